"""Recorded episodes played again: what keeps its words, what is sampled, and what a change reaches."""

from __future__ import annotations

import asyncio
import json

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.fork import SILENCED, Fork, answers_of, key_of, name_of, slot_at
from recipe.dag.episode.replay import Change, Recorded, differing, play_effect
from recipe.dag.report.evaluation_log import episode_from
from recipe.dag.report.jsonfile import to_json
from tests.episode.conftest import Client, Tool
from tests.episode.flows import debate, flow_of


def by_seed(prompt, sampling, request):
    return f"{request.rsplit('-', 1)[1]} says {sampling['seed'] % 1000}"


def diamond(world):
    """`join` reads `left` alone; `right` runs beside it."""
    nodes = {"start": {}, "left": {"after": ["start"]}, "right": {"after": ["start"]}, "join": {"after": ["left"]}}
    return flow_of(world, nodes, hook=None)


def recorded_of(runner, sample, *, step=3) -> Recorded:
    """An episode as it is read back from the journal."""
    episode = asyncio.run(runner.run(sample, "u0", 1, step=step))
    return Recorded(episode_from(json.loads(to_json(episode))), step, validate=False)


def effect_of(runner, recorded, at: str, change: Change, n: int = 2):
    return asyncio.run(play_effect(runner, recorded, slot_at(recorded.episode, at), change, n))


@pytest.mark.parametrize("flow", [diamond, debate])
def test_without_a_change_the_first_continuation_is_the_record_and_the_next_differs_from_the_fork_on(world, flow):
    runner = world.runner(flow(world), Client(by_seed))
    recorded = recorded_of(runner, world.sample())
    for call in recorded.episode.calls:
        slot = key_of(call)[:3]
        effect = effect_of(runner, recorded, name_of(slot), Change())
        assert effect.repeats
        changed = list(differing(recorded.episode, effect.after[1]))
        assert changed[0][:3] == slot
        order = [key_of(one) for one in recorded.episode.calls]
        assert all(order.index(key) >= order.index(changed[0]) for key in changed)


def test_a_change_reaches_descendants_only_and_what_is_recorded_is_not_asked_again(world):
    client = Client(by_seed)
    runner = world.runner(diamond(world), client)
    recorded = recorded_of(runner, world.sample())
    for change, text in ((Change("silence"), ""), (Change("say", text="four"), "four")):
        client.requests.clear()
        effect = effect_of(runner, recorded, "left", change, n=1)
        left = effect.after[0].calls[1]
        assert (left.node, left.text) == ("left", text)
        assert (left.parsed == {"failed": SILENCED}) == (change.kind == "silence")
        assert {key[0] for key in differing(recorded.episode, effect.after[0])} <= {"left", "join"}
        assert [request.rsplit("-", 1)[1] for request, _, _ in client.requests] == ["agent3", "agent3"]
        assert effect.repeats, "without the change, the call at the fork keeps its words"


def test_an_agent_of_parallel_nodes_is_silent_in_all_of_them_and_not_before(world):
    nodes = {"start": {}, "left": {"after": ["start"]}, "right": {"after": ["start"], "agent": "agent1"}}
    runner = world.runner(flow_of(world, nodes, hook=None), Client(by_seed))
    recorded = recorded_of(runner, world.sample())
    agent = recorded.episode.calls[1].agent
    assert [call.agent for call in recorded.episode.calls[1:]] == [agent, agent]
    (episode,) = effect_of(runner, recorded, "left", Change("silence", agent), n=1).after
    assert [call.text == "" for call in episode.calls] == [False, True, True]
    (episode,) = effect_of(runner, recorded, "start", Change("silence", agent), n=1).after
    assert episode.calls[0].text == recorded.episode.calls[0].text, "a call of another agent is not asked again"


