from __future__ import annotations

import json
import os

import numpy as np
import pytest

from recipe.dag.report.jsonfile import replace_file, to_json


def test_what_is_not_finite_becomes_null_at_any_depth():
    data = {"a": float("nan"), "b": [1.5, float("inf"), {"c": (-float("inf"), True, None, "x")}], 3: 4}
    assert json.loads(to_json(data)) == {"a": None, "b": [1.5, None, {"c": [None, True, None, "x"]}], "3": 4}


def test_arrays_and_strangers_are_written(tmp_path):
    data = {"array": np.array([1.0, 2.0]), "int": np.int64(3), "float": np.float32(0.5), "path": tmp_path}
    assert json.loads(to_json(data)) == {"array": [1.0, 2.0], "int": 3, "float": 0.5, "path": str(tmp_path)}
    assert json.loads(to_json({"array": np.array([1.0, np.nan])})) == {"array": [1.0, None]}


def test_text_is_utf8_even_with_lone_surrogates():
    assert to_json("π") == '"π"'.encode()
    assert json.loads(to_json("a\udc80b")) == "a\udc80b"


def test_one_line_whatever_the_text():
    assert to_json({"text": "a\nb\r\n"}).count(b"\n") == 0


def test_replace_is_all_or_nothing(tmp_path):
    path = tmp_path / "x.json"
    replace_file(path, [b"old"])

    def fails():
        yield b"ne"
        raise OSError("disk full")

    with pytest.raises(OSError):
        replace_file(path, fails())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.json"]
    replace_file(path, [b"ne", b"w"])
    assert path.read_bytes() == b"new"
