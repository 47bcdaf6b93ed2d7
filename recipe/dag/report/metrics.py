"""What one step's episodes say in numbers.

Invariant: a key is present only if something was measured. There is no 0 that stands for "nothing to count": accuracy
is absent when no episode was graded, a reward when no call was scored, tool rates when no tool was called. Counts of
what was looked for and not found (faults, masked episodes, retried tools) are true zeros.

What went wrong is counted over all episodes; everything else over the episodes that ended without a fault, the ones
that can be trained on. `accuracy_all` stands beside each accuracy: there an episode that a fault ended counts as not
solved, so that no fault can raise it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from recipe.dag.episode.record import Call, Episode, Skip
from recipe.dag.report.pass_at_k import average_at_n, outcomes_by_problem, pass_at_k
from recipe.dag.workflow.schema import Workflow

RAN = ("success", "failed", "timeout")
"""Tool statuses of calls whose code ran; `invalid` never did, and `fault` is the infrastructure's."""

ENDS = ("done", "length", "turns")
"""What an episode can be ended by."""


def rollout_metrics(
    episodes: Sequence[Episode],
    workflow: Workflow | None = None,
    *,
    versions: Mapping[str, int] | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """Flat metrics, each key led by `prefix`. Lengths in tokens, times in seconds, rates in [0, 1].

    `info/<key>` is the mean of what reward nodes and envs put into `episode.info`, where that is a number.

    With `workflow`, agents come in its order, agents that never moved are shown with `calls` 0, and tool keys appear
    for the agents that declare tools, `skipped` (share of the moves that were passed over) if a node has a condition,
    and `rounds` (mean per turn, 0 for one without) for agents in loops; without it, where the episodes show such
    things. `versions` (current weight version by policy) adds `policy/<name>/staleness`, the mean number of updates by
    which the calls' weights lag behind.
    """
    good = [episode for episode in episodes if episode.fault is None]
    calls = [call for episode in good for call in episode.calls]
    metrics = _episode_metrics(episodes, good) | _fault_metrics(episodes)
    names = [agent.name for agent in workflow.agents] if workflow else list(dict.fromkeys(call.agent for call in calls))
    with_tools = {agent.name for agent in workflow.agents if agent.tools} if workflow else set()
    branches = workflow is not None and any(node.when for node in workflow.nodes)
    loops = _loops(good, workflow)
    for name in names:
        own = [call for call in calls if call.agent == name]
        shown = _agent_metrics(own, name in with_tools or any(call.tool_results for call in own))
        shown |= _flow_metrics(good, name, branches=branches, loops=loops)
        metrics |= {f"agent/{name}/{key}": value for key, value in shown.items()}
    for policy, version in (versions or {}).items():
        lags = [float(version - call.weight_version) for call in calls if call.policy == policy]
        metrics |= _stats(f"policy/{policy}/staleness", lags)
    return {prefix + key: float(value) for key, value in metrics.items()}


def validation_metrics(episodes: Sequence[Episode], workflow: Workflow | None = None) -> dict[str, float]:
    """`rollout_metrics` under `val/`, plus `val/accuracy` (over problems, each the mean of its episodes), the same per
    data source where there are several, `val/accuracy_all`, and with n > 1 episodes per problem `val/pass@<k>` for k =
    1, 2, 4, ... and n."""
    metrics = rollout_metrics(episodes, workflow, prefix="val/")
    problems = outcomes_by_problem(episodes)
    if not problems:
        return metrics
    metrics["val/accuracy"] = average_at_n(problems)
    metrics["val/accuracy_all"] = average_at_n(outcomes_by_problem(episodes, lost=True))
    sources = dict.fromkeys(episode.sample.get("data_source") for episode in episodes)
    if len(sources) > 1:
        for source in sources:
            part = outcomes_by_problem([e for e in episodes if e.sample.get("data_source") == source])
            metrics |= {f"val/accuracy/{source}": average_at_n(part)} if part else {}
    n = max(len(outcomes) for outcomes in problems)
    ks = sorted({1 << power for power in range(n.bit_length())} | {n}) if n > 1 else []
    return metrics | {f"val/pass@{k}": pass_at_k(problems, k) for k in ks}


def _episode_metrics(episodes: Sequence[Episode], good: Sequence[Episode]) -> dict[str, float]:
    metrics: dict[str, float] = {"episode/count": len(episodes)}
    graded = [e.outcome for e in good if e.outcome is not None]
    metrics |= _stats("episode/accuracy", graded)
    # Only of a workflow that grades: of others a lost episode says nothing about accuracy.
    metrics |= _stats("episode/accuracy_all", graded + [0.0] * (len(episodes) - len(good)) if graded else [])
    rewards = [[call.reward for call in e.calls if call.reward is not None] for e in good]
    metrics |= _stats("episode/reward", [sum(own) for own in rewards if own])
    metrics |= _stats("episode/turns", [float(e.turns) for e in good])
    if ended := [e.ended_by for e in good if e.ended_by]:
        shares = {reason: ended.count(reason) / len(ended) for reason in ENDS}
        metrics |= {f"episode/ended_by/{reason}": share for reason, share in shares.items()}
    metrics |= _stats("episode/seconds", [e.seconds for e in good], "mean", "max")
    metrics |= _stats("episode/masked", [float(e.fault is not None) for e in episodes])
    metrics |= _stats("episode/attempts", [float(e.attempts) for e in episodes])
    said = [(key, float(value)) for e in good for key, value in e.info.items() if isinstance(value, int | float)]
    for name in dict.fromkeys(key for key, _ in said):
        metrics |= _stats(f"info/{name}", [value for key, value in said if key == name])
    metrics["tokens/prompt"] = sum(len(call.prompt_ids) for e in good for call in e.calls)
    metrics["tokens/sampled"] = sum(sum(call.response_mask) for e in good for call in e.calls)
    return metrics


def _fault_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`faults/total`, and `faults/<boundary>` for those that occurred; retried ones count."""
    boundaries = Counter(fault["boundary"] for episode in episodes for fault in episode.faults)
    results = [result for episode in episodes for call in episode.calls for result in call.tool_results]
    retried = {"faults/retried_tools": sum(result.attempts > 1 for result in results)} if results else {}
    return {"faults/total": boundaries.total()} | {f"faults/{b}": n for b, n in sorted(boundaries.items())} | retried


def _agent_metrics(calls: Sequence[Call], uses_tools: bool) -> dict[str, float]:
    metrics: dict[str, float] = {"calls": len(calls)}
    metrics |= _stats("reward", [call.reward for call in calls if call.reward is not None], "mean", "min", "max")
    metrics |= _stats("response_length", [float(sum(call.response_mask)) for call in calls], "mean", "max")
    metrics |= _stats("prompt_length", [float(len(call.prompt_ids)) for call in calls], "mean")
    metrics |= _stats("truncated", [float(call.stop_reason == "length") for call in calls])
    metrics |= {"unscored": sum(call.unscored for call in calls)} if calls else {}
    metrics |= _stats("void", [float(_is_void(call)) for call in calls])
    metrics |= _stats("generations", [float(call.generations) for call in calls])
    if uses_tools:
        results = [result for call in calls for result in call.tool_results]
        metrics |= _stats("tool_calls", [float(len(call.tool_results)) for call in calls])
        metrics |= _stats("tool_success", [float(result.ok) for result in results if result.status in RAN])
        metrics |= _stats("invalid_calls", [float(result.status == "invalid") for result in results])
    return metrics


def _loops(good: Sequence[Episode], workflow: Workflow | None) -> set[str]:
    """The nodes that stand in loops."""
    if workflow is not None:
        return {name for loop in workflow.loops.values() for name in loop.nodes}
    return {move.node for e in good for move in (*e.calls, *e.skips) if move.round}


def _flow_metrics(good: Sequence[Episode], agent: str, *, branches: bool, loops: set[str]) -> dict[str, float]:
    moves: list[float] = []
    rounds: dict[tuple[int, int, str], float] = {}
    for number, episode in enumerate(good):
        for move in (*episode.calls, *episode.skips):
            if move.agent != agent:
                continue
            moves.append(float(isinstance(move, Skip)))
            if move.node in loops:
                key = (number, move.turn, move.node)
                moved = 0.0 if isinstance(move, Skip) else move.round + 1.0
                rounds[key] = max(rounds.get(key, 0.0), moved)
    metrics = _stats("skipped", moves) if branches or any(moves) else {}
    return metrics | _stats("rounds", list(rounds.values()))


def _is_void(call: Call) -> bool:
    """It sampled nothing, or what it hands over is blank."""
    return not any(call.response_mask) or not call.text.strip()


def _stats(key: str, values: Sequence[float], *kinds: str) -> dict[str, float]:
    """The mean as `key`, or `key/<kind>` for each kind; nothing of nothing."""
    if not values:
        return {}
    if not kinds:
        return {key: fmean(values)}
    known = {"mean": fmean, "min": min, "max": max}
    return {f"{key}/{kind}": known[kind](values) for kind in kinds}
