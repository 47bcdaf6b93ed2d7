"""Search in a folder: what is read, how it is ranked, what the model sees."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.dag.tools import bm25
from recipe.dag.tools.base import Resources
from recipe.dag.tools.bm25 import Index, open_index, snippet, words
from recipe.dag.tools.passages import Passage, pieces, read_collection
from recipe.dag.tools.search import Search

TEXTS = {
    "birds.txt": "The heron stands in water.\n\nThe owl hunts at night.",
    "deep/rocks.md": "Stones.\n# Granite\nGranite is hard.\n```\n# no heading\n```\n## Chalk ##\nChalk is soft.",
    "rows.jsonl": '{"contents": "\\"Wolf\\"\\nThe wolf howls at night."}\n\n'
    '{"title": "Fox", "text": "Red."}\n{"text": "No title."}',
}


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def search(folder: Path, query: str, **options) -> str:
    tool = Search.make(Search.Options(folder=str(folder), **options), Resources(str(folder)))
    result = asyncio.run(tool.execute({"query": query}, {}))
    assert (result.name, result.status) == ("search", "success")
    return result.text


def titles(folder: Path, limit: int = 800) -> list[str]:
    return [passage.title for passage in read_collection(folder, max_mb=1).passages(limit)]


def test_files_are_cut_into_passages_with_titles(texts):
    (texts / ".hidden.txt").write_text("x")
    (texts / "code.py").write_text("x")
    found = read_collection(texts, max_mb=1).passages(30)
    assert [(passage.title, passage.text) for passage in found] == [
        ("birds.txt", "The heron stands in water."),
        ("birds.txt", "The owl hunts at night."),
        ("deep/rocks.md", "Stones."),
        ("deep/rocks.md: Granite", "Granite is hard."),
        ("deep/rocks.md: Granite", "```\n# no heading\n```"),
        ("deep/rocks.md: Chalk", "Chalk is soft."),
        ("Wolf", "The wolf howls at night."),
        ("Fox", "Red."),
        ("rows.jsonl:4", "No title."),
    ]


def test_the_model_reads_the_best_passages_first(texts):
    assert search(texts, "what howls at night?") == (
        "[1] Wolf\nThe wolf howls at night.\n\n[2] birds.txt\nThe heron stands in water.\n\nThe owl hunts at night."
    )
    assert search(texts, "GRANITE", top_k=1).startswith("[1] deep/rocks.md: Granite\n")
    assert search(texts, "fox").startswith("[1] Fox\nRed.")  # a title counts, too
    assert search(texts, "zebra ...") == "No results."


def test_a_query_must_be_a_text(texts):
    tool = Search.make(Search.Options(folder=str(texts)), Resources(str(texts)))
    for arguments in ({"query": 3}, {"query": " "}, {}):
        assert asyncio.run(tool.execute(arguments, {})).status == "invalid"


def test_a_folder_is_found_beside_the_workflow(texts):
    tool = Search.make(Search.Options(folder="texts", called="look_up"), Resources(str(texts.parent / "w.yaml")))
    assert tool.schema["function"]["name"] == tool.name == Search.shown_as({"called": "look_up"}) == "look_up"
    with pytest.raises(UserError, match="no such folder `other`"):
        Search.make(Search.Options(folder="other"), Resources(str(texts.parent / "w.yaml")))


def test_links_are_followed_within_the_folder_only(texts, tmp_path):
    (texts / "again.txt").symlink_to(texts / "birds.txt")
    (texts / "loop").symlink_to(texts)
    assert titles(texts).count("again.txt") == 1 and not any(title.startswith("loop") for title in titles(texts))
    (tmp_path / "secret.txt").write_text("secret")
    for name, target in (("out.txt", tmp_path / "secret.txt"), ("up", tmp_path), ("gone.txt", tmp_path / "nothing")):
        (texts / name).symlink_to(target)
        with pytest.raises(UserError, match=f"{name}: is a link out of the folder"):
            read_collection(texts, max_mb=1)
        (texts / name).unlink()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe\x00", r"a\.txt: is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\nno json', r"a\.jsonl:2: must be an object with `contents` or `text`"),
        ("a.jsonl", b'{"body": "x"}', r"a\.jsonl:1: must be"),
        ("a.jsonl", b'["text"]', r"a\.jsonl:1: must be"),
        ("a.txt", b"x" * 2_000_000, r"holds more than 1 MB \(max_mb\)"),
        ("a.py", b"", r"holds no \.txt"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_collection(tmp_path, max_mb=1).passages(800)


@given(st.text(alphabet="ab .!\n", max_size=300), st.integers(1, 60))
def test_pieces_keep_every_letter_and_the_limit(text, limit):
    found = list(pieces(text, limit))
    assert all(0 < len(piece) <= limit for piece in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_a_long_paragraph_is_cut_after_a_sentence():
    assert list(pieces("One two three. Four five six. Seven", 30)) == ["One two three. Four five six.", "Seven"]


def test_words_are_compared_without_case_width_and_ligatures():
    assert words("The ﬁrst ＴＥＳＴ, snake_case; straße 3.5") == "the first test snake case strasse 3 5".split()
    assert words("東京 tower") == ["東", "京", "tower"]


def corpus(seed: int, count: int) -> list[Passage]:
    draw = random.Random(seed)
    return [Passage("", " ".join(draw.choices("abcdefgh", k=draw.randrange(0, 30)))) for _ in range(count)]


@pytest.mark.parametrize("passages", [[], [Passage("", "...")]])
def test_passages_without_words_are_never_found(passages):
    assert Index.build(passages).search("a ...", 3) == []


def test_equal_passages_keep_their_order_and_the_order_of_words_does_not_matter():
    index = Index.build([Passage("", "x y")] * 5 + [Passage("", "x")])
    assert index.search("y x", 4) == index.search("x y y", 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", [None, b"", b"{}"])
def test_a_large_index_is_read_from_its_cache_by_content(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(bm25, "CACHED_FROM", 10)
    passages = corpus(1, 50)
    built = open_index(passages, "digest", cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    files = sorted(folder.iterdir())
    builds = []
    build = Index.build
    monkeypatch.setattr(Index, "build", lambda passages: builds.append(1) or build(passages))
    for file in files:
        if damage is not None:
            file.write_bytes(damage)
        again = open_index(passages, "digest", cache=tmp_path)
        assert list(tmp_path.iterdir()) == [folder] and sorted(folder.iterdir()) == files
        for query in ("a", "b c", "h a x"):
            assert again.search(query, 9) == built.search(query, 9)
    assert len(builds) == (0 if damage is None else len(files))
    open_index(passages, "other digest", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_hold_the_cache_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(bm25, "CACHED_FROM", 1)
    (tmp_path / "file").write_text("")
    assert open_index(corpus(1, 5), "digest", cache=tmp_path / "file").search("a", 1)


def test_the_digest_tells_names_and_contents_apart(texts):
    first = read_collection(texts, max_mb=1).digest
    assert read_collection(texts, max_mb=1).digest == first
    (texts / "birds.txt").rename(texts / "b.txt")
    second = read_collection(texts, max_mb=1).digest
    (texts / "b.txt").write_text("changed")
    assert len({first, second, read_collection(texts, max_mb=1).digest}) == 3


def test_a_snippet_shows_the_place_with_most_of_the_query():
    text = "zero " * 50 + "the wolf and the owl meet " + "zero " * 50
    part = snippet(text, "owl wolf", 60)
    assert "wolf and the owl" in part and len(part) <= 60 and part.startswith("...") and part.endswith("...")
    assert snippet("short", "x", 60) == "short"
    assert len(snippet("x" * 500, "y", 60)) <= 60


def test_options_are_checked(texts):
    def problems(**options) -> list[str]:
        return [f"{key}: {text}" for key, text in Search.problems(Search.Options(**options), str(texts))]

    assert problems(folder=str(texts)) == [] and problems(url="http://host/x") == []
    assert "either a `folder`" in problems()[0] and "either a `folder`" in problems(folder="x", url="http://host")[0]
    (useless,) = problems(folder=str(texts), retries=1, passage_chars=99)
    assert useless == "retries: has no effect with `folder`; remove it"
    assert problems(url="http://host", max_mb=3) == ["max_mb: has no effect with `url`; remove it"]
    assert "no such folder" in problems(folder="nowhere")[0]
    assert "URL such as" in problems(url="host")[0] and problems(url="${oc.env:X}") == []
    assert "not the key itself" in problems(url="http://host", key_env="sk-123")[0]
    assert "{query}" in problems(url="http://host", request={"q": "x"})[0]
    assert "`a` must be" in problems(url="http://host", method="GET", request={"q": "{query}", "a": {}})[0]
    assert json.dumps(Search.parameters)
