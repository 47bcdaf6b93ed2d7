"""The tool `code_interpreter`: a fresh Python process per call.

Invariant: whatever the model passes becomes a ToolResult; only the sandbox's own failure raises. The model sees no more
than `max_output_chars` of either stream.
"""

from __future__ import annotations

import ast
import math
import re
import textwrap
from typing import Any

from recipe.dag.episode.record import ToolResult
from recipe.dag.tools.sandbox_client import RunResult, SandboxClient

_FENCE = re.compile(r"\s*```[ \t]*[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)


class CodeInterpreter:
    """timeout_s: for calls that name none, in seconds; max_timeout_s: the most that the model may ask for (what a hook
    asks for is the user's, and honoured).
    auto_print: print the value of a last line that is an expression, as a notebook does."""

    name = "code_interpreter"
    create_kwargs = ("ground_truth",)
    """What a sample's create_kwargs may hold: verl's data sets repeat the truth there, which reward nodes read."""

    def __init__(
        self,
        client: SandboxClient,
        *,
        timeout_s: float = 20.0,
        max_timeout_s: float = 60.0,
        max_output_chars: int = 4096,
        memory_mb: int = 1024,
        auto_print: bool = False,
    ):
        self._client = client
        self._timeout_s = timeout_s
        self._max_timeout_s = max(timeout_s, max_timeout_s)
        self._max_output_chars = max_output_chars
        self._memory_mb = memory_mb
        self._auto_print = auto_print
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": "Run Python code in a fresh process and return what it prints.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "code": {
                            "type": "string",
                            "description": "A complete Python program; print what you want to see.",
                        },
                        "timeout": {
                            "type": "number",
                            "description": f"Seconds it may take, {timeout_s:g} by default, "
                            f"{self._max_timeout_s:g} at most.",
                        },
                    },
                    "required": ["code"],
                },
            },
        }

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        """Run what a model asks for. Raises SandboxFault."""
        return await self._run(arguments, self._max_timeout_s)

    async def execute_for_hook(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        """Run what an agent's hook asks for, for as long as it says. Raises SandboxFault."""
        return await self._run(arguments, math.inf)

    async def _run(self, arguments: dict[str, Any], max_timeout_s: float) -> ToolResult:
        code = arguments.get("code")
        code = source_of(code) if isinstance(code, str) else ""
        if not code:
            return ToolResult(self.name, arguments, "invalid", "empty_code")
        timeout_s = self._timeout(arguments.get("timeout"), max_timeout_s)
        if timeout_s is None:
            return ToolResult(self.name, arguments, "invalid", "timeout must be a positive number of seconds")
        if self._auto_print:
            code = echo_last(code)
        result = await self._client.run_code(code, timeout_s=timeout_s, memory_mb=self._memory_mb)
        return self._shown(arguments, result)

    async def close(self) -> None:
        """The client belongs to who made it."""

    def _timeout(self, given: Any, max_timeout_s: float) -> float | None:
        if given is None:
            return self._timeout_s
        try:
            seconds = math.nan if isinstance(given, bool) else float(given)
        except (TypeError, ValueError, OverflowError):
            return None
        seconds = min(seconds, max_timeout_s)
        return seconds if 0 < seconds < math.inf else None

    def _shown(self, arguments: dict[str, Any], result: RunResult) -> ToolResult:
        stdout = clip(result.stdout, self._max_output_chars)
        stderr = clip(result.stderr, self._max_output_chars)
        if result.status == "timeout":
            text = f"[timeout]\n{stderr}" if stderr else "[timeout]"
        elif result.status == "success":
            text = stdout or "[no stdout]"
        else:
            text = stderr or "[execution error]"
        return ToolResult(
            self.name,
            arguments,
            result.status,
            text,
            stdout=stdout,
            stderr=stderr,
            return_code=result.return_code,
            seconds=result.seconds,
            attempts=result.attempts,
        )


def source_of(text: str) -> str:
    """The program in what a model passed: without a fence around it and without common indentation; "" when blank."""
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    return textwrap.dedent(text).strip("\n") if text.strip() else ""


def clip(text: str, limit: int) -> str:
    """At most `limit` characters: head and tail, and between them how many are missing."""
    if len(text) <= limit:
        return text
    marker = f"\n[... {len(text) - limit} characters left out ...]\n"
    room = limit - len(marker)
    if room < 2:
        return text[:limit]
    head = room - room // 2
    marker = f"\n[... {len(text) - room} characters left out ...]\n"[: limit - room]
    return text[:head] + marker + text[len(text) - room // 2 :]


def echo_last(code: str) -> str:
    """Make a last top-level expression print its value, unless that is None. Anything else, broken code too, stays as
    it is."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not body or not isinstance(body[-1], ast.Expr):
        return code
    last = body[-1]
    lines = code.encode().split(b"\n")
    before = b"\n".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]])
    value = ast.get_source_segment(code, last.value)
    return f"{before.decode()}_value = (\n{value}\n)\nif _value is not None: __import__('builtins').print(_value)\n"
