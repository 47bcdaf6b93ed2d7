"""The CPU rollout server without Ray, and its parity with verl's own engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.dag.platform.adapter_weights import merge, target_layers, write_adapter
from recipe.dag.platform.rollout_server import RolloutServer
from recipe.dag.train import kernels
from recipe.dag.train.kernels import PolicyBatch
from recipe.dag.types.row import Row
from recipe.dag.workflow.adapter_shape import AdapterShape
from tests.rows import build_row

TOLERANCE = 1e-4
PARAMS = {"max_tokens": 12, "temperature": 1.0, "seed": 0, "ignore_eos": True, "logprobs": True}


@pytest.fixture
def server(tiny_model, monkeypatch) -> RolloutServer:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return RolloutServer(str(tiny_model), max_requests=4, max_len=64, load_format="auto", trust_remote_code=False)


def weights_of(server: RolloutServer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in server.generator.model.named_parameters()}


def generate(server: RolloutServer, prompt_ids: list[int], **params):
    return server.generate(prompt_ids, {**PARAMS, **params}, "r")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def hold(server: RolloutServer, method: str, error: Exception | None = None) -> tuple[threading.Event, threading.Event]:
    """(reached, gate): generation sets `reached` in `method`, waits for `gate`, then raises `error`, if any."""
    reached, gate, original = threading.Event(), threading.Event(), getattr(server.generator, method)

    def held(*args):
        reached.set()
        assert gate.wait(30)
        if error is not None:
            raise error
        return original(*args)

    setattr(server.generator, method, held)
    return reached, gate


async def start_together(server: RolloutServer, calls: list) -> list[asyncio.Task]:
    """Start `calls` so that the generation thread meets them all at once."""
    held, gate = threading.Event(), threading.Event()
    server.inbox.put((lambda settle: (held.set(), gate.wait(30)), lambda **kwargs: None))
    await until(held.is_set)
    tasks = [asyncio.create_task(call) for call in calls]
    await until(lambda: server.inbox.qsize() == len(calls))
    gate.set()
    return tasks


def test_a_cancelled_request_frees_its_row_and_changes_no_other(server):
    prompts = [[3 + i] * (1 + i) for i in range(7)]  # more than rows: some wait
    sampled: list[int] = []
    accept = server.generator._accept

    def counted(hidden, requests):
        sampled.extend(request.seed for request in requests)
        return accept(hidden, requests)

    async def main() -> None:
        alone = [await generate(server, prompt, seed=i) for i, prompt in enumerate(prompts)]
        server.generator._accept = counted
        reached, gate = hold(server, "step")
        calls = [generate(server, prompt, seed=i) for i, prompt in enumerate(prompts)]
        tasks = await start_together(server, calls)
        await until(reached.is_set)
        for number in (1, 6):  # the first is being generated, the second waits
            tasks[number].cancel()
        await until(lambda: tasks[1].done() and tasks[6].done())
        gate.set()
        others = [i for i in range(7) if i not in (1, 6)]
        for i, output in zip(others, await asyncio.gather(*[tasks[i] for i in others]), strict=True):
            assert output.token_ids == alone[i].token_ids
        assert server.generator.active == [] and server.waiting == []

    asyncio.run(main())
    # the first token and that of the step that was under way
    assert (sampled.count(1), sampled.count(6), sampled.count(0)) == (2, 0, 12)


def test_many_requests_are_answered_as_each_would_be_alone(server):
    async def main() -> None:
        prompts = [[3 + i] * (1 + i) for i in range(10)]
        together = await asyncio.gather(*[generate(server, prompt, seed=i) for i, prompt in enumerate(prompts)])
        for i, (prompt, output) in enumerate(zip(prompts, together, strict=True)):
            alone = await generate(server, prompt, seed=i)
            assert alone.token_ids == output.token_ids and len(output.log_probs) == 12
            assert (output.stop_reason, output.extra_fields) == ("length", {"global_steps": 0})

    asyncio.run(main())


def test_a_request_that_cannot_be_sampled_fails_alone(server):
    class Undecodable:
        def decode(self, ids, skip_special_tokens):
            raise OverflowError("out of range")

    server.tokenizer = Undecodable()

    async def main() -> None:
        alone = await generate(server, [5, 6], seed=3)
        bad = [generate(server, [7], top_k=10**20), generate(server, [8], stop=["x"])]
        tasks = await start_together(server, [bad[0], generate(server, [5, 6], seed=3), bad[1]])
        large, output, undecodable = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(large, ValueError) and isinstance(undecodable, ValueError)
        assert output.token_ids == alone.token_ids and server.generator.active == []

    asyncio.run(main())


def test_seed_zero_is_a_seed_and_no_seed_is_random(server):
    async def main() -> None:
        first, second = [await generate(server, [5, 6], seed=0) for _ in range(2)]
        assert first.token_ids == second.token_ids
        negative, unsigned = [await generate(server, [5, 6], seed=seed) for seed in (-1, 2**64 - 1)]
        assert negative.token_ids == unsigned.token_ids
        free = await asyncio.gather(*[generate(server, [5, 6], seed=None) for _ in range(4)])
        assert len({tuple(output.token_ids) for output in free}) == 4

    asyncio.run(main())


def test_stop_tokens_are_the_models_and_the_requests(server):
    async def main() -> None:
        free = await generate(server, [5, 6], max_tokens=30)
        stop = free.token_ids[3]
        cut = free.token_ids[: free.token_ids.index(stop) + 1]
        assert 1 not in cut  # the model's own
        asked = await generate(server, [5, 6], max_tokens=30, stop_token_ids=[stop], ignore_eos=False)
        assert (asked.token_ids, asked.stop_reason) == (cut, "stop")
        server.stop_token_ids = frozenset({stop})
        assert (await generate(server, [5, 6], max_tokens=30, ignore_eos=False)).token_ids == cut
        assert (await generate(server, [5, 6], max_tokens=30)).token_ids == free.token_ids

    asyncio.run(main())


def test_stop_strings_end_an_answer_without_touching_its_tokens(server, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    async def main() -> None:
        free = await generate(server, [5, 6], max_tokens=30, seed=1)
        assert server.tokenizer is None  # nothing was decoded
        stop = tokenizer.decode(free.token_ids[3:5])
        assert stop not in tokenizer.decode(free.token_ids[:4])
        cut = await generate(server, [5, 6], max_tokens=30, seed=1, stop=["never there", stop])
        assert (cut.token_ids, cut.stop_reason) == (free.token_ids[:5], "stop")
        assert cut.log_probs == free.log_probs[:5]
        assert (await generate(server, [5, 6], max_tokens=30, seed=1, stop=[])).token_ids == free.token_ids

    asyncio.run(main())


def test_penalties_and_min_p_reach_the_generator(server):
    async def main() -> None:
        free = await generate(server, [5, 6], max_tokens=30, seed=1)
        for option in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"min_p": 1.0}):
            assert (await generate(server, [5, 6], max_tokens=30, seed=1, **option)).token_ids != free.token_ids, option

    asyncio.run(main())


def test_the_models_stop_token_is_read_from_its_configuration(server):
    assert server.stop_token_ids == {1}


def test_prompts_that_cannot_be_served_are_refused_and_the_server_lives_on(server):
    async def main() -> None:
        refused = {(5,) * 64: "exceeds the context length", (): "at least one", (96,): "in \\[0, 96", (-1,): "in"}
        for prompt, message in refused.items():
            with pytest.raises(ValueError, match=message):
                await generate(server, [*prompt])
        full = await generate(server, [5] * 63)
        assert (full.token_ids, full.stop_reason) == ([], "length")
        nearly = await generate(server, [5] * 60, max_tokens=100)
        assert (len(nearly.token_ids), nearly.stop_reason) == (3, "length")

    asyncio.run(main())


def test_new_weights_answer_with_their_version(server):
    async def main() -> None:
        old = await generate(server, [5, 6, 7])
        weights = {name: 1.1 * value for name, value in weights_of(server).items()}
        await server.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, 3)  # tied
        new = await generate(server, [5, 6, 7])
        assert (old.extra_fields["global_steps"], new.extra_fields["global_steps"]) == (0, 3)
        with torch.inference_mode():
            logits = server.generator.model(torch.tensor([[5, 6, 7, *new.token_ids[:-1]]])).logits[0, 2:]
        expected = torch.log_softmax(logits, -1)[torch.arange(12), new.token_ids]
        assert new.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)
        assert all(torch.equal(value, weights[name]) for name, value in weights_of(server).items())
        assert old.log_probs != new.log_probs

    asyncio.run(main())


def test_a_prompt_is_scored_in_verls_form_whatever_else_is_asked_for_and_generated(server):
    async def main() -> None:
        prompt = [5 + i % 7 for i in range(40)]
        under_way = asyncio.create_task(generate(server, [5, 6], max_tokens=30))
        scored = await generate(server, prompt, prompt_logprobs=0, temperature=0.3, top_k=2)
        assert (scored.token_ids, scored.extra_fields["global_steps"]) == ([], 0)
        with torch.inference_mode():
            logits = server.generator.model(torch.tensor([prompt])).logits[0, :-1]
        expected = torch.log_softmax(logits, -1)[torch.arange(39), prompt[1:]].tolist()
        *rows, last = scored.extra_fields["prompt_logprobs"]
        assert [row for (row,) in rows] == pytest.approx(expected, abs=TOLERANCE) and last == [0.0]
        assert (await under_way).token_ids == (await generate(server, [5, 6], max_tokens=30)).token_ids

    asyncio.run(main())


def test_a_weight_update_aborts_what_is_under_way_and_what_waits(server):
    async def main() -> None:
        reached, gate = hold(server, "step")
        # 4 have room
        calls = await start_together(server, [generate(server, [5 + i], max_tokens=50) for i in range(6)])
        await until(reached.is_set)
        update = asyncio.create_task(server.load_weights(weights_of(server), 1))
        await until(lambda: not server.inbox.empty())
        gate.set()
        await update
        outputs = await asyncio.gather(*calls)
        assert [(o.stop_reason, o.extra_fields["global_steps"]) for o in outputs] == [("abort", 0)] * 6
        assert sorted(len(o.token_ids) for o in outputs) == [0, 0, 2, 2, 2, 2]
        assert all(len(o.token_ids) == len(o.log_probs) for o in outputs)
        assert (await generate(server, [5])).extra_fields["global_steps"] == 1

    asyncio.run(main())


def test_sleep_aborts_too(server):
    async def main() -> None:
        reached, gate = hold(server, "step")
        call = asyncio.create_task(generate(server, [5], max_tokens=50))
        await until(reached.is_set)
        sleep = asyncio.create_task(server.sleep())
        await until(lambda: not server.inbox.empty())
        gate.set()
        await sleep
        assert (await call).stop_reason == "abort"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing \\['model.norm.weight'\\]"),
        (lambda weights: weights.update({"model.extra": torch.zeros(1)}), "unknown \\['model.extra'\\]"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(1)}), "model.norm.weight.*shape"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_are_refused_whole(server, change, message):
    async def main() -> None:
        before = weights_of(server)
        weights = {name: value + 1 for name, value in before.items()}
        change(weights)
        with pytest.raises(ValueError, match=message):
            await server.load_weights(weights, 9)
        assert all(torch.equal(value, before[name]) for name, value in weights_of(server).items())
        assert (await generate(server, [5])).extra_fields["global_steps"] == 0

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("method", ["add", "step", "_forward"])
def test_when_generation_dies_everybody_who_waits_is_told(server, method):
    async def main() -> None:
        reached, gate = hold(server, method, RuntimeError("out of memory"))
        calls = await start_together(server, [generate(server, [5 + i]) for i in range(6)])  # 4 have room
        await until(reached.is_set)
        calls.append(asyncio.create_task(server.load_weights(weights_of(server), 1)))
        await until(lambda: not server.inbox.empty())
        gate.set()
        async with asyncio.timeout(30):
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in errors] == ["generation failed: out of memory"] * 7
        for late in (generate(server, [5]), server.load_weights({}, 1), server.abort_all_requests()):
            with pytest.raises(RuntimeError, match="the generation thread failed: out of memory"):
                await late

    asyncio.run(main())


def test_behaviour_log_probs_equal_those_of_verls_engine(engine, server):
    """The gate: after a sync of changed weights, server and trainer agree on every sampled token."""
    actor = engine.worker.actor.engine
    with torch.no_grad():
        for parameter in actor.module.parameters():
            parameter.mul_(1.03)
    parameters, _ = actor.get_per_tensor_param()
    weights = {name: tensor.detach().to("cpu", torch.float32).clone() for name, tensor in parameters}

    async def roll_out() -> list[Row]:
        await server.load_weights(weights, 5)
        draw = torch.Generator().manual_seed(1)
        prompts = [torch.randint(2, 96, (1 + 3 * i,), generator=draw).tolist() for i in range(10)]
        temperatures = [(1.0, 0.6, 1.5, 0.0)[i % 4] for i in range(10)]
        calls = [
            generate(server, prompt, temperature=temperature, seed=i, max_tokens=5 + i)
            for i, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        ]
        outputs = await asyncio.gather(*calls)
        rows = []
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            ids = output.token_ids
            recorded = {"log_probs": output.log_probs, "temperature": temperatures[i]}
            rows.append(build_row(uid=f"u{i}", prompt=prompt, response=ids, mask=[1] * len(ids), **recorded))
        return rows

    rows = asyncio.run(roll_out())
    workers = {"data_parallel_size": 1, "workers": engine.worker}
    policy = SimpleNamespace(config=engine.config, tokenizer=SimpleNamespace(pad_token_id=0), **workers)
    for chosen in (rows, rows[::4]):  # one temperature per row, and temperature 1 for all
        batch = PolicyBatch(chosen)
        kernels.prepare(policy, batch, engine.workflow.algorithm)
        kernels.old_log_probs(policy, batch)
        trainer = torch.cat(batch.columns["old_log_probs"])
        rollout = torch.cat([torch.tensor(row.rollout_log_probs) for row in chosen])
        assert len(trainer) == sum(len(row.response_ids) for row in chosen)
        assert (trainer - rollout).abs().max().item() < TOLERANCE
        assert rollout.std() > 0.5  # not all alike: a shift by one would show


def adapter_in(folder, model, *, seed: int, rank: int, targets: tuple[str, ...] = ("all-linear",)) -> str:
    """Write an adapter that changes every log-prob, and return its folder."""
    draw = torch.Generator().manual_seed(seed)
    layers = target_layers(model, targets).items()
    pairs = {
        name: (torch.randn(rank, of.in_features, generator=draw), torch.randn(of.out_features, rank, generator=draw))
        for name, of in layers
    }
    write_adapter(folder, AdapterShape(rank, 0.1 * rank, targets), pairs, "base")
    return str(folder)


def test_requests_of_several_adapters_in_one_batch_get_what_merged_models_give(server, tiny_model, tmp_path):
    model = server.generator.model
    folders = {
        "a": adapter_in(tmp_path / "a", model, seed=1, rank=4),
        "b": adapter_in(tmp_path / "b", model, seed=2, rank=2, targets=("q_proj", "down_proj")),
    }

    async def main() -> dict:
        base_before = await generate(server, [3, 4, 5])
        for name, folder in folders.items():
            await server.load_adapter(name, 7, folder)
        names = [None, "a", "b", "a"]
        mixed = await asyncio.gather(
            *await start_together(server, [server.generate([3, 4, 5], PARAMS, "r", adapter=name) for name in names])
        )
        alone = await server.generate([3, 4, 5], PARAMS, "r", adapter="a")
        assert base_before.token_ids == mixed[0].token_ids and alone.token_ids == mixed[1].token_ids
        assert [output.extra_fields["global_steps"] for output in mixed] == [0, 7, 7, 7]
        return dict(zip([None, "a", "b"], mixed, strict=False))

    outputs = asyncio.run(main())
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 3
    for name, output in outputs.items():
        merged = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        if name is not None:
            merge(merged, Path(folders[name]))
        with torch.no_grad():
            log_probs = merged(torch.tensor([[3, 4, 5, *output.token_ids]])).logits[0, 2:-1].log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=TOLERANCE, rtol=0)


def test_a_request_ends_on_the_version_of_the_adapter_with_which_it_began(server, tmp_path):
    model, adapters = server.generator.model, server.generator.adapters
    first, second = (adapter_in(tmp_path / str(seed), model, seed=seed, rank=2) for seed in (1, 2))

    async def main() -> None:
        await server.load_adapter("a", 1, first)
        alone = await server.generate([5, 6], PARAMS, "r", adapter="a")
        reached, gate = hold(server, "step")
        running = asyncio.create_task(server.generate([5, 6], PARAMS, "r", adapter="a"))
        await until(reached.is_set)
        load = asyncio.create_task(server.load_adapter("a", 2, second))
        await until(lambda: server.inbox.qsize() == 1)
        gate.set()
        await load
        late = await server.generate([5, 6], PARAMS, "r", adapter="a")
        old = await running
        assert (old.token_ids, old.extra_fields["global_steps"]) == (alone.token_ids, 1)
        assert late.token_ids != old.token_ids and late.extra_fields["global_steps"] == 2
        assert set(adapters.loaded) == {"a@1", "a@2"}
        await server.load_adapter("a", 3, first)
        assert set(adapters.loaded) == {"a@3"}, "no request needs the others"
        with pytest.raises(ValueError, match="adapter b has not been loaded; there are a"):
            await server.generate([5, 6], PARAMS, "r", adapter="b")

    asyncio.run(main())


def test_neither_aborted_nor_invalid_requests_of_an_adapter_hold_up_its_next_version(server, tmp_path):
    folder = adapter_in(tmp_path / "a", server.generator.model, seed=1, rank=2)

    async def main() -> None:
        await server.load_adapter("a", 1, folder)
        with pytest.raises(ValueError, match="exceeds the context length"):
            await server.generate([5] * 80, PARAMS, "r", adapter="a")
        reached, gate = hold(server, "step")
        running = asyncio.create_task(server.generate([5, 6], PARAMS, "r", adapter="a"))
        await until(reached.is_set)
        abort = asyncio.create_task(server.abort_all_requests())
        gate.set()
        await abort
        assert (await running).stop_reason == "abort"
        await asyncio.wait_for(server.load_adapter("a", 2, folder), 30)
        assert set(server.generator.adapters.loaded) == {"a@2"}

    asyncio.run(main())
