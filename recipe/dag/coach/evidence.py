"""The values of a template's variables: what a coach is shown about an action.

Invariant: pure. `agent_input` is what the judged model had read, as it was rendered, never a part of it; the truth is
"N/A" unless it is asked for. Texts are shortened only where `Keep` says so, and the cut is marked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from recipe.dag.core.frozen import Frozen
from recipe.dag.types.context import Context
from recipe.dag.types.markup import OPEN_TAG
from recipe.dag.types.record import Call

UNKNOWN = "N/A"
NO_TOOLS = "N/A (no tools used)"
NONE = "none"


Limit = Annotated[int, Field(ge=1)] | None


class Keep(Frozen):
    """The characters to which texts are shortened; None keeps the whole text."""

    observation: Limit = 2000
    """`tool_observation`."""
    earlier: Limit = 500
    """Each earlier action, observation and other agent's output."""
    input: Limit = None
    """`agent_input`, from its end."""
    output: Limit = None
    """`agent_output`."""
    reformat: Limit = 8000
    """The parts of the prompt and of the answer that a request for the right form repeats, from their ends."""

    def tail(self, text: str) -> str:
        """Return the end of a prompt, where a template states the form of the answer, or of an answer."""
        return _end(text, self.reformat)


def evidence(context: Context, judged: Call, keep: Keep, *, truth: bool) -> dict[str, str]:
    """Return a text for each variable of a template. `truth`: with the ground truth."""
    sample = context.sample
    extra = sample.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    answer = sample.get("ground_truth")
    label = extra.get("label", answer)
    position = next((index for index, call in enumerate(context.calls) if call is judged), len(context.calls))
    before, own = context.calls[:position], [c for c in context.calls[:position] if c.agent == judged.agent]
    return {
        "problem": context.problem,
        "task": str(extra.get("task") or context.problem),
        "agent_name": judged.agent,
        "agent_role": judged.role or judged.agent,
        "agent_input": _end(context.read_by(judged), keep.input),
        "agent_output": _start(_model_text(judged), keep.output),
        "ground_truth_answer": str(answer) if truth and answer is not None else UNKNOWN,
        "label": str(label) if truth and label is not None else UNKNOWN,
        "tool_observation": _start(_observation(judged), keep.observation) or NO_TOOLS,
        "all_tool_observations": _numbered((_observation(call) for call in (*own, judged)), keep.earlier) or NO_TOOLS,
        "previous_actions": _numbered(map(_model_text, own), keep.earlier) or NONE,
        "previous_outputs": _outputs(before, (judged.agent, context.agent), keep.earlier) or NONE,
        **_files(context.calls, position, judged),
    }


def _model_text(call: Call) -> str:
    """Return the model's own text, with the tag of a thought that its prompt opened: the filter `answer` needs it."""
    return OPEN_TAG * call.opened_thinking + (call.text if call.completion is None else call.completion)


def _observation(call: Call) -> str:
    """Return what the tools and then the environment answered to a call."""
    return "\n------\n".join([*(result.text for result in call.tool_results), *filter(None, [call.next_observation])])


def _numbered(texts: Iterable[str], limit: int | None) -> str:
    numbered = ((number, text) for number, text in enumerate(texts, 1) if text)
    return "\n\n".join(f"Action {number}:\n{_start(text, limit)}" for number, text in numbered)


def _outputs(before: Iterable[Call], excluded: Collection[str], limit: int | None) -> str:
    """`excluded`: agents that are left out, the judged one and the coach itself."""
    latest = {call.agent: call.text for call in before if call.agent not in excluded and "failed" not in call.parsed}
    return "\n\n".join(f"{name}:\n{_start(text, limit)}" for name, text in latest.items())


def _files(calls: list[Call], position: int, judged: Call) -> dict[str, str]:
    """Return the variables about files, from the `info` of the environment: `files` and `missing`."""
    # an env that several nodes play is stepped by the last of them, after the judged one
    info_after = next((call.env_info for call in (judged, *calls[position:]) if "files" in call.env_info), {})
    own = (index for index, call in enumerate(calls) if call.agent == judged.agent and call.turn == judged.turn)
    first_own = next(own, position)
    info_before = next((call.env_info for call in reversed(calls[:first_own]) if "files" in call.env_info), {})
    return {
        "files_available": _listing(info_after.get("files")),
        "files_from_previous_agents": _listing(info_before.get("files")),
        "files_missing": _listing(info_after.get("missing")),
    }


def _listing(files: Any) -> str:
    """Return names, and sizes where they are known, of a mapping name -> size, or a list of names or of mappings with
    `name` and `size`."""
    if isinstance(files, Mapping):
        entries = list(files.items())
    else:
        listed = files if isinstance(files, list | tuple) else []
        entries = [(f.get("name"), f.get("size")) if isinstance(f, Mapping) else (f, None) for f in listed]
    texts = [f"{name} ({size} bytes)" if isinstance(size, int) else str(name) for name, size in entries]
    return ", ".join(texts) or NONE


def _start(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}\n[... {len(text) - limit} characters cut]"


def _end(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"[{len(text) - limit} characters cut ...]\n{text[len(text) - limit :]}"
