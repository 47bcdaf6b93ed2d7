"""A past self of a policy at run time: frozen servers that get the policy's weights every few steps.

Invariant: the servers hold the weights that the source had after step `version`, the last multiple of `every`, or 0 for
the start. The same weights are on disk, in the folder of the checkpoints, where each checkpoint links to them: the
source has none of its past, so that a resumed run could not make them again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError
from recipe.dag.policy.canary import Canary, number_format
from recipe.dag.policy.placement import Pool
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.policy.shards import SNAPSHOT, Saved, link_files

ABOUT = "snapshot.json"
"""The version of a folder's weights, and the canary: its prompt, and the source's log-probs by these weights."""


class SnapshotPolicy(PolicyRuntime):
    """Servers without a trainer, whose weights another policy's workers write."""

    def __init__(
        self,
        name: str,
        config: DictConfig,
        pool: Pool,
        policies: Mapping[str, PolicyRuntime],
        *,
        source: str,
        every: int,
    ):
        """`policies`: all of the run, once they have started, among them `source`."""
        super().__init__(name, config, pool, trained=False)
        self.policies, self.source, self.every = policies, source, every
        self.root = Path(config.trainer.default_local_dir) / "snapshots"
        self.folder: Path | None = None
        """Of the weights; None before the first."""
        self.expected: list[float] = []

    async def refresh(self, step: int) -> None:
        """Take the source's weights after `step` if they are due, and check the servers. Raises UserError."""
        if self.folder is None or (step % self.every == 0 and step != self.version):
            folder = self.root / f"{self.name}@{step}"
            await asyncio.to_thread(self._write, folder, step)
            await self._serve(folder)
        elif self.canary is not None:
            await self.canary.check(self.expected, self.version)

    def save(self, folder: Path, step: int) -> None:
        assert self.folder is not None  # taken before the first step
        link_files(self.folder, folder / SNAPSHOT)

    def saved(self) -> list[Saved]:
        return [Saved(f"{self.name}/{SNAPSHOT}", 1, ("hf_model",))]

    async def load_snapshot(self, folder: Path) -> None:
        """Serve what `save` wrote to `folder`."""
        version = _about(folder / SNAPSHOT)["version"]
        own = self.root / f"{self.name}@{version}"
        await asyncio.to_thread(link_files, folder / SNAPSHOT, own)  # the checkpoint may be removed later
        await self._serve(own)

    def _write(self, folder: Path, step: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        source = self.policies[self.source]
        source.workers.save_weights(str(folder))
        about: dict[str, Any] = {"version": step}
        if source.canary is not None:
            prompt = source.canary.prompt
            about |= {"prompt": prompt, "log_probs": source.workers.score_canary(prompt)[0][0]}
        (folder / ABOUT).write_text(json.dumps(about))

    async def _serve(self, folder: Path) -> None:
        about = _about(folder)
        servers: list[Any] = [replica.server_handle for replica in self.replicas]
        weights = str(folder / "huggingface")
        await asyncio.gather(*[server.load_weights_from.remote(weights, about["version"]) for server in servers])
        for other in self.root.iterdir():  # also those of an earlier run; checkpoints have links of their own
            if other != folder and other.name.rpartition("@")[0] == self.name:
                shutil.rmtree(other, ignore_errors=True)
        self.folder, self.version = folder, about["version"]
        if self.config.rollout.canary and "prompt" in about:
            kind = number_format(self.config.actor_rollout_ref.rollout)
            self.canary = self.canary or Canary(self.name, about["prompt"], self.replicas, kind)
            self.expected = about["log_probs"]
            await self.canary.check(self.expected, self.version)


def _about(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / ABOUT}: cannot be read ({type(error).__name__}); resume from another checkpoint"
        ) from error
