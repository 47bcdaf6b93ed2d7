"""The kinds of nodes: one entry defines a kind, the checks that apply to it, and how plans show it.

Invariant: data only. Each kind belongs to one stage; other modules derive their lists of kinds from `KINDS`. A new
kind of node in the episode is an entry here, the field of its key in `schema.Node` and its runner in
`episode/compute.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from recipe.dag.types.convention import COMPUTE, REWARD, Convention


class Kind(StrEnum):
    ROLLOUT = "rollout"
    VOTE = "vote"
    REWARD = "reward"
    COMPUTE = "compute"
    OLD_LOG_PROBS = "old_log_probs"
    REFERENCE = "reference"
    VALUES = "values"
    ADVANTAGE = "advantage"
    CRITIC_UPDATE = "critic_update"
    UPDATE = "update"


TrainingStep = Literal["old_log_probs", "reference", "values", "advantage", "critic_update", "update"]


class Stage(StrEnum):
    EPISODE = "episode"
    """Inside a turn of an episode."""
    REWARD = "reward"
    """After an episode has finished, to score it."""
    TRAINING = "training"
    """Once per step, on the rows of all episodes."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    stage: Stage
    step: str
    """The name of the node in plans if it has no agent."""
    key: str = "train"
    """The key of the node that gives it this kind; for training nodes, the kind is the value of the key."""
    convention: Convention | None = None
    """How the user's function that the node runs is called; None if it runs none."""
    configures_model: bool = False
    """The node's `config` overrides keys of the policy's model."""
    shape: tuple[str, str] | None = None
    """Mermaid's brackets around the node; None: a box for nodes with a policy, a hexagon for nodes without."""


_CRITIC = ("[(", ")]")

KINDS: Mapping[Kind, NodeKind] = {
    Kind.ROLLOUT: NodeKind(Stage.EPISODE, "rollout", key="agent", configures_model=True),
    Kind.REWARD: NodeKind(Stage.REWARD, "reward", key="reward", convention=REWARD["episode"]),
    Kind.VOTE: NodeKind(Stage.EPISODE, "vote", key="vote", shape=("([", "])")),
    Kind.COMPUTE: NodeKind(Stage.EPISODE, "compute", key="compute", convention=COMPUTE, shape=("[/", "/]")),
    Kind.ADVANTAGE: NodeKind(Stage.TRAINING, "advantage"),
    Kind.OLD_LOG_PROBS: NodeKind(Stage.TRAINING, "old log-probs", configures_model=True),
    Kind.REFERENCE: NodeKind(Stage.TRAINING, "reference log-probs", configures_model=True),
    Kind.VALUES: NodeKind(Stage.TRAINING, "values", configures_model=True, shape=_CRITIC),
    Kind.UPDATE: NodeKind(Stage.TRAINING, "update", configures_model=True),
    Kind.CRITIC_UPDATE: NodeKind(Stage.TRAINING, "critic update", configures_model=True, shape=_CRITIC),
}
KEYS = tuple(dict.fromkeys(kind.key for kind in KINDS.values()))
"""The keys that give a node its kind."""


def kinds_of(stage: Stage) -> tuple[Kind, ...]:
    return tuple(kind for kind, spec in KINDS.items() if spec.stage is stage)


def title(kind: Kind) -> str:
    """Return `a rollout node`, for example; for each step of training, `a training node`."""
    return f"a {'training' if KINDS[kind].stage is Stage.TRAINING else kind} node"


EPISODE_KINDS = kinds_of(Stage.EPISODE)
TRAINING_KINDS = kinds_of(Stage.TRAINING)
CRITIC_KINDS = (Kind.VALUES, Kind.CRITIC_UPDATE)
