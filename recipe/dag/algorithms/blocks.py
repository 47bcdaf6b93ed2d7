"""The blocks of a workflow's `algorithm`: their base class, and the small ones.

Invariant: a block's class declares its options, traits and checks; without the block its feature is off. The larger
blocks are in `happo`, `cory`, `mixer` and `tree`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.frozen import Frozen
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.core.suggestion import did_you_mean


class Block(Frozen):
    """Options that are written together under one key of `algorithm`."""

    source: ClassVar[str] = ""
    """Paper or system. `verl-dag algorithms` lists the blocks that have one."""
    assumes: ClassVar[str] = ""
    """Requirements on a run, in words."""
    reads_old_log_probs: ClassVar[bool] = False
    """Needs the trainer's log-probs from before the update."""

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        """Yield the problems that the blocks `algorithm` and `episode` show. Called for every workflow file."""
        yield from ()

    def check(self, facts: Facts) -> Iterator[Problem]:
        """Yield the problems that need the whole workflow. Called when all of it could be read, and its dependencies
        exist and have no cycle."""
        yield from ()

    def warn(self, facts: Facts) -> Iterator[Problem]:
        """Yield warnings about a workflow without problems: options that are legal, but seldom intended."""
        yield from ()


class DynamicSampling(Block):
    """A step rolls out further batches of samples until it has as many groups with different rewards as a batch has
    samples (DAPO)."""

    max_batches: int = Field(default=3, ge=1)
    """The most batches that one step may roll out; it then trains on the groups that it has."""

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        if not facts.algorithm.drop_zero_variance:
            message = "dynamic sampling replaces groups that were left out; set `drop_zero_variance: true`"
            yield facts.problem(("algorithm", "dynamic_sampling"), message, key=True)


class Uncertainty(Block):
    """Lowers the weight of rows of which the policy was unsure (UMAD, arXiv 2603.01221): exp(-alpha z), where z is the
    mean negative log-prob of an agent's tokens in the row, as the server sampled them, in standard deviations of the
    rows of its sample and agent."""

    source: ClassVar[str] = "UMAD, arXiv 2603.01221"
    assumes: ClassVar[str] = (
        "several episodes per sample; with any estimator; a group is the rows of one sample and agent"
    )

    alpha: float = Field(default=0.25, ge=0.0)
    bound: float = Field(default=5.0, gt=0.0)
    """Limit of |z|."""


class Importance(Block):
    """Corrects for a server that samples with slightly different probabilities from the trainer's: the policy loss of
    each token is multiplied by the ratio of the two, bounded. Works with every policy loss."""

    source: ClassVar[str] = "truncated: fengyao.notion.site/off-policy-rl; masked: IcePop, arXiv 2510.18855"
    assumes: ClassVar[str] = "old_log_probs of the trainer; with any estimator and policy loss"
    reads_old_log_probs: ClassVar[bool] = True

    cap: float = Field(default=2.0, gt=1.0)
    level: Literal["token", "sequence", "geometric"] = "token"
    """The unit of a ratio: a token, or all sampled tokens of a call together. sequence: their product (unbiased, with
    far higher variance). geometric: their geometric mean, as in GSPO, which hardly grows with the length."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: a ratio above `cap` counts as `cap`. mask: a ratio outside 1 / cap to cap counts as 0."""
    veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """A call with a token that the trainer finds less probable than the server by this factor, such as 1e-4, counts as
    0: server and trainer disagree about it. By default no call is vetoed."""

    def check(self, facts: Facts) -> Iterator[Problem]:
        path: KeyPath = ("algorithm", "importance")
        if facts.algorithm.old_log_probs == "rollout":
            message = "with `old_log_probs: rollout` ratios are relative to the server already; remove one of the two"
            yield facts.problem(path, message, key=True)
        else:
            yield from facts.check_forward_passes(path)


class OverlongPenalty(Frozen):
    """A generation that reaches into the last `buffer` tokens before its agent's `max_tokens`, or a call into those
    before `data.max_response_length`, costs from 0 to `weight`, linearly; a call that was cut off costs all of it
    (DAPO's soft overlong punishment, arXiv 2503.14476)."""

    buffer: int = Field(ge=1)
    """Tokens."""
    weight: float = Field(default=1.0, gt=0.0)
    """Largest cost, in units of the reward."""


OVERLONG = "overlong"
"""Name of the penalty among the parts of a call's reward, as if a node with this name had paid it."""


class Overlong(Block):
    """Treatment of calls that were cut off, or nearly."""

    source: ClassVar[str] = "DAPO, arXiv 2503.14476"
    assumes: ClassVar[str] = "with any estimator; what is left out of the loss stays in the baselines"

    agents: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The agents whose calls are treated so; by default all."""
    mask: bool = False
    """Calls that a limit of tokens or generations cut off are left out of the policy's loss (DAPO's overlong filter).
    Their rewards stay in the baselines, and critics learn from them."""
    penalty: OverlongPenalty | None = None

    def check(self, facts: Facts) -> Iterator[Problem]:
        path: KeyPath = ("algorithm", "overlong")
        if not self.mask and self.penalty is None:
            message = "has neither `mask: true` nor a `penalty`, so it does nothing; add one, or remove this"
            yield facts.problem(path, message, key=True)
        trained = [agent.name for agent in facts.trained_agents]
        for index, name in enumerate(self.agents or ()):
            if name not in trained:
                message = f"`{name}` is not an agent of a trained policy{did_you_mean(name, trained)}"
                yield facts.problem((*path, "agents", index), message)
        if self.penalty is not None:
            yield from self._check_penalty(facts, self.penalty, (*path, "penalty"))

    def covers(self, agent: str) -> bool:
        """Return whether the calls of this agent are treated."""
        return self.agents is None or agent in self.agents

    def _check_penalty(self, facts: Facts, penalty: OverlongPenalty, path: KeyPath) -> Iterator[Problem]:
        mixer = facts.algorithm.team_value
        if mixer is not None and mixer.loss == "binary":
            message = "makes returns negative, and `mixer.loss: binary` needs them between 0 and 1; use `squared`"
            yield facts.problem(path, message, key=True)
        for agent in (agent for agent in facts.trained_agents if self.covers(agent.name)):
            limit = agent.sampling.max_tokens
            if penalty.buffer > limit:
                message = f"agent `{agent.name}` generates at most {limit} tokens; write a smaller number"
                yield facts.problem((*path, "buffer"), message)
        for index, node in enumerate(facts.nodes):
            if node.id == OVERLONG:
                message = f"the length penalty is recorded as the reward of `{OVERLONG}`; give this node another name"
                yield facts.problem(("nodes", index, "id"), message)
