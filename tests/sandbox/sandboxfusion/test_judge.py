"""Judging without a server: extraction, comparison and refused requests."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from recipe.sandbox import wire
from recipe.sandbox.fair_queue import Overloaded
from recipe.sandbox.sandboxfusion import judge


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("Look:\n```python\nprint(1)\n```\ndone", "print(1)"),
        ("```cpp\nint x;\n```\n```py\nprint(2)\n```", "print(2)"),
        ("```\nprint(3)\n\n  ```\n```\nprint(4)\n```", "print(3)"),
        ("text ```python\nprint(5)", "print(5)"),
        ("inline ```x``` only\nprint(6)", "print(6)"),
        ("import os\n\ndef f():\n\n    return 7\nprint(f())", "import os\ndef f():\n    return 7\n"),
        ("Sure:\nclass A:\n    x = 1\n\ndef g():\n    pass", "class A:\n    x = 1\n"),
        ("print(8)", ""),
        ("  \n", ""),
    ],
)
def test_code_is_found_in_a_completion(completion, code):
    assert judge.extract(completion, "python") == code


def test_prose_is_a_program_in_bash_only():
    assert judge.extract("echo 1\n\necho 2", "bash") == "echo 1\necho 2\n"
    assert judge.extract("int main() { return 0; }", "cpp") == ""


def test_extraction_is_linear():
    started = time.monotonic()
    judge.extract("```\n" + "\n \n```x```" * 500_000, "python")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("1\n2\n", "1\n2", True),
        ("  YES \n", "yes", True),
        ("0.3333334", "0.33333333", True),
        ("0.334", "0.33333333", False),
        ("1e400", "1e400", True),
        ("inf", "1", False),
        ("nan", "1", False),
        ("1\n2", "1 2", False),
        ("", "\n", True),
        ("x", "y", False),
    ],
)
def test_comparison(printed, expected, equal):
    assert judge.same(printed, expected) is equal


CASES = [{"input": {"stdin": str(n)}, "output": {"stdout": str(2 * n)}} for n in range(6)]


def submission(**config) -> judge.Submission:
    given = {"dataset_type": "CommonOJDataset", "language": "python", "provided_data": {"id": 7, "test": CASES}}
    body = {"dataset": "mine", "id": 7, "completion": "```\ncode\n```", "config": given | config}
    return judge.check(body)


def evaluate(known: judge.Submission, wrong: set[str] = frozenset()) -> tuple[dict, list[str]]:
    asked = []

    async def run(request):
        stdin = request.job.stdin
        asked.append(stdin)
        await asyncio.sleep(0.001 * int(stdin))
        stdout = "wrong" if stdin in wrong else str(2 * int(stdin))
        return {"status": "Success", "run_result": {"stdout": stdout}}

    return asyncio.run(judge.evaluate(known, "me", run)), asked


def test_all_cases_passed_is_accepted():
    result, asked = evaluate(submission())
    assert result["accepted"] and len(result["tests"]) == len(asked) == 6
    assert result["id"] == 7 and result["extracted_code"] == "code" and result["extracted_type"] is None
    assert json.loads(judge.to_json(result)) == result


def test_thousands_of_cases_do_not_become_thousands_of_tasks():
    most = 0

    async def run(_request):
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)
        return {"status": "Success", "run_result": {"stdout": "0"}}

    case = {"input": {"stdin": "0"}, "output": {"stdout": "0"}}
    known = submission(provided_data={"test": [case] * 3000})
    result = asyncio.run(judge.evaluate(known, "me", run))
    assert len(result["tests"]) == 3000 and result["accepted"] and most < 100


def test_the_first_failed_case_ends_it_unless_all_are_wanted():
    result, asked = evaluate(submission(), {"1"})
    assert not result["accepted"] and [test["passed"] for test in result["tests"]] == [True, False]
    assert len(asked) < 6
    result, asked = evaluate(submission(extra={"run_all_cases": True}), {"1"})
    assert [test["passed"] for test in result["tests"]] == [True, False, True, True, True, True]


def test_long_texts_of_passed_cases_are_cut_unless_wanted_whole():
    case = {"input": {"stdin": " " * 5000 + "0"}, "output": {"stdout": "0"}}
    data = {"test": [case]}
    shown = evaluate(submission(provided_data=data))[0]["tests"][0]["test_info"]["input"]["stdin"]
    assert len(shown) < 1100 and shown.endswith("0")
    whole = evaluate(submission(provided_data=data, extra={"return_full_case": True}))[0]
    assert whole["tests"][0]["test_info"] == case


def test_a_case_that_could_not_run_gives_no_verdict():
    async def overloaded(_request):
        raise Overloaded("full")

    async def broken(_request):
        return {"status": "SandboxError", "message": "no disk", "run_result": None}

    with pytest.raises(Overloaded):
        asyncio.run(judge.evaluate(submission(), "me", overloaded))
    with pytest.raises(wire.Invalid, match="Failed to check stdio test case: no disk") as caught:
        asyncio.run(judge.evaluate(submission(), "me", broken))
    assert caught.value.status == 500


def test_cases_may_be_json_and_rows_a_list():
    rows = [{"id": "6", "test": "[]"}, {"id": "7", "test": '[{"input": {"stdin": "1"}, "output": {"stdout": "2"}}]'}]
    assert len(submission(provided_data=rows).cases) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dataset_type": None}, "no eval class found for dataset mine"),
        ({"dataset_type": "MBPPDataset"}, "no eval class found for dataset mine"),
        ({"custom_extract_logic": "import os"}, "never runs"),
        ({"language": None}, "config.language field must exist"),
        ({"provided_data": None}, "no problem 7"),
        ({"provided_data": [{"id": 8}]}, "no problem 7"),
        ({"provided_data": {"test": "["}}, "not valid JSON"),
        ({"provided_data": {"test": []}}, "not empty"),
        ({"provided_data": {"test": [{"input": {}, "output": {}}]}}, "needs input.stdin"),
    ],
)
def test_invalid_submissions_are_refused(config, message):
    with pytest.raises(wire.Invalid, match=message) as caught:
        submission(**config)
    assert caught.value.status == 400
