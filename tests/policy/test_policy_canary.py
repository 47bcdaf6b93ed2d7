"""The weight canary: servers with the trainer's weights pass, any other is named, and nothing else changes."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoTokenizer

from recipe.dag.core.errors import UserError
from recipe.dag.platform.rollout_server import RolloutServer
from recipe.dag.policy.adapter_worker import AdapterWorker
from recipe.dag.policy.canary import BOUNDS, LENGTH, MOVED, TEXT, Canary, canary_metrics, number_format, prompt_of
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from tests.rows import build_row

PROMPT = [5 + i * 7 % 90 for i in range(62)]
TRUE = [-1.0 - i / 100 for i in range(61)]
"""Log-probs of the prompt by a trainer that has learned nothing yet."""


def shifted(by: float, log_probs: list[float] = TRUE) -> list[float]:
    return [value - by for value in log_probs]


class Replica:
    """verl's replica, whose server is in this process, or answers with `log_probs` and `version`."""

    def __init__(self, number: int, server: RolloutServer | None = None):
        self.server_address, self.server = f"host:{number}", server
        self.server_handle = SimpleNamespace(generate=SimpleNamespace(remote=self.generate))
        self.log_probs, self.version, self.asked = TRUE, 0, 0

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.asked += 1
        if self.server is not None:
            return await self.server.generate(prompt_ids, sampling_params, request_id)
        rows = [[value] for value in self.log_probs]
        return SimpleNamespace(extra_fields={"prompt_logprobs": [*rows, [0.0]], "global_steps": self.version})


class Canned:
    """A canary over servers that answer what they are told to."""

    def __init__(self, count: int = 1, number_format: str = "bfloat16"):
        self.replicas = [Replica(number) for number in range(count)]
        self.canary = Canary("main", PROMPT, self.replicas, number_format)

    def check(self, *answers: list[float], expected: list[float] = TRUE, version: int = 0) -> str:
        """Return the message for the servers' answers; "" if all is well."""
        for replica, answer in zip(self.replicas, answers, strict=True):
            replica.log_probs, replica.version = answer, version
        return self.outcome(expected, version)

    def outcome(self, expected: list[float], version: int) -> str:
        try:
            asyncio.run(self.canary.check(expected, version))
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("number_format", BOUNDS)
def test_servers_may_differ_from_the_trainer_by_what_the_number_format_explains(number_format):
    bound = BOUNDS[number_format]
    assert Canned(2, number_format).check(shifted(0.9 * bound), shifted(-0.9 * bound)) == ""
    message = Canned(2, number_format).check(TRUE, shifted(1.1 * bound), version=4)
    assert message.startswith(
        "policy main, version 4: 1 of 2 servers do not have the trainer's weights: server 1 (host:1) "
    )
    assert number_format in message and "host:0" not in message and "\n" not in message


def test_every_server_with_other_weights_is_named():
    message = Canned(3).check(shifted(0.8), TRUE, shifted(-0.8))
    assert "2 of 3 servers" in message and "host:0" in message and "host:2" in message and "host:1" not in message


@pytest.mark.parametrize("answer", [[], TRUE[:-1], [math.nan] * 61, [*TRUE[:-1], -math.inf]])
def test_an_answer_that_is_cut_off_or_not_finite_is_wrong(answer):
    assert "differ from the trainer's by inf" in Canned().check(answer)


def test_a_server_that_reports_another_version_is_named_however_close_its_weights_are():
    canned = Canned(2)
    canned.check(TRUE, TRUE, version=3)
    canned.replicas[0].version = 4
    message = canned.outcome(TRUE, 4)
    assert "server 1 (host:1) reports version 3" in message and "host:0" not in message
    canned.replicas[1].version = None  # SGLang's, until its first sync
    assert "reports version None" in canned.outcome(TRUE, 4)


def test_a_sync_that_only_its_version_reached_is_seen_though_one_step_is_within_the_bound():
    canned, step = Canned(2), 0.4 * MOVED * BOUNDS["bfloat16"]
    for version in range(3):  # the second server's log-probs move with the trainer's
        expected = shifted(version * step)
        assert canned.check(TRUE, expected, expected=expected, version=version) == ""
    message = canned.check(TRUE, shifted(3 * step), expected=shifted(3 * step), version=3)
    assert "1 of 2" in message and "server 0 (host:0) still has the weights of version 0" in message


def test_weights_that_do_not_change_are_not_a_sync_that_failed():
    canned = Canned()
    assert [canned.check(shifted(0.01), version=version) for version in range(4)] == [""] * 4


def test_weights_of_a_trainer_that_has_diverged_are_not_the_servers_fault():
    message = Canned().check(shifted(math.nan), expected=shifted(math.nan), version=7)
    assert "policy main, version 7: the trainer's log-probs are not finite" in message and "host:0" not in message


