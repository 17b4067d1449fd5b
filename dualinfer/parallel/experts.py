"""The sharing of a mixture's experts by devices: what `moe` asks, checked against the model."""

from collections.abc import Sequence
from math import comb

from ..config.nested import MoEConfig
from ..errors import ConfigError
from ..model.spec import Experts, ModelSpec
from .sharding import ShardingPlan, split_evenly


def parts_of_experts(moe: MoEConfig, spec: ModelSpec, size: int) -> int:
    """As `parts_of`, of the model that a spec describes."""
    mixtures = [layer.mlp for layer in spec.all_layers if isinstance(layer.mlp, Experts)]
    check_type(moe, [own.blended for own in mixtures], spec.architecture)
    return parts_of(moe, [own.choices - own.idle for own in mixtures], spec.architecture, size)


def check_type(moe: MoEConfig, residual: Sequence[bool], architecture: str) -> None:
    """Raise ConfigError where `moe.type` is given and is not that of a model's MoE layers.

    `residual` says of each whether it has a dense MLP beside the experts.
    """
    if not moe.enabled or "type" not in moe.model_fields_set:
        return
    if not residual and moe.type == "residual":
        raise ConfigError(f"moe.type='residual': {architecture} has no experts. Leave it unset.")
    if sum(residual) != (len(residual) if moe.type == "residual" else 0):
        own = f"of the {len(residual)} MoE layers of {architecture} {sum(residual)} are residual"
        other = "residual" if moe.type == "standard" else "standard"
        is_mixed = len(set(residual)) > 1
        way = "Leave it unset" if is_mixed else f"Use {other!r}"
        raise ConfigError(
            f"moe.type={moe.type!r}: {own}, with a dense MLP beside the experts. {way}."
        )


def parts_of(moe: MoEConfig, counts: Sequence[int], architecture: str, size: int) -> int:
    """In how many parts `size` devices share out the experts of a model: 1 where they cut within.

    `counts` are the experts of its layers with some. Raises ConfigError for what the model, or the
    number of devices, does not allow.
    """
    if not moe.enabled:
        return 1
    asked, parts = moe.moe_experts, moe.ep_size
    if asked != [1] and asked not in (list(counts), sorted(set(counts))):
        way = "Leave it unset."
        if counts:
            known = str(counts[0]) if len(set(counts)) == 1 else str(counts)
            way = f"Use {known}, or leave it unset."
        raise ConfigError(f"moe.moe_experts={asked}: {architecture} {_has(counts)}. {way}")
    if parts == 1:
        return 1
    if not counts:
        raise ConfigError(
            f"moe.ep_size={parts}: {architecture} {_has(counts)} to share out. Leave it "
            f"unset, and set tensor_parallel.tp_size={parts} to share the model."
        )
    if parts > min(counts):
        raise ConfigError(
            f"moe.ep_size={parts}: {architecture} {_has(counts)}, which is less than one for "
            f"each part. Use at most {min(counts)}."
        )
    if size % parts:
        devices = "one device has" if size == 1 else f"{size} devices share"
        raise ConfigError(
            f"moe.ep_size={parts}, and {devices} the model: it must divide their number. Set "
            f"tensor_parallel.tp_size to a multiple of {parts}."
        )
    return parts


def _has(counts: Sequence[int]) -> str:
    """A phrase on a model's experts, for people; `counts` are those of its layers with some."""
    if not counts:
        return "has no experts"
    if len(set(counts)) > 1:
        return f"has {_listed(counts)} experts in its {len(counts)} layers with some"
    layers = f"{len(counts)} layers" if len(counts) > 1 else "its only layer with some"
    return f"has {counts[0]} experts in {'each of ' if len(counts) > 1 else ''}{layers}"


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def describe_experts(plan: ShardingPlan) -> list[str]:
    """Lines for people on how devices share experts; none without experts, or on one device."""
    mixtures = [layer.mlp for layer in plan.table.spec.all_layers if layer.experts]
    if plan.size == 1 or not mixtures:
        return []
    first = mixtures[0]
    assert isinstance(first, Experts)
    chosen, parts, size = min(first.router.chosen, first.count), plan.expert_parts, plan.size
    dense = ", one of which is the dense MLP of all tokens" if first.blended else ""
    if parts == 1:
        return [
            f"experts (ep_size 1): each of {size} devices has a share of the width of all "
            f"{first.count}{dense}, so that they work evenly whatever a token chooses, which "
            "decoding wants most"
        ]
    shares = [share.real for share in split_evenly(first.count, parts, 1)]
    held = ", ".join(f"{shares.count(n)} of {n}" for n in sorted(set(shares), reverse=True))
    within = size // parts
    how = f", the width of each cut for {within} devices" if within > 1 else ", whole ones"
    most = most_chosen(shares, chosen, first.blended)
    faster = first.per_token * within / most
    return [
        f"experts (ep_size {parts}): {first.count} in {parts} parts ({held}){how}{dense}. Of "
        f"{chosen} that a token chooses as if by lot the part with the most has {most:.2f} on "
        f"average: the experts of one token take 1/{faster:.2f} of one device's time, and cut by "
        f"width alone (ep_size 1) 1/{size}"
    ]


def most_chosen(shares: Sequence[int], chosen: int, always: bool = False) -> float:
    """The most of a token's experts that one part has, expected where it takes as if by lot.

    `shares` are the experts of each part. A token takes `chosen` of them, and with `always` the
    last part's last one besides.
    """
    *others, last = shares
    everything = comb(sum(shares) - always, chosen)

    def ways(limit: int) -> int:
        """In how many ways no part has more than `limit`."""
        found = [1] + [0] * chosen  # by how many are chosen
        for own, room in [*((n, limit) for n in others), (last - always, limit - always)]:
            found = [
                sum(found[k - j] * comb(own, j) for j in range(min(k, room) + 1))
                for k in range(chosen + 1)
            ]
        return found[chosen]

    return sum(1 - ways(limit) / everything for limit in range(chosen + always))
