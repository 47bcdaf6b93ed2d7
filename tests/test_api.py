"""What users import from the package itself, and that what should be quick loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import recipe.dag as dag

ROOT = Path(__file__).parents[1]


def test_every_name_is_there_and_is_what_its_module_has():
    assert {name: getattr(dag, name).__name__ for name in dag.__all__ if name != "Message"} == {
        name: name for name in dag.__all__ if name != "Message"
    }
    from recipe.dag.types.context import Context, Message

    assert dag.Context is Context and dag.Message is Message


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Agnet'"):
        dag.Agnet  # noqa: B018


PROGRAM = f"""
import sys
from recipe.dag.app import cli

def check(what, heavy):
    assert not heavy & set(sys.modules), f"{{what}} loads {{heavy & set(sys.modules)}}"

heavy, workflow = {{"torch", "ray", "verl", "transformers", "pandas"}}, sys.argv[1]
for command in ("validate", "plan"):
    sys.argv = ["verl-dag", command, workflow]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code
    slow = {{"hydra", "aiohttp", "jinja2", "recipe.dag.app.main", "recipe.dag.coach"}}
    slow = slow if command == "validate" else set()
    check(command, heavy | slow | {{"numpy"}})
from recipe.dag import {", ".join(dag.__all__)}
check("the interface", heavy)
{"; ".join(f"import recipe.dag.report.{path.stem}" for path in (ROOT / "recipe/dag/report").glob("[a-z]*.py"))}
check("a report", {{"torch", "ray", "verl"}})
"""


def test_checks_imports_and_reports_load_nothing_heavy():
    command = [sys.executable, "-c", PROGRAM, "workflows/workflow_retool_ma.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
