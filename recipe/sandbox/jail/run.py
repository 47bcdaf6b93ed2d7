"""The server's side of one job in its jail.

Invariant: `end` leaves nothing behind: the jail is dead, or has reported that all of the job's processes are, and every
descriptor is closed. A jail that dies before its program has started is a fault, NotRun. One that dies afterwards ends
the program as SIGKILL does, since the program may be the cause (by using up memory) and must not gain another try; it
is a fault only if the server killed it, or its zygote died.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from recipe.sandbox.jail import files, program, protocol
from recipe.sandbox.jail.handle import Jail
from recipe.sandbox.jail.inside import SCRATCH
from recipe.sandbox.jail.pump import Pump
from recipe.sandbox.limits import Limits
from recipe.sandbox.outcome import Outcome, SandboxError, UnusableSession

WATCH_S = 0.05
_PUMP_EVERY_S = 0.01
_GRACE_S = 5.0
"""Time for a jail to end its job after a stop, and again to return files, before the whole jail is killed."""
NOTICE_S = 0.1
"""Time for the server to notice the death of a zygote and of its jails."""
_INLINE_BYTES = 1 << 20
"""More bytes are packed and unpacked in a thread."""
_SPENT = 0.5
"""Share of the CPU limit that was used if it ended a stage: the limit counts whole ticks of the clock, which on a busy
machine are more than the reported time."""
_OTHER_PROCESSES = 4
"""Processes of a jail beside its job's."""
SLACK = 64 << 20
"""Bytes above the limit on a job's memory that are tolerated, so that a single process reaches its own limit first,
which its program can handle."""


class NotRun(SandboxError):
    """The jail died before its program started."""


