"""What a prefix cache saves of a workflow's prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from recipe.dag.app import cli
from recipe.dag.app.inspection import find_tokenizers, predict_reuse
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
    hint = "check reads 75% of its prompt again, which ask has read: they differ after 0%; put what they share first"
    assert reuse[1].hint.startswith(hint)
    table = list(lines_of(reuse, 1, "tokens"))
    assert table[2].split() == ["ask", "main", "30", "0%", "100%", "33%", "33%"] and table[-1] == reuse[1].hint


def test_a_conversation_of_all_roles_reuses_what_separate_prompts_read_again(monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "somewhere")

    def shares(name: str) -> dict[str, str]:
        lines = predict_reuse(load_workflow(ROOT / "workflows" / f"workflow_{name}.yaml"), None, None)
        return {line.split()[0]: line.split()[3] for line in lines[2:5]}

    separate, shared = shares("retool_ma"), shares("retool_ma_transcript")
    assert separate == {"plan": "0%", "execute": "2%", "verify": "1%"}
    assert all(int(shared[node].rstrip("%")) > 60 for node in ("execute", "verify"))


def test_tokens_are_counted_if_the_tokenizer_is_on_this_machine(monkeypatch, tmp_path):
    workflow = load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml")
    monkeypatch.setenv("MODEL_PATH", "somewhere")
    of_characters = predict_reuse(workflow, None, None)
    words = Tokenizer(models.WordLevel({"?": 0, "<end>": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("MODEL_PATH", str(tmp_path))
    of_words = predict_reuse(workflow, None, None)
    assert "(in characters, since the tokenizer of policy main is not here)" in of_characters[0]
    assert "(in tokens)" in of_words[0]
    lengths = [int(lines[3].split()[2]) for lines in (of_characters, of_words)]
    assert lengths[0] > 3 * lengths[1] > 0


def test_an_api_without_a_tokenizer_gets_none_of_the_current_directory(tmp_path):
    (tmp_path / "own.py").write_text("def score(episode): ...")
    (tmp_path / "w.yaml").write_text(
        """
dag_id: remote
agents: [{name: solver, policy: main}, {name: helper, policy: remote}]
policies: {remote: {api: {base_url: "http://localhost:1/v1", model: m}}, main: {model: {path: m}}}
nodes:
  - {id: help, agent: helper}
  - {id: solve, agent: solver, after: help}
  - {id: score, reward: "own.py:score", after: solve}
"""
    )
    assert find_tokenizers(load_workflow(tmp_path / "w.yaml"))[1].endswith("policy remote has no tokenizer")


def test_what_a_runs_servers_measured_stands_beside_the_prediction(monkeypatch, tmp_path):
    monkeypatch.setenv("MODEL_PATH", "somewhere")
    workflow = load_workflow(ROOT / "workflows" / "workflow_retool_ma.yaml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/rows": 4}\n')
    lines = predict_reuse(workflow, None, None, tmp_path)
    assert lines[2].split()[-1] == "-" and "measured: nothing" in "".join(lines)
    steps = [{"step": step, "node/verify/cached_tokens_share": 0.25 * step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    lines = predict_reuse(workflow, None, None, tmp_path)
    assert [line.split()[-1] for line in lines[1:5]] == ["measured", "-", "-", "38%"]


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
    assert "verify reads 8" in of_two.output, "the problem, which one other episode shares"
