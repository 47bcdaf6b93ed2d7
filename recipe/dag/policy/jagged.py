"""Jagged columns, [rows, tokens], and what losses need of them, without a wait for the GPU.

Invariant: nothing here reads a value on a GPU. Offsets become positions there, and lengths, on which shapes depend,
come from host memory. While the host waits for a value, it gives the GPU no work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import index_select_tensor_dict


def offsets_of(jagged: Tensor) -> Tensor:
    """Return where the rows of a jagged tensor start and end, [rows + 1]."""
    return jagged.offsets()  # pyright: ignore[reportAttributeAccessIssue]  # a method of nested tensors only


def make(values: Tensor, offsets: Tensor, lengths: tuple[int, int]) -> Tensor:
    """Return the jagged tensor of `values` [tokens] whose rows have these `lengths`: the shortest and the longest.

    Without them, torch reads the offsets as soon as rows are padded."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=lengths[0], max_seqlen=lengths[1])


def lengths_of(jagged: Any) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest row, which a tensor that was made here knows."""
    return jagged._get_min_seqlen(), jagged._get_max_seqlen()


def select_rows(batch: TensorDict, indices: Iterable[int | Tensor]) -> TensorDict:
    """Return the rows of a batch in host memory at the `indices`: verl's `index_select_tensor_dict`, which takes every
    column of all rows apart each time, while the GPU waits."""
    chosen = torch.tensor([int(i) for i in indices])
    # positions of multimodal rows are [rows, axes, tokens]
    columns = [(name, column) for name, column in batch.items() if isinstance(column, Tensor) and column.is_nested]
    names = [name for name, column in columns if column.dim() == 2]
    selected = index_select_tensor_dict(batch.exclude(*names), chosen)
    for name in names:
        column = cast(Tensor, batch[name])
        starts, lengths = offsets_of(column)[chosen], offsets_of(column).diff()[chosen]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        index = torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(lengths)
        # with the longest length: without it, torch would pad a row to the length of all rows together
        selected[name] = make(column.values()[index], offsets, (int(lengths.min()), int(lengths.max())))
    return selected


def chunk_rows(batch: TensorDict, chunks: int) -> list[TensorDict]:
    """Return so many parts of a batch, with as many rows each: verl's `chunk_tensordict`, which takes columns apart,
    too."""
    size, rest = divmod(len(batch), chunks)
    assert not rest, f"{len(batch)} rows in {chunks} parts"
    return [select_rows(batch, range(start, start + size)) for start in range(0, len(batch), size)]


def register() -> None:
    """Make verl cut batches by this module in this process."""
    # the names by which verl calls its own
    setattr(tu, "index_select_tensor_dict", select_rows)  # noqa: B010
    setattr(tu, "chunk_tensordict", chunk_rows)  # noqa: B010


def pinned_to(device: torch.device, column: Tensor) -> Tensor:
    """Return a tensor in host memory on the GPU, where it is copied after the work that the GPU has already."""
    if column.is_nested:  # torch's own copy of a jagged tensor waits for that of the offsets
        values, offsets = (pinned_to(device, part) for part in (column.values(), offsets_of(column)))
        return make(values, offsets, lengths_of(column))
    return column.pin_memory().to(device, non_blocking=True)


def positions_before(ids: Tensor, responses: Tensor) -> Tensor:
    """Return the position, among the packed tokens `ids`, of the token before each response token, [response tokens].

    Both arguments are jagged, [rows, tokens]; a row of `responses` covers the last tokens of that of `ids`."""
    ends, starts = offsets_of(responses), offsets_of(responses)[:-1]
    total = responses.values().shape[0]
    # a row and its response end together, so this moves an index into the responses to the packed tokens
    shifts = (offsets_of(ids)[1:] - ends[1:] - 1).repeat_interleave(ends[1:] - starts, output_size=total)
    return torch.arange(total, device=shifts.device) + shifts


def responses_of(output: Tensor, responses: Tensor) -> Tensor:
    """Return the model's `output` for each response token, jagged like `responses`. The output at a token is about the
    next one."""
    values = output.values().index_select(0, positions_before(output, responses))
    return make(values, offsets_of(responses), lengths_of(responses))


def padded_responses(output: Tensor, data: Any) -> Tensor:
    """Return the same as [rows, longest response], padded with zeros: verl's `no_padding_2_padding`, which reads the
    offsets row by row."""
    values, responses = output.values(), data["response_mask"]
    lengths = offsets_of(responses).diff().unsqueeze(1)
    steps = torch.arange(lengths_of(responses)[1], device=values.device)
    index = offsets_of(output)[1:].unsqueeze(1) - lengths - 1 + steps
    rows = values.index_select(0, index.flatten().clamp(max=len(values) - 1)).view(index.shape)
    return torch.where(steps < lengths, rows, 0.0)
