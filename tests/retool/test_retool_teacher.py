"""The teacher of the tiny run: its lessons, and that its transcripts are what the tool loop would have recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tool_loop import requests_in
from recipe.dag.episode.transcript import TranscriptEncoder, plain_messages, plain_tools
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.train.data_script import run
from recipe.dag.types.record import Generation
from recipe.dag.types.tool import Tool
from recipe.retool import teacher as module
from recipe.retool.agent import answer_in
from recipe.retool.teacher import BROKEN_CODE, NO_TOOL, SLIP, TOOL, TOOL_RATE, WORKFLOW, Teacher, main
from recipe.sandbox.launch import LocalSandbox
from recipe.tiny.arithmetic import splits
from recipe.tiny.build import encode
from recipe.tiny.careless import MISREADINGS, RIGHT_READING, right_formula
from recipe.tiny.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
COUNT = 1500


@pytest.fixture(scope="module")
def workflow():
    return load_workflow(WORKFLOW)


@pytest.fixture(scope="module")
def teacher(workflow) -> Teacher:
    return Teacher(workflow, 0)


@pytest.fixture(scope="module")
def dialogues(teacher):
    return [(problem, teacher.transcript(problem)) for problem in teacher.problems(COUNT, 64)]


@pytest.fixture(scope="module")
def lessons(workflow):
    base = Teacher(workflow, 0)
    return [(problem, base.teach(problem)) for problem in base.problems(COUNT, 64)]


@pytest.fixture(scope="module")
def tokenizer(teacher, lessons):
    return build_tokenizer([d for _, lesson in lessons for d in lesson], segments=teacher.segments)


def calls_in(dialogue):
    return [message["tool_calls"][0]["function"] for message in dialogue if message.get("tool_calls")]


def code_of(function) -> str:
    assert function["name"] == TOOL
    return json.loads(function["arguments"])["code"]


def is_broken(dialogue) -> bool:
    return any("SyntaxError" in message["content"] for message in dialogue)


def test_a_transcript_is_a_prompt_then_calls_with_results_then_an_answer(dialogues):
    for problem, dialogue in dialogues:
        roles = [message["role"] for message in dialogue]
        assert roles[:2] == ["system", "user"] and dialogue[1]["content"] == problem.text
        assert roles[2:] == ["assistant", "tool"] * len(calls_in(dialogue)) + ["assistant"]
        assert answer_in(dialogue[-1]["content"]) is not None and len(calls_in(dialogue)) <= 2


def test_outputs_are_what_the_programs_print(dialogues):
    for _, dialogue in dialogues:
        for call, result in zip(dialogue[2:-1:2], dialogue[3::2], strict=True):
            code = code_of(call["tool_calls"][0]["function"])
            try:
                compile(code, "program", "exec")
            except SyntaxError:
                assert result["content"] == module.syntax_error(code.removeprefix("print("))
            else:
                assert result["content"] == f"{eval(code.removeprefix('print'))}\n"


def test_the_teacher_is_careless_at_its_rates(dialogues):
    direct = [not calls_in(dialogue) for _, dialogue in dialogues]
    with_tool = [(problem, dialogue) for problem, dialogue in dialogues if calls_in(dialogue)]
    right = {misread: [] for misread in (False, True)}
    for problem, dialogue in with_tool:
        right[problem.family in MISREADINGS].append(
            code_of(calls_in(dialogue)[-1]) == f"print({right_formula(problem)})"
        )
    broken = [is_broken(dialogue) for _, dialogue in with_tool]
    assert sum(direct) / COUNT == pytest.approx(NO_TOOL, abs=0.03)
    assert sum(right[False]) / len(right[False]) == pytest.approx(1 - SLIP, abs=0.04)
    assert sum(right[True]) / len(right[True]) == pytest.approx(RIGHT_READING * (1 - SLIP), abs=0.05)
    assert sum(broken) / len(broken) == pytest.approx(BROKEN_CODE, abs=0.03)
    solved = [answer_in(dialogue[-1]["content"]) == str(problem.answer) for problem, dialogue in dialogues]
    assert 0.4 < sum(solved) / COUNT < 0.65  # a wrong formula may print the right number


def test_the_base_model_rarely_sees_a_tool_call(lessons):
    calls = [lesson[0].role == "call" for _, lesson in lessons]
    assert sum(calls) / COUNT == pytest.approx(TOOL_RATE, abs=0.03)
    for problem, lesson in lessons:
        assert answer_in(lesson[-1].answer) == str(problem.answer)
        assert [d.role for d in lesson] == (["call", "read"] if lesson[0].role == "call" else ["solve"])


def test_no_problem_of_the_test_split_is_taught(dialogues):
    test = {problem.text for problem in splits(0, COUNT, 64)[1]}
    assert not test & {dialogue[1]["content"] for _, dialogue in dialogues}


def test_the_protocol_is_a_token_per_piece(teacher, tokenizer, dialogues):
    for segment in teacher.segments:
        assert len(tokenizer.encode(segment, add_special_tokens=False)) == 1
    encoder = TranscriptEncoder(tokenizer)
    assert encoder.calls_by_template
    for _, dialogue in dialogues[:300]:
        ids, mask = encoder.encode(plain_messages(dialogue), teacher.tools)
        prompt = mask.index(1)
        assert prompt <= 48 and len(ids) - prompt <= 64  # config/tiny_cpu.yaml


def test_lessons_fit_the_model(lessons, tokenizer):
    assert max(len(encode(tokenizer, d).ids) for _, lesson in lessons[:300] for d in lesson) <= 128


class Replayed:
    """A policy's server that says the assistant's messages of one transcript."""

    def __init__(self, tokenizer, texts):
        self._tokenizer, self._texts = tokenizer, iter(texts)

    async def generate(self, request_id, prompt_ids, sampling):
        text = next(self._texts)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Generation(ids, [-0.5] * len(ids), "stop")


def texts_of(dialogue, tokenizer):
    for message in dialogue:
        if message["role"] == "assistant":
            rendered = tokenizer.apply_chat_template([message], tokenize=False)
            yield rendered.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>")


def test_the_tool_loop_records_the_transcripts_as_they_are(workflow, teacher, tokenizer, dialogues, sandbox_level):
    """The same ids and mask as the SFT trainer's, and the sandbox prints what the teacher wrote."""
    broken = [pair for pair in dialogues if is_broken(pair[1])][:3]
    pairs = [*dialogues[:12], *broken]
    assert broken and any(not calls_in(dialogue) for _, dialogue in dialogues)
    local = LocalSandbox(**sandbox_level)
    asyncio.run(local.start())

    async def play(problem, dialogue):
        client = Replayed(tokenizer, texts_of(dialogue, tokenizer))
        tools: dict[str, Tool] = {
            tool.key: CodeInterpreter(sandbox) for agent in workflow.agents for tool in agent.tools
        }
        runner = EpisodeRunner(workflow, {"main": PolicyEndpoint(client, tokenizer, 512)}, tools, seed=0)
        row = {"prompt": [{"role": "user", "content": problem.text}], "ground_truth": str(problem.answer)}
        return await runner.run(row, "0", 0, step=0)

    async def play_all():
        try:
            return [await play(*pair) for pair in pairs]
        finally:
            await sandbox.close()

    try:
        sandbox = SandboxClient(local.url, token=local.token)
        episodes = asyncio.run(play_all())
    finally:
        local.close()
    encoder = TranscriptEncoder(tokenizer)
    for (problem, dialogue), episode in zip(pairs, episodes, strict=True):
        assert episode.fault is None
        (call,) = episode.calls
        encoded = encoder.encode(plain_messages(dialogue), teacher.tools)
        assert call.prompt_ids + call.response_ids == encoded.ids
        assert [0] * len(call.prompt_ids) + call.response_mask == encoded.mask
        assert [result.text for result in call.tool_results] == [m["content"] for m in dialogue if m["role"] == "tool"]
        answer = answer_in(dialogue[-1]["content"])
        right = answer == str(problem.answer)
        assert (call.parsed["answer"], call.reward, episode.outcome) == (answer, 1.0 if right else -1.0, float(right))


