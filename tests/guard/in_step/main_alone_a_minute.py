# CONTROL nproc=3 rc=0 long
"""The main rank works alone for a minute: some of it in one long call without Python, some in a child."""

import hashlib
import subprocess
import sys
import time

import torch
import torch.distributed as dist

CHILD = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: sum(range(1000))"


def prepare():
    end = time.monotonic() + 20
    while time.monotonic() < end:
        torch.linalg.svd(torch.rand(1000, 1000))
    subprocess.run([sys.executable, "-c", CHILD], check=True)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 3_000_000)


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    prepare()
dist.barrier()
dist.destroy_process_group()
