from __future__ import annotations

import pytest
import torch

from recipe.dag.algorithms.catalogue import make_algorithm
from recipe.dag.algorithms.estimate import estimate
from recipe.dag.core.errors import UserError
from recipe.dag.episode.rows import rows_of
from recipe.dag.settings.compose import compose_config
from recipe.dag.settings.effects import check_samples
from recipe.dag.train import kernels
from recipe.dag.train.mixer_inputs import question_of
from recipe.dag.train.step import TrainingStep
from recipe.dag.train.team_critic import FILE, Credit, TeamCritic, credited
from recipe.dag.types.record import Episode
from tests.train.plays import (
    SIBLINGS,
    WORDS,
    again,
    call_of,
    encode,
    episode_of,
    learned,
    noise,
    play,
    reward_of,
    sum_of,
)
from tests.train.steps import run_step

pytestmark = pytest.mark.usefixtures("one_thread")


def correlation(episodes, values) -> float:
    """Return the correlation of each call's credit with its word's reward, both centered among siblings."""
    counted, earned = [], []
    for start in range(0, len(episodes), SIBLINGS):
        group = episodes[start : start + SIBLINGS]
        for node in range(len(group[0].calls)):
            counted.append(torch.tensor([values(episode, node) for episode in group], dtype=torch.float64))
            rewards = [reward_of(episode.calls[node].text) for episode in group]
            earned.append(torch.tensor(rewards, dtype=torch.float64))
    columns = (torch.cat([part - part.mean() for part in column]) for column in (counted, earned))
    return torch.corrcoef(torch.stack(list(columns)))[0, 1].item()


def shared(episode: Episode, node: int) -> float:
    return sum(call.reward for call in episode.calls)


@pytest.mark.parametrize("estimator", ["vdn", "qmix"])
def test_credit_comes_to_tell_agents_apart_where_the_shared_reward_cannot(workflow_of, estimator):
    critic = TeamCritic(workflow_of(6, algorithm=f"estimator: {estimator}"), encode, seed=0)
    of_credit, of_shared, weights = [], [], []
    for step in range(14):
        episodes = play(step, 6, sum_of)
        call_credits = critic.learn(episodes, seed=step)
        of_credit.append(correlation(episodes, lambda e, node, c=call_credits: sum(c[e.uid, e.index][node])))
        of_shared.append(correlation(episodes, shared))
        weights.append(critic.metrics["mixer/weight"])
    assert weights[0] == 0.0 and of_credit[0] == pytest.approx(of_shared[0])
    assert weights[-1] == 1.0 and critic.metrics["mixer/explained_variance"] > 0.6
    assert of_credit[-1] > 0.7 > 0.5 > max(of_shared)


def team_rows(rows, episodes):
    """Rows in which every call is paid what the team earned."""
    totals = {(e.uid, e.index): sum(call.reward for call in e.calls) for e in episodes}
    return [credited(row, [Credit(totals[row.uid, row.episode], 0.0)] * 9)[0] for row in rows]


def advantages_of(rows, call_credits, algorithm) -> list[torch.Tensor]:
    """Return the advantages of rows with these call_credits."""
    plain, mixed = zip(*(credited(row, call_credits[row.uid, row.episode]) for row in rows), strict=True)
    return estimate(algorithm, plain, mixer_credits=mixed)[0]


def test_without_anything_to_explain_the_weight_stays_at_0_and_the_result_is_grpos(workflow_of):
    workflow = workflow_of(3, algorithm="estimator: qmix")
    critic = TeamCritic(workflow, encode, seed=0)
    for step in range(8):
        episodes = play(step, 3, noise)
        rows = rows_of(episodes)
        call_credits = critic.learn(episodes, seed=step)
        found = advantages_of(rows, call_credits, workflow.algorithm)
        plain = estimate(make_algorithm(), team_rows(rows, episodes))
        assert critic.metrics["mixer/weight"] == 0.0 and critic.explained <= 0.0
        assert all(torch.equal(a, b) for a, b in zip(found, plain[0], strict=True))
        assert any(advantage.any() for advantage in found)


