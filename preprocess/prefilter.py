"""Keep the rows of a parquet file whose prompt, as the model will see it, and whose response are short enough.

`python preprocess/prefilter.py --input IN.parquet --output OUT.parquet --tokenizer MODEL` counts the tokens of each
prompt with the code that renders rollouts: the agent's own messages (`--workflow FILE`), the chat template with its
generation prompt, and the schemas of the tools. Without `--workflow`, the messages are the row's, and the tool is
`code_interpreter`; `--tools none` is for agents without one. A column of responses is counted if there is one.

Rows that cannot be counted are left out and counted by kind of error. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe.dag.core.counted import counted
from recipe.dag.core.errors import UserError
from recipe.dag.episode.first_prompt import FirstPrompts, PromptError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.train import data_script
from recipe.dag.train.data import prompt_of
from verl_dag.preprocess.parquet import batches, open_parquet, write_selected

KEPT, LONG_PROMPT, LONG_RESPONSE = "kept", "prompt", "response"
_ROWS_PER_WORKER = 1000
"""A worker needs seconds to start; fewer rows than these are counted sooner without it."""
_SHOWN_ERRORS = 10
_CONTEXT = ("reward_model", "data_source", "extra_info")
"""Columns that an agent's hook may read, besides the prompt."""
_COMPOSED = 4
"""Characters that a normalizer composes to one, at most."""
_PLAIN = """\
dag_id: prefilter
agents: [{{name: solver, policy: main{tools}}}]
policies: {{main: {{model: {{path: "-"}}, frozen: true}}}}
nodes: [{{id: solve, agent: solver}}]
"""
_TOOLS = {"code_interpreter": ", tools: [code_interpreter], tool_loop: {format: hermes}", "none": ""}


@dataclass(frozen=True, slots=True)
class Limits:
    """The columns to count, their limits, and the tokenizer that counts."""

    tokenizer: str
    trust_remote_code: bool
    workflow: str | None
    tools: str
    prompt_key: str
    response_key: str | None
    """None: the file has no responses."""
    max_prompt: int
    max_response: int


class Judge:
    """Decides about rows; each process has its own."""

    def __init__(self, limits: Limits) -> None:
        """Raises UserError for a tokenizer or workflow that cannot be used."""
        self._limits = limits
        tokenizer = load_tokenizer(limits.tokenizer, trust_remote_code=limits.trust_remote_code)
        text = None if limits.workflow else _PLAIN.format(tools=_TOOLS[limits.tools])
        self._prompts = FirstPrompts(load_workflow(limits.workflow or "prefilter.yaml", text), tokenizer)
        # a token has at most so many characters, of which a normalizer may have composed each from several
        self._token_chars = _COMPOSED * max((len(token) for token in tokenizer.get_vocab()), default=1)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Return KEPT, LONG_PROMPT, LONG_RESPONSE or the kind of error of each row."""
        return asyncio.run(self._judge_all(rows))

    def endless(self, row: dict[str, Any]) -> str | None:
        """Return the verdict on a row whose texts are too long for any tokens, None for others; encodes nothing."""
        limits = self._limits
        for key, limit, verdict in (
            (limits.prompt_key, limits.max_prompt, LONG_PROMPT),
            (limits.response_key, limits.max_response, LONG_RESPONSE),
        ):
            if key is not None and _characters(row[key]) > limit * self._token_chars:
                return verdict
        return None

    async def _judge_all(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        return [await self._judge(row) for row in rows]

    async def _judge(self, row: dict[str, Any]) -> str:
        limits = self._limits
        try:
            prompt = prompt_of(row, limits.prompt_key)
            if len(await self._prompts.ids({"prompt": prompt, **_rest(row)})) > limits.max_prompt:
                return LONG_PROMPT
            if limits.response_key is None:
                return KEPT
            response = _text(row[limits.response_key], limits.response_key)
        except (PromptError, UserError) as error:
            return " ".join(str(error).split())[:160]
        return KEPT if len(await self._prompts.encode(response)) <= limits.max_response else LONG_RESPONSE


def _characters(value: Any) -> int:
    """Return the length of the texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(_characters, value.values() if isinstance(value, dict) else value))
    return 0


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    """Return what else a hook may read in a sample."""
    truth = _mapping(row, "reward_model").get("ground_truth")
    extra = {key: value for key, value in _mapping(row, "extra_info").items() if value is not None}
    return {
        "ground_truth": "" if truth is None else str(truth),
        "data_source": row.get("data_source") or "",
        "extra_info": extra,
    }


def _mapping(row: dict[str, Any], column: str) -> dict[str, Any]:
    """Return a column's mapping, which may be JSON text, {} without one. Raises UserError for anything else."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(f"column {column} is a text that is not JSON") from None
    if value is not None and not isinstance(value, dict):
        raise UserError(f"column {column} must be a mapping, not {type(value).__name__}")
    return value or {}


def _text(response: Any, column: str) -> str:
    """Return a response as text: a text, or the contents of a list of messages. Raises UserError."""
    if response is None:
        return ""
    if isinstance(response, str):
        return response
    if isinstance(response, list) and all(isinstance(message, dict) for message in response):
        return "\n".join(str(message.get("content") or "") for message in response)
    raise UserError(f"column {column} must be a text or a list of messages, not {type(response).__name__}")


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a local folder or hub model. Raises UserError if it cannot be, or has no chat template."""
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise UserError(f"--tokenizer {name}: no such folder; pass a model's folder or a hub name like owner/model")
    try:
        path = str(folder) if folder.is_dir() else name
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the loaders' failures have no common type
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--tokenizer {name}: cannot be loaded: {reason}; pass the folder of a complete model"
        ) from error
    if not tokenizer.chat_template:
        raise UserError(
            f"--tokenizer {name}: has no chat template, so the prompt as the model will see it is unknown; pass an "
            "instruction-tuned model, or put a chat_template.jinja into the folder"
        )
    return tokenizer


