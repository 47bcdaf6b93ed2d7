"""Runs the requests in the sandbox's README against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.sandbox import body
from recipe.sandbox.fair_queue import default_slots
from recipe.sandbox.limits import MAX_RUN_S, Limits
from recipe.sandbox.server import Options
from recipe.sandbox.sessions import DEFAULT_QUOTA_MB, DEFAULT_TTL_S
from recipe.sandbox.wire import RunCodeRequest

README = (Path(__file__).parents[2] / "recipe/sandbox/README.md").read_text()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_requests_run(sandbox_level, env, tmp_path):
    level = ["--isolation", sandbox_level["isolation"]]
    level += ["--allow-unsandboxed"] * sandbox_level.get("accept_unsandboxed", False)
    command = [sys.executable, "-m", "recipe.sandbox", "--port", "0", "--quiet", *level]
    blocks = [
        block for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "curl" in block
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            line = server.stdout.readline()
            url = line.split()[2].rstrip(":")
            lines = [f"{line}\necho" for block in blocks for line in block.splitlines()]
            script = re.sub(r"URL=\S+", f"URL={url}", "\n".join(["set -e", *lines]))
            script = script.replace("python -c", f"{sys.executable} -c")
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.strip()]
    assert json.loads(answers[0])["run_result"]["stdout"] == "42\n"
    assert '{"bytes": 8}' in done.stdout and '"status": "Success"' in done.stdout
    assert "\n10\n" in done.stdout and json.loads(answers[-1]) == {"deleted": True}
    shown = next(line for line in README.splitlines() if line.startswith("sandbox at "))
    if sandbox_level["isolation"] == "full":
        shape = re.compile(r":[\w-]+@|\d+")
        assert shape.sub("N", shown) == shape.sub("N", line.strip())


def test_every_option_in_the_readme_exists(env):
    others = {"--quick", "--against", "--runtime"}
    named = {option.partition("=")[0] for option in re.findall(r"--[a-z][a-z-]+(?:=\w+)?", README)} - others
    command = [sys.executable, "-m", "recipe.sandbox", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, env=env | {"COLUMNS": "200"}).stdout
    assert named and all(option in shown for option in named), named


def test_the_figures_in_the_readme_match_the_code():
    assert body.BODY_TIMEOUT_S == 30 and body.MAX_BODY_BYTES == 32 << 20 and MAX_RUN_S == 3600
    assert default_slots() >= 8
    limits, options, request = Limits(), Options(), RunCodeRequest(code="", language="python")
    assert (limits.processes, limits.open_files, limits.file_mb, limits.output_bytes) == (64, 256, 64, 1 << 20)
    assert request.run_timeout == request.compile_timeout == 10
    assert (options.memory_mb, options.max_memory_mb, options.max_queue, options.grace_s) == (1024, 8192, 1024, 5)
    assert (options.max_sessions, options.sessions_mb) == (1024, 8192)
    assert (DEFAULT_QUOTA_MB, DEFAULT_TTL_S) == (256, 3600)
