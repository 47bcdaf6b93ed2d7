"""Adapters on SGLang's server: which one a request gets, and syncs that requests gone wrong do not hold up.

SGLang is not installed here; `Manager` counts requests as SGLang 0.5.12 does, leaks included.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest

from recipe.dag.policy import adapter_serving
from recipe.dag.policy.adapter_serving import AdapterServing


class Manager:
    """SGLang's tokenizer manager."""

    def __init__(self):
        self.lora_update_lock = asyncio.Lock()
        self.registry: dict[str, str] = {}
        self.lora_ref_cache: dict[str, SimpleNamespace] = {}
        self.counters: Counter[str] = Counter()
        self.scheduler: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_lora_adapter(self, request):
        async with self.lora_update_lock:
            if "missing" in request.lora_path:
                return SimpleNamespace(success=False, error_message="no such file")
            lora_id = f"id-{request.lora_name}"
            self.scheduler[lora_id] = request.lora_path
            self.registry[request.lora_name] = lora_id
            self.lora_ref_cache[request.lora_name] = SimpleNamespace(lora_id=lora_id)
            return SimpleNamespace(success=True, error_message="")

    async def unload_lora_adapter(self, request):
        async with self.lora_update_lock:
            request.lora_id = self.registry.pop(request.lora_name)
            while self.counters[request.lora_id]:
                await asyncio.sleep(0.001)
            return await self.update_lora_adapter_communicator(request)

    async def update_lora_adapter_communicator(self, request):
        del self.scheduler[request.lora_id]
        return SimpleNamespace(success=True, error_message="")

    async def generate_request(self, request, _):
        name = request.lora_path
        if name is not None:
            self.counters[self.registry[name]] += 1
        await self.gate.wait()
        if request.input_ids == "too long":
            raise ValueError("too long")  # no release
        if request.input_ids != "aborted":
            self.counters[self.registry.get(name, f"id-{name}")] -= 1
        yield {"name": name, "meta_info": {} if name is None else {"cached_tokens": len(request.input_ids)}}


class Verls:
    """verl's server, as far as AdapterServing calls it."""

    async def launch_server(self):
        self.tokenizer_manager = Manager()

    async def generate(self, prompt_ids, sampling_params, request_id):
        request = SimpleNamespace(input_ids=prompt_ids, lora_path="verl's")
        output = await self.tokenizer_manager.generate_request(request, None).__anext__()
        return SimpleNamespace(token_ids=[output["name"]], extra_fields={"global_steps": None})


class Server(AdapterServing, Verls):
    pass


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    module = ModuleType("sglang.srt.managers.io_struct")

    def request(lora_name, lora_path=None, lora_id=None):
        return SimpleNamespace(lora_name=lora_name, lora_path=lora_path, lora_id=lora_id)

    module.LoadLoRAAdapterReqInput = module.UnloadLoRAAdapterReqInput = request
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", module)
    monkeypatch.setattr(adapter_serving, "UNLOAD_S", 0.05)


def served(play) -> None:
    async def main() -> None:
        server = Server()
        await server.launch_server()
        await asyncio.wait_for(play(server, server.tokenizer_manager), 20)

    asyncio.run(main())


async def ask(server, adapter=None, prompt="prompt"):
    output = await server.generate(prompt, {}, "r", adapter=adapter)
    return output.token_ids[0], output.extra_fields["global_steps"]


def test_each_request_gets_the_last_version_of_its_adapter_and_others_the_base():
    async def play(server, manager):
        with pytest.raises(ValueError, match="adapter a has not been loaded; there are none"):
            await ask(server, "a")
        await server.load_adapter("a", 1, "/a1")
        await server.load_adapter("b", 1, "/b1")
        together = await asyncio.gather(ask(server), ask(server, "a"), ask(server, "b"), ask(server, "a"))
        assert together == [(None, 0), ("a@1", 1), ("b@1", 1), ("a@1", 1)]
        await server.load_adapter("a", 2, "/a2")
        assert await ask(server, "a") == ("a@2", 2)
        with pytest.raises(RuntimeError, match="SGLang did not load b@2: no such file"):
            await server.load_adapter("b", 2, "/missing")
        assert await ask(server, "b") == ("b@1", 1)

    served(play)


def test_a_request_ends_on_its_version_which_is_then_unloaded():
    async def play(server, manager):
        await server.load_adapter("a", 1, "/a1")
        manager.gate.clear()
        running = asyncio.create_task(ask(server, "a"))
        await asyncio.sleep(0.01)
        await server.load_adapter("a", 2, "/a2")
        assert manager.scheduler == {"id-a@1": "/a1", "id-a@2": "/a2"}
        manager.gate.set()
        assert await running == ("a@1", 1)
        await asyncio.gather(*server.unloading)
        assert manager.scheduler == {"id-a@2": "/a2"} and list(manager.lora_ref_cache) == ["a@2"]

    served(play)


@pytest.mark.parametrize("prompt", ["aborted", "too long"])
def test_requests_that_sglang_counts_for_ever_hold_up_no_sync_and_leave_nothing(prompt):
    async def play(server, manager):
        await server.load_adapter("a", 1, "/a1")
        await asyncio.gather(ask(server, "a", prompt), return_exceptions=True)
        assert manager.counters["id-a@1"] == 1, "as SGLang leaks it"
        for version in (2, 3):
            await server.load_adapter("a", version, f"/a{version}")
            assert await ask(server, "a") == (f"a@{version}", version)
        await asyncio.gather(*server.unloading)
        assert manager.scheduler == {"id-a@3": "/a3"} and not manager.lora_update_lock.locked()

    served(play)


def test_each_answer_has_the_cached_tokens_of_its_own_request_and_none_that_sglang_does_not_report():
    async def play(server, manager):
        await server.load_adapter("a", 1, "/a1")
        asked = [server.generate("p" * length, {}, "r", adapter="a") for length in (3, 5)]
        outputs = [*await asyncio.gather(*asked), await server.generate("p", {}, "r")]
        assert [output.extra_fields["cached_tokens"] for output in outputs] == [3, 5, None]

    served(play)
