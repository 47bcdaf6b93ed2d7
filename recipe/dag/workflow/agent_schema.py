"""Agents, and the policies whose weights they use, as a workflow declares them.

Invariant: as in `schema`, every key is declared here, an unknown key is an error, and `0` is a value, not "unset".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from recipe.dag.core.frozen import Frozen, Mark
from recipe.dag.types.model import Api, Model


def as_tuple(value: Any) -> Any:
    """Return a text as a tuple of one item, a list as a tuple, and anything else as it is."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)]


class Sampling(Frozen):
    """Sampling parameters of an agent in training, named as in SGLang."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Tokens less probable than this fraction of the most probable token are excluded."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from the logit of each token that the generation already contains."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from the logit of a token once for each occurrence in the generation."""
    stop: Texts = ()
    """Strings that end a generation. They stay in the generated text."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens per generation."""
    thinking_tokens: int = Field(default=0, ge=0)
    """Added to `max_tokens` for a model that thinks: one whose chat template has <think>, or one behind an API. The
    servers of a policy of the run get as much more context. For agents whose policy is not trained."""
    ignore_eos: bool = False
    """Always generate `max_tokens` tokens; for benchmarks only."""

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens per generation of a model that thinks."""
        return self.max_tokens + self.thinking_tokens


NEUTRAL = {
    name: Sampling.model_fields[name].default
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
}
"""Options that change the distribution of tokens, each with its default, at which it does not."""


class ValidationSampling(Frozen):
    """Sampling parameters for validation and evaluation. Parameters that are not set have their value in `sampling`."""

    temperature: float | None = Field(default=None, ge=0.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    stop: Texts | None = None
    max_tokens: int | None = Field(default=None, ge=1)


class ToolSpec(Frozen):
    """A tool, under `tools` or in an agent: built in, or a class of the user. In an agent, a name with further keys
    overrides those of the tool of that name under `tools`."""

    name: str | None = None
    """The name of a built-in tool or of a tool under `tools`. Models call a tool by the name in its schema."""
    path: Annotated[str | None, Mark.CODE] = None
    """The user's class: `file.py:Class`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the class, or options of a built-in tool."""
    timeout_s: float | None = Field(default=None, gt=0.0)
    """Time limit of a call in seconds; the model sees that it was exceeded. For a built-in tool, the limit of calls
    that ask for none."""
    max_timeout_s: float | None = Field(default=None, gt=0.0)
    """The code interpreter only: the largest time limit that the model may ask for."""
    memory_mb: int | None = Field(default=None, ge=1)
    """The code interpreter only: memory of one program."""
    auto_print: bool | None = None
    """The code interpreter only: print the value of a last line that is an expression, as notebooks do."""
    max_output_chars: int | None = Field(default=None, ge=1)
    """Length to which a result is cut before anything else reads it; for the code interpreter, stdout and stderr
    each."""
    workers: Annotated[int | None, Mark.UNLEARNED] = Field(default=None, ge=1)
    """Maximum number of calls that run at once, over all episodes of the run; further ones wait."""
    calls_per_second: Annotated[float | None, Mark.UNLEARNED] = Field(default=None, gt=0.0)
    """Maximum number of calls that start per second, over all episodes of the run; further ones wait."""
    description: str | None = Field(default=None, min_length=1)
    """What the model reads about the tool, in place of the description in its schema."""
    parameters: dict[str, Any] | None = None
    """The arguments that the model is shown and that are checked, as a JSON schema, in place of those in its schema."""

    @property
    def key(self) -> str:
        """Identity of the tool: agents whose tools have equal keys share one instance and its state."""
        options = self.model_dump(exclude_none=True, exclude={"name", "path"})
        options = {name: value for name, value in options.items() if value != {} or name == "parameters"}
        return str(self) + (json.dumps(options, sort_keys=True, default=str) if options else "")

    def options(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the options of a built-in tool that has options of these `names`: `kwargs`, and those that are set."""
        own = {name: getattr(self, name) for name in names if name in ToolSpec.model_fields}
        return self.kwargs | {name: value for name, value in own.items() if value is not None}

    def __str__(self) -> str:
        return self.path or self.name or ""


class DeclaredTool(ToolSpec):
    """A tool of an agent that is declared under `tools`, with what the agent overrides."""

    declared: str
    """Its name there. The limits of calls hold for all agents that name it, unless they set limits of their own."""


def _tool_from_text(value: Any) -> Any:
    """Read `code_interpreter` or `file.py:Class` as a tool without options."""
    if not isinstance(value, str):
        return value
    return ToolSpec(path=value) if ":" in value else ToolSpec(name=value)


class ToolLoop(Frozen):
    """A loop inside one call of an agent: the engine runs the tool calls of each generation and lets the model
    continue with their results."""

    format: Literal["hermes", "fenced", "tags"] = "hermes"
    """Format of tool calls. hermes: JSON inside <tool_call> tags. fenced: the last ```python block is the argument
    `code` of the first tool. tags: a generation ends at </code>; the text between <code> and </code> is the argument of
    the first tool, and its result continues the same message, between <interpreter> and </interpreter>."""
    call_tag: str = Field(default="code", pattern=r"^[A-Za-z_][\w-]*$")
    """Format tags only: the name of the tags around a call."""
    result_tag: str = Field(default="interpreter", pattern=r"^[A-Za-z_][\w-]*$")
    """Format tags only: the name of the tags around a result."""
    max_generations: int = Field(default=8, ge=1)
    """Maximum number of generations per call, including the final answer."""
    max_parallel: int = Field(default=1, ge=1)
    """Format hermes only: maximum number of tool calls that are run per generation; the others are answered with an
    error text."""
    max_invalid_streak: int | None = Field(default=None, ge=1)
    """End the agent's call after this many generations in a row without a tool call that could be run (an unknown tool,
    unreadable or refused arguments); by default only `max_generations` ends it."""
    max_response_chars: int = Field(default=1024, ge=1)
    """Maximum number of characters of a tool's result; longer results are shortened."""
    truncate: Literal["left", "middle", "right"] = "middle"
    """The part of a long result that is removed."""

    @property
    def continues_message(self) -> bool:
        """Whether a result is written into the model's own message, instead of a message that follows it."""
        return self.format == "tags"

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the strings that end a generation, besides those of the agent's sampling options."""
        return (f"</{self.call_tag}>",) if self.continues_message else ()


class Agent(Frozen):
    """An agent: a role that one policy plays. Its index in the list is `agent_group` in records."""

    name: str = Field(min_length=1)
    policy: str
    """The name of the policy, under `policies`, that generates for this agent."""
    role: str | None = None
    """The role by which `algorithm.group_by: [role]` pools agents; by default the agent's name."""
    sampling: Sampling = Sampling()
    validation: ValidationSampling = ValidationSampling()
    tools: tuple[Annotated[ToolSpec, BeforeValidator(_tool_from_text)], ...] = ()
    """The agent's tools: a name, `file.py:Class`, or a mapping with `name` or `path` and the tool's options."""
    tool_loop: ToolLoop | None = None
    """The engine runs the model's tool calls in this loop. Without it, only the agent's hook calls tools."""
    memory: Literal["none", "chat", "shared"] = "none"
    """none: every call starts from a new prompt. chat: within an episode, each node of the agent keeps its conversation
    as token ids and appends only the new messages, so that its calls become one row. shared: one conversation of all
    agents of the policy that have `shared`; a call continues the latest one that its node sees."""
    chat_template_kwargs: dict[str, Any] = {}
    """Keyword arguments of the tokenizer's chat template."""
    on_failure: Literal["fault", "skip"] = "fault"
    """Handling of a call that fails, unless the user's code is at fault. fault: the episode fails
    (`episode.on_failure`). skip: the call's `parsed` is {"failed": reason}, and the episode goes on; only for agents
    whose policy is not trained."""
    hand_over: Literal["all", "answer"] = "all"
    """The part of its text that other agents read. all: the whole text. answer: the text without thoughts."""

    def stop_strings(self, *, validate: bool) -> list[str]:
        """Return the strings that end a generation, in training or in validation."""
        stop = self.validation.stop if validate and self.validation.stop is not None else self.sampling.stop
        return list(dict.fromkeys((*stop, *(self.tool_loop.stop if self.tool_loop is not None else ()))))


class Critic(Frozen):
    """A value model with its own optimizer, on the devices of its policy."""

    model: Model | None = None
    """The model that provides the initial weights, below a new value head; by default the policy's model."""
    share: str | None = None
    """The policy whose critic this policy uses, too: one network, trained on the rows of all policies that share it."""
    lr: float | None = Field(default=None, gt=0.0)
    """Learning rate of the critic; by default the run's `critic.optim.lr`."""
    cliprange_value: float = Field(default=0.5, gt=0.0)
    """Maximum distance of a value from its value before the update, in units of the return."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows of a step."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    rank: int | None = Field(default=None, ge=1)
    """Rank of the critic of an adapter, which is an adapter on the same base, with a value head; by default that of the
    policy."""
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's `critic`."""


def _reference(value: Any) -> Any:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class Lora(Frozen):
    """A low-rank adapter on a frozen policy: each of its linear layers W computes with W + alpha / rank * B A, where A
    and B alone are trained. Adapters of one base share its weights, its trainer and its servers."""

    base: str
    """The frozen policy, under `policies`, that has the model."""
    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0.0)
    """By default twice the rank."""
    targets: Texts = ("all-linear",)
    """The layers: `all-linear`, which are all but the output embeddings, or a list of their last names, such as
    q_proj."""
    path: Annotated[str | None, Mark.CONTENT] = None
    """A folder of PEFT (adapter_config.json and adapter_model.safetensors) to start at, which also determines rank,
    alpha and targets. By default B is 0: the adapter starts as its base. `${oc.env:NAME}` is read when the run
    starts."""

    @property
    def scaled_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha


class Reference(Frozen):
    """A copy of a policy's weights that is not trained."""

    refresh: int | None = Field(default=None, ge=1)
    """Number of steps after which the copy is taken anew: after step s if s is a multiple, so that step s + 1 is the
    first with the new one. By default it keeps the initial weights."""


class Policy(Frozen):
    """One set of weights with its tokenizer, optimizer and inference servers. Several agents may share it."""

    model: Model = Model(path="")
    """The initial weights, which every policy needs unless it has an `api`, or is a `lora` or a snapshot."""
    lora: Lora | None = None
    """An adapter on the model of another policy; such a policy has no `model`, and its `gpus` and `config` are those of
    its base."""
    api: Api | None = None
    """A server with OpenAI's interface generates; such a policy has no `model` and is always frozen."""
    snapshot_of: str | None = None
    """A past self of a trained policy, under `policies`: a frozen player with that policy's `model` and `config`, whose
    servers get its weights when the run starts and again every `every` steps."""
    every: int | None = Field(default=None, ge=1)
    """After each step that is a multiple of this, a snapshot becomes what the policy then is."""
    frozen: bool = False
    """Generate with these weights, but never train them."""
    critic: Critic | None = None
    lr: float | None = Field(default=None, gt=0.0)
    """Learning rate of the actor; by default the run's `actor_rollout_ref.actor.optim.lr`."""
    train_cycle: int | None = Field(default=None, ge=1)
    """Number of steps before the next policy is updated. Policies with a `train_cycle` alternate: in step s (from 0),
    the k-th of n such policies updates its actor if (s // train_cycle) % n == k. Critics are updated in every step."""
    reference: Annotated[Reference | None, BeforeValidator(_reference)] = None
    """true: keep a copy of the initial weights, for a KL or for estimator spin. {refresh: K}: renew the copy every K
    steps. The reference of an adapter is its base, which needs no copy."""
    gpus: Annotated[int | None, Mark.UNLEARNED] = Field(default=None, ge=1)
    """Number of GPUs reserved for this policy; without it, the policies share all GPUs of the run."""
    config: dict[str, Any] = {}
    """Dotted or nested overrides of verl's `actor_rollout_ref` for this policy."""

    @model_validator(mode="before")
    @classmethod
    def _freeze(cls, data: Any) -> Any:
        never_trained = isinstance(data, dict) and any(data.get(key) is not None for key in ("api", "snapshot_of"))
        return {"frozen": True, **data} if never_trained else data

    @property
    def parent(self) -> str | None:
        """The policy whose model this one has: the base of an adapter, the policy of a snapshot; None for others."""
        return self.lora.base if self.lora is not None else self.snapshot_of


def critic_owners(policies: Mapping[str, Policy]) -> dict[str, str]:
    """Return, for each trained policy with a critic, the policy that owns the critic."""
    return {
        name: policy.critic.share or name
        for name, policy in policies.items()
        if policy.critic is not None and not policy.frozen
    }
