"""The games as workflows: prompts, parsed answers and rewards of the players."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.core.user_code import load_object
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.record import Call, Episode

ROOT = Path(__file__).resolve().parents[2]
GAMES = ROOT / "examples" / "games"
WORKFLOWS = GAMES / "workflows"
SIZED = [*(f"relay_{n}" for n in range(2, 6)), *(f"additive{vdn}_{n}" for vdn in ("", "_vdn") for n in range(2, 9))]


def module(name):
    return load_object(f"{name}.py", GAMES)


def shipped(name):
    return load_workflow(WORKFLOWS / f"workflow_{name}.yaml")


@pytest.fixture
def sized(tmp_path):
    def load(name):
        file = tmp_path / "made" / "workflow.yaml"
        assert module("sized").main([name, "--output", str(file)]) == 0
        return load_workflow(file)

    return load


def context(agent="one", text="", number=0, **upstream):
    calls = {node: SimpleNamespace(text=said) for node, said in upstream.items()}
    sample = {"ground_truth": str(number)}
    return SimpleNamespace(agent=agent, upstream=calls, call=SimpleNamespace(text=text), sample=sample)


def test_players_see_their_role_and_the_other_choice_only_where_the_workflow_shows_it():
    hooks = module("hooks")

    def told(context, player=hooks.Player, **options):
        return player().prompt(context, **options)[0]["content"]

    assert told(context("one")) == told(context("two")) == "Choose a or b."
    assert told(context("two"), role=True, actions=3) == "You are player two. Choose a or b or c."
    assert told(context(one=" b")) == "The other player chose b. Choose a or b."
    assert told(context(number=11), hooks.Speaker, actions=4) == "The number is 3. Choose a or b or c or d."
    heard = told(context(number=11, speak="c"), hooks.Guesser, actions=4)
    assert heard == "The other player chose c. Choose 0 or 1 or 2 or 3."


@pytest.mark.parametrize(
    ("text", "action"), [("a", 0), (" b\n", 1), ("f", None), ("ab", None), ("0", None), ("", None)]
)
def test_an_answer_is_one_of_the_letters_or_nothing(text, action):
    hooks = module("hooks")
    assert hooks.Player().parse(context(text=text)).parsed == {"action": action}
    assert hooks.Guesser().parse(context(text=text)).parsed["action"] == (0 if text == "0" else None)


def played(*actions, texts=(), number=0):
    calls = [
        Call(node=str(i), agent=f"p{i}", agent_group=i, policy="p", turn=0, parsed={"action": action}, text=text)
        for i, (action, text) in enumerate(zip(actions, texts or [""] * len(actions), strict=True))
    ]
    return Episode(uid="u", index=0, sample={"ground_truth": str(number)}, calls=calls[::-1])


@pytest.mark.parametrize("game", ["anti_coordination", "separating", "climbing"])
def test_players_earn_the_tables_entry_and_the_worst_for_no_answer(game, monkeypatch):
    payoff, table = module("hooks").payoff, getattr(module("payoffs"), game.upper())
    for row, line in enumerate(table.tolist()):
        for column, entry in enumerate(line):
            episode = played(row, column)
            assert payoff(episode, game=game) == {"p0": [entry], "p1": [entry]}
            assert episode.outcome == float(entry == table.max())
    for actions in ((None, 0), (0, len(table))):
        assert payoff(played(*actions), game=game)["p1"] == [table.min()]


@pytest.mark.parametrize(("guess", "earned"), [(2, 1.0), (1, 0.0), (None, 0.0)])
def test_the_relay_pays_both_for_the_right_guess(guess, earned):
    episode = played(0, guess, number=5)
    assert module("hooks").guessed(episode, symbols=3, guesser="p1") == {"p0": [earned], "p1": [earned]}
    assert episode.outcome == earned


def test_every_player_of_the_additive_game_earns_the_teams_share():
    episode = played(0, 1, 0, 0, texts=["a", "b ", "a", ""])
    assert module("hooks").additive(episode, right="abba") == {f"p{i}": [0.5] for i in range(4)}
    assert episode.outcome == 0.0
    episode = played(0, 1, texts=["a", "b"])
    assert module("hooks").additive(episode, right="ab")["p1"] == [1.0] and episode.outcome == 1.0


def test_in_the_lottery_the_last_player_decides_about_forty_times_what_another_one_does():
    lottery = module("hooks").lottery
    for gambler, stake in (("a", 10.0), ("b", -10.0), ("", -10.0)):
        episode = played(0, 1, 0, texts=["a", "a", gambler])
        assert lottery(episode, right="ab", stake=10.0) == {f"p{i}": [0.5 + stake] for i in range(3)}
        assert (episode.info["right"], episode.outcome) == (0.5, 0.0)


@pytest.mark.parametrize("name", SIZED)
def test_sized_games_are_valid_workflows(name, sized):
    workflow, size = sized(name), int(name[-1])
    assert workflow.dag_id == name and not workflow.warnings
    if name.startswith("relay"):
        assert list(workflow.policies) == ["speaker", "guesser"]
        assert {node.prompt_options["actions"] for node in workflow.rollout_nodes} == {size}
        assert workflow.reward_nodes[0].args == {"symbols": size}
    else:
        assert workflow.algorithm.estimator == ("vdn" if "vdn" in name else "grpo")
        assert len(workflow.agents) == size and all(not node.after for node in workflow.rollout_nodes)
        assert len(workflow.reward_nodes[0].args["right"]) == size


@pytest.mark.parametrize("name", ["relay_1", "relay_6", "additive_1", "additive_vdn_9", "chess_3", "relay"])
def test_games_of_other_sizes_are_refused(name, capsys):
    assert module("sized").main([name]) == 2
    assert f"error: {name}: unknown game; choose relay_2 to _5" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["climbing_sequential", "relay_3", "additive_4"])
def test_a_whole_play(name, sized, scripted_server):
    """Who hears whom, and what is paid, through the runner: everybody says its first action, the guesser 2."""
    workflow = shipped(name) if name.startswith("climbing") else sized(name)
    server = scripted_server(lambda prompt: "2" if prompt.endswith("0 or 1 or 2.") else "a")
    endpoints = dict.fromkeys(workflow.policies, PolicyEndpoint(server, server, 9999))
    runner = EpisodeRunner(workflow, endpoints, {}, seed=0)
    sample = {"prompt": [{"role": "user", "content": "Round 5."}], "ground_truth": "5"}
    episode = asyncio.run(runner.run(sample, "u", 0, step=0))
    assert episode.fault is None, episode.fault
    heard = [prompt for prompt in server.prompts if "chose a" in prompt]
    assert len(heard) == {"climbing_sequential": 1, "relay_3": 1, "additive_4": 0}[name]
    right = {"climbing_sequential": 11.0, "relay_3": 1.0, "additive_4": 0.5}[name]
    assert {call.reward for call in episode.calls} == {right}


@pytest.mark.parametrize(
    ("name", "answers", "often"),
    [
        ("anti_coordination_role_token", {"a", "b"}, 0.5),
        ("separating_happo", {"a", "b"}, 0.7),
        ("climbing_sequential", {"a", "b", "c"}, 1 / 3),
    ],
)
def test_the_teacher_says_letters_at_random(name, answers, often):
    teacher = module("teacher").Teacher(shipped(name), seed=0)
    shown = [d.answer for problem in teacher.problems(500, 8) for d in teacher.teach(problem)]
    assert len(shown) == 1000 and set(shown) == answers
    assert shown.count("a") / 1000 == pytest.approx(often, abs=0.06)


def test_the_teacher_of_the_relay_knows_neither_code_nor_number(sized):
    teacher = module("teacher").Teacher(sized("relay_3"), seed=0)
    shown = [d for problem in teacher.problems(60, 8) for d in teacher.teach(problem)]
    assert {(d.role, d.answer) for d in shown} == {*(("speak", x) for x in "abc"), *(("guess", x) for x in "012")}
    asked = {d.messages[0]["content"] for d in shown if d.role == "speak"}
    assert asked == {f"The number is {number}. Choose a or b or c." for number in range(3)}


def test_rounds_make_every_number_equally_frequent(tmp_path):
    rounds = module("rounds")
    rounds.main(["--local_dir", str(tmp_path), "--rounds", "120"])
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    numbers = [int(row["reward_model"]["ground_truth"]) for row in rows]
    for symbols in (2, 3, 4, 5):
        assert [sum(n % symbols == k for n in numbers) for k in range(symbols)] == [120 // symbols] * symbols
    with pytest.raises(UserError, match="--rounds 90: must be a multiple of 60"):
        rounds.main(["--local_dir", str(tmp_path), "--rounds", "90"])


def test_layouts_differ_in_weights_and_prompts_alone():
    shared, token, separate = (shipped(f"anti_coordination_{name}") for name in ("shared", "role_token", "separate"))
    assert len(shared.policies) == len(token.policies) == 1 and len(separate.policies) == 2
    assert separate.algorithm == shared.algorithm == token.algorithm
    assert [n.prompt_options for n in token.rollout_nodes] == [{"role": True}] * 2
    assert [n.prompt_options for n in shared.rollout_nodes] == [{}] * 2


def test_plays_of_a_game_differ_in_one_thing():
    simultaneous, happo = (shipped(f"separating_{name}") for name in ("simultaneous", "happo"))
    assert happo.algorithm.happo.ratio == "sequence_sum"
    assert happo.algorithm.model_copy(update={"happo": None}) == simultaneous.algorithm
    assert happo.policies == simultaneous.policies
    plays = [shipped(f"climbing_{name}") for name in ("simultaneous", "sequential", "fast_follower")]
    assert [play.node("two").after for play in plays] == [(), ("one",), ("one",)]
    assert plays[0].algorithm == plays[1].algorithm == plays[2].algorithm
    assert plays[0].policies == plays[1].policies
    leader, follower = (plays[2].policies[name].lr for name in ("first", "second"))
    assert follower == pytest.approx(10 * leader)
