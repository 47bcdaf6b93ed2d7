"""Recorded episodes: read, chosen and listed for `verl-dag trace`.

Invariant: reads the journal's episodes and nothing else, and yields them in its order unless the worst come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.printable import printable
from recipe.dag.report.journal import EPISODES, episode_files, run_name
from recipe.dag.report.journal import read_records as read_lines
from recipe.dag.report.pass_at_k import SOLVED


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a folder's or file's journal, in order, with the name of their `run`. Raises UserError."""
    files = (episode_files(path) or [path / EPISODES[0]]) if path.is_dir() else [path]
    for file in files:
        for record in read_lines(file, "pass the output folder of a run, or its episodes.jsonl", is_episode):
            yield record | {"run": run_name(file)}


def is_episode(record: Mapping[str, Any]) -> bool:
    """Check the fields that every episode has, of the types that are read here."""
    calls, outcome = record.get("calls"), record.get("outcome")
    return (
        {"uid", "index"} <= record.keys()
        and isinstance(record.get("sample"), dict)
        and isinstance(outcome, int | float | None)
        and isinstance(calls, list)
        and all(isinstance(call, dict) and {"node", "agent", "text"} <= call.keys() for call in calls)
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which episodes to show; None: any."""

    step: int | None = None
    split: Literal["train", "validation"] | None = None
    solved: bool | None = None
    uid: str | None = None
    agent: str | None = None
    """An agent that was called."""
    worst: bool = False
    """Those with the least reward first: of `agent`, or in all."""
    flagged: bool = False
    """Only those that a monitor flagged."""

    def matches(self, record: Mapping[str, Any]) -> bool:
        return (
            self.step in (None, record.get("step"))
            and self.split in (None, record.get("split", "train"))
            and self.uid in (None, record["uid"])
            and (not self.flagged or bool(record.get("flags")))
            and self.solved in (None, (record.get("outcome") or 0.0) >= SOLVED)
            and (self.agent is None or any(call["agent"] == self.agent for call in record["calls"]))
        )


def select(records: Iterable[dict[str, Any]], wanted: Wanted, *, last_step: bool = True) -> list[dict[str, Any]]:
    """Return the episodes that match; `last_step`: of the last step in which any does, unless a step or a uid is
    wanted. Raises UserError if there is none."""
    matches: list[dict[str, Any]] = []
    count = 0
    for record in records:
        count += 1
        if not wanted.matches(record):
            continue
        is_later = bool(matches) and matches[-1].get("step") != record.get("step")
        if is_later and last_step and wanted.step is None and wanted.uid is None:
            matches.clear()
        matches.append(record)
    if not matches:
        raise UserError(f"none of {counted(count, 'recorded episode')} matches")
    if wanted.worst:
        matches.sort(key=lambda record: math.inf if (own := reward_of(record, wanted.agent)) is None else own)
    return matches


def choose(records: Iterable[dict[str, Any]], wanted: Wanted, position: int = 0) -> dict[str, Any]:
    """Return the episode at `position` among those that `select` finds. Raises UserError if there are fewer."""
    matches = select(records, wanted)
    if len(matches) <= position:
        found = counted(len(matches), "recorded episode")
        raise UserError(f"{found} found; episode {position} is not among them")
    return matches[position]


def reward_of(record: Mapping[str, Any], agent: str | None = None) -> float | None:
    """Return the sum of the rewards of the episode's calls, or of one agent's; None if none was rewarded."""
    rewards = [
        call["reward"] for call in record["calls"] if agent in (None, call["agent"]) and call.get("reward") is not None
    ]
    return sum(rewards) if rewards else None


def list_episodes(records: Sequence[Mapping[str, Any]], agent: str | None = None) -> Table:
    """Return a table with a line per episode; its number is what `--episode` takes. agent: whose reward to show beside
    the sum; None: of each."""
    agents = list(dict.fromkeys(call["agent"] for record in records for call in record["calls"]))
    shown = [name for name in agents if agent in (None, name)] if len(agents) > 1 else []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "step", "split", "sample", "outcome", "reward", *shown, "tokens", "s"):
        table.add_column(
            Text(printable(heading)), justify="left" if heading in ("split", "sample") else "right", no_wrap=True
        )
    table.add_column("notes")
    for number, record in enumerate(records):
        rewards = [reward_of(record, name) for name in (None, *shown)]
        table.add_row(
            str(number),
            str(record.get("step", "")),
            str(record.get("split", "train")),
            Text(printable(f"{record['uid']}/{record['index']}")),
            "" if record.get("outcome") is None else f"{record['outcome']:g}",
            *("" if reward is None else f"{reward:+.2f}" for reward in rewards),
            str(sum(sum(call.get("response_mask", ())) for call in record["calls"])),
            f"{record.get('seconds', 0.0):.1f}",
            Text(printable(", ".join(_notes(record)))),
        )
    return table


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what went otherwise than it should."""
    if record.get("fault"):
        yield f"{record['fault'].get('boundary', '')} fault"
    yield from dict.fromkeys(f"flagged {flag['rule']}" for flag in record.get("flags", ()))
    for call in record["calls"]:
        if call.get("stop_reason") not in ("stop", "", None):
            yield f"{call['node']}: {call['stop_reason']}"
        yield from (
            f"{call['node']}: {tool['name']} {tool['status']}"
            for tool in call.get("tool_results", ())
            if tool["status"] != "success"
        )
