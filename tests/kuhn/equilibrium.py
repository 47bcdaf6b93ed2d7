"""The equilibria of Kuhn poker (Kuhn 1950)."""

from __future__ import annotations

from recipe.kuhn.exploitability import InfoSet
from verl_dag.envs.kuhn_poker import CARDS

VALUE = -1 / 18
"""Chips per game of the first player, if both play an equilibrium."""


def equilibrium(alpha: float) -> dict[InfoSet, float]:
    """Return an equilibrium; `alpha` in [0, 1/3] is the first player's rate of bluffs."""
    by_history = {
        (): (alpha, 0.0, 3 * alpha),
        ("check", "bet"): (0.0, alpha + 1 / 3, 1.0),
        ("check",): (1 / 3, 0.0, 1.0),
        ("bet",): (0.0, 1 / 3, 1.0),
    }
    return {(card, history): rate for history, of in by_history.items() for card, rate in zip(CARDS, of, strict=True)}
