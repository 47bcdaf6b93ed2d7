"""Agents with `memory: chat`: what is appended, what is not said twice, and how rows merge."""

from __future__ import annotations

import asyncio
import re

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.endpoint.chat import render
from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.record import Generation

TALK = [{"id": "a", "agent": "left"}, {"id": "b", "agent": "right", "after": ["a"]}]
LOOP = {"talk": {"nodes": ["a", "b"], "max_rounds": 3}}


def numbered():
    """A script that answers `<agent> <n>` to an agent's n-th call, the same in every world."""
    counts: dict[str, int] = {}

    def script(prompt: str, sampling: dict, request: str) -> str:
        agent = request.rpartition("-")[2]
        counts[agent] = counts.get(agent, 0) + 1
        return f"{agent} {counts[agent]}"

    return script


def talk(world, memory: str = "chat", **keys):
    agents = [{"name": "left", "memory": memory}, {"name": "right", "memory": memory}]
    return world.play(world.workflow(TALK, agents=agents, loops=LOOP), world.Client(numbered()), **keys)


def told(call) -> list[str]:
    """The user's messages in a prompt."""
    return re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", call.prompt_text, re.S)


def computed(episode, **options) -> int:
    return sum(len(row.prompt_ids) + len(row.response_ids) for row in rows_of([episode], **options))


def trained(episode) -> list[int]:
    return [
        token
        for row in rows_of([episode])
        for token, bit in zip(row.response_ids, row.response_mask, strict=True)
        if bit
    ]


def test_a_later_prompt_is_the_first_with_the_answer_and_what_was_said_since(world):
    first, _, second, _, third, _ = talk(world).calls
    for earlier, later in ((first, second), (second, third)):
        kept = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(kept)] == kept
    assert told(third) == ["question", "right:\nright 1", "right:\nright 2"]


def test_the_ids_are_those_of_a_full_render_where_the_template_only_appends(world):
    third = talk(world).calls[4]
    contents = ["question", "left 1", "right:\nright 1", "left 2", "right:\nright 2"]
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    assert third.prompt_ids == render(world.Tokenizer(), messages)


def test_a_template_that_rewrites_earlier_turns_changes_no_earlier_id(world, monkeypatch):
    plain = world.Tokenizer.apply_chat_template

    def forgets_thoughts(self, conversation, **keys):
        kept = [{**m, "content": re.sub("<think>.*</think>", "", m["content"])} for m in conversation]
        return plain(self, kept, **keys)

    monkeypatch.setattr(world.Tokenizer, "apply_chat_template", forgets_thoughts)
    flow = world.workflow(TALK, agents=[{"name": "left", "memory": "chat"}, {"name": "right"}], loops=LOOP)
    episode = world.play(flow, world.Client(lambda prompt, sampling, request: "<think>hm</think>yes"))
    third = episode.calls[4]
    assert third.prompt_text.count("<think>hm</think>yes<|im_end|>\n<|im_start|>user") == 2
    assert len([row for row in rows_of([episode]) if row.calls[0].agent == "left"]) == 1


def test_the_calls_of_a_node_become_one_row_with_the_same_sampled_tokens_and_fewer_computed_ones(world):
    chat = talk(world)
    rows = rows_of([chat])
    assert [(row.calls[0].node, len(row.calls)) for row in rows] == [("a", 3), ("b", 3)]
    assert sorted(trained(chat)) == sorted(trained(talk(world, "none")))
    assert computed(chat) < computed(chat, merge=False) / 2
    assert len(rows_of([talk(world, "none")])) == 6


def test_without_memory_every_call_has_a_prompt_of_its_own(world):
    third = talk(world, "none").calls[4]
    assert len(told(third)) == 1 and told(third)[0].startswith("question")


def test_an_answer_that_was_cut_off_is_ended_before_the_next_message(world):
    def cut(prompt: str, sampling: dict, request: str) -> Generation:
        return Generation(world.Tokenizer().encode("to be"), [-0.5] * 5, "length")

    flow = world.workflow([{"id": "a"}], agents=[{"memory": "chat"}], episode={"max_turns": 2})
    first, second = world.play(flow, world.Client(cut)).calls
    assert second.prompt_text == first.prompt_text + "to be<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n" + (
        "<|im_start|>assistant\n"
    )
    assert first.stop_reason == "length" and first.response_mask == [1] * 5


def test_a_conversation_that_outgrows_the_context_ends_the_episode_as_a_long_prompt_does(world):
    flow = world.workflow([{"id": "a"}], agents=[{"memory": "chat"}], episode={"max_turns": 9})
    whole = world.play(flow, world.Client(lambda *_: "word"))
    limit = len(whole.calls[2].prompt_ids) + 1
    episode = world.play(flow, world.Client(lambda *_: "word"), max_model_len=limit)
    last = episode.calls[-1]
    assert episode.ended_by == "length" and len(episode.calls) == 4 and episode.info["prompt_too_long"] == 1
    assert last.stop_reason == "length" and not last.generations and not last.response_ids
    assert len(rows_of([episode])) == 1


