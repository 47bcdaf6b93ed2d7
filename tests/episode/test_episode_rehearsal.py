"""Episodes without a model: what user code does wrong is found before a run starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.episode.rehearsal import ANSWERS, SAMPLE, CharacterTokenizer, paid_alike, rehearse, unseen_keys
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.entry_json import to_json
from tests.test_shipped import WORKFLOWS

WORKFLOW = """
dag_id: own
agents: [{{name: solver, policy: main{agent}}}, {{name: other, policy: main}}]
policies: {{main: {{model: {{path: m}}}}}}
{more}
nodes:
  - {{id: solve, agent: solver{solve}}}
  - {{id: second, agent: other{second}}}
  - {{id: score, reward: "own.py:score", after: [solve, second]}}
"""
SCORE = "def score(episode): return {'solver': 1.0, 'other': 0.0}\n"
TOOL = """
class Add:
    name = "add"
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object",
        "properties": {"a": {"type": "integer"}, "how": {"enum": ["fast"]}}, "required": ["a", "how"]}}}
    async def execute(self, arguments, state): return self.run(arguments)
    async def close(self): ...
    def run(self, arguments): return RESULT
"""
ENV = """
class Game:
    def step(self, actions, ground_truth):
        one, two = actions
        return "", 0.0, True
"""


@pytest.fixture
def load(tmp_path):
    def load(code: str, **parts: str):
        (tmp_path / "own.py").write_text(code)
        keys = {"agent": "", "more": "", "solve": "", "second": ""} | parts
        (tmp_path / "workflow.yaml").write_text(WORKFLOW.format(**keys))
        return load_workflow(tmp_path / "workflow.yaml")

    return load


def gym_problem() -> dict[str, str]:
    factory = pytest.importorskip("reasoning_gym.factory")
    entry = factory.create_dataset("chain_sum", size=1, seed=0)[0]
    return {"generator": "chain_sum", "options": "{}", "entry": to_json(entry)}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_every_shipped_workflow_plays(file):
    truth = '["assert True"]' if "CodeEnv" in file.read_text() else "1"
    sample = {"prompt": [{"role": "user", "content": "?"}], "ground_truth": truth, "data_source": "maths"}
    sample["extra_info"] = {"level": 5, "game": "up"}
    if "verifier_reward" in file.read_text():
        sample["extra_info"]["reasoning_gym"] = gym_problem()
    if "task_score" in file.read_text():
        sample["extra_info"]["answer_csv"] = "id,target\n1,0\n2,1\n"
    episodes = rehearse(load_workflow(file), sample)
    assert len(episodes) == len(ANSWERS) and all(episode.fault is None for episode in episodes)
    assert paid_alike(episodes) == []


def test_each_tool_is_called_with_arguments_that_fit_its_schema(load):
    tools = ", tools: [own.py:Add], tool_loop: {}"
    code = SCORE + TOOL.replace("RESULT", "str(arguments)")
    first, *_ = rehearse(load(code, agent=tools))
    assert [result.text for result in first.calls[0].tool_results] == ["{'a': 1, 'how': 'fast'}"]


class Named(CharacterTokenizer):
    """Its template prints the names of tools alone."""

    def apply_chat_template(self, conversation, tools=None, **options):
        names = [{"is": tool["function"]["name"]} for tool in tools or ()]
        return super().apply_chat_template(conversation, names, **options)


def test_tools_are_called_whatever_the_template_makes_of_their_schemas(load):
    workflow = load(SCORE + TOOL.replace("RESULT", "'3'"), agent=", tools: [own.py:Add], tool_loop: {}")
    first, *_ = rehearse(workflow, tokenizers={"main": Named()})
    assert [len(call.tool_results) for call in first.calls] == [1, 0]


@pytest.mark.parametrize(
    ("code", "parts", "message"),
    [
        (SCORE + TOOL.replace("RESULT", "1 / 0"), {"agent": ", tools: [own.py:Add], tool_loop: {}"}, "own.py:9"),
        (SCORE + TOOL.replace("RESULT", "7"), {"agent": ", tools: [own.py:Add], tool_loop: {}"}, "returned int"),
        (SCORE + ENV, {"second": ", env: own.py:Game"}, "own.py:5"),
        ("def score(episode): return {'solver': 'much'}\n", {}, "own.py:score"),
        (SCORE + "\nclass Own:\n    def prompt(self, context): return 1\n", {"solve": ", hooks: own.py:Own"}, "Own"),
    ],
)
def test_an_error_of_the_users_code_is_one_line_with_its_place(load, code, parts, message):
    with pytest.raises(UserError) as caught:
        rehearse(load(code, **parts))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "critic", "message"),
    [
        ("1 / 0", "", "own.py:2"),
        ("batch.rewards[1:]", "", "one number for each of the 8 calls"),
        ("batch.rewards", "", None),
        ("batch.rewards + batch.values[:0].sum()", ", critic: {lr: 1.0e-5}", None),
    ],
)
def test_an_estimator_credits_the_episodes(load, body, critic, message):
    path = load(SCORE + f"def mine(batch): return {body}\n", more="algorithm: {estimator: own.py:mine}").path
    workflow = load_workflow(path, Path(path).read_text().replace("path: m}", f"path: m}}{critic}"))
    if message is None:
        assert len(rehearse(workflow)) == len(ANSWERS)
        return
    with pytest.raises(UserError) as caught:
        rehearse(workflow)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_answer_is_played_too_also_for_a_known_truth(load):
    code = "def score(episode): return {'solver': 1 / 0 if '0' in episode.calls[0].text else 0.0, 'other': 0.0}\n"
    with pytest.raises(UserError, match="own.py:1"):
        rehearse(load(code), SAMPLE | {"ground_truth": "27"})


def test_a_return_that_no_episode_reaches_is_read(load):
    game = ENV.replace('return "", 0.0, True', 'return ("", 0.0, True) if two else 1\n        return "", 1.0')
    with pytest.raises(UserError, match=r"step of `own.py:Game` returns 2 values in line 7, not \(obs, reward, done\)"):
        load(SCORE + game, second=", env: own.py:Game")


def test_keys_that_no_agent_sets_are_named(load):
    code = "from recipe.dag.types.context import Output\n" + SCORE
    code += "class Own:\n    def parse(self, context): return Output(parsed={'answer': context.call.text})\n"
    loop = "loops: {again: {nodes: [solve], max_rounds: 2, until: {node: solve, key: KEY, equals: '1'}}}"
    for key, expected in (("verdict", ["loops.again.until: reads `verdict` of solve"]), ("answer", [])):
        workflow = load(code, solve=", hooks: own.py:Own", more=loop.replace("KEY", key))
        lines = unseen_keys(workflow, rehearse(workflow))
        assert [line.partition(", which")[0] for line in lines] == expected


@pytest.mark.parametrize(
    ("paid", "named"),
    [("1.0", ["1"]), ("0.1", ["0.1"]), ("0.0", []), ("-1.0", []), ("float(bool(episode.calls[0].text))", [])],
)
def test_a_reward_that_pays_for_anything_is_named(load, paid, named):
    workflow = load(f"def score(episode): return {{'solver': {paid}, 'other': 0.0}}\n")
    lines = paid_alike(rehearse(workflow))
    assert [line.partition(" for any")[0] for line in lines] == [f"node score: pays solver {text}" for text in named]


def test_errors_count_even_where_a_run_would_leave_the_episode_out(load):
    workflow = load("def score(episode): return 1 / 0\n", more="episode: {on_user_error: mask}")
    with pytest.raises(UserError, match="own.py:1"):
        rehearse(workflow)


def test_the_tokenizer_gives_text_back():
    tokenizer = CharacterTokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hällo \U0001f600"}], tokenize=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tool_is_called_however_short_the_agents_answers_are(load):
    tools = ", sampling: {max_tokens: 4}, tools: [own.py:Add], tool_loop: {}"
    with pytest.raises(UserError, match="own.py:9"):
        rehearse(load(SCORE + TOOL.replace("RESULT", "1 / 0"), agent=tools))


def test_a_tool_whose_schema_refuses_the_made_up_arguments_is_reported(load):
    code = SCORE + TOOL.replace("RESULT", "'fine'").replace('{"type": "integer"}', '{"type": "string", "minLength": 9}')
    with pytest.raises(UserError, match="tool add: was not run, since invalid arguments: '1' is too short"):
        rehearse(load(code, agent=", tools: [own.py:Add], tool_loop: {}"))
