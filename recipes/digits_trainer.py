"""digits.py once more, with instep.Trainer in place of a loop of one's own.

    instep run --nproc 2 recipes/digits_trainer.py
    python recipes/digits_trainer.py

The same network, data and schedule, and the same figures on every number of ranks. Needs: pip install 'instep[recipes]'
"""

from __future__ import annotations

import torch
from digits import load_data, resnet  # recipes/digits.py, beside this file

import instep


def main() -> None:
    train_data, test_data = load_data()
    trainer = instep.Trainer(
        resnet,  # a function: every rank makes the same weights of it
        lambda parameters: torch.optim.SGD(parameters, 0.03, momentum=0.9, weight_decay=5e-4, nesterov=True),
        train_data,
        loss=torch.nn.functional.cross_entropy,
        eval_data=test_data,
        metrics={"accuracy": instep.train.Accuracy()},
        global_batch=96,  # images per step, all ranks together: that is why the figures do not depend on their number
        drop_last=True,
        epochs=10,
        schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=steps),
    )
    trainer.fit()
    right = round(trainer.results["accuracy"] * len(test_data))
    if instep.is_main():
        print(f"test accuracy {trainer.results['accuracy']:.2%} ({right} of {len(test_data)} images)")


if __name__ == "__main__":
    main()
