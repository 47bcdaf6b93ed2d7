"""The metrics of tabular tasks: their formulas, the level of chance of each, and which one a task's text asks for.

Invariant: pure functions of one column of truth and one of predictions. A metric that cannot be computed from them
raises Unscorable with the reason; no value is invented, and none is infinite or NaN.

The list is the one that the 72 published modelling tasks use. `chance` is the value of guessing without the features:
uniform classes, or the best constant; a failed submission counts as that in fair averages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

CLASSIFICATION, REGRESSION = "classification", "regression"
DATA_TYPES = (CLASSIFICATION, REGRESSION)
_EPSILON = 1e-15
"""Probabilities are clipped to [_EPSILON, 1 - _EPSILON] before their logarithm is taken."""

Floats = np.ndarray
"""float64 [N]"""


class Unscorable(Exception):
    """A submission that cannot be scored; the message says why."""


@dataclass(frozen=True, slots=True)
class Labels:
    """One column of a classification task, as class indices."""

    classes: tuple[str, ...]
    """In ascending order: numbers by value, texts alphabetically."""
    truth: np.ndarray
    """int [N], an index into `classes`."""
    predicted: np.ndarray
    """int [N], an index into `classes`; -1: a label that is not one of them."""
    scores: Floats | None
    """Predicted scores of the last class, if there are two classes and the predictions are numbers or one of them."""
    texts: tuple[tuple[str, ...], tuple[str, ...]]
    """(truth, predictions) as written."""


def accuracy(labels: Labels) -> float:
    _check_labels(labels)
    return float(np.mean(labels.truth == labels.predicted))


def f1(labels: Labels) -> float:
    """Return F1 of the last class for two classes, else the mean over classes weighted by their frequency."""
    _check_labels(labels)
    if len(labels.classes) == 2:
        return _f1_of(labels, 1)
    counts = np.bincount(labels.truth, minlength=len(labels.classes))
    return float(sum(count * _f1_of(labels, index) for index, count in enumerate(counts)) / counts.sum())


def f1_macro(labels: Labels) -> float:
    _check_labels(labels)
    return float(np.mean([_f1_of(labels, index) for index in range(len(labels.classes))]))


def _check_labels(labels: Labels) -> None:
    if (labels.predicted < 0).all():
        raise Unscorable("no prediction is one of the classes")


def _f1_of(labels: Labels, index: int) -> float:
    hits = np.sum((labels.truth == index) & (labels.predicted == index))
    total = np.sum(labels.truth == index) + np.sum(labels.predicted == index)
    return float(2 * hits / total) if total else 0.0


def roc_auc(labels: Labels) -> float:
    """Return the area under the ROC curve, from ranks: ties count half (Mann-Whitney)."""
    scores, positive = _binary_scores(labels)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise Unscorable("roc_auc: the truth has only one class")
    rank_sum = float(average_ranks(scores)[positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def normalized_gini(labels: Labels) -> float:
    """Return the normalized Gini coefficient, which is 2 AUC - 1 for two classes."""
    return 2 * roc_auc(labels) - 1


def log_loss(labels: Labels) -> float:
    """Return the mean negative log-probability of the truth, in nats, for two classes."""
    scores, positive = _binary_scores(labels)
    if scores.min() < 0 or scores.max() > 1:
        raise Unscorable("log_loss: predictions must be probabilities in [0, 1]")
    probability = np.clip(np.where(positive, scores, 1 - scores), _EPSILON, 1 - _EPSILON)
    return float(-np.mean(np.log(probability)))


def log_loss_of_columns(columns: Sequence[Labels]) -> float:
    """Return the mean negative log-probability of the true column, in nats: the truth is one-hot over the columns, and
    each row of predictions is divided by its sum."""
    scores, truth = zip(*[_binary_scores(column) for column in columns], strict=True)
    scores_NC, truth_NC = np.stack(scores, axis=1), np.stack(truth, axis=1)  # noqa: N806
    if (truth_NC.sum(axis=1) != 1).any():
        raise Unscorable("log_loss: the target columns are not one-hot")
    if scores_NC.min() < 0 or (scores_NC.sum(axis=1) <= 0).any():
        raise Unscorable("log_loss: predictions must be probabilities, at least one above 0 in each row")
    probability = scores_NC[truth_NC] / scores_NC.sum(axis=1)
    return float(-np.mean(np.log(np.clip(probability, _EPSILON, 1))))


def quadratic_weighted_kappa(labels: Labels) -> float:
    """Return Cohen's kappa with squared distances of the labels, which must be numbers."""
    try:
        values = np.array([float(name) for name in labels.classes])
    except ValueError:
        raise Unscorable("quadratic_weighted_kappa: the labels are not numbers") from None
    if (labels.predicted < 0).any():
        raise Unscorable("quadratic_weighted_kappa: a prediction is not one of the classes")
    size = len(labels.classes)
    observed = np.bincount(labels.truth * size + labels.predicted, minlength=size * size).reshape(size, size)
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / observed.sum()
    weights = (values[:, None] - values[None]) ** 2
    disagreement = float((weights * expected).sum())
    return 1.0 if disagreement == 0 else 1.0 - float((weights * observed).sum()) / disagreement


