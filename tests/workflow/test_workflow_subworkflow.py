from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.conversion import import_workflow
from recipe.dag.loading.workflow_file import load_workflow

TALK = """\
dag_id: talk
agents: [{name: pro, policy: theirs}, {name: contra, policy: theirs}]
policies: {theirs: {model: {path: unused}}}
envs: {quiz: {path: env.py:Env}}
loops:
  rounds: {nodes: [claim, answer], max_rounds: 2, until: {agree: [claim, answer]}}
nodes:
  - {id: open, agent: pro, config: {rollout.max_num_seqs: 5}}
  - {id: claim, agent: pro, after: open, env: quiz}
  - {id: answer, agent: contra, after: [open], hooks: hooks.py:Hook,
     when: {any_of: [{node: open, exists: true}, {env: claim, key: level, equals: 1}]}}
  - {id: count, vote: {}, after: [claim, answer]}
  - {id: side, compute: hooks.py:note, after: open}
  - {id: score, reward: missing.py:score, after: count}
  - {id: update, train: update, policy: theirs, after: score}
"""

MAIN = """\
dag_id: demo
agents: [{name: pro, policy: main}, {name: critic, policy: main}, {name: judge, policy: main}]
policies: {main: {model: {path: a}}}
nodes:
  - {id: start, agent: critic}
  - {id: sub, workflow: parts/talk.yaml, agents: {contra: critic}, after: start}
  - {id: end, agent: judge, after: [start, sub], when: {node: sub__count, key: share, at_most: 0.5}}
  - {id: score, reward: rewards.py:score, after: end}
"""


@pytest.fixture
def write(folder):
    parts = folder / "parts"
    parts.mkdir()
    for name in ("hooks.py", "env.py"):
        (folder / name).rename(parts / name)

    def write(main=MAIN, talk=TALK):
        (parts / "talk.yaml").write_text(talk)
        (folder / "main.yaml").write_text(main)
        return folder / "main.yaml"

    return write


def problems(path) -> list[str]:
    with pytest.raises(WorkflowError) as caught:
        load_workflow(path)
    return [f"{Path(p.file).name}:{p.line}:{p.column}: {p.where}: {p.message}" for p in caught.value.problems]


def test_nodes_loops_and_envs_come_along_and_rewards_and_training_do_not(write):
    workflow = load_workflow(write())
    ids = [node.id for node in workflow.nodes if "." not in node.id]
    assert ids == ["start", "sub__open", "sub__claim", "sub__answer", "sub__count", "sub__side", "end", "score"]
    assert workflow.loops["sub__rounds"].nodes == ("sub__claim", "sub__answer")
    assert workflow.loops["sub__rounds"].until.agree == ("sub__claim", "sub__answer")
    assert list(workflow.envs) == ["quiz"] and list(workflow.policies) == ["main"]


def test_entries_wait_for_what_the_sub_waits_for_and_its_ends_are_waited_for(write):
    workflow = load_workflow(write())
    assert workflow.node("sub__open").after == ("start",)
    assert workflow.node("sub__count").after == ("sub__claim", "sub__answer")
    assert workflow.node("end").after == ("start", "sub__count", "sub__side")


def test_agents_are_those_of_the_same_name_or_the_mapped_ones(write):
    workflow = load_workflow(write())
    named = {node.id: workflow.agent_of(node).name for node in workflow.rollout_nodes}
    assert named == {
        "start": "critic", "sub__open": "pro", "sub__claim": "pro", "sub__answer": "critic", "end": "judge",
    }  # fmt: skip
    assert workflow.policies["main"].config == {"rollout.max_num_seqs": 5}


def test_conditions_follow_the_new_names(write):
    when = load_workflow(write()).node("sub__answer").when
    assert when.any_of[0].node == "sub__open" and when.any_of[1].env == "sub__claim"


def test_paths_mean_the_files_that_they_meant_there(write):
    workflow = load_workflow(write())
    assert workflow.node("sub__answer").hooks == "parts/hooks.py:Hook"
    assert workflow.node("sub__side").function == "parts/hooks.py:note"
    assert workflow.envs["quiz"].path == "parts/env.py:Env"
    assert workflow.node("sub__claim").env == ("quiz",)


def test_one_file_may_come_twice_and_a_loop_may_repeat_it(write):
    second = "  - {id: twin, workflow: parts/talk.yaml, agents: {contra: judge}, after: sub}\n"
    talk = TALK.replace("loops:\n", "x-loops:\n").replace(
        "env: claim, key: level, equals: 1", "sample: a, exists: true"
    )
    main = MAIN.replace("nodes:\n", "loops: {again: {nodes: [twin], max_rounds: 2}}\nnodes:\n", 1) + second
    workflow = load_workflow(write(main, talk))
    assert workflow.node("twin__open").after == ("sub__count", "sub__side")
    assert len(workflow.loops["again"].nodes) == 5