def test_metrics_have_the_largest_difference_of_each_policy_and_the_time_of_all():
    canned = Canned(2)
    assert canned.check(TRUE, shifted(0.02)) == ""
    canned.canary.seconds = 0.5
    policies = [SimpleNamespace(canary=canned.canary), SimpleNamespace(canary=None)]
    expected = {"canary/main/logprob_diff": pytest.approx(0.02), "timing/canary": 0.5}
    assert canary_metrics(policies) == expected
    assert canary_metrics(policies[1:]) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "cpu", "quantization": None}, "float32"),
        ({"name": "sglang", "quantization": None}, "bfloat16"),
        ({"name": "sglang", "quantization": "fp8"}, "fp8"),
    ],
)
def test_the_number_format_is_that_of_the_server(settings, expected):
    assert number_format(OmegaConf.create(settings)) == expected


def test_the_prompt_is_of_the_tokenizers_own_tokens(tiny_model):
    of_bytes = SimpleNamespace(encode=lambda text, add_special_tokens: list(text.encode()))
    ids = prompt_of(of_bytes, 4096)
    assert ids == list(TEXT[:LENGTH].encode())
    assert prompt_of(of_bytes, 64) == ids[:62]  # verl's server needs room for two tokens more
    with_bos = SimpleNamespace(encode=of_bytes.encode, bos_token_id=2)
    assert prompt_of(with_bos, 4096) == [2, *ids[:-1]]
    # has no token of the text, and one that the model lacks
    of_words, size = AutoTokenizer.from_pretrained(tiny_model), AutoConfig.from_pretrained(tiny_model).vocab_size
    assert prompt_of(of_words, 4096) == [*range(size), *range(LENGTH - size)]
    assert len(of_words) > size


