"""Every call of the model becomes a ToolResult, against a real local server."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.core.errors import SandboxFault
from recipe.dag.tools.code_interpreter import CodeInterpreter, clip, echo_last, source_of
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.record import ToolResult
from recipe.dag.types.tool import Tool
from recipe.sandbox.launch import LocalSandbox


def execute(local: LocalSandbox, arguments: dict, **options) -> ToolResult:
    async def once() -> ToolResult:
        client = SandboxClient(local.url, token=local.token)
        try:
            return await CodeInterpreter(client, **options).execute(arguments, {})
        finally:
            await client.close()

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print(6 * 7)", "success", "42\n"),
        ("    x = 1\n    print(x)", "success", "1\n"),
        ("```python\nprint('fenced')\n```", "success", "fenced\n"),
        ("x = 1", "success", "[no stdout]"),
        ("import sys; print('seen'); sys.exit(2)", "failed", "[execution error]"),
        ("print('a\\x00b')", "success", "a\0b\n"),
    ],
)
def test_text_for_the_model(local, code, status, text):
    result = execute(local, {"code": code})
    assert (result.status, result.text) == (status, text)
    assert result.name == "code_interpreter" and result.arguments == {"code": code} and result.attempts == 1


def test_failing_code_shows_its_traceback(local):
    result = execute(local, {"code": "print('before')\n1/0"})
    assert (result.status, result.return_code, result.stdout, result.ok) == ("failed", 1, "before\n", False)
    assert result.text == result.stderr and result.text.rstrip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("code", ["a\0b", "def f(:", "print('\ud800')"])
def test_invalid_code_fails(local, code):
    result = execute(local, {"code": code})
    assert result.status == "failed" and "SyntaxError" in result.text


def test_timeout_of_the_call_counts_and_stderr_follows(local):
    code = "import sys, time; print('log', file=sys.stderr); time.sleep(60)"
    for timeout in ("0.3", "20"):  # a busy machine may not have started it within 0.3 s
        result = execute(local, {"code": code, "timeout": timeout})
        if "log" in result.text:
            break
    assert (result.status, result.text, result.return_code) == ("timeout", "[timeout]\nlog\n", None)
    assert 0.25 < result.seconds - float(timeout) + 0.3 < 10
    assert execute(local, {"code": "import time; time.sleep(60)"}, timeout_s=0.2).text == "[timeout]"


def test_timeout_is_capped(local):
    result = execute(local, {"code": "import time; time.sleep(60)", "timeout": 1e9}, timeout_s=0.2, max_timeout_s=0.3)
    assert result.status == "timeout"


@pytest.mark.parametrize(
    "arguments",
    [{}, {"code": ""}, {"code": " \n"}, {"code": None}, {"code": ["print(1)"]}, {"code": "```python\n\n```"}],
)
def test_empty_code_never_runs(arguments):
    result = asyncio.run(CodeInterpreter(SandboxClient("http://127.0.0.1:1")).execute(arguments, {}))
    assert (result.status, result.text) == ("invalid", "empty_code")


@pytest.mark.parametrize("timeout", [0, -1, "soon", True, float("nan"), [], {}])
def test_bad_timeouts_never_run(timeout):
    arguments = {"code": "print(1)", "timeout": timeout}
    result = asyncio.run(CodeInterpreter(SandboxClient("http://127.0.0.1:1")).execute(arguments, {}))
    assert result.status == "invalid" and "timeout" in result.text


def test_an_unreachable_sandbox_is_a_fault_and_not_a_result():
    tool = CodeInterpreter(SandboxClient("http://127.0.0.1:1", retries=0))
    with pytest.raises(SandboxFault):
        asyncio.run(tool.execute({"code": "print(1)"}, {}))


def test_streams_are_clipped(local):
    code = "import sys\nfor out in (sys.stdout, sys.stderr): out.write('a' * 3000 + 'z' * 3000)"
    result = execute(local, {"code": code}, max_output_chars=100)
    assert len(result.text) <= 100 and len(result.stderr) <= 100
    assert result.text.startswith("aaa") and result.text.endswith("zzz") and "left out" in result.text


def test_clip_counts_what_is_missing():
    text = "".join(chr(97 + n % 26) for n in range(1000))
    clipped = clip(text, 100)
    head, tail = clipped.split("\n[... ")[0], clipped.split("...]\n")[1]
    assert text.startswith(head) and text.endswith(tail)
    assert f"[... {1000 - len(head) - len(tail)} characters left out ...]" in clipped
    assert clip("short", 5) == "short"
    assert all(len(clip(text, limit)) <= limit for limit in range(200))


def test_memory_limit(local):
    assert "MemoryError" in execute(local, {"code": "bytearray(400 << 20)"}, memory_mb=300).text


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 5; x  # comment", "5\n"),
        ("s = 'é'\n(s +\n s)", "éé\n"),
        ("print('once')", "once\n"),
        ("None", ""),
        ("x = 5", ""),
        ("print = 3\n7", "7\n"),
        ("if True:\n    5", ""),
        ("a = 1\ra + 1", "2\n"),
        ("a = 1\r\na + 2", "3\n"),
        ("a = 1\rb = 2", ""),
        ("f(", None),
        ("", None),
    ],
)
def test_echo_last(code, printed, capsys):
    changed = echo_last(code)
    if printed is None:
        assert changed == code
    else:
        exec(changed, {})
        assert capsys.readouterr().out == printed


def test_auto_print_is_off_unless_asked_for(local):
    assert execute(local, {"code": "6 * 7"}).text == "[no stdout]"
    assert execute(local, {"code": "6 * 7"}, auto_print=True).text == "42\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```py\nx\n```", "x"),
        ("```\nx\n```", "x"),
        ("\n  ```Python\n  a\n    b\n  ```\n", "a\n  b"),
        ("x = '```'", "x = '```'"),
        ("\n    a\n      b\n", "a\n  b"),
    ],
)
def test_source_of(text, code):
    assert source_of(text) == code


def test_it_follows_the_tool_protocol():
    tool = CodeInterpreter(SandboxClient("http://127.0.0.1:1"))
    assert isinstance(tool, Tool)
    assert tool.schema["function"]["name"] == tool.name
    assert tool.schema["function"]["parameters"]["required"] == ["code"]
