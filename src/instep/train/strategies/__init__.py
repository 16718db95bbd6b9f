"""How the ranks share one training, over torch's own engines: DDP, ZeRO-1, FSDP and HSDP."""

from instep.train.strategies.base import Single, Strategy
from instep.train.strategies.ddp import DDP
from instep.train.strategies.resolving import resolve

__all__ = ["DDP", "Single", "Strategy", "resolve"]
