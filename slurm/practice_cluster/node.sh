#!/bin/sh
# One node of the practice cluster, in namespaces of its own, with a cable to the login host's switch.
# node.sh NAME ADDRESS LOGIN_PID COMMAND ...   prepares it and becomes COMMAND.
set -eu
name=$1
address=$2
login_pid=$3
shift 3

hostname "$name"
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add name eth0 type veth peer name "$name" netns "$login_pid"
nsenter --target "$login_pid" --net ip link set "$name" master switch up
ip address add "$address/24" dev eth0
ip link set eth0 up
exec "$@"
