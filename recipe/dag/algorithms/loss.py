"""The policy losses: which options each of them reads, and with which defaults.

Invariant: an option of another loss is an error; a default that a loss changes is replaced only if the user wrote none.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.problem import Problem

READERS = {"clip_ratio_c": "vanilla", "policy_drift_coef": "cpgd"}
"""Option -> the only policy loss that reads it."""
GSPO_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Clip ratios of whole sequences (arXiv 2507.18071, section 5.1); a token's 0.2 would clip nothing there."""
LARGE_GSPO_CLIP = 0.01
"""Above this, no update of a sequence's mean log-probability is clipped."""
DEFAULTS = {"gspo": {"loss_agg": "seq-mean-token-mean", **GSPO_CLIP}}
"""Policy loss -> the defaults that it changes."""


def check_loss_options(facts: Facts) -> Iterator[Problem]:
    algorithm = facts.algorithm
    for key, loss in READERS.items():
        if facts.has("algorithm", key) and algorithm.policy_loss != loss:
            message = f"policy_loss `{algorithm.policy_loss}` does not read this, only `{loss}` does; remove it"
            yield facts.problem(("algorithm", key), message, key=True)
    if algorithm.policy_loss == "gspo" and algorithm.loss_agg != "seq-mean-token-mean":
        message = "gspo averages over each sequence; write `loss_agg: seq-mean-token-mean`, or remove this"
        yield facts.problem(("algorithm", "loss_agg"), message)


def warn_of_clip(facts: Facts) -> Iterator[Problem]:
    """Warn of a clip ratio for tokens under gspo: a ratio averaged over a sequence moves by about 1e-3."""
    if facts.algorithm.policy_loss != "gspo":
        return
    for key, usual in GSPO_CLIP.items():
        value = getattr(facts.algorithm, key)
        if facts.has("algorithm", key) and value > LARGE_GSPO_CLIP:
            message = f"gspo clips a sequence's mean ratio, which never reaches {value:g}; the paper uses {usual:g}"
            yield facts.problem(("algorithm", key), message)
