"""Which samples are mine? Exact sharding, in an order that seed and epoch alone decide."""

from __future__ import annotations

from instep.data.checks import LengthUnknownError
from instep.data.fingerprint import fingerprint
from instep.data.sharding import ShardedLoader, shard

__all__ = ["LengthUnknownError", "ShardedLoader", "fingerprint", "shard"]
