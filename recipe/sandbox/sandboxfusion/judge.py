"""SandboxFusion's `/submit` for problems that the request contains (`CommonOJDataset` with `provided_data`).

Invariant: none of the caller's code runs in the server: the program runs as one job per test case, its output is
compared here, and a request with custom_extract_logic, which is Python code for the server, is refused. What takes long
for a large request does not run on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from recipe.sandbox import wire
from recipe.sandbox.job import Job
from recipe.sandbox.jobs import JobRequest

Runner = Callable[[JobRequest], Coroutine[Any, Any, dict[str, Any]]]
"""Runs a job and returns the answer of /run_code."""
_PARALLEL = 3
_AHEAD = 30
"""Cases in flight, most of them waiting for their turn, so that a slow one does not hold up the next."""
_RELATIVE = 1e-5
_SHOWN = 1000
"""Characters of a passed case's texts that the answer repeats, from both ends; extra.return_full_case returns all."""
_TAGS = {"python": {"python", "py", "python3"}, "cpp": {"cpp", "c++"}, "bash": {"bash", "sh", "shell"}}
_CLOSING = re.compile(r"^[^\S\n]*```", re.MULTILINE)
_DATASET = "CommonOJDataset"


class TestConfig(wire.Request):
    __test__ = False

    dataset_type: str | None = None
    language: wire.Language | None = None
    compile_timeout: float | None = None
    run_timeout: float | None = None
    custom_extract_logic: str | None = None
    provided_data: list[dict[str, Any]] | dict[str, Any] | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class SubmitRequest(wire.Request):
    dataset: str
    id: int | str
    completion: wire.Text
    config: TestConfig


class Case(BaseModel):
    """A test case: `input` has the key `stdin`, `output` has `stdout`."""

    input: dict[str, wire.Text]
    output: dict[str, str]


@dataclass(frozen=True)
class Submission:
    request: SubmitRequest
    language: str
    cases: Sequence[Case]
    code: str


def check(data: Any) -> Submission:
    """Check a decoded request and extract its program. Raises wire.Invalid, 400 with the reason or 422."""
    request = wire.parse(SubmitRequest, data)
    config = request.config
    if config.dataset_type != _DATASET:
        raise wire.Invalid(f"no eval class found for dataset {request.dataset}; dataset_type must be {_DATASET}", 400)
    if config.custom_extract_logic is not None:
        raise wire.Invalid("custom_extract_logic is Python code for the server, which this server never runs", 400)
    if not config.language:
        raise wire.Invalid(f"config.language field must exist for {_DATASET}, got None", 400)
    row = config.provided_data
    if isinstance(row, list):
        row = next((item for item in row if str(item.get("id")) == str(request.id)), None)
    if row is None:
        raise wire.Invalid(f"config.provided_data has no problem {request.id!r}, and this server stores none", 400)
    cases = row.get("test")
    try:
        cases = json.loads(cases, strict=False) if isinstance(cases, str) else cases
    except (ValueError, RecursionError) as error:
        raise wire.Invalid(f"config.provided_data.test is not valid JSON: {error}", 400) from None
    if not isinstance(cases, list) or not cases:
        raise wire.Invalid("config.provided_data.test must be a list of {input, output}, not empty", 400)
    checked = [wire.parse(Case, case) for case in cases]
    if any("stdin" not in case.input or "stdout" not in case.output for case in checked):
        raise wire.Invalid("every case in config.provided_data.test needs input.stdin and output.stdout", 400)
    return Submission(request, config.language, checked, extract(request.completion, config.language))


async def evaluate(submission: Submission, client: str, run: Runner) -> dict[str, Any]:
    """Return the EvalResult: cases in order, up to the first that fails unless extra.run_all_cases. Raises what `run`
    raises, and wire.Invalid, 500, if a case could not be run: that is no verdict."""
    gate = asyncio.Semaphore(_PARALLEL)
    remaining = iter(submission.cases)
    ahead: deque[asyncio.Task[dict[str, Any]]] = deque()
    run_all = submission.request.config.extra.get("run_all_cases", False)
    tests: list[dict[str, Any]] = []
    try:
        while run_all or not tests or tests[-1]["passed"]:
            while len(ahead) < _AHEAD and (case := next(remaining, None)):
                ahead.append(asyncio.ensure_future(_judge(submission, case, client, run, gate)))
            if not ahead:
                break
            tests.append(await ahead[0])
            ahead.popleft()
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    return {
        "id": submission.request.id,
        "accepted": all(test["passed"] for test in tests),
        "extracted_code": submission.code,
        "full_code": None,
        "test_code": None,
        "extracted_type": None,  # as in SandboxFusion, for this kind of dataset
        "extra": None,
        "tests": tests,
    }


