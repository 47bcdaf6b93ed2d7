"""The reward node: where it reads the answers, what it pays, and what it says of failures."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.types.record import Call, Episode
from recipe.dsbench.reward import task_score

ANSWER = "id,species\n1,cat\n2,dog\n3,cat\n4,dog\n"
AGENTS = ("engineer", "modeler", "analyst")


def episode(submission=None, extra=None, refused=None, **keys):
    texts = {} if submission is None else {"submission.csv": submission}
    info = {"workspace": "w", "fetched": texts, "kept": list(texts), "refused": refused or {}}
    calls = [Call(name, name, i, "p", 0, env_info={}) for i, name in enumerate(AGENTS)]
    calls.insert(1, Call("engineer", "engineer", 0, "p", 0, round=1, env_info={}))
    calls[-1].env_info = info
    extra = {"answer_csv": ANSWER, "metadata": '{"metric": "accuracy"}'} if extra is None else extra
    sample = {"prompt": [{"role": "user", "content": "Classify."}], "extra_info": extra, **keys}
    return Episode("u", 0, sample, calls=calls)


def paid(made, **options):
    return asyncio.run(task_score(made, **options))


def test_every_action_earns_the_quality():
    made = episode("id,species\n1,cat\n2,dog\n3,cat\n4,cat\n")
    assert paid(made, weight=2.0) == {"engineer": [1.0, 1.0], "modeler": [1.0], "analyst": [1.0]}
    assert made.outcome == 1.0
    assert made.info == {
        "task/success": 1.0,
        "task/success/classification": 1.0,
        "task/quality": 0.5,  # from 0.5 (chance) to 1.0
        "task/quality/classification": 0.5,
        "task/fair/accuracy": 0.75,
        "task/fair/f1": pytest.approx(2 / 3),
        "task/accuracy": 0.75,
        "task/f1": pytest.approx(2 / 3),  # of dog: one of two is found, and nothing else
        "task/roc_auc": 0.75,
        "task/log_loss": pytest.approx(-math.log(1e-15) / 4, rel=1e-6),
        "final_reward": 0.5,
    }
    assert paid(made, solved_at=0.6) and made.outcome == 0.0


@pytest.mark.parametrize(
    ("submission", "refused", "reason"),
    [
        (None, None, "no submission"),
        (None, {"submission.csv": "it has 9 bytes; 4 may still leave the sandbox"}, "it has 9 bytes"),
        ("id,species\n1,cat\n", None, "1 rows for 4 ids"),
        ("\ufffd\ufffd", None, "no rows"),
    ],
)
def test_a_failure_earns_nothing_and_counts_as_chance(submission, refused, reason):
    made = episode(submission, refused=refused)
    assert paid(made) == {"engineer": [0.0, 0.0], "modeler": [0.0], "analyst": [0.0]}
    assert made.outcome == 0.0 and made.info["task/fair/accuracy"] == 0.5 and made.info["task/success"] == 0.0
    assert "task/accuracy" not in made.info
    assert made.info["task/failure"].startswith(reason)


@pytest.mark.parametrize(("metric", "fair"), [("rmse", []), ("mae", []), ("r2", ["task/fair/r2"])])
def test_metrics_in_the_unit_of_a_target_are_reported_in_percent_alone(metric, fair):
    """Their mean over tasks would be that of dollars and kilometres."""
    extra = {"answer_csv": "id,price\n1,10\n2,20\n3,50\n", "metadata": json.dumps({"metric": metric})}
    percents = ["task/fair/rmse_pct_of_range", "task/fair/rmse_pct_of_iqr"]
    for submission in ("id,price\n1,10\n2,25\n3,50\n", None):
        made = episode(submission, extra=extra)
        paid(made)
        assert {name for name in made.info if "fair" in name} == {*fair, *percents}
        assert not {"task/rmse", "task/mse", "task/mae"} & made.info.keys()
        assert (made.info[percents[0]] > 40.0) == (submission is None)


def test_the_answers_may_be_a_file_below_the_data_root(tmp_path):
    (tmp_path / "test_answer.csv").write_text(ANSWER)
    extra = {"answer_file": "test_answer.csv", "metadata": {"metric": "accuracy"}, "task": "Evaluation: F1 score"}
    for options, keys in (({"data_root": str(tmp_path)}, {}), ({}, {"data_folder": str(tmp_path)})):
        made = episode(ANSWER, extra=extra, **keys)
        assert paid(made, **options)["analyst"] == [1.0]


def test_the_published_text_names_the_metric_where_the_metadata_does_not():
    made = episode(ANSWER, extra={"answer_csv": ANSWER, "task": "Evaluation: Submissions are scored by the F1 score."})
    paid(made)
    assert made.info["task/fair/f1"] == 1.0


def test_a_sample_without_usable_answers_is_an_error_of_the_task(tmp_path):
    with pytest.raises(UserError, match="neither extra_info.answer_csv nor answer_file"):
        paid(episode(ANSWER, extra={"metadata": json.dumps({})}))
    with pytest.raises(UserError, match=r"extra_info.answer_file: .*none.csv: no file"):
        paid(episode(ANSWER, extra={"answer_file": "none.csv"}), data_root=str(tmp_path))
