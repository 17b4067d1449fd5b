"""Tensors that the ranks of a job have split, joined again to those that a model asks for."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import CheckpointError, counted, listing, shortened
from ...model.load_plan import TensorSource
from ..files.safetensors import StoredFile
from .fitting import Wanted, strip
from .injected import convert, is_injected, layers_of
from .merged import Merge, MergedSource, Shard, check_alike, join, take

_FUSED = re.compile(r"(qkv|query_key_value|c_attn|gate_up|in_proj|c_fc_0_1)", re.IGNORECASE)


class Shards:
    """Files of a checkpoint in rounds; those of one round are of ranks, in order.

    A round of one file holds whole tensors. It is read once `fit` knows the model.
    """

    def __init__(
        self, rounds: Sequence[Sequence[StoredFile]], description: str, notes: Sequence[str] = ()
    ):
        self.description, self.notes = description, tuple(notes)
        self.files = [file for own in rounds for file in own]
        self.size = max((len(own) for own in rounds), default=1)
        self.shards = _by_name(rounds, description)

    def names(self) -> Iterable[str]:
        """Names as stored."""
        return self.shards.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the first rank's shard."""
        return self.shards[name][0].shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype."""
        return self.shards[name][0].dtype

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """A shard is no tensor of the model: `fit` makes those."""
        raise NotImplementedError(name)

    def fit(self, wanted: Wanted) -> TensorSource:
        """The tensors that the model asks for, by HF's names, and as stored what it has not."""
        stored = list(self.shards)
        names, note = strip(stored, wanted, self.description, layers_of(wanted))
        shards = {name: self.shards[old] for name, old in zip(names, stored, strict=True)}
        notes = [*self.notes, *([note] if note else [])]
        if is_injected(shards):
            tensors, others = convert(shards, wanted, self.description)
            notes.append("the layers are those of DeepSpeed's kernels, under their own names")
            tensors |= merge_all(others, wanted, self.description)
        else:
            tensors = merge_all(shards, wanted, self.description)
        if self.size > 1:
            notes.append(f"the shards of {self.size} ranks were merged")
        return MergedSource(tensors, self.description, notes)


def _by_name(
    rounds: Sequence[Sequence[StoredFile]], description: str
) -> dict[str, tuple[Shard, ...]]:
    """The shards of each tensor, of the ranks in order."""
    found: dict[str, tuple[Shard, ...]] = {}
    twice, uneven = [], []
    for files in rounds:
        names = [set(file.names()) for file in files]
        common = set.intersection(*names)
        for file, own in zip(files, names, strict=True):
            uneven += [f"{name} (only in {file.path.name})" for name in sorted(own - common)]
            if own - common:
                break
        for name in files[0].names():
            if name in found:
                twice.append(f"{name} ({_file(found[name][0])}, {files[0].path.name})")
            found[name] = tuple(Shard(file, name) for file in files)
    faults = [
        f"{what} {counted(names)}"
        for what, names in (
            ("tensors held by two files", twice),
            ("tensors that not all ranks hold", uneven),
        )
        if names
    ]
    if faults:
        raise CheckpointError(
            f"The files of {description} contradict each other: {'; '.join(faults)}. Are they all "
            "of one checkpoint, and listed in the order of their ranks?"
        )
    return found


def _file(shard: Shard) -> str:
    return shard.file.path.name if isinstance(shard.file, StoredFile) else ""


def check_no_pairs(files: Iterable[Any], description: str) -> None:
    """Raise CheckpointError for int8 weights that DeepSpeed saved with their scales."""
    pairs = [name for file in files for name in getattr(file, "pairs", ())]
    if pairs:
        raise CheckpointError(
            f"{description} holds weights as pairs of a tensor and its scales, {counted(pairs)}, "
            "which is how DeepSpeed saves int8. Save it with dtype fp16 or bf16, and quantize here "
            'with quant="int8".'
        )


def merge_all(
    shards: Mapping[str, Sequence[Shard]], wanted: Wanted, description: str
) -> dict[str, Merge]:
    """Each tensor made whole. Raises CheckpointError that names those whose shards do not fit."""
    turned = any(_is_turned(own, wanted.find(name)) for name, own in shards.items())
    tensors: dict[str, Merge] = {}
    faults = []
    for name, own in shards.items():
        try:
            tensors[name] = merge(own, name, wanted, description, turned)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            faults.append(f"{name} ({error})")
    if faults:
        raise CheckpointError(
            f"The shards of {description} do not make the model's tensors, "
            f"{counted([shortened(fault) for fault in faults])}. Are all ranks' files listed, in "
            "order, and is tp_size the number of ranks that wrote them?"
        )
    return tensors


def merge(
    shards: Sequence[Shard], name: str, wanted: Wanted, description: str, turned: bool = False
) -> Merge:
    """A tensor of the ranks' shards, by the shape that the model expects of it.

    The axis is that along which the shards add up to it, and a tensor that each rank holds whole is
    taken once. `turned`: matrices that HF stores [in, out] lie here as [out, in]. Raises ValueError
    that says what does not fit.
    """
    expected = wanted.find(name)
    if len(shards) == 1 or expected is None:
        return take(shards[0])
    shapes = [shard.shape for shard in shards]
    if all(shape == expected for shape in shapes):
        check_alike(shards, description)
        return take(shards[0])
    turns = turned and len(expected) == 2 and _is_conv(name)
    target = expected[::-1] if turns else expected
    axes = _axes(shapes, target)
    if len(axes) != 1:
        raise ValueError(f"{listing([str(shape) for shape in shapes], 4)} for {expected}")
    axis, blocks = axes[0], ()
    if name in wanted.blocks:
        along, lengths = wanted.blocks[name]
        along = len(expected) - 1 - along if turns else along
        blocks = lengths if along == axis else ()
    elif not wanted.is_known and _FUSED.search(name):
        raise ValueError("it joins several projections, and how is not known of this family")
    merged = join(shards, axis, blocks)
    return replace(merged, turned=True) if turns else merged


def _axes(shapes: Sequence[tuple[int, ...]], target: tuple[int, ...]) -> list[int]:
    """The axes along which shards of these shapes add up to the target's."""
    if any(len(shape) != len(target) for shape in shapes):
        return []
    return [
        axis
        for axis in range(len(target))
        if sum(shape[axis] for shape in shapes) == target[axis]
        and all(s[:axis] + s[axis + 1 :] == target[:axis] + target[axis + 1 :] for s in shapes)
    ]


def _is_conv(name: str) -> bool:
    """True for the matrices that HF's GPT-2 stores [in, out]."""
    return name.rsplit(".", 2)[-2:] in (
        ["c_attn", "weight"],
        ["c_proj", "weight"],
        ["c_fc", "weight"],
    )


def _is_turned(shards: Sequence[Shard], expected: tuple[int, ...] | None) -> bool:
    """True for shards that fit the transpose of what is expected, and not that itself."""
    if expected is None or len(expected) != 2 or len(shards) == 1:
        return False
    if not _is_conv(shards[0].name):
        return False
    shapes = [shard.shape for shard in shards]
    return not _axes(shapes, expected) and bool(_axes(shapes, expected[::-1]))
