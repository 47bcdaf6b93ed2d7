"""`verl-dag blame`: how much the outcome depends on each agent.

Invariant: an episode with a change and the one without it have the same seeds, and the calls that no call of the agent
can reach keep their words. An interval is a bootstrap over problems, since the episodes of one are alike. Rewards that
compare the episodes of a problem see one of them changed, among the others as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from recipe.dag.app.evaluate import find_checkpoint
from recipe.dag.app.reopened import Reopened, Weights, reopen, weights_of
from recipe.dag.core.printable import printable
from recipe.dag.core.tasks import together
from recipe.dag.episode.batch import play_batch
from recipe.dag.episode.failure import TooManyFailed
from recipe.dag.episode.fork import Fork, key_of, recorded_calls
from recipe.dag.episode.reward import scratch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.report.what_if import bootstrap, paired, value_of
from recipe.dag.train import checkpoint
from recipe.dag.train.data import load_samples
from recipe.dag.train.rollout import episodes_at_once
from recipe.dag.types.record import Episode

CHANGES = {
    "silent": "says nothing",
    "start": "has the weights of the run's start",
    "sibling": "says what it said in another episode of the problem",
}
Value = Callable[[Episode], float | None]


@dataclass(frozen=True, slots=True)
class Share:
    """What one change of one agent does to the value of an episode."""

    agent: str
    change: str
    """One of `CHANGES`."""
    interval: tuple[float, float, float] | None
    """The mean difference over problems, and its bounds; None if no pair has a value."""
    pairs: int

    @property
    def is_known(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval is not None and not self.interval[1] <= 0.0 <= self.interval[2]


async def shares(
    runner: EpisodeRunner,
    at_start: Mapping[str, EpisodeRunner],
    samples: Sequence[tuple[dict[str, Any], str]],
    n: int,
    *,
    step: int,
    value: Value = value_of,
    max_in_flight: int = 512,
) -> tuple[float | None, list[Share]]:
    """Play n episodes of each (sample, uid), and again with each change of each agent; return the mean value without a
    change, and what the changes do. at_start: by agent, the runner in which it has the weights of the run's start; an
    agent that is missing was never trained. Raises UserError."""
    base = await play_batch(runner, samples, n, step=step, validate=True, max_in_flight=max_in_flight)
    await _score_groups(runner, base)
    others = {(episode.uid, episode.index): episode for episode in base}
    before = list(map(value, base))
    found = []
    for agent in dict.fromkeys(call.agent for episode in base for call in episode.calls):
        for change in CHANGES:
            if (change == "start" and agent not in at_start) or (change == "sibling" and n == 1):
                continue
            if change == "sibling" and not any(c.response_ids for one in base for c in one.calls_of(agent)):
                continue  # an API's answers are not given by token ids
            playing = at_start[agent] if change == "start" else runner

            async def again(episode: Episode, agent=agent, change=change, playing=playing) -> Episode:
                if episode.fault is not None or not episode.calls_of(agent):
                    return episode
                siblings = [others[episode.uid, (episode.index + k) % n] for k in range(1, n)]
                fork = _fork(playing, episode, agent, change, siblings[0] if siblings else episode)
                changed = await playing.run(
                    episode.sample, episode.uid, episode.index, step=step, validate=True, fork=fork
                )
                await _score_groups(playing, [changed], siblings)
                return changed

            after = [value(episode) for episode in await _limited(again, base, max_in_flight)]
            found.append(_share(agent, change, [episode.uid for episode in base], before, after))
    known = [one for one in before if one is not None]
    return fmean(known) if known else None, found


async def _score_groups(runner: EpisodeRunner, episodes: Sequence[Episode], siblings: Sequence[Episode] = ()) -> None:
    """Run the reward nodes that compare episodes; the siblings stay as they are."""
    if runner.scores_groups:
        copies = [replace(scratch(one), before_group=one.before_group) for one in siblings]
        with suppress(TooManyFailed):  # the pairs count them
            await runner.finish(episodes, "blame", earlier=copies)


async def _limited(again: Callable[[Episode], Any], episodes: Sequence[Episode], limit: int) -> list[Episode]:
    played: list[Episode] = []
    for first in range(0, len(episodes), limit):
        played += await together(map(again, episodes[first : first + limit]))
    return played


def _fork(runner: EpisodeRunner, episode: Episode, agent: str, change: str, sibling: Episode) -> Fork:
    slots = [key_of(call)[:3] for call in episode.calls_of(agent)]
    # without those before: what a program prints may differ, and is then read with the same seeds
    recorded, _ = recorded_calls(runner.graph, episode, slots)
    silent = frozenset([agent] if change == "silent" else ())
    said = {key_of(call)[:3]: call for call in sibling.calls_of(agent)} if change == "sibling" else {}
    return Fork(recorded, silent_agents=silent, words=said)


def _share(
    agent: str, change: str, uids: Sequence[str], before: Sequence[float | None], after: Sequence[float | None]
) -> Share:
    by_problem: dict[str, list[float]] = {}
    for uid, old, new in zip(uids, before, after, strict=True):
        by_problem.setdefault(uid, []).extend(paired([old], [new]))
    means = [fmean(differences) for differences in by_problem.values() if differences]
    interval = bootstrap(means) if len(means) > 1 else (means[0], -inf, inf) if means else None
    return Share(agent, change, interval, sum(map(len, by_problem.values())))


def most_needed(found: Sequence[Share]) -> str | None:
    """Return the agent with the largest effects, summed over its changes; one whose interval has 0 in it counts as 0.
    None if all do."""
    sums: dict[str, float] = {}
    for share in found:
        if share.interval is not None and share.is_known:
            sums[share.agent] = sums.get(share.agent, 0.0) + abs(share.interval[0])
    return max(sums, key=lambda agent: sums[agent], default=None)


def blame(
    folder: Path, data: str, n: int, *, checkpoint_folder: Path | None, max_samples: int | None, value: Value
) -> tuple[float | None, list[Share]]:
    """Return what `shares` does for the last weights of the run in `folder`, or those of a `global_step_N`, and the
    problems in `data`. Raises UserError."""
    kept = weights_of(folder)
    weights: Weights = kept[max(kept)] if kept else None
    if checkpoint_folder is not None:
        weights = find_checkpoint(checkpoint_folder)
    samples = [
        (dict(sample), f"val-{index}")
        for index, sample in enumerate(load_samples(data, max_samples=max_samples, what="--data"))
    ]

    async def work(policies: Reopened) -> tuple[float | None, list[Share]]:
        at_start = {}
        for agent in policies.workflow.agents:
            name = policies.names[None, agent.policy]
            if name != policies.names[weights, agent.policy]:
                at_start[agent.name] = policies.runner(weights, swapped={agent.name: name})
        step = 0 if weights is None else checkpoint.step_of(weights)
        limit = episodes_at_once(policies.config)
        runner = policies.runner(weights)
        return await shares(runner, at_start, samples, n, step=step, value=value, max_in_flight=limit)

    return reopen(folder, [weights, None], work)


def table_of(found: Sequence[Share]) -> Table:
    """Return a line per agent with the effect of each change."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("agent", no_wrap=True)
    changes = [change for change in CHANGES if any(share.change == change for share in found)]
    for change in changes:
        table.add_column(CHANGES[change], justify="right")
    for agent in dict.fromkeys(share.agent for share in found):
        own = {share.change: share for share in found if share.agent == agent}
        table.add_row(Text(printable(agent)), *(_cell(own.get(change)) for change in changes))
    return table


def _cell(share: Share | None) -> Text:
    if share is None:
        return Text("-", style="dim")
    if share.interval is None:
        return Text("not graded", style="dim")
    mean, low, high = share.interval
    return Text(f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", style="bold" if share.is_known else "")
