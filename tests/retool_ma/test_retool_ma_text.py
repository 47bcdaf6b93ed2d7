"""Templates, plans, code and verdicts: what is found in what models write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.dag.core.errors import UserError
from recipe.retool_ma import prompts
from recipe.retool_ma.plan import KEYS, parse_plan, plan_json
from recipe.retool_ma.prompts import render
from recipe.retool_ma.snippet import execution_log, extract_code
from recipe.retool_ma.verdict import parse_verdict

FIELDS = {"problem": r"Let $x_{max} = \frac{{1}}{2}$, {feedback}", "feedback": "F"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{problem}", FIELDS["problem"]),
        ("{problem}{feedback}{problem}", FIELDS["problem"] + "F" + FIELDS["problem"]),
        (r"End with \boxed{value}.", r"End with \boxed{value}."),
        (r"\frac{a}{b} x^{n} y_{max} \sqrt[n]{m} {feedback}", r"\frac{a}{b} x^{n} y_{max} \sqrt[n]{m} F"),
        ('{"reasoning": "..."} {} { feedback } {1} $', '{"reasoning": "..."} {} { feedback } {1} $'),
        (r"\{a\} %s ${feedback}$ {{feedback}", r"\{a\} %s $F$ {F"),
        ("no field", "no field"),
        ("", ""),
    ],
)
def test_render_replaces_known_fields_only(template, expected):
    assert render(template, FIELDS) == expected


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{problm}", "{problm}"),
        ("{problem} {planner_plan}", "{planner_plan}"),
        ("{problem}{feedbak}", "{feedbak}"),
        ("{{problem}}", "{{problem}}"),
        ("say {{hello}}", "{{hello}}"),
    ],
)
def test_render_names_a_field_that_is_none(template, named):
    with pytest.raises(UserError) as error:
        render(template, FIELDS, "node 'plan': prompt_options.prompt")
    assert str(error.value).startswith("node 'plan': prompt_options.prompt: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(), st.text())
def test_values_pass_through_untouched(problem, feedback):
    assert render("<{problem}|{feedback}>", {"problem": problem, "feedback": feedback}) == f"<{problem}|{feedback}>"


def test_built_in_prompts_have_no_unknown_field():
    every = dict.fromkeys(("problem", "planner_plan", "planner_reasoning", "execution_log", "feedback"), "")
    texts = [value for name, value in vars(prompts).items() if name.isupper() and not name.startswith("_")]
    assert len(texts) == 16
    assert all(render(text, every) for text in texts)


def plan(reasoning="r", code_plan="c", expected_output="e") -> dict[str, str]:
    return {"reasoning": reasoning, "code_plan": code_plan, "expected_output": expected_output}


PLAIN = '{"reasoning": "r", "code_plan": "c", "expected_output": "e"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, plan()),
        (f"```json\n{PLAIN}\n```", plan()),
        (f"Here it is:\n```\n{PLAIN}\n```\nGood luck {{}} {{", plan()),
        (f"The set {{1, 2}} and {{x}}. {PLAIN} trailing }}", plan()),
        (r'{"reasoning": "a \"b\"\n\u00e9 \\frac{1}{2}", "code_plan": "c"}', plan('a "b"\né \\frac{1}{2}', "c", "")),
        ('{"reasoning": "naïve 数学 {a {b}}", "code_plan": "c"}', plan("naïve 数学 {a {b}}", "c", "")),
        ('{"reasoning": "two\nlines\tand a tab"}', plan("two\nlines\tand a tab", "", "")),
        (r'{"reasoning": "a \(x\) \sqrt{2}", "code_plan": "\\pi"}', plan(r"a \(x\) \sqrt{2}", r"\pi", "")),
        ('{"reasoning": "r", "code_plan": ["a", {"b": 1}], "expected_output": 12}', plan("r", '["a", {"b": 1}]', "12")),
        ('{"reasoning": null, "code_plan": true, "expected_output": 0.5}', plan("", "true", "0.5")),
        ('{"plan": {"reasoning": "inner"}} {"code_plan": "outer"}', plan("", "outer", "")),
        ('{"code_plan": "draft"} then ' + PLAIN, plan()),
        (PLAIN + ' {"code_plan": "late"}', plan()),
        ('{"code_plan": "first"} {"code_plan": "second"}', plan("", "second", "")),
        (r'{"reasoning": "half a pair: \ud83d", "code_plan": "\ud83d\ude00"}', plan("half a pair: ?", "😀", "")),
    ],
)
def test_plans_that_parse(text, expected):
    assert parse_plan(text) == (expected, True)
    plan_json(expected).encode()
    assert json.loads(plan_json(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", '{"reasoning": "cut off', '{"other": 1}', "[1, 2]", "{" * 5000, '{"a":' * 3000, '"reasoning": "r"'],
)
def test_plans_that_do_not_parse_are_the_whole_text(text):
    assert parse_plan(f" {text}\n") == (dict.fromkeys(KEYS, text), False)


@given(st.fixed_dictionaries({key: st.text() for key in KEYS}), st.text(alphabet=st.characters(exclude_characters="{")))
def test_any_plan_survives_its_own_json(values, around):
    assert parse_plan(f"{around}{plan_json(values)}\n```") == (values, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```PYTHON\nprint(1)\n```", "print(1)"),
        ("```py\nprint(1)\n```", "print(1)"),
        ("``` python3  \nprint(1)\n```", "print(1)"),
        ("```python print(1)```", "print(1)"),
        ("```\nprint(0)\n```\n```python\nprint(1)\n```\n```python\nprint(2)\n```", "print(1)"),
        ("```json\n{}\n```\nthen\n```\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```\n```\nprint(2)\n```", "print(1)"),
        ("```print(1)```", "print(1)"),
        ("Run ```python\nx = 1\n\nprint(x)", "x = 1\n\nprint(x)"),
        ("  ```python\n    if 1:\n        print(1)\n    ```", "if 1:\n    print(1)"),
        ("\n  print(1)\n", "print(1)"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("```python\n```", ""),
        ("```python", ""),
        ("```python\n   \n```\n```\nprint(1)\n```", ""),
        ("", ""),
        (" \n\t", ""),
    ],
)
def test_code_extraction(text, code):
    assert extract_code(text) == code


def test_execution_log_shows_all_code_and_the_heads_of_the_streams():
    log = execution_log("x = 1\n" * 200, "failed", "o" * 511 + "OUT", "e" * 600)
    assert log == "Code:\n" + "x = 1\n" * 200 + f"\nStatus:\nfailed\nStdout:\n{'o' * 511}O\nStderr:\n{'e' * 512}"
    assert execution_log("", "failed", "", "empty_code") == (
        "Code:\n[none]\nStatus:\nfailed\nStdout:\n[none]\nStderr:\nempty_code"
    )


@pytest.mark.parametrize(
    ("text", "may_revise", "kind", "answer", "feedback"),
    [
        (r"All fits. FINAL ANSWER: \boxed{\frac{1}{2}}", False, "final", r"\frac{1}{2}", ""),
        (r"I see \boxed{3}. **Final Answer:** 42", False, "none", None, ""),
        (r"My final answer is \boxed{3}.", False, "final", "3", ""),
        (r"\boxed{3} is my final answer.", False, "final", "3", ""),
        ("FINAL ANSWER: x + 1", False, "none", None, ""),
        ("The program printed 7", False, "none", None, ""),
        ("REVISE: use 3 colours", False, "none", None, ""),
        ("No idea", False, "none", None, ""),
        ("REVISE: use 3 colours\nnot 4", True, "revise", None, "use 3 colours\nnot 4"),
        ("**REVISE:** count again.**", True, "revise", None, "count again."),
        ("REVISE:", True, "revise", None, "The plan has to change."),
        (r"REVISE: a slip, no: FINAL ANSWER: \boxed{5}", True, "final", "5", ""),
        ("FINAL ANSWER: \\boxed{5}\nREVISE: no, count again", True, "revise", None, "no, count again"),
        (r"Clearly \boxed{5}", True, "final", "5", ""),
        ("The plan has 3 steps", True, "none", None, "The review of this plan came to no answer."),
        ("FINAL ANSWER: 5", True, "none", None, "The review of this plan came to no answer."),
        (r"We revise: it is fine. FINAL ANSWER: \boxed{5}", True, "final", "5", ""),
    ],
)
def test_verdicts(text, may_revise, kind, answer, feedback):
    verdict = parse_verdict(text, may_revise=may_revise)
    assert (verdict.kind, verdict.answer, verdict.feedback) == (kind, answer, feedback)


@pytest.mark.parametrize(
    ("text", "may_revise", "kind", "answer", "feedback"),
    [
        (r"I see \boxed{3}. **Final Answer:** 42", False, "final", "42", ""),
        ("FINAL ANSWER: x + 1", False, "final", "x + 1", ""),
        ("The program printed 7", False, "final", "7", ""),
        ("REVISE: use 3 colours", False, "final", "3", ""),
        ("We revise: it is fine. FINAL ANSWER: 5", True, "final", "5", ""),
        ("The plan has 3 steps", True, "none", None, "The review of this plan came to no answer."),
    ],
)
def test_compat_reads_verdicts_as_was_published(text, may_revise, kind, answer, feedback):
    verdict = parse_verdict(text, may_revise=may_revise, compat=True)
    assert (verdict.kind, verdict.answer, verdict.feedback) == (kind, answer, feedback)
