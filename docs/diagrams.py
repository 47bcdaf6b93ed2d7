"""Draw a Mermaid flowchart as SVG, so that the site needs no script from elsewhere: `svg(text)`.

Reads what `verl-dag plan --format mermaid` prints; any other line is a ValueError. Equal text gives equal SVG.

Layered drawing: a node is one rank below the lowest node that leads to it. The label of an edge is a node without a
border, shared by the edges that have it in common, and an edge over several ranks passes an empty node in each of those
between, so that no line crosses a box. `-. label .->`, the way back of a loop, takes no part in the ranks.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

_SHAPES = {"[": "box", "[/": "box", "{{": "hexagon", "[(": "drum", "([": "stadium"}
_NODE = r'(\w+)(?:(\[\(|\(\[|\[/|\{\{|\[)"?([^"\]]*)"?(?:\)\]|\]\)|/\]|\}\}|\]))?(?::::(\w+))?'
NODE = re.compile(_NODE)
EDGE = re.compile(rf'{_NODE} (-->|-\.->|-\. (?P<back>.+) \.->)(?:\|"(?P<label>[^"]+)"\|)? {_NODE}')
FRAME = re.compile(r'subgraph (\w+)\["([^"]*)"\]')
STYLE = re.compile(r"classDef (\w+) (.*)")
CHARACTER, LINE, GAP, PADDING = 7.3, 18, 30, 14
"""Width of a character, height of a line, distance between ranks and nodes, inner margin of a frame, in pixels."""


@dataclass
class Node:
    lines: list[str]
    shape: str = "box"
    style: str = ""
    frame: str = ""
    rank: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return max(map(len, self.lines), default=0) * CHARACTER + (24 if self.lines else 8)

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + (14 if self.shape != "label" else 0) if self.lines else 0


@dataclass
class Edge:
    source: str
    target: str
    dotted: bool = False
    arrow: bool = True


class Chart:
    """A parsed flowchart with the positions of its nodes."""

    def __init__(self, text: str):
        self.nodes: dict[str, Node] = {}
        self.edges: list[Edge] = []
        self.back: list[tuple[Edge, str]] = []
        self.frames: dict[str, list[str]] = {}
        self.styles: dict[str, tuple[str, str]] = {"": ("", "")}
        self._labels: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
        self._parse(text)
        self._share_labels()
        self._rank()
        self._order()
        self._place()

    def _parse(self, text: str) -> None:
        first, *lines = (line.strip() for line in text.strip().splitlines())
        if first != "flowchart TD":
            raise ValueError(f"not a flowchart from top to bottom: {first}")
        frame = ""
        for line in filter(None, lines):
            if match := FRAME.fullmatch(line):
                frame, self.frames[match[1]] = match[1], textwrap.wrap(_plain(match[2]), 40)
            elif line == "end":
                frame = ""
            elif match := STYLE.fullmatch(line):
                properties = dict(part.split(":") for part in match[2].split(","))
                colour = f' style="fill:{properties.pop("color")}"'
                self.styles[match[1]] = f' style="{";".join(map(":".join, properties.items()))}"', colour
            elif match := EDGE.fullmatch(line):
                *source, arrow, back, label, name, opening, words, style = match.groups()
                edge = Edge(self._node(*source, frame), self._node(name, opening, words, style, frame), arrow != "-->")
                if back:
                    self.back.append((edge, back))
                elif label:
                    self._labels[edge.target, _plain(label), edge.dotted].append(edge.source)
                else:
                    self.edges.append(edge)
            elif match := NODE.fullmatch(line):
                self._node(*match.groups(), frame)
            else:
                raise ValueError(f"not a line of a plan's flowchart: {line}")

    def _node(self, name: str, opening: str | None, words: str | None, style: str | None, frame: str) -> str:
        if opening:
            self.nodes[name] = Node(re.split("<br/>", words or ""), _SHAPES[opening], style or "", frame)
            self.nodes[name].lines = [_plain(line) for line in self.nodes[name].lines]
        elif name not in self.nodes:
            raise ValueError(f"an edge names {name} before the node")
        return name

    def _share_labels(self) -> None:
        """Make one node of each label with the same sources."""
        targets: dict[tuple[str, bool, tuple[str, ...]], list[str]] = defaultdict(list)
        for (target, label, dotted), sources in self._labels.items():
            targets[label, dotted, tuple(sources)].append(target)
        for number, ((label, dotted, sources), ends) in enumerate(targets.items()):
            name = f"label {number}"
            self.nodes[name] = Node(textwrap.wrap(label, 34), "label")
            self.edges += [Edge(source, name, dotted, arrow=False) for source in sources]
            self.edges += [Edge(name, end, dotted) for end in ends]

    def _rank(self) -> None:
        """Give each node its rank, and each edge over several ranks an empty node in those between."""
        for _ in self.nodes:
            for edge in self.edges:
                self.nodes[edge.target].rank = max(self.nodes[edge.target].rank, self.nodes[edge.source].rank + 1)
        if any(self.nodes[edge.target].rank <= self.nodes[edge.source].rank for edge in self.edges):
            raise ValueError("the edges form a circle; write its way back as `-. label .->`")
        short: list[Edge] = []
        for edge in self.edges:
            source, last = edge.source, self.nodes[edge.target].rank
            for rank in range(self.nodes[edge.source].rank + 1, last):
                name = f"{edge.source} to {edge.target}, {rank}"
                self.nodes[name] = Node([], "label", rank=rank)
                short.append(Edge(source, name, edge.dotted, arrow=False))
                source = name
            short.append(Edge(source, edge.target, edge.dotted, edge.arrow))
        self.edges = short

    def _order(self) -> None:
        """Order the nodes of each rank by their neighbours; those of a frame stay together."""
        ranks: dict[int, list[str]] = defaultdict(list)
        for name, node in self.nodes.items():
            ranks[node.rank].append(name)
        self.ranks = [ranks[rank] for rank in sorted(ranks)]
        self.neighbours: dict[str, list[str]] = defaultdict(list)
        for edge in self.edges:
            self.neighbours[edge.source].append(edge.target)
            self.neighbours[edge.target].append(edge.source)
        for _ in range(8):
            place = {name: i - (len(rank) - 1) / 2 for rank in self.ranks for i, name in enumerate(rank)}
            wish = {name: fmean(place[other] for other in self.neighbours[name] or [name]) for name in self.nodes}
            framed = {
                frame: fmean(wish[name] for name, node in self.nodes.items() if node.frame == frame)
                for frame in {node.frame for node in self.nodes.values()} - {""}
            }
            for rank in self.ranks:
                rank.sort(key=lambda name: (framed.get(self.nodes[name].frame, wish[name]), wish[name]))

    def _place(self) -> None:
        """Move the nodes of each rank towards the middle of their neighbours, at their distances."""
        for _ in range(300):
            for rank in self.ranks:
                nodes = [self.nodes[name] for name in rank]
                wishes = [fmean(self.nodes[other].x for other in self.neighbours[name] or [name]) for name in rank]
                right = float("-inf")
                for number, (name, node, wish) in enumerate(zip(rank, nodes, wishes, strict=True)):
                    space = self._distance(rank[number - 1], name) if number else 0.0
                    node.x = max(wish, right + space + node.width / 2)
                    right = node.x + node.width / 2
                shift = fmean(wish - node.x for wish, node in zip(wishes, nodes, strict=True))
                for node in nodes:
                    node.x += shift
        y = 0.0
        for number, rank in enumerate(self.ranks):
            nodes = [self.nodes[name] for name in rank]
            opened = {node.frame for node in nodes} - self._frames_at(number - 1) - {""}
            height = max(node.height for node in nodes)
            y += max((LINE * len(self.frames[frame]) + PADDING for frame in opened), default=0)
            y += PADDING if number and self._frames_at(number - 1) else 0
            for node in nodes:
                node.y = y + height / 2
            y += height + GAP

    def _frames_at(self, rank: int) -> set[str]:
        return {node.frame for node in self.nodes.values() if node.rank == rank and node.frame}

    def _distance(self, left: str, right: str) -> float:
        frames = {self.nodes[left].frame, self.nodes[right].frame}
        labels = [len(label) * CHARACTER for edge, label in self.back if {edge.source, edge.target} == {left, right}]
        return max([GAP / 2, *labels]) + (PADDING * 2 if len(frames) > 1 else GAP / 2)

    def svg(self) -> str:
        """Return the chart as an `svg` element; its colours follow the page."""
        boxes = [(frame, self._box(frame)) for frame in self.frames]
        sides = [x for node in self.nodes.values() for x in (node.x - node.width / 2, node.x + node.width / 2)]
        sides += [x for _, (x0, _, x1, _) in boxes for x in (x0, x1)]
        ways = [self._way_back(edge, label) for edge, label in self.back]
        left, right = min(sides) - 8, max([*sides, *(end for _, end in ways)]) + 8
        top = min([n.y - n.height / 2 for n in self.nodes.values()] + [y0 for _, (_, y0, _, _) in boxes]) - 4
        bottom = max([n.y + n.height / 2 for n in self.nodes.values()] + [y1 for _, (_, _, _, y1) in boxes]) + 4
        size = f"{right - left:.0f} {bottom - top:.0f}"
        parts = [
            f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" viewBox="{left:.0f} {top:.0f} {size}" '
            f'style="width:{right - left:.0f}px" role="img">',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
            *(_rectangle("frame", x0, y0, x1 - x0, y1 - y0, 6) for _, (x0, y0, x1, y1) in boxes),
            *map(self._edge, self.edges),
            *(way for way, _ in ways),
            *(part for node in self.nodes.values() for part in self._drawn(node)),
            *(part for frame, box in boxes for part in self._title(frame, box)),
            "</svg>",
        ]
        return "\n".join(parts)

    def _box(self, frame: str) -> tuple[float, float, float, float]:
        nodes = [node for node in self.nodes.values() if node.frame == frame]
        middle = fmean(node.x for node in nodes)
        half = (
            max(max(map(len, self.frames[frame])) * CHARACTER / 2, *(abs(n.x - middle) + n.width / 2 for n in nodes))
            + PADDING
        )
        top = min(node.y - node.height / 2 for node in nodes) - PADDING - LINE * len(self.frames[frame])
        return middle - half, top, middle + half, max(node.y + node.height / 2 for node in nodes) + PADDING

    def _title(self, frame: str, box: tuple[float, float, float, float]) -> Iterator[str]:
        x0, y0, *_ = box
        for number, line in enumerate(self.frames[frame], 1):
            yield _text("title", x0 + PADDING, y0 + LINE * number, line)

    def _edge(self, edge: Edge) -> str:
        source, target = self.nodes[edge.source], self.nodes[edge.target]
        y0, y1 = source.y + source.height / 2, target.y - target.height / 2
        middle = (y0 + y1) / 2
        return _path(
            f"M{source.x:.0f} {y0:.0f}C{source.x:.0f} {middle:.0f} {target.x:.0f} {middle:.0f} {target.x:.0f} {y1:.0f}",
            edge,
        )

    def _way_back(self, edge: Edge, label: str) -> tuple[str, float]:
        """Return a line between two neighbours, or around the right of what is between two nodes, and its right end."""
        source, target = self.nodes[edge.source], self.nodes[edge.target]
        if source.rank == target.rank:
            side = 1 if source.x < target.x else -1
            x0, x1 = source.x + side * source.width / 2, target.x - side * target.width / 2
            line, x, y, kind = f"M{x0:.0f} {source.y:.0f}H{x1:.0f}", (x0 + x1) / 2, source.y - 6, "label"
        else:
            x0, x1 = source.x + source.width / 2, target.x + target.width / 2
            x = max(n.x + n.width / 2 for n in self.nodes.values() if target.rank <= n.rank <= source.rank) + GAP
            line = f"M{x0:.0f} {source.y:.0f}C{x:.0f} {source.y:.0f} {x:.0f} {target.y:.0f} {x1:.0f} {target.y:.0f}"
            x, y, kind = x + 4, (source.y + target.y) / 2, "side"
        return _path(line, edge) + _text(kind, x, y, label), x + len(label) * CHARACTER

    def _drawn(self, node: Node) -> Iterator[str]:
        left, top, width, height = node.x - node.width / 2, node.y - node.height / 2, node.width, node.height
        style, colour = self.styles[node.style]
        if node.shape == "hexagon":
            tips = [(left - 6, node.y), (left + 6, top), (left + width - 6, top), (left + width + 6, node.y)]
            tips += [(left + width - 6, top + height), (left + 6, top + height)]
            points = " ".join(f"{x:.0f},{y:.0f}" for x, y in tips)
            yield f'<polygon class="node" points="{points}"{style}/>'
        elif node.shape != "label":
            round_ = {"box": 3, "drum": 9, "stadium": height / 2}[node.shape]
            yield _rectangle("node", left, top, width, height, round_, style)
        kind = "label" if node.shape == "label" else "text"
        for number, line in enumerate(node.lines):
            y = node.y + (number - (len(node.lines) - 1) / 2) * LINE + 4.5
            yield _text(kind, node.x, y, line, colour)


def svg(text: str) -> str:
    return Chart(text).svg()


def _rectangle(kind: str, x: float, y: float, width: float, height: float, radius: float, style: str = "") -> str:
    area = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="{radius:.0f}"'
    return f'<rect class="{kind}" {area}{style}/>'


def _text(kind: str, x: float, y: float, line: str, style: str = "") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}"{style}>{html.escape(line)}</text>'


def _path(line: str, edge: Edge) -> str:
    arrow = ' marker-end="url(#arrow)"' if edge.arrow else ""
    return f'<path class="{"dotted" if edge.dotted else "line"}" d="{line}"{arrow}/>'


def _plain(text: str) -> str:
    """Return the text of which Mermaid's `#quot;` and `#35;` are a part."""
    return html.unescape(re.sub(r"#(\d+);", r"&#\1;", re.sub(r"#([a-z]+);", r"&\1;", text)))