class Served:
    """The tiny model's worker, two servers in this process, and the policy that syncs them."""

    def __init__(self, engine: SimpleNamespace, model: str):
        self.engine, self.worker, self.model = engine, engine.worker, model
        self.module = engine.worker.actor.engine.module
        self.replicas = [Replica(number, self.server()) for number in range(2)]
        self.lost: set[int] = set()
        """Servers that no sync reaches."""
        self.policy = PolicyRuntime.__new__(PolicyRuntime)
        self.policy.name, self.policy.version, self.policy.seconds = "main", 0, {}
        # as Ray does: one result for each rank
        self.policy.workers = SimpleNamespace(score_canary=lambda prompt: [self.worker.score_canary(prompt)])
        self.policy.canary = Canary("main", PROMPT, self.replicas, "float32")
        self.policy.sync = SimpleNamespace(update_weights=self.update_weights)

    def server(self, load_format: str = "auto") -> RolloutServer:
        options = {"max_requests": 2, "max_len": 64, "trust_remote_code": False}
        return RolloutServer(self.model, load_format=load_format, **options)

    async def update_weights(self, global_steps: int) -> None:
        weights = {name: p.detach().full_tensor().clone() for name, p in self.module.named_parameters()}
        for number in {0, 1} - self.lost:
            await self.replicas[number].server.load_weights(weights, global_steps)

    def sync(self, version: int) -> str:
        try:
            asyncio.run(self.policy.sync_weights(version))
        except UserError as error:
            return str(error)
        return ""

    def train(self) -> None:
        rows = [build_row(mask=(1, 1, 1), prompt=(3, 4, 5), response=(6 + i, 7, 8)) for i in range(4)]
        policy = SimpleNamespace(
            config=self.engine.config,
            data_parallel_size=1,
            workers=self.worker,
            tokenizer=SimpleNamespace(pad_token_id=0),
        )
        batch, algorithm = PolicyBatch(rows), self.engine.workflow.algorithm
        kernels.prepare(policy, batch, algorithm)
        for name in ("old_log_probs", "ref_log_prob", "advantages"):
            batch.columns[name] = [torch.full((3,), -1.0) for _ in rows]
        kernels.update_actor(policy, batch, algorithm, seed=0)

    def learn(self, amount: float) -> None:
        """Train, and then scale the weights by 1 + `amount`, more than the tiny learning rate would."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1 + amount)
        self.train()


@pytest.fixture
def served(engine, tiny_model, monkeypatch, one_thread) -> Iterator[Served]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    served = Served(engine, str(tiny_model))
    before = [p.detach().clone() for p in served.module.parameters()]
    yield served
    with torch.no_grad():
        for parameter, value in zip(served.module.parameters(), before, strict=True):
            parameter.copy_(value)
    served.worker.canary, served.worker.canary_scores = [], None


def test_servers_with_the_trainers_weights_pass_after_every_update(served):
    for version in range(3):
        assert served.sync(version) == ""
        assert served.policy.canary.difference <= 1e-5 and served.policy.version == version
        served.learn(0.05)


def test_a_server_that_a_sync_missed_is_named(served):
    assert served.sync(1) == ""
    served.learn(0.05)
    served.lost = {1}
    assert "1 of 2 servers" in (message := served.sync(2)) and "server 1 (host:1) reports version 1" in message


@pytest.mark.parametrize(
    ("amount", "words"), [(0.05, "has other weights"), (3e-6, "still has the weights of version 1")]
)
def test_a_sync_without_its_weights_is_seen(served, amount, words):
    assert served.sync(1) == ""
    served.learn(amount)
    served.lost = {0, 1}
    asyncio.run(served.update_weights(2))
    for replica in served.replicas:
        replica.server.version = 2
    message = served.sync(2)
    assert "2 of 2 servers" in message and message.count(words) == 2


def test_a_server_that_was_started_again_is_named(served):
    served.learn(0.05)
    assert served.sync(3) == ""
    served.lost, served.replicas[1].server = {1}, served.server()
    assert "server 1 (host:1) reports version 0" in served.sync(4)
    served.replicas[1].server.version = 4
    assert "server 1 (host:1) has other weights" in served.sync(4)


@pytest.mark.parametrize("number_format", BOUNDS)
def test_garbage_and_another_models_weights_are_beyond_every_bound(served, number_format):
    served.policy.canary = Canary("main", PROMPT, served.replicas, number_format)
    served.lost = {0, 1}
    served.replicas[0].server = served.server("dummy")
    with torch.no_grad():
        for parameter in served.replicas[1].server.generator.model.parameters():
            parameter.copy_(parameter.flip(0))
    message = served.sync(0)
    assert "2 of 2 servers" in message and message.count("has other weights") == 2


def test_the_canary_draws_no_random_number_and_changes_no_weight(served):
    def states() -> list:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    served.sync(0)
    before = states(), [p.detach().clone() for p in served.module.parameters()]
    served.worker.canary_scores = None
    served.sync(1)
    assert states() == before[0]
    for parameter, value in zip(served.module.parameters(), before[1], strict=True):
        assert torch.equal(parameter, value) and parameter.grad is None


def test_an_update_scores_the_canary_without_loading_the_weights_again(served, monkeypatch):
    actor, moves = served.worker.actor.engine, []
    monkeypatch.setattr(actor, "_is_offload_param", True)
    monkeypatch.setattr(actor, "_is_offload_optimizer", True)
    monkeypatch.setattr(actor, "to", lambda **keys: moves.append({"scored": served.worker.canary_scores, **keys}))
    served.train()
    alone = len(moves)
    served.sync(0)
    moves.clear()
    served.train()
    updated = served.worker.canary_scores
    assert len(moves) == alone and moves[-1]["scored"] == updated != moves[0]["scored"]
    assert served.worker.score_canary(PROMPT)[0] == updated and len(moves) == alone


@pytest.mark.parametrize(
    ("prompt", "offloaded", "sleeps", "expected"),
    [
        (PROMPT, False, True, ["b", "c"]),
        (PROMPT, False, False, ["b", "c"]),
        (PROMPT, True, True, []),
        ([], False, True, []),
    ],
    ids=["while they wake", "awake", "offloaded", "no canary"],
)
def test_adapters_that_have_changed_are_scored_while_servers_wake(monkeypatch, prompt, offloaded, sleeps, expected):
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    engine = SimpleNamespace(is_param_offload_enabled=offloaded, use=lambda name: None, to=lambda *_, **__: None)
    worker = object.__new__(AdapterWorker)
    done = threading.Event()

    def score(*, loaded: bool) -> None:
        assert loaded
        worker.canary_scores = [0.0]
        scored.append(worker.used)
        if len(scored) == len(expected):
            done.set()

    async def resume(tags: list[str]) -> None:
        woken.append(tags)
        assert await asyncio.to_thread(done.wait, 10) == bool(expected)

    scored, woken = [], []
    custom = {"keeps_weights": True}
    config = SimpleNamespace(rollout=SimpleNamespace(free_cache_engine=sleeps, custom=custom))
    parts = {"config": config, "actor": SimpleNamespace(engine=engine), "rollout": SimpleNamespace(resume=resume)}
    vars(worker).update(parts, canary=prompt, used="a", _score_canary=score)
    worker.scores = {None: [0.0], "a": [0.0], "b": None, "c": None}
    if not expected:
        monkeypatch.setattr(done, "wait", lambda seconds: False)
    asyncio.run(worker.update_weights())
    assert (scored, woken) == (expected, [["kv_cache"]] * sleeps)


def test_a_loaded_checkpoint_is_scored_anew(served, tmp_path, monkeypatch):
    assert served.sync(0) == ""
    monkeypatch.setattr(served.worker.actor, "load_checkpoint", lambda *_: served.module.load_state_dict(loaded))
    loaded = {name: value * 1.05 for name, value in served.module.state_dict().items()}
    served.worker.load_checkpoint(str(tmp_path))
    assert served.sync(0) == ""


def test_without_a_canary_nobody_is_asked(served):
    served.policy.canary = None
    served.lost = {0, 1}
    assert served.sync(5) == "" and served.policy.version == 5
    assert [replica.asked for replica in served.replicas] == [0, 0] and served.worker.canary_scores is None
