"""Adapters from the workflow file to checkpoints, evaluations and merged models."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.runs import (
    ROOT,
    TWO_STEPS,
    comparable,
    environment,
    episodes_of,
    finish,
    log_of,
    start,
    steps,
    two_steps,
)
from tests.end_to_end.test_end_to_end_algorithms import SCORED_BY_LENGTH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

AGENTS = ("planner", "executor", "verifier")
WORKFLOW = "workflow_retool_ma_lora.yaml"
LARGE = [f"workflow.policies.{name}.lr=0.01" for name in AGENTS]


def digests(step: Path) -> dict[str, str]:
    """Return the digest of each agent's adapter."""
    files = {name: step / name / "actor" / "adapter_model.safetensors" for name in AGENTS}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def evaluated(material, out: Path, *options: str) -> list[list[int]]:
    """Evaluate with the material's model, and return the tokens of each call."""
    command = [material.zygote.python, "-m", "recipe.dag.cli", "eval", f"{ROOT}/workflows/{WORKFLOW}", *options]
    command += ["--data", f"{material.folder}/data/test.parquet", "--output", str(out), "--max-samples", "4"]
    command += ["--config-path", f"{ROOT}/recipe/retool_ma/config", "--config-name", "tiny_cpu"]
    env = environment(MODEL_PATH=f"{material.folder}/model", **material.ray)
    done = subprocess.run(
        [*command, *material.options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [call["response_ids"] for episode in episodes_of(out, "validation") for call in episode["calls"]]


def as_adapters(*agents: str) -> list[str]:
    """Return the settings of the recipes' scripts with WEIGHTS=adapters."""
    script = (
        f'. recipe/dag/scripts/arguments.sh; find_adapters 0.01 {" ".join(agents)}; printf "%s\\n" "${{adapters[@]}}"'
    )
    env = environment(WEIGHTS="adapters")
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_marft_trains_adapters_with_critics_and_resumes_bit_equal(material, tmp_path):
    out, again = tmp_path / "first", tmp_path / "again"
    # the env never pays this model, so returns would be zeros
    (tmp_path / "score.py").write_text(
        "def score(episode): return {'reasoner': 0.5, 'actor': len(episode.calls[-1].text) % 5 / 5}\n"
    )
    settings = [*TWO_STEPS, *as_adapters("reasoner", "actor"), "workflow.nodes.rollout_actor.env_pays=false"]
    settings.append(f"workflow.nodes.function_reward.reward={tmp_path}/score.py:score")
    settings += [f"workflow.policies.{name}.train_cycle=1" for name in ("reasoner", "actor")]
    workflow = "workflow_marft_tiny.yaml"
    metrics = finish(start(material, out, *settings, workflow=workflow), out)
    first, second = (out / "checkpoints" / f"global_step_{step}" for step in (1, 2))
    for name, turn in (("reasoner", 1), ("actor", 2)):
        heads = [load_file(step / name / "critic" / "value_head.safetensors")["weight"] for step in (first, second)]
        assert heads[0].any() and not torch.equal(*heads), "critics learn in every step"
        assert [step for step in (1, 2) if f"policy/{name}/grad_norm" in metrics[step]] == [turn]
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}"]
    resumed = finish(start(material, again, *settings, *resume, workflow=workflow), again)
    assert comparable(resumed[2]) == pytest.approx(comparable(metrics[2]), rel=1e-5, abs=1e-6)
    files = [str(path.relative_to(second)) for path in second.rglob("*.safetensors")]
    assert len(files) == 2 * 3
    for file in files:
        assert (again / "checkpoints" / "global_step_2" / file).read_bytes() == (second / file).read_bytes()


LOST = """\
from recipe.dag.policy.adapter import AdapterHost

serve = AdapterHost.serve


def lost(self, name, version, folder):
    return [] if (name, version) == ("actor", 1) else serve(self, name, version, folder)


AdapterHost.serve = lost


def score(episode):
    return {"reasoner": 0.5, "actor": 0.5}
"""
ON_GPU = ["platform=cuda", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2"]


@pytest.mark.parametrize(
    "platform",
    [[], pytest.param(ON_GPU, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
    ids=["cpu", "cuda"],
)
def test_a_sync_that_never_arrives_stops_the_run(material, tmp_path, platform):
    (tmp_path / "score.py").write_text(LOST)
    model = material.folder / "model"
    if platform:  # SGLang's attention needs wider heads
        config = AutoConfig.from_pretrained(model, hidden_size=256, num_attention_heads=4, num_key_value_heads=4)
        AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
        model = tmp_path / "model"
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    settings = [*TWO_STEPS, *as_adapters("reasoner", "actor"), "workflow.nodes.rollout_actor.env_pays=false", *platform]
    settings += [f"workflow.nodes.function_reward.reward={tmp_path}/score.py:score", f"model_path={model}"]
    out = tmp_path / "run"
    run = start(material, out, *settings, workflow="workflow_marft_tiny.yaml", own_ray=bool(platform))
    assert run.wait(timeout=1200) == 2, log_of(out)[-3000:]
    assert "policy actor, version 1: 1 of 1 servers do not have the trainer's weights" in log_of(out)
    assert "reports version 0: no sync reached it since" in log_of(out)
    assert not steps(out).get(2)


def test_adapters_exchange_roles(material, tmp_path):
    cory = (ROOT / "workflows" / "workflow_cory.yaml").read_text().replace("every: 5", "every: 1")
    cory = cory.replace("recipe/debate/hooks.py:right_answers", "score.py:right_answers").replace("512", "16")
    agents = ("first", "second")
    settings = [*as_adapters(*agents), "trainer.save_freq=-1"]
    metrics, out = two_steps(material, tmp_path, cory, SCORED_BY_LENGTH, *settings)
    for step, players in ((1, agents), (2, agents[::-1])):
        calls = [episode["calls"] for episode in episodes_of(out) if episode["step"] == step]
        assert calls and all(tuple(call["policy"] for call in two) == players for two in calls)
        for name in agents:  # the rows were sampled with the adapter that is trained on them
            assert metrics[step][f"policy/{name}/logprob_diff/max"] <= 1e-4
            assert metrics[step][f"policy/{name}/grad_norm"] > 0


def test_mathchat_trains_adapters_by_the_scores_of_a_coach(material, tmp_path):
    out = tmp_path / "first"
    coach = ["~workflow.policies.coach.model", "workflow.policies.coach.api={script: recipe/mathchat/judge.py:judge}"]
    settings = [*TWO_STEPS, *as_adapters("solver", "coder", "verifier"), *coach, "data.max_prompt_length=600"]
    metrics = finish(start(material, out, *settings, workflow="workflow_mathchat.yaml"), out)
    calls = [call["agent"] for episode in episodes_of(out) for call in episode["calls"]]
    assert {"solver", "coder", "verifier", "coach"} <= set(calls)
    for name in ("solver", "coder", "verifier"):
        assert metrics[2][f"policy/{name}/logprob_diff/max"] <= 1e-4
        assert (out / "checkpoints" / "global_step_2" / name / "actor" / "adapter_model.safetensors").is_file()


def test_adapters_train_resume_bit_equal_and_are_evaluated_and_merged(material, tmp_path):
    out = tmp_path / "first"
    metrics = finish(start(material, out, *TWO_STEPS, *LARGE, workflow=WORKFLOW), out)
    for name in AGENTS:
        assert metrics[2][f"policy/{name}/logprob_diff/max"] <= 1e-4, "the servers have the trainer's weights"
    assert any(metrics[step][f"policy/{name}/grad_norm"] > 0 for step in (1, 2) for name in AGENTS)
    assert "loading" in log_of(out) and "to train planner, executor, verifier on it" in log_of(out)
    first, second = (out / "checkpoints" / f"global_step_{step}" for step in (1, 2))
    assert digests(first) != digests(second)
    saved = sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    files = ("adapter_config.json", "adapter_model.safetensors", "optim_world_size_1_rank_0.pt")
    assert saved == sorted(["run.json", *(f"{name}/actor/{file}" for name in AGENTS for file in files)])
    assert set(json.loads((second / "run.json").read_text())["policies"]) == set(AGENTS), "the base is never written"

    again = tmp_path / "again"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}"]
    resumed = finish(start(material, again, *TWO_STEPS, *resume, *LARGE, workflow=WORKFLOW), again)
    assert list(resumed) == [2]
    assert digests(again / "checkpoints" / "global_step_2") == digests(second)
    assert comparable(resumed[2]) == pytest.approx(comparable(metrics[2]), rel=1e-5, abs=1e-6)

    trained = evaluated(material, tmp_path / "trained", "--checkpoint", str(second))
    assert trained != evaluated(material, tmp_path / "base"), "the base plays without the adapters"

    adapter, merged = second / "planner" / "actor", tmp_path / "merged"
    command = [material.zygote.python, "-m", "recipe.dag.cli", "merge", str(adapter), "--output", str(merged)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=1200)
    base = AutoModelForCausalLM.from_pretrained(material.folder / "model", dtype=torch.float32)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, str(adapter))(ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    refused = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1200)
    assert refused.returncode == 2 and "already exists; choose another --output" in refused.stderr
