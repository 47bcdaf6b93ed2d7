"""Rows, and with them micro-batches, are those of verl, selected faster."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from recipe.dag.policy.jagged import chunk_rows, index_select_tensor_dict, select_rows

LENGTHS = (5, 40, 3, 17, 17, 60, 1, 22)


def batch(**options) -> TensorDict:
    def jagged(first: int) -> torch.Tensor:
        return torch.nested.as_nested_tensor(
            [torch.arange(first * index, first * index + length) for index, length in enumerate(LENGTHS)],
            layout=torch.jagged,
        )

    columns = {"input_ids": jagged(100), "loss_mask": jagged(7), "temperature": torch.arange(8.0)}
    data = TensorDict(columns, batch_size=[len(LENGTHS)])
    tu.assign_non_tensor(data, sp_size=1, global_batch_size=8.0, **options)
    return data


@pytest.mark.parametrize(
    "options",
    [
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64},
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 1000},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    ],
    ids=str,
)
def test_rows_columns_and_padded_widths_are_those_of_verl(options, monkeypatch):
    monkeypatch.setattr(tu, "index_select_tensor_dict", index_select_tensor_dict)
    expected, indices = prepare_micro_batches(batch(**options))
    monkeypatch.setattr(tu, "index_select_tensor_dict", select_rows)
    monkeypatch.setattr(tu, "chunk_tensordict", chunk_rows)
    found, positions = prepare_micro_batches(batch(**options))
    assert positions == indices and len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert set(ours.keys()) == set(theirs.keys()) and ours.batch_size == theirs.batch_size
        assert torch.equal(ours["temperature"], theirs["temperature"])
        assert tu.get(ours, "global_batch_size") == 8.0
        for name in ("input_ids", "loss_mask"):
            assert torch.equal(ours[name].values(), theirs[name].values())
            padded = [part[name].to_padded_tensor(0) for part in (ours, theirs)]
            assert torch.equal(*padded), "losses pad rows to the longest of a micro-batch"


def test_a_column_with_two_axes_is_cut_by_verl():
    data = batch()
    rows = [torch.arange(3.0 * length).reshape(length, 3) for length in LENGTHS]
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    chosen = [5, 0, 6]
    part = select_rows(data, torch.tensor(chosen))
    for row, index in zip(part["position_ids"].unbind(), chosen, strict=True):
        assert torch.equal(row, rows[index])


def test_parts_are_consecutive_rows_equally_many():
    parts = chunk_rows(batch(), 4)
    lengths = [[len(row) for row in part["input_ids"].unbind()] for part in parts]
    assert lengths == [list(LENGTHS[first : first + 2]) for first in range(0, 8, 2)]
    assert torch.equal(torch.cat([part["loss_mask"].values() for part in parts]), batch()["loss_mask"].values())
    assert torch.equal(torch.cat([part["temperature"] for part in parts]), batch()["temperature"])
    with pytest.raises(AssertionError, match="8 rows in 3 parts"):
        chunk_rows(batch(), 3)
