"""How far layers see and by what they turn, and factors: rows of decoders name these functions."""

from collections.abc import Mapping
from typing import Any

from ...errors import ModelError, shown
from .decoders import Decoder, Factors, Sight
from .fields import is_positive
from .rope import ropes_by_kind


def one_window(own: Decoder) -> Sight:
    """All layers see through one window, where there is one."""
    window = own.fields.take("sliding_window")
    size = None if window is None else own.fields.size("sliding_window")
    return Sight([size] * own.count, [""] * own.count, _one(own))


def by_kind(own: Decoder) -> Sight:
    """Layers have windows by kind, and each kind its rotary embedding."""
    kinds = own.fields.layer_types(own.count)
    given = ropes_by_kind(own.fields.take("rope_parameters"), kinds)
    return Sight(own.fields.windows(kinds), kinds, {kind: given[kind] for kind in kinds})


def by_kind_if_any(own: Decoder) -> Sight:
    """As `by_kind`; a kind whose parameters are None does not turn."""
    sight = by_kind(own)
    turning = {kind: ropes for kind, ropes in sight.ropes.items() if ropes is not None}
    turns = [kind if kind in turning else None for kind in sight.turns]
    return Sight(sight.windows, turns, turning)


def by_theta(own: Decoder) -> Sight:
    """Layers have windows by kind, and each a theta of its own, 0 for no rotary embedding."""
    windows, count = own.fields.windows(own.fields.layer_types(own.count)), own.count
    thetas, given = own.fields.take("layer_rope_theta"), own.fields.take("rope_parameters")
    fits = isinstance(thetas, list | tuple) and len(thetas) == count
    if not fits or not all(theta == 0 or is_positive(theta) for theta in thetas):
        raise ModelError(
            f"config.json has layer_rope_theta={shown(thetas)}; expected a positive number for "
            f"each of {count} layers, or 0 of one without rotary embedding."
        )
    turns = [str(theta) if theta else None for theta in thetas]
    keys = dict.fromkeys(key for key in turns if key)
    if not isinstance(given, Mapping):
        return Sight(windows, turns, dict.fromkeys(keys, given))
    own.fields.ignore("rope_theta")  # which layer_rope_theta says again for each layer
    return Sight(windows, turns, {key: {**given, "rope_theta": float(key)} for key in keys})


def unturned(own: Decoder) -> Sight:
    """All layers see all of the past, and know no positions."""
    return Sight([None] * own.count, [None] * own.count, {})


def windows_by_kind(own: Decoder) -> Sight:
    """Layers have windows by kind, and all turn."""
    windows = own.fields.windows(own.fields.layer_types(own.count))
    return Sight(windows, [""] * own.count, _one(own))


def turning_in_windows(own: Decoder) -> Sight:
    """Layers have windows by kind, and those with a window turn."""
    windows = own.fields.windows(own.fields.layer_types(own.count))
    return Sight(windows, ["" if w is not None else None for w in windows], _one(own))


def turning_unless_wide(own: Decoder) -> Sight:
    """As `turning_in_windows`; all turn where the config has no window."""
    wide = own.fields.take("sliding_window") is None
    return (windows_by_kind if wide else turning_in_windows)(own)


def turning_if_dense(own: Decoder) -> Sight:
    """As `turning_in_windows`; layers without experts turn too, where the config says so."""
    sight = turning_in_windows(own)
    if own.fields.take("prefix_dense_sliding_window_pattern") != 1:
        return sight
    feeds = own.fields.kinds("mlp_layer_types", own.count, ("dense", "sparse"))
    turns = ["" if f == "dense" else turn for f, turn in zip(feeds, sight.turns, strict=True)]
    return sight._replace(turns=turns)


def turning_if_listed(own: Decoder) -> Sight:
    """Layers have windows by kind, and turn by HF's no_rope_layers, which has 1 where they do."""
    windows = own.fields.windows(own.fields.layer_types(own.count))
    turns = own.fields.take("no_rope_layers")
    if not isinstance(turns, list | tuple) or len(turns) != own.count or {*turns} - {0, 1}:
        raise ModelError(
            f"config.json has no_rope_layers={shown(turns)}; expected a 0 or 1 for each of "
            f"{own.count} layers."
        )
    return Sight(windows, ["" if t else None for t in turns], _one(own))


def turning_if_asked(own: Decoder) -> Sight:
    """All layers see all of the past, and turn where position_embedding_type is rope, not nope."""
    own.fields.require("position_embedding_type", "rope", "nope")
    turns = own.fields.take("position_embedding_type") == "rope"
    return Sight([None] * own.count, ["" if turns else None] * own.count, _one(own))


def _one(own: Decoder) -> dict[str, Any]:
    return {"": own.fields.take("rope_parameters")}


def granite(own: Decoder) -> Factors:
    """Granite's four."""
    fields = own.fields
    embed, scores, residual = (
        fields.number(f"{x}_multiplier") for x in ("embedding", "attention", "residual")
    )
    return Factors(embed, scores, residual, 1 / fields.number("logits_scaling"))


def hyperclovax(own: Decoder) -> Factors:
    """Granite's, where logits are times the field by which Granite's are divided."""
    return granite(own)._replace(logits=own.fields.number("logits_scaling"))


def logits(own: Decoder) -> Factors:
    """One of logits."""
    return Factors(logits=own.fields.number("logit_scale"))


def logits_if_any(own: Decoder) -> Factors:
    """One of logits, 1 where there is none."""
    return Factors(logits=own.fields.optional_number("logit_scale") or 1.0)


def root(own: Decoder) -> Factors:
    """The root of the width, of embedded tokens."""
    return Factors(own.embed**0.5)


def root_if_asked(own: Decoder) -> Factors:
    """As `root`, where `mup_enabled` is true."""
    return root(own) if own.fields.flag("mup_enabled", False) else Factors()
