"""Two ways to write one thing give one episode, and text goes from one tokenizer to another byte by byte."""

from __future__ import annotations

import asyncio
import dataclasses

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.types.record import Generation

HOOKS = """
from recipe.dag.types.context import Output

def pre_process(tokenizer, prompt_ids, obs, *, context):
    heard = " ".join(call.text for call in context.upstream.values())
    return tokenizer.encode(f"{context.problem} [{heard}]")

def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return Output(parsed={"answer": context.call.text})
"""
SCORE = "def score(episode): return {name: 1.0 for name in {call.agent for call in episode.calls}}\n"
FILES = {"talk.py": HOOKS, "score.py": SCORE}


def node(name, number, *dependencies, **keys):
    return {"id": name, "agent": ("left", "right")[number], "after": dependencies, "hooks": "talk.py", **keys}


def score(*dependencies):
    return {"id": "score", "after": dependencies, "reward": "score.py:score"}


def said(episode):
    return [(call.agent, call.prompt_ids, call.response_ids, call.reward) for call in episode.calls]


def test_a_loop_of_two_rounds_is_the_same_talk_as_its_nodes_written_out(world):
    """What each hears, says and earns; the loop sees the round before, so does the node written out."""
    agents = [{"name": "left"}, {"name": "right"}]
    loop = world.workflow(
        [node("left", 0), node("right", 1), score("left", "right")],
        agents=agents, files=FILES, loops={"talk": {"nodes": ["left", "right"], "max_rounds": 2}},
    )  # fmt: skip
    out = world.workflow(
        [
            *(node("left_0", 0), node("right_0", 1)),
            *(node("left_1", 0, "left_0", "right_0"), node("right_1", 1, "left_0", "right_0")),
            score("left_1", "right_1"),
        ],
        agents=agents, files=FILES,
    )  # fmt: skip

    def answer(prompt, sampling, request):
        return f"{len(prompt)}{prompt[-3]}"

    looped, written = (world.play(flow, world.Client(answer)) for flow in (loop, out))
    assert looped.fault is written.fault is None
    assert said(looped) == said(written) and len(looped.calls) == 4


def test_rounds_that_agreement_ends_leave_the_rows_of_a_talk_without_them(world):
    """What was not said has no row, so it cannot touch the loss."""
    agents = [{"name": "left"}, {"name": "right"}]
    agree = {"agree": ["left", "right"]}
    talk = [node("left", 0), node("right", 1)]
    whole = world.workflow(
        [
            *talk,
            node("again", 0, "left", "right", when={"none_of": [agree]}),
            node("more", 1, "left", "right", when={"none_of": [agree]}),
            score("left", "right", "again", "more"),
        ],
        agents=agents, files=FILES, loops={"debate": {"nodes": ["again", "more"], "max_rounds": 3}},
    )  # fmt: skip
    short = world.workflow([*talk, score("left", "right")], agents=agents, files=FILES)
    found = [rows_of([world.play(flow, world.Client(lambda *_: "same"))]) for flow in (whole, short)]
    assert [dataclasses.asdict(row) for row in found[0]] == [dataclasses.asdict(row) for row in found[1]]
    assert len(found[0]) == 2
    differing = world.Client(lambda prompt, sampling, request: request.rsplit("-", 1)[1])
    assert len(rows_of([world.play(whole, differing)])) > 2


class Bytes:
    """A tokenizer of UTF-8 bytes: nothing that the characters' tokenizer knows."""

    eos_token_id = 300

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=False):
        return bytes(i for i in ids if i < 256).decode()

    def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
        text = "".join(message["content"] for message in messages)
        return text if not tokenize else {"input_ids": self.encode(text)} if return_dict else self.encode(text)


TEXT = "na\u00efve \u4e2d\u6587 \U0001f40d  two  spaces\ttab\n\nlines "


def test_text_goes_between_tokenizers_byte_by_byte_and_what_was_sampled_stays(world):
    class Server:
        prompts: list[str] = []

        async def generate(self, request_id, prompt_ids, sampling):
            self.prompts.append(Bytes().decode(prompt_ids))
            # "ab" as the server sampled it: with an id that no encoding of the text would give
            return Generation([97, 98, 299, 300], [-0.1] * 4, "stop")

    policies = {"one": {"model": {"path": "m"}}, "two": {"model": {"path": "n"}}}
    agents = [{"name": "left", "policy": "one"}, {"name": "right", "policy": "two"}]
    flow = world.workflow(
        [node("left", 0), node("right", 1, "left"), node("back", 0, "right"), score("back")],
        agents=agents, files=FILES, policies=policies,
    )  # fmt: skip
    client, server = world.Client(lambda *_: TEXT), Server()
    endpoints = {"one": PolicyEndpoint(client, world.Tokenizer(), 4096), "two": PolicyEndpoint(server, Bytes(), 4096)}

    episode = asyncio.run(EpisodeRunner(flow, endpoints, {}, seed=0).run(world.sample(), "u", 0, step=0))
    assert episode.fault is None, episode.fault
    assert server.prompts == [f"question [{TEXT}]"]
    assert client.requests[1][1] == f"question [{TEXT} ab]"
    rows = {row.calls[0].node: row for row in rows_of([episode])}
    assert rows["right"].response_ids == [97, 98, 299, 300] and rows["right"].rollout_log_probs == [-0.1] * 4
    assert world.text(episode.calls[0]).startswith(TEXT)
