"""API policies in workflow files: what is accepted, and every mistake with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.dag.app.evaluate import api_of, evaluation_of
from recipe.dag.core.errors import UserError
from recipe.dag.core.problem import WorkflowError
from recipe.dag.loading.conversion import import_workflow
from recipe.dag.loading.workflow_file import load_workflow
from recipe.dag.settings.pools import plan_pools
from recipe.dag.train.models import find_models
from recipe.dag.workflow.plan import make_plan
from recipe.dag.workflow.render import to_text
from recipe.dag.workflow.user_files import user_files

ROOT = Path(__file__).parents[2]
JUDGE = ROOT / "examples" / "gallery" / "workflow_api_judge.yaml"
API = "{base_url: 'http://localhost:8000/v1', model: m}"


def write(tmp_path: Path, policy: str, *, algorithm: str = "{estimator: grpo}", nodes: str = "") -> Path:
    """A trained solver and a helper whose policy is `policy`."""
    (tmp_path / "reward.py").write_text("def pay(episode):\n    return {}\n")
    file = tmp_path / "w.yaml"
    file.write_text(f"""\
dag_id: w
agents: [{{name: solver, policy: main}}, {{name: helper, policy: outside}}]
policies:
  main: {{model: {{path: m}}}}
  outside: {policy}
