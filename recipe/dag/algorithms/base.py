"""What every algorithm has: the options of the loss and the update, and the traits that a method declares.

Invariant: a workflow's `algorithm` is an object of its estimator's class, whose fields are the options that this
estimator reads. An option that it does not read is no field of it, and so an error where it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from recipe.dag.workflow.blocks import Cory, DynamicSampling, Frozen, Happo, Importance, Mixer, Overlong, Uncertainty

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch

GSPO_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Of the ratio of whole sequences (arXiv 2507.18071, section 5.1); a token's 0.2 would clip nothing there."""
GroupKey = Literal["uid", "agent", "role", "turn", "round", "node", "branch", "prompt_hash"]
Scope = Literal["call", "earlier", "trajectory", "episode"]


def held(estimator: str, value: Any, why: str | None = None) -> AfterValidator:
    """Return a validator of an option that makes this estimator what it is, so that no other value may be given."""
    always = f"[{', '.join(value)}]" if isinstance(value, tuple) else value

    def check(given: Any) -> Any:
        if given != value:
            raise PydanticCustomError(
                "held", f"estimator `{estimator}` always has {why or always}; remove this, or choose `grpo` to set it"
            )
        return given

    return AfterValidator(check)


class Algorithm(Frozen):
    """How rewards become advantages, and advantages an update. Each estimator is a subclass."""

    source: ClassVar[str] = ""
    """Paper or system."""
    assumes: ClassVar[str] = ""
    """What a run must have for it, in words."""
    needs_values: ClassVar[bool] = False
    """Needs a critic for each trained policy."""
    may_read_values: ClassVar[bool] = False
    """Reads a critic's values where policies have one."""
    spans_policies: ClassVar[bool] = False
    """Sees the rows of all policies at once, and carries rewards from one agent to another."""
    joint_critic: ClassVar[bool] = False
    """One critic for all reads the joint history: each call is a row of its own."""

    estimator: str
    share_reward_in_agent: bool = False
    """Every agent's calls get the last agent's reward. Not with gae_chain, mappo, vdn and qmix, which hand rewards on
    themselves."""
    kl_reward_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the reference that is subtracted from the reward of each token."""
    kl_loss_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the reference in the actor's loss; above 0 the policy needs `reference: true`."""
    clip_ratio_low: float = Field(0.2, ge=0.0)
    """How far below 1 a ratio may count; with gspo 3e-4 where absent."""
    clip_ratio_high: float = Field(0.2, ge=0.0)
    """The same above 1; with gspo 4e-4 where absent."""
    clip_ratio_c: float = Field(3.0, gt=1.0)
    """Dual clip: bounds the loss of tokens with negative advantage."""
    policy_loss: Literal["vanilla", "gspo", "cpgd"] = "vanilla"
    """vanilla: PPO's, per token. gspo: ratios per call (arXiv 2507.18071), averaged over calls, not tokens. cpgd: the
    logarithm of the ratio is clipped (arXiv 2505.12504)."""
    policy_drift_coef: float = Field(0.001, ge=0.0)
    """cpgd: weight of the KL from the policy before the update to the one after it."""
    entropy_coef: float = 0.0
    old_log_probs: Literal["auto", "trainer", "rollout"] = "auto"
    """What importance ratios are taken against. trainer: recomputed before the update, so that a ratio starts at 1.
    rollout: the server's own, which saves a forward pass and corrects for the server's different arithmetic. auto: as
    trainer, without the pass where all ratios are 1 whatever it finds: one update of the weights, and nothing else that
    reads it."""
    importance: Importance | None = None
    """Weights on the loss where the server's log-probs differ from the trainer's; without it, the difference is only
    measured (logprob_diff)."""
    epochs: int = Field(1, ge=1)
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per epoch and step of the run."""
    loss_agg: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    drop_zero_variance: bool = False
    """Leave out rows whose group has one reward only (they carry no gradient, but dilute the mean)."""
    overlong: Overlong | None = None
    """What becomes of calls that were cut off, or nearly; without it, they are trained like all others."""
    drop_void_turns: bool = False
    """Agents with tools: a turn of the model that gives neither code nor an answer takes all calls of its agent in the
    episode out of the policy's loss (SimpleTIR, arXiv 2509.02479). Their rewards stay in the baselines."""
    dynamic_sampling: DynamicSampling | None = None
    """Roll out more samples in place of those whose groups were left out; needs drop_zero_variance."""
    cory: Cory | None = None
    """Role exchange; without it, agents keep their policies."""
    uncertainty: Uncertainty | None = None
    """Weights on the advantages of any estimator; needs several episodes per sample."""
    happo: Happo | None = None
    """Sequential updates; without it, policies learn from the same advantages, in no order."""

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Whether the trainer computes the rows' log-probs before it updates on them."""
        if self.old_log_probs != "auto":
            return self.old_log_probs == "trainer"
        read = self.importance is not None or self.happo is not None or self.kl_reward_coef > 0
        return read or self.epochs * self.mini_batches > 1

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return (advantages, returns) of the batch: per row one float32 tensor as long as its response, 0 where the
        mask is 0. `base`: the workflow file, for what it names."""
        raise TypeError(f"{type(self).__name__} has no credit of its own")  # every estimator's class overrides it

    @property
    def grouping(self) -> tuple[GroupKey, ...]:
        """What calls must have in common to be compared; () where none are."""
        return ()

    @property
    def team_value(self) -> Mixer | None:
        """How the team's value is learned on the driver; None where none is."""
        return None

    @property
    def warmup_steps(self) -> int:
        """Steps at the start in which only critics learn."""
        return 0

    @property
    def discount_per_turn(self) -> float | None:
        """What an agent's later rewards count for in an earlier call's worth; None where the option is unset."""
        return None

    def reward_columns(self, batch: CreditBatch) -> list[Sequence[float] | None]:
        """Return the rewards whose differences carry gradient, each [C]; None for the batch's own. A group may be left
        out only where it earned one and the same in all of them."""
        return [None]

    @property
    def unscored_scope(self) -> Scope:
        """Which calls an unscored call takes out with it, since what they are worth is unknown: `call` (itself alone),
        `earlier` (its agent's calls up to it), `trajectory` (all of its agent's) or `episode`."""
        return "earlier"

    @property
    def advantages_per_turn(self) -> bool:
        """Whether the advantages of an episode differ by turn by construction: each call is worth something of its own,
        or what is earned from it on. Otherwise one return is every turn's."""
        return True

    @property
    def carries_back(self) -> bool:
        """Whether the estimator itself credits a call with what its agent earns after it."""
        return True

    @model_validator(mode="after")
    def _as_loss_has_it(self) -> Algorithm:
        """What the loss sets and the user did not."""
        defaults = {"loss_agg": "seq-mean-token-mean", **GSPO_CLIP} if self.policy_loss == "gspo" else {}
        for key, value in defaults.items():
            if key not in self.model_fields_set:
                object.__setattr__(self, key, value)
        return self


def options_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """Return the options that this estimator reads and not every one, or that it holds at a value, with defaults."""
    shared = Algorithm.model_fields
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in algorithm.model_fields.items()
        if name != "estimator" and (name not in shared or is_held(algorithm, name))
    }


def is_held(algorithm: type[Algorithm], name: str) -> bool:
    """Whether the option may have no other value."""
    return any(isinstance(rule, AfterValidator) for rule in algorithm.model_fields[name].metadata)
