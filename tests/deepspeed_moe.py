"""MoE layers with the classes, parts and tensors of DeepSpeed's, by the rules in plain words.

`tests/real_deepspeed_moe.py` compares them with DeepSpeed's own.
"""

import copy
import math

import torch
from torch import nn


class TopKGate(nn.Module):
    """Which experts a token goes to; the rules are those of evaluation, without noise."""

    def __init__(self, width, count, k, factor, least, drop_tokens, use_rts, sampling):
        super().__init__()
        self.wg = nn.Linear(width, count, bias=False)
        self.k, self.eval_capacity_factor, self.min_capacity = k, factor, least
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = sampling
        self.capacity_factor, self.noisy_gate_policy = 7.0, None

    def forward(self, x):
        """For each token its experts with their weights, the loss, and the counts."""
        gates = torch.softmax(x.float() @ self.wg.weight.float().T, 1)
        tokens, count = gates.shape
        ranked = [row.argsort(descending=True, stable=True)[: self.k].tolist() for row in gates]
        counts = torch.zeros(count, dtype=torch.int64)
        for row in ranked:
            for i in row:
                counts[i] += 1
        loads = torch.zeros(tokens, count)
        for t, row in enumerate(ranked):
            loads[t, row[:1] if self.k == 2 else row] = 1
        loss = (gates.mean(0) * loads.mean(0)).sum() * count / (self.k if self.k > 2 else 1)
        kept = self._kept(gates, ranked)
        routes = []
        for t, row in enumerate(ranked):
            own = [(i, gates[t, i]) for i in row if (t, i) in kept]
            total = sum(w for _, w in own) if self.k > 1 else 1
            routes.append([(i, w / total) for i, w in own])
        return routes, loss, counts

    def _kept(self, gates, ranked):
        """The pairs of token and expert that are within an expert's capacity."""
        tokens, count = gates.shape
        pairs = [
            (t, i) for place in range(self.k) for t in range(tokens) for i in [ranked[t][place]]
        ]
        if not self.drop_tokens:
            return set(pairs)
        capacity = max(
            math.ceil(tokens / count * self.eval_capacity_factor * self.k), self.min_capacity
        )
        if self.k == 1:  # any of equals, as torch.topk finds them
            chosen = torch.zeros(tokens, count, dtype=torch.int64)
            for t, i in pairs:
                chosen[t, i] = 1
            first = chosen.topk(min(capacity, tokens), 0).indices
            return {(t, i) for t, i in pairs if t in first[:, i]}
        if self.k > 2:  # the likeliest first
            pairs.sort(key=lambda pair: -float(gates[pair]))
        kept, taken = set(), [0] * count
        for t, i in pairs:
            taken[i] += 1
            if taken[i] <= capacity:
                kept.add((t, i))
        return kept


class Experts(nn.Module):
    """Copies of one module."""

    def __init__(self, expert, count):
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(count)])

    def forward(self, inputs):
        """Each expert's own; `MOELayer` calls them by token."""
        raise NotImplementedError


class MOELayer(nn.Module):
    """Tokens to experts and back, one token after another."""

    def __init__(self, gate, experts):
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden, used_token=None):
        """The weighted sum of the experts' outputs."""
        x = hidden.reshape(-1, hidden.shape[-1])
        routes, self.l_aux, self.exp_counts = self.gate(x)
        rows = []
        for row, own in zip(x, routes, strict=True):
            outputs = [
                (self.experts.deepspeed_experts[i](row[None, None, None]), w) for i, w in own
            ]
            parts = [(y[0] if isinstance(y, tuple) else y)[0, 0, 0] * w for y, w in outputs]
            rows.append(sum(parts, torch.zeros_like(row)))
        return torch.stack(rows).reshape(hidden.shape)


class MoE(nn.Module):
    """A MoE layer; with `use_residual` a dense MLP beside the experts, the two weighed by a token.

    With `ep_size` it holds a part of its experts.
    """

    def __init__(
        self,
        hidden_size,
        expert,
        num_experts=1,
        ep_size=1,
        k=1,
        eval_capacity_factor=1.0,
        min_capacity=4,
        use_residual=False,
        drop_tokens=True,
        use_rts=True,
        top2_2nd_expert_sampling=True,
    ):
        super().__init__()
        self.use_residual, self.num_experts = use_residual, num_experts
        how = k, eval_capacity_factor, min_capacity, drop_tokens, use_rts
        gate = TopKGate(hidden_size, num_experts, *how, top2_2nd_expert_sampling)
        self.deepspeed_moe = MOELayer(gate, Experts(expert, num_experts // ep_size))
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(self, hidden_states, used_token=None):
        """(output, loss, counts)."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            weights = self.coefficient(hidden_states).softmax(-1)
            output = output * weights[..., 0:1] + dense * weights[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


class Feed(nn.Module):
    """What DeepSpeed's users put in the place of a HF layer's MLP; BLOOM's adds a residual."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x, residual=None):
        """The layer's output without its loss and counts."""
        y = self.moe(x)[0]
        return y if residual is None else y + residual


class Mlp(nn.Module):
    """Two layers of a known form."""

    def __init__(self, width, ffn):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x):
        """x [..., width] to the same."""
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class Odd(nn.Module):
    """An expert of no known form, which returns a bias beside its output, as Megatron's do."""

    def __init__(self, width, ffn):
        super().__init__()
        self.way, self.back = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        """(output, bias)."""
        return self.back(self.way(x).sin()) * self.scale + x.square(), self.scale


class Block(nn.Module):
    """A layer around a MoE layer."""

    def __init__(self, width, moe):
        super().__init__()
        self.norm, self.mix, self.moe = nn.LayerNorm(width), nn.Linear(width, width), moe

    def forward(self, x):
        """x [..., width] to the same."""
        self.losses = []
        y, loss, counts = self.moe(self.mix(self.norm(x)))
        self.losses.append((loss, counts))
        return x + y


class Model(nn.Module):
    """Ids to logits over a stack of such layers."""

    def __init__(self, make, layers=2, width=12, ffn=20, vocab=37, expert=Mlp, **fields):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        blocks = [Block(width, make(width, expert(width, ffn), **fields)) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        """Logits [B, T, vocab]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model(seed=0, make=MoE, **fields):
    """A model with random weights, biases among them, the same for a seed."""
    torch.manual_seed(seed)
    model = Model(make, **fields).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    for name, parameter in model.named_parameters():
        if "wg" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    return model
