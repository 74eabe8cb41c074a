#!/bin/sh
# The login host of the practice cluster, in separate namespaces: network, name, mounts.
# login.sh HOSTS_FILE ADDRESS COMMAND ...   prepares it and becomes COMMAND.
set -eu
hosts_file=$1
address=$2
shift 2

hostname login
mount --bind "$hosts_file" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
# The machine's GPUs can be opened neither here nor on the nodes, which begin as copies of this host.
for gpu in /dev/nvidia[0-9]* /dev/kfd /dev/dxg; do
    [ ! -e "$gpu" ] || mount --bind -o nodev "$gpu" "$gpu"
done
ip link set lo up
ip link add name switch type bridge
ip address add "$address/24" dev switch
ip link set switch up
exec "$@"
