"""The documentation: its site builds, its links lead somewhere, its YAML and Python are valid, and its tables and file
names are those of the code. Commands are run by tests/test_readme.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from docs import diagrams
from recipe.dag.algorithms.catalogue import BLOCKS, ESTIMATORS, OWN, algorithm_class
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.workflow.json_schema import workflow_schema
from recipe.dag.workflow.mermaid import to_mermaid
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.verl_keys import TABLE
from tests.test_readme import READMES, ROOT
from tests.test_shipped import WORKFLOWS

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*READMES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"(?:^<!-- file: (\S+) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page. `file`: the one that it quotes, from `<!-- file: PATH -->` in the line above."""

    page: Path
    file: str
    language: str
    text: str


@cache
def loaded(file: Path) -> Workflow:
    return load_workflow(file)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(*languages: str) -> list[Block]:
    matches = (Block(page, *match) for page in READMES for match in BLOCK.findall(page.read_text()))
    return [block for block in matches if block.language in languages]


def name_of(block: Block) -> str:
    return f"{relative(block.page)}:{block.page.read_text().partition(block.text)[0].count(chr(10))}"


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).strip().replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
    assert not any(seen.values()), f"{page}: two headings have one anchor: {[key for key in seen if seen[key]]}"
    return set(seen)


def nav_pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        (target,) = entry.values()
        yield from [target] if isinstance(target, str) else nav_pages(target)


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text()
    nav = YAML(typ="safe").load(text[text.index("nav:\n") : text.index("theme:\n")])["nav"]
    pages = list(nav_pages(nav))
    assert sorted(page for page in pages if "/" not in page) == [page.name for page in PAGES]
    recipes = [f"repository/{relative(readme)}" for readme in (ROOT / "recipe").glob("*/README.md")]
    assert set(recipes) <= set(pages) and len(set(pages)) == len(pages)


@pytest.mark.parametrize("page", TEXTS, ids=relative)
def test_links_lead_to_files_and_headings(page):
    missing = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            missing.append(link)
    assert missing == []


