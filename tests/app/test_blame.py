"""Blame in games whose effects are known in closed form, played by scripts in place of models."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from examples.games.sized import workflow_of
from recipe.dag.app.blame import most_needed, shares
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.rehearsal import MAX_TOKENS, CharacterTokenizer
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.report.what_if import reward_value
from recipe.dag.types.record import Generation

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = CharacterTokenizer()


class Player:
    """Answers with `choose(prompt, agent, seed)`."""

    def __init__(self, choose):
        self._choose = choose

    async def generate(self, request_id, prompt_ids, sampling):
        agent = request_id.rsplit("-", 1)[1]
        text = self._choose(TOKENIZER.decode(prompt_ids), agent, sampling["seed"])
        ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        return Generation(ids, [-1.0] * len(ids), "stop")


def blamed(workflow, now, start, *, problems=12, n=2, **options):
    """Return the mean effects by (agent, change), and the agent that is named."""
    policies = workflow.policies | {"start": workflow.policies[min(workflow.policies)]}
    workflow = workflow.model_copy(update={"policies": policies})
    endpoint = {name: PolicyEndpoint(Player(now), TOKENIZER, MAX_TOKENS) for name in workflow.policies}
    endpoint["start"] = PolicyEndpoint(Player(start), TOKENIZER, MAX_TOKENS)

    def runner(swapped=None):
        agents = tuple(
            agent.model_copy(update={"policy": "start"}) if agent.name == swapped else agent
            for agent in workflow.agents
        )
        return EpisodeRunner(workflow.model_copy(update={"agents": agents}), endpoint, {}, seed=0)

    at_start = {agent.name: runner(agent.name) for agent in workflow.agents}
    prompt = [{"role": "user", "content": "play"}]
    samples = [({"prompt": prompt, "ground_truth": str(k), "extra_info": {}}, f"val-{k}") for k in range(problems)]
    mean, found = asyncio.run(shares(runner(), at_start, samples, n, step=1, **options))
    return mean, {(one.agent, one.change): one.interval[0] for one in found}, most_needed(found)


@pytest.fixture
def game(tmp_path):
    def load(name: str):
        if (shipped := ROOT / f"examples/games/workflows/workflow_{name}.yaml").exists():
            return load_workflow(shipped)
        file = tmp_path / f"{name}.yaml"
        file.write_text(workflow_of(name).replace("examples/games", f"{ROOT}/examples/games"))
        return load_workflow(file)

    return load


def test_in_the_additive_game_each_player_is_worth_its_own_hit(game):
    """Player one is right and has learned it, two is wrong, three and four have always been right."""
    right = {"one": "a", "two": "b", "three": "b", "four": "a"}  # RIGHT of the game

    def now(prompt, agent, seed):
        return "a" if agent == "two" else right[agent]

    def start(prompt, agent, seed):
        return "b" if agent == "one" else now(prompt, agent, seed)

    mean, effects, worst = blamed(game("additive_4"), now, start, value=reward_value)
    assert mean == 0.75 and worst == "one"
    assert [effects[agent, "silent"] for agent in right] == [-0.25, 0, -0.25, -0.25]
    assert [effects[agent, "start"] for agent in right] == [-0.25, 0, 0, 0]
    assert {effects[agent, "sibling"] for agent in right} == {0}


def test_in_the_relay_the_guesser_matters_most_and_the_message_all_but_a_lucky_guess(game):
    def now(prompt, agent, seed):
        if agent == "speaker":
            return "abc"[int(re.search(r"number is (\d)", prompt)[1])]
        heard = re.search(r"chose (\w+)", prompt)[1]
        return str("abc".index(heard)) if heard in "abc" else "0"

    mean, effects, worst = blamed(game("relay_3"), now, lambda prompt, agent, seed: "a" if agent == "speaker" else "0")
    assert mean == 1.0 and worst == "guesser"
    assert effects["guesser", "silent"] == -1.0
    others = [("speaker", "silent"), ("speaker", "start"), ("guesser", "start")]
    assert [effects[key] for key in others] == pytest.approx([-2 / 3] * 3)
    assert effects["speaker", "sibling"] == effects["guesser", "sibling"] == 0.0


def test_in_anti_coordination_the_player_that_learned_to_differ_is_named(game):
    workflow = game("anti_coordination_separate")
    first, second = (agent.name for agent in workflow.agents)

    def now(prompt, agent, seed):
        return "a" if agent == first or seed // 7 % 4 == 0 else "b"

    mean, effects, worst = blamed(workflow, now, lambda prompt, agent, seed: "a", problems=200)
    share = mean  # of episodes in which the second chose b
    assert share == pytest.approx(0.75, abs=0.08) and worst == second
    assert effects[first, "start"] == 0.0 and effects[second, "start"] == pytest.approx(-share)
    assert effects[first, "silent"] == effects[second, "silent"] == pytest.approx(-share)
    assert effects[second, "sibling"] == pytest.approx(0.0, abs=1e-9), "siblings exchange their words"


def test_a_reward_of_the_group_compares_a_changed_episode_with_the_others_as_they_were(tmp_path):
    """All three say the same: changed one by one, each falls out of the majority, and the other two keep it."""
    file = tmp_path / "majority.yaml"
    file.write_text(
        """dag_id: majority
agents: [{name: solver, policy: main}]
policies: {main: {model: {path: none}}}
algorithm: {estimator: grpo}
nodes:
  - {id: solve, agent: solver}
  - {id: majority, reward: "recipe.dag.reward.group:majority_label", scope: group, args: {compare: text}, after: solve}
  - {id: again, reward: own.py:again, after: majority}
"""
    )
    (tmp_path / "own.py").write_text("def again(episode):\n    return {'solver': episode.calls[0].reward / 2}\n")
    workflow = load_workflow(file)

    def say(answer):
        return lambda prompt, agent, seed: f"\\boxed{{{answer}}}"

    mean, effects, _ = blamed(workflow, say("1"), say("2"), problems=2, n=3, value=reward_value)
    assert mean == 1.5
    assert effects == {("solver", "silent"): -1.5, ("solver", "start"): -1.5, ("solver", "sibling"): 0.0}
