"""The blocks of a workflow's `algorithm`, and the models that it and the policies name.

Invariant: as in `schema`, which offers all of them under its own name.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CodeInterpreterOptions(Frozen):
    """`kwargs` of the tool `code_interpreter`; what is absent is the run's (`sandbox.timeout_s`, `sandbox.memory_mb`)
    or the tool's own default."""

    timeout_s: float | None = Field(None, gt=0.0)
    """Of a program, where the call names none."""
    max_timeout_s: float | None = Field(None, gt=0.0)
    """The most that the model may ask for; a hook gets what it asks for."""
    max_output_chars: int | None = Field(None, ge=1)
    """Of each stream."""
    memory_mb: int | None = Field(None, ge=1)
    auto_print: bool = False
    """Print the value of a last line that is an expression, as a notebook does."""


class Model(Frozen):
    path: str
    """A local directory or hub name; `${oc.env:NAME}` is read when the run starts."""
    tokenizer_path: str | None = None
    trust_remote_code: bool = False


class DynamicSampling(Frozen):
    """A step rolls out further batches of samples until as many groups with different rewards are there as a batch has
    samples (DAPO)."""

    max_batches: int = Field(3, ge=1)
    """The most batches that one step may roll out; it then trains on what there is."""


class Happo(Frozen):
    """Policies learn one after the other; what an update did to the probability of an agent's messages weighs the
    advantages of the policies after it (HAPPO, arXiv 2109.11251): those of the same turn where advantages differ by
    turn, those of the whole episode where its return is every turn's. Each agent needs a policy of its own."""

    source: ClassVar[str] = "arXiv 2109.11251"
    assumes: ClassVar[str] = "a policy per agent, none shared; every agent's reward is the team's; with any estimator"

    order: Literal["random", "reverse_topological"] = "random"
    """random: drawn anew in every step. reverse_topological: whoever speaks last learns first."""
    ratio: Literal["sequence_sum", "sequence_mean", "clamped"] = "clamped"
    """What an update did. clamped: the exact ratio of all that an agent said, within 1 / bound and bound. sequence_sum:
    the exact one, whose variance grows with length. sequence_mean: its geometric mean per token, which is 1 within a
    thousandth from a hundred tokens on, so that the policies after an update hardly feel it."""
    bound: float = Field(4.0, gt=1.0)
    """Of one policy's ratio; factors of several policies multiply."""


class Uncertainty(Frozen):
    """What a policy was unsure of weighs less (UMAD, arXiv 2603.01221): exp(-alpha z), where z is the mean negative
    log-prob of a row's tokens, as the server sampled them, in standard deviations of the rows of its sample and agent.
    """

    source: ClassVar[str] = "UMAD, arXiv 2603.01221"
    assumes: ClassVar[str] = (
        "several episodes per sample; with any estimator; a group is the rows of one sample and agent"
    )

    alpha: float = Field(0.25, ge=0.0)
    bound: float = Field(5.0, gt=0.0)
    """Of z, to either side."""


class Importance(Frozen):
    """Corrects for a server that samples with slightly other probabilities than the trainer's: each token's policy
    loss, whatever the loss, is multiplied by the ratio of the two, bounded."""

    source: ClassVar[str] = "truncated: fengyao.notion.site/off-policy-rl; masked: IcePop, arXiv 2510.18855"
    assumes: ClassVar[str] = "old_log_probs of the trainer; with any estimator and policy loss"

    cap: float = Field(2.0, gt=1.0)
    level: Literal["token", "sequence"] = "token"
    """What has one ratio: each token, or all sampled tokens of a call together (unbiased, of far higher variance)."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: a ratio above `cap` counts as `cap`. mask: one outside of 1 / cap and cap counts as 0."""


class OverlongPenalty(Frozen):
    """A generation that reaches into the last `buffer` tokens before its agent's `max_tokens` costs its call from 0 to
    `weight`, linearly; one that was cut off costs all of it (DAPO's soft overlong punishment, arXiv 2503.14476)."""

    buffer: int = Field(ge=1)
    """Tokens."""
    weight: float = Field(1.0, gt=0.0)
    """In units of the reward."""


