"""What a prefix cache saves of a workflow's prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipe.dag.app import cli
from recipe.dag.app.inspection import predict_reuse
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.report.reuse import lines_of, reuse_by_node

ROOT = Path(__file__).resolve().parents[2]
ROLE = list(range(100, 110))


@pytest.fixture
def problems(make_call, make_episode):
    """Two problems of two episodes: `ask` reads its role and the problem; `check` its own role, the problem, and what
    `ask` said, which differs; `other` has a policy of its own and reads what `ask` reads."""

    def episode(problem: int, index: int):
        text, said = [problem] * 20, [50 + problem * 2 + index] * 10
        prompts = {"ask": ROLE + text, "check": [7] * 10 + text + said, "other": ROLE + text}
        calls = [
            make_call(node, prompt_ids=ids, response_ids=said, policy="second" if node == "other" else "main")
            for node, ids in prompts.items()
        ]
        return make_episode(str(problem), index, calls=calls)

    return [[episode(problem, index) for index in range(2)] for problem in range(2)]


def test_a_prompt_reuses_the_longest_prefix_that_its_policy_has_read(problems):
    ask, check, other = reuse_by_node(problems, n=4)
    assert (ask.tokens, ask.episode, ask.siblings, ask.others) == (30, 0, 1, pytest.approx(10 / 30))
    assert (check.episode, check.siblings, check.others) == (0, 30 / 40, 10 / 40)
    assert (other.policy, other.episode, other.siblings) == ("second", 0, 1)
    assert ask.hit == pytest.approx((10 / 30 + 3) / 4), "the first of four episodes finds its role alone"
    assert check.hit == pytest.approx((10 / 40 + 3 * 30 / 40) / 4)


def test_a_prompt_that_continues_an_earlier_call_with_its_answer_reuses_all_of_it(problems, make_call):
    for problem in problems:
        for episode in problem:
            first = episode.calls[0]
            ids = [*first.prompt_ids, *first.response_ids, 1, 2]
            episode.calls.append(make_call("go_on", prompt_ids=ids))
    assert reuse_by_node(problems, n=4)[-1].episode == pytest.approx(40 / 42)


def test_a_hint_names_what_is_read_again_and_where_the_prompts_part(problems):
    reuse = reuse_by_node(problems, n=1)
    assert [bool(own.hint) for own in reuse] == [False, True, False]
    hint = "check reads 30 tokens again that ask has read: their prompts differ after 0; put what they share first"
    assert reuse[1].hint.startswith(hint)
    table = list(lines_of(reuse, 1))
    assert table[2].split() == ["ask", "main", "30", "0%", "100%", "33%", "33%"] and table[-1] == reuse[1].hint


def test_a_conversation_of_all_roles_reuses_what_separate_prompts_read_again(monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "somewhere")

    def shares(name: str) -> dict[str, str]:
        lines = predict_reuse(load_workflow(ROOT / "workflows" / f"workflow_{name}.yaml"), None, None)
        return {line.split()[0]: line.split()[3] for line in lines[2:5]}

    separate, shared = shares("retool_ma"), shares("retool_ma_transcript")
    assert separate == {"plan": "0%", "execute": "2%", "verify": "1%"}
    assert all(int(shared[node].rstrip("%")) > 60 for node in ("execute", "verify"))


def test_the_command_plays_the_first_problems_of_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("MODEL_PATH", "somewhere")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"problem": "{text}", "answer": "1"}}\n' for text in ("a" * 3000, "b" * 3000)))
    arguments = ["plan", str(ROOT / "workflows" / "workflow_retool_ma.yaml"), "--reuse", "--data", str(data)]
    several = CliRunner().invoke(cli.app, arguments)
    of_two = CliRunner().invoke(cli.app, [*arguments, "actor_rollout_ref.rollout.n=2"])
    assert (several.exit_code, of_two.exit_code) == (0, 0), several.output + of_two.output
    length, _, _, _, share = next(
        line.split()[2:] for line in several.output.splitlines() if line.startswith("verify ")
    )
    assert int(length) > 3000 and int(share.rstrip("%")) > 70 and "verify reads " not in several.output
    assert "verify reads 3" in of_two.output, "the problem, which one other episode shares"
