"""What a run's processes consume together, and the budgets over it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.remote.connect import ApiSpec, Remotes, transport_of
from recipe.dag.remote.ledger import COUNTS, Account, BudgetError, BudgetFault, Ledger, left_of, spent_in
from recipe.dag.types.model import Budget, Price
from recipe.dag.types.record import Episode
from tests.remote.openai_server import OpenAIServer, scattered

ROOT = Path(__file__).parents[3]


def counts(**known: float) -> dict[str, float]:
    return dict.fromkeys(COUNTS, 0.0) | known


def flow(world, server, *, episode: dict | None = None, agents: list[dict] | None = None, **api):
    options = {
        "base_url": server.url,
        "model": "test",
        "max_wait_s": 0.02,
        "price": {"input": 1e6, "output": 1e6},
        **api,
    }
    spec = {"on_user_error": "mask", "retries": 0, **(episode or {})}
    policies = {"main": {"api": options}}
    return world.workflow([{"id": "solve"}], agents=agents, policies=policies, episode=spec)


def play(world, workflow, *, n: int, spent: dict | None = None) -> tuple[list[Episode | BaseException], Remotes]:
    """Play n episodes at once; return them, or what they raised, and the policies, whose counts can still be read."""

    async def main():
        remotes = Remotes(workflow, spent)
        runner = EpisodeRunner(workflow, remotes.endpoints, {}, seed=0)
        played = (runner.run(world.sample(), f"u{k}", 0, step=0) for k in range(n))
        ended = await asyncio.gather(*played, return_exceptions=True)
        for endpoint in remotes.endpoints.values():
            await transport_of(endpoint).close()
        return ended, remotes

    return asyncio.run(main())


def test_a_budget_is_spent_by_the_first_limit_that_is_reached():
    budget = Budget(usd=2.0, calls=10, tokens=100)
    assert spent_in(budget, counts(cost=1.9, calls=9, prompt_tokens=60, completion_tokens=39)) is None
    assert spent_in(budget, counts(cost=2.1)) == "its budget of 2 usd is spent (2.1 usd)"
    assert spent_in(budget, counts(calls=10)) == "its budget of 10 calls is spent (10 calls)"
    assert (
        spent_in(budget, counts(prompt_tokens=60, completion_tokens=40))
        == "its budget of 100 tokens is spent (100 tokens)"
    )
    assert left_of(budget, counts(cost=0.5, calls=9, prompt_tokens=10)) == pytest.approx(0.1)
    assert left_of(budget, counts(cost=5.0)) == 0.0


def test_a_budget_of_calls_is_kept_exactly_and_the_run_ends(world):
    with OpenAIServer() as server:
        ended, remotes = play(world, flow(world, server, budget={"calls": 5}), n=12)
    assert len(server.requests) == 5 and remotes.counts()["main"]["calls"] == 5
    errors = [error for error in ended if not isinstance(error, Episode)]
    assert len(errors) == 7 and all(isinstance(error, BudgetError) for error in errors)
    message = (
        "policy main: its budget of 5 calls is spent (5 calls); raise policies.main.api.budget, and the same command"
    )
    assert str(errors[0]).startswith(message)


@pytest.mark.parametrize(("budget", "sent"), [({"usd": 35.0}, 4), ({"tokens": 21}, 3)])
def test_money_and_tokens_exceed_their_budget_by_what_is_in_flight(world, budget, sent):
    async def pause():
        await asyncio.sleep(0.01)

    with OpenAIServer(before=pause) as server:
        workflow = flow(world, server, budget=budget, on_budget="skip", max_concurrent=1)
        play(world, workflow, n=9)
        assert len(server.requests) == sent  # 10 tokens and 10 usd each
    with OpenAIServer(before=pause) as server:
        play(world, flow(world, server, budget=budget, on_budget="skip", max_concurrent=3), n=20)
        assert sent <= len(server.requests) <= sent + 2


def test_repeated_requests_count_as_calls(world):
    with OpenAIServer(faults={0: "500", 1: "500"}) as server:
        ended, remotes = play(world, flow(world, server, budget={"calls": 2}, on_budget="skip"), n=1)
    assert len(server.requests) == 2 and remotes.counts()["main"] == counts(calls=2, failed=1)
    (episode,) = ended
    assert isinstance(episode, Episode) and episode.fault is not None and episode.fault["boundary"] == "budget"


def test_with_skip_further_calls_fail_and_are_never_rewarded(world):
    with OpenAIServer() as server:
        ended, remotes = play(world, flow(world, server, budget={"calls": 2}, on_budget="skip"), n=5)
    episodes = [episode for episode in ended if isinstance(episode, Episode)]
    faults = [episode.fault for episode in episodes if episode.fault is not None]
    assert len(episodes) == 5 and len(faults) == 3
    assert {(fault["boundary"], fault["infra"], fault["where"]) for fault in faults} == {
        ("budget", False, "policy main")
    }
    assert all(episode.calls[0].reward is None and episode.outcome is None for episode in episodes)
    metrics = remotes.metrics()
    assert (metrics["policy/main/api/failed"], metrics["policy/main/api/budget_left"]) == (3, 0.0)
    assert remotes.metrics()["policy/main/api/failed"] == 0  # since the last time


def test_metrics_count_failures_and_openings(world):
    with OpenAIServer(faults=scattered({"500": 1.0}, seed=0)) as server:
        workflow = flow(world, server, retries=1, failures_to_open=2, probe_after_s=30.0)
        _, remotes = play(world, workflow, n=2)
    assert remotes.metrics() == {"policy/main/api/failed": 2, "policy/main/api/breaker": 1}


def test_a_resumed_run_goes_on_counting_and_a_larger_budget_goes_on(world):
    earlier = {"main": counts(calls=5, cost=50.0), "gone": counts(calls=9)}
    with OpenAIServer() as server:
        workflow = flow(world, server, budget={"calls": 5})
        with pytest.raises(UserError, match="policy main: its budget of 5 calls is spent .5 calls.; raise"):
            asyncio.run(Remotes(workflow, earlier).check())
        workflow = flow(world, server, budget={"calls": 7})
        _, remotes = play(world, workflow, n=9, spent=earlier)
        assert len(server.requests) == 2 and remotes.counts()["main"]["calls"] == 7
        assert "gone" not in remotes.counts()
        asyncio.run(Remotes(flow(world, server, budget={"calls": 5}, on_budget="skip"), earlier).check())


def test_answers_from_the_cache_cost_nothing_even_when_the_budget_is_spent(world):
    api = {"cache": str(world.path / "a.sqlite"), "budget": {"calls": 1}}
    with OpenAIServer() as server:
        workflow = flow(world, server, agents=[{"sampling": {"temperature": 0.0}}], **api)
        for _ in range(2):
            ended, remotes = play(world, workflow, n=1, spent=None)
            assert isinstance(ended[0], Episode)
        ended, remotes = play(world, workflow, n=2, spent={"main": counts(calls=1)})
    assert len(server.requests) == 1 and all(isinstance(episode, Episode) for episode in ended)
    assert remotes.counts()["main"] == counts(calls=1, cache_hits=2)


def test_a_request_that_no_budget_admits_says_nothing_about_the_server(world):
    with OpenAIServer() as server:
        _, remotes = play(world, flow(world, server, budget={"calls": 1}, failures_to_open=1), n=6)
        transport = transport_of(remotes.endpoints["main"])
        assert not transport.breaker.is_open and transport.breaker.opened == 0


def test_threads_share_a_ledger_without_losing_a_count():
    ledger, admitted = Ledger(), []

    def work() -> None:
        for _ in range(300):
            admitted.append(ledger.admit("main", Budget(calls=500)))
            ledger.add("main", prompt_tokens=2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert admitted.count(None) == 500 and ledger.counts("main") == counts(calls=500, prompt_tokens=2400)


def test_processes_share_a_ledger_and_its_budget(tmp_path):
    code = """
