"""A recorded episode played again from one of its calls on: which calls keep their words, and what is changed.

Invariant: pure. A call before the fork, and one that cannot react to it, has the recorded words; every other call is
sampled, silent, or has the words that it is given. Envs, tools and the code of agents run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.core.errors import ForkFault, UserError
from recipe.dag.endpoint.client import ChatAnswer
from recipe.dag.episode.env_class import choose_env
from recipe.dag.episode.graph import EpisodeGraph
from recipe.dag.types.record import Call, Episode, Generation

Slot = tuple[str, int, int]
"""A node, a turn and a round."""
Key = tuple[str, int, int, int]
"""A call: its slot, and its index among the candidates."""
SILENCED = "silenced"
"""`parsed["failed"]` of a silenced call, as of one that its agent skipped."""


@dataclass(frozen=True, slots=True)
class Fork:
    """What the calls of an episode get in place of an answer of their policy."""

    recorded: Mapping[Key, Call] = field(default_factory=dict)
    """Calls with the words of the record, tool calls included."""
    before: frozenset[Key] = frozenset()
    """Calls that must have the record's prompt. Another one of `recorded` with a new prompt is sampled."""
    silent: frozenset[Slot] = frozenset()
    silent_agents: frozenset[str] = frozenset()
    """Agents whose calls are silent, except for the recorded ones."""
    texts: Mapping[Slot, str] = field(default_factory=dict)
    """Their first answer."""
    words: Mapping[Slot, Call] = field(default_factory=dict)
    """Answers one by one as in a call of another episode, whatever was asked."""
    draw: int = 0
    """0: what is sampled has the seeds of the recorded episode. Each other number gives other seeds."""
    trunk: Episode | None = None
    """In training: the recorded episode, with whose answer at `at` the fork's is compared."""
    at: Slot | None = None

    @property
    def forked(self) -> dict[str, Any] | None:
        """`Episode.forked` of what it plays."""
        return {"from": self.trunk.index, "at": name_of(self.at)} if self.trunk and self.at else None

    def silence(self, call: Call) -> str | None:
        """Return why the call has no answer and an empty text, or None if it has one."""
        key = key_of(call)
        if key[:3] in self.silent or (call.agent in self.silent_agents and key not in self.recorded):
            return SILENCED
        recorded = self.recorded.get(key)
        return recorded.parsed.get("failed") if recorded is not None and not recorded.text else None

    def text_of(self, call: Call) -> str | None:
        """Return the answer that the call is given as a text, if one is and it has no answer yet."""
        return self.texts.get(key_of(call)[:3]) if not call.generations else None

    def generation(self, call: Call) -> Generation | None:
        """Return the next answer of a call by token ids; None: sample it. Raises UserError if the prompt of a call
        before the fork is not the record's."""
        key = key_of(call)
        if (other := self.words.get(key[:3])) is not None:
            answers = answers_of(other)
            return answers[call.generations] if call.generations < len(answers) else None
        if (recorded := self.recorded.get(key)) is None:
            return None
        offset = len(call.response_ids)
        same = call.prompt_ids == recorded.prompt_ids and call.response_ids == recorded.response_ids[:offset]
        if not same or offset == len(recorded.response_ids):
            return self._differs(key)
        return _answer(recorded, offset)

    def answer(self, call: Call) -> ChatAnswer | None:
        """Return the next answer of a call by messages; None: ask for it. Raises UserError as `generation` does."""
        key = key_of(call)
        if (recorded := self.recorded.get(key)) is None:
            return None
        count = len(call.messages)
        if call.messages != recorded.messages[:count] or count >= len(recorded.messages):
            return self._differs(key)
        is_last = call.generations + 1 == recorded.generations
        cut_off = is_last and recorded.stop_reason == "length" and not recorded.ended_in_tool_call
        return ChatAnswer(dict(recorded.messages[count]), "length" if cut_off else "stop", {})

    def mark(self, episode: Episode) -> None:
        """Let a fork in training say what it repeats, and be trained on in the call at the fork alone."""
        if self.trunk is None:
            return
        for call in episode.calls:
            recorded = self.recorded.get(key_of(call))
            call.replayed = recorded is not None and _said(recorded) == _said(call)
            call.train = call.train and key_of(call)[:3] == self.at

    def check(self, episode: Episode) -> None:
        """Raise ForkFault if a fork in training has another context than the answer that it is compared with."""
        if self.trunk is None:
            return
        now, recorded = ({key_of(call): call for call in one.calls} for one in (episode, self.trunk))
        for key, call in recorded.items():
            if key in self.before and (key not in now or _said(now[key]) != _said(call)):
                self._differs(key)
            if key[:3] == self.at and (key not in now or now[key].prompt_ids != call.prompt_ids):
                raise _unrepeated(key)

    def _differs(self, key: Key) -> None:
        if key not in self.before:
            return
        if self.trunk is not None:
            raise _unrepeated(key)
        raise UserError(
            f"node {name_of(key[:3])}: has another prompt than in the record: a tool does not repeat its results, "
            "or the workflow's code, its tools or the tokenizer have changed since (launch.json names the commit)"
        )


