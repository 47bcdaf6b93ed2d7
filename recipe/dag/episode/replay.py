"""Recorded episodes played again with one change, beside the same episodes without it.

Invariant: the n-th continuation with the change and the n-th without it have the same seeds, and the first of each has
those of the record, so that the two differ by the change alone where the servers repeat their answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from recipe.dag.core.tasks import together
from recipe.dag.episode.failure import TooManyFailed
from recipe.dag.episode.fork import Fork, Key, Slot, key_of, recorded_calls
from recipe.dag.episode.graph import EpisodeGraph
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.types.record import Call, Episode

Kind = Literal["none", "silence", "say", "swap"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode and what its seeds were made of."""

    episode: Episode
    step: int
    validate: bool


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the fork on."""

    kind: Kind = "none"
    """none: the call at the fork is sampled again, and what reacts to it. swap: another policy answers."""
    agent: str = ""
    """silence, swap: all its calls from the fork on; of a silence "": the call at the fork alone."""
    text: str = ""
    """say: the call's answer. swap: the policy."""

    def fork(self, graph: EpisodeGraph, recorded: Recorded, at: Slot, draw: int) -> Fork:
        """Return the fork of one continuation."""
        calls, before = recorded_calls(graph, recorded.episode, self._places(recorded.episode, at))
        silent = frozenset([at] if self.kind == "silence" and not self.agent else ())
        agents = frozenset([self.agent] if self.kind == "silence" and self.agent else ())
        texts = {at: self.text} if self.kind == "say" else {}
        return Fork(calls, before, silent, agents, texts, draw=draw)

    def control(self, graph: EpisodeGraph, recorded: Recorded, at: Slot, draw: int) -> Fork:
        """Return the fork without the change: where the change sets the text of the call at the fork, that is the
        record's; where another policy samples it, it is sampled."""
        keep = self.kind in ("silence", "say")
        return Fork(*recorded_calls(graph, recorded.episode, self._places(recorded.episode, at), keep=keep), draw=draw)

    def _places(self, episode: Episode, at: Slot) -> list[Slot]:
        """Return the calls that are changed: those of the agent from `at` on, or that at `at`."""
        if self.kind == "say" or not self.agent:
            return [at]
        slots = [key_of(call)[:3] for call in episode.calls]
        later = zip(slots[slots.index(at) :], episode.calls[slots.index(at) :], strict=True)
        return [slot for slot, call in later if call.agent == self.agent] or [at]


@dataclass(frozen=True, slots=True)
class Effect:
    """The continuations of one fork."""

    recorded: Recorded
    at: Slot
    change: Change
    after: list[Episode]
    before: list[Episode] = field(default_factory=list)
    """Without the change, one for each of `after`; for the change `none`, the record alone."""

    @property
    def first(self) -> Key | None:
        """The first call after the fork that another text or other tokens answer than without the change."""
        return next((key for key in differing(self.before[0], self.after[0]) if key[:3] != self.at), None)

    @property
    def repeats(self) -> bool:
        """Whether the first continuation without a change is the record, token by token."""
        unchanged = self.after[0] if self.change.kind == "none" else self.before[0]
        return next(differing(self.recorded.episode, unchanged), None) is None


async def play_effect(
    runner: EpisodeRunner, recorded: Recorded, at: Slot, change: Change, n: int, changed: EpisodeRunner | None = None
) -> Effect:
    """Return n continuations with the change, and as many without it. changed: the runner of the change, if that is
    another policy. Raises UserError."""
    draws = range(n)
    after = [change.fork(runner.graph, recorded, at, draw) for draw in draws]
    if change.kind == "none":
        return Effect(recorded, at, change, await _play(runner, recorded, after), [recorded.episode])
    control = [change.control(runner.graph, recorded, at, draw) for draw in draws]
    played = await together([_play(changed or runner, recorded, after), _play(runner, recorded, control)])
    return Effect(recorded, at, change, *played)


async def _play(runner: EpisodeRunner, recorded: Recorded, forks: list[Fork]) -> list[Episode]:
    episode, options = recorded.episode, {"step": recorded.step, "validate": recorded.validate}
    run = (runner.run(episode.sample, episode.uid, episode.index, fork=fork, **options) for fork in forks)
    episodes = await together(run)
    with suppress(TooManyFailed):  # an effect counts them
        await runner.finish(episodes, f"sample {episode.uid}")
    return episodes


def differing(first: Episode, second: Episode) -> Iterator[Key]:
    """Yield the calls of either episode that the other one lacks or answers otherwise, those of the second in order."""
    ours, theirs = ({key_of(call): _answer(call) for call in episode.all_calls} for episode in (first, second))
    yield from (key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key))


def _answer(call: Call) -> tuple:
    """Return what the call said. Tokens without a log-prob are none of a policy's."""
    return call.text, call.response_ids, [message.get("content") for message in call.messages]
