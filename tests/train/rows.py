"""Rows of the workflow `two_policies` (conftest.py), and random ones."""

from __future__ import annotations

from typing import Any

import torch

from recipe.dag.types.row import Row
from tests.rows import build_row


def row(reward: float = 0.0, *, mask=(1, 0, 1), **keys: Any) -> Row:
    log_probs = [-float(i + 1) * bit for i, bit in enumerate(mask)]
    response = range(5, 5 + len(mask))
    keys = {"policy": "a", "agent": "left", "node": "l"} | keys
    return build_row(reward, mask=mask, prompt=[3, 4], response=response, log_probs=log_probs, **keys)


def some_rows(count: int = 6) -> list[Row]:
    """Return rows of random tokens and lengths, the first of whose response tokens is sampled."""
    draw = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, 96, (size,), generator=draw).tolist()

    rows = []
    for index in range(count):
        response = ids(3, 9)
        mask = [1, *torch.randint(0, 2, (len(response) - 1,), generator=draw).tolist()]
        log_probs = [-1.0 * bit for bit in mask]
        rows.append(build_row(uid=f"u{index}", mask=mask, prompt=ids(2, 6), response=response, log_probs=log_probs))
    return rows
