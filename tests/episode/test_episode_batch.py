from __future__ import annotations

import asyncio
import gc

import pytest

from recipe.dag.core import tasks
from recipe.dag.core.errors import HookFault, ModelServerFault, UserError
from recipe.dag.core.tasks import guarded, invoke, limited, together
from recipe.dag.episode.batch import run_batch


def samples(world, count: int):
    return [(world.sample(f"q{k}"), f"u{k}") for k in range(count)]


def one_node(world, **episode):
    return world.workflow([{"id": "a"}], episode=episode)


def test_a_thousand_episodes_are_in_flight_and_come_back_in_order(world):
    async def main():
        everyone = asyncio.Barrier(1000)

        async def script(prompt, sampling, request):
            await everyone.wait()  # Deadlocks unless all are in flight at once.
            return request

        runner = world.runner(one_node(world), world.Client(script))
        episodes = await run_batch(runner, samples(world, 125), 8, step=0, max_in_flight=1000)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return episodes

    episodes = asyncio.run(main())
    assert [(e.uid, e.index) for e in episodes] == [(f"u{k}", i) for k in range(125) for i in range(8)]
    assert [e.calls[0].text for e in episodes] == [f"u{k}-{i}-agent0" for k in range(125) for i in range(8)]


def test_no_more_than_allowed_are_in_flight(world):
    async def main():
        inside, most = 0, 0

        async def script(prompt, sampling, request):
            nonlocal inside, most
            inside, most = inside + 1, max(most, inside + 1)
            await asyncio.sleep(0)
            inside -= 1
            return "x"

        await run_batch(
            world.runner(one_node(world), world.Client(script)), samples(world, 10), 5, step=0, max_in_flight=7
        )
        return most

    assert asyncio.run(main()) == 7


def test_a_slow_episode_delays_no_other(world):
    async def main():
        others = asyncio.Event()
        done = []

        async def script(prompt, sampling, request):
            if request == "u0-0-agent0":
                await others.wait()  # Set only when all others have ended.
            return "x"

        def on_done(episode):
            done.append((episode.uid, episode.index))
            if len(done) == 99:
                others.set()

        runner = world.runner(one_node(world), world.Client(script))
        await run_batch(runner, samples(world, 25), 4, step=0, max_in_flight=2, on_done=on_done)
        return done

    done = asyncio.run(main())
    assert len(done) == 100 and done[-1] == ("u0", 0)


def test_an_episode_that_fails_stops_no_other(world):
    def script(prompt, sampling, request):
        if request.startswith("u1-"):
            raise ModelServerFault("down")
        return "x"

    runner = world.runner(one_node(world), world.Client(script))
    episodes = asyncio.run(run_batch(runner, samples(world, 3), 2, step=0))
    assert [bool(episode.fault) for episode in episodes] == [False, False, True, True, False, False]


def test_a_batch_without_one_good_episode_says_why(world):
    def script(prompt, sampling, request):
        raise ModelServerFault("503" if request.startswith("u0") else "504\nlong")

    runner = world.runner(one_node(world), world.Client(script))
    with pytest.raises(UserError) as raised:
        asyncio.run(run_batch(runner, samples(world, 3), 2, step=4))
    assert str(raised.value) == (
        "step 4: all 6 episodes failed; most often: model fault in node a, policy main: 504 long (4 of 6)"
    )


def test_an_empty_batch_is_empty(world):
    assert asyncio.run(run_batch(world.runner(one_node(world)), [], 4, step=0)) == []


