"""Is this the same data as before? A short hash, without reading much."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from instep.data.checks import length
from instep.data.randomness import Randomness, derive

_MOST = 1 << 18  # elements of a tensor or an array that are looked at


def fingerprint(dataset: Any, *, read: bool = False) -> str:
    """A short hash that tells "another dataset": the same value on every rank, in every process, in every run.

    It covers the name of the class, the length, and three samples (first, middle, last) of what lies in memory:
    tensors, arrays, lists, datasets that torch's own classes make of these, and the tensors and arrays that a dataset
    of another class has as attributes. No code of a dataset of another class runs, unless `read`. Equal values
    therefore do not prove that the data are equal.

    Args:
        dataset: any dataset, or a stream (of which the class and the length are all that is covered).
        read: fetch the three samples from a dataset of any class, twice, under random states of their own; what
            differs between the two times is left out. Numbers computed on another kind of machine may differ in
            their last bits, and then the fingerprint does.

    Returns:
        16 hexadecimal digits.

    """
    return _hash(b"dataset", *_features(dataset, read=read)).hex()


def _features(dataset: Any, *, read: bool) -> list[bytes]:
    features = [_name(dataset), str(length(dataset)).encode()]
    return features if isinstance(dataset, IterableDataset) else features + _inside(dataset, read=read)


def _inside(dataset: Any, *, read: bool) -> list[bytes]:
    kind = type(dataset)
    if kind is Subset:
        return [*_features(dataset.dataset, read=read), _hash(*_samples(dataset.indices))]
    if kind is ConcatDataset:
        return [_hash(*_features(inner, read=read)) for inner in dataset.datasets]
    if kind is TensorDataset:
        return [_hash(*_array(tensor)) for tensor in dataset.tensors]
    if isinstance(dataset, (Tensor, np.ndarray)):
        return _array(dataset)
    if kind in {list, tuple}:
        return _samples(dataset)
    arrays = {k: v for k, v in getattr(dataset, "__dict__", {}).items() if isinstance(v, (Tensor, np.ndarray))}
    attributes = [_hash(name.encode(), *_array(value)) for name, value in sorted(arrays.items())]
    return attributes + (_fetched(dataset) if read else [])


def _fetched(dataset: Any) -> list[bytes]:
    """Three samples' contents; nothing where they cannot be fetched, or differ when they are fetched again."""
    first, second = (_fetch(dataset) for _ in range(2))
    return first if first == second else []


def _fetch(dataset: Any) -> list[bytes]:
    with Randomness(derive("fingerprint"), owners=[dataset]):
        try:
            return _samples(dataset)
        except Exception:  # noqa: BLE001  # whatever the dataset raises, it will raise again where it is read
            return []


def _array(array: Tensor | np.ndarray[Any, Any]) -> list[bytes]:
    """Element type, shape, and three rows."""
    about = f"{array.dtype} {tuple(array.shape)}".encode()
    return [about, *(_samples(array) if len(array.shape) else [_content(array) or b""])]


def _samples(items: Any) -> list[bytes]:
    size = length(items) or 0
    contents = (_content(items[at]) for at in sorted({0, size // 2, size - 1} & set(range(size))))
    return [content for content in contents if content is not None]


def _content(value: Any) -> bytes | None:  # noqa: PLR0911
    """A hash of the value; None for anything that has no value that is the same in every process."""
    match value:
        case None | bool() | int() | float() | complex() | str():
            return _hash(_name(value), _plain(value))
        case bytes() | bytearray():
            return _hash(_name(value), bytes(value))
        case Tensor():
            return _tensor(value)
        case Mapping():
            return _nested(value, sorted(_pair(key, item) for key, item in value.items()))
        case AbstractSet():
            return _nested(value, sorted(_content(item) or b"" for item in value))
        case list() | tuple():
            return _nested(value, [_content(item) or b"" for item in value])
        case _ if hasattr(value, "__array_interface__"):  # numpy's arrays and numbers, PIL's images
            return _numpy(np.asarray(value))
        case _:
            return None


def _pair(key: Any, item: Any) -> bytes:
    return _hash(_content(key) or b"", _content(item) or b"")


def _nested(value: Any, contents: list[bytes]) -> bytes:
    return _hash(_name(value), *contents)


def _plain(value: Any) -> bytes:
    return struct.pack("<d", value) if isinstance(value, float) else str(value).encode("utf-8", "surrogatepass")


def _tensor(tensor: Tensor) -> bytes | None:
    about = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return _hash(about)
    flat = tensor.detach().reshape(-1)[:_MOST].cpu().resolve_conj().resolve_neg().contiguous()
    return _hash(about, flat.view(torch.uint8).numpy().tobytes())


def _numpy(array: np.ndarray[Any, Any]) -> bytes | None:
    about = f"{array.dtype} {array.shape}".encode()
    return _hash(about) if array.dtype.hasobject else _hash(about, array.reshape(-1)[:_MOST].tobytes())


def _name(value: object) -> bytes:
    return type(value).__qualname__.encode()  # without the module: a script is __main__ here, and a module there


def _hash(*pieces: bytes) -> bytes:
    """Of the pieces and of where each ends."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()
