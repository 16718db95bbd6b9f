"""The final weights as one plain file that needs neither instep nor many ranks to be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import CheckpointError
from instep.train.checkpoints import content, files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_SUFFIXES = (".safetensors", ".pt")


def export(full_state: Mapping[str, Tensor], path: str | Path) -> Path:
    """Write the weights of a model, on one rank (no collective).

    Args:
        full_state: ``model.state_dict()`` of the bare model: whole tensors.
        path: a folder, in which it becomes ``model.safetensors`` if the package safetensors is installed and
            ``model.pt`` otherwise; or a file, whose suffix says which.

    Returns:
        The file. ``safetensors.torch.load_file(file)`` or ``torch.load(file, weights_only=True)`` reads it. Tensors
        that share memory (tied weights) are written for each of their names; the header of the safetensors file says
        which (``tied``).

    Raises:
        CheckpointError: what was given is no state_dict of whole tensors, the file cannot be written, or safetensors
            was asked for and is not installed.

    """
    state = _checked(full_state)
    file = _file(Path(path))
    data = _safetensors(state) if file.suffix == ".safetensors" else content.as_bytes(state)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.replace(file, data)
    except OSError as error:
        raise CheckpointError(f"The weights could not be written to {file}.", evidence=[str(error)]) from None
    return file


def _checked(full_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch
    from torch.distributed.tensor import DTensor

    state = dict(full_state)
    wrong = [
        f"{key}: a part of a tensor over several ranks" if isinstance(one, DTensor) else f"{key}: {type(one).__name__}"
        for key, one in state.items()
        if not isinstance(one, torch.Tensor) or isinstance(one, DTensor)
    ]
    if wrong or not state:
        raise CheckpointError(
            "These are no whole weights of a model.",
            evidence=wrong[:10] or ["the state_dict is empty (full_model_state() gives it on the main rank only)"],
            cure="Give model.state_dict() of the bare model; under fsdp: strategy.full_model_state(model).",
        )
    return {key: one.detach().cpu() for key, one in state.items()}


def _file(path: Path) -> Path:
    if path.suffix in _SUFFIXES:
        return path
    try:
        import safetensors  # noqa: F401  # asked for its presence only
    except ImportError:
        return path / "model.pt"
    return path / "model.safetensors"


def _safetensors(state: dict[str, Tensor]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError:
        raise CheckpointError(
            "The package safetensors is not installed.", cure="pip install 'instep[export]', or export to model.pt"
        ) from None
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    whole: dict[str, Tensor] = {}
    for key, one in state.items():
        memory = one.untyped_storage().data_ptr()
        if memory in first and one.numel():  # the format has no names for one and the same memory
            tied[key] = first[memory]
            whole[key] = one.clone().contiguous()
        else:
            first[memory] = key
            whole[key] = one.contiguous()
    notes = {"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {})
    return bytes(save(whole, metadata=notes))
