"""One broken file per kind of mistake: exactly one problem, at the marked place.

A case edits a good file. `§` in a replacement stands right before the character that the problem must point at, and is
taken out again.
"""

from __future__ import annotations

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.workflow_file import load_workflow

GOOD = """\
dag_id: demo
agents:
  - {name: writer, policy: main, sampling: {temperature: 0.7, max_tokens: 64}, tools: [code_interpreter]}
  - {name: critic, policy: main}
policies:
  main: {model: {path: "${oc.env:MODEL_PATH}"}}
algorithm: {estimator: grpo}
nodes:
  - {id: write, agent: writer, hooks: hooks.py:Hook, env: env.py:Env}
  - {id: judge, agent: critic, after: [write]}
  - {id: score, reward: rewards.py:score, after: [judge]}
"""

SCORE = GOOD[GOOD.index("  - {id: score") :]
SHAPE = SCORE.replace("id: score", "id: shape").replace(
    "rewards.py:score", "§recipe.dag.reward.credit:shaped, args: {shaping: margin}"
)
ADV = "  - {id: adv, train: advantage, policy: main, after: [score]}\n"
OLD = "  - {id: old, train: old_log_probs, policy: main, after: [score]}\n"
REFERENCE = "  - {id: ref, train: reference, policy: main, after: [score]}\n"
UPDATE = "  - {id: update, train: update, policy: main, after: [adv, old]}\n"
TRAIN = GOOD + ADV + OLD + UPDATE

SYNTAX = [
    ("tab", ("agents:\n", "agents:\n§\t"), "a tab cannot"),
    ("unclosed", ("[code_interpreter]}", "[code_interpreter§}"), "YAML syntax"),
    ("colon", ("demo", "demo§: x"), "a `:` is not allowed here"),
    ("alias", ("demo", "§*name"), "undefined alias `*name`"),
    ("documents", ("policies:", "§---\npolicies:"), "a second document starts here"),
    ("key twice", ("dag_id: demo", "dag_id: demo\n§dag_id: again"), "occurs twice (first in line 1)"),
    ("nested key twice", ("agent: critic,", "agent: critic, §agent: critic,"), "occurs twice"),
    ("tag", ("demo", "§!!python/name:os.system demo"), "the tag `!!python/name:os.system` is not allowed"),
    ("container tag", ("[code", "§!!set [code"), "the tag `!!set` is not allowed"),
    ("anchor in itself", ("nodes:", "x-a: §&a [*a]\nnodes:"), "cannot contain its own alias"),
    ("merge", ("estimator: grpo", "<<: §3"), "`<<` merges a mapping"),
    ("key is a number", ("  main:", "  §1: {}\n  main:"), "a key must be text"),
    ("infinite", ("0.7", "§.inf"), "must be finite"),
    ("not a number", ("0.7", "§.nan"), "must be finite"),
    ("overflow", ("0.7", "§1e999"), "must be finite"),
    ("control character", ("demo", "d§\x07"), "U+0007"),
]

