"""The protocol of users' environments."""

from __future__ import annotations

from typing import Any, Protocol


class Env(Protocol):
    """An environment; the engine creates one instance per episode. A class needs only `step`::

        class Countdown:
            def reset(self, sample, seed):
                self.left = 3
                return "3 tries left"

            def step(self, actions, ground_truth):
                self.left -= 1
                solved = actions[-1].strip() == ground_truth
                return f"{self.left} tries left", float(solved), solved or self.left == 0

    Methods may be async; sync methods run in a thread. Async methods of an instance run on an event loop that belongs
    to the instance, so instances must not share objects that are bound to a loop, such as an HTTP client. An optional
    method `close(self)` is called at the end of the episode, also of one that failed or was cancelled. An optional
    attribute `tool_state`, read after `reset`, maps names of tools to entries that are added to their state of this
    episode.
    """

    def reset(self, sample: dict[str, Any], seed: int) -> Any:
        """Return the first observation, in one of the forms of `step`. Optional.

        It may take any of `sample`, `seed`, `sandbox` (the run's SandboxClient) and `agents` (names of all agents that
        step or see an env), passed by name. `seed` is the same for all episodes of a group.
        """
        ...

    def step(self, actions: list[str], ground_truth: Any) -> tuple[Any, Any, bool] | tuple[Any, Any, bool, dict]:
        """Return (obs, reward, done) or (obs, reward, done, info).

        actions: one text per player, in agent order; "" for a player whose node was skipped, whose reward is ignored.
        obs: one value for all agents, a list with one entry per player, or a dict by agent name. A list always means
            one entry per player; wrap an observation that is itself a list in a dict.
        reward: a number for every agent, a list per player, or a dict by agent name. With an estimator that carries
            rewards from agent to agent (gae_chain, mappo, vdn, qmix) a single number goes to the last player only.
        done: True ends the episode after this turn.
        info: a JSON-able dict for the workflow's conditions and the record.

        Arguments with these two names are passed by name, in any order; with other names, by position. A step that
        takes `agents` gets the agent of each action, one that takes `agent` the agent whose node steps the env.
        """
        ...
