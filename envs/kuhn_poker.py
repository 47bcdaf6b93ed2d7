"""Kuhn poker (Kuhn 1950): three cards, two players, at most three moves; small enough to be solved exactly.

Invariant: zero-sum. The deal follows from the seed of the episode. A text that is not a legal move ends the game, and
its player loses the most that a game can cost.
"""

from __future__ import annotations

import random
from typing import Any

CARDS = "JQK"
SEATS = ("first", "second")
MOST = 2.0
"""Chips that a player can lose: the ante and a bet."""
LEGAL = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("fold", "call"),
    ("check", "bet"): ("fold", "call"),
}
"""Moves so far -> the legal moves: the one that puts no chip in, then the one that does. Other histories are final."""
RULES = (
    "In Kuhn poker, two players ante one chip each and get one of the cards J, Q and K; K is the highest. A player may "
    "check, or bet one chip. After a bet, the other one may call with a chip, or fold and leave the pot. If nobody "
    "folds, the higher card wins the pot."
)

History = tuple[str, ...]


def seat_to_move(history: History) -> int:
    return len(history) % 2


def payoff(cards: str, history: History) -> float:
    """Return the chips that the first player wins in a final history of legal moves. `cards`: the first player's, the
    second one's."""
    if history[-1] == "fold":
        return 1.0 if seat_to_move(history) == 0 else -1.0
    stake = 2.0 if history[-1] == "call" else 1.0
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def observation(card: str, history: History) -> str:
    """Return what the player to move reads in a history that is not final."""
    moves = ", ".join(history) or "none"
    choice = " or ".join(LEGAL[history])
    seat = SEATS[seat_to_move(history)]
    return f"{RULES} You are the {seat} player. Your card: {card}. Moves so far: {moves}. Answer {choice}."


class KuhnPoker:
    """One game. `first`, `second`: the agents that may sit there, of which a workflow runs one per episode."""

    def __init__(self, first: tuple[str, ...] = ("first",), second: tuple[str, ...] = ("second",)) -> None:
        self.seat_of = dict.fromkeys(first, 0) | dict.fromkeys(second, 1)
        self.history: History = ()

    def reset(self, seed: int) -> dict[str, str]:
        self.cards = "".join(random.Random(seed).sample(CARDS, 2))
        return self._observations()

    def step(self, actions: list[str], ground_truth: Any, agents: list[str], agent: str) -> tuple[Any, ...]:
        """Make the move of `agent`, whose last action it is. Rewards are chips, paid when the game is over."""
        text = [action for action, name in zip(actions, agents, strict=True) if name == agent][-1]
        move, seat = text.strip().lower(), self.seat_of[agent]
        legal = move in LEGAL[self.history]
        self.history += (move if legal else "illegal",)
        over = self.history not in LEGAL
        won = 0.0
        if over:
            won = payoff(self.cards, self.history) if legal else (MOST if seat else -MOST)
        rewards = {name: -won if self.seat_of[name] else won for name in agents}
        info = {"cards": self.cards, "moves": " ".join(self.history), "legal": legal}
        info |= {"to_move": "nobody" if over else SEATS[seat_to_move(self.history)]}
        return {} if over else self._observations(), rewards, over, info

    def _observations(self) -> dict[str, str]:
        seat = seat_to_move(self.history)
        text = observation(self.cards[seat], self.history)
        return {name: text for name, other in self.seat_of.items() if other == seat}
