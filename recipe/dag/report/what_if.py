"""The effects of changes to recorded episodes: a file, and what the page and a terminal show of it.

Invariant: an effect compares continuations in pairs that share their seeds; its interval is a bootstrap over the pairs.
An episode without an outcome counts with its mean reward per rewarded call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from recipe.dag.core.errors import UserError, writing
from recipe.dag.episode.fork import name_of
from recipe.dag.episode.replay import Effect
from recipe.dag.report.journal import record_of
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.pass_table import LEVEL
from recipe.dag.types.record import Episode

VERSION = 1
RESAMPLES = 2000


def value_of(episode: Episode) -> float | None:
    """Return the outcome, or else the mean reward of the rewarded calls; None of an episode that failed or has
    neither."""
    if episode.fault is None and episode.outcome is not None:
        return episode.outcome
    return reward_value(episode)


def reward_value(episode: Episode) -> float | None:
    """Return the mean reward of the rewarded calls; None of an episode that failed or has none."""
    rewards = [call.reward for call in episode.calls if call.reward is not None]
    return fmean(rewards) if rewards and episode.fault is None else None


def bootstrap(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences, and the bounds of its bootstrap interval (percentiles)."""
    generator, count = random.Random(0), len(differences)
    means = sorted(fmean(generator.choices(differences, k=count)) for _ in range(RESAMPLES))
    tail = round((1 - LEVEL) / 2 * (RESAMPLES - 1))
    return fmean(differences), means[tail], means[-1 - tail]


def paired(before: Iterable[float | None], after: Iterable[float | None]) -> list[float]:
    """Return the differences of the pairs in which both have a value."""
    return [new - old for old, new in zip(before, after, strict=True) if old is not None and new is not None]


def effect_record(effect: Effect, weights: str) -> dict[str, Any]:
    """Return an effect as JSON. weights: those that answered."""
    recorded, change = effect.recorded, effect.change
    episode = recorded.episode
    before, after = ([value_of(one) for one in side] for side in (effect.before, effect.after))
    pairs = paired(before, after) if change.kind != "none" else []
    first = effect.first
    return {
        "step": recorded.step,
        "split": "validation" if recorded.validate else "train",
        "uid": episode.uid,
        "index": episode.index,
        "at": effect.at,
        "agent": next(call.agent for call in episode.calls if (call.node, call.turn, call.round) == effect.at),
        "change": {"kind": change.kind, "agent": change.agent, "text": change.text},
        "weights": weights,
        "recorded": value_of(episode),
        "before": before,
        "after": after,
        "interval": bootstrap(pairs) if pairs else None,
        "first": first and first[:3],
        "repeats": effect.repeats,
        "episodes": [json.loads(to_json(record_of(one))) for one in effect.after],
    }


def write_effects(effects: Sequence[Mapping[str, Any]], run: str, path: Path) -> None:
    """Write the file of effects. Raises UserError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [to_json({"version": VERSION, "run": run, "effects": effects}), b"\n"])


def read_effects(path: Path) -> list[dict[str, Any]]:
    """Return the effects in a file of `verl-dag replay`. Raises UserError."""
    try:
        data = json.loads(path.read_bytes())
        if data["version"] == VERSION:
            return data["effects"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: is no file of effects ({error}); write one with verl-dag replay RUN -o FILE"
        ) from error
    raise UserError(f"{path}: was written by another version; write it again with verl-dag replay RUN -o FILE")


def lines_of(effects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per effect."""
    return [_line(effect) for effect in effects]


def _line(effect: Mapping[str, Any]) -> str:
    where = f"step {effect['step']} {effect['uid']}/{effect['index']} {name_of(tuple(effect['at']))}"
    change, after = effect["change"], _mean(effect["after"])
    who = change["agent"] or effect["agent"]
    did = {
        "none": "sampled again",
        "silence": f"{who} silent",
        "say": f"{who} says {change['text'][:40]!r}",
        "swap": f"{who} played by {change['text']}",
    }[change["kind"]]
    text = f"{where}: {did}: {_mean(effect['before'])} -> {after}"
    if effect["interval"] is not None:
        text += "  {:+.2f} [{:+.2f}, {:+.2f}]".format(*effect["interval"])
    if effect["first"] is not None:
        text += f", first other answer: {name_of(tuple(effect['first']))}"
    if change["kind"] == "none" and effect["repeats"]:
        text += ", the first one repeats the record token by token"
    return text + ("" if change["kind"] == "none" or effect["repeats"] else " (without the change, not the record)")


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}" if known else "not graded"
