"""Which runs may go on from a checkpoint: the command as a user types it, up to where Ray would start."""

from __future__ import annotations

import copy
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from ruamel.yaml import YAML

from recipe.dag.errors import UserError
from recipe.dag.main import compose_config, launch
from recipe.dag.policy.cluster import Cluster
from recipe.dag.report.run_record import launches
from recipe.dag.settings import defaults
from recipe.dag.train import checkpoint, setup
from recipe.dag.train.data import Columns, load_samples
from recipe.dag.train.fingerprint import Fingerprint, fingerprint_of
from recipe.dag.train.models import find_models
from recipe.dag.train.resume import Start, find_start, way_back
from recipe.dag.workflow.loader import load_workflow
from recipe.dag.workflow.schema import Workflow

yaml = YAML(typ="safe")

WORKFLOW = """\
dag_id: pair
agents: [{name: solver, policy: main}, {name: judge, policy: fixed}]
policies: {main: {model: {path: "${oc.env:MODEL_PATH}"}}, fixed: {model: {path: FIXED}, frozen: true}}
algorithm: {estimator: grpo}
nodes:
  - {node_id: solve, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: solver,
     agent_options: {process_path: hooks.py}}
  - {node_id: judge, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: judge, dependencies: [solve]}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [judge], executable_ref: score.py:score}
"""
HOOKS = "from words import ASK\n\ndef pre_process(tokenizer, prompt_ids, obs, **kwargs):\n    return prompt_ids\n"
PROBLEMS = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]


class Started(Exception):
    """The run got past all checks."""


@pytest.fixture
def project(tmp_path, tiny_model, monkeypatch):
    """A workflow with its code and problems, and `go(*overrides)`, which raises Started where the run would start."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("model", "fixed"):
        shutil.copytree(tiny_model, folder / name)
    (folder / "flow.yaml").write_text(WORKFLOW.replace("FIXED", str(folder / "fixed")))
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "words.py").write_text("ASK = 'what is'\n")
    (folder / "score.py").write_text("def score(episode):\n    return {}\n")
    (folder / "train.json").write_text(json.dumps(PROBLEMS))
    (folder / "val.json").write_text(json.dumps(PROBLEMS[:2]))
    monkeypatch.setenv("MODEL_PATH", str(folder / "model"))

    async def start(*args):
        raise Started

    monkeypatch.setattr(setup.Toolbox, "open", start)
    return folder


def overrides_of(project: Path, *more: str) -> list[str]:
    return [
        *(f"workflow={project}/flow.yaml", f"data.train_files={project}/train.json", "platform=cpu"),
        *(f"data.val_files={project}/val.json", f"output_dir={project}/out", "trainer.total_training_steps=9", *more),
    ]


@cache
def _defaults() -> DictConfig:
    return compose_config("dag", ["workflow=any"])


def inputs(project: Path, *more: str) -> tuple[DictConfig, Workflow, Fingerprint, int]:
    """What `launch` makes of the same overrides: configuration, workflow, fingerprint, and the number of problems."""
    config = copy.deepcopy(_defaults())
    for override in overrides_of(project, *more):
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.load(value), force_add=".engine_kwargs." in key)
    defaults.apply(config, defaults.on_cpu(config))
    flow = load_workflow(config.workflow)
    files = {"train": config.data.train_files, "test": config.data.val_files}
    data = [load_samples(names, columns=Columns(split=split)) for split, names in files.items()]
    return config, flow, fingerprint_of(config, flow, find_models(flow), *data), len(data[0])


def go(project: Path, *more: str) -> None:
    """As `launch` does it, without the seconds that composing a configuration takes."""
    config, flow, fingerprint, samples = inputs(project, *more)
    assert find_start(config, flow, fingerprint, samples=samples, platform="cpu").step == 3
    raise Started


def save(project: Path, **facts) -> Path:
    """The checkpoint that the run's third step leaves; `facts` replace what it says of the run."""
    said = {"policies": {"main": 1}, "drawn": 3, "fingerprint": inputs(project)[2].items} | facts
    said = {key: value for key, value in said.items() if value is not None}
    return checkpoint.save(project / "out" / "checkpoints", 3, said, write_shards, keep=2)


