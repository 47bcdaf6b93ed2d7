"""Requests of an SGLang server: the adapter that each names, how much of its prompt was cached; versions of adapters
that replace each other, and unloading that cannot hold up a sync.

Invariant: a request for an adapter never gets the base, or an adapter that has been replaced before it arrived. Nothing
waits for SGLang's counters of requests, which aborted and invalid requests leave above zero for ever
(sgl-project/sglang #36894): an unload has a time limit, and runs beside the steps.

SGLang is imported by the methods that need it, so that tests of the others run without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

LOAD_S, UNLOAD_S = 120.0, 10.0
"""Seconds that SGLang may take; a load waits for an unload that is under way."""
_ADAPTER: ContextVar[str | None] = ContextVar("adapter", default=None)
"""SGLang's name of the adapter of the request that this task makes; None: the base."""
_CACHED: ContextVar[int | None] = ContextVar("cached", default=None)
"""Tokens that the request of this task found in the prefix cache; None: unknown."""

logger = logging.getLogger(__name__)


class NamingRequests:
    """SGLang's tokenizer manager, except that a request names the adapter of its task and leaves there how much of its
    prompt was cached: verl builds requests itself, and drops that number."""

    def __init__(self, manager: Any):
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, request: Any, *arguments: Any) -> AsyncIterator[Any]:
        request.lora_path = _ADAPTER.get()
        # closed with this generator, because SGLang takes new weights only when no request's generator is open
        async with aclosing(self._manager.generate_request(request, *arguments)) as outputs:
            async for output in outputs:
                # an aborted request that never ran has none; one that was retracted keeps that of its first start
                _CACHED.set(output["meta_info"].get("cached_tokens"))
                yield output


class AdapterServing:
    """Mixin for verl's SGLang server."""

    tokenizer_manager: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.adapters: dict[str, int] = {}
        """Adapter -> its last version."""
        self.in_flight: Counter[str] = Counter()
        """SGLang's name of a version -> requests that are being answered. Ours, because SGLang's own may be wrong."""
        self.unloading: set[asyncio.Task] = set()

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  # of a mixin
        if self.tokenizer_manager is not None:  # only the first of a server's machines has one
            self.tokenizer_manager = NamingRequests(self.tokenizer_manager)

    async def generate(self, *args: Any, adapter: str | None = None, **kwargs: Any) -> Any:
        """Generate with the last version of `adapter`, or with the base. Raises ValueError for one that is unknown."""
        generate = super().generate  # pyright: ignore[reportAttributeAccessIssue]  # of a mixin
        if adapter is None:
            output = await generate(*args, **kwargs)
            output.extra_fields["cached_tokens"] = _CACHED.get()
            if self.adapters:  # verl knows the versions of weights that it sent, and sent none
                output.extra_fields["global_steps"] = 0
            return output
        if adapter not in self.adapters:
            raise ValueError(f"adapter {adapter} has not been loaded; there are {', '.join(self.adapters) or 'none'}")
        version = self.adapters[adapter]
        name = _name(adapter, version)
        token = _ADAPTER.set(name)
        self.in_flight[name] += 1
        try:
            output = await generate(*args, **kwargs)
        finally:
            self.in_flight[name] -= 1
            _ADAPTER.reset(token)
        # verl's version is that of the base
        output.extra_fields.update(global_steps=version, cached_tokens=_CACHED.get())
        return output

    async def load_adapter(self, adapter: str, version: int, folder: str) -> None:
        """Generate requests of `adapter` that arrive from now on with the weights in a PEFT folder, which must stay
        until the next but one version is loaded. Works while the server sleeps. Raises RuntimeError."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        name = _name(adapter, version)
        request = LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder)
        result = await asyncio.wait_for(self.tokenizer_manager.load_lora_adapter(request), LOAD_S)
        if not result.success:
            raise RuntimeError(f"SGLang did not load {name}: {result.error_message}")
        replaced = self.adapters.get(adapter)
        self.adapters[adapter] = version
        if replaced is not None and replaced != version:
            task = asyncio.create_task(self._unload(_name(adapter, replaced)))
            self.unloading.add(task)
            task.add_done_callback(self.unloading.discard)

    async def _unload(self, name: str) -> None:
        """Free a version after its last request."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        while self.in_flight[name]:
            await asyncio.sleep(0.1)
        del self.in_flight[name]
        manager = self.tokenizer_manager
        # else SGLang would load it again, from its folder, for a request that names it
        reference = manager.lora_ref_cache.pop(name, None)
        try:
            request = UnloadLoRAAdapterReqInput(lora_name=name)
            await asyncio.wait_for(manager.unload_lora_adapter(request), UNLOAD_S)
        except TimeoutError:
            # SGLang's counter is not zero and never will be; the name is gone, but the scheduler's copy is still there
            logger.warning("SGLang counts requests of %s that have ended; it is unloaded regardless", name)
            if reference is not None:
                request = UnloadLoRAAdapterReqInput(lora_name=name, lora_id=reference.lora_id)
                await asyncio.wait_for(manager.update_lora_adapter_communicator(request), UNLOAD_S)


def _name(adapter: str, version: int) -> str:
    return f"{adapter}@{version}"
