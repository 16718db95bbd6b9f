# CASE nproc=4 kind=mismatch|missing ranks=3 line=@HERE
"""Each rank iterates until its own error is small."""

import torch
import torch.distributed as dist


def power_iteration(matrix, tolerance):
    vector = torch.ones(matrix.shape[1])
    error, rounds = 1.0, 0
    while error > tolerance:  # <- HERE
        product = matrix @ vector
        dist.all_reduce(product)
        new = product / product.norm()
        error = (new - vector).norm().item() if rounds < 20 else 0.0
        vector, rounds = new, rounds + 1
    return vector


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    matrix = torch.rand(6, 6)
    tolerance = 1e-1 if dist.get_rank() == 3 else 1e-7
    vector = power_iteration(matrix, tolerance)
    dist.broadcast(vector, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
