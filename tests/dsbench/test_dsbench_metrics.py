"""Formulas against independent ones: definitions written out, pairwise counts, numbers worked out by hand."""

import itertools
import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dsbench.columns import data_type_of, labels_of, numbers_or_nan
from recipe.dsbench.metrics import METRICS, Unscorable, average_ranks, log_loss_of_columns, metric_in_text, named_metric


def of(metric, truth, predicted):
    found = METRICS[metric]
    if found.labels is not None:
        return found.labels(labels_of([str(t) for t in truth], [str(p) for p in predicted], "y"))
    return found.numbers(np.array(truth, float), np.array(predicted, float))


def chance(metric, truth):
    found = METRICS[metric]
    texts = [str(t) for t in truth]
    return found.chance(labels_of(texts, texts, "y") if found.labels else np.array(truth, float))


@pytest.mark.parametrize(
    ("metric", "truth", "predicted", "value"),
    [
        ("accuracy", ["a", "b", "a", "c"], ["a", "a", "a", "c"], 3 / 4),
        ("accuracy", [0, 1, 1, 0], [0.2, 0.7, 0.4, 0.1], 3 / 4),  # probabilities: cut at 0.5
        ("accuracy", [0, 1, 1, 0], ["0.0", "1.0", "1", "1"], 3 / 4),
        ("accuracy", ["True", "False"], ["true", "FALSE"], 1.0),
        ("accuracy", ["no", "yes"], ["no", "maybe"], 1 / 2),
        ("f1", [0, 0, 1, 1, 1], [0, 1, 1, 1, 0], 2 / 3),  # TP 2, FP 1, FN 1
        ("f1", ["a", "a", "b", "c"], ["a", "b", "b", "a"], (2 * (1 / 2) + 1 * (2 / 3) + 1 * 0) / 4),
        ("f1_macro", ["a", "a", "b", "c"], ["a", "b", "b", "a"], (1 / 2 + 2 / 3 + 0) / 3),
        ("f1_micro", ["a", "a", "b", "c"], ["a", "b", "b", "a"], 1 / 2),
        ("roc_auc", [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], 3 / 4),
        ("roc_auc", [0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5], 1 / 2),
        ("roc_auc", ["No", "Yes", "Yes"], [0.2, 0.9, 0.1], 1 / 2),
        ("roc_auc", ["No", "Yes", "Yes"], ["No", "Yes", "No"], 3 / 4),
        ("roc_auc", [1, 2, 2], [-3.0, 5.0, 9.0], 1.0),
        ("normalized_gini", [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], 1 / 2),
        ("log_loss", [1, 0], [0.8, 0.4], -(math.log(0.8) + math.log(0.6)) / 2),
        ("log_loss", [1, 0], [0.0, 0.0], -math.log(1e-15) / 2 - math.log(1 - 1e-15) / 2),
        ("quadratic_weighted_kappa", [1, 2, 3], [1, 2, 3], 1.0),
        ("quadratic_weighted_kappa", [1, 2, 3], [3, 2, 1], -1.0),
        ("quadratic_weighted_kappa", [1, 1, 2, 2], [1, 2, 1, 2], 0.0),
        ("map_at_3", ["flu", "cold", "rash"], ["flu cold rash", "flu cold", "a b c rash"], (1 + 1 / 2 + 0) / 3),
        ("jaccard", ["so very sad", "Fine"], ["very sad day", "fine"], (2 / 4 + 1) / 2),
        ("mse", [1, 2, 3], [2, 2, 5], 5 / 3),
        ("rmse", [1, 2, 3], [2, 2, 5], math.sqrt(5 / 3)),
        ("mae", [1, 2, 3], [2, 2, 5], 1.0),
        ("medae", [1, 2, 3, 9], [2, 2, 5, 9], 0.5),
        ("rmsle", [0, math.e - 1], [math.e - 1, math.e - 1], math.sqrt(1 / 2)),
        ("smape", [0, 100], [0, 300], 100 * (0 + 200 / 200) / 2),
        ("r2", [1, 2, 3], [1, 2, 3], 1.0),
        ("r2", [1, 2, 3], [2, 2, 2], 0.0),
        ("pearson", [1, 2, 3], [2, 4, 6], 1.0),
        ("pearson", [1, 2, 3], [5, 5, 5], 0.0),
        ("spearman", [1, 2, 3], [1, 10, 1000], 1.0),
        ("spearman", [1, 2, 3, 4], [2, 1, 4, 3], 1 - 6 * 4 / (4 * 15)),  # no ties: 1 - 6 sum d^2 / n(n^2 - 1)
    ],
)
def test_values_worked_out_by_hand(metric, truth, predicted, value):
    assert of(metric, truth, predicted) == pytest.approx(value, abs=1e-12)


