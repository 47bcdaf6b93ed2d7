"""Learners that know the game: gradients are exact, so what they show is the method and no sampling noise (the additive
game alone is sampled, because there the noise is the question).

Invariant: all randomness comes from the seed; many seeds are one batch.
"""

from __future__ import annotations

import itertools

import torch
from payoffs import ANTI_COORDINATION, CLIMBING, SEPARATING, value
from torch import Tensor

from recipe.dag.credit.happo import advance, log_ratio, update_order, weigh
from recipe.dag.credit.mixer import VDN
from recipe.dag.credit.mixer_credit import counterfactual, peers_of

JOINT = list(itertools.product((0, 1), (0, 1)))


def _noise(shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def separating(
    start: tuple[float, float], updates: int, *, trust: float, sequential: bool, seed: int = 0
) -> list[float]:
    """Payoff before and after each update. An update moves each agent towards its better action until that action's
    probability has grown by the factor 1 + trust. Simultaneously, both judge by the advantages under the old policies;
    one after the other (HAPPO), the second one's are weighed by what the first one's update did."""
    probability, payoffs = list(start), []
    for step in range(updates + 1):
        policies = [torch.tensor([1 - p, p], dtype=torch.float64) for p in probability]
        payoffs.append(value(SEPARATING, *policies).item())
        advantages = [(SEPARATING[a, b] - payoffs[-1]).reshape(1) for a, b in JOINT]
        factor: dict = {}
        for name in update_order(["0", "1"], "random", seed=seed, step=step):
            me = int(name)
            weighed = weigh(advantages, JOINT, factor)
            gain = _gain(weighed, policies, me)
            probability[me] = _move(probability[me], gain, trust)
            if sequential:
                new = torch.tensor([1 - probability[me], probability[me]], dtype=torch.float64)
                logs = [
                    [p.clamp_min(1e-12).log()[joint[me]].reshape(1) for joint in JOINT] for p in (new, policies[me])
                ]
                factor = advance(factor, log_ratio(*logs, [torch.ones(1)] * 4, JOINT))
    return payoffs


def _gain(weighed: list[Tensor], policies: list[Tensor], me: int) -> float:
    """How much better action 1 is than action 0, the other agent acting as it did."""
    other = policies[1 - me]
    terms = zip(JOINT, weighed, strict=True)
    return sum((1 if joint[me] else -1) * other[joint[1 - me]] * m for joint, m in terms).item()


def _move(p: float, gain: float, trust: float) -> float:
    if gain == 0.0:
        return p
    return min(1.0, p * (1 + trust)) if gain > 0 else 1 - min(1.0, (1 - p) * (1 + trust))


def climbing(seeds: int, updates: int = 6000, *, sequential: bool, follower: float = 1.0, lr: float = 0.1) -> Tensor:
    """Final payoffs [seeds] of softmax policies under the exact gradient. `sequential`: the second agent sees what the
    first one did. `follower`: how much faster the second one learns."""
    first = _noise((seeds, 3), 0.5, 0)
    second = _noise((seeds, 3, 3) if sequential else (seeds, 1, 3), 0.5, 1)
    for _ in range(updates):
        p, q = first.softmax(-1), second.softmax(-1)
        of_first = (CLIMBING * q).sum(-1)
        payoff = (p * of_first).sum(-1, keepdim=True)
        if sequential:
            slope = p.unsqueeze(-1) * q * (CLIMBING - of_first.unsqueeze(-1))
        else:
            slope = q * ((p @ CLIMBING).unsqueeze(1) - payoff.unsqueeze(-1))
        first = first + lr * p * (of_first - payoff)
        second = second + lr * follower * slope
    p, q = first.softmax(-1), second.softmax(-1)
    return (p * (CLIMBING * q).sum(-1)).sum(-1)


def anti_coordination(seeds: int, updates: int = 400, *, layout: str, lr: float = 1.0) -> Tensor:
    """Payoffs [updates + 1, seeds]. `shared`: one policy for both. `role token`: one policy, which sees the role.
    `separate`: a policy each. Exact gradients by autograd."""
    width = {"shared": 1, "role token": 3, "separate": 2}[layout]
    features = {
        "shared": [[1.0], [1.0]],
        "role token": [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]],
        "separate": [[1.0, 0.0], [0.0, 1.0]],
    }[layout]
    weights, inputs, payoffs = _noise((seeds, width), 0.1, 0), torch.tensor(features, dtype=torch.float64), []
    for _ in range(updates + 1):
        weights = weights.detach().requires_grad_(True)
        p = torch.sigmoid(weights @ inputs.T)
        policies = torch.stack([1 - p, p], dim=-1)
        payoff = value(ANTI_COORDINATION, policies[:, 0], policies[:, 1])
        payoffs.append(payoff.detach())
        weights = weights + lr * torch.autograd.grad(payoff.sum(), weights)[0]
    return torch.stack(payoffs)


