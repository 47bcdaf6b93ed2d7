"""What makes a run another experiment than that of its checkpoint."""

from __future__ import annotations

import copy
import json
import re

import pytest

from recipe.dag.core.errors import UserError
from recipe.dag.policy.cluster import Cluster
from recipe.dag.report.run_record import launches
from recipe.dag.train.api_policies import ApiPolicies
from recipe.dag.train.resources import Resources
from recipe.dag.train.resume import find_start
from tests.train.projects import PROBLEMS, Started, edit, go, inputs, launched, other_weights, save

CHANGES = {
    "seed: was 0, now 1": lambda p: ["seed=1"],
    "actor_rollout_ref.rollout.n: was 8, now 4": lambda p: ["actor_rollout_ref.rollout.n=4"],
    "data.train_batch_size: was 32, now 2": lambda p: ["data.train_batch_size=2"],
    "actor_rollout_ref.actor.optim.lr: was 1e-06, now 0.5": lambda p: ["actor_rollout_ref.actor.optim.lr=0.5"],
    "algorithm.estimator: was grpo, now reinforce": lambda p: edit(p / "flow.yaml", "grpo", "reinforce"),
    "policies.main.lr: was None, now 0.01": lambda p: edit(p / "flow.yaml", '"}}', '"}, lr: 0.01}'),
    "data.train_files: was .*4 problems .*, now .*4 problems": lambda p: edit(p / "train.json", "0 + 1", "0 + 2"),
    "policies.main.model: was .*model .*, now .*model ": lambda p: other_weights(p / "model"),
    "policies.fixed.model: was .*fixed .*, now .*fixed ": lambda p: other_weights(p / "fixed"),
    "content of hooks.py: was": lambda p: edit(p / "hooks.py", "return prompt_ids", "return prompt_ids[1:]"),
    "content of words.py: was": lambda p: edit(p / "words.py", "what is", "how much is"),
    "content of score.py: was": lambda p: edit(p / "score.py", "{}", "{'solver': [1.0]}"),
    "nodes.check: was absent, now present": lambda p: edit(
        p / "flow.yaml",
        "  - {id: reward",
        "  - {id: check, agent: judge, after: judge}\n  - {id: reward",
    ),
}


@pytest.mark.parametrize(("line", "change"), CHANGES.items(), ids=CHANGES)
def test_another_experiment_is_refused_with_a_line_for_what_differs(project, line, change):
    save(project)
    options = change(project) or []
    with pytest.raises(UserError, match=rf"global_step_3 belongs to another experiment:(?s:.*)\n  {line}") as error:
        go(project, *options)
    assert str(error.value).count("\n  ") <= 3, "one change is a line or a few, not a dump"


@pytest.mark.parametrize(
    "options",
    [
        ["trainer.total_training_steps=50"],
        ["trainer.logger=[console,file]", "trainer.test_freq=2", "trainer.save_freq=3", "report.keep_checkpoints=9"],
        ["actor_rollout_ref.actor.fsdp_config.param_offload=true", "rollout.max_in_flight=3"],
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000", "actor_rollout_ref.rollout.max_num_seqs=7"],
        ["actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"],
        ["actor_rollout_ref.rollout.gpu_memory_utilization=0.7", "trainer.project_name=other"],
        [
            f"actor_rollout_ref.rollout.engine_kwargs.sglang.{option}"
            for option in (
                *("mem_fraction_static=0.5", "cuda_graph_max_bs=8", "max_prefill_tokens=4096", "log_level=info"),
                *("max_running_requests=8", "attention_backend=fa3", "schedule_policy=lpm", "sampling_backend=pytorch"),
                *("grammar_backend=none", "chunked_prefill_size=2048", "skip_tokenizer_init=false"),
            )
        ],
    ],
    ids=lambda options: options[0],
)
def test_steps_loggers_reports_and_resources_are_no_difference(project, options):
    save(project)
    go(project, *options)


API = "{script: 'script.py:judge', budget: {calls: 9}, cache: a.sqlite}"


