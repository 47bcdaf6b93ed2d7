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
    nodes = [{"node_id": "solve", "agent_options": {"process_path": ref, **keys}}]
    return world.workflow(nodes, files={"hooks.py": code}, episode={"on_user_error": on_user_error})


SIIRL = """
from string import Template

def pre_process(tokenizer, prompt_ids, obs, **kwargs):
    text = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    prompt = Template(kwargs["pre_chat_template"]).substitute(prompt=text)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)

def post_process(tokenizer, prompt_ids, response_ids, **kwargs):
    return prompt_ids + tokenizer.encode(kwargs["post_chat_template"]) + response_ids
"""


def test_siirl_hooks_hand_on_a_running_transcript(world):
    nodes = [
        {
            "node_id": name,
            "agent_group": group,
            "dependencies": needs,
            "agent_options": {
                "process_path": "marft.py",
                "pre_process_kwargs": {"pre_chat_template": f"{name} reads: $prompt"},
                "post_process_kwargs": {"post_chat_template": f"[{name}]"},
            },
        }
        for name, group, needs in (("reason", 0, []), ("act", 1, ["reason"]))
    ]
    client = world.Client(lambda prompt, sampling, request: f"answer of {request[-6:]}")
    episode = world.play(world.workflow(nodes, files={"marft.py": SIIRL}), client)
    assert episode.fault is None
    reason, act = episode.calls
    assert "reason reads: user\nquestion" in reason.prompt_text
    assert reason.text.endswith("[reason]answer of agent0")
    assert "act reads: user\nreason reads:" in act.prompt_text and "answer of agent0" in act.prompt_text
    # What is trained on is what was sampled, whatever the hook made of it.
    assert world.text(act) == "answer of agent1<|im_end|>"
    assert act.response_mask == [1] * len(act.response_ids)


def test_a_hook_that_names_context_gets_the_samples_own_ids_at_every_node(world):
    code = """
def pre_process(tokenizer, prompt_ids, obs, *, context=None):
    return prompt_ids
def post_process(tokenizer, prompt_ids, response_ids, *, context=None):
    return prompt_ids + response_ids
"""
    options = {"process_path": "own.py"}
    nodes = [
        {"node_id": "a", "agent_options": options},
        {"node_id": "b", "agent_group": 1, "dependencies": ["a"], "agent_options": options},
    ]
    a, b = world.play(world.workflow(nodes, files={"own.py": code})).calls
    assert a.prompt_ids == b.prompt_ids
    assert a.prompt_text == "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"


def test_messages_are_templated_with_the_agents_own_arguments(world):
    code = """
async def pre_process(tokenizer, prompt_ids, obs, context):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": context.problem}]
"""
    flow = world.workflow(
        [{"node_id": "a", "agent_options": {"process_path": "m.py"}}],
        agents=[{"chat_template_kwargs": {"prefix": "<think>"}}],
        files={"m.py": code},
    )
    call = world.play(flow).calls[0]
    assert call.prompt_text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n<think>"
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return None", "ok"),
        ("return 'mine'", "mine"),
        ("return Output(parsed={'n': 1})", "ok"),
        ("return Output(text='')", ""),
    ],
)
def test_what_post_process_may_return(world, body, text):
    code = f"{IMPORT}async def post_process(tokenizer, p, r, context=None):\n    {body}"
    call = world.play(solo(world, code)).calls[0]
    assert call.text == text
    assert world.text(call) == "ok<|im_end|>"


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


def test_a_class_is_made_once_and_only_hooks_that_take_context_get_it(world):
    code = """
class Solver:
    made = 0
    def __init__(self):
        Solver.made += 1
    def pre_process(self, tokenizer, prompt_ids, obs):
        return prompt_ids
    def post_process(self, tokenizer, prompt_ids, response_ids, **kwargs):
        return f"{Solver.made} {sorted(kwargs)} {kwargs['context'].node}"
"""
    flow = solo(world, code, ref="hooks.py:Solver", post_process_kwargs={"a": 1})

    async def main():
        made = world.runner(flow)
        return [await made.run(world.sample(), "u", index, step=0) for index in range(3)]

    assert [episode.calls[0].text for episode in asyncio.run(main())] == ["1 ['a', 'context'] solve"] * 3


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
    flow = solo(world, AGENT, ref="hooks.py:Solver", pre_process_kwargs={"word": "now"})
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


def test_a_class_in_siirls_form_may_have_a_helper_called_parse(world):
    code = """
class Solver:
    def pre_process(self, tokenizer, prompt_ids, obs):
        return prompt_ids
    def post_process(self, tokenizer, prompt_ids, response_ids):
        return self.parse("helped")
    def parse(self, text):
        return text
"""
    (call,) = world.play(solo(world, code, ref="hooks.py:Solver")).calls
    assert call.text == "helped"


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
        [{"node_id": "a", "agent_options": {"process_path": "h.py"}}],
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


READERS = {
    "by name": "def pre_process(tokenizer, prompt_ids, obs): return prompt_ids",
    "in a comprehension": "def pre_process(tokenizer, ids, obs): return [i for _ in obs or '1' for i in ids]",
    "in a closure": "def pre_process(tokenizer, ids, obs):\n    def inner(): return ids\n    return inner()",
    "with all arguments": "def pre_process(*arguments): return arguments[1]",
    "through locals": "def pre_process(tokenizer, ids, obs): return locals()['ids']",
    "by keyword": "def made(ids): return ids\ndef pre_process(tokenizer, ids, obs): return made(ids=ids)",
    "behind a decorator": (
        "import functools\ndef wrap(f):\n    @functools.wraps(f)\n    def g(*a, **k): return f(*a, **k)\n    return g\n"
        "@wrap\ndef pre_process(tokenizer, ids, obs): return ids"
    ),
    "as a method": "class C:\n    def hook(self, tokenizer, ids, obs): return ids\npre_process = C().hook",
    "as an object": "class C:\n    def __call__(self, tokenizer, ids, obs): return ids\npre_process = C()",
    "as a coroutine": "async def pre_process(tokenizer, ids, obs): return ids",
}


def rendered(world, code: str, monkeypatch) -> tuple[list[int], int]:
    """The ids of the hook's prompt, and how often the template was used."""
    times, render = [], world.Tokenizer.apply_chat_template
    monkeypatch.setattr(
        world.Tokenizer, "apply_chat_template", lambda *a, **keys: [times.append(1), render(*a, **keys)][1]
    )
    episode = world.play(solo(world, code))
    assert episode.fault is None, episode.fault
    return episode.calls[0].prompt_ids, len(times)


@pytest.mark.parametrize("code", READERS.values(), ids=READERS)
def test_a_hook_that_reads_the_samples_ids_gets_them(world, code, monkeypatch):
    ids, times = rendered(world, code, monkeypatch)
    assert world.Tokenizer().decode(ids).startswith("<|im_start|>user\nquestion") and times == 1


@pytest.mark.parametrize(
    "code",
    [
        "def pre_process(tokenizer, prompt_ids, obs): return [{'role': 'user', 'content': 'mine'}]",
        "class Hooks:\n    def pre_process(self, tokenizer, prompt_ids, obs, *, context):\n"
        "        return [{'role': 'user', 'content': 'mine'}]\npre_process = Hooks().pre_process",
    ],
)
def test_nothing_is_rendered_for_a_hook_that_does_not_read_it(world, code, monkeypatch):
    ids, times = rendered(world, code, monkeypatch)
    assert "mine" in world.Tokenizer().decode(ids) and times == 1