binary = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=30)


@given(binary)
def test_the_auc_is_the_share_of_ordered_pairs(pairs):
    positive = [score for label, score in pairs if label]
    negative = [score for label, score in pairs if not label]
    truth, predicted = [int(label) for label, _ in pairs], [score for _, score in pairs]
    if not positive or not negative:
        return
    wins = sum(Fraction(p > n) + Fraction(p == n, 2) for p, n in itertools.product(positive, negative))
    assert of("roc_auc", truth, predicted) == pytest.approx(float(wins / (len(positive) * len(negative))))


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40))
def test_average_ranks_count_smaller_and_half_of_equal_values(values):
    expected = [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]
    assert average_ranks(np.array(values, float)).tolist() == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=40))
def test_kappa_compares_the_disagreement_with_that_of_independent_raters(pairs):
    truth, predicted = [t for t, _ in pairs], [p if p in {t for t, _ in pairs} else t for t, p in pairs]
    observed = sum((t - p) ** 2 for t, p in zip(truth, predicted, strict=True)) / len(truth)
    expected = sum((t - p) ** 2 for t in truth for p in predicted) / len(truth) ** 2
    value = of("quadratic_weighted_kappa", truth, predicted)
    assert value == pytest.approx(1 - observed / expected if expected else 1.0)


def test_r2_and_pearson_agree_for_a_line_through_the_data():
    rng = random.Random(0)
    truth = [rng.gauss(0, 3) for _ in range(50)]
    x = [t + rng.gauss(0, 1) for t in truth]
    slope, offset = np.polyfit(x, truth, 1)
    fit = [slope * value + offset for value in x]
    assert of("r2", truth, fit) == pytest.approx(of("pearson", truth, fit) ** 2)


def test_the_log_loss_of_several_columns_is_that_of_the_true_column():
    truth = {"a": ["1", "0"], "b": ["0", "0"], "tie": ["0", "1"]}
    predicted = {"a": ["0.5", "0.1"], "b": ["0.25", "0.1"], "tie": ["0.25", "0.8"]}
    columns = [labels_of(["0", "1", *truth[n]], ["0", "0", *predicted[n]], n) for n in truth]
    with pytest.raises(Unscorable, match="one-hot"):
        log_loss_of_columns(columns)
    # the first two rows, so that every column has both classes: (1, 0, 0) and (0, 1, 0)
    rows = [["1", "0", "1", "0"], ["0", "1", "0", "0"], ["0", "0", "0", "1"]]
    guesses = [["1", "0", "0.5", "1"], ["0", "1", "0.25", "1"], ["0", "0", "0.25", "8"]]
    columns = [labels_of(t, p, "y") for t, p in zip(rows, guesses, strict=True)]
    assert log_loss_of_columns(columns) == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 4)


@pytest.mark.parametrize(
    ("metric", "truth", "value"),
    [
        ("accuracy", ["a", "b", "c", "a"], 1 / 3),
        ("accuracy", [0, 1, 1], 1 / 2),
        ("roc_auc", [0, 1, 1], 1 / 2),
        ("log_loss", [0, 1, 1], math.log(2)),
        ("f1", [0, 1, 1, 1], 2 * 0.75 * 0.5 / (0.75 + 0.5)),  # precision = share, recall = 1/2
        ("map_at_3", list("abcdefghijk"), (1 + 1 / 2 + 1 / 3) / 11),
        ("rmse", [1, 2, 3], math.sqrt(2 / 3)),
        ("mae", [0, 0, 9], 3.0),  # the median
        ("r2", [1, 2, 3], 0.0),
        ("rmsle", [0, math.e**2 - 1], 1.0),
    ],
)
def test_chance_is_the_value_of_guessing_without_features(metric, truth, value):
    assert chance(metric, truth) == pytest.approx(value)


@pytest.mark.parametrize("metric", METRICS)
def test_the_truth_itself_scores_best(metric):
    truth = [1.0, 2.0, 2.0, 7.0] if METRICS[metric].numbers else [0, 1, 1, 0]
    assert of(metric, truth, truth) == pytest.approx(METRICS[metric].best, abs=1e-9)


