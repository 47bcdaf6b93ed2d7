"""A synced SGLang server keeps no copy of its weights in host memory; any other one does as verl says. Here with the
classes of SGLang and verl replaced, since SGLang needs a GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

STOCK = "verl.workers.rollout.sglang_rollout.async_sglang_server"
OURS = "recipe.dag.policy.sglang_server"


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    attention_backend: str | None = None
    enable_weights_cpu_backup: bool = False
    disable_overlap_schedule: bool = False
    tp_size: int = 1
    enable_prefill_delayer: bool = False
    prefill_delayer_queue_min_ratio: float | None = None
    prefill_delayer_max_delay_ms: float | None = None
    enable_lora: bool = False
    enable_breakable_cuda_graph: bool = False
    disable_piecewise_cuda_graph: bool = False

    def __post_init__(self):
        self._handle_piecewise_cuda_graph()

    def _handle_piecewise_cuda_graph(self):
        self.disable_piecewise_cuda_graph |= self.enable_lora or self.disable_overlap_schedule


class Trainer:
    """A worker's actor: what it is asked runs after its load."""

    is_loaded = False

    @property
    def __ray_call__(self):
        return SimpleNamespace(remote=self._call)

    async def _call(self, function):
        await asyncio.sleep(0)
        self.is_loaded = True
        return function(self)


class StockServer:
    """As in verl 0.9.1: the copy is switched on after the user's keys."""

    def __init__(self, config, rollout_mode):
        self.config, self.rollout_mode, self.workers = config, rollout_mode, [Trainer()]
        self.model_config = SimpleNamespace(hf_config=LlamaConfig())

    async def launch_server(self, master_address=None):
        assert self.workers[0].is_loaded, "a server would take the memory that the trainer needs"
        stock = sys.modules[STOCK]
        assert "enable_weights_cpu_backup" in [field.name for field in dataclasses.fields(stock.ServerArgs)]
        args = {"model_path": master_address, **(self.config.engine_kwargs.get("sglang") or {})}
        self.args, self.tokenizer_manager = stock.ServerArgs(**args | {"enable_weights_cpu_backup": True}), None

    async def sleep(self):
        self.released = ["kv_cache", "weights"]

    async def release_kv_cache(self):
        self.released = ["kv_cache"]


@pytest.fixture
def make_server(monkeypatch):
    """Makes a server with so many changes of its configuration."""
    stock = ModuleType(STOCK)
    vars(stock).update(ServerArgs=ServerArgs, SGLangHttpServer=StockServer, SGLangReplica=object)
    monkeypatch.setitem(sys.modules, STOCK, stock)
    monkeypatch.setattr("verl.workers.rollout.sglang_rollout.async_sglang_server", stock, raising=False)
    engine, entrypoints = ModuleType("sglang.srt.entrypoints.engine"), ModuleType("sglang.srt.entrypoints")
    vars(entrypoints)["engine"] = engine
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), entrypoints, engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    from recipe.dag.policy.sglang_server import PolicyServer

    monkeypatch.setitem(sys.modules, OURS, sys.modules[OURS])  # removed with the rest
    plain = {"engine_kwargs": {}, "quantization": None, "mtp": {"enable": False}, "custom": {}}
    return lambda changes, mode: PolicyServer(OmegaConf.create(plain | changes), mode)


@pytest.mark.parametrize(
    ("changes", "mode", "copied"),
    [
        ({}, "HYBRID", False),
        ({}, "COLOCATED", True),
        ({"quantization": "fp8"}, "HYBRID", True),
        ({"mtp": {"enable": True}}, "HYBRID", True),
        ({"engine_kwargs": {"sglang": {"enable_weights_cpu_backup": True}}}, "HYBRID", True),
    ],
    ids=["synced", "loaded from disk", "quantized", "drafts", "wanted"],
)
def test_only_a_server_whose_weights_are_all_synced_goes_without_the_copy(make_server, changes, mode, copied):
    from verl.workers.rollout.replica import RolloutMode

    server = make_server(changes, RolloutMode[mode])
    asyncio.run(server.launch_server(master_address="model"))
    assert server.args.enable_weights_cpu_backup is copied and type(server.args) is ServerArgs


@pytest.mark.parametrize(
    ("own", "ratio"),
    [
        ({}, 0.1),
        ({"prefill_delayer_queue_min_ratio": 0.5}, 0.5),
        ({"enable_prefill_delayer": False}, None),
        ({"disable_overlap_schedule": True}, None),
        ({"tp_size": 2}, None),
    ],
    ids=["by default", "another share", "off", "no overlap", "several ranks"],
)
def test_prompts_wait_for_others_unless_the_user_says_otherwise(make_server, own, ratio):
    from verl.workers.rollout.replica import RolloutMode

    server = make_server({"engine_kwargs": {"sglang": own}}, RolloutMode.HYBRID)
    asyncio.run(server.launch_server(master_address="model"))
    assert server.args.enable_prefill_delayer is (ratio is not None)
    assert server.args.prefill_delayer_queue_min_ratio == ratio


