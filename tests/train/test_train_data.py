from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.train.data import Columns, load_samples

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def row(**keys) -> dict:
    return {"prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "sums", **keys}


@pytest.fixture
def parquet(tmp_path):
    def write(rows: list[dict], name: str = "data.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        return str(tmp_path / name)

    return write


def test_rows_become_samples(parquet):
    file = parquet([row(extra_info={"index": 3, "split": None})])
    assert load_samples(file) == [
        {"prompt": MESSAGES, "ground_truth": "4", "data_source": "sums", "extra_info": {"index": 3}}
    ]


def test_a_row_with_files_names_the_folder_that_they_are_relative_to(parquet, tmp_path, monkeypatch):
    rows = [row(extra_info={"files": [{"name": "a.csv", "path": "a.csv"}]}), row(extra_info={"files": None})]
    file = parquet(rows)
    assert [sample.get("data_folder") for sample in load_samples(file)] == [str(tmp_path), None]
    monkeypatch.chdir(tmp_path)
    assert load_samples("data.parquet")[0]["data_folder"] == str(tmp_path)


def test_a_prompt_of_text_becomes_a_users_message(parquet):
    assert load_samples(parquet([row(prompt="2 + 2?")]))[0]["prompt"] == MESSAGES


def test_a_truth_that_is_no_text_is_kept_as_json(parquet):
    truths = load_samples(parquet([row(reward_model={"ground_truth": [1, 2]})]))[0]["ground_truth"]
    assert truths == "[1, 2]"
    assert load_samples(parquet([row(reward_model={"ground_truth": 0})]))[0]["ground_truth"] == "0"


def test_a_prompt_a_response_and_tools_kwargs_are_enough(parquet):
    tools = {"search": {"create_kwargs": {"index": "maths"}}}
    rows = [
        {"prompt": "2 + 2?", "response": "Two and two. \\boxed{4}", "tools_kwargs": tools, "agent_name": "tool_agent"},
        {"prompt": "3 + 3?", "response": "\\boxed{6}", "tools_kwargs": tools, "agent_name": "tool_agent"},
    ]
    first, second = load_samples(parquet(rows))
    assert first["prompt"] == MESSAGES and (first["ground_truth"], second["ground_truth"]) == ("4", "6")
    assert first["tools_kwargs"] == tools and first["agent_name"] == "tool_agent"
    system = {"role": "system", "content": "Count."}
    file = parquet([{"prompt": [system, *MESSAGES], "response": "4", "extra_info": {"level": 3}}])
    (only,) = load_samples(file, columns=Columns(add_prompt_suffix=" Box it."))
    assert only["prompt"] == [system, {"role": "user", "content": "2 + 2? Box it."}]
    assert only["ground_truth"] == "4" and only["extra_info"]["level"] == 3


def test_several_files_are_read_in_order_and_cut(parquet):
    names = [parquet([row(data_source=f"{k}{i}") for i in range(2)], f"{k}.parquet") for k in "ab"]
    assert [s["data_source"] for s in load_samples(names)] == ["a0", "a1", "b0", "b1"]
    assert [s["data_source"] for s in load_samples(names, max_samples=3)] == ["a0", "a1", "b0"]
    assert load_samples(names, max_samples=0) == []


def test_what_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path, parquet):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    schema = pa.Table.from_pylist([row()]).schema
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    for name, content in {"deep.json": "[" * 100_000, "deep.jsonl": '{"a":' * 100_000}.items():
        (tmp_path / name).write_text(content)
    cases = {
        str(tmp_path / "deep.json"): "deep.json: not a JSON list",
        str(tmp_path / "deep.jsonl"): "deep.jsonl:1: not JSON",
        str(tmp_path / "absent.parquet"): "does not exist",
        str(tmp_path / "broken.parquet"): "broken.parquet",
        str(tmp_path / "empty.parquet"): "no rows",
        parquet([{"prompt": MESSAGES, "truth": "4"}], "column.parquet"): "lacks the column reward_model",
        parquet([{"prompt": MESSAGES, "response": ""}], "response.parquet"): "row 1: 'response' is empty or null",
        parquet(
            [row(), row(reward_model={"ground_truth": None})], "truth.parquet"
        ): "row 1: reward_model.ground_truth is missing",
        parquet([row(prompt=[])], "prompt.parquet"): "row 0: column prompt must be a list",
        parquet([row(prompt=[{"role": "user"}])], "content.parquet"): "row 0: column prompt must be a list",
        parquet([row(extra_info="text")], "extra.parquet"): "row 0: column extra_info must be a struct",
    }
    for file, expected in cases.items():
        with pytest.raises(UserError) as caught:
            load_samples(file, what="data.val_files")
        message = str(caught.value)
        assert message.startswith("data.val_files: ") and expected in message and "\n" not in message
