"""Translation of the `config` of siiRL's nodes to options of agents, policies, critics and the whole run.

Invariant: an option has one value per policy; two nodes of a group with different values are an error, as two overrides
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.compat.siirl.keys import (
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
    why_ignored,
)
from recipe.dag.compat.siirl.nodes import Nodes, role_of
from recipe.dag.core.flatten import flatten
from recipe.dag.core.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.parse_model import show_value
from recipe.dag.workflow.source import Origin, Source
from recipe.dag.workflow.verl_keys import rows_key

_TRANSLATED = frozenset({*ACTOR_KEYS, *AGENT_KEYS, *ALGORITHM_KEYS, *EPISODE_KEYS, USE_KL_LOSS, REWARDS_WITH_ENV})
"""Keys of rollout, actor and reference nodes that are translated to options."""


@dataclass(slots=True)
class Options:
    """Values by dotted name, each with its path in siiRL's file."""

    source: Source
    problems: list[Problem]
    values: dict[str, tuple[Any, KeyPath]] = field(default_factory=dict)

    def put(self, name: str, value: Any, path: KeyPath, owner: str) -> None:
        """Add an option; a second value of the same option is a problem."""
        first_value, first_path = self.values.setdefault(name, (value, path))
        if first_value != value:
            message = f"{owner} has one value of this, but {render_path(first_path)} is {show_value(first_value)}"
            self.problems.append(self.source.problem(path, f"{message}; remove one", key=True))

    def under(self, prefix: str) -> dict[str, tuple[Any, KeyPath]]:
        """Return the options whose name starts with `prefix.`, by the rest of the name."""
        start = f"{prefix}."
        return {name.removeprefix(start): entry for name, entry in self.values.items() if name.startswith(start)}

    def nested(self, *blocks: str) -> dict[str, Any]:
        """Return the values of the options in these blocks, as one mapping per block that is not empty."""
        mappings = {block: {key: value for key, (value, _) in self.under(block).items()} for block in blocks}
        return {block: values for block, values in mappings.items() if values}


def read_config(source: Source, result: Source, nodes: Nodes, index: int, options: Options, number: int) -> None:
    """Translate the `config` of a rollout, actor or reference node of agent `number`."""
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
    """Return the options of the critic of agent `number`, from the nodes `critics`."""
    options = Options(source, result.problems)
    for index in critics:
        for key, value, path in _entries(source, result, nodes, index, number):
            options.put(CRITIC_KEYS.get(key, f"config.{key}"), value, path, "a critic")
    _settle_rows(source, result, options, critic=True)
    return options


def _entries(
    source: Source, result: Source, nodes: Nodes, index: int, number: int
) -> Iterator[tuple[str, Any, KeyPath]]:
    """Yield (dotted key, value, path) of the entries of a node's config that have an effect, and warn of the others.

    The switch of the KL precedes its weight, and the ends of the clip range precede the key for both.
    """
    config_path: KeyPath = ("nodes", index, "config")
    config, role = nodes.raw[index].get("config"), role_of(nodes.raw[index])
    if config is not None and not isinstance(config, dict):
        result.problems.append(source.problem(config_path, f"expected a mapping, got {show_value(config)}"))
        return
    translated_keys = CRITIC_KEYS.keys() if role == "CRITIC" else _TRANSLATED
    order = {USE_KL_LOSS: 0, CLIP_RATIO: 2}
    for key, value, path in sorted(flatten(config or {}, config_path), key=lambda entry: order.get(entry[0], 1)):
        if key not in translated_keys and (message := why_ignored(key, role=role, policy=f"policy_{number}")):
            result.warnings.append(source.problem(path, message, key=True))
        elif role != "CRITIC" and key in TRUTHS and not isinstance(value, bool):
            result.problems.append(source.problem(path, f"expected true or false, got {show_value(value)}"))
        else:
            yield key, value, path


def _settle_rows(source: Source, result: Source, options: Options, *, critic: bool) -> None:
    """Warn of a number of rows per micro-batch, and remove it, if micro-batches are formed by tokens."""
    rows, dynamic = (f"config.{key}" for key in rows_key(critic=critic))
    if rows in options.values and options.values.get(dynamic, (False, ()))[0] is True:
        _, path = options.values.pop(rows)
        message = "no effect, here as in siiRL: `use_dynamic_bsz` is true, so micro-batches are formed by tokens"
        result.warnings.append(source.problem(path, message, key=True))


def _algorithm(source: Source, result: Source, key: str, value: Any, path: KeyPath) -> None:
    name, value = translated(ALGORITHM_KEYS[key], key, value)
    for part in ("clip_ratio_low", "clip_ratio_high") if key == CLIP_RATIO else (name,):
        origin = result.origins.get(("algorithm", part))
        is_set_directly = origin is not None and str(origin.path[-1]).endswith(part)
        if key != CLIP_RATIO or not is_set_directly:
            _set(source, result, "algorithm", part, value, path)


def _set(source: Source, result: Source, block: str, key: str, value: Any, path: KeyPath) -> None:
    """Set an option of the whole workflow. A value in the file's `episode` or `algorithm` precedes those of nodes, and
    the first node's value precedes the others'."""
    values = result.data.setdefault(block, {})
    if not isinstance(values, dict):
        return
    if key not in values:
        values[key] = value
        result.origins[block, key] = Origin(source, path)
    elif values[key] != value:
        where = render_path(result.origin((block, key)).path)
        message = f"{block}.{key} applies to all policies, and {where} is {show_value(values[key])}; this is not used"
        result.warnings.append(source.problem(path, message, key=True))
