"""The sandbox server that a run starts for itself.

Invariant: between `start` and `stop` there is one server, always at the same address; after `stop`, or a crash of the
server, nothing of it is left, neither processes nor files. Safe to use from several event loops and threads.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from recipe.dag.errors import SandboxFault, UserError
from recipe.dag.sandbox import survivors, workspace

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_PING_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0


class LocalSandbox:
    """`url` and `token` are what a SandboxClient needs, and `ensure` is its `on_unreachable`.

    max_concurrent: programs at once; the number of cores when None. A client should not send more than that at a time:
    what waits at the client waits as long as it must, what waits at the server is sent away after half a minute.
    """

    def __init__(self, max_concurrent: int | None = None):
        self.max_concurrent = max_concurrent or len(os.sched_getaffinity(0))
        self.token = secrets.token_urlsafe(24)
        self.restarts = 0
        self.url = ""
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._root: Path | None = None
        self._lock = threading.Lock()

    async def start(self) -> str:
        """Start the server, if it is not running; returns its URL. Raises UserError when it cannot start."""
        await asyncio.to_thread(self._start_first)
        return self.url

    async def ensure(self) -> None:
        """Start it again, at the same address, if it died or does not answer. Concurrent callers share one restart."""
        await asyncio.to_thread(self._ensure)

    async def stop(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """`stop` for when there is no event loop; runs at interpreter exit too."""
        with self._lock:
            atexit.unregister(self.close)
            self._end()
            self.url, self._port = "", 0

    def _start_first(self) -> None:
        with self._lock:
            if self._port:
                return
            self._launch()
            atexit.register(self.close)
            logger.warning(
                "sandbox at %s: isolation rlimits only, no security boundary: the agents' code runs as this user",
                self.url,
            )

    def _ensure(self) -> None:
        with self._lock:
            if not self._port:
                raise SandboxFault("the local sandbox is not started", where="sandbox")
            if self._process is not None and self._process.poll() is None and self._answers():
                return
            logger.warning("sandbox at %s does not answer: starting it again", self.url)
            self._end()
            try:
                self._launch()
            except UserError as error:
                # It ran before, so nothing that the user wrote is to blame.
                raise SandboxFault(str(error), where="sandbox") from error
            self.restarts += 1

    def _launch(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="verl-dag-sandbox-"))
        command = [sys.executable, "-P", "-m", "recipe.dag.sandbox.server", "--parent-stdin", "--root", str(self._root)]
        command += ["--port", str(self._port), "--max-concurrent", str(self.max_concurrent)]
        # Nothing secret: a job can read its server's environment.
        keep = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "MY_POD_NAME")
        env = {name: os.environ[name] for name in keep if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Its own session: Ctrl-C is for the run, which then stops the server in its own time.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        self._process.stdin.write(self.token.encode() + b"\n")
        self._process.stdin.flush()
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if ready.poll(_START_TIMEOUT_S * 1000) else b""
        if not line:
            self._end()
            raise UserError(
                "the local sandbox server did not start; see its message above, or set sandbox.url to one that runs"
            )
        hello = json.loads(line)
        self.url, self._port = hello["url"], hello["port"]

    def _answers(self) -> bool:
        request = urllib.request.Request(f"{self.url}/v1/ping", headers={"Authorization": f"Bearer {self.token}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_PING_TIMEOUT_S) as response:
                return response.status == 200
        except OSError:
            return False

    def _end(self) -> None:
        """End the server and what it may have left behind."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
                clean = process.returncode == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                clean = False
            process.stdin.close()
            process.stdout.close()
            if not clean:
                survivors.kill(set(survivors.anywhere(self._root)))
        root, self._root = self._root, None
        if root is not None:
            workspace.remove(root)
