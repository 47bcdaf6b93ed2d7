"""The warm engine: each job in a jail of its own, forked from an interpreter that is loaded already.

Invariant: programs of other languages, and those that need a fresh interpreter, run in the same jails by exec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.dag.sandbox.jail import routing
from recipe.dag.sandbox.jail.engine import JailEngine
from recipe.dag.sandbox.jail.handle import Jail
from recipe.dag.sandbox.jail.helper import NotStarted
from recipe.dag.sandbox.jail.nursery import Nursery
from recipe.dag.sandbox.jail.probe import explain
from recipe.dag.sandbox.jail.rootfs import USER
from recipe.dag.sandbox.outcome import SandboxError, Unavailable


class WarmEngine(JailEngine):
    """ahead: jails that wait, per kind; None: some more than the cores. life: jails before a zygote is replaced."""

    name = "warm"

    def __init__(
        self, root: Path, *, ahead: int | None = None, life: int = 5000, disk_mb: int = 256, inodes: int = 20_000
    ):
        super().__init__(root, disk_mb=disk_mb, inodes=inodes)
        self._life = life
        self.owner = USER if os.geteuid() == 0 else None
        self._ahead = ahead or 2 + 2 * len(os.sched_getaffinity(0))
        self._nurseries: dict[str, Nursery] = {}

    async def start(self) -> None:
        settings = self._settings()
        try:
            for kind in routing.KINDS:
                if kind.useful():
                    told = {**settings, **kind.settings()}
                    nursery = Nursery(told, self._ahead, self._learn(kind.name), life=self._life)
                    self._nurseries[kind.name] = nursery
                    self._loaded[kind.name] = frozenset()
                    if kind.eager:
                        await nursery.start()
            await super().start()
        except NotStarted as error:
            await self.close()
            raise Unavailable(explain(error.step, str(error), error.number)) from error

    async def close(self) -> None:
        await super().close()
        for nursery in self._nurseries.values():
            await nursery.close()

    def status(self) -> dict[str, object]:
        return {
            **super().status(),
            "zygotes": {name: nursery.status() for name, nursery in self._nurseries.items()},
        }

    def number(self, kind: str) -> int | None:
        """The process number of a kind's zygote, or rather of its keeper."""
        return self._nurseries[kind].number()

    def _learn(self, kind: str):
        def learn(modules: list[str]) -> None:
            self._loaded[kind] = frozenset(modules)

        return learn

    async def _take(self, kind: str, job: Mapping[str, Any]) -> Jail:
        nursery = self._nurseries.get(kind)
        if nursery is None:
            raise SandboxError("the sandbox is not started")
        return await nursery.take()
