"""The coach in the engine: what it is shown, what it makes of answers, what becomes of the calls that it judges."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.remote.connect import Remotes
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.errors import UserError
from recipe.dag.types.record import Episode
from tests.episode.openai_server import OpenAIServer

COACH = "recipe.dag.coach.agent:Coach"
TEMPLATE = "IN {{ agent_input }}\nOUT {{ agent_output }}\nTRUTH {{ ground_truth_answer }}\nState PROCESS_SCORE: X/10."


@pytest.fixture
def coached(world):
    """`coached(server, ...)`: a solver and a coach behind it; `play(flow, server)` runs an episode."""

    def flow(server, *, template: str = TEMPLATE, api=None, on_failure="skip", options=None, reward=None, **keys):
        options = {"judges": "solve", "template": "coach.txt", **(options or {})}
        nodes = keys.pop("nodes", None) or [
            {"node_id": "solve"},
            {
                "node_id": "coach",
                "agent_group": 1,
                "dependencies": ["solve"],
                "agent_options": {"process_path": COACH, "pre_process_kwargs": options},
            },
            {
                "node_id": "score",
                "node_role": "REWARD",
                "dependencies": ["coach"],
                "executable_ref": "recipe.dag.coach.reward:coach_scores",
                "executable_kwargs": {"coaches": {"coach": "solve"}, **(reward or {})},
            },
        ]
        (world.path / "coach.txt").write_text(template)
        api = {"base_url": server.url, "model": "m", "max_wait_s": 0.01, "retries": 1, **(api or {})}
        policies = {"main": {"model": {"path": "m"}}, "outside": {"api": api}}
        agents = [{"name": "solver"}, {"name": "coach", "policy": "outside", "on_failure": on_failure}]
        return world.workflow(nodes, agents=keys.pop("agents", agents), policies=policies, **keys)

    return flow


def play(world, workflow, client=None) -> Episode:
    async def main():
        remotes = Remotes(workflow)
        local = PolicyEndpoint(client or world.Client(lambda *_: "it is 4"), world.Tokenizer(), 4096)
        endpoints = {name: remotes.endpoints.get(name, local) for name in workflow.policies}
        runner = EpisodeRunner(workflow, endpoints, {}, seed=0)
        try:
            return await runner.run(world.sample(), "u", 0, step=0)
        finally:
            await remotes.close()

    return asyncio.run(main())


def test_a_score_of_seven_of_ten_is_a_reward_of_07(world, coached):
    with OpenAIServer(lambda body: "Fine.\n**PROCESS_SCORE:** 7/10") as server:
        episode = play(world, coached(server))
    solve, coach = episode.calls
    assert coach.parsed == {"process": 7.0, "outcome": None, "reasoning": "Fine."}
    assert solve.reward == pytest.approx(0.7) and not solve.unscored
    assert episode.info == {"coach/solver/mean": pytest.approx(0.7), "coach/solver/count": 1, "coach/solver/failed": 0}
    prompt = server.requests[0]["messages"][0]["content"]
    assert prompt == coach.messages[0]["content"]
    assert "OUT it is 4\nTRUTH N/A\n" in prompt


def test_nonsense_is_asked_for_once_more_and_then_unscored(world, coached):
    with OpenAIServer(lambda body: "good work, 9!") as server:
        episode = play(world, coached(server))
    solve, coach = episode.calls
    assert len(server.requests) == 2 and coach.parsed.keys() == {"failed"}
    assert solve.unscored and solve.reward is None and episode.fault is None
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert server.requests[1]["messages"][1]["content"] == "good work, 9!"
    assert server.requests[1]["messages"][0]["content"].endswith("State PROCESS_SCORE: X/10.")
    assert coach.usage["requests"] == 2 and coach.generations == 2
    assert coach.messages[:3] == server.requests[1]["messages"] and len(coach.messages) == 4
    assert json.dumps(coach.messages)


def test_a_dead_coach_is_skipped(world, coached):
    with OpenAIServer() as server:
        server.kill()
        episode = play(world, coached(server))
    solve, coach = episode.calls
    assert episode.fault is None and solve.unscored and "failed" in coach.parsed
    assert [fault["boundary"] for fault in episode.faults] == ["model"]


def test_an_unknown_variable_is_an_error_at_load(world, coached):
    with (
        OpenAIServer() as server,
        pytest.raises(UserError, match=r"coach.txt:2: unknown variable `problm`; did you mean `problem`"),
    ):
        play(world, coached(server, template="Judge.\n{{ problm }}"))
