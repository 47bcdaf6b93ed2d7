"""The games as workflows: what players are told, how answers are read, and what they earn."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.dag.episode.record import Call, Episode
from recipe.dag.workflow.loader import load_workflow

ROOT = Path(__file__).resolve().parents[2]
GAMES = ROOT / "examples" / "games"


@pytest.fixture
def load(monkeypatch):
    """A module of the folder, fresh, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(GAMES))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def context(agent="one", text="", **upstream):
    calls = {node: SimpleNamespace(text=said) for node, said in upstream.items()}
    return SimpleNamespace(agent=agent, upstream=calls, call=SimpleNamespace(text=text))


def test_players_know_their_role_and_the_other_ones_choice_only_where_they_are_told(load):
    player = load("hooks").Player()

    def told(context, **options):
        return player.pre_process(None, [], None, context=context, **options)[0]["content"]

    assert told(context("one")) == told(context("two")) == "Choose a or b."
    assert told(context("two"), role=True, actions=3) == "You are player two. Choose a or b or c."
    assert told(context(one=" b")) == "The other player chose b. Choose a or b."


@pytest.mark.parametrize(("text", "action"), [("a", 0), (" b\n", 1), ("c", None), ("ab", None), ("", None)])
def test_an_answer_is_one_of_the_letters_or_nothing(load, text, action):
    assert load("hooks").Player().post_process(None, [], [], context=context(text=text)).parsed == {"action": action}


def played(*actions):
    calls = [
        Call(node=name, agent=name, agent_group=i, policy="p", turn=0, parsed={"action": action})
        for i, (name, action) in enumerate(zip(("one", "two"), actions, strict=True))
    ]
    return Episode(uid="u", index=0, sample={}, calls=calls[::-1])


@pytest.mark.parametrize("game", ["anti_coordination", "separating", "climbing"])
def test_players_earn_the_tables_entry_and_the_worst_for_no_answer(load, game):
    payoff, table = load("hooks").payoff, getattr(load("payoffs"), game.upper())
    for row, line in enumerate(table.tolist()):
        for column, entry in enumerate(line):
            episode = played(row, column)
            assert payoff(episode, game=game) == {"one": [entry], "two": [entry]}
            assert episode.outcome == float(entry == table.max())
    assert payoff(played(None, 0), game=game)["two"] == [table.min()]


def test_the_teacher_says_letters_at_random(load):
    workflow = load_workflow(GAMES / "workflow_role_token.yaml")
    teacher = load("teacher").Teacher(workflow, seed=0)
    shown = [d for problem in teacher.problems(40, 8) for d in teacher.teach(problem)]
    assert len(shown) == 80 and {d.answer for d in shown} == {"a", "b"}
    assert {d.messages[0]["content"] for d in shown} == {f"You are player {n}. Choose a or b." for n in ("one", "two")}


def test_layouts_differ_in_weights_and_prompts_alone():
    shared, token, separate = (
        load_workflow(GAMES / f"workflow_{name}.yaml") for name in ("shared", "role_token", "separate")
    )
    assert len(shared.policies) == len(token.policies) == 1 and len(separate.policies) == 2
    assert separate.algorithm.happo is not None and shared.algorithm.happo is None
    assert [n.agent_options.pre_process_kwargs for n in token.rollout_nodes] == [{"role": True}] * 2
    assert [n.agent_options.pre_process_kwargs for n in shared.rollout_nodes] == [{}] * 2
