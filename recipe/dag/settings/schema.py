"""Checks that keys of a run's configuration exist and have an effect, and that their values have the right kinds.

Invariant: a key that a user typed or wrote into a configuration file has an effect, or is reported in one line with
what to write instead. `dag.yaml` itself is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.dag.algorithms.catalogue import METHODS
from recipe.dag.compat.marti import key_hint
from recipe.dag.core.flatten import flatten
from recipe.dag.settings.typed import Typed
from recipe.dag.settings.values import kind_of
from recipe.dag.settings.verl_run import NO_EFFECT, SAME, is_read, says_the_same
from recipe.dag.workflow.schema import EpisodeSpec, Workflow
from recipe.dag.workflow.verl_keys import PAGE, nearest, replacement

Tree = dict[str, Any]
"""A configuration as nested dicts."""
_MISSING = object()
_BLOCKS = {
    "algorithm": {key for method in METHODS for key in method.model_fields},
    "episode": set(EpisodeSpec.model_fields),
}
"""Blocks of a workflow that share their names with blocks of verl's configuration -> their keys."""
_ELSEWHERE = "recipe/dag/config/dag.yaml lists the run's keys; agents, policies and learning are set in the workflow"


class Schema:
    """The keys and kinds of `default`, which is `own`, dag.yaml, over verl's configuration."""

    def __init__(self, default: DictConfig, own: DictConfig):
        self.default, self.tree = default, tree_of(default)
        self.values = values_of(self.tree)
        self.own = {key: value for key, value in values_of(tree_of(own)).items() if key in self.values}

    def is_read(self, key: str) -> bool:
        """Return whether this project or verl reads a key of the default configuration, or one below it."""
        return key in self.own and key not in SAME or is_read(key)

    def check_keys(self, tree: Tree, settings: Iterable[Typed]) -> Iterator[str]:
        """Yield a message for each key that configuration files set and nothing reads, and for each typed setting that
        has no effect on the configuration."""
        yield from self._check_file(tree)
        for typed in settings:
            if (reason := self._reason(typed.key, typed.value, tree)) is not None:
                yield f"{typed.argument}: {reason}"

    def _check_file(self, tree: Tree) -> Iterator[str]:
        values = values_of(tree)
        interpolations = " ".join(value for value in values.values() if isinstance(value, str) and "${" in value)
        referenced = set(re.findall(r"[\w.]+", interpolations))
        for key in _changed(self.values, values):
            if key not in self.values and (key in referenced or key in NO_EFFECT):
                continue  # the file defines this key, and its other keys interpolate it
            if (reason := self._reason(key, values[key], self.tree)) is not None:
                yield f"configuration: {key}: {reason}"

    def check_values(self, config: DictConfig, values: Mapping[str, Any], typed: Mapping[str, Typed]) -> Iterator[str]:
        """Yield a message for each value of the wrong kind. `values` are those of `config`, in which a whole number
        becomes text where text is expected."""
        for key in dict.fromkeys([*_changed(self.values, values), *typed]):
            value = _resolved(config, key)
            if value is _MISSING:
                continue
            kind = kind_of(key, _resolved(self.default, key))
            if kind.accepts(value):
                continue
            if type(value) is int and kind.accepts(str(value)):
                OmegaConf.update(config, key, str(value))
                continue
            setting = typed[key].argument if key in typed else f"configuration: {key}={value}"
            yield f"{setting}: it takes {kind.takes}"

    def _reason(self, key: str, value: Any, tree: Tree) -> str | None:
        if says_the_same(key, value):
            return None
        if (reason := _of_the_workflow(key)) is not None or self.is_read(key):
            return reason
        if (reason := replacement(key)) is not None:
            return reason
        current: Any = tree
        for part in key.split("."):
            current = current.get(part, _MISSING) if isinstance(current, dict) else _MISSING
        if current is _MISSING:
            return self._unknown(key, tree)
        if isinstance(current, dict) and current:
            if inside := next((name for name in self._names(tree) if name.startswith(f"{key}.")), None):
                return f"is a block of keys; set one of them, such as {inside}=..."
        elif key not in self.values:  # the configuration file defines it
            return None
        return f"verl has this key, but nothing here reads it; remove it ({PAGE})"

    def _unknown(self, key: str, tree: Tree) -> str:
        if (hint := key_hint(key)) is not None:
            return f"unknown key; {hint}"
        suggestion = nearest(key, self._names(tree), cutoff=0.6)  # verl has no such key either
        return f"unknown key; did you mean `{suggestion}`?" if suggestion else f"unknown key; {_ELSEWHERE}"

    def _names(self, tree: Tree) -> list[str]:
        """Return the keys that may be set, with those that a configuration file defines itself."""
        return [name for name in values_of(tree) if self.is_read(name) or name not in self.values]


def plain(value: Any) -> Any:
    """Return the value with OmegaConf's containers converted to dicts and lists."""
    return OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value


def _of_the_workflow(key: str) -> str | None:
    block, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if block in _BLOCKS and name in _BLOCKS[block]:
        return f"`{block}.{name}` of the workflow says this; set it there, or pass workflow.{key}=VALUE"
    if block in Workflow.model_fields and block not in (*_BLOCKS, "path"):
        return f"`{block}` is part of the workflow; set it there"
    return None


def tree_of(config: DictConfig) -> Tree:
    """Return the configuration as nested dicts, in which a missing value is "???". Interpolations are not resolved:
    verl's configuration has 130, and parsing them takes longer than the rest of a composition."""
    return cast(Tree, OmegaConf.to_container(config))  # a DictConfig becomes a dict


def values_of(tree: Tree) -> dict[str, Any]:
    """Return every leaf by its dotted key."""
    return {key: value for key, value, _ in flatten(tree)}


def _changed(default: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    return [key for key, value in values.items() if value != default.get(key, _MISSING)]


def _resolved(config: DictConfig, key: str) -> Any:
    """Return the value of a key, or `_MISSING`. Raises OmegaConfBaseException for an interpolation that cannot be
    resolved."""
    value = OmegaConf.select(config, key, default=_MISSING)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