def with_api(project) -> None:
    """Put a script in the place of the judge's weights."""
    (project / "script.py").write_text("def judge(messages):\n    return '1'\n")
    edit(project / "flow.yaml", f"{{model: {{path: {project / 'fixed'}}}, frozen: true}}", f"{{api: {API}}}")
    save(project)


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ("{script: 'script.py:judge', budget: {usd: 1.5}, on_budget: stop, price: {input: 1, output: 1}}", None),
        ("{script: 'script.py:judge', max_concurrent: 2, retries: 9}", None),
        ("{script: 'script.py:other'}", "policies.fixed.api.script: was script.py:judge, now script.py:other"),
        ("{model: claude-x}", "policies.fixed.api.model: was , now claude-x"),
    ],
)
def test_what_an_api_may_cost_is_no_difference_and_what_it_is_is_one(project, now, line):
    with_api(project)
    edit(project / "flow.yaml", API, now)
    (project / "script.py").write_text("def judge(messages):\n    return '1'\ndef other(messages):\n    return '1'\n")
    if line is None:
        (project / "script.py").write_text("def judge(messages):\n    return '1'\n")
        go(project)
        return
    with pytest.raises(UserError, match="belongs to another experiment") as error:
        go(project)
    assert line in str(error.value)


def test_a_script_counts_as_code(project):
    with_api(project)
    edit(project / "script.py", "'1'", "'2'")
    with pytest.raises(UserError, match="content of script.py: was"):
        go(project)


def test_a_project_that_was_moved_or_whose_comments_about_it_changed_is_the_same(project, tmp_path, monkeypatch):
    save(project)
    moved = tmp_path / "moved"
    project.rename(moved)
    edit(moved / "flow.yaml", str(project), str(moved))
    edit(moved / "flow.yaml", "dag_id: pair", "dag_id: pair  # a solver and a judge\ndescription: two")
    monkeypatch.setenv("MODEL_PATH", str(moved / "model"))
    go(moved)


def test_what_ends_a_run_is_no_difference(project):
    """So that a run that an error has ended goes on without the episodes that raise it."""
    save(project)
    edit(project / "flow.yaml", "dag_id: pair", "episode: {on_user_error: mask, max_masked: 0.9}\ndag_id: pair")
    go(project)


