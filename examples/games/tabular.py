"""Tabular learners with exact gradients, so that differences are due to the method and not to sampling noise.

    python examples/games/tabular.py climbing sequential 10 seed=0 output_dir=outputs/climbing

Plays a game from PLAYS starts and writes metrics.jsonl as a run does: `payoff` and `best`, the share of plays that
found the best payoff, after each update; for the additive game `updates`, how many it took. The arms of
`studies/exact_*.yaml` are such commands.

Only the additive game is sampled, because it is about that noise. Invariant: all randomness comes from the seed; many
starts are one batch.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Sequence
from statistics import fmean

import torch
from payoffs import ANTI_COORDINATION, CLIMBING, SEPARATING, value
from torch import Tensor

from recipe.dag.credit.happo import advance, log_ratio, update_order, weigh
from recipe.dag.credit.joint_advantages import Siblings, baseline_inputs, counterfactual
from recipe.dag.credit.mixer import VDN
from recipe.dag.report.journal import Journal

PLAYS = 20
BEST = {"separating": 2.0, "climbing": 11.0, "anti_coordination": 1.0, "relay": 1.0}
"""The highest payoff, by game."""
JOINT = list(itertools.product((0, 1), (0, 1)))


def _noise(shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def separating(
    start: tuple[float, float], updates: int, *, trust: float, sequential: bool, seed: int = 0
) -> list[float]:
    """Return the payoff before and after each update.

    An update multiplies the probability of each agent's better action by 1 + trust. In simultaneous updates both agents
    use the advantages under the old policies; in sequential ones (HAPPO) the second agent's advantages are weighted by
    the probability ratio of the first agent's update.
    """
    probability, payoffs = list(start), []
    for step in range(updates + 1):
        policies = [torch.tensor([1 - p, p], dtype=torch.float64) for p in probability]
        payoffs.append(value(SEPARATING, policies[0], policies[1]).item())
        advantages = [(SEPARATING[a, b] - payoffs[-1]).reshape(1) for a, b in JOINT]
        factor: dict = {}
        for name in update_order(["0", "1"], "random", seed=seed, step=step):
            agent = int(name)
            gain = _gain(weigh(advantages, JOINT, factor), policies, agent)
            probability[agent] = _move(probability[agent], gain, trust)
            if sequential:
                updated = torch.tensor([1 - probability[agent], probability[agent]], dtype=torch.float64)
                new, old = _joint_log_probs(updated, agent), _joint_log_probs(policies[agent], agent)
                ratios = log_ratio(new, old, [torch.ones(1)] * len(JOINT), JOINT, level="sequence_sum", bound=math.inf)
                factor = advance(factor, ratios)
    return payoffs


def _joint_log_probs(policy: Tensor, agent: int) -> list[Tensor]:
    """Return the log-probability of the agent's part of each joint action."""
    logs = policy.clamp_min(1e-12).log()
    return [logs[joint[agent]].reshape(1) for joint in JOINT]


def _gain(advantages: list[Tensor], policies: list[Tensor], agent: int) -> float:
    """Return the advantage of action 1 over action 0, given the other agent's policy."""
    other, gain = policies[1 - agent], 0.0
    for joint, advantage in zip(JOINT, advantages, strict=True):
        sign = 1 if joint[agent] else -1
        gain += (sign * other[joint[1 - agent]] * advantage).item()
    return gain


def _move(p: float, gain: float, trust: float) -> float:
    """Return the probability of action 1 after moving towards the better action."""
    if gain == 0.0:
        return p
    return min(1.0, p * (1 + trust)) if gain > 0 else 1 - min(1.0, (1 - p) * (1 + trust))


def climbing(
    seeds: int, updates: int = 6000, *, sequential: bool, follower: float = 1.0, lr: float = 0.1, seed: int = 0
) -> Tensor:
    """Return the payoffs [updates + 1, seeds] of softmax policies under the exact gradient.

    `sequential`: the second agent sees the first one's action. `follower`: the second agent's learning rate relative to
    the first one's.
    """
    first, payoffs = _noise((seeds, 3), 0.5, 2 * seed), []
    second = _noise((seeds, 3, 3) if sequential else (seeds, 1, 3), 0.5, 2 * seed + 1)
    for _ in range(updates + 1):
        p, q = first.softmax(-1), second.softmax(-1)
        of_first = (CLIMBING * q).sum(-1)
        payoff = (p * of_first).sum(-1, keepdim=True)
        payoffs.append(payoff[:, 0])
        if sequential:
            slope = p.unsqueeze(-1) * q * (CLIMBING - of_first.unsqueeze(-1))
        else:
            slope = q * ((p @ CLIMBING).unsqueeze(1) - payoff.unsqueeze(-1))
        first = first + lr * p * (of_first - payoff)
        second = second + lr * follower * slope
    return torch.stack(payoffs)


def anti_coordination(seeds: int, updates: int = 400, *, layout: str, lr: float = 1.0, seed: int = 0) -> Tensor:
    """Return the payoffs [updates + 1, seeds] under exact gradients. `layout`: `shared` (one policy for both agents),
    `role token` (one policy that sees the role) or `separate` (two policies)."""
    width = {"shared": 1, "role token": 3, "separate": 2}[layout]
    features = {
        "shared": [[1.0], [1.0]],
        "role token": [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]],
        "separate": [[1.0, 0.0], [0.0, 1.0]],
    }[layout]
    weights, inputs, payoffs = _noise((seeds, width), 0.1, seed), torch.tensor(features, dtype=torch.float64), []
    for _ in range(updates + 1):
        weights = weights.detach().requires_grad_(True)
        p = torch.sigmoid(weights @ inputs.T)
        policies = torch.stack([1 - p, p], dim=-1)
        payoff = value(ANTI_COORDINATION, policies[:, 0], policies[:, 1])
        payoffs.append(payoff.detach())
        weights = weights + lr * torch.autograd.grad(payoff.sum(), weights)[0]
    return torch.stack(payoffs)


