from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import os
import pathlib

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


class Color(enum.StrEnum):
    RED = "red"


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(slots=True)
class Record:
    name: str
    values: list


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        -(2**63),
        0.1 + 0.2,
        1e-300,
        5e-324,
        1e22,
        -0.0,
        "\u2028\x00\x7f\ud83d\ude00\ud800",
        {1: "a", 2.5: "b", None: "c"},
        {True: "d"},
        {"a": (1, (2, 3)), "b": Pair(1, [2])},
        collections.Counter("aab"),
        Color.RED,
        [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.array([[1], [2]]), np.array("x")],
        {"a": {1}, "b": b"bytes", "c": pathlib.PurePosixPath("x/y"), "d": 1j},
        datetime.datetime(2026, 1, 2, 3, 4, 5),
        functools.reduce(lambda inner, _: [inner], range(300), 1),
    ],
    ids=repr,
)
def test_a_line_says_what_the_standard_library_writes(value):
    def plain(stranger):
        return stranger.tolist() if hasattr(stranger, "tolist") else str(stranger)

    expected = json.loads(json.dumps(value, default=plain))
    found = json.loads(to_json({"value": value}))["value"]
    assert found == expected and repr(found) == repr(expected)


@pytest.mark.parametrize("indent", [None, 1])
def test_records_become_objects(indent):
    record = Record("r", [Record("inner", [math.nan]), 2**70, "\ud800"])
    inner = {"name": "inner", "values": [None]}
    assert json.loads(to_json([record], indent)) == [{"name": "r", "values": [inner, 2**70, "\ud800"]}]


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
