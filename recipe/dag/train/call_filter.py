"""Which calls the policy's loss leaves out, and what overlong ones pay (DAPO, arXiv 2503.14476; SimpleTIR, arXiv
2509.02479).

Invariant: a call that is left out stays in its row: it counts in baselines and groups, critics learn from it, and
HAPPO's factors follow it. Pure, but for `penalise_overlong`, which pays the episodes it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from recipe.dag.episode.record import Call, Episode
from recipe.dag.episode.reward import pay
from recipe.dag.reward.outcome import answer_of
from recipe.dag.workflow.blocks import OVERLONG
from recipe.dag.workflow.schema import Workflow


def outside_loss(episode: Episode, workflow: Workflow) -> set[int]:
    """Return the positions of the episode's calls that its workflow's algorithm leaves out of the loss: with
    `overlong.mask` those that a limit cut off; with `drop_void_turns` all calls of an agent one of whose turns was
    void."""
    algorithm, positions = workflow.algorithm, set()
    if algorithm.overlong is not None and algorithm.overlong.mask:
        positions |= {place for place, call in enumerate(episode.calls) if is_truncated(call)}
    if algorithm.drop_void_turns:
        agents = {agent.name: agent for agent in workflow.agents if agent.tools}
        void = {
            call.agent
            for call in episode.calls
            if call.agent in agents and is_void(call, loops=agents[call.agent].tool_loop is not None)
        }
        positions |= {place for place, call in enumerate(episode.calls) if call.agent in void}
    return positions


def is_truncated(call: Call) -> bool:
    """Whether a limit of tokens or generations ended the call."""
    return call.stop_reason in ("length", "max_generations")


def is_void(call: Call, *, loops: bool) -> bool:
    """Whether a turn of the model gave neither code nor an answer. `loops`: the engine runs the tools, so that every
    generation but the last one called some; else the agent's hook does, after the only one."""
    if 1 not in call.response_mask:  # its prompt did not fit
        return False
    acted = call.ended_in_tool_call if loops else any(result.status != "invalid" for result in call.tool_results)
    return not acted and not (answer_of(call) or "").strip()


def penalise_overlong(episodes: Sequence[Episode], workflow: Workflow) -> None:
    """Pay each scored call of a trained policy what its length costs, as the part `overlong` of its reward."""
    options = workflow.algorithm.overlong
    if options is None or options.penalty is None:
        return
    limits = {agent.name: agent.sampling.max_tokens for agent in workflow.agents}
    trained = set(workflow.trained_policies())
    for call in (call for episode in episodes if episode.fault is None for call in episode.calls):
        if call.reward is not None and call.policy in trained:
            over = overlong_share(call, limits[call.agent], options.penalty.buffer)
            if over > 0.0:
                pay(call, OVERLONG, -options.penalty.weight * over)


def overlong_share(call: Call, limit: int, buffer: int) -> float:
    """Return how far the call's longest generation reaches into the last `buffer` of `limit` tokens, from 0 (not at
    all) to 1 (up to the limit, or cut off by another limit of length)."""
    if call.stop_reason == "length" and any(call.response_mask):
        return 1.0
    longest = max((len(list(run)) for sampled, run in groupby(call.response_mask) if sampled), default=0)
    return min(max((longest - (limit - buffer)) / buffer, 0.0), 1.0)
