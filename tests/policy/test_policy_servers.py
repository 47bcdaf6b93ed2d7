from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout import router
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from recipe.dag.core.errors import ModelServerFault
from recipe.dag.policy.servers import PolicyServerManager, ServerClient, replica_class
from recipe.dag.types.record import Generation

SAMPLING = {"temperature": 0.8, "max_tokens": 3, "seed": 11, "ignore_eos": False}


class Balanced:
    """verl's load-balanced client: answers with `answer`, or raises it, and keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append((request_id, prompt_ids, sampling_params))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def output(ids=(4, 5), log_probs=(-0.1, -0.2), reason="stop", **extra) -> TokenOutput:
    values = None if log_probs is None else list(log_probs)
    return TokenOutput(token_ids=list(ids), log_probs=values, stop_reason=reason, extra_fields=extra)


def test_pools_that_start_at_the_same_time_load_the_replica_class_in_turn(monkeypatch):
    both = threading.Barrier(2)

    def load():
        os.environ["ENGINE_OF_A_TEST"] = "1"
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # another load would get here
        del os.environ["ENGINE_OF_A_TEST"]
        return SimpleNamespace

    monkeypatch.setitem(RolloutReplicaRegistry._registry, "slow", load)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(replica_class, ["slow"] * 2)) == [SimpleNamespace] * 2


def ask(answer, *, seeded: bool = True, **sampling) -> Generation:
    client = ServerClient(Balanced(answer), "main", seeded=seeded)
    return asyncio.run(client.generate("r", [1, 2], {**SAMPLING, **sampling}))


def test_an_answer_becomes_a_generation_with_its_version():
    assert ask(output(global_steps=7)) == Generation([4, 5], [-0.1, -0.2], "stop", 7)
    assert ask(output()).weight_version == 0
    assert ask(output(cached_tokens=0)).cached_tokens == 0 and ask(output()).cached_tokens is None


@pytest.mark.parametrize(
    ("said", "meant"), [("completed", "stop"), (None, "stop"), ("stop", "stop"), ("length", "length")]
)
def test_stop_reasons_have_one_name_each(said, meant):
    assert ask(output(reason=said)).stop_reason == meant


def test_an_answer_that_ran_to_its_end_without_stop_tokens_is_of_full_length():
    full = output((4, 5, 6), (-1.0, -1.0, -1.0), "completed")
    assert ask(full, ignore_eos=True).stop_reason == "length"
    assert ask(full).stop_reason == "stop"


def test_an_answer_without_tokens_is_an_answer():
    assert ask(output((), None, "length")).response_ids == []


@pytest.mark.parametrize("seeded", [True, False])
def test_what_the_server_is_asked(seeded):
    balanced = Balanced(output())
    sampling = dict(SAMPLING)
    asyncio.run(ServerClient(balanced, "main", seeded=seeded).generate("r", [1, 2], sampling))
    expected = {**SAMPLING, "logprobs": True}
    if not seeded:
        del expected["seed"]
    assert balanced.asked == [("r", [1, 2], expected)] and sampling == SAMPLING


@pytest.mark.parametrize(
    "answer",
    [
        output(reason="abort"),
        output(reason="aborted"),
        output(log_probs=None),
        output(log_probs=(-0.1,)),
        output(log_probs=(-0.1, math.nan)),
        output(log_probs=(-0.1, -math.inf)),
        RuntimeError("actor died"),
        TimeoutError("no answer"),
        object(),
    ],
    ids=["abort", "aborted", "no log-probs", "too few", "nan", "inf", "died", "timeout", "nonsense"],
)
def test_an_unusable_answer_is_the_servers_fault(answer):
    with pytest.raises(ModelServerFault) as caught:
        ask(answer)
    assert caught.value.infra and caught.value.where == "main"


class Server:
    """A replica's actor: answers with its own number, after `wait`, and counts what it is asked."""

    def __init__(self, number: int):
        self.number, self.asked, self.wait = number, [], None
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, *, request_id, prompt_ids, sampling_params, image_data, video_data):
        self.asked.append(request_id)
        if self.wait is not None:
            await self.wait.wait()
        if prompt_ids == [0]:
            raise RuntimeError("actor died")
        return output((self.number,), (-0.5,))


def manager_of(count: int, **rollout) -> tuple[PolicyServerManager, list[Server]]:
    manager, servers = PolicyServerManager.__new__(PolicyServerManager), [Server(number) for number in range(count)]
    settings = {"name": "sglang", "full_determinism": False, "router_config_path": None, **rollout}
    manager.config = OmegaConf.create({"actor_rollout_ref": {"rollout": settings}})
    manager.rollout_config = manager.config.actor_rollout_ref.rollout
    manager._load_balancer_cls = router.GlobalRequestLoadBalancer
    manager.server_handles, manager.server_addresses = servers, [f"host:{number}" for number in range(count)]
    asyncio.run(manager._init_global_load_balancer())
    return manager, servers


def test_a_generation_is_one_call_of_a_server_and_draws_no_random_number():
    manager, servers = manager_of(2)
    client = ServerClient(manager.get_client(), "main", seeded=False)
    before = random.getstate()
    answer = asyncio.run(client.generate("u-0-a", [1], dict(SAMPLING)))
    assert answer.response_ids == [0] and [len(server.asked) for server in servers] == [1, 0]
    assert random.getstate() == before


def test_requests_go_to_the_least_loaded_server_and_stay_with_it():
    manager, servers = manager_of(3)
    client = ServerClient(manager.get_client(), "main", seeded=False)

    async def main() -> tuple[list[int], list[int]]:
        for server in servers:
            server.wait = asyncio.Event()
        asked = [asyncio.create_task(client.generate(f"u-{k}-a", [1], dict(SAMPLING))) for k in range(6)]
        await asyncio.sleep(0)
        for server in servers:
            server.wait.set()
        first = [(await task).response_ids[0] for task in asked]
        again = [(await client.generate(f"u-{k}-a", [1], dict(SAMPLING))).response_ids[0] for k in range(6)]
        return first, again

    first, again = asyncio.run(main())
    assert first == again and sorted(first) == [0, 0, 1, 1, 2, 2]


def test_a_failed_or_cancelled_request_is_no_load():
    manager, servers = manager_of(1)
    client = ServerClient(manager.get_client(), "main", seeded=False)

    async def main() -> None:
        with pytest.raises(ModelServerFault, match="actor died"):
            await client.generate("u-0-a", [0], dict(SAMPLING))
        servers[0].wait = asyncio.Event()
        task = asyncio.create_task(client.generate("u-1-a", [1], dict(SAMPLING)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert manager.global_load_balancer.get_total_inflight() == 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_full_determinism_keeps_the_requests_name(deterministic):
    manager, servers = manager_of(2, full_determinism=deterministic)
    asyncio.run(ServerClient(manager.get_client(), "main", seeded=False).generate("u-0-a", [1], dict(SAMPLING)))
    asked = [name for server in servers for name in server.asked]
    assert (asked == ["u-0-a"]) is deterministic


def test_a_router_of_the_users_is_verls_to_start(monkeypatch):
    started = []
    monkeypatch.setattr(router, "get_router_handle", lambda **options: started.append(options) or object())
    manager, _ = manager_of(1, router_config_path="router.yaml")
    assert started[0]["router_config_path"] == "router.yaml"
    assert type(manager.get_client()) is LLMServerClient


def test_cancelling_is_no_fault():
    with pytest.raises(asyncio.CancelledError):
        ask(asyncio.CancelledError())