def test_random_guesses_come_out_at_chance():
    rng = random.Random(1)
    truth = [rng.choices(("a", "b", "c"), (5, 3, 2))[0] for _ in range(20_000)]
    guesses = [rng.choice(("a", "b", "c")) for _ in truth]
    for metric in ("accuracy", "f1"):
        assert of(metric, truth, guesses) == pytest.approx(chance(metric, truth), abs=0.01)


@pytest.mark.parametrize(
    ("metric", "truth", "predicted", "reason"),
    [
        ("accuracy", ["a", "b", "c"], ["0.1", "0.2", "0.3"], "no prediction is one of the classes"),
        ("roc_auc", ["a", "b", "c"], ["a", "b", "c"], "the truth has 3"),
        ("roc_auc", ["a", "b"], ["x", "y"], "numbers or labels of two classes"),
        ("roc_auc", [1, 1], [0.1, 0.2], "the truth has 1"),
        ("log_loss", [0, 1], [0.5, 1.5], r"probabilities in \[0, 1\]"),
        ("quadratic_weighted_kappa", ["a", "b"], ["a", "b"], "not numbers"),
        ("quadratic_weighted_kappa", [1, 2, 3], [1, 2, 4], "not one of the classes"),
        ("rmsle", [0, 1], [0, -1], "-1 or less"),
        ("r2", [2, 2], [1, 2], "constant"),
    ],
)
def test_what_cannot_be_computed_has_a_reason(metric, truth, predicted, reason):
    with pytest.raises(Unscorable, match=reason):
        of(metric, truth, predicted)


@pytest.mark.parametrize(
    ("values", "declared", "metric", "data_type"),
    [
        (["Graduate", "Dropout"], "regression", "accuracy", "classification"),  # playground-series-s4e6
        (["Graduate", "Dropout"], "regression", None, "classification"),
        (["Graduate", "1.0"], "regression", "rmse", "classification"),  # text is never a number
        (["0", "1", "2"], "regression", "accuracy", "classification"),
        (["0", "1"], "classification", "rmse", "regression"),
        ([str(i / 7) for i in range(200)], "regression", "accuracy", "regression"),
        ([str(i / 7) for i in range(200)], None, "accuracy", "classification"),
        (["3", "8", "9"], "regression", None, "regression"),
        (["3", "8", "9"], None, None, "classification"),
        (["3.5", "8", "9"], None, None, "regression"),
        ([str(i) for i in range(11)], None, None, "regression"),
        (["0.0", "1.0"], None, None, "classification"),
    ],
)
def test_the_data_type_follows_labels_then_metric_then_metadata(values, declared, metric, data_type):
    assert data_type_of(values, declared=declared, metric=metric) == data_type


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-Infinity", "1e999", "", "1_000", "0x1f", "١", "1 2", "True", "9" * 400]
)
def test_texts_that_are_not_finite_numbers(text):
    assert np.isnan(numbers_or_nan([text])[0])


@given(st.text(max_size=20))
def test_any_text_is_read_as_a_finite_number_or_none(text):
    number = numbers_or_nan([text])[0]
    assert np.isnan(number) or (np.isfinite(number) and float(text) == number)


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("Evaluation: Submissions are evaluated using the accuracy score.", "accuracy"),
        ("A study of accuracy.\n\nEvaluation\nRoot Mean Squared Log Error (RMSLE)", "rmsle"),
        ("Submissions are scored on the root mean squared error.", "rmse"),
        ("Scored by mean squared error", "mse"),
        ("Evaluation: area under the ROC curve", "roc_auc"),
        ("Metric: log loss", "log_loss"),
        ("Evaluation: the macro F1 score", "f1_macro"),
        ("Predict the price of a house.", None),
    ],
)
def test_the_metric_is_named_by_the_text(text, metric):
    assert metric_in_text(text) == metric


def test_other_names_of_metrics():
    assert named_metric("QWK") == "quadratic_weighted_kappa"
    assert named_metric("ROC AUC") == named_metric("auc") == "roc_auc"
    assert named_metric("mcrmse") == "rmse"
    assert named_metric(None) is None and named_metric("beauty") is None


def test_metrics_are_json():
    assert json.dumps({name: metric.best for name, metric in METRICS.items()})
