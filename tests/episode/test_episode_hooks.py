from __future__ import annotations

import asyncio
import copy

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.hooks import default_prompt, load_hooks
from recipe.dag.types.context import Context
from recipe.dag.types.record import Call

IMPORT = "from recipe.dag.types.context import Output\n"


def solo(world, code: str, *, ref: str = "hooks.py", group: int = 0, on_user_error: str = "fail", **keys):
    nodes = [{"id": "solve", "hooks": ref, **keys}]
    return world.workflow(nodes, files={"hooks.py": code}, episode={"on_user_error": on_user_error})


def test_messages_are_templated_with_the_agents_own_arguments(world):
    code = """
async def pre_process(tokenizer, prompt_ids, obs, context):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": context.problem}]
"""
    flow = world.workflow(
        [{"id": "a", "hooks": "m.py"}],
        agents=[{"chat_template_kwargs": {"prefix": "<think>"}}],
        files={"m.py": code},
    )
    call = world.play(flow).calls[0]
    assert call.prompt_text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n<think>"
    )


def test_an_output_takes_the_call_out_of_training(world):
    code = IMPORT + "def post_process(t, p, r):\n    return Output(parsed={'ok': False}, train=False)"
    call = world.play(solo(world, code)).calls[0]
    assert (call.train, call.parsed) == (False, {"ok": False})


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        ("def pre_process(t, p, o):\n    raise KeyError('x')", "pre_process", "KeyError: 'x'"),
        (
            "def pre_process(t, p, o):\n    return 'text'",
            "pre_process",
            "returned str 'text', not token ids or messages",
        ),
        ("def pre_process(t, p, o):\n    return []", "pre_process", "returned list []"),
        ("def pre_process(t, p, o):\n    return [1, -2]", "pre_process", "returned list"),
        ("async def pre_process(t, p, o):\n    return None", "pre_process", "returned NoneType"),
        ("def post_process(t, p, r):\n    return 1 / 0", "post_process", "ZeroDivisionError"),
        ("def post_process(t, p, r):\n    return 3.5", "post_process", "returned float 3.5"),
        ("def post_process(t, p, r):\n    raise StopIteration", "post_process", "StopIteration"),
        (
            IMPORT + "def post_process(t, p, r):\n    return Output(parsed={'s': {1}})",
            "post_process",
            "parsed is not JSON",
        ),
    ],
)
def test_a_broken_hook_is_a_fault_that_names_it(world, code, function, message):
    episode = world.play(solo(world, code, on_user_error="mask"))
    assert episode.fault["boundary"] == "hook" and not episode.fault["infra"]
    assert episode.fault["where"] == f"hooks.py:{function}"
    assert message in episode.fault["message"]
    assert episode.attempts == 1 and episode.faults == [episode.fault]


def test_a_template_that_fails_on_a_hooks_messages_is_a_hook_fault(world):
    code = "def pre_process(t, p, o):\n    return [{'role': 'user'}]"
    episode = world.play(solo(world, code, on_user_error="mask"))
    assert episode.fault["boundary"] == "hook" and "KeyError: 'content'" in episode.fault["message"]


DERIVED = "from recipe.dag import Agent\nclass A(Agent):\n"
AGENT = """
from recipe.dag import Agent, Output

class Solver(Agent):
    def prompt(self, context, *, word="please"):
        return [{"role": "user", "content": f"{context.problem}, {word}"}]

    async def parse(self, context, *, end="!"):
        return Output(text=context.call.text + end, parsed={"node": context.node})
"""


def test_an_agent_reads_its_context_and_nothing_else(world):
    flow = solo(world, AGENT, ref="hooks.py:Solver", prompt_options={"word": "now"})
    (call,) = world.play(flow, world.Client(lambda *_: "42")).calls
    assert "user\nquestion, now<|im_end|>" in call.prompt_text
    assert (call.text, call.completion, call.parsed) == ("42!", "42", {"node": "solve"})


@pytest.mark.parametrize(
    ("code", "ref"),
    [
        ("def prompt(context, word='please'): return [{'role': 'user', 'content': word}]", "hooks.py"),
        ("def parse(context): return None", "hooks.py"),
        ("def parse(context): return 'said: ' + context.call.text", "hooks.py"),
        (f"{DERIVED}    def parse(self, context): return 'said: 42'", "hooks.py:A"),
    ],
)
def test_either_function_of_an_agent_may_be_missing_and_a_file_will_do(world, code, ref):
    (call,) = world.play(solo(world, code, ref=ref), world.Client(lambda *_: "42")).calls
    assert ("please" if "def prompt" in code else "question") in call.prompt_text
    assert call.text == ("said: 42" if "said" in code else "42")


