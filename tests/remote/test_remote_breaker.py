from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.remote.breaker import CircuitBreaker, Entry


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(threshold: int = 3) -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(threshold, 5.0, clock), clock


def entered(circuit: CircuitBreaker) -> Entry:
    entry = circuit.enter()
    assert entry is not None
    return entry


def opened() -> tuple[CircuitBreaker, Clock]:
    """A circuit that one failure has opened."""
    circuit, clock = breaker(1)
    circuit.failed(entered(circuit))
    return circuit, clock


def test_it_opens_after_that_many_failures_in_a_row():
    circuit, _ = breaker()
    for end in (circuit.failed, circuit.failed, circuit.succeeded, circuit.failed, circuit.failed):
        end(entered(circuit))
    assert circuit.wait_s() == 0.0 and not circuit.is_open
    circuit.failed(entered(circuit))
    assert circuit.is_open and circuit.wait_s() == 5.0 and circuit.enter() is None


def test_one_probe_at_a_time_decides():
    circuit, clock = opened()
    clock.now += 5.0
    probe = entered(circuit)
    assert probe.probe and circuit.enter() is None and circuit.wait_s() > 0.0  # everyone else waits for it
    circuit.failed(probe)
    assert circuit.wait_s() == 5.0 and circuit.opened == 2
    clock.now += 5.0
    circuit.succeeded(entered(circuit))
    assert not entered(circuit).probe and not entered(circuit).probe and circuit.failures == 0


def test_a_probe_that_is_cancelled_lets_another_one_through():
    circuit, clock = opened()
    clock.now += 5.0
    circuit.gave_up(entered(circuit))
    assert circuit.is_open and entered(circuit).probe


def test_requests_that_were_under_way_do_not_postpone_the_probe():
    circuit, clock = breaker(1)
    first, second = entered(circuit), entered(circuit)
    circuit.failed(first)
    clock.now += 4.0
    circuit.failed(second)
    assert circuit.wait_s() == 1.0 and circuit.opened == 1


@pytest.mark.parametrize("end", ["succeeded", "failed", "gave_up"])
def test_a_request_of_before_says_nothing_while_a_probe_is_out(end):
    circuit, clock = breaker(1)
    early, last = entered(circuit), entered(circuit)
    circuit.failed(last)
    clock.now += 5.0
    probe = entered(circuit)
    getattr(circuit, end)(early)
    assert circuit.is_open and circuit.enter() is None and not circuit.admits(early)
    circuit.succeeded(probe)
    assert not circuit.is_open


ENDS = ("succeeded", "failed", "gave_up")


@given(st.lists(st.one_of(st.just("enter"), st.just("wait"), st.tuples(st.sampled_from(ENDS), st.integers(0, 9)))))
def test_an_open_circuit_has_one_probe_and_closes_by_it_alone(events):
    circuit, clock = breaker(2)
    under_way: list[Entry] = []
    for event in events:
        if event == "wait":
            clock.now += 2.0
        elif event == "enter":
            may, was_open = circuit.wait_s() == 0.0, circuit.is_open
            entry = circuit.enter()
            assert (entry is not None) == may
            if entry is not None:
                assert entry.probe == was_open
                under_way.append(entry)
        elif under_way:
            end, number = event
            entry, was_open = under_way.pop(number % len(under_way)), circuit.is_open
            getattr(circuit, end)(entry)
            if was_open and not circuit.is_open:
                assert entry.probe and end == "succeeded"
        probes = [entry for entry in under_way if entry.probe]
        assert len(probes) <= 1 and (not probes or circuit.is_open)
    for entry in under_way:
        circuit.gave_up(entry)
    clock.now += 5.0
    assert circuit.enter() is not None  # whatever happened, a request gets through in the end
