from __future__ import annotations

import asyncio
import json
import math
import random

import pytest

from recipe.dag.core.errors import (
    EnvFault,
    Fault,
    GraderFault,
    HookFault,
    ModelServerFault,
    RewardFault,
    SandboxFault,
    ToolFault,
    UserError,
)
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.failure import decide, pause_s
from recipe.dag.episode.generation import check_generation
from recipe.dag.episode.rows import rows_of
from recipe.dag.types.record import Generation
from recipe.dag.workflow.schema import EpisodeSpec
from tests.episode.records import episode_from_json

REWARD = """
def score(episode):
    return {name: [len(call.text) + call.response_ids[0] / 7 for call in episode.calls_of(name)]
            for name in {call.agent for call in episode.calls}}
"""


def pipeline(world, **episode):
    """Two agents, the second with a tool loop, two turns, a reward that depends on what was sampled."""
    return world.workflow(
        [
            {"id": "plan"},
            {"id": "solve", "agent": "agent1", "after": ["plan"]},
            {"id": "score", "after": ["solve"], "reward": "reward.py:score"},
        ],
        agents=[{}, {"tools": ["calc"], "tool_loop": {}}],
        files={"reward.py": REWARD},
        episode={"max_turns": 2, **episode},
    )


def sampler(prompt: str, sampling: dict, request: str) -> str:
    """What a model says depends on the prompt and the seed alone."""
    draw = random.Random(f"{prompt} {sampling['seed']}")
    if request.endswith("agent1") and draw.random() < 0.5:
        arguments = json.dumps({"name": "calc", "arguments": {"n": draw.randrange(100)}})
        return f"<tool_call>{arguments}</tool_call>"
    return "w" * draw.randrange(1, 30)


def outcome(episodes) -> dict:
    """What is learnt from each episode, by its place."""
    return {(e.uid, e.index): rows_of([e]) for e in episodes if not e.fault}


def play_batch(world, flow, script, work, *, uids: int = 8, n: int = 8):
    async def main():
        runner = world.runner(flow, world.Client(script), [world.Tool("calc", work)])
        samples = [(world.sample(f"question {k}"), f"u{k}") for k in range(uids)]
        episodes = await run_batch(runner, samples, n, step=1)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return episodes

    return asyncio.run(main())


def calc(arguments, state):
    return str(arguments["n"] ** 2)


def test_a_tenth_of_503s_and_hangs_changes_no_reward(world):
    clean = play_batch(world, pipeline(world), sampler, calc)
    assert not any(episode.faults for episode in clean)
    chance = random.Random(1)

    def shaky(prompt, sampling, request):
        luck = chance.random()
        if luck < 0.05:
            raise ModelServerFault("503 Service Unavailable")
        if luck < 0.10:
            return asyncio.Event().wait()
        return sampler(prompt, sampling, request)

    shaken = play_batch(world, pipeline(world, generation_timeout_s=1, call_timeout_s=60), shaky, calc)
    kept, whole = outcome(shaken), outcome(clean)
    # Three tries, twice: hardly any episode is lost, and those that are not are the same bit by bit.
    assert kept == {place: whole[place] for place in kept} and len(kept) >= 62
    messages = {fault["message"] for episode in shaken for fault in episode.faults}
    assert messages == {"503 Service Unavailable", "an answer took longer than 1 s"}


def test_a_sandbox_killed_mid_run_costs_episodes_but_changes_none(world):
    clean = play_batch(world, pipeline(world), sampler, calc)
    runs = 0

    def dying(arguments, state):
        nonlocal runs
        runs += 1
        if 20 < runs < 90:
            raise SandboxFault("connection refused")
        return calc(arguments, state)

    shaken = play_batch(world, pipeline(world), sampler, dying)
    kept, whole = outcome(shaken), outcome(clean)
    masked = [episode for episode in shaken if episode.fault]
    assert 0 < len(masked) < 64 and any(episode.faults and not episode.fault for episode in shaken)
    assert kept == {place: whole[place] for place in kept}
    assert {episode.fault["boundary"] for episode in masked} == {"sandbox"}
    assert {(e.uid, e.index) for e in masked} == whole.keys() - kept.keys()


