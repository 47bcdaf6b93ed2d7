"""The record of one episode: plain, JSON-able data to train from, to report on and to inspect.

Invariant: token ids are the truth and text is derived from them. What was sampled is kept as ids with the log-probs
that the server reported; nothing here is ever decoded and encoded again. A record holds no live objects, except the
tokenizer that a prompt's text needs until it is first read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.types.markup import after_thinking


@dataclass(slots=True)
class Generation:
    """One answer of a policy's server."""

    response_ids: list[int]
    log_probs: list[float]
    """In nats, after temperature, one per response id."""
    stop_reason: str
    """stop: the model ended it. length: a limit did. abort: the server gave up."""
    weight_version: int = 0
    usage: dict[str, float] | None = None
    """An API policy's (`types.usage`); None for a policy of the run."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server found in its prefix cache; None if it does not report them."""


STATUSES = ("success", "failed", "timeout", "invalid", "fault")


@dataclass(slots=True)
class ToolResult:
    """The result of one tool call. A tool that ran and failed is `failed`; a tool that could not run is `fault`."""

    name: str
    arguments: dict[str, Any]
    status: str
    """One of `STATUSES`: success, failed, timeout, invalid (unknown tool, unreadable or refused arguments; never ran),
    fault."""
    text: str
    """The text that the model reads."""
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None
    seconds: float = 0.0
    """Running time. The engine measures it for tools that do not report it."""
    attempts: int = 1
    """More than 1 if the infrastructure failed and the call was repeated."""
    waited: float = 0.0
    """Seconds for which the call waited for its turn, because of the tool's `workers` or `calls_per_second`."""
    start_seconds: float = 0.0
    """Seconds from the start of the episode until the tool was asked; 0.0 if it never ran."""
    generation: int = 0
    """How many generations of the agent's call came before it."""

    @property
    def ok(self) -> bool:
        return self.status == "success"


@dataclass(slots=True)
class Call:
    """One agent's action in one turn (in a loop: in one round): its generations and tool results up to the text that it
    passes on."""

    node: str
    agent: str
    agent_group: int
    """The agent's index in the workflow."""
    policy: str
    turn: int
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    """Sampled tokens (mask 1) and the tokens between generations, tool results and template (mask 0)."""
    response_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    """One per response id; 0.0 where the mask is 0."""
    prompt_text: str = ""
    """The prompt with special tokens, decoded when it is first read."""
    observation: str = ""
    """The env's observation that the agent had before this call; empty without one."""
    text: str = ""
    """The text that the agent passes on: its last generation without special tokens, or the text from `parse`."""
    parsed: dict[str, Any] = field(default_factory=dict)
    """The data from `parse`, for later hooks, conditions and rewards."""
    tool_results: list[ToolResult] = field(default_factory=list)
    stop_reason: str = ""
    """Why the last generation ended: stop, or length (it was cut off). max_generations: it asked for a tool and no
    further generation is allowed. invalid_calls: its tool calls were invalid too often in a row. length without a
    generation: the prompt did not fit."""
    generations: int = 0
    weight_version: int = 0
    cached_tokens: int | None = None
    """Of `prompt_ids`, `Generation.cached_tokens` of the first generation."""
    temperature: float = 1.0
    reward: float | None = None
    """Set by the reward nodes or the env; None if neither rewarded the call."""
    train: bool = True
    """False keeps its tokens out of training: no actor or critic learns from them and no baseline counts them, but its
    reward still counts in the returns of its trajectory. Set by `parse` or a reward function."""
    seconds: float = 0.0
    generation_seconds: float = 0.0
    round: int = 0
    """The round of the node's loop, from 0 in every turn; 0 outside loops."""
    env_info: dict[str, Any] = field(default_factory=dict)
    """`info` returned by the env for this node's step."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The terms of `reward`, by the node that paid them: a reward node, or a rollout node for its env."""
    role: str = ""
    """The agent's role, or its name if it has none; empty in records older than roles."""
    branch: str = ""
    """The decisions of conditions that led to this call (`Schedule.branch_of`): skipped nodes, rounds of loops."""
    start_seconds: float = 0.0
    """Seconds from the start of the episode, earlier attempts included, to the start of this call."""
    done: bool = False
    """True if the episode ended with this turn because of its output, or of the env that its node stepped."""
    advantage: float | None = None
    """The mean advantage over the sampled tokens; None if the call was not trained on."""
    token_columns: dict[str, list[float]] = field(default_factory=dict)
    """With `report.token_columns`: one number per response id (`train.metrics.token_columns`), by name."""
    unscored: bool = False
    """True if a reward function returned None for it, so that its reward is unknown and no baseline counts it. It is
    outside the policy's loss, with the calls whose return depends on it (`Algorithm.unscored_scope`)."""
    completion: str | None = None
    """The model's last generation, if `parse` replaced it in `text`; otherwise None."""
    ended_in_tool_call: bool = False
    """True if the last generation asked for a tool and a limit left no room for another generation, so that the agent
    never answered."""
    opened_thinking: bool = False
    """True if the last generation began inside a thought: its prompt ended with <think>, or it continued one."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of an API policy without a tokenizer: what was sent and received, in order, its tool calls and their results
    included; such a call has no token ids. Of other policies: what `Context.ask` sent and received."""
    asked: list[int] = field(default_factory=list)
    """Indices of those of `messages` that `Context.ask` sent and received."""
    next_observation: str = ""
    """The env's observation for this agent after the node's step, which answers this action; empty if the node steps no
    env."""
    hand_over: str = "all"
    """`Agent.hand_over` in the workflow."""
    usage: dict[str, float] | None = None
    """Of an API policy: its requests, retries, prompt_tokens, completion_tokens and cost. None for a policy of the
    run. A call with a usage is never trained on."""
    candidate: int | None = None
    """Its index among the candidates of its node, or that of the candidate that it judges; None without candidates."""
    candidates: int = 0
    """How many candidates of its node there are; 0 for a node without candidates."""
    score: float | None = None
    """The score of a candidate; None if it could not be scored."""
    parent_score: float | None = None
    """The score of the candidate that was kept last before this one was generated; None for the first ones."""
    replayed: bool = False
    """True if it repeats a call of the episode that this one was forked from, and was not sampled again."""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """`messages` without those of `Context.ask`."""
        return [message for index, message in enumerate(self.messages) if index not in self.asked]

    @property
    def handed(self) -> str:
        """The text that other agents read: `text`, with `hand_over: answer` without its thoughts."""
        if self.hand_over == "all":
            return self.text
        # a text from `parse` is not the model's continuation of a thought that the prompt opened
        return after_thinking(self.text, opened=self.opened_thinking and self.completion is None).strip()


