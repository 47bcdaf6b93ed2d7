"""Decides which nodes may run next within a turn, and names the decisions that led to a call.

Invariant: pure, except for the two questions it asks (`should_run`, `should_repeat`), and it asks neither before
everything that the answer may depend on has finished. Which nodes run, and what each waits for, therefore follow from
the graph and the answers, never from the order in which nodes finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode, Slot

Work = Literal["run", "step"]


class Task(NamedTuple):
    """One unit of work of a turn."""

    node: str
    round: int
    kind: Work
    """run: the node itself. step: the env that the node steps after it has run."""

    @property
    def slot(self) -> Slot:
        return self.node, self.round


class Schedule:
    """One turn. Every task returned by `initial_tasks` or `on_finished` must be passed to `on_finished` once."""

    def __init__(
        self,
        graph: EpisodeGraph,
        envs: Mapping[str, str],
        *,
        should_run: Callable[[EpisodeNode, int], bool],
        should_repeat: Callable[[str, int], bool],
    ) -> None:
        """`envs`: the env that each node steps, by node id. `should_run(node, round)`: the node's `when` holds.
        `should_repeat(loop, round)`: the loop's `until` does not hold yet; asked only if a round is left and a node of
        the loop ran in this one."""
        self._graph, self._envs, self._players = graph, envs, graph.players(envs)
        self._should_run, self._should_repeat = should_run, should_repeat
        self.skipped: dict[Slot, Literal["when", "dependencies"]] = {}
        self.rounds = dict.fromkeys(graph.loops, 0)
        """The current round of each loop, or its last one if the loop has ended."""
        self._ended: set[str] = set()
        self._started: set[Task] = set()
        self._finished: set[Task] = set()

    def initial_tasks(self) -> list[Task]:
        """Return the tasks that can start at once."""
        return self._advance()

    def on_finished(self, task: Task) -> list[Task]:
        """Return the tasks that can start now that `task` has finished."""
        self._finished.add(task)
        return self._advance()

    def branch_of(self, slot: Slot, turn: int, before: str) -> str:
        """Return the branch of a call: the decisions of conditions that led to it, as text.

        Two calls have the same branch if and only if the same nodes were skipped and the same loops ended after the
        same rounds on the way to them; it is "" where nothing branches. `before`: `branch_after` of the turn before.
        Of this turn it contains only the decisions about nodes that the call waited for.
        """
        node = self._graph.by_id[slot[0]]
        skipped = [other for other in self.skipped if self._precedes(other, node, slot[1])]
        awaited = {self._graph.by_id[name].loop for name in node.ancestors} - {node.loop}
        rounds = {loop: last for loop, last in self.rounds.items() if loop in awaited}
        return self._branch_text(turn, skipped, rounds, before)

    def branch_after(self, turn: int, before: str) -> str:
        """Return all decisions up to the end of `turn`, as text."""
        return self._branch_text(turn, self.skipped, self.rounds, before)

    def _branch_text(self, turn: int, skipped: Iterable[Slot], rounds: Mapping[str, int], before: str) -> str:
        parts = [f"{turn}.{number} without {node}" for node, number in sorted(skipped, key=self._graph.causal)]
        parts += [f"{turn} {loop} x{last + 1}" for loop, last in rounds.items()]
        return "; ".join([before] * bool(before) + parts)

    def _precedes(self, skipped: Slot, node: EpisodeNode, round_index: int) -> bool:
        name, skipped_round = skipped
        is_ancestor = name in node.ancestors
        if self._graph.by_id[name].loop != node.loop:
            return is_ancestor
        # In one loop a node also waits for all nodes of the rounds before. Outside loops every round is 0.
        return skipped_round < round_index or (is_ancestor and skipped_round == round_index)

    def _advance(self) -> list[Task]:
        """Skip nodes, repeat or end loops, and collect what can start, until nothing changes any more."""
        tasks: list[Task] = []
        changed = True
        while changed:
            changed = False
            for node in self._graph.nodes:
                if node.loop in self._ended:
                    continue
                slot = node.id, 0 if node.loop is None else self.rounds[node.loop]
                if self._may_run(node, slot):
                    if self._skips(node, slot):
                        changed = True
                    else:
                        tasks.append(self._start(slot, "run"))
                elif self._may_step(node, slot):
                    tasks.append(self._start(slot, "step"))
            changed |= self._advance_loops()
        return tasks

    def _advance_loops(self) -> bool:
        """Repeat or end each loop whose round is complete; return whether there was one."""
        changed = False
        for loop, body in self._graph.bodies.items():
            current = self.rounds[loop]
            if loop in self._ended or not all(self._is_complete((node.id, current)) for node in body):
                continue
            changed = True
            # If every node was skipped, nothing has changed and the next round would be the same.
            idle = all((node.id, current) in self.skipped for node in body)
            last = idle or current + 1 == self._graph.loops[loop].max_rounds
            if not last and self._should_repeat(loop, current):
                self.rounds[loop] += 1
            else:
                self._ended.add(loop)
        return changed

    def _start(self, slot: Slot, kind: Work) -> Task:
        task = Task(*slot, kind)
        self._started.add(task)
        return task

    def _may_run(self, node: EpisodeNode, slot: Slot) -> bool:
        if slot in self.skipped or Task(*slot, "run") in self._started:
            return False
        return all(self._is_complete_for(node, self._graph.by_id[name], slot[1]) for name in node.after)

    def _skips(self, node: EpisodeNode, slot: Slot) -> bool:
        if node.after and not any(self._ran_for(node, name, slot[1]) for name in node.after):
            self.skipped[slot] = "dependencies"
        elif not self._should_run(node, slot[1]):
            self.skipped[slot] = "when"
        return slot in self.skipped

    def _may_step(self, node: EpisodeNode, slot: Slot) -> bool:
        env = self._envs.get(node.id)
        if env is None or Task(*slot, "step") in self._started or Task(*slot, "run") not in self._finished:
            return False
        if not all(self._has_acted(name, node, slot[1]) for name in self._players[node.id]):
            return False
        # Nodes that share an env step it in their order, never two at once.
        earlier = (other for other in self._graph.nodes[: node.position] if self._envs.get(other.id) == env)
        return all(self._is_complete_for(node, other, slot[1]) for other in earlier)

    def _has_acted(self, player: str, owner: EpisodeNode, round_index: int) -> bool:
        """Return whether the player's action for this step of the owner's env is final."""
        loop = self._graph.by_id[player].loop
        if loop is not None and loop != owner.loop:
            return loop in self._ended
        slot = player, round_index
        return slot in self.skipped or Task(*slot, "run") in self._finished

    def _is_complete(self, slot: Slot) -> bool:
        last = Task(*slot, "step" if slot[0] in self._envs else "run")
        return slot in self.skipped or last in self._finished

    def _is_complete_for(self, node: EpisodeNode, other: EpisodeNode, round_index: int) -> bool:
        """Return whether `node`, in its round, no longer has to wait for `other`."""
        if other.loop is None:
            return self._is_complete((other.id, 0))
        return self._is_complete((other.id, round_index)) if other.loop == node.loop else other.loop in self._ended

    def _ran_for(self, node: EpisodeNode, name: str, round_index: int) -> bool:
        """Return whether `name` ran in a round that `node` depends on."""
        loop = self._graph.by_id[name].loop
        if loop is not None and loop != node.loop:
            return any(Task(name, number, "run") in self._finished for number in range(self.rounds[loop] + 1))
        return Task(name, round_index if loop else 0, "run") in self._finished
