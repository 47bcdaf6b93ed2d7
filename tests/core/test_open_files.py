"""The limit on open files is raised, and said where it stays too low."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from recipe.dag.app import main
from recipe.dag.core.open_files import shortage

CODE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 700))
from recipe.dag.core.open_files import raise_limit, shortage
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
print(shortage(512, 700))
"""


def test_the_limit_is_raised_as_far_as_it_may_be():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=os.getcwd())
    limits, line = done.stdout.splitlines()
    assert limits == "700 (700, 700)"
    assert line.startswith("this process may open 700 files, and rollout.max_in_flight=512 episodes may need 1536: ")
    assert line.endswith("or set rollout.max_in_flight=94")
    assert shortage(94, 700) is None


@pytest.mark.parametrize("evaluate_only", [False, True], ids=["train", "eval"])
def test_a_run_raises_it_and_says_where_that_is_too_little(evaluate_only, tmp_path, monkeypatch, capsys):
    before, limits = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def started(coroutine) -> None:
        coroutine.close()
        limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    monkeypatch.setattr(main.asyncio, "run", started)
    monkeypatch.setattr(main, "prepare_environment", lambda platform: None)
    options = ["workflow=workflows/workflow_retool_ma.yaml", "model_path=m", "platform=cpu", "data.train_files=t"]
    options += [f"output_dir={tmp_path}", f"rollout.max_in_flight={before[1]}"]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        main.launch("dag", options, evaluate_only=evaluate_only)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == [before[1]]
    warning = [line for line in capsys.readouterr().err.splitlines() if "rollout.max_in_flight" in line]
    assert len(warning) == 1 and warning[0].startswith(f"warning: this process may open {before[1]} files")
