"""Two different models: who reads what, what they are paid, and that their runs fit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.loading.workflow_file import load_workflow
from recipe.gsm8k import teacher as gsm8k_teacher
from recipe.gsm8k.hooks import team_answers
from recipe.gsm8k.teacher import Teacher
from recipe.tiny.arithmetic import splits
from recipe.tiny.build import encode
from recipe.tiny.tokenizer import DIALECTS, build_tokenizer

ROOT = Path(__file__).parents[2]
FILE = ROOT / "workflows" / "workflow_gsm8k.yaml"
SCRIPT = ROOT / "recipe" / "gsm8k" / "run_qwen.sh"
COMMON = {"num_hidden_layers": 36, "vocab_size": 151936, "tie_word_embeddings": True}
MODELS = {
    "MODEL_PATH": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 2048}
    | {"intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2},
    "CHECKER_MODEL_PATH": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560}
    | {"intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
"""The shapes of Qwen2.5-3B and Qwen3-4B."""


def test_a_corrected_solution_is_checked_again_and_every_call_is_paid_for_its_answer(scripted_server):
    first = scripted_server(lambda prompt: r"\boxed{8}" if "checker wrote" in prompt else r"<|im_end|> \boxed{6}")
    second = scripted_server(lambda prompt: r"\boxed{8}")
    endpoints = {"solver": PolicyEndpoint(first, first, 9999), "checker": PolicyEndpoint(second, second, 9999)}
    sample = {"prompt": [{"role": "user", "content": "What is 2^3?"}], "ground_truth": "8"}
    episode = asyncio.run(EpisodeRunner(load_workflow(FILE), endpoints, {}, seed=0).run(sample, "u", 0, step=0))
    assert episode.fault is None, episode.fault
    calls = [(call.policy, call.turn, call.reward) for call in episode.calls]
    assert calls == [("solver", 0, 0.0), ("checker", 0, 1.0), ("solver", 1, 1.0), ("checker", 1, 1.0)]
    assert episode.outcome == 1.0
    assert asyncio.run(team_answers(episode)) == {"solver": [1.0, 2.0], "checker": [1.0, 2.0]}
    assert "wrote" not in first.prompts[0] and "solver wrote:\n<" in first.prompts[1]
    assert "checker wrote:\n\\boxed{8}" in first.prompts[1] and "checker wrote" not in second.prompts[1]
    assert "solver wrote:\n\\boxed{8}" in second.prompts[1]
    assert "<|im_end|>" not in second.prompts[0] and "im_end|> \\boxed{6}" in second.prompts[0]


def test_the_cold_start_has_a_transcript_for_each_call_without_problems_of_the_test(tmp_path):
    output = tmp_path / "sft.parquet"
    gsm8k_teacher.main(["--output", str(output), "--size", "20", "--test_size", "64"])
    dialogues = pq.read_table(output).column("messages").to_pylist()
    assert [message["role"] for message in dialogues[0]] == ["user", "assistant"] and len(dialogues) == 80
    assert all(dialogue[-1]["content"].startswith("\\boxed{") for dialogue in dialogues)
    tests = splits(0, 20, 64, mental=True)[1]
    assert not {problem.text for problem in tests} & {
        dialogue[0]["content"].partition("\n")[0] for dialogue in dialogues
    }


@pytest.mark.parametrize(("dialect", "vocabulary"), [("qwen", 640), ("gemma", 480)])
def test_dialogues_fit_the_configured_lengths_in_both_vocabularies(dialect, vocabulary):
    teacher = Teacher(load_workflow(FILE), 0)
    lessons = [d for problem in teacher.problems(300, 64) for d in teacher.teach(problem)]
    assert [(lesson.role, lesson.turn) for lesson in lessons[:4]] == [
        ("solve", 0), ("check", 0), ("solve", 1), ("check", 1)]  # fmt: skip
    tokenizer = build_tokenizer(lessons, vocabulary, dialect=DIALECTS[dialect])
    start, end, assistant = DIALECTS[dialect]
    for ids, in_answer in (encode(tokenizer, lesson) for lesson in lessons):
        assert len(ids) - sum(in_answer) <= 120 and sum(in_answer) <= 16  # config/tiny_cpu.yaml
    text = tokenizer.decode(ids)
    assert text.startswith(f"{start}user\n") and f"{end}{start}{assistant}\n" in text and text.endswith(end)


PLANNED = {name: f"estimator {name}" for name in ("ippo", "mappo", "vdn", "qmix")}
PLANNED |= {"happo": "policies one after the other", "cory": "solver and checker exchange policies every 5 steps"}
PLANNED["grpo"] = "estimator grpo, groups by uid, agent, turn"


@pytest.mark.parametrize(("algorithm", "gpus"), [("grpo", 8), *((name, 2) for name in PLANNED)])
def test_the_plan_fits_on_two_gpus_and_on_eight(algorithm, gpus, gpu_script, tmp_path):
    for name, shape in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(COMMON | shape))
    paths = {name: str(tmp_path / name) for name in MODELS}
    env = {"SHOW": "1", "GPU_GB": "80", "ALGORITHM": algorithm, **paths}
    done = gpu_script.run(SCRIPT, f"trainer.n_gpus_per_node={gpus}", **env)
    assert done.returncode == 0, done.stderr
    assert f"GPUs of each machine: {gpus} of 80.0 GB" in done.stdout and "\n  fits: " in done.stdout
    assert "3.09 B" in done.stdout and "4.02 B" in done.stdout and PLANNED[algorithm] in done.stdout


def test_an_unknown_algorithm_is_one_line(gpu_script):
    done = gpu_script.run(SCRIPT, SHOW="1", ALGORITHM="ppo")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(
        "error: ALGORITHM=ppo: it must be grpo, "
    )


def test_the_script_without_data_says_how_to_make_it(gpu_script, tmp_path):
    gpu_script.expect_refusal(SCRIPT, "no NVIDIA GPU")
    gpu_script.pretend_there_is_a_gpu()
    missing = {"DATA_DIR": str(tmp_path / "none"), "PYTHON": "/bin/echo"}
    done = gpu_script.run(SCRIPT, **missing)
    assert done.returncode == 2
    assert done.stderr.endswith(f"make it: python preprocess/gsm8k.py --local_dir {tmp_path / 'none'}\n")
    given = gpu_script.run(SCRIPT, "data.train_files=mine.jsonl", **missing)
    assert given.returncode == 0 and given.stdout.endswith("data.train_files=mine.jsonl\n")
