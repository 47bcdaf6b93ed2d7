"""The texts of the token ids that a page shows.

Invariant: a tokenizer is used only if it gives the recorded text of a prompt for its ids; no code of a model runs.
Without one, the page shows ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.dag.report.run_folder import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def vocabularies(run: Run, tokens: Mapping[str, tuple[Mapping[str, Any], set[int]]]) -> dict[str, dict[int, str]]:
    """Return token id -> text of each policy whose tokenizer is on disk. tokens: a call of each policy, and the ids."""
    found = {}
    for policy, (call, ids) in tokens.items():
        tokenizer = next((one for one in _tokenizers(run, policy) if _fits(one, call)), None)
        if tokenizer is not None:
            found[policy] = {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(ids)}
    return found


def _tokenizers(run: Run, policy: str) -> Iterator[Tokenizer]:
    from tokenizers import Tokenizer

    for folder in _folders(run, policy):
        try:
            yield Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises plain Exceptions, for a missing file, too
            continue


def _folders(run: Run, policy: str) -> Iterator[Path]:
    """Yield the folders that may hold the policy's tokenizer."""
    model = (run.workflow.get("policies") or {}).get(policy, {}).get("model") or {}
    names = [model.get("tokenizer_path"), model.get("path"), run.config.get("model_path")]
    launched = Path(run.launch.get("folder", "."))
    for name in names:
        if name and "${" not in name:
            yield from (Path(name), launched / name)
    yield run.folder / "model"
    yield from sorted(run.folder.glob(f"checkpoints/global_step_*/{policy}/actor/huggingface"))


def _fits(tokenizer: Tokenizer, call: Mapping[str, Any]) -> bool:
    try:
        return tokenizer.decode(call["prompt_ids"], skip_special_tokens=False) == call["prompt_text"]
    except (KeyError, OverflowError):
        return False
