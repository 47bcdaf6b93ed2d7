"""A run's folder, read back: its journal, its last launch, and the table of its calls."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from recipe.dag.report.journal import Journal
from recipe.dag.report.run_folder import read_run


@pytest.fixture
def folder(tmp_path, make_episode, make_call, make_result):
    first = make_call("solver", reward=1.0, reward_parts={"score": 0.75, "team": 0.25}, advantage=0.5)
    first.token_columns = {"advantage": [0.5] * 6}
    second = make_call("checker", tool_results=[make_result()], parsed={"answer": "42"}, usage={"requests": 1.0})
    Journal(tmp_path).episodes(3, [make_episode(calls=[first, second], outcome=1.0), make_episode(index=1)])
    return tmp_path


def test_calls_are_a_table_that_parquet_holds(folder, make_call):
    run = read_run(folder)
    run.records[1]["dropped"] = [json.loads(json.dumps(run.records[1]["calls"][0])) | {"node": "other"}]
    run.calls().to_parquet(folder / "calls.parquet")
    table = pd.read_parquet(folder / "calls.parquet")
    assert list(table["node"]) == ["solver", "checker", "solver", "other"]
    assert list(table["position"]) == [0, 1, 0, 1] and list(table["kept"]) == [True, True, True, False]
    first = table.iloc[0]
    assert (first["step"], first["uid"], first["outcome"]) == (3, "u0", 1.0)
    assert (first["reward_parts/score"], first["reward_parts/team"], first["advantage"]) == (0.75, 0.25, 0.5)
    assert list(first["token_columns/advantage"]) == [0.5] * 6 and list(first["response_mask"]) == [1] * 4 + [0] * 2
    assert json.loads(table.iloc[1]["tool_results"])[0]["name"] == "code_interpreter"
    assert table.iloc[1]["usage/requests"] == 1.0


def test_the_last_launch_is_a_part_of_the_run(folder):
    assert (read_run(folder).launch, read_run(folder).workflow, read_run(folder).config) == ({}, {}, {})
    for number in (1, 2, 10):
        launch = folder / "run" / str(number)
        launch.mkdir(parents=True)
        (launch / "launch.json").write_text(json.dumps({"seed": number}))
        (launch / "workflow.json").write_text(json.dumps({"dag_id": f"dag{number}"}))
        (launch / "config.yaml").write_text(f"seed: {number}\n")
    run = read_run(folder)
    assert (run.launch["seed"], run.workflow["dag_id"], run.config) == (10, "dag10", {"seed": 10})


def test_compressed_and_plain_episodes_of_one_run_are_read_together(folder, make_episode):
    Journal(folder, compress=True).episodes(4, [make_episode("later")])
    assert [record["uid"] for record in read_run(folder).records] == ["u0", "u0", "later"]
