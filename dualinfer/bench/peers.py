"""Other people's systems, run beside ours: HF on torch, eager and compiled; keras-hub on JAX."""

import asyncio
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ..errors import UnsupportedError
from .drive import Clock, Record, Run, drive
from .load import Ask, Load
from .random_weights import make_module
from .shapes import Model


def make_peer(name: str, model: Model, dtype: str, kind: str) -> Any:
    """The peer with the model loaded, or UnsupportedError that says why it cannot run."""
    if name == "hf-eager":
        return HfEager(model, dtype)
    if name == "hf-compile":
        return HfCompiled(model, dtype, kind)
    if name == "hf":
        return HfBatching(model, dtype)
    if name == "keras-hub":
        return KerasHub(model, dtype, kind)
    raise UnsupportedError(
        "--peer flax: transformers has had no Flax models since version 5, which dualinfer needs. "
        "Use --peer keras-hub."
    )


_BATCH = 32  # texts, as sentence-transformers takes them


class HfEager:
    """HF's own module and its own generate."""

    def __init__(self, model: Model, dtype: str) -> None:
        import torch
        from transformers import GenerationConfig

        self._place = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: Any = make_module(model, dtype, self._place)
        if self._module.can_generate():
            self._module.generation_config = GenerationConfig()  # no EOS, whatever the folder says

    def _put(self, ids: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(ids).to(self._place)

    def _generate(self, ids: np.ndarray, new_tokens: int, **options: Any) -> int:
        import torch

        tensor = self._put(ids)
        result = self._module.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return result.cpu().shape[1]

    def generate(self, ids: np.ndarray, new_tokens: int) -> int:
        """HF's generate with its dynamic cache."""
        return self._generate(ids, new_tokens)

    def prefill(self, ids: np.ndarray) -> None:
        """HF's generate of one token."""
        self._generate(ids, 1)

    def _forward(self) -> Callable[[Any], Any]:
        return self._module

    def forward(self, ids: np.ndarray) -> Callable[[], Any]:
        """One pass of the module."""
        import torch

        tensor, module = self._put(ids), self._forward()

        def run() -> Any:
            with torch.no_grad():
                outputs = module(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            return outputs

        return run

    def _embedder(self) -> Callable[..., Any]:
        """The module without its head."""
        return self._module.base_model

    def embed(self, texts: list[list[int]]) -> Callable[[], Any]:
        """As sentence-transformers: texts by length, padded in batches of 32, mean pooling."""
        import torch

        texts = sorted(texts, key=len, reverse=True)
        batches = []
        for first in range(0, len(texts), _BATCH):
            part = texts[first : first + _BATCH]
            ids = np.zeros((len(part), len(part[0])), np.int64)
            for row, text in zip(ids, part, strict=True):
                row[: len(text)] = text
            lengths = np.array([[len(text)] for text in part])
            batches.append((ids, (np.arange(ids.shape[1]) < lengths).astype(np.int64)))
        module = self._embedder()

        def run() -> Any:
            vectors = []
            with torch.no_grad():
                for ids, mask in batches:
                    seen = self._put(mask)
                    out = module(self._put(ids), attention_mask=seen)
                    last = out.last_hidden_state * seen[..., None]
                    vectors.append(last.sum(1).float() / seen.sum(1, keepdim=True))
            return torch.cat(vectors).cpu()

        return run

    def answer(self, loads: list[Load], vocab: int, most: int | None, over_http: bool) -> list[Run]:
        """Refused by the command: that is the peer hf."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """The attention that HF chose, and the bytes in which it holds the weights."""
        return {
            "attention": self._module.config._attn_implementation,
            "parameter_bytes": self._module.get_memory_footprint(),
        }

    def close(self) -> None:
        """Drop the module."""
        self._module = None


_FLASH = "flash_attn_interface", "flash_attn_3", "flash_attn"  # packages that HF looks for
_STOPPING = 60.0  # seconds that its thread has for the step that it is at


class HfBatching(HfEager):
    """HF's continuous batching, with the settings that it takes by itself.

    Without flash attention a step's attention is one product over all its sequences' keys behind a
    mask, so that 256 sequences cost 256 times what they need; there a step has `_FEW` of them.
    """

    _FEW: ClassVar[dict[str, Any]] = {"max_requests_per_batch": 32, "max_batch_tokens": 2048}

    def _settings(self) -> dict[str, Any]:
        """The fields of its config that are not its own choice."""
        if any(importlib.util.find_spec(name) for name in _FLASH):
            return {}
        from transformers import ContinuousBatchingConfig

        how = dict(self._FEW)
        if hasattr(ContinuousBatchingConfig, "auto_switch_to_flash"):  # nor is a kernel fetched
            how["auto_switch_to_flash"] = False
        return how if self._place == "cuda" else how | {"max_memory_percent": 0.05}  # of the host's

    def answer(self, loads: list[Load], vocab: int, most: int | None, over_http: bool) -> list[Run]:
        """Each request by `add_request`, streamed; no server."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        before = self._module.config._attn_implementation
        manager = self._module.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**self._settings()),
        )
        manager.start()
        try:
            return asyncio.run(self._answer(manager, loads, vocab, most))
        finally:
            if self._module.config._attn_implementation != before:
                self._module.set_attn_implementation(before)

    async def _answer(
        self, manager: Any, loads: list[Load], vocab: int, most: int | None
    ) -> list[Run]:
        count = 0

        async def send(ask: Ask, record: Record, clock: Clock) -> None:
            nonlocal count
            count += 1
            name, ended = f"bench-{count}", asyncio.get_running_loop().create_future()

            def note(result: Any) -> None:
                if (made := len(result.generated_tokens)) > record.output:
                    record.stamps.append(clock())
                    record.output = made
                if result.is_finished() and not ended.done():
                    ended.set_result(result.error)

            manager.register_result_handler(name, note)
            manager.add_request(
                ask.ids,
                request_id=name,
                max_new_tokens=ask.new_tokens,
                streaming=True,
                eos_token_id=-1,
            )
            try:
                while not ended.done():
                    await asyncio.wait([ended], timeout=5)
                    if not ended.done() and not manager.is_running():
                        raise RuntimeError("HF's generation thread has ended.")
            finally:
                if not ended.done():
                    manager.cancel_request(name)
            if (error := ended.result()) is not None:
                raise RuntimeError(str(error))

        try:
            return [await drive(load, load.asks(vocab, most), send) for load in loads]
        finally:  # while the loop is there that it tells of what it gives up
            self._attention = self._module.config._attn_implementation
            stop = functools.partial(manager.stop, timeout=_STOPPING, hard_stop=True)
            await asyncio.to_thread(stop)

    def facts(self) -> dict[str, Any]:
        """Likewise, of the attention that served, and what was set."""
        return super().facts() | {"attention": self._attention, "settings": self._settings()}