def test_a_server_that_never_answers_one_group_masks_that_group_only(world):
    clean = play_batch(world, pipeline(world), sampler, calc, uids=3)

    def deaf(prompt, sampling, request):
        return asyncio.Event().wait() if request.startswith("u1-") else sampler(prompt, sampling, request)

    shaken = play_batch(world, pipeline(world, call_timeout_s=1.0, timeout_s=10), deaf, calc, uids=3)
    assert outcome(shaken) == {place: rows for place, rows in outcome(clean).items() if place[0] != "u1"}
    assert all(episode.attempts == 2 and episode.fault["infra"] for episode in shaken if episode.uid == "u1")


def test_the_episode_has_a_limit_of_its_own(world):
    async def script(prompt, sampling, request):
        await asyncio.sleep(0.05)
        return "x"

    flow = world.workflow([{"id": "a"}], episode={"max_turns": 10_000, "timeout_s": 1, "retries": 0})
    episode = world.play(flow, world.Client(script))
    assert episode.fault["boundary"] == "timeout" and episode.fault["message"] == "the episode took longer than 1 s"
    assert 0 < len(episode.calls) < 10_000 and rows_of([episode]) == []


def test_a_call_has_a_limit_that_covers_its_hooks_and_tools(world):
    code = "import asyncio\nasync def pre_process(t, p, o):\n    await asyncio.Event().wait()"
    node = {"id": "a", "hooks": "h.py"}
    episode = world.play(world.workflow([node], files={"h.py": code}, episode={"call_timeout_s": 0.2}))
    assert (episode.fault["boundary"], episode.fault["where"], episode.attempts) == ("timeout", "node a", 2)


def test_a_failed_branch_stops_its_siblings(world):
    async def main():
        cancelled = asyncio.Event()

        async def script(prompt, sampling, request):
            if request.endswith("0"):
                raise ModelServerFault("down")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        flow = world.workflow([{"id": "a"}, {"id": "b", "agent": "agent1"}], episode={"on_failure": "mask"})
        episode = await world.runner(flow, world.Client(script)).run(world.sample(), "u", 0, step=0)
        assert cancelled.is_set() and asyncio.all_tasks() == {asyncio.current_task()}
        return episode

    episode = asyncio.run(main())
    assert episode.attempts == 1 and [call.node for call in episode.calls] == ["a", "b"]
    # Two tries that were repeated, and the one that ended it.
    assert [fault["message"] for fault in episode.faults] == ["down"] * 3


def test_generations_are_tried_again_with_the_same_seed(world):
    def script(prompt, sampling, request):
        if len(client.requests) < 3:
            raise OSError("reset by peer")
        return "x"

    client = world.Client(script)
    episode = world.play(world.workflow([{"id": "a"}]), client)
    assert episode.fault is None and episode.attempts == 1
    assert [fault["message"] for fault in episode.faults] == ["OSError: reset by peer"] * 2
    assert len({sampling["seed"] for _, _, sampling in client.requests}) == 1


def test_fail_stops_the_run_and_names_the_fault(world):
    def script(prompt, sampling, request):
        raise ModelServerFault("503")

    flow = world.workflow([{"id": "a"}], episode={"on_failure": "fail"})
    with pytest.raises(UserError, match=r"episode u0-0: model fault in node a, policy main: 503 \(on_failure: fail\)"):
        world.play(flow, world.Client(script))


