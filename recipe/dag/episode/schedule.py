"""Who may move now, within one turn.

Invariant: pure, but for the two questions that it asks (`allowed`, `again`), and it never asks one before all that the
answer may rest on is over. So which moves are made, and what each waits for, follow from the graph and the answers,
never from the order in which moves end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode, Slot


class Task(NamedTuple):
    node: str
    round: int
    kind: Literal["move", "step"]
    """step: of the env that the node steps after its move."""


class Schedule:
    """One turn. Every task handed out by `start` or `over` must be reported to `over` once."""

    def __init__(
        self,
        graph: EpisodeGraph,
        envs: Mapping[str, str],
        *,
        allowed: Callable[[EpisodeNode, int], bool],
        again: Callable[[str, int], bool],
    ) -> None:
        """`envs`: the env that each node steps, by node id. `allowed(node, round)`: its `when` holds. `again(loop,
        round)`: another round is wanted; asked only while there is one left and somebody moved."""
        self._graph, self._envs, self._players = graph, envs, graph.players(envs)
        self._allowed, self._again = allowed, again
        self.skipped: dict[Slot, Literal["when", "dependencies"]] = {}
        self.rounds = dict.fromkeys(graph.loops, 0)
        """The round that each loop is in, or was in last."""
        self._ended: set[str] = set()
        self._handed: set[Task] = set()
        self._over: set[Task] = set()

    def start(self) -> list[Task]:
        return self._advance()

    def over(self, task: Task) -> list[Task]:
        """What may be done now that `task` is."""
        self._over.add(task)
        return self._advance()

    def _advance(self) -> list[Task]:
        found: list[Task] = []
        moving = True
        while moving:
            moving = False
            for place in self._graph.nodes:
                if place.loop in self._ended:
                    continue
                slot = place.id, self.rounds.get(place.loop, 0)
                if self._may_move(place, slot):
                    if self._skips(place, slot):
                        moving = True
                    else:
                        found.append(self._hand_out(slot, "move"))
                elif self._may_step(place, slot):
                    found.append(self._hand_out(slot, "step"))
            for loop, body in self._graph.bodies.items():
                round = self.rounds[loop]
                if loop not in self._ended and all(self._finished((place.id, round)) for place in body):
                    moving = True
                    # Where nobody moved nothing is new, so the next round would be the same.
                    idle = all((place.id, round) in self.skipped for place in body)
                    last = idle or round + 1 == self._graph.loops[loop].max_rounds
                    if not last and self._again(loop, round):
                        self.rounds[loop] += 1
                    else:
                        self._ended.add(loop)
        return found

    def _hand_out(self, slot: Slot, kind: Literal["move", "step"]) -> Task:
        task = Task(*slot, kind)
        self._handed.add(task)
        return task

    def _may_move(self, place: EpisodeNode, slot: Slot) -> bool:
        if slot in self.skipped or Task(*slot, "move") in self._handed:
            return False
        return all(self._finished_for(place, self._graph.by_id[name], slot[1]) for name in place.dependencies)

    def _skips(self, place: EpisodeNode, slot: Slot) -> bool:
        if place.dependencies and not any(self._ran_for(place, name, slot[1]) for name in place.dependencies):
            self.skipped[slot] = "dependencies"
        elif not self._allowed(place, slot[1]):
            self.skipped[slot] = "when"
        return slot in self.skipped

    def _may_step(self, place: EpisodeNode, slot: Slot) -> bool:
        env = self._envs.get(place.id)
        if env is None or Task(*slot, "step") in self._handed or Task(*slot, "move") not in self._over:
            return False
        for name in self._players[place.id]:
            loop = self._graph.by_id[name].loop
            if not (self._moved((name, slot[1])) if loop in (None, place.loop) else loop in self._ended):
                return False
        # One env stepped by several nodes: in their order, never two at once.
        earlier = (other for other in self._graph.nodes[: place.position] if self._envs.get(other.id) == env)
        return all(self._finished_for(place, other, slot[1]) for other in earlier)

    def _moved(self, slot: Slot) -> bool:
        return slot in self.skipped or Task(*slot, "move") in self._over

    def _finished(self, slot: Slot) -> bool:
        last = Task(*slot, "step" if slot[0] in self._envs else "move")
        return slot in self.skipped or last in self._over

    def _finished_for(self, place: EpisodeNode, other: EpisodeNode, round: int) -> bool:
        """Whether `place` in its round need not wait for `other` any more."""
        if other.loop is None:
            return self._finished((other.id, 0))
        return self._finished((other.id, round)) if other.loop == place.loop else other.loop in self._ended

    def _ran_for(self, place: EpisodeNode, name: str, round: int) -> bool:
        other = self._graph.by_id[name].loop
        rounds = (round,) if other == place.loop else range(self.rounds[other] + 1) if other else (0,)
        return any(Task(name, number, "move") in self._over for number in rounds)
