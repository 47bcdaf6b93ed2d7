"""Why verdicts could not be read, and what to do if none of a step could.

Invariant: pure. Only what a coach wrote is counted: a server's fault is no unreadable verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from recipe.dag.coach.reward import coach_scores
from recipe.dag.core.paths import split_ref
from recipe.dag.episode.failure import NO_ROOM
from recipe.dag.types.markup import after_thinking, ends_in_thought
from recipe.dag.types.record import Call, Episode
from recipe.dag.workflow.agent_schema import Agent
from recipe.dag.workflow.node import Node
from recipe.dag.workflow.schema import Workflow

_PREFIX = "unreadable: "
IN_THOUGHT, CUT, EMPTY, NO_SCORE = "cut off in its thought", "cut off before its score", "empty", "it states no score"


def unreadable(text: str, call: Call) -> str:
    """Return `failed` of a verdict without a score. `text`: the latest answer of `call`."""
    is_cut = call.stop_reason == "length"
    if is_cut and ends_in_thought(text, opened=call.opened_thinking):
        return _PREFIX + IN_THOUGHT
    answer = after_thinking(text, opened=call.opened_thinking).strip()
    return _PREFIX + (CUT if is_cut else NO_SCORE if answer else EMPTY)


def coach_nodes(workflow: Workflow) -> Iterator[Node]:
    for node in workflow.reward_nodes:
        if node.function is not None and split_ref(node.function)[1] == coach_scores.__name__:
            yield node


def silent_coach(episodes: Iterable[Episode], workflow: Workflow) -> str:
    """Return one line about a coach that answered in these episodes, but gave no verdict that can be read; empty if
    there is none."""
    coaches = {coach for node in coach_nodes(workflow) for coach in node.args.get("coaches") or ()}
    calls = [call for episode in episodes for call in episode.all_calls if call.node in coaches]
    for agent in (agent for agent in workflow.agents if any(call.agent == agent.name for call in calls)):
        own = [call for call in calls if call.agent == agent.name]
        reasons = Counter(reason for call in own if (reason := _reason(call)))
        if reasons and all("failed" in call.parsed for call in own):
            return _describe(agent, reasons, own)
    return ""


def _reason(call: Call) -> str:
    """Return why the verdict could not be read; empty if it could, or if something else failed."""
    failed = str(call.parsed.get("failed", ""))
    return failed.removeprefix(_PREFIX) if failed.startswith(_PREFIX) or failed == NO_ROOM else ""


def _describe(agent: Agent, reasons: Counter[str], calls: Sequence[Call]) -> str:
    counts = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    key, sampling = f"workflow.agents.{agent.name}.sampling", agent.sampling
    thinking = f"thinking_tokens (now {sampling.thinking_tokens})"
    advice = {
        NO_ROOM: f"raise policies.{agent.policy}.config.rollout.max_model_len, or shorten its prompt with `keep`",
        IN_THOUGHT: f"raise {key}.{thinking}, or take a model that does not think",
        CUT: f"raise {key}.max_tokens (now {sampling.max_tokens}) or, for a model that thinks, {thinking}",
    }
    most = reasons.most_common(1)[0][0]
    remedy = advice.get(most, "let its template end with the lines that it must write, or take a stronger model")
    if most in (IN_THOUGHT, CUT):
        sampled = max((sum(call.response_mask) for call in calls), default=0)
        if 0 < sampled < sampling.max_tokens:
            remedy = f"its context ends there: {advice[NO_ROOM]}"
    return (
        f"coach {agent.name}: none of its {sum(reasons.values())} verdicts can be read, so what it judges has no score "
        f"and cannot be trained: {counts}; {remedy}; their texts are in episodes.jsonl"
    )
