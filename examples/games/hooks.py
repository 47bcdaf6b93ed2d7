"""Players of small games, as agents of a workflow: each says one letter or one digit.

Invariant: hooks are stateless. A player is told which one it is only where the workflow says so (`role: true`), and
what another one said only where its node depends on the other's.
"""

from __future__ import annotations

from typing import Any, ClassVar

from recipe.dag import Agent, Call, Context, Episode, Message, Output

LETTERS, DIGITS = "abcde", "01234"
GAMES = {
    "anti_coordination": ((0.0, 1.0), (1.0, 0.0)),
    "separating": ((0.0, 2.0), (2.0, -1.0)),
    "climbing": ((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0)),
}


class Player(Agent):
    says: ClassVar[str] = LETTERS

    def prompt(self, context: Context, *, actions: int = 2, role: bool = False) -> list[Message]:
        lines = [f"You are player {context.agent}."] if role else []
        lines += [f"The other player chose {call.text.strip() or 'nothing'}." for call in context.upstream.values()]
        lines += self.told(context, actions)
        return [{"role": "user", "content": " ".join([*lines, f"Choose {' or '.join(self.says[:actions])}."])}]

    def told(self, context: Context, actions: int) -> list[str]:
        """What this player alone is told."""
        return []

    def parse(self, context: Context) -> Output:
        """`action` is None where the answer is no letter (digit) of the game."""
        choice = context.call.text.strip()
        return Output(parsed={"action": self.says.index(choice) if choice in tuple(self.says) else None})


class Speaker(Player):
    """Knows the round's number and says a letter."""

    def told(self, context: Context, actions: int) -> list[str]:
        return [f"The number is {number_of(context.sample, actions)}."]


class Guesser(Player):
    """Hears the letter and says which number it is."""

    says = DIGITS


def number_of(sample: dict[str, Any], symbols: int) -> int:
    return int(sample["ground_truth"]) % symbols


def payoff(episode: Episode, *, game: str) -> dict[str, list[float]]:
    """Both players earn the table's entry; its worst one if either chose nothing that is in it."""
    table = GAMES[game]
    row, column = (call.parsed["action"] for call in _by_agent(episode))
    known = range(len(table))
    worst, best = min(map(min, table)), max(map(max, table))
    earned = table[row][column] if row in known and column in known else worst
    episode.outcome = float(earned == best)
    return {call.agent: [earned] for call in episode.calls}


def guessed(episode: Episode, *, symbols: int, guesser: str = "guesser") -> dict[str, list[float]]:
    """Both players earn 1 if the number was guessed."""
    (guess,) = episode.calls_of(guesser)
    episode.outcome = float(guess.parsed["action"] == number_of(episode.sample, symbols))
    return {call.agent: [episode.outcome] for call in episode.calls}


def additive(episode: Episode, *, right: str) -> dict[str, list[float]]:
    """The team earns 1 for each player that said its letter of `right`; every player gets the same share of that."""
    hits = [call.text.strip() == letter for call, letter in zip(_by_agent(episode), right, strict=True)]
    episode.outcome = float(all(hits))
    return {call.agent: [sum(hits) / len(hits)] for call in episode.calls}


def _by_agent(episode: Episode) -> list[Call]:
    return sorted(episode.calls, key=lambda call: call.agent_group)
