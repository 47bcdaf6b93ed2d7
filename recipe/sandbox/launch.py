"""The sandbox server that a run starts for itself.

Invariant: between `start` and `stop` there is one server, always at the same address, a UNIX socket in a folder that
only this user can enter and that stays while the server restarts, so that no other process can take the address. After
`stop`, or the end of this process, none of the server's processes and files is left. Safe to use from several event
loops and threads.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from recipe.sandbox import removal
from recipe.sandbox.errors import CannotIsolate, CannotStart
from recipe.sandbox.fair_queue import default_slots

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_PING_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0
_LONGEST_PARENT = 107 - len("/verl-dag-sandbox-12345678/socket")
"""In bytes; the path of a UNIX socket has at most 107."""


class LocalSandbox:
    """`url` and `token` are what a client needs, which calls `ensure` when the server does not answer. The token keeps
    out jobs that run as this user where only Landlock holds them, which does not stop connections to sockets.

    max_concurrent: programs at once; None: the server's default. A client should not send more at a time: a request
    that waits at the client waits as long as it takes, one that waits at the server is refused after half a minute.
    isolation, accept_unsandboxed: what is requested; the attribute `isolation` is what runs.
    """

    def __init__(
        self,
        max_concurrent: int | None = None,
        *,
        isolation: str = "auto",
        accept_unsandboxed: bool = False,
    ):
        self.max_concurrent = max_concurrent or default_slots()
        self._requested = {"isolation": isolation, "accept_unsandboxed": accept_unsandboxed}
        self.token = secrets.token_urlsafe(24)
        self.restarts = 0
        self.url = self.socket = ""
        self.root = Path()
        """The directory of the jobs' files, of the server that runs."""
        self.isolation = ""
        self.memory = ""
        """What limits the memory of a program's processes together: "cgroup v1", "cgroup v2" or "watchdog"."""
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = os.getpid()
        self._reaper: subprocess.Popen[bytes] | None = None
        """Removes the socket's folder, from `start` to `stop`."""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The server's process number. Raises ValueError while the server is not running."""
        if self._process is None:
            raise ValueError("the local sandbox does not run")
        return self._process.pid

    async def start(self) -> str:
        """Start the server unless it is running; return its URL. Raises CannotStart."""
        await asyncio.to_thread(self.launch)
        return self.url

    def reserve(self) -> None:
        """Choose `url`, at which the server will be. Raises CannotStart."""
        with self._lock:
            if self._reaper is None:
                self._take_address()
                atexit.register(self.close)

    async def ensure(self) -> None:
        """Restart the server, at the same address, if it does not answer. Concurrent callers share one restart.
        Raises CannotStart."""
        await asyncio.to_thread(self._ensure)

    async def stop(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the server without an event loop; runs at interpreter exit, too."""
        if os.getpid() != self._starter:
            return  # in a forked child, which does not own the server
        with self._lock:
            atexit.unregister(self.close)
            self._end()
            self._leave()

    def launch(self) -> None:
        """Start the server unless it is running, and block until it answers. Raises CannotStart."""
        self.reserve()
        with self._lock:
            if self._process is not None:
                return
            try:
                self._launch()
            except BaseException:
                atexit.unregister(self.close)
                self._leave()
                raise
            if self.isolation == "rlimits":
                logger.warning(
                    "sandbox at %s: isolation %s only, no security boundary: programs run as this user",
                    self.url,
                    self.isolation,
                )

    def _ensure(self) -> None:
        with self._lock:
            if self._reaper is None:
                raise CannotStart("the local sandbox is not started")
            if self._process is not None and self._process.poll() is None and self._answers():
                return
            logger.warning("sandbox at %s does not answer: restarting it", self.url)
            self._end()
            self._launch()
            self.restarts += 1

    def _launch(self) -> None:
        self._starter = os.getpid()
        command = [sys.executable, "-P", "-m", "recipe.sandbox.embedded"]
        options = {
            "socket": self.socket,
            "max_concurrent": self.max_concurrent,
            **self._requested,
            "grace_s": 0.1,
            # One per episode, and no others are opened. What they hold together is limited, not their number: above
            # the limit, a session with more than its equal share is refused programs and files.
            "max_sessions": 1 << 16,
            "log_level": "warning",
        }
        # No secrets: under rlimits a job can read its server's environment.
        keep = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "TZ", "MY_POD_NAME")
        env = {name: os.environ[name] for name in keep if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # A new session: Ctrl-C goes to the run only, which then stops the server.
        process = self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        # A process that has already ended is noticed below.
        with suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps(options)}\n{self.token}\n".encode())
        ready = select.poll()
        ready.register(process.stdout, select.POLLIN)
        line = process.stdout.readline() if ready.poll(_START_TIMEOUT_S * 1000) else b""
        hello = json.loads(line) if line else {}
        if "socket" not in hello:
            self._end()
            reason = hello.get("error") or "the local sandbox server did not start; see its output above"
            raise (CannotIsolate if hello.get("cannot_isolate") else CannotStart)(reason)
        self.isolation, self.memory, self.root = hello["isolation"], hello["memory"], Path(hello["root"])

    def _answers(self) -> bool:
        ping = f"GET /v1/ping HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(_PING_TIMEOUT_S)
            connection.connect(self.socket)
            connection.sendall(ping.encode())
            return connection.recv(12).endswith(b" 200")
        return False

    def _take_address(self) -> None:
        """Make the socket's folder, for this user alone. Raises CannotStart."""
        parent = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_PARENT else "/tmp"
        try:
            folder = tempfile.mkdtemp(prefix="verl-dag-sandbox-", dir=parent)
        except OSError as error:
            raise CannotStart(
                f"the sandbox cannot make a folder for its socket in {parent}: {error.strerror}; set TMPDIR to a "
                f"folder that you can write to, with a path of at most {_LONGEST_PARENT} bytes"
            ) from None
        self._reaper = removal.start_reaper(folder)
        self.socket = f"{folder}/socket"
        self.url = f"http+unix://{quote(self.socket, safe='')}"

    def _leave(self) -> None:
        """Give the address up."""
        if self._reaper is not None:
            # Closes its stdin. If the removal takes longer, the reaper finishes on its own.
            with suppress(subprocess.TimeoutExpired):
                self._reaper.communicate(timeout=_STOP_TIMEOUT_S)
        self._reaper, self.url = None, ""

    def _end(self) -> None:
        """End the server. What it leaves behind, its reaper removes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
