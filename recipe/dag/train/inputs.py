"""The inputs of a training run or an evaluation: models, problems, and the checkpoint to resume from.

Invariant: all of them are read and checked before Ray is joined or started and before anything is written.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError
from recipe.dag.core.interrupt import Interruption
from recipe.dag.policy.shards import SNAPSHOT, check_loadable
from recipe.dag.report.phases import announce
from recipe.dag.reward.gold import check_gold
from recipe.dag.train import checkpoint
from recipe.dag.train.data import Columns, Sample, load_samples
from recipe.dag.train.fingerprint import Fingerprint, fingerprint_of
from recipe.dag.train.given_rows import check_given
from recipe.dag.train.models import ModelPaths, find_models
from recipe.dag.train.resume import Start, find_start, needed_to_resume, report_evaluated, resume_from, way_back
from recipe.dag.train.rollout import episodes_at_once
from recipe.dag.train.sampling import choose_subset, conflicting_labels, shared_prompts
from recipe.dag.workflow.schema import Workflow

Samples = list[Sample]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads before it starts processes."""

    models: ModelPaths
    train: Samples
    val: Samples
    fingerprint: Fingerprint
    start: Start | None = None
    """The checkpoint to resume from; None for a new run and for an evaluation."""
    subset: dict[str, Any] | None = None
    """The choice of training samples, as `subset.json` records it; None if the run uses all."""


async def training_inputs(config: DictConfig, workflow: Workflow, platform: str, stop: Interruption) -> Inputs | None:
    """Read what a training run needs; None if its checkpoint is already at the last step. Raises UserError."""
    models = await asyncio.to_thread(find_models, workflow)
    train, val = await _samples(config, workflow, "train"), await _samples(config, workflow, "val")
    check_given(train, workflow.algorithm, "data.train_files")
    train, subset = _subset_of(config, train)
    _check_overlap(config, train, val)
    fingerprint = await asyncio.to_thread(fingerprint_of, config, workflow, models, train, val)
    start = find_start(config, workflow, fingerprint, samples=len(train), platform=platform)
    stop.way_back = way_back(config, start, 0 if start is None else start.step)
    if start is not None and (done := _complete(config, start)):
        print(f"the checkpoint is at {done} to continue")
        return None
    if start is not None:
        check_loadable(start.folder, checkpoint.read(start.folder), config, workflow)
        announce("checking the files of the checkpoint")
        await asyncio.to_thread(checkpoint.check_intact, start.folder, resume_from, needed_to_resume)
    return Inputs(models, train, val, fingerprint, start, subset)


def _complete(config: DictConfig, start: Start) -> str:
    """Return why nothing is left to train, and what to raise; "" if something is."""
    steps, tokens = int(config.trainer.total_training_steps), config.trainer.total_training_tokens
    if start.step >= steps:
        return f"step {start.step} of {steps}: nothing to do; raise trainer.total_training_steps"
    if tokens is not None and start.sampled >= tokens:
        return f"{start.sampled:,} of {tokens:,} sampled tokens: nothing to do; raise trainer.total_training_tokens"
    return ""


async def evaluation_inputs(config: DictConfig, workflow: Workflow, platform: str, evaluated: Path | None) -> Inputs:
    """Read what an evaluation needs. Raises UserError."""
    models = await asyncio.to_thread(find_models, workflow)
    if not config.data.val_files:
        raise UserError("data.val_files: an evaluation needs problems; pass --data FILE, or data.val_files=FILE")
    val = await _samples(config, workflow, "val")
    if platform == "cpu":  # the CPU server's cache has a row for each request
        rollout = config.actor_rollout_ref.rollout
        rollout.max_num_seqs = min(rollout.max_num_seqs, episodes_at_once(config), len(val) * config.validation.n)
    fingerprint = await asyncio.to_thread(fingerprint_of, config, workflow, models, [], val)
    if evaluated is not None:
        report_evaluated(evaluated, fingerprint)
        announce("checking the files of the checkpoint")
        await asyncio.to_thread(
            checkpoint.check_intact,
            evaluated,
            lambda other: f"pass --checkpoint {other}",
            lambda name: "/actor/huggingface/" in name or f"/{SNAPSHOT}/" in name,
        )
    return Inputs(models, [], val, fingerprint)


async def _samples(config: DictConfig, workflow: Workflow, kind: Literal["train", "val"]) -> Samples:
    """Return the problems of `data.train_files` or `data.val_files`, none without files. Raises UserError."""
    data, what = config.data, f"data.{kind}_files"
    if not data[f"{kind}_files"]:
        return []
    limit = data[f"{kind}_max_samples"]
    if kind == "val" and config.validation.max_samples is not None:
        limit = config.validation.max_samples
    columns = Columns(
        data.input_key,
        data.label_key,
        data[f"{kind}_split"],
        data[f"{kind}_name"],
        data.answer_format,
        data.add_prompt_suffix or "",
    )
    samples = load_samples(data[f"{kind}_files"], max_samples=limit, what=what, columns=columns)
    _report_conflicts(samples, what)
    await check_gold(workflow, samples, what)
    return samples


def _subset_of(config: DictConfig, samples: Samples) -> tuple[Samples, dict[str, Any] | None]:
    """Return the samples of `data.subset`, and what `subset.json` records about them; None without a subset."""
    subset, files = config.data.subset, config.data.train_files
    if subset.size is None:
        return samples, None
    indices = choose_subset(len(samples), int(subset.size), int(subset.seed))
    record = {
        "original_dataset": [str(name) for name in ([files] if isinstance(files, str) else files)],
        "total_available": len(samples),
        "sampled_size": len(indices),
        "max_samples": int(subset.size),
        "seed": int(subset.seed),
        "random_indices": indices,
    }
    return [samples[index] for index in indices], record


def _check_overlap(config: DictConfig, train: Samples, val: Samples) -> None:
    """Report validation problems that are also training problems. Raises UserError for `data.val_overlap=refuse`."""
    if config.data.val_overlap == "allow" or not (shared := shared_prompts(train, val)):
        return
    example = " ".join(str(val[shared[0]]["prompt"][-1]["content"]).split())[:80]
    text = (
        f"data.val_files: {len(shared)} of {len(val)} prompts are also training prompts, the first: '{example}'; val/ "
        "metrics are not about unseen problems"
    )
    if config.data.val_overlap == "refuse":
        raise UserError(f"{text}; remove them from one of the files, or pass data.val_overlap=warn")
    print(f"warning: {text} (data.val_overlap=allow silences this)", file=sys.stderr)


def _report_conflicts(samples: Samples, what: str) -> None:
    """Print a warning about samples that have the same prompt and different ground truths."""
    if not (pairs := conflicting_labels(samples)):
        return
    first, other = pairs[0]
    prompt = " ".join(str(samples[first]["prompt"][-1]["content"]).split())[:80]
    truths = " and ".join(repr(samples[index]["ground_truth"][:40]) for index in (first, other))
    rows = ", ".join(f"{number + 1} (as {earlier + 1})" for earlier, number in pairs[:10])
    print(
        f"warning: {what}: {len(pairs)} of {len(samples)} rows repeat a prompt with another ground truth, such as "
        f"'{prompt}' with {truths}; correct or remove them: row {rows}{', ...' if len(pairs) > 10 else ''}",
        file=sys.stderr,
    )
