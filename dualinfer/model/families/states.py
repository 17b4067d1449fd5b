"""Mamba-2's part of a config: what hybrids have beside attention, or in its place."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ...blocks.state_space import StateSpace
from ...errors import ModelError, shown
from ..spec import Norm
from .fields import ConfigFields

# HF's fields of heads, elements of a head, groups, elements of B and C, taps, and the activation.
_HYBRIDS = (
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    "hidden_act",
)

FIELDS = (  # of hybrids, that say nothing where no layer has a state
    *_HYBRIDS[:5],
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"),
    "time_step_limit",
)


def read(
    fields: ConfigFields,
    norm: Norm | None,
    width: int | None,
    names: Sequence[str] = _HYBRIDS,
    least: str = "",
) -> StateSpace:
    """The state space of a config's layers, whose heads have `width` elements, None for any.

    HF's step by step ignores `time_step_limit`, which its whole prompts are within; here both are.
    """
    heads, activation = fields.heads(names[0]), fields.activation(names[5])
    head_dim, groups, state, taps = (fields.size(name) for name in names[1:5])
    if heads % groups:
        raise ModelError(f"config.json has {names[0]}={heads}, no multiple of {groups} groups.")
    if width is not None and heads * head_dim != width:
        raise ModelError(
            f"config.json has {heads} heads of {head_dim} elements, which are not the {width} that "
            f"its layers have ({names[0]}, {names[1]})."
        )
    fields.ignore("chunk_size", "mamba_chunk_size")  # how HF cuts a sum, which is the same
    own = StateSpace(
        *(heads, head_dim, groups, state, taps, activation, norm, heads * head_dim // groups)
    )
    return replace(own, limits=_limits(fields, least))


def _limits(fields: ConfigFields, least: str) -> tuple[float, float]:
    """Between which a step lies; the lower end may have a field of its own."""
    given = fields.take("time_step_limit", [0.0, math.inf])
    if least:
        given = [fields.take(least, 0.0), math.inf]
    fits = isinstance(given, list | tuple) and len(given) == 2
    if not fits or not all(isinstance(x, int | float) and x >= 0 for x in given):
        raise ModelError(
            f"config.json has time_step_limit={shown(given)}; expected two numbers, from 0 on."
        )
    return float(given[0]), float(given[1])
