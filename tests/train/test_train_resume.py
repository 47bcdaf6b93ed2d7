"""Which runs may resume from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.dag.app.launch import Evaluation, launch
from recipe.dag.core.errors import UserError
from recipe.dag.report.run_record import launches
from recipe.dag.train import checkpoint
from recipe.dag.train.resume import Start, way_back
from tests.train.projects import (
    Started,
    edit,
    go,
    launched,
    other_weights,
    overrides_of,
    reported,
    save,
    write_shards,
)


def test_the_same_command_resumes(project):
    save(project)
    launched(project)


def test_a_refusal_says_how_to_start_over_or_resume_and_both_work(project, capsys):
    save(project)
    with pytest.raises(UserError, match=r"trainer\.resume_mode=disable, .* trainer\.resume_mode=force"):
        launch("dag", overrides_of(project, "seed=1", "data.train_batch_size=2"))
    assert not launches(project / "out"), "a refused run writes nothing"
    launched(project, "seed=1", "data.train_batch_size=2", "trainer.resume_mode=force")
    warning = capsys.readouterr().err
    assert "(trainer.resume_mode=force):\n  data.train_batch_size: was 32, now 2\n  seed: was 0, now 1\n" in warning
    launched(project, "seed=1", "trainer.resume_mode=disable")
    assert reported(capsys) == ""


def test_a_path_to_resume_from_is_compared_too_and_forced_with_it(project):
    folder = save(project)
    path = ["seed=1", f"trainer.resume_from_path={folder}", f"trainer.default_local_dir={project}/elsewhere"]
    with pytest.raises(UserError, match="belongs to another experiment:\n  seed: was 0, now 1\n"):
        go(project, *path, "trainer.resume_mode=resume_path")
    go(project, *path, "trainer.resume_mode=force")


def test_checkpoints_of_earlier_versions_go_on_with_a_warning_where_what_they_say_agrees(project, capsys):
    save(project, fingerprint=None, seed=0, train_batch_size=32, train_samples=4)
    go(project, "actor_rollout_ref.rollout.n=4")
    assert "written by an earlier version, which did not record workflow" in capsys.readouterr().err
    with pytest.raises(UserError, match="belongs to another experiment:\n  seed: was 0, now 1\n"):
        go(project, "seed=1")


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"policies": {"main": 4}}, "policy main was trained by 4 processes, but this run has 1; use as many GPUs"),
        ({"policies": {"other": 1}}, r"has no policy `main` \(its policies: other\)"),
        ({"sft": {}}, r"a checkpoint of supervised fine-tuning; start from its model .*: model_path=.*/huggingface"),
    ],
    ids=["processes", "policies", "fine-tuning"],
)
def test_what_cannot_be_loaded_is_refused_even_where_it_is_forced(project, facts, problem):
    save(project, **facts)
    with pytest.raises(UserError, match=problem):
        go(project, "trainer.resume_mode=force")


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


def test_a_run_that_has_sampled_its_tokens_is_finished(project, capsys):
    save(project, sampled=50)
    launch("dag", overrides_of(project, "trainer.total_training_tokens=50"))
    assert "50 of 50 sampled tokens: nothing to do; raise trainer.total_training_tokens" in capsys.readouterr().out
    with pytest.raises(Started):
        launch("dag", overrides_of(project, "trainer.total_training_tokens=51"))


def test_an_evaluation_of_a_checkpoint_says_what_is_not_as_in_training(project, capsys):
    folder = save(project)
    for name in ("model", "fixed"):
        shutil.copytree(project / name, folder / "main" / "actor" / "huggingface", dirs_exist_ok=True)

    def evaluate(*more: str) -> str:
        options = [o for o in overrides_of(project, *more) if not o.startswith(("output_dir", "data.train"))]
        with pytest.raises(Started):
            launch("dag", [*options, f"output_dir={project}/eval"], evaluation=Evaluation(project / "out"))
        return reported(capsys)

    # another estimator, n, learning rate or other problems have no part in an evaluation
    edit(project / "flow.yaml", "grpo", "reinforce")
    assert evaluate("seed=5", "actor_rollout_ref.rollout.n=2", "validation.n=2", "validation.temperature=0.5") == ""
    edit(project / "words.py", "what is", "how much is")
    other_weights(project / "fixed")
    other_weights(project / "model")  # the checkpoint's weights take the place of these
    lines = evaluate().splitlines()
    assert len(lines) == 3 and lines[0].endswith("global_step_3 was not trained as it is evaluated:")
    assert lines[1].startswith("  content of words.py: was") and lines[2].startswith("  policies.fixed.model: was")


def test_a_run_that_could_not_resume_from_what_it_saves_warns_at_launch(project, capsys):
    options = ["trainer.resume_mode=disable", "actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"]
    for save_freq, count in ((2, 1), (-1, 0)):
        launched(project, *options, f"trainer.save_freq={save_freq}")
        lines = reported(capsys)
        assert lines.count("warning: the run cannot resume from its checkpoints") == count == len(lines.splitlines())


def test_a_checkpoint_without_its_weights_is_refused_before_anything_is_started(project):
    folder = save(project)
    (folder / "main" / "actor" / "model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(UserError, match="global_step_3: main/actor/model_world_size_1_rank_0.pt is missing"):
        launch("dag", overrides_of(project))


def flip_last(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def test_a_damaged_shard_is_refused_before_anything_is_started(project):
    folder = save(project)
    flip_last(folder / "main" / "actor" / "optim_world_size_1_rank_0.pt")
    shutil.copytree(folder, folder.with_name("global_step_2"))
    shutil.rmtree(folder)
    folder = save(project)
    flip_last(folder / "main" / "actor" / "model_world_size_1_rank_0.pt")
    with pytest.raises(UserError, match=r"model_world_size_1_rank_0\.pt: damaged.* no other one there is intact"):
        launch("dag", overrides_of(project))


def test_a_damaged_model_is_not_evaluated_and_one_that_a_resume_does_not_read_may_be_damaged(project):
    def write(folder: Path) -> None:
        write_shards(folder)
        shutil.copytree(project / "model", folder / "main" / "actor" / "huggingface")

    good, bad = (
        checkpoint.save(project / "out" / "checkpoints", step, checkpoint.read(save(project)), write, keep=2)
        for step in (2, 3)
    )
    flip_last(next((bad / "main" / "actor" / "huggingface").glob("*.safetensors")))
    options = [o for o in overrides_of(project) if not o.startswith(("output_dir", "data.train"))]
    with pytest.raises(UserError, match=f"damaged.*the last intact checkpoint is {good}: pass --checkpoint {good}"):
        launch("dag", [*options, f"output_dir={project}/eval"], evaluation=Evaluation(project / "out"))
    launched(project)
