"""The catalogue of reward nodes: their sources, traits and options.

Invariant: data only, without imports of the engine. An option is listed if and only if the function takes it, with the
function's default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

REWARD = "a reward node: executable_ref is its code"
SHAPING = "a reward node: executable_ref recipe.dag.reward.credit:shaped, its kwargs shaping=<name>, players=None, ..."
REQUIRED = object()
"""The default of an option that must be given."""


class OptionKind(StrEnum):
    NUMBER = "number"
    TEXT = "text"
    CHOICE = "choice"
    SCALAR = "scalar"
    NODE = "node"
    NODES = "nodes"
    PLAYERS = "players"
    """Lists of nodes: each list is a player; the k-th nodes of all players are a stage."""
    AGENTS = "agents"
    """A list of agents; None for all agents."""
    AGENT = "agent"
    FLAG = "flag"
    FUNCTION = "function"
    """`file.py:function`; it is called with `arguments`."""


@dataclass(frozen=True)
class RewardOption:
    """The values that an option of a reward node may have. Nodes are always rollout nodes."""

    kind: OptionKind
    default: Any = REQUIRED
    low: float = -math.inf
    """Least value of a number; least length of a list of nodes or players."""
    high: float = math.inf
    choices: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardEntry:
    name: str
    source: str
    assumes: str
    where: str
    """The function, as module:name under recipe.dag."""
    use: str
    """REWARD or SHAPING."""
    takes: Mapping[str, RewardOption] = field(default_factory=dict)
    """The options of the function."""
    copies: bool = False
    """Pays several calls for the same reward."""
    discounts: bool = False
    """Pays a call for rewards earned after it."""
    peers: bool = False
    """Compares the nodes that moved in the same turn and in the next, so that its result depends on the players."""
    graded: bool = False
    """Reads the episode's outcome, which a node before it must have set."""
    of_group: bool = False
    """Compares all episodes of a sample: its node needs `scope: group`."""

    @property
    def free(self) -> Mapping[str, Any]:
        """The options that have a default, with it."""
        return {key: option.default for key, option in self.takes.items() if option.default is not REQUIRED}


def reward_entry(name: str, source: str, assumes: str, where: str, use: str, /, **more: Any) -> RewardEntry:
    """Return an entry. `more`: `copies`, `discounts`, `peers`, `graded`, `of_group`, and options by name."""
    takes = {key: option for key, option in more.items() if isinstance(option, RewardOption)}
    traits = {key: value for key, value in more.items() if key not in takes}
    return RewardEntry(name, source, assumes, where, use, MappingProxyType(takes), **traits)


_TURNS = "rewards per node and turn"


def _number(default: float, low: float = -float("inf"), high: float = float("inf")) -> RewardOption:
    return RewardOption(OptionKind.NUMBER, default, low, high)


def _unit(default: float) -> RewardOption:
    return _number(default, 0.0, 1.0)


_AGENT = RewardOption(OptionKind.AGENT, "solver")
_FLAG = RewardOption(OptionKind.FLAG, False)

REWARDS: tuple[RewardEntry, ...] = (
    reward_entry(
        "team_reward",
        "the episode's outcome",
        "an outcome per episode",
        "reward.outcome:team_reward",
        REWARD,
        copies=True,
        graded=True,
        weight=_number(0.5),
        agents=RewardOption(OptionKind.AGENTS, None),
    ),
    reward_entry(
        "vote_marginals",
        "difference rewards",
        "a vote among rollout nodes; with a VOTE node: its dependencies, key and ties",
        "reward.credit:vote_marginals",
        REWARD,
        voters=RewardOption(OptionKind.NODES, low=2),
        key=RewardOption(OptionKind.TEXT, "answer"),
        ties=RewardOption(OptionKind.CHOICE, "first", choices=("first", "none")),
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
        players=RewardOption(OptionKind.PLAYERS, None, low=2),
    ),
    reward_entry(
        "conditional_quality",
        "MARTI",
        "a node that judges another one, whose reward says whether it was right",
        "reward.credit:conditional_quality",
        REWARD,
        verifier=RewardOption(OptionKind.NODE),
        generator=RewardOption(OptionKind.NODE),
        key=RewardOption(OptionKind.TEXT, "verdict"),
        right=RewardOption(OptionKind.SCALAR, True),
        threshold=_number(0.5),
    ),
    reward_entry(
        "majority_label",
        "TTRL, arXiv 2504.16084",
        "several episodes per sample; no ground truth",
        "reward.group:majority_label",
        REWARD,
        copies=True,
        of_group=True,
        agent=_AGENT,
        agents=RewardOption(OptionKind.AGENTS, None),
        compare=RewardOption(OptionKind.CHOICE, "math", choices=("text", "math")),
        ties=RewardOption(OptionKind.CHOICE, "none", choices=("none", "first")),
        min_share=_unit(0.0),
        weight=_number(1.0),
        grade_timeout_s=_number(10.0, 0.0),
    ),
    reward_entry(
        "pairwise_ranking",
        "win rate among siblings",
        "several episodes per sample; a comparison, or a node that scores",
        "reward.group:pairwise_ranking",
        REWARD,
        copies=True,
        of_group=True,
        compare=RewardOption(OptionKind.FUNCTION, None, arguments=("first", "second")),
        judge=RewardOption(OptionKind.NODE, None),
        key=RewardOption(OptionKind.TEXT, "score"),
        agents=RewardOption(OptionKind.AGENTS, None),
        weight=_number(1.0),
    ),
    reward_entry(
        "diversity",
        "distance to siblings",
        "several episodes per sample",
        "reward.group:diversity",
        REWARD,
        copies=True,
        of_group=True,
        agent=_AGENT,
        agents=RewardOption(OptionKind.AGENTS, None),
        measure=RewardOption(OptionKind.CHOICE, "answer", choices=("answer", "ngrams")),
        n=_number(3, 1),
        threshold=RewardOption(OptionKind.NUMBER, None, 0.0, 1.0),
        penalty=_FLAG,
        right_only=_FLAG,
        weight=_number(0.1),
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
COACH_SCORES = "coach.reward:coach_scores"
"""The function that turns the verdicts of coaches into rewards."""
SHAPED = "reward.credit:shaped"
"""The function whose option `shaping` selects one of SHAPINGS."""
SHAPED_TAKES = {
    "shaping": RewardOption(OptionKind.CHOICE, choices=tuple(SHAPINGS)),
    "players": RewardOption(OptionKind.PLAYERS, None, low=1),
}
"""The options of SHAPED beside those of the shaping."""