class Run:
    """One job in its jail."""

    def __init__(
        self,
        jail: Jail,
        job: Mapping[str, Any],
        stages: Sequence[Mapping[str, Any]],
        stdin: str | None,
        fetch: Sequence[str],
        limits: Limits,
        descriptors: Sequence[int] = (),
    ):
        """packed: a descriptor of the job's files, if it has any."""
        self._jail = jail
        self._stages = stages
        self._scratch = job["scratch"]
        self._loop = asyncio.get_running_loop()
        self._ends: list[tuple[int | None, float]] = []
        """For each stage: its exit code, None if it was stopped, and its seconds."""
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._pumps = [Pump(limits.output_bytes) for _ in range(2 * len(stages))]
        self._files = os.memfd_create("files", os.MFD_CLOEXEC) if fetch else None
        self._started = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """The jail writes to it before the program starts: a message would wake the server for every job."""
        self._exceeded: set[int] = set()
        """The stages that used more memory than they may."""
        self._kills = 0
        self._running = self._fetching = self._stopped = self._killed = self._died = self._clean = False
        self._began = self._taken = self._loop.time()
        try:
            self._limit_group()
            self._send(job, stdin, fetch, descriptors)
        except OSError:
            self._break()
        for pump in self._pumps:
            pump.sent()
        self._loop.add_reader(jail.connection.fileno(), self._hear)
        self._pumping = self._loop.call_later(_PUMP_EVERY_S, self._pump)
        self._deadline = self._loop.call_later(max(0.0, stages[0]["timeout_s"]), self._stop)

    def _send(
        self, job: Mapping[str, Any], stdin: str | None, fetch: Sequence[str], descriptors: Sequence[int]
    ) -> None:
        """Send the job to the jail's second process, then the work after the first stage to its first process."""
        sources = [*(_stdin(None) for _ in self._stages[1:]), _stdin(stdin)]
        try:
            streams = [
                (source, *(pump.write_end for pump in self._pumps[2 * number : 2 * number + 2]))
                for number, source in enumerate(sources)
            ]
            first = [*streams[0], self._started, *descriptors]
            protocol.send(self._jail.connection, {**job, "stage": self._stages[0]}, first)
            later = [descriptor for stage in streams[1:] for descriptor in stage]
            if self._files is not None:
                later.append(self._files)
            places = {name: job[name] for name in ("scratch", "directory")}
            rest = {"stages": self._stages[1:], "fetch": fetch, **places}
            protocol.send(self._jail.connection, rest, later)
        finally:
            for source in sources:
                os.close(source)

    async def result(self) -> tuple[list[Outcome], dict[str, str]]:
        """Return one outcome per stage that ran, and the files.

        Raises SandboxError if the jail refused the job or died by the server's doing, NotRun if it died before the
        program started.
        """
        await self._done
        if self._died:
            await asyncio.sleep(NOTICE_S)
            if self._killed or self._jail.is_orphan():
                raise SandboxError("the sandbox ended, or its zygote died, while the program ran")
        for pump in self._pumps:
            pump.close()
        outcomes = [self._outcome(number) for number in range(len(self._ends))]
        return outcomes, await self._fetched()

    def kill(self) -> None:
        """Kill the jail because the server ends."""
        self._killed = True
        self._jail.kill()

    async def end(self) -> None:
        """Release everything; unless the jail has reported the end of all processes, kill it and wait for its death."""
        self._pumping.cancel()
        self._deadline.cancel()
        self._loop.remove_reader(self._jail.connection.fileno())
        try:
            if not self._clean:
                self.kill()
                fallback = self._loop.call_later(_GRACE_S, self._jail.signal, signal.SIGKILL)
                try:
                    await uncancelled(self._jail.gone())
                finally:
                    fallback.cancel()
        finally:
            for pump in self._pumps:
                pump.close()
            if self._files is not None:
                os.close(self._files)
            os.close(self._started)
            self._jail.close()

    def allowed(self) -> float:
        """Return the bytes that the processes of the present stage may use together."""
        memory_mb = self._stages[len(self._ends)]["limits"]["memory_mb"]
        return (memory_mb << 20) + SLACK if memory_mb > 0 else math.inf

    def watched(self) -> int:
        """Return the number of the jail's first process if the memory of its processes has to be measured, else 0."""
        young = self._loop.time() - self._taken < WATCH_S
        return 0 if young or not self._runs() or math.isinf(self.allowed()) else self._jail.number()

    def check_group(self) -> None:
        """Stop the job if the kernel has ended one of its processes because they use too much memory together."""
        if self._runs() and self._group_kills() > self._kills:
            self.exceed()

    def exceed(self) -> None:
        """Stop the job because it uses too much memory."""
        if self._runs():
            self._exceeded.add(len(self._ends))
            self._stop()

    def _runs(self) -> bool:
        return not self._done.done() and not self._stopped and len(self._ends) < len(self._stages)

    def _limit_group(self) -> None:
        """Limit the jail's group for the present stage. Raises OSError."""
        group = self._jail.group
        if group is None:
            return
        self._kills = group.kills()
        try:
            # The user's own limit is reached first, so that the jail's first process can always fork.
            group.limit(self.allowed(), self._stages[len(self._ends)]["limits"]["processes"] + _OTHER_PROCESSES)
        except OSError:
            if not self._ends:
                raise
            self.exceed()  # the files of an earlier stage already are larger

    def _group_kills(self) -> int:
        return self._jail.group.kills() if self._jail.group is not None else 0

    def _hear(self) -> None:
        try:
            while not self._done.done():
                message, _ = protocol.receive(self._jail.connection)
                if "refused" in message:
                    kind = UnusableSession if message["session"] else SandboxError
                    self._done.set_exception(kind(message["refused"]))
                elif "fetched" in message:
                    self._finish(clean=True)
                elif not self._has_started() or (self._stopped and message["following"] == "stage"):
                    self._break()
                else:
                    self._end_stage(self._code(message["code"], message["cpu_s"]), message["following"])
        except BlockingIOError:
            return
        except (protocol.Closed, ValueError, KeyError):
            self._break()

    def _has_started(self) -> bool:
        """Return whether the program has been started."""
        if not self._running:
            with suppress(BlockingIOError):
                self._running = os.eventfd_read(self._started) > 0
        return self._running

    def _code(self, code: int | None, cpu_s: float) -> int | None:
        """Return the exit code, or None if the CPU limit ended the stage: a program can send itself that signal."""
        stage = self._stages[len(self._ends)]
        limit = program.cpu_seconds(stage["limits"]["cpu_s"], stage["timeout_s"])
        return None if code == -signal.SIGXCPU and cpu_s > _SPENT * limit else code

    def _end_stage(self, code: int | None, following: str) -> None:
        now = self._loop.time()
        if self._group_kills() > self._kills:
            self._exceeded.add(len(self._ends))
        self._ends.append((code, now - self._began))
        self._began = now
        self._deadline.cancel()
        if following == "stage":
            timeout_s = self._stages[len(self._ends)]["timeout_s"]
            self._deadline = self._loop.call_later(max(0.0, timeout_s), self._stop)
            self._limit_group()
        elif following == "files":
            self._fetching = True
            self._deadline = self._loop.call_later(_GRACE_S, self._jail.signal, signal.SIGKILL)
        else:
            self._finish(clean=following == "end")

    def _finish(self, *, clean: bool) -> None:
        self._clean = clean
        self._done.set_result(None)

    def _break(self) -> None:
        """Decide the outcome of a jail that will report nothing more."""
        if self._done.done():
            return
        if self._fetching:
            self._finish(clean=False)
        elif self._stopped:
            self._end_stage(None, "nothing")
        elif self._has_started():
            self._died = self._group_kills() <= self._kills
            self._end_stage(-signal.SIGKILL, "nothing")
        else:
            self._done.set_exception(NotRun("the jail died before its program started"))

    def _stop(self) -> None:
        """Tell the jail to end the job; if it does not, kill the whole jail."""
        self._stopped = True
        self._jail.stop()
        self._deadline.cancel()
        self._deadline = self._loop.call_later(_GRACE_S, self._jail.signal, signal.SIGKILL)

    def _pump(self) -> None:
        if not all([pump.start_when_written() for pump in self._pumps]):
            self._pumping = self._loop.call_later(_PUMP_EVERY_S, self._pump)

    def _outcome(self, number: int) -> Outcome:
        code, seconds = self._ends[number]
        # A random name would make every traceback unique.
        stdout, stderr = (
            pump.text().replace(self._scratch, SCRATCH) for pump in self._pumps[2 * number : 2 * number + 2]
        )
        if number in self._exceeded:
            memory_mb = self._stages[number]["limits"]["memory_mb"]
            note = f"[sandbox] killed: more than {memory_mb} MiB of memory\n"
            return Outcome("finished", -signal.SIGKILL, stdout, stderr + note, seconds)
        if code is None:
            return Outcome("timeout", None, stdout, stderr, seconds)
        if self._died and number == len(self._ends) - 1:
            stderr += "[sandbox] killed with its jail, as when the machine has no memory left\n"
        return Outcome("finished", code, stdout, stderr, seconds)

    async def _fetched(self) -> dict[str, str]:
        contents: dict[str, str] = {}
        if self._files is not None and self._clean:
            descriptor = self._files
            await off_loop(os.fstat(descriptor).st_size, lambda: contents.update(files.unpack(descriptor)))
        return contents


async def off_loop(size: int, work: Callable[[], None]) -> None:
    """Do work on `size` bytes, in a thread if they are many. If cancelled, ends with the work: it uses descriptors."""
    if size > _INLINE_BYTES:
        await uncancelled(asyncio.to_thread(work))
    else:
        work()


def _stdin(text: str | None) -> int:
    """Return a descriptor to read `text` from: a pipe, as programs expect, if the text fits into its buffer, so that it
    needs no writer; else a file in memory. Never blocks: the buffer of a pipe shrinks to a page once this user has
    many pipes (fs.pipe-user-pages-soft)."""
    if text is None:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= 1 << 16:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        try:
            if not data or os.write(write, data) == len(data):
                return read
        except BlockingIOError:
            pass
        finally:
            os.close(write)
        os.close(read)
    with open(os.memfd_create("stdin", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(data)
        # Opened again: read-only, and at its beginning.
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)


async def uncancelled(work: Coroutine[None, None, None]) -> None:
    """Wait for `work` to finish even if cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
