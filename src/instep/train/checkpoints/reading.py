"""Read a checkpoint: into the tensors that are there, with nothing changed if it does not fit.

No file of a checkpoint goes through an unrestricted pickle. ``plain.pt`` and ``rank-N.pt`` are read with
``weights_only=True``, as torch.distributed.checkpoint reads its tensors. Its ``.metadata`` is a pickle of its own
classes: torch reads it with plain ``pickle.load``, here it goes through an unpickler that knows these few classes and
refuses everything else.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from instep.comm.logs import get_logger
from instep.comm.objects import gather_objects
from instep.errors import CheckpointError
from instep.train.checkpoints import content, writing

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata

    from instep.comm.session import Session
    from instep.train.checkpoints.listing import Found

SHARED = "instep.shared."  # the prefix of the tensors of the shared state
_SHOWN = 10
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held besides the tensors that were filled.

    Attributes:
        shared: what was saved as such, the same on every rank.
        own: what this rank saved as its own; None at another world size, where no rank is the one that it was.
        manifest: what ``manifest.json`` says.

    """

    shared: dict[str, Any]
    own: dict[str, Any] | None
    manifest: dict[str, Any]


def load(found: Found, state: dict[str, Any], session: Session) -> Loaded:
    """Fill a nested state from a checkpoint, on all ranks together: what lies under the keys that it has.

    Raises:
        CheckpointError: it is of another model (nothing has been changed), or cannot be read.

    """
    parts = content.Parts(state)
    problem, files = "", None
    try:
        files = _Files(found, session)
    except (OSError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
    _all_can_read(found, problem)
    assert files is not None  # else _all_can_read() has raised
    roots = {str(key) for key in state}
    _all_fit(found, files, parts.tensors, roots)
    shared = {key: _empty(files.saved[key]) for key in content.places(files.shared, SHARED)}
    _read_tensors(found, {**parts.tensors, **shared}, session)
    content.fill(state, {key: value for key, value in files.state.items() if str(key) in roots})
    return Loaded(content.put_together(files.shared, shared, SHARED), files.own, found.manifest)


class _Files:
    """The small files of a checkpoint, read."""

    def __init__(self, found: Found, session: Session) -> None:
        plain = _load_plain(found.path / writing.PLAIN)
        self.state, self.shared = plain["state"], plain["shared"]
        same_world = found.manifest["world_size"] == session.world_size
        self.own = _load_plain(found.path / writing.own_name(session.rank)) if same_world else None
        self.saved: dict[str, Any] = _Reader(found.path).read_metadata().state_dict_metadata


def _load_plain(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _empty(saved: Any) -> Tensor:
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _all_can_read(found: Found, problem: str) -> None:
    problems = [f"rank {rank}: {one}" for rank, one in enumerate(gather_objects(problem)) if one]
    if problems:
        raise CheckpointError(
            f"The checkpoint of step {found.step} cannot be read.",
            evidence=[f"path: {found.path}", *problems[:_SHOWN]],
            cure="Read another one, or see who has changed its files.",
        )


def _all_fit(found: Found, files: _Files, tensors: dict[str, Tensor], roots: set[str]) -> None:
    """Refuse a checkpoint of another model, on all ranks if on one; what is not under `roots` was not asked for."""
    mine = {key: tuple(one.shape) for key, one in tensors.items()}
    saved = {key: tuple(one.size) for key, one in files.saved.items() if not key.startswith(SHARED)}
    missing = [f"{key} {list(mine[key])}" for key in mine if key not in saved]
    differ = [
        f"{key}: {list(saved[key])} in the checkpoint, {list(mine[key])} here"
        for key in mine
        if key in saved and saved[key] != mine[key]
    ]
    of_ranks = gather_objects((missing, differ, set(mine)))
    asked = set().union(*(keys for _, _, keys in of_ranks))
    extra = [
        f"{key} {list(shape)}" for key, shape in saved.items() if key not in asked and key.partition(".")[0] in roots
    ]
    missing = list(dict.fromkeys(line for lines, _, _ in of_ranks for line in lines))
    differ = list(dict.fromkeys(line for _, lines, _ in of_ranks for line in lines))
    if missing or differ or extra:
        raise CheckpointError(
            f"The checkpoint of step {found.step} is of another model or optimizer. Nothing was changed.",
            evidence=[
                f"path: {found.path}",
                *_some("not in the checkpoint", missing),
                *_some("only in the checkpoint", extra),
                *_some("of another shape", differ),
            ],
            cure="Build the model and the optimizer as they were, or begin in another folder of checkpoints.",
        )
    cast = [
        f"{key} ({files.saved[key].properties.dtype} -> {one.dtype})"
        for key, one in tensors.items()
        if files.saved[key].properties.dtype != one.dtype
    ]
    if cast:
        more = f" and {len(cast) - 3} more" if len(cast) > 3 else ""
        get_logger("instep").warning(
            "tensors of step-%d are converted to another dtype: %s%s", found.step, ", ".join(cast[:3]), more
        )


def _some(what: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    rest = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"{what} ({len(lines)}):", *(f"  {line}" for line in lines[:_SHOWN]), *rest]


def _read_tensors(found: Found, tensors: dict[str, Tensor], session: Session) -> None:
    import torch.distributed.checkpoint as dcp

    writing.hush_dcp()
    try:
        dcp.load(
            tensors,
            storage_reader=_Reader(found.path),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            process_group=session.group,
        )
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # whatever it was on whichever rank
        # The same on all ranks: torch.distributed.checkpoint tells every rank of a failure.
        failures = getattr(error, "failures", {0: (error, None)})
        lines = [f"rank {rank}: {type(one[0]).__name__}: {one[0]}"[:300] for rank, one in failures.items()]
        raise CheckpointError(
            f"The checkpoint of step {found.step} could not be read to its end. The state may be half of it.",
            evidence=[f"path: {found.path}", *lines[:_SHOWN]],
            cure="Build the state anew before you go on with another checkpoint.",
        ) from None


class _Reader(FileSystemReader):
    """torch's reader, but for its trust in ``.metadata``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  # torch's own signature
        from torch.distributed.checkpoint.metadata import StorageMeta

        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None  # just seen to
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _CLASSES.get(module, ())
        if module == "torch" and not known:
            known = isinstance(getattr(torch, name, None), (torch.dtype, torch.memory_format))
        if not known:
            raise pickle.UnpicklingError(f".metadata wants {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
