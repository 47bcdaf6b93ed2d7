"""CPU time that the rollout's driver needs per call, apart from the model, whose answers are scripted here.

    python examples/bench_executor.py [--episodes 1 16 256 1024 4096] [--rounds 3] [--wait 0.05] [--arms retool_ma ...]

Each arm plays this many episodes concurrently with the same tokenizer (a real byte-level BPE, trained here), a stub
server that answers after `--wait` seconds, and a stub tool that takes as long. Prints, for each number of episodes, the
median over the rounds of CPU microseconds per call (all threads: process_time), and the wall seconds of the last one.
The first line times a fixed Python loop, by which runs can be compared. Episodes have three calls (generations):

retool_ma  workflows/workflow_retool_ma.yaml: planner, executor with its tool, verifier, two reward nodes.
chain      three agents, one after another, default prompts, texts of a few tokens: only the executor's cost.
tool_loop  one agent with a tool loop: two tool calls, then the answer.
verl       verl's AgentLoopWorker with its tool_agent on the texts of tool_loop; it also pads and makes tensors.
verifiers  verifiers' ToolEnv on the same texts; it never sees tokens.       (extra `bench`, skipped if missing)
langgraph  a StateGraph of three nodes that pass short texts; no tokens.     (extra `bench`, skipped if missing)
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import io
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.batch import run_batch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.record import Generation, ToolResult

CALLS = 3
ROOT = Path(__file__).parents[1]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
SENTENCE = "a farmer sells apples and pears at the market each morning while his sister counts coins in three jars"
WORDS = tuple(SENTENCE.split())
WORDS_LONG = 30  # with these, the prompts of retool_ma have about 450 tokens
THOUGHT = "First we read the problem again and write down what is known, then we add the numbers one by one. "
SHORT = """\
dag_id: chain
agents: [{name: a, policy: main}, {name: b, policy: main}, {name: c, policy: main}]
policies: {main: {model: {path: none}, frozen: true}}
nodes:
  - {id: a, agent: a}
  - {id: b, agent: b, after: a}
  - {id: c, agent: c, after: b}
"""
TOOL_LOOP = """\
dag_id: tool_loop
agents:
  - name: solver
    policy: main
    tools: [code_interpreter]
    tool_loop: {max_generations: 3}
    sampling: {max_tokens: 512}
policies: {main: {model: {path: none}, frozen: true}}
nodes:
  - {id: solve, agent: solver}
