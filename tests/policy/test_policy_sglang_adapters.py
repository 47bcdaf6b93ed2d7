"""SGLang's back end of adapters with this project's products, in a model of one layer."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from recipe.dag.policy import sglang_adapters
from tests.policy.adapter_pool import ENDS, IN, OUT, Linear, Pool


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's names that the back end uses, with the pool's layer in a model of one layer."""
    names = ("lora", "lora.backend", "model_executor", "layers", "layers.quantization")
    modules = {name: ModuleType(f"sglang.srt.{name}") for name in names}
    registry = {}

    class Backend:
        def __init__(self, places, device):
            self.device = device

    class LoRAManager:
        def __init__(self, pool, backend, module, name="qkv_proj", block=None):
            self.memory_pool, self.lora_backend, self.device = pool, backend, torch.device("cpu")
            self.base_model = nn.ModuleList([block or nn.Module()])
            self.lora_modules = [{f"0.{name}": module}]

        def update_lora_info(self): ...

    class CudaGraphRunner:
        def __init__(self, manager):
            self.model_runner = SimpleNamespace(lora_manager=manager)

        def can_run(self, forward_batch):
            return True

    class BreakableCudaGraphRunner(CudaGraphRunner):
        max_num_tokens = 4
        can_run = CudaGraphRunner.can_run

        def _warmup(self):
            manager = getattr(self.model_runner, "lora_manager", None)
            self.read = manager and manager.lora_backend.products.tiles[0].tolist()

    class UnquantizedLinearMethod(Linear):
        def __init__(self): ...

        def create_weights(self, layer, input_size_per_partition, output_partition_sizes, params_dtype):
            shape = (sum(output_partition_sizes), input_size_per_partition)
            layer.weight = nn.Parameter(torch.randn(shape, dtype=params_dtype), requires_grad=False)

    members_of = {
        "layers.quantization.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
        "lora.backend.lora_registry": {"register_lora_backend": lambda name: partial(registry.__setitem__, name)},
        "lora.backend.base_backend": {"BaseLoRABackend": Backend},
        "lora.lora_manager": {"LoRAManager": LoRAManager},
        "lora.utils": {
            "LoRAType": SimpleNamespace(LORA_A="A", LORA_B="B"),
            "get_target_module_name": lambda name, targets: next(each for each in targets if each in name),
        },
        "model_executor.breakable_cuda_graph_runner": {"BreakableCudaGraphRunner": BreakableCudaGraphRunner},
        "model_executor.cuda_graph_runner": {"CudaGraphRunner": CudaGraphRunner},
    }
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in {**{name: {} for name in modules}, **members_of}.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(
        registry=registry,
        manager=LoRAManager,
        runner=CudaGraphRunner,
        prompts=BreakableCudaGraphRunner,
        method=UnquantizedLinearMethod,
    )


def batch_of(requests, lengths=None):
    mode = SimpleNamespace(is_extend=lambda: lengths is not None, is_target_verify=lambda: False)
    return SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=lengths, lora_ids=requests)


