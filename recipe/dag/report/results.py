"""results.json and summary.json: the output of an evaluation.

Invariant: one item per episode, in dataset order; an episode with a fault has an "error" instead of "metrics" and is
excluded from averages. Keys of rounds of a loop, team rewards, results of vote and compute nodes and skipped nodes are
there if these occur. What no graded episode can tell, an accuracy above all, is null.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from recipe.dag.core.paths import split_ref
from recipe.dag.core.user_code import load_object
from recipe.dag.episode.failure import most_frequent
from recipe.dag.report.conversations import problem_of
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.pass_at_k import (
    SOLVED,
    atleast_k_at_n,
    average_at_n,
    majority_at_n,
    outcomes_by_problem,
    pass_at_k,
)
from recipe.dag.report.tools import tool_metrics
from recipe.dag.types.agent import Agent
from recipe.dag.types.record import Call, Episode, ToolResult
from recipe.dag.types.usage import usage_by_policy
from recipe.dag.workflow.schema import Workflow

CODE_TOOL = "code_interpreter"
Metadata = Callable[[Call, Episode], dict[str, Any]]
TEAM_REWARD = "team_reward"
"""The function of reward nodes whose reward is shown beside the agent's own."""


def write_results(
    folder: str | Path, episodes: Sequence[Episode], workflow: Workflow, uids: Sequence[str] | None = None
) -> dict[str, Any]:
    """Write `results.json` and `summary.json` into `folder` (created if missing), each atomically; return the summary.

    `uids`: the dataset's order; without it, problems are in the order of their first episode.
    """
    order = {uid: index for index, uid in enumerate(uids or dict.fromkeys(e.uid for e in episodes))}
    ordered = sorted(episodes, key=lambda e: (order.get(e.uid, len(order)), e.index))
    team = {
        node.id
        for node in workflow.reward_nodes
        if node.function is not None and split_ref(node.function)[1] == TEAM_REWARD
    }
    results = results_list(ordered, team, metadata=_metadata_of(workflow))
    summary = summarise(ordered, team)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "results.json", [to_json(results, indent=2), b"\n"])
    replace_file(folder / "summary.json", [to_json(summary, indent=2), b"\n"])
    return summary


def _metadata_of(workflow: Workflow) -> dict[str, Metadata]:
    """Return the `results_metadata` of the agents that have their own, by node."""
    hooks = {node.id: load_object(node.hooks, workflow.path) for node in workflow.rollout_nodes if node.hooks}
    own = {name: holder for name, holder in hooks.items() if inspect.isclass(holder) and issubclass(holder, Agent)}
    return {name: holder.results_metadata for name, holder in own.items()}


def results_list(
    episodes: Sequence[Episode], team: Collection[str] = (), *, metadata: Mapping[str, Metadata] | None = None
) -> list[dict[str, Any]]:
    """Return one item per episode, in the given order, with a `sample_index` if problems have several episodes.
    `team`: the ids of the nodes that pay team rewards. `metadata`: of calls, by node; by default as `Agent` has it."""
    several = _has_groups(episodes)
    return [
        _item(episode, team, metadata or {}) | ({"sample_index": episode.index} if several else {})
        for episode in episodes
    ]


def summarise(episodes: Sequence[Episode], team: Collection[str] = ()) -> dict[str, Any]:
    """Summarise the episodes without a fault; `num_errors` counts the episodes with one. A ratio of nothing is 0.0,
    but an accuracy is None if no episode was graded.

    `reward_stats` has the mean reward of each agent's calls, and `team_reward_stats` that from the nodes `team`.
    `final_accuracy` is over the `num_graded` graded episodes; `final_accuracy_all` adds the `num_errors` ones as not
    solved, and `most_frequent_error` quotes their most frequent fault. Pass rates are pooled: passes over attempts of
    all correct (incorrect) episodes. With several episodes per problem: `samples_per_problem` n, `avg@n`,
    `majority@n`, and for k = 1 ... n the unbiased `pass@k` and `atleast_k@n`. With API policies: `api_usage`, what each
    of them consumed.
    """
    good = [episode for episode in episodes if episode.fault is None]
    graded = [episode for episode in good if _is_correct(episode) is not None]
    attempts = sum(len(_code_runs(episode)) for episode in good)
    passes = sum(result.ok for episode in good for result in _code_runs(episode))
    solved, lost = sum(bool(_is_correct(episode)) for episode in graded), len(episodes) - len(good)
    rewards, team_rewards = _rewards(good, team), _team_rewards(good, team)
    summary: dict[str, Any] = {
        "num_samples": len(good),
        "num_errors": lost,
        "num_graded": len(graded),
        **({"most_frequent_error": most_frequent(e.fault for e in episodes if e.fault is not None)} if lost else {}),
        "final_accuracy": solved / len(graded) if graded else None,
        "final_accuracy_all": solved / (len(graded) + lost) if graded else None,
        "avg_trajectory_length": _ratio(sum(len(episode.calls) for episode in good), len(good)),
        "code_metrics": {
            "total_attempts": attempts,
            "total_passes": passes,
            "total_failures": attempts - passes,
            "overall_pass_rate": _ratio(passes, attempts),
            "pass_rate_when_correct": _pooled_pass_rate(e for e in graded if _is_correct(e)),
            "pass_rate_when_incorrect": _pooled_pass_rate(e for e in graded if not _is_correct(e)),
            "avg_calls_per_problem": _ratio(attempts, len(good)),
        },
        "reward_stats": {agent: fmean(values) for agent, values in rewards.items()},
        **({"team_reward_stats": {a: fmean(values) for a, values in team_rewards.items()}} if team_rewards else {}),
        "tool_metrics": tool_metrics(episodes),
    }
    if usage := usage_by_policy(episodes):
        summary["api_usage"] = usage
    problems = outcomes_by_problem(episodes)
    if _has_groups(episodes) and problems:
        n = max(len(outcomes) for outcomes in problems)
        summary["samples_per_problem"] = n
        summary["avg@n"] = average_at_n(problems)
        summary["pass@k"] = {str(k): pass_at_k(problems, k) for k in range(1, n + 1)}
        summary["majority@n"] = majority_at_n(problems, n)
        summary["atleast_k@n"] = {str(k): atleast_k_at_n(problems, k, n) for k in range(1, n + 1)}
    return summary


