"""`verl-dag serve` as a process, and an evaluation against it: by messages, by token ids, and through faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.app.test_cli_eval_api import evaluate, task
from tests.dialogues import byte_tokenizer
from tests.remote.openai_server import OpenAIServer, scattered

__all__ = ["task"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with a tokenizer of bytes, so that every text can be encoded."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder = tmp_path_factory.mktemp("byte_model")
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
    )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config.from_pretrained(tiny_model, vocab_size=len(tokenizer), max_position_embeddings=512, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(*arguments: str, python: object = sys.executable, **options) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run `verl-dag serve`; yields its URL and the process, which is terminated at the end."""
    command = [str(python), "-m", "recipe.dag.cli", "serve", *arguments, "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **options)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://")
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def options(zygote) -> dict[str, object]:
    return {"python": zygote.python, "stderr": subprocess.DEVNULL}


@pytest.fixture(scope="module")
def served(model, options) -> Iterator[str]:
    """The URL of a server that tests do not end."""
    with serving(str(model), "--model-name", "test", **options) as (url, _):
        yield url


def texts(folder: Path) -> dict[tuple[str, int], list[str]]:
    """The texts of each episode in the log."""
    lines = map(json.loads, (folder / "episodes.jsonl").read_text().splitlines())
    return {(line["uid"], line["index"]): [call["text"] for call in line["calls"]] for line in lines}


@pytest.mark.slow
def test_an_evaluation_gives_the_same_texts_by_messages_by_ids_and_through_faults(served, model, task, zygote):
    workflow = (task / "w.yaml").read_text().replace(
        "tools: [code_interpreter], tool_loop: {max_generations: 3}", "sampling: {max_tokens: 24, top_p: 0.95}"
    )  # fmt: skip
    (task / "w.yaml").write_text(workflow)
    runs = {"plain": evaluate(task, served, "-n", "4", output="plain", python=zygote.python)}
    runs["ids"] = evaluate(task, served, "-n", "4", "--tokenizer", str(model), output="ids")
    shares = {"drop": 0.05, "429": 0.05, "500": 0.05}
    with OpenAIServer(upstream=served, faults=scattered(shares, seed=2)) as proxy:
        limit = ["--max-concurrent", "3"]
        runs["faults"] = evaluate(task, proxy.url, "-n", "4", *limit, output="faults", python=zygote.python)
    assert {name: done.returncode for name, done in runs.items()} == dict.fromkeys(runs, 0), runs
    assert all("32 episodes, 0 errors" in done.stdout for done in runs.values())
    assert not {"ray", "verl", "sglang"} & set(runs["ids"].stdout.splitlines()[-1].split())
    plain = texts(task / "plain")
    assert len(plain) == 32 and len({str(text) for text in plain.values()}) > 16
    assert texts(task / "ids") == texts(task / "faults") == plain
    assert len(proxy.requests) > 32


@pytest.mark.slow
def test_serve_prints_its_url_and_ends_at_a_signal(model, options):
    with serving(str(model), "--model-name", "test", **options) as (url, process):
        with urllib.request.urlopen(f"{url}/models", timeout=300) as answer:
            assert json.load(answer)["data"][0]["id"] == "test"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def test_a_served_script_answers_until_a_signal(tmp_path):
    (tmp_path / "judge.py").write_text("def judge(messages):\n    return f'{len(messages)} messages'\n")
    with serving("--script", "judge.py:judge", cwd=tmp_path) as (url, process):
        body = {"model": "judge", "messages": [{"role": "user", "content": "hi"}]}
        with urllib.request.urlopen(f"{url}/chat/completions", json.dumps(body).encode(), timeout=300) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "1 messages"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
