"""Every option of `algorithm.mixer` has its effect, and the learner reads all messages and rewards of the team."""

from __future__ import annotations

import pytest
import torch

from recipe.dag.core.errors import UserError
from recipe.dag.credit.joint_value import joint_values
from recipe.dag.credit.mixer_fit import fit
from recipe.dag.train import mixer_inputs
from recipe.dag.train import team_critic as module
from recipe.dag.train.mixer_inputs import call_layout, encode_episodes
from recipe.dag.train.team_critic import TeamCritic
from recipe.dag.workflow.moves import moves_of
from tests.credit.with_defaults import advantages_of
from tests.train.plays import WORDS, again, call_of, encode, episode_of, learned, noise, play, sum_of

pytestmark = pytest.mark.usefixtures("one_thread")


def mixer_of(options: str) -> str:
    return f"estimator: qmix, mixer: {{{options}}}"


def weights_of(critic: TeamCritic) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in critic.model.parameters()])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", 2),
        ("batch_size", 32),
        ("steps_per_epoch", 1),
        ("lr", 0.01),
        ("weight_decay", 0.5),
        ("lam", 0.5),
        ("gamma_turn", 0.5),
        ("loss", "binary"),
    ],
)
def test_the_fit_reads_what_the_file_says(workflow_of, monkeypatch, option, value):
    """The fit gets the option, and the weights after a step are not those of the default."""
    seen = {}

    def spy(model, optimizer, data, **options):
        seen.update(options, binary=model.binary, **optimizer.param_groups[0])
        return fit(model, optimizer, data, **options)

    monkeypatch.setattr(module, "fit", spy)
    names = {"steps_per_epoch": "steps"}
    after = []
    for text in ("", f"{option}: {value}"):
        critic = TeamCritic(workflow_of(2, turns=2, algorithm=mixer_of(text)), encode, seed=0)
        critic.learn(play(0, 2, lambda texts, draw: 0.5 * (texts[0] < texts[1]), turns=2), seed=3)
        after.append(weights_of(critic))
    assert seen["binary"] if option == "loss" else seen[names.get(option, option)] == value
    assert not torch.equal(*after)


def test_the_slow_copy_follows_as_fast_as_the_file_says(workflow_of):
    def gap(tau):
        critic = TeamCritic(workflow_of(1, turns=2, algorithm=mixer_of(f"lam: 0.5, target_tau: {tau}")), encode, seed=0)
        critic.learn(play(0, 1, sum_of, turns=2), seed=0)
        target = torch.cat([parameter.flatten() for parameter in critic.target.module.parameters()])
        return (weights_of(critic) - target).norm().item()

    assert gap(1.0) == 0.0 < gap(0.5) < gap(0.001)


@pytest.mark.parametrize("form", ["control_variate", "counterfactual", "sloped"])
def test_the_mixers_share_has_the_form_that_the_file_says(workflow_of, form):
    critic = learned(workflow_of(3, algorithm=mixer_of(f"form: {form}, full_at: 0.05")), steps=6)
    episodes = play(50, 3, sum_of)
    data = encode_episodes(episodes, critic.moves, encode)
    expected = advantages_of(critic.model, data, form=form)
    found = critic.learn(episodes, seed=0)
    assert critic.metrics["mixer/weight"] == 1.0
    for row, episode in enumerate(episodes):
        assert found[episode.uid, episode.index] == [(0.0, pytest.approx(one)) for one in expected[row].tolist()]


def test_the_weight_is_full_where_the_file_says(workflow_of):
    weights = []
    for full in (0.25, 1.0):
        critic = TeamCritic(workflow_of(2, algorithm=mixer_of(f"full_at: {full}")), encode, seed=0)
        critic.learn(play(0, 2, sum_of), seed=0)
        critic.explained = 0.2
        critic.learn(play(1, 2, sum_of), seed=1)
        weights.append(critic.metrics["mixer/weight"])
    assert weights == [pytest.approx(0.8), pytest.approx(0.2)]


def test_first_weights_are_a_function_of_the_runs_seed(workflow_of):
    def first(seed):
        critic = TeamCritic(workflow_of(1), encode, seed=seed)
        torch.manual_seed(5)
        critic._build(16)
        return weights_of(critic)

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_after_a_resume_the_optimizer_has_the_options_of_this_runs_file(workflow_of, tmp_path):
    before = learned(workflow_of(1, algorithm=mixer_of("lr: 0.001, weight_decay: 0.01")), steps=1, agents=1)
    now = workflow_of(1, algorithm=mixer_of("lr: 0.02, weight_decay: 0.3"))
    group = again(before, now, tmp_path).optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.3)


def test_one_bad_step_does_not_dominate_the_running_mean(workflow_of, monkeypatch):
    critic = TeamCritic(workflow_of(1), encode, seed=0)
    monkeypatch.setattr(module, "explained_variance", lambda predicted, actual: -1000.0)
    critic.learn(play(0, 1, noise), seed=0)
    assert critic.explained == pytest.approx(-0.2) and critic.metrics["mixer/explained_variance"] == -1000.0


def test_returns_are_standardised_by_the_first_steps_and_only_after_its_credit(workflow_of):
    critic = TeamCritic(workflow_of(1), encode, seed=0)
    first = [10.0 + episode.calls[0].reward for episode in play(0, 1, noise)]
    critic.learn(play(0, 1, lambda texts, draw: 10.0 + noise(texts, draw)), seed=0)
    mean = critic.model.return_mean.item()
    assert mean == pytest.approx(sum(first) / len(first), abs=1e-4)
    critic.learn(play(1, 1, sum_of), seed=1)
    assert critic.model.return_mean.item() == mean