def _item(episode: Episode, team: Collection[str], metadata: Mapping[str, Metadata]) -> dict[str, Any]:
    runs = _code_runs(episode)
    item = {
        "prompt": problem_of(episode),
        "label": episode.sample.get("ground_truth"),
        "trajectory": [
            _trajectory_item(turn, call, team)
            | {"metadata": metadata.get(call.node, Agent.results_metadata)(call, episode)}
            for turn, call in enumerate(episode.calls)
        ],
        "code_runs": [
            {
                "code": run.arguments.get("code", ""),
                "status": "success" if run.ok else "failed",
                "stdout": run.stdout,
                "stderr": run.stderr,
                "passed": run.ok,
            }
            for run in runs
        ],
        "final_reward": _final_reward(episode),
    }
    item |= {"results": [asdict(result) for result in episode.results]} if episode.results else {}
    item |= {"skips": [asdict(skip) for skip in episode.skips]} if episode.skips else {}
    if episode.fault is not None:
        fault = episode.fault
        where = f" at {fault['where']}" if fault.get("where") else ""
        return item | {"final_reward": None, "error": f"{fault['boundary']} fault{where}: {fault['message']}"}
    passes = sum(run.ok for run in runs)
    item["metrics"] = {
        "is_correct": _is_correct(episode),
        "code_execution": {
            "attempts": len(runs),
            "passes": passes,
            "failures": len(runs) - passes,
            "pass_rate": _ratio(passes, len(runs)),
            "invalid_calls": len(runs) - passes,
        },
        "trajectory_length": len(episode.calls),
        "reward_breakdown": {agent: sum(values) for agent, values in _rewards([episode], team).items()},
    }
    return item


def _rewards(episodes: Iterable[Episode], team: Collection[str]) -> dict[str, list[float]]:
    """Return agent -> the rewards of its calls that have one, without team rewards."""
    return _by_agent(episodes, lambda call: _own_reward(call, team))


def _team_rewards(episodes: Iterable[Episode], team: Collection[str]) -> dict[str, list[float]]:
    """Return agent -> the team rewards of its calls that have one beside their own reward."""
    return _by_agent(episodes, lambda call: _team_reward(call, team))


def _by_agent(episodes: Iterable[Episode], value_of: Callable[[Call], float | None]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for call in (call for episode in episodes for call in episode.calls):
        if (value := value_of(call)) is not None:
            values.setdefault(call.agent, []).append(value)
    return values


def _own_reward(call: Call, team: Collection[str]) -> float | None:
    """Return the call's reward without its team reward. A call that only team rewards pay has these as its own."""
    if _team_reward(call, team) is None:
        return call.reward
    return sum(value for node, value in call.reward_parts.items() if node not in team)


def _team_reward(call: Call, team: Collection[str]) -> float | None:
    shared = [value for node, value in call.reward_parts.items() if node in team]
    return sum(shared) if call.reward is not None and 0 < len(shared) < len(call.reward_parts) else None


def _trajectory_item(turn: int, call: Call, team: Collection[str]) -> dict[str, Any]:
    shared = _team_reward(call, team)
    return {
        "turn_id": turn,
        "agent_role": call.agent,
        "agent_id": call.agent_group,
        "agent_input": call.prompt_text,
        "agent_output": call.text if call.completion is None else call.completion,
        "agent_reward": _own_reward(call, team),
        **({"team_reward": shared} if shared is not None else {}),
        **({"round": call.round} if call.round else {}),
    }


def _is_code(result: ToolResult) -> bool:
    return result.name == CODE_TOOL or "code" in result.arguments


def _code_runs(episode: Episode) -> list[ToolResult]:
    """Return the attempts to run code, including rejected ones; infrastructure faults do not count as attempts."""
    return [r for call in episode.calls for r in call.tool_results if _is_code(r) and r.status != "fault"]


def _final_reward(episode: Episode) -> float | None:
    """Return `final_reward` as a reward node reports it, else the outcome; None if not graded."""
    return episode.info.get("final_reward", episode.outcome)


def _is_correct(episode: Episode) -> bool | None:
    return None if episode.outcome is None else episode.outcome >= SOLVED


def _pooled_pass_rate(episodes: Iterable[Episode]) -> float:
    runs = [run for episode in episodes for run in _code_runs(episode)]
    return _ratio(sum(run.ok for run in runs), len(runs))


def _has_groups(episodes: Sequence[Episode]) -> bool:
    return len({episode.uid for episode in episodes}) < len(episodes)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
