"""A plan as a Mermaid flowchart, as GitHub draws it.

Invariant: equal plans give equal text. A loop is a frame with an edge back, a condition is the label of the edges into
its node, and a critic is a drum. Solid edges carry data; dotted ones order the policies' updates or lead to the next
round.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.core.counted import counted
from recipe.dag.workflow.node import KINDS, Kind
from recipe.dag.workflow.plan import Plan, PlannedLoop, PlannedNode

COLOURS = ("#cfe2ff", "#d1e7dd", "#fff3cd", "#f8d7da", "#e2d9f3", "#cff4fc", "#ffe5d0", "#d3d3d3")
_BOX, _HEXAGON = ("[", "]"), ("{{", "}}")


def to_mermaid(plan: Plan) -> str:
    return "\n".join(["flowchart TD", *_Chart(plan).lines()])


def step_name(node: PlannedNode) -> str:
    """Return the name of what a node without an agent does."""
    return KINDS[Kind(node.kind)].step


class _Chart:
    def __init__(self, plan: Plan):
        self.plan = plan
        # Declared ids may be Mermaid keywords ("end"), so nodes get new ids.
        self.ids = {node.id: f"n{index}" for index, node in enumerate(plan.nodes)}
        self.colour = {policy.name: f"p{index}" for index, policy in enumerate(plan.policies)}
        self.training = {name for level in plan.training for name in level}

    def lines(self) -> Iterator[str]:
        plan = self.plan
        framed = {name for loop in plan.loops for name in loop.nodes}
        owned = {node.id for node in plan.nodes if node.id in self.training and node.policy}
        yield from (f"  {self.box(n)}" for n in plan.nodes if n.id not in framed | owned)
        for index, loop in enumerate(plan.loops):
            body = [node for node in plan.nodes if node.id in loop.nodes]
            yield from self.frame(f"loop{index}", _loop_title(loop), body)
        for policy in plan.policies:
            steps = [n for n in plan.nodes if n.id in self.training and n.policy == policy.name]
            yield from self.frame(f"train_{self.colour[policy.name]}", f"training of policy {policy.name}", steps)
        for node in plan.nodes:
            yield from self.edges(node)
        for loop in plan.loops:
            first, last = (self.ids[name] for name in (loop.nodes[0], loop.nodes[-1]))
            yield f"  {last} -. next round .-> {first}"
        for index, policy in enumerate(plan.policies):
            style = "stroke:#333,color:#111" + ("" if policy.trained else ",stroke-dasharray:4 3")
            yield f"  classDef {self.colour[policy.name]} fill:{COLOURS[index % len(COLOURS)]},{style}"

    def box(self, node: PlannedNode) -> str:
        opened, closed = KINDS[Kind(node.kind)].shape or (_BOX if node.policy else _HEXAGON)
        colour = f":::{self.colour[node.policy]}" if node.policy else ""
        return f'{self.ids[node.id]}{opened}"{_label(node)}"{closed}{colour}'

    def frame(self, name: str, title: str, nodes: list[PlannedNode]) -> Iterator[str]:
        if nodes:
            yield f'  subgraph {name}["{_safe(title)}"]'
            yield from (f"    {self.box(node)}" for node in nodes)
            yield "  end"

    def edges(self, node: PlannedNode) -> Iterator[str]:
        label = f'|"if {_safe(node.when)}"|' if node.when else ""
        for name in node.after:
            other = self.plan.node(name).policy
            crosses = {name, node.id} <= self.training and other and node.policy and other != node.policy
            yield f"  {self.ids[name]} {'-.->' if crosses else '-->'}{label} {self.ids[node.id]}"


def _label(node: PlannedNode) -> str:
    second = node.agent or step_name(node)
    text = f"{node.id}<br/>{second}" + (f" ({node.policy})" if node.agent else "")
    text += " of the group" if node.of_group else ""
    text += f"<br/>{_safe(node.candidates)}" if node.candidates else ""
    text += f"<br/>env {_safe(' or '.join(node.envs))}" if node.envs else ""
    return text + (f"<br/>if {_safe(node.when)}" if node.when and not node.after else "")


def _loop_title(loop: PlannedLoop) -> str:
    rounds = counted(loop.max_rounds, "round")
    return f"loop {loop.name}: {f'up to {rounds}, until {loop.until}' if loop.until else rounds}"


def _safe(text: str) -> str:
    """Escape a user's text so that it cannot end Mermaid's quotes or become a tag."""
    for character, name in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        text = text.replace(character, name)
    return " ".join(text.split())
