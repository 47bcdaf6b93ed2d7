"""The task's score as a reward, beside the coach's scores (recipe/dag/coach/reward.py).

Invariant: only this reward function reads the answers, after the episode, and nothing of them reaches a prompt. A
submission that cannot be scored is a failure and earns 0; answers that cannot be read are a UserError.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from recipe.dag import Episode, UserError
from recipe.dsbench.score import Score, Truth, score_submission, truth_of
from verl_dag.envs.workspace_env import fetched_files

SUBMISSION = "submission.csv"
REPORTED = ("accuracy", "f1", "roc_auc", "log_loss", "rmse_pct_of_range", "rmse_pct_of_iqr")
"""Metrics whose means over successes are reported; those in the unit of one task's target have none."""


async def task_score(
    episode: Episode,
    *,
    weight: float = 1.0,
    solved_at: float = 0.5,
    data_root: str | None = None,
    agents: Sequence[str] = ("engineer", "modeler", "analyst"),
) -> dict[str, list[float]]:
    """Return `weight` times the submission's quality for each action of `agents`: 0 for chance or a failure, 1 for
    perfect. Every action is paid, because with `stat_unit: call` a reward reaches no other action.

    Sets `episode.outcome`: 1.0 if the quality is at least `solved_at`, else 0.0. `episode.info` gets `task/success` and
    `task/quality`, both also by data type; `task/fair/<metric>` (`Score.fair_metrics`), with chance for a failure; the
    metrics of REPORTED after a success; and the reason of a failure. data_root: the folder that
    `extra_info.answer_file` is relative to; None: that of the data set. Raises UserError for a sample without usable
    answers.
    """
    score = await asyncio.to_thread(_score, episode, data_root)
    episode.outcome = float(score.quality >= solved_at)
    measured = {"success": float(score.success), "quality": score.quality}
    for name, value in measured.items():
        episode.info |= {f"task/{name}": value, f"task/{name}/{score.data_type}": value}
    episode.info |= {f"task/fair/{name}": value for name, value in score.fair_metrics.items()}
    episode.info["final_reward"] = score.quality
    episode.info |= {
        f"task/{name}": score.metrics[name] for name in REPORTED if score.success and name in score.metrics
    }
    if score.reason:
        episode.info["task/failure"] = score.reason
    return {agent: [weight * score.quality] * len(episode.calls_of(agent)) for agent in agents}


def _score(episode: Episode, data_root: str | None) -> Score:
    sample, extra = episode.sample, episode.sample.get("extra_info") or {}
    metadata = extra.get("metadata") or {}
    truth = _truth(
        extra.get("answer_csv"),
        extra.get("answer_file"),
        data_root or sample.get("data_folder") or "",
        metadata if isinstance(metadata, str) else json.dumps(metadata, sort_keys=True),
        str(extra.get("task") or sample["prompt"][-1]["content"]),
    )
    submission = fetched_files(episode).get(SUBMISSION)
    if submission is None:
        return score_submission(None, truth, missing=_refusal(episode) or "no submission")
    return score_submission(submission.encode(), truth)


@lru_cache(maxsize=256)
def _truth(answer_csv: str | None, answer_file: str | None, root: str, metadata: str, text: str) -> Truth:
    if answer_csv is not None:
        return truth_of(answer_csv.encode(), metadata, text, where="extra_info.answer_csv")
    if not answer_file:
        raise UserError(
            "task_score: a sample has neither extra_info.answer_csv nor answer_file; make the data with prepare.py"
        )
    return truth_of(Path(root).expanduser() / answer_file, metadata, text, where="extra_info.answer_file")


def _refusal(episode: Episode) -> str:
    """Return why the workspace did not hand the submission out, or ""."""
    infos = [call.env_info for call in episode.calls if "refused" in call.env_info]
    return infos[-1]["refused"].get(SUBMISSION, "") if infos else ""