def relay(seeds: int, symbols: int, updates: int = 6000, *, lr: float = 2.0) -> Tensor:
    """Final payoffs [seeds] of the guess-number relay: the first agent sees a number and says a symbol, the second one
    hears it and guesses. Independent policies, exact gradients."""
    speak, guess = (_noise((seeds, symbols, symbols), 0.5, seed) for seed in (0, 1))
    for _ in range(updates):
        s, g = speak.softmax(-1), guess.softmax(-1)
        right_by_symbol = g.transpose(1, 2)
        right = (s * right_by_symbol).sum(-1, keepdim=True)
        heard = s.transpose(1, 2)
        slope = g * (heard - (g * heard).sum(-1, keepdim=True))
        speak = speak + lr * s * (right_by_symbol - right) / symbols
        guess = guess + lr * slope / symbols
    return (speak.softmax(-1) * guess.softmax(-1).transpose(1, 2)).sum((1, 2)) / symbols


def additive(agents: int, *, mixer: bool, seed: int, group: int = 8, lr: float = 0.5, most: int = 400) -> int:
    """Updates until every agent plays its right action with probability .95. The team earns the number of right
    actions, in groups of sampled plays. Without `mixer` every agent gets the group-relative team reward; with it, the
    utilities of a VDN mixer, fitted by least squares to the team rewards of the last 16 groups, divide it, and each
    agent's part is normalised by itself."""
    generator = torch.Generator().manual_seed(seed)
    logits, plays, earned = torch.zeros(agents, dtype=torch.float64), [], []
    parallel = peers_of({str(i): () for i in range(agents)}, [str(i) for i in range(agents)])
    state, present = torch.ones(1), torch.ones(group, agents, dtype=torch.bool)
    for update in range(most):
        p = torch.sigmoid(logits)
        if p.min() >= 0.95:
            return update
        actions = (torch.rand(group, agents, generator=generator, dtype=torch.float64) < p).double()
        reward = actions.sum(-1)
        credit = reward.unsqueeze(-1).expand(-1, agents)
        if mixer:
            plays, earned = [*plays, actions][-16:], [*earned, reward][-16:]
            utilities = actions * _least_squares(torch.cat(plays), torch.cat(earned))
            credit = counterfactual(VDN(), utilities, state, parallel, present)
        spread = credit.std(0)
        credit = torch.where(spread > 1e-9, (credit - credit.mean(0)) / (spread + 1e-6), 0.0)
        logits = logits + lr * (credit * (actions - p)).mean(0)
    return most


def _least_squares(actions: Tensor, rewards: Tensor) -> Tensor:
    """Per agent, what its action 1 is worth more than its action 0; a little ridge for actions never seen."""
    inputs = actions - actions.mean(0)
    square = inputs.T @ inputs + 1e-3 * torch.eye(actions.shape[1], dtype=torch.float64)
    return torch.linalg.solve(square, inputs.T @ (rewards - rewards.mean()))
