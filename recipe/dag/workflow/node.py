"""The nodes of a workflow: their kinds, and a node with its keys.

Invariant: the table `KINDS` says what a kind is, except how it runs: its stage, the keys that it reads, its look in
plans. The loader, the checks, the JSON schema and plans follow it. A new kind of node in the episode is a name in
`Kind`, an entry in `KINDS` and the field of its key in `Node`, and its runner in `episode/compute.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from recipe.dag.core.frozen import Frozen, Mark
from recipe.dag.types.convention import COMPUTE, REWARD, Convention
from recipe.dag.workflow.agent_schema import as_tuple
from recipe.dag.workflow.condition import Condition

Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
"""Several names, or one without a list."""


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
    reads: tuple[str, ...] = ()
    """The keys of a node that this kind reads; those that all kinds read are not listed."""
    voters: int = 0
    """The least number of rollout nodes under `after`, which may then name no other nodes."""
    shape: tuple[str, str] | None = None
    """Mermaid's brackets around the node; None: a box for nodes with a policy, a hexagon for nodes without."""


_ROLLOUT = "hooks prompt_options parse_options env env_route sees_env env_pays when candidates config".split()
_MODEL = ("policy", "config")
_CRITIC = ("[(", ")]")

KINDS: Mapping[Kind, NodeKind] = {
    Kind.ROLLOUT: NodeKind(Stage.EPISODE, "rollout", key="agent", reads=tuple(_ROLLOUT)),
    Kind.REWARD: NodeKind(Stage.REWARD, "reward", key="reward", reads=("args", "scope"), convention=REWARD["episode"]),
    Kind.VOTE: NodeKind(Stage.EPISODE, "vote", key="vote", reads=("when",), voters=2, shape=("([", "])")),
    Kind.COMPUTE: NodeKind(
        Stage.EPISODE, "compute", key="compute", reads=("args", "when"), convention=COMPUTE, shape=("[/", "/]")
    ),
    Kind.ADVANTAGE: NodeKind(Stage.TRAINING, "advantage", reads=("policy",)),
    Kind.OLD_LOG_PROBS: NodeKind(Stage.TRAINING, "old log-probs", reads=_MODEL),
    Kind.REFERENCE: NodeKind(Stage.TRAINING, "reference log-probs", reads=_MODEL),
    Kind.VALUES: NodeKind(Stage.TRAINING, "values", reads=_MODEL, shape=_CRITIC),
    Kind.UPDATE: NodeKind(Stage.TRAINING, "update", reads=_MODEL),
    Kind.CRITIC_UPDATE: NodeKind(Stage.TRAINING, "critic update", reads=_MODEL, shape=_CRITIC),
}
KEYS = tuple(dict.fromkeys(kind.key for kind in KINDS.values()))
"""The keys that give a node its kind."""
OPTIONS = tuple(dict.fromkeys(key for kind in KINDS.values() for key in kind.reads))
"""The keys that only some kinds read."""


def kinds_of(stage: Stage) -> tuple[Kind, ...]:
    return tuple(kind for kind, spec in KINDS.items() if spec.stage is stage)


def title(kind: Kind) -> str:
    """Return `a rollout node`, for example; for each step of training, `a training node`."""
    return f"a {'training' if KINDS[kind].stage is Stage.TRAINING else kind} node"


def readers(option: str) -> str:
    """Return the kinds that read an option, such as `reward and compute nodes`."""
    kinds = [kind for kind, spec in KINDS.items() if option in spec.reads]
    if set(TRAINING_KINDS) <= set(kinds):
        kinds = [*(kind for kind in kinds if kind not in TRAINING_KINDS), "training"]
    *most, last = kinds
    return f"{', '.join(most)} and {last} nodes" if most else f"{last} nodes"


EPISODE_KINDS = kinds_of(Stage.EPISODE)
TRAINING_KINDS = kinds_of(Stage.TRAINING)
CRITIC_KINDS = (Kind.VALUES, Kind.CRITIC_UPDATE)


class Vote(Frozen):
    """Options of a vote node, which selects the most frequent `parsed[key]` of its dependencies. Its result is
    `parsed = {key: winner, share: 0..1, votes: {...}}`."""

    key: str = "answer"
    """The entry of `parsed` that is counted."""
    ties: Literal["first", "none"] = "first"
    """first: among equals, the value of the node that comes first in `after` wins. none: a tie has no winner."""


