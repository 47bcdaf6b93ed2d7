"""Patterns of file names: the rules of `fetch_files`, in linear time."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.sandbox.file_pattern import matches
from recipe.sandbox.jail import files


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        ("submission.csv", ["submission.csv"], ["a/submission.csv", "submission.csv2", "Submission.csv"]),
        ("*.pkl", ["X_train.pkl", "-.pkl"], [".pkl", "d/X.pkl", "X.pkl/y"]),
        ("X_?.p[kq]l", ["X_1.pkl", "X_1.pql"], ["X_12.pkl", "X_1.pyl"]),
        ("**/*.npy", ["a.npy", "d/a.npy", "d/e/f/a.npy"], ["d/a.npz", ".d/a.npy"]),
        ("out/**", ["out/a", "out/b/c"], ["out", "a/out/b", "out/.a"]),
        ("a/**/b/**/c", ["a/b/c", "a/x/b/y/z/c"], ["a/c", "a/b"]),
        (".config/*", [".config/a"], ["config/a"]),
        ("[0]", ["0", "[0]"], ["1"]),
        ("a\nb", ["a\nb"], ["a", "b"]),
        ("*", ["a\nb"], ["a/b", ".a"]),
    ],
)
def test_rules(pattern, fitting, other):
    assert [name for name in (*fitting, *other) if matches(name, pattern)] == fitting


def test_many_stars_take_no_exponential_time():
    assert not matches("/".join("a" * 100), "/".join(["**", "a"] * 50 + ["b"]))
    assert matches("/".join("a" * 100), "/".join(["**", "a"] * 50))


NAMES = st.sampled_from(["a", "b.csv", "d/a", "d/b.csv", "d/e/a", "d/e/f/b.csv", ".h", "d/.h/a", "d/e/.h"])
PARTS = st.sampled_from(["a", "*", "**", "*.csv", "d", "e", "?", "[ab]", ".*", "[!a]*"])


@given(st.sets(NAMES), st.lists(PARTS, min_size=1, max_size=4))
def test_the_rules_are_those_of_fetch_files(tmp_path_factory, names, parts):
    folder, pattern = tmp_path_factory.mktemp("files"), "/".join(parts)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    before = os.getcwd()
    os.chdir(folder)
    try:
        fetched = set(files.fetch([pattern]))
    finally:
        os.chdir(before)
    assert {name for name in names if matches(name, pattern)} == fetched