def test_problems_count_by_content_not_by_file(project):
    save(project)
    (project / "lines").mkdir()
    (project / "lines" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    go(project, f"data.train_files={project}/lines/train.jsonl")


def test_other_validation_is_reported_and_not_refused(project, capsys):
    save(project)
    go(project, "validation.n=4")
    assert "accuracies up to step 3 are not comparable with later ones:\n  validation.n: was 1, now 4" in (
        capsys.readouterr().err
    )


def test_a_resource_that_an_earlier_version_counted_is_no_difference(project):
    kept = copy.deepcopy(inputs(project)[2].items)
    kept["learned"]["configuration"]["actor_rollout_ref"]["actor_rollout_ref.rollout.skip_tokenizer_init"] = True
    save(project, fingerprint=kept)
    go(project)


@pytest.mark.parametrize("unknown", ["stored", "now"])
def test_a_model_whose_content_one_run_could_not_see_is_compared_by_its_name(project, unknown):
    def hide(items):
        items["learned"]["models"]["policies.main.model"]["digest"] = ""

    config, flow, now, samples = inputs(project)
    kept = copy.deepcopy(now.items)
    for items in (kept,) if unknown == "stored" else (now.items, now.chosen):
        hide(items)
    folder = save(project, fingerprint=kept)
    assert find_start(config, flow, now, samples=samples, platform="cpu").folder == folder
    kept["learned"]["models"]["policies.main.model"]["name"] = "org/other"
    save(project, fingerprint=kept)
    with pytest.raises(UserError, match="policies.main.model: was org/other"):
        find_start(config, flow, now, samples=samples, platform="cpu")


def test_a_checkpoint_keeps_no_secret_and_another_one_is_no_difference(project, monkeypatch):
    shop = "class Shop:\n    def __init__(self, **kwargs): pass\n    def reset(self, sample, seed): pass\n"
    (project / "shop.py").write_text(shop + "    def step(self, actions, truth): pass\n")
    edit(
        project / "flow.yaml",
        "nodes:\n",
        "envs: {shop: {path: 'shop.py:Shop', kwargs: {token: tok123, n: 1}}}\nnodes:\n",
    )
    edit(project / "flow.yaml", "hooks.py}", "hooks.py, env: shop, env_pays: true}")
    kept = (save(project) / "run.json").read_text()
    assert "tok123" not in kept and '"n": 1' in kept
    edit(project / "flow.yaml", "tok123", "tok456")
    go(project)
    edit(project / "flow.yaml", "n: 1", "n: 2")
    with pytest.raises(UserError, match="\n  envs.shop.kwargs.n: was 1, now 2\n"):
        go(project)


def test_an_option_that_an_earlier_version_did_not_know_is_no_difference_unless_it_is_used(project):
    folder = save(project)
    facts = json.loads((folder / "run.json").read_text())
    del facts["fingerprint"]["learned"]["workflow"]["algorithm"]["stat_unit"]
    (folder / "run.json").write_text(json.dumps(facts))
    go(project)
    edit(project / "flow.yaml", "estimator: grpo", "estimator: grpo, stat_unit: call")
    with pytest.raises(UserError, match="algorithm.stat_unit: was absent, now call"):
        go(project)


def test_a_checkpoint_of_an_earlier_version_has_nodes_of_the_long_form(project):
    options = {"process_path": None, "pre_process_kwargs": {}, "post_process_kwargs": {}, "env_path": []}
    options |= {"env_route": None, "obs_with_env": False, "rewards_with_env": False}
    node = {"only_forward_compute": False, "config": {}, "executable_ref": None, "executable_kwargs": {}}
    node |= {"scope": "episode", "when": None, "vote": None, "candidates": None, "policy": None}
    nodes = {
        "solve": {"node_role": "ROLLOUT", "agent": "solver", "agent_options": options | {"process_path": "hooks.py"}},
        "judge": {"node_role": "ROLLOUT", "agent": "judge", "dependencies": ["solve"]},
        "reward": {"node_role": "REWARD", "dependencies": ["judge"], "executable_ref": "score.py:score"},
        "main.advantage": {"node_role": "ADVANTAGE", "dependencies": ["reward"], "policy": "main"},
        "main.update": {"node_role": "ACTOR", "dependencies": ["main.advantage"], "policy": "main"},
    }
    for own in nodes.values():
        own |= {**node, "dependencies": [], "agent_options": options, **own}
    folder = save(project)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["fingerprint"]["learned"]["workflow"]["nodes"].keys() == nodes.keys()
    facts["fingerprint"]["learned"]["workflow"]["nodes"] = nodes
    (folder / "run.json").write_text(json.dumps(facts))
    go(project)
    edit(project / "flow.yaml", "hooks.py", "hooks.py, prompt_options: {tone: kind}")
    with pytest.raises(UserError, match="nodes.solve.prompt_options.tone: was absent, now kind"):
        go(project)


def test_the_fingerprint_is_kept_in_the_checkpoint_and_what_it_is_made_of_in_the_launch(project, monkeypatch):
    seen = {}

    async def open_resources(config, workflow, *args, **options):
        return Resources(ApiPolicies(workflow, config.output_dir))

    async def start(self, *args, **options):
        (seen["launch"],) = launches(project / "out")
        raise Started

    monkeypatch.setattr(Resources, "open", open_resources)
    monkeypatch.setattr(Resources, "start_policies", start)
    monkeypatch.setattr(Cluster, "start", lambda cluster: None)
    launched(project)
    kept = json.loads((seen["launch"] / "fingerprint.json").read_text())
    assert kept == json.loads((save(project) / "run.json").read_text())["fingerprint"]
    facts = json.loads((seen["launch"] / "launch.json").read_text())
    assert (facts["seed"], facts["platform"], facts["resumed_from"]) == (0, "cpu", None)


def with_search(project, **kwargs) -> None:
    options = json.dumps({"folder": "texts", **kwargs})
    workflow = re.sub(
        r"name: solver, policy: main.*?}(?=, {name: judge)", "SOLVER", (project / "flow.yaml").read_text()
    )
    solver = f"name: solver, policy: main, tool_loop: {{}}, tools: [{{name: search, kwargs: {options}}}]}}"
    (project / "flow.yaml").write_text(workflow.replace("SOLVER", solver))


def test_the_texts_that_a_tool_searches_count_by_content(project):
    (project / "texts").mkdir()
    (project / "texts" / "a.txt").write_text("one")
    with_search(project)
    save(project)
    with_search(project, max_mb=5.0)
    go(project)
    (project / "texts" / "a.txt").write_text("two")
    with pytest.raises(UserError, match=r"tools.*: was .*texts"):
        go(project)
