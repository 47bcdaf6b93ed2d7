"""The SGLang server of a policy that trains: verl's, but without a copy of its weights in host memory.

Invariant: a server goes without the copy only if each of its wake-ups is followed by a sync of all its weights.

verl asks SGLang for the copy in every server that shares its GPU with a trainer (verl 0.9.1, async_sglang_server.py:
launch_server, after the user's `engine_kwargs`). torch-memory-saver allocates it anew, pinned, at each sleep: 2.1 s for
Qwen2.5-3B, and 0.7 s at the wake-up that the sync overwrites; without it both take 0.01 s (measured on an H100).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import ray
import verl.workers.rollout.sglang_rollout.async_sglang_server as stock
from verl.workers.rollout.replica import RolloutMode

from recipe.dag.policy import sglang_adapters
from recipe.dag.policy.adapter_serving import AdapterServing
from recipe.dag.policy.sglang_scheduler import DELAY, run_scheduler_process

ServerArgs = stock.ServerArgs  # pyright: ignore[reportPrivateImportUsage]


class Args(ServerArgs):
    """Makes SGLang's ServerArgs, with DELAY where the user has not chosen and SGLang 0.5.12 can: not without the
    overlap of scheduling, which some models turn off, nor on several ranks, each of which would go by its own clock."""

    def __new__(cls, **args: Any):
        # an instance of SGLang's own class, because SGLang's processes unpickle it
        made = ServerArgs(**args)
        if "enable_prefill_delayer" not in args and not made.disable_overlap_schedule and made.tp_size == 1:
            for key, value in DELAY.items():
                if key not in args:
                    setattr(made, key, value)
        return made


class ArgsWithoutCopy(Args):
    """The same without the copy of the weights."""

    def __new__(cls, **args: Any):
        return super().__new__(cls, **{**args, "enable_weights_cpu_backup": False})


class PolicyServer(AdapterServing, stock.SGLangHttpServer):
    """verl's server of one policy."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Launch the server as soon as its GPUs' trainers are idle: it takes a share of the memory that is free then.
        This process has imported SGLang beside their load."""
        self._choose_attention()
        # safe, because this process serves one policy
        stock.ServerArgs = Args if self._needs_copy() else ArgsWithoutCopy  # pyright: ignore[reportPrivateImportUsage]
        from sglang.srt.entrypoints import engine

        columns = (self.config.custom or {}).get("adapter_columns")
        sglang_adapters.allow_graphs(ServerArgs)
        engine.run_scheduler_process = partial(run_scheduler_process, adapter_columns=columns)  # verl reads it there
        await asyncio.gather(*[worker.__ray_call__.remote(_nothing) for worker in self.workers])
        await super().launch_server(*args, **kwargs)

    async def sleep(self) -> None:
        if (self.config.custom or {}).get("keeps_weights"):
            await self.release_kv_cache()
        else:
            await super().sleep()

    async def load_weights_from(self, folder: str, version: int) -> None:
        """Generate from now on with the weights in a folder of Hugging Face's form. Raises RuntimeError."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=folder)
        succeeded, message, *_ = await self.tokenizer_manager.update_weights_from_disk(request, None)
        if not succeeded:
            raise RuntimeError(f"SGLang did not load {folder}: {message}")
        await self.set_global_steps(version)

    def _choose_attention(self) -> None:
        """Use Triton's attention for a model with sliding windows, unless the user has chosen.

        verl chooses FlashInfer's. With it, SGLang 0.5.12 ends at the first prompt of Gemma 3 that its graphs of prompts
        pad, and without these graphs applies no window to prompts and attends wrongly after a cached prefix.
        """
        layers = getattr(self.model_config.hf_config.get_text_config(), "layer_types", None) or ()
        if "sliding_attention" in layers:
            kwargs = self.config.engine_kwargs
            kwargs["sglang"] = {"attention_backend": "triton", **(kwargs.get("sglang") or {})}

    def _needs_copy(self) -> bool:
        """Return whether a wake-up must restore weights that no sync sends: those of a server that is not synced, of
        drafts, those that quantization derived; or the user wants the copy."""
        config = self.config
        wanted = (config.engine_kwargs.get("sglang") or {}).get("enable_weights_cpu_backup")
        is_synced = self.rollout_mode == RolloutMode.HYBRID
        return bool(wanted or not is_synced or config.get("quantization") or (config.mtp and config.mtp.enable))


def _nothing(worker: Any) -> None:
    """Runs in a worker when it has ended what it was asked before."""


class PolicyReplica(stock.SGLangReplica):
    """verl's replica with a PolicyServer."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(PolicyServer)
