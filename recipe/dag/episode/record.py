"""The record of one episode: plain data, JSON-able, enough to train from, to report on and to look at.

Invariant: tokens are the truth and text is a view. What was sampled is kept as ids with the log-probs that the server
reported; nothing here is ever decoded and encoded again. A record never holds live objects, but for the tokenizer that
a prompt's text waits for until it is read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Generation:
    """One answer of a policy's server. `log_probs` (nats) belong to `response_ids`, after temperature, one each."""

    response_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    """stop: the model ended it. length: a limit did. abort: the server gave up."""
    weight_version: int = 0


@dataclass(slots=True)
class ToolResult:
    """What came back from one tool call. A tool that ran and failed is `failed`; a tool that could not run is
    `fault`."""

    name: str
    arguments: dict[str, Any]
    status: str
    """success | failed | timeout | invalid (unknown tool, unreadable or refused arguments; never ran) | fault"""
    text: str
    """What the model is shown."""
    stdout: str = ""
    stderr: str = ""
    return_code: int | None = None
    seconds: float = 0.0
    attempts: int = 1
    """More than 1: the infrastructure failed and the call was repeated."""

    @property
    def ok(self) -> bool:
        return self.status == "success"


@dataclass(slots=True)
class Call:
    """One agent's move in one turn (in a loop, one round): its generations and tool results until it hands over."""

    node: str
    agent: str
    agent_group: int
    policy: str
    turn: int
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    """Sampled tokens (mask 1) and what was put between them, tool results and template tokens (mask 0)."""
    response_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    """0.0 where the mask is 0."""
    prompt_text: str = ""
    observation: str = ""
    """What its env had shown the agent before; empty where it watches none."""
    text: str = ""
    """What the agent hands over: the answer without special tokens, or what post_process made of it."""
    parsed: dict[str, Any] = field(default_factory=dict)
    """What post_process found in it; downstream hooks and rewards read this."""
    tool_results: list[ToolResult] = field(default_factory=list)
    stop_reason: str = ""
    """Of its last generation: stop, or length (it was cut off). max_generations: that asked for a tool, and there may
    not be another one. length without a generation: the prompt did not fit."""
    generations: int = 0
    weight_version: int = 0
    temperature: float = 1.0
    reward: float | None = None
    """Set by the reward nodes, or by the env."""
    train: bool = True
    """False: the call is left out of the loss (post_process or a reward function said so)."""
    seconds: float = 0.0
    generation_seconds: float = 0.0
    round: int = 0
    """Of the loop that the node stands in, from 0 in every turn; 0 outside of loops."""
    env_info: dict[str, Any] = field(default_factory=dict)
    """What the env said besides, in the step that this node made."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What `reward` adds up, by the node that paid it: a reward node, or a rollout node for its env."""
    role: str = ""
    """The agent's role, or its name where it has none; empty in records that are older than roles."""
    branch: str = ""
    """What conditions decided on the way here (episode/branch.py): the nodes that were skipped, the rounds of loops."""
    start_seconds: float = 0.0
    """From the start of the episode, earlier attempts included, to the start of this call."""
    advantage: float | None = None
    """Mean over the sampled tokens of what the estimator gave them. None: the call was left out of training."""
    unscored: bool = False
    """A reward function returned None for it: it has no reward, and is left out of the loss and of all statistics."""
    completion: str | None = None
    """The model's last generation, where post_process replaced it in `text`; None: `text` is it."""
    ended_in_tool_call: bool = False
    """Its last generation asked for a tool, and a limit left no room for another one: it never answered."""
    opened_thinking: bool = False
    """The prompt of its last generation ended with <think>, so that the generation began as a thought."""


class Deferred:
    """An attribute that may be set to a function: it is called when the attribute is first read."""

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

    def unread(self, record: Any) -> Any:
        """Return what it was set to, for a copy of the record."""
        return self._slot.__get__(record)


# Few calls are looked at, and to decode a prompt costs more than most of what else is done to it.
Call.prompt_text = Deferred(Call.prompt_text)


@dataclass(slots=True)
class Result:
    """What a vote or compute node found."""

    node: str
    turn: int
    round: int
    text: str
    parsed: dict[str, Any]


@dataclass(slots=True)
class Skip:
    """A node that was passed over."""

    node: str
    agent: str
    """Empty for a vote or compute node."""
    turn: int
    round: int
    reason: str
    """when: its condition was false. dependencies: all that it depends on was skipped."""


@dataclass(slots=True)
class Episode:
    """One run of the rollout nodes on one sample. `n` episodes with one `uid` form a group."""

    uid: str
    index: int
    """Which of the group's n episodes this is."""
    sample: dict[str, Any]
    """The data row: prompt (messages), data_source, ground_truth, extra_info."""
    calls: list[Call] = field(default_factory=list)
    """In causal order: turn by turn, in a turn the nodes' topological order, and a loop's rounds one after another."""
    results: list[Result] = field(default_factory=list)
    """Of vote and compute nodes, in the same order."""
    skips: list[Skip] = field(default_factory=list)
    """In the same order."""
    turns: int = 0
    done: bool = False
    ended_by: str = ""
    """done: a node or an env said so. length: a prompt did not fit any more. turns: the last turn was over. Empty where
    a fault ended it. The first of these that holds after a turn."""
    outcome: float | None = None
    """1.0 solved, 0.0 not solved, None: not graded. What accuracy is made of; never what trains."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers and short texts that a reward node or env wants reported."""
    fault: dict[str, Any] | None = None
    """The fault that ended it (`Fault.record()`); such an episode is never trained on."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """All faults on the way, retried ones included."""
    attempts: int = 1
    seconds: float = 0.0

    def calls_of(self, agent: str) -> list[Call]:
        return [call for call in self.calls if call.agent == agent]

    def call_at(self, node: str) -> Call | None:
        """The latest call of a node."""
        return next((call for call in reversed(self.calls) if call.node == node), None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Episode:
        calls = [
            Call(**{**call, "tool_results": [ToolResult(**r) for r in call["tool_results"]]}) for call in data["calls"]
        ]
        results = [Result(**result) for result in data.get("results", ())]
        skips = [Skip(**skip) for skip in data.get("skips", ())]
        return cls(**{**data, "calls": calls, "results": results, "skips": skips})
