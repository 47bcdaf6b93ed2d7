"""Agents that hardly learn, or learn what is not asked of them, named while the run goes on.

Invariant: an agent is named once for each condition, which, except for dominance, has held in PATIENCE steps in a row.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import linear_regression

from recipe.dag.workflow.schema import Workflow

LITTLE = 0.02
"""Share of its policy's gradient mass below which an agent starves."""
SILENT = 0.9
"""Share of its groups without an advantage above which it does."""
SOLVED = 0.9
PATIENCE = 3
WINDOW, FEWEST = 40, 8
"""Steps over which trends are taken, at most and at least."""
CERTAIN = 3.0
"""Standard errors of a trend that is not noise."""


class Starvation:
    """`lines` of each step yields the warnings."""

    def __init__(self, workflow: Workflow):
        sharing = Counter(agent.policy for agent in workflow.agents)
        self._shared = {agent.name: agent.policy for agent in workflow.agents if sharing[agent.policy] > 1}
        self._agents = [agent.name for agent in workflow.agents]
        self._steps: Counter[tuple[str, str]] = Counter()
        self._dominated: set[str] = set()
        self._history: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def lines(
        self, metrics: Mapping[str, float], dominant: Mapping[str, tuple[str, float]] | None = None
    ) -> Iterator[str]:
        """Yield a line for each agent whose condition has now held for PATIENCE steps, and for each of `dominant`:
        policy -> its agent with nearly all of its loss, and the share."""
        for policy, (agent, share) in (dominant or {}).items():
            if policy not in self._dominated:
                self._dominated.add(policy)
                yield (
                    f"agent {agent} has {share:.0%} of the loss of policy {policy}, so its other agents hardly learn; "
                    "set `algorithm: {agent_weights: equal}`, or loss_agg: seq-mean-token-mean"
                )
        accuracy = self._trend("episode/accuracy", metrics)
        for agent in self._agents:
            rises = self._trend(f"agent/{agent}/reward/mean", metrics)
            solved = metrics.get("episode/accuracy", 0.0) > SOLVED
            hacked = rises is not None and accuracy is not None and rises > CERTAIN and accuracy < 1.0 and not solved
            if self._lasts(agent, "hack", hacked):
                yield (
                    f"the reward of agent {agent} rises by {rises:.1f} standard errors and accuracy by {accuracy:.1f}: "
                    "look at what it is paid for with `verl-dag trace`; `verl-dag audit` tries the reward"
                )
            mass = metrics.get(f"agent/{agent}/grad_mass")
            if self._lasts(agent, "mass", agent in self._shared and mass is not None and mass < LITTLE):
                yield (
                    f"agent {agent} has {mass:.1%} of the gradient mass of policy {self._shared[agent]} (tokens times "
                    "|advantage|): the other agents capture the shared weights; set `algorithm: {agent_weights: "
                    "equal}`, or give it a policy of its own"
                )
            silent = metrics.get(f"agent/{agent}/silent_groups")
            learned = metrics.get("episode/accuracy", 0.0) > SOLVED  # there is nothing left to teach
            if self._lasts(agent, "silent", silent is not None and silent > SILENT and not learned):
                yield (
                    f"agent {agent} starves: in {silent:.0%} of its groups all its advantages are 0, as all episodes "
                    "pay it the same; look at its reward with `verl-dag trace`"
                )

    def _lasts(self, agent: str, kind: str, holds: bool) -> bool:
        """Count the steps in a row, and return whether this is the one that makes them enough."""
        reported = self._steps[agent, kind] >= PATIENCE
        self._steps[agent, kind] = self._steps[agent, kind] + 1 if holds or reported else 0
        return self._steps[agent, kind] == PATIENCE

    def _trend(self, key: str, metrics: Mapping[str, float]) -> float | None:
        """Add the step's value to the history of a metric and return its trend; None if there are too few."""
        history = self._history[key]
        if key in metrics:
            history.append(metrics[key])
        return trend(history) if len(history) >= FEWEST else None


def trend(values: Sequence[float]) -> float:
    """Return the slope of a line through the values over its standard error."""
    steps = range(len(values))
    slope, intercept = linear_regression(steps, values)
    rest = sum((value - intercept - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    middle = (len(values) - 1) / 2
    error = (rest / (len(values) - 2) / sum((step - middle) ** 2 for step in steps)) ** 0.5
    return slope / max(error, 1e-12)
