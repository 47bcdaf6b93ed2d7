"""Reasoner and actor: what they are shown, what they hand over, what the episode's outcome is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.tools.sandbox_client import RunResult
from recipe.dag.types.context import Context
from recipe.dag.types.record import Call
from recipe.marft import prompts
from recipe.marft.hooks import Actor, Reasoner
from recipe.marft.prompts import render

ROOT = Path(__file__).parents[2]
FIELDS = {"prompt": r"Let $x = \frac{1}{2}$, ${reasoning} and $5.", "reasoning": "R"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("${prompt}", FIELDS["prompt"]),
        ("${reasoning}${reasoning}", "RR"),
        (r"Put it in \boxed{}. ${reasoning}", r"Put it in \boxed{}. R"),
        ("It costs $5, not $$6$$, ${x}$ $x_{max}$ $prompt $", "It costs $5, not $$6$$, ${x}$ $x_{max}$ $prompt $"),
        ("$${reasoning}$", "$R$"),
        (r"\1 \g<0> %s {0} {prompt}", r"\1 \g<0> %s {0} {prompt}"),
        ("", ""),
    ],
)
def test_render_replaces_known_fields_only(template, expected):
    assert render(template, FIELDS) == expected


@pytest.mark.parametrize("template", ["${promt}", "a ${problem}", "${reasoning} ${answer_1}"])
def test_render_names_a_field_that_is_none(template):
    with pytest.raises(UserError, match="unknown field .*; the fields here are"):
        render(template, FIELDS)


@given(st.text(), st.text())
def test_values_pass_through_untouched(prompt, reasoning):
    assert render("<${prompt}|${reasoning}>", {"prompt": prompt, "reasoning": reasoning}) == f"<{prompt}|{reasoning}>"


def call(node: str, text: str, turn: int = 0) -> Call:
    return Call(node, node, 0, "p", turn, text=text)


def context(
    node: str = "act",
    *,
    turn: int = 0,
    upstream: dict[str, Call] | None = None,
    obs: str | None = None,
    call: Call | None = None,
) -> Context:
    sample = {"prompt": [{"role": "user", "content": r"What is $2^{3}$? It cost $5."}]}
    return Context(sample, "u", 0, turn, 3, node, node, upstream or {}, [], obs, False, None, call)


def contents(agent, context: Context, **options) -> list[str]:
    return [message["content"] for message in agent.prompt(context, **options)]


def test_the_reasoner_sees_the_problem():
    system, user = contents(Reasoner(), context("reason"))
    assert system == prompts.SYSTEMS["math"]
    assert user.startswith("What is $2^{3}$? It cost $5.\n\nWork out")


def test_the_actor_sees_problem_and_steps():
    _, user = contents(Actor(), context(upstream={"reason": call("reason", "2*2*2")}))
    assert "What is $2^{3}$?" in user and "A colleague's steps:\n2*2*2\n\nCarry" in user and "earlier" not in user


def test_code_has_texts_of_its_own():
    assert "```python" in contents(Actor(), context(), task="code")[1]
    assert contents(Reasoner(), context(), task="code")[0] == prompts.SYSTEMS["code"]
    with pytest.raises(
        UserError, match="node 'act': prompt_options.task: 'chess' is unknown; choose one of math, code"
    ):
        contents(Actor(), context(), task="chess")


def test_templates_and_system_can_be_replaced():
    (user,) = contents(
        Actor(),
        context(upstream={"reason": call("reason", "\nSteps: S")}),
        pre_chat_template="${prompt} Box it: \\boxed{}, $$x$$.",
        system="",
    )
    assert user == "What is $2^{3}$? It cost $5.\n\nSteps: S Box it: \\boxed{}, $$x$$."


def test_a_later_turn_shows_the_observation_but_no_steps_of_the_turn_before():
    upstream = {"reason": call("reason", "old", 0), "act": call("act", "old answer", 0)}
    _, user = contents(Reasoner(), context("reason", turn=1, upstream=upstream, obs="old\n\nThis was wrong."))
    assert "An earlier attempt:\nold\n\nThis was wrong." in user and "old answer" not in user
    upstream["reason"] = call("reason", "new", 1)
    _, user = contents(Actor(), context(turn=1, upstream=upstream, obs="old answer\n\nThis was wrong."))
    assert "An earlier attempt:\nold answer\n\nThis was wrong.\n\nA colleague's steps:\nnew\n" in user


def handed_over(agent, text: str, **options):
    return agent.parse(context(call=call("act", text)), **options)


@pytest.mark.parametrize(
    ("text", "out", "parsed"),
    [
        (r"So \boxed{8}.", r"So \boxed{8}.", {"answer": "8"}),
        ("so 8", "so 8", {}),
        (r"<think>\boxed{7}</think>\boxed{8}", r"\boxed{8}", {"answer": "8"}),
        (r"<think>\boxed{7}", "", {}),
    ],
)
def test_what_an_actor_hands_over(text, out, parsed):
    output = handed_over(Actor(), text)
    assert (output.text, output.parsed, output.done) == (out, parsed, False)


def test_post_chat_template_precedes_the_answer():
    assert handed_over(Reasoner(), "2*2*2", post_chat_template="\nSteps ($): ").text == "\nSteps ($): 2*2*2"


@pytest.fixture
def saying(scripted_server):
    """A server that says these, one after the other."""
    return lambda *answers: scripted_server(lambda prompt, left=iter(answers): next(left))


def test_a_whole_episode_of_the_shipped_workflow(saying):
    """Two turns: wrong, told so, right. What was sampled is kept as it was sampled; the reward is the actor's alone."""
    flow = load_workflow(ROOT / "workflows" / "workflow_marft.yaml")
    sides = {"reasoner": saying("2*2", "2*2*2"), "actor": saying(r"\boxed{4}", r"\boxed{8}")}
    endpoints = {name: PolicyEndpoint(side, side, 9999) for name, side in sides.items()}
    runner = EpisodeRunner(flow, endpoints, {}, seed=0)
    sample = {"prompt": [{"role": "user", "content": "What is 2^3?"}], "ground_truth": "8"}
    episode = asyncio.run(runner.run(sample, "u", 0, step=0))
    assert episode.fault is None and (episode.turns, episode.done, episode.outcome) == (2, True, 1.0)
    assert [made.reward for made in episode.calls] == [0.0, 0.0, 0.0, 1.0]
    assert [made.response_ids[-1] for made in episode.calls] == [0] * 4
    second = sides["actor"].prompts[1]
    assert r"An earlier attempt:" in second and r"\boxed{4}" in second and "steps:\n2*2*2\n" in second
    assert not any("8" in prompt for side in sides.values() for prompt in side.prompts)


