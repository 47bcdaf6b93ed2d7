"""A jail's first process: takes one job, runs its stages one after the other, hands back what they left.

Invariant: when it reports, every process that the job started is dead. It is the only process of the jail that holds
the connection to the server, and the job, which runs as the same user, can neither trace it nor end it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag.sandbox.jail import files, inside, program, protocol
from recipe.dag.sandbox.jail.inside import SCRATCH
from recipe.dag.sandbox.jail.seccomp import Filter

_STEM = "tmp_program"
_SUFFIXES = {"python": ".py", "bash": ".sh", "cpp": ".cpp"}
STOP = signal.SIGTERM


class Stage:
    """One process of the job, in a jail that is settled."""

    def __init__(self, streams: Sequence[int], directory: str, settings: Mapping[str, Any], excess: int):
        self._arguments = (streams, directory, settings["limits"], settings["timeout_s"], excess)
        self._streams = streams

    def begin(self) -> int:
        """A fork: 0 in the job's process, its number in the supervisor."""
        process = os.fork()
        if process == 0:
            program.become(*self._arguments)
            return 0
        for descriptor in self._streams:
            os.close(descriptor)
        return process


def finish(leader: int) -> int | None:
    """Wait until `leader` has ended, or until the server says stop; then end everything that is left. Returns the exit
    code, negative after a signal, None when stopped."""
    status, stopped = None, False
    while status is None and not stopped:
        signalled = signal.sigwaitinfo((signal.SIGCHLD, STOP))
        # Only a sender outside of this process namespace has number 0; the job may send what it likes.
        stopped = signalled.si_signo == STOP and signalled.si_pid == 0 and signalled.si_code == 0
        while True:
            process, ended = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == leader:
                status = ended
                break
    _end_all()
    return None if stopped or status is None else os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class Supervisor:
    """All signals are blocked: a handler that Python installed would let the job interrupt this process.

    connection: to the server. seccomp: None in a jail that somebody else has furnished and filtered already.

    excess: the zygote's address space, in bytes.
    """

    def __init__(self, connection: socket.socket, settings: Mapping[str, Any], seccomp: Filter | None, excess: int):
        self._connection = connection
        self._settings = settings
        self._seccomp = seccomp
        self._excess = excess

    def run(self) -> program.Program | None:
        """Take one job and see it through. Returns only in the job's own process, and only for a warm program."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            job, descriptors = protocol.receive(self._connection)
        except protocol.Closed:
            os._exit(0)
        stdin, *outputs = descriptors
        result = outputs.pop() if job["fetch"] else None
        path = self._prepare(job)
        directory = os.getcwd()
        for number, stage in enumerate(job["stages"]):
            streams = (stdin if number == len(job["stages"]) - 1 else _nothing(), *outputs[2 * number : 2 * number + 2])
            warm = stage["argv"] is None
            started = time.monotonic()
            leader = Stage(streams, directory, stage, self._excess if warm else 0).begin()
            if leader == 0:
                if not warm:
                    program.replace([part.replace("{}", path) for part in stage["argv"]], self._environment(job))
                self._connection.detach()
                return program.Program(path, job["code"], directory)
            code = finish(leader)
            seconds = time.monotonic() - started
            last = code != 0 or number == len(job["stages"]) - 1
            if last and result is not None:
                with open(result, "wb") as file:
                    file.write(json.dumps(files.fetch(job["fetch"])).encode())
            self._connection.send(protocol.report(last, code, seconds))
            if last:
                os._exit(0)
        raise AssertionError("a job has at least one stage")

    def _environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Of a fresh interpreter, or another program: modules that a session holds come before installed ones."""
        environment = dict(self._settings["environment"])
        if job["work"]:
            environment["PYTHONPATH"] = ":".join(filter(None, ("/work", environment.get("PYTHONPATH"))))
        return environment

    def _prepare(self, job: Mapping[str, Any]) -> str:
        """Mounts, rights, files; returns the program's path. A job that cannot be prepared is reported, and ends."""
        settings = self._settings
        try:
            if self._seccomp is not None:
                inside.grant(job["work"], job["shares"], settings["host"], settings["expose"])
            inside.settle(self._seccomp)
            path = f"{SCRATCH}/{_STEM}{_SUFFIXES[job['language']]}"
            files.write_whole(path, job["code"].encode())
            os.chdir("/work" if job["work"] else SCRATCH)
            if job["files"]:
                files.write(job["files"])
        except files.BadFile as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(f"the jail could not be prepared: {type(error).__name__}: {error}")
        return path

    def _refuse(self, reason: str) -> None:
        protocol.send(self._connection, {"refused": reason})
        os._exit(0)


def _nothing() -> int:
    return os.open("/dev/null", os.O_RDONLY)
