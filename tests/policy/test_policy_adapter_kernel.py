"""The kernel of adapters against plain products: on a GPU, or interpreted where Triton is installed without one."""

from __future__ import annotations

import pytest
import torch

from recipe.dag.policy.adapter_columns import TILE, Span, tiles_of

CASES = [  # tokens, columns, the ends of the parts
    (1, 16, (256,)),
    (65, 48, (200, 232, 264)),
    (17, 128, (130, 260)),
    (64, 144, (96,)),
    (200, 48, (7, 11, 12)),
    (70, 144, (72, 144)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_gets_its_own_columns_on_a_gpu(dtype):
    check("cuda", dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="computed on the GPU")
def test_a_token_gets_its_own_columns(run_interpreted):
    run_interpreted(__file__)


def check(device: str, dtype: torch.dtype) -> None:
    from recipe.dag.policy import adapter_kernel

    torch.manual_seed(0)
    for tokens, columns, ends in CASES:
        starts, out = (0, *ends[:-1]), ends[-1]
        half = columns // 32 * 16
        spans = {"a": Span(0, half), "b": Span(half, columns - half)} if half else {"b": Span(0, columns)}
        requests = [("b", None, next(iter(spans)))[token * 7 % 11 % 3] for token in range(tokens)]
        table = tiles_of(requests, None, spans, rows=tokens + 3, number=(tokens + 3) // TILE + 3)
        tiles = torch.from_numpy(table).to(device)
        own = torch.zeros(tokens, columns, dtype=torch.bool)
        for token, name in enumerate(requests):
            if name is not None:
                own[token, spans[name].start : spans[name].end] = True
        own, of_base = own.to(device), torch.tensor([name is None for name in requests], device=device)
        h = torch.randn(tokens, len(ends) * columns + 8, device=device).to(dtype)[:, :-8]
        b = (torch.randn(columns, out, device=device) / columns**0.5).to(dtype)
        around = torch.randn(tokens + 1, out + 8, device=device).to(dtype)
        expected = around[:tokens, :out].double()
        for start, end, part in zip(starts, ends, h.split(columns, 1), strict=True):
            expected[:, start:end] += part.double().where(own, 0) @ b[:, start:end].double()
        h[~own.repeat(1, len(ends))] = torch.nan  # of no importance, whatever they are
        for adapter_kernel.MULTIPROCESSORS in (1, 132):  # wide tiles, and narrow ones
            for buffer in (around.clone(), around[:, :out].clone()):
                output = buffer[:tokens, :out]
                total = adapter_kernel.add_product(h, b, output, tiles, ends)
                torch.testing.assert_close(total.double(), expected, atol=1e-3, rtol=torch.finfo(dtype).eps)
                assert torch.equal(total[of_base], around[:tokens, :out][of_base])
                assert total.is_contiguous() and (total is output) == output.is_contiguous()
                changed = buffer != around[:, : buffer.shape[1]]
                if total is output:
                    changed[:tokens, :out] = False
                assert not changed.any()
                if ends[0] * 2 == out:  # an MLP's gate and up
                    gate, up = total.double().chunk(2, -1)
                    gated = adapter_kernel.add_product_and_gate(h, b, around[:tokens, :out], tiles)
                    true = torch.nn.functional.silu(gate) * up
                    torch.testing.assert_close(gated.double(), true, atol=1e-4, rtol=2 * torch.finfo(dtype).eps)


if __name__ == "__main__":
    check("cpu", torch.float16)  # interpreted products of bf16 are wrong