def _unrepeated(key: Key) -> ForkFault:
    problem = "has another prompt or answer than in the episode: a tool, env or hook does not repeat its results"
    advice = "make it deterministic (seed it, freeze the time), or use another estimator"
    return ForkFault(f"node {name_of(key[:3])}: {problem}; {advice}")


def recorded_calls(
    graph: EpisodeGraph, episode: Episode, at: Sequence[Slot], *, keep: bool = False
) -> tuple[dict[Key, Call], frozenset[Key]]:
    """Return what `fork_at` does, with the envs that the episode's sample chooses."""
    envs = {node.id: env for node in graph.nodes if (env := choose_env(node.spec, episode.sample)) is not None}
    return fork_at(graph, graph.players(envs), episode, at, keep=keep)


def fork_at(
    graph: EpisodeGraph,
    players: Mapping[str, Iterable[str]],
    episode: Episode,
    at: Sequence[Slot],
    *,
    keep: bool = False,
) -> tuple[dict[Key, Call], frozenset[Key]]:
    """Return the recorded calls that keep their words when the episode is played again from the calls `at` on, and
    those that come before all of these.

    players: the nodes whose texts are the actions of the env, by the node that steps it
    keep: the calls `at` keep their words, too
    """
    known = {key_of(call): call for call in episode.all_calls}

    def position(slot: Slot) -> tuple[int, ...]:
        return slot[1], *graph.causal((slot[0], slot[2]))

    first = min(map(position, at))
    before = frozenset(key for key in known if position(key[:3]) < first)
    changed = [] if keep else at
    recorded = {
        key: call
        for key, call in known.items()
        if key[:3] not in changed and not any(reacts(graph, players, slot, key[:3]) for slot in at)
    }
    return recorded, before


def reacts(graph: EpisodeGraph, players: Mapping[str, Iterable[str]], at: Slot, other: Slot) -> bool:
    """Return whether a call in slot `other` may depend on the text of the call at `at`."""
    node, turn, number = at
    name, other_turn, other_number = other
    if other_turn != turn:
        return other_turn > turn
    first, second = graph.by_id[node], graph.by_id[name]
    # the env that reads the text is stepped after the node `owner`, perhaps a later one
    sources = {node, *(owner for owner, acting in players.items() if node in acting)}
    follows = bool(sources & second.ancestors)
    if first.loop is not None and first.loop == second.loop:
        return other_number > number or (other_number == number and follows)
    return follows


def slot_at(episode: Episode, address: str) -> Slot:
    """Return the slot that NODE[.TURN[.ROUND]] names: by default the node's first call. Raises UserError if the
    episode has no such call."""
    slots = list(dict.fromkeys(key_of(call)[:3] for call in episode.calls))
    parts = address.split(".")
    for count in range(len(parts), max(len(parts) - 3, 0), -1):  # names of nodes may have dots, too
        numbers = parts[count:]
        if not all(number.isdecimal() for number in numbers):
            continue
        wanted = (".".join(parts[:count]), *map(int, numbers))
        for slot in slots:
            if slot[: len(wanted)] == wanted:
                return slot
    known = ", ".join(map(name_of, slots)) or "none"
    raise UserError(f"--at {address}: the episode has no such call; its calls: {known}")


def name_of(slot: Slot) -> str:
    """Return the address of a slot, as short as it can be."""
    node, turn, number = slot
    return f"{node}.{turn}.{number}" if number else f"{node}.{turn}" if turn else node


def key_of(call: Call) -> Key:
    return call.node, call.turn, call.round, call.candidate or 0


def _said(call: Call) -> tuple:
    # a call that failed is repeated without asking for its prompt
    return call.text, call.response_ids, call.response_ids and call.prompt_ids


def answers_of(call: Call) -> list[Generation]:
    """Return the generations of a recorded call."""
    starts = [n for n, sampled in enumerate(call.response_mask) if sampled and not (n and call.response_mask[n - 1])]
    return [_answer(call, start) for start in starts]


def _answer(call: Call, start: int) -> Generation:
    """Return what was sampled from the position `start` of the response on."""
    end = start
    while end < len(call.response_mask) and call.response_mask[end]:
        end += 1
    is_last = end == len(call.response_ids)
    cut_off = is_last and call.stop_reason == "length" and not call.ended_in_tool_call
    ids, log_probs = call.response_ids[start:end], call.rollout_log_probs[start:end]
    return Generation(ids, log_probs, "length" if cut_off else "stop", call.weight_version)
