"""The decoder over exact ops, which are the contract's meaning; and who keeps the contract."""

import importlib
import inspect
from contextlib import nullcontext

import numpy as np
import pytest

from dualinfer import decoder
from dualinfer.model.weights import parts_of, with_parts
from dualinfer.ops import contract, exact, plain
from dualinfer.ops.contract import LayerAttention, Tokens
from dualinfer.ops.schemes import BlockArithmetic

from .models import relative_rms

pytest.importorskip("torch")


class ExactOps(plain.PlainOps):
    """Plain ops over NumPy in float64."""

    maths, schemes, implementations = exact.MATHS, BlockArithmetic(exact.MATHS), {}

    def __init__(self):
        super().__init__()
        self.spans = []

    def span(self, name):
        self.spans.append(name)
        return nullcontext()

    def frequencies(self, params, rope):
        return np.array(rope.tables)

    def layer_attention(self, spec, params, index):
        a = spec.layers[index].attention
        slopes = None if a.alibi is None else np.array(a.alibi)
        return LayerAttention.named(a, params.layers[index], params.outer, slopes=slopes)


class NumpyParams:
    """The weights of a torch engine as NumPy has them."""

    def __init__(self, params):
        self.outer = _arrays(params.outer)
        self.layers = [_arrays(layer) for layer in params.layers]


def _arrays(w):
    parts = {name: {k: x.numpy() for k, x in parts_of(leaf).items()} for name, leaf in w.items()}
    return {name: with_parts(w[name], own) for name, own in parts.items()}


@pytest.mark.parametrize(
    "name", ["llama-gqa", "qwen3", "gemma2", "gptj", "bloom", "opt-post", "bert-masked", "bert"]
)
def test_decoder_gives_the_same_over_any_ops_of_the_contract(name, engine_of):
    engine = engine_of(name, "torch")
    spec, ops = engine.runner.spec, ExactOps()
    params = NumpyParams(engine.runner.params)
    ids = np.random.default_rng(3).integers(3, 60, (2, 7))
    positions = np.broadcast_to(np.arange(7), ids.shape)
    has_types = spec.embedding.own_types
    types = np.zeros_like(ids) if has_types else None

    angles = ops.angles(spec, params, positions)

    def attend(i, qkv):
        return ops.attend(ops.layer_attention(spec, params, i), qkv, angles)[0]

    tokens, mixers = Tokens(ids, positions, token_types=types), decoder.Mixers(attend)
    states = decoder.hidden_states(spec, params, ops, tokens, mixers, keep=True)
    found = decoder.outputs(spec, params, ops, states, keep=True)
    expected = engine(ids, output_hidden_states=True)
    assert set(found) == set(expected)
    for key in set(found) - {"hidden_states"}:
        assert relative_rms(found[key], expected[key]) < 1e-5
    for state, wanted in zip(found["hidden_states"], expected["hidden_states"], strict=True):
        assert relative_rms(state, wanted) < 1e-5
    layers = [name for name in ops.spans if name.startswith("layer.")]
    assert layers == [f"layer.{i}" for i in range(len(spec.layers))]


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