VALUES = [
    ("dag_id missing", ("dag_id: demo\nagents", "§agents"), "`dag_id` is missing"),
    ("dag_id a number", ("demo", "§3"), "expected text, got 3"),
    ("top-level key", ("algorithm:", "§algoritm:"), "did you mean `algorithm`?"),
    ("nodes a mapping", ("nodes:", "nodes: §{a: b}\nx-nodes:"), "expected a list, got a mapping"),
    ("no policies", ("policies:", "policies: §{}\nx-policies:"), "must not be empty"),
    ("no agents", ("dag_id: demo\nagents:", "§dag_id: demo\nx-agents:"), "`agents` is missing"),
    ("unknown key", ("{name: critic", "{§colour: red, name: critic"), "unknown key; available: `name`"),
    ("misspelt key", ("critic, policy", "critic, §polcy"), "unknown key; did you mean `policy`?"),
    ("missing key", ("{name: critic, policy: main}", "§{name: critic}"), "agents[1].policy: missing"),
    ("text for a number", ("0.7", '§"0.8"'), "expected a number, got '0.8'"),
    ("word for a number", ("64", "§abc"), "max_tokens: expected a whole number, got 'abc'"),
    ("true for a number", ("64", "§true"), "expected a whole number, got true"),
    ("null for a number", ("64", "§null"), "expected a whole number, got null"),
    ("fraction", ("64", "§64.5"), "expected a whole number, got 64.5"),
    ("negative", ("0.7", "§-0.1"), "at least 0, got -0.1"),
    ("zero tokens", ("64", "§0"), "at least 1, got 0"),
    ("top_p", ("temperature: 0.7", "top_p: §1.5"), "at most 1, got 1.5"),
    ("top_k", ("temperature: 0.7", "top_k: §0"), "expected -1 (whole vocabulary) or at least 1"),
    ("text for a bool", ("main: {", "main: {frozen: §no, "), "expected true or false, got 'no'"),
    ("choice", ("grpo", "§grop"), "did you mean `grpo`?"),
    ("node is text", ("  - {id: judge", "  - §text\n  - {id: judge"), "expected a mapping, got 'text'"),
    ("option key", ("hooks: hooks", "§hoks: hooks"), "did you mean `hooks`?"),
    ("filter", ("{id: score", "{§filter_plugin: a.b, id: score"), "nodes have no filters"),
    ("node retries", ("{id: judge", "{§retry_limit: 2, id: judge"), "`episode.retries` repeats"),
    ("train_cycle of a node", ("{id: write", "{§train_cycle: 2, id: write"), "`policies.<name>.train_cycle`"),
    ("share_instance", ("{id: write", "{§share_instance: 0, id: write"), "`policies.<name>.critic: {share"),
    ("env syntax", ('"${oc.env:MODEL_PATH}"', '§"${oc.env:MODEL PATH}"'), "write `${oc.env:NAME}`"),
    ("env brace", ('"${oc.env:MODEL_PATH}"', '§"${oc.env:MODEL_PATH,x"'), "a `}` is missing"),
    ("empty path", ('"${oc.env:MODEL_PATH}"', '§""'), "must not be empty"),
    ("stray ref", ("demo", "§!Ref global_config.a\nglobal_config: {a: demo}"), "only inside a node's `config`"),
    (
        "unknown ref",
        ("agent: critic", "agent: critic, config: {rollout.dtype: §!Ref global_config.x}"),
        "does not name a value",
    ),
]

