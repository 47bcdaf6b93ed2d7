"""A SandboxFusion-compatible server: `/run_code`, `/run_jupyter`, `/submit`, sessions, `/v1/ping`, `/v1/status`.

Invariant: a handler reads, checks, runs and answers; only the files of a session outlive the answer. A client that
hangs up ends its job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from aiohttp import web

from recipe.sandbox import judge, jupyter, wire
from recipe.sandbox.body import MAX_BODY_BYTES, read_json
from recipe.sandbox.fair_queue import FairQueue
from recipe.sandbox.guard import client_of, middlewares, note_outcome
from recipe.sandbox.jail.engine import JailEngine
from recipe.sandbox.job import Job
from recipe.sandbox.jobs import JobRequest, Jobs
from recipe.sandbox.limits import MAX_RUN_S, Limits
from recipe.sandbox.outcome import SandboxError
from recipe.sandbox.session_routes import SessionRoutes
from recipe.sandbox.sessions import Sessions

_DATASET_ROUTES = ("/list_ids", "/get_prompts", "/get_prompt_by_id", "/get_metrics", "/get_metrics_function")
Result = TypeVar("Result")


class SandboxServer:
    """Runs at most `queue.slots` programs at once; `queue.depth` more may wait."""

    def __init__(
        self,
        engine: JailEngine,
        queue: FairQueue,
        sessions: Sessions,
        *,
        limits: Limits = Limits(),
        max_memory_mb: int = 8192,
        token: str = "",
    ):
        self._engine = engine
        self._queue = queue
        self._sessions = sessions
        self._jobs = Jobs(engine, queue, sessions, limits, max_memory_mb=max_memory_mb)
        self._limits = limits
        self._token = token
        self._started = time.monotonic()
        self._served = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares(self._token))
        app.add_routes(
            [
                web.post("/run_code", self.run_code),
                web.post("/run_jupyter", self.run_jupyter),
                web.post("/submit", self.submit),
                web.get("/list_datasets", self.list_datasets),
                *(web.post(path, self.no_dataset) for path in _DATASET_ROUTES),
                web.get("/v1/ping", self.ping),
                web.get("/v1/status", self.status),
                *SessionRoutes(self._sessions).routes(),
            ]
        )
        return app

    async def ping(self, _request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def status(self, _request: web.Request) -> web.Response:
        limits = self._limits
        return web.json_response(
            {
                **self._engine.status(),
                "isolation": self._engine.isolation,
                "queue": self._queue.waiting,
                "running": self._queue.running,
                "max_concurrent": self._queue.slots,
                "max_queue": self._queue.depth,
                "served": self._served,
                "uptime_s": round(time.monotonic() - self._started, 3),
                "sessions": {"open": len(self._sessions), "used_bytes": self._sessions.used_bytes},
                "limits": {
                    "memory_mb": limits.memory_mb,
                    "max_memory_mb": self._jobs.max_memory_mb,
                    "processes": limits.processes,
                    "file_mb": limits.file_mb,
                    "output_bytes": limits.output_bytes,
                    "open_files": limits.open_files,
                    "run_timeout_s": MAX_RUN_S,
                    "body_bytes": MAX_BODY_BYTES,
                },
            }
        )

    async def run_code(self, request: web.Request) -> web.Response:
        wanted = wire.parse(wire.RunCodeRequest, await read_json(request))
        job = Job(
            code=wanted.code,
            language=wanted.language,
            timeout_s=wanted.run_timeout,
            compile_timeout_s=wanted.compile_timeout,
            stdin=wanted.stdin,
            args=wanted.args,
            files=wanted.files,
            fetch=wanted.fetch_files,
        )
        job_request = JobRequest(
            client_of(request),
            job,
            memory_mb=wanted.memory_limit_mb,
            session_id=wanted.session_id,
            share=wanted.share,
        )
        answer = await self._run(job_request)
        self._served += 1
        note_outcome(request, answer["status"])
        return web.json_response(answer)

    async def run_jupyter(self, request: web.Request) -> web.Response:
        wanted = wire.parse(wire.RunJupyterRequest, await read_json(request))
        try:
            execution = await _without_os_error(self._jobs.run(jupyter.job_request(wanted, client_of(request))))
            size = len(execution.run.stdout) if execution.run else 0
            status, body = await wire.unblocked(size, jupyter.answer, wanted, execution)
        except SandboxError as error:
            status, body = jupyter.refusal(error)
        self._served += 1
        note_outcome(request, status)
        return web.Response(body=body, content_type="application/json")

    async def submit(self, request: web.Request) -> web.Response:
        submission = await asyncio.to_thread(judge.check, await read_json(request))
        result = await judge.evaluate(submission, client_of(request), self._run)
        note_outcome(request, "accepted" if result["accepted"] else "rejected")
        return web.json_response(text=await asyncio.to_thread(judge.to_json, result))

    async def list_datasets(self, _request: web.Request) -> web.Response:
        return web.json_response([])

    async def no_dataset(self, _request: web.Request) -> web.Response:
        raise wire.Invalid(
            "this server stores no datasets: send the problem as config.provided_data of /submit, with "
            "config.dataset_type CommonOJDataset",
            400,
        )

    async def _run(self, request: JobRequest) -> dict[str, Any]:
        try:
            return wire.answer(await _without_os_error(self._jobs.run(request)))
        except SandboxError as error:
            return wire.refusal(request.job.code, error)


async def _without_os_error(run: Awaitable[Result]) -> Result:
    """Await `run`; an OSError, such as a full disk, becomes a SandboxError, since the request did not cause it."""
    try:
        return await run
    except OSError as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error
