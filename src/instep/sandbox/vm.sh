#!/bin/sh
# Make the disk, the kernel and the first file system (initrd) of virtual machines, from the image of the containers.
# Runs as root in mount and process namespaces of its own, as image.sh does.
# Usage: vm.sh IMAGE OUT
set -eu
image=$1 out=$2
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
root=$out/root
mkdir "$out/upper" "$out/work" "$root"
mount -t overlay overlay -o "lowerdir=$image,upperdir=$out/upper,workdir=$out/work" "$root"
mount -t proc proc "$root/proc"
for file in /etc/resolv.conf /etc/hosts; do cp "$file" "$root$file"; done

echo "@ the kernel"
chroot "$root" apt-get install --yes --no-install-recommends linux-image-cloud-amd64 initramfs-tools zstd

# Before systemd begins: the machine's own files, which are on its second disk.
hook=$root/etc/initramfs-tools/scripts/local-bottom/instep
cat >"$hook" <<'END'
#!/bin/sh
[ "$1" = prereqs ] && exit 0
[ -e "${rootmnt}/etc/instep-laid" ] && exit 0
chroot "${rootmnt}" tar --extract --preserve-permissions --numeric-owner --file=- </dev/vdb
: >"${rootmnt}/etc/instep-laid"
END
chmod +x "$hook"
sed -i 's/^MODULES=.*/MODULES=list/' "$root/etc/initramfs-tools/initramfs.conf"
printf 'virtio_pci\nvirtio_blk\next4\n' >>"$root/etc/initramfs-tools/modules"
chroot "$root" update-initramfs -u

echo "@ the disk"
cp "$root"/boot/vmlinuz-* "$out/vmlinuz"
cp "$root"/boot/initrd.img-* "$out/initrd.img"
rm -rf "$root"/boot/vmlinuz-* "$root"/boot/initrd.img-* "$root"/var/cache/apt/archives/linux-* "$root"/var/log/apt
rm -f "$root/etc/resolv.conf" "$root/etc/hosts"
umount "$root/proc"
mke2fs -q -t ext4 -d "$root" "$out/disk.ext4" 8G
umount "$root"
rm -rf "$root" "$out/upper" "$out/work"
