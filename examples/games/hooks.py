"""Players of small games as agents of a workflow; each answers with one letter or digit.

Invariant: agents are stateless. A player sees its name only with `role: true`, and another player's choice only if its
node depends on that player's.
"""

from __future__ import annotations

from typing import Any, ClassVar

from verl_dag import Agent, Call, Context, Episode, Message, Output

LETTERS, DIGITS = "abcde", "01234"
GAMES = {
    "anti_coordination": ((0.0, 1.0), (1.0, 0.0)),
    "separating": ((0.0, 2.0), (2.0, -1.0)),
    "climbing": ((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0)),
}


class Player(Agent):
    """Chooses one of the first `actions` letters."""

    says: ClassVar[str] = LETTERS

    def prompt(self, context: Context, *, actions: int = 2, role: bool = False) -> list[Message]:
        lines = [f"You are player {context.agent}."] if role else []
        lines += [f"The other player chose {call.text.strip() or 'nothing'}." for call in context.upstream.values()]
        lines += self.private_lines(context, actions)
        return [{"role": "user", "content": " ".join([*lines, f"Choose {' or '.join(self.says[:actions])}."])}]

    def private_lines(self, context: Context, actions: int) -> list[str]:
        """Return the part of the prompt that only this player sees."""
        return []

    def parse(self, context: Context) -> Output:
        """Read the choice: `action` is its index, or None for anything but a single letter (digit)."""
        choice = context.call.text.strip()
        return Output(parsed={"action": self.says.index(choice) if choice in tuple(self.says) else None})


class Speaker(Player):
    """Sees the round's number and says a letter."""

    def private_lines(self, context: Context, actions: int) -> list[str]:
        return [f"The number is {number_of(context.sample, actions)}."]


class Guesser(Player):
    """Sees the letter and guesses the number."""

    says = DIGITS


def number_of(sample: dict[str, Any], symbols: int) -> int:
    return int(sample["ground_truth"]) % symbols


def payoff(episode: Episode, *, game: str) -> dict[str, list[float]]:
    """Pay both players the table's entry, or its smallest one if a choice is not in the table."""
    table = GAMES[game]
    row, column = (call.parsed.get("action") for call in _by_agent(episode))
    actions = range(len(table))
    paid = [reward for line in table for reward in line]
    worst, best = min(paid), max(paid)
    reward = table[row][column] if row in actions and column in actions else worst
    episode.outcome = float(reward == best)
    return {call.agent: [reward] for call in episode.calls}


def guessed(episode: Episode, *, symbols: int, guesser: str = "guesser") -> dict[str, list[float]]:
    """Pay both players 1 if the guess is right."""
    (guess,) = episode.calls_of(guesser)
    episode.outcome = float(guess.parsed.get("action") == number_of(episode.sample, symbols))
    return {call.agent: [episode.outcome] for call in episode.calls}


def additive(episode: Episode, *, right: str) -> dict[str, list[float]]:
    """Pay every player the share of players that chose their letter of `right`."""
    hits = [call.text.strip() == letter for call, letter in zip(_by_agent(episode), right, strict=True)]
    episode.outcome = float(all(hits))
    return {call.agent: [sum(hits) / len(hits)] for call in episode.calls}


def lottery(episode: Episode, *, right: str, stake: float) -> dict[str, list[float]]:
    """Pay every player as `additive` does, and what the last one wins with an a or else loses."""
    *players, gambler = _by_agent(episode)
    hits = [call.text.strip() == letter for call, letter in zip(players, right, strict=True)]
    episode.info["right"] = share = sum(hits) / len(hits)
    episode.outcome = float(all(hits))
    reward = share + (stake if gambler.text.strip() == "a" else -stake)
    return {call.agent: [reward] for call in episode.calls}


def _by_agent(episode: Episode) -> list[Call]:
    return sorted(episode.calls, key=lambda call: call.agent_group)