GRAPH = [
    ("agent twice", ("name: critic", "name: §writer"), ("agent: critic", "agent: writer"),
     "another agent is called `writer`"),
    ("node twice", ("id: judge", "id: §write"), ("[judge]", "[write]"), "another node is called `write`"),
    ("bad name", ("name: critic", "name: §the critic"), ("agent: critic", "agent: the critic"), "use letters, digits"),
    ("no name", ("name: critic", "name: §''"), "agents[1].name: must not be empty"),
    ("no id", ("id: write", "id: §''"), "nodes[0].id: must not be empty"),
    ("unknown policy", ("critic, policy: main", "critic, policy: §mian"), "no policy `mian`; did you mean `main`?"),
    ("unused policy", ("  main:", "  §spare: {model: {path: x}}\n  main:"), "no agent uses policy `spare`"),
    ("idle agent", ("policies:", "  - {name: §idle, policy: main}\npolicies:"), "agent `idle` has no rollout node"),
    ("unknown agent", ("agent: writer", "agent: §writter"), "no agent `writter`; did you mean `writer`?"),
    ("no kind", ("  - {id: judge", "  - §{id: judge"), ("agent: critic, ", ""), "the node has no kind; add `agent:`"),
    ("two kinds", ("agent: critic,", "agent: critic, §vote: {},"), "`agent` and `vote` give it two; write two nodes"),
    ("unknown dependency", ("[judge]", "[§juge]"), "no node `juge`; did you mean `judge`?"),
    ("repeated dependency", ("[judge]", "[judge, §judge]"), "listed twice"),
    ("own dependency", ("[write]", "[write, §judge]"), "cannot depend on itself"),
    ("cycle", ("agent: writer", "agent: writer, §after: [judge]"), "cycle: write -> judge -> write"),
    ("rollout after reward", ("  - {id: score",
     SCORE.replace("id: score", "id: early").replace("judge", "write") + "  - {id: score"),
     ("after: [write]", "after: [§early]"), "it cannot depend on `early` (reward)"),
    ("reward of nothing", ("[judge]", "§[]"), "must depend on the rollout nodes"),
    ("options of a reward", ("{id: score", "{§sees_env: false, id: score"), "only rollout nodes read this"),
    ("agent of a reward", ("after: [judge]}", "§agent: critic, after: [judge]}"), "`reward` and `agent` give it two"),
    ("policy of a rollout", ("agent: critic", "agent: critic, §policy: main"), "a rollout node; its agent names"),
    ("nothing scores", ("nodes:", "§nodes:"), (SCORE, ""), "nothing scores the episode"),
    ("greedy training", ("0.7", "§0.0"), "cannot sample at temperature 0"),
    (
        "room for thoughts that are trained",
        ("max_tokens: 64", "max_tokens: 64, §thinking_tokens: 8"),
        "thoughts of a trained policy are trained, within `max_tokens`; raise that, and remove this",
    ),
    ("loop without tools", ("name: critic", "§tool_loop: {}, name: critic"), "a tool loop needs tools"),
    ("unknown tool", ("[code_interpreter]", "[§code_interpeter]"), "did you mean `code_interpreter`?"),
    ("tool twice", ("[code_interpreter]", "[code_interpreter, §code_interpreter]"), "listed twice"),
    ("kl without reference", ("  main:", "  §main:"), ("estimator: grpo", "kl_loss_coef: 0.1"),
     "needs `reference: true`"),
    ("reference without kl", ("main: {", "main: {reference: §true, "), "`reference` has no effect"),
    ("frozen reference", ("main: {", "main: {frozen: true, reference: §true, "), "needs no reference"),
    ("unread gamma", ("estimator: grpo", "§gamma: 0.9"), "does not use this option"),
    ("unread groups", ("grpo", "reinforce_pp, §group_by: [uid]"), "does not use this option"),
    ("unread role", ("{name: critic", "{§role: judge, name: critic"), "`role` has no effect unless"),
    ("no branches", ("estimator: grpo", "group_by: [uid, agent, §branch]"), "nothing branches here"),
    ("uncertain", ("grpo}", "grpo, uncertainty: {alpha: §-1}}"), "at least 0, got -1"),
    ("unbound", ("grpo}", "grpo, uncertainty: {bound: §0}}"), "a number above 0, got 0"),
    ("component", ("grpo", "gdpo, weights: {§scores: 2}"), "no node `scores` pays a reward; did you mean `score`?"),
    ("component of an env", ("grpo", "gdpo, weights: {§write: 2}"), "no node `write` pays a reward"),
    ("KL of gdpo", ("main: {", "main: {reference: true, "), ("grpo", "gdpo, §kl_reward_coef: 0.1"),
     "no node pays the KL; use `kl_loss_coef`"),
    ("shaping under gdpo", ("grpo", "gdpo"),
     ("  - {id: score", SHAPE + "  - {id: score"), "it is not a component"),
    ("one component", ("grpo", "§gdpo"), "only `score` pays; choose `grpo`"),
    ("no rounds", ("estimator: grpo", "group_by: [uid, agent, §round]"), "nothing runs in rounds here"),
    ("group twice", ("estimator: grpo", "group_by: [uid, §uid]"), "listed twice"),
    ("config of a reward", ("{id: score", "{§config: {a: 1}, id: score"), "read this, and this is a reward node"),
    ("config disagrees", ("main: {", "main: {config: {rollout: {max_num_seqs: 3}}, "),
     ("agent: critic", "agent: critic, config: {§rollout.max_num_seqs: 2}"),
     "policies.main.config.rollout.max_num_seqs is 3"),
]  # fmt: skip

