"""Quantized linear layers of a module: which become so, their codes, and the layers that hold them.

Codes and scales are those of the whole matrix, as in fused mode, of which a rank holds a part.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ....arrays import from_numpy, to_numpy
from ....checkpoint.sources import TorchSource
from ....checkpoint.views.quantized import QuantizedSource
from ....errors import ConfigError, UnsupportedError, counted
from ....model.load_plan import TensorSource
from ....model.weights import Leaf, Weight, at_blocks, parts_of, with_parts
from ....quantization import Blocks, BlockScheme
from ....quantization.formats import Opener
from ....quantization.quantize import Quantizing
from ....quantization.recipe import HEAD, Recipe
from ..ops.schemes import SCHEMES
from .autotp.changes import SurgeryPlan, is_linear, opaque_parts
from .autotp.guards import refuse_changes
from .autotp.layers import ColumnLinear, GatheredLinear, RowLinear, is_conv1d
from .autotp.layouts import Run, Runs, extent
from .fill import is_hf, slots


class Target(NamedTuple):
    """The way to quantize the matrix of a linear layer; `transposed` if it is stored [in, out]."""

    scheme: BlockScheme
    transposed: bool


class _Codes(nn.Module):
    """The base of quantized layers: codes, and what lies beside them, as buffers."""

    form: Weight  # of None in the place of arrays

    @property
    def held(self) -> Weight:
        """The weight as the arithmetic takes it."""
        parts = {part: self._buffers[part] for part in self.form.beside}
        return with_parts(self.form, {"data": self._buffers["codes"], **parts})

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The matrix that the codes mean, made anew each time, for code that reads it."""
        return SCHEMES.dequantize(self.held)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] times the matrix."""
        return SCHEMES.product(input, self.held, self.form.dtype)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """As others, but scales keep their dtype."""
        old = dict(self._buffers)
        super()._apply(fn, recurse)
        for part, tensor in old.items():
            new = self._buffers[part]
            if tensor is not None and new is not None and new.dtype != tensor.dtype:
                self._buffers[part] = tensor.to(new.device)
        return self

    def extra_repr(self) -> str:
        """The sizes, and the scheme."""
        assert isinstance(self.form.scheme, BlockScheme)
        return f"{super().extra_repr()}, scheme={self.form.scheme.name}"


class QuantizedLinear(_Codes, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """x [..., in] to [..., out]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product, and the bias."""
        output = self.product(input)
        return output if self.bias is None else output + self.bias


class _QuantizedColumn(_Codes, ColumnLinear):  # pyright: ignore[reportIncompatibleVariableOverride]
    forward = QuantizedLinear.forward


class _QuantizedGathered(_Codes, GatheredLinear):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class _QuantizedRow(_Codes, RowLinear):  # pyright: ignore[reportIncompatibleVariableOverride]
    def product(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum; inputs are quantized by scales of all ranks' columns."""
        input, weight = SCHEMES.share_input(input, self.held, self.seam.most)
        return SCHEMES.product(input, weight, self.form.dtype)


_LAYERS = {
    ColumnLinear: _QuantizedColumn,
    GatheredLinear: _QuantizedGathered,
    RowLinear: _QuantizedRow,
}


def choose_layers(module: nn.Module, recipe: Recipe) -> tuple[dict[str, Target], list[str]]:
    """By their paths, the linear layers that become quantized, and notes on those that do not.

    Only shapes are looked at. Those stay that share their weight with an embedding, are read by
    fused operations of torch, or have hooks or a forward of their own. The head is HEAD. Raises
    ConfigError or UnsupportedError for what cannot be honoured.
    """
    kind = type(module).__name__
    if not recipe.qkv:
        raise ConfigError(
            "quant.qkv.enabled=False: in module mode dualinfer does not know which of a module's "
            "layers are queries, keys and values. Leave it unset, or set "
            "replace_with_kernel_inject=True if dualinfer knows the model's family."
        )
    _refuse_quantized(module)
    heads = {id(head) for head in _heads(module)}
    opaque = tuple(opaque_parts(module))
    chosen: dict[str, Target] = {}
    tied: list[str] = []
    plain: list[str] = []
    linears = {
        id(part): (path, part)
        for path, part in module.named_modules()
        if is_linear(part) and not path.startswith(opaque or ("\n",))
    }
    users: dict[int, set[tuple[int, bool]]] = {}
    for slot in slots(module):
        known = id(slot.owner) in linears and slot.key == "weight"
        way = (1 + is_conv1d(slot.owner)) if known else 0
        users.setdefault(id(slot.tensor), set()).add((way, id(slot.owner) in heads))
    for path, part in module.named_modules():
        if id(part) not in linears:
            if isinstance(part, nn.Linear):
                plain.append(path)
            continue
        weight: Any = part.weight
        if any(not way for way, _ in users[id(weight)]) or len({*users[id(weight)]}) > 1:
            tied.append(path)
            continue
        turned = is_conv1d(part)
        n, k = weight.shape[::-1] if turned else weight.shape
        scheme = HEAD if id(part) in heads else recipe.scheme_of(f"{path}.weight", (n, k))
        chosen[path] = Target(scheme, turned)
    if not chosen:
        raise ConfigError(
            f"quant: the {kind} has no linear layer that can be quantized: no nn.Linear that runs "
            "as torch's does and has its weight for itself. Leave quant unset."
        )
    notes = []
    if tied:
        notes.append(
            f"quant: weights shared with an embedding or another kind of layer stay plain, "
            f"{counted(tied)}"
        )
    if plain:
        notes.append(
            "quant: linear layers with hooks or a forward of their own, or read by fused "
            f"operations of torch, stay plain, {counted(plain)}"
        )
    return chosen, notes


