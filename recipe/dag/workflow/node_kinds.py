"""The kinds of nodes: one entry defines a kind, the checks that apply to it, and how plans show it.

Invariant: data only. Each role belongs to one type; other modules derive their lists of roles from `KINDS`. A new
kind of node in the episode is an entry here and its runner in `episode/compute.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from recipe.dag.types.convention import COMPUTE, REWARD, Convention


class NodeType(StrEnum):
    MODEL_INFERENCE = "MODEL_INFERENCE"
    MODEL_TRAIN = "MODEL_TRAIN"
    COMPUTE = "COMPUTE"


class NodeRole(StrEnum):
    ROLLOUT = "ROLLOUT"
    VOTE = "VOTE"
    REWARD = "REWARD"
    ADVANTAGE = "ADVANTAGE"
    ACTOR = "ACTOR"
    CRITIC = "CRITIC"
    REFERENCE = "REFERENCE"
    DEFAULT = "DEFAULT"


class Stage(StrEnum):
    EPISODE = "episode"
    """Inside a turn of an episode."""
    REWARD = "reward"
    """After an episode has finished, to score it."""
    TRAINING = "training"
    """Once per step, on the rows of all episodes."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    type: NodeType
    stage: Stage
    step: str
    """The name of the node in plans if it has no agent."""
    key: str | None = None
    """The key of the short form that gives a node this kind."""
    keeps_value: bool = True
    """The value under `key` is a field of the node; otherwise it must be empty (`longest: {}`)."""
    convention: Convention | None = None
    """How the user's function that the node runs is called; None if it runs none."""
    forward_step: str | None = None
    """The name of the node's forward pass in plans; None if `only_forward_compute` has no effect."""
    configures_model: bool = False
    """The node's `config` overrides keys of the policy's model."""
    shape: tuple[str, str] | None = None
    """Mermaid's brackets around the node; None: a box for nodes with a policy, a hexagon for nodes without."""


KINDS: Mapping[NodeRole, NodeKind] = {
    NodeRole.ROLLOUT: NodeKind(NodeType.MODEL_INFERENCE, Stage.EPISODE, "rollout", key="agent", configures_model=True),
    NodeRole.REWARD: NodeKind(NodeType.COMPUTE, Stage.REWARD, "reward", key="reward", convention=REWARD["episode"]),
    NodeRole.VOTE: NodeKind(NodeType.COMPUTE, Stage.EPISODE, "vote", key="vote", shape=("([", "])")),
    NodeRole.DEFAULT: NodeKind(
        NodeType.COMPUTE, Stage.EPISODE, "compute", key="compute", convention=COMPUTE, shape=("[/", "/]")
    ),
    NodeRole.ADVANTAGE: NodeKind(NodeType.COMPUTE, Stage.TRAINING, "advantage"),
    NodeRole.ACTOR: NodeKind(
        NodeType.MODEL_TRAIN,
        Stage.TRAINING,
        "update",
        forward_step="old log-probs",
        configures_model=True,
    ),
    NodeRole.CRITIC: NodeKind(
        NodeType.MODEL_TRAIN,
        Stage.TRAINING,
        "critic update",
        forward_step="values",
        configures_model=True,
        shape=("[(", ")]"),
    ),
    NodeRole.REFERENCE: NodeKind(
        NodeType.MODEL_TRAIN,
        Stage.TRAINING,
        "reference log-probs",
        forward_step="reference log-probs",
        configures_model=True,
    ),
}


def roles_of(stage: Stage) -> tuple[NodeRole, ...]:
    return tuple(role for role, kind in KINDS.items() if kind.stage is stage)


EPISODE_ROLES = roles_of(Stage.EPISODE)
TRAINING_ROLES = roles_of(Stage.TRAINING)