@pytest.mark.parametrize("fault", [ModelServerFault, SandboxFault, GraderFault])
@pytest.mark.parametrize("on_user_error", ["fail", "mask"])
def test_infrastructure_faults_are_retried_as_often_as_the_workflow_says(fault, on_user_error):
    def decision(on_failure: str, *, attempt: int = 1, retries: int = 2) -> str:
        spec = EpisodeSpec(on_failure=on_failure, retries=retries, on_user_error=on_user_error)
        return decide(fault("x"), spec, attempt=attempt)

    assert [decision("retry", attempt=k) for k in (1, 2, 3)] == ["retry", "retry", "mask"]
    assert decision("retry", retries=0) == "mask"
    assert decision("mask") == decision("drop_group") == "mask"
    assert decision("fail") == "fail"


def test_the_pause_doubles_with_each_attempt(monkeypatch):
    monkeypatch.setattr("recipe.dag.episode.failure.BACKOFF_S", 1.0)
    for bound, factor in ((min, 0.5), (max, 1.5)):
        monkeypatch.setattr(random, "uniform", bound)
        assert [pause_s(attempt) for attempt in (1, 2, 3)] == [factor, 2 * factor, 4 * factor]


@pytest.mark.parametrize("fault", [HookFault, EnvFault, RewardFault, ToolFault, Fault])
def test_an_error_of_user_code_ends_the_run_and_is_never_run_again(fault):
    for on_failure in ("retry", "mask", "drop_group", "fail"):
        assert decide(fault("x"), EpisodeSpec(on_failure=on_failure), attempt=1) == "fail"
    for on_failure in ("retry", "mask", "drop_group"):
        spec = EpisodeSpec(on_failure=on_failure, on_user_error="mask")
        assert decide(fault("x"), spec, attempt=1) == "mask"
    assert decide(fault("x", infra=True), EpisodeSpec(), attempt=1) == "retry"


def user_code(world, tmp_path, *, hook: str = "", reward: str = "", compute: str = "", env: str = "", **episode):
    """A workflow in which one kind of user code has a bug in its second line, for the sample u1 alone."""
    for name, body in {"hook": hook, "reward": reward, "compute": compute, "env": env}.items():
        (tmp_path / f"{name}.py").write_text(body)
    options = {"hooks": "hook.py"} if hook else {}
    options |= {"env": ["env.py:E"], "env_pays": True} if env else {}
    nodes = [{"id": "a", **options}]
    if reward:
        nodes.append({"id": "r", "after": ["a"], "reward": "reward.py:score"})
    if compute:
        nodes.append({"id": "c", "after": ["a"], "compute": "compute.py:merge"})
    return world.workflow(nodes, episode=episode)