import sys
from recipe.dag.remote.ledger import Ledger
from recipe.dag.types.model import Budget
ledger = Ledger(sys.argv[1])
print(sum(ledger.admit("main", Budget(calls=1000)) is None for _ in range(500)))
"""
    ledger = Ledger()
    ledger.add("main", calls=100)
    ledger.share(tmp_path / "ledger.sqlite")
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(ledger.path)], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert sum(int(process.communicate()[0]) for process in started) == 900
    assert ledger.counts("main")["calls"] == 1000


def test_the_specs_of_other_processes_count_in_the_same_ledger(world):
    with OpenAIServer() as server:
        remotes = Remotes(flow(world, server, budget={"calls": 3}))
        remotes.ledger.add("main", calls=1)
        specs = remotes.shared()
        assert remotes.shared() == specs  # also if it is asked again
        account = transport_of(specs["main"].share(0, 2).endpoint()).account
        account.admit("policy main")
        account.charge(5, 5)
        assert remotes.counts()["main"] == counts(calls=2, prompt_tokens=5, completion_tokens=5, cost=10.0)
        account.admit("policy main")
        with pytest.raises(BudgetError):
            account.admit("policy main")
        folder = Path(str(remotes.ledger.path)).parent
        account.ledger.close()
        asyncio.run(remotes.close())
    assert not folder.exists()


def test_an_account_without_price_counts_tokens_and_no_cost():
    account = Account("main", Ledger(), price=None, budget=Budget(tokens=10), stops=False)
    account.charge(6, 4)
    with pytest.raises(BudgetFault, match="10 tokens"):
        account.admit("policy main")
    assert account.ledger.counts("main")["cost"] == 0.0
    assert Price(input=1.0, output=10.0).of(1000, 100) == pytest.approx(0.002)


def test_a_spec_travels_with_the_path_of_the_ledger_alone(world):
    import pickle

    with OpenAIServer() as server:
        remotes = Remotes(flow(world, server))
        spec = pickle.loads(pickle.dumps(remotes.shared()["main"]))
        assert isinstance(spec, ApiSpec) and spec.ledger == remotes.ledger.path
        asyncio.run(remotes.close())
