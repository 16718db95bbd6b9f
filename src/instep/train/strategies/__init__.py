"""How the ranks share one training, over torch's own engines: DDP, ZeRO-1, FSDP and HSDP."""

from instep.train.strategies.base import Single, Strategy
from instep.train.strategies.ddp import DDP
from instep.train.strategies.fsdp import FSDP, HSDP
from instep.train.strategies.resolving import resolve
from instep.train.strategies.zero1 import Zero1

__all__ = ["DDP", "FSDP", "HSDP", "Single", "Strategy", "Zero1", "resolve"]
