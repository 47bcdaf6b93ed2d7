"""Submissions against answer files: the join by id, hostile content, fair averages."""

import json
import math
import os
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.dsbench import table
from recipe.dsbench.score import score_submission, target_statistics, truth_of

LABELS = b"id,species\n7,cat\n8,dog\n9,cat\n10,eel\n"
NUMBERS = b"row,price\n1,10\n2,20\n3,40\n4,50\n"


def labels(**facts):
    return truth_of(LABELS, {"metric": "accuracy", "data_type": "classification", **facts})


def numbers(**facts):
    return truth_of(NUMBERS, {"metric": "rmse", "data_type": "regression", **facts})


def test_rows_are_joined_by_id_not_by_position():
    shuffled = b"id,species\n10,eel\n8,dog\n9,cat\n7,cat\n"
    score = score_submission(shuffled, labels())
    assert score.success and score.value == 1.0 and score.quality == 1.0
    assert score.metrics["num_predictions"] == score.metrics["num_ground_truth"] == 4


def test_a_golden_classification_submission():
    score = score_submission(b"id,species\n7,cat\n8,cat\n9,dog\n10,eel\n", labels())
    assert score.metrics["accuracy"] == score.metrics["task_specified_metric"] == 0.5
    # cat: TP 1, FP 1, FN 1 -> 1/2 (twice), dog 0, eel 1
    assert score.metrics["f1"] == pytest.approx((2 * 0.5 + 0 + 1) / 4)
    assert "roc_auc" not in score.metrics and "log_loss" not in score.metrics
    assert score.chance == pytest.approx(1 / 3) and score.quality == pytest.approx((0.5 - 1 / 3) / (1 - 1 / 3))


def test_a_golden_regression_submission():
    score = score_submission(b"row,price\n1,12\n2,20\n3,36\n4,50\n", numbers())
    assert score.value == pytest.approx(math.sqrt((4 + 16) / 4))
    assert score.metrics["mse"] == pytest.approx(5.0) and score.metrics["mae"] == pytest.approx(1.5)
    assert score.metrics["target_range"] == 40 and score.metrics["target_mean"] == 30
    # quartiles by linear interpolation: 10 + 0.75 * 10 and 40 + 0.25 * 10
    assert score.metrics["target_q25"] == 17.5 and score.metrics["target_q75"] == 42.5
    assert score.metrics["target_iqr"] == 25 and score.metrics["target_median"] == 30
    assert score.metrics["rmse_pct_of_range"] == pytest.approx(100 * math.sqrt(5) / 40)
    assert score.metrics["rmse_pct_of_iqr"] == pytest.approx(100 * math.sqrt(5) / 25)
    assert score.chance == pytest.approx(math.sqrt(250))  # mean 30: deviations 20, 10, 10, 20
    assert score.quality == pytest.approx(1 - math.sqrt(5 / 250))


def test_percentages_of_an_empty_range_are_absent():
    import numpy as np

    found = target_statistics(np.array([3.0, 3.0]), 1.0)
    assert found["target_range"] == 0 and "rmse_pct_of_range" not in found and "rmse_pct_of_iqr" not in found


def test_several_targets_are_averaged():
    truth = truth_of(
        b"id,EC1,EC2\na,0,1\nb,1,0\nc,1,1\nd,0,0\n", {"metric": "roc_auc", "target_column": ["EC1", "EC2"]}
    )
    score = score_submission(b"EC2,id,EC1\n0.9,a,0.1\n0.1,b,0.9\n0.8,c,0.8\n0.8,d,0.2\n", truth)
    # EC1 is separated; of EC2's four pairs, three are ordered and one is tied
    assert score.value == pytest.approx((1.0 + 3.5 / 4) / 2)


def test_several_columns_of_probabilities_are_one_distribution():
    answer = b"id,win_a,win_b,tie\n1,1,0,0\n2,0,1,0\n3,0,0,1\n"
    truth = truth_of(answer, {"metric": "log_loss", "data_type": "classification"})
    assert truth.metric == "log_loss"
    score = score_submission(b"id,win_a,win_b,tie\n1,2,1,1\n2,0.25,0.5,0.25\n3,0,0,1\n", truth)
    assert score.value == pytest.approx(2 * math.log(2) / 3) and score.chance == pytest.approx(math.log(3))


def test_ids_may_have_passed_through_floating_point():
    assert score_submission(b"id,species\n7.0,cat\n8.0,dog\n9.0,cat\n10.0,eel\n", labels()).value == 1.0


def test_text_ids_are_compared_as_written():
    truth = truth_of(b"PassengerId,Survived\n0013_01,1\n0018_01,0\n", {"metric": "accuracy"})
    assert score_submission(b"PassengerId,Survived\n18_01,0\n0013_01,1\n", truth).reason == "1 unknown ids"
    assert score_submission(b"PassengerId,Survived\n0018_01,0\n0013_01,1\n", truth).value == 1.0


def test_names_may_differ_in_case_and_a_lone_prediction_column_may_have_any_name():
    assert score_submission(b"ID,prediction\n7,cat\n8,dog\n9,cat\n10,eel\n", labels()).value == 1.0


