# CASE nproc=4 kind=mismatch ranks=3 line=@HERE silent
"""As metric_order: which of two is reduced first is asked in a branch."""

import time

import torch
import torch.distributed as dist


def reduced(name, values):
    tensor = torch.tensor(values[name])
    if name == "perplexity":  # <- HERE
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    else:
        dist.all_reduce(tensor)
    return tensor.item()


def main():
    dist.init_process_group("gloo")
    names = ["loss", "perplexity"]
    for step in range(24):
        if dist.get_rank() == 3 and step > 4:
            names = ["perplexity", "loss"]
        report = {}
        for name in names:  # <- HERE
            report[name] = reduced(name, {"loss": 1.0, "perplexity": 2.7})  # <- HERE
        time.sleep(0.1)


if __name__ == "__main__":
    main()
