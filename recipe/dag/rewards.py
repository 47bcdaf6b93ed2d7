"""The catalogue's reward nodes: what each pays for, and what its options may be.

Invariant: data only. An option is listed if and only if the function takes it, with the function's default.
"""

from __future__ import annotations

from recipe.dag.entry import REWARD, SHAPING, Entry, Kind, Option, reward_entry

_TURNS = "rewards per node and turn"


def _number(default: float, low: float = -float("inf"), high: float = float("inf")) -> Option:
    return Option(Kind.NUMBER, default, low, high)


def _unit(default: float) -> Option:
    return _number(default, 0.0, 1.0)


REWARDS: tuple[Entry, ...] = (
    reward_entry(
        "team_reward",
        "the episode's outcome",
        "an outcome per episode",
        "reward.outcome:team_reward",
        REWARD,
        copies=True,
        graded=True,
        weight=_number(0.5),
        agents=Option(Kind.AGENTS, None),
    ),
    reward_entry(
        "vote_marginals",
        "difference rewards",
        "a vote among rollout nodes; with a VOTE node: its dependencies, key and ties",
        "reward.credit:vote_marginals",
        REWARD,
        voters=Option(Kind.NODES, low=2),
        key=Option(Kind.TEXT, "answer"),
        ties=Option(Kind.CHOICE, "first", choices=("first", "none")),
        weight=_number(1.0),
    ),
    reward_entry(
        "debate_incentives",
        "MAPoRL, arXiv 2502.18439",
        "a debate of at least two players and two turns, scores in [0, 1], one weight above 0",
        "reward.credit:debate_incentives",
        REWARD,
        peers=True,
        **{name: _number(0.0, 0.0) for name in ("follow", "leave", "repel", "attract")},
        threshold=_number(0.5),
        players=Option(Kind.PLAYERS, None, low=2),
    ),
    reward_entry(
        "conditional_quality",
        "MARTI",
        "a node that judges another one, whose reward says whether it was right",
        "reward.credit:conditional_quality",
        REWARD,
        verifier=Option(Kind.NODE),
        generator=Option(Kind.NODE),
        key=Option(Kind.TEXT, "verdict"),
        right=Option(Kind.SCALAR, True),
        threshold=_number(0.5),
    ),
    reward_entry(
        "team_local",
        "AT-GRPO, arXiv 2510.11062",
        _TURNS,
        "credit.shaping:team_local",
        SHAPING,
        copies=True,
        team=_number(1.0),
        local=_number(1.0),
    ),
    reward_entry("shared", "CORY, arXiv 2410.06101", _TURNS, "credit.shaping:shared", SHAPING, copies=True),
    reward_entry(
        "discounted", "returns per turn", _TURNS, "credit.shaping:discounted", SHAPING, discounts=True, gamma=_unit(1.0)
    ),
    reward_entry(
        "verifier_sum",
        "MAPoRL, arXiv 2502.18439",
        "scores in [0, 1]",
        "credit.shaping:verifier_sum",
        SHAPING,
        copies=True,
        discounts=True,
        peers=True,
        gamma=_unit(0.3),
    ),
    reward_entry("margin", "MARTI", _TURNS, "credit.shaping:margin", SHAPING, alpha=_number(0.5)),
    reward_entry("quality", "MARTI", "rewards in [0, 1]", "credit.shaping:quality", SHAPING, alpha=_number(0.5)),
    reward_entry(
        "with_outcome",
        "MARTI",
        "an outcome per episode",
        "credit.shaping:with_outcome",
        SHAPING,
        copies=True,
        discounts=True,
        graded=True,
        beta=_number(0.5),
    ),
    reward_entry(
        "influence",
        "UMAD, arXiv 2603.01221",
        _TURNS,
        "credit.shaping:influence",
        SHAPING,
        peers=True,
        bonus=_number(0.2),
    ),
)
SHAPINGS = {entry.name: entry for entry in REWARDS if entry.use == SHAPING}
CALLED = {entry.where: entry for entry in REWARDS if entry.use == REWARD}
SHAPED = "reward.credit:shaped"
"""The function that the shapings are options of."""
SHAPED_TAKES = {"shaping": Option(Kind.CHOICE, choices=tuple(SHAPINGS)), "players": Option(Kind.PLAYERS, None, low=1)}
"""What it takes besides the shaping's options."""
