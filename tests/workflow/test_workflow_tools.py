"""Tools of a workflow file: names, files, mappings; at the top level and by agent."""

from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.workflow.agent_schema import DeclaredTool, ToolSpec
from recipe.dag.workflow.to_yaml import to_yaml

GOOD = """\
dag_id: demo
tools:
  finder: {path: tool.py:Search, kwargs: {index: maths}}
  code_interpreter: {kwargs: {timeout_s: 30, auto_print: true}}
agents:
  - {name: left, policy: main, tools: [finder, code_interpreter]}
  - {name: right, policy: main, tools: [{path: tool.py:Search, kwargs: {index: art}}, {name: finder}]}
policies: {main: {model: {path: m}}}
nodes:
  - {id: l, agent: left, hooks: h.py:Hook}
  - {id: r, agent: right}
  - {id: score, reward: rewards.py:score, after: [l, r]}
"""
CASES = [
    ("unknown name", ("[finder, ", "[§findr, "), "no tool `findr`; did you mean `finder`?"),
    ("unknown built-in", ("[finder, code", "[finder, code_interpreter, §code_x"), "no tool `code_x"),
    ("the only use", ("[finder, code_interpreter]", "[finder, §code_interpretr]"), "did you mean `code_interpreter`?"),
    ("misspelt key", ("policy: main, tools: [finder", "policy: main, §tols: [finder"), "did you mean `tools`?"),
    ("neither", ("{name: finder}", "§{kwargs: {}}"), "give the tool a `name`"),
    ("unused", ("tools:\n", "tools:\n  §spare: {path: tool.py:Search}\n"), "no agent uses tool `spare`"),
    ("kwargs", ("index: maths", "§indx: maths"), "did you mean `index`?"),
    ("kwargs by agent", ("index: art", "§indx: art"), "did you mean `index`?"),
    ("options", ("auto_print: true", "§auto_prnt: true"), "did you mean `auto_print`?"),
    ("option's value", ("timeout_s: 30", "timeout_s: §0"), "a number above 0, got 0"),
    (
        "two classes",
        ("{name: finder}", "{name: finder, §path: tool.py:Search}"),
        "`tools.finder` says which tool it is",
    ),
    ("overriding kwargs", ("{name: finder}", "{name: finder, kwargs: {§indx: x}}"), "did you mean `index`?"),
    ("overriding option", ("{name: finder}", "{name: finder, workers: §0}"), "at least 1, got 0"),
    ("memory of a class", ("{name: finder}", "{name: finder, §memory_mb: 64}"), "has no effect on a class of yours"),
    ("memory of a declared class", ("finder: {", "finder: {§auto_print: true, "), "has no effect on a class of yours"),
    (
        "option twice",
        ("{kwargs: {timeout_s: 30,", "{§timeout_s: 20, kwargs: {timeout_s: 30,"),
        "`kwargs.timeout_s` sets",
    ),
    ("limits crossed", ("{kwargs:", "{§max_timeout_s: 5, kwargs:"), "max_timeout_s 5 is below timeout_s 30"),
    ("schema", ("finder: {", "finder: {§schema: {}, "), "write `description` and `parameters`"),
    ("rate", ("finder: {", "finder: {§rate_limit: 3, "), "write `calls_per_second`"),
    ("engine's own key", ("finder: {", "finder: {§declared: other, "), "unknown key"),
    ("not shown", ("finder: {", "finder: {§description: Search., "), "(agents: `left`, `right`)"),
    ("not called", ("finder: {", "finder: {§parameters: {}, "), "no model calls the tool"),
    ("not shown by agent", ("{name: finder}", "{name: finder, §description: Search.}"), "no model reads it"),
    ("not a schema", ("finder: {", "finder: {parameters: §{type: objekt}, "), "is not a JSON schema"),
    (
        "hidden argument",
        ("{kwargs:", "{parameters: §{properties: {timeout: {}}}, kwargs:"),
        "hides the argument `code`",
    ),
    (
        "unknown argument",
        ("{kwargs:", "{parameters: §{properties: {code: {}, x: {}}}, kwargs:"),
        "does not take (code, tim",
    ),
    (
        "loop's option",
        (
            "auto_print: true}}\nagents:\n  - {name: left,",
            "auto_print: true}}\nagents:\n  - {name: left, tool_loop: {format: fenced, §max_parallel: 2},",
        ),
        "has no effect with `format: fenced`, only with `hermes`",
    ),
    (
        "loop's tag",
        (
            "auto_print: true}}\nagents:\n  - {name: left,",
            "auto_print: true}}\nagents:\n  - {name: left, tool_loop: {§call_tag: run},",
        ),
        "only with `tags`",
    ),
    ("misspelt key", ("path: tool.py:Search, kwargs: {index: art}", "§pth: tool.py:Search"), "did you mean `path`?"),
    ("without execute", ("tool.py:Search, kwargs: {index: maths}", "§tool.py:Shut"), "has no method `execute`"),
    ("not async", ("tool.py:Search, kwargs: {index: maths}", "§tool.py:Sync"), "must be `async def`"),
    ("signature", ("tool.py:Search, kwargs: {index: maths}", "§tool.py:Narrow"), "must take the positional arguments"),
    ("listed twice", ("{name: finder}", "§{path: tool.py:Search, kwargs: {index: art}}"), "is listed twice"),
]


