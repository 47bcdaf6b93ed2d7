from __future__ import annotations

import pytest

from recipe.dag.report.console import step_line


def test_a_full_line():
    metrics = {
        "episode/accuracy": 0.4375,
        "val/accuracy": 0.5,
        "agent/planner/reward/mean": 0.314,
        "agent/executor/reward/mean": -0.2,
        "agent/planner/reward/max": 1.0,
        "tokens/sampled": 123_456.0,
        "timing/train": 40.0,
        "timing/actor_update": 30.0,
        "timing/sync": 4.2,
        "timing/rollout": 12.34,
        "timing/step": 61.0,
        "faults/total": 2.0,
        "episode/masked": 0.0625,
        "actor/pg_loss": 0.1,
    }
    assert step_line(7, 200, metrics) == (
        "step   7/200 | acc 0.438 val 0.500 | reward planner +0.31 executor -0.20 | 123k tokens | "
        "61 s: rollout 12 train 40 sync 4.2 | 2 faults, 6.2% masked"
    )


def test_what_was_not_measured_is_left_out():
    assert step_line(1, 5, {}) == "step 1/5"
    assert step_line(1, 5, {"val/accuracy": 0.25, "faults/total": 0.0}) == "step 1/5 | val 0.250"


def test_times_stand_alone():
    assert step_line(1, 5, {"timing/rollout": 3.0, "timing/sync": 4.0}) == "step 1/5 | rollout 3.0 sync 4.0"
    assert step_line(1, 5, {"timing/step": 3.0}) == "step 1/5 | 3.0 s"


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (999, "999"), (1234, "1.2k"), (999_999, "1000k"), (2_500_000, "2.5M"), (7e9, "7.0G")]
)
def test_token_counts_are_short(count, shown):
    assert step_line(1, 5, {"tokens/sampled": count}) == f"step 1/5 | {shown} tokens"


def test_faults_are_quoted_and_accuracy_is_given_over_all_episodes_where_some_were_lost():
    metrics = {
        "episode/accuracy": 0.743,
        "episode/accuracy_all": 0.409,
        "val/accuracy": 0.5,
        "val/accuracy_all": 0.5,
        "faults/total": 14.0,
        "episode/masked": 0.45,
        "val/faults/total": 1.0,
        "val/episode/masked": 0.0,
    }
    bug = "rewards.py:12: reward fault in rewards.py:score: returned 1 rewards for the 2 calls of solver (14 of 14)"
    assert step_line(1, 5, metrics, fault=bug, val_fault="model fault: 503 (1 of 1)") == (
        f"step 1/5 | acc 0.743 (all 0.409) val 0.500 | 14 faults, 45.0% masked: {bug} | "
        "val 1 fault, 0.0% masked: model fault: 503 (1 of 1)"
    )


def test_on_gpus_the_share_of_the_peak_and_the_memory_are_shown():
    metrics = {
        "perf/a/mfu": 0.381,
        "perf/b/mfu": 0.3,
        "perf/a/log_prob_mfu": 0.5,
        "perf/a/max_memory_allocated_gb": 61.84,
        "perf/b/max_memory_allocated_gb": 20.0,
    }
    assert step_line(1, 5, metrics) == "step 1/5 | mfu 38% 30%, 61.8 GiB"
    assert step_line(1, 5, {"perf/a/max_memory_allocated_gb": 20.0}) == "step 1/5 | 20.0 GiB"


def test_a_step_that_trained_nothing_says_so():
    assert step_line(1, 5, {"train/rows": 0.0}) == "step 1/5 | NO ROW TRAINED"
    assert step_line(1, 5, {"train/rows": 3.0}) == "step 1/5"
