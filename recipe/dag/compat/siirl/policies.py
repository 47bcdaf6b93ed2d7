"""Agents and policies of a siiRL file: one agent and one policy per agent group.

Invariant: an option has one value per policy; two nodes of a group with different values are an error, as two overrides
are.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.compat.siirl.config import Options, read_config, read_critic_config
from recipe.dag.compat.siirl.nodes import Nodes, options_of
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.workflow.parse_model import show_value
from recipe.dag.workflow.source import Origin, Source

MODEL_PATH = "${oc.env:MODEL_PATH}"


def make_policies(source: Source, result: Source, nodes: Nodes) -> None:
    """Add `agents` and `policies` to the data of `result`."""
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
    policy_path: KeyPath = ("policies", f"policy_{number}")
    policy: dict[str, Any] = {"model": {"path": MODEL_PATH}}
    for key, (value, path) in options.under("model").items():
        policy["model"][key] = value
        result.origins[(*policy_path, "model", key)] = Origin(source, path)
    for key, (value, path) in options.under("config").items():
        policy.setdefault("config", {})[key] = value
        result.origins[(*policy_path, "config", key)] = Origin(source, path)
    updates = [i for i in nodes.of_group(group, "ACTOR") if not nodes.raw[i].get("only_forward_compute")]
    if not updates:
        message = "no ACTOR node updates this agent, so its policy is frozen"
        result.warnings.append(result.problem(policy_path, message))
        ignored = [("nodes", i) for i in nodes.of_group(group, "CRITIC", "REFERENCE")]
        ignored += [options.values["lr"][1]] if "lr" in options.values else []
        for path in ignored:
            result.warnings.append(source.problem(path, "this has no effect on a frozen policy", key=True))
        return policy | {"frozen": True}
    if "lr" in options.values:
        policy["lr"], path = options.values["lr"]
        result.origins[(*policy_path, "lr")] = Origin(source, path)
    for index in updates[1:] if nodes.sound else ():
        message = f"agent_group {group} has another update of its actor; keep one"
        result.problems.append(source.problem(("nodes", index), message))
    if cycle := options_of(nodes.raw[updates[0]]).get("train_cycle"):
        policy["train_cycle"] = cycle
        cycle_path = ("nodes", updates[0], "agent_options", "train_cycle")
        result.origins[(*policy_path, "train_cycle")] = Origin(source, cycle_path)
    if references := nodes.of_group(group, "REFERENCE"):
        policy["reference"] = True
        result.origins[(*policy_path, "reference")] = Origin(source, ("nodes", references[0], "node_role"))
    if critics := nodes.of_group(group, "CRITIC"):
        policy["critic"] = _critic(source, result, nodes, critics, number)
    return policy


def _critic(source: Source, result: Source, nodes: Nodes, critics: list[int], number: int) -> dict[str, Any]:
    critic_path: KeyPath = ("policies", f"policy_{number}", "critic")
    result.origins[critic_path] = Origin(source, ("nodes", critics[0], "node_role"))
    shares = [(i, options_of(nodes.raw[i])["share_instance"]) for i in critics if _shares(nodes.raw[i])]
    if shares:
        index, group = shares[0]
        share_path: KeyPath = ("nodes", index, "agent_options", "share_instance")
        result.origins[(*critic_path, "share")] = Origin(source, share_path)
        for other in critics:
            if not _shares(nodes.raw[other]):
                message = f"`{nodes.raw[index].get('node_id')}` shares the critic of group {group}; so does this node"
                result.warnings.append(source.problem(("nodes", other), message))
            if isinstance(nodes.raw[other].get("config"), dict) and nodes.raw[other]["config"]:
                message = "this has no effect on a shared critic; the config of its owner's node applies"
                result.warnings.append(source.problem(("nodes", other, "config"), message, key=True))
        if group not in nodes.groups:
            message = f"no agent_group {show_value(group)}; the groups are {nodes.groups}"
            result.problems.append(source.problem(share_path, message))
            return {}
        return {"share": f"policy_{nodes.groups.index(group)}"}
    options = read_critic_config(source, result, nodes, critics, number)
    critic: dict[str, Any] = options.nested("model", "config")
    critic |= {key: value for key, (value, _) in options.values.items() if "." not in key}
    for key, (_, path) in options.values.items():
        block, _, rest = key.partition(".")
        result.origins[(*critic_path, block, rest) if rest else (*critic_path, block)] = Origin(source, path)
    return critic


def _shares(node: dict[str, Any]) -> bool:
    return options_of(node).get("share_instance") is not None


def _check_training(source: Source, result: Source, nodes: Nodes, policies: dict[str, dict[str, Any]]) -> None:
    """Report settings of siiRL's training nodes that the derived training chain does not follow."""
    for index in nodes.training:
        group = nodes.raw[index].get("agent_group", 0)
        if group not in nodes.groups and nodes.training[index] != "ADVANTAGE":
            message = (
                f"agent_group {show_value(group)} has no ROLLOUT node; the groups that have one are {nodes.groups}"
            )
            path: KeyPath = ("nodes", index, "agent_group")
            path = path if source.has(path) else path[:2]
            result.problems.append(source.problem(path, message))
    critics = [name for name, policy in policies.items() if "critic" in policy]
    for name, policy in policies.items():
        if critics and "critic" not in policy and not policy.get("frozen"):
            policy["critic"] = {"share": critics[0]}
            message = f"{name} has no CRITIC node; it shares the critic of {critics[0]}"
            result.warnings.append(Problem(source.file, *result.at(("policies", name)), "", message))
    cycling = [name for name, policy in policies.items() if "train_cycle" in policy]
    if len(cycling) == 1:
        del policies[cycling[0]]["train_cycle"]
        message = "no other agent has a train_cycle, so this one is updated in every step"
        result.warnings.append(result.problem(("policies", cycling[0], "train_cycle"), message, key=True))
    elif 1 < len(cycling) < len(nodes.groups):
        message = (
            f"siiRL counts all {len(nodes.groups)} agents, so that some steps update none of those with a train_cycle; "
            f"here {' and '.join(cycling)} alternate without a gap"
        )
        result.warnings.append(result.problem(("policies", cycling[0], "train_cycle"), message, key=True))