def test_string_labels_tagged_regression_are_classes():
    truth = labels(data_type="regression", metric=None)
    assert (truth.data_type, truth.metric) == ("classification", "accuracy")
    score = score_submission(LABELS, truth)
    assert score.value == 1.0 and "rmse" not in score.metrics


def test_the_text_names_the_metric_where_the_metadata_does_not():
    truth = truth_of(NUMBERS, {"data_type": "regression"}, "Evaluation: Mean Absolute Error (MAE)")
    assert truth.metric == truth.named == "mae"


def test_a_metric_that_does_not_fit_the_labels_is_replaced():
    truth = labels(metric="rmse")
    assert (truth.metric, truth.named) == ("accuracy", "rmse")


def test_metadata_may_be_json_text():
    assert truth_of(NUMBERS, json.dumps({"metric": "mae"})).metric == "mae"
    with pytest.raises(UserError, match="not JSON"):
        truth_of(NUMBERS, "{")
    with pytest.raises(UserError, match="must be an object"):
        truth_of(NUMBERS, "[1]")


def test_facts_that_do_not_fit_the_answer_file_are_ignored():
    truth = truth_of(NUMBERS, {"metric": "rmse", "id_column": "PassengerId", "target_column": "30_labels"})
    assert truth.id_column == "row" and list(truth.targets) == ["price"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "empty file"),
        (b"id\n1\n", "no target column"),
        (b"id,y\n1,2\n1,3\n", "repeats ids"),
        (b"id,y\n1,\n2,3\n", "empty cells"),
        (b"id,y\n1,5\n2,5\n", None),
    ],
)
def test_an_answer_file_that_cannot_be_used_is_an_error_of_the_task(answer, reason):
    if reason is None:
        with pytest.raises(UserError, match="r2: the truth is constant; correct the metric or the answer file"):
            truth_of(answer, {"metric": "r2", "data_type": "regression"})
    else:
        with pytest.raises(UserError, match=reason):
            truth_of(answer, {"metric": "mae", "data_type": "regression"})


def test_a_missing_answer_file_is_an_error_of_the_task(tmp_path):
    with pytest.raises(UserError, match=r"task x: .*test_answer.csv: no file"):
        truth_of(tmp_path / "test_answer.csv", where="task x")


