"""The debate, played whole: who is asked what, when it ends, and who is paid."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.record import Call, Episode
from recipe.debate.hooks import right_answers

FILE = Path(__file__).parents[2] / "workflows" / "workflow_debate.yaml"


@pytest.fixture
def play(scripted_server):
    """Plays an episode; `solve`, `solve_left` (in its defence), `solve_right`, `judge`: the answers in order."""

    def play(file: Path = FILE, /, **answers: list[str]) -> tuple[Episode, list[str]]:
        left = {key: list(value) for key, value in answers.items()}

        def answer(prompt: str) -> str:
            defended = re.search(r"defend the answer of (\w+)", prompt)
            return left[defended[1] if defended else "judge" if "decide which" in prompt else "solve"].pop(0)

        server = scripted_server(answer)
        runner = EpisodeRunner(load_workflow(file), {"main": PolicyEndpoint(server, server, 9999)}, {}, seed=0)
        sample = {"prompt": [{"role": "user", "content": "What is 2^3?"}], "ground_truth": "8"}
        episode = asyncio.run(runner.run(sample, "u", 0, step=0))
        assert episode.fault is None, episode.fault
        return episode, server.prompts

    return play


def test_it_is_four_agents_in_forty_lines():
    workflow = load_workflow(FILE)
    assert len(FILE.read_text().splitlines()) <= 40
    assert [agent.name for agent in workflow.agents] == ["left", "right", "debater", "judge"]
    assert workflow.loops["debate"].max_rounds == 3 and workflow.trained_policies() == ("main",)


def test_solvers_who_agree_are_not_asked_to_debate(play):
    episode, prompts = play(solve=[r"\boxed{8}", r"\boxed{8}"], judge=[r"\boxed{8}"])
    assert [call.node for call in episode.calls] == ["solve_left", "solve_right", "judge"]
    assert {skip.node for skip in episode.skips} == {"defend_left", "defend_right"}
    assert episode.outcome == 1.0 and len(prompts) == 3


def test_the_debate_ends_when_both_sides_say_the_same(play):
    left, right = [r"\boxed{6}", r"you are right: \boxed{8}"], [r"\boxed{8}", r"\boxed{8}"]
    episode, prompts = play(
        solve=[r"\boxed{6}", r"\boxed{8}"], solve_left=left, solve_right=right, judge=[r"\boxed{8}"]
    )
    rounds = [(call.node, call.round) for call in episode.calls]
    assert rounds[2:-1] == [("defend_left", 0), ("defend_right", 0), ("defend_left", 1), ("defend_right", 1)]
    assert [call.reward for call in episode.calls] == [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert episode.info["rounds"] == 2 and episode.outcome == 1.0
    assert "you are right" in prompts[-1] and prompts[0].startswith("What is 2^3?\n\nSolve")


def test_it_ends_after_three_rounds_without_agreement(play):
    episode, _ = play(
        solve=[r"\boxed{6}", "no idea"],
        solve_left=[r"\boxed{6}"] * 3,
        solve_right=["still none"] * 3,
        judge=[r"\boxed{6}"],
    )
    assert len(episode.calls) == 2 + 2 * 3 + 1
    assert episode.outcome == 0.0 and all(call.reward == 0.0 for call in episode.calls)


def test_a_debater_that_remembers_hears_the_other_sides_reply_alone(scripted_server, tmp_path):
    class Chat(scripted_server):
        def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
            text = "".join(f"<{m['role']}>{m['content']}\0" for m in messages)
            return self.encode(text) if tokenize else text

    def episode_of(memory: str) -> Episode:
        file = tmp_path / f"{memory}.yaml"
        file.write_text(FILE.read_text().replace("{max_tokens: 384}}", f"{{max_tokens: 384}}, memory: {memory}}}"))
        server = Chat(lambda prompt: f"{'so ' * 60}{len(prompt)}")  # never the same answer
        runner = EpisodeRunner(load_workflow(file), {"main": PolicyEndpoint(server, server, 9999)}, {}, seed=0)
        sample = {"prompt": [{"role": "user", "content": "What is 2^3?"}], "ground_truth": "8"}
        return asyncio.run(runner.run(sample, "u", 0, step=0))

    chat, anew = episode_of("chat"), episode_of("none")
    second = [call for call in chat.calls if call.node == "defend_left"][1]
    added = "".join(chr(i) for i in second.prompt_ids).rpartition("<user>")[2]
    assert added.startswith("defend_right said:") and added.count(" said:") == 1 and "2^3" not in added
    assert "Look for mistakes" in added
    lengths = [
        sum(len(row.prompt_ids) + len(row.response_ids) for row in rows_of([episode])) for episode in (chat, anew)
    ]
    assert [len(row.calls) for row in rows_of([chat]) if row.calls[0].agent == "debater"] == [3, 3]
    assert lengths[0] < 0.8 * lengths[1]


PLAYERS = "players: [[solve_left, defend_left], [solve_right, defend_right]]"


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        # right are solve_right, defend_right, in the second round defend_left, the judge
        ("debate_incentives", f"attract: 0.5, follow: 0.25, {PLAYERS}", [0.0, 1.0, 0.0, 1.5, 1.25, 1.0, 1.0]),
        ("shaped", f"shaping: margin, alpha: 1.0, {PLAYERS}", [0.0, 1.0, 0.0, 1.0, 2.0, 1.0, 1.0]),
        ("shaped", "shaping: margin, alpha: 1.0", [0.0, 1.0, 0.0, 1.0, 2.0, 1.0, 1.0]),
        ("shaped", f"shaping: shared, {PLAYERS}", [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0]),
    ],
)
def test_its_rewards_can_be_shaped(play, tmp_path, monkeypatch, function, kwargs, expected):
    monkeypatch.chdir(FILE.parents[1])  # where recipe/debate is
    node = f"""\
  - {{id: shape, reward: "recipe.dag.reward.credit:{function}", after: reward, args: {{{kwargs}}}}}
"""
    (tmp_path / "shaped.yaml").write_text(FILE.read_text() + node)
    right = [r"\boxed{8}"] * 2
    episode, _ = play(
        tmp_path / "shaped.yaml",
        solve=[r"\boxed{6}", right[0]],
        solve_left=[r"\boxed{6}", right[0]],
        solve_right=right,
        judge=right[:1],
    )
    assert [call.reward for call in episode.calls] == expected
    agreed, _ = play(tmp_path / "shaped.yaml", solve=right, judge=right[:1])
    assert [call.node for call in agreed.calls] == ["solve_left", "solve_right", "judge"]


def test_an_unknown_judge_is_named():
    episode = Episode("u", 0, {"ground_truth": "8"}, [Call("other", "other", 0, "p", 0)])
    with pytest.raises(UserError, match="node 'judge' made no call; nodes that did: other"):
        asyncio.run(right_answers(episode))
