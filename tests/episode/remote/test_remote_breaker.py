from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.episode.remote.breaker import CircuitBreaker, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(threshold: int = 3) -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(threshold, 5.0, clock), clock


def test_it_opens_after_that_many_failures_in_a_row():
    circuit, _ = breaker()
    circuit.failed()
    circuit.failed()
    circuit.succeeded()
    circuit.failed()
    circuit.failed()
    assert circuit.enter() == 0.0 and not circuit.is_open
    circuit.failed()
    assert circuit.is_open and circuit.enter() == 5.0


def test_one_probe_at_a_time_decides():
    circuit, clock = breaker(1)
    circuit.failed()
    clock.now += 5.0
    assert circuit.enter() == 0.0  # the probe
    assert circuit.enter() > 0.0  # everyone else waits for it
    circuit.failed()
    assert circuit.enter() == 5.0 and circuit.opened == 2
    clock.now += 5.0
    assert circuit.enter() == 0.0
    circuit.succeeded()
    assert circuit.enter() == 0.0 and circuit.enter() == 0.0 and circuit.failures == 0


def test_a_probe_that_is_cancelled_lets_another_one_through():
    circuit, clock = breaker(1)
    circuit.failed()
    clock.now += 5.0
    assert circuit.enter() == 0.0
    circuit.gave_up()
    assert circuit.is_open and circuit.enter() == 0.0


def test_requests_that_were_under_way_do_not_postpone_the_probe():
    circuit, clock = breaker(1)
    circuit.failed()
    clock.now += 4.0
    circuit.failed()
    assert circuit.enter() == 1.0 and circuit.opened == 1


@given(st.lists(st.sampled_from(["fail", "succeed", "enter", "give up", "wait"]), max_size=60))
def test_an_open_circuit_never_lets_two_probes_through(events):
    circuit, clock = breaker(2)
    probes = 0
    for event in events:
        if event == "wait":
            clock.now += 2.0
        elif event == "enter":
            was_open = circuit.is_open
            if circuit.enter() == 0.0 and was_open:
                probes += 1
        else:
            {"fail": circuit.failed, "succeed": circuit.succeeded, "give up": circuit.gave_up}[event]()
            probes = 0
        assert probes <= 1


def test_a_pace_spaces_requests_and_saves_up_nothing():
    clock = Clock()
    pace = Pace(60.0, clock)
    assert [pace.reserve() for _ in range(3)] == [0.0, 1.0, 2.0]
    clock.now += 100.0
    assert [pace.reserve() for _ in range(2)] == [0.0, 1.0]
    assert Pace(None, clock).reserve() == 0.0
