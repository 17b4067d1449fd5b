"""The decoder over ops of NumPy, which are the contract's meaning; and who keeps the contract."""

import importlib
import inspect
from contextlib import nullcontext

import numpy as np
import pytest

from dualinfer import decoder
from dualinfer.kernels import reference
from dualinfer.model.weights import parts_of
from dualinfer.ops import contract
from dualinfer.ops.contract import ALONE, LayerAttention

from .models import relative_rms

pytest.importorskip("torch")


class NumpyOps:
    """The contract in NumPy, float32, composed of the reference's primitives."""

    def __init__(self):
        self.spans = []

    def span(self, name):
        self.spans.append(name)
        return nullcontext()

    def embed(self, spec, w, ids, positions, token_types):
        x = reference.embed(ids, _array(w["embed.weight"])) * np.float32(spec.embed_scale)
        if spec.embed_width:
            x = reference.matmul(x, _array(w["project_in.weight"]))
        if token_types is not None:
            x = x + reference.embed(token_types, _array(w["token_types.weight"]))
        if spec.learned_positions:
            at = positions + spec.position_offset
            x = x + reference.embed(at, _array(w["positions.weight"]))
        return x

    def norm(self, x, norm, residual=None):
        x = x if residual is None else residual + x
        spec, weight, bias = norm.spec, _array(norm.weight), _array(norm.bias)
        if spec.kind == "rms":
            return reference.rms_norm(x, weight, spec.eps, spec.unit_offset)
        return reference.layer_norm(x, weight, bias, spec.eps, spec.unit_offset)

    def linear(self, x, weight, by=ALONE):
        x = self.norm(x, by.norm) if by.norm else x
        y = reference.matmul(x, _array(weight), _array(by.bias))
        if by.activation is not None:
            name = "gated_activation" if by.gated else "activation"
            y = getattr(reference, name)(y, by.activation)
        return y if by.residual is None else by.residual + y

    def read(self, x, weight, by):
        x = self.norm(x.y, x.norm, x.residual)
        return self.linear(x, weight, by), x

    def row_product(self, x, weight, by=ALONE):
        return self.linear(x, weight, by)

    def add(self, x, y, norm=None):
        return x + (y if norm is None else self.norm(y, norm))

    def clip(self, x, limit):
        return np.clip(x, -limit, limit)

    def xielu(self, x, numbers):
        return reference.xielu(x, *map(_array, numbers))

    def softcap(self, logits, cap):
        return np.tanh(logits / cap) * cap

    def pool(self, x, weights, segments=None, count=1, largest=False):
        return reference.pool(x, weights, segments, count, largest)

    def like(self, x, other):
        return x.astype(other.dtype)

    def gather_logits(self, logits):
        return logits

    def layer_attention(self, spec, params, index):
        a = spec.layers[index].attention
        slopes = None if a.alibi is None else np.array(a.alibi, np.float32)
        return LayerAttention.named(a, params.layers[index], params.outer, slopes=slopes)

    def attend(self, layer, qkv, positions):
        a = layer.spec
        parts = np.split(qkv, np.cumsum(a.qkv_sizes[:2]), axis=-1)
        q, k, v = (x.reshape(*x.shape[:2], -1, a.head_dim) for x in parts)
        if layer.q_norm:
            q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        if a.rope:
            angles = positions[..., None] * np.array(a.rope.inv_freq, np.float32)
            cos, sin = (f(angles) * a.rope.scaling for f in (np.cos, np.sin))
            q, k = (reference.rotary(x, cos, sin, a.rope.interleaved) for x in (q, k))
        how = {"scale": a.scale, "causal": a.causal, "window": a.window, "softcap": a.softcap}
        y = reference.attention(q, k, v, alibi=layer.slopes, **how)
        return y.reshape(*y.shape[:2], -1)


def _array(weight):
    return None if weight is None else parts_of(weight)["data"].numpy()


@pytest.mark.parametrize(
    "name", ["llama-gqa", "qwen3", "gemma2", "gptj", "bloom", "opt-post", "bert-masked", "bert"]
)
def test_decoder_gives_the_same_over_any_ops_of_the_contract(name, engine_of):
    engine = engine_of(name, "torch")
    spec, params, ops = engine.runner.spec, engine.runner.params, NumpyOps()
    ids = np.random.default_rng(3).integers(3, 60, (2, 7))
    positions = np.broadcast_to(np.arange(7), ids.shape)
    has_types = spec.token_types and not spec.token_types_from_vocab
    types = np.zeros_like(ids) if has_types else None

    def attend(i, qkv):
        return ops.attend(ops.layer_attention(spec, params, i), qkv, positions)

    states = decoder.hidden_states(spec, params, ops, ids, positions, types, attend, keep=True)
    found = decoder.outputs(spec, params, ops, states, keep=True)
    expected = engine(ids, output_hidden_states=True)
    assert set(found) == set(expected)
    for key in set(found) - {"hidden_states"}:
        assert relative_rms(found[key], expected[key]) < 1e-5
    for state, wanted in zip(found["hidden_states"], expected["hidden_states"], strict=True):
        assert relative_rms(state, wanted) < 1e-5
    assert ops.spans == [f"layer.{i}" for i in range(len(spec.layers))]


OPS = [
    *(("torch.ops.plain", "PlainOps"), ("torch.ops.kernels", "KernelOps")),
    *(("torch.ops.split", "SplitKernelOps"), ("jax.ops.plain", "PlainOps")),
    *(("jax.ops.kernels", "KernelOps"), ("jax.ops.split", "SplitKernelOps")),
    ("torch.tuning.recorder", "Recorder"),  # of what the blocks call alone
]


@pytest.mark.parametrize(("module", "name"), OPS)
def test_ops_take_what_the_contract_says(module, name):
    pytest.importorskip("triton" if module.startswith("torch") else "jax")
    own = getattr(importlib.import_module(f"dualinfer.backends.{module}"), name)
    contracts = contract.BlockOps if name == "Recorder" else contract.Ops
    for op in [op for op in dir(contracts) if not op.startswith("_")]:
        promised = getattr(contracts, op)
        if isinstance(promised, property):
            assert hasattr(own, op)
            continue
        wanted = inspect.signature(promised).parameters
        taken = dict(inspect.signature(getattr(own, op)).parameters)
        for parameter in wanted.values():
            mine = taken.pop(parameter.name)
            assert (mine.kind, mine.default) == (parameter.kind, parameter.default)
        assert all(extra.default is not extra.empty for extra in taken.values())
