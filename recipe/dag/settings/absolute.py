"""Conversion of the paths in a run's configuration to absolute paths.

Invariant: after `make_absolute`, a path refers to the same file in every process. Before, it is relative to the folder
of the command; Ray's workers run in the folder in which Ray was started, which differs on a cluster.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.dag.core.errors import UserError

WRITTEN = (
    "output_dir",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "global_profiler.save_path",
    "ray_kwargs.timeline_json_file",
)
"""Keys of files and folders that the run may create."""
READ = ("path", "_dir", "_file", "_files", "workflow")
"""Suffixes of keys of files and folders to read; a value that does not exist here is a hub name or a module."""


def absolute(path: str | Path) -> str:
    """Return `path` as an absolute path, with `~` expanded and symbolic links kept."""
    return os.path.abspath(Path(path).expanduser())


def absolute_if_local(path: str | None) -> str | None:
    """Return `absolute(path)` if it exists on this machine, else `path`, which may be a hub name."""
    if not path:
        return path
    try:
        exists = Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # too long for a file name, or `~` of an unknown user
        exists = False
    return absolute(path) if exists else path


def make_absolute(config: DictConfig) -> None:
    """Make every path in `config` absolute, in place. Raises UserError for a URL in a key that the run writes to."""
    with open_dict(config):
        for key in WRITTEN:
            value = OmegaConf.select(config, key)
            if value is not None and "://" in str(value):
                raise UserError(f"{key}={value} is a URL; pass a folder that every machine of the run sees")
            if value is not None:
                OmegaConf.update(config, key, absolute(str(value)))
        for path, value in _read_paths(OmegaConf.to_container(config)):
            node = functools.reduce(operator.getitem, path[:-1], config)
            node[path[-1]] = absolute_if_local(value)


def _read_paths(node: Any, path: tuple[str | int, ...] = (), name: str = "") -> Iterator[tuple[tuple, str]]:
    """Yield path and value of each text under a key of READ."""
    if isinstance(node, dict | list):
        for item, value in node.items() if isinstance(node, dict) else enumerate(node):
            # the items of a list are of the kind that the list's key says
            yield from _read_paths(value, (*path, item), str(item) if isinstance(node, dict) else name)
    elif isinstance(node, str) and name.endswith(READ) and node != "???" and "${" not in node:
        yield path, node  # an interpolation gets the converted value of the key that it refers to
