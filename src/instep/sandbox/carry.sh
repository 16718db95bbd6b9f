#!/bin/sh
# Become a machine: run in mount and network namespaces of its own, so that the file system and the network of the
# machine are gone with its processes, and never to be seen on this host.
# Usage: carry.sh IMAGE PLACE CGROUP NSPAWN-ARGUMENTS; starts when it can read a line.
set -eu
image=$1 place=$2 cgroup=$3
shift 3
# Without systemd on this host nobody gives a machine its own branch of the cgroups; two in one would fight over it.
for tree in $([ -d /run/systemd/system ] || echo /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified); do
    if [ -e "$tree/cgroup.procs" ]; then
        mkdir -p "$tree/$cgroup"
        echo $$ >"$tree/$cgroup/cgroup.procs"
    fi
done
read -r _ # the network is there; or nobody is left who would make it, and this ends
mount -t overlay overlay -o "lowerdir=$image,upperdir=$place/upper,workdir=$place/work" "$place/root"
# What systemd-nspawn writes down of its machines is nothing to this host.
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
exec systemd-nspawn "$@" </dev/null
