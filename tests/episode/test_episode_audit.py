"""What rewards pay for texts that need no skill."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from recipe.dag.app import cli
from recipe.dag.core.errors import UserError
from recipe.dag.episode.attacks import ATTACKS
from recipe.dag.episode.audit import Audit, audit
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.reward.entry_json import to_json
from recipe.dag.tools.sandbox_client import SandboxClient
from tests.test_shipped import ROOT

BOUND = 0.7
WORKFLOW = """
dag_id: own
agents: [{name: solver, policy: main}, {name: judge, policy: judge}]
policies: {main: {model: {path: m}}, judge: {api: {base_url: "http://127.0.0.1:9/v1", model: j}}}
nodes:
  - {id: solve, agent: solver}
  - {id: judge, agent: judge, after: solve}
  - {id: score, reward: "own.py:score", after: judge}
"""
HEAD = """import math, re
def score(episode):
    text, label = episode.calls[0].text, episode.sample["ground_truth"]
    return {"solver": REWARD}
"""
# as two generators of reasoning-gym score
DISTANCE = "min(1.0, math.exp(-abs(float(re.sub('[^-.0-9a-z]', '', text)) - float(label))))"
TRUTHY = "1.0 if bool(text) == bool(label) else 0.0"
LABELS = ("72", "5", "13")


def sample(label: str, **extra: object) -> dict:
    return {
        "prompt": [{"role": "user", "content": "How many?"}],
        "ground_truth": label,
        "data_source": "maths",
        "extra_info": {"level": 5, **extra},
    }


def audited(file: Path, samples: list[dict] | None = None, **options) -> Audit:
    return asyncio.run(audit(load_workflow(file), samples or [sample(label) for label in LABELS], **options))


@pytest.fixture
def own(tmp_path):
    def write(reward: str) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a file is loaded once
        folder.mkdir()
        (folder / "own.py").write_text(HEAD.replace("REWARD", reward))
        (folder / "workflow.yaml").write_text(WORKFLOW)
        return folder / "workflow.yaml"

    return write


def attacks_of(result: Audit) -> set[str]:
    return {row.attack for row, *_ in result.above(BOUND)}


def test_a_constant_reward_pays_for_everything(own):
    result = audited(own("0.1"))
    assert attacks_of(result) == set(ATTACKS)
    assert result.rows[1].parts == {("solver", "score"): (pytest.approx(0.1), 1.0)}
    assert result.silent == ["judge"] and result.worth("solver") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        ("float(text == label)", set()),
        ("float(label in text)", set()),
        (TRUTHY, set(ATTACKS)),
        ("1.0 if 'full marks' in text else 0.0", {"to the judge"}),
        ("1.0 if len(text) > 4000 else 0.0", {"long text"}),
        ("1.0 if episode.sample['prompt'][0]['content'] in text else 0.0", {"the question"}),
        ("1.0 if re.search(r'\\d', text) else 0.0", None),
        ("-1.0 if text != label else 1.0", set()),
        ("1.0, 'judge': -1.0", set()),  # won from another agent
    ],
)
def test_a_hole_is_found_by_the_attacks_that_fit(own, reward, found):
    result = attacks_of(audited(own(reward)))
    assert result == found if found is not None else {"0", "the label's format"} < result < set(ATTACKS)


def test_a_distance_that_is_not_a_number_is_full_marks(own):
    reward = DISTANCE.replace("float(re", "(lambda t: float(t) if t in ('nan', '0', '72', '5', '13') else 1e9)(re")
    assert attacks_of(audited(own(reward))) == {"nan"}


def test_an_attack_that_the_reward_cannot_read_is_an_error_that_names_it(own):
    with pytest.raises(UserError, match=r"own.py:4.*\(the attack: nan\)"):
        audited(own("0.0 / ('nan' not in text)"))


TOOL = """
class Run:
    name = "run"
    schema = {"type": "function", "function": {"name": "run", "parameters": {"type": "object",
        "properties": {"code": {"type": "string"}}, "required": ["code"]}}}
    async def execute(self, arguments, state): return "output of " + arguments["code"].strip()
    async def close(self): ...
