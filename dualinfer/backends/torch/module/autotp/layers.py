"""One rank's part of a module's layers: linear layers, embeddings, and what hooks do for others."""

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from .....errors import ClosedError
from ...parallel import Ranks
from .layouts import Runs, extent, take


class Seam(Protocol):
    """The seam where the ranks' parts come together."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        ...

    def join_last(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """Every rank's `x` [..., width] side by side, [..., sum of widths]."""
        ...

    def most(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of every rank's `x`, element by element."""
        ...


class RanksSeam:
    """The processes of an engine; tensors on the host go over the host's group.

    Copies of a module share it.
    """

    def __init__(self, ranks: Ranks) -> None:
        host = Ranks(ranks.members, ranks.rank, ranks.host, ranks.host, torch.device("cpu"))
        self._place = f"rank {ranks.rank} of {ranks.size}"
        self._ranks, self._host = ranks, host
        self._closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "RanksSeam":
        """Itself: groups have no copies."""
        return self

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Seam`."""
        return self._carrier(x).sum(x)

    def join_last(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """See `Seam`."""
        return self._carrier(x).join_last(x, widths)

    def most(self, x: torch.Tensor) -> torch.Tensor:
        """See `Seam`."""
        return self._carrier(x).most(x)

    def _carrier(self, x: torch.Tensor) -> Ranks:
        if self._closed:
            raise ClosedError(
                f"This module is {self._place} of a split one, and the engine that joined them was "
                "closed. Load the module again and make a new engine with init_inference()."
            )
        return self._host if x.device.type == "cpu" else self._ranks

    def close(self) -> None:
        """The groups are about to be given up."""
        self._closed = True


_BIASES = ("alibi", "attention_mask", "position_bias")


class Part:
    """The base of split layers, with `whole`, the shape of the weight before it was split."""

    whole: tuple[int, ...]


def _bare(layer: Any, like: nn.Module, **fields: Any) -> Any:
    """A `layer` without the memory that its constructor would reserve."""
    new = layer.__new__(layer)
    nn.Module.__init__(new)
    vars(new).update(fields)
    return new.train(like.training)


class ColumnLinear(nn.Linear, Part):
    """x [..., in] to this rank's outputs [..., local out]."""

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """The input times this rank's part of the weight."""
        return functional.linear(input, self.weight)

    def extra_repr(self) -> str:
        """Sizes here and of the whole."""
        return f"{super().extra_repr()}, whole={self.whole}"


class GatheredLinear(ColumnLinear):
    """x [..., in] to all outputs [..., out]: each rank's, gathered."""

    seam: Seam
    widths: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The outputs of all ranks."""
        local = self.product(input)
        output = self.seam.join_last(local, self.widths)
        return output if self.bias is None else output + self.bias


class RowLinear(ColumnLinear):
    """This rank's inputs [..., local in] to the sum over ranks [..., out], and the bias once."""

    seam: Seam

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        output = self.seam.sum(self.product(input))
        return output if self.bias is None else output + self.bias


class PartialLinear(ColumnLinear):
    """This rank's inputs [..., local in] to its part of a sum [..., out] that is made later."""


class VocabEmbedding(nn.Embedding, Part):
    """Ids [...] to rows [..., E], of which each rank has a part, from `first` on.

    `num_embeddings` is that of the whole: code around the table bounds ids by it.
    """

    seam: Seam
    first: int
    embed_scale: Any  # of HF's scaled embeddings: a number, or a tensor; else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows, summed over ranks."""
        rows = input - self.first
        count = self.weight.shape[0]
        here = (rows >= 0) & (rows < count)
        # Ids beyond the vocabulary stay what they are, for torch to refuse.
        known = (input >= 0) & (input < self.whole[0])
        rows = torch.where(known, rows.clamp(0, count - 1), input)
        vectors = functional.embedding(rows, self.weight)
        vectors = self.seam.sum(vectors.masked_fill(~here.unsqueeze(-1), 0))
        scale = self.embed_scale
        if scale is None:
            return vectors
        return vectors * (scale.to(vectors.dtype) if isinstance(scale, torch.Tensor) else scale)

    def extra_repr(self) -> str:
        """Sizes of the whole, and the rows here."""
        return f"{super().extra_repr()}, rows={self.weight.shape[0]}"


_LAYERS = {
    "column": ColumnLinear,
    "row": RowLinear,
    "gathered": GatheredLinear,
    "partial": PartialLinear,
}


class Shards:
    """Makes one rank's parts of a module's tensors; those that are tied stay tied."""

    def __init__(self, module: nn.Module, rank: int, seam: Seam) -> None:
        self.rank, self.seam = rank, seam
        seen: set[int] = set()
        self._tied: set[int] = set()
        for _, tensor in module.named_parameters(remove_duplicate=False):
            (self._tied if id(tensor) in seen else seen).add(id(tensor))
        # The whole ones are kept with their parts: an id must stay its owner's.
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, tensor: torch.Tensor, runs: Runs, dim: int) -> nn.Parameter:
        """This rank's part of a parameter, in memory of its own."""
        key = (id(tensor), runs, dim)
        if key in self._made:
            part: Any = self._made[key][1]
            return part
        new = nn.Parameter(take(tensor.detach(), runs, dim), requires_grad=tensor.requires_grad)
        if id(tensor) in self._tied:
            self._made[key] = tensor, new
        return new

    def linear(self, old: Any, kind: str, by_rank: tuple[Runs, ...]) -> nn.Linear:
        """The part of a Linear or a Conv1D that `kind` asks for: column, gathered, row or partial.

        A partial one has the bias where its inputs are the first ones.
        """
        runs, conv = by_rank[self.rank], is_conv1d(old)
        axis = 1 if kind in ("row", "partial") else 0
        weight = self.take(old.weight, runs, 1 - axis if conv else axis)
        if conv:
            weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
        layer = _LAYERS[kind]
        new = _bare(layer, old, whole=tuple(old.weight.shape))
        new.out_features, new.in_features = weight.shape
        bias = old.bias
        if bias is not None and kind == "column":
            bias = self.take(bias, runs, 0)
        elif kind == "partial" and runs[0].start:
            bias = None
        new.register_parameter("weight", weight)
        new.register_parameter("bias", bias)
        if kind in ("gathered", "row"):
            new.seam = self.seam
        if kind == "gathered":
            new.widths = tuple(extent(own) for own in by_rank)
        return new

    def embedding(self, old: Any, by_rank: tuple[Runs, ...]) -> nn.Embedding:
        """A part of the rows of an embedding."""
        runs = by_rank[self.rank]
        new = _bare(VocabEmbedding, old, whole=tuple(old.weight.shape), seam=self.seam)
        new.num_embeddings, new.embedding_dim = old.num_embeddings, old.embedding_dim
        new.padding_idx, new.max_norm, new.norm_type = None, None, old.norm_type
        new.scale_grad_by_freq, new.sparse = old.scale_grad_by_freq, old.sparse
        new.first = runs[0].start
        new.register_parameter("weight", self.take(old.weight, runs, 0))
        scale = getattr(old, "embed_scale", None)
        if isinstance(scale, torch.Tensor):
            new.register_buffer("embed_scale", scale, persistent=False)
        else:
            new.embed_scale = scale
        return new


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D: a Linear whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


EXPERT_WEIGHTS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}


def expert_axes(part: Any) -> tuple[int, int] | None:
    """The axes of an expert's width in fused experts' weights; None if their shapes do not fit.

    In gate_up_proj [X, 2F, E] and down_proj [X, E, F], or [X, E, 2F] and [X, F, E].
    """
    up, down = part.gate_up_proj.shape, part.down_proj.shape
    for axis in (1, 2):
        if up[axis] == 2 * down[3 - axis] and up[3 - axis] == down[axis]:
            return axis, 3 - axis
    return None


class SumOutput:
    """A forward hook: the module's output is summed over ranks."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return self.seam.sum(output)


class LocalHeads:
    """A forward pre-hook of attention: of biases for all heads, those of this rank's heads.

    Of `alibi` [B*H, ...], and of `alibi`, `attention_mask` and `position_bias` [H, ...] or
    [B, H, ...]; what has another extent there serves all heads, or is local already.
    """

    def __init__(self, heads: int, local: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.heads, self.local, self.names = heads, local, names
        self._indices: dict[torch.device, torch.Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """The arguments with local biases."""
        slices = tuple(
            self._slice(name, value) for name, value in zip(self.names, args, strict=False)
        )
        return (*slices, *args[len(slices) :]), {n: self._slice(n, v) for n, v in kwargs.items()}

    def _slice(self, name: str, value: Any) -> Any:
        if name not in _BIASES or not isinstance(value, torch.Tensor) or value.ndim < 3:
            return value
        if value.ndim == 4:
            return self._local(value) if value.shape[1] == self.heads else value
        if name == "attention_mask" or value.shape[0] % self.heads:
            return value
        return self._local(value.unflatten(0, (-1, self.heads))).flatten(0, 1)

    def _local(self, value: torch.Tensor) -> torch.Tensor:
        """Of [B, H, ...], the local heads."""
        first, count = self.local[0], len(self.local)
        if self.local == tuple(range(first, first + count)):
            return value[:, first : first + count]
        index = self._indices.get(value.device)
        if index is None:  # once, for it waits for the device
            index = self._indices[value.device] = torch.tensor(self.local, device=value.device)
        return value.index_select(1, index)
