"""How attention of whole prompts is cut for the GPU, and what else could do it."""

from typing import Any, NamedTuple

from .launch import has_pdl


class Config(NamedTuple):
    """How the kernel is cut: queries of a program, keys of a step, warps, steps in flight.

    `late` adds the values of a step beside the softmax of the next one.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    late: bool = False


# By (greatest head_dim, 16-bit), the best first.
_LONG = {
    (128, True): [
        Config(128, 128, 8, 2, True),
        Config(128, 64, 8, 3, True),
        Config(64, 64, 4, 2, True),
        Config(128, 128, 8, 2),
    ],
    (256, True): [Config(128, 64, 8, 2, True), Config(64, 64, 4, 2), Config(128, 64, 8, 2)],
    (256, False): [Config(16, 32, 4, 2), Config(16, 16, 4, 2), Config(32, 32, 8, 2)],
}
_SHORT = {
    (64, True): [
        Config(64, 64, 4, 2),
        Config(32, 64, 4, 2),
        Config(32, 128, 4, 1),
        Config(16, 128, 4, 1),
    ],
    (128, True): [Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(16, 64, 4, 2)],
    (256, True): [Config(64, 32, 4, 2), Config(16, 64, 4, 2)],
    (256, False): [Config(16, 32, 4, 2), Config(16, 16, 4, 2)],
}


def attention_configs(
    *, itemsize: int, head_dim: int, tokens: int, pairs: int, processors: int = 132
) -> list[Config]:
    """Configurations worth measuring, the default first.

    `pairs` is sequences times query heads. Where blocks of 128 queries would leave processors
    without work, they are smaller.
    """
    few = pairs * -(-tokens // 128) < processors
    table = _SHORT if few else _LONG
    bound = min(dim for dim, half in table if half == (itemsize == 2) and dim >= min(head_dim, 256))
    return list(table[bound, itemsize == 2])


def sdpa_backends(
    q: Any,
    k: Any,
    *,
    causal: bool,
    window: int | None = None,
    mask: Any = None,
    segments: Any = None,
    alibi: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    lengths: Any = None,
    start: int = 0,
) -> tuple[str, ...]:
    """Those of torch's fused kernels, "cudnn" and "flash", that can do what `attention` is asked.

    Without a mask they know only whole sequences, and with `is_causal` align the first query with
    the first key. cuDNN's limit of 128 elements a head is torch's; newer pairs allow more.
    """
    tokens, dim = q.shape[1], q.shape[3]
    options = (mask, segments, alibi, softcap, sinks, lengths)
    windowed = window is not None and window < tokens
    if windowed or any(x is not None for x in options) or start or not has_pdl(q):
        return ()
    if q.element_size() != 2 or dim % 8 or dim > 256:
        return ()
    return ("cudnn", "flash") if dim <= 128 else ("flash",)
