"""An evaluation as one JSON file: `metadata`, and in `results` every episode as a conversation in OpenAI's form.

Invariant: one item per episode, in the order of the problems; in each conversation every tool call has an id and an
answer. An episode that a fault ended has an `error` and no part in any accuracy: it is counted in `errors`. The file
holds no times, so that the same episodes give the same bytes. Its keys are those that evaluations of ReTool publish.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.dag.core.counted import counted
from recipe.dag.episode.failure import describe, most_frequent
from recipe.dag.report.jsonfile import replace_file, to_json
from recipe.dag.report.pass_at_k import SOLVED, average_at_n
from recipe.dag.report.pass_table import Graded, Interval, intervals
from recipe.dag.types.context import Message
from recipe.dag.types.markup import TOOL_CALL, after_thinking
from recipe.dag.types.record import Call, Episode

_NAME = re.compile(r"[^a-zA-Z0-9_-]")
"""What OpenAI does not accept in the name of a function."""


def write_conversations(
    path: str | Path, episodes: Sequence[Episode], uids: Sequence[str], about: Mapping[str, Any]
) -> None:
    """Write the file atomically. uids: the problems in order. about: further metadata, such as the model's name."""
    order = {uid: index for index, uid in enumerate(uids)}
    ordered = sorted(episodes, key=lambda episode: (order[episode.uid], episode.index))
    content = {
        "metadata": {**about, **figures(ordered, problems=len(uids))},
        "results": [_item(episode, order[episode.uid]) for episode in ordered],
    }
    replace_file(path, [to_json(content, indent=1), b"\n"])


def figures(episodes: Sequence[Episode], *, problems: int) -> dict[str, Any]:
    """Return the counts and accuracies of the episodes. Accuracies are over the `graded` ones; null if there is none.

    `pass@k`: unbiased, for each k up to the number of episodes of a problem, over the problems with k graded ones
    (`pass@k_problems`); `_interval`: 95 %, with a problem as one observation.
    """
    faults = [episode.fault for episode in episodes if episode.fault is not None]
    outcomes: dict[str, list[bool]] = {}
    for episode in episodes:
        if episode.fault is None and episode.outcome is not None:
            outcomes.setdefault(episode.uid, []).append(episode.outcome >= SOLVED)
    graded, correct = sum(map(len, outcomes.values())), sum(map(sum, outcomes.values()))
    pass_at = intervals(Graded(outcomes, len(faults)), range(1, max(map(len, outcomes.values()), default=0) + 1))
    enough = {k: sum(len(solved) >= k for solved in outcomes.values()) for k in pass_at}
    return {
        "total_problems": problems,
        "total_samples": len(episodes),
        "graded": graded,
        "correct": correct,
        "wrong": graded - correct,
        "errors": len(faults),
        "ungraded": len(episodes) - len(faults) - graded,
        **({"most_frequent_error": most_frequent(faults)} if faults else {}),
        "accuracy": correct / graded if graded else None,
        "accuracy_of": f"{correct} of {counted(graded, 'graded sample')}",
        "pass_at_1": pass_at[1].value if pass_at else None,
        "pass_at_1_interval": _bounds(pass_at[1]) if pass_at else None,
        "avg@n": average_at_n(list(outcomes.values())) if outcomes else None,
        "pass@k": {str(k): interval.value for k, interval in pass_at.items()},
        "pass@k_interval": {str(k): _bounds(interval) for k, interval in pass_at.items()},
        "pass@k_problems": {str(k): count for k, count in enough.items()},
    }


def _bounds(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _item(episode: Episode, problem_id: int) -> dict[str, Any]:
    last = episode.calls[-1] if episode.calls else None
    text = "" if last is None else last.text if last.completion is None else last.completion
    item = {
        "problem_id": problem_id,
        "sample_id": episode.index,
        "problem": problem_of(episode),
        "ground_truth": episode.sample.get("ground_truth"),
        "predicted_answer": _answer(episode, last),
        "final_response": text,
        "conversation_history": conversation(episode),
        "turn_count": sum(call.generations for call in episode.calls),
        "correct": None if episode.outcome is None else episode.outcome >= SOLVED,
    }
    # false as in published files, but with an error it is no wrong answer
    return item | {"correct": False, "error": describe(episode.fault)} if episode.fault is not None else item


def problem_of(episode: Episode) -> str:
    """Return the last user message of the episode's sample."""
    return next((m["content"] for m in reversed(episode.sample["prompt"]) if m["role"] == "user"), "")


def _answer(episode: Episode, last: Call | None) -> str | None:
    """Return the answer that was graded, else the one that the last call gave."""
    answer = episode.info.get("answer") or (last.parsed.get("answer") if last is not None else None)
    return None if answer is None else str(answer)


def conversation(episode: Episode) -> list[Message]:
    """Return the messages of the episode's last call, those that no call sent included: the answers to tool calls that
    were not run. An episode without a call has its problem only."""
    call = next((call for call in reversed(episode.calls) if call.messages), None)
    if call is None:
        return [dict(message) for message in episode.sample["prompt"]]
    if call.ended_in_tool_call:
        reason = "no further turn was left"
    elif episode.fault is not None:
        reason = describe(episode.fault)
    else:
        reason = "the message was cut off" if call.stop_reason == "length" else "the conversation ended"
    return list(_answered(call.messages, f"not run: {reason}"))


def _answered(messages: Sequence[Message], missing: str) -> Iterator[Message]:
    """Yield the messages with an answer to each tool call. `missing`: the text of an answer that is absent."""
    position = turn = 0
    while position < len(messages):
        message, position = dict(messages[position]), position + 1
        if message["role"] != "assistant":
            yield message
            continue
        end = position
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        yield from _turn(message, messages[position:end], turn, missing)
        position, turn = end, turn + 1


def _turn(message: Message, replies: Sequence[Message], turn: int, missing: str) -> Iterator[Message]:
    """Yield an assistant's message and the answers to its tool calls, which `replies` has in the same order."""
    calls = message.pop("tool_calls", None) or []
    if replies and not calls:  # the model wrote them into its text
        calls = _calls_in(message["content"], replies)
        message["content"] = TOOL_CALL.sub("", message["content"]).rstrip()
    if not calls:
        yield message
        return
    # servers number their calls in the order of the requests, or at random; these ids are the same in every run
    ids = [f"call_{turn}_{number}" for number in range(len(calls))]
    named = [_plain(call["function"]) for call in calls]
    yield {
        **message,
        "tool_calls": [{"id": id_, "type": "function", "function": call} for id_, call in zip(ids, named, strict=True)],
    }
    for number, id_ in enumerate(ids):
        text = replies[number]["content"] if number < len(replies) else missing
        yield {"role": "tool", "tool_call_id": id_, "name": named[number]["name"], "content": text}


def _calls_in(text: str, replies: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the tool calls in a model's text, one for each reply; what cannot be read becomes the arguments."""
    blocks = TOOL_CALL.findall(after_thinking(text))
    calls = []
    for number, reply in enumerate(replies):
        block = blocks[number].strip() if number < len(blocks) else ""
        try:
            data = json.loads(block)
        except (ValueError, RecursionError):
            data = None
        known = isinstance(data, dict) and isinstance(data.get("name"), str)
        function = data if known else {"name": reply.get("name") or "unreadable", "arguments": {"text": block}}
        calls.append({"function": function})
    return calls


def _plain(function: Mapping[str, Any]) -> dict[str, str]:
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": _NAME.sub("_", function["name"])[:64] or "unreadable", "arguments": text}