class Html(HTMLParser):
    """The ids of a page, and what it links to or loads, each with the name of the element."""

    def __init__(self, file: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values["id"]} if values.get("id") else set()
        self.links += [(tag, values[key]) for key in ("href", "src") if values.get(key) and tag != "base"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as it is built without any setting."""
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != "DOCS_REPOSITORY"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {file: Html(file) for file in folder.rglob("*.html") if file.name != "404.html"}


@pytest.mark.parametrize("file", WORKFLOWS, ids=relative)
def test_the_plan_of_every_shipped_workflow_can_be_drawn(file):
    plan = make_plan(loaded(file))
    chart = diagrams.Chart(to_mermaid(plan))
    drawn = [node for node in chart.nodes.values() if node.shape != "label"]
    svg = unescape(chart.svg())
    assert all(f">{line}</text>" in svg for node in drawn for line in node.lines)
    assert sorted(node.lines[0] for node in drawn) == sorted(node.id for node in plan.nodes)
    for one, other in combinations([node for node in chart.nodes.values() if node.lines], 2):
        beside = abs(one.x - other.x) >= (one.width + other.width) / 2 - 1
        assert beside or abs(one.y - other.y) >= (one.height + other.height) / 2, (one, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph LR", "not a flowchart from top to bottom: graph LR"),
        ("flowchart TD\n  click n0 call()", "not a line of a plan's flowchart: click n0 call()"),
        ("flowchart TD\n  n0 --> n1", "an edge names n0 before the node"),
        ('flowchart TD\n  a["x"] --> b["y"]\n  b --> a', "the edges form a circle"),
    ],
)
def test_a_diagram_that_cannot_be_drawn_ends_the_build(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        diagrams.svg(text)


def test_edges_with_one_label_share_it():
    chart = diagrams.Chart("""flowchart TD
  a["x"] -->|"if #quot;so#quot;"| c["z"]
  b["y"] -->|"if #quot;so#quot;"| c
  b -. again .-> a""")
    assert [node.lines for node in chart.nodes.values() if node.shape == "label"] == [['if "so"']]
    assert len(chart.edges) == 3 and [edge.arrow for edge in chart.edges] == [False, False, True]
    assert ">again</text>" in chart.svg() and chart.svg().count('class="dotted"') == 1


def test_the_site_needs_nothing_from_elsewhere(site):
    """A `mermaid` element would make the theme load its script from a CDN."""
    loaded = [link for page in site.values() for tag, link in page.links if tag != "a" and "://" in link]
    assert loaded == []
    assert [file for file in site if re.search(r'class="[^"]*mermaid|@import|url\(["\']?http', file.read_text())] == []
    drawn = {file.parent.name for file in site if '<svg class="diagram"' in file.read_text()}
    assert {"site", "workflows", "architecture", "repository"} <= drawn
    assert all("http" not in link for page in site.values() for tag, link in page.links if tag == "img")


def test_links_and_pictures_of_the_site_lead_somewhere(site):
    missing = []
    for file, page in site.items():
        for _, link in page.links:
            path, _, anchor = link.partition("#")
            if "://" in link or link.startswith(("mailto:", "data:")):
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in site and unquote(anchor) not in site[target].ids):
                missing.append((file.name if file.parent.name == "site" else file.parent.name, link))
    assert missing == []


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("algorithms", "../repository/examples/gallery/workflow_rloo.yaml/"),
        ("algorithms", "../repository/recipe/dag/reward/outcome.py/"),
        ("getting-started", "../repository/examples/gallery/"),
        ("repository/recipe/retool_ma", "../../../operating/"),
        ("repository/recipe/retool_ma", "estimators.png"),
    ],
)
def test_what_pages_link_to_outside_docs_is_in_the_site(site, page, link):
    (links,) = [html.links for file, html in site.items() if file.as_posix().endswith(f"/site/{page}/index.html")]
    assert link in {target.partition("#")[0] for _, target in links}


def test_first_pages_have_pictures(site):
    for page in ("index.html", "getting-started/index.html", "workflows/index.html", "operating/index.html"):
        (file,) = [file for file in site if file.as_posix().endswith(f"/site/{page}")]
        text = file.read_text().partition("<article")[2].partition("</article>")[0]
        assert "<img " in text or '<svg class="diagram"' in text, page


@pytest.mark.parametrize("block", [block for block in blocks("yaml", "python") if block.file], ids=name_of)
def test_a_quoted_file_is_as_it_is_shown(block):
    assert block.text in (ROOT / block.file).read_text()


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if not block.file], ids=name_of)
def test_yaml_is_a_workflow_or_a_part_of_one(block, tmp_path):
    """A block with a `dag_id` loads. Any other one is checked as the part of a workflow that it shows."""
    data = YAML(typ="safe").load(block.text)
    if isinstance(data, dict) and "dag_id" in data:
        (tmp_path / "workflow.yaml").write_text(block.text)
        assert load_workflow(tmp_path / "workflow.yaml").warnings == ()
        return
    base = {
        "dag_id": "base",
        "agents": [{"name": "solver", "policy": "main"}],
        "policies": {"main": {"model": {"path": "model"}}},
        "nodes": [{"id": "solve", "agent": "solver"}],
    }
    part = {"nodes": data} if isinstance(data, list) else data or {}
    validator = Draft202012Validator(workflow_schema())
    assert [error.message for error in validator.iter_errors(base | part)] == []
    if "algorithm" in part:
        algorithm_class(part["algorithm"].get("estimator", "grpo"))(**part["algorithm"])


@pytest.mark.parametrize("block", [block for block in blocks("python") if not block.file], ids=name_of)
def test_python_runs(block):
    exec(compile(block.text, name_of(block), "exec"), {"__name__": "example"})


def example_of(name: str, uses: Callable[[Workflow], bool]) -> str:
    """Return a link to a shipped workflow for which `uses` holds: preferably of this name, then of the gallery."""
    candidates = [
        (file.stem != f"workflow_{name}", file.parent.name != "gallery", file)
        for file in WORKFLOWS
        if uses(loaded(file))
    ]
    *_, file = min(candidates)
    return f"[{file.name.removeprefix('workflow_')}](../{relative(file)})"


def estimator_table() -> str:
    """Return the table of estimators in docs/algorithms.md."""
    lines = ["| estimator | source | assumes | example |", "|---|---|---|---|"]
    for name, method in ESTIMATORS.items():
        example = example_of(name, lambda workflow, name=name: workflow.algorithm.estimator == name)
        lines.append(f"| `{name}` | {method.source} | {method.assumes} | {example} |")
    own = example_of("own", lambda workflow: ":" in workflow.algorithm.estimator)
    return "\n".join([*lines, f"| `{OWN}` | [your own](#an-estimator-of-your-own) | - | {own} |"])


def block_table() -> str:
    """Return the table of the blocks of `algorithm` in docs/algorithms.md."""
    lines = ["| block | source | assumes | example |", "|---|---|---|---|"]
    for block in BLOCKS:
        name = block.__name__.lower()
        example = example_of(name, lambda workflow, name=name: name in workflow.algorithm.model_fields_set)
        lines.append(f"| `{name}` | {block.source} | {block.assumes} | {example} |")
    return "\n".join(lines)


def key_table() -> str:
    """Return the table of verl's keys in docs/migrating.md."""
    lines = ["| verl | verl-dag |", "|---|---|"]
    for keys, message in TABLE:
        names = ", ".join(f"`{key}`" for key in keys.replace("@", "").split())
        lines.append(f"| {names} | {message.replace('@', '')} |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("file", "name", "make"),
    [
        ("algorithms.md", "table of estimators", estimator_table),
        ("algorithms.md", "table of blocks", block_table),
        ("migrating.md", "table of verl's keys", key_table),
    ],
)
def test_tables_are_those_of_the_code(file, name, make):
    """`UPDATE_DOCS=1 python -m pytest tests/test_docs.py` writes them."""
    page = DOCS / file
    before, start, rest = page.read_text().partition(f"<!-- {name} -->\n")
    table, end, after = rest.partition(f"\n<!-- end of {name} -->")
    if os.environ.get("UPDATE_DOCS"):
        page.write_text("".join([before, start, make(), end, after]))
        return
    assert table == make(), "UPDATE_DOCS=1 python -m pytest tests/test_docs.py"


def test_the_architecture_names_files_and_folders_that_exist():
    text = (DOCS / "architecture.md").read_text()
    files = re.findall(r"[\w/]+/[\w]+\.py", text)
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists() and not (ROOT / "recipe/dag" / file).exists()] == []


def test_the_architecture_describes_every_folder_of_the_engine():
    text = (DOCS / "architecture.md").read_text()
    folders = {file.parent.name for file in (ROOT / "recipe" / "dag").glob("*/*.*") if file.suffix != ".pyc"}
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in text] == []
