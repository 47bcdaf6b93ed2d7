"""Which samples a run trains on, and those of each step.

Invariant: the subset is a pure function of (number of samples, size, seed), and the samples of step s one of (samples,
seed, s): epochs are seeded permutations, and steps cut the endless sequence of epochs into pieces of equal size.
Resuming therefore needs no loader state, and where a run stops does not change the order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recipe.dag.core.errors import UserError
from recipe.dag.types.values import look_up

UNKNOWN = "unknown"
"""The stratum of samples without a value of the key."""
_ORDER = 1 << 32
"""Tells the random stream of a step's order from those of the strata."""
Pick = tuple[int, int]
"""(index of a sample, epoch)"""


class Sampler:
    """Chooses the samples of each step: all of them, once per epoch."""

    def __init__(self, size: int, batch_size: int, seed: int):
        if batch_size < 1:
            raise UserError(f"data.train_batch_size={batch_size} must be at least 1")
        if size < 1:
            raise UserError("data.train_max_samples=0 leaves no sample to train on; -1 uses all samples")
        self.size, self.batch_size, self.seed = size, batch_size, seed

    def batch(self, step: int) -> list[Pick]:
        """Return (index, epoch) of each sample of `step`, which is counted from 1."""
        return _cut(self.size, (step - 1) * self.batch_size, self.batch_size, [self.seed])


class StratifiedSampler:
    """Chooses equally many samples of a stratum in every step.

    strata: the stratum of each sample. A step has max(1, round(batch_size * share)) samples of each stratum, and the
    largest stratum has the rest. Each stratum has its own epochs, so a small one may be ahead. Raises UserError if a
    step has no room for all strata.
    """

    def __init__(self, strata: Sequence[str], batch_size: int, seed: int):
        members: dict[str, list[int]] = {}
        for index, stratum in enumerate(strata):
            members.setdefault(stratum, []).append(index)
        self.batch_size, self.seed = batch_size, seed
        self._members = dict(sorted(members.items()))
        self.counts = self._counts(len(strata))
        """Samples of each stratum in a step."""

    def _counts(self, total: int) -> dict[str, int]:
        sizes = {stratum: len(indices) for stratum, indices in self._members.items()}
        largest = max(sizes, key=lambda stratum: sizes[stratum])
        counts = {stratum: max(1, round(self.batch_size * size / total)) for stratum, size in sizes.items()}
        counts[largest] = self.batch_size - sum(count for stratum, count in counts.items() if stratum != largest)
        if counts[largest] < 1:
            raise UserError(
                f"data.stratify_key: {len(sizes)} strata do not fit into data.train_batch_size={self.batch_size}; use "
                "a larger batch or a key with fewer values"
            )
        return counts

    def batch(self, step: int) -> list[Pick]:
        """Return (index, epoch) of each sample of `step`, which is counted from 1."""
        picks: list[Pick] = []
        for number, (stratum, indices) in enumerate(self._members.items()):
            count = self.counts[stratum]
            chosen = _cut(len(indices), (step - 1) * count, count, [self.seed, number])
            picks += [(indices[position], epoch) for position, epoch in chosen]
        # in random order: dynamic sampling takes the first groups of a step
        order = np.random.default_rng([self.seed, _ORDER, step]).permutation(len(picks))
        return [picks[position] for position in order]


def _cut(size: int, first: int, count: int, seed: list[int]) -> list[Pick]:
    """Return (position, epoch) of `count` picks from the `first` on, in the sequence of an epoch's permutations."""
    epochs = {pick // size for pick in range(first, first + count)}
    order = {epoch: np.random.default_rng([*seed, epoch]).permutation(size) for epoch in epochs}
    return [(int(order[pick // size][pick % size]), pick // size) for pick in range(first, first + count)]


def sampler_of(
    samples: Sequence[Mapping[str, Any]], batch_size: int, seed: int, stratify_key: str | None
) -> Sampler | StratifiedSampler:
    """Return the sampler of a run; a plain one if fewer than two values of `stratify_key` occur. Raises UserError."""
    plain = Sampler(len(samples), batch_size, seed)
    if stratify_key is None:
        return plain
    values = [look_up(sample, stratify_key) for sample in samples]
    if all(value is None for value in values):
        raise UserError(f"data.stratify_key={stratify_key}: no sample has it; name a key such as extra_info.data_type")
    strata = [UNKNOWN if value in (None, "") else str(value) for value in values]
    if len(set(strata) - {UNKNOWN}) < 2:
        return plain
    return StratifiedSampler(strata, batch_size, seed)


def describe(sampler: Sampler | StratifiedSampler) -> str:
    """Return a line about the strata of each step; "" for a plain sampler."""
    if not isinstance(sampler, StratifiedSampler):
        return ""
    counts = ", ".join(f"{count} {stratum}" for stratum, count in sampler.counts.items())
    return f"samples of each step: {counts}"


def choose_subset(total: int, size: int, seed: int) -> list[int]:
    """Return `size` of the indices below `total`, in ascending order; all if `size` is not smaller. The same as
    `np.random.seed(seed); np.random.choice(total, size, replace=False)`, with which published subsets were drawn."""
    if size >= total:
        return list(range(total))
    return sorted(int(index) for index in np.random.RandomState(seed).choice(total, size, replace=False))


def shared_prompts(train: Sequence[Mapping[str, Any]], val: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of validation samples whose prompt is also a training prompt, ignoring spacing and case.

    Empty if all training prompts are equal: then the prompt is not what distinguishes samples, as in a game.
    """
    prompts = Counter(_prompt_key(sample) for sample in train)
    if len(prompts) == 1 and len(train) > 1:
        return []
    return [index for index, sample in enumerate(val) if _prompt_key(sample) in prompts]


def conflicting_labels(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return pairs of indices of samples that ask the same but have different ground truths: each such sample with the
    first one that asks it. Empty if all prompts are equal, as in a game."""
    first: dict[str, int] = {}
    conflicts = []
    for index, sample in enumerate(samples):
        asked = [sample["extra_info"].get("files"), *map(sample.get, ("prompt", "tools_kwargs", "data_folder"))]
        earlier = first.setdefault(json.dumps(asked, sort_keys=True, default=str), index)
        if samples[earlier]["ground_truth"].strip() != sample["ground_truth"].strip():
            conflicts.append((earlier, index))
    return conflicts if len({_prompt_key(sample) for sample in samples}) > 1 else []


def _prompt_key(sample: Mapping[str, Any]) -> str:
    return "\0".join("".join(str(message["content"]).lower().split()) for message in sample["prompt"])