def test_every_call_is_read_by_the_loop(workflow, tokenizer, dialogues):
    loop = workflow.agents[0].tool_loop
    for _, dialogue in dialogues[:300]:
        read = [requests_in(text, loop, (TOOL,)) for text in texts_of(dialogue, tokenizer)]
        assert read[-1] == [] and all(len(requests) == 1 and not requests[0].problem for requests in read[:-1])
        assert [requests[0].arguments["code"] for requests in read[:-1]] == [code_of(f) for f in calls_in(dialogue)]


def test_the_file_has_one_row_per_transcript_and_is_the_same_again(tmp_path, teacher):
    files = [tmp_path / name for name in ("a.parquet", "b.parquet", "c.parquet")]
    for file, seed in zip(files, "001", strict=True):
        main(["--output", str(file), "--size", "40", "--seed", seed])
    rows = pq.read_table(files[0]).to_pylist()
    assert len(rows) == 40 and set(rows[0]) == {"messages", "tools"}
    assert all(plain_tools(row["tools"]) == teacher.tools for row in rows)
    assert any(calls_in(plain_messages(row["messages"])) for row in rows)
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "--size 0: must be 1 or more"),
        (["--workflow", str(ROOT / "workflows" / "workflow_debate.yaml")], "this teacher needs one rollout node"),
        (["--workflow", str(ROOT / "workflows" / "workflow_simpletir.yaml")], "and `tool_loop` hermes"),
        (["--workflow", "none.yaml"], "none.yaml"),
        (["--output", "/proc/none/sft.parquet"], "cannot write"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, message):
    assert run(main, ["--output", str(tmp_path / "sft.parquet"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
