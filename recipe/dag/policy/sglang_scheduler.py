"""The process of SGLang's scheduler, with this project's changes.

Invariant: a change is made before the scheduler is, and in its process alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DELAY = {"enable_prefill_delayer": True, "prefill_delayer_queue_min_ratio": 0.1, "prefill_delayer_max_delay_ms": 300}
"""Prompts wait until a tenth as many wait as requests decode, or 0.3 s; on a full server, until a tenth of its places
is free. Calls of a rollout end one by one, so that else nearly every token of all others waits for one prompt.
"""


def run_scheduler_process(server_args: Any, *args: Any, adapter_columns: int | None = None, **kwargs: Any) -> Any:
    """SGLang's function of this name, with adapters as dense products, of so many columns (`sglang_adapters.register`),
    that are placed at a wake-up, and a limit of the delay of prompts."""
    from sglang.srt.managers.scheduler import run_scheduler_process as run

    from recipe.dag.policy import sglang_adapters

    sglang_adapters.register(adapter_columns if server_args.lora_backend == sglang_adapters.NAME else None)
    place_adapters()
    limit_delay()
    return run(server_args, *args, **kwargs)


def limit_delay() -> None:
    """Let prompts of a full server wait for a tenth of its places at most. SGLang 0.5.12 waits for as many as its
    largest batch of prompts ever had, without a limit of time."""
    from sglang.srt.managers.prefill_delayer import PrefillDelayer

    decide = PrefillDelayer._negotiate_should_allow_prefill

    def bounded(self: Any, **given: Any) -> Any:
        most = given.get("max_running_requests", 0) // 10
        return decide(self, **given | {"max_prefill_bs": min(given.get("max_prefill_bs", 0), most)})

    PrefillDelayer._negotiate_should_allow_prefill = bounded


def place_adapters() -> None:
    """Copy the adapters that were loaded last to the GPU while a server's cache of keys and values gets its memory
    back, which the GPU's driver does. SGLang 0.5.12 copies each one before its first batch."""
    from sglang.srt.managers.scheduler import Scheduler

    resume = Scheduler.resume_memory_occupation

    def resume_and_place(self: Any, request: Any) -> Any:
        if not self.enable_lora or request.tags != ["kv_cache"]:  # the base is copied, too, and on another stream
            return resume(self, request)
        manager = self.tp_worker.model_runner.lora_manager
        set_device = torch.get_device_module(manager.device).set_device
        with ThreadPoolExecutor(1, initializer=set_device, initargs=(manager.device,)) as thread:
            resumed = thread.submit(resume, self, request)
            manager.fetch_new_loras({*[*manager.loras][1 - manager.max_loras_per_batch :]})  # the base has a place, too
            return resumed.result()

    Scheduler.resume_memory_occupation = resume_and_place
