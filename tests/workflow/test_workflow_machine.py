from __future__ import annotations

import shutil

import pytest

from recipe.dag.workflow.machine import MIB, this_machine


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi on the PATH that prints `text`."""

    def make(text: str) -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!{shutil.which('bash')}\nprintf '%s' '{text}'\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


CARDS = "0, GPU-aa11, 81559\n1, GPU-bb22, 81559\n2, GPU-cc33, 32768\n"


@pytest.mark.parametrize(
    ("visible", "sizes"),
    [
        (None, [81559, 81559, 32768]),
        ("", []),
        ("2", [32768]),
        ("2,0", [32768, 81559]),
        ("GPU-bb,7,0", [81559]),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_would_show(visible, sizes, nvidia_smi):
    nvidia_smi(CARDS)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert this_machine(environ).gpu_bytes == tuple(size * MIB for size in sizes)


def test_a_machine_without_a_driver_has_no_gpu(nvidia_smi, monkeypatch, tmp_path):
    nvidia_smi("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.\n")
    assert this_machine({}).gpu_bytes == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    machine = this_machine({})
    assert machine.gpu_bytes == () and machine.host_bytes > 2**28
