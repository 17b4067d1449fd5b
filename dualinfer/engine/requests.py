"""The requests of a call of generate: one for each sequence, and what the host does with logits."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Kind, kind_of, to_kind, to_numpy
from ..backends.base import NO_TOKEN, Grammar, Request, Sampling
from ..errors import ArgumentError, shown
from ..model.spec import ModelSpec
from .options import GenerationOptions
from .prompts import Prompts

_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_HIDDEN = ("suppress_tokens", "begin_suppress_tokens")


def make_requests(
    spec: ModelSpec,
    prompts: Prompts,
    source: Prompts | None,
    is_encoded: bool,
    options: GenerationOptions,
    new_tokens: int,
    least_tokens: int,
    seeds: Sequence[int],
    grammar: Grammar | None = None,
) -> tuple[list[Request], list[str]]:
    """A request for each sequence, and the names of the options that the host must serve.

    `source` is what an encoder reads, or gave before where it `is_encoded`. A `grammar` counts the
    least tokens itself, and knows what is hidden.
    """
    names, fields = _served(spec, prompts, options, new_tokens)
    sources = source.rows if source else [None] * len(seeds)
    requests = [
        Request(
            tokens=row,
            max_new_tokens=new_tokens,
            min_new_tokens=0 if grammar is not None else least_tokens,
            eos_ids=options.eos_token_ids,
            sampling=Sampling(
                options.do_sample,
                options.temperature,
                options.top_k,
                options.top_p,
                options.min_p,
                options.repetition_penalty,
                row_seed,
                index,
                options.presence_penalty,
                options.frequency_penalty,
                options.bias,
            ),
            embeds=vectors,
            source=read,
            is_encoded=is_encoded,
            encoded=_encoded(spec, read, is_encoded),
            tells=options.logprobs is not None,
            grammar=grammar,
            **fields,
        )
        for row, vectors, read, row_seed in zip(
            prompts.rows, prompts.embeds or [None] * len(seeds), sources, seeds, strict=True
        )
        for index in range(options.num_return_sequences)
    ]
    return requests, names


def _served(
    spec: ModelSpec, prompts: Prompts, options: GenerationOptions, new_tokens: int
) -> tuple[list[str], dict[str, Any]]:
    """The names of the options that the host must serve, and the fields that do others' work.

    Tokens that are forced or hidden the host need not choose by the logits of each step.
    """
    names = options.stepwise
    if prompts.block.shape[1] > 1:  # HF forces the second token alone
        names = [name for name in names if name != "forced_bos_token_id"]
    if not {*names} <= {*_FORCED, *_HIDDEN} or (new_tokens <= 1 and _FORCED[0] in names):
        return names, {}
    if options.logprobs is not None and {*names} & {*_FORCED}:  # which no step chooses
        return names, {}
    first, last = (options.forced(name) if name in names else None for name in _FORCED)
    hidden = [options.hidden(name, spec.vocab) if name in names else () for name in _HIDDEN]
    if first in options.eos_token_ids or NO_TOKEN in (first, last, *sum(hidden, ())):
        return names, {}
    if first is not None and prompts.embeds is not None:  # which have no row for that token
        return names, {}
    return [], {"first": first, "last": last, "hidden": hidden[0], "hidden_at_first": hidden[1]}


def make_seeds(seed: Any, prompts: int) -> list[int]:
    """The caller's seed of each prompt; 0 where they are yet to be drawn, or of no use."""
    if seed is None:
        return [0] * prompts
    if kind_of(seed) == "jax" and not str(seed.dtype).startswith("int"):
        raise ArgumentError(
            f"seed is a JAX array of {seed.dtype}, as keys are; expected an int, or one for "
            "each prompt."
        )
    if kind_of(seed) not in (None, "list"):
        seed = to_numpy(seed).tolist()
    seeds = list(seed) if isinstance(seed, Iterable) else [seed] * prompts
    if len(seeds) != prompts:
        raise ArgumentError(f"seed has {len(seeds)} values for {prompts} prompts.")
    for value in seeds:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ArgumentError(f"seed={shown(value)}; expected an int.")
        if not 0 <= value.__index__() < 2**64:
            raise ArgumentError(f"seed={shown(value)}; expected an int from 0 to 2**64 - 1.")
    return [value.__index__() for value in seeds]


def _encoded(spec: ModelSpec, source: np.ndarray | None, is_encoded: bool) -> int:
    """Places of what an encoder gives of `source`, or gave before."""
    if source is None or spec.encoder is None:
        return 0
    return len(source) // (1 if is_encoded else spec.encoder.stride)


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the likeliest ids of its step with theirs.

    They are by the model's own logits, before anything changes them.
    """

    logprob: float
    top: list[tuple[int, float]]


def told_of(told: np.ndarray, most: int) -> TokenLogprobs:
    """Read what `sampling.tell` says of one token, with `most` likeliest ids."""
    of_all = (len(told) - 1) // 2
    most = min(most, of_all)
    ids = told[1 + of_all : 1 + of_all + most].astype(np.int64).tolist()
    return TokenLogprobs(float(told[0]), list(zip(ids, told[1 : 1 + most].tolist(), strict=True)))


def told_fields(
    told: Sequence[Sequence[np.ndarray]], count: int, most: int, kind: Kind
) -> dict[str, Any]:
    """The fields `logprobs`, `top_logprobs` and `top_ids` of HF's output, arrays of a kind.

    `told` is what `sampling.tell` says of the tokens of each sequence, of which the longest has
    `count`; of each step `most` likeliest tokens are told, or all of a smaller vocabulary.
    """
    width = max((len(one) for row in told for one in row[:1]), default=1)
    whole = np.zeros((len(told), count, width), np.float32)
    of_all = (width - 1) // 2
    whole[..., 1 + of_all :] = NO_TOKEN
    for i, row in enumerate(told):
        whole[i, : len(row)] = np.stack(row) if row else 0
    most = min(most, of_all)
    fields = {
        "logprobs": whole[..., 0],
        "top_logprobs": whole[..., 1 : 1 + most],
        "top_ids": whole[..., 1 + of_all : 1 + of_all + most].astype(np.int32),
    }
    return {name: to_kind(np.ascontiguousarray(x), kind) for name, x in fields.items()}