@pytest.mark.parametrize(
    ("columns", "ranks_", "replaced"), [(32, 1, False), (32, 2, False), (32, 1, True), (None, 1, False)]
)
def test_sglangs_pool_and_layers_reach_the_products(sglang, columns, ranks_, replaced):
    """`ranks_`: of tensor parallelism. `replaced`: the weight, by another one, as by torchao."""
    sglang_adapters.register(columns)
    backend = sglang.registry["dense"]()(max_loras_per_batch=4, device=torch.device("cpu"), server_args=None)
    ends = torch.tensor(ENDS)
    base = SimpleNamespace(quant_method=sglang.method(), bias=torch.randn(OUT), reduce_results=True, tp_size=ranks_)
    base.quant_method.create_weights(base, IN, output_partition_sizes=[5, 3, 1], params_dtype=torch.float32)
    assert base.weight.shape == (OUT, IN)
    if replaced:
        base.weight = nn.Parameter(torch.randn(OUT, IN), requires_grad=False)
    pool = Pool()
    for name, place, rank, scaling in (("a@1", 0, 8, 1.0), ("b@1", 1, 2, 2.0), ("c@1", 3, 8, 1.0)):
        pool.load(name, place, rank, scaling)
    manager = sglang.manager(pool, backend, SimpleNamespace(output_offset_cpu=ends, base_layer=base))
    manager.update_lora_info()
    backend.init_cuda_graph_batch_info(max_bs_in_cuda_graph=8, num_tokens_per_bs=1)
    prompts = sglang.prompts(manager)
    prompts._warmup()
    assert prompts.read == [0, 1, 2, 3, *[-1] * 60, 0, 0], "the base's"
    ranks, scalings = [8, 2, 0, 8], [1.0, 2.0, 0.0, 1.0]
    places = {None: 2, "a@1": 0, "b@1": 1, "c@1": 3}
    for requests, lengths, fits in (
        (["a@1", None], [2, 1], True),
        (["b@1", "a@1", "b@1"], None, True),
        (["a@1", "b@1", "c@1"], None, columns is None),
    ):
        batch = batch_of(requests, lengths)
        indices = [places[name] for name in requests]
        backend.prepare_lora_batch(batch, indices, ranks, scalings, use_cuda_graph=lengths is None)
        owners = [name for name, n in zip(requests, lengths or [1, 1, 1], strict=True) for _ in range(n)]
        x = torch.randn(3, IN)
        output = base.quant_method.apply(base, x, base.bias)
        is_stacked = bool(columns) and ranks_ == 1 and not replaced and lengths is None and fits
        assert output.is_contiguous() != is_stacked, "ranks cannot add up rows that lie apart"
        rest = {"output_offset": None, "output_offset_cpu": ends, "max_qkv_out_dim": 5}
        output = backend.run_qkv_lora(x, pool.a, pool.b, **rest, base_output=output)
        torch.testing.assert_close(output, nn.functional.linear(x, base.weight, base.bias) + pool.expected(x, owners))
        assert sglang.runner(manager).can_run(batch) == prompts.can_run(batch) == fits
    for runner in (sglang.runner, sglang.prompts):
        of_whole_weights = runner(None)
        del of_whole_weights.model_runner.lora_manager
        assert of_whole_weights.can_run(SimpleNamespace(lora_ids=[None]))
    of_whole_weights._warmup()
    assert of_whole_weights.read is None


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.act_fn = SiluAndMul()


class OtherMLP(LlamaMLP):
    """Its `forward` may do more with what `act_fn` reads."""


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


@pytest.mark.parametrize("kind", [LlamaMLP, OtherMLP])
def test_an_activation_reads_its_input_with_the_adapters_part(sglang, kind):
    sglang_adapters.register(32)
    backend = sglang.registry["dense"]()(max_loras_per_batch=4, device=torch.device("cpu"), server_args=None)
    pool = Pool(ends=(0, 4, 8))
    for place, name in enumerate("abc"):
        pool.load(name, place, 8 - 4 * (name == "b"), 2.0)
    base = SimpleNamespace(quant_method=sglang.method())
    base.quant_method.create_weights(base, IN, output_partition_sizes=[4, 4], params_dtype=torch.float32)
    mlp = kind()
    module = SimpleNamespace(output_offset_cpu=torch.tensor(pool.ends), base_layer=base)
    sglang.manager(pool, backend, module, "gate_up_proj", mlp).update_lora_info()
    backend.init_cuda_graph_batch_info(max_bs_in_cuda_graph=4, num_tokens_per_bs=1)
    for requests, in_graph in ((["a", None, "b"], False), (["b", "a"], True), (["c"], False), (["a", "c"], False)):
        indices = [3 if name is None else "abc".index(name) for name in requests]
        backend.prepare_lora_batch(batch_of(requests), indices, [8, 4, 8, 0], [2.0] * 4, use_cuda_graph=in_graph)
        x = torch.randn(len(requests), IN)
        true = nn.functional.linear(x, base.weight) + pool.expected(x, requests)
        output = base.quant_method.apply(base, x, None)
        output = backend.run_gate_up_lora(x, pool.a, pool.b, base_output=output)
        assert torch.allclose(output, true, atol=1e-3) == (kind is OtherMLP or backend.products.one_by_one is not None)
        torch.testing.assert_close(mlp.act_fn(output), SiluAndMul()(true), atol=1e-3, rtol=1e-4)


def test_experts_are_refused(sglang):
    pool = Pool()
    sglang_adapters.register()
    backend = sglang.registry["dense"]()(max_loras_per_batch=4, device=torch.device("cpu"), server_args=None)
    with pytest.raises(NotImplementedError, match="lora_backend=csgmv"):
        sglang.manager(pool, backend, SimpleNamespace()).update_lora_info()
    other = SimpleNamespace()
    sglang.manager(pool, other, SimpleNamespace()).update_lora_info()  # of another back end
