"""The frozen model that turns texts into vectors for a mixer.

Invariant: its weights never change, and the same texts in one call give the same vectors on the same machine. Without a
GPU it lives in the driver's process. With one it has an actor of its own on a policy's first device, which it occupies
only while it is asked: in between the weights are in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe.dag.credit.mixer import LastHiddenState
from recipe.dag.errors import UserError
from recipe.dag.policy.placement import Pool

WHERE = "algorithm.mixer.encoder"


class TextEncoder:
    """Texts -> [B, D] float32 on the CPU."""

    def __init__(
        self, path: str, *, chunk: int, device: str = "cpu", tokenizer: str | None = None, trust: bool = False
    ):
        """`path`: a local folder or hub name; bfloat16 on a GPU, float32 elsewhere. Raises UserError for a model that
        transformers cannot load, and for a chunk that is longer than it can read."""
        from transformers import AutoModel, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or path, trust_remote_code=trust)
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            self.model = AutoModel.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise UserError(f"{WHERE}.model: {path} cannot be loaded ({str(error).strip().splitlines()[0]})") from error
        self.model.requires_grad_(False).eval()
        self.device = device
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and chunk > longest:
            raise UserError(f"{WHERE}.chunk: {chunk} tokens at once, but {path} reads {longest} at most; lower it")
        self._encode = LastHiddenState(self._tokenize, self._hidden, chunk=chunk)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self.encode(texts)

    def encode(self, texts: Sequence[str]) -> Tensor:
        if self.device == "cpu":
            return self._encode(texts)
        self.model.to(self.device)
        try:
            return self._encode(texts)
        finally:
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def _tokenize(self, text: str) -> list[int]:
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        return ids or [self.tokenizer.eos_token_id or 0]

    def _hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        found = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device))
        return found.last_hidden_state


class RemoteEncoder:
    """A TextEncoder in a Ray actor on the first device of `pool`. It is ready when this returns."""

    def __init__(self, pool: Pool, path: str, **options):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices = pool.resources
        group = devices.get_placement_groups(device_name="cuda" if devices.use_gpu else "cpu")[0]
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        share = 1 / devices.max_colocate_count if devices.use_gpu else 0
        actor = ray.remote(TextEncoder).options(num_gpus=share, num_cpus=1, scheduling_strategy=place)
        self._get = ray.get
        self._actor = actor.remote(path, device="cuda" if devices.use_gpu else "cpu", **options)
        self._get(self._actor.encode.remote(["ready"]))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self._get(self._actor.encode.remote(list(texts)))


def start_encoder(pool: Pool, path: str, *, platform: str, **options) -> TextEncoder | RemoteEncoder:
    return TextEncoder(path, **options) if platform == "cpu" else RemoteEncoder(pool, path, **options)