USER_CODE = [
    ("no hook file", ("hooks.py:Hook", "§hoks.py:Hook"), "no such file `hoks.py`"),
    ("no hook class", ("hooks.py:Hook", "§hooks.py:Hok"), "defines no `Hok`; did you mean `Hook`?"),
    ("invalid Python", ("hooks.py:Hook", "§broken.py:Hook"), "not valid Python"),
    ("no hook in a file", ("hooks.py:Hook", "§env.py"), "`env.py` defines neither prompt nor parse"),
    ("option of a file's hook", ("hooks.py:Hook", "hooks.py, §parse_options: {a: 1}"), "could take this"),
    ("unknown option", ("hooks.py:Hook", "hooks.py:Native, prompt_options: {§tune: x}"), "did you mean `tone`?"),
    ("option of a class", ("hooks.py:Hook", "hooks.py:Chosen, prompt_options: {§tune: x}"), "did you mean `tone`?"),
    (
        "inherited option",
        ("hooks.py:Hook", "hooks.py:Mine, parse_options: {§strikt: 1}"),
        "did you mean `strict`?",
    ),
    ("context is given", ("hooks.py:Hook", "hooks.py:Native, prompt_options: {§context: x}"), "prompt of"),
    ("missing option", ("hooks.py:Hook", "§hooks.py:Derived"), "prompt of `hooks.py:Derived`"),
    ("prompt without a context", ("hooks.py:Hook", "§hooks.py:Bare"), "prompt of `hooks.py:Bare`"),
    ("empty hook class", ("hooks.py:Hook", "§hooks.py:Empty"), "neither prompt nor parse"),
    ("hook is a function", ("hooks.py:Hook", "§hooks.py:pre_process"), "is a function"),
    ("constructor", ("hooks.py:Hook", "§hooks.py:Built"), "__init__ needs the argument `size`"),
    ("short hook", ("hooks.py:Hook", "§hooks.py:Short"), "must take the positional arguments"),
    ("hungry hook", ("hooks.py:Hook", "§hooks.py:Hungry"), "needs the argument `template`"),
    ("unknown kwarg", ("hooks.py:Hook", "hooks.py:Hook, prompt_options: {§promt: x}"), "did you mean `prompt`?"),
    ("inherited kwarg", ("hooks.py:Hook", "hooks.py:Hook, parse_options: {§styl: x}"), "did you mean `style`?"),
    (
        "reserved kwarg",
        ("hooks.py:Hook", "hooks.py:Hook, prompt_options: {§context: x}"),
        "already given by the engine",
    ),
    (
        "kwargs of no hook",
        ("hooks.py:Hook", "hooks.py:PostOnly, §prompt_options: {a: 1}"),
        "defines no pre_process",
    ),
    ("kwargs alone", ("hooks: hooks.py:Hook", "§prompt_options: {a: 1}"), "has no effect without `hooks`"),
    ("env file alone", ("env.py:Env", "§env.py"), "write `file.py:Class`"),
    ("env step", ("env.py:Env", "§env.py:ShortStep"), "step of `env.py:ShortStep` must take"),
    ("env step asks", ("env.py:Env", "§env.py:AskingMore"), "step of `env.py:AskingMore` needs the argument `role`"),
    ("env yields", ("env.py:Env", "§env.py:Yielding"), "step of `env.py:Yielding` yields, so it is a generator"),
    ("env reset", ("env.py:Env", "§env.py:OddReset"), "needs the argument `difficulty`"),
    ("flag without env", ("env: env.py:Env", "§sees_env: true"), "no node has an env"),
    (
        "rewards of no env",
        ("agent: critic", "agent: critic, §env_pays: true"),
        "does not step an env",
    ),
    (
        "rewards of an empty list",
        ("agent: critic", "agent: critic, env: [], §env_pays: true"),
        "does not step an env",
    ),
    ("no reward file", ("rewards.py:score", "§reward.py:score"), "no such file `reward.py`"),
    ("no reward function", ("rewards.py:score", "§rewards.py:scores"), "did you mean `score`?"),
    ("reward arguments", ("rewards.py:score", "§rewards.py:nothing"), "must take the positional arguments `episode`"),
    ("reward class", ("rewards.py:score", "§rewards.py:Score"), "is a class; name a function"),
    (
        "reward kwarg",
        ("rewards.py:score", "rewards.py:score, args: {§wight: 2}"),
        "did you mean `weight`?",
    ),
    (
        "imported reward",
        ("rewards.py:score", "imports.py:score, args: {§wight: 2}"),
        "did you mean `weight`?",
    ),
    ("no module", ("rewards.py:score", "§no_such_package.mod:score"), "no module `no_such_package.mod`"),
    ("tool class", ("[code_interpreter]", "[§env.py:Env]"), "has no method `execute`"),
]

