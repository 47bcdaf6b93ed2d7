from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from recipe.dag.episode.rows import rows_of
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.policy.placement import Pool
from recipe.dag.train import kernels, trainer
from recipe.dag.train.centralized_critic import JointHistory
from recipe.dag.train.step import TrainingStep
from recipe.dag.types.record import Call, Episode

WORKFLOW = """\
dag_id: debate
agents: [{name: left, policy: a}, {name: judge, policy: fixed}, {name: right, policy: b}]
policies:
  a: {model: {path: m}, critic: {share: b}}
  b: {model: {path: m}, critic: {}}
  fixed: {model: {path: m}, frozen: true}
algorithm: {estimator: mappo, gamma: 0.5, lam: 0.0, whiten: false}
nodes:
  - {id: l, agent: left}
  - {id: j, agent: judge, after: l}
  - {id: r, agent: right, after: j}
  - {id: reward, reward: score.py:score, after: r}
"""
LETTERS = SimpleNamespace(encode=lambda text, add_special_tokens: list(map(ord, text)))


@pytest.fixture
def load(tmp_path):
    (tmp_path / "score.py").write_text("def score(episode): return {}\n")

    def load(algorithm: str = ""):
        text = WORKFLOW.replace("estimator: mappo", algorithm) if algorithm else WORKFLOW
        (tmp_path / "flow.yaml").write_text(text)
        return load_workflow(tmp_path / "flow.yaml")

    return load


def episode() -> Episode:
    calls = []
    for agent, policy, text, reward in (
        ("left", "a", "four", 1.0),
        ("judge", "fixed", "hm", 2.0),
        ("right", "b", "five", 4.0),
    ):
        calls.append(Call(agent[0], agent, 0, policy, 0, [1, 2], [7, 8], [1, 1], [-1.0, -1.0], text=text))
        calls[-1].reward = reward
    return Episode("u", 0, {"prompt": [{"role": "user", "content": "2 + 2?"}]}, calls)


def reader(limit: int = 200, **options) -> JointHistory:
    one = episode()
    return JointHistory({("u", 0): one}, lambda owner: LETTERS, lambda owner: limit, **{"max_chars": 100, **options})


def text_of(row) -> str:
    return "".join(map(chr, row.prompt_ids))


def test_before_a_call_stands_what_was_said_before_it_and_the_response_is_its_own():
    rows = rows_of([episode()], merge=False)
    first, _, last = [reader()("b", row) for row in rows]
    assert text_of(first) == "2 + 2?\n\n[next] left:"
    assert text_of(last) == "2 + 2?\n\n[turn 0] left:\nfour\n\n[turn 0] judge:\nhm\n\n[next] right:"
    assert last.response_ids == rows[2].response_ids and last.response_mask == rows[2].response_mask
    assert rows[2].prompt_ids == [1, 2]


def test_what_envs_showed_stands_there_too_and_shrinks_like_a_message():
    row, one = rows_of([episode()], merge=False)[0], reader(limit=60, max_chars=50)
    one.episodes["u", 0].calls[0].observation = "o" * 50
    assert (
        text_of(one("b", row))
        == f"2 + 2?\n\n[turn 0] shown to left:\n{'o' * 8}\n[...]\n{'o' * 8}\n\n[next] left:"[-58:]
    )
    assert one.shortened == 1
    one = reader()
    one.episodes["u", 0].calls[0].observation = "a door"
    assert text_of(one("b", row)) == "2 + 2?\n\n[turn 0] shown to left:\na door\n\n[next] left:"


def test_a_message_is_encoded_once_however_many_histories_it_stands_in():
    asked, rows = [], rows_of([episode()], merge=False)
    one = reader()
    one.tokenizer_of = lambda owner: SimpleNamespace(encode=lambda text, add_special_tokens: asked.append(text) or [1])
    assert [len(one("b", row).prompt_ids) for row in rows] == [2, 3, 4]
    assert len(asked) == len(set(asked)) == 1 + 2 + 3  # the question, what two said, who speaks


def test_a_history_that_would_not_fit_loses_the_middle_of_messages_first_then_its_beginning():
    row = rows_of([episode()], merge=False)[2]
    whole = text_of(reader()("b", row))
    fits = reader(limit=len(whole) + 2)
    assert text_of(fits("b", row)) == whole and fits.shortened == 0

    long = reader(max_chars=1000, limit=180)
    long.episodes["u", 0].calls[0].text = "x" * 400 + "y" * 400
    found = text_of(long("b", row))
    assert "x\n[...]\ny" in found and found.startswith("2 + 2?") and found.endswith("[next] right:")
    assert len(found) + 2 <= 180 and (long.rows, long.shortened) == (1, 1)

    short = reader(limit=12)
    assert text_of(short("b", row)) == whole[-10:] and short.shortened == 1
    assert short("b", row).response_ids == row.response_ids


