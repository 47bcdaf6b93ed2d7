"""The three agents: each acts in rounds in the team's folder (`envs/workspace_env.py:Workspace`).

Invariant: agents are stateless. What an agent knows of the folder is what the workspace answered to the last action
that it may see; a program is only what a model wrote outside of its thoughts. The answers' file is no part of a prompt.
"""

from __future__ import annotations

import re
from typing import ClassVar

from recipe.dag import Agent, Call, Context, Message
from recipe.dag.reward.outcome import written_in
from recipe.dsbench import prompts
from recipe.retool_ma.prompts import render
from verl_dag.envs.code_env import programs_in

_SUMMARY = re.compile(r"---([A-Z]+)_SUMMARY---\s*\n(.*?)\n?---END_SUMMARY---", re.DOTALL)
_LISTING = "Files: "


class Scientist(Agent):
    """An agent in the folder. Prompt fields: problem, files, names (of files), warning, summaries, earlier, output (of
    its last program), action."""

    system: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """Texts that the names of the files it starts from contain, in lower case."""

    def prompt(
        self,
        context: Context,
        *,
        prompt: str = prompts.TASK,
        system: str | None = None,
        keep_output: int = 4000,
        keep_earlier: int = 1500,
    ) -> list[Message]:
        """keep_output: characters of the last program's output and of each summary; keep_earlier: of each earlier
        output. `system: ""` omits the system message."""
        where = f"node '{context.node}': prompt_options"
        system = self.system if system is None else system
        text = render(prompt, self._fields(context, keep_output, keep_earlier), f"{where}.prompt")
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": text}]

    def _fields(self, context: Context, keep_output: int, keep_earlier: int) -> dict[str, str]:
        own = [call for call in context.history if call.turn == context.turn]
        listing, names = _files(context)
        absent = [need for need in self.needs if not any(need in name.lower() for name in names)]
        return {
            "problem": context.problem,
            "files": listing,
            "names": ", ".join(names),
            "warning": prompts.WARNING.format(names=" or ".join(absent)) if absent else "",
            "summaries": "".join(_summaries(context, keep_output)),
            "earlier": "".join(_actions(own, keep_output, keep_earlier)),
            "output": _output(own[-1], keep_output) if own else "",
            "action": _action(context, own),
        }


class Engineer(Scientist):
    system = prompts.ENGINEER_SYSTEM


class Modeler(Scientist):
    system = prompts.MODELER_SYSTEM
    needs = ("x_train", "y_train")


class Analyst(Scientist):
    system = prompts.ANALYST_SYSTEM
    needs = ("x_test", "model")


def _files(context: Context) -> tuple[str, list[str]]:
    """Return the listing and the names of the files, as the folder was after the last visible action."""
    for call in reversed(context.calls):
        if "files" in call.env_info:
            sizes = call.env_info["files"]
            return ", ".join(f"{name} ({size} bytes)" for name, size in sizes.items()) or "none", list(sizes)
    listing = str(context.obs or "").removeprefix(_LISTING)
    return listing, re.findall(r"(\S+) \(\d+ bytes\)", listing)


def _summaries(context: Context, keep: int) -> list[str]:
    """Return a section for each other agent that printed a summary: the last one it printed."""
    summaries: dict[str, str] = {}
    for call in context.calls:
        if call.agent != context.agent and (blocks := _SUMMARY.findall(str(call.env_info.get("output", "")))):
            summaries[call.agent] = blocks[-1][1].strip()[:keep]
    return [prompts.SUMMARY.format(agent=agent, text=text) for agent, text in summaries.items()]


def _actions(own: list[Call], keep_output: int, keep_earlier: int) -> list[str]:
    """Return a section for each earlier action of this agent, the last one with more of its output."""
    return [
        prompts.ACTION.format(
            number=number,
            program="\n\n".join(programs_in(written_in(call))) or "# no program",
            output=_output(call, keep_output if call is own[-1] else keep_earlier),
        )
        for number, call in enumerate(own, 1)
    ]


def _output(call: Call, keep: int) -> str:
    """Return what the workspace answered, with its middle cut out if it is longer than `keep`: errors come last."""
    text = str(call.env_info.get("output", ""))
    half = keep // 2
    return text if len(text) <= keep else f"{text[:half]}\n...(truncated)...\n{text[len(text) - half :]}"


def _action(context: Context, own: list[Call]) -> str:
    if not own:
        return prompts.FIRST
    missing = ", ".join(own[-1].env_info.get("missing", ())) or "something"
    return prompts.AGAIN.format(missing=missing, number=context.round + 1, most=context.max_rounds)
