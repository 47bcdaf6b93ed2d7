"""The API policies of a run, whose consumption is kept in the output folder.

Invariant: a run that is killed forgets at most what was consumed in the last SAVE_S seconds. An older count never
replaces a newer one, and a disk that is full does not stop the run.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from recipe.dag.remote.connect import Remotes
from recipe.dag.report.api_usage import NAME, Totals, write_api_usage
from recipe.dag.report.phases import announce
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)
SAVE_S = 2.0
"""Seconds between two writes of what was consumed."""


class ApiPolicies(Remotes):
    """The API policies of a workflow, between `start` and `close`."""

    def __init__(self, workflow: Workflow, output: str, spent: Totals | None = None):
        """`output`: the run's output folder. `spent`: what was consumed before the run was interrupted. Raises
        UserError."""
        super().__init__(workflow, spent)
        self._output, self._before = output, self.counts()
        self._saving: asyncio.Task[None] | None = None
        self._save_lock = threading.Lock()

    async def start(self) -> None:
        """Check the servers, and save from now on what is consumed. Raises UserError as `check` does."""
        if self.specs:
            announce("asking the servers of the API policies")
            await self.check()
            self._saving = asyncio.create_task(self._keep_saving(), name="save-api-usage")

    def save(self) -> None:
        """Write what was consumed since the run began. Raises OSError."""
        with self._save_lock:
            write_api_usage(self._output, self.counts())

    async def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
            (error,) = await asyncio.gather(self._saving, return_exceptions=True)
            if isinstance(error, Exception):
                logger.warning("%s was not written while the run went on: %s", NAME, error)
        try:
            if self.counts() != self._before:  # a run that is refused writes nothing
                self.save()
        except OSError as error:  # it must not hide the error that ends the run
            logger.warning("%s was not written: %s", NAME, error)
        await super().close()

    async def _keep_saving(self) -> None:
        saved, failing = self.counts(), False
        while True:
            await asyncio.sleep(SAVE_S)
            if (spent := self.counts()) == saved:
                continue
            try:
                await asyncio.to_thread(self.save)
            except OSError as error:
                if not failing:
                    logger.warning("%s was not written, and is tried again: %s", NAME, error)
                failing = True
            else:
                saved, failing = spent, False