def test_a_whole_episode_on_programs(saying):
    """The run's sandbox reaches the env; half of the tests pass, then all; no test is ever shown."""
    flow = load_workflow(ROOT / "workflows" / "workflow_marft_code.yaml")
    programs = ["```python\nprint(1)\n```", "```python\nprint(input())\n```"]
    sides = {"reasoner": saying("Print one.", "Print the input."), "actor": saying(*programs)}
    endpoints = {name: PolicyEndpoint(side, side, 9999) for name, side in sides.items()}

    async def run_code(program, *, stdin, **kwargs):
        return RunResult("success", stdin if "input" in program else "1", "", 0, 0.0, 1)

    runner = EpisodeRunner(flow, endpoints, {}, seed=0, sandbox=SimpleNamespace(run_code=run_code))
    truth = json.dumps({"inputs": ["1", "hidden"], "outputs": ["1", "hidden"]})
    sample = {"prompt": [{"role": "user", "content": "Repeat the input."}], "ground_truth": truth}
    episode = asyncio.run(runner.run(sample, "u", 0, step=0))
    assert episode.fault is None and (episode.turns, episode.done, episode.outcome) == (2, True, 1.0)
    assert [made.reward for made in episode.calls] == [0.0, 0.5, 0.0, 1.0]
    assert "passed 1 of 2 tests; 1 gave a wrong result" in sides["actor"].prompts[1]
    assert not any("hidden" in prompt for side in sides.values() for prompt in side.prompts)
