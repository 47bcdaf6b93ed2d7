"""Templates: every mistake is found when they are loaded, and nothing in them is evaluated but the template itself."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.coach.agent import Coach
from recipe.dag.coach.evidence import Keep
from recipe.dag.coach.template import VARIABLES, PromptTemplate
from recipe.dag.core.errors import HookFault, UserError
from tests.test_shipped import ROOT


def template(folder, text: str) -> PromptTemplate:
    path = folder / "coach.txt"
    path.write_text(text, encoding="utf-8")
    return PromptTemplate(path)


def values(**texts: str) -> dict[str, str]:
    return dict.fromkeys(VARIABLES, "-") | texts


def test_every_variable_can_be_used(tmp_path):
    text = "\n".join(f"{name}={{{{ {name} }}}}" for name in VARIABLES)
    rendered = template(tmp_path, text).render({name: name.upper() for name in VARIABLES})
    assert rendered == "\n".join(f"{name}={name.upper()}" for name in VARIABLES)


def test_the_branch_of_the_judged_agent_is_checked(tmp_path):
    path = tmp_path / "coach.txt"
    path.write_text("{% if agent_name == 'verifier' %}{{ problem | truncate(lenght=3) }}{% endif %}")
    PromptTemplate(path, agent="solver")
    with pytest.raises(UserError, match="coach.txt:1: TypeError"):
        PromptTemplate(path, agent="verifier")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "Judge.\n\n{{ agent_ouput }}",
            ":3: unknown variable `agent_ouput`; did you mean `agent_output`? (known: `problem`",
        ),
        ("{% if zzz %}x{% endif %}", ":1: unknown variable `zzz` (known: "),
        ("{% for a in b %}{{ a }}{% endfor %}", ":1: unknown variable `b`"),
        ("{{ problem }\nx", ":1: "),
        ("a\n{% if problem %}", ":2: "),
        (
            "{% for a in range(9000) %}\n{% for b in range(9000) %}{% endfor %}{% endfor %}",
            ":2: SecurityError: the template takes more than 200,000 steps",
        ),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}\n{{ m(40) }}",
            ":1: SecurityError: the template takes more than 200,000 steps",
        ),
        ("{{ problem * 999999999 }}", ":1: SecurityError: the result of `*` is too large"),
        ("{{ 9 ** 99999999 }}", ":1: SecurityError: the result of `**` is too large"),
        ("a\n{{ problem | shout }}", ":2: no filter named 'shout'"),
        ("{% if agent_name == 'x' %}{{ task | uper }}{% endif %}", ":1: no filter named 'uper'; did you mean `upper`?"),
        ("{% if problem is defind %}a{% endif %}", ":1: no test named 'defind'; did you mean `defined`?"),
        ("a\n{% if label == 'N/A' %}{{ problem.author }}{% endif %}", ":2: UndefinedError"),
        ("a\n{{ problem.author }}", ":2: UndefinedError: 'str object' has no attribute 'author'"),
        ("a\nb\n{{ 1 / 0 }}", ":3: ZeroDivisionError"),
        ("a\n{% include 'other.txt' %}", ":2: a template is one file"),
        ("{% import 'other.txt' as x %}", ":1: a template is one file"),
        ("a\n{{ ''.__class__.__mro__ }}", ":2: SecurityError"),
        ("{{ problem.__init__.__globals__ }}", ":1: SecurityError"),
        ("{{ range(999999999) | list }}", ":1: OverflowError"),
    ],
)
def test_a_mistake_is_found_at_load_with_its_line(tmp_path, text, problem):
    with pytest.raises(UserError, match=re.escape(f"coach.txt{problem}")) as raised:
        template(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "coach.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="coach.txt: cannot be read"):
        PromptTemplate(tmp_path / "coach.txt")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_the_text_of_a_model_is_inserted_as_it_is(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp()
    assert template(folder, "[{{ agent_output }}]").render(values(agent_output=text)) == f"[{text}]"


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% set problem = 1 %}", "{{ ground_truth_answer }}", "{# gone #}", "<b>&"]
)
def test_the_text_of_a_model_is_never_evaluated(tmp_path, text):
    made = template(tmp_path, "{{ agent_output }}|{{ agent_output | trim }}|{% set x = agent_output %}{{ x }}")
    assert made.render(values(agent_output=text, ground_truth_answer="SECRET")) == f"{text}|{text}|{text}"


def test_a_filter_takes_the_thoughts_out(tmp_path):
    text = template(tmp_path, "{{ agent_output | answer }}").render(values(agent_output="<think>hm</think>4"))
    assert text == "4"


def test_what_breaks_for_some_values_only_is_a_fault_with_its_line(tmp_path):
    made = template(tmp_path, "a\n{% if problem == 'bad' %}{{ problem.author }}{% endif %}")
    assert made.render(values()) == "a\n"
    with pytest.raises(HookFault, match="no attribute 'author'") as raised:
        made.render(values(problem="bad"))
    assert raised.value.source.endswith("coach.txt:2")


def test_the_documentation_lists_every_variable_and_option():
    text = (ROOT / "docs" / "coaching.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert named >= VARIABLES.keys() | Coach.Options.model_fields.keys()
    assert all(f"`{name}`" in text for name in Keep.model_fields)