"""

Play = Callable[[int], Coroutine[Any, Any, Any]]  # plays this many episodes concurrently


def train_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level BPE with Qwen2's pre-tokenizer, trained on the recipe's sources."""
    texts = [path.read_text() for path in sorted((ROOT / "recipe" / "retool_ma").rglob("*.py"))]
    bpe = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = Qwen2Tokenizer(tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def problem(number: int, words: int) -> str:
    """Return a text of `words` words and as many numbers; each `number` has a different one."""
    return " ".join(f"{WORDS[index % len(WORDS)]} {index}" for index in range(number, number + words))


class StubServer:
    """Answers with the agent's text, or, if `answers` is a list, with its texts in turn."""

    def __init__(self, tokenizer: Any, answers: dict[str, str] | list[str], wait: float):
        self.wait, self.calls, self.tokens = wait, 0, [0, 0]
        named = answers if isinstance(answers, dict) else dict(enumerate(answers))
        self._answers = {}
        for name, text in named.items():
            ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
            self._answers[name] = ids, [-0.125] * len(ids)
        self._at: dict[str, int] = {}

    def answer(self, request_id: str, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        key: Any = request_id.rpartition("-")[2]
        if key not in self._answers:
            key = self._at.get(request_id, 0)
            self._at[request_id] = (key + 1) % len(self._answers)
        ids, log_probs = self._answers[key]
        self.calls += 1
        self.tokens[0] += len(prompt_ids)
        self.tokens[1] += len(ids)
        return list(ids), list(log_probs)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        if self.wait:
            await asyncio.sleep(self.wait)
        return Generation(*self.answer(request_id, prompt_ids), "stop")


class StubTool:
    name = "code_interpreter"
    _arguments = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    schema = {
        "type": "function",
        "function": {"name": name, "description": "Run Python code.", "parameters": _arguments},
    }

    def __init__(self, wait: float):
        self.wait = wait

    async def execute(self, arguments: dict[str, Any], state: dict[str, Any]) -> ToolResult:
        if self.wait:
            await asyncio.sleep(self.wait)
        return ToolResult(self.name, arguments, "success", "42", stdout="42\n", return_code=0)

    async def close(self) -> None: ...


def code_interpreter_call() -> str:
    return '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'


def long_answers() -> dict[str, str]:
    plan = '{"reasoning": "' + THOUGHT * 4 + '", "code_plan": "' + THOUGHT * 2 + '", "expected_output": "42"}'
    code = "```python\n" + "total = 6 * 7  # the price of six apples and seven pears\n" * 8 + "print(total)\n```"
    return {"planner": plan, "executor": code, "verifier": THOUGHT * 6 + "\nFINAL ANSWER: \\boxed{42}"}


def loop_answers() -> list[str]:
    return [THOUGHT * 4 + code_interpreter_call(), THOUGHT * 4 + code_interpreter_call(), THOUGHT * 6 + "\\boxed{42}"]


def play_ours(workflow: str, tokenizer: Any, answers: Any, words: int, wait: float) -> tuple[Play, StubServer]:
    server, tool = StubServer(tokenizer, answers, wait), StubTool(wait)
    flow = load_workflow(workflow)
    runner = EpisodeRunner(flow, {"main": PolicyEndpoint(server, tokenizer, 8192)}, {tool.name: tool}, seed=0)

    async def play(episodes: int) -> None:
        group, common = min(8, episodes), {"ground_truth": "42", "data_source": "bench"}
        prompts = [[{"role": "user", "content": problem(number, words)}] for number in range(episodes // group)]
        samples = [({"prompt": prompt, **common}, f"u{number}") for number, prompt in enumerate(prompts)]
        finished = await run_batch(runner, samples, group, step=0, max_in_flight=episodes)
        assert all(episode.fault is None for episode in finished), finished[0].fault

    return play, server


def play_retool_ma(tokenizer: Any, wait: float, folder: Path) -> tuple[Play, StubServer]:
    os.environ.setdefault("MODEL_PATH", "none")
    return play_ours(str(ROOT / "workflows/workflow_retool_ma.yaml"), tokenizer, long_answers(), WORDS_LONG, wait)


def play_chain(tokenizer: Any, wait: float, folder: Path) -> tuple[Play, StubServer]:
    (path := folder / "chain.yaml").write_text(SHORT)
    return play_ours(str(path), tokenizer, {"a": "one", "b": "two", "c": "three"}, 2, wait)


def play_tool_loop(tokenizer: Any, wait: float, folder: Path) -> tuple[Play, StubServer]:
    (path := folder / "tool_loop.yaml").write_text(TOOL_LOOP)
    return play_ours(str(path), tokenizer, loop_answers(), 45, wait)


def play_verl(tokenizer: Any, wait: float, folder: Path) -> tuple[Play, StubServer]:
    import numpy as np
    import verl
    from hydra import compose, initialize_config_dir
    from transformers import Qwen2Config
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.workers.rollout.replica import TokenOutput

    tokenizer.save_pretrained(folder)
    Qwen2Config(vocab_size=len(tokenizer), architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    (folder / "tools.py").write_text(VERL_TOOL.format(wait=wait))
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}",
                f"{rollout}.name=vllm",
                f"{rollout}.prompt_length=1024",
                f"{rollout}.response_length=1024",
                f"{rollout}.calculate_log_probs=true",
                f"{rollout}.multi_turn.enable=true",
                f"{rollout}.multi_turn.max_assistant_turns={CALLS}",
                f"{rollout}.multi_turn.function_tool_path={folder}/tools.py",
            ],
        )
    server = StubServer(tokenizer, loop_answers(), wait)

    class Client:
        async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
            if wait:
                await asyncio.sleep(wait)
            ids, log_probs = server.answer(request_id, prompt_ids)
            return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={})

    client: Any = Client()  # has the one method of verl's LLMServerClient that the worker calls
    worker = AgentLoopWorker(config, client)

    async def play(episodes: int) -> None:
        prompts = np.empty(episodes, dtype=object)
        prompts[:] = [[{"role": "user", "content": problem(number // 8, WORDS_LONG)}] for number in range(episodes)]
        names = np.array(["tool_agent"] * episodes, dtype=object)
        batch = DataProto.from_dict(non_tensors={"raw_prompt": prompts, "agent_name": names})
        finished = await worker.generate_sequences(batch)
        assert len(finished) == episodes

    return play, server


VERL_TOOL = '''
import asyncio
from verl.tools.function_tool import function_tool


@function_tool
async def code_interpreter(code: str) -> str:
    """Run Python code.

    Args:
        code: The program.
    """
    await asyncio.sleep({wait})
    return "42"
'''


def play_verifiers(tokenizer: Any, wait: float, folder: Path) -> tuple[Play, StubServer]:
    import verifiers
    from datasets import Dataset
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion
    from verifiers.clients import OpenAIChatCompletionsClient

    texts, server = loop_answers(), StubServer(tokenizer, loop_answers(), wait)

    async def code_interpreter(code: str) -> str:
        """Run Python code. Args: code: The program."""
        await asyncio.sleep(wait)
        return "42"

    openai = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:1")

    async def create(*, messages: list[dict], **_: Any) -> ChatCompletion:
        await asyncio.sleep(wait)
        turn = sum(message["role"] == "assistant" for message in messages)
        server.calls += 1
        call = {"name": "code_interpreter", "arguments": '{"code": "print(6 * 7)"}'}
        message: dict[str, Any] = {"role": "assistant", "content": texts[turn].partition("<tool_call>")[0]}
        if turn < CALLS - 1:
            message["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": call}]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if turn < CALLS - 1 else "stop"}
        return ChatCompletion(id="1", created=0, model="stub", object="chat.completion", choices=[choice])

    openai.chat.completions.create = create
    client = OpenAIChatCompletionsClient(openai)

    rows = [{"question": problem(number, WORDS_LONG), "answer": "42"} for number in range(512)]
    environment = verifiers.ToolEnv(tools=[code_interpreter], max_turns=CALLS, dataset=Dataset.from_list(rows))

    async def play(episodes: int) -> None:
        inputs = environment.get_dataset(n=max(1, episodes // 8)).repeat(min(8, episodes)).to_list()
        await environment.generate(inputs, client, "stub", max_concurrent=-1)

    return play, server


def play_langgraph(tokenizer: Any, wait: float, folder: Path) -> tuple[Play, StubServer]:
    from typing import TypedDict

    from langgraph.graph import END, START, StateGraph

    server = StubServer(tokenizer, {"a": "one", "b": "two", "c": "three"}, wait)

    class State(TypedDict, total=False):
        problem: str
        a: str
        b: str
        c: str

    def node(name: str) -> Callable[[dict], Awaitable[dict]]:
        async def run(state: dict) -> dict:
            if wait:
                await asyncio.sleep(wait)
            server.answer(f"u-0-{name}", [])
            return {name: f"{name} after {len(state)}"}

        return run

    graph = StateGraph(State)
    for name in "abc":
        graph.add_node(f"node_{name}", node(name))
    for edge in ((START, "node_a"), ("node_a", "node_b"), ("node_b", "node_c"), ("node_c", END)):
        graph.add_edge(*edge)
    compiled = graph.compile()

    async def play(episodes: int) -> None:
        await asyncio.gather(*(compiled.ainvoke({"problem": problem(number, 2)}) for number in range(episodes)))

    return play, server


ARMS: dict[str, tuple[Callable[..., tuple[Play, StubServer]], str]] = {
    "retool_ma": (play_retool_ma, "recipe"),
    "chain": (play_chain, "recipe"),
    "tool_loop": (play_tool_loop, "recipe"),
    "verl": (play_verl, "verl"),
    "verifiers": (play_verifiers, "verifiers"),
    "langgraph": (play_langgraph, "langgraph"),
}
"""Name -> (constructor, the package that it needs)."""


def calibrate() -> float:
    """Return the CPU milliseconds of a million additions, the best of five runs."""

    def once() -> float:
        started, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        return time.process_time() - started

    return min(once() for _ in range(5)) * 1e3


def measure(play: Play, episodes: int, rounds: int) -> tuple[float, float]:
    """Return the median CPU microseconds per call, and the median wall seconds."""
    cpu, wall = [], []
    for _ in range(rounds):
        gc.collect()
        started, clock = time.process_time(), time.perf_counter()
        asyncio.run(play(episodes))
        cpu.append((time.process_time() - started) / (episodes * CALLS) * 1e6)
        wall.append(time.perf_counter() - clock)
    return statistics.median(cpu), statistics.median(wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 16, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that every generation and tool call takes")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = train_tokenizer()
    print(f"a million additions: {calibrate():.0f} ms; every generation and tool call waits {args.wait:g} s")
    print(f"{'us CPU/call':12}" + "".join(f"{count:>8}" for count in args.episodes) + "  tokens a call     wall")
    for name in args.arms:
        make, package = ARMS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name:12} not installed (pip install 'verl-dag[bench]')")
            continue
        with tempfile.TemporaryDirectory() as folder:
            with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):  # other libraries' progress bars
                play, server = make(tokenizer, args.wait, Path(folder))
                asyncio.run(play(1))  # warm up: imports, templates and caches
                server.calls, server.tokens = 0, [0, 0]
                results = [measure(play, count, args.rounds) for count in args.episodes]
        prompt, response = (round(count / server.calls) for count in server.tokens)
        costs = "".join(f"{cpu:8.0f}" for cpu, _ in results)
        print(f"{name:12}{costs}  {prompt:>6} + {response:<6} {results[-1][1]:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
