"""One training run or evaluation, after its configuration has been checked.

Invariant: models and problems are checked before Ray is joined or started, and nothing is written before the run is
known to fit. When a run fails, its processes are killed before Ray is shut down.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recipe.dag.core.errors import UserError
from recipe.dag.episode.listed_tools import with_listed_tools
from recipe.dag.report.phases import PHASES, announce
from recipe.dag.report.run_record import write_run_record
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from recipe.dag.core.interrupt import Interruption
    from recipe.dag.policy.cluster import Cluster
    from recipe.dag.policy.policy import PolicyRuntime
    from recipe.dag.train.fingerprint import Fingerprint
    from recipe.dag.train.models import ModelPaths
    from recipe.dag.train.resume import Start
    from recipe.dag.train.setup import Resources

Samples = list[dict[str, Any]]


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


async def run(
    config: DictConfig,
    workflow: Workflow,
    *,
    platform: str,
    evaluate_only: bool,
    stop: Interruption,
    cluster: Cluster | None,
    evaluated: Path | None = None,
) -> None:
    """Train or evaluate `workflow`. `evaluated`: the checkpoint whose weights are evaluated, if any. `cluster`: None if
    all policies are APIs."""
    announce("reading the models and the problems")
    if evaluate_only:
        inputs = await _evaluation_inputs(config, workflow, platform, evaluated)
    else:
        inputs = await _training_inputs(config, workflow, platform, stop)
    if inputs is None:
        return
    workflow = await with_listed_tools(workflow)
    if not workflow.local_policies():
        await _evaluate_apis(config, workflow, inputs, platform)
        return

    assert cluster is not None  # there are local policies
    announce("loading verl")
    from recipe.dag.policy.shared_folders import check_folders
    from recipe.dag.train import setup
    from recipe.dag.train.resume import spent_before

    cluster.join()
    stop.install()  # ray.init replaced its handler
    spent = spent_before(config, inputs.start, evaluate_only=evaluate_only)
    resources = await setup.Resources.open(config, workflow, [*inputs.train, *inputs.val], spent=spent)
    policies: dict[str, PolicyRuntime] = {}
    try:
        written = None if evaluate_only else Path(config.trainer.default_local_dir)
        check_folders(written, inputs.models.folders(), cluster.nodes())
        _write_record(config, workflow, inputs, platform, evaluated)
        cluster.start()
        stop.install()
        await setup.start_policies(config, workflow, inputs.models, policies, platform=platform)
        await resources.start_processes(
            config, workflow, policies, episodes=_largest_batch(config, inputs, evaluate_only)
        )
        if evaluate_only:
            await _evaluate(config, workflow, policies, resources, inputs)
        else:
            await _train(config, workflow, policies, resources, inputs, platform, stop)
    except BaseException as error:
        # killed workers end the threads that wait for them, before Ray is shut down under those threads
        for policy in policies.values():
            policy.kill()
        pointer = await asyncio.to_thread(cluster.pointer) if isinstance(error, Exception) else ""
        if pointer and isinstance(error, UserError):
            raise UserError(f"{error} ({pointer})") from error
        if pointer:
            error.add_note(pointer)
        raise
    finally:
        await resources.close()


async def _evaluate_apis(config: DictConfig, workflow: Workflow, inputs: Inputs, platform: str) -> None:
    """Evaluate a workflow whose policies are all APIs: without Ray, verl and torch."""
    from recipe.dag.train.resume import spent_before
    from recipe.dag.train.setup import Resources

    spent = spent_before(config, None, evaluate_only=True)
    resources = await Resources.open(config, workflow, inputs.val, spent=spent)
    try:
        _write_record(config, workflow, inputs, platform, None)
        await _evaluate(config, workflow, {}, resources, inputs)
    finally:
        await resources.close()


async def _training_inputs(config: DictConfig, workflow: Workflow, platform: str, stop: Interruption) -> Inputs | None:
    """Read what a training run needs; None if its checkpoint is already at the last step. Raises UserError."""
    from recipe.dag.policy.shards import check_loadable
    from recipe.dag.train import checkpoint
    from recipe.dag.train.fingerprint import fingerprint_of
    from recipe.dag.train.models import find_models
    from recipe.dag.train.resume import find_start, needed_to_resume, resume_from, way_back

    models = await asyncio.to_thread(find_models, workflow)
    train, val = await _train_samples(config, workflow), await _val_samples(config, workflow)
    train, subset = _subset_of(config, train)
    _check_overlap(config, train, val)
    fingerprint = await asyncio.to_thread(fingerprint_of, config, workflow, models, train, val)
    start = find_start(config, workflow, fingerprint, samples=len(train), platform=platform)
    stop.way_back = way_back(config, start, 0 if start is None else start.step)
    total = int(config.trainer.total_training_steps)
    if start is not None and start.step >= total:
        print(
            f"the checkpoint is at step {start.step} of {total}: nothing to do; "
            "raise trainer.total_training_steps to continue"
        )
        return None
    if start is not None:
        check_loadable(start.folder, checkpoint.read(start.folder), config, workflow)
        announce("checking the files of the checkpoint")
        await asyncio.to_thread(checkpoint.check_intact, start.folder, resume_from, needed_to_resume)
    return Inputs(models, train, val, fingerprint, start, subset)


async def _evaluation_inputs(config: DictConfig, workflow: Workflow, platform: str, evaluated: Path | None) -> Inputs:
    """Read what an evaluation needs. Raises UserError."""
    from recipe.dag.train import checkpoint
    from recipe.dag.train.fingerprint import fingerprint_of
    from recipe.dag.train.models import find_models
    from recipe.dag.train.resume import report_evaluated

    models = await asyncio.to_thread(find_models, workflow)
    if not config.data.val_files:
        raise UserError("data.val_files: an evaluation needs problems; pass --data FILE, or data.val_files=FILE")
    val = await _val_samples(config, workflow)
    if platform == "cpu":  # the CPU server's cache has a row for each request
        rollout = config.actor_rollout_ref.rollout
        rollout.max_num_seqs = min(rollout.max_num_seqs, config.rollout.max_in_flight, len(val) * config.validation.n)
    fingerprint = await asyncio.to_thread(fingerprint_of, config, workflow, models, [], val)
    if evaluated is not None:
        report_evaluated(evaluated, fingerprint)
        announce("checking the files of the checkpoint")
        await asyncio.to_thread(
            checkpoint.check_intact,
            evaluated,
            lambda other: f"pass --checkpoint {other}",
            lambda name: "/actor/huggingface/" in name,
        )
    return Inputs(models, [], val, fingerprint)


async def _train_samples(config: DictConfig, workflow: Workflow) -> Samples:
    from recipe.dag.reward.gold import check_gold
    from recipe.dag.train.data import load_samples

    data = config.data
    samples = load_samples(data.train_files, max_samples=data.train_max_samples, columns=_columns(data))
    _report_conflicts(samples, "data.train_files")
    await check_gold(workflow, samples, "data.train_files")
    return samples


def _subset_of(config: DictConfig, samples: Samples) -> tuple[Samples, dict[str, Any] | None]:
    """Return the samples of `data.subset`, and what `subset.json` records about them; None without a subset."""
    from recipe.dag.train.sampling import choose_subset

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
    from recipe.dag.train.sampling import shared_prompts

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
    from recipe.dag.train.sampling import conflicting_labels

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


async def _val_samples(config: DictConfig, workflow: Workflow) -> Samples:
    from recipe.dag.reward.gold import check_gold
    from recipe.dag.train.data import load_samples

    data = config.data
    if not data.val_files:
        return []
    limit = config.validation.max_samples if config.validation.max_samples is not None else data.val_max_samples
    columns = replace(_columns(data), split=data.val_split, name=data.val_name)
    samples = load_samples(data.val_files, max_samples=limit, what="data.val_files", columns=columns)
    _report_conflicts(samples, "data.val_files")
    await check_gold(workflow, samples, "data.val_files")
    return samples


def _columns(data: DictConfig):
    from recipe.dag.train.data import Columns

    return Columns(
        data.input_key,
        data.label_key,
        data.train_split,
        data.train_name,
        data.answer_format,
        data.add_prompt_suffix or "",
    )


def _write_record(
    config: DictConfig, workflow: Workflow, inputs: Inputs, platform: str, evaluated: Path | None
) -> None:
    from omegaconf import OmegaConf

    from recipe.dag.train.resume import launch_facts

    write_run_record(
        config.output_dir,
        config=cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)),  # the keys of a DictConfig
        workflow=workflow,
        fingerprint=inputs.fingerprint.items,
        launch=launch_facts(config, platform=platform, start=inputs.start, evaluated=evaluated),
        subset=inputs.subset,
    )


def _largest_batch(config: DictConfig, inputs: Inputs, evaluate_only: bool) -> int:
    """Return the largest number of episodes that the run plays at once."""
    validation = len(inputs.val) * config.validation.n
    if evaluate_only:
        return validation
    return max(validation, config.data.train_batch_size * config.actor_rollout_ref.rollout.n)


async def _evaluate(
    config: DictConfig, workflow: Workflow, policies: dict[str, PolicyRuntime], resources: Resources, inputs: Inputs
) -> None:
    from recipe.dag.app.evaluate import describe_evaluation
    from recipe.dag.train.evaluation import evaluate

    PHASES.ready()
    started = time.monotonic()
    runner = resources.runner(config, workflow, policies)
    about = describe_evaluation(config, workflow, max_programs=resources.max_programs)
    summary = await evaluate(config, runner, workflow, inputs.val, inputs.fingerprint.items, about)
    counts = f"{summary['num_samples']} episodes, {summary['num_errors']} errors"
    seconds = time.monotonic() - started
    accuracy = "nothing graded"
    if summary["num_graded"]:
        accuracy = f"accuracy {summary['final_accuracy']:.4f}"
        if summary["num_graded"] < summary["num_samples"]:
            accuracy += f" of {summary['num_graded']} graded"
        if summary["num_errors"]:
            accuracy += f" ({summary['final_accuracy_all']:.4f} with errors as not solved)"
    if summary["num_errors"]:
        counts += f" (most often: {summary['most_frequent_error']})"
    pass_at = summary.get("pass@k", {})
    pass_rates = "".join(f", pass@{k} {pass_at[k]:.4f}" for k in dict.fromkeys([*pass_at][:1] + [*pass_at][-1:]))
    print(f"{accuracy}, {counts}{pass_rates}, {seconds:.0f} s: {config.output_dir}/summary.json")


async def _train(
    config: DictConfig,
    workflow: Workflow,
    policies: dict[str, PolicyRuntime],
    resources: Resources,
    inputs: Inputs,
    platform: str,
    stop: Interruption,
) -> None:
    from recipe.dag.train import setup, trainer

    mixing = await asyncio.to_thread(setup.open_mixing, config, workflow, inputs.models, policies, platform=platform)
    loop = trainer.Trainer(
        config,
        workflow,
        policies,
        resources,
        train_samples=inputs.train,
        val_samples=inputs.val,
        mixing=mixing,
        start=inputs.start,
        fingerprint=inputs.fingerprint.items,
        stop=stop,
    )
    await loop.train()
