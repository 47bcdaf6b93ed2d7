"""Sampling options: what they may be, and which of them the trainer's log-probs do not know."""

from __future__ import annotations

import pytest

GOOD = """\
dag_id: demo
agents:
  - {name: solver, policy: main, sampling: {temperature: 0.7, top_p: 1.0}, validation: {top_p: 0.9, min_p: 0.1}}
  - {name: judge, policy: fixed, sampling: {top_p: 0.9, top_k: 20}}
policies: {main: {model: {path: m}}, fixed: {model: {path: m}, frozen: true}}
nodes:
  - {id: solve, agent: solver}
  - {id: judge, agent: judge, after: solve}
  - {id: score, reward: rewards.py:score, after: judge}
"""


def test_frozen_policies_and_validation_may_sample_as_they_like(load_text):
    assert load_text(GOOD).warnings == ()


@pytest.mark.parametrize(
    "option",
    [
        "top_p: 0.9",
        "top_k: 20",
        "min_p: 0.1",
        "repetition_penalty: 1.1",
        "presence_penalty: 1",
        "frequency_penalty: -1",
    ],
)
def test_a_trained_policy_that_samples_otherwise_than_its_log_probs_say_is_warned_of(load_text, option):
    (warning,) = load_text(GOOD.replace("top_p: 1.0", option)).warnings
    name = option.partition(":")[0]
    assert warning.training_only and warning.where == f"agents[0].sampling.{name}" and warning.line == 3
    assert f"ignore {name}" in warning.message and "importance ratio" in warning.message
    assert "move it to `validation`" in warning.message


def test_stop_strings_are_one_or_several(load_text):
    one = load_text(GOOD.replace("top_p: 1.0", "stop: '</code>'")).agents[0]
    assert one.sampling.stop == ("</code>",) and one.validation.stop is None
    assert load_text(GOOD.replace("top_p: 1.0", "stop: [a, b]")).agents[0].sampling.stop == ("a", "b")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("stop: §3", "expected a list, got 3"),
        ("stop: [§'']", "must not be empty"),
        ("min_p: §2", "a number of at most 1, got 2"),
        ("presence_penalty: §3", "a number of at most 2, got 3"),
        ("§min: 0.1", "did you mean `min_p`?"),
    ],
)
def test_one_mistake_is_one_problem_at_its_place(edit, message, expect_one_problem):
    expect_one_problem(GOOD, (("top_p: 1.0", edit),), message)
