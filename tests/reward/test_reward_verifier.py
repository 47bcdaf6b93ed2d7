"""No verifier of reasoning-gym evaluates a model's answer as Python."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.reward import verifier, verifier_worker
from recipe.dag.reward.entry_json import to_json
from recipe.dag.reward.grader import GraderPool

factory = pytest.importorskip("reasoning_gym.factory")
OWN = {"basic_arithmetic", "bitwise_arithmetic", "gsm_symbolic", "number_sorting", "propositional_logic", "codeio"}
"""Evaluate what the package wrote; propositional_logic's `parse_expr` is a parser of its own."""


def request(generator: str, prediction: str) -> dict[str, str]:
    entry = factory.create_dataset(generator, size=1, seed=3)[0]
    return {"generator": generator, "options": "{}", "entry": to_json(entry), "prediction": prediction}


def right(generator: str) -> str:
    return str(factory.create_dataset(generator, size=1, seed=3)[0]["answer"])


def attack(file: object) -> str:
    return f"exec(\"open({str(file)!r}, 'w')\")"


@pytest.mark.parametrize("generator", sorted(verifier_worker.LITERALS | verifier_worker.FORMULAS))
def test_an_answer_is_never_run_and_a_right_one_still_counts(generator, tmp_path):
    answer_to = verifier_worker.load()
    file = tmp_path / "made"
    for text in (attack(file), f"[{attack(file)}]", f"1 + {attack(file)}", f"(lambda: {attack(file)})()"):
        assert answer_to(request(generator, text))["score"] < 1
    assert not file.exists()
    wanted = right(generator)
    if generator not in ("countdown", "puzzle24") or verifier_worker.is_formula(wanted):
        assert answer_to(request(generator, wanted))["score"] == 1


def test_a_text_on_which_the_verifier_does_not_end_scores_nothing(monkeypatch):
    hang = (
        "import json, sys, time\nprint(json.dumps({'ready': True}), flush=True)\nsys.stdin.readline(); time.sleep(60)"
    )
    pool = GraderPool(command=[sys.executable, "-c", hang])
    monkeypatch.setattr(verifier, "_shared_pool", lambda: pool)
    assert asyncio.run(verifier.scored({}, "a bomb", timeout_s=0.2)) == 0.0
    assert pool.counters == {"timeouts": 2, "undecided": 1}
    pool.shutdown()


def test_every_generator_that_evaluates_answers_is_known():
    evaluating = {
        name
        for name, (dataset, _) in factory.DATASETS.items()
        if re.search(r"\beval\(|parse_expr|sympify|\bexec\(", inspect.getsource(sys.modules[dataset.__module__]))
    }
    assert evaluating - OWN == verifier_worker.LITERALS | verifier_worker.FORMULAS


@pytest.mark.parametrize("text", ["2*x**3 + C", "sin(x)/2 - log(x)", "-(3 + 4) * 2 / 1.5", "Rational(1, 3)*x"])
def test_formulas_pass(text):
    assert verifier_worker.is_formula(text)


REFUSED = "x.__class__ x[0] 'a' open(x) exec(chr(1)) f(x) sin(x=1) (sin)(x)(x) 1;2".split()


@pytest.mark.parametrize("text", ["", "a if b else c", *REFUSED])
def test_anything_else_does_not(text):
    assert not verifier_worker.is_formula(text)


@given(st.text(max_size=40))
def test_any_text_is_decided(text):
    assert verifier_worker.is_formula(text) in (True, False)
