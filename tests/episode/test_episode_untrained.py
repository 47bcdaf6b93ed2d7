"""Agents whose policy is not trained: calls that may fail, further requests, outputs that only some nodes see."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import ModelServerFault, UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.report.metrics import rollout_metrics
from tests.remote.openai_server import OpenAIServer, tool_call
from tests.remote.test_remote_chat import calculator, looped
from tests.remote.test_remote_chat import flow as api_flow
from tests.remote.test_remote_chat import play as api_play

HEAD = "from recipe.dag import Agent, Context, Output, SkipCall\n"
REWARD = {"id": "r", "after": ["a"], "reward": "reward.py:score"}


def judged(world, hook: str, *, frozen: bool = True, on_failure: str = "skip", solver=None, judge=None, **keys):
    """A trained agent at node `a`, and behind it node `b` with the class `Judge` in `hook`."""
    nodes = [
        {"id": "a"},
        {"id": "b", "agent": "agent1", "after": ["a"], **({"hooks": "hook.py:Judge"} if hook else {})},
        REWARD,
    ]
    policies = {"main": {"model": {"path": "m"}}, "judge": {"model": {"path": "m"}, "frozen": frozen}}
    agents = [solver or {}, {"policy": "judge", "on_failure": on_failure, **(judge or {})}]
    files = {"hook.py": HEAD + hook, "reward.py": "def score(episode): return {'agent0': 1.0, 'agent1': 0.0}"}
    return world.workflow(nodes, agents=agents, policies=policies, files=files, **keys)


def says(world, answer):
    """A client: agent1 says what `answer(prompt)` returns or raises."""

    def script(prompt, sampling, request):
        return answer(prompt) if request.endswith("agent1") else "it is 4"

    return world.Client(script)


def broken(prompt):
    raise ModelServerFault("down")


def test_a_call_that_fails_is_recorded_and_the_episode_goes_on(world):
    client = says(world, broken)
    episode = world.play(judged(world, ""), client)
    solve, judge = episode.calls
    assert episode.fault is None and episode.ended_by == "turns" and episode.attempts == 1
    assert judge.parsed == {"failed": "model fault in node b, policy judge: down"} and judge.text == ""
    assert solve.reward == 1.0 and [row.calls[0].node for row in rows_of([episode])] == ["a"]
    # each of the tries is counted, the last of them once
    assert len(client.requests) == 4 and rollout_metrics([episode])["faults/model"] == 3


def test_without_skip_the_episode_fails(world):
    episode = world.play(judged(world, "", on_failure="fault", episode={"on_failure": "mask"}), says(world, broken))
    assert episode.fault["boundary"] == "model"


def test_a_call_that_takes_too_long_is_skipped(world):
    async def hang():
        await asyncio.Event().wait()

    flow = judged(world, "", episode={"call_timeout_s": 1.0})
    episode = world.play(flow, says(world, lambda prompt: hang()))
    assert episode.fault is None and "took longer than" in episode.calls[1].parsed["failed"]


def test_a_bug_in_a_hook_is_no_failure_to_skip(world):
    hook = "class Judge(Agent):\n    def parse(self, context):\n        return Output(parsed={'x': 1 / 0})\n"
    with pytest.raises(UserError, match="ZeroDivisionError"):
        world.play(judged(world, hook))


def test_a_prompt_that_does_not_fit_is_skipped_and_does_not_end_the_episode(world):
    hook = "class Judge(Agent):\n    def prompt(self, context):\n"
    hook += "        return [{'role': 'user', 'content': 'x' * 500}]\n"
    flow = judged(world, hook, episode={"max_turns": 2})
    episode = world.play(flow, max_model_len=400)
    assert [call.node for call in episode.calls] == ["a", "b", "a", "b"] and episode.ended_by == "turns"
    assert episode.calls[1].parsed == {"failed": "its prompt does not fit into the context"}


def test_a_hook_may_find_that_there_is_nothing_to_ask(world):
    hook = "class Judge(Agent):\n    def prompt(self, context):\n        raise SkipCall('nothing to judge')\n"
    client = world.Client()
    episode = world.play(judged(world, hook, on_failure="fault"), client)
    assert episode.calls[1].parsed == {"failed": "nothing to judge"} and len(client.requests) == 1
    assert episode.fault is None and episode.faults == []
    with pytest.raises(UserError, match="skips its call .nothing to judge., but its policy is trained"):
        world.play(judged(world, hook, frozen=False, on_failure="fault"))


def test_skip_is_refused_at_load_for_a_trained_policy(tmp_path):
    text = (
        "dag_id: d\nagents: [{name: a, policy: main, on_failure: skip}]\npolicies: {main: {model: {path: m}}}\n"
        "nodes: [{id: n, agent: a}]\n"
    )
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(
        UserError, match=r"w.yaml:2:\d+: agents\[0\].on_failure: `skip` is for agents whose policy is not"
    ):
        load_workflow(tmp_path / "w.yaml")


ASKS = """
class Judge(Agent):
    def prompt(self, context):
        return [{"role": "user", "content": "first"}]
    async def parse(self, context):
        return Output(parsed={"again": await context.ask([{"role": "user", "content": "SECOND" * TIMES}])})
