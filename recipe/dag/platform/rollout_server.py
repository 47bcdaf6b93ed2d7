"""The CPU rollout server: the interface of verl's SGLang server, over `generator.Generator`.

Invariant: a weight update happens between two forwards and is complete, and every output has the version of the weights
that sampled all of its tokens. New weights of the model abort the requests in flight, as in SGLang; a request of an
adapter ends on the version with which it began. A request whose parameters cannot be sampled with fails alone.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipe.dag.platform.generator import Generator, Request

if TYPE_CHECKING:
    from verl.workers.rollout.replica import TokenOutput

    from recipe.dag.platform.adapter_weights import Pairs
    from recipe.dag.workflow.adapter_shape import AdapterShape

SAMPLING: dict[str, Callable[[Any], Any]] = {"top_k": int} | dict.fromkeys(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), float
)
"""Parameters of a request by their types; Request has their defaults."""
Settle = Callable[..., None]
"""`settle(result)` or `settle(error=...)` completes the future of one caller, from any thread."""


class RolloutServer:
    """Runs as a Ray actor, with one generation thread that owns the generator."""

    def __init__(
        self,
        model_path: str,
        *,
        max_requests: int,
        max_len: int,
        load_format: str,
        trust_remote_code: bool,
        tokenizer_path: str | None = None,
    ):
        """Load the model and start the generation thread.

        `model_path` has the architecture and, unless `load_format` is "dummy", the weights. The tokenizer
        (`tokenizer_path`, by default the model's) is loaded by the first request with stop strings.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        kwargs = {"attn_implementation": "sdpa", "trust_remote_code": trust_remote_code}
        if load_format == "dummy":
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kwargs)
        else:
            model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, **kwargs)
        try:
            eos = GenerationConfig.from_pretrained(model_path).eos_token_id
        except OSError:
            eos = model.config.eos_token_id
        self.stop_token_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.generator = Generator(model, max_requests=max_requests, max_len=max_len)
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self.max_len = max_len
        self.tokenizer_source = {
            "pretrained_model_name_or_path": tokenizer_path or model_path,
            "trust_remote_code": trust_remote_code,
        }
        self.tokenizer: Any = None
        self.version = 0
        self.adapters: dict[str, str] = {}
        """Adapter -> the name of its last version in the generator."""
        self.waiting: list[Request] = []
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.failure: BaseException | None = None
        threading.Thread(target=self._serve, daemon=True, name="generation").start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data=None,
        video_data=None,
        adapter: str | None = None,
    ) -> TokenOutput:
        """Sample a response with the last version of `adapter`, or with the model alone. With verl's `prompt_logprobs`,
        sample none, but return the log-probs of the prompt itself."""
        if adapter is not None and adapter not in self.adapters:
            raise ValueError(f"adapter {adapter} has not been loaded; there are {', '.join(self.adapters) or 'none'}")
        vocabulary = self.vocabulary
        if not prompt_ids or not 0 <= min(prompt_ids) <= max(prompt_ids) < vocabulary:
            raise ValueError(f"prompt of {len(prompt_ids)} token ids: at least one is needed, all in [0, {vocabulary})")
        budget = self.max_len - len(prompt_ids) - 1
        if budget < 0:
            raise ValueError(f"prompt of {len(prompt_ids)} tokens exceeds the context length ({self.max_len})")
        max_tokens = sampling_params.get("max_new_tokens", sampling_params.get("max_tokens", budget))
        ignore_eos = sampling_params.get("ignore_eos", False)
        seed = sampling_params.get("seed")
        request = Request(
            prompt_ids=list(prompt_ids),
            max_tokens=max(0, min(int(max_tokens), budget)),
            **{name: kind(sampling_params[name]) for name, kind in SAMPLING.items() if name in sampling_params},
            stopped=self._stop_test(sampling_params.get("stop")),
            stop_token_ids=frozenset()
            if ignore_eos
            else self.stop_token_ids | frozenset(sampling_params.get("stop_token_ids") or ()),
            seed=int.from_bytes(os.urandom(8)) if seed is None else int(seed) % 2**64,
            adapter=self.adapters[adapter] if adapter is not None else None,
        )
        if sampling_params.get("prompt_logprobs") is not None:
            return await self._post(lambda settle: settle(self._scored(request)))
        if request.max_tokens == 0:
            return self._output(request, "length", self._version_of(request))
        try:
            return await self._post(lambda future: self._enqueue(request, adapter, future))
        except asyncio.CancelledError:  # the caller has gone; its row is free for another request
            self.inbox.put((lambda settle: self._give_up(request), lambda *_, **__: None))
            raise

    def _stop_test(self, stop: str | list[str] | None) -> Callable[[list[int]], bool] | None:
        """Return the test for stop strings in a response; None if there are none.

        Only the end of the response is decoded: a string has at most as many tokens as bytes, and a character may be
        split over the tokens before it.
        """
        strings = [stop] if isinstance(stop, str) else list(stop or ())
        if not strings:
            return None
        if self.tokenizer is None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(**self.tokenizer_source)
        tail = max(len(string.encode()) for string in strings) + 4

        def stopped(ids: list[int]) -> bool:
            text = self.tokenizer.decode(ids[-tail:], skip_special_tokens=False)
            return any(string in text for string in strings)

        return stopped

    async def load_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Replace all weights in place. Raises ValueError if a parameter is missing, unknown or of another shape."""
        await self._post(lambda future: self._load(weights, version, future))

    async def load_weights_from(self, folder: str, version: int) -> None:
        """Do the same with the safetensors files of a folder."""
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        await self.load_weights(weights, version)

    async def load_adapter(self, name: str, version: int, folder: str) -> None:
        """Generate requests of adapter `name` that arrive from now on with the weights in a PEFT folder, which may be
        removed afterwards. Raises UserError."""
        adapter = self.generator.adapters.read(Path(folder))
        await self._post(lambda settle: self._add_adapter(name, version, adapter, settle))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._post(self._abort)

    async def set_global_steps(self, global_steps: int) -> None:
        self.version = global_steps

    async def sleep(self) -> None:
        """Abort the requests in flight, as on a GPU; on a CPU there is no memory to free."""
        await self.abort_all_requests()

    async def wake_up(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_profile(self, **kwargs) -> None: ...

    async def stop_profile(self) -> None: ...

    async def _post(self, command: Callable[[Settle], None]) -> Any:
        """Run `command` in the generation thread between two forwards, and wait until it settles the result."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle(result: Any = None, error: BaseException | None = None) -> None:
            def deliver() -> None:
                if not future.done():
                    future.set_result(result) if error is None else future.set_exception(error)

            loop.call_soon_threadsafe(deliver)

        self.inbox.put((command, settle))
        # checked after the put: a thread that fails later still settles every command in the inbox
        if self.failure is not None:
            raise RuntimeError(f"the generation thread failed: {self.failure}") from self.failure
        return await future

    def _enqueue(self, request: Request, adapter: str | None, settle: Settle) -> None:
        request.handle = settle
        if adapter is not None:  # again: a version may have replaced the one of a moment ago
            request.adapter = self.adapters[adapter]
        self.waiting.append(request)

    def _give_up(self, request: Request) -> None:
        """Stop generating for a request, which may have finished by now."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.generator.active:
            self.generator.drop(request)

    def _load(self, weights: dict[str, torch.Tensor], version: int, settle: Settle) -> None:
        self._drop_requests()
        model = self.generator.model
        parameters = dict(model.named_parameters())
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        missing, unknown = parameters.keys() - weights.keys(), weights.keys() - parameters.keys() - tied
        if missing or unknown:
            raise ValueError(f"weight update: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
        reshaped = [name for name, parameter in parameters.items() if weights[name].shape != parameter.shape]
        if reshaped:
            raise ValueError(f"weight update: {sorted(reshaped)[:3]} differ in shape")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        self.version = version
        settle()

    def _add_adapter(self, name: str, version: int, adapter: tuple[AdapterShape, Pairs], settle: Settle) -> None:
        self.adapters[name] = f"{name}@{version}"
        self.generator.adapters.add(self.adapters[name], adapter)
        in_flight = (request.adapter for request in (*self.waiting, *self.generator.active))
        self.generator.adapters.keep({*self.adapters.values(), *(used for used in in_flight if used is not None)})
        settle()

    def _abort(self, settle: Settle) -> None:
        self._drop_requests()
        settle()

    def _drop_requests(self) -> None:
        dropped, self.waiting = self.generator.drop_all() + self.waiting, []
        for request in dropped:
            request.handle(self._output(request, "abort", self._version_of(request)))

    def _drain(self, *, block: bool) -> None:
        while block or not self.inbox.empty():
            command, settle = self.inbox.get()
            block = False
            try:
                command(settle)
            except Exception as error:
                settle(error=error)

    def _serve(self) -> None:
        try:
            while True:
                self._drain(block=not (self.waiting or self.generator.active))
                room = self.generator.room
                if self.waiting and room:
                    finished = self.generator.add(self.waiting[:room])
                    self.waiting = self.waiting[room:]  # only now: if `add` fails, these callers get the error, too
                    self._answer(finished)
                if self.generator.active:
                    self._answer(self.generator.step())
        except BaseException as error:
            self.failure = error
            callers = [request.handle for request in self.generator.drop_all() + self.waiting]
            while not self.inbox.empty():
                callers.append(self.inbox.get()[1])
            for settle in callers:
                settle(error=RuntimeError(f"generation failed: {error}"))
            raise

    def _answer(self, finished: list[Request]) -> None:
        for request in finished:
            if request.failure is not None:
                request.handle(error=ValueError(f"no token can be sampled with these parameters: {request.failure}"))
            else:
                request.handle(self._output(request, request.stop_reason, self._version_of(request)))

    def _version_of(self, request: Request) -> int:
        return self.version if request.adapter is None else int(request.adapter.rpartition("@")[2])

    def _scored(self, request: Request) -> TokenOutput:
        """Return the log-probs of the prompt in verl's form [tokens, 1], which ends with a row without meaning."""
        output = self._output(request, "length", self._version_of(request))
        rows = [[value] for value in self.generator.score(request.prompt_ids, request.adapter)]
        output.extra_fields["prompt_logprobs"] = [*rows, [0.0]]
        return output

    @staticmethod
    def _output(request: Request, stop_reason: str, version: int) -> TokenOutput:
        # here, because verl takes seconds to load and a subclass may answer in another form
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(
            token_ids=request.response_ids,
            log_probs=request.log_probs,
            stop_reason=stop_reason,
            extra_fields={"global_steps": version},
        )