def test_fail_ends_the_batch_at_once_and_leaves_nothing_running(world):
    async def main():
        def script(prompt, sampling, request):
            if request.startswith("u3-"):
                raise ModelServerFault("down")
            return asyncio.Event().wait()

        runner = world.runner(one_node(world, on_failure="fail"), world.Client(script))
        with pytest.raises(UserError, match="episode u3-0: model fault"):
            await asyncio.wait_for(run_batch(runner, samples(world, 5), 1, step=0), 20)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_cancelling_leaves_no_task_and_closes_every_env(world):
    env = """
class E:
    alive = 0
    def reset(self):
        E.alive += 1
    def step(self, actions, ground_truth): ...
    async def close(self):
        E.alive -= 1
"""
    flow = world.workflow(
        [{"id": "a", "env": ["env.py:E"]}, {"id": "b", "agent": "agent1"}],
        files={"env.py": env},
    )

    async def main():
        waiting, all_in = 0, asyncio.Event()

        async def script(prompt, sampling, request):
            nonlocal waiting
            waiting += 1
            if waiting == 600:
                all_in.set()
            await asyncio.Event().wait()

        batch = asyncio.create_task(run_batch(world.runner(flow, world.Client(script)), samples(world, 100), 3, step=0))
        await asyncio.wait_for(all_in.wait(), 30)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    from recipe.dag.core.user_code import load_object

    assert load_object("env.py:E", flow.path).alive == 0


def test_a_fault_while_winding_up_does_not_keep_a_cancelled_episode_alive(world):
    code = """
import asyncio
import gc
async def pre_process(tokenizer, prompt_ids, obs):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("stubborn")
"""
    node = {"id": "a", "hooks": "h.py"}
    flow = world.workflow([node], files={"h.py": code})

    async def main():
        run = asyncio.create_task(world.runner(flow).run(world.sample(), "u", 0, step=0))
        await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(run), 20)
        assert run.cancelled() and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_together_raises_the_first_failure_and_waits_for_the_rest():
    async def main():
        log = []

        async def fail():
            await asyncio.sleep(0)
            raise ValueError("first")

        async def linger():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                log.append("wound up")
                raise KeyError("second")

        with pytest.raises(ValueError, match="first"):
            await together([linger(), fail(), linger()])
        assert log == ["wound up"] * 2
        assert asyncio.current_task().cancelling() == 0
        assert await together([asyncio.sleep(0.01, "a"), asyncio.sleep(0, "b")]) == ["a", "b"]
        assert await together([]) == []

    asyncio.run(main())


def test_code_that_catches_every_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(tasks, "CLEAN_UP_S", 0.05)

    async def stubborn():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def main():
        with pytest.raises(HookFault, match="it took longer than 0.05 s"):
            async with limited(0.05, HookFault, "it"):
                await guarded(stubborn())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())  # which waits for all tasks that it knows of
    assert "catches every cancellation" in caplog.text and "stubborn" in caplog.text


def test_code_that_is_cancelled_may_clean_up_once(monkeypatch):
    log = []

    async def tidy():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
            log.append("clean")

    async def main():
        with pytest.raises(HookFault, match="took longer"):
            async with limited(0.05, HookFault, "it"):
                await guarded(tidy())
        assert log == ["clean"]

        async def fails():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await guarded(fails())

        async def exits():
            raise SystemExit(3)

        with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):  # the process goes on
            await guarded(exits())
        assert await guarded(asyncio.sleep(0, "value")) == "value"

    asyncio.run(main())


def test_invoke_takes_functions_of_every_colour():
    async def coroutine(x):
        return x + 1

    class Callable:
        async def __call__(self, x):
            return x + 3

    async def main():
        return [await invoke(coroutine, 1), await invoke(lambda x: x + 2, x=1), await invoke(Callable(), 1)]

    assert asyncio.run(main()) == [2, 3, 4]


def test_the_collector_is_calmed_for_the_rollout_and_left_as_it_was(world):
    gc.unfreeze()  # the process that this one was forked from froze what it had imported
    before, seen = (gc.get_threshold(), gc.get_freeze_count()), []

    async def main():
        async def script(prompt, sampling, request):
            seen.append((gc.get_threshold(), gc.get_freeze_count()))
            return "x"

        runner = world.runner(one_node(world), world.Client(script))
        await asyncio.gather(*(run_batch(runner, samples(world, 1), 1, step=0) for _ in range(2)))
        broken = world.workflow([{"id": "a", "hooks": "h.py"}], files={"h.py": "def pre_process(*_): 1 / 0"})
        with pytest.raises(UserError):
            await run_batch(world.runner(broken, world.Client(script)), samples(world, 1), 1, step=0)

    asyncio.run(main())
    assert len(seen) == 2
    assert all(thresholds[0] > before[0][0] and frozen > before[1] for thresholds, frozen in seen)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
