"""Two adapters on SGLang's own server, through sleep, syncs and a request that goes wrong. Skipped without a GPU."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.dag.policy.adapter_serving import LOAD_S, UNLOAD_S, AdapterServing
from recipe.dag.policy.canary import BOUNDS, difference

PROMPT = [3 + i * 7 % 900 for i in range(128)]
CONTEXT = 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("sglang") is None, reason="needs a GPU and SGLang")
@pytest.mark.parametrize("prompts", ["eager", "graphs"])
def test_two_adapters_on_sglangs_server(prompts, tmp_path):
    # which the other tests set to cpu
    env = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), prompts], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    bound = BOUNDS["bfloat16"]
    for name in ("None", "a", "b"):
        assert found["first"][name] <= bound, "the log-probs are those of merged weights"
        assert found["synced"][name] <= bound
        assert max(found["decoded"][name]) <= bound, "so are those of tokens that all three decode in one batch"
    assert found["distance"] > 2 * bound, "those of other weights are not"
    assert found["cached"] == [0, len(PROMPT) - 1, 0], "by the requests of the same adapter"
    assert found["others_equal"] == [True, True], "a sync of one adapter changes neither the base nor the other one"
    assert found["next_load_s"] < UNLOAD_S < found["unloaded_s"] < LOAD_S, "a leaked counter holds up no load"


class Stock:
    """verl's server, as far as adapters are concerned."""

    def __init__(self, engine: Any):
        self.engine = engine

    async def launch_server(self) -> None:
        self.tokenizer_manager = self.engine.tokenizer_manager

    async def generate(self, prompt: list[int], start: int = 0, new: int = 1) -> SimpleNamespace:
        """start: the first token of the prompt whose log-prob is computed; -1: none is. new: tokens to sample."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
        request = GenerateReqInput(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=start
        )
        answer = await self.tokenizer_manager.generate_request(request, None).__anext__()
        log_probs = [row[0] for row in (answer["meta_info"].get("input_token_logprobs") or [])[1:]]
        sampled = [(row[0], row[1]) for row in answer["meta_info"]["output_token_logprobs"]]
        return SimpleNamespace(log_probs=log_probs, sampled=sampled, extra_fields={})


class Server(AdapterServing, Stock): ...


def serve(folder: Path, prompts: str) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoModelForCausalLM, Qwen2Config

    from recipe.dag.platform.adapter_weights import merge, target_layers, write_adapter
    from recipe.dag.policy.adapter_config import _server_arguments
    from recipe.dag.policy.sglang_adapters import NAME, allow_graphs
    from recipe.dag.policy.sglang_scheduler import run_scheduler_process
    from recipe.dag.workflow.adapter_shape import AdapterShape, columns_of

    shapes = {"a": AdapterShape(16, 32.0, ("all-linear",)), "b": AdapterShape(8, 16.0, ("all-linear",))}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # which are 0
            torch.nn.init.normal_(parameter, std=0.1)
    base = folder / "base"
    model.save_pretrained(base)
    layers = target_layers(model, ("all-linear",))
    for name, version in (("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2)):
        rank = shapes[name].rank
        pairs = {
            layer: (torch.randn(rank, m.in_features) * m.in_features**-0.5, torch.randn(m.out_features, rank) * 0.1)
            for layer, m in layers.items()
        }
        pairs = {layer: (x.bfloat16(), y.bfloat16()) for layer, (x, y) in pairs.items()}
        write_adapter(folder / f"{name}@{version}", shapes[name], pairs, str(base))

    def expected(adapter: str | None, tokens: list[int] = PROMPT) -> list[float]:
        merged = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        if adapter is not None:
            merge(merged, folder / adapter)
        ids = torch.tensor([tokens]).cuda()
        with torch.no_grad():
            log_probs = merged.cuda()(ids).logits[0, :-1].float().log_softmax(-1)
        return log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    scheduler = partial(run_scheduler_process, adapter_columns=sum(columns_of(shape.rank) for shape in shapes.values()))
    Engine.run_scheduler_process_func = staticmethod(scheduler)
    allow_graphs(ServerArgs)
    engine = Engine(
        model_path=str(base),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        mem_fraction_static=0.2,
        enable_memory_saver=True,
        cuda_graph_max_bs=4,
        attention_backend="triton",  # which needs no other kernels
        sampling_backend="pytorch",
        log_level="error",
        lora_backend=NAME,
        enable_breakable_cuda_graph=prompts == "graphs",
        piecewise_cuda_graph_max_tokens=256,
        **_server_arguments(shapes),
    )
    server = Server(engine)
    run = (getattr(engine, "loop", None) or asyncio.get_event_loop()).run_until_complete

    def sync(name: str, version: int) -> None:
        tags = ["kv_cache"] if version > 1 else None  # with the base kept, and without
        engine.release_memory_occupation(tags)
        run(server.load_adapter(name, version, str(folder / f"{name}@{version}")))
        engine.resume_memory_occupation(tags)

    def scores() -> dict[str | None, list[float]]:
        return {name: run(server.generate(PROMPT, adapter=name)).log_probs for name in (None, "a", "b")}

    async def sample(prompts: dict[str | None, list[int]]) -> list[SimpleNamespace]:
        return await asyncio.gather(*[server.generate(each, -1, 64, adapter=name) for name, each in prompts.items()])

    def decoded(versions: dict[str, str]) -> list[float]:
        """Return the difference to merged weights for the base and each adapter."""
        # not cached, and in one graph of prompts
        prompts = {name: PROMPT[n + 1 : 51 + 30 * n] for n, name in enumerate((None, *versions))}
        found = []
        for name, answer in zip(prompts, run(sample(prompts)), strict=True):
            log_probs, tokens = zip(*answer.sampled, strict=True)
            true = expected(name and versions[name], [*prompts[name], *tokens])[-len(tokens) :]
            found.append(difference(list(log_probs), true))
        return found

    run(server.launch_server())
    sync("a", 1)
    sync("b", 1)
    asked = [run(server.generate(PROMPT, -1, adapter=name)) for name in ("a", "a", "b")]
    cached = [answer.extra_fields["cached_tokens"] for answer in asked]
    first = scores()
    true = {name: expected(name and f"{name}@1") for name in first}
    before = decoded({"a": "a@1", "b": "b@1"})
    engine.release_memory_occupation()  # with the matrices that hold b@1, which is not loaded again
    engine.resume_memory_occupation()
    sync("a", 2)
    after = decoded({"a": "a@2", "b": "b@1"})
    synced = scores()
    true_then = true | {"a": expected("a@2")}
    try:  # SGLang counts this request of a@2 for ever
        run(server.generate([5] * (CONTEXT + 8), adapter="a"))
        raise AssertionError("a prompt beyond the context is refused")
    except ValueError:
        pass
    started = time.monotonic()
    sync("a", 3)

    async def unloaded() -> None:
        while server.unloading:
            await asyncio.sleep(0.1)

    sync_s = time.monotonic() - started
    run(unloaded())
    unloaded_s = time.monotonic() - started
    sync("b", 2)
    run(server.generate(PROMPT, adapter="b"))
    engine.shutdown()
    return {
        "cached": cached,
        "first": {str(name): difference(first[name], true[name]) for name in first},
        "synced": {str(name): difference(synced[name], true_then[name]) for name in first},
        "decoded": dict(zip(("None", "a", "b"), zip(before, after, strict=True), strict=True)),
        "distance": difference(synced["a"], true["a"]),
        "others_equal": [synced[name] == first[name] for name in (None, "b")],
        "next_load_s": sync_s,
        "unloaded_s": unloaded_s,
    }


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]), sys.argv[2])))
