"""Agents and policies of a siiRL file: one of each per agent group, with weights of its own.

Invariant: an option has one value per policy; two nodes of a group that disagree are an error, as two overrides are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipe.dag.workflow.dotted import flat
from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import KeyPath, Problem, render_path
from recipe.dag.workflow.siirl.keys import (
    ACTOR_KEYS,
    AGENT_KEYS,
    ALGORITHM_KEYS,
    CRITIC_KEYS,
    EPISODE_KEYS,
    UNREAD,
    translated,
)
from recipe.dag.workflow.siirl.nodes import Nodes, options_of
from recipe.dag.workflow.source import Origin, Source

MODEL_PATH = "${oc.env:MODEL_PATH}"


@dataclass(slots=True)
class _Options:
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


def make_policies(source: Source, result: Source, nodes: Nodes) -> None:
    agents: list[dict[str, Any]] = []
    policies: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(nodes.groups):
        options = _Options(source, result.problems)
        first = nodes.rollouts(group)[0]
        for index in (*nodes.rollouts(group), *nodes.of_group(group, "ACTOR", "REFERENCE")):
            _read_config(source, result, nodes, index, options, number)
        agent, policy = f"agent_{number}", f"policy_{number}"
        agents.append({"name": agent, "policy": policy} | _nested(options, ("sampling", "validation")))
        result.origins["agents", number] = Origin(source, ("nodes", first))
        result.origins["policies", policy] = Origin(source, ("nodes", first))
        for key, (_, path) in (options.under("sampling") | options.under("validation")).items():
            for block in ("sampling", "validation"):
                result.origins["agents", number, block, key] = Origin(source, path)
        policies[policy] = _policy(source, result, nodes, group, policy, options)
    result.data["agents"], result.data["policies"] = agents, policies
    _check_training(source, result, nodes, policies)


def _read_config(source: Source, result: Source, nodes: Nodes, index: int, options: _Options, number: int) -> None:
    config = nodes.raw[index].get("config")
    if config is not None and not isinstance(config, dict):
        message = f"expected a mapping, got {shown(config)}"
        result.problems.append(source.problem(("nodes", index, "config"), message))
        return
    for key, value, path in flat(config or {}, ("nodes", index, "config")):
        if key in UNREAD:
            result.warnings.append(source.problem(path, UNREAD[key], key=True))
        elif key in EPISODE_KEYS:
            name, value = translated(EPISODE_KEYS[key], key, value)
            _set(source, result, "episode", name, value, path)
        elif key in ALGORITHM_KEYS:
            _algorithm(source, result, key, value, path)
        elif key == "actor.use_kl_loss":
            if value is False:
                _set(source, result, "algorithm", "kl_loss_coef", 0.0, path)
        elif key == "rollout.agent.rewards_with_env":
            nodes.env_rewards = value is not False
        elif key in AGENT_KEYS:
            options.put(AGENT_KEYS[key], value, path, f"agent_{number}")
        else:
            name = ACTOR_KEYS.get(key, f"config.{key}")
            options.put(name, value, path, f"policy_{number}")


def _algorithm(source: Source, result: Source, key: str, value: Any, path: KeyPath) -> None:
    name, value = translated(ALGORITHM_KEYS[key], key, value)
    for part in ("clip_ratio_low", "clip_ratio_high") if name == "clip_ratio" else (name,):
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


def _nested(options: _Options, blocks: tuple[str, ...]) -> dict[str, Any]:
    found = {block: {key: value for key, (value, _) in options.under(block).items()} for block in blocks}
    return {block: values for block, values in found.items() if values}


def _policy(source: Source, result: Source, nodes: Nodes, group: int, name: str, options: _Options) -> dict[str, Any]:
    at: KeyPath = ("policies", name)
    policy: dict[str, Any] = {"model": {"path": MODEL_PATH}}
    for key, (value, path) in options.under("model").items():
        policy["model"][key] = value
        result.origins[(*at, "model", key)] = Origin(source, path)
    for key, (value, path) in options.under("config").items():
        policy.setdefault("config", {})[key] = value
        result.origins[(*at, "config", key)] = Origin(source, path)
    if "lr" in options.values:
        policy["lr"], path = options.values["lr"]
        result.origins[(*at, "lr")] = Origin(source, path)
    updates = [i for i in nodes.of_group(group, "ACTOR") if not nodes.raw[i].get("only_forward_compute")]
    if not updates:
        message = "no ACTOR node updates this agent, so its policy is frozen"
        result.warnings.append(result.problem(at, message))
        return policy | {"frozen": True}
    for index in updates[1:]:
        message = f"agent_group {group} has another update of its actor; keep one"
        result.problems.append(source.problem(("nodes", index), message))
    if cycle := options_of(nodes.raw[updates[0]]).get("train_cycle"):
        policy["train_cycle"] = cycle
        result.origins[(*at, "train_cycle")] = Origin(source, ("nodes", updates[0], "agent_options", "train_cycle"))
    if references := nodes.of_group(group, "REFERENCE"):
        policy["reference"] = True
        result.origins[(*at, "reference")] = Origin(source, ("nodes", references[0], "node_role"))
    if critics := nodes.of_group(group, "CRITIC"):
        policy["critic"] = _critic(source, result, nodes, critics, (*at, "critic"))
    return policy


def _critic(source: Source, result: Source, nodes: Nodes, critics: list[int], at: KeyPath) -> dict[str, Any]:
    result.origins[at] = Origin(source, ("nodes", critics[0], "node_role"))
    shares = [(i, options_of(nodes.raw[i])["share_instance"]) for i in critics if _shares(nodes.raw[i])]
    if shares:
        index, group = shares[0]
        place: KeyPath = ("nodes", index, "agent_options", "share_instance")
        result.origins[(*at, "share")] = Origin(source, place)
        for other in critics:
            if not _shares(nodes.raw[other]):
                message = f"`{nodes.raw[index].get('node_id')}` shares the critic of group {group}; so does this one"
                result.warnings.append(source.problem(("nodes", other), message))
            if isinstance(nodes.raw[other].get("config"), dict) and nodes.raw[other]["config"]:
                message = "nothing reads this of a shared critic; its owner's node counts"
                result.warnings.append(source.problem(("nodes", other, "config"), message, key=True))
        if group not in nodes.groups:
            message = f"no agent_group {shown(group)}; the groups are {nodes.groups}"
            result.problems.append(source.problem(place, message))
            return {}
        return {"share": f"policy_{nodes.groups.index(group)}"}
    options = _Options(source, result.problems)
    for index in critics:
        config = nodes.raw[index].get("config")
        for key, value, path in flat(config if isinstance(config, dict) else {}, ("nodes", index, "config")):
            if key in UNREAD:
                result.warnings.append(source.problem(path, UNREAD[key], key=True))
            else:
                options.put(CRITIC_KEYS.get(key, f"config.{key}"), value, path, "a critic")
    critic: dict[str, Any] = _nested(options, ("model", "config"))
    critic |= {key: value for key, (value, _) in options.values.items() if "." not in key}
    for key, (_, path) in options.values.items():
        block, _, rest = key.partition(".")
        result.origins[(*at, block, rest) if rest else (*at, block)] = Origin(source, path)
    return critic


def _shares(node: dict[str, Any]) -> bool:
    return options_of(node).get("share_instance") is not None


def _check_training(source: Source, result: Source, nodes: Nodes, policies: dict[str, dict[str, Any]]) -> None:
    """What the original's training nodes ask for and the derived chain does otherwise."""
    for index in nodes.training:
        group = nodes.raw[index].get("agent_group", 0)
        if group not in nodes.groups and nodes.training[index] != "ADVANTAGE":
            message = f"agent_group {shown(group)} generates nothing; the groups with a ROLLOUT node are {nodes.groups}"
            at = ("nodes", index, "agent_group") if source.has(("nodes", index, "agent_group")) else ("nodes", index)
            result.problems.append(source.problem(at, message))
    critics = [name for name, policy in policies.items() if "critic" in policy]
    for name, policy in policies.items():
        if critics and "critic" not in policy and not policy.get("frozen"):
            policy["critic"] = {"share": critics[0]}
            message = f"{name} has no CRITIC node; it shares the critic of {critics[0]}"
            result.warnings.append(Problem(source.file, *result.at(("policies", name)), "", message))
    cycling = [name for name, policy in policies.items() if "train_cycle" in policy]
    if len(cycling) == 1:
        del policies[cycling[0]]["train_cycle"]
        message = "no other agent takes turns with this one, so it learns in every step"
        result.warnings.append(result.problem(("policies", cycling[0], "train_cycle"), message, key=True))