class HfCompiled(HfEager):
    """HF as its documentation makes it fast: a static cache, and torch.compile with CUDA graphs.

    With a static cache HF's generate compiles the decode step by itself, `reduce-overhead`; the
    cache is the same in every call, reset, so that its addresses stay. HF leaves the prefill eager;
    for the workloads prefill and forward the whole pass is compiled.
    """

    def __init__(self, model: Model, dtype: str, kind: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError(
                "--peer hf-compile needs a CUDA device: HF's generate compiles on no CPU. Use "
                "--peer hf-eager."
            )
        super().__init__(model, dtype)
        self._kind = kind
        self._shape: tuple[int, ...] | None = None
        self._cache: Any = None
        self._compiled: Any = None

    def _begin(self, ids: np.ndarray) -> bool:
        """True for ids of another shape: compiled afresh, not as the old code's dynamic sizes."""
        import torch

        if ids.shape == self._shape:
            return False
        self._shape, self._cache = ids.shape, None
        torch.compiler.reset()
        return True

    def generate(self, ids: np.ndarray, new_tokens: int) -> int:
        """HF's generate with a static cache; the first call for ids sets the cache's length."""
        from transformers import StaticCache

        if self._begin(ids):
            length = ids.shape[1] + new_tokens
            self._cache = StaticCache(config=self._module.config, max_cache_len=length)
        self._cache.reset()
        return self._generate(ids, new_tokens, past_key_values=self._cache)

    def prefill(self, ids: np.ndarray) -> None:
        """A compiled pass whose head serves the last token only; no cache is filled."""
        if self._kind != "prefill":
            self.generate(ids, 1)
            return
        import torch

        self._begin(ids)
        with torch.no_grad():
            out = self._forward()(self._put(ids), use_cache=False, logits_to_keep=1)
            out.logits[:, -1].argmax(-1).cpu()

    def _forward(self) -> Callable[..., Any]:
        import torch

        if self._compiled is None:
            self._compiled = torch.compile(self._module, mode="reduce-overhead")
        return self._compiled

    def _embedder(self) -> Callable[..., Any]:
        """Compiled once for all sizes, since batches of texts differ in length."""
        import torch

        if self._compiled is None:
            self._compiled = torch.compile(super()._embedder(), dynamic=True)
        return self._compiled

    def forward(self, ids: np.ndarray) -> Callable[[], Any]:
        """One compiled pass."""
        self._begin(ids)
        return super().forward(ids)

    def close(self) -> None:
        """Drop the module, its cache, and what was compiled for it."""
        import torch

        super().close()
        self._cache = self._compiled = None
        torch.compiler.reset()


class KerasHub:
    """keras-hub's causal model on Keras' JAX backend; generate with its own samplers, greedy."""

    def __init__(self, model: Model, dtype: str, kind: str) -> None:
        missing = [p for p in ("keras", "keras_hub") if importlib.util.find_spec(p) is None]
        if missing:
            raise UnsupportedError(
                f"--peer keras-hub needs {' and '.join(missing)}, not installed here. Install "
                "keras-hub, or leave the peer out."
            )
        if kind in ("forward", "embed") or model.folder is not None:
            raise UnsupportedError(
                "--peer keras-hub generates with random weights only: use decode or prefill, and a "
                "--shape."
            )
        if os.environ.setdefault("KERAS_BACKEND", "jax") != "jax":
            raise UnsupportedError(
                f"--peer keras-hub: KERAS_BACKEND={os.environ['KERAS_BACKEND']!r}. Set it to jax."
            )
        keras, hub = importlib.import_module("keras"), importlib.import_module("keras_hub")
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(dtype)
        try:
            if model.config.model_type == "llama":
                self._model: Any = hub.models.LlamaCausalLM(
                    preprocessor=None, backbone=_llama_backbone(hub, model.config, dtype)
                )
            elif model.config.model_type == "gpt2":
                self._model = hub.models.GPT2CausalLM(
                    preprocessor=None, backbone=_gpt2_backbone(hub, model.config, dtype)
                )
            else:
                raise UnsupportedError(
                    f"--peer keras-hub runs llama and gpt2 shapes here; {model.name} is "
                    f"{model.config.model_type}."
                )
        finally:
            keras.config.set_dtype_policy(before)
        self._model.compile(sampler="greedy")

    def generate(self, ids: np.ndarray, new_tokens: int) -> int:
        """Generate over a buffer of the whole length; the padding mask tells what is prompt."""
        batch, prompt = ids.shape
        tokens = np.zeros((batch, prompt + new_tokens), np.int32)
        tokens[:, :prompt] = ids
        mask = np.zeros(tokens.shape, bool)
        mask[:, :prompt] = True
        inputs = {"token_ids": tokens, "padding_mask": mask}
        result = self._model.generate(inputs, stop_token_ids=None)
        return np.asarray(result["token_ids"]).shape[1]

    def prefill(self, ids: np.ndarray) -> None:
        """Generate of one token."""
        self.generate(ids, 1)

    def forward(self, ids: np.ndarray) -> Callable[[], Any]:
        """Refused when the peer is made."""
        raise NotImplementedError

    def embed(self, texts: list[list[int]]) -> Callable[[], Any]:
        """Likewise."""
        raise NotImplementedError

    def answer(self, loads: list[Load], vocab: int, most: int | None, over_http: bool) -> list[Run]:
        """Likewise."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """The package's version."""
        return {"keras_hub": importlib.import_module("keras_hub").__version__}

    def close(self) -> None:
        """Drop the model."""
        self._model = None


def _llama_backbone(hub: Any, config: Any, dtype: str) -> Any:
    if config.tie_word_embeddings:
        raise UnsupportedError(
            "--peer keras-hub: its Llama has a head of its own; this shape none."
        )
    return hub.models.LlamaBackbone(
        vocabulary_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        hidden_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        num_key_value_heads=config.num_key_value_heads,
        rope_max_wavelength=config.rope_parameters["rope_theta"],
        layer_norm_epsilon=config.rms_norm_eps,
        dtype=dtype,
    )


def _gpt2_backbone(hub: Any, config: Any, dtype: str) -> Any:
    return hub.models.GPT2Backbone(
        vocabulary_size=config.vocab_size,
        num_layers=config.n_layer,
        num_heads=config.n_head,
        hidden_dim=config.n_embd,
        intermediate_dim=4 * config.n_embd,
        max_sequence_length=config.n_positions,
        dtype=dtype,
    )