"""


def test_a_hook_asks_a_frozen_policy_again(world):
    client = says(world, lambda prompt: "two" if "SECOND" in prompt else "one")
    episode = world.play(judged(world, ASKS.replace("TIMES", "1")), client)
    judge = episode.calls[1]
    assert judge.text == "one" and judge.parsed == {"again": "two"} and judge.generations == 2
    assert judge.messages == [{"role": "user", "content": "SECOND"}, {"role": "assistant", "content": "two"}]
    assert world.text(judge) == "one<|im_end|>"  # the ids are those of the first answer alone
    seeds = [sampling["seed"] for request, _, sampling in client.requests if request.endswith("agent1")]
    assert len(set(seeds)) == 2


def test_what_the_prompt_asked_counts_and_the_loop_of_tools_still_ends(world):
    """Two questions before the call's own generation, of which there may be one."""
    hook = """
class Judge(Agent):
    async def prompt(self, context):
        for _ in range(2):
            await context.ask([{"role": "user", "content": "SECOND"}])
        return [{"role": "user", "content": "first"}]
"""
    client = says(world, lambda prompt: "asked" if "SECOND" in prompt else "```python\n1\n```")
    loop = {"tools": ["python"], "tool_loop": {"format": "fenced", "max_generations": 1}}
    call = world.play(
        judged(world, hook, judge=loop), client, [world.Tool("python", lambda arguments, state: "1")]
    ).calls[1]
    assert (call.generations, call.stop_reason) == (3, "max_generations")


def test_a_second_prompt_that_does_not_fit_is_a_failure(world):
    episode = world.play(judged(world, ASKS.replace("TIMES", "99")), max_model_len=400)
    assert "does not fit" in episode.calls[1].parsed["failed"]


def test_a_hook_that_asks_from_its_own_thread_has_the_rest_of_the_calls_time(world):
    """Of 10 s, the call has spent far more."""
    hook = """import asyncio
class Judge(Agent):
    async def parse(self, context):
        context.call.start_seconds -= 1e6
        await asyncio.to_thread(asyncio.run, context.ask([{"role": "user", "content": "SECOND"}]))
"""

    async def hang():
        await asyncio.Event().wait()

    flow = judged(world, hook, episode={"call_timeout_s": 10})
    episode = world.play(flow, says(world, lambda prompt: hang() if "SECOND" in prompt else "one"))
    assert "an answer took longer than 0.001 s" in episode.calls[1].parsed["failed"]


def test_a_trained_policy_cannot_be_asked_again(world):
    with pytest.raises(UserError, match="node b: context.ask is for agents whose policy is not trained"):
        world.play(judged(world, ASKS.replace("TIMES", "1"), frozen=False, on_failure="fault"))


def test_a_compute_node_has_no_model_to_ask(world):
    nodes = [
        {"id": "a"},
        {"id": "c", "after": ["a"], "compute": "f.py:f"},
    ]
    code = "async def f(context): return await context.ask([])"
    with pytest.raises(UserError, match="this node has none"):
        world.play(world.workflow(nodes, files={"f.py": code}))


def test_an_answer_is_handed_over_without_its_thoughts(world):
    text = "<think>is it 5? no</think>It is 4."
    for hand_over, shown in (("all", text), ("answer", "It is 4.")):
        client = world.Client(lambda prompt, sampling, request: text)
        episode = world.play(judged(world, "", solver={"hand_over": hand_over}), client)
        assert f"agent0:\n{shown}<|im_end|>" in client.requests[1][1]
        assert episode.calls[0].text == text and episode.calls[0].handed == shown


def test_a_thought_that_the_prompt_opened_is_not_handed_over(world):
    solver = {"hand_over": "answer", "chat_template_kwargs": {"prefix": "<think>\n"}}
    client = world.Client(lambda prompt, sampling, request: "maybe 5\n</think>\nIt is 4.")
    world.play(judged(world, "", solver=solver), client)
    assert "agent0:\nIt is 4.<|im_end|>" in client.requests[1][1]


PRIVATE = "class Judge(Agent):\n    private = {}\n    def parse(self, context):\n        return None\n"


