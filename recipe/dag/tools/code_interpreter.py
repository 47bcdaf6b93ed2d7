"""The tool `code_interpreter`: runs each call in a fresh Python process.

Invariant: every call of the model yields a ToolResult; only a failure of the sandbox raises. The model sees at most
`max_output_chars` of either stream.
"""

from __future__ import annotations

import ast
import copy
import math
import re
import textwrap
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from recipe.dag.core.frozen import Frozen
from recipe.dag.tools.base import BuiltinTool, Resources, function_schema
from recipe.dag.types.record import ToolResult

if TYPE_CHECKING:
    from recipe.dag.tools.sandbox_client import RunResult, SandboxClient

SESSION = "session_id"
"""Key of the tool's state: the sandbox session in whose files its programs run, if an env of the episode names one."""
_FENCE = re.compile(r"\s*```[ \t]*[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)


class CodeInterpreter(BuiltinTool):
    """Runs Python programs for a model or a hook.

    timeout_s: seconds for calls without a time-out. max_timeout_s: limit for the model's calls; the calls of hooks,
    which the user writes, have no limit. auto_print: print the value of a last line that is an expression, as a
    notebook does.
    """

    name = "code_interpreter"
    create_kwargs = ("ground_truth",)
    """Allowed keys of a sample's create_kwargs: verl's data sets repeat the ground truth there, for reward nodes."""

    class Options(Frozen):
        """`kwargs` in a workflow. Options that are absent have the value of the run (`sandbox.timeout_s`,
        `sandbox.memory_mb`) or the default of the tool."""

        timeout_s: float | None = Field(default=None, gt=0.0)
        """Time limit of a program whose call has none."""
        max_timeout_s: float | None = Field(default=None, gt=0.0)
        """Largest time limit that the model may ask for; hooks have no limit."""
        max_output_chars: int | None = Field(default=None, ge=1)
        """Length to which stdout and stderr are each cut."""
        memory_mb: int | None = Field(default=None, ge=1)
        auto_print: bool = False
        """Print the value of a last line that is an expression, as notebooks do."""

    needs_sandbox = True
    checks_arguments = True
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "A complete Python program; print what you want to see."},
            "timeout": {"type": "number"},
        },
        "required": ["code"],
    }

    @classmethod
    def make(cls, options: Options, resources: Resources) -> CodeInterpreter:
        assert resources.sandbox is not None, "a run with this tool has a sandbox"
        arguments: dict[str, Any] = {**resources.limits, **options.model_dump(exclude_none=True)}
        return cls(resources.sandbox, **arguments)

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
        parameters = copy.deepcopy(self.parameters)
        limits = f"Seconds it may take, {timeout_s:g} by default, {self._max_timeout_s:g} at most."
        parameters["properties"]["timeout"]["description"] = limits
        description = "Run Python code in a fresh process and return what it prints."
        self.schema = function_schema(self.name, description, parameters)

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        """Run a model's call. Raises SandboxFault."""
        return await self._run(arguments, state, self._max_timeout_s)

    async def execute_for_hook(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        """Run a call of an agent's hook, without a limit on its time-out. Raises SandboxFault."""
        return await self._run(arguments, state, math.inf)

    async def _run(self, arguments: dict[str, Any], state: dict[str, Any], max_timeout_s: float) -> ToolResult:
        code = arguments.get("code")
        code = source_of(code) if isinstance(code, str) else ""
        if not code:
            return ToolResult(self.name, arguments, "invalid", "empty_code")
        timeout_s = self._timeout(arguments.get("timeout"), max_timeout_s)
        if timeout_s is None:
            return ToolResult(self.name, arguments, "invalid", "timeout must be a positive number of seconds")
        if self._auto_print:
            code = echo_last(code)
        session = {SESSION: state[SESSION]} if SESSION in state else {}
        result = await self._client.run_code(code, timeout_s=timeout_s, memory_mb=self._memory_mb, **session)
        return self._to_tool_result(arguments, result)

    def _timeout(self, requested: Any, max_timeout_s: float) -> float | None:
        """Return the time-out in seconds; None if the request is invalid."""
        if requested is None:
            return self._timeout_s
        try:
            seconds = math.nan if isinstance(requested, bool) else float(requested)
        except (TypeError, ValueError, OverflowError):
            return None
        seconds = min(seconds, max_timeout_s)
        return seconds if 0 < seconds < math.inf else None

    def _to_tool_result(self, arguments: dict[str, Any], result: RunResult) -> ToolResult:
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
    """Return the program in a model's text, without the fence around it and common indentation; "" if blank."""
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    return textwrap.dedent(text).strip("\n") if text.strip() else ""


def clip(text: str, limit: int) -> str:
    """Cut `text` to `limit` characters: its head, the number of omitted characters, its tail."""
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
    """Make a last top-level expression print its value, unless that is None. Any other code, even if invalid, is
    returned unchanged."""
    original, code = code, code.replace("\r\n", "\n").replace("\r", "\n")  # Python ends lines at each of these
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return original
    if not body or not isinstance(body[-1], ast.Expr):
        return original
    last = body[-1]
    lines = code.encode().split(b"\n")
    before = b"\n".join([*lines[: last.lineno - 1], lines[last.lineno - 1][: last.col_offset]])
    value = ast.get_source_segment(code, last.value)
    return f"{before.decode()}_value = (\n{value}\n)\nif _value is not None: __import__('builtins').print(_value)\n"
