"""A jail's first two processes: the second prepares the job and becomes it, the first waits for its end.

Invariant: when a report is sent, every process that the job started is dead. The first process, which forks the second
before it does anything else, is the only one of the jail that keeps the connection to the server; the job can
neither trace nor kill it. Only the server can stop a job, by closing its half of the connection:
no signal means stop. (Each page that both processes write is copied twice, so the second does the work and the first
hardly runs.)
"""

from __future__ import annotations

import _signal  # the public functions convert to enumerations, which costs every job
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from recipe.sandbox.jail import files, program, protocol
from recipe.sandbox.jail.wall import Wall

WAKE = signal.SIGTERM
"""Makes the first process look at the connection. The job can send it, too."""
_AWAITED = (signal.SIGCHLD, WAKE)


class Supervisor:
    """Runs with all signals blocked: a handler that Python installed would let the job interrupt the first process.

    connection: to the server. excess: the zygote's address space, in bytes.
    """

    def __init__(self, connection: socket.socket, settings: Mapping[str, Any], wall: Wall, excess: int):
        self._connection = connection
        self._settings = settings
        self._wall = wall
        self._excess = excess

    def run(self) -> program.Program:
        """Take one job and run it. Returns only in the job's own process, and only for a warm program."""
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        program.limit_signals()
        self._wall.start()
        worker = os.fork()
        if worker == 0:
            return self._work()
        self._watch(worker)

    def _work(self) -> program.Program:
        try:
            self._wall.enter()
            job, descriptors = protocol.receive(self._connection)
            streams, (started, *others) = descriptors[:3], descriptors[3:]
            self._prepare(job, others)
        except protocol.Closed:
            os._exit(0)
        except files.BadFile as error:
            # An earlier program may have made the session such that the file cannot be written.
            self._refuse(
                str(error), session=job["directory"] != job["scratch"] and isinstance(error.__cause__, OSError)
            )
        except BaseException as error:
            self._refuse(f"the jail could not be prepared: {type(error).__name__}: {error}")
        self._connection.detach()
        os.eventfd_write(started, 1)
        self._become(job, job["stage"], streams)
        return program.Program(job["path"], job["code"], job["directory"])

    def _prepare(self, job: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Set up directories, rights and files. descriptors: the mounts of the sessions, then a packed file, if the job
        has files."""
        count = job["work"] + len(job["shares"])
        program.be_the_first_victim()
        self._wall.grant(job, descriptors[:count])
        self._wall.confine(job)
        files.write_whole(job["path"], job["code"].encode())
        os.chdir(job["directory"])
        for descriptor in descriptors[count:]:
            files.write(files.unpack(descriptor))

    def _become(self, job: Mapping[str, Any], stage: Mapping[str, Any], streams: list[int]) -> None:
        """Become the job's process. Returns only for a warm program."""
        argv, directory = stage["argv"], job["directory"]
        try:
            program.become(streams, directory, stage["limits"], stage["timeout_s"], 0 if argv else self._excess)
            if argv:
                environment = self._settings["environment"] | self._wall.environment(job)
                # Modules in the session come before installed ones.
                if directory != job["scratch"]:
                    environment["PYTHONPATH"] = ":".join(filter(None, (directory, environment.get("PYTHONPATH"))))
                program.replace(argv, environment)
        except BaseException as error:
            os.write(2, f"[sandbox] {type(error).__name__}: {error}\n".encode())
            os._exit(program.PREPARATION_FAILED)

    def _watch(self, leader: int) -> NoReturn:
        """Wait for the first stage, then run further stages and return files."""
        try:
            self._wall.shield()
            code, cpu_s = self._finish(leader)
            rest, descriptors = protocol.receive(self._connection)
            stages = rest["stages"]
            while code == 0 and stages:
                self._connection.send(protocol.report("stage", code, cpu_s))
                streams, descriptors = descriptors[:3], descriptors[3:]
                leader = self._fork()
                if leader == 0:
                    try:
                        program.be_the_first_victim()
                        self._wall.confine(rest)
                        self._become(rest, stages[0], streams)
                    finally:
                        os._exit(program.PREPARATION_FAILED)
                for descriptor in streams:
                    os.close(descriptor)
                stages = stages[1:]
                code, cpu_s = self._finish(leader)
            self._connection.send(protocol.report("files" if rest["fetch"] else "end", code, cpu_s))
            if rest["fetch"]:
                # Reported before: whatever the program has done to its files, its exit code is known.
                self._wall.read_back(rest, lambda: _fetch(rest, descriptors[-1]))
                self._connection.send(protocol.FETCHED)
        finally:
            # Also if the server has ended. If it has not, it notices that a message is missing.
            os._exit(0)

    def _fork(self) -> int:
        try:
            return os.fork()
        except OSError as error:
            self._refuse(f"no process for the next stage: {error}")

    def _finish(self, leader: int) -> tuple[int | None, float]:
        """Wait until `leader` has ended, or until the server closes its half of the connection; then kill all other
        processes. Returns the exit code, negative after a signal, None if stopped, and the leader's CPU seconds."""
        # The server may have ended before this process could hear of it.
        ended = (None, 0.0) if _is_closed(self._connection) else None
        while ended is None:
            signal.sigwaitinfo(_AWAITED)
            ended = _collect(leader)
            if ended is None and _is_closed(self._connection):
                ended = None, 0.0
        self._wall.end_all()
        return ended

    def _refuse(self, reason: str, *, session: bool = False) -> NoReturn:
        protocol.send(self._connection, {"refused": reason, "session": session})
        os._exit(program.PREPARATION_FAILED)


def _fetch(job: Mapping[str, Any], descriptor: int) -> None:
    os.chdir(job["directory"])
    files.pack(files.fetch(job["fetch"]), descriptor)


def _collect(leader: int) -> tuple[int, float] | None:
    """Collect the processes that have ended; return the exit code and CPU seconds of the leader, if it has."""
    with suppress(ChildProcessError):
        while (waited := os.wait4(-1, os.WNOHANG))[0]:
            process, status, usage = waited
            if process == leader:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    return None


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other side will send nothing more; messages may wait to be read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
