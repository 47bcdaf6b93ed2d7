"""Agents with `memory: shared`: whose call is continued, what is told, and how the rows of several agents merge."""

from __future__ import annotations

import asyncio
import re

import pytest

from recipe.dag.core.errors import ModelServerFault, UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow

PARSED = """
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return Output(text=f"made of {context.call.text}")
"""
JUDGE = """
from recipe.dag.types.context import Output
def post_process(tokenizer, prompt_ids, response_ids, *, context):
    return Output(parsed={"score": float(context.upstream["a"].text)})
"""
HOOK = """
def pre_process(tokenizer, prompt_ids, obs, *, context):
    heard = "".join(name for name, call in context.upstream.items() if context.remembers(call))
    rules = {"role": "system", "content": f"rules of {context.node}"}
    return [rules, {"role": "user", "content": f"{context.node} {context.continues} {heard}"}]
"""


def flow_of(world, nodes: dict[str, dict], *, agents: dict[str, dict] | None = None, files=None, **keys):
    """One agent per node, named like it, with the memory `shared` unless `agents` says otherwise."""
    listed = [{"id": name, "agent": name, **node} for name, node in nodes.items()]
    own = [{"name": name, "memory": "shared", **(agents or {}).get(name, {})} for name in nodes]
    return world.workflow(listed, agents=own, files=files, **keys)


def chain(*names: str) -> dict[str, dict]:
    return {name: {"after": [names[k - 1]] if k else []} for k, name in enumerate(names)}


DIAMOND = {"a": {}, "b": {"after": ["a"]}, "c": {"after": ["a"]}, "d": {"after": ["b", "c"]}}


def named(prompt: str, sampling: dict, request: str) -> str:
    return f"{request.rpartition('-')[2]} says"


def play(world, flow, script=named, **keys):
    return world.play(flow, world.Client(script), **keys)


def told(call) -> list[str]:
    """The user's messages in a prompt."""
    return re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", call.prompt_text, re.S)


def continues(later, earlier) -> bool:
    kept = earlier.prompt_ids + earlier.response_ids
    return later.prompt_ids[: len(kept)] == kept


def positions(episode) -> list[list[int]]:
    return [[call.position for call in row.calls] for row in rows_of([episode])]


def test_the_calls_of_several_agents_are_one_conversation_and_one_row(world):
    episode = play(world, flow_of(world, chain("a", "b", "c")))
    first, second, third = episode.calls
    assert continues(second, first) and continues(third, second)
    assert told(third) == ["question", "Go on.", "Go on."]
    (row,) = rows_of([episode])
    assert row.agents == ["a", "b", "c"] and row.prompt_ids == first.prompt_ids
    assert row.prompt_ids + row.response_ids == third.prompt_ids + third.response_ids


def test_a_text_from_parse_is_told_since_the_conversation_does_not_contain_it(world):
    nodes = chain("a", "b", "c")
    nodes["b"]["hooks"] = "own.py"
    last = play(world, flow_of(world, nodes, files={"own.py": PARSED})).calls[-1]
    assert told(last) == ["question", "Go on.", "b:\nmade of b says"] and "b says<|im_end|>" in last.prompt_text


@pytest.mark.parametrize("slow", ["b", "c"])
def test_nodes_that_run_at_once_fork_and_a_later_one_is_told_what_its_branch_lacks(world, slow):
    """... whichever of them finishes first."""

    async def script(prompt: str, sampling: dict, request: str) -> str:
        for _ in range(20 * request.endswith(f"-{slow}")):
            await asyncio.sleep(0)
        return named(prompt, sampling, request)

    episode = play(world, flow_of(world, DIAMOND), script)
    a, b, c, d = episode.calls
    assert continues(b, a) and continues(c, a) and continues(d, c) and not continues(d, b)
    assert told(d) == ["question", "Go on.", "b:\nb says"]
    assert positions(episode) == [[0, 1], [2, 3]]


def test_what_one_branch_was_told_is_told_in_the_other_one_too(world):
    nodes = {"x": {}, **DIAMOND, "b": {"after": ["a", "x"]}, "d": {"after": ["x", "b", "c"]}}
    x, a, b, c, d = play(world, flow_of(world, nodes, agents={"x": {"memory": "none"}})).calls
    assert told(b) == ["question", "x:\nx says"] and told(c) == ["question", "Go on."]
    assert told(d) == ["question", "Go on.", "x:\nx says\n\nb:\nb says"]


def test_a_later_turn_and_a_later_round_continue_the_latest_call_before_them(world):
    loop = {"talk": {"nodes": ["a", "b"], "max_rounds": 2}}
    flow = flow_of(world, chain("a", "b", "c"), loops=loop, episode={"max_turns": 2})
    episode = play(world, flow)
    assert len(episode.calls) == 10
    assert all(continues(later, earlier) for earlier, later in zip(episode.calls, episode.calls[1:], strict=False))
    assert positions(episode) == [list(range(10))] and set(told(episode.calls[-1])[1:]) == {"Go on."}


