"""The split depends on the seed alone, loses nothing but repeated problems, and never leaves an empty training set."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.dag.train import data_script
from verl_dag.preprocess import split as script


def read(folder: Path, name: str) -> list[dict]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


@pytest.mark.parametrize(("count", "held_out"), [(1200, 1000), (1001, 1000), (1000, 250), (2, 1)])
def test_rows_are_held_out_and_both_files_keep_the_order(parquet, tmp_path, capsys, count, held_out):
    rows = [{"prompt": f"{n}?", "extra_info": {"index": n, "note": None if n % 2 else "even"}} for n in range(count)]
    out = tmp_path / "out"
    script.main(["--input", parquet(rows), "--local_dir", str(out)])
    train, val = read(out, "train"), read(out, "val")
    assert (len(train), len(val)) == (count - held_out, held_out)
    assert sorted(train + val, key=lambda row: row["extra_info"]["index"]) == rows
    indices = [row["extra_info"]["index"] for row in val]
    assert indices == sorted(indices) and (count == 2 or indices != list(range(held_out)))
    assert f"{count - held_out} rows" in capsys.readouterr().out


def test_a_folder_named_like_a_file_is_refused(parquet, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--input", parquet([{"prompt": "a"}]), "--local_dir", str(tmp_path / "out.parquet")])
    assert "out.parquet' names a file; pass the folder" in capsys.readouterr().err and not list(tmp_path.glob("out*"))


def test_same_seed_same_bytes_other_seed_other_rows(parquet, tmp_path):
    source = parquet([{"prompt": f"{n}?"} for n in range(50)])
    for name, seed in (("a", []), ("b", ["--seed", "42"]), ("c", ["--seed", "43"])):
        script.main(["--input", source, "--local_dir", str(tmp_path / name), "--val_size", "10", *seed])
    files = [[(tmp_path / name / f"{part}.parquet").read_bytes() for part in ("train", "val")] for name in "abc"]
    assert files[0] == files[1] and files[0] != files[2]


def test_a_training_row_that_repeats_a_validation_prompt_is_left_out(parquet, tmp_path, capsys):
    rows = [{"prompt": [{"role": "user", "content": f"{n % 30}?"}], "copy": n // 30} for n in range(90)]
    script.main(["--input", parquet(rows), "--local_dir", str(tmp_path / "out"), "--val_size", "5"])
    train, val = read(tmp_path / "out", "train"), read(tmp_path / "out", "val")
    asked = {str(row["prompt"]) for row in val}
    assert len(val) == 5 and not asked & {str(row["prompt"]) for row in train}
    assert len(train) == 3 * (30 - len(asked))
    assert f"left out {90 - 5 - len(train)} training rows whose prompt is a validation row's" in capsys.readouterr().out


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), min_size=2, max_size=30), st.integers(1, 40), st.integers())
def test_every_split_has_training_rows_or_is_refused(keys, size, seed):
    try:
        places = script.places(keys, size, seed)
    except UserError:
        taken = size >= len(keys) or len(set(keys)) <= size
        assert taken
        return
    held_out = {key for key, place in zip(keys, places, strict=True) if place == script.VAL}
    trained = {key for key, place in zip(keys, places, strict=True) if place == script.TRAIN}
    assert places.count(script.VAL) == size and trained and not trained & held_out


def test_any_schema_is_split(parquet, tmp_path):
    source = parquet([{"messages": [{"role": "user", "content": "?"}], "n": n} for n in range(4)], "same.parquet")
    refused = ["--input", source, "--local_dir", str(tmp_path / "no"), "--val_size", "1"]
    with pytest.raises(UserError, match="none is left to train on"):
        script.main(refused)
    script.main([*refused[:3], str(tmp_path / "out"), *refused[4:], "--key", "n"])
    assert len(read(tmp_path / "out", "train")) == 3
    pq.write_table(pa.table({"x": [1, 1, 1]}), tmp_path / "other.parquet")
    script.main(["--input", str(tmp_path / "other.parquet"), "--local_dir", str(tmp_path / "other"), "--val_size", "1"])
    assert len(read(tmp_path / "other", "train")) == 2


def test_bad_inputs_are_one_line_and_write_nothing(parquet, tmp_path, capsys, monkeypatch):
    source, out = parquet([{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "file").write_text("")
    cases = [
        (source, out, ["--val_size", "1000"], "1000 validation rows of 2 leave none to train on"),
        (source, out, ["--val_size", "2"], "pass a smaller --val_size"),
        (source, out, ["--key", "id"], "has no column 'id' (its columns: prompt)"),
        (str(tmp_path / "bad.parquet"), out, [], "cannot be read as parquet"),
        (source, tmp_path / "file" / "out", ["--val_size", "1"], "cannot write"),
    ]
    for file, folder, options, message in cases:
        assert data_script.run(script.main, ["--input", file, "--local_dir", str(folder), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error
        assert not out.exists()


def test_a_full_disk_leaves_no_file_of_the_pair(parquet, tmp_path, capsys, monkeypatch):
    synced = []

    def full_at_the_second(descriptor):
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    source = parquet([{"prompt": "a"}, {"prompt": "b"}])
    assert (
        data_script.run(script.main, ["--input", source, "--local_dir", str(tmp_path / "out"), "--val_size", "1"]) == 2
    )
    assert "No space left on device" in capsys.readouterr().err and list((tmp_path / "out").iterdir()) == []


def test_a_dialogue_repeats_another_if_its_question_does(parquet, tmp_path):
    def dialogue(question: int, answer: str) -> dict:
        messages = [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": answer}]
        return {"messages": messages}

    source = parquet([dialogue(n % 10, f"{n}") for n in range(20)])
    script.main(["--input", source, "--local_dir", str(tmp_path / "out"), "--val_size", "5"])
    asked = [{row["messages"][0]["content"] for row in read(tmp_path / "out", name)} for name in ("train", "val")]
    assert not asked[0] & asked[1] and asked[0]
