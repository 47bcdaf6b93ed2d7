"""Columns of text as classes or numbers.

Invariant: a text label is a class, never a number; 1 and 1.0 are one class, and so are True and true. What cannot be
read as what the task needs raises Unscorable, which quotes at most a few characters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from recipe.dsbench.metrics import CLASSIFICATION, DATA_TYPES, METRICS, REGRESSION, Floats, Labels, Unscorable

MANY_CLASSES = 100
"""With more distinct values than this, numbers are not taken for classes against what the metadata declares."""


def data_type_of(values: Sequence[str], *, declared: str | None = None, metric: str | None = None) -> str:
    """Return whether a target is classified or estimated.

    Text is classified, whatever the metadata declares. Numbers follow the task's metric; if it is one for classes and
    the metadata says otherwise, only with at most MANY_CLASSES distinct values. Without a metric, the metadata decides,
    and without either, two distinct values or up to ten distinct integers are classes.
    """
    distinct = numbers_or_nan(list(set(values)))
    if np.isnan(distinct).any():
        return CLASSIFICATION
    asked = METRICS[metric].data_type if metric else None
    if asked == REGRESSION or (asked and (len(distinct) <= MANY_CLASSES or declared != REGRESSION)):
        return asked
    if declared in DATA_TYPES:
        return str(declared)
    integers = bool((distinct == np.floor(distinct)).all())
    return CLASSIFICATION if len(distinct) <= 2 or (integers and len(distinct) <= 10) else REGRESSION


def floats_of(values: Sequence[str], name: str) -> Floats:
    """Return finite numbers, [N]. Raises Unscorable, which names the column and the first other value."""
    numbers = numbers_or_nan(values)
    bad = np.isnan(numbers)
    if bad.any():
        raise Unscorable(f"column '{name}': {_quoted(values[int(bad.argmax())])} is not a finite number")
    return numbers


def labels_of(truth: Sequence[str], predicted: Sequence[str], name: str) -> Labels:
    """Return one column of a classification task. Predictions of two classes may be labels or scores of the last class;
    scores become labels, at 0.5, only if the classes are 0 and 1. Raises Unscorable for empty cells."""
    if "" in predicted:
        raise Unscorable(f"column '{name}' has empty cells")
    right, guesses = _canonical_all(truth), _canonical_all(predicted)
    names = list(dict.fromkeys(right))
    values = numbers_or_nan(names)
    numeric = not np.isnan(values).any()
    order = np.argsort(values, kind="stable") if numeric else np.argsort(np.array(names, dtype=object))
    classes = tuple(names[index] for index in order)
    index = {name: number for number, name in enumerate(classes)}
    chosen = np.array([index.get(guess, -1) for guess in guesses])
    scores = None
    if len(classes) == 2 and (chosen >= 0).all():
        scores = chosen.astype(float)
    elif len(classes) == 2:
        numbers = numbers_or_nan(guesses)
        scores = None if np.isnan(numbers).any() else numbers
        if scores is not None and classes == ("0", "1"):
            chosen = (scores >= 0.5).astype(int)
    return Labels(
        classes, np.array([index[label] for label in right]), chosen, scores, (tuple(truth), tuple(predicted))
    )


def numbers_or_nan(values: Sequence[str]) -> Floats:
    """Return each text as a number, NaN where it is not a finite one, [N]."""
    numbers = np.array(pd.to_numeric(np.array(values, dtype=object), errors="coerce"), float)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _canonical_all(labels: Sequence[str]) -> list[str]:
    spelling = {label: _canonical(label) for label in set(labels)}
    return [spelling[label] for label in labels]


def _canonical(label: str) -> str:
    number = numbers_or_nan([label])[0]
    if np.isnan(number):
        return label.lower() if label.lower() in ("true", "false") else label
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(float(number))


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
