"""An estimator of one's own: the rarer a success is in its group, the more it counts."""

from __future__ import annotations

from collections import defaultdict


def by_mean(batch, *, floor: float = 0.05) -> list[float]:
    """Return the advantage of each call: its reward's distance to the mean of its sample and agent, divided by that
    mean. Rewards are 0 or above. `floor`: the least that is divided by."""
    groups = defaultdict(list)
    for call, key in enumerate(zip(batch.uid, batch.agent, strict=True)):
        groups[key].append(call)
    rewards, advantages = batch.rewards.tolist(), [0.0] * len(batch.uid)
    for calls in groups.values():
        mean = sum(rewards[call] for call in calls) / len(calls)
        for call in calls:
            advantages[call] = (rewards[call] - mean) / max(mean, floor)
    return advantages


class Shrunk:
    """The same choice as a class, which is built with the options: the baseline of a sample leans towards the mean of
    the whole step, which helps where a sample has few episodes."""

    def __init__(self, trust: float = 0.2):
        """`trust`: from 0 (the sample's own mean) to 1 (the step's)."""
        self.trust = trust

    def credit(self, batch) -> list[float]:
        rewards, samples = batch.rewards.tolist(), defaultdict(list)
        for uid, reward in zip(batch.uid, rewards, strict=True):
            samples[uid].append(reward)
        overall = sum(rewards) / len(rewards)
        baseline = {uid: (1 - self.trust) * sum(own) / len(own) + self.trust * overall for uid, own in samples.items()}
        return [reward - baseline[uid] for uid, reward in zip(batch.uid, rewards, strict=True)]
