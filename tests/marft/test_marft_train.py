"""The command line: what is checked before anything starts, what is shown, what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from recipe.dag.core.errors import UserError
from recipe.dag.loading.workflow_file import load_workflow
from recipe.marft.flags import FLAGS, translate
from recipe.marft.train import main, prepared

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "workflows" / "workflow_marft.yaml"
SIIRL = ROOT / "tests" / "compat" / "siirl" / "marft.yaml"
RUN = "actor_rollout_ref"


def prepare(*arguments: str):
    return prepared("qwen2_5_3b", [f"workflow={WORKFLOW}", "data.train_files=t.parquet", *arguments])


@pytest.mark.parametrize(
    ("arguments", "conflicts"),
    [
        ("algorithm.gamma=0.5 workflow.algorithm.gamma=0.6", True),
        ("workflow.algorithm.gamma=0.6 algorithm.gamma=0.5", True),
        ("algorithm.gamma=0.5 ~workflow.algorithm.gamma", True),
        ("algorithm.gamma=0.5 workflow.algorithm.gamma=0.5", False),
        ("algorithm.gamma=0.5 workflow.algorithm.lam=0.9", False),
    ],
)
def test_a_flag_and_an_edit_of_one_key_must_agree(arguments, conflicts):
    if not conflicts:
        assert prepare(*arguments.split()).text is not None
        return
    with pytest.raises(UserError, match="workflow.algorithm.gamma.*: a flag of siiRL's sets the same key"):
        prepare(*arguments.split())


def test_mistakes_of_every_kind_are_reported_at_once():
    wrong = ["data.shuffle=False", "nonsense", "algorithm.kl_ctrl.kl_coef=0.001", "actor.use_dynamic_bsz=False"]
    wrong += ["algorithm.share_reward_in_agent=True", "critic.optim.num_cycles=2", "trainer.total_epochs=1"]
    with pytest.raises(UserError) as raised:
        prepare(*wrong)
    lines = str(raised.value).split("\nerror: ")
    assert len(lines) == len(wrong) and all(any(part in line for line in lines) for part in wrong)


def test_a_flag_that_says_what_siirls_file_says_is_no_mistake():
    same = (f"{RUN}.rollout.tensor_model_parallel_size=4", f"{RUN}.rollout.gpu_memory_utilization=0.3")
    prepare(f"dag.workflow_path={SIIRL}", "trainer.n_gpus_per_node=4", *same)
    with pytest.raises(UserError, match=r"the workflow itself says 0.3 .*or `config` of nodes"):
        prepare(f"dag.workflow_path={SIIRL}", "trainer.n_gpus_per_node=4", "rollout.gpu_memory_utilization=0.5")


@pytest.fixture
def parquet(tmp_path) -> str:
    pq.write_table(pa.table({"x": list(range(100))}), tmp_path / "train.parquet")
    return f"data.train_files={tmp_path}/train.parquet"


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ("data.train_batch_size=8 trainer.total_epochs=3", 37),
        ("data.train_batch_size=8 trainer.total_epochs=3 data.train_max_samples=16", 6),
        ("data.train_batch_size=8 trainer.total_epochs=3 data.train_max_samples=-1", 37),
        ("data.train_batch_size=8 trainer.total_epochs=3 data.train_max_samples=null", 37),
        ("data.train_batch_size=8 trainer.total_epochs=3 data.train_max_samples=1000", 37),
        ("data.train_batch_size=128 trainer.total_epochs=1", 1),
    ],
)
def test_epochs_become_steps(arguments, steps, parquet):
    run = prepare(parquet, *arguments.split())
    assert f"trainer.total_training_steps={steps}" in run.overrides and run.text is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data.train_files=x.json", "trainer.total_epochs=3: needs data.train_files that exist"),
        ("data.train_files=none.parquet", "trainer.total_epochs=3: needs data.train_files that exist"),
        ("trainer.total_training_steps=9", "trainer.total_epochs=3: trainer.total_training_steps=9 conflicts with it"),
        ("data.train_max_samples=0", "data.train_max_samples=0: it takes a whole number"),
        ("data.train_max_samples=abc", "data.train_max_samples=abc: it takes a whole number"),
        ("data.train_batch_size=0", "data.train_batch_size=0: it takes a whole number"),
    ],
)
def test_epochs_that_cannot_be_counted(arguments, message, parquet):
    with pytest.raises(UserError, match=f"^{message}"):
        prepare(parquet, *arguments.split(), "trainer.total_epochs=3")


def test_epochs_of_a_broken_file(tmp_path):
    (tmp_path / "train.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="^trainer.total_epochs=3: data.train_files cannot be read"):
        prepare(f"data.train_files={tmp_path}/train.parquet", "trainer.total_epochs=3")


ROWS = "batches are then made by rows; add"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo: compares the episodes of a sample"),
        ("algorithm.adv_estimator=cpgd rollout.n=1", "algorithm.adv_estimator=cpgd: compares the episodes of a sample"),
        ("actor.use_dynamic_bsz=False", f"{RUN}.actor.use_dynamic_bsz=False: {ROWS} {RUN}.actor.ppo_micro_batch_size"),
        ("critic.use_dynamic_bsz=False", f"critic.use_dynamic_bsz=False: {ROWS} critic.ppo_micro_batch_size_per_gpu"),
        ("rollout.tensor_model_parallel_size=4", f"{RUN}.rollout.tensor_model_parallel_size=4: servers of 4 GPUs do"),
        (
            "data.max_prompt_length=20000",
            f"{RUN}.actor.ppo_max_token_len_per_gpu=16384 is below the longest row, 22048",
        ),
        ("no.such.key=1", "no.such.key=1: unknown key"),
        ("model.path=${none}", "configuration: Interpolation key 'none' not found"),
        ("model_engine=3", "model_engine=3: verl has this key, but nothing here reads it"),
        ("output_dir=${none}", "configuration: Interpolation key 'none' not found"),
        ("data.train_batch_size=4 actor.ppo_mini_batch_size=8", f"{RUN}.actor.ppo_mini_batch_size=8: exceeds data"),
        ("algorithm.gamma=nan", "algorithm.gamma=nan: it takes a number from 0 to 1"),
        ("algorithm.share_reward_in_agent=True", "algorithm.share_reward_in_agent=True: algorithm.share_reward_in"),
    ],
)
@pytest.mark.parametrize("show", [[], ["--show"]], ids=["run", "show"])
def test_what_is_wrong_is_one_line_and_nothing_is_written(arguments, message, show, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recipe.dag.app.main.main", lambda argv: pytest.fail("a run was started"))
    files = [f"workflow={WORKFLOW}", "data.train_files=t.parquet"]
    assert main([*show, *files, *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    ["algorithm.adv_estimator=grpo rollout.n=2", "critic.use_dynamic_bsz=False actor.ppo_micro_batch_size_per_gpu=4"],
)
def test_flags_that_complete_each_other(arguments):
    assert prepare(*arguments.split()).text is not None


BAD = ("", "-4", "0", "nan", "abc", "[1,2]", "{}", "yes", "null", "1,2", "[", "1e400", "${x}")


@pytest.mark.parametrize("flag", FLAGS)
def test_no_value_of_any_flag_is_a_traceback(flag):
    """It is legal, or one line on the flag; alone, so that each value that its own check accepts meets the others."""
    for value in BAD:
        try:
            translate([f"{flag}={value}"])
            prepare("data.train_files=t.parquet", f"{flag}={value}")
        except UserError as error:
            assert str(error).startswith((f"{flag}={value}: ", "configuration: ", f"{value}: no such file"))
            assert "\n" not in str(error)


SCRIPT = (
    "algorithm.adv_estimator=gae_marft dag.workflow_path={workflow} data.train_files=t.parquet "
    "data.val_files=v.parquet data.train_batch_size=128 data.max_prompt_length=10240 "
    "data.max_response_length=2048 data.truncation=error data.return_raw_chat=True "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.grad_clip=0.5 "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.name=sglang "
    "actor_rollout_ref.rollout.n=1 actor_rollout_ref.rollout.max_model_len=12288 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.3 "
    "actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.enable_chunked_prefill=False "
    "actor_rollout_ref.rollout.agent.rewards_with_env=True "
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 "
    "actor_rollout_ref.rollout.multi_turn.use_all_traj=False critic.optim.lr=1e-5 critic.use_dynamic_bsz=False "
    "critic.cliprange_value=0.5 critic.model.path=Qwen/Qwen2.5-3B-Instruct algorithm.use_kl_in_reward=False "
    "algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.val_before_train=False trainer.save_freq=30 "
    "trainer.test_freq=10 trainer.n_gpus_per_node=8 trainer.nnodes=1"
)
"""A command line in the manner of siiRL's script, without what is refused."""


