"""CORY, played whole: who hears whom, who is paid, and who is asked in validation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train.alternation import as_bound
from recipe.dag.types.record import Episode

WORKFLOW = load_workflow(Path(__file__).parents[2] / "workflows" / "workflow_cory.yaml")
SAMPLE = {"prompt": [{"role": "user", "content": "What is 2^3?"}], "ground_truth": "8"}


@pytest.fixture
def play(scripted_server):
    """Plays an episode; returns it and what was asked."""

    def play(first: str, second: str, *, step: int = 0, validate: bool = False) -> tuple[Episode, list[str]]:
        server = scripted_server(lambda prompt: second if "pioneer said" in prompt else first)
        endpoints = {name: PolicyEndpoint(server, server, 9999) for name in WORKFLOW.policies}
        runner = EpisodeRunner(as_bound(WORKFLOW, step), endpoints, {}, seed=0)
        episode = asyncio.run(runner.run(SAMPLE, "u", 0, step=step, validate=validate))
        assert episode.fault is None, episode.fault
        return episode, server.prompts

    return play


@pytest.mark.parametrize(
    ("first", "second", "reward"), [("8", "8", 2.0), ("8", "6", 1.0), ("6", "8", 1.0), ("6", "6", 0.0)]
)
def test_both_earn_what_both_earned_and_the_pioneers_answer_is_the_outcome(play, first, second, reward):
    episode, prompts = play(rf"\boxed{{{first}}}", rf"\boxed{{{second}}}")
    assert [call.agent for call in episode.calls] == ["pioneer", "observer"]
    assert [call.reward for call in episode.calls] == [reward, reward]
    assert episode.outcome == float(first == "8")
    assert rf"\boxed{{{first}}}" in prompts[1] and "pioneer said" not in prompts[0]


def test_in_validation_the_pioneer_is_alone(play):
    episode, prompts = play(r"\boxed{8}", r"\boxed{6}", validate=True)
    assert [call.agent for call in episode.calls] == ["pioneer"] and len(prompts) == 1
    assert [(skip.node, skip.reason) for skip in episode.skips] == [("observer", "when")]
    assert episode.outcome == episode.calls[0].reward == 1.0


@pytest.mark.parametrize(("step", "policies"), [(4, ["first", "second"]), (5, ["second", "first"])])
def test_policies_change_roles_every_five_steps(play, step, policies):
    episode, _ = play("one", "two", step=step)
    assert [call.policy for call in episode.calls] == policies
