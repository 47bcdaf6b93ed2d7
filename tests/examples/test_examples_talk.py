"""The agents of the talk remember what was said, and their rows are a fraction of what they would be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rows import rows_of
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.types.record import Episode

EXAMPLE = Path(__file__).parents[2] / "examples" / "talk" / "workflow_talk.yaml"
PROBLEM, ANSWER = "p" * 200, "a" * 200 + r"\boxed{8}"


@pytest.fixture
def play(scripted_server, tmp_path):
    """One episode of the example; `memory` of both agents."""

    class Chat(scripted_server):
        def apply_chat_template(self, messages, tokenize=True, return_dict=True, **kwargs):
            text = "".join(f"<{m['role']}>{m['content']}\0" for m in messages) + "<assistant>"
            text = text if kwargs.get("add_generation_prompt") else text.removesuffix("<assistant>")
            return self.encode(text) if tokenize else text

    def play(memory: str) -> Episode:
        file = tmp_path / f"{memory}.yaml"
        file.write_text(EXAMPLE.read_text().replace("memory: chat}", f"memory: {memory}}}"))
        server = Chat(lambda prompt: ANSWER)
        runner = EpisodeRunner(load_workflow(file), {"main": PolicyEndpoint(server, server, 99_999)}, {}, seed=0)
        sample = {"prompt": [{"role": "user", "content": PROBLEM}], "ground_truth": "8"}
        episode = asyncio.run(runner.run(sample, "u", 0, step=0))
        assert episode.fault is None, episode.fault
        return episode

    return play


def computed(episode: Episode) -> int:
    return sum(len(row.prompt_ids) + len(row.response_ids) for row in rows_of([episode]))


def test_each_agent_has_one_row_of_ten_calls_and_both_are_paid(play):
    rows = rows_of([play("chat")])
    shown = [(row.calls[0].agent, len(row.calls), sum(call.reward for call in row.calls)) for row in rows]
    assert shown == [("proposer", 10, 1.0), ("checker", 10, 1.0)]


def test_the_problem_and_every_answer_stand_in_a_prompt_once(play):
    last = play("chat").calls[-1]
    text = str(last.prompt_text() if callable(last.prompt_text) else last.prompt_text)
    assert text.count(PROBLEM) == 1 and text.count("proposer:") == 10 and text.count(ANSWER) == 19


def test_a_talk_that_is_remembered_costs_less_than_one_whose_prompts_are_rendered_anew(play):
    chat, anew = computed(play("chat")), computed(play("none"))
    unmerged = sum(len(call.prompt_ids) + len(call.response_ids) for call in play("chat").calls)
    assert chat < 0.75 * anew and chat < 0.2 * unmerged
