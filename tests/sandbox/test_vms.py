"""Virtual machines: what containers cannot show. Minutes where they are emulated, so only when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import needs
from tests.cluster import machines
from tests.sandbox.traces import traces

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vms
NFS = """
DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends nfs-kernel-server nfs-common
mkdir -p /srv/work && echo over NFS > /srv/work/words
echo '/srv/work *(ro,no_subtree_check)' > /etc/exports && exportfs -ra
"""


def test_virtual_machines(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "vms" not in request.config.getoption("-m"):
        pytest.skip("takes minutes where virtual machines are emulated: pytest -m vms")
    needs.need_sandbox()
    needs.need_tool("qemu-system-x86_64", "qemu-img", "mke2fs")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith("pytest"):
            folder.chmod(0o755)
    with machines.sandbox(tmp_path, "--as", "vms", "--docker", "--disk", "20mb", "--net", "50mbit", nodes=2) as made:
        kernel = made.exec("n1", ["sh", "-c", "stat -fc %T /sys/fs/cgroup; uname -r; id -un; pwd"]).ok().out.split()
        assert (kernel[0], kernel[2:]) == ("cgroup2fs", ["root", str(tmp_path)])
        for node in made.nodes:
            done = made.exec(node, ["systemctl", "is-system-running", "--wait"], limit_s=100)
            why = made.exec(node, ["sh", "-c", "systemctl --failed --no-pager; journalctl -b -p 3 --no-pager"]).out
            assert done.out == "running\n", f"{done}\n{why}"
        made.exec("n1", ["sh", "-c", "echo seen > seen"]).ok()
        assert made.exec("n2", ["cat", "seen", f"{tmp_path}/seen"]).ok().out == "seen\nseen\n"
        facts = made.exec("n2", ["sh", "-c", "ip -br -4 address; df -k --output=size /scratch; tc qdisc"]).ok().out
        assert "172.17.0.1/16" in facts
        assert "20480" in facts
        assert "tbf" in facts
        assert sorted(made.exec("n1", ["srun", "-N2", "hostname"]).ok().out.split()) == ["n1", "n2"]
        for node in made.nodes:
            made.exec(node, ["sh", "-ec", NFS if node == "n1" else NFS.splitlines()[1]], limit_s=200).ok()
        mounted = made.exec("n2", ["sh", "-c", "mount -t nfs n1:/srv/work /mnt && cat /mnt/words"], limit_s=100).ok()
        assert mounted.out == "over NFS\n"
        made.exec("n2", ["sh", "-c", "umount /mnt; echo kept > /root/disk; sync"]).ok()
        made.kill("n2")
        assert made.exec("n1", ["ping", "-c1", "-W1", "n2"]).rc == 1
        made.tool("start", "n2", limit_s=250).ok()
        assert made.exec("n2", ["cat", "/root/disk"]).ok().out == "kept\n"
        name = made.name
    assert traces(name) == []
