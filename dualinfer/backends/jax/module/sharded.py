"""Share a Flax module's parameters over devices: a policy of path patterns, and its checks."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from ....errors import ConfigError, a_type, listing
from ..mesh import WHOLE, ManyDevices, Place

_EXAMPLE = 'injection_policy={"*.up.kernel": (None, "tp"), "*.down.kernel": ("tp", None)}'


def read_policy(
    policy: Mapping[Any, Any] | None, shapes: Mapping[str, tuple[int, ...]], place: Place
) -> dict[str, PartitionSpec]:
    """The split of each parameter of these `shapes`, by dotted path, over the devices of `place`.

    A key of `policy` is a pattern with `*`, `?` and `[...]`, as of file names, for a whole path; a
    `*` passes over dots. Its value has an entry for each axis of the array: the mesh's axis that
    splits it, a tuple of several, or None. The first pattern that fits a parameter decides; what
    none fits stays whole. Raises ConfigError for what cannot be so.
    """
    if not isinstance(place, ManyDevices):
        if policy:
            raise ConfigError(
                f"injection_policy: {place.name} is one device, which has nothing to split. Leave "
                "it unset, or use several."
            )
        return dict.fromkeys(shapes, WHOLE)
    if not policy:
        raise ConfigError(
            f"tensor_parallel: {place.mesh.size} devices are to share a Flax module, and nothing "
            f"says how its parameters are split. Pass patterns of their paths, as {_EXAMPLE}. It "
            f"has, for instance, {listing(list(shapes))}."
        )
    odd = next((pattern for pattern in policy if not isinstance(pattern, str)), None)
    if odd is not None:
        raise ConfigError(
            f"injection_policy: the key {odd!r} is {a_type(odd)}; on JAX expected are "
            f"patterns of parameters' paths, as {_EXAMPLE}."
        )
    decided: dict[str, list[str]] = {pattern: [] for pattern in policy}
    for name in shapes:
        first = next((pattern for pattern in policy if fnmatchcase(name, pattern)), None)
        if first is not None:
            decided[first].append(name)
    for pattern, names in decided.items():
        if not names:
            shadowed = [name for name in shapes if fnmatchcase(name, pattern)]
            if shadowed:
                reason = f"fits only what patterns before it fit: {listing(shadowed)}"
            else:
                reason = f"fits no parameter. There are, for instance, {listing(list(shapes))}"
            raise ConfigError(f"injection_policy: the pattern {pattern!r} {reason}.")
    return dict.fromkeys(shapes, WHOLE) | {
        name: _spec(pattern, policy[pattern], name, shapes[name], place)
        for pattern, names in decided.items()
        for name in names
    }


def _spec(
    pattern: str, value: Any, name: str, shape: tuple[int, ...], place: ManyDevices
) -> PartitionSpec:
    rule = f"injection_policy: {pattern!r} gives {name} {list(shape)} the axes {value!r}"
    if not isinstance(value, tuple | list | PartitionSpec) or len(value) != len(shape):
        raise ConfigError(
            f"{rule}; expected a tuple of {len(shape)}, one entry for each of its axes: the name "
            "of a mesh axis, a tuple of names, or None."
        )
    sizes, used = place.mesh.shape, []
    for extent, entry in zip(shape, value, strict=True):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        unknown = [axis for axis in axes if axis not in sizes]
        if unknown:
            raise ConfigError(f"{rule}, but the mesh has {', '.join(map(repr, sizes))} only.")
        used += axes
        count = prod(sizes[axis] for axis in axes)
        if extent % count:
            raise ConfigError(
                f"{rule}, and {extent} does not divide by the {count} devices along "
                f"{', '.join(map(repr, axes))}. Split another axis of it, or none."
            )
    if len(used) != len(set(used)):
        raise ConfigError(f"{rule}, which names a mesh axis twice.")
    return PartitionSpec(*value)


def policy_notes(specs: Mapping[str, PartitionSpec], place: Place) -> tuple[str, ...]:
    """Notes for people on what is split and what every device has."""
    if not isinstance(place, ManyDevices):
        return ()
    split = {name: spec for name, spec in specs.items() if any(spec)}
    whole = [name for name in specs if name not in split]
    listed = [f"{name} {tuple(spec)}" for name, spec in split.items()]
    return (
        f"split over {place.mesh.size} devices: {listing(listed) or 'nothing'}",
        f"whole on every device: {listing(whole) or 'nothing'}",
    )
