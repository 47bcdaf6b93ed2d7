"""The kernels with which a GPU multiplies by the adapters' B and adds the product to a layer's output.

Invariant: a token's output gets the product of its own adapter's columns alone, which is summed in fp32 and rounded
once, with the output.

Triton is installed with SGLang: `dense_adapters` imports this module on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# The kernels wait for memory: each output is read and written for some 100 multiplications. A batch that decodes (256
# tokens on an H100, whose cache then holds the output) has 4 rows of tiles, which read B once from memory and 3 times
# from the cache; with fewer tokens, the idle rest of a tile costs no time. Wide tiles copy less of h and B per output,
# and are taken where they give each multiprocessor two, as the inputs of an MLP and prompts do; else narrow ones leave
# none idle. Up to 128 columns are read at once. Each width is compiled once, before SGLang captures its first graph.
HEIGHT, WIDE, NARROW, DEPTH = 64, 128, 64, 128
MULTIPROCESSORS = 132  # of an H100


@triton.jit
def _own_product(
    h,
    b,
    owner,
    owners,
    token,
    outputs,
    tokens,
    end,
    h_stride,
    b_stride,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    """Return the product [height, width] of one part. `h`: the first token's first column of it. `b`: its first row."""
    real, within = token < tokens, outputs < end
    total = tl.zeros((height, width), tl.float32)
    for begin in tl.static_range(0, columns, depth):
        column = begin + tl.arange(0, depth)
        exists = column < columns
        x = h + token.to(tl.int64)[:, None] * h_stride + column[None, :]
        x = tl.load(x, mask=real[:, None] & exists[None, :], other=0.0)
        y = tl.load(
            b + column[:, None] * b_stride + outputs[None, :], mask=exists[:, None] & within[None, :], other=0.0
        )
        token_owner = tl.load(owner + token, mask=real, other=-2)
        column_owner = tl.load(owners + column, mask=exists, other=-1)
        total = tl.dot(tl.where(token_owner[:, None] == column_owner[None, :], x, 0.0), y, total)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _add_product(
    h,
    b,
    source,
    target,
    owner,
    owners,
    tokens,
    first_end,
    second_end,
    out,
    h_stride,
    source_stride,
    target_stride,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    # each part has tiles of its own, the last of which may be narrower
    tile = tl.program_id(0)
    first_tiles = tl.cdiv(first_end, width)
    second_tiles = first_tiles + tl.cdiv(second_end - first_end, width)
    first, second = tile < first_tiles, tile < second_tiles
    part = tl.where(first, 0, tl.where(second, 1, 2))
    start = tl.where(first, 0, tl.where(second, first_end, second_end))
    end = tl.where(first, first_end, tl.where(second, second_end, out))
    tile -= tl.where(first, 0, tl.where(second, first_tiles, second_tiles))

    outputs = start + tile * width + tl.arange(0, width)
    token = tl.program_id(1) * height + tl.arange(0, height)
    row = token.to(tl.int64)[:, None]  # times a stride, it may exceed 32 bits
    inside = (token < tokens)[:, None] & (outputs < end)[None, :]
    # all reads precede the first use of one, which waits
    base = tl.load(source + row * source_stride + outputs[None, :], mask=inside, other=0.0)
    total = _own_product(
        h + part * columns, b, owner, owners, token, outputs, tokens, end, h_stride, out, columns, height, width, depth
    )
    tl.store(target + row * target_stride + outputs[None, :], base.to(tl.float32) + total, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _gate(
    h,
    b,
    source,
    target,
    owner,
    owners,
    tokens,
    half,
    h_stride,
    source_stride,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
):
    outputs = tl.program_id(0) * width + tl.arange(0, width)
    token = tl.program_id(1) * height + tl.arange(0, height)
    row = token.to(tl.int64)[:, None]
    inside = (token < tokens)[:, None] & (outputs < half)[None, :]
    read = source + row * source_stride + outputs[None, :]
    gate = tl.load(read, mask=inside, other=0.0)
    up = tl.load(read + half, mask=inside, other=0.0)
    product = _own_product(
        h, b, owner, owners, token, outputs, tokens, half, h_stride, 2 * half, columns, height, width, depth
    )
    # rounded, as if it had been written
    gate = (gate.to(tl.float32) + product).to(gate.dtype).to(tl.float32)
    product = _own_product(
        h + columns,
        b + half,
        owner,
        owners,
        token,
        outputs,
        tokens,
        half,
        h_stride,
        2 * half,
        columns,
        height,
        width,
        depth,
    )
    up = (up.to(tl.float32) + product).to(up.dtype).to(tl.float32)
    tl.store(target + row * half + outputs[None, :], gate * tl.sigmoid(gate) * up, mask=inside)


def add_product(
    h: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor,
    owner: torch.Tensor,
    owners: torch.Tensor,
    ends: Sequence[int],
) -> torch.Tensor:
    """Return `output` [tokens, out] plus the products of `h` [tokens, parts * columns] and `b` [columns, out], for each
    token in the columns whose entry in `owners` [columns] is its own in `owner` [at least tokens].

    `h`, `b` and `output`: bf16 or fp16; rows of `h` and `output` may lie apart. The sum is contiguous: in place, if
    `output` is. `ends`: of the parts in `out`, three at most.
    """
    tokens, (columns, out) = len(output), b.shape
    assert len(h) == tokens <= len(owner)
    assert h.stride(1) == output.stride(1) == 1
    total = output if output.is_contiguous() else output.new_empty(output.shape)
    first, second = (*ends[:-1], out, out)[:2]
    rows = triton.cdiv(tokens, HEIGHT)
    width = WIDE if rows * triton.cdiv(out, WIDE) >= 2 * MULTIPROCESSORS else NARROW
    tiles = sum(triton.cdiv(size, width) for size in (first, second - first, out - second))
    _add_product[(tiles, rows)](  # pyright: ignore[reportIndexIssue]  # what Triton's decorator makes of it
        h,
        b,
        output,
        total,
        owner,
        owners,
        tokens,
        first,
        second,
        out,
        h.stride(0),
        output.stride(0),
        total.stride(0),
        columns=columns,
        height=HEIGHT,
        width=width,
        depth=_depth(columns),
    )
    return total


def add_product_and_gate(
    h: torch.Tensor, b: torch.Tensor, output: torch.Tensor, owner: torch.Tensor, owners: torch.Tensor
) -> torch.Tensor:
    """Return silu(g) * u [tokens, out / 2], where g and u are the halves of what `add_product` would return: an MLP's
    next step, with which the sum is neither written nor read again."""
    tokens, (columns, out) = len(output), b.shape
    assert len(h) == tokens <= len(owner)
    assert h.stride(1) == output.stride(1) == 1
    result = output.new_empty(tokens, out // 2)
    _gate[(triton.cdiv(out // 2, NARROW), triton.cdiv(tokens, HEIGHT))](  # pyright: ignore[reportIndexIssue]  # as above
        h,
        b,
        output,
        result,
        owner,
        owners,
        tokens,
        out // 2,
        h.stride(0),
        output.stride(0),
        columns=columns,
        height=HEIGHT,
        width=NARROW,
        depth=_depth(columns),
    )
    return result


def _depth(columns: int) -> int:
    return min(DEPTH, max(16, triton.next_power_of_2(columns)))