async def _judge(
    submission: Submission, case: Case, client: str, run: Runner, gate: asyncio.Semaphore
) -> dict[str, Any]:
    config = submission.request.config
    job = Job(
        code=submission.code,
        language=submission.language,
        timeout_s=config.run_timeout or (10.0 if submission.language == "cpp" else 20.0),
        compile_timeout_s=config.compile_timeout or 10.0,
        stdin=case.input["stdin"],
    )
    async with gate:
        answer = await run(JobRequest(client, job))
    if answer["status"] == "SandboxError":
        raise wire.Invalid(f"Failed to check stdio test case: {answer['message']}", 500)
    passed = False
    if answer["status"] == "Success":
        printed, expected = answer["run_result"]["stdout"], case.output["stdout"]
        passed = await wire.unblocked(len(printed) + len(expected), same, printed, expected)
    uncut = not passed or config.extra.get("return_full_case", False)
    info = case.model_dump() if uncut else {key: _cut(texts) for key, texts in case.model_dump().items()}
    return {"passed": passed, "exec_info": answer, "test_info": info}


def to_json(result: dict[str, Any]) -> str:
    """Return an EvalResult as JSON, encoded piece by piece: while it encodes, `json` lets no other thread run."""
    tests = ", ".join(map(json.dumps, result["tests"]))
    return f"{json.dumps({**result, 'tests': []})[:-2]}{tests}]}}"


def extract(completion: str, language: str) -> str:
    """Return the program in a completion, found as in SandboxFusion: the first closed fence, then an open one, in both
    cases preferably of the language, then what looks like code. Takes linear time."""
    blocks = _fenced(completion)
    if blocks:
        tags = _TAGS.get(language, set())
        return next((code for tag, code in blocks if tag in tags), blocks[0][1])
    lines = [line for line in completion.split("\n") if line.strip()]
    if language == "bash":
        return "\n".join(lines) + "\n"
    return _definition(lines) if language == "python" else ""


def _fenced(text: str) -> list[tuple[str, str]]:
    """Return the tag and the code of all closed fences; if there are none, of the first open one, up to the end."""
    blocks: list[tuple[str, str]] = []
    position = 0
    while (fence := text.find("```", position)) >= 0 and (line_end := text.find("\n", fence)) >= 0:
        tag, start = text[fence + 3 : line_end].strip().lower(), line_end + 1
        # Not on the fence's next line: between two fences there is at least one line, even if it is empty.
        closing = _CLOSING.search(text, start + 1)
        if closing is None:
            return blocks or [(tag, text[start:])]
        body = text[start : closing.start()]
        code = body.rstrip()
        blocks.append((tag, body[: body.index("\n", len(code))]))
        position = closing.end()
    return blocks


def _definition(lines: list[str]) -> str:
    """Return the first function or class, with the imports and comments directly above it, or an empty program."""
    for first, (line, body) in enumerate(zip(lines, lines[1:], strict=False)):
        if line.startswith(("def ", "class ")) and body[0].isspace():
            start, end = first, first + 1
            while start and lines[start - 1].startswith(("import", "from", "#")):
                start -= 1
            while end < len(lines) and lines[end][0].isspace():
                end += 1
            return "\n".join(lines[start:end]) + "\n"
    return ""


def same(printed: str, expected: str) -> bool:
    """Compare line by line: equal up to case and outer blanks, or numbers within a relative 1e-5."""
    lines, wanted = printed.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(printed: str, expected: str) -> bool:
    printed, expected = printed.strip().lower(), expected.strip().lower()
    if printed == expected:
        return True
    try:
        value, wanted = float(printed), float(expected)
    except ValueError:
        return False
    return abs(value - wanted) / max(abs(wanted), 1e-10) < _RELATIVE


def _cut(texts: dict[str, str]) -> dict[str, str]:
    half = _SHOWN // 2 - 2
    return {name: text if len(text) <= _SHOWN else f"{text[:half]}...{text[-half:]}" for name, text in texts.items()}
