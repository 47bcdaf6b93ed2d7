"""Every sampled token is trained in the context that the server had when it sampled it: C13, whose published
counterpart trained on the wrong context after the first action."""

from __future__ import annotations

from collections import Counter

import pytest

from recipe.dag.episode.rows import rows_of
from recipe.dag.types.record import Generation

HOOKS = """
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return Output(text=f"{context.agent} handed over, not what it said")
def length(context):
    return len(context.call.text)
def pay(episode):
    return {call.agent: 1.0 for call in episode.calls}
"""


class Recorded:
    """A client that keeps what it was sent and what it answered."""

    def __init__(self, world, script):
        self._client, self.generations = world.Client(script), list[tuple[list[int], Generation]]()

    async def generate(self, request_id, prompt_ids, sampling):
        generation = await self._client.generate(request_id, prompt_ids, sampling)
        self.generations.append((list(prompt_ids), generation))
        return generation


def script(prompt: str, sampling: dict, request: str) -> str:
    agent = request.rsplit("-", 1)[1]
    if agent == "agent1" and prompt.count("result of") % 2 == 0:  # a call of the tool, then an answer
        return f'<tool_call>{{"name": "run", "arguments": {{"code": "{len(prompt)}"}}}}</tool_call>'
    return f"{agent} says {sampling['seed'] % 1000}"


@pytest.mark.parametrize("memory", ["none", "chat", "shared"])
@pytest.mark.parametrize("candidates", [None, {"k": 3, "by": "hooks.py:length"}])
@pytest.mark.parametrize("merge", [True, False])
def test_the_ids_before_each_trained_token_are_those_that_the_server_was_sent(world, memory, candidates, merge):
    tool = world.Tool("run", lambda arguments, state: f"result of {arguments['code']}")
    agents = [
        {"memory": memory},
        {"tools": [{"name": "run"}], "tool_loop": {"max_generations": 3}, "memory": memory},
        {},
    ]
    nodes = [
        {"id": "solve", "candidates": candidates},
        {"id": "code", "agent": "agent1", "after": ["solve"], "hooks": "hooks.py"},
        {"id": "verify", "agent": "agent2", "after": ["code"]},
        {"id": "pay", "after": ["verify"], "reward": "hooks.py:pay"},
    ]
    flow = world.workflow(nodes, agents=agents, files={"hooks.py": HOOKS}, episode={"max_turns": 2})
    client = Recorded(world, script)
    episode = world.play(flow, client, [tool])
    assert episode.fault is None, episode.fault
    assert len(episode.calls) == 6 and sum(len(call.tool_results) for call in episode.calls) >= 1
    rows = rows_of([episode], merge=merge)
    merged = {"none": 6, "chat": 4, "shared": 3} if merge else {}  # the third agent has no memory
    assert len(rows) == merged.get(memory, 6) + len(episode.dropped)
    trained = Counter(
        (tuple(row.prompt_ids + row.response_ids[:at]), row.response_ids[at], row.rollout_log_probs[at])
        for row in rows
        for at, sampled in enumerate(row.response_mask)
        if sampled
    )
    sampled = Counter(
        (tuple(sent + generation.response_ids[:at]), generation.response_ids[at], generation.log_probs[at])
        for sent, generation in client.generations
        for at in range(len(generation.response_ids))
    )
    assert trained == sampled
