"""Attention implementations that a policy can train with, and the check that this machine can run them.

Invariant: a package counts only when its own distribution is installed and its kernels import. Several distributions
share the import name flash_attn: SGLang brings flash-attn-4, whose kernels `flash_attention_2` cannot use. `varlen`
needs no package, only a torch with its kernel.
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec

from recipe.dag.core.versions import package_version

VARLEN = "varlen"
"""This package's attention over packed rows: `recipe.dag.policy.varlen`."""
FLASH = "flash_attention_2"
"""verl's default."""
PADDED = "sdpa"
"""torch's own attention, for rows that are not packed."""
PACKAGES = {
    "flash_attention_2": ("flash-attn", "flash_attn", ("flash_attn_func", "flash_attn_varlen_func")),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface", ("flash_attn_func", "flash_attn_varlen_func")),
    "flash_attention_4": ("flash-attn-4", "flash_attn.cute", ("flash_attn_func", "flash_attn_varlen_func")),
}
"""Value of attn_implementation -> distribution, module, functions that transformers imports from it."""


def missing_attention(implementation: str) -> str | None:
    """Return why this machine cannot run `implementation`; None if it can, or if no package is needed."""
    if implementation == VARLEN and find_spec("torch.nn.attention.varlen") is None:
        return f"torch {metadata.version('torch')} has no torch.nn.attention.varlen (2.10 on)"
    if implementation not in PACKAGES:
        return None
    distribution, module, functions = PACKAGES[implementation]
    if package_version(distribution) is None:
        return f"{distribution} is not installed"
    try:
        kernels = import_module(module)
    except Exception as error:  # a wheel built for another torch fails with whatever its binary raises
        return f"{distribution} does not import ({' '.join(str(error).split())})"
    absent = [name for name in functions if not hasattr(kernels, name)]
    return f"{distribution} has no {absent[0]}" if absent else None
