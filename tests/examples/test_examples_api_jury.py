"""The jury of examples/gallery, with a server of each provider's form."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.remote.connect import Remotes
from recipe.dag.types.record import Episode
from recipe.dag.workflow.schema import Workflow
from tests.remote.provider_servers import AnthropicServer, GoogleServer, VertexServer

FILE = Path(__file__).parents[2] / "examples" / "gallery" / "workflow_api_jury.yaml"
SERVERS = {"claude": AnthropicServer, "gemini": GoogleServer, "vertex": VertexServer}
SAMPLE = {"prompt": [{"role": "user", "content": "What is 6 * 7?"}], "ground_truth": "42"}


def moved(workflow: Workflow, folder: Path, **servers) -> Workflow:
    """Return the workflow with other addresses, and with its cache in `folder`."""
    policies = dict(workflow.policies)
    for name, server in servers.items():
        changes = {"provider": policies[name].api.service.name, "base_url": server.url, "retries": 0}
        changes |= {"cache": str(folder / "jury.sqlite")} if policies[name].api.cache else {}
        policies[name] = policies[name].model_copy(update={"api": policies[name].api.model_copy(update=changes)})
    return workflow.model_copy(update={"policies": policies})


def play(scripted_server, tmp_path, said: str, verdicts: dict[str, str], **faults: str) -> tuple[list[Episode], dict]:
    """Play the problem twice, one after the other."""
    solver = scripted_server(lambda prompt: said)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                server(
                    lambda body, name=name: verdicts[name],
                    faults=dict.fromkeys(range(9), faults[name]) if name in faults else {},
                    strict=True,
                )
            )
            for name, server in SERVERS.items()
        }

        async def main() -> list[Episode]:
            workflow = moved(load_workflow(FILE), tmp_path, **servers)
            remotes = Remotes(workflow)
            endpoints = {**remotes.endpoints, "main": PolicyEndpoint(solver, solver, 9999)}
            runner = EpisodeRunner(workflow, endpoints, {}, seed=0)
            try:
                return [await runner.run(SAMPLE, "u", index, step=0) for index in range(2)]
            finally:
                await remotes.close()

        return asyncio.run(main()), servers


def test_the_share_of_the_judges_that_say_yes_is_the_reward(scripted_server, tmp_path):
    verdicts = {"claude": "YES", "gemini": "NO", "vertex": "YES, it is."}
    episodes, servers = play(scripted_server, tmp_path, "42 (95 %)", verdicts)
    for episode in episodes:
        assert episode.fault is None and episode.outcome == 1.0
        assert [call.reward for call in episode.calls] == [0.75, 0.0, 0.0, 0.0, 0.0]  # the function says YES, too
    # the second time, two judges answer from the cache
    assert {name: len(server.requests) for name, server in servers.items()} == {"claude": 1, "gemini": 1, "vertex": 2}
    config = servers["gemini"].requests[0]["generationConfig"]
    assert config["thinkingConfig"] == {"thinkingBudget": 0} and config["maxOutputTokens"] == 16
    usage, again = ({call.policy: call.usage for call in episode.calls[1:]} for episode in episodes)
    assert usage["claude"]["cost"] == pytest.approx((7 * 1.0 + 3 * 5.0) / 1e6) and usage["rule"]["requests"] == 1
    assert (again["claude"]["cost"], again["claude"]["cache_hits"], again["rule"]["requests"]) == (0.0, 1, 1)


def test_judges_that_fail_or_say_nothing_readable_have_no_vote(scripted_server, tmp_path):
    verdicts = {"claude": "YES", "gemini": "perhaps", "vertex": "YES"}
    (episode, _), _ = play(scripted_server, tmp_path, "41 (95 %)", verdicts, claude="529", vertex="429")
    assert episode.fault is None and episode.outcome == 0.0
    assert episode.calls[0].reward == 0.0  # only the function has a vote
    assert [("failed" in call.parsed) for call in episode.calls[1:]] == [True, False, True, False]
