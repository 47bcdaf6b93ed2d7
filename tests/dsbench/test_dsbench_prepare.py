"""The published modelling tasks: forms of the files, cleaned prompts, tables that are missing, and what agents read."""

from __future__ import annotations

import json
import shutil

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train.data import load_samples
from recipe.dsbench import prepare

PROMPT = "Evaluation\n\nSubmissions are evaluated using the accuracy score."


def task(name="cats", **keys):
    metadata = {
        "task_id": name,
        "task_type": "data_modeling",
        "data_type": "regression",
        "train_file": f"./tables/{name}/train.csv",
        "test_file": f"./tables/{name}/test.csv",
        "answer_dir": f"./answers/{name}",
        "url": "https://example.org",
    }
    return {"prompt": f"{PROMPT} ({name})", "answer": None, "metadata": metadata} | keys


@pytest.fixture
def project(tmp_path):
    """`project(tasks, ...)`: writes the published files and tables, and returns the script's options."""

    def make(tasks, *, test=None, cleaned=None, lines=True, tables=True):
        def write(name, rows):
            text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows)
            (tmp_path / name).write_text(text)
            return str(tmp_path / name)

        options = ["--input", write("train.json", tasks), "--data_root", str(tmp_path)]
        options += ["--local_dir", str(tmp_path / "out")]
        options += ["--test_input", write("eval.json", test)] if test else ["--test_size", "1"]
        if cleaned is not None:
            (tmp_path / "cleaned.json").write_text(json.dumps(cleaned))
            options += ["--cleaned", str(tmp_path / "cleaned.json")]
        for row in [*tasks, *(test or [])] if tables else []:
            metadata = row["metadata"] if isinstance(row["metadata"], dict) else json.loads(row["metadata"])
            for folder, names in (("tables", ("train.csv", "test.csv")), ("answers", ("test_answer.csv",))):
                (tmp_path / folder / metadata["task_id"]).mkdir(parents=True, exist_ok=True)
                for name in names:
                    (tmp_path / folder / metadata["task_id"] / name).write_text("id,species\n1,cat\n2,dog\n")
        return options

    return make


def written(tmp_path, split="train"):
    return load_samples(str(tmp_path / "out" / f"{split}.parquet"))


@pytest.mark.parametrize("lines", [True, False])
def test_json_lines_and_lists_are_read(project, tmp_path, lines):
    prepare.main(project([task("a"), task("b")], test=[task("c")], lines=lines))
    assert [json.loads(s["extra_info"]["metadata"])["task_id"] for s in written(tmp_path)] == ["a", "b"]
    assert len(written(tmp_path, "test")) == 1


def test_metadata_may_be_text_or_an_object(project, tmp_path):
    prepare.main(project([task("a", metadata=json.dumps(task("a")["metadata"])), task("b")], test=[task("c")]))
    first, second = (json.loads(s["extra_info"]["metadata"]) for s in written(tmp_path))
    assert first.keys() == second.keys() and first["task_id"] == "a"


def test_agents_read_the_cleaned_prompt_and_the_coach_the_published_one(project, tmp_path):
    cleaned = {
        "a": {"cleaned_prompt": "Classify.", "metric": "ROC AUC", "id_column": "id", "target_column": ["species"]},
        "b": "Only a text.",
    }
    prepare.main(project([task("a"), task("b"), task("d")], test=[task("c")], cleaned=cleaned))
    samples = written(tmp_path)
    assert [sample["prompt"][0]["content"] for sample in samples] == ["Classify.", "Only a text.", f"{PROMPT} (d)"]
    assert [sample["extra_info"]["task"] for sample in samples] == [f"{PROMPT} ({name})" for name in "abd"]
    facts = [json.loads(sample["extra_info"]["metadata"]) for sample in samples]
    assert facts[0]["metric"] == "roc_auc" and facts[0]["target_column"] == ["species"]
    assert facts[1]["metric"] == facts[2]["metric"] == "accuracy"


def test_agents_get_the_tables_and_never_the_answers(project, tmp_path):
    prepare.main(project([task("a")], test=[task("c")]))
    (sample,) = written(tmp_path)
    assert sample["extra_info"]["files"] == {
        "train.csv": {"path": "tables/a/train.csv"},
        "test.csv": {"path": "tables/a/test.csv"},
    }
    assert sample["extra_info"]["answer_file"] == "answers/a/test_answer.csv"


@pytest.mark.parametrize(
    "test_file", ["answers/a/test_answer.csv", "tables/../answers/a/test_answer.csv", "link", "hard"]
)
def test_answers_under_another_name_are_never_a_file_for_the_agents(project, tmp_path, test_file):
    project([task("a")], test=[task("c")])
    (tmp_path / "link").symlink_to(tmp_path / "answers" / "a" / "test_answer.csv")
    (tmp_path / "hard").hardlink_to(tmp_path / "answers" / "a" / "test_answer.csv")
    leaking = task("a")
    leaking["metadata"]["test_file"] = test_file
    with pytest.raises(UserError, match="is both the answer and a file for the agents"):
        prepare.main(project([leaking], test=[task("c")]))


