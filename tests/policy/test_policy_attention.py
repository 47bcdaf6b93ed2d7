"""Which packages pass for FlashAttention, with fakes of the ones that share a name."""

from __future__ import annotations

import sys

import pytest

from recipe.dag.app import doctor
from recipe.dag.policy.attention import PACKAGES, missing_attention

KERNELS = "def flash_attn_func(): ...\ndef flash_attn_varlen_func(): ...\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a fake distribution on sys.path: install(name, version, {file: text})."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, version: str, files: dict[str, str]) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in files.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))  # forgets what the import system has cached

    yield make
    for module in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[module]


def install_version_4(install) -> None:
    """As SGLang brings it: the folder flash_attn, without flash_attn/__init__.py."""
    install("flash-attn-4", "4.0.0b1", {"flash_attn/cute/__init__.py": KERNELS})


def test_flash_attn_4_does_not_pass_for_flash_attn(install):
    install_version_4(install)
    assert missing_attention("flash_attention_2") == "flash-attn is not installed"
    assert missing_attention("flash_attention_4") is None
    with pytest.raises(doctor.Note, match="flash-attn is not installed; nothing needs it"):
        doctor.check_flash_attn()


def test_flash_attn_beside_flash_attn_4_is_used(install):
    install_version_4(install)
    install("flash-attn", "2.8.3", {"flash_attn/__init__.py": KERNELS})
    assert missing_attention("flash_attention_2") is None
    assert doctor.check_flash_attn() == "2.8.3"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('undefined symbol:\\n _ZN3c10')", "does not import (undefined symbol: _ZN3c10)"),
        ("def flash_attn_func(): ...\n", "has no flash_attn_varlen_func"),
    ],
)
def test_a_distribution_that_cannot_be_used_is_missing(install, text, reason):
    install("flash-attn", "2.8.3", {"flash_attn/__init__.py": text})
    assert missing_attention("flash_attention_2") == f"flash-attn {reason}"


def test_an_attention_of_torch_needs_no_package():
    assert [missing_attention(name) for name in ("sdpa", "eager", "flex_attention")] == [None, None, None]


def test_every_flash_attention_of_transformers_is_known():
    """Another one would reach transformers unchecked, which asks a hub for its kernels."""
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

    assert FLASH_ATTN_KERNEL_FALLBACK.keys() == PACKAGES.keys()