"""


@pytest.mark.parametrize("loop", ["hermes", "fenced", "tags"])
def test_an_agent_with_a_tool_loop_calls_its_tool_with_the_program_and_then_answers(own, loop):
    ran = "[result.text for result in episode.calls[0].tool_results] == ['output of print(1)']"
    file = own(f"float({ran} and text.endswith('boxed{{1}}.'))")
    with (file.parent / "own.py").open("a") as code:
        code.write(TOOL)
    agent = f"policy: main, tools: [own.py:Run], tool_loop: {{format: {loop}}}}}"
    file.write_text(file.read_text().replace("policy: main}", agent, 1))
    assert attacks_of(audited(file)) == {"a constant program"}


@pytest.mark.parametrize(
    ("generator", "some", "all_of_them"),
    [
        ("complex_arithmetic", {"nan"}, {"nan"}),
        ("game_of_life_halting", {"nan", "any text"}, set(ATTACKS) - {"empty"}),
        ("chain_sum", set(), set()),
    ],
)
def test_the_verifiers_of_reasoning_gym_that_pay_for_nothing_are_found(generator, some, all_of_them):
    factory = pytest.importorskip("reasoning_gym.factory")
    data = factory.create_dataset(generator, size=6, seed=1)
    problems = [{"generator": generator, "options": "{}", "entry": to_json(data[index])} for index in range(6)]
    samples = [sample(str(data[index]["answer"]), reasoning_gym=problem) for index, problem in enumerate(problems)]
    found = attacks_of(audited(ROOT / "examples" / "gallery" / "workflow_reasoning_gym.yaml", samples))
    assert some <= found <= all_of_them


SHIPPED: dict[object, Path] = {}
"""A workflow for each combination of agents' code and rewards."""
for file in sorted((ROOT / "workflows").glob("workflow_*.yaml")):
    nodes = load_workflow(file).nodes
    code = [(node.hooks, node.env, node.reward, json.dumps(dict(node.args or {}), default=str)) for node in nodes]
    SHIPPED.setdefault(json.dumps([sorted(map(str, code))]), file)


@pytest.mark.parametrize("file", SHIPPED.values(), ids=lambda path: path.stem)
def test_no_shipped_recipe_pays_for_an_attack(file, local):
    text, samples = file.read_text(), [sample(label) for label in LABELS]
    if "CodeEnv" in text:
        samples = [sample(f'["assert f(1) == {label}"]') for label in LABELS]
    if "task_score" in text:
        samples = [sample("0", answer_csv="id,target\n1,0\n2,1\n")]

    async def run() -> Audit:
        client = SandboxClient(local.url, token=local.token, max_concurrent=4)
        try:
            return await audit(load_workflow(file), samples, sandbox=client)
        finally:
            await client.close()

    result = asyncio.run(run())
    assert [(row.attack, share) for row, share, _ in result.above(BOUND)] == []
    assert result.rows[0].agents, "something is scored"


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["verl-dag", "audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code or 0, *capsys.readouterr())  # pyright: ignore

    return run


def test_the_command_prints_a_table_and_fails_above_the_bound(own, command, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"problem": "?", "answer": label}) + "\n" for label in LABELS))
    code, out, error = command(own("0.5"), "--data", data, "--samples", 2)
    assert code == 1 and "2 samples" in out and "solver by score" in out and "+0.50 (100%)" in out
    assert "not asked, since no model is: judge; a coach's" in out
    assert "pays solver 0.50, 100% of what the label earns it (0.50); an example" in error
    assert command(own("float(text == label)"), "--data", data)[0] == 0
    assert command(own("0.5"), "--data", data, "--bound", 1.0)[0] == 0


def test_attacks_of_ones_own_find_the_hole_of_the_example(command):
    folder = ROOT / "examples" / "audit"
    line = [folder / "workflow_contains.yaml", "--data", ROOT / "examples" / "gallery" / "questions.jsonl"]
    assert command(*line)[0] == 0
    code, _, error = command(*line, "--attacks", folder / "attacks.py")
    assert code == 1 and "`all numbers` pays solver 1.00" in error
    code, _, error = command(*line, "--attacks", folder / "rewards.py")
    assert code == 2 and "defines no `ATTACKS`" in error
