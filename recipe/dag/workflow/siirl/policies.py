"""Agents and policies of a siiRL file: one of each per agent group, with weights of its own.

Invariant: an option has one value per policy; two nodes of a group that disagree are an error, as two overrides are.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.workflow.pieces import shown
from recipe.dag.workflow.problem import KeyPath, Problem
from recipe.dag.workflow.siirl.config import Options, read_config, read_critic_config
from recipe.dag.workflow.siirl.nodes import Nodes, options_of
from recipe.dag.workflow.source import Origin, Source

MODEL_PATH = "${oc.env:MODEL_PATH}"


def make_policies(source: Source, result: Source, nodes: Nodes) -> None:
    agents: list[dict[str, Any]] = []
    policies: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(nodes.groups):
        options = Options(source, result.problems)
        first = nodes.rollouts(group)[0]
        for index in (*nodes.rollouts(group), *nodes.of_group(group, "ACTOR", "REFERENCE")):
            read_config(source, result, nodes, index, options, number)
        agent, policy = f"agent_{number}", f"policy_{number}"
        agents.append({"name": agent, "policy": policy} | options.nested("sampling", "validation"))
        result.origins["agents", number] = Origin(source, ("nodes", first))
        result.origins["policies", policy] = Origin(source, ("nodes", first))
        for block in ("sampling", "validation"):
            for key, (_, path) in options.under(block).items():
                result.origins["agents", number, block, key] = Origin(source, path)
        policies[policy] = _policy(source, result, nodes, group, number, options)
    result.data["agents"], result.data["policies"] = agents, policies
    _check_training(source, result, nodes, policies)


def _policy(source: Source, result: Source, nodes: Nodes, group: int, number: int, options: Options) -> dict[str, Any]:
    at: KeyPath = ("policies", f"policy_{number}")
    policy: dict[str, Any] = {"model": {"path": MODEL_PATH}}
    for key, (value, path) in options.under("model").items():
        policy["model"][key] = value
        result.origins[(*at, "model", key)] = Origin(source, path)
    for key, (value, path) in options.under("config").items():
        policy.setdefault("config", {})[key] = value
        result.origins[(*at, "config", key)] = Origin(source, path)
    updates = [i for i in nodes.of_group(group, "ACTOR") if not nodes.raw[i].get("only_forward_compute")]
    if not updates:
        message = "no ACTOR node updates this agent, so its policy is frozen"
        result.warnings.append(result.problem(at, message))
        unread = [("nodes", i) for i in nodes.of_group(group, "CRITIC", "REFERENCE")]
        unread += [options.values["lr"][1]] if "lr" in options.values else []
        for place in unread:
            result.warnings.append(source.problem(place, "nothing reads this of a frozen policy", key=True))
        return policy | {"frozen": True}
    if "lr" in options.values:
        policy["lr"], path = options.values["lr"]
        result.origins[(*at, "lr")] = Origin(source, path)
    for index in updates[1:] if nodes.sound else ():
        message = f"agent_group {group} has another update of its actor; keep one"
        result.problems.append(source.problem(("nodes", index), message))
    if cycle := options_of(nodes.raw[updates[0]]).get("train_cycle"):
        policy["train_cycle"] = cycle
        result.origins[(*at, "train_cycle")] = Origin(source, ("nodes", updates[0], "agent_options", "train_cycle"))
    if references := nodes.of_group(group, "REFERENCE"):
        policy["reference"] = True
        result.origins[(*at, "reference")] = Origin(source, ("nodes", references[0], "node_role"))
    if critics := nodes.of_group(group, "CRITIC"):
        policy["critic"] = _critic(source, result, nodes, critics, number)
    return policy


def _critic(source: Source, result: Source, nodes: Nodes, critics: list[int], number: int) -> dict[str, Any]:
    at: KeyPath = ("policies", f"policy_{number}", "critic")
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
    options = read_critic_config(source, result, nodes, critics, number)
    critic: dict[str, Any] = options.nested("model", "config")
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
    elif 1 < len(cycling) < len(nodes.groups):
        message = (
            f"siiRL counts all {len(nodes.groups)} agents, so that in some turns none of those with a train_cycle "
            f"learns; here {' and '.join(cycling)} take turns without a gap"
        )
        result.warnings.append(result.problem(("policies", cycling[0], "train_cycle"), message, key=True))