def test_an_answer_path_replaces_the_answer_dir(project, tmp_path):
    row = task("a", answer="answers/a/test_answer.csv")
    del row["metadata"]["answer_dir"]
    prepare.main(project([row], test=[task("c")]))
    assert written(tmp_path)[0]["extra_info"]["answer_file"] == "answers/a/test_answer.csv"
    row["answer"] = None
    with pytest.raises(UserError, match="row 1: `answer` is null and metadata has no answer_dir"):
        prepare.main(project([row], test=[task("c")]))


def test_missing_tables_are_one_line_and_nothing_is_written(project, tmp_path, capsys):
    tasks = [task(f"task{i}") for i in range(7)]
    options = project(tasks, test=[task("c")], tables=False)
    with pytest.raises(UserError) as caught:
        prepare.main(options)
    message = str(caught.value)
    assert "8 of 8 tasks lack tables below" in message and "task0, task1, task2, task3, task4, ...;" in message
    assert "tables/task0/train.csv; pass their --data_root, or --allow_missing" in message and "\n" not in message
    assert not (tmp_path / "out").exists()
    prepare.main([*options, "--allow-missing"])
    assert "warning: 8 of 8 tasks lack tables" in capsys.readouterr().out
    assert len(written(tmp_path)) == 7


def test_tasks_whose_tables_do_not_fit_are_named_the_largest_first(project, tmp_path, capsys):
    options = project([task("small"), task("large"), task("larger")], test=[task("c")])
    prepare.main(options)
    assert "do not fit" not in capsys.readouterr().out
    for name, size in (("large", 7 << 20), ("larger", (9 << 20) + 1)):
        with (tmp_path / "tables" / name / "test.csv").open("r+b") as file:
            file.truncate(size)
    prepare.main([*options, "--quota_mb", "8"])
    warning = "warning: the tables of 2 of 4 tasks do not fit into a folder of 8 MiB: larger (10 MiB), large (8 MiB);"
    assert warning in capsys.readouterr().out and len(written(tmp_path)) == 3


def test_the_data_type_is_that_of_the_score_not_what_the_metadata_declares(project, tmp_path):
    for tables in (True, False):  # by the labels, and without tables by the metric
        options = project([task("a")], test=[task("c")], tables=tables)
        prepare.main([*options, "--allow_missing"])
        (sample,) = written(tmp_path)
        assert json.loads(sample["extra_info"]["metadata"])["data_type"] == "regression"
        assert sample["extra_info"]["data_type"] == "classification"
        shutil.rmtree(tmp_path / "answers", ignore_errors=True)


def test_answers_that_cannot_be_scored_are_found_here(project, tmp_path):
    options = project([task("a")], test=[task("c")])
    (tmp_path / "answers" / "a" / "test_answer.csv").write_text("id,species\n1,cat\n1,dog\n")
    with pytest.raises(UserError, match="a: column id of the answer file repeats ids"):
        prepare.main(options)


def test_a_test_task_is_never_a_training_task(project, tmp_path, capsys):
    same_text = task("b") | {"prompt": task("c")["prompt"].upper()}
    prepare.main(project([task("a"), task("c"), same_text], test=[task("c")]))
    assert "left out 2 tasks among the test tasks" in capsys.readouterr().out
    assert len(written(tmp_path)) == 1


def test_tasks_are_held_out_without_a_test_file(project, tmp_path):
    prepare.main(project([task(name) for name in "abcd"]))
    ids = [{s["extra_info"]["task"] for s in written(tmp_path, split)} for split in ("train", "test")]
    assert len(ids[0]) == 3 and len(ids[1]) == 1 and not ids[0] & ids[1]


def test_a_held_out_text_is_in_no_training_task(project, tmp_path, capsys):
    same = [task(name, prompt=f"{PROMPT} {'again' * (number % 2)}") for number, name in enumerate("abcdef")]
    prepare.main(project(same))
    assert "left out 2 tasks among the test tasks" in capsys.readouterr().out
    assert len(written(tmp_path)) == 3


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (task("a", prompt=" "), "row 1: `prompt` must be the task's text"),
        (task("a", metadata="{"), "row 1: metadata: not JSON"),
        (task("a", metadata=None), "row 1: metadata: must be an object or its JSON text, not NoneType"),
        (task("a", metadata={"task_id": "a"}), "row 1: metadata lacks train_file, test_file"),
    ],
)
def test_a_malformed_task_is_one_line(project, tmp_path, row, problem):
    with pytest.raises(UserError, match=problem):
        prepare.main(project([row], test=[task("c")], tables=False))


def test_a_task_that_occurs_twice_is_refused(project):
    with pytest.raises(UserError, match="task_id a occurs twice"):
        prepare.main(project([task("a"), task("a")], test=[task("c")]))


def test_cleaned_prompts_of_another_form_are_refused(project, tmp_path):
    options = project([task("a")], test=[task("c")], cleaned=["a"])
    with pytest.raises(UserError, match="must be an object of task_id -> cleaned prompt"):
        prepare.main(options)
