"""examples/slurm/train.sbatch, with a Slurm of stubs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
STUBS = {
    "scontrol": 'printf "%s\\n" one two three',
    "srun": 'while [ "$1" != env ]; do case $1 in --nodelist=*) node=${1#*=} ;; esac; shift; done\n'
    'echo "$node: ${*:4}" >> "$LOG"',
    "nvidia-smi": "echo GPU 0: a card",
    # the check of packages, the wait for Ray, the run
    "python3": 'case $1 in -c) exit ;; esac; echo "run at $RAY_ADDRESS: $*" >> "$LOG"\n'
    '[ -z "$BLOCKS" ] || { trap "echo saved >> $LOG; exit 143" TERM; echo > "$READY"; while :; do sleep 0.05; done; }',
    "python": "cat > /dev/null",
}


@pytest.fixture
def job(tmp_path):
    """`start(**environment)` starts the job; `.log` has what ran where."""
    for name, lines in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").touch()
    os.mkfifo(tmp_path / "ready")
    log = tmp_path / "log"
    env = {
        **{"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(log), "READY": str(tmp_path / "ready"), "BLOCKS": ""},
        **{"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_GPUS_ON_NODE": "4"},
        **{"MODEL_PATH": "/models/m", "VERL_DAG_GPU_VENV": str(tmp_path / "venv"), "DATA_DIR": str(tmp_path / "data")},
    }

    def start(*arguments: str, **more: str) -> subprocess.Popen:
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.Popen(command, env={**env, **more}, stderr=subprocess.PIPE, text=True)

    return SimpleNamespace(start=start, log=log, ready=tmp_path / "ready")


def test_ray_starts_on_every_machine_and_the_run_on_the_first(job):
    process = job.start("trainer.save_freq=5")
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")
    *started, run = sorted(job.log.read_text().splitlines(), key=lambda line: line.startswith("run"))
    options = "--num-gpus=4 --num-cpus=64 --disable-usage-stats --block"
    assert sorted(started) == [
        f"one: ray start --head --port=6379 {options}",
        f"three: ray start --address=one:6379 {options}",
        f"two: ray start --address=one:6379 {options}",
    ]
    assert run.startswith("run at one:6379: -m recipe.dag.main --config-path recipe/retool_ma/config")
    assert run.endswith("trainer.nnodes=3 trainer.n_gpus_per_node=4 trainer.save_freq=5")


def test_sigterm_reaches_the_run_and_the_job_waits_for_its_checkpoint(job):
    process = job.start(BLOCKS="1")
    job.ready.read_text()  # opens when the run has started
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143 and job.log.read_text().splitlines()[-1] == "saved"


@pytest.mark.parametrize(("missing", "line"), [("MODEL_PATH", "set it to the model"), ("SLURM_JOB_NODELIST", "sbatch")])
def test_what_is_missing_is_one_line(job, missing, line):
    process = job.start(**{missing: ""})
    _, error = process.communicate()
    assert process.returncode != 0 and error.count("\n") == 1 and line in error


def test_the_options_exist(job):
    from ray.scripts.scripts import start

    text = SCRIPT.read_text()
    known = {name for parameter in start.params for name in parameter.opts}
    used = [option for line in re.findall(r"ray start (.*)", text) for option in re.findall(r"--[a-z-]+", line)]
    assert {"--head", "--address", "--block"} <= set(used) <= known
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives and all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in directives)
    assert text.index("#SBATCH") < text.index("set -euo"), "Slurm reads no directive after the first command"
