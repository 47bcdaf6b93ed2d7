"""`verl-dag eval` and `doctor` with tools that ask servers: listed once, called, and keys in their headers alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app import cli
from tests.app.test_cli_eval_api import SCORE
from tests.remote.openai_server import OpenAIServer, tool_call
from tests.tools.mcp_server import McpServer, content
from tests.tools.web_server import WebServer

ROOT = Path(__file__).parents[2]
NOTES_KEY, WIKI_KEY = "tk1234567890qwertzuiop", "zz9876543210asdfghjkl"
WORKFLOW = """\
dag_id: asking
agents: [{name: solver, policy: main, tools: [notes, wiki, texts, calculator], tool_loop: {max_generations: 6}}]
policies: {main: {model: {path: m}}}
tools:
  notes: {name: mcp, kwargs: {url: "${oc.env:NOTES_URL}", key_env: NOTES_ACCESS}}
  wiki: {name: search, kwargs: {url: "${oc.env:WIKI_URL}", called: wiki, key_env: WIKI_ACCESS, key_header: X-Key}}
  texts: {name: search, kwargs: {folder: texts, called: texts}}
nodes:
  - {id: solve, agent: solver}
  - {id: pay, reward: "score.py:score", after: solve}
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "w.yaml").write_text(WORKFLOW)
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The word is heron.")
    rows = [{"problem": f"Question {k}?", "answer": "42"} for k in range(2)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("NOTES_ACCESS", NOTES_KEY)
    monkeypatch.setenv("WIKI_ACCESS", WIKI_KEY)
    return tmp_path


@pytest.fixture
def servers(monkeypatch):
    """An MCP server and a search service that repeat the keys that they are sent."""
    documents = [{"document": {"contents": f"Page. {WIKI_KEY}"}}]
    with (
        McpServer(lambda name, arguments: content(f"{arguments['text'].upper()} {NOTES_KEY}"), key=NOTES_KEY) as notes,
        WebServer(lambda request: {"result": [documents]}) as wiki,
    ):
        monkeypatch.setenv("NOTES_URL", notes.url)
        monkeypatch.setenv("WIKI_URL", wiki.url)
        yield notes, wiki


def ask(body: dict) -> object:
    """Call each tool in turn, then answer."""
    calls = [
        ("shout", {"text": "loud"}),
        ("wiki", {"query": "page"}),
        ("texts", {"query": "heron"}),
        ("calculator", {"expression": "6*7"}),
    ]
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    if len(results) == len(calls):
        return results[-1]
    name, arguments = calls[len(results)]
    return tool_call(name, f"c{len(results)}", **arguments)


def test_an_evaluation_calls_all_tools_and_keeps_their_keys(task, servers, zygote):
    notes, wiki = servers
    with OpenAIServer(ask) as model:
        command = [zygote.python, "-m", "recipe.dag.cli", "eval", "w.yaml", "--base-url", model.url]
        command += ["--served-model", "test", "--data", "data.jsonl", "--output", "out"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=task, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "accuracy 1.0000, 2 episodes, 0 errors" in done.stdout
    shown = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert shown == ["shout", "store_text", "wiki", "texts", "calculator"]
    assert notes.methods.count("tools/list") == 1 and notes.methods.count("tools/call") == 2 and not notes.live
    assert len(wiki.requests) == 3 and {request.headers["X-Key"] for request in wiki.requests} == {WIKI_KEY}
    said = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert said == ["LOUD ***", "[1] Page. ***", "[1] a.txt\nThe word is heron.", "42"] or len(said) < 4
    record = json.loads((task / "out" / "run" / "1" / "workflow.json").read_text())
    assert [tool["kwargs"].get("tools") for tool in record["agents"][0]["tools"]][:2] == [["shout"], ["store.text"]]
    written = b"".join(file.read_bytes() for file in task.rglob("*") if file.is_file())
    for key in (NOTES_KEY, WIKI_KEY):
        assert key.encode() not in written and key not in json.dumps(model.requests) + done.stdout + done.stderr


def test_doctor_asks_the_servers_of_tools(task, servers):
    notes, wiki = servers
    runner = CliRunner()
    out = runner.invoke(cli.app, ["doctor", str(task / "w.yaml")]).stdout
    (line,) = [line for line in out.splitlines() if " tools " in line]
    assert line.startswith("ok ") and "passages" not in line
    assert f"{notes.url} lists shout, store.text; {wiki.url} answers; texts: 1 passage" in line
    wiki.kill()
    out = runner.invoke(cli.app, ["doctor", str(task / "w.yaml")])
    assert out.exit_code == 1 and "start the service, or correct `url`" in out.stdout
    assert (
        "none asks a server" in runner.invoke(cli.app, ["doctor", str(ROOT / "workflows/workflow_retool.yaml")]).stdout
    )
