"""The arguments of the scripts that take [SEED] [key=value ...]: checked before anything is installed or started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipe.dag.app import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(ROOT.glob("recipe/*/run_tiny*_cpu.sh")) + sorted(ROOT.glob("recipe/*/run_smollm2.sh"))


@pytest.fixture
def run(tmp_path):
    """Run a script, from the root by its relative path, with nothing that it could install with."""

    def start(script: Path, *arguments: str, system: str = "Linux") -> subprocess.CompletedProcess[str]:
        (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n")
        (tmp_path / "uname").chmod(0o755)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "/bin/false", "VERL_DAG_VENV": str(tmp_path / "venv")}
        command = ["bash", str(script.relative_to(ROOT)), *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    return start


def test_there_are_scripts():
    assert len(SCRIPTS) >= 10


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help_is_the_header_and_a_word_that_is_no_setting_one_line(run, script):
    answer = run(script, "--help")
    assert answer.returncode == 0 and f"bash {script.relative_to(ROOT)}" in answer.stdout and not answer.stderr
    for arguments in (("lr",), ("1", "lr"), ("a.b=1", "2")):
        done = run(script, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: '{arguments[-1]}' is not key=value\n"


def test_another_system_than_linux_is_refused_before_anything_is_installed(run):
    done = run(ROOT / "recipe" / "mathchat" / "run_tiny_cpu.sh", system="Darwin")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: the sandbox needs Linux")


@pytest.mark.parametrize("word", ["3", "a=1", "+a.b=1", "++a=", "~a.b", "workflow.agents.*.tools=[x]", "a@b=c"])
def test_seeds_and_settings_are_taken(run, word):
    done = run(ROOT / "recipe" / "mathchat" / "run_tiny_cpu.sh", word)
    assert "is not key=value" not in done.stderr and done.returncode != 0, "it goes on to the environment"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_settings_are_checked_before_a_model_and_data_are_made(script, tmp_path, monkeypatch, capsys):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name, text in (
        ("python", '[ "$1" != -c ] || exit 0; printf "%s\\n" "$@"; exit 3'),
        ("nvidia-smi", "echo GPU 0"),
    ):
        (venv / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (venv / "bin" / name).chmod(0o755)
    stamp = f'echo "{ROOT} cpu $(cksum < pyproject.toml)" | cksum | tr " " -'
    ready = subprocess.run(["bash", "-c", stamp], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    (venv / f".verl-dag-{ready}").touch()
    python = str(venv / "bin" / "python")
    env = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "PYTHON": python, "VERL_DAG_VENV": str(venv)}
    command = ["bash", str(script.relative_to(ROOT)), "1", "trainer.total_stepz=3"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    first = done.stdout.splitlines()
    assert (done.returncode, first[:3]) == (3, ["-m", "recipe.dag.main", "--check"]), done.stderr
    monkeypatch.chdir(ROOT)
    assert main.main(first[2:]) == 2
    assert capsys.readouterr().err.startswith("error: trainer.total_stepz=3: unknown key; did you mean")
    assert main.main(first[2:-1]) == 0
