"""A model of EleutherAI's lm-evaluation-harness around an engine, on either backend."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .engine.fused import FusedEngine
from .engine.scoring import prefix_of
from .engine.tokenizing import ids_of
from .errors import ArgumentError, BackendNotAvailableError, a_type, shown

_MOST = 512  # texts under way at a time


def lm_eval_model(engine: Any, max_gen_toks: int = 256) -> Any:
    """An `lm_eval.api.model.LM` of an engine, for `lm_eval.simple_evaluate(model=...)`.

    It has loglikelihood, loglikelihood_rolling and generate_until. Texts that are longer than the
    model takes lose their beginning, as in the harness's own models; answers have at most
    `max_gen_toks` tokens where a task names no number.
    """
    if not isinstance(engine, FusedEngine):
        raise ArgumentError(
            f"lm_eval_model() got {a_type(engine)}; expected an engine of fused mode."
        )
    try:
        base = importlib.import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise BackendNotAvailableError(
            "lm_eval_model() needs lm-evaluation-harness: `pip install lm-eval`."
        ) from error
    return type("DualinferLM", (_Calls, base), {})(engine, max_gen_toks)


class _Calls:
    """The calls of the harness."""

    def __init__(self, engine: FusedEngine, max_gen_toks: int) -> None:
        super().__init__()
        self._engine, self._most_new = engine, max_gen_toks
        self._most = engine.max_tokens

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness caches requests of chats."""
        return str(getattr(self._engine.tokenizer, "name_or_path", "")).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template of the tokenizer, which tells caches of the harness apart."""
        return str(getattr(self._engine.tokenizer, "chat_template", "") or "")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat."""
        return self._engine.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of each (context, continuation) its log-probability, and whether it is greedy."""
        pairs = [
            self._engine.encode_pair(context, continuation)
            for context, continuation in (one.args for one in requests)
        ]
        kept = [
            (first[max(0, len(first) + len(then) - self._most) :], then) for first, then in pairs
        ]
        scores = self._engine.score(*_columns(kept))
        found = [(one.logprob, one.is_greedy) for one in scores]
        for one, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", one.args, result)  # type: ignore[attr-defined]
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Of each text the log-probability of all of it.

        It is read in windows of what the model takes, each token once, with as much before it as
        there is room for in the last window.
        """
        tokenizer = self._engine.tokenizer
        windows, owners = [], []
        for i, (text,) in enumerate(one.args for one in requests):
            made = _windows(ids_of(tokenizer, text), prefix_of(tokenizer), self._most - 1)
            windows += made
            owners += [i] * len(made)
        sums = [0.0] * len(requests)
        for owner, score in zip(owners, self._engine.score(*_columns(windows)), strict=True):
            sums[owner] += score.logprob
        for one, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", one.args, total)  # type: ignore[attr-defined]
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to one of the strings of `until`, and without it."""

        async def all_of() -> list[str]:
            gate = asyncio.Semaphore(_MOST)

            async def one(context: str, options: Mapping[str, Any]) -> str:
                async with gate:
                    return await self._answer(context, dict(options))

            return list(await asyncio.gather(*(one(*request.args) for request in requests)))

        with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop
            texts = thread.submit(asyncio.run, all_of()).result()
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)  # type: ignore[attr-defined]
        return texts

    async def _answer(self, context: str, options: dict[str, Any]) -> str:
        until = options.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        new = options.pop("max_gen_toks", None) or self._most_new
        drawn = options.pop("do_sample", False) and options.get("temperature", 1.0) != 0
        names = [name for name in ("temperature", "top_p", "top_k") if name in options]
        how: dict[str, Any] = {name: options.pop(name) for name in names}
        how = how if drawn else {}
        if options:
            raise ArgumentError(f"generate_until does not take {shown(next(iter(options)))}.")
        ids = ids_of(self._engine.tokenizer, context)
        if not ids:
            ids = [prefix_of(self._engine.tokenizer)]
        new = min(new, self._most - 1)
        ids = ids[max(0, len(ids) + new - self._most) :]
        handle = self._engine.generate_async(
            ids,
            tokenizer=self._engine.tokenizer,
            max_new_tokens=new,
            do_sample=bool(drawn),
            stop_strings=stops or None,
            **how,
        )
        text = await handle.text()
        return text[: min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))]


def _columns(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[list[Any], list[Any]]:
    return [first for first, _ in pairs], [then for _, then in pairs]


def _windows(ids: list[int], prefix: int, most: int) -> list[tuple[list[int], list[int]]]:
    """The ids read before each window, and its own ids, which together are every id once."""
    found = [([prefix], ids[:most])] if ids else []
    for first in range(most, len(ids), most):
        last = min(first + most, len(ids))
        # The last window begins earlier, so that it is as long as the others.
        found.append((ids[last - most - 1 : first], ids[first:last]))
    return found
