"""DeepSpeed's MoE layers in a caller's module, run by their rules in the place of its dispatch.

They are told by the names of their classes and parts, so that DeepSpeed is not imported. The outer
layer stays the caller's: it adds the dense MLP of a residual one, and gives what it always gives.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from ....config.nested import MoEConfig
from ....errors import ConfigError, ModelError, shown
from ....model.deepspeed_moe import check_dispatch, describe_layers, draws_second, is_dispatch
from ....parallel.experts import check_type, parts_of


class Summing(Protocol):
    """The seam where ranks' parts come together; see `autotp.layers.Seam`."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        ...


class Routes(NamedTuple):
    """Of S tokens and X experts: `weights` [S, X] float32, and where a token goes, `kept` [S, X].

    `loss` is the gate's auxiliary loss, and `counts` [X] the tokens that chose each expert, those
    among them that are dropped.
    """

    weights: torch.Tensor
    kept: torch.Tensor
    loss: torch.Tensor
    counts: torch.Tensor


def route(
    logits: torch.Tensor, k: int, capacity: int | None = None, used: torch.Tensor | None = None
) -> Routes:
    """Route tokens by float32 logits [S, X], as DeepSpeed's gates do it without noise.

    One expert has its probability as its weight, more have theirs over the sum of those kept. An
    expert takes the first `capacity` tokens: with k = 2 by position, first choices before second
    ones, with more by probability, with k = 1 as torch.topk has it among equals. `used` [S] says
    which tokens count, with k = 1 alone, as there.
    """
    tokens, experts = logits.shape
    gates = logits.softmax(1)
    if k == 1:
        chosen = functional.one_hot(gates.argmax(1), experts)
        if used is not None:
            chosen = chosen * used.reshape(-1, 1).to(chosen.device)
        counts, loads, kept = chosen.sum(0), chosen, chosen
        if capacity is not None:
            first = chosen.topk(min(capacity, tokens), 0).indices
            kept = chosen * torch.zeros_like(chosen).scatter_(0, first, 1)
        loss = (gates.mean(0) * loads.float().mean(0)).sum() * experts
        return Routes(gates * kept, kept.bool(), loss, counts)
    if k == 2:
        first = functional.one_hot(gates.argmax(1), experts)
        others = logits.masked_fill(first.bool(), float("-inf"))
        second = functional.one_hot(others.argmax(1), experts)
        counts, loads = (first + second).sum(0), first
        if capacity is not None:
            before = first.sum(0)
            first = first * (first.cumsum(0) <= capacity)
            second = second * (second.cumsum(0) + before <= capacity)
        kept = first + second
    else:
        best = gates.topk(k, 1)
        kept = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, best.indices, True)
        counts, loads = kept.sum(0), kept
        if capacity is not None:
            scores = torch.zeros_like(gates).scatter(1, best.indices, best.values)
            highest = scores.topk(min(capacity, tokens), 0, sorted=False).indices
            kept = kept & torch.zeros_like(kept).scatter_(0, highest, True)
    loss = (gates.mean(0) * loads.float().mean(0)).mean() * experts * experts
    weights = gates * kept
    least = torch.finfo(weights.dtype).eps
    weights = weights / weights.sum(1, keepdim=True).clamp(min=least)
    return Routes(weights, kept.bool(), loss if k == 2 else loss / k, counts)


