"""Turns episodes into rows, the training sequences.

Invariant: pure. Each sampled token of a row has the log-prob and the preceding tokens that it had in its call, merged
or not: merging saves computing a shared prefix twice and changes no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from recipe.dag.types.record import Call, Episode
from recipe.dag.types.row import Candidate, Row, RowCall


def rows_of(
    episodes: Sequence[Episode],
    *,
    merge: bool = True,
    on_failure: str = "retry",
    train_turns: str = "all",
    keep_unsampled_rewarded: bool = False,
    outside_loss: Callable[[Episode], Collection[int]] | None = None,
    unscored: str = "call",
) -> list[Row]:
    """Return the rows of all policies, including frozen ones, in the order of the episodes and their calls; the
    candidates that were not kept come after the calls of their episode, each as a row by itself, without a reward.

    Dropped are: episodes that a fault ended (with drop_group: their whole group, unless they are forks); calls that a
    hook or a reward function excluded from training; calls of API policies; calls without a sampled token; with
    train_turns `last`, calls before the last turn in which the episode sampled a token. The reward of a call that no
    node rewarded is 0.0.

    merge: a call whose prompt begins with an earlier row of the same episode and policy, token by token, joins that
        row, whichever agents they are of; of several such rows, the latest of the longest.
    keep_unsampled_rewarded: a call that would be dropped but has a reward becomes a row without response tokens, since
        credit that chains calls propagates its reward.
    outside_loss: returns the positions in `Episode.all_calls` of the calls that count in baselines, but not in the
        policy's loss.
    unscored: which calls are dropped together with one that could not be scored (`Algorithm.unscored_scope`). With
        `link`, none is: the call itself stays, outside the policy's loss.
    """
    rows: list[Row] = []
    for episode in _trained_episodes(episodes, on_failure):
        first_turn, unscored_calls = _first_turn(episode, train_turns), _unscored_calls(episode, unscored)
        excluded = outside_loss(episode) if outside_loss is not None else ()
        open_rows: list[Row] = []
        steps = _steps(episode.calls)
        for position, call in enumerate(episode.calls):
            if call.turn < first_turn or position in unscored_calls:
                continue
            is_link = call.unscored  # in the other scopes, unscored calls have been dropped above
            learns = position not in excluded and not is_link
            row = _row(episode, call, position, step=steps[position], learns=learns)
            if not (call.train or is_link) or call.usage is not None or 1 not in call.response_mask:
                # The parts may be rewarded even if they add up to 0.
                if keep_unsampled_rewarded and (call.reward or is_link or any(call.reward_parts.values())):
                    rows.append(row.without_tokens())
                continue
            earlier = [other for other in reversed(open_rows) if _extends(row, other)]
            if earlier:
                _extend(max(earlier, key=lambda other: len(other.prompt_ids) + len(other.response_ids)), row)
                continue
            rows.append(row)
            if merge:
                open_rows.append(row)
        rows += _dropped_rows(episode, first_turn, excluded, unscored_calls)
    return rows


def _dropped_rows(
    episode: Episode, first_turn: int, excluded: Collection[int], unscored_calls: Collection[int]
) -> Iterator[Row]:
    """Yield the rows of the candidates that were not kept. Calls that judged them are never trained on, nor are those
    of a kept one that is left out: without it, only what was worse than it would be learned from."""
    left_out = {_slot(c) for k, c in enumerate(episode.calls) if c.unscored or k in unscored_calls}
    for position, call in enumerate(episode.dropped, len(episode.calls)):
        is_scored = call.candidates > 0 and call.score is not None and _slot(call) not in left_out
        if is_scored and call.train and call.usage is None and 1 in call.response_mask and call.turn >= first_turn:
            # it has no return, so the discount's step is never read
            yield _row(episode, call, position, step=call.turn, learns=position not in excluded)


def _steps(calls: Sequence[Call]) -> list[int]:
    """Return how many turns and rounds lie between each call and the start, for its agent: also those in which the
    agent was skipped, and those whose calls are dropped. Otherwise discounts would depend on which calls are rows."""
    steps: list[int] = []
    last: dict[str, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for call in calls:
        turn, round_index, step = last[call.agent]
        if call.turn > turn:
            step += call.turn - turn + call.round
        elif call.round != round_index:  # a lower one: behind the loop, or in the next one
            step += max(call.round - round_index, 1)
        last[call.agent] = call.turn, call.round, step
        steps.append(step)
    return steps


def _slot(call: Call) -> tuple[str, int, int]:
    return call.node, call.turn, call.round


def _candidate(episode: Episode, call: Call, position: int) -> Candidate | None:
    if not call.candidates:
        return None
    scores = tuple(sibling.score for sibling in episode.siblings_of(call))
    return Candidate(call.candidate or 0, scores, call.parent_score, kept=position < len(episode.calls))


def _trained_episodes(episodes: Sequence[Episode], on_failure: str) -> Iterator[Episode]:
    failed = (episode.uid for episode in episodes if episode.fault and not episode.forked)
    dropped = set(failed) if on_failure == "drop_group" else set()
    return (episode for episode in episodes if not episode.fault and episode.uid not in dropped)


def left_out_unscored(episode: Episode, scope: str, trained: Collection[str]) -> set[int]:
    """Return the positions of the calls of `trained` policies that are left out of the loss because they, or calls that
    their return depends on, could not be scored."""
    calls = episode.calls
    left_out = _unscored_calls(episode, "call" if scope == "link" else scope)
    return {k for k in left_out if calls[k].policy in trained and 1 in calls[k].response_mask}


def _unscored_calls(episode: Episode, scope: str) -> set[int]:
    """Return the positions of the calls whose return depends on a call that could not be scored."""
    unscored = [(position, call.agent) for position, call in enumerate(episode.calls) if call.unscored]
    if scope == "episode":
        return set(range(len(episode.calls))) if unscored else set()
    if scope == "link":
        return set()
    if scope == "call":
        return {position for position, _ in unscored}
    # The position up to which each agent's calls are dropped: its last unscored call, or the end of the episode.
    last = {agent: position if scope == "earlier" else len(episode.calls) for position, agent in unscored}
    return {position for position, call in enumerate(episode.calls) if position <= last.get(call.agent, -1)}


def _first_turn(episode: Episode, train_turns: str) -> int:
    """Return the first turn whose calls are trained on."""
    return 0 if train_turns == "all" else max((c.turn for c in episode.calls if 1 in c.response_mask), default=0)


def _row(episode: Episode, call: Call, position: int, *, step: int, learns: bool) -> Row:
    recorded = RowCall(
        agent=call.agent,
        role=call.role or call.agent,
        node=call.node,
        end=len(call.response_ids),
        reward=call.reward or 0.0,
        turn=call.turn,
        round=call.round,
        position=position,
        step=step,
        branch=call.branch,
        parts=dict(call.reward_parts),
        learns=learns,
        unscored=call.unscored,
        candidate=_candidate(episode, call, position),
    )
    return Row(
        uid=episode.uid,
        episode=episode.index,
        trunk=episode.trunk,
        policy=call.policy,
        weight_version=call.weight_version,
        prompt_ids=list(call.prompt_ids),
        response_ids=list(call.response_ids),
        response_mask=list(call.response_mask),
        rollout_log_probs=list(call.rollout_log_probs),
        calls=(recorded,),
        temperature=call.temperature,
    )


def _extends(later: Row, earlier: Row) -> bool:
    # One row has one weight version and one temperature, since both enter its importance ratios.
    if any(getattr(later, key) != getattr(earlier, key) for key in ("policy", "weight_version", "temperature")):
        return False
    cut, end = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.response_ids)
    # the last token first: comparing whole prompts of unrelated rows would cost much more
    if end > len(later.prompt_ids) or later.prompt_ids[end - 1] != earlier.response_ids[-1]:
        return False
    return later.prompt_ids[:cut] == earlier.prompt_ids and later.prompt_ids[cut:end] == earlier.response_ids


def _extend(row: Row, later: Row) -> None:
    gap = later.prompt_ids[len(row.prompt_ids) + len(row.response_ids) :]
    row.response_ids += gap + later.response_ids
    row.response_mask += [0] * len(gap) + later.response_mask
    row.rollout_log_probs += [0.0] * len(gap) + later.rollout_log_probs
    shift = len(row.response_ids) - len(later.response_ids)
    row.calls += tuple(replace(call, end=call.end + shift) for call in later.calls)
