"""The bias monitor: correlation, gap, the alarm, and a state that survives a restart."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.coach.bias import BiasMonitor, Sums, correlation, divergence, observe
from recipe.dag.types.record import Episode

UNIT = st.floats(0.0, 1.0)


def episode(score: float | None, outcome: float | None, kind: str | None = None, **keys) -> Episode:
    info = {} if score is None else {"coach/modeler/mean": score, "coach/modeler/count": 1, "coach/modeler/failed": 0}
    extra = {} if kind is None else {"data_type": kind}
    return Episode("u", 0, {"prompt": [], "extra_info": extra}, outcome=outcome, info=info, **keys)


def step(rng: random.Random, score: float, outcome: float, kind: str, n: int = 40) -> list[Episode]:
    """Noisy scores around `score`; solved with probability `outcome`."""
    return [episode(min(max(rng.gauss(score, 0.15), 0.0), 1.0), float(rng.random() < outcome), kind) for _ in range(n)]


@given(st.lists(st.tuples(UNIT, UNIT), min_size=2, max_size=30))
def test_the_correlation_is_pearsons(pairs):
    scores, outcomes = ([pair[k] for pair in pairs] for k in (0, 1))
    (sums,) = observe(episode(*pair) for pair in pairs).values()
    found = correlation(sums)
    means = [math.fsum(values) / len(values) for values in (scores, outcomes)]
    spreads = [
        math.fsum((value - mean) ** 2 for value in values)
        for values, mean in zip((scores, outcomes), means, strict=True)
    ]
    if min(spreads) / len(pairs) < 1e-6:
        return
    both = math.fsum((one - means[0]) * (other - means[1]) for one, other in pairs)
    assert found == pytest.approx(both / math.sqrt(spreads[0] * spreads[1]), abs=1e-6)


def test_scores_that_do_not_vary_correlate_with_nothing():
    assert correlation(Sums()) is None
    assert correlation(next(iter(observe([episode(0.5, 0.0), episode(0.5, 1.0)]).values()))) is None


def test_metrics_are_by_agent_and_data_type():
    monitor = BiasMonitor(3)
    metrics = monitor.update([episode(0.8, 1.0, "regression"), episode(0.2, 0.0, "regression"), episode(0.4, 0.0)])
    known = {"score": 0.5, "outcome": 0.5, "gap": 0.0, "correlation": 1.0}
    unknown = {"score": 0.4, "outcome": 0.0, "gap": 0.4}
    expected = {f"coach_bias/modeler/regression/{key}": value for key, value in known.items()}
    expected |= {f"coach_bias/modeler/all/{key}": value for key, value in unknown.items()}
    assert metrics == pytest.approx(expected)


def test_episodes_without_a_score_an_outcome_or_an_end_do_not_count():
    lost = episode(0.9, 1.0, fault={"boundary": "model"})
    assert BiasMonitor(3).update([episode(None, 1.0), episode(0.9, None), lost]) == {}
    assert BiasMonitor(0).update([episode(0.9, 1.0)]) == {}


def test_the_window_forgets():
    monitor = BiasMonitor(2)
    for score in (0.0, 0.0, 0.0, 1.0, 1.0):
        metrics = monitor.update([episode(score, 0.0)])
    assert metrics["coach_bias/modeler/all/gap"] == 1.0


def run(trend, steps: int = 20, window: int = 10, seed: int = 0) -> list[tuple[int, str]]:
    """`trend(step)` -> {data type: (score, outcome)}; return the alarms with their steps."""
    rng, monitor, alarms = random.Random(seed), BiasMonitor(window), []
    for number in range(steps):
        episodes = [e for kind, values in trend(number).items() for e in step(rng, *values, kind)]
        monitor.update(episodes)
        alarms += [(number, line) for line in monitor.alarms]
    return alarms


def test_a_score_that_rises_without_its_outcome_sets_off_one_alarm():
    """Kinder to regression, strict to classification, which improves."""
    alarms = run(lambda k: {"regression": (0.4 + 0.02 * k, 0.5), "classification": (0.4 + 0.02 * k, 0.3 + 0.02 * k)})
    assert len(alarms) == 1
    number, line = alarms[0]
    assert number >= 4 and "the score of modeler on regression rose by 0." in line


def test_a_score_that_rises_while_its_outcome_falls_sets_off_the_alarm():
    assert run(lambda k: {"regression": (0.4 + 0.01 * k, 0.6 - 0.01 * k)})


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_learning_set_off_none(seed):
    assert run(lambda k: {"a": (0.5, 0.5), "b": (0.3 + 0.02 * k, 0.3 + 0.02 * k)}, seed=seed) == []


def test_an_alarm_that_lasts_comes_once_per_window():
    alarms = [number for number, _ in run(lambda k: {"a": (0.02 * k, 0.5)}, steps=40, window=10)]
    assert len(alarms) >= 3 and min(b - a for a, b in zip(alarms, alarms[1:], strict=False)) >= 10


def test_the_state_survives_a_restart():
    whole, parts = BiasMonitor(4), BiasMonitor(4)
    for number in range(12):
        episodes = step(random.Random(number), 0.3 + 0.05 * number, 0.4, "a", n=20)
        parts.restore(json.loads(json.dumps(parts.state())))
        assert parts.update(episodes) == whole.update(episodes) and parts.alarms == whole.alarms
    fresh = BiasMonitor(4)
    fresh.restore({})
    assert fresh.state() == BiasMonitor(4).state()


def pairs(score: float, outcome: float, spread: tuple[float, float] = (0.0, 0.0)) -> Sums:
    """The sums of four episodes, two of them above and two below the means."""
    signs = (1, -1, 1, -1)
    (sums,) = observe(episode(score + s * spread[0], outcome + s * spread[1]) for s in signs).values()
    return sums


@pytest.mark.parametrize(
    ("rises", "spread", "diverges"),
    [
        ((0.06, 0.0), (0.0, 0.0), True),
        ((0.04, 0.0), (0.0, 0.0), False),
        ((0.06, 0.014), (0.0, 0.0), True),
        ((0.06, 0.016), (0.0, 0.0), False),
        ((0.06, -0.1), (0.0, 0.0), True),
        # two standard errors of a difference between halves of eight episodes are the spread itself
        ((0.1, 0.0), (0.09, 0.0), True),
        ((0.1, 0.0), (0.11, 0.0), False),
        ((0.1, 0.0), (0.0, 0.09), True),
        ((0.1, 0.0), (0.0, 0.11), False),
        ((0.1, 0.0), (0.09, 0.09), True),
        ((0.1, 0.0), (0.09, -0.09), False),
        ((0.1, 0.0), (0.11, 0.11), False),
    ],
)
def test_a_divergence_is_more_than_chance(rises, spread, diverges):
    steps = [pairs(0.4, 0.5, spread)] * 2 + [pairs(0.4 + rises[0], 0.5 + rises[1], spread)] * 2
    assert divergence(steps) == (pytest.approx(rises) if diverges else None)


def test_too_few_steps_are_no_trend():
    assert divergence([Sums(9, 9 * k / 3, 0.0, 9 * (k / 3) ** 2) for k in range(3)]) is None
