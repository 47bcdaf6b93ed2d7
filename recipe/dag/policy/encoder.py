"""The frozen model that turns texts into vectors for a mixer.

Invariant: its weights never change, and the same texts in one call give the same vectors on the same machine. Without a
GPU it runs in the driver's process. With one it runs in its own Ray actor on the first device of a policy, and its
weights are on that device only during a call: otherwise they are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recipe.dag.core.errors import UserError
from recipe.dag.policy.placement import Pool

WHERE = "algorithm.mixer.encoder"


class LastHiddenState:
    """Encodes a text as the last token's hidden state of a frozen language model, averaged over chunks: the end of a
    long text counts like its beginning, and nothing is cut off. Batches depend only on the texts of the call, so the
    same call gives the same bits."""

    def __init__(
        self,
        tokenize: Callable[[str], list[int]],
        hidden: Callable[[Tensor, Tensor], Tensor],
        *,
        chunk: int,
        batch_tokens: int = 16384,
    ):
        """`tokenize`: text -> at least one token id. `hidden`: ids [B, L] and mask [B, L] (1: a token, 0: padding on
        the right) -> last layer's states [B, L, D]. `chunk`: tokens that the model reads at once. `batch_tokens`: the
        most tokens of a batch, padding included."""
        if chunk < 1:
            raise ValueError(f"chunk: {chunk} is not at least 1")
        self.tokenize, self.hidden, self.chunk, self.batch_tokens = tokenize, hidden, chunk, batch_tokens

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return [number of texts, D]."""
        chunks_of_texts = [torch.tensor(self.tokenize(text)).split(self.chunk) for text in texts]
        chunks = [chunk for text_chunks in chunks_of_texts for chunk in text_chunks]
        order = sorted(range(len(chunks)), key=lambda index: len(chunks[index]))
        states: list[Tensor] = [torch.empty(0)] * len(chunks)
        while order:
            # longest first, so that a batch that does not fit into memory fails at once
            count = max(1, self.batch_tokens // len(chunks[order[-1]]))
            batch, order = order[-count:], order[:-count]
            for index, state in zip(batch, self._last_states([chunks[index] for index in batch]), strict=True):
                states[index] = state
        means, start = [], 0
        for text_chunks in chunks_of_texts:
            end = start + len(text_chunks)
            means.append(torch.stack(states[start:end]).mean(0))
            start = end
        return torch.stack(means)

    def _last_states(self, chunks: Sequence[Tensor]) -> Tensor:
        """Return [B, D]."""
        lengths_B = torch.tensor([len(chunk) for chunk in chunks])
        ids_BL = torch.nn.utils.rnn.pad_sequence(list(chunks), batch_first=True)
        mask_BL = (torch.arange(ids_BL.shape[1]) < lengths_B.unsqueeze(1)).long()
        return self.hidden(ids_BL, mask_BL)[torch.arange(len(ids_BL)), lengths_B - 1].float().cpu()


class TextEncoder:
    """Maps texts to vectors, [B, D] float32 on the CPU."""

    def __init__(
        self, path: str, *, chunk: int, device: str = "cpu", tokenizer: str | None = None, trust: bool = False
    ):
        """Load the model at `path`, a local folder or hub name: in bfloat16 on a GPU, in float32 elsewhere. Raises
        UserError if transformers cannot load it, or if `chunk` exceeds its context length."""
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
            raise UserError(f"{WHERE}.chunk={chunk} exceeds the context length of {path} ({longest} tokens); lower it")
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
            torch.cuda.empty_cache()  # so that the policy on this device can have the memory

    def _tokenize(self, text: str) -> list[int]:
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        return ids or [self.tokenizer.eos_token_id or 0]  # the model needs at least one token

    def _hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        output = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device))
        return output.last_hidden_state


class RemoteEncoder:
    """A TextEncoder in a Ray actor on the first device of `pool`, ready once constructed."""

    def __init__(self, pool: Pool, path: str, **options):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices = pool.resources
        group = devices.get_placement_groups(device_name="cuda" if devices.use_gpu else "cpu")[0]
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        # the share of a GPU that verl gives each process; the rest is promised to the policy's
        num_gpus = 1 / devices.max_colocate_count if devices.use_gpu else 0
        actor = ray.remote(TextEncoder).options(num_gpus=num_gpus, num_cpus=1, scheduling_strategy=strategy)
        self._get = ray.get
        self._actor = actor.remote(path, device="cuda" if devices.use_gpu else "cpu", **options)
        self._get(self._actor.encode.remote(["ready"]))  # waits until the model is loaded

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self._get(self._actor.encode.remote(list(texts)))


def start_encoder(pool: Pool, path: str, *, platform: str, **options) -> TextEncoder | RemoteEncoder:
    """Load the encoder in this process on a CPU, and next to the policy of `pool` on GPUs."""
    return TextEncoder(path, **options) if platform == "cpu" else RemoteEncoder(pool, path, **options)
