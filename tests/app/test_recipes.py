"""`verl-dag run`: the scripts of the recipes, in any folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app import recipes
from recipe.dag.app.cli import app

ROOT = Path(__file__).parents[2]


class Started(BaseException):
    """The program that would have replaced this process."""


@pytest.fixture
def start(monkeypatch):
    def execvpe(file, arguments, environment):
        raise Started(arguments, environment["PATH"])

    def start(folder: Path, *arguments: str):
        monkeypatch.chdir(folder)
        with pytest.raises(Started) as started:
            CliRunner().invoke(app, ["run", *arguments], catch_exceptions=False)
        return started.value.args

    monkeypatch.setattr(os, "execvpe", execvpe)
    return start


def test_a_script_runs_in_a_folder_with_links_to_the_project_and_this_python(start, tmp_path):
    (tmp_path / ".verl-dag").mkdir()
    (tmp_path / ".verl-dag" / "recipe").symlink_to("/of/an/older/version")
    for _ in range(2):
        arguments, path = start(tmp_path, "marft", "--tiny", "1", "trainer.save_freq=5")
        script = tmp_path / ".verl-dag" / "recipe" / "marft" / "run_tiny_cpu.sh"
        assert arguments == ["bash", str(script), "1", "trainer.save_freq=5"] and script.resolve().is_relative_to(ROOT)
        assert path.split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert (tmp_path / ".verl-dag" / "workflows").resolve() == ROOT / "workflows"
    assert (tmp_path / ".verl-dag" / "outputs").resolve() == tmp_path / "outputs"


def test_in_the_checkout_a_script_runs_as_it_is(start):
    arguments, _ = start(ROOT, "retool/evaluate_model", "--", "MODEL", "--help")
    assert arguments == ["bash", f"{ROOT}/recipe/retool/evaluate_model.sh", "MODEL", "--help"]
    assert not (ROOT / ".verl-dag").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["retool_mo", "--tiny"], "no recipe `retool_mo`; did you mean `retool_ma`?; verl-dag run lists them"),
        (["retool_ma/run_tinny_cpu"], "no script of retool_ma `run_tinny_cpu.sh`; did you mean `run_tiny_cpu.sh`?"),
        (["retool_mo"], "no recipe `retool_mo`"),
        (["--tiny"], "--tiny needs a recipe"),
        (["retool_ma/run_smollm2", "--tiny"], "--tiny takes the name of a recipe, not 'retool_ma/run_smollm2'"),
    ],
)
def test_what_cannot_be_run_is_said(arguments, message):
    assert message in str(CliRunner().invoke(app, ["run", *arguments]).exception)


def test_scripts_are_listed_with_the_first_line_of_their_headers():
    lines = CliRunner().invoke(app, ["run", "debate"]).output.splitlines()
    assert len(lines) == 1 and lines[0].startswith("debate/run_tiny_cpu.sh: The debate on a laptop")
    every = CliRunner().invoke(app, ["run"]).output.splitlines()
    assert len(every) == len(list(ROOT.glob("recipe/*/*.sh"))) and lines[0] in every


def test_scripts_that_need_examples_are_left_out_of_an_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "_examples", lambda: tmp_path)
    assert "run_smollm2.sh" not in recipes.scripts()["retool_ma"]