def test_mistakes_in_a_loop_behind_a_sub_workflow_are_at_their_own_place(write):
    loop = "loops: {again: {nodes: [sub, nd, end], max_rounds: 2}}\nnodes:\n"
    found = problems(write(MAIN.replace("nodes:\n", loop, 1)))
    assert "main.yaml:4:30: loops.again.nodes[1]: no node `nd`; did you mean `end`?" in found


def test_envs_of_one_text_in_two_folders_are_not_one_env(write, folder):
    main = MAIN.replace("nodes:\n", "envs: {quiz: {path: env.py:Env}}\nnodes:\n", 1)
    file = write(main)
    (folder / "env.py").write_text((folder / "parts" / "env.py").read_text())
    assert "`parts/talk.yaml` has another env called `quiz`" in "".join(problems(file))
    file.write_text(main.replace("env.py", "parts/env.py"))
    assert load_workflow(file).node("sub__claim").env == ("quiz",), "another text for the same file"


def test_a_sub_workflow_may_have_one_of_its_own(write, folder):
    write()
    (folder / "parts" / "more.yaml").write_text(
        "dag_id: more\nnodes:\n  - {id: inner, workflow: talk.yaml, agents: {contra: pro}}\n"
        "  - {id: last, agent: pro, after: inner}\n"
    )
    text = MAIN.replace("talk.yaml, agents: {contra: critic}", "more.yaml").replace("sub__count", "sub__inner__count")
    (folder / "main.yaml").write_text(text)
    # Both agents of the innermost file are the outermost one's `pro`; nobody declares agents in between.
    workflow = load_workflow(folder / "main.yaml")
    assert workflow.agent_of(workflow.node("sub__inner__answer")).name == "pro"
    assert workflow.node("sub__inner__open").after == ("start",)
    assert workflow.node("sub__last").after == ("sub__inner__count", "sub__inner__side")
    assert workflow.node("end").after == ("start", "sub__last")
    assert workflow.loops["sub__inner__rounds"].nodes == ("sub__inner__claim", "sub__inner__answer")
    assert workflow.node("sub__inner__answer").hooks == "parts/hooks.py:Hook"


