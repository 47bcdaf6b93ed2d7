"""The score of one submission.

Invariant: a score is a function of the submission, the answer file and the task. A submission that cannot be scored is
a failure with a reason, and counts as chance in fair averages; an answer file that cannot be read is a UserError,
never a score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isclose, isfinite, log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from recipe.dag.core.errors import UserError
from recipe.dsbench.columns import data_type_of, floats_of, labels_of
from recipe.dsbench.metrics import (
    CLASSIFICATION,
    METRICS,
    REGRESSION,
    Floats,
    Unscorable,
    log_loss_of_columns,
    metric_in_text,
    named_metric,
)
from recipe.dsbench.table import MAX_BYTES, align, keys_of, read_bytes, read_table

_ANSWER_BYTES = 512 << 20
_BASIC = {CLASSIFICATION: ("accuracy", "f1", "roc_auc", "log_loss"), REGRESSION: ("rmse", "mse", "mae")}
_FAIR = {CLASSIFICATION: ("accuracy", "f1"), REGRESSION: ("rmse_pct_of_range", "rmse_pct_of_iqr")}
"""Metrics that tasks of a type have in common, so that they have a mean."""
_IN_UNITS = ("rmse", "mse", "mae", "medae")
"""Metrics in the target's unit, or its square: they have no mean over tasks."""
_DEFAULT = {CLASSIFICATION: "accuracy", REGRESSION: "rmse"}


@dataclass(frozen=True, slots=True)
class Truth:
    """A task's answers."""

    ids: list[str]
    id_column: str
    targets: dict[str, list[str]]
    """Target column -> values in the order of `ids`."""
    metric: str
    """One of METRICS; the one that the task asks for, unless it does not fit `data_type`."""
    data_type: str
    named: str | None
    """The metric that the task names; None if it names none."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one submission."""

    success: bool
    """The submission could be scored."""
    reason: str
    """Why it could not; empty after success."""
    data_type: str
    metric: str
    value: float | None
    """Of `metric`; None after a failure."""
    chance: float
    """Of `metric`, for guessing without the features."""
    best: float
    metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of the data type that could be computed, `task_specified_metric`, counts, and for regression the
    statistics of the target."""
    fair_metrics: dict[str, float] = field(default_factory=dict)
    """Those that have a mean over tasks; after a failure, chance: accuracy and F1, or the RMSE in percent of the
    target's ranges, and `metric` unless it is in the target's unit."""

    @property
    def quality(self) -> float:
        """The way from chance (0) to perfect (1); 0 after a failure and below chance."""
        way = self.best - self.chance
        return 0.0 if self.value is None or way == 0 else min(1.0, max(0.0, (self.value - self.chance) / way))


def mapping_of(metadata: object, where: str = "metadata") -> dict[str, Any]:
    """Return metadata that is a mapping or its JSON text. Raises UserError."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(metadata, Mapping):
        raise UserError(f"{where}: must be an object or its JSON text, not {type(metadata).__name__}")
    return dict(metadata)


def truth_of(answer: bytes | str | Path, metadata: object = None, text: str = "", where: str = "answer") -> Truth:
    """Read the answers of a task.

    metadata: a mapping or JSON, of which metric, data_type, id_column and target_column are used where they fit the
    file; else the metric is the one that `text` names, the id is the first column and the targets are the others.
    Raises UserError.
    """
    facts = mapping_of(metadata or {}, f"{where}: metadata")
    try:
        table = read_table(read_bytes(answer, _ANSWER_BYTES))
    except Unscorable as error:
        raise UserError(f"{where}: {answer if not isinstance(answer, bytes) else 'bytes'}: {error}") from error
    names = list(table.columns)
    id_column = str(facts.get("id_column"))
    id_column = id_column if id_column in table.columns else names[0]
    wanted = facts.get("target_column") or []
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(wanted, list | tuple) or not all(isinstance(name, str) for name in wanted):
        raise UserError(f"{where}: metadata: target_column must be a name or a list of names, not {wanted!r:.100}")
    targets = [name for name in wanted if name in table.columns and name != id_column]
    targets = targets or [name for name in names if name != id_column]
    if not targets:
        raise UserError(f"{where}: the answer file has no target column; it has {', '.join(names)}")
    ids = table.columns[id_column]
    if len(set(keys_of(ids))) < len(ids):  # as submissions are joined: 01 and 1 are one id
        raise UserError(f"{where}: column {id_column} of the answer file repeats ids")
    empty = next((name for name in targets if "" in table.columns[name]), None)
    if empty is not None:
        raise UserError(f"{where}: column {empty} of the answer file has empty cells")
    named = named_metric(facts.get("metric")) or metric_in_text(text)
    values = [value for name in targets for value in table.columns[name]]
    data_type = data_type_of(values, declared=facts.get("data_type"), metric=named)
    fits = named is not None and METRICS[named].data_type == data_type
    metric = named if named is not None and fits else _DEFAULT[data_type]
    columns = {name: table.columns[name] for name in targets}
    try:  # a task whose own answers cannot be scored must not make failures of its submissions
        _check_scale(metric, _columns(data_type, columns, columns))
    except Unscorable as error:
        raise UserError(f"{where}: {error}; correct the metric or the answer file") from error
    return Truth(ids, id_column, columns, metric, data_type, named)


