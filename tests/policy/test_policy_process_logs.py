"""Where the lines of Ray and of a run's processes go."""

from __future__ import annotations

import io
import logging

import pytest
from ray._private.log import PlainRayHandler
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from recipe.dag.policy.process_logs import HANDLER, ProcessLogs


def batch(*lines: str, pid: int | str = 7, ip: str = "10.0.0.1", **names: str) -> dict:
    """As Ray's log monitor sends it."""
    return {"pid": pid, "ip": ip, "localhost": "10.0.0.1", "job": "01", "is_err": False, "lines": [*lines], **names}


@pytest.fixture
def logs(tmp_path):
    made = ProcessLogs(tmp_path / "logs")
    made.quiet()
    yield made
    made.close()


def texts(logs: ProcessLogs) -> dict[str, str]:
    return {path.name: path.read_text() for path in logs.folder.iterdir()}


def test_each_process_has_a_file_and_nothing_is_printed(logs, capfd):
    logs.follow(console=False)
    logs.open()
    dispatcher.emit(batch("loading", "loaded", actor_name="main_server"))
    dispatcher.emit(batch("resting", pid=8, task_name="Policy Worker/x"))
    dispatcher.emit(batch("more", actor_name="main_server"))
    dispatcher.emit(batch("far away", pid=9, ip="10.0.0.2", actor_name="main_server"))
    dispatcher.emit(batch("a node died", pid="raylet"))
    assert texts(logs) == {
        "main_server-7.log": "loading\nloaded\nmore\n",
        "Policy_Worker_x-8.log": "resting\n",
        "main_server-9-10.0.0.2.log": "far away\n",
        "raylet.log": "a node died\n",
    }
    assert capfd.readouterr() == ("", "")


def test_what_ray_says_before_files_may_be_written_is_kept_until_then(logs, capfd):
    logging.getLogger("ray._private.worker").info("Started a local Ray instance.")
    logs.take(batch("early", actor_name="server"))
    assert not logs.folder.exists() and not logs.written
    logs.open()
    logging.getLogger("ray").warning("a worker died")
    written = texts(logs)
    assert written["server-7.log"] == "early\n" and logs.written
    first, second = written["ray.log"].splitlines()
    assert first.endswith("INFO ray._private.worker: Started a local Ray instance.")
    assert second.endswith("WARNING ray: a worker died")
    assert capfd.readouterr() == ("", "")


def test_rays_errors_are_printed_too(logs, monkeypatch):
    terminal = io.StringIO()  # Ray's handler keeps the stream that was there when it was made
    (own,) = [handler for handler in logging.getLogger("ray").handlers if isinstance(handler, PlainRayHandler)]
    monkeypatch.setattr(own, "stream", terminal)
    logs.open()
    logging.getLogger("ray").error("the cluster is gone")
    logging.getLogger("ray").warning("a worker died")
    assert "the cluster is gone" in terminal.getvalue() and "a worker died" not in terminal.getvalue()
    assert "the cluster is gone" in texts(logs)["ray.log"]


def test_the_terminal_keeps_the_lines_where_the_user_asks_for_them(logs):
    printed: list[dict] = []
    dispatcher.add_handler("ray_print_logs", printed.append)
    try:
        logs.follow(console=True)
        logs.open()
        dispatcher.emit(batch("loading", actor_name="server"))
        assert len(printed) == 1 and texts(logs) == {"server-7.log": "loading\n"}
        logs.follow(console=False)
        dispatcher.emit(batch("loaded", actor_name="server"))
        assert len(printed) == 1 and texts(logs) == {"server-7.log": "loading\nloaded\n"}
    finally:
        dispatcher.remove_handler("ray_print_logs")


def test_afterwards_rays_logger_and_dispatcher_are_as_they_were(tmp_path):
    logger = logging.getLogger("ray")
    before = [(handler, handler.level) for handler in logger.handlers]
    logs = ProcessLogs(tmp_path / "logs")
    logs.quiet()
    logs.follow(console=False)
    logs.open()
    logs.close()
    assert [(handler, handler.level) for handler in logger.handlers] == before
    assert HANDLER not in [name for name, _ in dispatcher.handlers]


def test_a_folder_that_cannot_be_written_ends_nothing(logs):
    logs.open()
    logs.folder.rmdir()
    logs.take(batch("lost", actor_name="server"))
    assert not logs.written
