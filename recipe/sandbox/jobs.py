"""Runs a checked request: acquires its session and a slot, then calls the engine.

Invariant: a job acquires its session before its slot, so that a busy session does not block a slot. Its time-out starts
when the job does. A request acquires its sessions in the order of their names, so that no two wait for each other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from recipe.sandbox import wire
from recipe.sandbox.fair_queue import FairQueue
from recipe.sandbox.jail.engine import JailEngine
from recipe.sandbox.job import Job
from recipe.sandbox.limits import MAX_RUN_S, Limits
from recipe.sandbox.outcome import Execution, Outcome, SandboxError, UnusableSession
from recipe.sandbox.sessions import Session, Sessions

MAX_PATIENCE_S = 30.0
_CLIENT_SLACK_S = 10.0
_ANSWER_S = 2.0
_WATCH_S = 0.25
_SHARE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class JobRequest:
    """A job before its limits and directories are known.

    client: whose turn it takes in the queue. memory_mb: at 0 and below the server's own limit applies. output_bytes: of
    each stream; None: the server's own limit.
    """

    client: str
    job: Job
    memory_mb: int = -1
    output_bytes: int | None = None
    session_id: str | None = None
    share: Mapping[str, str] = field(default_factory=dict)

    @property
    def patience_s(self) -> float:
        """Return how long the job may wait: SandboxFusion's clients give up compile_timeout + 10 s after the program's
        own time."""
        return min(max(self.job.compile_timeout_s, 0.0) + _CLIENT_SLACK_S - _ANSWER_S, MAX_PATIENCE_S)


class Jobs:
    """Runs job requests on an engine: at most `queue.slots` programs at once, while `queue.depth` more may wait.
    max_memory_mb: the largest limit that a request may set."""

    def __init__(
        self,
        engine: JailEngine,
        queue: FairQueue,
        sessions: Sessions,
        limits: Limits = Limits(),
        *,
        max_memory_mb: int = 8192,
    ):
        self.engine, self.queue, self.sessions, self.limits = engine, queue, sessions, limits
        self.max_memory_mb = max(max_memory_mb, limits.memory_mb)
        self.served = 0
        """Requests that were answered."""

    async def run(self, request: JobRequest) -> Execution:
        """Run one job. Raises SandboxError, Overloaded, NoSession."""
        try:
            return await self._run(request)
        except OSError as error:  # such as a full disk: the request did not cause it
            raise SandboxError(f"{type(error).__name__}: {error}") from error

    async def answer(self, request: JobRequest) -> dict[str, Any]:
        """Run one job and return the answer of /run_code. Raises Overloaded, NoSession."""
        try:
            return wire.answer(await self.run(request))
        except SandboxError as error:
            return wire.refusal(request.job.code, error)

    async def _run(self, request: JobRequest) -> Execution:
        job = request.job
        wire.check_language(job.language)
        for name, value in (("run_timeout", job.timeout_s), ("compile_timeout", job.compile_timeout_s)):
            wire.check_seconds(name, value)
        for name in request.share:
            if not _SHARE_NAME.fullmatch(name):
                raise SandboxError(f"share: {name!r} must be a plain file name of letters, digits, _, - and .")
        deadline = time.monotonic() + request.patience_s
        async with AsyncExitStack() as stack:
            held: dict[str, Session] = {}
            own = [] if request.session_id is None else [request.session_id]
            for name in sorted({*request.share.values(), *own}):
                left_s = max(deadline - time.monotonic(), 0.01)
                hold = self.sessions.hold(name, left_s, write=name == request.session_id)
                held[name] = await stack.enter_async_context(hold)
            await stack.enter_async_context(self.queue.slot(request.client, max(deadline - time.monotonic(), 0.01)))
            session = held[own[0]] if own else None
            job = self._limited(request, session, {name: held[number] for name, number in request.share.items()})
            if session is None:
                return await self.engine.execute(job)
            try:
                return await self._execute_in(session, job)
            except UnusableSession as error:
                # A program's doing, not a fault: the call fails.
                return Execution(Outcome("finished", 1, "", f"[sandbox] {error}\n", 0.0))
            finally:
                # Runs also when the client hung up.
                await self.sessions.measure(session)

    def _limited(self, request: JobRequest, session: Session | None, shares: Mapping[str, Session]) -> Job:
        memory_mb = min(request.memory_mb, self.max_memory_mb) if request.memory_mb > 0 else self.limits.memory_mb
        output = request.output_bytes or self.limits.output_bytes
        limits = dataclasses.replace(self.limits, memory_mb=memory_mb, output_bytes=output)
        return dataclasses.replace(
            request.job,
            timeout_s=min(request.job.timeout_s, MAX_RUN_S),
            compile_timeout_s=min(request.job.compile_timeout_s, MAX_RUN_S),
            limits=limits,
            work=session and session.place,
            shares={name: share.place for name, share in shares.items()},
        )

    async def _execute_in(self, session: Session, job: Job) -> Execution:
        """Run a job in a session. Where no file system enforces the quota, the job is ended when it exceeds it, and the
        next call is refused: raises wire.Invalid, also for a session that takes too much of what all may hold."""
        check_share(self.sessions, session)
        if session.place.enforced:
            return await self.engine.execute(job)
        await self.sessions.measure(session)
        if session.over:
            raise over_quota(session)
        task = asyncio.ensure_future(self.engine.execute(job))
        try:
            while not (await asyncio.wait([task], timeout=_WATCH_S))[0] and not session.over:
                await self.sessions.measure(session)
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.sessions.measure(session)
        if not session.over:
            return task.result()
        run = (None if task.cancelled() else task.result().run) or Outcome("finished", -9, "", "", 0.0)
        note = f"[sandbox] {over_quota(session).detail}\n"
        return Execution(dataclasses.replace(run, return_code=run.return_code or -9, stderr=run.stderr + note))


def check_share(sessions: Sessions, session: Session) -> None:
    """Raise wire.Invalid if the session must not grow because of what all sessions hold."""
    if sessions.crowds(session):
        held = f"all sessions hold {sessions.used_bytes} bytes, this one {session.used_bytes}, which is above its share"
        raise wire.Invalid(f"the server is full ({held}): delete files first", 507)


def over_quota(session: Session) -> wire.Invalid:
    held = f"{session.used_bytes} of {session.quota_bytes} bytes"
    return wire.Invalid(f"the session is full (it holds {held}, or as many files as it may): delete files first", 507)
