"""Measures of readability:  python docs/measure.py FOLDER...

Lines are all lines; a function's length counts its signature and docstring. `ruff` must be on the PATH.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

VAGUE_NAMES = {"found", "mine", "said", "given", "place", "near", "shown", "one", "made"}
PHRASES = {
    '"is no X"': r"(?<![Tt]here )\b(?:is|are|was) no (?!longer|more)[a-z]",
    'docstrings that open with "What"': r"^What\b",
    '"whoever", "nobody", "somebody", "everybody"': r"\b(?:whoever|nobody|somebody|everybody|anybody)\b",
    '"stands in", "stands on", "stands for"': r"\bstands? (?:in|on|for)\b",
    '"of its own"': r"\bof its own\b",
    '"told"': r"\btold\b",
    '"but for"': r"\bbut for\b",
    '"mend"': r"\bmend\b",
}


@dataclass
class Tally:
    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    comments: int = 0
    docstring_lines: int = 0
    public: int = 0
    documented: int = 0
    parameters: int = 0
    typed: int = 0
    comprehensions: int = 0
    conditional_expressions: int = 0
    vague_bindings: int = 0
    texts: list[tuple[str, bool]] = field(default_factory=list)
    """(text, whether it is a docstring): docstrings, comments and messages."""

    def read(self, path: Path) -> None:
        source = path.read_text()
        tree = ast.parse(source)
        self.files.append(source.count("\n"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                self.comments += 1
                self.texts.append((token.string.lstrip("# "), False))
        for node in ast.walk(tree):
            self._count(node)

    def _count(self, node: ast.AST) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                self.docstring_lines += docstring.count("\n") + 1
                self.texts.append((docstring, True))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._count_function(node)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self.comprehensions += 1
        elif isinstance(node, ast.IfExp):
            self.conditional_expressions += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.vague_bindings += node.id in VAGUE_NAMES
        elif isinstance(node, ast.arg):
            self.vague_bindings += node.arg in VAGUE_NAMES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            self.texts.append((node.value, False))

    def _count_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
        if not node.name.startswith("_"):
            self.public += 1
            self.documented += ast.get_docstring(node) is not None
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        self.parameters += len(arguments)
        self.typed += sum(argument.annotation is not None for argument in arguments)


def distribution(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):g}, {ordered[int(0.9 * (len(ordered) - 1))]}, {ordered[-1]}"


def ruff_count(rule: str, folders: list[str]) -> int:
    arguments = ["--isolated", "--select", rule, "--output-format", "concise", *folders]
    done = subprocess.run(["ruff", "check", *arguments], capture_output=True, text=True)
    return len(re.findall(rf"^\S+:\d+:\d+: {rule}\b", done.stdout, re.MULTILINE))


def rows(folders: list[str], paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    tally = Tally()
    for path in paths:
        tally.read(path)
    lines = sum(tally.files)
    yield "files, lines", f"{len(tally.files)}, {lines:,}"
    yield "lines per file: median, 90 %, maximum", distribution(tally.files)
    yield "lines per function: median, 90 %, maximum", distribution(tally.functions)
    yield "functions with a complexity above 10 (ruff C901)", str(ruff_count("C901", folders))
    yield "functions with more than 5 arguments (ruff PLR0913)", str(ruff_count("PLR0913", folders))
    yield "comments per 100 lines", f"{100 * tally.comments / lines:.1f}"
    yield "docstring lines per 100", f"{100 * tally.docstring_lines / lines:.1f}"
    yield "public functions with a docstring", f"{100 * tally.documented / tally.public:.0f} %"
    yield "typed parameters", f"{100 * tally.typed / tally.parameters:.0f} %"
    per_thousand = [1000 * count / lines for count in (tally.comprehensions, tally.conditional_expressions)]
    yield "comprehensions, conditional expressions per 1,000 lines", ", ".join(f"{rate:.0f}" for rate in per_thousand)
    yield f"bindings of the names {', '.join(sorted(VAGUE_NAMES))}", str(tally.vague_bindings)
    for name, pattern in PHRASES.items():
        texts = [text for text, is_docstring in tally.texts if is_docstring or not pattern.startswith("^")]
        yield name, str(sum(len(re.findall(pattern, text)) for text in texts))


def main(folders: list[str]) -> None:
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    for name, value in rows(folders, paths):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["recipe/dag"])
