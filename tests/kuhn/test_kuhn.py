"""Kuhn poker as workflows: whole games, who is paid and trained, the metrics, the teacher, the scripts."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.kuhn import curves, deals
from recipe.kuhn.exploitability import INFO_SETS
from recipe.kuhn.metrics import exploitability
from recipe.kuhn.teacher import NODES, Teacher
from tests.kuhn.equilibrium import equilibrium
from verl_dag.envs.kuhn_poker import LEGAL

ROOT = Path(__file__).resolve().parents[2]


def game(name, server, *moves, past="none", number=0):
    """Play the moves, whoever is asked, through the workflow's runner."""
    remaining = iter(moves)
    made = server(lambda prompt: next(remaining))
    workflow = load_workflow(ROOT / "workflows" / f"workflow_{name}.yaml")
    long = {"sampling": workflow.agents[0].sampling.model_copy(update={"max_tokens": 99})}  # a token per character
    agents = tuple(agent.model_copy(update=long) for agent in workflow.agents)
    workflow = workflow.model_copy(update={"agents": agents})
    runner = EpisodeRunner(workflow, dict.fromkeys(workflow.policies, PolicyEndpoint(made, made, 9999)), {}, seed=0)
    sample = {"prompt": [{"role": "user", "content": "Play."}], "ground_truth": "", "extra_info": {"past": past}}
    episode = asyncio.run(runner.run(sample, f"u{number}", 0, step=0))
    assert episode.fault is None, episode.fault
    return episode


@pytest.mark.parametrize(
    ("moves", "nodes"),
    [
        (("bet", "fold"), ["open", "reply"]),
        (("check", "check"), ["open", "reply"]),
        (("check", "bet", "fold"), ["open", "reply", "answer"]),
        (("hello",), ["open"]),
    ],
)
def test_a_game_ends_where_the_rules_end_it_and_pays_both_players(scripted_server, moves, nodes):
    episode = game("kuhn", scripted_server, *moves)
    assert [call.node for call in episode.calls] == nodes
    totals = {name: sum(call.reward for call in episode.calls_of(name)) for name in ("first", "second")}
    won = {"fold": 1.0 if len(moves) == 2 else -1.0, "hello": -2.0}.get(moves[-1])
    cards = episode.calls[0].env_info["cards"]
    won = ("JQK".index(cards[0]) > "JQK".index(cards[1])) * 2.0 - 1.0 if won is None else won
    assert totals == {"first": won, "second": -won if len(nodes) > 1 else 0}


@pytest.mark.parametrize(
    ("past", "policies"),
    [("none", ["main"] * 3), ("first", ["old", "main", "old"]), ("second", ["main", "old", "main"])],
)
def test_a_past_self_takes_the_seat_that_the_sample_says_and_is_not_trained(scripted_server, past, policies):
    episode = game("kuhn_past", scripted_server, "check", "bet", "fold", past=past)
    assert [call.policy for call in episode.calls] == policies
    assert [call.env_info["moves"] for call in episode.calls] == ["check", "check bet", "check bet fold"]
    trained = {call.agent: call.reward for call in episode.calls if call.policy == "main"}
    assert trained == {name: won for name, won in (("first", -1.0), ("second", 1.0)) if name in trained}
    rows = rows_of([episode])
    assert {row.policy for row in rows if row.policy == "main"} == {"main"}


class Player:
    """A policy with the given chances of putting a chip in; the rest goes to other texts."""

    def __init__(self, policy, legal=0.5):
        self.policy, self.legal, self.asked = policy, legal, []

    async def log_probs(self, messages, answers):
        text = messages[0]["content"]
        card = text.partition("Your card: ")[2][0]
        history = next(h for h in LEGAL if f"Moves so far: {', '.join(h) or 'none'}." in text)
        assert tuple(answers) == LEGAL[history]
        self.asked.append((card, history))
        chance = self.policy[card, history]
        return [math.log(self.legal * (1 - chance) + 1e-300), math.log(self.legal * chance + 1e-300)]


def test_the_metrics_are_those_of_the_policys_own_probabilities_among_legal_answers():
    state, player = {}, Player(equilibrium(0.2))
    metrics = asyncio.run(exploitability({"main": player}, state))
    assert sorted(player.asked) == sorted(INFO_SETS)
    assert metrics["nash_conv"] == pytest.approx(0, abs=1e-9) and metrics["legal_min"] == pytest.approx(0.5)
    assert metrics["first_wins"] == pytest.approx(-1 / 18)
    assert metrics["active/K"] == pytest.approx(0.6) and metrics["active/J_check_bet"] < 1e-9
    state = json.loads(json.dumps(state))  # as a checkpoint keeps it
    other = {info_set: 0.5 for info_set in INFO_SETS}
    later = asyncio.run(exploitability({"main": Player(other)}, state))
    assert later["nash_conv"] == pytest.approx(11 / 12)
    assert 0 < later["nash_conv_average"] < 11 / 12
    with pytest.raises(UserError, match="measures policy `main`, which the workflow lacks"):
        asyncio.run(exploitability({"one": player}, {}))


def test_the_teacher_shows_the_players_prompts_and_legal_moves(scripted_server):
    teacher = Teacher(load_workflow(ROOT / "workflows" / "workflow_kuhn.yaml"), seed=0)
    shown = [d for problem in teacher.problems(300, 8) for d in teacher.teach(problem)]
    taught = {(d.role, d.messages[0]["content"]) for d in shown}
    assert len(taught) == len(INFO_SETS) and {role for role, _ in taught} == set(NODES)
    assert all(d.answer in d.messages[0]["content"] for d in shown)
    prompts = {
        (call.node, call.prompt_text)
        for number in range(20)
        for call in game("kuhn", scripted_server, "check", "bet", "call", number=number).calls
    }
    assert len(prompts) > 6 and prompts <= taught, "the warm start sees the prompts of the game"


def test_half_of_the_games_have_a_past_self_on_either_seat(tmp_path):
    deals.main(["--local_dir", str(tmp_path), "--games", "8"])
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["past"] for row in rows] == ["none", "first", "none", "second"] * 2


def test_curves_show_every_seed_of_every_arm(tmp_path, capsys):
    for name, values in (("plain", (0.9, 0.3, 0.5)), ("plain_seed1", (0.7, 0.1)), ("past", (0.8,)), ("x", (0,))):
        folder = tmp_path / f"kuhn_{name}"
        folder.mkdir()
        lines = [{"step": 10 * n, "user/nash_conv": v, "user/nash_conv_average": 1.0} for n, v in enumerate(values)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert curves.main(["--runs", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert "| plain | last policy | 0.90, 0.70 | 0.30 (10), 0.10 (10) | 0.50 (20), 0.10 (10) |" in table
    assert "| past | averaged policy | 1.00 | 1.00 (0) | 1.00 (0) |" in table and "| x |" not in table
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"exploitability.md", "exploitability.png"}
    assert curves.main(["--runs", str(tmp_path / "none")]) == 2
    assert "no run of Kuhn poker; start one" in capsys.readouterr().err
