"""Hooks on token ids: what they get, and what becomes of what they return."""

from __future__ import annotations

import asyncio

import pytest

from tests.episode.test_episode_hooks import IMPORT, solo

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
            "id": name,
            "agent": f"agent{group}",
            "after": needs,
            "hooks": "marft.py",
            "prompt_options": {"pre_chat_template": f"{name} reads: $prompt"},
            "parse_options": {"post_chat_template": f"[{name}]"},
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


def test_siirl_envs_obs_becomes_the_transcript(world):
    hooks = """
def pre_process(tokenizer, prompt_ids, obs, **kwargs):
    return prompt_ids
def post_process(tokenizer, prompt_ids, response_ids, **kwargs):
    return prompt_ids + response_ids
"""
    env = """
class E:
    def __init__(self):
        self.turn = 0
    async def step(self, actions, ground_truth):
        self.turn += 1
        return [f"{a} wrong" for a in actions], 0.0, False
"""
    options = {"hooks": "hooks.py", "sees_env": True}
    flow = world.workflow(
        [
            {"id": "a", **options},
            {"id": "b", "agent": "agent1", "after": ["a"], **options, "env": ["env.py:E"]},
        ],
        files={"env.py": env, "hooks.py": hooks},
        episode={"max_turns": 2},
    )
    episode = world.play(flow)
    assert episode.fault is None
    a, b, again, _ = episode.calls
    assert b.prompt_text == a.prompt_text + "ok<|im_end|>"
    assert again.prompt_text == f"{b.text} wrong"


def test_a_judge_reads_the_transcript_of_the_candidate_that_it_judges(world):
    hooks = f"""{IMPORT}
def pre_process(tokenizer, prompt_ids, obs, **kwargs):
    return prompt_ids
def post_process(tokenizer, prompt_ids, response_ids, **kwargs):
    return Output(parsed={{"score": 1.0}}) if kwargs["context"].node == "judge" else prompt_ids + response_ids
"""
    options = {"hooks": "own.py"}
    nodes = [
        {"id": "solve", "candidates": {"k": 2, "by": "judge"}, **options},
        {"id": "judge", "agent": "agent1", "after": ["solve"], **options},
    ]
    client = world.Client(lambda prompt, sampling, request: f"answer {sampling['seed']}")
    episode = world.play(world.workflow(nodes, files={"own.py": hooks}), client)
    candidates = {call.candidate: call for call in episode.all_calls if call.node == "solve"}
    judges = [call for call in episode.all_calls if call.node == "judge"]
    assert len(judges) == 2
    for judge in judges:
        solved = candidates[judge.candidate]
        assert judge.prompt_text == solved.prompt_text + world.text(solved)


def test_a_hook_that_names_context_gets_the_samples_own_ids_at_every_node(world):
    code = """
def pre_process(tokenizer, prompt_ids, obs, *, context=None):
    return prompt_ids
def post_process(tokenizer, prompt_ids, response_ids, *, context=None):
    return prompt_ids + response_ids
"""
    options = {"hooks": "own.py"}
    nodes = [
        {"id": "a", **options},
        {"id": "b", "agent": "agent1", "after": ["a"], **options},
    ]
    a, b = world.play(world.workflow(nodes, files={"own.py": code})).calls
    assert a.prompt_ids == b.prompt_ids
    assert a.prompt_text == "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"


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
    flow = solo(world, code, ref="hooks.py:Solver", parse_options={"a": 1})

    async def main():
        made = world.runner(flow)
        return [await made.run(world.sample(), "u", index, step=0) for index in range(3)]

    assert [episode.calls[0].text for episode in asyncio.run(main())] == ["1 ['a', 'context'] solve"] * 3


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
