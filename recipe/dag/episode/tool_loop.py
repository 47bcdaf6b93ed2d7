"""Tool calls: parsed from the model's text, run, and rendered as messages.

Invariant: every tool call that the model writes ends as a ToolResult. Only failures that the model did not cause raise,
as a Fault.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.core.tasks import together
from recipe.dag.types.context import Message
from recipe.dag.types.markup import TOOL_CALL, after_thinking, python_blocks
from recipe.dag.types.record import Call, ToolResult
from recipe.dag.types.tool import Tool, parameters_of, tool_name
from recipe.dag.workflow.agent_schema import ToolLoop


@dataclass(frozen=True, slots=True)
class Request:
    """One tool call that the model asked for. `problem`: the reason if it cannot be run."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


def requests_in(
    text: str, loop: ToolLoop, names: tuple[str, ...], *, opened_thinking: bool = False, argument: str = "code"
) -> list[Request]:
    """Return the tool calls in one complete generation. Calls inside <think> are ignored. Without any call, the
    generation is the final answer. `names`: the agent's tools. `opened_thinking`: the prompt ends with <think>.
    `argument`: that of the first tool, for calls between tags."""
    text = after_thinking(text, opened=opened_thinking)
    if loop.format == "tags":
        return _between_tags(text, loop, names[0], argument)
    if loop.format == "fenced":
        blocks = python_blocks(text)
        return [Request(names[0], {"code": blocks[-1]})] if blocks else []
    requests = [_hermes(block, names) for block in TOOL_CALL.findall(text)]
    refused = f"not run: at most {loop.max_parallel} tool call(s) per message are run"
    return [
        request if position < loop.max_parallel else replace(request, problem=request.problem or refused)
        for position, request in enumerate(requests)
    ]


def _between_tags(text: str, loop: ToolLoop, name: str, argument: str) -> list[Request]:
    opening, closing = f"<{loop.call_tag}>", f"</{loop.call_tag}>"
    before, closed, _ = text.partition(closing)
    if not closed:
        return []
    _, opened, content = before.rpartition(opening)
    if not opened:
        return [Request(name, {}, f"unreadable tool call: there is no {opening} before {closing}")]
    return [Request(name, {argument: content.strip("\n")})]


def calls_end(text: str, loop: ToolLoop) -> bool:
    """Return whether the text contains the tag that ends a call, and with it the generation."""
    return any(string in text for string in loop.stop)


def argument_between_tags(tool: Tool, where: str) -> str:
    """Return the argument of the tool that the text between the tags becomes: `code`, or the only one that the tool
    needs. Raises UserError if there are several."""
    parameters = parameters_of(tool)
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    needed = [name for name in properties if name in required] or list(properties)
    if "code" in properties or not properties:
        return "code"
    if len(needed) != 1:
        raise UserError(
            f"{where}: `format: tags` passes one text to the tool {tool_name(tool, where)}, which needs "
            f"{', '.join(needed)}; use `format: hermes`"
        )
    return needed[0]


def between_tags(message: Message, loop: ToolLoop, before: str) -> str:
    """Return a tool's result as it continues the model's message, which so far ends with `before`."""
    start = "" if before.endswith("\n") else "\n"
    content = message["content"].strip("\n")
    return f"{start}<{loop.result_tag}>\n{content}\n</{loop.result_tag}>\n"


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
        return Request(name, arguments, f"unknown tool {name!r}; available: {', '.join(names)}")
    return Request(name, arguments)


Run = Callable[[str, dict[str, Any], Callable[[ToolResult], None]], Awaitable[ToolResult]]
"""`await run(name, arguments, keep)` runs a tool and passes its record to `keep`."""
RunTools = Callable[[list[Request]], Awaitable[tuple[list[Message], bool]]]
"""Runs the tool calls of one generation; returns the messages that present their results, and False if all calls were
invalid."""


async def run_requests(requests: list[Request], loop: ToolLoop, run: Run, results: list[ToolResult]) -> list[Message]:
    """Run all requests concurrently, append their results to `results` in the order of the requests, and return the
    messages that present them to the model."""
    # A slot per request keeps the order, and keeps the record of a run that raises.
    slots: list[list[ToolResult]] = [[] for _ in requests]

    async def run_one(request: Request, slot: list[ToolResult]) -> Message:
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
        return await together(run_one(request, slot) for request, slot in zip(requests, slots, strict=True))
    finally:
        results.extend(result for slot in slots for result in slot)


def end_in_tool_call(call: Call, stop_reason: str) -> None:
    """End a call whose last generation asked for a tool, and that has no room for another one."""
    call.stop_reason, call.ended_in_tool_call = stop_reason, True


def truncate(text: str, limit: int, side: str) -> str:
    """Return at most `limit` characters, with a marker where text was removed: at the left, middle or right."""
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