def test_a_silent_agent_is_silent_from_the_fork_on(world):
    runner = world.runner(debate(world), Client(by_seed))
    recorded = recorded_of(runner, world.sample())
    after = effect_of(runner, recorded, "talk_a.0.1", Change("silence", "agent2")).after[0]
    texts = [call.text for call in after.calls if call.node == "talk_a"]
    assert texts[0] and texts[1:] == ["", ""]


def test_a_call_with_tools_is_replayed_generation_by_generation_and_its_tools_run_again(world):
    ran = []

    def answer(prompt, sampling, request):
        if "tool_response" in prompt or "agent1" in request:
            return by_seed(prompt, sampling, request)
        return '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

    agents = [{"tools": ["look"], "tool_loop": {}}, {}]
    nodes = [{"id": "use"}, {"id": "read", "agent": "agent1", "after": ["use"]}]
    client, tool = Client(answer), Tool("look", lambda arguments, state: ran.append(1) or "42")
    flow = world.workflow(nodes, agents=agents, files={"tool.py": ""})
    runner = world.runner(flow, client, [tool])
    recorded = recorded_of(runner, world.sample())
    assert len(answers_of(recorded.episode.calls[0])) == 2
    client.requests.clear()
    effect = effect_of(runner, recorded, "read", Change(), n=1)
    assert effect.repeats and len(ran) == 2 and len(client.requests) == 1


def test_the_words_of_another_episode_are_said_whatever_was_asked(world):
    runner = world.runner(diamond(world), Client(by_seed))
    recorded, other = recorded_of(runner, world.sample()), recorded_of(runner, world.sample("another"), step=4)
    words = {("start", 0, 0): other.episode.calls[0]}
    played = asyncio.run(runner.run(world.sample(), "u0", 1, step=3, fork=Fork(words=words)))
    assert played.calls[0].text == other.episode.calls[0].text != recorded.episode.calls[0].text


def test_code_that_has_changed_since_is_an_error_not_another_past(world):
    runner = world.runner(diamond(world), Client(by_seed))
    recorded = recorded_of(runner, world.sample())
    recorded.episode.calls[0].prompt_ids[5] += 1
    with pytest.raises(UserError, match="node start: has another prompt than in the record"):
        effect_of(runner, recorded, "left", Change())


def test_an_address_is_a_node_a_turn_and_a_round(world):
    runner = world.runner(debate(world), Client(by_seed))
    episode = recorded_of(runner, world.sample()).episode
    assert slot_at(episode, "talk_b") == slot_at(episode, "talk_b.0.0") == ("talk_b", 0, 0)
    assert slot_at(episode, "talk_b.0.2") == ("talk_b", 0, 2) and name_of(("talk_b", 0, 2)) == "talk_b.0.2"
    with pytest.raises(UserError, match="its calls: solve_a, solve_b, talk_a, talk_b, talk_a.0.1"):
        slot_at(episode, "talk_b.1")


ENV = """
class Count:
    def reset(self):
        self.seen = []
        return "start"
    def step(self, actions, ground_truth):
        self.seen += actions
        return f"seen {len(self.seen)} {self.seen[-1]}", 0.0, False, {}
"""


def test_environments_are_stepped_again_and_later_turns_react_to_what_they_show(world):
    nodes = [{"id": "play", "env": "count.py:Count", "sees_env": True}, {"id": "idle", "agent": "agent1"}]
    flow = world.workflow(nodes, files={"count.py": ENV}, episode={"max_turns": 3})
    runner = world.runner(flow, Client(by_seed))
    recorded = recorded_of(runner, world.sample())
    assert effect_of(runner, recorded, "play.1", Change()).repeats
    effect = effect_of(runner, recorded, "play.1", Change("say", text="else"), n=1)
    changed, kept = effect.after[0].calls, recorded.episode.calls
    assert [call.text for call in changed[:4]] == [kept[0].text, kept[1].text, "else", kept[3].text]
    assert (changed[4].observation, changed[2].observation) == ("seen 2 else", kept[2].observation)