class MixtureLayer(nn.Module):
    """The layer in the place of DeepSpeed's MOELayer, with the same `gate` and `experts`.

    x [..., E] to the weighted sum of the chosen experts' outputs [..., E]; `l_aux` and `exp_counts`
    are those of the last call. Tokens are dropped only with `drops`. Of `count` experts it holds
    those of `held`, by their numbers; what it gives is summed over `seam`, if there is one. Live
    layers of several processes have `period` experts each, which count from 0 in every one.
    """

    def __init__(self, original: Any, drops: bool) -> None:
        super().__init__()
        self.gate, self.experts = original.gate, original.experts
        self._forward_hooks = original._forward_hooks
        self._forward_pre_hooks = original._forward_pre_hooks
        self._forward_hooks_with_kwargs = original._forward_hooks_with_kwargs
        self._forward_pre_hooks_with_kwargs = original._forward_pre_hooks_with_kwargs
        self.count = int(self.gate.wg.weight.shape[0])
        self.held = range(self.count)
        self.period = len(self.experts.deepspeed_experts)
        self.parts = 1  # in which experts are to be shared out
        self.may_cut = True  # within experts, where these are not shared out
        self.drops = drops and bool(getattr(self.gate, "drop_tokens", True))
        self.seam: Summing | None = None
        self.l_aux: Any = None
        self.exp_counts: Any = None
        self.training = original.training
        vars(self)["original"] = original  # no part of this one

    @property
    def is_partial(self) -> bool:
        """True for a layer that was made with a part of its experts."""
        return self.period < self.count

    def forward(self, hidden: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        """See the class; `used_token` as in `route`."""
        x = hidden.reshape(-1, hidden.shape[-1])
        k = int(self.gate.k)
        capacity = self._capacity(len(x), k) if self.drops else None
        logits = functional.linear(x.float(), self.gate.wg.weight.float())
        routes = route(logits, k, capacity, used_token)
        self.l_aux, self.exp_counts = routes.loss, routes.counts
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._add_all(x, routes, total)
        else:
            self._add_chosen(x, routes, total)
        if self.seam is not None:
            total = self.seam.sum(total)
        return total.to(hidden.dtype).reshape(hidden.shape)

    def _capacity(self, tokens: int, k: int) -> int:
        """Tokens that an expert takes, rounded as in float32."""
        factor = float(getattr(self.gate, "eval_capacity_factor", 1.0)) * k
        share = torch.ceil((tokens / self.count) * torch.tensor(factor, device="cpu"))
        return max(int(share), int(getattr(self.gate, "min_capacity", 4)))

    def _add_chosen(self, x: torch.Tensor, routes: Routes, total: torch.Tensor) -> None:
        """Add what each expert gives for its tokens; the host asks once how many these are."""
        experts, rows = routes.kept.t().nonzero().unbind(1)
        sizes = torch.bincount(experts, minlength=self.count).tolist()
        for i, own in enumerate(rows.split(sizes)):
            if i in self.held and len(own):
                weights = routes.weights[own, i].unsqueeze(1)
                total.index_add_(0, own, self._call(i, x[own]).float() * weights)

    def _add_all(self, x: torch.Tensor, routes: Routes, total: torch.Tensor) -> None:
        """The same while a graph is captured, when the host may not ask: all tokens to all."""
        for i in self.held:
            output = self._call(i, x).float() * routes.weights[:, i : i + 1]
            total += output.masked_fill(~routes.kept[:, i : i + 1], 0)

    def _call(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """An expert's output; DeepSpeed gives it [ranks, experts, tokens, E], and drops biases."""
        output = self.expert(i)(x[None, None])
        if isinstance(output, tuple):
            output = output[0]
        return output.reshape(x.shape)

    def expert(self, i: int) -> nn.Module:
        """The expert of this number."""
        return self.experts.deepspeed_experts._modules[str(i % self.period)]

    def keep(self, held: range) -> None:
        """Hold these experts alone, under their old names."""
        own = self.experts.deepspeed_experts._modules
        for i in range(self.count) if not self.is_partial else ():
            if i not in held:
                del own[str(i)]
        self.held = held

    def extra_repr(self) -> str:
        """The number of experts, and those of this rank."""
        here = "" if len(self.held) == self.count else f", here {self.held.start} to "
        return f"experts={self.count}{here}{self.held.stop - 1 if here else ''}, k={self.gate.k}"


class Mixture(NamedTuple):
    """A MoE layer of DeepSpeed's: its path, its dispatch, and what holds that at `key`."""

    path: str
    owner: nn.Module
    key: str
    original: nn.Module
    layer: MixtureLayer

    @property
    def is_residual(self) -> bool:
        """True with a dense MLP beside the experts."""
        return isinstance(getattr(self.owner, "coefficient", None), nn.Module)

    def put(self) -> None:
        """Let our layer run, unless the caller has put another one there."""
        found = self.owner._modules.get(self.key)
        if found is not self.layer and (
            found is self.original or (isinstance(found, MixtureLayer) and _same(found, self.layer))
        ):
            self.owner._modules[self.key] = self.layer

    def put_back(self) -> None:
        """Let DeepSpeed's own run again."""
        if self.owner._modules.get(self.key) is self.layer:
            self.owner._modules[self.key] = self.original


def _same(one: MixtureLayer, other: MixtureLayer) -> bool:
    return one.gate is other.gate and one.experts is other.experts


class Mixtures:
    """The MoE layers of DeepSpeed's that a module holds, in the order of its parts.

    Raises ModelError or UnsupportedError for those that are not as DeepSpeed makes them.
    """

    def __init__(self, module: nn.Module, moe: MoEConfig) -> None:
        self.kind = type(module).__name__
        self._added: list[tuple[MixtureLayer, list[str], int]] = []
        self.found: list[Mixture] = []
        if isinstance(module, torch.jit.ScriptModule):
            return
        made: dict[int, tuple[nn.Module, MixtureLayer]] = {}
        drops = moe.enabled and moe.drop_tokens
        for path, owner in module.named_modules():
            for key, part in owner._modules.items():
                if not _is_dispatch(part):
                    continue
                original: Any = part.original if isinstance(part, MixtureLayer) else part
                if id(original) not in made:
                    check_dispatch(f"{path}.{key}".lstrip("."), original)
                    made[id(original)] = original, MixtureLayer(original, drops)
                layer = made[id(original)][1]
                self.found.append(Mixture(path, owner, key, original, layer))

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self.found)

    @property
    def layers(self) -> list[MixtureLayer]:
        """Our layers, each once."""
        return list({id(m.layer): m.layer for m in self.found}.values())

    def check(self, moe: MoEConfig, size: int, filled: bool, quantized: bool) -> None:
        """Raise ConfigError or ModelError for what `moe` asks of this module over `size` ranks.

        `filled`: a checkpoint is about to fill the module, with all experts; `quantized`: its
        linear layers become so.
        """
        if not self.found:
            self._check_none(moe)
            return
        counts = [mixture.layer.count for mixture in self.found]
        parts = parts_of(moe, counts, self.kind, size)
        if moe.enabled:
            check_type(moe, [m.is_residual for m in self.found], f"the {self.kind}")
            self._check_drops(moe)
            for name in ("ep_group", "ep_mp_group"):
                if getattr(moe, name) is not None:
                    raise ConfigError(
                        f"moe.{name}: in module mode processes in a row share out the experts. Set "
                        "moe.ep_size, and tensor_parallel.tp_group for other processes."
                    )
        if quantized and size > 1 and parts not in (1, size):
            raise ConfigError(
                f"moe.ep_size={parts} over {size} processes cuts within experts, and quant is "
                f"given: quantized experts are whole. Use {size}, or leave quant unset."
            )
        for mixture in self.found:
            layer = mixture.layer
            layer.parts, layer.may_cut = parts, not quantized
            if not layer.is_partial or filled:
                continue
            share, made_for = layer.period, layer.count // layer.period
            if parts != size or made_for != size:
                raise ModelError(
                    f"{mixture.path or self.kind} was made with ep_size={made_for} and holds "
                    f"{share} of its {layer.count} experts. Start {made_for} processes with "
                    f'tensor_parallel.tp_size={made_for} and moe={{"ep_size": {made_for}}}, pass '
                    "checkpoint= with all experts, or make the layer with ep_size=1."
                )

    def _check_none(self, moe: MoEConfig) -> None:
        """Raise ConfigError where a module without such layers is asked for what they alone do."""
        nothing = {"ep_size": 1, "moe_experts": [1], "type": "standard", "drop_tokens": False}
        for name, value in {**nothing, "ep_group": None, "ep_mp_group": None}.items():
            asked = getattr(moe, name)
            if moe.enabled and asked != value:
                fused = ", or set replace_with_kernel_inject=True if fused mode serves the model"
                raise ConfigError(
                    f"moe.{name}={shown(asked)}: in module mode that is for DeepSpeed's MoE layers "
                    f"alone, and the {self.kind} has none. Leave it unset"
                    f"{'' if name == 'drop_tokens' else fused}."
                )

    def _check_drops(self, moe: MoEConfig) -> None:
        """Raise ConfigError where DeepSpeed's own choice of what is dropped is left to chance."""
        if not moe.drop_tokens:
            return
        for mixture in self.found:
            gate: Any = mixture.layer.gate
            if not mixture.layer.drops:
                continue
            chance = ""
            if gate.k == 1 and getattr(gate, "use_rts", False):
                chance = "use_rts=True drops tokens at random"
            elif gate.k == 2 and getattr(gate, "top2_2nd_expert_sampling", True):
                chance = "top2_2nd_expert_sampling=True draws the second expert at random"
            if chance:
                place = f"{mixture.path}.{mixture.key}.gate".lstrip(".")
                name = chance.partition("=")[0]
                raise ConfigError(
                    f"moe.drop_tokens=True: {place} with {chance}, so that no call gives what "
                    f"another gave. Set {name}=False on it, or leave moe.drop_tokens unset: then "
                    "no token is dropped, and the likeliest experts are chosen."
                )

    def put(self) -> None:
        """Let our layers run."""
        for mixture in self.found:
            mixture.put()

    def put_back(self) -> None:
        """Let DeepSpeed's run again, with the experts that they had; not for layers of a split."""
        for mixture in self.found:
            if mixture.layer.seam is None:
                mixture.put_back()

    def complete(self) -> None:
        """Give layers that were made with a part of their experts all of them, without values."""
        for layer in self.layers:
            if not layer.is_partial:
                continue
            own, before = layer.experts.deepspeed_experts._modules, layer.period
            names = [str(i) for i in range(before, layer.count)]
            for name in names:
                own[name] = copy.deepcopy(own["0"]).to("meta")
            layer.period = layer.count
            self._added.append((layer, names, before))

    def undo(self) -> None:
        """Take everything back after a failure, so that the module is as it was."""
        for layer, names, before in self._added:
            for name in names:
                layer.experts.deepspeed_experts._modules.pop(name, None)
            layer.period = before
        self._added = []
        self.put_back()

    @property
    def own_parts(self) -> tuple[str, ...]:
        """Starts of the names of tensors that processes do not have in common."""
        return tuple(
            f"{m.path}.{m.key}.experts.".lstrip(".") for m in self.found if m.layer.is_partial
        )

    def notes(self) -> list[str]:
        """For the report."""
        if not self.found:
            return []
        drops = sum(m.layer.drops for m in self.found)
        drawn = any(draws_second(m.layer.gate) for m in self.found)
        return [describe_layers([m.layer.count for m in self.found], drops, drawn)]


def _is_dispatch(part: Any) -> bool:
    return part.seam is None if isinstance(part, MixtureLayer) else is_dispatch(part)


def mixture_layers(module: nn.Module) -> Sequence[tuple[str, MixtureLayer]]:
    """Our layers in a module, with their paths."""
    return [(p, part) for p, part in module.named_modules() if isinstance(part, MixtureLayer)]