def _refuse_quantized(module: nn.Module) -> None:
    """Raise UnsupportedError for a module of which parts are quantized already."""
    names = [path for path, part in module.named_modules() if isinstance(part, _Codes)]
    names += [
        slot.name
        for slot in slots(module)
        if slot.kind == "_parameters"
        and type(slot.tensor) not in (nn.Parameter, torch.Tensor)
        and not torch.nn.parameter.is_lazy(slot.tensor)
    ]
    names += [
        path
        for path, part in module.named_modules()
        if type(part).__module__.startswith(("bitsandbytes.", "torchao.", "torch.ao.nn."))
    ]
    if names:
        raise UnsupportedError(
            f"quant is given, and parts of the {type(module).__name__} are quantized already, or "
            f"hold their weights in a way of their own: {counted(sorted({*names}))}. Leave it "
            "unset, or pass the module that they were made from."
        )


def _heads(module: nn.Module) -> Iterator[nn.Module]:
    """The output embeddings of the HF models in a module."""
    for part in module.modules():
        if is_hf(part):
            hf: Any = part
            with suppress(AttributeError, NotImplementedError):
                head = hf.get_output_embeddings()
                if isinstance(head, nn.Module):
                    yield head


def held_sizes(
    module: nn.Module,
    targets: Mapping[str, Target],
    dtype: torch.dtype,
    kept: Mapping[int, int],
) -> dict[int, int]:
    """Room that weights take, as elements of `dtype`, by their ids; `kept` as `check_room`."""
    sizes = dict(kept)
    for path, (scheme, _) in targets.items():
        weight: Any = module.get_submodule(path).weight
        scale = {"float8_e4m3fn": 1}.get(scheme.scale_dtype, 4) + scheme.zeros
        each = scheme.code.bits / 8 + scale / (scheme.columns or min(weight.shape))
        count = kept.get(id(weight), weight.numel())
        sizes[id(weight)] = int(count * each / dtype.itemsize) + 1
    return sizes


def quantize_layers(
    module: nn.Module,
    targets: Mapping[str, Target],
    plan: SurgeryPlan | None,
    rank: int,
    source: TensorSource | None,
    dtype_of: Callable[[torch.Tensor], torch.dtype],
) -> dict[str, Weight]:
    """The rank's quantized part of each target's matrix, on the host; the module stays as it is.

    Weights are quantized as they are stored, in `source` if that filled the module. `dtype_of` says
    in which dtype a weight will compute. Raises CheckpointError for values that are not finite.
    """
    changes = {} if plan is None else {change.path: change for change in plan.changes}
    names = set() if source is None else {*source.names()}
    description = f"the {type(module).__name__}" if source is None else source.description
    made: dict[int, Weight] = {}
    weights: dict[str, Weight] = {}
    for path, target in targets.items():
        tensor: Any = module.get_submodule(path).weight
        if id(tensor) not in made:
            name = f"{path}.weight"
            stored = _stored_dtype(name, names, source) or tensor.dtype
            change = changes.get(path)
            runs: dict[int, Runs] = {}
            if change is not None:
                runs[int(change.becomes == "row")] = change.by_rank[rank]
            own = TorchSource({name: tensor.detach().to(stored)}, description)
            made[id(tensor)] = _quantized(own, name, target, runs, dtype_of(tensor))
        weights[path] = made[id(tensor)]
    return weights


def _stored_dtype(name: str, names: set[str], source: TensorSource | None) -> torch.dtype | None:
    """The dtype of a weight in the source that filled it, whose names may be older ones."""
    if source is None:
        return None
    if name in names:
        return getattr(torch, source.dtype(name))
    counts: dict[str, int] = {}
    for other in names:
        kind = source.dtype(other)
        if "float" in kind:
            counts[kind] = counts.get(kind, 0) + prod(source.shape(other))
    return getattr(torch, max(counts, key=lambda kind: counts[kind])) if counts else None


