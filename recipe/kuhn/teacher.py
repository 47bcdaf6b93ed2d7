"""A teacher of Kuhn poker that knows the legal moves, and that a higher card is a reason to put a chip in.

Invariant: the probabilities of each information set are drawn from the seed, so that the model learns to tell the
information sets apart; none is near 0 or 1. Prompts are those of `hooks.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from recipe.dag.workflow.schema import Workflow
from recipe.kuhn.exploitability import INFO_SETS
from recipe.kuhn.hooks import messages
from recipe.tiny.dialogue import Demonstration
from verl_dag.envs.kuhn_poker import CARDS, LEGAL, History, observation, seat_to_move

NODES = ("open", "reply", "answer")
TENDENCY = {"J": -0.6, "Q": 0.0, "K": 0.6}
"""Mean of the logit of putting a chip in, by card."""
NOISE = 0.5
"""Standard deviation of that logit over information sets."""


@dataclass(frozen=True, slots=True)
class Game:
    """A problem without content: the prompts come from the env."""

    text: str = "Play."
    answer: str = ""


class Teacher:
    """Demonstrates the workflows of Kuhn poker."""

    def __init__(self, workflow: Workflow, seed: int):
        self._rng = random.Random(seed)
        logits = {info_set: self._rng.gauss(TENDENCY[info_set[0]], NOISE) for info_set in INFO_SETS}
        self._active = {info_set: 1.0 / (1.0 + math.exp(-logit)) for info_set, logit in logits.items()}

    def problems(self, count: int, test_size: int) -> list[Game]:
        return [Game()] * count

    def teach(self, problem: Game) -> list[Demonstration]:
        """Return the demonstrations of one game."""
        cards = self._rng.sample(CARDS, 2)
        history: History = ()
        demonstrations: list[Demonstration] = []
        while history in LEGAL:
            card, node = cards[seat_to_move(history)], NODES[len(history)]
            move = LEGAL[history][self._rng.random() < self._active[card, history]]
            demonstrations.append(Demonstration(node, tuple(messages(observation(card, history))), move))
            history += (move,)
        return demonstrations