def write_shards(folder: Path) -> None:
    actor = folder / "main" / "actor"
    actor.mkdir(parents=True)
    for name in ("model", "optim", "extra_state"):
        torch.save({}, actor / f"{name}_world_size_1_rank_0.pt")


def reported(capsys) -> str:
    """What a launch has said on stderr, without the phases that it announces."""
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(" ...\n"))


def edit(path: Path, old: str, new: str) -> None:
    assert old in (text := path.read_text())
    path.write_text(text.replace(old, new))


def other_weights(folder: Path) -> None:
    """The same sizes, shapes and configuration."""
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def test_the_same_command_goes_on(project):
    save(project)
    with pytest.raises(Started):
        launch("dag", overrides_of(project))


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
    "nodes.check: was not there, now there": lambda p: edit(
        p / "flow.yaml",
        "  - {node_id: reward",
        "  - {node_id: check, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent: judge, dependencies: [judge]}\n"
        "  - {node_id: reward",
    ),
}


@pytest.mark.parametrize(("line", "change"), CHANGES.items(), ids=CHANGES)
def test_another_experiment_is_refused_with_a_line_for_what_differs(project, line, change):
    save(project)
    options = change(project) or []
    with pytest.raises(UserError, match=rf"global_step_3 belongs to another experiment:(?s:.*)\n  {line}") as error:
        go(project, *options)
    assert str(error.value).count("\n  ") <= 3, "one change is a line or a few, not a dump"


def test_a_refusal_says_how_to_start_anew_or_to_go_on_all_the_same_and_both_work(project, capsys):
    save(project)
    with pytest.raises(UserError, match=r"trainer\.resume_mode=disable, .* trainer\.resume_mode=force"):
        launch("dag", overrides_of(project, "seed=1", "data.train_batch_size=2"))
    assert not launches(project / "out"), "a refused run writes nothing"
    with pytest.raises(Started):
        launch("dag", overrides_of(project, "seed=1", "data.train_batch_size=2", "trainer.resume_mode=force"))
    told = capsys.readouterr().err
    assert "(trainer.resume_mode=force):\n  data.train_batch_size: was 32, now 2\n  seed: was 0, now 1\n" in told
    with pytest.raises(Started):
        launch("dag", overrides_of(project, "seed=1", "trainer.resume_mode=disable"))
    assert reported(capsys) == ""


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
    with pytest.raises(Started):
        go(project, *options)


def test_a_project_that_was_moved_or_whose_comments_about_it_changed_is_the_same(project, tmp_path, monkeypatch):
    save(project)
    moved = tmp_path / "moved"
    project.rename(moved)
    edit(moved / "flow.yaml", str(project), str(moved))
    edit(moved / "flow.yaml", "dag_id: pair", "dag_id: pair  # a solver and a judge\ndescription: two")
    monkeypatch.setenv("MODEL_PATH", str(moved / "model"))
    with pytest.raises(Started):
        go(moved)


def test_what_ends_a_run_is_no_difference(project):
    """So that a run that an error has ended goes on without the episodes that raise it."""
    save(project)
    edit(project / "flow.yaml", "dag_id: pair", "episode: {on_user_error: mask, max_masked: 0.9}\ndag_id: pair")
    with pytest.raises(Started):
        go(project)


