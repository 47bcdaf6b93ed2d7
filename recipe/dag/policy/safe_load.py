"""Loading of checkpoints without running what they contain.

Invariant: within `weights_only`, torch.load restores tensors, plain containers and the states of random generators, and
refuses any other pickle, also where verl asks for `weights_only=False`.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed.tensor  # allows the types of sharded tensors

from recipe.dag.core.errors import UserError

FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
RECONSTRUCT = np.empty(0).__reduce__()[0]
NUMPY_STATE = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    # the function's module, as numpy 2 and numpy 1 name it
    *((RECONSTRUCT, f"{module}._reconstruct") for module in ("numpy._core.multiarray", "numpy.core.multiarray")),
]
"""Types in the state of numpy's generator, which torch does not allow by itself."""


@contextmanager
def weights_only(path: str | Path) -> Iterator[None]:
    """Load `path`, a file or folder of a checkpoint. Raises UserError if it contains anything else. Not for threads:
    torch reads the setting from the environment."""
    before = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}  # torch accepts only one of the two
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(NUMPY_STATE):
            yield
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it contains `{match[1]}`" if match else "its pickle is malformed"
        raise UserError(
            f"{path}: refused, because a checkpoint contains only tensors and plain data, and {reason}, which might "
            "run a program when it is loaded; use a checkpoint that you trust"
        ) from error
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