@pytest.mark.parametrize("pay", [lambda texts, draw: 1.0, noise], ids=["the same every turn", "by the turn"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_without_anything_to_explain_turns_count_as_grpo_counts_them(workflow_of, pay, gamma):
    """Several turns: a call is compared with those of its own turn, by what the team earned from there on."""
    workflow = workflow_of(2, turns=2, algorithm=f"estimator: vdn, mixer: {{gamma_turn: {gamma}}}")
    episodes = play(0, 2, pay, turns=2)
    rows = rows_of(episodes)
    found = advantages_of(rows, TeamCritic(workflow, encode, seed=0).learn(episodes, seed=0), workflow.algorithm)
    for episode in episodes:
        for call in episode.calls:  # every agent gets the team's reward of the turn
            call.reward = episode.calls[2 * call.turn + 1].reward
    options = make_algorithm(group_by=("uid", "agent", "turn"), stat_unit="call", gamma_turn=gamma)
    plain = estimate(options, rows_of(episodes))[0]
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert any(advantage.any() for advantage in found) == (pay is noise)


@pytest.mark.parametrize("options", ["", ", mixer: {lam: 0.5, target_tau: 0.1, gamma_turn: 0.9, replay_steps: 2}"])
def test_a_resumed_run_goes_on_bit_by_bit(workflow_of, tmp_path, options):
    workflow = workflow_of(2, turns=2, algorithm=f"estimator: qmix{options}")
    critic = learned(workflow, steps=3, agents=2, turns=2)
    copy = again(critic, workflow, tmp_path / "saved")
    for step in (3, 4):
        episodes = play(step, 2, sum_of, turns=2)
        assert critic.learn(episodes, seed=step) == copy.learn(episodes, seed=step)
        assert critic.metrics == copy.metrics
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    critic.save(tmp_path / "one")
    copy.save(tmp_path / "two")
    assert (tmp_path / "one" / FILE).read_bytes() == (tmp_path / "two" / FILE).read_bytes()
    assert (critic.target is None) == (options == "")


def test_a_checkpoint_without_a_mixer_or_with_another_one_is_refused(workflow_of, tmp_path):
    workflow = workflow_of(2)
    with pytest.raises(UserError, match=f"{FILE} is missing, so vdn cannot resume here.*resume_mode=disable"):
        TeamCritic(workflow, encode, seed=0).load(tmp_path)
    TeamCritic(workflow, encode, seed=0).save(tmp_path)  # before the first step
    fresh = TeamCritic(workflow, encode, seed=0)
    fresh.load(tmp_path)
    assert fresh.model is None and fresh.explained == 0.0
    for other, what in (
        (workflow_of(2, algorithm="estimator: qmix"), "estimator='vdn', but this run has 'qmix'"),
        (workflow_of(3), "calls="),
        (workflow_of(2, algorithm="estimator: vdn, mixer: {hidden: 8}"), "hidden=64, but this run has 8"),
    ):
        with pytest.raises(UserError, match=what):
            TeamCritic(other, encode, seed=0).load(tmp_path)


def test_peers_that_the_file_names_are_all_that_a_baseline_reads(workflow_of):
    workflow = workflow_of(3, algorithm="estimator: vdn, mixer: {peers: {n0: [n2], n1: []}}")
    allowed = TeamCritic(workflow, encode, seed=0).layout.baseline_inputs
    assert allowed.int().tolist() == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]


def test_calls_that_were_not_made_and_fixed_agents_count_as_what_they_are(workflow_of):
    """A reward counts for the team whichever agent got it; a call that was not made has no credit."""
    workflow = workflow_of(3, frozen=True)
    critic = TeamCritic(workflow, encode, seed=0)
    episodes = play(0, 3, sum_of)
    for episode in episodes:
        episode.calls[2].policy = "fixed"
    skipped = episodes[0]
    skipped.calls = skipped.calls[::2]
    call_credits = critic.learn(episodes, seed=0)
    assert call_credits[skipped.uid, 0] == [(skipped.calls[1].reward, 0.0)] * 2
    assert call_credits[episodes[1].uid, 1] == [(episodes[1].calls[2].reward, 0.0)] * 3
    assert critic.replay[0].message[0].tolist()[1] == -1


def test_returns_are_from_a_calls_turn_on(workflow_of):
    workflow = workflow_of(1, turns=2, algorithm="estimator: vdn, mixer: {gamma_turn: 0.5}")
    calls = [call_of(0, WORDS[0], 1.0), call_of(0, WORDS[1], 4.0, turn=1)]
    episodes = [episode_of("u", 0, "q", calls), episode_of("u", 1, "q", [call_of(0, WORDS[2], None)])]
    assert TeamCritic(workflow, encode, seed=0).learn(episodes, seed=0) == {
        ("u", 0): [(3.0, 0.0), (4.0, 0.0)],
        ("u", 1): [(0.0, 0.0)],
    }


def test_a_single_sibling_learns_nothing(workflow_of):
    workflow = workflow_of(2)
    critic = learned(workflow, steps=12, agents=2)
    episodes = [episode_of("alone", 0, "question 0", [call_of(0, WORDS[0]), call_of(1, WORDS[2], 5.0)])]
    call_credits = critic.learn(episodes, seed=0)
    assert critic.metrics["mixer/weight"] == 1.0 and call_credits == {("alone", 0): [(0.0, 0.0)] * 2}
    found = advantages_of(rows_of(episodes), call_credits, workflow.algorithm)
    assert not any(advantage.any() for advantage in found)


def test_features_and_losses_that_are_not_finite_are_errors(workflow_of):
    def broken(texts):
        return torch.tensor([[float("nan") if text == WORDS[3] else 1.0] for text in texts])

    with pytest.raises(UserError, match="a feature of 'word 3' is not finite"):
        TeamCritic(workflow_of(2), broken, seed=0).learn(play(0, 2, sum_of), seed=0)
    wild = TeamCritic(workflow_of(2, algorithm="estimator: vdn, mixer: {lr: 1.0e+30}"), encode, seed=0)
    with pytest.raises(UserError, match="the loss of the joint value is .*lower algorithm.mixer.lr"):
        wild.learn(play(0, 2, sum_of), seed=0)


def test_a_question_is_all_of_its_messages():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert question_of(Episode("u", 0, {"prompt": prompt})) == "Be brief.\n\nWhy?"


def step_of(workflow, critic, episodes, monkeypatch, **columns) -> TrainingStep:
    """A step whose old log-probs are the server's, run without a model."""
    for kernel in ("prepare", "update_actor"):
        monkeypatch.setattr(kernels, kernel, lambda *args, **kwargs: None)

    def put(column, value):
        return lambda policy, batch: batch.columns.update({column: [torch.tensor(value)] * len(batch.rows)})

    monkeypatch.setattr(kernels, "old_log_probs", put("old_log_probs", [-1.0, -2.0]))
    monkeypatch.setattr(kernels, "reference_log_probs", put("ref_log_prob", [-1.5, -2.5]))
    rows = rows_of([episode for episode in episodes if not episode.fault])
    return run_step(workflow, rows, "main", episodes=episodes, mixing=critic, seed=7)


def test_a_step_compares_credits_as_grpo_does_and_leaves_faults_out(workflow_of, monkeypatch):
    workflow = workflow_of(3, frozen=True, algorithm="estimator: qmix, scale: none, group_by: [uid]")
    critic, episodes = TeamCritic(workflow, encode, seed=0), play(0, 3, sum_of)
    for episode in episodes:
        episode.calls[2].policy = "fixed"
    episodes[3].fault = {"boundary": "sandbox"}
    step = step_of(workflow, critic, episodes, monkeypatch)
    assert len(critic.replay[0].group) == len(episodes) - 1
    batch = step.batches["main"]
    plain = estimate(make_algorithm(scale="none", group_by=("uid",)), team_rows(batch.rows, episodes))
    assert all(torch.equal(a, b) for a, b in zip(batch.columns["advantages"], plain[0], strict=True))
    assert {"mixer/explained_variance", "mixer/weight", "mixer/loss", "timing/mixer.advantage"} <= step.metrics().keys()


def test_what_the_kl_takes_from_the_rewards_is_each_calls_own(workflow_of, monkeypatch):
    workflow = workflow_of(
        2, algorithm="estimator: vdn, scale: none, kl_reward_coef: 0.5", policy="{model: {path: m}, reference: true}"
    )
    episodes = play(0, 2, sum_of)
    episodes[0].calls[0].response_mask = [1, 0]  # only -0.25 is taken from it, and -0.5 from the others
    batch = step_of(workflow, TeamCritic(workflow, encode, seed=0), episodes, monkeypatch).batches["main"]
    team = team_rows(batch.rows, episodes)
    plain = estimate(make_algorithm(scale="none"), team)[0]
    away = batch.columns["advantages"][0][0] - plain[0][0]
    assert away.item() == pytest.approx(0.25 * (1 - 1 / SIBLINGS), abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "turns", "refused"),
    [
        ("estimator: vdn", 2, "vdn needs at least 2 episodes"),
        ("estimator: grpo", 1, "grpo needs at least 2 episodes"),
        ("estimator: grpo", 2, "grpo needs at least 2 episodes"),
        ("estimator: magrpo", 2, "magrpo needs at least 2 episodes"),
        ("estimator: rloo, stat_unit: call, gamma_turn: 1", 2, "rloo needs at least 2 episodes"),
        ("group_by: [uid]", 1, None),
        ("group_by: [agent]", 1, None),
        ("estimator: reinforce_pp_baseline", 1, "reinforce_pp_baseline needs at least 2 episodes"),
        ("estimator: reinforce_pp", 1, None),
    ],
)
def test_one_episode_per_sample_is_refused_before_the_run_starts(workflow_of, algorithm, turns, refused):
    workflow = workflow_of(2, algorithm=algorithm, turns=turns)
    run = compose_config("dag", ["workflow=w.yaml", "data.train_files=none", "actor_rollout_ref.rollout.n=1"])
    if refused is None:
        check_samples(run, workflow)
    else:
        with pytest.raises(UserError, match=f"{refused}.*set actor_rollout_ref.rollout.n"):
            check_samples(run, workflow)
    run.actor_rollout_ref.rollout.n = 2
    check_samples(run, workflow)
