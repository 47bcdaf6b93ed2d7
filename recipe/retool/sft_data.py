"""Convert ReTool-SFT transcripts to dialogues with tool calls, for a supervised cold start.

`python recipe/retool/sft_data.py --output data/retool_sft/all.parquet` reads JoeYing/ReTool-SFT from the hub; `--input`
reads JSON, JSON Lines or parquet. A row's `messages` are a question and one text with <code>, <interpreter> and
<answer> tags. Each program becomes a call of `code_interpreter`, each result a message of role `tool`; the question is
put as the workflow's agent puts it (system message, suffix), with the schemas of its tools, so that what is learned is
what rollouts continue. Malformed transcripts are left out and counted by kind.

Columns: `messages` (role, content, tool_calls) and `tools` (OpenAI's function schemas).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.core.paths import shipped
from recipe.dag.episode.first_prompt import FirstPrompts, MessageRecorder, PromptError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.answer import extract_answer
from recipe.dag.tools.code_interpreter import CodeInterpreter, source_of
from recipe.dag.train import data_script
from recipe.dag.train.problems import read_rows

HUB_NAME = "JoeYing/ReTool-SFT"
WORKFLOW = shipped("workflows/workflow_retool.yaml")
_PLAIN = """\
dag_id: retool_sft
agents: [{name: solver, policy: main, tools: [code_interpreter], tool_loop: {format: hermes}}]
policies: {main: {model: {path: "-"}, frozen: true}}
nodes: [{id: solve, agent: solver}]
"""
"""`--workflow none`: the question alone, with the schema of the tool."""
_QUESTION = "*user question:*"
_TAG = re.compile(r"</?(?:code|interpreter|answer)>")
_STRING = pa.string()
_CALL = pa.struct(
    [("type", _STRING), ("function", pa.struct([("name", _STRING), ("arguments", pa.struct([("code", _STRING)]))]))]
)
MESSAGES = pa.list_(pa.struct([("role", _STRING), ("content", _STRING), ("tool_calls", pa.list_(_CALL))]))


class Malformed(Exception):
    """A transcript that is no dialogue with an interpreter; the text is the kind of mistake."""


def question_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the question, without the instructions before it and without tags, and the transcript. Raises
    Malformed."""
    messages = [message for message in messages if message.get("role") != "system"]
    if [message.get("role") for message in messages] != ["user", "assistant"]:
        raise Malformed("not one question and one answer")
    texts = [text for message in messages if isinstance(text := message.get("content"), str) and text.strip()]
    if len(texts) != 2:
        raise Malformed("empty question or answer")
    question = texts[0].rpartition(_QUESTION)[2].replace("<answer>", "").replace("</answer>", "").strip()
    if not question:
        raise Malformed("empty question or answer")
    return question, texts[1]


def dialogue_of(transcript: str) -> list[dict[str, Any]]:
    """Return the messages of the assistant and the tool. Raises Malformed."""
    messages: list[dict[str, Any]] = []
    rest = transcript
    while (code := _TAG.search(rest)) and code[0] == "<code>":
        thought, program, rest = rest[: code.start()], *_until(rest[code.end() :], "</code>")
        result = _TAG.search(rest)
        if result is None or result[0] != "<interpreter>" or rest[: result.start()].strip():
            raise Malformed("<code> that no <interpreter> follows")
        output, rest = _until(rest[result.end() :], "</interpreter>")
        if not (program := source_of(program)):
            raise Malformed("empty <code>")
        call = {"type": "function", "function": {"name": CodeInterpreter.name, "arguments": {"code": program}}}
        messages.append({"role": "assistant", "content": thought.strip(), "tool_calls": [call]})
        messages.append({"role": "tool", "content": output.strip()})
    tags = _TAG.findall(rest)
    if tags not in (["<answer>", "</answer>"], []):
        kind = next((tag for tag in tags if "answer" not in tag), None)
        raise Malformed(f"{kind} where none belongs" if kind else "unpaired or repeated <answer>")
    if extract_answer(rest, tagged=True) is None:
        raise Malformed("no answer")
    return [*messages, {"role": "assistant", "content": rest.strip()}]


def _until(text: str, tag: str) -> tuple[str, str]:
    inside, separator, rest = text.partition(tag)
    if not separator:
        raise Malformed(f"no {tag}")
    return inside, rest


class Prompts:
    """The messages and tool schemas with which a workflow's first agent is asked."""

    def __init__(self, workflow: str) -> None:
        """`workflow`: a file, or "none". Raises UserError."""
        self._recorder = MessageRecorder()
        plain = workflow == "none"
        loaded = load_workflow("retool_sft.yaml" if plain else workflow, _PLAIN if plain else None)
        self._prompts = FirstPrompts(loaded, self._recorder)
        self._file = workflow

    def __call__(self, question: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return (messages, schemas). Raises UserError."""
        sample = {"prompt": [{"role": "user", "content": question}], "ground_truth": "", "extra_info": {}}
        try:
            asyncio.run(self._prompts.ids(sample))
        except PromptError as error:
            raise UserError(f"--workflow {self._file}: {error}") from error
        messages, schemas = self._recorder.messages, self._recorder.schemas
        if CodeInterpreter.name not in [schema["function"]["name"] for schema in schemas]:
            raise UserError(
                f"--workflow {self._file}: its first agent needs the tool code_interpreter, and tool_loop hermes"
            )
        return messages, schemas


def tools_column(schemas: list[list[dict[str, Any]]]) -> pa.Array:
    """Return the schemas as structs; as JSON if structs would give a schema the keys of another one."""
    structs = pa.array(schemas)
    return structs if structs.to_pylist() == schemas else pa.array([json.dumps(row) for row in schemas])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default=HUB_NAME, help=f"JSON, JSON Lines, parquet, or hub data set; {HUB_NAME}")
    parser.add_argument("--prompt_split", default="train", help="split of a hub data set; default: train")
    parser.add_argument("--name", help="configuration of a hub data set")
    parser.add_argument("--output", required=True, type=Path, help="parquet file to write")
    parser.add_argument(
        "--workflow", default=str(WORKFLOW), help="workflow_retool.yaml by default; none: no agent's text"
    )
    options = parser.parse_args(argv)
    prompts = Prompts(options.workflow)
    rows = read_rows(options.input, options.prompt_split, options.name)
    if not isinstance(rows[0].get("messages"), list):
        raise UserError(f"{options.input}: has no column of 'messages' (its columns: {', '.join(rows[0])}); see --help")
    kept: list[dict[str, Any]] = []
    malformed: Counter[str] = Counter()
    for row in rows:
        try:
            question, transcript = question_of(row.get("messages") or [])
            dialogue = dialogue_of(transcript)
        except Malformed as error:
            malformed[str(error)] += 1
            continue
        messages, schemas = prompts(question)
        kept.append({"messages": messages + dialogue, "tools": schemas})
    for kind, count in malformed.most_common():
        print(f"retool_sft: left out {counted(count, 'transcript')}: {kind}")
    if not kept:
        raise UserError(f"{options.input}: none of {len(rows)} transcripts is well-formed; see the kinds above")
    messages = pa.array([row["messages"] for row in kept], MESSAGES)
    table = pa.table({"messages": messages, "tools": tools_column([row["tools"] for row in kept])})
    with data_script.new_files([options.output], "--output") as files:
        pq.write_table(table, files[0])
    print(f"retool_sft: kept {len(kept)} of {len(rows)} ({100 * len(kept) / len(rows):.1f} %) -> {options.output}")


if __name__ == "__main__":
    sys.exit(data_script.run(main))
