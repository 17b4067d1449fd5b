"""How attention of whole prompts is cut for the GPU, and what else could do it."""

from typing import Any, NamedTuple

from .launch import INTERPRETED, next_power_of_2
from .tunable import SHARED_BYTES, Key, Kind, Tunable, powers


class Config(NamedTuple):
    """How the kernel is cut: queries of a program, keys of a step, warps, steps in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By (greatest head_dim, 16-bit), the best first, as measured on an H100.
_LONG = {
    (64, True): [Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(128, 128, 8, 2)],
    (128, True): [Config(64, 64, 4, 2), Config(128, 128, 8, 2), Config(128, 64, 8, 3)],
    (256, True): [Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 3)],
    (256, False): [Config(16, 16, 8, 2), Config(16, 32, 4, 2), Config(32, 32, 8, 2)],
}
_SHORT = {
    (64, True): [Config(64, 64, 4, 2), Config(16, 128, 4, 1), Config(32, 128, 4, 1)],
    (128, True): [Config(64, 64, 4, 2), Config(16, 64, 4, 2), Config(32, 64, 4, 2)],
    (256, True): [Config(64, 32, 4, 2), Config(16, 64, 4, 2)],
    (256, False): [Config(16, 16, 8, 2), Config(16, 32, 4, 2)],
}
_SDPA_FROM = 512  # tokens: below, our kernel is the quicker one
_SDPA_DIMS = (64, 128)  # elsewhere, too


def attention_configs(
    *,
    itemsize: int,
    head_dim: int,
    tokens: int,
    pairs: int,
    processors: int = 132,
    packed: bool = False,
) -> list[Config]:
    """Configurations worth measuring, the default first.

    `pairs` is sequences times query heads. Where blocks of 128 queries would leave processors
    without work, they are smaller, and where rows are `packed` with short texts: 74 us for 32 rows
    of 512 tokens on an H100, where blocks of 128 took 81.
    """
    few = packed or pairs * -(-tokens // 128) < processors
    table = _SHORT if few else _LONG
    bound = min(dim for dim, half in table if half == (itemsize == 2) and dim >= min(head_dim, 256))
    return list(table[bound, itemsize == 2])


def sdpa_backends(
    q: Any,
    *,
    causal: bool,
    window: int | None = None,
    mask: Any = None,
    segments: Any = None,
    alibi: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> tuple[str, ...]:
    """Those of torch's fused kernels, "cudnn" and "flash", that can do what `attention` is asked.

    Without a mask they know only whole sequences, and with `is_causal` align the first query with
    the first key. None are named where our kernel measured faster: short sequences, and head
    sizes that are no power of two or above 128.
    """
    tokens, dim = q.shape[1], q.shape[3]
    options = (mask, segments, alibi, softcap, sinks)
    windowed = window is not None and window < tokens
    if windowed or any(x is not None for x in options):
        return ()
    if INTERPRETED or q.device.type != "cuda":
        return ()
    if q.element_size() != 2 or dim not in _SDPA_DIMS or tokens < _SDPA_FROM:
        return ()
    return ("cudnn", "flash")


def tuning_key(itemsize: int, dim: int, tokens: int, pairs: int, causal: bool) -> Key:
    """Of whole sequences' attention: `pairs` of sequence and query head."""
    return "attention", itemsize, dim, next_power_of_2(tokens), next_power_of_2(pairs), causal


def _fits(key: Key, config: Config) -> bool:
    _, itemsize, dim, *_ = key
    held = config.block_m + 2 * config.block_n * config.stages
    return held * next_power_of_2(dim) * itemsize <= SHARED_BYTES


def _candidates(key: Key, sms: int) -> list[Config]:
    _, itemsize, dim, tokens, pairs, _ = key

    def configs(processors: int) -> list[Config]:
        shape = {"itemsize": itemsize, "head_dim": dim, "tokens": tokens, "pairs": pairs}
        return attention_configs(**shape, processors=processors, packed=False)

    few, default, many = configs(1 << 31), configs(sms), configs(0)
    return [*default, *many, *few]


TUNABLE = Tunable(
    op="attention",
    fields=("itemsize", "dim", "tokens", "pairs", "causal"),
    flags=("causal",),
    kinds={
        "attention": Kind(
            Config,
            {
                **{"block_m": powers(16, 256), "block_n": powers(16, 256)},
                **{"warps": powers(1, 16), "stages": range(1, 9)},
            },
        )
    },
    fits=_fits,
    candidates=_candidates,
)