def test_a_whole_command_line_is_shown_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--show", *SCRIPT.format(workflow=WORKFLOW).split()]) == 0
    overrides, _, text = capsys.readouterr().out.partition("\n\n# ")
    expected = {"workflow=outputs/marft_3b/workflow.yaml", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"}
    assert expected <= set(overrides.splitlines())
    assert "kl_loss_coef: 0.01" in text and list(tmp_path.iterdir()) == []


def test_a_run_gets_the_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("recipe.dag.app.main.main", lambda argv: started.append(argv) or 0)
    files = [f"workflow={WORKFLOW}", "data.train_files=t.parquet"]
    assert main([*files, "output_dir=out", "algorithm.gamma=0.5"]) == 0
    (argv,) = started
    copy = tmp_path / "out/workflow.yaml"
    assert "workflow=out/workflow.yaml" in argv and load_workflow(copy).algorithm.gamma == 0.5
    assert main([*files, "output_dir=out", "algorithm.gamma=0.25", "algorithm.lam=7"]) == 2
    assert load_workflow(copy).algorithm.gamma == 0.5 and len(started) == 1
    assert main([*files, "output_dir=plain"]) == 0
    assert f"workflow={WORKFLOW}" in started[1] and not (tmp_path / "plain").exists()


def test_a_refused_run_leaves_the_copy_of_the_run_before_it_or_nothing(tmp_path, monkeypatch):
    out, codes = tmp_path / "out", [2, 0, 2, 2]

    def run(argv):
        if len(codes) == 1:  # this one gets under way before it ends with an error
            (out / "run" / "1").mkdir(parents=True)
        return codes.pop(0)

    monkeypatch.setattr("recipe.dag.app.main.main", run)
    command = [f"workflow={WORKFLOW}", "data.train_files=t.parquet", f"output_dir={out}"]
    assert main([*command, "algorithm.gamma=0.5"]) == 2
    assert not out.exists()
    assert main([*command, "algorithm.gamma=0.6"]) == 0
    assert load_workflow(out / "workflow.yaml").algorithm.gamma == 0.6
    assert main([*command, "algorithm.gamma=0.7"]) == 2
    assert load_workflow(out / "workflow.yaml").algorithm.gamma == 0.6
    assert main([*command, "algorithm.gamma=0.8"]) == 2
    assert load_workflow(out / "workflow.yaml").algorithm.gamma == 0.8


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    files = [f"workflow={WORKFLOW}", "data.train_files=t.parquet", f"output_dir={tmp_path}/out"]
    assert main([*files, "algorithm.gamma=0.5"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path}/out/workflow.yaml: cannot write: ") and err.count("\n") == 1


def test_a_workflow_is_not_replaced_by_its_copy(tmp_path, capsys):
    shutil.copy(WORKFLOW, tmp_path / "workflow.yaml")
    text = (tmp_path / "workflow.yaml").read_text()
    arguments = [f"workflow={tmp_path}/workflow.yaml", f"output_dir={tmp_path}", "data.train_files=t.parquet"]
    assert main([*arguments, "algorithm.gamma=0.5"]) == 2
    assert "the run would replace its workflow" in capsys.readouterr().err
    assert (tmp_path / "workflow.yaml").read_text() == text


@pytest.mark.parametrize("arguments", [[], ["algorithm.gamma=0.5"]])
@pytest.mark.parametrize("show", [[], ["--show"]], ids=["run", "show"])
def test_a_workflow_that_is_not_there_or_wrong(show, arguments, tmp_path, capsys):
    assert main([*show, f"workflow={tmp_path}/none.yaml", *arguments]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/none.yaml: no such file\n"
    (tmp_path / "own.yaml").write_text(WORKFLOW.read_text().replace("gae_chain", "gea"))
    assert main([*show, f"workflow={tmp_path}/own.yaml", *arguments]) == 2
    assert "own.yaml:35:14: algorithm.estimator: " in capsys.readouterr().err


def test_warnings_of_siirls_file_are_told_once(tmp_path, monkeypatch, capsys):
    """With a copy, which has done what they say, here; without one, by the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recipe.dag.app.main.main", lambda argv: 0)
    files = [
        f"workflow={WORKFLOW}",
        f"dag.workflow_path={SIIRL}",
        "data.train_files=t.parquet",
        "trainer.n_gpus_per_node=4",
    ]
    warnings = [warning.as_warning() for warning in load_workflow(SIIRL).warnings]
    for arguments, told in ((["algorithm.gamma=0.5"], warnings), ([], []), (["--show"], warnings)):
        assert main([*files, *arguments]) == 0
        assert capsys.readouterr().err.splitlines() == told


@pytest.mark.parametrize(
    ("argument", "of"),
    [
        ("rollout.agent.rewards_with_env=False", "without `executable_ref` the env's rewards are used"),
        ("actor.use_kl_loss=True", "the reference has no effect while algorithm.kl_loss_coef is 0"),
    ],
)
def test_a_warning_of_what_a_flag_decides_is_not_told(argument, of):
    arguments = [f"workflow={SIIRL}", "trainer.n_gpus_per_node=4"]
    before, after = (prepare(*arguments, *more).warnings for more in ([], [argument]))
    (gone,) = (warning.message for warning in before if warning not in after)
    assert of in gone and len(after) == len(before) - 1


def test_a_workflow_in_json_takes_flags_and_edits(tmp_path):
    data = YAML(typ="safe", pure=True).load(WORKFLOW.read_text())
    for node in data["nodes"]:  # paths are relative to the file
        if "hooks" in node:
            node["hooks"] = f"{ROOT}/{node['hooks']}"
    (tmp_path / "marft.json").write_text(json.dumps(data))
    arguments = ["data.train_files=t.parquet", "algorithm.gamma=0.5", "workflow.algorithm.lam=0.9"]
    run = prepared("qwen2_5_3b", [f"workflow={tmp_path}/marft.json", *arguments])
    algorithm = YAML(typ="safe", pure=True).load(run.text)["algorithm"]
    assert (algorithm["gamma"], algorithm["lam"]) == (0.5, 0.9)
