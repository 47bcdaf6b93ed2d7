"""The prompt is counted as the model sees it; what cannot be counted is left out and named."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.chat import render
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.train import data_script
from verl_dag.preprocess import prefilter as script
from verl_dag.preprocess.parquet import write_selected

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = CodeInterpreter(None).schema


def row(text: str, response: object = None, **keys) -> dict:
    prompt = [{"role": "user", "content": text}]
    return {"prompt": prompt, "response": response, "reward_model": {"ground_truth": "1"}, **keys}


@pytest.fixture
def run(tokenizer_folder, tmp_path, capsys):
    """Runs the script: run(input, *options) -> (exit code, rows kept or None, stdout, stderr)."""

    def run(source: str, *options: str):
        out = tmp_path / "out.parquet"
        tokenizer = [] if "--tokenizer" in options else ["--tokenizer", tokenizer_folder]
        code = data_script.run(script.main, ["--input", source, "--output", str(out), *tokenizer, *options])
        said = capsys.readouterr()
        return code, pq.read_table(out).to_pylist() if out.exists() else None, said.out, said.err

    return run


def test_a_prompt_of_exactly_the_limit_is_kept_and_one_token_more_is_not(run, parquet, tokenizer):
    rows = [row("the fox " * n) for n in range(1, 12)]
    lengths = [len(render(tokenizer, r["prompt"], [SCHEMA])) for r in rows]
    assert len(set(lengths)) == len(rows)
    limit = lengths[5]
    code, kept, out, _ = run(parquet(rows), "--max_prompt_length", str(limit))
    assert code == 0 and kept == rows[:6]
    assert f"left out 5 rows with a prompt of more than {limit} tokens" in out and "6 of 11 rows (54.5 %)" in out


def test_the_tools_schema_counts(run, parquet, tokenizer):
    rows = [row("the fox")]
    bare, full = (len(render(tokenizer, rows[0]["prompt"], tools)) for tools in (None, [SCHEMA]))
    assert full > bare + 50
    limit = ("--max_prompt_length", str(bare))
    assert run(parquet(rows), *limit, "--tools", "none")[1] == rows
    code, _, _, err = run(parquet(rows), *limit)
    assert code == 2 and "none of 1 rows is left" in err


def test_the_agents_own_messages_count(run, parquet, tokenizer):
    from recipe.retool.agent import SYSTEM

    rows = [row("the fox")]
    messages = [{"role": "system", "content": SYSTEM}, *rows[0]["prompt"]]
    length = len(render(tokenizer, messages, [SCHEMA]))
    workflow = ("--workflow", str(ROOT / "workflows/workflow_retool.yaml"))
    assert run(parquet(rows), *workflow, "--max_prompt_length", str(length))[1] == rows
    assert run(parquet(rows), *workflow, "--max_prompt_length", str(length - 1))[0] == 2


def test_responses_are_counted_where_there_are_any(run, parquet, tokenizer):
    rows = [row("a", "the fox " * n) for n in (1, 5, 9)] + [row("a", None), row("a", "")]
    limit = len(tokenizer.encode("the fox " * 5, add_special_tokens=False))
    code, kept, out, _ = run(parquet(rows), "--max_response_length", str(limit))
    assert kept == [*rows[:2], *rows[3:]]
    assert f"left out 1 row with a response of more than {limit} tokens" in out
    messages = [{"prompt": "a", "answers": [{"role": "assistant", "content": r["response"] or ""}]} for r in rows]
    found = run(parquet(messages), "--max_response_length", str(limit), "--response_key", "answers")
    assert len(found[1]) == 4


def test_errors_are_counted_by_kind_and_left_out(run, parquet):
    bad = [row("x", prompt=[]), row("x", prompt=None), row("x", prompt=[{"role": "critic", "content": "x"}])]
    good = row("the fox")
    code, kept, out, _ = run(parquet([good, *bad, good]))
    assert code == 0 and kept == [good, good]
    assert "left out 2 rows by error: column prompt must be a list of {role, content} messages" in out
    assert "left out 1 row by error" in out and "no critics" in out


def test_mappings_as_json_text_are_read_and_others_are_counted(run, parquet):
    plain = {"prompt": [{"role": "user", "content": "the fox"}], "extra_info": '{"level": 1}'}
    code, kept, out, _ = run(
        parquet([plain | {"reward_model": '{"ground_truth": "1"}'}, plain | {"reward_model": "{"}])
    )
    assert code == 0 and len(kept) == 1
    assert "left out 1 row by error: column reward_model is a text that is not JSON" in out


def test_same_input_same_bytes_whatever_the_number_of_workers(tokenizer_folder, parquet, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "_ROWS_PER_WORKER", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    source = parquet([row("the fox " * (n % 40), index=n) for n in range(300)], row_group_size=7)
    files = []
    for workers in ("1", "1", "192"):
        target = tmp_path / f"{len(files)}.parquet"
        options = ["--tokenizer", tokenizer_folder, "--num_workers", workers, "--max_prompt_length", "500"]
        script.main(["--input", source, "--output", str(target), *options])
        files.append(target.read_bytes())
    assert files[0] == files[1] == files[2]
    assert 0 < len(pq.read_table(tmp_path / "0.parquet")) < 300


def test_an_endless_response_neither_stalls_nor_fills_the_memory(tokenizer_folder, tmp_path):
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    schema = pa.Table.from_pylist([row("a", "b")]).schema
    with pq.ParquetWriter(source, schema) as writer:
        for number in range(24):
            endless = "".join(chr(97 + (number + i) % 26) for i in range(26)) * (1 << 18)  # 7 MB
            writer.write_table(pa.Table.from_pylist([row("the fox", endless), row("the dog", "short")], schema))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (120, 120));"
        "from preprocess import prefilter; prefilter.main(sys.argv[1:]);"
        # not ru_maxrss, which counts the tests' own process, from which this one was forked
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    options = ["--input", str(source), "--output", str(out), "--tokenizer", tokenizer_folder]
    done = subprocess.run([sys.executable, "-c", code, *options], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "left out 24 rows with a response" in done.stdout and pq.read_metadata(out).num_rows == 24
    # KB: 640 MB, most of them imports; 960 MB if the whole file is read at once
    assert int(done.stdout.split()[-1]) < 800 * 1024


def test_a_full_disk_leaves_what_was_there(run, parquet, tmp_path, monkeypatch):
    out = tmp_path / "out.parquet"
    pq.write_table(pa.table({"before": [1]}), out)
    source = parquet([row("the fox")])

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, kept, _, err = run(source)
    assert code == 2 and err.count("\n") == 1 and "No space left on device; free space there" in err
    assert kept == [{"before": 1}] and sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


def test_a_device_that_is_full_while_rows_are_written(tmp_path):
    """/dev/full answers every write with ENOSPC, as a full disk does."""
    rows = pa.RecordBatch.from_pylist([{"text": "x" * 100_000}])
    with pytest.raises(UserError, match="No space left on device"):
        with data_script.new_files([tmp_path / "out.parquet"], "--output") as files:
            with open("/dev/full", "wb") as device:
                write_selected([rows], rows.schema, [0], [device])
    assert list(tmp_path.iterdir()) == []
    assert files[0].closed


def test_bad_inputs_are_one_line(run, parquet, tmp_path):
    good = parquet([row("the fox")], "good.parquet")
    data = Path(good).read_bytes()
    (tmp_path / "garbage.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    pages = bytearray(data)
    pages[4:60] = os.urandom(56)
    (tmp_path / "pages.parquet").write_bytes(pages)
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    (tmp_path / "broken/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    cases = [
        (tmp_path / "absent.parquet", (), "does not exist"),
        (tmp_path / "folder", (), "is a folder"),
        (tmp_path / "garbage.parquet", (), "cannot be read as parquet"),
        (tmp_path / "cut.parquet", (), "cannot be read as parquet"),
        (tmp_path / "pages.parquet", (), "cannot be read as parquet"),
        (tmp_path / "empty.parquet", (), "contains no rows"),
        (parquet([{"question": "?"}], "column.parquet"), (), "has no column 'prompt' (its columns: question)"),
        (good, ("--response_key", "output"), "has no column 'output'"),
        (good, ("--tokenizer", str(tmp_path / "folder")), "cannot be loaded"),
        (good, ("--tokenizer", str(tmp_path / "broken")), "cannot be loaded"),
        (good, ("--tokenizer", str(tmp_path / "absent")), "no such folder"),
    ]
    for source, options, message in cases:
        code, kept, _, err = run(str(source), *options)
        assert (code, kept, err.count("\n")) == (2, None, 1) and message in err, (source, options, err)


def test_a_tokenizer_without_a_chat_template_is_refused(run, parquet, tokenizer_folder, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in Path(tokenizer_folder).iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    code, kept, _, err = run(parquet([row("the fox")]), "--tokenizer", str(folder))
    assert (code, kept, err.count("\n")) == (2, None, 1) and "has no chat template" in err
