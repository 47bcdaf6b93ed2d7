"""The environment for GPUs: what gpu_env.sh asks uv or pip for, and what scripts say outside of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.scripts.training_script import TrainingScript

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipe" / "dag" / "scripts" / "gpu_env.sh"
RECORD = '#!/bin/bash\necho "$(basename "$0") $*" >> {folder}/asked\n'
PYTHON = RECORD + 'case "$1 $2" in "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;; esac\n'


@pytest.fixture
def host(tmp_path):
    """`run(*arguments, **options)`: gpu_env.sh on a host with the tools that the options name; returns the result and
    what uv and Python were asked for."""

    def run(*arguments: str, uv=True, python=True, driver="580.65.06", glibc="2.35", machine="x86_64", free=10**9):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        programs = {
            "uname": f"case $1 in -s) echo Linux ;; -m) echo {machine} ;; esac",
            "getconf": f"echo glibc {glibc}",
            "df": f"printf 'header\\n/dev/disk 1 1 {free} 1 /\\n'",
            "nvidia-smi": f"echo {driver}" if driver else "exit 9",
        }
        for name, line in programs.items():
            (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        if uv:
            (tools / "uv").write_text(RECORD.format(folder=tmp_path) + '[ "$1" != venv ] || mkdir -p "$4/bin"\n')
        (tools / "python3.12").write_text(PYTHON.format(folder=tmp_path) if python else "#!/bin/bash\nexit 1\n")
        for tool in tools.iterdir():
            tool.chmod(0o755)
        env = {"PATH": f"{tools}:/usr/bin:/bin", "VERL_DAG_GPU_VENV": str(tmp_path / "env"), "HF_TOKEN": "hf_secret"}
        done = subprocess.run(["bash", str(SCRIPT), *arguments], env=env, cwd="/", capture_output=True, text=True)
        asked = tmp_path / "asked"
        return done, asked.read_text().splitlines() if asked.exists() else []

    return run


def test_uv_gets_every_package_of_the_lock_file_once(host, tmp_path):
    for _ in range(2):
        done, asked = host()
        assert (done.returncode, done.stderr) == (0, "")
        assert f"source {tmp_path}/env/bin/activate" in done.stdout
        assert asked == [
            f"uv venv --python 3.12 {tmp_path}/env",
            f"uv pip install --python {tmp_path}/env/bin/python --no-deps -r requirements-gpu.lock -e .",
        ]


def test_without_uv_pip_does_the_same(host, tmp_path):
    done, asked = host(uv=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert asked[1:] == [
        f"python3.12 -m venv {tmp_path}/env",
        "python -m pip install --no-deps -r requirements-gpu.lock -e .",
    ]


@pytest.mark.parametrize("uv", [True, False])
def test_a_dry_run_prints_the_commands_and_makes_nothing(host, tmp_path, uv):
    done, asked = host("--dry-run", uv=uv, driver="")
    assert done.returncode == 0 and not (tmp_path / "env").exists()
    assert not [line for line in asked if "install" in line or "venv" in line]
    assert done.stderr.startswith("warning: no NVIDIA driver here")
    assert [line.rstrip().endswith("--no-deps -r requirements-gpu.lock -e .") for line in done.stdout.splitlines()] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"driver": "570.86.10"},
            "NVIDIA driver 570.86.10: requirements-gpu.lock has CUDA 13, which needs 580 or newer",
        ),
        ({"glibc": "2.31"}, "glibc 2.31: 2.34 or newer is needed"),
        ({"machine": "aarch64"}, "Linux on aarch64: the wheels of requirements-gpu.lock are for Linux on x86_64"),
        ({"free": 4_000_000}, "4 GB free, 12 are needed"),
        ({"uv": False, "python": False}, "python3.12 is not Python 3.12; install uv"),
    ],
)
def test_a_host_that_cannot_have_it_is_one_line(host, options, line):
    done, asked = host(**options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and line in done.stderr
    assert not [command for command in asked if "install" in command]


GPU_SCRIPTS = sorted(
    path for path in ROOT.glob("recipe/*/*.sh") if path.name.startswith(("run_", "train_")) and "tiny" not in path.name
)


@pytest.mark.parametrize("path", GPU_SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("python", ["/nowhere/python", ""], ids=["none", "bare"])
def test_every_script_for_gpus_says_in_one_line_how_to_make_and_activate_the_environment(tmp_path, path, python):
    script = TrainingScript(path, tmp_path)
    script.stub("python", 'echo "No module named pydantic" >&2; exit 1')
    (script.data / "val.parquet").touch()
    arguments = {"train_retool_grpo": 3, "train_sft": 3, "run_train_mathchat": 1, "run_train_dsbench": 1}
    given = [script.model, script.data, script.out][: arguments.get(path.stem, 0)]
    env = {"MODEL_PATH": str(script.model), "DATA_DIR": str(script.data)} | ({"PYTHON": python} if python else {})
    said = script.expect_refusal("run bash recipe/dag/scripts/gpu_env.sh once", *given, **env)
    assert (python or f"{script.stubs}/python lacks this project's packages") in said
