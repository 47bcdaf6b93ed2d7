"""`validation.metrics` of Kuhn poker: the policy's exact NashConv, and that of its average over the measurements.

Invariant: the probabilities are the policy's own at every information set, renormalised over the two legal answers;
nothing is estimated from games.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recipe.dag import Scorer, UserError
from recipe.kuhn.exploitability import INFO_SETS, Average, InfoSet, name_of, nash_conv, value
from recipe.kuhn.hooks import messages
from verl_dag.envs.kuhn_poker import LEGAL, observation

POLICY = "main"
"""The policy of the workflow that is measured."""


async def exploitability(policies: Mapping[str, Scorer], state: dict[str, Any]) -> dict[str, float]:
    """Return NashConv of the last policy and of the average, the first player's value of self-play, the smallest
    probability of a legal answer, and each information set's probability of putting a chip in."""
    if POLICY not in policies:
        raise UserError(f"recipe/kuhn/metrics.py measures policy `{POLICY}`, which the workflow lacks")
    policy: dict[InfoSet, float] = {}
    legal = 1.0
    for info_set in INFO_SETS:
        card, history = info_set
        passive, active = await policies[POLICY].log_probs(messages(observation(card, history)), LEGAL[history])
        policy[info_set] = 1.0 / (1.0 + math.exp(passive - active))
        legal = min(legal, math.exp(passive) + math.exp(active))
    average = Average(state)
    average.add(policy)
    return {
        "nash_conv": nash_conv(policy),
        "nash_conv_average": nash_conv(average.policy()),
        "first_wins": value(policy, policy),
        "legal_min": legal,
        **{f"active/{name_of(info_set)}": chance for info_set, chance in policy.items()},
    }
