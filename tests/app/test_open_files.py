"""A run raises the limit of open files, and says where it stays too low."""

from __future__ import annotations

import resource

import pytest

from recipe.dag.app import launch


def test_too_low_a_limit_is_said_with_what_fits():
    line = launch.shortage_of_files(512, 700)
    assert line.startswith("this process may open 700 files, and rollout.max_in_flight=512 episodes may need 1536: ")
    assert line.endswith("or set rollout.max_in_flight=94")
    assert launch.shortage_of_files(94, 700) is None


@pytest.mark.parametrize("evaluate_only", [False, True], ids=["train", "eval"])
def test_a_run_raises_it_and_says_where_that_is_too_little(evaluate_only, tmp_path, monkeypatch, capsys):
    before, limits = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def started(coroutine) -> None:
        coroutine.close()
        limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    monkeypatch.setattr(launch.asyncio, "run", started)
    monkeypatch.setattr(launch, "prepare_environment", lambda platform: None)
    options = ["workflow=workflows/workflow_retool_ma.yaml", "model_path=m", "platform=cpu", "data.train_files=t"]
    options += [f"output_dir={tmp_path}", f"rollout.max_in_flight={before[1]}"]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        launch.launch("dag", options, evaluation=launch.Evaluation() if evaluate_only else None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits == [before[1]]
    warning = [line for line in capsys.readouterr().err.splitlines() if "rollout.max_in_flight" in line]
    assert len(warning) == 1 and warning[0].startswith(f"warning: this process may open {before[1]} files")
