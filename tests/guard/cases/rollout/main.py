# CASE nproc=4 kind=mismatch|missing|extra ranks=2 line=@HERE
"""Reinforcement learning in a package: an environment ends its episode early, and its rank its rollout."""

import torch.distributed as dist
from agent import learner


def main():
    dist.init_process_group("gloo")
    learner.Learner(dist.get_rank()).learn(rounds=6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
