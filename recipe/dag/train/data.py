"""Parquet files to samples, and which samples a step sees.

Invariant: the samples of step s are a pure function of (seed, s): each epoch is one seeded permutation, and steps cut the
endless run of epochs into equal pieces. So resuming needs no loader state, and stopping anywhere changes no order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from recipe.dag.errors import UserError

Sample = dict[str, Any]
"""prompt (messages), ground_truth, data_source, extra_info."""


def load_samples(files: str | Sequence[str], *, max_samples: int = -1, what: str = "data.train_files") -> list[Sample]:
    """Read verl's parquet schema. Raises UserError for a file that is missing, unreadable, empty or lacks a column."""
    samples: list[Sample] = []
    for name in [files] if isinstance(files, str) else list(files):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{what}: {name} does not exist; make it with a script of preprocess/")
        try:
            table = pq.read_table(path)
        except Exception as error:
            raise UserError(f"{what}: {name} is no readable parquet file ({str(error).splitlines()[0]})") from error
        missing = [column for column in ("prompt", "reward_model") if column not in table.column_names]
        if missing:
            raise UserError(f"{what}: {name} lacks the column {', '.join(missing)}; it has {', '.join(table.column_names)}")
        samples += [_sample(row, f"{what}: {name} row {i}") for i, row in enumerate(table.to_pylist())]
    if not samples:
        raise UserError(f"{what}: {files} holds no rows")
    return samples if max_samples is None or max_samples < 0 else samples[:max_samples]


def _sample(row: dict[str, Any], where: str) -> Sample:
    prompt, reward_model = row["prompt"], row["reward_model"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not prompt or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        raise UserError(f"{where}: column prompt must be a list of {{role, content}} messages")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if truth is None:
        raise UserError(f"{where}: reward_model.ground_truth is missing")
    extra = {key: value for key, value in (row.get("extra_info") or {}).items() if value is not None}
    return {
        "prompt": [dict(message) for message in prompt],
        "ground_truth": truth if isinstance(truth, str) else json.dumps(truth),
        "data_source": row.get("data_source") or "",
        "extra_info": extra,
    }


class Sampler:
    """Indices of each step's samples."""

    def __init__(self, size: int, batch_size: int, seed: int):
        if batch_size < 1:
            raise UserError(f"data.train_batch_size={batch_size} must be at least 1")
        self.size, self.batch_size, self.seed = size, batch_size, seed

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(index, epoch) for each sample of `step`, counted from 1."""
        first = (step - 1) * self.batch_size
        epochs = {position // self.size for position in range(first, first + self.batch_size)}
        order = {epoch: np.random.default_rng([self.seed, epoch]).permutation(self.size) for epoch in epochs}
        return [
            (int(order[position // self.size][position % self.size]), position // self.size)
            for position in range(first, first + self.batch_size)
        ]