def test_what_is_explained_is_what_differs_among_siblings(workflow_of):
    """Knowing the questions' values alone explains nothing."""

    critic = TeamCritic(workflow_of(1), encode, seed=0)
    for step in range(8):
        episodes = play(step, 1, noise)
        for episode in episodes:
            episode.calls[0].reward = 10 * int(episode.sample["prompt"][0]["content"][-1]) + hash_of(episode)
        critic.learn(episodes, seed=step)
    assert critic.metrics["mixer/explained_variance"] < 0.2


def hash_of(episode) -> float:
    """A small number that no message explains."""
    return 0.1 * ((7 * episode.index + 3 * sum(map(ord, episode.uid))) % 5)


@pytest.mark.parametrize(("steps", "kept"), [(0, 0), (1, 1), (3, 3)])
def test_so_many_steps_are_replayed(workflow_of, steps, kept):
    critic = learned(workflow_of(1, algorithm=mixer_of(f"replay_steps: {steps}")), steps=5, agents=1)
    assert len(critic.replay) == kept


def test_an_episode_without_calls_is_left_out(workflow_of):
    critic, episodes = TeamCritic(workflow_of(1), encode, seed=0), play(0, 1, sum_of)
    silent = episode_of("silent", 0, "question 0", [])
    call_credits = critic.learn([silent, *episodes], seed=0)
    assert len(call_credits) == len(episodes) and ("silent", 0) not in call_credits


def test_an_episode_whose_team_reward_is_unknown_is_left_out(workflow_of):
    critic, episodes = TeamCritic(workflow_of(1), encode, seed=0), play(0, 1, sum_of)
    episodes[0].calls[-1].unscored = True
    call_credits = critic.learn(episodes, seed=0)
    assert len(call_credits) == len(episodes) - 1 and (episodes[0].uid, episodes[0].index) not in call_credits
    for episode in episodes:
        episode.calls[-1].unscored = True
    assert TeamCritic(workflow_of(1), encode, seed=0).learn(episodes, seed=0) == {}


def test_a_probability_learns_what_the_team_earns_and_refuses_other_returns(workflow_of):
    def won(texts, draw):
        return float("word 1" in texts or "word 2" in texts)

    critic = TeamCritic(workflow_of(2, algorithm="estimator: vdn, mixer: {loss: binary, lr: 0.01}"), encode, seed=0)
    for step in range(8):
        episodes = play(step, 2, won)
        critic.learn(episodes, seed=step)
    data = encode_episodes(episodes, critic.moves, encode)
    values = joint_values(critic.model, data)[0]
    assert values.min() >= 0.0 and values.max() <= 1.0 and critic.metrics["mixer/explained_variance"] > 0.4
    assert advantages_of(critic.model, data, form="counterfactual").abs().max() <= 1.0
    episodes[9].calls[1].reward = 1.5
    with pytest.raises(UserError, match="binary needs returns .* sample 7-1, episode 1, earned 1.5 from turn"):
        critic.learn(episodes, seed=9)


def test_a_mixer_of_another_loss_is_refused(workflow_of, tmp_path):
    binary = TeamCritic(workflow_of(1, algorithm=mixer_of("loss: binary")), encode, seed=0)
    with pytest.raises(UserError, match="written with loss='binary', but this run has 'squared'"):
        again(binary, workflow_of(1, algorithm=mixer_of("")), tmp_path)


def read(workflow, episodes):
    moves = moves_of(workflow.nodes, workflow.loops, workflow.episode.max_turns)
    return encode_episodes(episodes, moves, encode)


def test_the_question_that_is_encoded_holds_the_system_message(workflow_of):
    one, other = (episode_of("u", i, "Why?", [call_of(0, WORDS[0])]) for i in range(2))
    other.sample["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    data = read(workflow_of(1), [one, other])
    assert data.question[0] != data.question[1]
    assert data.vectors[data.question[1]].equal(encode(["Be brief.\n\nWhy?"])[0])


def test_turns_that_were_not_played_do_not_count_and_every_reward_does(workflow_of):
    """The team's reward is that of all calls, also of those left out of training."""
    short = episode_of("u", 0, "q", [call_of(0, WORDS[0], 1.0)])
    long = episode_of("u", 1, "q", [call_of(0, WORDS[0], 1.0), call_of(0, WORDS[1], 2.0, turn=1)])
    long.calls[0].train = False
    data = read(workflow_of(1, turns=2), [short, long])
    assert data.turns.tolist() == [1, 2] and data.rewards.tolist() == [[1.0, 0.0], [1.0, 2.0]]
    assert [pair.tolist() for pair in data.points()] == [[0, 1, 1], [0, 0, 1]]


def test_peers_of_the_file_never_add_what_may_react(workflow_of):
    """The file narrows what a baseline reads; a later turn of an allowed node stays out."""
    workflow = workflow_of(2, chain=True, turns=2)
    object.__setattr__(workflow.algorithm.mixer, "peers", {"n0": ("n1",)})  # what the loader refuses
    layout = call_layout(workflow, moves_of(workflow.nodes, workflow.loops, 2))
    # n0@0 n1@0 n0@1 n1@1
    assert layout.baseline_inputs.int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0]]


def test_a_baseline_that_could_react_is_refused_once_more_at_the_start(workflow_of, monkeypatch):
    workflow = workflow_of(2, chain=True)
    monkeypatch.setattr(mixer_inputs, "baseline_inputs", lambda graph, ids: torch.ones(2, 2, dtype=torch.bool).triu(1))
    with pytest.raises(UserError, match="n0@0.0: .*`n1@0.0`, which comes after it"):
        call_layout(workflow, moves_of(workflow.nodes, workflow.loops, 1))
