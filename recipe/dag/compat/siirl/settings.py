"""Settings of the whole run from siiRL's nodes: rewards, estimator, reference, dynamic sampling, retries.

Invariant: values in the file's `algorithm` and `episode` have priority.
"""

from __future__ import annotations

from typing import Any

from recipe.dag.algorithms.catalogue import algorithm_class
from recipe.dag.compat.siirl.nodes import Nodes, options_of, role_of
from recipe.dag.core.counted import counted
from recipe.dag.workflow.source import Origin, Source, nowhere

ENV_OUTCOME = "recipe.dag.reward.outcome:env_outcome"
"""Function of a REWARD node that leaves the reward to the env."""
RULE_REWARD = "recipe.dag.reward.outcome:outcome_reward"
"""Replacement for siiRL's rule-based reward."""
KL_LOSS_COEF = 0.001
"""The default of siiRL's actor, if `use_kl_loss` is true; it is false by default."""


def set_rewards(source: Source, result: Source, nodes: Nodes) -> None:
    """Give each REWARD node without a function one, and remove `obs_with_env` if no node has an env."""
    steps = [i for i, node in nodes.kept.items() if i in nodes.raw and options_of(node).get("env_path")]
    for index, node in nodes.kept.items():
        if index not in nodes.raw:
            continue
        options = options_of(node)
        if not steps and options.pop("obs_with_env", False):
            path = ("nodes", index, "agent_options", "obs_with_env")
            message = "no node has an env, so `obs_with_env` has no effect"
            result.warnings.append(source.problem(path, message, key=True))
            new_path = ("nodes", nodes.places[index], "agent_options", "obs_with_env")
            result.origins[new_path] = nowhere(source, path)
        if role_of(nodes.raw[index]) != "REWARD" or "executable_ref" in node:
            continue
        path = ("nodes", index, "node_role")
        if steps and nodes.env_rewards:
            node["executable_ref"] = ENV_OUTCOME
            for step in steps:
                nodes.kept[step]["agent_options"]["rewards_with_env"] = True
                new_path = ("nodes", nodes.places[step], "agent_options", "rewards_with_env")
                result.origins[new_path] = Origin(source, ("nodes", step, "agent_options", "env_path"))
            message = "without `executable_ref` the env's rewards are used (`rewards_with_env: true` on its node)"
        else:
            node["executable_ref"] = RULE_REWARD
            node["executable_kwargs"] = {"agent": f"agent_{len(nodes.groups) - 1}"}
            message = "without `executable_ref` the last agent's answer is compared with the ground truth"
        result.warnings.append(source.problem(path, message))
        result.origins["nodes", nodes.places[index], "executable_ref"] = Origin(source, path)


def set_algorithm(source: Source, result: Source, nodes: Nodes) -> None:
    """Complete `algorithm` and `episode` by the settings that siiRL's nodes imply."""
    algorithm = result.data.setdefault("algorithm", {})
    policies = result.data["policies"]
    if not isinstance(algorithm, dict):
        return
    trained = [policy for policy in policies.values() if not policy.get("frozen")]
    advantages = [index for index, role in nodes.training.items() if role == "ADVANTAGE"]
    if "estimator" not in algorithm and any("critic" in policy for policy in trained):
        algorithm["estimator"] = "gae_chain" if len(nodes.groups) > 1 else "gae"
        if advantages:
            result.origins["algorithm", "estimator"] = Origin(source, ("nodes", advantages[0], "node_role"))
    estimator = algorithm.get("estimator", "grpo")
    if len(nodes.groups) > 1 and trained and not _needs_values(estimator) and "share_reward_in_agent" not in algorithm:
        algorithm["share_reward_in_agent"] = True
    _set_reference(source, result, nodes, algorithm, trained)
    method = algorithm_class(estimator)
    if nodes.sampling and method is not None and "group_by" not in method.model_fields:
        message = f"{estimator} does not compare groups of episodes, so dynamic sampling has no effect"
        result.warnings.append(source.problem(("nodes", nodes.sampling[0]), message))
    elif nodes.sampling:
        algorithm.setdefault("drop_zero_variance", True)
        if algorithm["drop_zero_variance"] is True:
            algorithm.setdefault("dynamic_sampling", {})
        result.origins["algorithm", "dynamic_sampling"] = Origin(source, ("nodes", nodes.sampling[0]))
    _set_episode(source, result, nodes)


def _needs_values(estimator: Any) -> bool:
    method = algorithm_class(estimator)
    return method is not None and method.needs_values


def _set_reference(
    source: Source, result: Source, nodes: Nodes, algorithm: dict[str, Any], trained: list[dict[str, Any]]
) -> None:
    referring = [policy for policy in trained if policy.get("reference")]
    coefs = [algorithm.get(key) for key in ("kl_loss_coef", "kl_reward_coef")]
    first = next((index for index, role in nodes.training.items() if role == "REFERENCE"), None)
    key = "kl_loss_coef" if coefs[0] else "kl_reward_coef"
    path = result.origin(("algorithm", key)).path if first is None else ("nodes", first, "node_role")
    if nodes.kl_loss is not None and coefs[0] is not None and not coefs[0]:
        message = "algorithm.kl_loss_coef applies to all policies, and it is 0; this is not used"
        result.warnings.append(source.problem(nodes.kl_loss, message, key=True))
    elif nodes.kl_loss is not None and first is None:
        path = nodes.kl_loss
    if nodes.kl_loss is not None and coefs == [None, None]:
        coefs[0] = algorithm["kl_loss_coef"] = KL_LOSS_COEF
        message = f"algorithm.kl_loss_coef is {KL_LOSS_COEF}, siiRL's default; with 0 no reference is kept"
        result.warnings.append(source.problem(path, message))
    if any(coefs) and len(referring) < len(trained):
        for policy in trained:
            policy["reference"] = True
        message = "the KL applies to all policies, so those without a REFERENCE node keep a reference, too"
        result.warnings.append(source.problem(path, message))
    elif referring and not any(coefs):
        for policy in referring:
            del policy["reference"]
        message = (
            "the reference has no effect while algorithm.kl_loss_coef is 0 (see `actor.use_kl_loss`); it is left out"
        )
        result.warnings.append(source.problem(path, message))


def _set_episode(source: Source, result: Source, nodes: Nodes) -> None:
    limits = {index: node["retry_limit"] for index, node in nodes.raw.items() if node.get("retry_limit")}
    episode = result.data.setdefault("episode", {})
    if ("episode", "max_turns") in result.origins and "train_turns" not in episode:
        episode["train_turns"] = "last"  # siiRL's use_all_traj is false by default
    for index, limit in limits.items():
        path = ("nodes", index, "retry_limit")
        if role_of(nodes.raw[index]) == "ROLLOUT" and isinstance(episode, dict) and "retries" not in episode:
            episode["retries"] = max(limits.values()) if all(isinstance(v, int) for v in limits.values()) else limit
            result.origins["episode", "retries"] = Origin(source, path)
            most = counted(episode["retries"], "time")
            message = f"nodes are not retried one by one: the whole episode is, up to {most}"
        else:
            message = "nodes are not retried one by one; `episode.retries` sets how often an episode is"
        result.warnings.append(source.problem(path, message, key=True))