def test_only_agents_of_the_policy_that_share_are_in_its_conversation(world):
    agents = {"b": {"memory": "none"}, "c": {"policy": "other"}}
    policies = {name: {"model": {"path": "m"}} for name in ("main", "other")}
    flow = flow_of(world, chain("a", "b", "c", "d"), agents=agents, policies=policies, episode={"max_turns": 2})
    episode = play(world, flow)
    assert positions(episode) == [[0, 3, 4, 7], [1], [2, 6], [5]]
    # d's first call continues a's, which has not read b and c
    assert told(episode.calls[3]) == ["question", "c:\nc says"] and told(episode.calls[2])[0].startswith("question")


def test_a_hook_knows_which_calls_it_continues_and_only_the_first_system_message_counts(world):
    nodes = {name: node | {"hooks": "own.py"} for name, node in DIAMOND.items()}
    a, b, c, d = play(world, flow_of(world, nodes, files={"own.py": HOOK})).calls
    assert told(a) == ["a False "] and told(b) == ["a False ", "b True a"]
    assert told(d) == ["a False ", "c True a", "d True ac"]
    assert "rules of a" in d.prompt_text and "rules of c" not in d.prompt_text


def test_a_call_that_failed_is_not_continued(world):
    def script(prompt: str, sampling: dict, request: str) -> str:
        if request.endswith("-b"):
            raise ModelServerFault("down")
        return named(prompt, sampling, request)

    agents = {"b": {"on_failure": "skip"}}
    policies = {"main": {"model": {"path": "m"}, "frozen": True}}
    episode = play(world, flow_of(world, chain("a", "b", "c"), agents=agents, policies=policies), script)
    assert continues(episode.calls[2], episode.calls[0]) and episode.calls[1].parsed["failed"]


def test_a_judge_continues_the_candidate_that_it_judges(world):
    nodes = chain("a", "b", "c")
    nodes["a"]["candidates"] = {"k": 3, "by": "b"}
    nodes["b"]["hooks"] = "own.py"
    answers = iter("375")

    def script(prompt: str, sampling: dict, request: str) -> str:
        return next(answers) if request.endswith("-a") else named(prompt, sampling, request)

    episode = play(world, flow_of(world, nodes, files={"own.py": JUDGE}), script)
    kept, verdict, last = episode.calls
    assert kept.text == "7" and continues(verdict, kept) and continues(last, verdict)
    of = {call.candidate: call for call in episode.dropped if call.node == "a"}
    judged = [call for call in episode.dropped if call.node == "b"]
    assert len(judged) == 2 and all(continues(call, of[call.candidate]) for call in judged)
    assert positions(episode)[0] == [0, 1, 2]


def test_every_candidate_continues_the_conversation(world):
    nodes = chain("a", "b", "c")
    nodes["b"]["candidates"] = {"k": 3, "by": "own.py:length"}
    code = "def length(context): return len(context.continued) * len(context.call.text)\n"
    episode = play(world, flow_of(world, nodes, files={"own.py": code}))
    a, kept, c = episode.calls
    tried = [kept, *episode.dropped]
    assert [call.score for call in tried] == [6.0] * 3 and all(continues(call, a) for call in tried)
    assert positions(episode) == [[0, 1, 2], [3], [4]] and continues(c, kept)


def test_an_agent_whose_calls_are_private_cannot_share(world):
    code = "from recipe.dag import Agent\nclass Own(Agent):\n    private = True\n    def prompt(self, context): ...\n"
    nodes = chain("a", "b")
    nodes["b"]["hooks"] = "own.py:Own"
    with pytest.raises(UserError, match="node b: its code is private.*remove `memory: shared`"):
        world.runner(flow_of(world, nodes, files={"own.py": code}))


FILE = """\
dag_id: demo
agents:
  - {name: one, policy: main, memory: shared}
  - {name: two, policy: main, memory: shared}
policies: {main: {model: {path: m}}}
nodes:
  - {id: first, agent: one}
  - {id: second, agent: two, after: first}
  - {id: reward, reward: score.py:score, after: second}
"""
LOOKUP_CODE = "class Lookup:\n    schema = {}\n    async def execute(self, arguments, state): ...\n"
LOOKUP = "tools: [{path: tools.py:Lookup}], tool_loop: {format: hermes}"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (", after: first", "", r"w.yaml:3:.*agents\[0\].memory: `shared` has no effect: no call of an agent of policy"),
        ("one, policy: main, memory: shared", "one, policy: main", r"w.yaml:4:.*agents\[1\].memory: `shared` has no"),
        ("two, policy: main, ", f"two, policy: main, {LOOKUP}, ", r"w.yaml:4:.*`two` and `one` show different ones"),
        ("two, policy: main, ", "two, policy: main, hand_over: answer, ", r"w.yaml:4:.*remove this, or `hand_over"),
        ("two, policy: main, ", f"two, policy: main, {LOOKUP.replace('hermes', 'fenced')}, ", ""),
        (", after: first", "", ""),
    ],
)
def test_what_agents_cannot_share_is_a_mistake(tmp_path, old, new, problem):
    assert old in FILE
    text = FILE.replace(old, new) + ("episode: {max_turns: 2}" if not problem else "")
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")
    (tmp_path / "tools.py").write_text(LOOKUP_CODE)
    (tmp_path / "w.yaml").write_text(text)
    if not problem:
        assert load_workflow(tmp_path / "w.yaml").agents[1].memory == "shared"
        return
    with pytest.raises(WorkflowError, match=problem):
        load_workflow(tmp_path / "w.yaml")