def _quantized(
    source: TensorSource, name: str, target: Target, runs: Mapping[int, Runs], dtype: torch.dtype
) -> Weight:
    """The part of a matrix that `runs` of its axes give."""
    matrix = Quantizing(source, name, target.scheme, target.transposed)
    shown = QuantizedSource(source, Opener(lambda _: matrix), [name])
    rows, columns = (runs.get(i, (Run(0, size),)) for i, size in enumerate(matrix.shape))
    scheme = matrix.scheme
    block = _uncut(columns, matrix.shape[1], scheme)
    codes = _read(lambda *index: matrix.codes(*index), (rows, columns))
    parts: dict[str, torch.Tensor] = {}
    for part in ("scale", "zero") if scheme.zeros else ("scale",):
        own: Runs = (Run(0, 1),)
        if block:
            own = tuple(Run(a and a // block, -(-n // block)) for a, n in columns)
        at = at_blocks(f"{name}:{part}@", (1, block))
        parts[part] = _read(lambda *index, at=at: shown.read(at, index), (rows, own))
    if scheme.outer:
        parts["outer"] = _read(lambda *index: shown.read(f"{name}:outer", index), (rows,))
    parts = {part: array.contiguous() for part, array in parts.items()}
    data = from_numpy(scheme.code.pack(to_numpy(codes.contiguous())), "torch")
    blocks = Blocks(1, block, extent(columns))
    return Weight(data, ("out", "in"), scheme, parts, dtype, blocks)


def _uncut(columns: Runs, size: int, scheme: BlockScheme) -> int:
    """Columns of blocks that no run cuts; 0 where a row has one scale."""
    block = scheme.columns
    padding = any(start is None for start, _ in columns)
    if not block and not (padding and not scheme.zero_code):
        return 0
    edges = [start for start, _ in columns if start is not None]
    last = len(columns) - 1
    for i, (start, width) in enumerate(columns):
        if i < last or start is None or start + width < size:
            edges.append(width)
    return gcd(block or size, *edges)


def _read(read: Callable[..., np.ndarray], runs: tuple[Runs, ...]) -> torch.Tensor:
    """The runs of each axis one after another, as `layouts.take`."""

    def along(axis: int, index: tuple[slice, ...]) -> torch.Tensor:
        if axis == len(runs):
            return from_numpy(read(*index), "torch")
        parts: list[Any] = []
        for start, width in runs[axis]:
            first = start or 0
            part = along(axis + 1, (*index, slice(first, first + width)))
            parts.append(part if start is not None else torch.zeros_like(part))
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    return along(0, ())


def put_layers(module: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Put quantized layers in the place of those that `weights` are of, split ones too.

    HF models then refuse to be saved or resized.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, child in part._modules.items():
            owners.setdefault(id(child), []).append((part, name))
    for path, weight in weights.items():
        old = module.get_submodule(path)
        new = _layer(old, weight)
        for owner, name in owners[id(old)]:
            owner._modules[name] = new
    if weights:
        refuse_changes(module, "quantized by dualinfer", "codes that transformers does not know")


def _layer(old: Any, weight: Weight) -> nn.Module:
    kind: Any = _LAYERS.get(type(old), QuantizedLinear)
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    fields = {k: v for k, v in vars(old).items() if k not in vars(new)}
    vars(new).update(fields)
    new.out_features, new.in_features = weight.shape
    new.form = replace(weight, data=None, beside=dict.fromkeys(weight.beside))
    for part, tensor in parts_of(weight).items():
        new.register_buffer("codes" if part == "data" else part, tensor)
    new.register_parameter("bias", old.bias)
    return new.train(old.training)


def held_leaves(module: nn.Module) -> dict[str, Leaf]:
    """All parameters and quantized weights by their names, the head under the name `head.weight`.

    A tied one is there once.
    """
    leaves: dict[str, Leaf] = dict(module.named_parameters())
    seen: set[int] = set()
    for path, part in module.named_modules():
        if isinstance(part, _Codes):
            if id(part._buffers["codes"]) not in seen:
                leaves[f"{path}.weight"] = part.held
            seen.add(id(part._buffers["codes"]))
    for head in _heads(module):
        own = head.held if isinstance(head, _Codes) else getattr(head, "weight", None)
        first = None if own is None else parts_of(own)["data"]
        names = [n for n, leaf in leaves.items() if parts_of(leaf)["data"] is first]
        if first is not None and names:
            return {"head.weight": leaves.pop(names[0]), **leaves}
    return leaves


def is_scale(module: nn.Module, name: str) -> bool:
    """True for a buffer of a quantized layer, by its path."""
    return isinstance(module.get_submodule(name.rpartition(".")[0]), _Codes)


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Give the module back the tensors that it had if anything inside fails."""
    before = [(slot, slot.tensor) for slot in slots(module)]
    try:
        yield
    except BaseException:
        for slot, tensor in before:
            slot.place[slot.key] = tensor
        raise
