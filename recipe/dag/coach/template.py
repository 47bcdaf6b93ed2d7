"""The template of a coach's prompt: a text file in Jinja's language.

Invariant: a template that loads can be rendered. It reads the variables of `VARIABLES` alone, in a sandbox without
files and with a bound on its steps; a model's text that is inserted is never evaluated. A mistake is a UserError with
the template's file and line.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

from recipe.dag.coach.evidence import UNKNOWN
from recipe.dag.core.errors import HookFault, UserError
from recipe.dag.core.suggestion import hint_at, listing
from recipe.dag.types.markup import after_thinking

VARIABLES: Mapping[str, str] = {
    "problem": "the text of the problem, as the data set has it",
    "task": "`extra_info.task` of the data set, or else the problem",
    "agent_name": "the judged agent",
    "agent_role": "its `role`, or else its name",
    "agent_input": "all that its model had read before it acted, as it was rendered",
    "agent_output": "the text of the judged action, thoughts included",
    "ground_truth_answer": "the ground truth if the agent is in `truth_for`, or else N/A",
    "label": "`extra_info.label`, or else the ground truth, if the agent is in `truth_for`, or else N/A",
    "tool_observation": "what the tools and the environment answered to this action",
    "all_tool_observations": "the same for this and the agent's earlier actions, each shortened",
    "previous_actions": "the agent's earlier actions in the episode, each shortened",
    "previous_outputs": "the latest output of each other agent before it",
    "files_available": "names and sizes of the files after the action",
    "files_from_previous_agents": "names and sizes of the files that other agents had left",
    "files_missing": "names of the files that the agent should have made and has not",
}
"""Variable -> its content, a text."""


MAX_STEPS = 200_000
"""Limit of the passes of loops, calls and numbers of ranges in one rendering."""
MAX_PRODUCT = 1_000_000
"""Limit of the length of a repeated text, and of the bits of a power."""
_steps: ContextVar[list[int]] = ContextVar("steps of a template's rendering")


class _BoundedEnvironment(SandboxedEnvironment):
    """A sandbox in which every loop and every call counts. Its operations are quick one by one."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _count(1)
        result = super().call(context, obj, *args, **kwargs)
        _count(len(result) if isinstance(result, range) else 0)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right)
        else:
            size = max(_length(left, right), _length(right, left))
        if size > MAX_PRODUCT:
            raise SecurityError(f"the result of `{operator}` is too large")
        return super().call_binop(context, operator, left, right)


def _length(value: Any, times: Any) -> int:
    """Return the length of `value * times` if that repeats a text or a list, else 0."""
    return len(value) * times if isinstance(value, str | list | tuple) and isinstance(times, int) else 0


def _count(steps: int) -> None:
    done = _steps.get()
    done[0] += steps
    if done[0] > MAX_STEPS:
        raise SecurityError(f"the template takes more than {MAX_STEPS:,} steps; its loops are too long")


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of a loop."""
    for value in values:
        _count(1)
        yield value


class PromptTemplate:
    """A template that has been checked."""

    def __init__(self, path: Path, *, agent: str = "text", role: str = "text") -> None:
        """Read and check the file. `agent`, `role`: those of the judged agent, by which templates branch. Raises
        UserError."""
        self.path = path
        environment = _BoundedEnvironment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False)
        environment.filters["answer"] = after_thinking
        try:
            source = path.read_text(encoding="utf-8")
            tree = environment.parse(source, filename=str(path))
            self._check(tree, environment)
            environment.filters["_counted"] = _counted
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            tree.set_environment(environment)
            code = environment.compile(tree, filename=str(path))
            self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        except TemplateSyntaxError as error:
            raise UserError(f"{path}:{error.lineno}: {error.message}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
        for truth in ("text", UNKNOWN):
            self._rehearse(agent_name=agent, agent_role=role, ground_truth_answer=truth, label=truth)

    def _check(self, tree: nodes.Template, environment: SandboxedEnvironment) -> None:
        for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise UserError(f"{self.path}:{node.lineno}: a template is one file; copy the text of the other one here")
        # jinja itself looks these up in the branches that are rendered, and only then
        for kind, known in ((nodes.Filter, environment.filters), (nodes.Test, environment.tests)):
            for node in tree.find_all(kind):
                if node.name not in known:
                    problem = f"no {kind.__name__.lower()} named {node.name!r}{hint_at(node.name, known)}"
                    raise UserError(f"{self.path}:{node.lineno}: {problem}")
        unknown = find_undeclared_variables(tree) - VARIABLES.keys()
        for name in tree.find_all(nodes.Name):
            if name.name in unknown:
                hint = f"{hint_at(name.name, VARIABLES)} (known: {listing(VARIABLES)})"
                raise UserError(f"{self.path}:{name.lineno}: unknown variable `{name.name}`{hint}")

    def _rehearse(self, **values: str) -> None:
        """Render with these and made-up texts: only that finds an attribute or argument that does not exist."""
        try:
            self._rendered(dict.fromkeys(VARIABLES, "text") | values)
        except Exception as error:
            raise UserError(f"{self._line(error)}: {type(error).__name__}: {error}") from error

    def render(self, values: Mapping[str, str]) -> str:
        """Return the text. `values`: exactly the variables of `VARIABLES`. Raises HookFault."""
        assert values.keys() == VARIABLES.keys()
        try:
            return self._rendered(values)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise HookFault(f"{type(error).__name__}: {error}", source=self._line(error)) from error

    def _rendered(self, values: Mapping[str, str]) -> str:
        _steps.set([0])
        return self._template.render(values)

    def _line(self, error: BaseException) -> str:
        """Return the line of the template in which `error` was raised, as `file:line`."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
        return f"{self.path}:{lines[-1]}" if lines else str(self.path)
