"""The coach of examples/gallery, with a server that answers as OpenAI's does, and as it does on a bad day."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from textwrap import indent

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rehearsal import END
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.remote.connect import Remotes
from recipe.dag.report.journal import Journal
from recipe.dag.report.metrics import rollout_metrics
from recipe.dag.types.inert import inert
from recipe.dag.types.record import Episode
from tests.remote.openai_server import OpenAIServer, scattered
from tests.rows import of_calls
from tests.test_shipped import ROOT

FILE = ROOT / "examples" / "gallery" / "workflow_coach.yaml"
GUESSES = ("40 (50 %)", "42 (80 %)", "42 (95 %)")
"""What the agents say: two guesses of the solver, then the verifier."""
VERDICTS = ("REASONING: below\nPROCESS_SCORE: 4/10", "PROCESS_SCORE: 7/10", "ANSWER_CORRECT: 1\n**PROCESS_SCORE:** 10")


class ByPrompt:
    """Answers a coach's request by the action in it, so that the order of requests does not matter."""

    def __init__(self, verdicts: Callable[[int, dict], str] = lambda action, body: VERDICTS[action]):
        self._verdicts = verdicts

    def __call__(self, body: dict) -> str:
        return self._verdicts(action_in(body), body)


def action_in(body: dict) -> int:
    prompt = body["messages"][0]["content"]
    if "The agent: verifier" in prompt:
        return 2
    judged = prompt.split("The action that you judge:\n")[1].split("\n")[0].strip()
    return GUESSES.index(judged)


