"""The server's side of a process that makes jails: a zygote, or a launcher.

Invariant: a helper that sends anything unexpected is killed, together with everything that it started. It is started by
exec with a scrubbed environment, so none of the server's secrets is in its memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe.sandbox.jail import protocol

logger = logging.getLogger(__name__)

_IMPORT_FROM = str(Path(__file__).resolve().parents[3])
# Jobs can read the command line, so everything that they must not see is passed on stdin.
_STARTER = """
import os, sys
number, module, sys.path[0] = os.read(0, 65536).decode().split("\\0")
serve = __import__("recipe.sandbox.jail." + module, fromlist=["serve"]).serve
with serve(int(number)) as job: exec(vars().pop("job"))
"""
_START_S = 120.0


class NotStarted(Exception):
    """A helper could not be set up. `step` says where it failed, `number` is the errno or None."""

    def __init__(self, step: str, reason: str, number: int | None = None):
        super().__init__(f"{step}: {reason}")
        self.step, self.number = step, number


class Helper:
    """A process that runs `serve` of a module of this package. `hello` is its message when it is ready."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        on_message: Callable[[Helper, dict[str, Any], list[int]], None],
        on_exit: Callable[[Helper], None],
    ):
        self._module = module
        self._settings = settings
        self._on_message, self._on_exit = on_message, on_exit
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._users = 0
        self._retired = False
        self.hello: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises NotStarted."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Pipes, as a job's streams will be: the interpreter checks their type only when it starts.
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", _STARTER],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()],
                env=dict(self._settings["environment"]), cwd="/", start_new_session=True,
            )  # fmt: skip
            assert process.stdin is not None  # a pipe
            process.stdin.write(f"{theirs.fileno()}\0{self._module}\0{_IMPORT_FROM}".encode())
            process.stdin.close()
        self._control = ours
        protocol.send(ours, {**self._settings, "server": os.getpid()})
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._hear)
        try:
            await asyncio.wait_for(self._ready, _START_S)
        except TimeoutError:
            self.end()
            raise NotStarted("start", f"no answer within {_START_S:g} s") from None
        except BaseException:
            self.end()
            raise

    def tell(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message; return False if the socket's buffer is full. The death of a helper is noticed by `_hear`."""
        with suppress(ConnectionError):
            try:
                if self._control is not None:
                    protocol.send(self._control, message, descriptors)
            except BlockingIOError:
                return False
        return True

    def use(self) -> None:
        """Count a jail that would die with this helper."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if self._retired and self._users == 0:
            self.end()

    def retire(self) -> None:
        """End as soon as no jail uses it."""
        self._retired = True
        if self._users == 0:
            self.end()

    def end(self) -> None:
        """Kill the process, and thereby everything that it started."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def number(self) -> int | None:
        """Return the process number; None if the process has ended."""
        return self._process.pid if self._process is not None else None

    def _hear(self) -> None:
        try:
            while self._control is not None:
                message, descriptors = protocol.receive(self._control)
                if self._ready.done():
                    self._on_message(self, message, descriptors)
                elif "ready" in message:
                    self.hello = message
                    self._ready.set_result(None)
                else:
                    self._ready.set_exception(NotStarted(message["failed"], message["reason"], message["errno"]))
        except BlockingIOError:
            return
        except protocol.Closed:
            if not self._ready.done():
                self._ready.set_exception(NotStarted("start", self._last_words()))
                return
        except Exception:
            logger.exception("sandbox: a %s broke the protocol", self._module)
        self.end()
        self._on_exit(self)

    def _last_words(self) -> str:
        assert self._process is not None and self._process.stderr is not None  # set from start() to end()
        self._process.kill()
        lines = self._process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it ended without a message"