def test_problems_count_by_content_not_by_file(project):
    save(project)
    (project / "lines").mkdir()
    (project / "lines" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    with pytest.raises(Started):
        go(project, f"data.train_files={project}/lines/train.jsonl")


def test_other_validation_is_reported_and_not_refused(project, capsys):
    save(project)
    with pytest.raises(Started):
        go(project, "validation.n=4")
    assert "accuracies up to step 3 do not compare with later ones:\n  validation.n: was 1, now 4" in (
        capsys.readouterr().err
    )


def test_a_path_to_resume_from_is_compared_too_and_forced_with_it(project):
    folder = save(project)
    path = ["seed=1", f"trainer.resume_from_path={folder}", f"trainer.default_local_dir={project}/elsewhere"]
    with pytest.raises(UserError, match="belongs to another experiment:\n  seed: was 0, now 1\n"):
        go(project, *path, "trainer.resume_mode=resume_path")
    with pytest.raises(Started):
        go(project, *path, "trainer.resume_mode=force")


def test_checkpoints_of_earlier_versions_go_on_with_a_warning_where_what_they_say_agrees(project, capsys):
    save(project, fingerprint=None, seed=0, train_batch_size=32, train_samples=4)
    with pytest.raises(Started):
        go(project, "actor_rollout_ref.rollout.n=4")
    assert "made by an earlier version, which kept nothing to compare" in capsys.readouterr().err
    with pytest.raises(UserError, match="belongs to another experiment:\n  seed: was 0, now 1\n"):
        go(project, "seed=1")


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"policies": {"main": 4}}, "policy main was trained by 4 processes, this run has 1; take as many GPUs"),
        ({"policies": {"other": 1}}, r"holds no policy `main` to go on with \(its policies: other\)"),
    ],
    ids=["processes", "policies"],
)
def test_what_cannot_be_loaded_is_refused_even_where_it_is_forced(project, facts, problem):
    save(project, **facts)
    with pytest.raises(UserError, match=problem):
        go(project, "trainer.resume_mode=force")


def test_a_resource_that_an_earlier_version_counted_is_no_difference(project):
    kept = copy.deepcopy(inputs(project)[2].items)
    kept["learned"]["configuration"]["actor_rollout_ref"]["actor_rollout_ref.rollout.skip_tokenizer_init"] = True
    save(project, fingerprint=kept)
    with pytest.raises(Started):
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


@pytest.mark.parametrize(
    ("mode", "path", "started", "saved", "line"),
    [
        ("auto", None, 0, 0, "no checkpoint was saved"),
        ("auto", None, 0, 4, "the same command resumes from out/global_step_4"),
        ("force", None, 3, 4, "the same command resumes from out/global_step_4"),
        ("disable", None, 0, 4, "resume from out/global_step_4 with trainer.resume_mode=auto"),
        ("resume_path", "there/global_step_3", 3, 3, "the same command resumes from there/global_step_3"),
        *(
            (
                mode,
                "there/global_step_3",
                3,
                4,
                "resume from out/global_step_4 with trainer.resume_mode=auto and without trainer.resume_from_path",
            )
            for mode in ("resume_path", "force")
        ),
    ],
)
def test_how_a_run_that_ended_early_goes_on(mode, path, started, saved, line):
    trainer = {"default_local_dir": "out", "resume_mode": mode, "resume_from_path": path}
    start = Start(Path(path or "out/global_step_3"), started, started) if started else None
    assert way_back(OmegaConf.create({"trainer": trainer}), start, saved) == line


def test_a_finished_run_says_so_before_anything_is_started(project, capsys):
    save(project)
    launch("dag", overrides_of(project, "trainer.total_training_steps=3"))
    assert "the checkpoint is at step 3 of 3: nothing to do" in capsys.readouterr().out


def test_a_checkpoint_keeps_no_secret_and_another_one_is_no_difference(project, monkeypatch):
    shop = "class Shop:\n    def __init__(self, **kwargs): pass\n    def reset(self, sample, seed): pass\n"
    (project / "shop.py").write_text(shop + "    def step(self, actions, truth): pass\n")
    edit(
        project / "flow.yaml",
        "nodes:\n",
        "envs: {shop: {path: 'shop.py:Shop', kwargs: {token: tok123, n: 1}}}\nnodes:\n",
    )
    edit(project / "flow.yaml", "hooks.py}", "hooks.py, env_path: shop, rewards_with_env: true}")
    kept = (save(project) / "run.json").read_text()
    assert "tok123" not in kept and '"n": 1' in kept
    edit(project / "flow.yaml", "tok123", "tok456")
    with pytest.raises(Started):
        go(project)
    edit(project / "flow.yaml", "n: 1", "n: 2")
    with pytest.raises(UserError, match="\n  envs.shop.kwargs.n: was 1, now 2\n"):
        go(project)