@pytest.fixture
def play_many(monkeypatch, world):
    """`play_many(server, n)` runs `n` episodes of the example with the server as the coach; `api` replaces keys of the
    policy."""

    def run(server: OpenAIServer, n: int, **api) -> list[Episode]:
        monkeypatch.setenv("MODEL_PATH", "m")
        monkeypatch.setenv("COACH_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        workflow = load_workflow(FILE)
        policy = workflow.policies["outside"]
        assert policy.api is not None
        quick = policy.api.model_copy(update={"max_wait_s": 0.02, "retries": 2, **api})
        policies = workflow.policies | {"outside": policy.model_copy(update={"api": quick})}
        workflow = workflow.model_copy(update={"policies": policies})

        def says(prompt: str, sampling: dict, request: str) -> str:
            if request.endswith("verifier"):
                return GUESSES[2]
            return GUESSES["guess said" in prompt]

        async def main() -> list[Episode]:
            remotes = Remotes(workflow)
            local = PolicyEndpoint(world.Client(says), world.Tokenizer(), 4096)
            runner = EpisodeRunner(workflow, {"main": local, **remotes.endpoints}, {}, seed=0)

            def sample(number: int) -> dict:
                text = "Which number?" + f" ({number})" * bool(number)
                return world.sample(text, extra_info={"data_type": "numbers"}) | {"ground_truth": "42"}

            try:
                return await asyncio.gather(*(runner.run(sample(k), f"u{k}", 0, step=0) for k in range(n)))
            finally:
                await remotes.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def play(play_many):
    """`play(server)` runs one episode."""

    def run(server: OpenAIServer, **api) -> Episode:
        return play_many(server, 1, **api)[0]

    return run


def rewards(episode: Episode) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for call in episode.calls:
        found.setdefault(call.node, []).append(call.reward)
    return found


GOOD = {"guess": [pytest.approx(0.4), pytest.approx(0.7)], "coach_guess": [None, None]}
GOOD |= {"verify": [pytest.approx(1.5)], "coach_verify": [None]}


def test_every_action_has_its_own_verdict_and_row(play):
    with OpenAIServer(ByPrompt()) as server:
        episode = play(server)
    assert [call.node for call in episode.calls] == [
        *("guess", "coach_guess", "guess", "coach_guess"),
        *("verify", "coach_verify"),
    ]
    assert rewards(episode) == GOOD and episode.outcome == 1.0
    # 7/10 is 0.7 in the row that is trained on: the scale divides once
    rows = rows_of([episode], merge=False)
    assert [(call.node, call.round, call.reward) for row in rows for call in row.calls] == [
        ("guess", 0, pytest.approx(0.4)),
        ("guess", 1, pytest.approx(0.7)),
        ("verify", 0, pytest.approx(1.5)),
    ]
    assert episode.info["coach/solver/mean"] == pytest.approx(0.55)
    metrics = rollout_metrics([episode])
    assert metrics["coach/solver/count"] == 2 and metrics["coach/verifier/mean"] == 1.0
    assert metrics["agent/coach/void"] == 0.0  # an API's call has no tokens, and a text
    assert metrics["coach/solver/failed"] == 0 and not any(key.startswith("info/coach") for key in metrics)


def test_the_coach_sees_all_that_the_agent_had_read_and_what_the_game_answered(play):
    """The published system showed the output before the action in place of the context."""
    with OpenAIServer(ByPrompt()) as server:
        episode = play(server)
    prompts = [body["messages"][0]["content"] for body in server.requests]
    guesses = [call for call in episode.calls if call.node == "guess"]
    for call, prompt in zip(guesses, prompts[:2], strict=True):
        assert f"What it had read:\n{indent(inert(call.prompt_text.rstrip()), '  ', lambda line: True)}" in prompt
    assert all(text in prompts[1] for text in ("Which number?", "guess said: 40 (50 %)", "The game says: higher"))
    for prompt, answer, earlier in zip(
        prompts[:2], ("higher", "right"), ("none", "Action 1:\n  40 (50 %)"), strict=True
    ):
        assert f"What the game answered to it:\n  {answer}\n" in prompt
        assert f"Its earlier actions:\n  {earlier}\n" in prompt


def test_the_truth_is_shown_only_where_it_is_declared(play):
    with OpenAIServer(ByPrompt()) as server:
        play(server)
    truths = ["you do not need it for this agent): 42\n" in body["messages"][0]["content"] for body in server.requests]
    assert truths == [False, False, True]
    # nor do the agents read the coach, which knows it
    with OpenAIServer(ByPrompt(lambda action, body: f"SECRET\n{VERDICTS[action]}")) as server:
        episode = play(server)
    assert not any("SECRET" in call.prompt_text for call in episode.calls)
    assert not any("SECRET" in body["messages"][0]["content"] for body in server.requests)


def test_nonsense_leaves_one_call_out_and_changes_no_other_reward(play):
    with OpenAIServer(ByPrompt(lambda action, body: "7" if action == 1 else VERDICTS[action])) as server:
        episode = play(server)
    assert len(server.requests) == 4
    assert rewards(episode) == GOOD | {"guess": [pytest.approx(0.4), None]}
    assert [call.unscored for call in episode.calls if call.node == "guess"] == [False, True]
    rows = rows_of([episode], unscored=load_workflow(FILE).algorithm.unscored_scope, merge=False)
    assert [(call.node, call.round, call.reward) for row in rows for call in row.calls] == [
        ("guess", 0, pytest.approx(0.4)),
        ("verify", 0, pytest.approx(1.5)),
    ]
    metrics = rollout_metrics([episode], load_workflow(FILE))
    assert metrics["agent/solver/unscored"] == metrics["left_out/calls_unscored"] == 1
    assert metrics["coach/solver/failed"] == 1 and metrics["faults/total"] == 0


@pytest.mark.parametrize("fault", ["503", "429", "drop", "nonsense"])
def test_a_server_that_stumbles_changes_no_reward(play, fault):
    with OpenAIServer(ByPrompt(), faults={0: fault, 2: fault}) as server:
        episode = play(server)
    assert len(server.requests) == 5 and rewards(episode) == GOOD and episode.attempts == 1


def test_a_request_that_hangs_is_given_up_and_its_call_left_out(play):
    with OpenAIServer(ByPrompt(), faults={1: "hang"}) as server:
        episode = play(server, timeout_s=1.0, retries=0)
    assert rewards(episode) == GOOD | {"guess": [pytest.approx(0.4), None]} and episode.fault is None
    assert [fault["boundary"] for fault in episode.faults] == ["model"]


def test_a_dead_coach_leaves_all_calls_out_and_the_episode_goes_on(play):
    with OpenAIServer() as server:
        server.kill()
        episode = play(server, retries=0)
    assert rewards(episode) == {name: [None] * len(calls) for name, calls in GOOD.items()}
    assert episode.fault is None and episode.outcome == 1.0 and episode.attempts == 1
    assert {fault["boundary"] for fault in episode.faults} == {"model"}
    failed = [call.parsed["failed"] for call in episode.calls if call.agent == "coach"]
    assert len(failed) == 3 and all(reason.startswith("model fault in policy outside: ") for reason in failed)
    assert rows_of([episode], unscored="call") == []


def test_the_judges_prompts_are_kept_in_episodes_jsonl(play, tmp_path):
    with OpenAIServer(ByPrompt()) as server:
        episode = play(server)
    Journal(tmp_path).episodes(1, [episode])
    (line,) = (tmp_path / "episodes.jsonl").read_text().splitlines()
    calls = [call for call in json.loads(line)["calls"] if call["agent"] == "coach"]
    assert [call["messages"][0] for call in calls] == [body["messages"][0] for body in server.requests]
    assert [call["messages"][1]["content"] for call in calls] == list(VERDICTS)
    assert calls[0]["parsed"] == {"process": 4.0, "outcome": None, "reasoning": "below"}


def rows_by_call(episodes: list[Episode]) -> dict[tuple, tuple]:
    scope = load_workflow(FILE).algorithm.unscored_scope
    rows = rows_of(episodes, unscored=scope, merge=False)
    return {
        (r.uid, r.calls[0].node, r.calls[0].round): (
            r.prompt_ids,
            r.response_ids,
            of_calls(r, "reward"),
            of_calls(r, "learns"),
        )
        for r in rows
    }


def test_faults_of_the_coach_change_no_row_of_a_scored_call(play_many):
    """A/B: 10 % 503, 10 % nonsense, one request that hangs. The rows are those of a perfect coach, without the calls
    that could not be scored."""

    def nonsense(action: int, body: dict) -> str:
        # the same judgements are unreadable, however often they are asked for
        unreadable = random.Random(body["messages"][0]["content"]).random() < 0.1
        return "Quite good, 9!" if unreadable else VERDICTS[action]

    with OpenAIServer(ByPrompt()) as server:
        perfect = play_many(server, 24)
    faults = scattered({"503": 0.1}, seed=5)
    with OpenAIServer(ByPrompt(nonsense), faults=lambda k: "hang" if k == 20 else faults(k)) as server:
        broken = play_many(server, 24, timeout_s=3.0, retries=1)
    assert all(episode.fault is None for episode in (*perfect, *broken))
    expected, found = rows_by_call(perfect), rows_by_call(broken)
    assert len(expected) == 3 * 24 and found.items() <= expected.items()
    unscored = [call for episode in broken for call in episode.calls if call.unscored]
    assert 0 < len(unscored) == len(expected) - len(found) < 20
    failed = [call for episode in broken for call in episode.calls if "failed" in call.parsed]
    assert len(failed) == len(unscored)
    metrics = rollout_metrics(broken, load_workflow(FILE))
    assert metrics["left_out/calls_unscored"] == len(unscored)
    assert metrics["coach/solver/failed"] + metrics["coach/verifier/failed"] == len(unscored)


def test_what_is_trained_on_are_the_sampled_tokens_and_not_their_text(play, world, monkeypatch):
    """The published system encoded the texts again; here a text looks like the token that ends a turn."""
    spelled = [ord(character) + 10 for character in f"{END} 41 (80 %)"]
    assert world.Tokenizer().encode(f"{END} 41 (80 %)") != spelled  # the special token in place of its characters

    class Spelling(world.Client):
        async def generate(self, request_id, prompt_ids, sampling):
            generation = await super().generate(request_id, prompt_ids, sampling)
            if "guess said" in world.Tokenizer().decode(prompt_ids) and request_id.endswith("solver"):
                return replace(generation, response_ids=[*spelled, 2], log_probs=[-0.5] * (len(spelled) + 1))
            return generation

    monkeypatch.setattr(world, "Client", Spelling)
    with OpenAIServer(lambda body: "PROCESS_SCORE: 5\nANSWER_CORRECT: 0") as server:
        episode = play(server)
    rows = {(row.calls[0].node, row.calls[0].round): row for row in rows_of([episode], merge=False)}
    assert rows["guess", 1].response_ids == [*spelled, 2]
    assert f"The action that you judge:\n  {inert(END)} 41 (80 %)" in server.requests[1]["messages"][0]["content"]
