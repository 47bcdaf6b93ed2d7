"""The application with SandboxFusion's API: `/run_code`, `/v1/ping`, `/v1/status`, and the routes of sessions and of
`sandboxfusion`.

Invariant: a handler reads, checks, runs and answers; only the files of a session outlive the answer. A client that
hangs up ends its job.
"""

from __future__ import annotations

import time

from aiohttp import web

from recipe.sandbox import wire
from recipe.sandbox.body import MAX_BODY_BYTES, read_json
from recipe.sandbox.guard import client_of, middlewares, note_outcome
from recipe.sandbox.job import Job
from recipe.sandbox.jobs import JobRequest, Jobs
from recipe.sandbox.limits import MAX_RUN_S
from recipe.sandbox.sandboxfusion.routes import SandboxFusionRoutes
from recipe.sandbox.session_routes import SessionRoutes


class Routes:
    def __init__(self, jobs: Jobs, token: str):
        """`token`: empty if requests need none."""
        self._jobs, self._token, self._started = jobs, token, time.monotonic()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares(self._token))
        app.add_routes(
            [
                web.post("/run_code", self.run_code),
                web.get("/v1/ping", self.ping),
                web.get("/v1/status", self.status),
                *SessionRoutes(self._jobs.sessions).routes(),
                *SandboxFusionRoutes(self._jobs).routes(),
            ]
        )
        return app

    async def ping(self, _request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def status(self, _request: web.Request) -> web.Response:
        jobs, limits = self._jobs, self._jobs.limits
        return web.json_response(
            {
                **jobs.engine.status(),
                "isolation": jobs.engine.isolation,
                "queue": jobs.queue.waiting,
                "running": jobs.queue.running,
                "max_concurrent": jobs.queue.slots,
                "max_queue": jobs.queue.depth,
                "served": jobs.served,
                "uptime_s": round(time.monotonic() - self._started, 3),
                "sessions": {"open": len(jobs.sessions), "used_bytes": jobs.sessions.used_bytes},
                "limits": {
                    "memory_mb": limits.memory_mb,
                    "max_memory_mb": jobs.max_memory_mb,
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
        answer = await self._jobs.answer(job_request)
        self._jobs.served += 1
        note_outcome(request, answer["status"])
        return web.json_response(answer)
