"""The JAX engine as scripts for HF and for JAX use it: its module, outputs, limits."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.engine.fused import FusedEngine
from dualinfer.engine.module import ModuleEngine
from dualinfer.errors import ClosedError, UnsupportedError
from dualinfer.model.outputs import Outputs, make_outputs

from .cases import make_model
from .models import random_ids, relative_rms
from .test_pipelines import make_gpt2, make_tokenizer

pytest.importorskip("flax")
import jax
import jax.numpy as jnp
from flax import nnx

CAUSAL = "llama-gqa"
GREEDY = dict(max_new_tokens=4, do_sample=False)


def make_engine(model, **fields):
    return dualinfer.init_inference(model, backend="jax", dtype="fp32", **fields)


@pytest.fixture
def fused(engine_of):
    return engine_of(CAUSAL, "jax")


@pytest.fixture(scope="module")
def module_engine():
    return make_engine(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))


@pytest.fixture(params=["fused", "module"])
def engine(request, fused, module_engine):
    return fused if request.param == "fused" else module_engine


# engine.module in fused mode.


def test_module_runs_and_generates_as_hf_does(fused, hf_model):
    module, ids = fused.module, torch.from_numpy(random_ids(2, 5))
    with torch.no_grad():
        expected = hf_model(CAUSAL)(ids).logits
    assert relative_rms(module(ids).logits.numpy(), expected.numpy()) < 1e-5
    expected = hf_model(CAUSAL).generate(ids, **GREEDY)
    np.testing.assert_array_equal(module.generate(ids, **GREEDY), expected)
    assert module.config is fused.config
    assert module.generation_config is fused.generation_config
    assert (module.device, module.dtype) == (fused.device, fused.dtype)
    assert module.can_generate() is True
    assert fused.module is module and module.eval() is module and module.to("cpu") is module
    with pytest.raises(UnsupportedError, match="inference"):
        module.train()
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


def test_module_is_the_nnx_model_that_the_runner_holds(fused):
    module, weights = fused.module, fused.runner.module
    assert isinstance(module, nnx.Module) and isinstance(module, type(weights))
    found, expected = (nnx.to_flat_state(nnx.state(m)) for m in (module, weights))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine[...] is theirs[...]
    _, state = nnx.split(module)
    assert len(jax.tree.leaves(state)) == len(found)
    assert module.layers[1] is weights.layers[1]
    assert module.layers[0].qkv.weight.shape == module.layers[0].qkv.weight[...].shape
    assert len(list(nnx.iter_modules(module))) == len(list(nnx.iter_modules(weights)))
    assert "qkv" in repr(module)
    assert sum(x.size for x in jax.tree.leaves(module)) == fused.report().parameters


def test_copies_of_the_module_have_its_weights_alone(fused):
    module = fused.module
    for other in (nnx.clone(module), nnx.merge(*nnx.split(module)), copy.deepcopy(module)):
        np.testing.assert_array_equal(
            other.layers[0].down.weight[...], module.layers[0].down.weight[...]
        )
        with pytest.raises(UnsupportedError, match="copy of a fused engine's module"):
            other(random_ids(1, 3))
        assert not hasattr(other, "generate")


def test_module_keeps_its_engine_and_goes_with_it(hf_model):
    gc.collect()
    gc.disable()
    try:
        engine = make_engine(hf_model(CAUSAL))
        expected = engine.generate(random_ids(1, 4), **GREEDY)
        module, gone = engine.module, weakref.ref(engine)
        del engine
        np.testing.assert_array_equal(module.generate(random_ids(1, 4), **GREEDY), expected)
        view = weakref.ref(module)
        del module
        assert view() is None and gone() is None
    finally:
        gc.enable()


def test_module_of_a_closed_engine_is_closed(hf_model):
    engine = make_engine(hf_model(CAUSAL))
    module = engine.module
    engine.close()
    for use in (lambda: module([[5]]), lambda: module.generate([[5]]), lambda: engine.module):
        with pytest.raises(ClosedError):
            use()


# What scripts call on a HF model.


def test_engine_is_one_of_dualinfers_and_keeps_its_signatures(fused, module_engine):
    assert isinstance(fused, FusedEngine) and isinstance(module_engine, ModuleEngine)
    assert type(fused).__doc__ == FusedEngine.__doc__
    for name in ("forward", "generate", "stream"):
        bound = inspect.signature(getattr(fused, name))
        assert (
            list(bound.parameters)
            == list(inspect.signature(getattr(FusedEngine, name)).parameters)[1:]
        )


def test_module_mode_says_what_fused_engines_alone_have(module_engine):
    with pytest.raises(AttributeError, match=r"'reserve': this engine is in module mode"):
        module_engine.reserve(1, 8)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        module_engine.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="Linear has no generate"):
        module_engine.generate  # noqa: B018


def test_engine_stays_in_evaluation_mode(engine):
    assert engine.eval() is engine and engine.train(False) is engine
    with pytest.raises(UnsupportedError, match="train the model itself"):
        engine.train()


@pytest.mark.parametrize(
    "wanted",
    [
        *("cpu", "cpu:0", torch.device("cpu"), jax.devices("cpu")[0]),
        *(torch.float32, jnp.float32, np.dtype("float32"), "fp32"),
    ],
    ids=str,
)
def test_to_what_the_engine_has_is_itself(engine, wanted):
    assert engine.to(wanted) is engine
    name = "dtype" if "32" in str(wanted) else "device"
    assert engine.to(**{name: wanted}) is engine


@pytest.mark.parametrize(
    "wanted",
    [
        *("cuda", "cuda:0", "cpu:7", "meta", torch.device("cuda", 0), 0),
        *(torch.bfloat16, jnp.float16, torch.float64, torch.ones(1)),
    ],
    ids=str,
)
def test_to_something_else_is_refused_with_the_way_on(engine, wanted):
    with pytest.raises(UnsupportedError, match=r"made in float32 on .*init_inference"):
        engine.to(wanted)
    with pytest.raises(UnsupportedError, match="init_inference"):
        engine.to("cpu", wanted)


def test_pipeline_is_built_around_an_engine():
    model, tokenizer = make_gpt2(), make_tokenizer(padding_side="left")
    pipe = hf.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    expected = pipe("the cat sat", **GREEDY)
    engine = make_engine(model)
    for used in (engine, engine.module):
        pipe = hf.pipeline("text-generation", model=used, tokenizer=tokenizer, device="cpu")
        assert pipe("the cat sat", **GREEDY) == expected


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engine_is_not_copied(engine, how):
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled.*init_inference"):
        how(engine)


# JAX's transformations.


def test_fused_engine_inside_a_transformation_is_refused_and_lives_on(fused):
    ids = jnp.asarray(random_ids(2, 5), jnp.int32)
    expected = np.asarray(fused.generate(ids, **GREEDY))
    calls = [
        lambda x: fused(x).logits,
        lambda x: fused.module(x).logits,
        lambda x: fused(ids, attention_mask=x).logits,
        lambda x: fused.generate(x, **GREEDY),
        lambda x: list(fused.stream(x, **GREEDY)),
    ]
    for call in calls:
        for transform in (jax.jit, jax.vmap):
            with pytest.raises(UnsupportedError, match=r"inside of jax\.jit"):
                transform(call)(jnp.ones_like(ids))
    for call in (  # only staged, nothing traced
        fused,
        lambda x: fused.generate(x, **GREEDY),
        lambda _: dualinfer.init_inference(dualinfer.embedded_model(), backend="jax"),
    ):
        with pytest.raises(UnsupportedError, match=r"inside of jax\.jit"):
            jax.jit(lambda x, call=call: (call(ids), x)[1])(1.0)
    with pytest.raises(UnsupportedError, match=r"jax\.grad"):
        jax.grad(lambda m: fused(ids, m).logits.sum())(jnp.ones((2, 5)))
    np.testing.assert_array_equal(fused.generate(ids, **GREEDY), expected)


def test_module_engine_inside_a_transformation_is_refused_and_its_module_is_not(module_engine):
    x = jnp.ones((2, 4))
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(UnsupportedError, match=r"engine\.module may be called inside"):
            transform(lambda x: module_engine(x).sum())(x)
    with pytest.raises(UnsupportedError):
        jax.jit(lambda y: module_engine(np.ones((2, 4))) + y)(1.0)
    found = jax.jit(lambda x: module_engine.module(x))(x)
    np.testing.assert_allclose(found, module_engine(x), rtol=1e-6)


# Outputs as a pytree.


def test_outputs_are_a_pytree(fused):
    ids = jnp.asarray(random_ids(2, 5), jnp.int32)
    out = fused(ids, output_hidden_states=True)
    assert jax.block_until_ready(out) is not None
    assert len(jax.tree.leaves(out)) == 1 + len(out.hidden_states)
    double = jax.tree.map(lambda x: 2 * x, out)
    assert type(double) is Outputs and list(double) == ["logits", "hidden_states"]
    np.testing.assert_array_equal(double.logits, 2 * out.logits)
    np.testing.assert_array_equal(double["hidden_states"][1], 2 * out.hidden_states[1])
    found = jax.jit(lambda o: Outputs(logits=o.logits + o.hidden_states[0].sum()))(out)
    np.testing.assert_allclose(found.logits, out.logits + out.hidden_states[0].sum(), rtol=1e-5)
    shapes = jax.tree.map(lambda x: x.shape, fused(ids))
    assert shapes.logits == shapes[0] == (2, 5, 1001)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
    assert paths[0] == "['logits']" and paths[1] == "['hidden_states'][0]"


def test_what_is_handed_out_is_not_taken_apart():
    """HF's own outputs look into a first field that stands alone: on a GPU a copy of its rows."""

    class Logits:
        def __iter__(self):
            raise AssertionError("taken apart")

    logits = Logits()
    out = make_outputs({"logits": logits})
    assert out.logits is out["logits"] is out[0] is logits and list(out) == ["logits"]


def test_outputs_are_registered_once_for_all_engines(hf_model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with make_engine(hf_model("bert")) as engine:
                out = engine(random_ids(1, 4))
                assert len(jax.tree.leaves(out)) == len(out)


# Attention at padded positions.


@pytest.mark.parametrize("name", ["bert", "bert-masked"])
def test_right_padded_bert_equals_hf_at_padded_positions_too(name):
    model, ids = make_model(name), random_ids(3, 9)
    mask = np.ones_like(ids)
    mask[1, 5:] = mask[2, 1:] = 0
    with torch.no_grad():
        expected = model(
            torch.tensor(ids), attention_mask=torch.tensor(mask), output_hidden_states=True
        )
    with make_engine(model) as engine:
        out = engine(ids, mask, output_hidden_states=True)
    for mine, theirs in zip(out.hidden_states, expected.hidden_states, strict=True):
        for row in (1, 2):
            hidden = mask[row] == 0
            assert relative_rms(mine[row][hidden], theirs[row].numpy()[hidden]) < 1e-5
    assert relative_rms(np.asarray(out[0]), expected[0].numpy()) < 1e-5