@pytest.mark.parametrize(("limit", "left"), [(20, 18), (3, 1), (2, 1), (1, 1)])
def test_a_question_that_would_not_fit_loses_its_beginning_but_never_all(limit, left):
    """A critic may have less room than the policy that answered."""
    row, one = rows_of([episode()], merge=False)[0], reader(limit=limit)
    one.episodes["u", 0].sample["prompt"][0]["content"] = "long " * 50
    whole = "long " * 50 + "\n\n[next] left:"
    assert text_of(one("b", row)) == whole[-left:] and (one.rows, one.shortened) == (1, 1)


def test_pieces_are_encoded_without_special_tokens_in_between():
    one = reader()
    one.tokenizer_of = lambda owner: SimpleNamespace(
        encode=lambda text, add_special_tokens=True: [1] * add_special_tokens + list(map(ord, text))
    )
    row = rows_of([episode()], merge=False)[2]
    assert text_of(one("b", row)) == text_of(reader()("b", row))


def test_rows_that_cannot_be_read_are_named():
    row = rows_of([episode()], merge=False)[0]
    row.calls *= 2
    with pytest.raises(ValueError, match="uid u, episode 0, agent left: a centralised critic reads one call"):
        reader()("b", row)
    row.calls, row.episode = row.calls[:1], 3
    with pytest.raises(ValueError, match="uid u, episode 3, agent left: a centralised critic needs the row's episode"):
        reader()("b", row)


@pytest.fixture
def trained(monkeypatch):
    """What the critics and actors were given in a step on `episode()`: each token is worth half its id."""

    def train(flow, rows):
        seen = SimpleNamespace(prompts=[], advantages={}, returns=[])

        def values(policy, batch):
            seen.prompts += [row.prompt_ids if isinstance(row.prompt_ids, list) else None for row in batch.rows]
            batch.columns["values"] = [torch.tensor(row.response_ids) / 2 for row in batch.rows]

        def update_critic(policy, batch, critic, *, seed):
            seen.returns += [one.tolist() for one in batch.columns["returns"]]

        def update_actor(policy, batch, algorithm, *, seed):
            seen.advantages[policy.name] = [one.tolist() for one in batch.columns["advantages"]]

        for kernel in (values, update_critic, update_actor):
            monkeypatch.setattr(kernels, kernel.__name__, kernel)
        for name in ("prepare", "prepare_critic", "old_log_probs"):
            monkeypatch.setattr(kernels, name, lambda *args: None)
        pool, endpoint = Pool(None, 2), SimpleNamespace(max_model_len=200)
        shared = {"pool": pool, "processes": None, "tokenizer": LETTERS, "endpoint": endpoint}
        policies = {n: SimpleNamespace(name=n, **shared) for n in "ab"}
        step = TrainingStep(flow, policies, rows, episodes=[episode()], seed=0)
        asyncio.run(step.run())
        seen.metrics = step.metrics()
        return seen

    return train


def test_a_step_values_the_joint_history_and_chains_past_frozen_agents(trained, load):
    seen = trained(load(), rows_of([episode()], merge=False, keep_unsampled_rewarded=True))
    texts = ["".join(map(chr, ids)) for ids in seen.prompts]
    assert [text.rpartition("[next] ")[2] for text in texts] == ["left:", "right:"]
    # V is 3.5 for both calls; the judge's 2 goes to left, which is no step further from it
    assert seen.advantages == {"a": [[3 + 0.5 * 3.5 - 3.5] * 2], "b": [[4 - 3.5] * 2]}
    assert seen.returns == [[3 + 0.5 * 3.5] * 2, [4.0] * 2]
    assert seen.metrics["policy/b/critic/history_shortened"] == 0


def test_ippo_leaves_the_prompts_alone_and_hands_silent_rewards_on_within_an_agents_stream(trained, load):
    text = "estimator: ippo, stream: agent"
    one = episode()
    one.calls.append(Call("l", "left", 0, "a", 1, [1], [], [], [], reward=8.0))
    flow = load(text)
    rows = rows_of([one], merge=False, keep_unsampled_rewarded=True)
    seen = trained(flow, rows)
    assert seen.prompts == [[1, 2], [1, 2]]
    assert seen.advantages == {"a": [[1 + 8 - 3.5] * 2], "b": [[4 - 3.5] * 2]}
    call = load("estimator: ippo")
    assert trained(call, rows_of([one], merge=False)).advantages["a"] == [[1 - 3.5] * 2]


@pytest.mark.parametrize(("algorithm", "alone"), [("", True), ("estimator: ippo", False)])
def test_calls_are_rows_of_their_own_where_each_has_a_history_of_its_own(load, algorithm, alone):
    made = SimpleNamespace(workflow=load(algorithm))
    assert trainer.Trainer._one_call_per_row(made) is alone