def loop_of(world, hook: str, *, after: str = "a"):
    """Nodes `a` and the judge `b` in a loop of two rounds, and `c` behind `after`; `a` and `c` have no hooks."""
    nodes = [
        {"id": "a"},
        {"id": "b", "agent": "agent1", "after": ["a"], "hooks": "hook.py:Judge"},
        {"id": "c", "agent": "agent2", "after": [after]},
    ]
    loops = {"l": {"nodes": ["a", "b"], "max_rounds": 2}}
    return world.workflow(nodes, files={"hook.py": HEAD + hook}, loops=loops, episode={"max_turns": 2})


@pytest.mark.parametrize(
    ("private", "after", "seen"), [(True, "a", set()), (True, "b", {"agent2"}), (False, "a", {"agent0"})]
)
def test_a_private_output_is_read_by_the_nodes_that_name_it(world, private, after, seen):
    client = world.Client(lambda prompt, sampling, request: "VERDICT" if request.endswith("agent1") else "ok")
    world.play(loop_of(world, PRIVATE.format(private), after=after), client)
    readers = {request.rsplit("-", 1)[1] for request, prompt, _ in client.requests if "VERDICT" in prompt}
    assert readers - {"agent1"} == seen


def test_a_private_output_is_not_in_the_calls_that_hooks_get(world):
    code = (
        HEAD + "seen = []\ndef prompt(context):\n    seen.append((context.node, [c.node for c in context.calls]))\n"
        "    return [{'role': 'user', 'content': 'x'}]\n"
    )
    flow = loop_of(
        world, "class Judge(Agent):\n    private = True\n    def parse(self, context):\n        return None\n"
    )
    nodes = [node.model_copy(update={"hooks": "seen.py"}) if node.id != "b" else node for node in flow.nodes]
    (world.path / "seen.py").write_text(code)
    flow = flow.model_copy(update={"nodes": tuple(nodes)})
    episode = world.play(flow)
    assert [call.node for call in episode.calls].count("b") == 4
    assert all("b" not in calls for _, calls in load_object("seen.py", flow.path).seen)


ENV = """
class Game:
    def step(self, actions, ground_truth):
        return f"you said {actions[-1]}", 0.0, False, {"n": len(actions)}
"""


def test_the_answer_of_the_env_to_an_action_is_in_its_call(world):
    nodes = [{"id": "a", "env": "env.py:Game", "sees_env": True}]
    episode = world.play(world.workflow(nodes, files={"env.py": ENV}, episode={"max_turns": 2}))
    assert [(call.observation, call.next_observation) for call in episode.calls] == [
        ("", "you said ok"),
        ("you said ok", "you said ok"),
    ]


READS = """
class Judge(Agent):
    def prompt(self, context):
        return [{"role": "user", "content": "READ:" + context.read_by(context.upstream["a"])}]
"""


def test_what_an_agent_with_tools_had_read_includes_their_results(world):
    """The published system showed a judge the last output before the action, and nothing else."""
    code = '<tool_call>{"name": "calc", "arguments": {"code": "6*7"}}</tool_call>'

    def script(prompt, sampling, request):
        if request.endswith("agent1"):
            return "fine"
        return "It is 42." if "42" in prompt else f"Let me see. {code}"

    client = world.Client(script)
    episode = world.play(judged(world, READS, solver=looped()), client, [calculator(world)])
    solve, judge = episode.calls
    assert solve.generations == 2
    sent = client.requests[1][1]  # what the server was sent before the last generation of the judged agent
    assert f"READ:{sent}<|im_end|>" in judge.prompt_text
    assert "Let me see." in sent and "<tool_response>\n42" in sent and "It is 42." not in sent


def test_the_same_holds_for_a_chat_api(world):
    hook = HEAD + READS
    nodes = [
        {"id": "a"},
        {"id": "b", "agent": "agent1", "after": ["a"], "hooks": "hook.py:Judge"},
    ]

    def answer(body):
        if body["messages"][-1]["content"].startswith("READ:"):
            return "fine"
        results = [message for message in body["messages"] if message["role"] == "tool"]
        return f"It is {results[-1]['content']}." if results else tool_call("calc", "call_x", code="6*7")

    with OpenAIServer(answer) as server:
        flow = api_flow(world, server, nodes=nodes, agent=looped(), files={"hook.py": hook})
        judge = flow.agents[0].model_copy(update={"name": "agent1", "tools": (), "tool_loop": None})
        (episode,) = api_play(world, flow.model_copy(update={"agents": (flow.agents[0], judge)}), [calculator(world)])
    prompt = episode.calls[1].messages[0]["content"]
    assert prompt.startswith("READ:user:\nquestion\n\nassistant:\n") and prompt.endswith("tool:\n42")
