"""run_train_dsbench.sh: MODEL, a KEY that never becomes a setting, where tables are, and settings after `--`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.dag.settings.compose import compose_config
from recipe.dag.workflow_edits import load_edited, split_edits

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "dsbench" / "run_train_dsbench.sh"
STUB = """#!/bin/bash
printf '%s\\n' "$@"
printf 'env %s\\n' "COACH_API_KEY=${COACH_API_KEY:-}" >&2
"""


@pytest.fixture
def script(tmp_path) -> SimpleNamespace:
    """`run(*arguments, **environment)` with a stub `python`, which prints its arguments and the coach's key, and a stub
    `nvidia-smi`."""
    stubs, model, data = tmp_path / "bin", tmp_path / "model", tmp_path / "it's data"
    for folder in (stubs, model, data):
        folder.mkdir()
    for name, text in (("python", STUB), ("nvidia-smi", "#!/bin/bash\necho 'GPU 0: one'\n")):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (model / "config.json").write_text("{}")
    for part in ("train", "test"):
        (data / f"{part}.parquet").touch()

    def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{stubs}:/usr/bin:/bin", "PYTHON": str(stubs / "python"), "DATA_DIR": str(data), **env}
        command = ["bash", str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    return SimpleNamespace(run=run, model=model, data=data)


def workflow_of(done: subprocess.CompletedProcess[str]):
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:6] == ["-m", "recipe.dag.main", "--config-path", "recipe/dsbench/config", "--config-name", "full"]
    rest, edits = split_edits(words[6:])
    (path,) = (setting.removeprefix("workflow=") for setting in rest if setting.startswith("workflow="))
    return rest, load_edited(ROOT / path, edits)


def test_without_a_key_the_coach_is_a_frozen_copy(script):
    rest, workflow = workflow_of(script.run(script.model, "--", "trainer.total_training_steps=3"))
    assert rest[-1] == "trainer.total_training_steps=3"
    assert workflow.policies["coach"].api is None and workflow.policies["coach"].frozen
    assert workflow.trained_policies() == ("engineer", "modeler", "analyst")
    config = compose_config("full", rest, SCRIPT.parent / "config")
    assert config.model_path == str(script.model) and config.data.val_files == f"{script.data}/test.parquet"
    assert config.data.stratify_key == "extra_info.data_type"


def test_a_key_goes_into_the_environment_alone(script):
    done = script.run(script.model, "sk-Secret.123")
    _, workflow = workflow_of(done)
    assert "Secret" not in done.stdout and "COACH_API_KEY=sk-Secret.123" in done.stderr
    api = workflow.policies["coach"].api
    assert (api.key_env, api.model, api.service.name) == ("COACH_API_KEY", "gemini-2.5-pro", "google")
    assert workflow.policies["coach"].frozen and workflow.agents[3].on_failure == "skip"


def test_the_name_of_a_variable_stands_for_its_key(script):
    done = script.run(script.model, "MY_KEY", MY_KEY="g-1", COACH_MODEL="gpt-4o-mini")
    api = workflow_of(done)[1].policies["coach"].api
    assert (api.key_env, api.model, api.service.name) == ("MY_KEY", "gpt-4o-mini", "openai")
    assert "g-1" not in done.stdout + done.stderr
    refused = script.run(script.model, "MY_KEY")
    assert refused.returncode == 2 and "is not set" in refused.stderr


def test_a_server_without_a_key(script):
    done = script.run(script.model, COACH_URL="http://127.0.0.1:9/v1", COACH_MODEL="mine")
    api = workflow_of(done)[1].policies["coach"].api
    assert (api.key_env, api.model, api.base_url) == (None, "mine", "${oc.env:COACH_URL}")


def test_shared_weights_are_one_setting(script):
    _, workflow = workflow_of(script.run(script.model, WEIGHTS="shared"))
    assert workflow.trained_policies() == ("engineer",) and list(workflow.policies) == ["engineer", "coach"]


def test_the_folder_of_the_tables_reaches_the_env_and_the_reward(script):
    _, workflow = workflow_of(script.run(script.model, DATA_ROOT=str(script.data)))
    assert workflow.envs["folder"].kwargs["data_root"] == str(script.data)
    assert workflow.node("task").executable_kwargs["data_root"] == str(script.data)
    _, workflow = workflow_of(script.run(script.model))
    assert workflow.envs["folder"].kwargs["data_root"] is None


@pytest.mark.parametrize(
    ("gpus", "profile", "layers", "width"), [(1, "small", 24, 896), (2, "small", 28, 1536), (8, "full", 36, 2560)]
)
def test_the_plan_says_that_the_profiles_fit(script, gpus, profile, layers, width):
    """On GPUs of 80 GB, with models of about 0.5B, 1.5B and 4B parameters."""
    heads, kv_heads = width // 64, 2 if width < 2000 else 8
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 151936}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 65536}
    shape |= {"model_type": "qwen2", "tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"]}
    (script.model / "config.json").write_text(json.dumps(shape))
    settings = ("--", f"trainer.n_gpus_per_node={gpus}")
    env = {"SHOW": "1", "GPU_GB": "80", "CONFIG": profile, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = script.run(script.model, *settings, **env)
    assert done.returncode == 0, done.stderr
    assert "  fits: " in done.stdout and "does not fit" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "reason"),
    [
        ((), {}, "MODEL is missing"),
        (("MODEL",), {}, "placeholder"),
        (("data.train_batch_size=1",), {}, "settings follow --"),
        (("{model}", ""), {}, "KEY is empty"),
        (("{model}", "my key"), {}, "KEY is a placeholder or an option"),
        (("{model}", "--", "word"), {}, "'word' is not key=value"),
        (("{data}",), {}, "has no config.json"),
        (("{model}",), {"WEIGHTS": "tied"}, "separate or shared"),
        (("{model}",), {"CONFIG": "large"}, "has no large.yaml"),
        (("{model}",), {"DATA_ROOT": "/nowhere"}, "DATA_ROOT: /nowhere is not a folder"),
        (
            ("{model}",),
            {"DATA_DIR": "/nowhere"},
            "does not exist; make it: python preprocess/dsbench.py",
        ),
        (("{model}",), {"COACH_MODEL": "a, key_env: HOME"}, "no model's name has"),
    ],
)
def test_bad_arguments_are_one_line(script, arguments, env, reason):
    names = {"{model}": script.model, "{data}": script.data}
    done = script.run(*(names.get(argument, argument) for argument in arguments), **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and reason in done.stderr