def relay(seeds: int, symbols: int, updates: int = 6000, *, lr: float = 2.0, seed: int = 0) -> Tensor:
    """Return the payoffs [updates + 1, seeds] of the relay, in which the first agent sees a number and says a symbol,
    and the second one sees the symbol and guesses the number. Independent policies, exact gradients."""
    speak, guess = (_noise((seeds, symbols, symbols), 0.5, 2 * seed + player) for player in (0, 1))
    payoffs = []
    for _ in range(updates + 1):
        s, g = speak.softmax(-1), guess.softmax(-1)
        right_by_symbol = g.transpose(1, 2)
        right = (s * right_by_symbol).sum(-1, keepdim=True)
        payoffs.append(right.sum((1, 2)) / symbols)
        symbol_given_number = s.transpose(1, 2)
        slope = g * (symbol_given_number - (g * symbol_given_number).sum(-1, keepdim=True))
        speak = speak + lr * s * (right_by_symbol - right) / symbols
        guess = guess + lr * slope / symbols
    return torch.stack(payoffs)


def additive(agents: int, *, mixer: bool, seed: int, group: int = 8, lr: float = 0.5, most: int = 400) -> int:
    """Return the number of updates until every agent chooses its right action with probability .95, at most `most`.

    The team reward is the number of right actions, in groups of sampled plays. Without `mixer`, every agent gets the
    group-relative team reward. With it, the reward is divided by the utilities of a VDN mixer, which is fitted by least
    squares to the last 16 groups, and each agent's part is normalized separately.
    """
    generator = torch.Generator().manual_seed(seed)
    logits, plays, rewards = torch.zeros(agents, dtype=torch.float64), [], []
    parallel = baseline_inputs({str(i): () for i in range(agents)}, [str(i) for i in range(agents)])
    state, present = torch.ones(1), torch.ones(group, agents, dtype=torch.bool)
    for update in range(most):
        p = torch.sigmoid(logits)
        if p.min() >= 0.95:
            return update
        actions = (torch.rand(group, agents, generator=generator, dtype=torch.float64) < p).double()
        reward = actions.sum(-1)
        credit = reward.unsqueeze(-1).expand(-1, agents)
        if mixer:
            plays, rewards = [*plays, actions][-16:], [*rewards, reward][-16:]
            utilities = actions * _least_squares(torch.cat(plays), torch.cat(rewards))
            credit = counterfactual(VDN(), Siblings(utilities, state, present, parallel))
        std = credit.std(0)
        credit = torch.where(std > 1e-9, (credit - credit.mean(0)) / (std + 1e-6), 0.0)
        logits = logits + lr * (credit * (actions - p)).mean(0)
    return most


def _least_squares(actions: Tensor, rewards: Tensor) -> Tensor:
    """Return the estimated value of each agent's action 1 relative to action 0."""
    inputs = actions - actions.mean(0)
    # a small ridge keeps the system solvable if an agent always chose the same action
    gram = inputs.T @ inputs + 1e-3 * torch.eye(actions.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram, inputs.T @ (rewards - rewards.mean()))


def play(game: str, method: Sequence[str], seed: int) -> Tensor:
    """Return the payoffs [updates + 1, PLAYS]. Raises KeyError for an unknown game."""
    if game == "separating":
        rng, sequential, trust = random.Random(seed), method[0] == "happo", float(method[1])
        starts = [(rng.uniform(0.2, 0.4), rng.uniform(0.2, 0.4)) for _ in range(PLAYS)]
        return torch.tensor([separating(start, 20, trust=trust, sequential=sequential) for start in starts]).T
    if game == "climbing":
        return climbing(PLAYS, sequential=method[0] == "sequential", follower=float([*method, 1][1]), seed=seed)
    if game == "anti_coordination":
        return anti_coordination(PLAYS, layout=" ".join(method), seed=seed)
    return {"relay": relay}[game](PLAYS, int(method[0]), seed=seed)


def main(arguments: Sequence[str]) -> None:
    game, *method = [word for word in arguments if "=" not in word]
    settings = dict(word.split("=", 1) for word in arguments if "=" in word)
    seed, journal = int(settings["seed"]), Journal(settings["output_dir"])
    torch.set_num_threads(1)  # the tensors are tiny
    journal.truncate_after(-1)
    if game == "additive":
        seeds = range(PLAYS * seed, PLAYS * (seed + 1))
        updates = fmean(additive(int(method[1]), mixer=method[0] == "vdn", seed=start) for start in seeds)
        journal.metrics(0, {"updates": updates})
        return
    payoffs = play(game, method, seed)
    every = max(1, len(payoffs) // 100)
    for update in range(0, len(payoffs), every):
        found = (payoffs[update] > 0.95 * BEST[game]).double().mean().item()
        journal.metrics(update, {"payoff": payoffs[update].mean().item(), "best": found})


if __name__ == "__main__":
    main(sys.argv[1:])
