"""The base class of all estimators: the options of the loss and the update, and the traits that an estimator declares.

Invariant: a workflow's `algorithm` is an object of its estimator's class, whose fields are the options that this
estimator reads. An option that it does not read is not a field, so writing it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from recipe.dag.algorithms.blocks import Block, DynamicSampling, Importance, Overlong, Uncertainty
from recipe.dag.algorithms.cory import Cory
from recipe.dag.algorithms.facts import Facts
from recipe.dag.algorithms.happo import Happo
from recipe.dag.algorithms.loss import DEFAULTS, check_loss_options, warn_of_clip
from recipe.dag.algorithms.mixer import Mixer
from recipe.dag.algorithms.tree import Tree
from recipe.dag.core.frozen import Frozen
from recipe.dag.core.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch

GroupKey = Literal["uid", "agent", "role", "turn", "round", "node", "branch", "prompt_hash", "trunk"]
Scope = Literal["call", "link", "earlier", "trajectory", "episode"]


class Forks(NamedTuple):
    """How the episodes of a step are forked."""

    alternatives: int
    """Answers that are compared at a decision: the episode's own, and one in each of its forks."""
    decisions: int | None
    """The most decisions of an episode that are forked; None: all."""

    def most(self, decisions: int) -> int:
        """Return the most forks of an episode that has up to so many decisions."""
        return min(decisions, self.decisions or decisions) * (self.alternatives - 1)


def held(estimator: str, value: Any, why: str | None = None) -> AfterValidator:
    """Return a validator of an option that defines this estimator, so that only `value` is allowed."""
    always = why or (f"[{', '.join(value)}]" if isinstance(value, tuple) else value)

    def check(option: Any) -> Any:
        if option != value:
            message = "estimator `{estimator}` always has {always}; remove this, or choose `grpo` to set it"
            raise PydanticCustomError("held", message, {"estimator": estimator, "always": always})
        return option

    return AfterValidator(check)