def score_submission(
    submission: bytes | str | Path | None,
    truth: Truth,
    *,
    max_bytes: int = MAX_BYTES,
    missing: str = "no submission",
) -> Score:
    """Score a submission, given as its content or path; None: there is none, for the reason `missing`. Never raises for
    its content."""
    metric = METRICS[truth.metric]
    chances = _chances(truth)
    chance = chances[truth.metric]
    shared = [name for name in (truth.metric, *_FAIR[truth.data_type]) if name not in _IN_UNITS]

    def result(reason: str, value: float | None, metrics: dict[str, float]) -> Score:
        values = chances if reason else metrics
        fair = {name: values[name] for name in shared if name in values}
        return Score(not reason, reason, truth.data_type, truth.metric, value, chance, metric.best, metrics, fair)

    figures = {"num_ground_truth": float(len(truth.ids))}
    try:
        if submission is None:
            raise Unscorable(missing)
        # a row per id: more are refused before they are parsed
        table = read_table(read_bytes(submission, max_bytes), max_rows=len(truth.ids))
        figures["num_predictions"] = float(table.rows)
        predicted = align(table, truth.ids, truth.id_column, list(truth.targets))
        columns = _columns(truth.data_type, truth.targets, predicted)
        value = _value(truth.metric, columns)
    except Unscorable as error:
        return result(str(error), None, figures)
    figures |= {truth.metric: value, "task_specified_metric": value}
    for name in _BASIC[truth.data_type]:
        with suppress(Unscorable):  # such as the AUC of several classes: absent, not 0
            figures[name] = _value(name, columns)
    if truth.data_type == REGRESSION:
        figures |= target_statistics(np.concatenate([column[0] for column in columns]), figures.get("rmse"))
    return result("", value, figures)


def _chances(truth: Truth) -> dict[str, float]:
    """Return the level of chance of the task's metric and of those of _FAIR."""
    columns = _columns(truth.data_type, truth.targets, truth.targets)
    own = {truth.metric: _chance(truth.metric, columns)}
    if truth.data_type == CLASSIFICATION:
        return {name: _chance(name, columns) for name in _FAIR[CLASSIFICATION]} | own
    targets = np.concatenate([column[0] for column in columns])
    return target_statistics(targets, _chance("rmse", columns)) | own


def target_statistics(truth: Floats, error: float | None) -> dict[str, float]:
    """Return the distribution of the target, and the RMSE `error` in percent of its range and of its interquartile
    range; a percentage is absent if the range is 0 or there is no error. truth: [N]."""
    low, q25, q75, high = (float(value) for value in np.quantile(truth, (0, 0.25, 0.75, 1)))
    figures = {"target_min": low, "target_max": high}
    figures |= {"target_mean": float(truth.mean()), "target_std": float(truth.std())}
    figures |= {"target_q25": q25, "target_q75": q75, "target_median": float(np.median(truth))}
    figures |= {"target_range": high - low, "target_iqr": q75 - q25}
    for name, size in (("range", high - low), ("iqr", q75 - q25)):
        figures |= {f"rmse_pct_of_{name}": 100 * error / size} if size > 0 and error is not None else {}
    return figures


def _columns(data_type: str, targets: Mapping[str, list[str]], predicted: Mapping[str, list[str]]) -> list[Any]:
    """Return Labels, or (truth, predictions), of each target. Raises Unscorable."""
    if data_type == CLASSIFICATION:
        return [labels_of(truth, predicted[name], name) for name, truth in targets.items()]
    return [(floats_of(truth, name), floats_of(predicted[name], name)) for name, truth in targets.items()]


def _chance(name: str, columns: Sequence[Any]) -> float:
    """Return the level of chance. columns: of the truth against itself."""
    metric = METRICS[name]
    if name == "log_loss" and len(columns) > 1:
        return log(len(columns))
    return fmean(metric.chance(column if metric.labels else column[0]) for column in columns)


def _check_scale(name: str, columns: Sequence[Any]) -> None:
    """Raise Unscorable unless a perfect submission reaches the best value, and chance does not. columns: of the truth
    against itself."""
    value, best = _value(name, columns), METRICS[name].best
    with np.errstate(all="ignore"):
        chance = _chance(name, columns)
    if not isclose(value, best, abs_tol=1e-6):
        raise Unscorable(f"{name}: the answers themselves reach {value:.6g}, not {best:g}")
    # the mean of equal numbers may differ from them by rounding
    constant = METRICS[name].labels is None and all(column[0].min() == column[0].max() for column in columns)
    if constant or chance == best or not isfinite(chance):
        raise Unscorable(
            f"{name}: guessing without the features reaches {best if constant else chance:g}, which no "
            f"submission improves: the answers are constant, or too large"
        )


def _value(name: str, columns: Sequence[Any]) -> float:
    """Return the mean of a metric over the target columns. Raises Unscorable."""
    metric = METRICS[name]
    with np.errstate(all="ignore"):  # an overflow is reported below
        if name == "log_loss" and len(columns) > 1:
            values = [log_loss_of_columns(columns)]
        elif metric.labels is not None:
            values = [metric.labels(column) for column in columns]
        else:
            assert metric.numbers is not None
            values = [metric.numbers(*column) for column in columns]
    if not all(np.isfinite(values)):
        raise Unscorable(f"{name}: predictions are too large")
    return fmean(values)
