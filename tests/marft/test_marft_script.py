"""The run script up to where it would start: what it needs, what it passes on."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "marft" / "run_qwen2_5-3b_marft.sh"


def test_a_flag_that_is_refused_is_one_line(gpu_script):
    gpu_script.pretend_there_is_a_gpu()
    flags = ("actor_rollout_ref.model.path=org/model", "data.shuffle=False")
    done = gpu_script.run(SCRIPT, *flags, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr.partition(":")[2][:20]) == (2, " data.shuffle=False:")


def test_what_the_readme_shows(gpu_script):
    flags = "algorithm.adv_estimator=gae_marft rollout.multi_turn.max_assistant_turns=3".split()
    env = {"SHOW": "1", "DATA_DIR": "d", "WANDB_KEY": "k", "WORKFLOW": "workflows/workflow_marft_code.yaml"}
    done = gpu_script.run(SCRIPT, *flags, **env, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    expected = {"data.train_files=d/train.parquet", "trainer.logger=[console,tensorboard,wandb]"}
    assert expected <= set(done.stdout.splitlines())
    assert "max_turns: 3" in done.stdout and "dag_id: marft_code" in done.stdout
    assert done.stdout.index("estimator: gae_chain") > 0
