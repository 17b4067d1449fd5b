"""Cases to measure, as a model's steps ask the kernels: its own weights, real shapes."""

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from .... import decoder
from ....kernels.triton import attention, attention_choice, decode_attention, latent, tuning
from ....kernels.triton.tuning import Config, Key
from ....model.spec import ModelSpec
from ....model.weights import count_leaves, parts_of, with_parts
from ....ops import cache_codes
from ....ops.cache_kinds import FullCache, LatentCache, over
from ....ops.contract import Epilogue, LatentQkv, LayerAttention, Routing, Tokens
from ...kernels import has_wide_heads
from ...slots import bucket
from ..cache import KINDS, size_of
from ..device import free_bytes
from ..maths import MATHS
from ..ops.kernels import KernelOps
from ..params import Params
from .recorder import ExpertsCall, ProductCall, Recorder, RouterCall

DECODE_ROWS = (1, 2, 4, 8, 16, 32)
FORWARD_ROWS = (1, 16, 32, 64, 128)  # of models that only run whole sequences
REACHES = (256, 512, 1024, 2048, 4096)
PROMPTS = (128, 512, 2048)
_L2_TIMES = 4  # so much more than the L2 cache holds is read between two readings of a tensor
_MOST_CACHE = 1 << 29  # bytes of a layer: above, reading them is all that counts
_PROMPT_CALLS = 4
_EXPERTS_CALLS = 8

Run: TypeAlias = Callable[[Any], torch.Tensor]
Prepare: TypeAlias = Callable[[], tuple[Run, int]]
Call = TypeVar("Call")


class TuningCase(NamedTuple):
    """A key to measure: `prepare` makes the tensors, and a function that does `calls` with them.

    That function gives the first call's result. The first of the candidates is the default.
    """

    key: Key
    candidates: Sequence[Config]
    prepare: Prepare


_Weighed = TypeVar("_Weighed", ProductCall, RouterCall)


def tuning_cases(
    spec: ModelSpec,
    params: Params,
    ops: KernelOps,
    rows: Iterable[int] = (),
    reaches: Iterable[int] = REACHES,
    prompts: Iterable[int] = PROMPTS,
    cache_codes: str | None = None,
) -> list[TuningCase]:
    """Tuning cases of a model's steps with so many rows (by default the likely ones).

    One row comes first, and what matters less later: the time may not last.
    """
    cases: dict[Key, TuningCase] = {}
    attending = [i for i, layer in enumerate(spec.layers) if layer.attention]
    layers = [ops.layer_attention(spec, params, i) for i in attending]
    layers = [layer for layer in layers if not has_wide_heads(layer.spec.head_dim)]
    most = spec.most_tokens(None) - 1  # of a prompt, and in the cache
    reaches = sorted({min(reach, bucket(most)) for reach in reaches})
    for count in rows or (DECODE_ROWS if spec.causal else FORWARD_ROWS):
        for case in _steps(spec, params, ops, count):
            cases.setdefault(case.key, case)
        if spec.causal:
            for case in _decodes(layers, ops, params, count, reaches, cache_codes):
                cases.setdefault(case.key, case)
    for tokens in sorted({min(tokens, most) for tokens in prompts}):
        of_experts = _steps(spec, params, ops, tokens, whole=False)
        for case in (*_prompts(layers, ops, params, tokens), *of_experts):
            cases.setdefault(case.key, case)
    return list(cases.values())


def _steps(
    spec: ModelSpec, params: Params, ops: KernelOps, rows: int, whole: bool = True
) -> list[TuningCase]:
    """Tuning cases of a step with `rows` rows: products with few rows, routers and experts.

    Those of a shape are together. Unless it is the `whole`, only routers and experts are there.
    """
    recorder = Recorder(ops)
    ids = torch.zeros((rows, 1), dtype=torch.int64, device=ops.device)

    def attend(i: int, qkv: torch.Tensor | LatentQkv) -> torch.Tensor:
        a = spec.layers[i].attending
        if isinstance(qkv, LatentQkv):
            return qkv.queries.new_zeros((rows, 1, a.qkv_sizes[2]))
        return qkv[..., : a.widened.qkv_sizes[0]].contiguous()

    def recur(i: int, x: torch.Tensor) -> torch.Tensor:
        own = spec.layers[i].recurrence
        assert own is not None
        return x[..., : own.width].contiguous()

    if not whole and not any(layer.experts for layer in spec.layers):
        return []
    with torch.inference_mode():
        mixers = decoder.Mixers(attend, lambda i, q: q, recur)
        x = decoder.hidden_states(spec, params, recorder, Tokens(ids, ids), mixers)[-1]
        if spec.head is not None and whole:
            decoder.logits(spec, params, recorder, x[:, 0], wide=spec.causal)
    total = count_leaves(params.leaves())["parameter_bytes"]
    makers: dict[Key, Prepare] = {}
    for key, group in (recorder.products if whole else {}).items():
        makers[key] = _product_maker(ops, group, rows, total)
    for key, group in recorder.routers.items():
        makers[key] = _router_maker(ops, group, rows, total)
    for key, group in recorder.mixtures.items():
        makers[key] = _experts_maker(ops, group, rows)
    return [
        TuningCase(key, tuning.candidates(key, ops.sms), maker) for key, maker in makers.items()
    ]


