"""Evaluations: validation episodes without training, and the files made of them.

Invariant: nothing here needs Ray, verl or torch, so that an evaluation of models behind servers runs without them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.episode.failure import TooManyFailed
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.report.conversations import write_conversations
from recipe.dag.report.evaluation_log import EvaluationLog
from recipe.dag.report.results import write_results
from recipe.dag.train.rollout import roll_out
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from recipe.dag.train.inputs import Inputs
    from recipe.dag.train.rollout_processes import SpreadRunner


async def evaluate(
    config: DictConfig, runner: EpisodeRunner | SpreadRunner, workflow: Workflow, inputs: Inputs, about: dict[str, Any]
) -> dict:
    """Run `workflow`, the runner's, on the validation samples without training, write its files, and return the
    summary.

    Episodes that an earlier run with the same fingerprint left in the folder are not run again; reward nodes with the
    scope `group` score them with the new ones. about: metadata for `report.conversations_file`. Raises UserError if a
    file cannot be written, and, with all files written, if more episodes failed than the workflow allows.
    """
    folder, n = Path(config.output_dir), config.validation.n
    pairs = [(sample, f"val-{index}") for index, sample in enumerate(inputs.val)]
    with _writing(folder):
        log = EvaluationLog(folder, {**determining(inputs.fingerprint.items), "seed": config.seed})
        log.limit(n)
        if log.finished:
            total = counted(len(pairs) * n, "episode")
            print(f"{log.path}: holds {len(log.finished)} of {total}; the others are run", flush=True)
        failed = None
        try:
            await roll_out(config, runner, pairs, n, 0, validate=True, title="evaluation", log=log)
        except TooManyFailed as error:
            failed = error
        if runner.scores_groups:
            log.rewrite()
        episodes, uids = [*log.finished.values(), *log.added], [uid for _, uid in pairs]
        summary = write_results(folder, episodes, workflow, uids)
        if name := config.report.conversations_file:
            write_conversations(folder / name, episodes, uids, about)
    if failed is not None:
        problem = str(failed).removeprefix("step 0: ")
        raise UserError(
            f"evaluation: {problem}; {folder}/summary.json counts them apart, and the same command repeats them"
        )
    return summary


def determining(items: dict[str, Any]) -> dict[str, Any]:
    """Return what of a fingerprint determines a finished episode: not the number of episodes, nor time limits and
    retries, which decide only whether it finishes, nor the address of a server that has the same model."""
    kept = copy.deepcopy(items)
    kept.get("validation", {}).pop("validation.n", None)
    workflow = kept.get("learned", {}).get("workflow", {})
    for key in ("timeout_s", "call_timeout_s", "generation_timeout_s", "retries"):
        workflow.get("episode", {}).pop(key, None)
    for policy in workflow.get("policies", {}).values():
        (policy.get("api") or {}).pop("base_url", None)
    return kept


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn a file that cannot be written into a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"{error.filename or folder}: cannot be written: {reason}; correct that and run the same command again, "
            "which keeps the finished episodes"
        ) from error
