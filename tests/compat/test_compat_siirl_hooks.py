"""siiRL's MARFT graph, as its file says it, played whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow

FILE = Path(__file__).parent / "siirl" / "marft.yaml"


def test_each_group_has_its_server_and_the_chain_is_paid_once(scripted_server):
    """The env pays a number; the chain of credit carries the actor's reward back, so the reasoner gets none of its
    own."""
    answers = {"policy_0": " so 2*2", "policy_1": " is 4"}
    servers = {name: scripted_server(lambda prompt, text=text: text) for name, text in answers.items()}
    endpoints = {name: PolicyEndpoint(server, server, 9999) for name, server in servers.items()}
    runner = EpisodeRunner(load_workflow(FILE), endpoints, {}, seed=0)
    sample = {"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": "4"}
    episode = asyncio.run(runner.run(sample, "u", 0, step=0))
    assert episode.fault is None, episode.fault
    assert [(call.agent, call.policy, call.reward) for call in episode.calls] == [
        ("agent_0", "policy_0", 0.0),
        ("agent_1", "policy_1", 1.0),
    ]
    assert servers["policy_0"].prompts == ["2+2?"] and servers["policy_1"].prompts == ["2+2? so 2*2"]
    assert (episode.turns, episode.done, episode.outcome) == (1, True, 1.0)
