#!/bin/sh
# Make the root file system of a sandbox's machines. Runs as root in mount and process namespaces of its own: what it
# mounts or starts is gone when it ends, however that happens.
# Usage: image.sh ROOT RELEASE MIRROR PACKAGES FETCHED, with apt's sources and settings in ROOT.sources and ROOT.conf.
# Lines that begin with "@ " tell the user what is being done.
set -eu
root=$1 release=$2 mirror=$3 packages=$4 fetched=$5
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

echo "@ the base system"
debootstrap --variant=minbase "$release" "$root" "$mirror"

# No daemon starts in here; what is written need not survive a power cut; nobody reads manuals.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod +x "$root/usr/sbin/policy-rc.d"
cat >"$root/etc/dpkg/dpkg.cfg.d/instep" <<'END'
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/locale/*
END
rm -f "$root/etc/apt/sources.list"
cp "$root.sources" "$root/etc/apt/sources.list.d/debian.list"
cp "$root.conf" "$root/etc/apt/apt.conf.d/90instep"
for file in /etc/resolv.conf /etc/hosts; do
    rm -f "$root$file"
    cp "$file" "$root$file"
done
rm -rf "$root"/var/cache/apt/archives/*.deb # debootstrap's

echo "@ the lists of packages"
chroot "$root" apt-get update
echo "@ systemd, sshd, Open MPI, MPICH and Slurm"
# shellcheck disable=SC2086 # both are lists of words
chroot "$root" apt-get install --yes --no-install-recommends $packages
rm -rf "$root"/var/cache/apt/archives/*.deb
# What later work installs on machines without a way to the outside.
# shellcheck disable=SC2086
chroot "$root" apt-get install --yes --no-install-recommends --download-only $fetched

echo "@ cleaning"
for unit in munge slurmctld slurmd nfs-server chrony apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
    e2scrub_all.timer e2scrub_reap fstrim.timer getty@tty1 systemd-pstore nftables rsync; do
    chroot "$root" systemctl --quiet disable "$unit" 2>/dev/null || true
done
ln -s /dev/null "$root/etc/systemd/system/console-getty.service" # nobody sits at a container's console
rm -f "$root/usr/sbin/policy-rc.d" "$root"/etc/ssh/ssh_host_* "$root/etc/munge/munge.key" "$root/etc/machine-id" \
    "$root/etc/hostname" "$root/etc/resolv.conf" "$root/etc/hosts" "$root/etc/dpkg/dpkg.cfg.d/instep"
rm -rf "$root"/var/log/apt "$root"/var/log/*.log "$root"/var/cache/apt/*.bin "$root"/usr/share/doc "$root"/usr/share/man
