"""`verl-dag doctor` with options: each check on something sound, and on what it must find."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from typer.testing import CliRunner

from recipe.dag.app import cli, doctor, doctor_options
from recipe.dag.app.doctor import Note, Unfit
from recipe.dag.core.errors import UserError
from tests.dialogues import byte_tokenizer
from tests.remote.provider_servers import AnthropicServer
from tests.workflow.shapes import QWEN, write_config

WORKFLOW = str(Path(__file__).parents[2] / "workflows" / "workflow_retool.yaml")
MATHCHAT = str(Path(__file__).parents[2] / "workflows" / "workflow_mathchat.yaml")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
OPEN{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}CLOSE
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = TEMPLATE.replace("OPEN", "<tool_call>\n").replace("CLOSE", "\n</tool_call>")


def test_a_call_that_the_template_writes_is_parsed():
    tokenizer = byte_tokenizer(HERMES)
    assert "'<|im_end|>'" in doctor_options.check_template(tokenizer)
    assert "unchanged" in doctor_options.check_tool_call(tokenizer)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (TEMPLATE.replace("OPEN", "[CALL]").replace("CLOSE", "[/CALL]"), Note, "does not write calls in <tool_call>"),
        (HERMES.replace("arguments | tojson", "arguments"), Unfit, "is parsed as .*unreadable tool call"),
        (HERMES.replace("{{ tool | tojson }}", ""), Unfit, "ignores the tools"),
        (HERMES.replace("call.function.name", "call.fun.name"), Unfit, "cannot render a tool call"),
        (None, Unfit, "no chat template"),
    ],
)
def test_a_template_that_the_tool_loop_cannot_follow_is_found(template, error, message):
    with pytest.raises(error, match=message):
        doctor_options.check_tool_call(byte_tokenizer(template))


def test_a_template_that_hides_results_is_found():
    hides = HERMES.replace("{{ message.content }}", "{% if message.role != 'tool' %}{{ message.content }}{% endif %}")
    with pytest.raises(Unfit, match="omits a tool's result"):
        doctor_options.check_template(byte_tokenizer(hides))
    with pytest.raises(Unfit, match="has no chat template"):
        doctor_options.check_template(byte_tokenizer(None))


def test_prompts_are_counted_with_template_and_tools(tmp_path):
    tokenizer, data = byte_tokenizer(HERMES), tmp_path / "rows.jsonl"
    rows = [{"problem": "x" * length, "answer": "1"} for length in (10, 20, 400)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = doctor_options.check_prompts(str(data), tokenizer, None, 10_000)
    assert line.startswith("3 prompts of ") and line.endswith("0.0% above 10,000")
    shortest, longest = (
        int(part.split(" ")[0].replace(",", "")) for part in (line.split("of ")[1], line.split("| ")[1])
    )
    assert longest - shortest == 390 and shortest > 100, "the schema of the interpreter counts"
    over = doctor_options.check_prompts(str(data), tokenizer, None, shortest + 10)
    assert over.endswith(f"33.3% above {shortest + 10:,}")
    (tmp_path / "bad.jsonl").write_text("no json")
    with pytest.raises(UserError, match="not JSON"):
        doctor_options.check_prompts(str(tmp_path / "bad.jsonl"), tokenizer, None, 10)


def test_the_histogram_shows_every_bin_that_is_not_empty():
    line = doctor_options.describe_lengths([1] * 1000 + [5] + [9] * 500, 8, bins=8)
    bars = line.split("|")[1]
    assert [bar != " " for bar in bars] == [True, False, False, False, True, False, False, True]
    assert bars[0] == "█" and bars[4] < bars[7] < bars[0]
    assert "p50 1, p90 9" in line and line.endswith("33.3% above 8")
    assert doctor_options.describe_lengths([7], 7).endswith("0.0% above 7")


@asynccontextmanager
async def serving(answers: dict[str, tuple[int, object]]) -> AsyncIterator[str]:
    """Answer `/v1/models`, `/v1/ping` and `/run_code` by their last part."""

    async def answer(request: web.Request) -> web.Response:
        status, body = answers[request.path.rpartition("/")[2]]
        return web.json_response(body(request) if callable(body) else body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def asked(check: Callable, suffix: str, argument: str | None, **answers: tuple[int, object]) -> str:
    async def run() -> str:
        async with serving(answers) as url:
            return await check(url + suffix, argument)

    return asyncio.run(run())


@pytest.mark.parametrize("suffix", ["/v1", "/v1/"])
def test_an_openai_server_lists_its_models(suffix, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    keys = []

    def models(request: web.Request) -> dict:
        keys.append(request.headers.get("Authorization"))
        return {"data": [{"id": "qwen"}, {"id": "other"}]}

    line = asked(doctor_options.ping_server, suffix, "MY_KEY", models=(200, models))
    assert line.endswith("/v1/models serves qwen, other") and keys == ["Bearer secret"] and "secret" not in line


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {}, "HTTP 401; the environment variable MY_KEY is not set"),
        (404, {}, "HTTP 404; pass the URL before /chat/completions"),
        (200, {"models": []}, "does not list models"),
    ],
)
def test_an_openai_server_that_cannot_be_used_is_found(status, body, message, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(Unfit, match=message):
        asked(doctor_options.ping_server, "/v1", "MY_KEY", models=(status, body))


def test_servers_that_do_not_answer_are_found():
    with pytest.raises(Unfit, match="does not answer"):
        asyncio.run(doctor_options.ping_server("http://127.0.0.1:9", "MY_KEY"))
    with pytest.raises(UserError, match="does not answer"):
        asyncio.run(doctor_options.ping_sandbox("http://127.0.0.1:9", None))


def test_a_sandbox_must_run_the_program():
    def ran(stdout: str) -> dict:
        run = {"status": "Finished", "return_code": 0, "stdout": stdout, "stderr": "", "execution_time": 0.1}
        return {"status": "Success", "message": "", "run_result": run, "compile_result": None, "files": {}}

    ping = doctor_options.ping_sandbox
    assert "ran print(6 * 7)" in asked(ping, "", None, ping=(200, "pong"), run_code=(200, ran("42\n")))
    with pytest.raises(Unfit, match=r"print\(6 \* 7\) gave success: '41"):
        asked(ping, "", None, ping=(200, "pong"), run_code=(200, ran("41\n")))
    with pytest.raises(Unfit, match="runs no program"):
        asked(ping, "", None, ping=(200, "pong"), run_code=(500, {}))


def run(*arguments: str) -> SimpleNamespace:
    result = CliRunner().invoke(cli.app, ["doctor", *arguments])
    return SimpleNamespace(code=result.exit_code, out=result.stdout)


def test_options_choose_the_checks(monkeypatch):
    assert doctor_options.option_checks() == {}
    with pytest.raises(UserError, match="add --model MODEL"):
        doctor_options.option_checks(data="rows.parquet")
    every = doctor_options.option_checks(workflow=WORKFLOW, sandbox_url="u", base_url="b", model="m", data="d.parquet")
    names = ["sandbox-url", "base-url", "template", "tool-call", "prompts", "apis", "tools", "gpu-memory"]
    assert list(every) == names
    monkeypatch.setattr(doctor, "CHECKS", {"machine": lambda: "fine"})
    assert run().out.split() == ["ok", "machine", "fine"]
    down = run("--base-url", "http://127.0.0.1:9/v1")
    assert down.code == 1 and down.out.startswith("FAIL  base-url") and "machine" not in down.out


def test_api_policies_are_asked_in_their_providers_form(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", "k1")
    api = "{provider: anthropic, base_url: '${oc.env:COACH_URL}', model: test, key_env: THE_KEY}"
    file = tmp_path / "w.yaml"
    file.write_text(f"dag_id: w\nagents: [{{name: a, policy: coach}}]\npolicies: {{coach: {{api: {api}}}}}\n"
                    "nodes: [{id: ask, agent: a}]\n")  # fmt: skip
    with AnthropicServer(key="k1") as server:
        monkeypatch.setenv("COACH_URL", server.url)
        assert doctor_options.check_apis(str(file)) == "coach: test at ${oc.env:COACH_URL} answers"
        monkeypatch.setenv("THE_KEY", "k2")
        with pytest.raises(UserError, match="refuses the key in THE_KEY"):
            doctor_options.check_apis(str(file))
    assert doctor_options.check_apis(WORKFLOW) == "none: every policy is the run's own"


def test_edits_of_the_workflow_count_in_every_check(monkeypatch):
    monkeypatch.setenv("THE_KEY", "k1")
    with AnthropicServer(key="k1") as server:
        api = f"{{provider: anthropic, base_url: {server.url!r}, model: test, key_env: THE_KEY}}"
        edits = ["~workflow.policies.coach.model", f"workflow.policies.coach.api={api}"]
        checks = doctor_options.option_checks(workflow=MATHCHAT, overrides=[*edits, "platform=cpu"])
        assert checks["apis"]() == f"coach: test at {server.url} answers"
        assert checks["tools"]().startswith("none")
        with pytest.raises(doctor.Note, match="none is used"):
            checks["gpu-memory"]()


def test_memory_is_that_of_the_plan(tmp_path):
    write_config(tmp_path, QWEN["7b"] | {"architectures": ["Qwen2ForCausalLM"]})
    command = (WORKFLOW, "trainer.n_gpus_per_node=8", f"model_path={tmp_path}")
    large = run(*command, "--gpu-gb", "80")
    assert large.code == 0 and "gpu-memory  main on 8 GPUs: fits: " in large.out
    small = run(*command, "--gpu-gb", "8")
    assert small.code == 1 and "FAIL  gpu-memory" in small.out and "does not fit" in small.out
