"""Rows of the workflow `two_policies` (conftest.py), and random ones."""

from __future__ import annotations

import torch

from recipe.dag.types.row import Row


def row(
    reward: float = 0.0, *, policy: str = "a", uid: str = "u", episode=0, temperature: float = 1.0, mask=(1, 0, 1)
) -> Row:
    ids = list(range(5, 5 + len(mask)))
    log_probs = [-float(i + 1) * bit for i, bit in enumerate(mask)]
    response = ([3, 4], ids, list(mask), log_probs, reward)
    return Row(uid, episode, "left", "l", 0, policy, 0, *response, temperature=temperature)


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
        rows.append(Row(f"u{index}", 0, "solver", "solve", 0, "main", 0, ids(2, 6), response, mask, log_probs, 0.0))
    return rows
