"""Whether keys of a run's configuration exist and have an effect, and whether their values are of the right kinds.

Invariant: what a user typed or wrote into a configuration file is in force, or named in one line with what to write
instead. What stands in `dag.yaml` is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.dag.algorithms.catalogue import METHODS
from recipe.dag.settings.typed import Typed
from recipe.dag.settings.values import kind_of
from recipe.dag.settings.verl_run import NO_EFFECT, is_read, refusal, says_the_same
from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.problem import closest
from recipe.dag.workflow.schema import EpisodeSpec, Workflow

_NOT_THERE = object()
_BLOCKS = {
    "algorithm": {key for method in METHODS for key in method.model_fields},
    "episode": set(EpisodeSpec.model_fields),
}
"""Blocks of a workflow whose keys are told from verl's of the same name."""
_ELSEWHERE = "recipe/dag/config/dag.yaml lists the run's keys; agents, policies and learning are set in the workflow"


class Schema:
    """`default`: dag.yaml over verl's configuration."""

    def __init__(self, default: DictConfig):
        self.default = default
        self.values = _values(default)

    def check_file(self, config: DictConfig) -> Iterator[str]:
        """What configuration files set and nothing reads."""
        values = _values(config)
        taken_from = " ".join(value for value in values.values() if isinstance(value, str) and "${" in value)
        named = set(re.findall(r"[\w.]+", taken_from))
        for key in _changed(self.values, values):
            if key not in self.values and (key in named or key in NO_EFFECT):
                continue  # a file's own key, which others take their value from
            if (reason := self._reason(key, values[key], self.default)) is not None:
                yield f"configuration: {key}: {reason}"

    def check_typed(self, typed: Typed, config: DictConfig) -> str | None:
        """Why what was typed would have no effect, if so."""
        reason = self._reason(typed.key, typed.value, config)
        return None if reason is None else f"{typed.argument}: {reason}"

    def check_values(self, config: DictConfig, typed: Mapping[str, Typed]) -> Iterator[str]:
        """Values of the wrong kind. A whole number where a text is expected becomes that text, in place."""
        for key in dict.fromkeys([*_changed(self.values, _values(config)), *typed]):
            value = _resolved(config, key)
            if value is _NOT_THERE:
                continue
            kind = kind_of(key, _resolved(self.default, key))
            if kind.accepts(value):
                continue
            if type(value) is int and kind.accepts(str(value)):
                OmegaConf.update(config, key, str(value))
                continue
            shown = typed[key].argument if key in typed else f"configuration: {key}={value}"
            yield f"{shown}: it takes {kind.takes}"

    def _reason(self, key: str, value: Any, config: DictConfig) -> str | None:
        if says_the_same(key, value):
            return None
        reason = _of_the_workflow(key) or refusal(key)
        if reason is not None or is_read(key):
            return reason
        there: Any = OmegaConf.to_container(config)
        for part in key.split("."):
            there = there.get(part, _NOT_THERE) if isinstance(there, dict) else _NOT_THERE
        if there is _NOT_THERE:
            return self._unknown(key, config)
        if isinstance(there, dict) and there:
            return f"has keys of its own; set one of them, such as {key}.{next(iter(there))}=..."
        return None

    def _unknown(self, key: str, config: DictConfig) -> str:
        known = [name for name in _values(config) if refusal(name) is None]
        longer = [name for name in known if name.endswith(f".{key}")]
        block, _, last = key.rpartition(".")
        beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == block}
        near = longer[0] if longer else beside.get(closest(last, beside) or "") or closest(key, known)
        return f"unknown key; did you mean `{near}`?" if near else f"unknown key; {_ELSEWHERE}"


def plain(value: Any) -> Any:
    """Without OmegaConf's containers."""
    return OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value


def _of_the_workflow(key: str) -> str | None:
    block, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if block in _BLOCKS and name in _BLOCKS[block]:
        return f"`{block}.{name}` of the workflow says this; set it there, or pass workflow.{key}=VALUE"
    if block in Workflow.model_fields and block not in (*_BLOCKS, "path"):
        return f"`{block}` is a part of the workflow; set it there"
    return None


def _values(config: DictConfig) -> dict[str, Any]:
    """Every leaf by its dotted key, interpolations as they are written."""
    return {key: value for key, value, _ in flat(OmegaConf.to_container(config))}


def _changed(default: dict[str, Any], values: dict[str, Any]) -> list[str]:
    return [key for key, value in values.items() if value != default.get(key, _NOT_THERE)]


def _resolved(config: DictConfig, key: str) -> Any:
    """The value of a key; `_NOT_THERE` where there is none (yet). Raises OmegaConfBaseException where an interpolation
    leads nowhere."""
    value = OmegaConf.select(config, key, default=_NOT_THERE)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
