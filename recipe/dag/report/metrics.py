"""Metrics of one step's episodes.

Invariant: a key is present only if something was measured. 0 never means "nothing to count": accuracy is absent if no
episode was graded, a reward if no call was scored, tool rates if no tool was called. Counts of events that did not
occur (faults, masked episodes, retried tools) are true zeros.

Faults are counted over all episodes; everything else over the episodes without a fault, which can be trained on. Each
accuracy comes with an `accuracy_all`, in which an episode with a fault counts as not solved, so that no fault can raise
it. Forks (`counterfactual`) add to what was spent and failed, and are in no mean: a long episode has more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from recipe.dag.episode.rows import left_out_unscored
from recipe.dag.report.pass_at_k import (
    atleast_k_at_n,
    average_at_n,
    majority_at_n,
    outcomes_by_problem,
    pass_at_k,
)
from recipe.dag.report.tools import tool_rates
from recipe.dag.types.record import Call, Episode, Skip
from recipe.dag.types.usage import usage_by_policy
from recipe.dag.workflow.schema import Workflow

RAN = ("success", "failed", "timeout")
"""Tool statuses of calls whose code ran; `invalid` calls did not run, and a `fault` is one of the infrastructure."""

COACH = "coach/"
"""Beginning of the keys of `episode.info` that coaches set (recipe/dag/coach/reward.py)."""

CACHED = "/cached_tokens_share"
"""End of the keys of what a prefix cache had, by node and by policy."""

ENDS = ("done", "length", "turns")
"""Reasons for which an episode can end."""


def rollout_metrics(
    episodes: Sequence[Episode],
    workflow: Workflow | None = None,
    *,
    versions: Mapping[str, int] | None = None,
    prefix: str = "",
) -> dict[str, float]:
    """Return flat metrics, with `prefix` before each key. Lengths in tokens, times in seconds, rates in [0, 1].

    Forks count in `episode/forks`, which is absent without any, `tokens/...`, `tool/...`, `policy/...`, faults and the
    shares of episodes with one, and cached tokens, without the calls that they repeat (their tools run again, so
    `tool/...` has these, too). Everything else is of the episodes that they were forked from.

    `info/<key>` is the mean of the numbers that reward nodes and envs put into `episode.info`. Numbers of coaches are
    not among these: `coach/<agent>/mean` is the mean score of all verdicts on the agent, from 0 to 1, `count` their
    number, and `failed` the number of calls without a readable one.

    With `workflow`, and outside validation, `left_out/calls_unscored` counts the calls of trained policies that are
    left out of the loss because they, or calls that their return depends on, could not be scored.

    With `workflow`, agents are in its order and agents that were never called have `calls` 0. Tool keys appear for
    agents that declare tools, `skipped` (fraction of skipped calls) if a node has a condition, and `rounds` (mean per
    turn, 0 if skipped) for agents in loops. Without `workflow`, these keys appear if the episodes have such events.

    `tool/<name>/...` and `agent/<name>/tool/<tool>/...` are those of `tool_rates`; the former are over all episodes,
    since the tools of an episode with a fault ran, too.

    `policy/<name>/api/...` are sums over all episodes of what an API policy consumed: requests, retries, prompt_tokens,
    completion_tokens and, with a price, cost.

    `node/<id>/cached_tokens_share` and `policy/<name>/cached_tokens_share` are of the tokens of the calls' prompts, as
    far as the server says how many it had cached.

    versions: current weight version by policy; adds `policy/<name>/staleness`, the mean number of updates by which the
        calls' weights lag behind
    """
    own = [episode for episode in episodes if episode.forked is None]
    good = [episode for episode in own if episode.fault is None]
    calls = [call for episode in good for call in episode.calls]
    sampled = [call for e in episodes if e.fault is None for call in e.all_calls if not call.replayed]
    metrics = _episode_metrics(own, good) | _fault_metrics(episodes)
    metrics |= {"episode/forks": len(episodes) - len(own)} if len(episodes) > len(own) else {}
    metrics["tokens/prompt"] = sum(len(call.prompt_ids) for call in sampled)
    metrics["tokens/sampled"] = sum(sum(call.response_mask) for call in sampled)
    names = [agent.name for agent in workflow.agents] if workflow else list(dict.fromkeys(call.agent for call in calls))
    with_tools = {agent.name for agent in workflow.agents if agent.tools} if workflow else set()
    branches = workflow is not None and any(node.when for node in workflow.nodes)
    loops = _loops(good, workflow)
    for name in names:
        made = [call for call in calls if call.agent == name]
        agent_metrics = _agent_metrics(made, name in with_tools or any(call.tool_results for call in made))
        agent_metrics |= _candidate_metrics(good, name)
        agent_metrics |= tool_rates(made)
        agent_metrics |= _flow_metrics(good, name, branches=branches, loops=loops)
        metrics |= {f"agent/{name}/{key}": value for key, value in agent_metrics.items()}
    metrics |= _coach_metrics(good)
    if workflow is not None and not prefix:
        scope, trained = workflow.algorithm.unscored_scope, set(workflow.trained_policies())
        metrics["left_out/calls_unscored"] = sum(len(left_out_unscored(e, scope, trained)) for e in good)
    metrics |= tool_rates(call for episode in episodes for call in episode.all_calls)
    for policy, usage in usage_by_policy(episodes).items():
        metrics |= {f"policy/{policy}/api/{name}": value for name, value in usage.items()}
    metrics |= _cached_shares(sampled)
    for policy, version in (versions or {}).items():
        lags = [float(version - call.weight_version) for call in sampled if call.policy == policy]
        metrics |= _stats(f"policy/{policy}/staleness", lags)
    return {prefix + key: float(value) for key, value in metrics.items()}


def validation_metrics(episodes: Sequence[Episode], workflow: Workflow | None = None) -> dict[str, float]:
    """Return `rollout_metrics` under `val/`, plus accuracy per problem.

    `val/accuracy` is the mean over problems of the mean of their episodes, also per data source if there are several.
    `val/accuracy_all` includes episodes with a fault. With n > 1 episodes per problem, `val/pass@<k>` and
    `val/atleast_<k>@<n>` are added for k = 1, 2, 4, ... and n, and `val/majority@<n>`.
    """
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
    metrics |= {f"val/pass@{k}": pass_at_k(problems, k) for k in ks}
    metrics |= {f"val/atleast_{k}@{n}": atleast_k_at_n(problems, k, n) for k in ks}
    return metrics | ({f"val/majority@{n}": majority_at_n(problems, n)} if ks else {})


def _episode_metrics(episodes: Sequence[Episode], good: Sequence[Episode]) -> dict[str, float]:
    metrics: dict[str, float] = {"episode/count": len(episodes)}
    graded = [e.outcome for e in good if e.outcome is not None]
    metrics |= _stats("episode/accuracy", graded)
    # only if anything was graded: in a workflow without grading, a lost episode says nothing about accuracy
    metrics |= _stats("episode/accuracy_all", graded + [0.0] * (len(episodes) - len(good)) if graded else [])
    rewards = [[call.reward for call in e.calls if call.reward is not None] for e in good]
    metrics |= _stats("episode/reward", [sum(own) for own in rewards if own])
    metrics |= _stats("episode/turns", [float(e.turns) for e in good])
    if ended := [e.ended_by for e in good if e.ended_by]:
        shares = {reason: ended.count(reason) / len(ended) for reason in ENDS}
        metrics |= {f"episode/ended_by/{reason}": share for reason, share in shares.items()}
    metrics |= _stats("episode/seconds", [e.seconds for e in good], "mean", "max")
    infos: dict[str, list[float]] = {}
    for key, value in (item for e in good for item in e.info.items()):
        if isinstance(value, int | float) and not key.startswith(COACH):
            infos.setdefault(key, []).append(float(value))
    for key, values in infos.items():
        metrics |= _stats(f"info/{key}", values)
    return metrics


def _cached_shares(calls: Iterable[Call]) -> dict[str, float]:
    tokens: dict[str, tuple[int, int]] = {}
    for call in calls:
        if call.cached_tokens is not None:
            for name in (f"node/{call.node}", f"policy/{call.policy}"):
                cached, total = tokens.get(name, (0, 0))
                tokens[name] = (cached + call.cached_tokens, total + len(call.prompt_ids))
    return {name + CACHED: cached / max(total, 1) for name, (cached, total) in tokens.items()}


def _coach_metrics(good: Sequence[Episode]) -> dict[str, float]:
    """Return `coach/<agent>/count` and `failed`, summed over the episodes, and the `mean` over all their verdicts."""
    metrics: dict[str, float] = {}
    totals: dict[str, float] = {}
    for episode in good:
        for key, value in episode.info.items():
            agent, _, kind = key.removeprefix(COACH).rpartition("/")
            if not key.startswith(COACH) or not isinstance(value, int | float):
                continue
            if kind == "mean":
                totals[agent] = totals.get(agent, 0.0) + value * episode.info.get(f"{COACH}{agent}/count", 1)
            else:
                metrics[key] = metrics.get(key, 0.0) + value
    for agent, total in totals.items():
        metrics[f"{COACH}{agent}/mean"] = total / (metrics.get(f"{COACH}{agent}/count") or 1.0)
    return metrics


def _fault_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `faults/total`, and `faults/<boundary>` for boundaries with a fault; retried faults count. Also the share
    of episodes with a fault, and the mean number of attempts."""
    boundaries = Counter(fault["boundary"] for episode in episodes for fault in episode.faults)
    results = [result for episode in episodes for call in episode.all_calls for result in call.tool_results]
    metrics: dict[str, float] = {"faults/total": boundaries.total()}
    metrics |= {f"faults/{boundary}": count for boundary, count in sorted(boundaries.items())}
    metrics |= _stats("episode/masked", [float(e.fault is not None) for e in episodes])
    metrics |= _stats("episode/attempts", [float(e.attempts) for e in episodes])
    return metrics | ({"faults/retried_tools": sum(result.attempts > 1 for result in results)} if results else {})


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
        metrics |= _stats("tool_rate", [float(bool(call.tool_results)) for call in calls])
        metrics |= _stats("tool_calls", [float(len(call.tool_results)) for call in calls])
        metrics |= _stats("tool_success", [float(result.ok) for result in results if result.status in RAN])
        metrics |= _stats("invalid_calls", [float(result.status == "invalid") for result in results])
        metrics |= (
            {"ended_by_invalid_calls": sum(call.stop_reason == "invalid_calls" for call in calls)} if calls else {}
        )
    return metrics


