"""Plays, then learns."""

from typing import NamedTuple

import torch

from .exchange import Exchange
from .world import World


class Moment(NamedTuple):
    observation: torch.Tensor
    done: bool


class Learner:
    def __init__(self, rank):
        self.world = World(rank)
        self.exchange = Exchange()
        self.memory = []

    def play(self):
        self.world.reset()
        done = False
        while not done:  # <- HERE
            observation = self.exchange.normalized(torch.rand(10))
            done = self.world.step()
            self.memory.append(Moment(observation, done))

    def learn(self, rounds):
        for _ in range(rounds):
            self.play()
            self.exchange.average(torch.stack([moment.observation for moment in self.memory]).mean(dim=0))
            self.memory.clear()