class Candidates(Frozen):
    """Several answers to one prompt, of which one is kept. All of them are trained on."""

    k: int = Field(ge=2)
    """Number of candidates."""
    by: Annotated[str, Mark.CODE_OR_NAME] = Field(min_length=1)
    """What scores a candidate: `file.py:function`, called as `function(context)` with the candidate as `context.call`,
    which returns a number or None; or a rollout or compute node that depends on this node alone, which then runs once
    for each candidate."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    key: str = "score"
    """The entry of the node's `parsed` that is the score."""
    keep: Literal["best", "first"] = "best"
    """best: the one with the highest score, of equals the first. first: the first one, whatever the scores."""
    validation_k: int | None = Field(default=None, ge=1)
    """Number of candidates in validation and evaluation; by default `k`."""


class Node(Frozen):
    """A node of the graph: an agent's call, a vote, a function, or a training step. One of the keys `agent`, `vote`,
    `reward`, `compute` and `train` gives it its kind, and the kind reads some of the other keys."""

    id: str = Field(min_length=1)
    """The node's unique name."""
    agent: str | None = None
    """A call of this agent."""
    vote: Vote | None = None
    """Select the most frequent answer of the nodes that this one waits for."""
    reward: Annotated[str | None, Mark.CODE] = None
    """The function that scores an episode: `file.py:function`."""
    compute: Annotated[str | None, Mark.CODE] = None
    """The function that runs in the episode, between the agents: `file.py:function`."""
    train: TrainingStep | None = None
    """A step of training, once on the rows of all episodes. Without such nodes, the steps that the policies need are
    derived."""
    policy: str | None = None
    """The policy that the node acts on, if there are several."""
    after: Names = ()
    """The ids of the nodes that must finish before this one starts."""
    args: Annotated[dict[str, Any], Mark.CODE] = {}
    """Keyword arguments of the node's function."""
    scope: Literal["episode", "group"] = "episode"
    """What the function scores. episode: a finished episode. group: all finished episodes of a sample at once."""
    hooks: Annotated[str | None, Mark.CODE] = None
    """The agent's hooks: `file.py`, or `file.py:Class` with `prompt` and `parse`."""
    prompt_options: dict[str, Any] = {}
    """Keyword arguments of the hook that makes the prompt."""
    parse_options: dict[str, Any] = {}
    """Keyword arguments of the hook that parses the output."""
    env: Annotated[Names, Mark.CODE_OR_NAME] = ()
    """The environment that the node steps: `file.py:Class`, or a name under `envs`. If this is a list of several,
    `env_route` selects the one of an episode."""
    env_route: str | None = None
    """A dotted path into the sample (`data_source`, `extra_info.env`) whose value names one entry of `env`."""
    sees_env: bool = False
    """Show the environment's observation to the agent; its output becomes part of the action."""
    env_pays: bool = False
    """Reward the episode with the environment's rewards."""
    when: Condition | None = None
    """Skip the node if this is false. A node is also skipped if all of its dependencies were skipped."""
    candidates: Candidates | None = None
    """Generate several answers, and go on with one of them."""
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's configuration for the policy (or critic) of this node."""

    @property
    def kind(self) -> Kind:
        if self.train is not None:
            return Kind(self.train)
        return next(kind for kind, spec in KINDS.items() if getattr(self, spec.key) is not None)

    @property
    def function(self) -> str | None:
        """The user's function that the node runs, if it runs one."""
        return self.reward or self.compute


class SubWorkflow(Frozen):
    """An entry of `nodes` that inserts the rollout, vote and compute nodes of another workflow file, with their loops
    and envs. Its ids become `<id>__<their id>`; its agents are matched to the agents of this file by name."""

    id: str = Field(min_length=1)
    """The prefix of the inserted nodes' ids."""
    workflow: str
    """The other file, relative to this file's folder or to the project's root."""
    agents: dict[str, str] = {}
    """Agents with other names in this file: name in the other file -> name in this file."""
    after: Names = ()
    """The ids of the nodes that must finish before the inserted ones start."""

    def renamed(self, names: Any) -> Any:
        """Return the id of a node of the other file, or each id in a list, as it is here. The value has not been
        checked yet: what is neither is returned as it is."""
        if isinstance(names, list):
            return [self.renamed(name) for name in names]
        return f"{self.id}__{names}" if isinstance(names, str) else names
