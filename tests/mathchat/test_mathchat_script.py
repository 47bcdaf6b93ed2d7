"""run_train_mathchat.sh: MODEL, a KEY that never becomes a setting, and settings after `--`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.dag.settings.compose import compose_config
from recipe.dag.workflow_edits import load_edited, split_edits

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "mathchat" / "run_train_mathchat.sh"
STUB = """#!/bin/bash
printf '%s\\n' "$@"
printf 'env %s\\n' "COACH_API_KEY=${COACH_API_KEY:-}" "COACH_URL=${COACH_URL:-}" >&2
"""


@pytest.fixture
def script(tmp_path) -> SimpleNamespace:
    """`run(*arguments, **environment)` with a stub `python`, which prints its arguments and the coach's environment,
    and a stub `nvidia-smi`."""
    stubs, model, data = tmp_path / "bin", tmp_path / "model", tmp_path / "it's data"
    for folder in (stubs, model, data):
        folder.mkdir()
    for name, text in (("python", STUB), ("nvidia-smi", "#!/bin/bash\necho 'GPU 0: one'\n")):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (model / "config.json").write_text("{}")
    for part in ("train", "test"):
        (data / f"{part}.parquet").touch()

    def run(*arguments: object, gpu: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        (stubs / "nvidia-smi").write_text(f"#!/bin/bash\n{'echo GPU 0: one' if gpu else 'exit 9'}\n")
        env = {"PATH": f"{stubs}:/usr/bin:/bin", "PYTHON": str(stubs / "python"), "DATA_DIR": str(data), **env}
        command = ["bash", str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    return SimpleNamespace(run=run, model=model, data=data)


def settings_of(done: subprocess.CompletedProcess[str], profile: str = "full") -> list[str]:
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "recipe.dag.main"]
    assert words[2:6] == ["--config-path", "recipe/mathchat/config", "--config-name", profile]
    return words[6:]


def workflow_of(settings: list[str]):
    rest, edits = split_edits(settings)
    assert all("=" in setting for setting in rest)
    (path,) = (setting.removeprefix("workflow=") for setting in rest if setting.startswith("workflow="))
    return rest, load_edited(ROOT / path, edits)


def test_without_a_key_the_coach_is_a_frozen_copy(script):
    rest, workflow = workflow_of(settings_of(script.run(script.model, "--", "trainer.total_training_steps=3")))
    assert rest[-1] == "trainer.total_training_steps=3"
    assert workflow.policies["coach"].api is None and workflow.policies["coach"].frozen
    assert workflow.trained_policies() == ("solver", "coder", "verifier")
    config = compose_config("full", rest, SCRIPT.parent / "config")
    assert config.model_path == str(script.model)
    assert config.data.val_files == f"{script.data}/test.parquet"


def test_a_key_goes_into_the_environment_alone(script):
    done = script.run(script.model, "sk-Secret.123", COACH_MODEL="gpt-4o-mini")
    settings = settings_of(done)
    assert "Secret" not in done.stdout
    assert "COACH_API_KEY=sk-Secret.123" in done.stderr
    _, workflow = workflow_of(settings)
    api = workflow.policies["coach"].api
    assert api is not None and (api.key_env, api.model, api.base_url) == ("COACH_API_KEY", "gpt-4o-mini", None)
    assert api.service is not None and api.service.name == "openai"
    assert workflow.policies["coach"].frozen and workflow.agents[3].on_failure == "skip"


def test_the_name_of_a_variable_stands_for_its_key(script):
    done = script.run(script.model, "GEMINI_API_KEY", GEMINI_API_KEY="g-1")
    _, workflow = workflow_of(settings_of(done))
    api = workflow.policies["coach"].api
    assert api is not None and api.service is not None
    assert (api.key_env, api.model, api.service.name) == ("GEMINI_API_KEY", "gemini-2.5-flash", "google")
    assert "g-1" not in done.stdout + done.stderr
    refused = script.run(script.model, "GEMINI_API_KEY")
    assert refused.returncode == 2 and "is not set" in refused.stderr


def test_a_server_without_a_key(script):
    done = script.run(script.model, COACH_URL="http://127.0.0.1:9/v1", COACH_MODEL="mine")
    _, workflow = workflow_of(settings_of(done))
    api = workflow.policies["coach"].api
    assert api is not None and (api.key_env, api.model, api.base_url) == (None, "mine", "${oc.env:COACH_URL}")
    assert "COACH_URL=http://127.0.0.1:9/v1" in done.stderr


def test_google_credentials_in_place_of_a_key_and_a_logger(script):
    done = script.run(script.model, COACH_PROVIDER="vertex", WANDB_API_KEY="w")
    rest, workflow = workflow_of(settings_of(done))
    api = workflow.policies["coach"].api
    assert api is not None and (api.provider, api.key_env, api.model) == ("vertex", None, "gemini-2.5-flash")
    assert "trainer.logger=[console,tensorboard,wandb]" in rest


def test_shared_weights_are_one_setting(script):
    _, workflow = workflow_of(settings_of(script.run(script.model, WEIGHTS="shared")))
    assert workflow.trained_policies() == ("solver",) and list(workflow.policies) == ["solver", "coach"]


def test_data_files_of_the_callers_own(script):
    done = script.run(script.model, "--", "data.train_files=mine.jsonl", DATA_DIR=str(script.data / "none"))
    assert (
        done.returncode == 2 and "test.parquet does not exist; make it: python preprocess/competition.py" in done.stderr
    )
    mine = ("data.train_files=mine.jsonl", "data.val_files=[a, b]")
    assert settings_of(script.run(script.model, "--", *mine, DATA_DIR="/none"))[-2:] == list(mine)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "MODEL is missing"),
        (("MODEL",), "placeholder"),
        (("<model>",), "placeholder"),
        (("data.train_batch_size=1",), "settings follow --"),
        (("{model}", ""), "KEY is empty"),
        (("{model}", "trainer.nnodes=1"), "settings follow --"),
        (("{model}", "--config", "small"), "3 arguments before --, at most 2 are taken"),
        (("{model}", "my key"), "KEY is a placeholder or an option"),
        (("{model}", "--help"), "KEY is a placeholder or an option"),
        (("{model}", "--", "word"), "'word' is not key=value"),
        (("{data}",), "has no config.json"),
    ],
)
def test_bad_arguments_are_one_line(script, arguments, reason):
    names = {"{model}": script.model, "{data}": script.data}
    done = script.run(*(names.get(argument, argument) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and reason in done.stderr


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"WEIGHTS": "tied"}, "separate or shared"),
        ({"CONFIG": "large"}, "has no large.yaml"),
        ({"COACH_MODEL": "a, key_env: HOME"}, "no model's name has"),
        ({"COACH_PROVIDER": "google"}, "must be vertex"),
        ({"COACH_PROVIDER": "vertex", "COACH_URL": "http://h/v1"}, "neither KEY nor COACH_URL"),
        ({"gpu": False}, "no NVIDIA GPU"),
    ],
)
def test_a_bad_environment_is_one_line(script, env, reason):
    done = script.run(script.model, **env)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1 and reason in done.stderr
    assert ("run_tiny_cpu.sh" in done.stderr) == ("gpu" in env)


def test_no_message_repeats_the_key(script):
    for arguments in (("sk-Secret", "a", "b"), (script.model, "sk-Secret=1"), (script.model, "sk Secret")):
        done = script.run(*arguments)
        assert done.returncode == 2 and "Secret" not in done.stdout + done.stderr


def test_help_is_the_header(script):
    done = script.run("--help")
    assert done.returncode == 0 and done.stdout.startswith("MathChat on CUDA GPUs") and "COACH_MODEL=" in done.stdout


@pytest.mark.parametrize(("profile", "most"), [("small", 1024), ("full", 4096), ("two_gpus", 4096)])
def test_actions_are_as_long_as_the_profile_has_room_for(script, profile, most):
    workflow = workflow_of(settings_of(script.run(script.model, CONFIG=profile), profile))[1]
    assert [agent.sampling.max_tokens for agent in workflow.agents] == [most] * 3 + [1024]


def test_the_plan_without_training(script):
    done = script.run(script.model, "sk-Secret", SHOW="1", GPU_GB="80", gpu=False)
    words = done.stdout.splitlines()
    assert words[:4] == ["-m", "recipe.dag.cli", "plan", "workflows/workflow_mathchat.yaml"] and "--gpu-gb" in words
    assert "Secret" not in done.stdout and not any(word.startswith("workflow=") for word in words)


def test_settings_of_the_coach_follow_its_key(script):
    own = (
        "workflow.policies.coach.api.budget={usd: 20}",
        "workflow.policies.coach.api.price={input: 0.3, output: 2.5}",
    )
    done = script.run(script.model, "GEMINI_API_KEY", "--", *own, GEMINI_API_KEY="g-1")
    api = workflow_of(settings_of(done))[1].policies["coach"].api
    assert api is not None and api.budget is not None and api.budget.usd == 20 and api.key_env == "GEMINI_API_KEY"


def test_smollm2_learns_the_form_and_coaches_itself(gpu_script):
    smollm2 = SCRIPT.parent / "run_smollm2.sh"
    gpu_script.expect_refusal(smollm2, "no NVIDIA GPU")
    gpu_script.pretend_there_is_a_gpu()
    done = gpu_script.run(smollm2, "2", "trainer.total_training_steps=3", PYTHON="/bin/echo")
    assert done.returncode == 0, done.stderr
    *made, data, transcripts, sft, train = done.stdout.splitlines()
    out = "outputs/mathchat_smollm2_seed2"
    assert made in ([], ["examples/small_model.py outputs/smollm2"]), "made once"
    assert f"--local_dir {out}/data" in data and f"--output {out}/data/sft.parquet" in transcripts
    assert f"sft {out}/data/sft.parquet --model outputs/smollm2 --output {out}/sft" in sft and "sft_smollm2" in sft
    assert f"model_path={out}/sft/huggingface" in train and train.endswith(" trainer.total_training_steps=3")
    assert all("seed 2" in line or "seed=2" in line for line in (data, transcripts, sft, train))
    assert "coach" not in train  # the workflow's own: a frozen copy of the model
