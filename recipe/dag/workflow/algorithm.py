"""The block `algorithm`: how rewards become advantages, and advantages an update.

Invariant: what a reader of the object finds is in force: options that the estimator or the loss sets, and the user did
not, stand in it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from recipe.dag.algorithms import ENTRIES, MIXED
from recipe.dag.workflow.blocks import Cory, DynamicSampling, Frozen, Happo, Importance, Mixer, Overlong, Uncertainty

GSPO_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Of the ratio of whole sequences (arXiv 2507.18071, section 5.1); a token's 0.2 would clip nothing there."""


class Algorithm(Frozen):
    estimator: Literal[
        "grpo",
        "rloo",
        "magrpo",
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
        "gae_chain",
        "gdpo",
        "ippo",
        "mappo",
        "vdn",
        "qmix",
    ] = "grpo"
    """gae: over the tokens of an agent's trajectory. gae_chain: one chain over turns, agents and tokens of an episode
    (MARFT). ippo: a critic per policy that reads what its agents read. mappo: one critic for all, which reads what
    everybody said and was shown. `verl-dag algorithms` lists all with what they assume; rloo and magrpo are grpo with
    options set."""
    group_by: tuple[Literal["uid", "agent", "role", "turn", "round", "node", "branch", "prompt_hash"], ...] = (
        "uid",
        "agent",
    )
    """What calls must have in common to be compared. role: `agents[].role`, which pools agents of one policy. branch:
    episodes that took the same way to the call (on it the same nodes were skipped and loops ran as many rounds).
    prompt_hash: the same prompt, token by token. Calls of different policies are never compared."""
    stat_unit: Literal["call", "trajectory"] = "trajectory"
    """What a call is worth. trajectory: all that its agent earns in the episode. call: its own reward and, with
    gamma_turn, the later ones of its agent. Either way, a trajectory counts once in its group's mean and deviation."""
    center: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["std", "none"] = "std"
    gamma_turn: float | None = Field(None, ge=0.0, le=1.0)
    """Makes stat_unit `call`: how much of its agent's later rewards a call is worth, per turn or round in between; 0:
    its own reward only. `stat_unit: call` needs it where an agent moves more than once in an episode."""
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """reinforce, reinforce_pp, gae, gae_chain: discount per token. ippo, mappo: per step (`level`)."""
    lam: float = Field(1.0, ge=0.0, le=1.0)
    """All with critics: how far errors of later values reach back. 0.95 for ippo and mappo."""
    whiten: bool = True
    """All with critics: advantages of a policy's tokens get mean 0 and variance 1."""
    weights: dict[str, float] = {}
    """gdpo: of the reward's components, by the node that pays: a reward node, or a rollout node with rewards_with_env.
    1 where absent."""
    stream: Literal["agent", "call"] = "agent"
    """ippo: what one chain of steps is. agent: an agent's calls of an episode, so that what it earns later reaches its
    earlier calls. call: each call by itself, for agents that move once."""
    level: Literal["action", "token"] = "action"
    """ippo, mappo: what a step is. action: a whole call, valued before its first token. token: each sampled token."""
    history_chars: int = Field(4000, ge=2)
    """mappo: the critic sees a longer message's beginning and end, in characters; less where it would not fit."""
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
    critic_warmup: int = Field(0, ge=0)
    """Steps at the start in which only critics learn."""
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
    mixer: Mixer | None = None
    """Of vdn and qmix, which have the default one where it is absent."""

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Whether the trainer computes the rows' log-probs before it updates on them."""
        if self.old_log_probs != "auto":
            return self.old_log_probs == "trainer"
        read = self.importance is not None or self.happo is not None or self.kl_reward_coef > 0
        return read or self.epochs * self.mini_batches > 1

    @model_validator(mode="after")
    def _as_estimator_and_loss_have_it(self) -> Algorithm:
        """What the estimator and the loss set and the user did not."""
        of_loss = {"loss_agg": "seq-mean-token-mean", **GSPO_CLIP} if self.policy_loss == "gspo" else {}
        by_call = {"stat_unit": "call"} if self.gamma_turn is not None else {}
        for key, value in {**ENTRIES[self.estimator].options, **by_call, **of_loss}.items():
            if key not in self.model_fields_set:
                object.__setattr__(self, key, value)
        if self.mixer is None and self.estimator in MIXED:
            object.__setattr__(self, "mixer", Mixer())
        return self
