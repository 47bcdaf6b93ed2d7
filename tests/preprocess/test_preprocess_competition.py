"""Training problems and contests from several data sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from verl_dag.preprocess import competition

HUB = {
    ("agentica-org/DeepScaleR-Preview-Dataset", None, "train"): [
        {"problem": f"Deep {n}?", "answer": rf"\frac{{{n}}}{{7}}", "solution": "s"} for n in range(6)
    ]
    + [
        {"problem": "what is 1 +  1?", "answer": "2", "solution": ""},
        {"problem": "Deep 0?", "answer": r"\frac{0}{7}", "solution": ""},
        {"problem": "", "answer": "3", "solution": ""},
    ],
    ("math-ai/amc23", None, "test"): [
        {"id": 0, "question": "What is 1 + 1?", "answer": "2.0", "url": "u"},
        {"id": 1, "question": "What is 2 + 1?", "answer": "3.0", "url": "u"},
    ],
    ("HuggingFaceH4/aime_2024", None, "train"): [{"problem": "Find it.", "answer": "025", "year": "2024"}],
    ("HuggingFaceH4/MATH-500", None, "test"): [{"problem": "Half?", "answer": r"\frac12", "subject": "Algebra"}],
    **{
        ("EleutherAI/hendrycks_math", part, "train"): [
            {"problem": f"{part} {n}", "solution": rf"So it is $\boxed{{{n}}}$.", "level": "Level 1"} for n in range(2)
        ]
        for part in competition.SOURCES["math"].configurations
    },
}


@pytest.fixture
def asked(hub):
    """Every data set that may be asked for; returns what was."""
    return hub(lambda *key: HUB[key])


def made(folder: Path) -> tuple[list[tuple], list[tuple]]:
    """(data source, problem, ground truth) of the training and test rows."""
    return tuple(
        [
            (row["data_source"], row["prompt"][0]["content"], row["reward_model"]["ground_truth"])
            for row in pq.read_table(folder / f"{split}.parquet").to_pylist()
        ]
        for split in ("train", "test")
    )


def test_the_hubs_data_sets_are_the_default(asked, tmp_path, capsys):
    competition.main(["--local_dir", str(tmp_path)])
    train, test = made(tmp_path)
    assert train == [("deepscaler", f"Deep {n}?", rf"\frac{{{n}}}{{7}}") for n in range(6)]
    assert test == [("amc23", "What is 1 + 1?", "2"), ("amc23", "What is 2 + 1?", "3"), ("aime24", "Find it.", "25")]
    repositories = {"agentica-org/DeepScaleR-Preview-Dataset", "math-ai/amc23", "HuggingFaceH4/aime_2024"}
    assert {path for path, _, _ in asked} == repositories
    assert capsys.readouterr().out.splitlines() == [
        "deepscaler: left out 1 row with a repeated problem",
        "deepscaler: left out 1 row without a problem",
        "train: left out 1 row whose problem is a test problem",
        f"train: 6 rows -> {tmp_path / 'train.parquet'}",
        f"test: 3 rows -> {tmp_path / 'test.parquet'}",
    ]


def test_maths_parts_are_read_one_by_one_and_their_answers_are_boxed(asked, tmp_path):
    competition.main(["--local_dir", str(tmp_path), "--train", "math", "--test", "math500"])
    train, test = made(tmp_path)
    assert len(train) == 14 and train[1] == ("math", "algebra 1", "1") and test == [("math500", "Half?", r"\frac12")]
    assert [name for path, name, _ in asked if "hendrycks" in path] == list(competition.SOURCES["math"].configurations)


def test_copies_stand_in_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "deep.json").write_text(json.dumps([{"problem": f"p{n}", "answer": n} for n in range(3)]))
    (tmp_path / "amc.jsonl").write_text('{"problem": "P 1", "answer": 1.0}\n{"problem": "q", "answer": 27.0}\n')
    (tmp_path / "math.jsonl").write_text(json.dumps({"problem": "p0", "solution": r"\boxed{0}"}) + "\n")
    sources = [f"deepscaler={tmp_path}/deep.json", f"math={tmp_path}/math.jsonl"]
    contests = [f"amc23={tmp_path}/amc.jsonl"]
    suffix = ["--add_prompt_suffix", " Box it."]
    competition.main(["--local_dir", str(tmp_path), "--train", *sources, "--test", *contests, *suffix])
    train, test = made(tmp_path)
    assert train == [("deepscaler", f"p{n} Box it.", str(n)) for n in (0, 2)], "no test problem, and p0 once"
    assert test == [("amc23", "P 1 Box it.", "1"), ("amc23", "q Box it.", "27")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "imo"], "imo: unknown data set; choose from deepscaler, math, amc23, aime24, math500, or pass"),
        (["--train", "deepscaler=none.json"], "none.json: no such file"),
        (
            ["--train", "math=same.json", "--test", "amc23=same.json"],
            "same.json: no row has a problem and an answer",
        ),
        (["--train", "deepscaler=same.json", "--test", "amc23=same.json"], "every training problem is also a test"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(options, message, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.json").write_text(json.dumps([{"problem": "p", "answer": "1"}]))
    with pytest.raises(UserError, match=message) as error:
        competition.main(["--local_dir", str(tmp_path / "out"), *options])
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
