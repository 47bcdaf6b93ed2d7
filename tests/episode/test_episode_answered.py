r"""Which episodes have answered, played whole and graded: an answer is what the format asks for, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from recipe.dag.reward.outcome import final_answer, outcome_reward
from recipe.dag.types.record import Call, Episode

LOOP = "```python\nprint(17)\n```"
HERMES = '<tool_call>{"name": "python", "arguments": {"code": "17"}}</tool_call>'


def graded(episode: Episode) -> float:
    episode.sample["ground_truth"] = "17"
    asyncio.run(outcome_reward(episode, agent="agent0"))
    return episode.outcome


def solver(world, *texts: str, agent: dict | None = None, files: dict | None = None, **keys):
    """An episode of one agent that says `texts`, one after the other; its tool prints a boxed 17."""
    client = world.Client(lambda *_: texts[min(len(client.requests), len(texts)) - 1])
    node = {"id": "solve", **({"hooks": "own.py"} if files else {})}
    flow = world.workflow([node], agents=[{"tools": ["python"], **(agent or {})}], files=files)
    return world.play(flow, client, [world.Tool("python", lambda *_: "17 \\boxed{17}")], **keys)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("fenced", LOOP),
        ("fenced", f"It is \\boxed{{17}}.\n{LOOP}"),
        ("hermes", HERMES),
        ("hermes", f"It is \\boxed{{17}}. {HERMES}"),
    ],
)
def test_a_loop_of_code_that_never_answers_earns_nothing(world, form, text):
    episode = solver(world, text, agent={"tool_loop": {"format": form, "max_generations": 3}})
    call = episode.calls[0]
    assert (call.stop_reason, call.ended_in_tool_call, len(call.tool_results)) == ("max_generations", True, 2)
    assert graded(episode) == 0.0


def test_a_loop_that_answers_after_its_code_earns_its_reward(world):
    episode = solver(world, LOOP, r"\boxed{17}", agent={"tool_loop": {"format": "fenced", "max_generations": 3}})
    assert not episode.calls[0].ended_in_tool_call and graded(episode) == 1.0


def test_a_call_whose_results_did_not_fit_has_not_answered(world):
    loop = {"tool_loop": {"format": "fenced"}}
    episode = solver(world, f"\\boxed{{17}}\n{LOOP}", agent=loop, max_model_len=160)
    assert (episode.calls[0].stop_reason, episode.calls[0].ended_in_tool_call) == ("length", True)
    assert graded(episode) == 0.0


@pytest.mark.parametrize(("text", "outcome"), [("then 17 and on", 0.0), (r"so \boxed{17} and on", 1.0), ("17", 0.0)])
def test_a_number_in_a_text_that_was_cut_off_is_not_an_answer(world, text, outcome):
    episode = solver(world, text, agent={"sampling": {"max_tokens": len(text)}})
    assert episode.calls[0].stop_reason == "length" and graded(episode) == outcome


def test_what_a_tool_printed_is_never_graded(world):
    code = """
from recipe.dag.types.context import Output

async def post_process(tokenizer, prompt_ids, response_ids, *, context):
    result = await context.call_tool("python", code="17")
    return Output(text=result.text)
"""
    episode = solver(world, "let it run", files={"own.py": code})
    assert episode.calls[0].text == r"17 \boxed{17}" and episode.calls[0].completion == "let it run"
    assert graded(episode) == 0.0


def test_an_env_is_not_given_a_tool_call_as_an_action(world):
    code = """
class Env:
    def step(self, actions, ground_truth):
        return actions[0], 0.0, True
"""
    node = {"id": "solve", "env": "env.py:Env", "sees_env": True}
    seen = {}
    for name, text, prefix in (("call", LOOP, ""), ("thought", r"\boxed{17}", "<think>"), ("answer", "ok", "")):
        agent = {"tools": ["python"], "tool_loop": {"format": "fenced", "max_generations": 1}}
        agent["chat_template_kwargs"] = {"prefix": prefix}
        watcher = {"id": "watch", "agent": "agent1", "after": ["solve"], "sees_env": True}
        flow = world.workflow([node, watcher], agents=[agent, {}], files={"env.py": code})
        client = world.Client(lambda *_, text=text: text)
        seen[name] = world.play(flow, client, [world.Tool("python", lambda *_: "")]).calls[-1].observation
    assert seen == {"call": "", "thought": "", "answer": "ok"}


def test_a_thought_that_the_prompt_opened_holds_neither_calls_nor_answers(world):
    thinking = {"chat_template_kwargs": {"prefix": "<think>\n"}, "tool_loop": {"format": "fenced"}}
    quiet = solver(world, LOOP + r" \boxed{17}", agent=thinking)
    assert quiet.calls[0].tool_results == [] and graded(quiet) == 0.0
    closed = solver(world, f"{LOOP}</think>\n{LOOP}", r"hm</think>\boxed{17}", agent=thinking)
    assert len(closed.calls[0].tool_results) == 1 and graded(closed) == 1.0


def test_the_published_behaviour_can_be_had():
    call = Call("solve", "solver", 0, "main", 0, text="then 12 and", stop_reason="length")
    assert (final_answer(call), final_answer(call, compat=True)) == (None, "12")
