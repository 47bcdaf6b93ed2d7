"""`verl-dag pass-at-k`: pass@k of one or two evaluations, with 95 % intervals.

Invariant: a problem is one observation, since its episodes are not independent; two evaluations are compared on the
problems that both graded, by the differences. An episode with an error is excluded and counted apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.report.pass_at_k import estimate_pass_at_k

LEVEL = 0.95
PRIOR = 8
"""Weight, in problems, of the assumption that each problem is always or never solved, which makes the widest interval.
A few problems say little about how much they differ, least of all if their scores are equal."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over problems and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Graded:
    """The graded episodes of an evaluation: outcomes by problem, and how many episodes ended in an error."""

    problems: dict[str, list[bool]]
    errors: int


def read_graded(path: Path) -> Graded:
    """Read `results.json`, or the folder that holds it: a list of episodes, or a file of conversations
    (conversations.py). Raises UserError."""
    file = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; pass the output folder of an evaluation") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    items = data.get("results") if isinstance(data, dict) else data
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UserError(f"{file}: neither a list of episodes nor an object with `results`")
    problems: dict[str, list[bool]] = {}
    errors = number = 0
    last = -1
    for item in items:
        if "problem_id" in item:
            name, correct = str(item["problem_id"]), item.get("correct")
        else:  # in order: a problem's episodes are numbered from 0
            index = int(item.get("sample_index", 0))
            number, last = number + (index <= last), index
            name, correct = str(number), item.get("metrics", {}).get("is_correct")
        if item.get("error"):
            errors += 1
        elif correct is not None:
            problems.setdefault(name, []).append(bool(correct))
    if not problems:
        raise UserError(f"{file}: no graded episode in it")
    return Graded(problems, errors)


def intervals(graded: Graded, ks: Sequence[int]) -> dict[int, Interval]:
    """Return pass@k over the problems with at least k graded episodes; a k that no problem has is left out."""
    return {k: interval_of_mean(list(scores.values())) for k in ks if (scores := _scores(graded, k))}


def difference(first: Graded, second: Graded, k: int) -> Interval | None:
    """Return pass@k of the second minus the first over the problems that both have; None without any."""
    first_scores, second_scores = _scores(first, k), _scores(second, k)
    common = [name for name in first_scores if name in second_scores]
    return interval_of_difference([second_scores[name] - first_scores[name] for name in common]) if common else None


def table(paths: Sequence[Path], ks: Sequence[int]) -> dict[str, Any]:
    """Return the figures of one or two evaluations as JSON. ks: empty for 1 and every power of two up to n, and n."""
    evaluations = [read_graded(path) for path in paths]
    n = max(len(outcomes) for graded in evaluations for outcomes in graded.problems.values())
    ks = ks or sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128, n) if k <= n})
    rows = [
        {
            "path": str(path),
            "problems": len(graded.problems),
            "episodes": sum(map(len, graded.problems.values())),
            "errors": graded.errors,
            "pass@k": {str(k): _plain(interval) for k, interval in intervals(graded, ks).items()},
        }
        for path, graded in zip(paths, evaluations, strict=True)
    ]
    result: dict[str, Any] = {"evaluations": rows}
    if len(evaluations) == 2:
        gains = {str(k): difference(evaluations[0], evaluations[1], k) for k in ks}
        result["difference"] = {k: _plain(gain) for k, gain in gains.items() if gain is not None}
    return result


def lines(figures: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    text = []
    for row in figures["evaluations"]:
        counts = f"{counted(row['problems'], 'problem')}, {row['episodes']} graded, {counted(row['errors'], 'error')}"
        text.append(f"{row['path']}: {counts}")
        text += [f"  pass@{k:<4} {_words(value)}" for k, value in row["pass@k"].items()]
    if "difference" in figures:
        text.append("second minus first, on the problems of both")
        text += [f"  pass@{k:<4} {_words(value, '+')}" for k, value in figures["difference"].items()]
    return text


def _scores(graded: Graded, k: int) -> dict[str, float]:
    enough = {name: outcomes for name, outcomes in graded.problems.items() if len(outcomes) >= k}
    return {name: estimate_pass_at_k(len(outcomes), sum(outcomes), k) for name, outcomes in enough.items()}


def interval_of_mean(scores: Sequence[float]) -> Interval:
    """Return the mean of scores in [0, 1], one per problem, and Wilson's interval for as many independent yes-or-no
    observations as have the same standard error (as Korn and Graubard do for surveys)."""
    m, mean = len(scores), fmean(scores)
    square = _quantile(m - 1) ** 2
    shrunk = (mean * m + square / 2) / (m + square)
    prior = PRIOR * shrunk * (1 - shrunk)
    scatter = math.fsum((score - mean) ** 2 for score in scores) * m / max(m - 1, 1)
    n = m * (m * mean * (1 - mean) + prior) / (scatter + prior)
    half = math.sqrt(square * (mean * (1 - mean) / n + square / (4 * n * n)))
    low, high = ((mean + square / (2 * n) + sign * half) / (1 + square / n) for sign in (-1, 1))
    return Interval(mean, max(low, 0.0), min(high, 1.0))


def interval_of_difference(differences: Sequence[float]) -> Interval:
    """Return the mean of paired differences in [-1, 1] and Student's interval, with half a gain, half a loss and a tie
    added (Agresti and Min), so that equal differences have a width, too."""
    m, square_sum = len(differences) + 2, math.fsum(value * value for value in differences) + 1
    mean = math.fsum(differences) / m
    half = _quantile(m - 3) * math.sqrt((square_sum / m - mean * mean) / m)
    return Interval(fmean(differences), max(mean - half, -1.0), min(mean + half, 1.0))


def _quantile(freedom: int) -> float:
    """Return Student's two-sided quantile for LEVEL (Abramowitz and Stegun, 26.7.5)."""
    z, freedom = NormalDist().inv_cdf((1 + LEVEL) / 2), max(freedom, 1)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _plain(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _words(value: dict[str, float], sign: str = "") -> str:
    return f"{value['value']:{sign}.4f}  [{value['low']:{sign}.4f}, {value['high']:{sign}.4f}]"