algorithm: {algorithm}
nodes:
  - {{id: help, agent: helper}}
  - {{id: solve, agent: solver, after: help}}
  - {{id: pay, reward: "reward.py:pay", after: solve}}
{nodes}""")
    return file


def mistakes(file: Path) -> str:
    with pytest.raises(WorkflowError) as error:
        load_workflow(file)
    return str(error.value)


def test_an_api_policy_is_frozen_and_needs_no_device_or_model(tmp_path, monkeypatch):
    workflow = load_workflow(write(tmp_path, f"{{api: {API}}}"))
    assert workflow.policies["outside"].frozen and workflow.trained_policies() == ("main",)
    assert workflow.local_policies() == ("main",)
    assert [pool.policies for pool in plan_pools(workflow, nnodes=1, n_gpus_per_node=1)] == [("main",)]
    plan = make_plan(workflow)
    assert {policy.name: policy.path for policy in plan.policies}["outside"] == "m at http://localhost:8000/v1"
    (row,) = [line for line in to_text(plan).splitlines() if "m at http" in line]
    assert row.split()[-4:] == ["frozen", "-", "helper", "none"]
    api = evaluation_of(workflow, api=api_of("http://localhost:1/v1", "x"))
    assert api.local_policies() == () and find_models(api).policies == {}


def test_the_example_loads_and_its_import_loads_again(tmp_path):
    workflow = load_workflow(JUDGE)
    api = workflow.policies["outside"].api
    assert api is not None and api.key_env == "OPENAI_API_KEY" and api.price is not None
    copy = JUDGE.with_name("workflow_api_judge_imported.yaml")
    try:
        copy.write_text(import_workflow(str(JUDGE), copy))
        assert load_workflow(copy).policies == workflow.policies
    finally:
        copy.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("policy", "place", "message"),
    [
        (f"{{api: {API}, model: {{path: x}}}}", "policies.outside.model", "has no weights of its own"),
        (f"{{api: {API}, frozen: false}}", "policies.outside.frozen", "never trained"),
        (f"{{api: {API}, gpus: 1}}", "policies.outside.gpus", "needs no GPU"),
        (f"{{api: {API}, config: {{a: 1}}}}", "policies.outside.config", "verl does not run"),
        (f"{{api: {API}, lr: 0.1}}", "policies.outside.lr", "no effect on a frozen policy"),
        (f"{{api: {API}, critic: {{}}}}", "policies.outside.critic", "needs no critic"),
        (f"{{api: {API}, reference: true}}", "policies.outside.reference", "needs no reference"),
        ("{api: {model: m}}", "policies.outside.api.provider", "the name `m` does not tell it"),
        ("{api: {provider: openai}}", "policies.outside.api.model", "missing"),
        ("{api: {base_url: 'http://h/v1'}}", "policies.outside.api.model", "missing"),
        ("{api: {provider: cohere, model: m}}", "policies.outside.api.provider", "one of `openai`, `anthropic`"),
        ("{api: {provider: mock}}", "policies.outside.api.script", "write file.py:function"),
        ("{api: {provider: google, model: m, script: 'reward.py:pay'}}", "policies.outside.api.script", "has a server"),
        ("{api: {script: 'reward.py:pay', key_env: KEY}}", "policies.outside.api.key_env", "no effect on a script"),
        ("{api: {model: claude-x, tokenizer: t}}", "policies.outside.api.tokenizer", "takes no token ids"),
        ("{api: {model: gpt-x, on_budget: skip}}", "policies.outside.api.on_budget", "no effect without `budget`"),
        ("{api: {model: gpt-x, budget: {}}}", "policies.outside.api.budget", "limits nothing"),
        ("{api: {model: gpt-x, budget: {usd: 1}}}", "policies.outside.api.budget.usd", "`price: {input: ..., output"),
        ("{api: {model: gpt-x, budget: {usd: 0}}}", "policies.outside.api.budget.usd", "above 0"),
        ("{api: {model: gpt-x, cache: ''}}", "policies.outside.api.cache", "must not be empty"),
        ("{api: {base_url: 'http://h/v1', model: m, keyenv: A}}", "policies.outside.api.keyenv", "`key_env`"),
        ("{api: {base_url: 'localhost:80', model: m}}", "policies.outside.api.base_url", "expected a URL"),
        ("{api: {base_url: 'http://u:p@h/v1', model: m}}", "policies.outside.api.base_url", "key_env"),
        ("{api: {base_url: 'http://h/v1?key=a', model: m}}", "policies.outside.api.base_url", "key_env"),
        ("{api: {base_url: '${oc.env:A', model: m}}", "policies.outside.api.base_url", "${oc.env:NAME}"),
        ("{api: {base_url: 'http://h/v1', model: ' '}}", "policies.outside.api.model", "must not be empty"),
        ("{api: {base_url: 'http://h/v1', model: m, retries: -1}}", "policies.outside.api.retries", "at least 0"),
        ("{api: {base_url: 'http://h/v1', model: m, max_model_len: 9}}", "outside.api.max_model_len", "tokenizer"),
        ("{api: {base_url: 'http://h/v1', model: m, body: {tools: []}}}", "policies.outside.api.body.tools", "engine"),
        ("{frozen: true}", "policies.outside.model", "missing; this key is required"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_place(policy, place, message, tmp_path):
    text = mistakes(write(tmp_path, policy))
    assert "w.yaml:5:" in text and f"{place}: " in text and message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("api", "agent", "place", "message"),
    [
        ("model: claude-x", "sampling: {min_p: 0.1}", "agents[1].sampling.min_p", "provider anthropic"),
        ("model: claude-x", "sampling: {temperature: 1.5}", "agents[1].sampling.temperature", "takes at most 1"),
        ("model: gemini-x", "validation: {repetition_penalty: 1.1}", "agents[1].validation.repetition_penalty", "goo"),
        ("model: gemini-x", "chat_template_kwargs: {a: 1}", "agents[1].chat_template_kwargs", "use `api.body`"),
        ("model: gpt-x, budget: {calls: 9}, on_budget: skip", "on_failure: fault", "policies.outside.api.on_budget",
         "fails the calls of agent `helper`; write `on_failure: skip` there"),
    ],
)  # fmt: skip
def test_what_a_provider_does_not_take_is_reported_at_the_agent(api, agent, place, message, tmp_path):
    file = write(tmp_path, f"{{api: {{{api}}}}}")
    file.write_text(
        file.read_text().replace("{name: helper, policy: outside}", f"{{name: helper, policy: outside, {agent}}}")
    )
    text = mistakes(file)
    assert f"{place}: " in text and message in text and len(text.splitlines()) == 1


def test_the_same_options_are_fine_where_the_provider_takes_them(tmp_path):
    file = write(tmp_path, "{api: {model: gpt-x, budget: {calls: 9}, on_budget: skip}}")
    options = "sampling: {min_p: 0.1, temperature: 1.5}, on_failure: skip"
    file.write_text(file.read_text().replace("policy: outside}]", f"policy: outside, {options}}}]"))
    assert load_workflow(file).policies["outside"].frozen


def test_a_script_is_checked_counted_as_code_and_follows_the_file(tmp_path):
    file = write(tmp_path, "{api: {script: 'judge.py:judge'}}")
    assert "policies.outside.api.script: no such file `judge.py`" in mistakes(file)
    (tmp_path / "judge.py").write_text("def judge(messages, more):\n    return ''\n")
    assert "policies.outside.api.script: " in mistakes(file)
    (tmp_path / "judge.py").write_text("def judge(messages):\n    return ''\n")
    workflow = load_workflow(file)
    assert "judge.py" in user_files(workflow)
    assert {policy.name: policy.path for policy in make_plan(workflow).policies}["outside"] == "judge.py:judge"
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "copy.yaml"
    copy.write_text(import_workflow(str(file), copy))
    api = load_workflow(copy).policies["outside"].api
    assert api is not None and api.script == "../judge.py:judge"


def test_a_key_in_place_of_its_variable_is_refused_without_repeating_it(tmp_path):
    text = mistakes(write(tmp_path, "{api: {base_url: 'http://h/v1', model: m, key_env: sk-abcdefgh12345678}}"))
    assert "policies.outside.api.key_env: expected the name of an environment variable" in text
    assert "sk-abc" not in text


def test_a_training_node_on_an_api_policy_is_an_error(tmp_path):
    chain = "".join(
        f"  - {{node_id: {policy}_{index}, node_role: {role}, policy: {policy}, dependencies: [{after}]{extra}}}\n"
        for policy in ("main", "outside")
        for index, (role, after, extra) in enumerate(
            [("ACTOR", "pay", ", only_forward_compute: true"), ("ADVANTAGE", f"{policy}_0", ""),
             ("ACTOR", f"{policy}_1", "")]
        )
    )  # fmt: skip
    text = mistakes(write(tmp_path, f"{{api: {API}}}", nodes=chain))
    assert text.count("policy `outside` is an API and cannot be trained; remove this node") == 3
    assert "w.yaml:14:" in text and "nodes[6]" in text


@pytest.mark.parametrize("algorithm", ["{estimator: vdn}", "{estimator: mappo}"])
def test_an_algorithm_that_reads_every_agents_tokens_is_an_error(algorithm, tmp_path):
    text = mistakes(write(tmp_path, f"{{api: {API}}}", algorithm=algorithm))
    assert "policies.outside.api: estimator" in text and "learns from the tokens of every agent" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:80", "m", None), "--base-url: expected a URL"),
        (("http://a:b@h/v1", "m", None), "--base-url: must hold neither"),
        (("http://h/v1", " ", None), "--served-model: must not be empty"),
        (("http://h/v1", "m", "sk-abc"), "--key-env: expected the name"),
    ],
)
def test_options_of_the_command_line_are_checked_too(arguments, message):
    url, model, key_env = arguments
    with pytest.raises(UserError, match=message) as error:
        api_of(url, model, key_env=key_env)
    assert "sk-abc" not in str(error.value)