def map_at_3(labels: Labels) -> float:
    """Return the mean of 1/rank of the truth among the first three space-separated labels of each prediction."""
    truth, predicted = labels.texts
    ranks = [_reciprocal_rank(right, guess.split()[:3]) for right, guess in zip(truth, predicted, strict=True)]
    return float(np.mean(ranks))


def _reciprocal_rank(right: str, guesses: Sequence[str]) -> float:
    return 1.0 / (guesses.index(right) + 1) if right in guesses else 0.0


def jaccard(labels: Labels) -> float:
    """Return the mean word-level Jaccard similarity of truth and prediction, ignoring case."""
    pairs = [(set(a.lower().split()), set(b.lower().split())) for a, b in zip(*labels.texts, strict=True)]
    return float(np.mean([len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs]))


def _binary_scores(labels: Labels) -> tuple[Floats, np.ndarray]:
    if labels.scores is None:
        raise Unscorable(f"predictions must be numbers or labels of two classes; the truth has {len(labels.classes)}")
    return labels.scores, labels.truth == 1


def average_ranks(values: Floats) -> Floats:
    """Return ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def mse(truth: Floats, predicted: Floats) -> float:
    return float(np.mean((truth - predicted) ** 2))


def rmse(truth: Floats, predicted: Floats) -> float:
    return float(np.sqrt(mse(truth, predicted)))


def mae(truth: Floats, predicted: Floats) -> float:
    return float(np.mean(np.abs(truth - predicted)))


def medae(truth: Floats, predicted: Floats) -> float:
    """Return the median absolute error."""
    return float(np.median(np.abs(truth - predicted)))


def rmsle(truth: Floats, predicted: Floats) -> float:
    """Return the root mean squared error of log(1 + value)."""
    if truth.min() <= -1 or predicted.min() <= -1:
        raise Unscorable("rmsle: a value is -1 or less")
    return rmse(np.log1p(truth), np.log1p(predicted))


def smape(truth: Floats, predicted: Floats) -> float:
    """Return the symmetric mean absolute percentage error in [0, 200]; 0 where both values are 0."""
    scale = np.abs(truth) + np.abs(predicted)
    share = np.divide(2 * np.abs(truth - predicted), scale, out=np.zeros_like(scale), where=scale > 0)
    return float(100 * np.mean(share))


def r2(truth: Floats, predicted: Floats) -> float:
    """Return the coefficient of determination."""
    spread = float(np.sum((truth - truth.mean()) ** 2))
    if spread == 0:
        raise Unscorable("r2: the truth is constant")
    return 1.0 - float(np.sum((truth - predicted) ** 2)) / spread


def pearson(truth: Floats, predicted: Floats) -> float:
    """Return the correlation; 0 for a constant prediction."""
    a, b = truth - truth.mean(), predicted - predicted.mean()
    scale = float(np.sqrt(np.sum(a**2) * np.sum(b**2)))
    return float(np.sum(a * b)) / scale if scale > 0 else 0.0


def spearman(truth: Floats, predicted: Floats) -> float:
    """Return the correlation of the ranks; 0 for a constant prediction."""
    return pearson(average_ranks(truth), average_ranks(predicted))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: `labels` computes it for classes, `numbers` for numbers (exactly one of them is set)."""

    best: float
    chance: Callable[..., float]
    """Of Labels or of the truth's numbers: the value of guessing without the features."""
    labels: Callable[[Labels], float] | None = None
    numbers: Callable[[Floats, Floats], float] | None = None

    @property
    def data_type(self) -> str:
        return REGRESSION if self.labels is None else CLASSIFICATION


def _uniform(labels: Labels) -> float:
    return 1.0 / len(labels.classes)


def _random_f1(labels: Labels) -> float:
    """Return F1 of uniform guesses: precision is the class's share, recall 1 / number of classes."""
    counts = np.bincount(labels.truth, minlength=len(labels.classes))
    shares = counts / counts.sum()
    values = 2 * shares / (shares * len(labels.classes) + 1)
    return float(values[1]) if len(labels.classes) == 2 else float(np.sum(shares * values))


def _of_constant(function: Callable[[Floats, Floats], float], constant: Callable) -> Callable[[Floats], float]:
    return lambda truth: function(truth, np.full_like(truth, constant(truth)))


def _zero(column: object) -> float:
    return 0.0