TOKENS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
"""The fields of a call with one number per token."""


class Deferred:
    """A descriptor for an attribute that may be set to a function, which is called when the attribute is first read."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            return self
        value = self._slot.__get__(record)
        if callable(value):
            value = value()
            self._slot.__set__(record, value)
        return value

    def __set__(self, record: Any, value: Any) -> None:
        self._slot.__set__(record, value)

    def defer(self, record: Any, value: Any) -> None:
        """Set the attribute to a function that returns its value, or to any placeholder."""
        self._slot.__set__(record, value)

    def raw(self, record: Any) -> Any:
        """Return what the attribute was set to, without calling it."""
        return self._slot.__get__(record)


PROMPT_TEXT = Deferred(vars(Call)["prompt_text"])
"""The descriptor of `Call.prompt_text`: decoding a prompt costs more than most of what else is done to a call, and few
prompts are ever looked at."""
setattr(Call, "prompt_text", PROMPT_TEXT)  # noqa: B010  # an assignment would contradict the field's type


@dataclass(slots=True)
class Result:
    """The result of a vote or compute node."""

    node: str
    turn: int
    round: int
    text: str
    parsed: dict[str, Any]


@dataclass(slots=True)
class Skip:
    """A node that was skipped in a turn or round."""

    node: str
    agent: str
    """Empty for a vote or compute node."""
    turn: int
    round: int
    reason: str
    """when: its condition was false. dependencies: all nodes that it depends on were skipped."""


@dataclass(slots=True)
class Episode:
    """One run of the workflow's nodes on one sample. The `n` episodes with one `uid` form a group."""

    uid: str
    index: int
    """Index of the episode in its group, from 0 to n - 1."""
    sample: dict[str, Any]
    """The data row: prompt (messages), data_source, ground_truth, extra_info."""
    calls: list[Call] = field(default_factory=list)
    """In causal order: turn by turn, within a turn in topological order, and a loop's rounds one after another."""
    dropped: list[Call] = field(default_factory=list)
    """The candidates that were not kept, and the calls that judged them, in the same order. Nothing after them saw
    them."""
    results: list[Result] = field(default_factory=list)
    """The results of vote and compute nodes, in the same order."""
    skips: list[Skip] = field(default_factory=list)
    """In the same order."""
    turns: int = 0
    done: bool = False
    ended_by: str = ""
    """The first of these that holds after a turn. done: a node or an env ended it. length: a prompt no longer fits.
    turns: the last turn is over. Empty if a fault ended it."""
    outcome: float | None = None
    """1.0 solved, 0.0 not solved, None not graded. Used for accuracy only, never for training."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers and short texts that reward nodes and the engine report."""
    fault: dict[str, Any] | None = None
    """The fault that ended it (`Fault.record()`); such an episode is never trained on."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """All faults, including those of attempts that were repeated."""
    attempts: int = 1
    seconds: float = 0.0
    usage: dict[str, dict[str, float]] = field(default_factory=dict)
    """What the calls of API policies consumed, by policy, attempts that failed included (`Call.usage`)."""
    flags: list[dict[str, Any]] = field(default_factory=list)
    """What the rules of `report.monitors` found: `rule`, `reason`, and `call`, its position in `all_calls`; None if the
    rule flags the episode."""
    before_group: dict[str, Any] | None = None
    """The outcome, the info and the calls' rewards that it had before its group was scored; None if nothing scores
    groups."""
    forked: dict[str, Any] | None = None
    """Of a fork in training: `from`, the index of the episode that it repeats, and `at`, the address of the call that
    was sampled again; None for other episodes."""

    @property
    def trunk(self) -> int:
        """Index of the episode that it was forked from, or is; hooks and rewards of both are shown this one."""
        return self.forked["from"] if self.forked else self.index

    @property
    def all_calls(self) -> list[Call]:
        """`calls` and then `dropped`; `RowCall.position` is an index of this list."""
        return [*self.calls, *self.dropped]

    def siblings_of(self, call: Call) -> list[Call]:
        """Return all candidates of the call's node, turn and round, itself included, by their index."""
        slot = (call.node, call.turn, call.round)
        siblings = [other for other in self.all_calls if (other.node, other.turn, other.round) == slot]
        return sorted(siblings, key=lambda other: other.candidate or 0)

    def calls_of(self, agent: str) -> list[Call]:
        """Return the agent's calls, in order."""
        return [call for call in self.calls if call.agent == agent]

    def to_json(self) -> dict[str, Any]:
        """Return the record as nested dicts and lists."""
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str:
        """Return the episode as a notebook shows it."""
        from recipe.dag.types.record_html import html_of

        return html_of(self.to_json())
