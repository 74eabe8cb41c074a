#!/bin/sh
# One node of the practice cluster, in separate namespaces, with a cable to the login host's switch.
# node.sh NAME ADDRESS LOGIN_PID MBIT COMMAND ...   prepares it and becomes COMMAND.
set -eu
name=$1
address=$2
login_pid=$3
mbit=$4
shift 4

hostname "$name"
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add name eth0 type veth peer name "$name" netns "$login_pid"
nsenter --target "$login_pid" --net ip link set "$name" master switch up
ip address add "$address/24" dev eth0
ip link set eth0 up
if [ "$mbit" != 0 ]; then
    # The burst has room for the 64 KB that TCP hands over at once: cutting those up here would take a third of a core.
    tc qdisc add dev eth0 root tbf rate "${mbit}mbit" burst 70kb latency 50ms
fi
exec "$@"
