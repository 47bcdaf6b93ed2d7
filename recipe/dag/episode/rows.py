"""Episodes to rows, what the trainer learns from.

Invariant: pure. The sampled tokens of a row, their log-probs and what stood before each of them are those of its calls,
merged or not: a merge saves computing a shared prefix twice and changes no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from recipe.dag.episode.record import Call, Episode
from recipe.dag.episode.row import Row


def rows_of(
    episodes: Sequence[Episode],
    *,
    merge: bool = True,
    on_failure: str = "retry",
    train_turns: str = "all",
    silent: bool = False,
    outside_loss: Callable[[Episode], Collection[int]] | None = None,
    unscored: str = "call",
) -> list[Row]:
    """The rows of all policies, frozen ones included, in the order of the episodes and their calls.

    Left out, as `left_out` counts them: episodes that a fault ended (drop_group: with their whole group), calls that
    post_process or a reward function took out, calls without a sampled token, and with train_turns `last` those of
    earlier turns than the last in which the episode sampled anything. A call that no node rewarded counts 0.0. With
    `merge`, a call whose prompt repeats an earlier row of the same episode, agent, policy and node token by token, and
    goes on, joins that row. With `silent`, a call of a turn that is trained on, itself left out and yet rewarded,
    becomes a row without response tokens: credit that chains calls hands its reward on (an unscored one has none).
    `outside_loss`: positions of an episode's calls that stay in their rows and baselines, but not in the policy's loss.
    `unscored`: which other calls go with one that could not be scored (`algorithms.unscored_scope`).
    """
    rows: list[Row] = []
    for episode in _kept(episodes, on_failure):
        unknown = _unknown(episode, unscored)
        open_rows: dict[tuple[str, str, str], Row] = {}
        first = _first_turn(episode, train_turns)
        outside = outside_loss(episode) if outside_loss is not None else ()
        for position, call in enumerate(episode.calls):
            if call.turn < first or position in unknown:
                continue
            row = _row(episode, call, position)
            row.call_learns = (position not in outside,)
            if not call.train or 1 not in call.response_mask:
                if silent and (call.reward or any(call.reward_parts.values())):
                    rows.append(replace(row, response_ids=[], response_mask=[], rollout_log_probs=[], call_ends=(0,)))
                continue
            key = (row.agent, row.policy, row.node)
            earlier = open_rows.get(key) if merge else None
            if earlier is not None and _extends(row, earlier):
                _extend(earlier, row)
            else:
                open_rows[key] = row
                rows.append(row)
    return rows


def left_out(episodes: Sequence[Episode], *, on_failure: str = "retry", train_turns: str = "all") -> dict[str, int]:
    """What rows_of leaves out: `episodes_masked`, and in the other episodes `calls_untrained` (post_process or a
    reward function said so), `calls_empty` (no sampled token) and `calls_earlier` (of a turn before the last)."""
    kept = list(_kept(episodes, on_failure))
    counts = Counter(episodes_masked=len(episodes) - len(kept), calls_untrained=0, calls_empty=0, calls_earlier=0)
    for episode in kept:
        first = _first_turn(episode, train_turns)
        for call in episode.calls:
            if not call.train:
                counts["calls_untrained"] += 1
            elif 1 not in call.response_mask:
                counts["calls_empty"] += 1
            elif call.turn < first:
                counts["calls_earlier"] += 1
    return dict(counts)


def split_row(row: Row) -> list[Row]:
    """One row per call: what rows_of makes without merging."""
    rows, end = [], 0
    calls = zip(
        *(row.call_ends, row.call_rewards, row.call_turns, row.call_rounds, row.call_positions),
        *(row.call_branches, row.call_parts, row.call_learns),
        strict=True,
    )
    for stop, reward, turn, round, position, branch, parts, learns in calls:
        # A call begins with a token of its own; what is masked before it was in its prompt.
        start = row.response_mask.index(1, end)
        rows.append(
            replace(
                row,
                turn=turn,
                prompt_ids=row.prompt_ids + row.response_ids[:start],
                response_ids=row.response_ids[start:stop],
                response_mask=row.response_mask[start:stop],
                rollout_log_probs=row.rollout_log_probs[start:stop],
                reward=reward,
                call_ends=(stop - start,),
                call_rewards=(reward,),
                call_turns=(turn,),
                round=round,
                call_rounds=(round,),
                call_positions=(position,),
                call_branches=(branch,),
                call_parts=(parts,),
                call_learns=(learns,),
            )
        )
        end = stop
    return rows


def _kept(episodes: Iterable[Episode], on_failure: str) -> Iterator[Episode]:
    dropped = {episode.uid for episode in episodes if episode.fault} if on_failure == "drop_group" else set()
    return (episode for episode in episodes if not episode.fault and episode.uid not in dropped)


def _unknown(episode: Episode, scope: str) -> set[int]:
    """Positions of the calls whose worth depends on a call that could not be scored."""
    unscored = [(position, call.agent) for position, call in enumerate(episode.calls) if call.unscored]
    if scope == "episode":
        return set(range(len(episode.calls))) if unscored else set()
    if scope == "call":
        return {position for position, _ in unscored}
    # up to which position each agent's calls are out: the last unscored one, or the end
    last = {agent: position if scope == "earlier" else len(episode.calls) for position, agent in unscored}
    return {position for position, call in enumerate(episode.calls) if position <= last.get(call.agent, -1)}


def _first_turn(episode: Episode, train_turns: str) -> int:
    """From which on its calls are trained."""
    return 0 if train_turns == "all" else max((c.turn for c in episode.calls if 1 in c.response_mask), default=0)


def _row(episode: Episode, call: Call, position: int) -> Row:
    return Row(
        uid=episode.uid,
        episode=episode.index,
        agent=call.agent,
        node=call.node,
        turn=call.turn,
        policy=call.policy,
        weight_version=call.weight_version,
        prompt_ids=list(call.prompt_ids),
        response_ids=list(call.response_ids),
        response_mask=list(call.response_mask),
        rollout_log_probs=list(call.rollout_log_probs),
        reward=call.reward or 0.0,
        call_turns=(call.turn,),
        temperature=call.temperature,
        round=call.round,
        call_rounds=(call.round,),
        call_positions=(position,),
        role=call.role,
        call_branches=(call.branch,),
        call_parts=(dict(call.reward_parts),),
    )


def _extends(later: Row, earlier: Row) -> bool:
    if (later.weight_version, later.temperature) != (earlier.weight_version, earlier.temperature):
        return False
    cut, end = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.response_ids)
    return later.prompt_ids[:cut] == earlier.prompt_ids and later.prompt_ids[cut:end] == earlier.response_ids


def _extend(row: Row, later: Row) -> None:
    gap = later.prompt_ids[len(row.prompt_ids) + len(row.response_ids) :]
    row.response_ids += gap + later.response_ids
    row.response_mask += [0] * len(gap) + later.response_mask
    row.rollout_log_probs += [0.0] * len(gap) + later.rollout_log_probs
    row.reward += later.reward
    row.call_ends += (len(row.response_ids),)
    row.call_rewards += (later.reward,)
    row.call_turns += (later.turn,)
    row.call_rounds += (later.round,)
    row.call_positions += later.call_positions
    row.call_branches += later.call_branches
    row.call_parts += later.call_parts
    row.call_learns += later.call_learns