CHAIN = [
    ("no advantage", ("  main:", "  §main:"), (ADV, ""), ("[adv, old]", "[old]"),
     "policy `main` has no `train: advantage`"),
    ("no update", ("  main:", "  §main:"), (UPDATE, ""), "policy `main` has no `train: update`"),
    ("second update", (UPDATE, UPDATE + UPDATE.replace("  - {id: update", "  - §{id: again")),
     "policy `main` has another `train: update`, `update`"),
    ("early update", ("  - {id: update", "  - §{id: update"), ("[adv, old]", "[adv]"), "must wait for `old`"),
    ("early advantage", ("  - {id: adv", "  - §{id: adv"), ("main, after: [score]}", "main}"),
     "need the rewards"),
    ("unknown policy", ("advantage, policy: main", "advantage, policy: §man"), "no policy `man`; did you mean `main`?"),
    ("stray reference", ("  - {id: update", REFERENCE.replace("{", "§{") + "  - {id: update"),
     ("[adv, old]", "[adv, old, ref]"), "policy `main` keeps no reference"),
    ("no reference node", ("  main: {", "  §main: {reference: true, "), ("estimator: grpo", "kl_loss_coef: 0.1"),
     "a reference that no `train: reference` computes"),
    ("servers' log-probs", ("estimator: grpo", "estimator: grpo, old_log_probs: §rollout"),
     "`old` recomputes the log-probs of policy `main`; remove it, or write `trainer`"),
    ("trainer's log-probs", ("estimator: grpo", "estimator: grpo, old_log_probs: §trainer"), (OLD, ""),
     ("[adv, old]", "[adv]"), "policy `main` has no `train: old_log_probs`, so its servers' log-probs are used"),
    ("reward after update", (", after: [judge]", ", after: [judge, §old]"),
     (OLD, OLD.replace(", after: [score]", "")),
     "cannot depend on `old` (old_log_probs)"),
    ("kwargs of an update", ("{id: update", "{§args: {}, id: update"),
     "only reward and compute nodes"),
]  # fmt: skip

CASES = [
    pytest.param(base, case[1:-1], case[-1], id=case[0])
    for base, cases in ((GOOD, SYNTAX), (GOOD, VALUES), (GOOD, GRAPH), (GOOD, USER_CODE), (TRAIN, CHAIN))
    for case in cases
]


@pytest.mark.parametrize("base", [GOOD, TRAIN])
def test_the_file_that_the_cases_break_is_good(base, load_text):
    assert load_text(base).dag_id == "demo"


@pytest.mark.parametrize("env", ["Swapped", "Later", "Asking"])
def test_an_env_may_take_its_arguments_by_name_and_have_generators_inside(env, load_text):
    assert load_text(GOOD.replace("env.py:Env", f"env.py:{env}")).dag_id == "demo"


@pytest.mark.parametrize(("base", "edits", "message"), CASES)
def test_one_mistake_is_one_problem_at_its_place(base, edits, message, expect_one_problem):
    expect_one_problem(base, edits, message)


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b"", (1, 1), "the file is empty"),
        (b"# nothing yet\n", (1, 1), "the file is empty"),
        (b"- a\n- b\n", (1, 1), "expected a mapping with keys such as `dag_id` and `nodes`, got a list"),
        (b"just text\n", (1, 1), "got one value"),
        ("dag_id: café\n".encode("latin-1"), (1, 12), "byte 0xe9 is not UTF-8"),
        (b"dag_id: x\na: [1, 2\n", (3, 1), "YAML syntax"),
        (b"a: " + b"[" * 1000 + b"]" * 1000, (1, 1), "nested too deeply"),
    ],
)
def test_what_is_no_workflow_at_all(content, place, message, problems_of):
    problems = problems_of(content)
    assert [(p.line, p.column) for p in problems] == [place]
    assert message in str(problems[0])