@pytest.mark.parametrize(
    ("model", "own", "chosen"),
    [
        (Gemma3TextConfig(), {}, "triton"),
        (Gemma3TextConfig(), {"attention_backend": "fa3"}, "fa3"),
        (Qwen2Config(sliding_window=4096), {}, None),
        (LlamaConfig(), {}, None),
    ],
    ids=["windows", "the user's", "windows that are off", "no windows"],
)
def test_sliding_windows_use_tritons_attention_unless_the_user_says_otherwise(make_server, model, own, chosen):
    from verl.workers.rollout.replica import RolloutMode

    server = make_server({"engine_kwargs": {"sglang": own}}, RolloutMode.HYBRID)
    server.model_config = SimpleNamespace(hf_config=model)
    asyncio.run(server.launch_server(master_address="model"))
    assert server.args.attention_backend == chosen


def test_sglangs_scheduler_is_started_with_this_projects_changes(make_server):
    from verl.workers.rollout.replica import RolloutMode

    from recipe.dag.policy.sglang_scheduler import run_scheduler_process

    server = make_server({"custom": {"policy": "base", "adapter_columns": 24}}, RolloutMode.HYBRID)
    asyncio.run(server.launch_server(master_address="model"))
    started = vars(sys.modules["sglang.srt.entrypoints.engine"])["run_scheduler_process"]
    assert started.func is run_scheduler_process and started.keywords == {"adapter_columns": 24}
    pickle.dumps(started)  # for another process


@pytest.mark.parametrize(
    ("own", "disabled"),
    [
        ({}, False),
        ({"enable_lora": True}, True),
        ({"enable_lora": True, "enable_breakable_cuda_graph": True}, False),
        ({"enable_breakable_cuda_graph": True, "disable_piecewise_cuda_graph": True}, True),
        ({"enable_lora": True, "enable_breakable_cuda_graph": True, "disable_overlap_schedule": True}, True),
    ],
)
def test_adapters_do_not_prevent_graphs_that_can_have_them(make_server, own, disabled):
    """`disable_overlap_schedule` stands for SGLang's other rules."""
    from verl.workers.rollout.replica import RolloutMode

    server = make_server({"engine_kwargs": {"sglang": own}}, RolloutMode.HYBRID)
    asyncio.run(server.launch_server(master_address="model"))
    assert server.args.disable_piecewise_cuda_graph == disabled
    assert server.args.enable_lora == bool(own.get("enable_lora"))


def test_prompts_of_a_full_server_wait_for_a_tenth_of_its_places(monkeypatch):
    from recipe.dag.policy.sglang_scheduler import limit_delay

    class PrefillDelayer:
        def _negotiate_should_allow_prefill(self, **given):
            return given["max_running_requests"] - given["running_batch"] >= given["max_prefill_bs"]

    delayer = ModuleType("sglang.srt.managers.prefill_delayer")
    vars(delayer)["PrefillDelayer"] = PrefillDelayer
    for module in (*map(ModuleType, ("sglang", "sglang.srt", "sglang.srt.managers")), delayer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    limit_delay()
    allows = PrefillDelayer()._negotiate_should_allow_prefill
    assert allows(running_batch=220, max_prefill_bs=256, max_running_requests=256)
    assert not allows(running_batch=240, max_prefill_bs=256, max_running_requests=256)
    assert allows(running_batch=240, max_prefill_bs=4, max_running_requests=256)


def test_the_adapters_that_were_loaded_last_are_placed_while_the_cache_gets_its_memory(monkeypatch):
    from recipe.dag.policy.sglang_scheduler import place_adapters

    placed = threading.Event()

    class Scheduler:
        enable_lora = True

        def resume_memory_occupation(self, request):
            return request.tags, placed.wait(30 if request.tags == ["kv_cache"] else 0)

    def place(names):
        found.append(names)
        placed.set()

    scheduler, found = ModuleType("sglang.srt.managers.scheduler"), []
    vars(scheduler)["Scheduler"] = Scheduler
    for module in (*map(ModuleType, ("sglang", "sglang.srt", "sglang.srt.managers")), scheduler):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    place_adapters()
    made, loaded = Scheduler(), dict.fromkeys(("a@1", "a@2", "b@2"))
    manager = SimpleNamespace(device="cpu", loras=loaded, max_loras_per_batch=3, fetch_new_loras=place)
    made.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    for tags, beside in ((["weights", "kv_cache"], False), (["kv_cache"], True)):
        assert made.resume_memory_occupation(SimpleNamespace(tags=tags)) == (tags, beside)
    assert found == [{"a@2", "b@2"}]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_base_that_fits_beside_the_trainer_stays_while_the_server_sleeps(make_server, keeps):
    server = make_server({"custom": {"policy": "base", "keeps_weights": keeps}}, None)
    asyncio.run(server.sleep())
    assert server.released == (["kv_cache"] if keeps else ["kv_cache", "weights"])


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_server_that_has_loaded_a_folder_reports_its_version(make_server, monkeypatch, succeeds):
    requests = ModuleType("sglang.srt.managers.io_struct")
    requests.UpdateWeightFromDiskReqInput = SimpleNamespace
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, requests.__name__, requests)
    asked, versions = [], []

    async def update_weights_from_disk(request, http_request):
        asked.append(request.model_path)
        return succeeds, "no such file", 0

    async def set_global_steps(version):
        versions.append(version)

    server = make_server({}, None)
    server.tokenizer_manager = SimpleNamespace(update_weights_from_disk=update_weights_from_disk)
    server.set_global_steps = set_global_steps
    loading = server.load_weights_from("folder", 7)
    if succeeds:
        asyncio.run(loading)
    else:
        with pytest.raises(RuntimeError, match="SGLang did not load folder: no such file"):
            asyncio.run(loading)
    assert (asked, versions) == (["folder"], [7] * succeeds)
