"""The paths in a run's configuration, made absolute once.

Invariant: after `make_absolute`, a path means what it meant in the folder in which the command was typed, whatever
folder the process that opens it runs in: Ray's workers run where Ray was started, which on a cluster is elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from recipe.dag.errors import UserError

WRITTEN = (
    "output_dir",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "global_profiler.save_path",
    "ray_kwargs.timeline_json_file",
)
"""Keys of files and folders that need not exist before the run."""
READ = ("path", "_dir", "_file", "_files", "workflow")
"""How keys of files and folders that are read end; a value that does not exist here is a hub name or a module."""


def absolute(path: str | Path) -> str:
    """Return `path` seen from the root, with `~` filled in and links kept."""
    return os.path.abspath(Path(path).expanduser())


def absolute_if_local(path: str | None) -> str | None:
    """Return `path` as `absolute` does where it exists on this machine; a hub name stays as it is."""
    try:
        exists = bool(path) and Path(path).expanduser().exists()
    except (OSError, RuntimeError):  # longer than a file name may be, or `~` of an unknown user
        exists = False
    return absolute(path) if exists else path


def make_absolute(config: DictConfig) -> None:
    """Make every path in `config` absolute, in place. Raises UserError for a URL where the run writes files."""
    with open_dict(config):
        for key in WRITTEN:
            value = OmegaConf.select(config, key)
            if value is not None and "://" in str(value):
                raise UserError(f"{key}={value} is a URL; pass a folder that every machine of the run sees")
            if value is not None:
                OmegaConf.update(config, key, absolute(str(value)))
        _make_read_absolute(config)


def _make_read_absolute(node: DictConfig | ListConfig, key: str = "") -> None:
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for each in keys:
        # a list's items are what the list's own key says
        name = key if isinstance(node, ListConfig) else str(each)
        # an interpolation takes over what the key that it names holds by now
        if OmegaConf.is_missing(node, each) or OmegaConf.is_interpolation(node, each):
            continue
        value = node[each]
        if isinstance(value, DictConfig | ListConfig):
            _make_read_absolute(value, name)
        elif isinstance(value, str) and name.endswith(READ):
            node[each] = absolute_if_local(value)