BUGS = {
    "hook": ("def post_process(t, p, r, context):\n    return {}[context.uid] if context.uid == 'u1' else None", 2),
    "reward": ("def score(episode):\n    return {'agent0': [1.0] * (2 if episode.uid == 'u1' else 1)}", 1),
    "compute": ("def merge(context):\n    return 'x' + (1 if context.uid == 'u1' else '')", 2),
    "env": (
        "class E:\n    def reset(self, sample):\n        self.bad = sample['bad']\n"
        "    def step(self, actions, ground_truth):\n        return None, float('nan') if self.bad else 1.0, True",
        4,
    ),
}
"""The code, and the line that a report names: the one that raised, or where a function with a wrong result begins."""


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_in_user_code_ends_the_run_in_one_line_that_names_file_and_line(world, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    code, line = BUGS[kind]
    flow = user_code(world, tmp_path, **{kind: code})
    with pytest.raises(UserError) as raised:
        asyncio.run(run_batch(world.runner(flow), [(world.sample(bad=k == 1), f"u{k}") for k in range(4)], 1, step=0))
    text = str(raised.value)
    assert text.startswith(f"{kind}.py:{line}: ") and "\n" not in text
    assert "episode u1-0" in text and "on_user_error: mask" in text


@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_in_user_code_costs_its_episodes_alone_where_the_workflow_says_so(world, tmp_path, kind):
    flow = user_code(world, tmp_path, **{kind: BUGS[kind][0]}, on_user_error="mask")
    samples = [(world.sample(bad=k == 1), f"u{k}") for k in range(4)]
    episodes = asyncio.run(run_batch(world.runner(flow), samples, 1, step=0))
    assert [bool(episode.fault) for episode in episodes] == [False, True, False, False]
    assert episodes[1].fault["source"].endswith(f"{kind}.py:{BUGS[kind][1]}") and not episodes[1].fault["infra"]


@pytest.mark.parametrize(
    "error", ["ConnectionResetError('peer')", "TimeoutError()", "OSError(errno.EMFILE, 'too many open files')"]
)
def test_what_the_machine_or_the_network_did_to_user_code_is_retried(world, tmp_path, error):
    code = "import errno\ntries = []\ndef score(episode):\n    tries.append(1)\n    if len(tries) == 1:\n"
    code += f"        raise {error}\n    return {{'agent0': 1.0}}\n"
    episode = world.play(user_code(world, tmp_path, reward=code))
    assert episode.fault is None and episode.attempts == 2 and episode.calls[0].reward == 1.0
    assert [(fault["boundary"], fault["infra"]) for fault in episode.faults] == [("reward", True)]


def lossy(world, share: float, **episode):
    """Runs 20 episodes of which a share is lost to the model's server."""

    def script(prompt, sampling, request):
        if int(request.split("-")[0][1:]) < 20 * share:
            raise ModelServerFault("503")
        return "x"

    flow = world.workflow([{"id": "a"}], episode={"retries": 0, **episode})
    runner = world.runner(flow, world.Client(script))
    samples = [(world.sample(), f"u{k}") for k in range(20)]
    return asyncio.run(run_batch(runner, samples, 1, step=7))


def test_a_batch_that_loses_more_episodes_than_allowed_ends_the_run(world):
    assert sum(episode.fault is not None for episode in lossy(world, 0.5)) == 10
    with pytest.raises(UserError) as raised:
        lossy(world, 0.55)
    assert str(raised.value) == (
        "step 7: 11 of 20 episodes failed, more than `episode.max_masked` (0.5) allows; "
        "most often: model fault in node a, policy main: 503 (11 of 11)"
    )
    assert len(lossy(world, 0.95, max_masked=1.0)) == 20
    with pytest.raises(UserError, match="5 of 20 episodes failed"):
        lossy(world, 0.25, max_masked=0.2)


def test_a_small_batch_is_not_judged_by_its_share(world):
    def script(prompt, sampling, request):
        if request.startswith("u0"):
            return "x"
        raise ModelServerFault("503")

    runner = world.runner(world.workflow([{"id": "a"}], episode={"retries": 0}), world.Client(script))
    episodes = asyncio.run(run_batch(runner, [(world.sample(), f"u{k}") for k in range(4)], 1, step=0))
    assert sum(episode.fault is not None for episode in episodes) == 3


@pytest.mark.parametrize(
    ("ids", "log_probs", "stop"),
    [
        ([1, 2], [0.0], "stop"),
        ([1], [math.nan], "stop"),
        ([1], [-math.inf], "stop"),
        ([1.0], [0.0], "stop"),
        ([-1], [0.0], "stop"),
        ([True], [0.0], "stop"),
        (["a"], [0.0], "stop"),
        ([1], [None], "stop"),
        ([1] * 9, [0.0] * 9, "length"),
        ([1], [0.0], "abort"),
        ([1], [0.0], ""),
    ],
)
def test_nonsense_from_the_server_is_a_fault(ids, log_probs, stop):
    with pytest.raises(ModelServerFault):
        check_generation(Generation(ids, log_probs, stop), max_tokens=8)


def test_sense_from_the_server_is_none():
    check_generation(Generation([1] * 8, [-0.5] * 8, "length"), max_tokens=8)
    check_generation(Generation([], [], "stop"), max_tokens=8)


def test_a_client_may_take_its_arguments_apart(world):
    class Greedy(world.Client):
        async def generate(self, request_id, prompt_ids, sampling):
            made = await super().generate(request_id, prompt_ids, sampling)
            prompt_ids.clear()
            sampling.clear()
            if len(self.requests) == 1:
                raise ModelServerFault("again")
            return made

    client = Greedy()
    call = world.play(world.workflow([{"id": "a"}]), client).calls[0]
    assert client.requests[0] == client.requests[1] and call.prompt_ids


def test_sampling_is_the_agents_and_validation_overrides_it(world):
    agents = [
        {
            "sampling": {"temperature": 0.7, "max_tokens": 9, "top_k": 5},
            "validation": {"temperature": 0.0, "max_tokens": 3},
        }
    ]
    flow = world.workflow([{"id": "a"}], agents=agents)
    train, test = world.Client(), world.Client()
    call = world.play(flow, train).calls[0]
    validated = world.play(flow, test, validate=True).calls[0]
    (_, _, first), (_, _, second) = train.requests[0], test.requests[0]
    assert (first["temperature"], first["max_tokens"], first["top_k"], call.temperature) == (0.7, 9, 5, 0.7)
    assert (second["temperature"], second["max_tokens"], second["top_k"], validated.temperature) == (0.0, 3, 5, 0.0)
    assert first["seed"] != second["seed"]


def test_a_prompt_that_does_not_fit_is_data(world):
    flow = world.workflow([{"id": "a"}, {"id": "b", "agent": "agent1", "after": ["a"]}])
    client = world.Client(lambda *_: "y" * 20)
    room = len(world.Tokenizer().encode("<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"))
    episode = world.play(flow, client, max_model_len=room + 8)
    a, b = episode.calls
    assert episode.fault is None and episode.info == {"prompt_too_long": 1}
    assert (a.stop_reason, len(a.response_ids), client.requests[0][2]["max_tokens"]) == ("length", 8, 8)
    assert (b.stop_reason, b.response_ids, b.text) == ("length", [], "")
    assert [row.calls[0].node for row in rows_of([episode])] == ["a"]
    assert (episode.ended_by, episode.done, episode.turns) == ("length", False, 1)


@pytest.mark.parametrize(("limit", "generations"), [(60, 1), (160, 2)])
def test_all_generations_and_tool_results_of_a_call_share_its_limit(world, limit, generations):
    request = '<tool_call>{"name": "t", "arguments": {}}</tool_call>'
    agents = [{"tools": ["t"], "tool_loop": {}, "sampling": {"max_tokens": 4096}}]
    flow = world.workflow([{"id": "a"}], agents=agents)
    client = world.Client(lambda *_: request if len(client.requests) == 1 else "y" * 99)
    episode = world.play(flow, client, [world.Tool("t", lambda *_: "7")], max_response_length=limit)
    (call,) = episode.calls
    assert (call.stop_reason, call.generations, client.requests[0][2]["max_tokens"]) == ("length", generations, limit)
    assert len(call.response_ids) == limit if generations == 2 else len(call.response_ids) < limit


def test_a_prompt_that_does_not_fit_any_more_ends_the_episode_and_keeps_what_was_there(world):
    """The conversation grows from turn to turn; the reward goes to the last call that has tokens."""
    grow = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    last = context.history[-1] if context.history else None
    return last.prompt_ids + last.response_ids + [50] if last else prompt_ids
"""
    nodes = [
        {"id": "a", "hooks": "grow.py"},
        {"id": "score", "after": ["a"], "reward": "one.py:one"},
    ]
    files = {"grow.py": grow, "one.py": "def one(episode):\n    return {'agent0': len(episode.calls)}\n"}
    flow = world.workflow(nodes, files=files, episode={"max_turns": 9})
    room = len(world.Tokenizer().encode("<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"))
    client = world.Client(lambda *_: "y" * 9)
    episode = world.play(flow, client, max_model_len=room + 33)
    assert (episode.fault, episode.ended_by, episode.turns) == (None, "length", 4)
    assert [(len(call.response_ids), call.reward) for call in episode.calls] == [
        (10, 0.0),
        (10, 0.0),
        (10, 4.0),
        (0, 0.0),
    ]
    (row,) = rows_of([episode])
    assert [call.reward for call in row.calls] == [0.0, 0.0, 4.0]
    (last,) = rows_of([episode], train_turns="last")
    assert [(call.turn, call.reward) for call in last.calls] == [(2, 4.0)]


def test_a_prompt_that_does_not_fit_ends_its_loop(world):
    nodes = [{"id": "a"}, {"id": "b", "agent": "agent1", "after": ["a"]}]
    flow = world.workflow(nodes, loops={"l": {"nodes": ["a"], "max_rounds": 9}}, episode={"max_turns": 3})
    room = len(world.Tokenizer().encode("<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"))
    client = world.Client(lambda prompt, sampling, request: "y" * (20 if request.endswith("0") else 2))
    episode = world.play(flow, client, max_model_len=room + 30)
    shapes = [(call.node, call.round, call.stop_reason, len(call.response_ids)) for call in episode.calls]
    # Its second round would show the 20 characters of the first.
    assert shapes == [("a", 0, "stop", 21), ("a", 1, "length", 0), ("b", 0, "stop", 3)]
    assert (episode.ended_by, episode.turns) == ("length", 1)


@pytest.mark.parametrize(("turns", "done_at", "expected"), [(3, 9, "turns"), (3, 2, "done"), (1, 0, "done")])
def test_the_record_says_what_ended_the_episode(world, turns, done_at, expected):
    code = f"""
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return Output(done=context.turn == {done_at})
"""
    nodes = [{"id": "a", "hooks": "h.py"}]
    flow = world.workflow(nodes, files={"h.py": code}, episode={"max_turns": turns})
    episode = world.play(flow)
    assert episode.ended_by == expected
    assert [call.turn for call in episode.calls if call.done] == ([done_at] if expected == "done" else [])


def test_an_episode_that_a_fault_ended_was_ended_by_nothing_else(world):
    def script(prompt, sampling, request):
        raise ModelServerFault("down")

    episode = world.play(world.workflow([{"id": "a"}]), world.Client(script))
    assert episode.fault and episode.ended_by == ""


def test_a_sample_without_messages_is_a_user_error(world):
    runner = world.runner(world.workflow([{"id": "a"}]))
    with pytest.raises(UserError, match="sample u: `prompt` must be a list of chat messages, not str"):
        asyncio.run(runner.run({"prompt": "hi"}, "u", 0, step=0))


def test_a_record_survives_json(world):
    flow = pipeline(world)
    for episode in play_batch(world, flow, sampler, calc, uids=2, n=2):
        assert episode_from_json(json.loads(json.dumps(episode.to_json(), allow_nan=False))) == episode


def test_calls_say_when_they_started_and_a_repeated_episode_counts_from_its_first_attempt(world):
    tries = []

    async def script(prompt, sampling, request):
        tries.append(request)
        await asyncio.sleep(0.02)
        if len(tries) <= 3:  # so often a generation is tried
            raise ConnectionError("down")
        return "ok"

    nodes = [{"id": "plan"}, {"id": "solve", "agent": "agent1", "after": ["plan"]}]
    episode = world.play(world.workflow(nodes), world.Client(script))
    plan, solve = episode.calls
    assert episode.attempts == 2 and episode.fault is None
    assert plan.start_seconds >= 3 * 0.02, "the first attempt took that long"
    assert plan.start_seconds + plan.seconds <= solve.start_seconds
    assert solve.start_seconds + solve.seconds <= episode.seconds
