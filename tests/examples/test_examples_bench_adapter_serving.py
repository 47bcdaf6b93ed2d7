"""The comparison of servers with adapters, with SGLang replaced: it needs a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType

import pytest

from examples import bench_adapter_serving


class Engine:
    """Keeps what it is asked."""

    made: Engine

    def __init__(self, **options):
        self.options, self.loaded, self.asked, self.loop = options, {}, [], asyncio.new_event_loop()
        Engine.made = self

    def load_lora_adapter(self, name, path):
        self.loaded[name] = path

    async def async_generate(self, *, input_ids, sampling_params, lora_path):
        self.asked.append((tuple(input_ids), sampling_params["max_new_tokens"], lora_path))

    def shutdown(self):
        self.loop.close()


@pytest.mark.parametrize(("arm", "adapters"), [("whole+eager", {None}), ("csgmv128+delay", {"a0", "a1", "a2"})])
def test_an_arm_asks_for_each_agents_adapter_in_turn(arm, adapters, tiny_model, tmp_path, monkeypatch):
    engine, arguments = ModuleType("sglang.srt.entrypoints.engine"), ModuleType("sglang.srt.server_args")
    vars(engine)["Engine"] = Engine
    vars(arguments)["ServerArgs"] = type("ServerArgs", (), {"_handle_piecewise_cuda_graph": None})
    for module in (*map(ModuleType, ("sglang", "sglang.srt", "sglang.srt.entrypoints")), engine, arguments):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    words = ["--arm", arm, "--episodes", "2", "--passes", "2", "--out", str(tmp_path)]
    bench_adapter_serving.main([str(tiny_model), *words, "attention_backend=triton", "cuda_graph_max_bs=8"])
    engine = Engine.made
    assert (engine.options["attention_backend"], engine.options["cuda_graph_max_bs"]) == ("triton", 8)
    assert engine.options.get("disable_piecewise_cuda_graph", False) == arm.endswith("eager")
    assert engine.options.get("prefill_delayer_max_delay_ms") == (300 if arm.endswith("delay") else None)
    prompts = {prompt for prompt, _, _ in engine.asked}
    assert len(engine.asked) == len(prompts) == 2 * 2 * 3, "a repeated prompt would be in the server's cache"
    assert {adapter for _, _, adapter in engine.asked} == adapters
    if None not in adapters:
        assert engine.options["max_loras_per_batch"] == 4 and engine.loaded.keys() == adapters
        assert all((tmp_path / name / "adapter_model.safetensors").exists() for name in adapters)
    result = json.loads((tmp_path / f"{arm}.json").read_text())
    assert result["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--arms", "whole,mine"], "unknown arm mine"),
        (["--arms", "whole+mine"], "unknown arm whole+mine"),
        (["--passes", "1"], "the first one is left out"),
    ],
)
def test_what_it_cannot_measure_is_one_line(words, line, capsys):
    with pytest.raises(SystemExit):
        bench_adapter_serving.main(["model", *words])
    assert line in capsys.readouterr().err
