"""Batches of the warm start, and refusals of the tiny model's builder."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.gallery.doors import Open
from recipe.dag.train.data_script import write
from recipe.dag.train.problems import row_of
from recipe.tiny.build import Example, batches, main

ROOT = Path(__file__).parents[2]
PAD = 99


@pytest.mark.parametrize("count", [4, 7, 40, 64, 130])
def test_batches_go_through_all_examples_and_pad_behind_them(count):
    """From one batch's worth of examples on; each pool of at most 16 batches holds every example once."""
    examples = [Example([index] * (1 + index % 5), [0] * (index % 5) + [1]) for index in range(count)]
    size, pool = 4, min(16, count // 4)
    drawn = list(islice(batches(examples, size, PAD, seed=0), count // (pool * size) * pool))
    seen = []
    for ids, in_answer, mask in drawn:
        assert ids.shape == in_answer.shape == mask.shape and len(ids) == size
        lengths = mask.sum(1).tolist()
        assert max(lengths) == ids.shape[1] and (ids[~mask] == PAD).all()
        assert (in_answer.sum(1) == 1).all() and all(in_answer[i, n - 1] for i, n in enumerate(lengths))
        seen += ids[:, 0].tolist()
    assert len(set(seen)) == len(seen) == count // (pool * size) * pool * size


def test_too_few_demonstrations_are_refused(tmp_path, capsys):
    arguments = ["--workflow", str(ROOT / "workflows" / "workflow_marft_tiny.yaml")]
    arguments += ["--teacher", f"{ROOT}/recipe/marft/teacher.py:Teacher", "--output", str(tmp_path / "model")]
    assert main([*arguments, "--problems", "3", "--batch_size", "8"]) == 2
    message = "error: --problems 3 make 6 demonstrations, fewer than --batch_size 8; ask for more problems"
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()
    assert main([*arguments, "--problems", "4", "--batch_size", "8", "--steps", "2"]) == 0
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_folder_that_this_command_did_not_make_is_not_replaced(tmp_path, capsys):
    (tmp_path / "notes").write_text("precious")
    arguments = ["--workflow", str(ROOT / "workflows" / "workflow_marft_tiny.yaml")]
    arguments += ["--teacher", f"{ROOT}/recipe/marft/teacher.py:Teacher", "--problems", "8", "--batch_size", "8"]
    assert main([*arguments, "--steps", "1", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_game_with_a_tool_is_taught_or_its_fault_is_one_line(tmp_path, capsys):
    gallery, output = ROOT / "examples" / "gallery", tmp_path / "model"
    arguments = ["--teacher", f"{gallery}/doors.py:Teacher", "--output", str(output)]
    arguments += ["--problems", "32", "--batch_size", "8", "--steps", "2"]
    assert main(["--workflow", str(gallery / "workflow_doors.yaml"), *arguments]) == 0
    tokenizer = AutoTokenizer.from_pretrained(output)
    schema = json.dumps(Open.schema, ensure_ascii=False)
    assert len(tokenizer.encode(schema, add_special_tokens=False)) == 1
    capsys.readouterr()
    assert main(["--workflow", str(gallery / "workflow_route.yaml"), *arguments]) == 2
    assert capsys.readouterr().err == (
        "error: env fault in node guess: env_route: extra_info.game is not in the sample; the envs are up, down\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_game_with_a_tool_is_trained(tmp_path, zygote, joined_ray):
    """A barely warm model already opens doors, since a rollout's prompts are those of its lessons."""
    workflow, model, out = ROOT / "examples" / "gallery" / "workflow_doors.yaml", tmp_path / "model", tmp_path / "out"
    lessons = ["--workflow", str(workflow), "--teacher", "doors.py:Teacher", "--problems", "256", "--steps", "150"]
    assert main([*lessons, "--output", str(model)]) == 0
    rows = [row_of("doors", f"Behind which door is the {n}?", str(n), n, "train") for n in range(10)]
    write(tmp_path, {"train": rows})
    command = [zygote.python, "-m", "recipe.dag.main", "--config-path", "examples/games/config"]
    command += ["--config-name", "tiny_cpu", f"workflow={workflow}", f"output_dir={out}"]
    command += [f"data.{split}_files={tmp_path}/train.parquet" for split in ("train", "val")]
    command += ["data.train_batch_size=8", "data.max_prompt_length=128", "data.max_response_length=128"]
    command += ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MODEL_PATH": str(model), **joined_ray}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2] and steps[-1]["policy/main/grad_norm"] > 0
    calls = [call for line in (out / "episodes.jsonl").open() for call in json.loads(line)["calls"]]
    opened = [any(result["status"] == "success" for result in call["tool_results"]) for call in calls]
    assert sum(opened) > 0.5 * len(opened) > 0