def test_agents_own_parse_changes_nothing(world):
    code = f"{DERIVED}    def parse(self, context): return super().parse(context)"
    (call,) = world.play(solo(world, code, ref="hooks.py:A"), world.Client(lambda *_: "42")).calls
    assert call.text == "42"


def test_agents_own_prompt_says_what_to_do(world):
    code = f"{DERIVED}    def prompt(self, context): return super().prompt(context)"
    with pytest.raises(UserError, match="A: Agent.prompt has no messages to return; build them from `context`"):
        world.play(solo(world, code, ref="hooks.py:A"))


def test_what_parse_may_not_return_is_a_fault_that_names_it(world):
    code = "def parse(context): return [1, 2]"
    with pytest.raises(UserError, match=r"in hooks.py:parse: returned list \[1, 2\], not a str, an Output or None"):
        world.play(solo(world, code))


HALVES = """
class A:
    def prompt(self, context): ...
    def post_process(self, tokenizer, prompt_ids, response_ids): ...
class B:
    def pre_process(self, tokenizer, prompt_ids, obs): ...
    def parse(self, context): ...
"""


@pytest.mark.parametrize(
    ("code", "ref", "message"),
    [
        ("x = 1", "hooks.py", "neither prompt nor parse"),
        ("pre_process = 5", "hooks.py", "hooks.py: pre_process is int 5, not a function"),
        ("prompt = 'text'", "hooks.py", "hooks.py: prompt is str 'text', not a function"),
        (HALVES, "hooks.py:A", "the class defines prompt and post_process; write prompt and parse"),
        (HALVES, "hooks.py:B", "the class defines parse and pre_process; write prompt and parse"),
        (f"{DERIVED}    pass", "hooks.py:A", "the class defines neither prompt nor parse"),
        ("class A:\n    def __init__(self, n): ...", "hooks.py:A", "takes no arguments"),
        ("x = 1", "hooks.py:B", "B"),
    ],
)
def test_hooks_that_cannot_be_loaded_are_user_errors(world, code, ref, message):
    flow = solo(world, code, ref=ref)
    with pytest.raises(UserError, match=message):
        load_hooks(flow.nodes[0], flow)


def test_a_hook_calls_the_tools_of_its_agent(world):
    code = """
async def post_process(tokenizer, prompt_ids, response_ids, context):
    result = await context.call_tool("calc", code=context.call.text, name="n")
    return result.text
"""
    flow = world.workflow(
        [{"id": "a", "hooks": "h.py"}],
        agents=[{"tools": ["calc"]}],
        files={"h.py": code},
    )
    tool = world.Tool("calc", lambda arguments, state: f"ran {arguments['code']}")
    call = world.play(flow, tools=[tool]).calls[0]
    assert call.text == "ran ok"
    assert [(r.name, r.arguments, r.status) for r in call.tool_results] == [
        ("calc", {"code": "ok", "name": "n"}, "success")
    ]


def test_a_tool_that_the_agent_does_not_declare_is_a_hook_fault(world):
    code = "async def post_process(t, p, r, context):\n    await context.call_tool('calc')"
    flow = solo(world, code, on_user_error="mask")
    episode = world.play(flow, tools=[world.Tool("calc", lambda a, s: "x")])
    assert episode.fault["boundary"] == "hook" and "agent0 does not declare" in episode.fault["message"]


def test_a_hook_that_changes_its_sample_changes_no_other_episode(world):
    code = """
def pre_process(tokenizer, prompt_ids, obs, context):
    context.sample["prompt"][0]["content"] += "!"
    return context.sample["prompt"]
"""
    sample = world.sample("q")

    async def main():
        made = world.runner(solo(world, code))
        return [await made.run(sample, "u", index, step=0) for index in range(2)]

    assert ["q!<" in episode.calls[0].prompt_text for episode in asyncio.run(main())] == [True, True]
    assert sample == world.sample("q")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "2+2?\n\nagent0:\nfour"}]),
        (
            [{"role": "system", "content": "be brief"}],
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": "agent0:\nfour"}],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "2+2?"}, {"type": "text", "text": "\n\nagent0:\nfour"}],
                }
            ],
        ),
    ],
)
def test_the_default_prompt_alternates_as_templates_ask_for(prompt, expected):
    call = Call("plan", "agent0", 0, "main", 0, text="four")
    context = Context(
        sample={"prompt": prompt},
        uid="u",
        episode=0,
        turn=0,
        max_turns=1,
        agent="agent1",
        node="solve",
        upstream={"plan": call},
        history=[],
        obs=None,
        validate=False,
        call_tool=None,
    )
    before = copy.deepcopy(prompt)
    assert default_prompt(context, ("plan",)) == expected and prompt == before
