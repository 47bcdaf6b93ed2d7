"""What the `config` of siiRL's nodes says: to agents, policies and critics, and to the whole run.

Invariant: an option has one value per policy; two nodes of a group that disagree are an error, as two overrides are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.siirl.keys import (
    ACTOR_KEYS,
    AGENT_KEYS,
    ALGORITHM_KEYS,
    CLIP_RATIO,
    CRITIC_KEYS,
    EPISODE_KEYS,
    REWARDS_WITH_ENV,
    TRUTHS,
    USE_KL_LOSS,
    translated,
    unread,
)
from recipe.dag.workflow.siirl.nodes import Nodes, role_of
from recipe.dag.workflow.source import Origin, Source
from recipe.dag.workflow.verl_keys import rows_key

_KNOWN = frozenset({*ACTOR_KEYS, *AGENT_KEYS, *ALGORITHM_KEYS, *EPISODE_KEYS, USE_KL_LOSS, REWARDS_WITH_ENV})
"""Keys of rollout, actor and reference nodes that say something here."""


@dataclass(slots=True)
class Options:
    """Values by dotted name, each with its place."""

    source: Source
    problems: list[Problem]
    values: dict[str, tuple[Any, KeyPath]] = field(default_factory=dict)

    def put(self, name: str, value: Any, path: KeyPath, what: str) -> None:
        before, place = self.values.setdefault(name, (value, path))
        if before != value:
            message = f"{what} has one value of this, but {render_path(place)} says {shown(before)}"
            self.problems.append(self.source.problem(path, message, key=True))

    def under(self, prefix: str) -> dict[str, tuple[Any, KeyPath]]:
        found = {name: held for name, held in self.values.items() if name.startswith(f"{prefix}.")}
        return {name.removeprefix(f"{prefix}."): held for name, held in found.items()}

    def nested(self, *blocks: str) -> dict[str, Any]:
        found = {block: {key: value for key, (value, _) in self.under(block).items()} for block in blocks}
        return {block: values for block, values in found.items() if values}


def read_config(source: Source, result: Source, nodes: Nodes, index: int, options: Options, number: int) -> None:
    """Of a rollout, actor or reference node of agent `number`."""
    for key, value, path in _entries(source, result, nodes, index, number):
        if key in EPISODE_KEYS:
            name, value = translated(EPISODE_KEYS[key], key, value)
            _set(source, result, "episode", name, value, path)
        elif key in ALGORITHM_KEYS:
            _algorithm(source, result, key, value, path)
        elif key == USE_KL_LOSS and value:
            nodes.kl_loss = nodes.kl_loss or path
        elif key == USE_KL_LOSS:
            _set(source, result, "algorithm", "kl_loss_coef", 0.0, path)
        elif key == REWARDS_WITH_ENV:
            nodes.env_rewards = nodes.env_rewards and value
        elif key in AGENT_KEYS:
            options.put(AGENT_KEYS[key], value, path, f"agent_{number}")
        else:
            options.put(ACTOR_KEYS.get(key, f"config.{key}"), value, path, f"policy_{number}")
    _settle_rows(source, result, options, critic=False)


def read_critic_config(source: Source, result: Source, nodes: Nodes, critics: list[int], number: int) -> Options:
    """Of the critic of agent `number`."""
    options = Options(source, result.problems)
    for index in critics:
        for key, value, path in _entries(source, result, nodes, index, number):
            options.put(CRITIC_KEYS.get(key, f"config.{key}"), value, path, "a critic")
    _settle_rows(source, result, options, critic=True)
    return options


def _entries(
    source: Source, result: Source, nodes: Nodes, index: int, number: int
) -> Iterator[tuple[str, Any, KeyPath]]:
    """(dotted key, value, place) of what a node's config says to somebody; the rest is told. Whether there is a KL at
    all comes before its weight, and the ends of the clip range before what stands for both."""
    at: KeyPath = ("nodes", index, "config")
    config, role = nodes.raw[index].get("config"), role_of(nodes.raw[index])
    if config is not None and not isinstance(config, dict):
        result.problems.append(source.problem(at, f"expected a mapping, got {shown(config)}"))
        return
    known = CRITIC_KEYS.keys() if role == "CRITIC" else _KNOWN
    order = {USE_KL_LOSS: 0, CLIP_RATIO: 2}
    for key, value, path in sorted(flat(config or {}, at), key=lambda entry: order.get(entry[0], 1)):
        if key not in known and (message := unread(key, role=role, policy=f"policy_{number}")):
            result.warnings.append(source.problem(path, message, key=True))
        elif role != "CRITIC" and key in TRUTHS and not isinstance(value, bool):
            result.problems.append(source.problem(path, f"expected true or false, got {shown(value)}"))
        else:
            yield key, value, path


def _settle_rows(source: Source, result: Source, options: Options, *, critic: bool) -> None:
    """A number of rows that is not read where micro-batches are made by tokens."""
    rows, dynamic = (f"config.{key}" for key in rows_key(critic=critic))
    if rows in options.values and options.values.get(dynamic, (False, ()))[0] is True:
        _, path = options.values.pop(rows)
        message = "nothing reads it, there as here: `use_dynamic_bsz` is true, so micro-batches are made by tokens"
        result.warnings.append(source.problem(path, message, key=True))


def _algorithm(source: Source, result: Source, key: str, value: Any, path: KeyPath) -> None:
    name, value = translated(ALGORITHM_KEYS[key], key, value)
    for part in ("clip_ratio_low", "clip_ratio_high") if key == CLIP_RATIO else (name,):
        first = result.origins.get(("algorithm", part))
        own = first is not None and str(first.path[-1]).endswith(part)
        if key != CLIP_RATIO or not own:
            _set(source, result, "algorithm", part, value, path)


def _set(source: Source, result: Source, block: str, key: str, value: Any, path: KeyPath) -> None:
    """An option of the whole workflow; what the file itself says in `episode` or `algorithm` comes first, then the
    first node."""
    values = result.data.setdefault(block, {})
    if not isinstance(values, dict):
        return
    if key not in values:
        values[key] = value
        result.origins[block, key] = Origin(source, path)
    elif values[key] != value:
        where = render_path(result.origin((block, key)).path)
        message = f"{block}.{key} holds for all policies, and {where} says {shown(values[key])}; this one is not used"
        result.warnings.append(source.problem(path, message, key=True))
