"""siiRL's MARFT graph, as its file says it, played whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.record import Generation
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.workflow.loader import load_workflow

FILE = Path(__file__).parents[1] / "workflow" / "siirl" / "marft.yaml"


class Scripted:
    """A server with its tokenizer, one token per character."""

    eos_token_id = 0

    def __init__(self, answer: str):
        self.answer, self.prompts = answer, []

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i)

    def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
        text = "".join(message["content"] for message in messages)
        return {"input_ids": self.encode(text)} if tokenize and return_dict else self.encode(text) if tokenize else text

    async def generate(self, request_id, prompt_ids, sampling):
        self.prompts.append(self.decode(prompt_ids))
        ids = [*self.encode(self.answer), 0]
        return Generation(ids, [-0.5] * len(ids), "stop")


def test_each_group_has_its_server_and_the_chain_is_paid_once():
    """The env pays a number; the chain of credit carries the actor's reward back, so the reasoner gets none of its
    own."""
    servers = {"policy_0": Scripted(" so 2*2"), "policy_1": Scripted(" is 4")}
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
