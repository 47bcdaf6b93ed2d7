"""Kuhn poker's rules: deals, moves, payoffs, and what each player sees."""

from __future__ import annotations

import pytest

from verl_dag.envs.kuhn_poker import CARDS, LEGAL, KuhnPoker

SEEDS = range(60)


def dealt(seed: int) -> str:
    env = KuhnPoker()
    env.reset(seed)
    return env.cards


def play(cards: str, *moves: str) -> tuple[float, dict]:
    """Play a whole game; return what the first player wins and the last info."""
    env = KuhnPoker()
    env.reset(next(seed for seed in SEEDS if dealt(seed) == cards))
    for number, move in enumerate(moves):
        agent = ("first", "second")[number % 2]
        # as the engine passes them: in agent order, the first player's opening before its answer
        agents = ["first", "second"][: number + 1] if number < 2 else ["first", "first", "second"]
        actions = [move if name == agent else "" for name in agents]
        _, rewards, done, info = env.step(actions, None, agents, agent)
        assert done == (number == len(moves) - 1), info
    assert rewards["first"] == -rewards.get("second", -rewards["first"])
    return rewards["first"], info


def test_the_deal_follows_from_the_seed_and_all_six_occur():
    assert [dealt(seed) for seed in SEEDS] == [dealt(seed) for seed in SEEDS]
    assert {dealt(seed) for seed in SEEDS} == {one + other for one in CARDS for other in CARDS if one != other}


@pytest.mark.parametrize(
    ("moves", "with_k", "with_j"),
    [
        (("check", "check"), 1.0, -1.0),
        (("bet", "call"), 2.0, -2.0),
        (("bet", "fold"), 1.0, 1.0),
        (("check", "bet", "call"), 2.0, -2.0),
        (("check", "bet", "fold"), -1.0, -1.0),
    ],
)
def test_every_end_of_a_game_pays_the_pot(moves, with_k, with_j):
    for other in "JQ":
        assert play(f"K{other}", *moves)[0] == with_k
    for other in "QK":
        assert play(f"J{other}", *moves)[0] == with_j


@pytest.mark.parametrize(
    ("moves", "won"), [(("raise",), -2.0), (("bet", "check"), 2.0), (("check", "bet", ""), -2.0), (("call",), -2.0)]
)
def test_a_text_that_is_no_legal_move_loses_the_most_that_a_game_costs(moves, won):
    for cards in ("KJ", "JK"):
        first, info = play(cards, *moves)
        assert first == won and not info["legal"] and info["to_move"] == "nobody"


def test_a_move_may_be_written_with_spaces_and_capitals():
    assert play("KQ", " Bet\n", "CALL")[0] == 2.0


def test_only_the_seat_to_move_sees_its_card_and_all_its_agents_do():
    env = KuhnPoker(first=["first", "past_first"], second=["second", "past_second"])
    seen = env.reset(next(seed for seed in SEEDS if dealt(seed) == "QJ"))
    assert set(seen) == {"first", "past_first"} and len(set(seen.values())) == 1
    assert "You are the first player. Your card: Q. Moves so far: none. Answer check or bet." in seen["first"]
    seen, rewards, done, info = env.step(["bet"], None, ["past_first"], "past_first")
    assert set(seen) == {"second", "past_second"} and rewards == {"past_first": 0.0} and not done
    assert "You are the second player. Your card: J. Moves so far: bet. Answer fold or call." in seen["second"]
    assert info == {"cards": "QJ", "moves": "bet", "legal": True, "to_move": "second"}
    seen, rewards, done, _ = env.step(["", "bet", "call"], None, ["first", "past_first", "second"], "second")
    assert (seen, rewards, done) == ({}, {"first": 2.0, "past_first": 2.0, "second": -2.0}, True)


def test_the_tree_has_four_decisions_and_five_ends():
    ends = {(*history, move) for history, moves in LEGAL.items() for move in moves} - LEGAL.keys()
    assert len(LEGAL) == 4 and len(ends) == 5