@pytest.fixture(autouse=True)
def files(folder):
    execute, close = "    async def execute(self, arguments, state): ...\n", "    async def close(self): ...\n"
    init = "    def __init__(self, index='all', limit=1): ...\n"
    (folder / "tool.py").write_text(
        f"class Search:\n{init}{execute}{close}"
        f"class Open:\n{execute}"
        f"class Shut:\n{close}"
        f"class Sync:\n{execute.replace('async ', '')}{close}"
        f"class Narrow:\n{execute.replace(', state', '')}{close}"
    )
    (folder / "h.py").write_text(
        "class Hook:\n    def post_process(self, tokenizer, prompt_ids, response_ids, *, code_timeout=1.0): ...\n"
    )


def test_a_tool_need_not_have_close(load_text):
    load_text(GOOD.replace("tool.py:Search, kwargs: {index: maths}", "tool.py:Open"))


def test_a_declared_tool_has_a_name_that_can_be_written_everywhere(load_text):
    with pytest.raises(WorkflowError, match=r"3:3: tools\[\"a finder\"\]: `a finder` is not a valid name"):
        load_text(
            GOOD.replace("  finder:", "  a finder:")
            .replace("[finder", "[a finder")
            .replace("name: finder", "name: a finder")
        )


def test_a_name_stands_for_what_is_declared_under_it(load_text):
    left, right = load_text(GOOD).agents
    finder = DeclaredTool(path="tool.py:Search", kwargs={"index": "maths"}, declared="finder")
    options = {"timeout_s": 30, "auto_print": True}
    code = DeclaredTool(name="code_interpreter", kwargs=options, declared="code_interpreter")
    assert left.tools == (finder, code)
    assert right.tools == (ToolSpec(path="tool.py:Search", kwargs={"index": "art"}), finder)


@pytest.mark.parametrize(("edits", "message"), [pytest.param(case[1:-1], case[-1], id=case[0]) for case in CASES])
def test_one_mistake_is_one_problem_at_its_place(edits, message, expect_one_problem):
    expect_one_problem(GOOD, edits, message)


@pytest.mark.parametrize(
    ("seconds", "limits", "warning"),
    [
        (20, "", ""),
        (119, "", ""),
        (120, "", "episode.call_timeout_s ends the call after 120 s"),
        (120, "episode: {call_timeout_s: 600}", ""),
        (500, "episode: {call_timeout_s: 600}", "episode.timeout_s ends the episode after 300 s"),
        (7200, "episode: {call_timeout_s: 9000, timeout_s: 9000}", "the sandbox ends every program after 3600 s"),
    ],
)
def test_time_that_would_not_be_granted_is_reported(load_text, seconds, limits, warning):
    hook = f"h.py:Hook, parse_options: {{code_timeout: {seconds}}}"
    for text, where in (
        (GOOD.replace("h.py:Hook", hook), "code_timeout"),
        (GOOD.replace("timeout_s: 30", f"max_timeout_s: {seconds}"), "max_timeout_s"),
        (GOOD.replace("{kwargs: {timeout_s: 30, ", f"{{timeout_s: {seconds}, kwargs: {{"), "timeout_s"),
    ):
        found = load_text(text + limits).warnings
        assert [where in problem.where and warning in problem.message for problem in found] == [True] * bool(warning)


def test_tools_must_be_a_mapping(load_text):
    with pytest.raises(WorkflowError, match="expected a mapping"):
        load_text(GOOD[: GOOD.index("tools:")] + "tools: [code_interpreter]\n" + GOOD[GOOD.index("agents:") :])


def test_an_agent_overrides_parts_of_a_declared_tool(load_text):
    text = GOOD.replace("{name: finder}", "{name: finder, timeout_s: 5, kwargs: {limit: 2}}")
    text = text.replace("kwargs: {index: maths}}", "kwargs: {index: maths}, timeout_s: 9, workers: 3}")
    left, right = load_text(text).agents
    assert (left.tools[0].timeout_s, left.tools[0].workers) == (9, 3)
    assert (right.tools[1].timeout_s, right.tools[1].workers) == (5, 3)
    assert right.tools[1].kwargs == {"index": "maths", "limit": 2} and right.tools[1].path == "tool.py:Search"
    assert left.tools[0].key != right.tools[1].key


def test_a_null_takes_a_declared_option_back(load_text):
    text = GOOD.replace("finder: {", "finder: {workers: 3, ").replace("{name: finder}", "{name: finder, workers: null}")
    left, right = load_text(text).agents
    assert (left.tools[0].workers, right.tools[1].workers) == (3, None)


def test_declared_tools_survive_being_written_again(load_text):
    text = GOOD.replace("{name: finder}", "{name: finder, timeout_s: null, kwargs: {limit: 2}}")
    flow = load_text(text.replace("finder: {", "finder: {timeout_s: 9, calls_per_second: 2, "))
    again = load_text(to_yaml(flow))
    assert (again.agents, again.tools) == (flow.agents, flow.tools)


def test_the_engine_shows_a_models_own_view_of_a_tool(load_text):
    shown = "description: Find., parameters: {type: object, properties: {query: {type: string}}}"
    text = GOOD.replace("finder: {", f"finder: {{{shown}, ").replace("{name: left,", "{name: left, tool_loop: {},")
    assert load_text(text).tools["finder"].description == "Find."