def _candidate_metrics(good: Sequence[Episode], agent: str) -> dict[str, float]:
    """Return the mean score of the agent's candidates and of those that were kept, the mean difference between the best
    and the worst of one prompt, and how many have no score."""
    kept = [(e, call) for e in good for call in e.calls_of(agent) if call.candidates]
    siblings = [[other.score for other in e.siblings_of(call)] for e, call in kept]
    scores = [[score for score in own if score is not None] for own in siblings]
    metrics = _stats("candidates/score", [score for own in scores for score in own])
    metrics |= _stats("candidates/kept", [call.score for _, call in kept if call.score is not None])
    metrics |= _stats("candidates/spread", [max(own) - min(own) for own in scores if own])
    unscored = sum(score is None for own in siblings for score in own)
    return metrics | ({"candidates/unscored": unscored} if kept else {})


def _loops(good: Sequence[Episode], workflow: Workflow | None) -> set[str]:
    """Return the names of the nodes in loops."""
    if workflow is not None:
        return {name for loop in workflow.loops.values() for name in loop.nodes}
    return {move.node for e in good for move in (*e.calls, *e.skips) if move.round}


def _flow_metrics(good: Sequence[Episode], agent: str, *, branches: bool, loops: set[str]) -> dict[str, float]:
    """Return the agent's fraction of skipped calls, and its rounds per turn."""
    skipped: list[float] = []
    rounds: dict[tuple[int, int, str], float] = {}
    for number, episode in enumerate(good):
        for move in (*episode.calls, *episode.skips):
            if move.agent != agent:
                continue
            skipped.append(float(isinstance(move, Skip)))
            if move.node in loops:
                # rounds count from 0, so the highest one of a node's calls in a turn, plus 1, is their number
                key = (number, move.turn, move.node)
                played = 0.0 if isinstance(move, Skip) else move.round + 1.0
                rounds[key] = max(rounds.get(key, 0.0), played)
    metrics = _stats("skipped", skipped) if branches or any(skipped) else {}
    return metrics | _stats("rounds", list(rounds.values()))


def _is_void(call: Call) -> bool:
    """Return True if the call sampled nothing, or if its text is blank. A call of a chat API has no tokens."""
    return (call.usage is None and not any(call.response_mask)) or not call.text.strip()


def _stats(key: str, values: Sequence[float], *kinds: str) -> dict[str, float]:
    """Return the mean as `key`, or one `key/<kind>` for each of `kinds`; {} without values."""
    if not values:
        return {}
    if not kinds:
        return {key: fmean(values)}
    functions = {"mean": fmean, "min": min, "max": max}
    return {f"{key}/{kind}": functions[kind](values) for kind in kinds}
