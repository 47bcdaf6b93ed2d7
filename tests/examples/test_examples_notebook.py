"""examples/notebook.ipynb runs cell by cell, and shows what its comments say."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipe.dag.report.journal import Journal
from recipe.dag.types.record import Call, Episode

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown_by(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does, and return the value of its last line if that is an expression."""
    *body, last = ast.parse(cell).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Examples beside the outputs of a run."""
    shutil.copytree(EXAMPLES / "gallery", tmp_path / "examples" / "gallery")
    journal = Journal(tmp_path / "outputs" / "retool_ma_tiny")
    for step, accuracy in ((0, 0.5), (30, 0.9)):
        journal.metrics(step, {"val/accuracy": accuracy})
    call = Call("verify", "verifier", 2, "main", 0, text="\\boxed{7}", reward=1.0)
    sample = {"prompt": [{"role": "user", "content": "3 + 4?"}]}
    journal.episodes(30, [Episode("val-0", 0, sample, calls=[call], outcome=1.0)], "validation")
    monkeypatch.chdir(tmp_path / "examples")
    return tmp_path


def test_the_cells_run_in_order(folder, capsys):
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert not any(cell["outputs"] for cell in notebook["cells"])
    names: dict[str, Any] = {"__name__": "__main__"}
    nodes, outcome, episode, hasty, recorded = (shown_by("".join(cell["source"]), names) for cell in notebook["cells"])
    assert nodes == ["answer", "criticize"] and (outcome, hasty) == (1.0, 0.0)
    assert len(episode.calls) == 6 and "Count once more." in episode._repr_html_()
    assert capsys.readouterr().out == "{0: 0.5, 30: 0.9}\n" and "outcome 1" in recorded._repr_html_()
