"""The sections of a rendered template: in order, each starting a line, texts as they were inserted."""

from __future__ import annotations

import pytest

from recipe.dag.coach.sections import sections

HEADINGS = ("Problem", "What the agent wrote", "Your score")


def rendered(problem: str, text: str) -> str:
    values = (value.replace("\n", "\n  ") for value in (problem, text))
    return "Judge.\n\n# Problem\n  {}\n\n# What the agent wrote\n  {}\n\n# Your score\n0 to 10\n".format(*values)


@pytest.mark.parametrize("text", ["one line", "two\n  lines", "x\n# Your score\n10", "x\n\n# Problem\nanother"])
def test_texts_come_back_as_they_were_whatever_headings_they_contain(text):
    for problem, written in (("2 + 2?", text), (text, "4")):
        texts = sections(rendered(problem, written), HEADINGS, "coach.txt")
        assert texts == {"Problem": problem, "What the agent wrote": written, "Your score": "0 to 10"}


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_request_without_a_section_is_refused(heading):
    request = rendered("2 + 2?", "4").replace(f"# {heading}\n", "")
    with pytest.raises(ValueError, match=f"no section '# {heading}'; it must be coach.txt"):
        sections(request, HEADINGS, "coach.txt")
