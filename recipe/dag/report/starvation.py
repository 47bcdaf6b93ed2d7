"""Agents that hardly learn, named while the run goes on.

Invariant: an agent is named once, after the condition has held in PATIENCE steps in a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from recipe.dag.workflow.schema import Workflow

LITTLE = 0.02
"""Share of its policy's gradient mass below which an agent starves."""
SILENT = 0.9
"""Share of its groups without an advantage above which it does."""
SOLVED = 0.9
PATIENCE = 3


class Starvation:
    """`lines(metrics)` of each step yields the warnings."""

    def __init__(self, workflow: Workflow):
        sharing = Counter(agent.policy for agent in workflow.agents)
        self._shared = {agent.name: agent.policy for agent in workflow.agents if sharing[agent.policy] > 1}
        self._agents = [agent.name for agent in workflow.agents]
        self._steps: Counter[tuple[str, str]] = Counter()

    def lines(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield a line for each agent whose condition has now held for PATIENCE steps."""
        for agent in self._agents:
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