def test_an_option_that_an_earlier_version_did_not_know_is_no_difference_unless_it_is_used(project):
    folder = save(project)
    facts = json.loads((folder / "run.json").read_text())
    del facts["fingerprint"]["learned"]["workflow"]["algorithm"]["stat_unit"]
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(Started):
        go(project)
    edit(project / "flow.yaml", "estimator: grpo", "estimator: grpo, stat_unit: call")
    with pytest.raises(UserError, match="algorithm.stat_unit: was not there, now call"):
        go(project)


def test_an_evaluation_of_a_checkpoint_says_what_is_not_as_in_training(project, capsys):
    folder = save(project)
    for name in ("model", "fixed"):
        shutil.copytree(project / name, folder / "main" / "actor" / "huggingface", dirs_exist_ok=True)

    def evaluate(*more: str) -> str:
        options = [o for o in overrides_of(project, *more) if not o.startswith(("output_dir", "data.train"))]
        with pytest.raises(Started):
            launch("dag", [*options, f"output_dir={project}/eval"], evaluate_only=True, weights=project / "out")
        return reported(capsys)

    # another estimator, n, learning rate or other problems have no part in an evaluation
    edit(project / "flow.yaml", "grpo", "reinforce")
    assert evaluate("seed=5", "actor_rollout_ref.rollout.n=2", "validation.n=2", "validation.temperature=0.5") == ""
    edit(project / "words.py", "what is", "how much is")
    other_weights(project / "fixed")
    other_weights(project / "model")  # the checkpoint's weights take the place of these
    lines = evaluate().splitlines()
    assert len(lines) == 3 and lines[0].endswith("global_step_3 was trained otherwise than it is evaluated:")
    assert lines[1].startswith("  content of words.py: was") and lines[2].startswith("  policies.fixed.model: was")


def test_the_fingerprint_is_kept_in_the_checkpoint_and_what_it_is_made_of_in_the_launch(project, monkeypatch):
    seen = {}

    async def open_toolbox(*args):
        return setup.Toolbox()

    def start(cluster):
        (seen["launch"],) = launches(project / "out")
        raise Started

    monkeypatch.setattr(setup.Toolbox, "open", open_toolbox)
    monkeypatch.setattr(Cluster, "start", start)
    with pytest.raises(Started):
        launch("dag", overrides_of(project))
    kept = json.loads((seen["launch"] / "fingerprint.json").read_text())
    assert kept == json.loads((save(project) / "run.json").read_text())["fingerprint"]
    facts = json.loads((seen["launch"] / "launch.json").read_text())
    assert (facts["seed"], facts["platform"], facts["resumed_from"]) == (0, "cpu", None)


def test_a_run_that_could_not_resume_from_what_it_saves_warns_at_launch(project, capsys):
    options = ["trainer.resume_mode=disable", "actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"]
    for save_freq, count in ((2, 1), (-1, 0)):
        with pytest.raises(Started):
            launch("dag", overrides_of(project, *options, f"trainer.save_freq={save_freq}"))
        lines = reported(capsys)
        assert lines.count("warning: the run cannot resume from its checkpoints") == count == len(lines.splitlines())


def test_a_checkpoint_without_its_weights_is_refused_before_anything_is_started(project):
    folder = save(project)
    (folder / "main" / "actor" / "model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(UserError, match="global_step_3: main/actor/model_world_size_1_rank_0.pt is missing"):
        launch("dag", overrides_of(project))
