"""Tool calls: read out of what the model wrote, run, and shown to it.

Invariant: whatever the model writes ends as a ToolResult. Only what the model did not cause raises, as a Fault.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from recipe.dag.episode.context import Message
from recipe.dag.episode.markup import TOOL_CALL, after_thinking, python_blocks
from recipe.dag.episode.record import ToolResult
from recipe.dag.episode.tasks import together
from recipe.dag.workflow.schema import ToolLoop


@dataclass(frozen=True, slots=True)
class Request:
    """One tool call that the model asked for. `problem`: why it cannot be run."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


def requests_in(text: str, loop: ToolLoop, names: tuple[str, ...], *, opened_thinking: bool = False) -> list[Request]:
    """Return the tool calls in one complete generation; none makes it the final answer. Calls in a thought are none.
    `names`: the agent's tools. `opened_thinking`: the prompt ends with <think>."""
    text = after_thinking(text, opened=opened_thinking)
    if loop.format == "fenced":
        blocks = python_blocks(text)
        return [Request(names[0], {"code": blocks[-1]})] if blocks else []
    found = [_hermes(block, names) for block in TOOL_CALL.findall(text)]
    refused = f"not run: at most {loop.max_parallel} tool call(s) per message are run"
    return [
        request if position < loop.max_parallel else replace(request, problem=request.problem or refused)
        for position, request in enumerate(found)
    ]


def _hermes(block: str, names: tuple[str, ...]) -> Request:
    try:
        data = json.loads(block)
    except (ValueError, RecursionError) as error:
        return Request("", {}, f"unreadable tool call: {error}")
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return Request("", {}, 'unreadable tool call: it must be {"name": ..., "arguments": {...}}')
    arguments = data.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Request(name, {}, f"unreadable arguments: {error}")
    if not isinstance(arguments, dict):
        return Request(name, {}, "unreadable arguments: they must be a JSON object")
    if name not in names:
        return Request(name, arguments, f"unknown tool {name!r}; there is {', '.join(names)}")
    return Request(name, arguments)


Run = Callable[[str, dict[str, Any], Callable[[ToolResult], None]], Awaitable[ToolResult]]
"""`await run(name, arguments, keep)` runs a tool; `keep` takes the record of it."""


async def answer(requests: list[Request], loop: ToolLoop, run: Run, results: list[ToolResult]) -> list[Message]:
    """Run the requests, all at once, append their results to `results` in the order asked for, and return the messages
    that show them to the model."""
    slots: list[list[ToolResult]] = [[] for _ in requests]

    async def one(request: Request, slot: list[ToolResult]) -> Message:
        if request.problem:
            result = ToolResult(request.name, request.arguments, "invalid", request.problem)
            slot.append(result)
        else:
            result = await run(request.name, request.arguments, slot.append)
        result = replace(result, text=truncate(result.text, loop.max_response_chars, loop.truncate))
        slot[-1] = result
        if loop.format == "fenced":
            return {"role": "user", "content": result.text}
        return {"role": "tool", "name": request.name, "content": result.text}

    try:
        return await together(one(request, slot) for request, slot in zip(requests, slots, strict=True))
    finally:
        results.extend(result for slot in slots for result in slot)


def truncate(text: str, limit: int, side: str) -> str:
    """At most `limit` characters, with a marker at the side (left, middle, right) where something was taken out."""
    if len(text) <= limit:
        return text
    marker = "...(truncated)..."
    room = limit - len(marker)
    if room <= 0:
        return text[-limit:] if side == "left" else text[:limit]
    if side == "left":
        return marker + text[len(text) - room :]
    if side == "right":
        return text[:room] + marker
    head = (room + 1) // 2
    return text[:head] + marker + text[len(text) - (room - head) :]
