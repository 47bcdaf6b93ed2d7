"""The generated tables: what the target depends on, where the answers are, and the wall between train and test."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from recipe.dag.train.data import load_samples
from recipe.dsbench import kit, tabular
from recipe.dsbench.score import score_submission, truth_of

FORMS = {"rmse": "value", "mae": "value", "accuracy": "label", "roc_auc": "probability"}


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def tasks():
    return tabular.splits(0, 48, 24)


def test_tables_have_the_promised_columns_and_the_answers_are_only_in_the_answer_file(tasks):
    for task in [*tasks[0], *tasks[1]]:
        train, test, answer = map(table, (task.train, task.test, task.answer))
        thing, target = task.domain.thing, task.domain.target
        names = [thing, *(column.name for column in task.columns)]
        assert list(train[0]) == [*names, target] and list(test[0]) == names and list(answer[0]) == [thing, target]
        assert (len(train), len(test)) == (tabular.TRAIN_ROWS, tabular.TEST_ROWS)
        assert [row[thing] for row in test] == [row[thing] for row in answer]
        assert not {row[thing] for row in train} & {row[thing] for row in test}
        assert all(name in task.text for name in [*names, target])


def test_the_metric_of_the_text_is_the_metadatas(tasks):
    for index, task in enumerate(tasks[1]):
        metadata = json.loads(tabular.row(task, index, "test")["extra_info"]["metadata"])
        truth = truth_of(task.answer.encode(), {}, task.text)
        assert truth.metric == metadata["metric"] == task.metric
        assert truth.data_type == metadata["data_type"]


def test_classes_are_balanced_and_all_domains_used(tasks):
    train, _ = tasks
    assert {task.domain.thing for task in train} == {domain.thing for domain in tabular.DOMAINS}
    for task in train:
        if task.domain.labels:
            targets = [row[task.domain.target] for row in table(task.train) + table(task.answer)]
            shares = [targets.count(label) / len(targets) for label in task.domain.labels]
            assert shares == pytest.approx([1 / len(shares)] * len(shares), abs=0.02)


def test_a_seed_gives_the_same_tasks_and_another_seed_others():
    assert tabular.generate(7, 16) == tabular.generate(7, 16)
    assert tabular.generate(7, 16) != tabular.generate(8, 16)


def test_train_and_test_share_neither_text_nor_table(tasks):
    train, test = tasks
    tabular.check_disjoint(train, test)
    texts = {data_script.text_key(task.text) for task in train}
    assert len(texts) == len(train) and not texts & {data_script.text_key(task.text) for task in test}
    with pytest.raises(RuntimeError, match="1 training tasks have the text of a test task"):
        tabular.check_disjoint([*train, test[0]], test)


def test_too_many_tasks_are_refused(monkeypatch):
    monkeypatch.setattr(tabular, "PLACES", ("Oslo",))
    monkeypatch.setattr(tabular, "_MAX_MISSES", 50)
    monkeypatch.setattr(tabular, "_rows", lambda domain, columns, rng: [["1", *("2" for _ in columns), "3"]] * 100)
    with pytest.raises(UserError, match="ask for fewer"):
        tabular.generate(0, 20_000)


def quality(task, folder, monkeypatch, columns, model) -> float:
    """Return the quality of a submission made with the kit."""
    monkeypatch.chdir(folder)
    (folder / "train.csv").write_text(task.train)
    (folder / "test.csv").write_text(task.test)
    with contextlib.redirect_stdout(io.StringIO()):
        kit.prepare(*columns)
        kit.train(model)
        kit.submit(task.domain.thing, task.domain.target, FORMS[task.metric])
    truth = truth_of(task.answer.encode(), {"metric": task.metric})
    score = score_submission(folder / "submission.csv", truth)
    assert score.success, score.reason
    return score.quality


def test_relevant_columns_and_the_right_model_predict_and_others_do_not(tasks, tmp_path, monkeypatch):
    best, swapped, wrong_model, irrelevant = [], [], [], []
    for task in tasks[1]:
        relevant = [column.name for column in task.domain.relevant]
        others = [column.name for column in task.columns if column.name not in relevant]
        right, wrong = ("bowl", "linear") if task.domain.peaked else ("linear", "bowl")
        best.append(quality(task, tmp_path, monkeypatch, relevant, right))
        swapped.append(quality(task, tmp_path, monkeypatch, [*relevant[:2], others[0]], right))
        wrong_model.append(quality(task, tmp_path, monkeypatch, relevant, wrong))
        irrelevant.append(quality(task, tmp_path, monkeypatch, others, right))

    def mean(values):
        return sum(values) / len(values)

    assert mean(best) > 0.75 and min(best) > 0.4
    assert mean(swapped) < mean(best) - 0.25
    assert mean(wrong_model) < 0.3 and mean(irrelevant) < 0.15


def test_the_kit_refuses_what_it_cannot_do(tasks, tmp_path, monkeypatch):
    task = next(task for task in tasks[1] if not task.domain.labels)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_text(task.train)
    (tmp_path / "test.csv").write_text(task.test)
    names = [column.name for column in task.columns]
    for columns, problem in ((names[:4], "one to 3"), ((), "one to 3"), ((names[0],) * 2, "one to 3")):
        with pytest.raises(SystemExit, match=problem):
            kit.prepare(*columns)
    with pytest.raises(SystemExit, match="no column nothing"):
        kit.prepare("nothing")
    with pytest.raises(SystemExit, match="X_train.pkl is missing"):
        kit.train("linear")
    kit.prepare(names[0])
    with pytest.raises(SystemExit, match="no model forest"):
        kit.train("forest")
    kit.train("mean")
    with pytest.raises(SystemExit, match="no form picture"):
        kit.submit(task.domain.thing, task.domain.target, "picture")
    with pytest.raises(SystemExit, match="the target is a number"):
        kit.submit(task.domain.thing, task.domain.target, "label")
    with pytest.raises(SystemExit, match="no column index"):
        kit.submit("index", task.domain.target, "value")


def test_the_kit_needs_the_standard_library_alone():
    source = open(kit.__file__).read()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names


def test_the_script_writes_rows_whose_files_do_not_hold_the_answers(tmp_path, capsys):
    extra = tmp_path / "kit.py"
    extra.write_text("def helper(): ...\n")
    options = ["--local_dir", str(tmp_path / "data"), "--train_size", "16", "--test_size", "8", "--file", str(extra)]
    tabular.main(options)
    assert "train: 16 rows" in capsys.readouterr().out
    for split, count in (("train", 16), ("test", 8)):
        samples = load_samples(str(tmp_path / "data" / f"{split}.parquet"))
        assert len(samples) == count
        for sample in samples:
            files = sample["extra_info"]["files"]
            assert set(files) == {"train.csv", "test.csv", "kit.py"}
            assert files["kit.py"] == {"content": "def helper(): ...\n"}
            assert sample["extra_info"]["answer_csv"] not in json.dumps(files)
            target = sample["extra_info"]["answer_csv"].splitlines()[0].split(",")[1]
            assert target not in files["test.csv"]["content"].splitlines()[0].split(",")
            assert sample["extra_info"]["data_type"] in ("classification", "regression")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--train_size", "0"], "--train_size 0: must be 1 or more"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (["--file", "/nowhere/kit.py"], "--file: .*No such file"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, problem):
    with pytest.raises(UserError, match=problem):
        tabular.main(["--local_dir", str(tmp_path), *options])