class Algorithm(Frozen):
    """How rewards become advantages, and advantages an update. Each estimator is a subclass."""

    source: ClassVar[str] = ""
    """Paper or system."""
    assumes: ClassVar[str] = ""
    """Requirements on a run, in words."""
    needs_values: ClassVar[bool] = False
    """Needs a critic for each trained policy."""
    may_read_values: ClassVar[bool] = False
    """Reads a critic's values where policies have one."""
    spans_policies: ClassVar[bool] = False
    """Reads the rows of all policies at once, and carries rewards from one agent to another."""
    pairs_calls: ClassVar[bool] = False
    """Compares pairs of calls by their log-probs under the policy and its reference, which every trained policy needs.
    A call without a pair has no part in the step."""
    joint_critic: ClassVar[bool] = False
    """One critic for all policies reads the joint history: each call is a row by itself."""
    carries_back_unless: ClassVar[str | None] = None
    """The option, as text to type, with which `carries_back` is False."""

    estimator: str
    share_reward_in_agent: bool = False
    """The calls of every agent get the last agent's reward. Not with gae_chain, mappo, vdn and qmix, which already
    carry rewards from agent to agent."""
    kl_reward_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference that is subtracted from the reward of each token."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference in the actor's loss; above 0 the policy needs `reference: true`."""
    clip_ratio_low: float = Field(default=0.2, ge=0.0)
    """How far below 1 a ratio counts; the default under gspo is 3e-4."""
    clip_ratio_high: float = Field(default=0.2, ge=0.0)
    """How far above 1 a ratio counts; the default under gspo is 4e-4."""
    clip_ratio_c: float = Field(default=3.0, gt=1.0)
    """Dual clip: bounds the loss of tokens with negative advantage."""
    policy_loss: Literal["vanilla", "gspo", "cpgd"] = "vanilla"
    """vanilla: PPO's, per token. gspo: ratios per call (arXiv 2507.18071), averaged over calls, not tokens. cpgd: the
    logarithm of the ratio is clipped (arXiv 2505.12504)."""
    policy_drift_coef: float = Field(default=0.001, ge=0.0)
    """cpgd: weight of the KL from the policy before the update to the one after it."""
    entropy_coef: float = 0.0
    old_log_probs: Literal["auto", "trainer", "rollout"] = "auto"
    """The denominator of importance ratios. trainer: log-probs recomputed before the update, so that a ratio starts at
    1. rollout: those of the server, which saves a forward pass and corrects for the server's different arithmetic.
    auto: as trainer, but without the pass if all ratios are 1 anyway: with one update per step, if no other option
    reads these log-probs."""
    importance: Importance | None = None
    """Weights of the loss where the server's log-probs differ from the trainer's; if absent, the difference is only
    measured (logprob_diff)."""
    epochs: int = Field(default=1, ge=1)
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch and step of the run."""
    loss_agg: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """What counts once in the policy loss. token-mean: each token. seq-mean-token-sum: each token, too, divided by the
    number of calls. seq-mean-token-mean: each call."""
    agent_weights: Literal["loss_agg", "equal"] = "loss_agg"
    """Weights of the agents that share a policy. loss_agg: as many as their tokens or calls. equal: their advantages
    are multiplied so that each agent has the same part in the step's policy loss."""
    drop_zero_variance: bool = False
    """Leave out rows whose group has equal rewards (they carry no gradient, but dilute the mean)."""
    mean_return_between: tuple[float, float] | None = None
    """With drop_zero_variance, also leave out rows whose group has a mean return at or beyond these bounds: problems
    that are too hard or too easy for the agent, even if its rewards differ a little (MARTI v2's dynamic filtering)."""
    overlong: Overlong | None = None
    """Treatment of calls that were cut off, or nearly; if absent, they are trained like all other calls."""
    drop_void_turns: bool = False
    """Agents with tools: a turn of the model that gives neither code nor an answer takes all calls of its agent in the
    episode out of the policy's loss (SimpleTIR, arXiv 2509.02479). Their rewards stay in the baselines."""
    dynamic_sampling: DynamicSampling | None = None
    """Roll out more samples in place of those whose groups were left out; needs drop_zero_variance."""
    cory: Cory | None = None
    """Role exchange; if absent, agents keep their policies."""
    uncertainty: Uncertainty | None = None
    """Weights of the advantages of any estimator; needs several episodes per sample."""
    tree: Tree | None = None
    """Credit of candidates; if absent, its defaults apply."""
    happo: Happo | None = None
    """Sequential updates; if absent, policies learn from the same advantages, in no order."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that this algorithm has, whose checks run with its own."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return tuple(value for value in values if isinstance(value, Block))

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        """Yield the problems that the blocks `algorithm` and `episode` show. Called for every workflow file; what needs
        more of the file asks `facts.complete` first."""
        yield from check_loss_options(facts)
        if self.share_reward_in_agent and self.spans_policies:
            message = (
                f"{self.estimator} carries the last agent's reward to the other agents already, so sharing would count "
                "it twice; remove this"
            )
            yield facts.problem(("algorithm", "share_reward_in_agent"), message, key=True)
        if self.drop_zero_variance and not self.grouping:
            message = (
                f"{self.estimator} compares no groups, so a row carries gradient even if its siblings earned the same; "
                "remove this, or choose an estimator that compares the episodes of a sample (grpo)"
            )
            yield facts.problem(("algorithm", "drop_zero_variance"), message, key=True)
        if self.mean_return_between is not None:
            low, high = self.mean_return_between
            if not self.drop_zero_variance:
                message = "selects among the groups that `drop_zero_variance: true` compares; add that, or remove this"
                yield facts.problem(("algorithm", "mean_return_between"), message, key=True)
            if not low < high:
                message = f"no number is above {low:g} and below {high:g}; write the smaller one first"
                yield facts.problem(("algorithm", "mean_return_between"), message)
        for block in self.blocks:
            yield from block.check_options(facts)

    def check(self, facts: Facts) -> Iterator[Problem]:
        """Yield the problems that need the whole workflow. Called when all of it could be read, and its dependencies
        exist and have no cycle."""
        if self.drop_void_turns and not any(agent.tools for agent in facts.trained_agents):
            message = "only agents with tools have void turns, and no trained agent has tools; remove this"
            yield facts.problem(("algorithm", "drop_void_turns"), message, key=True)
        policies = [agent.policy for agent in facts.trained_agents]
        if self.agent_weights == "equal" and len(set(policies)) == len(policies):
            message = "no trained policy has several agents, whose weights could differ; remove this"
            yield facts.problem(("algorithm", "agent_weights"), message, key=True)
        for block in self.blocks:
            yield from block.check(facts)

    def warn(self, facts: Facts) -> Iterator[Problem]:
        """Yield warnings about a workflow without problems: options that are legal, but seldom intended."""
        yield from warn_of_clip(facts)
        for block in self.blocks:
            yield from block.warn(facts)

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Whether the trainer computes the rows' log-probs before it updates on them."""
        if self.old_log_probs != "auto":
            return self.old_log_probs == "trainer"
        needed = any(block.reads_old_log_probs for block in self.blocks) or self.kl_reward_coef > 0
        return needed or self.epochs * self.mini_batches > 1

    @property
    def credit_reads_log_probs(self) -> bool:
        """Whether advantages depend on the log-probs of the policy and its reference."""
        return self.pairs_calls or self.kl_reward_coef > 0

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return (advantages, returns) of the batch: per row one float32 tensor as long as its response, 0 where the
        mask is 0. `base`: the workflow file, to which paths of the user's code are relative."""
        raise TypeError(f"{type(self).__name__} does not define credit")  # every estimator's class overrides it

    @property
    def grouping(self) -> tuple[GroupKey, ...]:
        """The keys in which calls agree that are compared; () if the estimator compares none."""
        return ()

    @property
    def forks(self) -> Forks | None:
        """How the episodes of a step are forked; None if they are not."""
        return None

    @property
    def given_text(self) -> str | None:
        """Dotted path, in a sample, of the text that answers are compared with; None if there is none."""
        return None

    @property
    def team_value(self) -> Mixer | None:
        """How the team's value is learned on the driver; None if it is not."""
        return None

    @property
    def warmup_steps(self) -> int:
        """Steps at the start in which only critics learn."""
        return 0

    @property
    def discount_per_turn(self) -> float | None:
        """Weight per turn of an agent's later rewards in an earlier call's return; None if the option is unset."""
        return None

    @property
    def decay_of_baseline(self) -> float | None:
        """Decay of the moving averages that a run keeps as baselines (`train/role_baselines.py`); None: it keeps
        none."""
        return None

    def credit_metrics(self, batch: CreditBatch) -> dict[str, float]:
        """Return what the estimator reports of a policy's batch."""
        return {}

    def reward_columns(self, batch: CreditBatch) -> list[Sequence[float] | None]:
        """Return the rewards whose differences carry gradient, each [C]; None for the batch's own. A group may be left
        out only if its calls are equal in all of them."""
        return [None]

    def paired_calls(self, batch: CreditBatch) -> list[bool]:
        """Return [C]: whether the call is in a pair."""
        raise TypeError(f"{type(self).__name__} pairs no calls")  # asked only where `pairs_calls`

    @property
    def unscored_scope(self) -> Scope:
        """The calls that leave the loss if a call is unscored, since their return is unknown: `call` (this one),
        `earlier` (those of its agent up to it), `trajectory` (all of its agent) or `episode`. `link`: this one, and it
        stays in the chain of steps, with the reward that the critic expected."""
        return "earlier"

    @property
    def advantages_per_turn(self) -> bool:
        """Whether the advantages of an episode differ by turn by construction: each call has its own reward, or the
        return from it on. Otherwise one return applies to every turn."""
        return True

    @property
    def carries_back(self) -> bool:
        """Whether the estimator itself credits a call with its agent's later rewards."""
        return self.unscored_scope != "call"

    @model_validator(mode="after")
    def _set_defaults_of_the_loss(self) -> Algorithm:
        for key, value in DEFAULTS.get(self.policy_loss, {}).items():
            if key not in self.model_fields_set:
                object.__setattr__(self, key, value)
        return self


def options_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """Return the options, with defaults, that only some estimators read, and those that this one fixes at a value."""
    shared = Algorithm.model_fields
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in algorithm.model_fields.items()
        if name != "estimator" and (name not in shared or is_held(algorithm, name))
    }


def is_held(algorithm: type[Algorithm], name: str) -> bool:
    """Return whether the estimator fixes the option at a value."""
    return any(isinstance(rule, AfterValidator) for rule in algorithm.model_fields[name].metadata)
