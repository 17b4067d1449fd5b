"""Linear layers in fewer bits: codes in the place of their weights, in the caller's own module."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ....arrays import from_numpy
from ....checkpoint.sources import TorchSource
from ....errors import ConfigError, ModelError, counted
from ....model.weights import Leaf, Weight
from ....quantization import Blocks, BlockScheme
from ....quantization.packing import hold
from ....quantization.quantize import Quantizing
from ....quantization.recipe import HEAD, Recipe
from ..ops.primitives import SCHEMES
from .autotp.layers import is_conv1d
from .fill import is_hf, slots


class QuantizedLinear(nn.Linear):
    """x [..., in] to [..., out] by codes; its dtype is that in which their values are computed.

    It holds codes, scales, zeros and second factors as buffers, and keeps the scales' dtype in a
    cast. `weight` is the matrix that they mean, made anew each time it is asked for.
    """

    scheme: BlockScheme

    @classmethod
    def instead_of(
        cls, old: Any, scheme: BlockScheme, parts: Mapping[str, torch.Tensor]
    ) -> "QuantizedLinear":
        """A layer that does what `old` does, a Linear or a Conv1D, with its hooks and its bias."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        vars(new).update(vars(old))
        new._parameters, new._buffers = {"bias": old.bias}, {}
        new.out_features, new.in_features = old.weight.shape
        if is_conv1d(old):
            new.in_features, new.out_features = old.weight.shape
        new.scheme = scheme
        for part, tensor in parts.items():
            new.register_buffer("codes" if part == "data" else part, tensor)
        like = torch.empty(0, dtype=old.weight.dtype, device=parts["data"].device)
        new.register_buffer("like", like, persistent=False)
        return new.train(old.training)

    @property
    def held(self) -> Weight:
        """What stands for the matrix."""
        beside = {part: t for part, t in self._buffers.items() if part not in ("codes", "like")}
        return Weight(
            self._buffers["codes"],
            ("out", "in"),
            self.scheme,
            beside,
            self.like.dtype,
            Blocks(self.scheme.rows, self.scheme.columns, self.in_features),
        )

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The matrix [out, in] that the codes mean."""
        return SCHEMES.dequantize(self.held)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        if input.dtype != self.like.dtype:  # the error that a plain layer raises
            return functional.linear(input, self.weight, self.bias)
        y = SCHEMES.product(input, self.held, input.dtype)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Sizes and the scheme."""
        return f"{super().extra_repr()}, {self.scheme.name}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move all, and cast the bias and what tells the dtype; codes and scales keep theirs."""
        held = {part: t for part, t in self._buffers.items() if part != "like" and t is not None}
        try:
            for part in held:
                del self._buffers[part]
            super()._apply(fn, recurse)
            for part, old in held.items():
                new = fn(old)
                held[part] = new if new.dtype == old.dtype else old.to(new.device)
        finally:
            self._buffers.update(held)
        return self


def quantize_layers(module: nn.Module, recipe: Recipe) -> tuple[dict[int, Any], list[str]]:
    """What takes the place of a module's linear layers, by their ids, and notes for the report.

    Nothing of the module is changed. Those are nn.Linear, and transformers' Conv1D, whose forward
    is their class's own; a weight that is also somebody else's, as of a tied head, stays. The head
    of a HF model becomes HEAD. Raises ConfigError for what cannot be honoured, ModelError where
    nothing could be quantized, CheckpointError for a weight that is not finite.
    """
    if not recipe.qkv:
        raise ConfigError(
            "quant.qkv.enabled=False: in module mode nothing tells which layers are queries, keys "
            "and values. Leave it unset, or set replace_with_kernel_inject=True if dualinfer knows "
            "the model's family."
        )
    layers: dict[str, Any] = {n: part for n, part in module.named_modules() if _is_linear(part)}
    owners: dict[int, set[int]] = {}
    for slot in slots(module):
        owners.setdefault(id(slot.tensor), set()).add(id(slot.owner))
    tied = [name for name, part in layers.items() if len(owners[id(part.weight)]) > 1]
    chosen = {name: part for name, part in layers.items() if name not in tied}
    if not chosen:
        raise ModelError(
            f"quant is given, and no nn.Linear of this {type(module).__name__} can be quantized: "
            f"{'each is tied to another part' if tied else 'it has none'}. Leave quant unset."
        )
    head = id(_head_of(module))
    made: dict[int, Any] = {}
    for name, part in chosen.items():
        turned = is_conv1d(part)
        size = tuple(part.weight.shape)
        shape = (size[1], size[0]) if turned else (size[0], size[1])
        scheme = HEAD if id(part) == head else recipe.scheme_of(name, shape)
        source = TorchSource({f"{name}.weight": part.weight.detach()}, type(module).__name__)
        matrix = Quantizing(source, f"{name}.weight", scheme, turned)
        parts = _parts(matrix, part.weight.device)
        made[id(part)] = QuantizedLinear.instead_of(part, matrix.scheme, parts)
    notes = [f"quant: {len(made):,} linear layers hold codes; all else keeps its dtype"]
    if tied:
        notes.append(f"not quantized, since others have the same weight: {counted(tied)}")
    return made, notes


def replace_layers(module: nn.Module, made: Mapping[int, Any]) -> None:
    """Put what was made into every place of what it stands for."""
    for owner in module.modules():
        for name, part in owner._modules.items():
            if id(part) in made:
                owner._modules[name] = made[id(part)]


def leaves_by_name(module: nn.Module) -> dict[str, Leaf]:
    """Every matrix of codes, and every plain parameter; a shared one once."""
    leaves: dict[str, Leaf] = dict(module.named_parameters())
    for name, part in module.named_modules():
        if isinstance(part, QuantizedLinear):
            leaves[f"{name}.weight"] = part.held
    return leaves


def _is_linear(part: nn.Module) -> bool:
    """True for a layer whose forward is nn.Linear's or Conv1D's, with a weight of floats."""
    if type(part) is not nn.Linear and not is_conv1d(part):
        return False
    weight: Any = part.weight
    return "forward" not in vars(part) and weight.is_floating_point() and weight.numel() > 0


def _head_of(module: Any) -> Any:
    """The output embedding of a HF model, where it has one."""
    hf: Any = module if is_hf(module) else None
    return None if hf is None else hf.get_output_embeddings()


def _parts(matrix: Quantizing, device: torch.device) -> dict[str, torch.Tensor]:
    """A matrix as a device holds it."""
    everything = slice(0, matrix.shape[0]), slice(0, matrix.shape[1])
    parts: dict[str, Any] = {"data": matrix.codes(*everything), "scale": matrix.scale()}
    parts |= {"zero": matrix.zero(), "outer": matrix.outer()}
    parts = {part: array for part, array in parts.items() if array is not None}
    scheme = matrix.scheme
    if scheme.codes == "int4":
        parts["data"] = parts["data"].view(np.uint8) & 15
    if scheme.scale_dtype.startswith("float8"):
        parts["scale"] = parts["scale"].view(np.uint8)

    def pad(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.pad(a, [(0, most - n) for n, most in zip(a.shape, shape, strict=True)])

    held = hold(scheme, parts, pad)
    return {part: from_numpy(array, "torch").to(device) for part, array in held.items()}
