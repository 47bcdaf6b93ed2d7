"""What each kind of value takes, in hydra's spelling, and what a wrong one is told."""

from __future__ import annotations

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.settings.kinds import (
    ABOVE_ONE,
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    PART,
    PATH,
    PATHS,
    POSITIVE,
    SHARE,
    TEXT,
    TRUTH,
    names,
    one_of,
    or_null,
    whole,
)
from recipe.marft.flags import FLAGS

KINDS = [
    (COUNT, {"1": 1, "1_000": 1000, " 7 ": 7}, ["0", "-4", "1.0", "2e3"]),
    (whole(0), {"0": 0}, ["-1"]),
    (whole(1, -1), {"-1": -1, "5": 5}, ["0", "-2"]),
    (or_null(COUNT), {"null": None, "2": 2}, ["0"]),
    (FINITE, {"-1.5": -1.5, "1e-6": 1e-6, "3": 3}, ["-inf", "1e999", "1" + "0" * 400]),
    (POSITIVE, {"1e-6": 1e-6}, ["0", "-1"]),
    (NOT_NEGATIVE, {"0": 0}, ["-0.1"]),
    (SHARE, {"0": 0, "1": 1, ".5": 0.5}, ["1.01", "-1"]),
    (PART, {"1.0": 1.0}, ["0", "1.1"]),
    (ABOVE_ONE, {"3.0": 3.0}, ["1"]),
    (TRUTH, {"True": True, "false": False, "TRUE": True}, ["yes", "on", "'true'"]),
    (
        PATH,
        {"a/b.yaml": "a/b.yaml", "'x=y'": "x=y", "'7'": "7", "${oc.env:HOME}/x": "${oc.env:HOME}/x"},
        ["True", "' '", "1e3"],
    ),
    (TEXT, {"a b": "a b"}, ["true"]),
    (PATHS, {"a": "a", "[a,b]": ["a", "b"]}, ["[a,null]", "[[a]]"]),
    (one_of("a", "b"), {"a": "a", "'b'": "b"}, ["c", "A"]),
    (names("a", "b"), {"[a,b]": ["a", "b"]}, ["a", "[c]", "[[a]]"]),
]
NEVER = ["", "null", "nan", "[]", "{}", "{a: 1}", "1,2", "range(1,3)", "[1", "x=y", "'"]
"""What no kind takes, unless it says so."""
CASES = [(kind, text, value) for kind, right, _ in KINDS for text, value in right.items()]
WRONG = [(kind, text) for kind, right, wrong in KINDS for text in [*wrong, *NEVER] if text not in right]


@pytest.mark.parametrize(("kind", "text", "value"), CASES, ids=[f"{k.takes}: {t}" for k, t, _ in CASES])
def test_a_value_that_a_kind_takes(kind, text, value):
    given = kind.read("some.flag", text)
    assert (given.value, type(given.value), given.text) == (value, type(value), text)


@pytest.mark.parametrize(("kind", "text"), WRONG, ids=[f"{k.takes}: {t[:20]}" for k, t in WRONG])
def test_a_value_that_a_kind_does_not_take(kind, text):
    with pytest.raises(UserError) as error:
        kind.read("some.flag", text)
    assert str(error.value) == f"some.flag={' '.join(text.split())}: it takes {kind.takes}"


def test_every_flag_with_a_meaning_has_a_kind_that_is_told():
    refused = {flag for flag, (kind, _) in FLAGS.items() if kind.accepts(object())}
    assert refused == {
        *("dag.custom_pipeline_fn", "dag.backend_threshold", "dag.env_enable", "dag.environment_path"),
        *(f"actor_rollout_ref.rollout.agent.{key}" for key in ("agent_name", "num_workers", "custom_async_server")),
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    }
