# CASE nproc=3 kind=mismatch ranks=1 line=@HERE
"""Each rank takes its own idea of the source: the tree of messages does not fit together."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
source = 0 if dist.get_rank() != 1 else 1
for step in range(30):
    noise = torch.randn(10)
    if step == 4:
        dist.broadcast(noise, src=source)  # <- HERE
    else:
        dist.broadcast(noise, src=0)
dist.destroy_process_group()