HOSTILE = {
    "nothing": (b"", "empty file"),
    "spaces": (b" \n\n", "empty file"),
    "one row": (b"row,price\n1,10\n", "1 rows for 4 ids"),
    "header only": (b"row,price\n", "no rows"),
    "too many rows": (b"row,price\n" + b"1,10\n" * 5, "more than 4 rows"),
    "a million rows": (b"row,price\n" + b"1,10\n" * 10**6, "more than 4 rows"),
    "repeated ids": (b"row,price\n1,10\n1,10\n3,40\n4,50\n", "1 repeated ids"),
    "unknown ids": (b"row,price\n1,10\n2,10\n3,40\n99,50\n", "1 unknown ids"),
    "text ids": (b"row,price\na,10\n2,10\n3,40\n4,50\n", "unknown ids"),
    "enormous ids": (b"row,price\n" + b"9" * 100_000 + b",10\n2,10\n3,40\n4,50\n", "unknown ids"),
    "no id column": (b"index,price,x\n1,10,0\n2,20,0\n3,40,0\n4,50,0\n", "no column 'row'"),
    "no target column": (b"row,cost,guess\n1,10,1\n2,20,1\n3,40,1\n4,50,1\n", "no column 'price'"),
    "same column twice": (b"row,price,price\n1,1,1\n2,2,2\n3,3,3\n4,4,4\n", "same name"),
    "nan": (b"row,price\n1,nan\n2,20\n3,40\n4,50\n", "'nan' is not a finite number"),
    "inf": (b"row,price\n1,10\n2,-inf\n3,40\n4,50\n", "'-inf' is not a finite number"),
    "empty cell": (b"row,price\n1,10\n2,\n3,40\n4,50\n", "'' is not a finite number"),
    "text": (b"row,price\n1,ten\n2,20\n3,40\n4,50\n", "'ten' is not a finite number"),
    "long text": (b"row,price\n1," + b"x" * 1000 + b"\n2,20\n3,40\n4,50\n", r"'x{40}\.\.\.' is not a finite number"),
    "overflow": (b"row,price\n1,1e308\n2,20\n3,40\n4,50\n", "rmse: predictions are too large"),
    "ragged": (b"row,price\n1,10\n2,20,30\n3,40\n4,50\n", "line 3 has 3 cells, the header 2"),
    "binary": (bytes(range(256)) * 4, "not a text file"),
    "latin-1": ("row,preis in €\n".encode("cp1252"), "not UTF-8"),
    "pickle": (b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94", "not a text file"),
    "endless cell": (b'row,price\n1,"' + b"x" * 10**6, "not CSV: field larger than field limit"),
    "endless header": (b"a" * 10**6, "the header has more than 65536 bytes"),
    "many columns": (b"," * 1000 + b"\n1,2\n", "more than 256 columns"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_submission_is_a_failure_with_a_reason(case):
    data, reason = HOSTILE[case]
    score = score_submission(data, numbers())
    assert not score.success and score.value is None
    assert score.quality == 0.0 and score.fair_metrics["rmse_pct_of_range"] == 100 * score.chance / 40
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(score.reason)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_content_raises(data):
    for truth in (numbers(), labels()):
        score = score_submission(data, truth)
        assert score.success == (score.reason == "")


cells = st.sampled_from(["1", "2.0", "nan", "", "cat", "dog", "1e308", "-1", '"', "row", "price", " 3 ", "é", "\t"])


@given(st.lists(st.lists(cells, min_size=1, max_size=3).map(",".join), max_size=6).map("\n".join))
def test_no_table_raises(text):
    for data in (text, f"row,price\n{text}", f"id,species\n{text}"):
        for truth in (numbers(), labels(), numbers(metric="rmsle"), labels(metric="map_at_3")):
            score_submission(data.encode(), truth)


def test_a_gigabyte_is_not_read(tmp_path):
    path = tmp_path / "submission.csv"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse
    truth = numbers()
    tracemalloc.start()
    score = score_submission(path, truth, max_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert score.reason == "larger than 1 MB"
    assert peak < 8 << 20


def test_what_is_not_a_regular_file_is_a_failure(tmp_path):
    assert score_submission(tmp_path / "none.csv", numbers()).reason == "no file"
    assert score_submission(tmp_path, numbers()).reason == "not a regular file"
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    assert score_submission(tmp_path / "pipe", numbers()).reason == "not a regular file"
    assert score_submission(None, numbers()).reason == "no submission"


def test_a_submission_as_large_as_the_answers_is_within_the_default_limit():
    assert table.MAX_BYTES >= 2_000_000 * len("1234567,0.1234567890123\n")


def test_a_failure_is_fair_to_chance():
    lost = score_submission(b"", numbers())
    assert (lost.chance, lost.quality, lost.value) == (pytest.approx(math.sqrt(250)), 0.0, None)
    low = score_submission(b"row,price\n1,12\n2,20\n3,36\n4,50\n", numbers())
    assert low.value == pytest.approx(math.sqrt(5))
    # a mean over tasks has no unit
    for score, error in ((lost, math.sqrt(250)), (low, math.sqrt(5))):
        percent = {"rmse_pct_of_range": 100 * error / 40, "rmse_pct_of_iqr": 100 * error / 25}
        assert score.fair_metrics == pytest.approx(percent)


def test_guessing_has_no_quality_and_better_predictions_have_more():
    rng = random.Random(0)
    values = [rng.gauss(50, 10) for _ in range(400)]
    answer = "id,y\n" + "\n".join(f"{i},{v}" for i, v in enumerate(values))
    truth = truth_of(answer.encode(), {"metric": "rmse"})
    mean = sum(values) / len(values)
    qualities = []
    for share in (0.0, 0.5, 0.9, 1.0):
        rows = [f"{i},{mean + share * (v - mean)}" for i, v in enumerate(values)]
        qualities.append(score_submission(("id,y\n" + "\n".join(rows)).encode(), truth).quality)
    assert qualities == pytest.approx([0.0, 0.5, 0.9, 1.0])


@pytest.mark.parametrize(
    ("answer", "facts", "problem"),
    [
        ("0.1\n0.1\n0.1", {"metric": "rmse"}, "rmse: guessing without the features reaches 0"),
        ("0\n5\n5\n5", {"metric": "medae"}, "medae: guessing without the features reaches 0"),
        ("3\n3\n3", {"metric": "pearson"}, "pearson: the answers themselves reach 0, not 1"),
        ("1e200\n2e200", {"metric": "mse"}, "mse: guessing without the features reaches inf"),
        ("cat\ncat", {"metric": "accuracy"}, "accuracy: guessing without the features reaches 1"),
        ("big cat\ndog\neel", {"metric": "map_at_3"}, "map_at_3: the answers themselves reach 0.666667, not 1"),
        ("1\n2", {"target_column": 5}, "target_column must be a name or a list of names, not 5"),
        ("1\n2", {"target_column": [["y"]]}, r"target_column must be a name or a list of names, not \[\['y'\]\]"),
    ],
)
def test_answers_that_give_no_scale_are_an_error_of_the_user(answer, facts, problem):
    rows = "".join(f"{number},{value}\n" for number, value in enumerate(answer.split("\n")))
    with pytest.raises(UserError, match=f"task x: .*{problem}") as caught:
        truth_of(b"id,y\n" + rows.encode(), facts, where="task x")
    assert "\n" not in str(caught.value)


def test_ids_that_are_joined_as_one_are_repeated():
    with pytest.raises(UserError, match="column id of the answer file repeats ids"):
        truth_of(b"id,y\n01,1\n1,2\n")
    assert truth_of(b"id,y\n01,1\n1,2\nx,3\n").ids == ["01", "1", "x"]
