"""`verl-dag replay`: recorded episodes of a run, played again with a change.

Invariant: by default the policies have the weights that they had when the episode was recorded; no other weights answer
unless an option names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.dag.app.evaluate import find_checkpoint
from recipe.dag.app.reopened import Reopened, Weights, read_launch, reopen, weights_at, weights_of
from recipe.dag.core.errors import UserError
from recipe.dag.core.tasks import together
from recipe.dag.episode.fork import Slot, key_of, slot_at
from recipe.dag.episode.replay import Change, Recorded, play_effect
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.report.pass_at_k import SOLVED
from recipe.dag.report.what_if import effect_record
from recipe.dag.types.record import Episode

_ADVICE = "pass --episode STEP/UID/INDEX"


@dataclass(frozen=True, slots=True)
class Question:
    """An episode, the call at which it forks, and the weights that answer."""

    recorded: Recorded
    at: Slot
    weights: Weights


def ask(folder: Path, questions: Sequence[Question], change: Change, n: int) -> list[dict[str, Any]]:
    """Return the effect of the change in each of the questions, as JSON. Raises UserError."""
    swapped, at = change.text.partition("@")[::2] if change.kind == "swap" else ("", "")
    others = weights_at(folder, _step(change.text, at)) if at else None
    if change.kind == "swap" and swapped not in (known := read_launch(folder)[1].policies):
        raise UserError(f"--swap {change.agent}={change.text}: no such policy; the run's: {', '.join(known)}")

    async def work(policies: Reopened) -> list[dict[str, Any]]:
        async def one(question: Question) -> dict[str, Any]:
            recorded, weights = question.recorded, question.weights
            bound = 0 if recorded.validate else recorded.step - 1
            changed = None
            if change.kind == "swap":
                name = policies.names[others if at else weights, swapped]
                changed = policies.runner(weights, swapped={change.agent: name}, bound=bound)
            effect = await play_effect(policies.runner(weights, bound=bound), recorded, question.at, change, n, changed)
            return effect_record(effect, "start" if weights is None else weights.name)

        return await together(map(one, questions))

    return reopen(folder, [question.weights for question in questions] + ([others] if at else []), work)


def _step(option: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--swap: {option}: write POLICY@STEP, such as main@0 for the start of the run")
    return int(text)


def questions_of(
    folder: Path,
    records: Sequence[dict[str, Any]],
    episodes: Iterable[str],
    at: str | None,
    checkpoint: Path | None = None,
    agent: str = "",
) -> list[Question]:
    """Return what to ask of a run's `records`.

    episodes: STEP/UID/INDEX; none: a problem of the validation at the first, a middle and the last step
    at: the call; by default each of an episode, or the first of `agent`
    checkpoint: a checkpoint whose weights answer; None: those of the record
    agent: the one that is silent or swapped from there on

    Raises UserError for what the records lack, for a fork, and for weights that the run did not keep.
    """
    chosen = [_find(records, address) for address in episodes] or _same_problem(folder, records)
    questions = []
    for record in chosen:
        validate = record.get("split", "train") == "validation"
        recorded = Recorded(episode_from(record), record["step"], validate)
        weights = find_checkpoint(checkpoint) if checkpoint else weights_at(folder, record["step"] - (not validate))
        questions += [Question(recorded, slot, weights) for slot in _places(recorded.episode, at, agent)]
    return questions


def _places(episode: Episode, at: str | None, agent: str) -> list[Slot]:
    """Return the calls to fork at. Raises UserError if the agent has no call from there on."""
    if at is None and not agent:
        return list(dict.fromkeys(key_of(call)[:3] for call in episode.calls))
    first = slot_at(episode, at) if at is not None else key_of(episode.calls[0])[:3]
    slots = [key_of(call)[:3] for call in episode.calls]
    own = [slot for slot, call in zip(slots, episode.calls, strict=True) if agent in ("", call.agent)]
    later = [slot for slot in own if slots.index(slot) >= slots.index(first)]
    if not later:
        agents = ", ".join(dict.fromkeys(call.agent for call in episode.calls))
        where = f"from {at} on" if at is not None else f"in {episode.uid}/{episode.index}"
        raise UserError(f"agent {agent}: has no call {where}; the episode's agents: {agents}")
    return [first if at is not None else later[0]]


def _find(records: Iterable[dict[str, Any]], address: str) -> dict[str, Any]:
    step, _, rest = address.partition("/")
    uid, _, index = rest.rpartition("/")
    if not (step.isdecimal() and uid and index.isdecimal()):
        raise UserError(f"--episode {address}: write STEP/UID/INDEX, such as 10/val-3/0")
    wanted = (int(step), uid, int(index))
    for record in records:
        if (record.get("step"), record["uid"], record["index"]) == wanted:
            if fork := record.get("forked"):  # the seeds of what it repeats are the other's
                place = f"{step}/{uid}/{fork['from']} --at {fork['at']}"
                raise UserError(f"--episode {address}: repeats another up to {fork['at']}; pass --episode {place}")
            return record
    raise UserError(f"--episode {address}: no recorded episode; verl-dag trace RUN --list --step {step} lists them")


def _same_problem(folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the episodes of one validation problem at the first, a middle and the last step whose weights are kept:
    of the first problem that was not solved at the start and is at the end, or of any."""
    kept = {0, *weights_of(folder)}
    steps: dict[int, dict[str, dict[str, Any]]] = {}
    for record in records:
        if record.get("split") == "validation" and record["step"] in kept and record["index"] == 0:
            steps.setdefault(record["step"], {})[record["uid"]] = record
    if not steps:
        listed = ", ".join(map(str, sorted(kept)))
        raise UserError(f"{folder}: no validation was recorded at a step whose weights are kept ({listed}); {_ADVICE}")
    order = sorted(steps)
    # a third of the way: learning is fastest early
    chosen = dict.fromkeys([order[0], order[len(order) // 3], order[-1]])
    shared = [uid for uid in steps[order[0]] if all(uid in steps[step] for step in chosen)]
    if not shared:
        raise UserError(f"{folder}: no problem is recorded in steps {', '.join(map(str, chosen))}; {_ADVICE}")

    def learned(uid: str) -> bool:
        first, last = (steps[step][uid].get("outcome") or 0.0 for step in (order[0], order[-1]))
        return first < SOLVED <= last

    uid = next(filter(learned, shared), shared[0])
    return [steps[step][uid] for step in chosen]