def _log_mean(truth: Floats) -> float:
    return float(np.expm1(np.mean(np.log1p(np.maximum(truth, -1 + 1e-9)))))


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(1.0, _uniform, labels=accuracy),
    "f1": Metric(1.0, _random_f1, labels=f1),
    "f1_macro": Metric(1.0, _random_f1, labels=f1_macro),
    "f1_micro": Metric(1.0, _uniform, labels=accuracy),  # with one label per row, micro-averaged F1 is the accuracy
    "roc_auc": Metric(1.0, lambda labels: 0.5, labels=roc_auc),
    "normalized_gini": Metric(1.0, _zero, labels=normalized_gini),
    "log_loss": Metric(0.0, lambda labels: log(max(2, len(labels.classes))), labels=log_loss),
    "quadratic_weighted_kappa": Metric(1.0, _zero, labels=quadratic_weighted_kappa),
    "map_at_3": Metric(1.0, lambda labels: min(1.0, (1 + 1 / 2 + 1 / 3) / len(labels.classes)), labels=map_at_3),
    "jaccard": Metric(1.0, _zero, labels=jaccard),
    "rmse": Metric(0.0, _of_constant(rmse, np.mean), numbers=rmse),
    "mse": Metric(0.0, _of_constant(mse, np.mean), numbers=mse),
    "mae": Metric(0.0, _of_constant(mae, np.median), numbers=mae),
    "medae": Metric(0.0, _of_constant(medae, np.median), numbers=medae),
    "rmsle": Metric(0.0, _of_constant(rmsle, _log_mean), numbers=rmsle),
    "smape": Metric(0.0, _of_constant(smape, np.median), numbers=smape),
    "r2": Metric(1.0, _zero, numbers=r2),
    "pearson": Metric(1.0, _zero, numbers=pearson),
    "spearman": Metric(1.0, _zero, numbers=spearman),
}
ALIASES = {"qwk": "quadratic_weighted_kappa", "auc": "roc_auc", "mcrmse": "rmse", "gini": "normalized_gini"}
"""Other names of metrics. Every metric of several columns is their mean, so mcrmse is rmse."""

_KEYWORDS = (
    ("map_at_3", r"(?:map|mpa) ?@ ?3"),
    ("quadratic_weighted_kappa", r"quadratic(?:ally)? weighted kappa|\bqwk\b"),
    ("f1_macro", r"macro[- ]?(?:averaged )?f1"),
    ("f1_micro", r"micro[- ]?(?:averaged )?f1"),
    ("f1", r"\bf1\b|\bf1[- ]score"),
    ("normalized_gini", r"gini coefficient|normalized gini"),
    ("roc_auc", r"area under the (?:roc|receiver)|roc[_ -]auc|auc[_ -]roc|\bauc\b|\broc\b"),
    ("log_loss", r"log[- _]?loss|cross[- ]entropy"),
    ("jaccard", r"jaccard"),
    ("spearman", r"spearman"),
    ("pearson", r"pearson"),
    ("smape", r"\bsmape\b|symmetric mean absolute percentage"),
    ("rmsle", r"\brmsle\b|root[- ]mean[- ]squared?[- ]log|mean column-?wise root mean squared log"),
    ("rmse", r"\brmse\b|\bmcrmse\b|root[- ]mean[- ]squared?[- ]error"),
    ("medae", r"\bmedae\b|median absolute error"),
    ("mae", r"\bmae\b|mean absolute error"),
    ("mse", r"\bmse\b|(?<!root )(?<!root-)mean[- ]squared?[- ]error"),
    ("r2", r"\br2\b|r\^2|r-squared|coefficient of determination"),
    ("accuracy", r"accuracy|percentage of \w+ (?:you )?correctly|correctly predict"),
)
_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KEYWORDS]
_EVALUATION = re.compile(r"^[#*\s]*evaluation\b|\b(?:is|are|be) (?:evaluated|scored)\b|\bMetric:", re.I | re.M)


def named_metric(name: object) -> str | None:
    """Return the canonical name of a metric, or None if it is not one of METRICS."""
    key = str(name or "").strip().lower().replace("-", "_").replace(" ", "_")
    key = ALIASES.get(key, key)
    return key if key in METRICS else None


def metric_in_text(text: str) -> str | None:
    """Return the metric that a task's text asks for: the first one named where it speaks of evaluation, else the first
    in the text; None if it names none."""
    for start in [*(match.start() for match in _EVALUATION.finditer(text)), 0]:
        window = text[start : start + 600] if start else text
        # the first mention counts; where two patterns match at one place, the more specific one, which is listed first
        hits = [(match.start(), rank, name) for rank, (name, p) in enumerate(_PATTERNS) if (match := p.search(window))]
        if hits:
            return min(hits)[2]
    return None
