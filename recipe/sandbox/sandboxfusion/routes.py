"""HTTP routes that run notebooks and judge programs: `/run_jupyter`, `/submit`, and those of data sets, of which this
server stores none.

Invariant: a handler reads, checks, runs and answers, as for `/run_code`.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from recipe.sandbox import wire
from recipe.sandbox.body import read_json
from recipe.sandbox.guard import client_of, note_outcome
from recipe.sandbox.jobs import Jobs
from recipe.sandbox.outcome import SandboxError
from recipe.sandbox.sandboxfusion import judge, jupyter

_DATASET_ROUTES = ("/list_ids", "/get_prompts", "/get_prompt_by_id", "/get_metrics", "/get_metrics_function")


class SandboxFusionRoutes:
    def __init__(self, jobs: Jobs):
        self._jobs = jobs

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/run_jupyter", self.run_jupyter),
            web.post("/submit", self.submit),
            web.get("/list_datasets", self.list_datasets),
            *(web.post(path, self.no_dataset) for path in _DATASET_ROUTES),
        ]

    async def run_jupyter(self, request: web.Request) -> web.Response:
        wanted = wire.parse(jupyter.RunJupyterRequest, await read_json(request))
        try:
            execution = await self._jobs.run(jupyter.job_request(wanted, client_of(request)))
            size = len(execution.run.stdout) if execution.run else 0
            status, body = await wire.unblocked(size, jupyter.answer, wanted, execution)
        except SandboxError as error:
            status, body = jupyter.refusal(error)
        self._jobs.served += 1
        note_outcome(request, status)
        return web.Response(body=body, content_type="application/json")

    async def submit(self, request: web.Request) -> web.Response:
        submission = await asyncio.to_thread(judge.check, await read_json(request))
        result = await judge.evaluate(submission, client_of(request), self._jobs.answer)
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