_judge: Judge | None = None
"""The judge of a worker process."""


def _start_worker(limits: Limits) -> None:
    global _judge
    _judge = Judge(limits)


def _work(rows: list[dict[str, Any]]) -> list[str]:
    assert _judge is not None  # _start_worker has run
    return _judge(rows)


def verdicts(rows: Iterable[list[dict[str, Any]]], limits: Limits, workers: int) -> Iterator[str]:
    """Yield the verdict of each row, in order. At most a few batches per worker are in memory. Raises UserError."""
    judge = Judge(limits)  # also where the tokenizer's and the workflow's mistakes are found
    if workers == 1:
        for batch in rows:
            endless = [judge.endless(row) for row in batch]
            yield from _merged(endless, judge(_others(endless, batch)))
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the tokenizer's threads in an unknown state
    waiting: deque[tuple[list[str | None], Future[list[str]]]] = deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (limits,)) as pool:
        try:
            for batch in rows:
                endless = [judge.endless(row) for row in batch]
                waiting.append((endless, pool.submit(_work, _others(endless, batch))))
                if len(waiting) > 2 * workers:
                    known, others = waiting.popleft()
                    yield from _merged(known, others.result())
            while waiting:
                known, others = waiting.popleft()
                yield from _merged(known, others.result())
        except BrokenProcessPool as error:
            raise UserError("a worker was killed, perhaps for lack of memory; pass a smaller --num_workers") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _others(endless: Sequence[str | None], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row, verdict in zip(rows, endless, strict=True) if verdict is None]


def _merged(endless: Sequence[str | None], others: Iterable[str]) -> Iterator[str]:
    """Yield the verdicts of a batch's rows: those known, and `others` in the remaining places."""
    rest = iter(others)
    for verdict in endless:
        yield next(rest) if verdict is None else verdict


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    started = time.monotonic()
    file = open_parquet(options.input)
    names = file.schema_arrow.names
    for option in ("prompt_key", "response_key"):
        if (column := getattr(options, option)) not in (None, *names):
            have = f"has no column '{column}' (its columns: {', '.join(names)})"
            raise UserError(f"{options.input}: {have}; name it with --{option}")
    limits = Limits(
        options.tokenizer,
        options.trust_remote_code,
        options.workflow,
        options.tools,
        options.prompt_key,
        options.response_key or ("response" if "response" in names else None),
        options.max_prompt_length,
        options.max_response_length,
    )
    workers = max(1, min(options.num_workers, len(os.sched_getaffinity(0)), file.metadata.num_rows // _ROWS_PER_WORKER))
    wanted = {limits.prompt_key, limits.response_key, *_CONTEXT}
    read = [name for name in names if name in wanted]
    rows = (batch.to_pylist() for batch in batches(file, options.input, read))
    counts: Counter[str] = Counter()
    places: list[int | None] = []
    for verdict in verdicts(rows, limits, workers):
        counts[verdict] += 1
        places.append(0 if verdict == KEPT else None)
    _print_dropped(counts, limits)
    kept, total = counts[KEPT], len(places)
    if not kept:
        raise UserError(
            f"{options.input}: none of {total} rows is left; raise --max_prompt_length or see the errors above"
        )
    with data_script.new_files([options.output], "--output") as files:
        write_selected(batches(file, options.input), file.schema_arrow, places, files)
    seconds = time.monotonic() - started
    share = f"{kept} of {total} rows ({100 * kept / total:.1f} %)"
    print(f"prefilter: kept {share} in {seconds:.1f} s with {workers} worker{'s' * (workers > 1)} -> {options.output}")


def _print_dropped(counts: Counter[str], limits: Limits) -> None:
    """Print how many rows were left out, by reason."""
    for verdict, limit in ((LONG_PROMPT, limits.max_prompt), (LONG_RESPONSE, limits.max_response)):
        if counts[verdict]:
            print(f"prefilter: left out {counted(counts[verdict], 'row')} with a {verdict} of more than {limit} tokens")
    errors = Counter({kind: n for kind, n in counts.items() if kind not in (KEPT, LONG_PROMPT, LONG_RESPONSE)})
    for kind, count in errors.most_common(_SHOWN_ERRORS):
        print(f"prefilter: left out {counted(count, 'row')} by error: {kind}")
    if len(errors) > _SHOWN_ERRORS:
        rest = errors.total() - sum(count for _, count in errors.most_common(_SHOWN_ERRORS))
        print(f"prefilter: left out {counted(rest, 'row')} by {len(errors) - _SHOWN_ERRORS} other errors")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="parquet file with a column of prompts")
    parser.add_argument("--output", required=True, type=Path, help="parquet file to write")
    parser.add_argument("--tokenizer", required=True, help="model folder or hub name")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code in the tokenizer's repository")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workflow", help="workflow whose first agent builds the prompt")
    what.add_argument("--tools", choices=sorted(_TOOLS), default="code_interpreter", help="default: code_interpreter")
    parser.add_argument("--prompt_key", default="prompt", help="column of prompts: texts or messages; default: prompt")
    parser.add_argument("--response_key", help="column of responses; default: response, if there is one")
    parser.add_argument("--max_prompt_length", type=data_script.positive, default=2048, help="tokens; default: 2048")
    parser.add_argument("--max_response_length", type=data_script.positive, default=4096, help="tokens; default: 4096")
    parser.add_argument("--num_workers", type=data_script.positive, default=192, help="processes, at most one per core")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(data_script.run(main))