@pytest.mark.parametrize(
    ("edit", "talk", "expected"),
    [
        (("talk.yaml", "tolk.yaml"), TALK, ["main.yaml:6:25: nodes[1].workflow: no such file `parts/tolk.yaml`"]),
        (("{contra:", "{contr:"), TALK, [
            "main.yaml:6:5: nodes[1]: `parts/talk.yaml` needs an agent `contra`",
            "main.yaml:6:51: nodes[1].agents.contr: `parts/talk.yaml` has no rollout node of an agent `contr`; did you",
        ]),
        (("contra: critic}", "contra: critik}"), TALK,
         ["nodes[1].agents.contra: no agent `critik`; did you mean `critic`?"]),
        (("agents: {contra: critic}", "agent: {}"), TALK, ["nodes[1].agent: unknown key; did you mean `agents`?"]),
        (("after: start}", "after: strat}"), TALK,
         ["main.yaml:6:75: nodes[1].after: no node `strat`; did you mean `start`?"]),
        (("", ""), TALK.replace("hooks.py:Hook", "hooks.py:Hok"),
         ["talk.yaml:10:55: nodes[2].hooks: `hooks.py` defines no `Hok`; did you mean `Hook`?"]),
        (("", ""), TALK.replace("max_rounds: 2", "max_rounds: 0"), ["talk.yaml:6:48: loops.rounds.max_rounds: exp"]),
        (("", ""), TALK.replace("env.py:Env", "env.py:Envy"), ["talk.yaml:4:21: envs.quiz.path: `env.py` defines no"]),
        (("", ""), TALK.replace("{node: open", "{node: opn"),
         ["talk.yaml:11:29: nodes[2].when.any_of[0].node: no node `opn`; did you mean `open`?"]),
        (("", ""), TALK.replace("[claim, answer]}\n  - {id: side", "[claim, anser]}\n  - {id: side"),
         ["talk.yaml:12:42: nodes[3].after[1]: no node `anser`; did you mean `answer`?"]),
        (("", ""), "dag_id: talk\nnodes: [\n", ["talk.yaml:3:1: : YAML syntax"]),
        (("", ""), "dag_id: talk\nnodes:\n  - {node_id: a, node_type: MODEL_INFERENCE, node_role: ROLLOUT}\n",
         ["talk.yaml:3:5: nodes[0]: add `agent: NAME`"]),
        (("", ""), "dag_id: talk\nagents: [{name: judge, policy: p}, {name: critic, policy: p}]\nnodes:\n"
         "  - {node_id: a, node_type: MODEL_INFERENCE, node_role: ROLLOUT}\n",
         ["talk.yaml:4:5: nodes[0]: with several agents, a ROLLOUT node must name its agent"]),
        (("", ""), "dag_id: talk\nnodes: []\n", ["nodes[1].workflow: `parts/talk.yaml` has no rollout node"]),
        (("", ""), "dag_id: talk\nnodes:\n  - {id: again, workflow: ../main.yaml}\n",
         ["talk.yaml:3:27: nodes[0].workflow: the file includes itself: main.yaml -> talk.yaml -> main.yaml"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_the_file_where_they_are(edit, talk, expected, write):
    found = problems(write(MAIN.replace(*edit) if edit[0] else MAIN, talk))
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        assert wanted in line


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("agent: pro, after: open", "agent: pro, after: start", "9:36: nodes[1].after"),
        ("{node: open, exists: true}", "{node: start, exists: true}", "11:29: nodes[2].when.any_of[0].node"),
        ("{agree: [claim, answer]}", "{agree: [claim, start]}", "6:74: loops.rounds.until.agree[1]"),
        ("nodes: [claim, answer], max", "nodes: [claim, start], max", "6:27: loops.rounds.nodes[1]"),
        (
            "agent: contra, after",
            "agent: contra, candidates: {k: 2, by: start}, after",
            "10:56: nodes[2].candidates.by",
        ),
    ],
    ids=["after", "when", "until", "loop", "candidates"],
)
def test_a_name_in_a_sub_workflow_never_means_a_node_of_the_including_file(old, new, place, write):
    assert old in TALK
    (line,) = problems(write(talk=TALK.replace(old, new, 1)))
    assert line.startswith(f"talk.yaml:{place}: no node `start`")


SAYS = "talk.yaml:{}: this has no effect: `{}` of `main.yaml` applies"
PRO = "talk.yaml:2:{}: agents[0].{}: this has no effect: agent `pro` of `main.yaml` is used instead"
PLAIN = "{name: pro, policy: theirs}"
SAMPLED = "{name: pro, policy: theirs, sampling: {temperature: 0.5}, tools: [code_interpreter]}"


@pytest.mark.parametrize(
    ("main", "talk", "expected"),
    [
        (("", ""), ("envs:", "episode: {max_turns: 4}\nenvs:"), [SAYS.format("4:1: episode", "episode")]),
        (("", ""), ("envs:", "algorithm: {epochs: 2}\nenvs:"), [SAYS.format("4:1: algorithm", "algorithm")]),
        (("nodes:", "episode: {max_turns: 4}\nnodes:"), ("envs:", "episode: {max_turns: 4}\nenvs:"), []),
        (("", ""), (PLAIN, SAMPLED), [PRO.format(38, "sampling"), PRO.format(68, "tools")]),
        (
            ("{name: pro, policy: main}", SAMPLED.replace("theirs", "main")),
            ("{name: pro, policy: theirs}", SAMPLED),
            [],
        ),
    ],
)
def test_what_the_including_file_decides_is_warned_of(write, main, talk, expected):
    workflow = load_workflow(write(MAIN.replace(*main, 1), TALK.replace(*talk, 1)))
    assert [f"{Path(p.file).name}:{p.line}:{p.column}: {p.where}: {p.message}" for p in workflow.warnings] == expected


def test_warnings_of_a_sub_workflow_of_a_sub_workflow_arrive(write, folder):
    path = write(talk=TALK.replace("envs:", "episode: {max_turns: 4}\nenvs:", 1))
    lines = ["dag_id: outer", "agents: [{name: pro, policy: main}, {name: critic, policy: main}]"]
    lines += ["policies: {main: {model: {path: a}}}", "nodes:", "  - {id: all, workflow: middle.yaml}"]
    reward = MAIN.splitlines()[-1].replace("after: end", "after: all")
    (folder / "outer.yaml").write_text("\n".join([*lines, reward]))
    middle = [line for line in path.read_text().splitlines() if "id: end" not in line and "when:" not in line]
    (folder / "middle.yaml").write_text("\n".join(middle).replace(", {name: judge, policy: main}", ""))
    (warning,) = load_workflow(folder / "outer.yaml").warnings
    assert warning.message == "this has no effect: `episode` of `middle.yaml` applies"
    comments = [line for line in import_workflow(folder / "outer.yaml").splitlines() if line.startswith("#   ")]
    assert comments == ["#   talk.yaml, line 4: episode: this has no effect: `episode` of `middle.yaml` applies"]
