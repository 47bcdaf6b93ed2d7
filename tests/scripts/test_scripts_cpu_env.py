"""Which torch the first command installs, with a pip that has what the test says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cpu"][0]
VERSION = TORCH.partition("==")[2]
PYTORCH = "https://download.pytorch.org/whl/cpu"
PIP = """\
#!/bin/bash
# A pip whose configured index, and PyTorch's, have the builds that the test names.
echo "$*" >> {folder}/asked
site={folder}/venv/lib/python3.11/site-packages
case " $* " in
  *"--index-url {pytorch}"*) index={folder}/pytorch ;;
  *) index={folder}/configured ;;
esac
spec="${{@: -1}}"
case $spec in
  torch==*)
    [ -z "$(ls "$site" 2>/dev/null)" ] || exit 0
    build=$(grep -Fx "${{spec#torch==}}" "$index" || grep -F "${{spec#torch==}}+" "$index")
    [ -n "$build" ] || {{ echo no match >&2; exit 1; }}
    mkdir -p "$site/torch-$build.dist-info" ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """Source cpu_env.sh: install(builds of the configured index, of PyTorch's) -> (result, what pip was asked)."""

    def run(configured: list[str], pytorch: list[str] = (), *, system: str = "Linux", installed: str | None = None):
        tools, python = tmp_path / "tools", tmp_path / "venv/bin/python"
        for folder in (tools, python.parent):
            folder.mkdir(parents=True)
        (tools / "uname").write_text(f"#!/bin/sh\necho {system}\n")
        python.write_text(PIP.format(folder=tmp_path, pytorch=PYTORCH))
        for program in (tools / "uname", python):
            program.chmod(0o755)
        for name, builds in (("configured", configured), ("pytorch", pytorch)):
            (tmp_path / name).write_text("".join(f"{build}\n" for build in builds))
        if installed:
            (tmp_path / f"venv/lib/python3.11/site-packages/torch-{installed}.dist-info").mkdir(parents=True)
        env = {"PATH": f"{tools}:/usr/bin:/bin", "PYTHON": sys.executable, "VERL_DAG_VENV": str(tmp_path / "venv")}
        script = f"set -euo pipefail; . {ROOT}/recipe/dag/scripts/cpu_env.sh"
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
        asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
        return done, [line.partition("--disable-pip-version-check ")[2] for line in asked]

    return run


CPU, DEFAULT = f"{VERSION}+cpu", VERSION


def test_the_configured_index_s_cpu_build_is_taken_and_no_other_index_is_asked(install):
    done, asked = install([CPU, DEFAULT], [CPU])
    assert asked == [f"--no-deps {TORCH}+cpu", TORCH, f"-e {ROOT}[cpu]"]
    assert f"torch {CPU} is installed" in done.stdout and (done.returncode, done.stderr) == (0, "")


def test_pytorch_s_cpu_build_is_taken_where_the_configured_index_has_none(install):
    done, asked = install([DEFAULT], [CPU])
    assert asked[1] == f"--no-deps --timeout 10 --retries 1 --index-url {PYTORCH} {TORCH}+cpu"
    assert f"torch {CPU} is installed" in done.stdout and (done.returncode, done.stderr) == (0, "")


def test_the_cuda_build_is_announced_before_it_is_installed(install):
    done, asked = install([DEFAULT])
    assert asked[-2:] == [TORCH, f"-e {ROOT}[cpu]"] and done.returncode == 0
    assert done.stderr.startswith(f"warning: no CPU build of {TORCH}") and done.stderr.count("\n") == 1
    assert "CUDA build: about 3 GB to download, 7 GB on disk" in done.stderr
    assert f"torch {DEFAULT} is installed" in done.stdout


@pytest.mark.parametrize("configured", [[DEFAULT], [CPU]])
def test_elsewhere_than_on_linux_plain_pip_decides(install, configured):
    done, asked = install(configured, [CPU], system="Darwin")
    assert asked == [TORCH, f"-e {ROOT}[cpu]"] and (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("installed", [CPU, DEFAULT, f"{VERSION}+cu130"])
def test_a_torch_of_the_right_version_stays(install, installed):
    done, asked = install([CPU], [CPU], installed=installed)
    assert asked == [f"-e {ROOT}[cpu]"] and f"torch {installed} is installed" in done.stdout


def test_an_index_without_any_torch_ends_the_command_and_leaves_no_stamp(install, tmp_path):
    done, asked = install([])
    assert done.returncode == 1 and done.stderr.endswith("no match\n") and asked[-1] == TORCH
    assert not list((tmp_path / "venv").glob(".verl-dag-*"))


def test_size_and_time_are_said_before_anything_is_installed(install):
    done, _ = install([CPU])
    assert re.match(r"installing into \S+ \(once\): about [\d.]+ GB to download, [\d.]+ GB on disk", done.stdout)