def _product_maker(ops: KernelOps, group: list[ProductCall], rows: int, total: int) -> Prepare:
    def prepare() -> tuple[Run, int]:
        products = _beyond(ops, group, total)
        features, width = group[0].weight.shape
        like = torch.empty(0, dtype=group[0].weight.dtype, device=ops.device)
        x = _random(like, rows, width)
        residual = _random(like, rows, features // (2 if group[0].epilogue.gated else 1))

        def product(own: ProductCall, config: Any) -> torch.Tensor:
            return ops.linear(x, own.weight, _adding(own.epilogue, residual), config)

        return _in_turn(products, product)

    return prepare


def _adding(epilogue: Epilogue, residual: torch.Tensor) -> Epilogue:
    """The epilogue with another residual, where it has one."""
    return epilogue if epilogue.residual is None else epilogue._replace(residual=residual)


def _in_turn(calls: Sequence[Call], call: Callable[[Call, Any], torch.Tensor]) -> tuple[Run, int]:
    """The result of a `Prepare` that makes calls one after another."""

    def run(config: Any) -> torch.Tensor:
        first, *others = calls
        y = call(first, config)
        for other in others:
            call(other, config)
        return y

    return run, len(calls)


def _beyond(ops: KernelOps, group: list[_Weighed], total: int) -> list[_Weighed]:
    """Calls of one shape, and copies, so that weights come from memory as in a step.

    `total` are the bytes that the model has.
    """
    needed = min(_beyond_cache(ops.device), total)
    sizes = [count_leaves([own.weight])["parameter_bytes"] for own in group]
    extra = max(0, -(-(needed - sum(sizes)) // sizes[0]))
    extra = min(extra, (free_bytes(ops.device) or 0) // 2 // sizes[0])
    found = list(group)
    for own in islice(cycle(group), extra):
        copies = {part: array.clone() for part, array in parts_of(own.weight).items()}
        found.append(own._replace(weight=with_parts(own.weight, copies)))
    return found


def _router_maker(ops: KernelOps, group: list[RouterCall], rows: int, total: int) -> Prepare:
    def prepare() -> tuple[Run, int]:
        routers = _beyond(ops, group, total)
        like = torch.empty(0, dtype=group[0].weight.dtype, device=ops.device)
        x = _random(like, rows, group[0].weight.shape[1])

        def route(own: RouterCall, config: Any) -> torch.Tensor:
            return ops.route(x, own.weight, own.router, **own.beside, config=config).weights

        return _in_turn(routers, route)

    return prepare


def _experts_maker(ops: KernelOps, group: list[ExpertsCall], rows: int) -> Prepare:
    """Calls of layers in turn, for other experts each time, so that weights come from memory."""

    def prepare() -> tuple[Run, int]:
        held, chosen, _, like = group[0]
        x, residual = _random(like, *like.shape), _random(like, *like.shape)
        calls = list(islice(cycle(group), _EXPERTS_CALLS if rows < 128 else _PROMPT_CALLS))
        how: dict[str, Any] = {
            "generator": torch.Generator(ops.device).manual_seed(0),
            "device": ops.device,
        }
        routings = []
        for i in range(len(calls)):
            order = torch.rand((*like.shape[:-1], held.choices), **how).argsort(-1)
            if rows == 1:
                order = (torch.arange(held.choices, device=ops.device) + i * chosen).expand_as(
                    order
                )
            picks = (order % held.choices)[..., :chosen].sort(-1)[0].int().contiguous()
            weights = torch.rand(picks.shape, **how)
            routings.append(Routing(picks, weights / weights.sum(-1, keepdim=True)))

        def mix(own: tuple[ExpertsCall, Routing], config: Any) -> torch.Tensor:
            (held, _, epilogue, _), routing = own
            return ops.own_part(x, held, routing, _adding(epilogue, residual), config=config)

        return _in_turn(list(zip(calls, routings, strict=True)), mix)

    return prepare


def _decodes(
    layers: list[LayerAttention],
    ops: KernelOps,
    params: Params,
    slots: int,
    reaches: Sequence[int],
    codes: str | None,
) -> Iterable[TuningCase]:
    """Attention of one token of `slots` sequences, by kind of layer and length."""
    like = torch.empty(0, dtype=params.outer["embed.weight"].dtype, device=ops.device)
    if codes is not None and codes not in ops.cache_codes:
        return
    itemsize = 1 if codes else like.element_size()
    for reach in reaches:
        for layer in layers:
            a = layer.spec
            if a.latent is not None:
                shape = a.heads, a.latent.rank, like.element_size()
                key = latent.tuning_key(slots, reach, *shape)
                maker = _latent_maker(layer, ops, like, slots, reach, len(layers))
                yield TuningCase(key, tuning.candidates(key, ops.sms), maker)
                continue
            keys = min(reach, a.reach or reach)
            shape = a.heads // a.kv_heads, a.head_dim, itemsize
            if 2 * slots * reach * a.kv_heads * a.head_dim * itemsize > _MOST_CACHE:
                continue
            key = decode_attention.tuning_key(slots * a.kv_heads, keys, *shape)
            maker = _decode_maker(layer, ops, like, slots, reach, len(layers), codes)
            yield TuningCase(key, tuning.candidates(key, ops.sms), maker)


def _decode_maker(
    layer: LayerAttention,
    ops: KernelOps,
    like: torch.Tensor,
    slots: int,
    reach: int,
    layers: int,
    codes: str | None,
) -> Prepare:
    def prepare() -> tuple[Run, int]:
        a = layer.spec
        qkv = _random(like, slots, 1, sum(a.qkv_sizes))
        keys, scales = _random(like, slots, a.kv_heads, reach, a.head_dim), []
        if codes is not None:
            keys, scale = cache_codes.encode(MATHS, keys, codes)
            scales = [scale, scale.flip(2).contiguous()]
        cache = KINDS["full"](keys, keys.flip(2).contiguous(), *scales)
        return _token(layer, ops, qkv, cache, layers)

    return prepare


def _latent_maker(
    layer: LayerAttention, ops: KernelOps, like: torch.Tensor, slots: int, reach: int, layers: int
) -> Prepare:
    def prepare() -> tuple[Run, int]:
        a = layer.spec
        assert a.latent is not None
        qkv = LatentQkv(
            _random(like, slots, 1, a.qkv_sizes[0]), _random(like, slots, 1, a.latent.width)
        )
        cache = KINDS["latent"](_random(like, slots, reach, a.latent.width))
        return _token(layer, ops, qkv, cache, layers)

    return prepare


def _token(
    layer: LayerAttention,
    ops: KernelOps,
    qkv: torch.Tensor | LatentQkv,
    cache: FullCache | LatentCache,
    layers: int,
) -> tuple[Run, int]:
    """A token of each slot, over copies of the cache, so that they come from memory."""
    size = size_of(cache)
    count = min(max(layers, 8), max(1, _beyond_cache(ops.device) // size) + 1)
    count = max(1, min(count, (free_bytes(ops.device) or 0) // 4 // size))
    caches = [cache, *(over(cache, torch.clone) for _ in range(count - 1))]
    slots, reach = len(cache[0]), cache.capacity
    lengths = torch.full((slots,), reach * 3 // 4, dtype=torch.int64, device=ops.device)

    def attend(own: FullCache | LatentCache, config: Any) -> torch.Tensor:
        return ops.attend_token(layer, qkv, None, own, lengths, config=config)[0]

    return _in_turn(caches, attend)


def _prompts(
    layers: list[LayerAttention], ops: KernelOps, params: Params, tokens: int
) -> Iterable[TuningCase]:
    """Attention of one prompt of `tokens` tokens, by kind of layer, where our kernel serves it."""
    like = torch.empty(0, dtype=params.outer["embed.weight"].dtype, device=ops.device)
    for layer in layers:
        a = layer.spec
        how: dict[str, Any] = {
            **{"causal": a.causal, "window": a.window, "alibi": layer.slopes},
            **{"softcap": a.softcap},
        }
        dim = max(a.head_dim, a.head_widths[2])
        shape = like.new_empty((1, tokens, 1, dim))
        if attention_choice.sdpa_backends(shape, **how):
            continue
        numbers = like.element_size(), dim, tokens, a.heads, a.causal
        key = attention_choice.tuning_key(*numbers)
        how |= {"scale": a.scale, "alibi_scale": layer.scoring.alibi_scale}
        maker = _prompt_maker(layer, ops, like, tokens, how)
        yield TuningCase(key, tuning.candidates(key, ops.sms), maker)


def _prompt_maker(
    layer: LayerAttention, ops: KernelOps, like: torch.Tensor, tokens: int, how: dict[str, Any]
) -> Prepare:
    def prepare() -> tuple[Run, int]:
        a = layer.spec
        dim = max(a.head_dim, a.head_widths[2])
        q = _random(like, 1, tokens, a.heads, dim)
        k, v = (_random(like, 1, tokens, a.kv_heads, dim) for _ in range(2))

        def attend(_: int, config: Any) -> torch.Tensor:
            return attention.attention(q, k, v, config=config, pdl=ops.pdl, **how)

        return _in_turn(range(_PROMPT_CALLS), attend)

    return prepare


def _random(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Normal numbers that leave the caller's generators alone, on the device and in the dtype."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _beyond_cache(device: torch.device) -> int:
    """Bytes that push everything else out of the L2 cache."""
    if device.type != "cuda":
        return 0
    return _L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
