"""Transcripts become dialogues with tool calls as the workflow asks its agent; malformed ones are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.train import data_script
from recipe.retool import sft_data as script
from recipe.retool.agent import SYSTEM

ROOT = Path(__file__).resolve().parents[2]
FIRST = "First, multiply.\n<code>\n```python\nprint(6 * 7)\n```\n</code>\n<interpreter>\n42\n</interpreter>\n"
SECOND = "Check.\n\n<code>assert 42\nprint('<answer>')</code><interpreter><answer></interpreter>"
LAST = "It is 42.\n<answer>\n\\boxed{42}\n</answer>"


def row(transcript: str, question: str = "What is 6 times 7?") -> dict:
    asked = f"Reply in <answer> tags.\n*user question:*\n{question} Answer as <answer>\\boxed{{}}</answer>."
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": transcript}]}


def call(code: str) -> list[dict]:
    return [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}]


def test_a_transcript_becomes_the_messages_of_its_rollout():
    assert script.dialogue_of(FIRST + SECOND + LAST) == [
        {"role": "assistant", "content": "First, multiply.", "tool_calls": call("print(6 * 7)")},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "Check.", "tool_calls": call("assert 42\nprint('<answer>')")},
        {"role": "tool", "content": "<answer>"},
        {"role": "assistant", "content": LAST},
    ]
    assert script.dialogue_of(LAST) == [{"role": "assistant", "content": LAST}]


@pytest.mark.parametrize(
    ("transcript", "kind"),
    [
        (FIRST.replace("</code>", "") + LAST, "no </code>"),
        (FIRST.replace("</interpreter>", "") + LAST, "no </interpreter>"),
        ("<code>print(1)</code> so: <interpreter>1</interpreter>" + LAST, "<code> that no <interpreter> follows"),
        ("<code>print(1)</code>" + FIRST + LAST, "<code> that no <interpreter> follows"),
        ("<code>print(1)</code>", "<code> that no <interpreter> follows"),
        ("<interpreter>1</interpreter>" + LAST, "<interpreter> where none belongs"),
        ("a </code>" + LAST, "</code> where none belongs"),
        ("<code>\n```python\n\n```</code><interpreter></interpreter>" + LAST, "empty <code>"),
        (LAST + FIRST, "<code> where none belongs"),
        (LAST + LAST, "unpaired or repeated <answer>"),
        (FIRST + "It is <answer>42", "unpaired or repeated <answer>"),
        (FIRST + "It is 42.", "no answer"),
        (FIRST + "<answer> </answer>", "no answer"),
    ],
)
def test_a_malformed_transcript_is_named_by_its_kind(transcript, kind):
    with pytest.raises(script.Malformed) as raised:
        script.dialogue_of(transcript)
    assert str(raised.value) == kind


@pytest.fixture
def run(tmp_path, capsys):
    def run(rows: list, *options: str):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        out = tmp_path / "out/all.parquet"
        arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(out), *options]
        code = data_script.run(script.main, arguments)
        said = capsys.readouterr()
        return code, pq.read_table(out).to_pylist() if out.exists() else None, said.out, said.err

    return run


def test_the_question_is_put_as_the_agent_puts_it(run):
    code, (first,), out, _ = run([row(FIRST + LAST)])
    assert code == 0 and "kept 1 of 1 (100.0 %)" in out
    system, user, answer, result, last = first["messages"]
    assert (system["role"], system["content"]) == ("system", SYSTEM)
    assert user["content"] == "What is 6 times 7? Answer as \\boxed{}."
    assert answer["tool_calls"] == call("print(6 * 7)") and result["content"] == "42" and last["tool_calls"] is None
    assert first["tools"] == [CodeInterpreter(None).schema]
    plain = run([row(FIRST + LAST)], "--workflow", "none")[1][0]
    assert [message["role"] for message in plain["messages"]][:2] == ["user", "assistant"]


def test_the_hubs_data_set_is_the_default(tmp_path, hub):
    asked = hub(lambda path, name, split: [row(LAST)])
    script.main(["--output", str(tmp_path / "all.parquet")])
    assert asked == [("JoeYing/ReTool-SFT", None, "train")]
    assert pq.read_metadata(tmp_path / "all.parquet").num_rows == 1


def test_malformed_rows_are_counted_and_the_others_kept(run):
    rows = [row(FIRST + LAST), row("?"), row(FIRST), {"messages": None}, {"messages": row(LAST)["messages"] * 2}]
    rows += [row(LAST, " "), {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": LAST}]}]
    code, kept, out, _ = run(rows)
    assert code == 0 and len(kept) == 2 and "kept 2 of 7 (28.6 %)" in out
    for line in ("2 transcripts: no answer", "2 transcripts: not one question and one answer"):
        assert f"left out {line}" in out
    assert "left out 1 transcript: empty question or answer" in out


def test_same_input_same_bytes(run, tmp_path):
    files = []
    for _ in range(2):
        run([row(FIRST + LAST), row(LAST)])
        files.append((tmp_path / "out/all.parquet").read_bytes())
    assert files[0] == files[1]


def test_several_tools_keep_their_schemas(tmp_path):
    one = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"type": "string"}}}}}
    other = {"type": "function", "function": {"name": "b", "parameters": {"properties": {"y": {"type": "string"}}}}}
    column = script.tools_column([[one, other]]).to_pylist()
    assert json.loads(column[0]) == [one, other]


def test_bad_inputs_are_one_line(run):
    no_tool = str(ROOT / "workflows/workflow_no_tool.yaml")
    for rows, options, message in [
        ([{"text": "x"}], (), "has no column of 'messages' (its columns: text)"),
        ([row("?")], (), "none of 1 transcripts is well-formed"),
        ([row(LAST)], ("--workflow", no_tool), "its first agent needs the tool code_interpreter"),
    ]:
        code, kept, _, err = run(rows, *options)
        assert (code, kept, err.count("\n")) == (2, None, 1) and message in err