def test_a_run_of_the_episode_that_is_retried_remembers_nothing(world):
    from recipe.dag.core.errors import ModelServerFault

    asked: list[str] = []

    def fails_late(prompt: str, sampling: dict, request: str) -> str:
        asked.append(prompt)
        if len(asked) in (2, 3, 4):  # the second call, all its tries
            raise ModelServerFault("down")
        return "ok"

    flow = world.workflow([{"id": "a"}], agents=[{"memory": "chat"}], episode={"max_turns": 2, "retries": 1})
    episode = world.play(flow, world.Client(fails_late))
    assert episode.attempts == 2 and episode.fault is None
    assert told(episode.calls[0]) == ["question"] and told(episode.calls[1]) == ["question", "Go on."]


def test_nodes_of_one_agent_have_a_conversation_each(world):
    nodes = [{"id": "a"}, {"id": "b"}]
    flow = world.workflow(nodes, agents=[{"memory": "chat"}], episode={"max_turns": 2})
    episode = world.play(flow, world.Client(lambda *_: "word"))
    assert [(row.calls[0].node, len(row.calls)) for row in rows_of([episode])] == [("a", 2), ("b", 2)]
    assert told(episode.calls[2]) == ["question", "agent0:\nword"], "the other node's words, and not its own again"


HOOK = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    rules = {"role": "system", "content": "be brief"}
    return [rules, {"role": "user", "content": f"{context.continues} {len(context.history)}"}]
"""


def with_hook(world, code: str, **keys):
    nodes = [{"id": "a", "hooks": "own.py"}]
    return world.workflow(nodes, agents=[{"memory": "chat"}], files={"own.py": code}, episode={"max_turns": 2, **keys})


def test_what_a_hook_says_is_appended_and_its_system_message_counts_once(world):
    first, second = world.play(with_hook(world, HOOK)).calls
    assert first.prompt_text.count("system") == second.prompt_text.count("system") == 1
    assert told(second) == ["False 0", "True 1"]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[5, 6, 7]", "own.py:2: hook fault .*`memory` needs messages, which it appends"),
        ("[{'role': 'system', 'content': '-'}]", "own.py:2: hook fault .*only system messages"),
    ],
)
def test_a_hook_that_has_nothing_to_append_is_a_fault_at_its_line(world, returned, problem):
    code = f"\ndef pre_process(tokenizer, prompt_ids, obs, *, context):\n    return {returned}\n"
    with pytest.raises(UserError, match=problem):
        world.play(with_hook(world, code))


def test_a_hook_without_context_is_refused_before_anything_runs(world):
    code = "def pre_process(tokenizer, prompt_ids, obs):\n    return prompt_ids\n"
    with pytest.raises(UserError, match="takes no `context`.*`memory: chat`"):
        world.runner(with_hook(world, code))


def test_a_template_that_cannot_go_on_is_refused_before_anything_runs(world, monkeypatch):
    monkeypatch.setattr(world.Tokenizer, "apply_chat_template", lambda self, conversation, **keys: "nothing")
    flow = world.workflow([{"id": "a"}], agents=[{"memory": "chat"}], episode={"max_turns": 2})
    with pytest.raises(UserError, match="policy main: the chat template omits the assistant's messages"):
        world.runner(flow)


def test_tool_calls_of_earlier_turns_stay_in_the_conversation(world):
    tool = world.Tool("add", lambda arguments, state: "5")
    script = iter(['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "five", "still five"])
    agents = [{"memory": "chat", "tools": ["add"], "tool_loop": {}}]
    flow = world.workflow([{"id": "a"}], agents=agents, episode={"max_turns": 2})
    episode = world.play(flow, world.Client(lambda *_: next(script)), [tool])
    first, second = episode.calls
    assert second.prompt_ids[: len(first.prompt_ids + first.response_ids)] == first.prompt_ids + first.response_ids
    assert "<tool_response>\n5\n</tool_response>" in second.prompt_text
    (row,) = rows_of([episode])
    assert len(row.calls) == 2


def test_many_episodes_at_once_keep_their_conversations_apart(world):
    flow = world.workflow([{"id": "a"}], agents=[{"memory": "chat"}], episode={"max_turns": 3})
    runner = world.runner(flow, world.Client(lambda prompt, sampling, request: request))

    async def play():
        samples = [world.sample(f"question {k}") for k in range(8)]
        return await asyncio.gather(
            *(runner.run(sample, f"u{k}", 0, step=0, validate=False) for k, sample in enumerate(samples))
        )

    for k, episode in enumerate(asyncio.run(play())):
        assert told(episode.calls[2]) == [f"question {k}", "Go on.", "Go on."]
        assert len(rows_of([episode])) == 1


FILE = """\
dag_id: demo
agents: [{name: solver, policy: main, memory: chat}]
policies: {main: {model: {path: m}}}
episode: {max_turns: TURNS}
nodes:
  - {id: solve, agent: solver}
  - {id: reward, reward: score.py:score, after: solve}
"""


def test_memory_of_an_agent_that_is_called_once_is_a_mistake(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "w.yaml").write_text(FILE.replace("TURNS", "2"))
    assert load_workflow(tmp_path / "w.yaml").agents[0].memory == "chat"
    (tmp_path / "w.yaml").write_text(FILE.replace("TURNS", "1"))
    with pytest.raises(
        WorkflowError, match=r"w.yaml:2:.*agents\[0\].memory: `chat` has no effect: each node of the agent"
    ):
        load_workflow(tmp_path / "w.yaml")