@pytest.mark.parametrize(
    ("first", "later", "depth"),
    [("[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", f"[{', '.join(['*'] * 10)}]", 9), ("{a: 1}", "{<<: [*, *]}", 30)],
)
def test_aliases_cannot_unfold_without_end(problems_of, first, later, depth):
    lines = [f"x-0: &a0 {first}"]
    lines += [f"x-{n}: &a{n} {later.replace('*', f'*a{n - 1}')}" for n in range(1, depth)]
    problems = problems_of("\n".join(lines).encode())
    assert "expand into more than" in str(problems[0])


def test_an_aliased_mistake_is_reported_once_where_it_is_written(problems_of, tmp_path):
    text = GOOD.replace("agents:", "x-hot: &hot {temperature: -1}\nagents:")
    text = text.replace("name: critic", "name: critic, sampling: *hot")
    text = text.replace("{temperature: 0.7, max_tokens: 64}", "*hot")
    problems = problems_of(text.encode())
    assert [(p.line, p.column, p.where) for p in problems] == [(2, 27, "agents[0].sampling.temperature")]


def test_all_mistakes_come_together_in_the_order_of_the_file(problems_of, tmp_path):
    text = GOOD.replace("64", "many").replace("critic, policy: main", "critic, policy: mian")
    text = text.replace("hooks.py:Hook", "hooks.py:Hok").replace("[judge]", "[jugde]")
    wheres = [problem.where for problem in problems_of(text.encode())]
    assert wheres == [
        "agents[0].sampling.max_tokens",
        "agents[1].policy",
        "nodes[0].hooks",
        "nodes[2].after[0]",
    ]


def test_a_problem_is_one_line_with_file_line_and_column(problems_of, tmp_path):
    problem = problems_of(GOOD.replace("env.py:Env", "env.py:Envv").encode())[0]
    column = GOOD.splitlines()[8].index("env.py:Env") + 1
    where = f"{tmp_path}/workflow.yaml:9:{column}: nodes[0].env"
    assert str(problem) == f"{where}: `env.py` defines no `Envv`; did you mean `Env`?"


def test_a_file_that_is_not_there_is_a_workflow_error(problems_of, tmp_path):
    with pytest.raises(WorkflowError, match="missing.yaml: no such file"):
        load_workflow(tmp_path / "missing.yaml")


def test_a_misspelt_agent_and_a_broken_file_of_several_nodes_are_one_problem_each(problems_of, tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    head = (
        "dag_id: x\nagents: [{name: a, policy: p}, {name: b, policy: p}]\npolicies: {p: {model: {path: m}}}\nnodes:\n"
    )
    score = "  - {id: r, reward: 'json:dumps', after: s}\n"
    (typo,) = problems_of(f"{head}  - {{id: s, agnet: a}}\n  - {{id: t, agent: b, after: s}}\n{score}".encode())
    assert typo.message == "unknown key; did you mean `agent`?"
    nodes = "".join(f"  - {{id: {node}, agent: {agent}, hooks: bad.py:A}}\n" for node, agent in ("sa", "tb"))
    (broken,) = problems_of(f"{head}{nodes}{score}".encode())
    assert "`bad.py` is not valid Python" in broken.message


def test_a_route_that_cannot_be_read_hides_no_mistake_of_the_env(tmp_path):
    (tmp_path / "w.yaml").write_text(
        "dag_id: d\nagents: [{name: a, policy: main}]\npolicies: {main: {model: {path: m}}}\n"
        "nodes: [{id: n, agent: a, env_route: 3, env_pays: true}]\n"
    )
    with pytest.raises(WorkflowError) as caught:
        load_workflow(tmp_path / "w.yaml")
    assert {problem.where for problem in caught.value.problems} >= {"nodes[0].env_route", "nodes[0].env_pays"}