OVERLONG = "overlong"
"""The part of a call's reward that the penalty is, as if a node of this name had paid it."""


class Overlong(Frozen):
    """What becomes of calls that were cut off, or nearly."""

    source: ClassVar[str] = "DAPO, arXiv 2503.14476"
    assumes: ClassVar[str] = "with any estimator; what is left out of the loss stays in the baselines"

    mask: bool = False
    """Calls that a limit of tokens or generations cut off are left out of the policy's loss (DAPO's overlong filter).
    Their rewards stay in the baselines, and critics learn from them."""
    penalty: OverlongPenalty | None = None


class Cory(Frozen):
    """Agents exchange policies every few steps (CORY, arXiv 2410.06101): with a pioneer and an observer who hears it,
    both policies learn both roles, and either can be deployed alone. Validation is with the policies as declared."""

    source: ClassVar[str] = "arXiv 2410.06101"
    assumes: ClassVar[str] = (
        "as many trained policies as roles; rewards are shared (shaping shared); the pioneer is deployed alone"
    )

    roles: tuple[str, ...]
    """The agents, in the order in which their policies move on."""
    every: int = Field(5, ge=1)
    """Steps."""


class Encoder(Frozen):
    """Turns texts into vectors for a mixer: the last hidden state of a frozen model, averaged over chunks."""

    model: Model | None = None
    """A language or embedding model; the first trained policy's initial one where absent."""
    chunk: int = Field(512, ge=1)
    """Tokens that it reads at once. A longer text is read in pieces, none of it is cut off."""


class Mixer(Frozen):
    """What vdn and qmix learn the team's value with. All of it is learned on the driver, from whole messages; only the
    encoder is a language model."""

    hidden: int = Field(64, ge=1)
    """Width of the network that gives a message its utility."""
    lr: float = Field(1e-3, gt=0.0)
    epochs: int = Field(4, ge=1)
    """Over a step's episodes and those of the replayed steps."""
    batch_size: int = Field(64, ge=1)
    """Turns of episodes per optimizer step."""
    steps_per_epoch: int = Field(40, ge=1)
    """Optimizer steps at most: where there are more turns than that many batches hold, batches are larger."""
    weight_decay: float = Field(0.01, ge=0.0)
    replay_steps: int = Field(4, ge=0)
    """So many earlier steps' episodes are learned from again; the older ones answer to policies that are gone."""
    gamma_turn: float = Field(1.0, ge=0.0, le=1.0)
    """Discount of the team's reward per turn."""
    lam: float = Field(1.0, ge=0.0, le=1.0)
    """1: the team's value is fitted to the returns as they were (Monte Carlo). Below, to TD(lambda) targets over turns,
    from a slow copy of utilities and mixer."""
    target_tau: float = Field(0.01, gt=0.0, le=1.0)
    """With lam below 1: how far the slow copy goes towards the learner after each optimizer step."""
    loss: Literal["squared", "binary"] = "squared"
    """Of the team's value to its return. binary: the value is a probability, fitted by cross entropy; the team's return
    from each turn on must lie in [0, 1]."""
    form: Literal["control_variate", "counterfactual", "sloped"] = "control_variate"
    """control_variate: the team's return less what it would have been expected to be without this message, which
    leaves the expected gradient as it is, whatever the mixer learned (with `scale: std` only up to the group's
    deviation, which siblings share, as in grpo). counterfactual: the team value with the message less that with the
    siblings' in its place. sloped: the message's utility less its siblings', times the slope of the team value in it.
    """
    full_at: float = Field(0.5, gt=0.0, le=1.0)
    """Held-out explained variance at which the credit is all the mixer's; at 0 and below it has no say."""
    encoder: Encoder = Encoder()
    peers: dict[str, tuple[str, ...]] = {}
    """Node -> the nodes whose messages its baseline may read; where absent, every call that cannot react to its own."""

    @property
    def widths(self) -> dict[str, int]:
        """Of the networks."""
        return {"hidden": self.hidden}
