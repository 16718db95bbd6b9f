"""Checkpoints that are whole or not there: written beside, committed by one rename, verified before they are read.

::

    with instep.init() as session:
        folder = CheckpointFolder("runs/NAME/checkpoints", keep=2)
        found = folder.find("latest")
        if found:
            folder.load(found, state)
        ...
        folder.save(step, state, shared={...}, own={...}, manifest={...})
        ...
        folder.close()

Tensors go through torch.distributed.checkpoint, so that a checkpoint of four ranks can be read on three. Nothing in a
checkpoint is read by an unrestricted pickle.
"""

from instep.train.checkpoints.export import export
from instep.train.checkpoints.folder import CheckpointFolder
from instep.train.checkpoints.held import Held
from instep.train.checkpoints.listing import Found
from instep.train.checkpoints.reading import Loaded
from instep.train.checkpoints.wishes import Checkpoints

__all__ = ["CheckpointFolder", "Checkpoints", "Found", "Held", "Loaded", "export"]
