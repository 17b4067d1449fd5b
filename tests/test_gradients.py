"""Gradients of `engine.apply`: those of HF's model by torch's autograd, parameter by parameter.

HF's own gradients become a model, which is read by the weight table: so they have our names, and
are fused, turned and stacked as our weights are.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.backends import jax as backend
from dualinfer.errors import UnsupportedError

from . import test_encoder_decoders
from .cases import images, make_model, pairs
from .kernels.jax_ops import interpreted_ops
from .models import random_ids, slow_but
from .test_quantize_on_load import dequantized

LIMIT = 1e-4
SMALL = 1e-5  # of all parameters' gradients: what is less is rounding
CASES = {
    "llama": "model llama-gqa",
    "llama-mqa": "model llama-mqa",  # small: one layer
    "gpt2-unscaled": "model gpt2-unscaled",
    "gpt2": "model gpt2",
    "gemma3": "model gemma3",
    "bloom": "model bloom",
    "opt-post": "model opt-post",
    "bert": "model bert-masked",
    "mixtral": "mixture mixtral",
    "gpt_oss": "mixture gpt_oss",
    "llama4": "mixture llama4",  # weighs experts' inputs, and norms without weights
    "deepseek_v3": "relative deepseek_v3",
    "qwen3_moe": "mixture qwen3_moe",
    "bamba": "recurrence bamba",
    "mamba2": "recurrence mamba2",
    "lfm2": "recurrence lfm2",
    "cohere": "relative cohere",  # norms without biases, which are no parameters
    "apertus": "relative apertus",  # buffers among a layer's numbers
    "doge": "relative doge",  # values that a layer reads twice
    "albert": "encoder albert-masked",  # layers that share weights
    "deberta": "encoder deberta-3",
    "choice": "encoder bert-choice",
    "layoutlm": "encoder layoutlm-token",
    "lilt": "encoder lilt",
    "t5": "pair t5",
    "bart": "pair bart",  # a bias of the vocabulary, which is a buffer
    "t5-labels": "pair t5-labels",  # the decoder reads the encoder's ids
    "whisper": "pair whisper",  # sines, which are frozen
    "moonshine": "pair moonshine",
    "vit": "image vit-labels",
    "registers": "image registers",
    "clip": "image clip",
    "siglip2": "image siglip2",  # patches of images of two sizes
}
QUICK = ("llama", "gpt2", "mixtral", "deepseek_v3", "bamba", "albert", "choice", "t5", "clip")


def make(name):
    """HF's model of a case, and what it reads: texts have a padded row."""
    kind, case = CASES[name].split(" ", 1)
    if kind == "image":
        return make_model(case), images.inputs_of(case)
    if name == "t5-labels":
        return make_scored()
    model = make_model(case)
    if kind == "pair":
        inputs = {n: x.numpy() for n, x in test_encoder_decoders.source_of(case).items()}
        return model, inputs | {"decoder_input_ids": random_ids(2, 6, seed=1, vocab=99)}
    vocab = min(getattr(model.config, "vocab_size", 99), 99)
    ids, mask = random_ids(2, 11, vocab=vocab), np.ones((2, 11), int)
    causal = kind != "encoder" and name != "bert"
    if name != "mamba2":  # whose padding HF's convolutions see
        mask[1, slice(4) if causal else slice(8, None)] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "choice":
        inputs = {n: np.stack((x, x[::-1], x), 1) for n, x in inputs.items()}
    if name in ("layoutlm", "lilt"):
        sides = np.random.default_rng(0).integers(0, 20, (2, 2, 11, 2))
        inputs["bbox"] = np.concatenate((sides[0], sides.sum(0)), -1)
    return model, inputs


def make_scored():
    """A pair that scores the last end of each text."""
    case = "T5ForSequenceClassification"
    cls = getattr(hf, case)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = cls(cls.config_class(**pairs.SCORED[case])).eval()
    inputs = {n: x.numpy() for n, x in test_encoder_decoders.source_of("t5").items()}
    ids = inputs["input_ids"]
    ids[ids == 2] = 3
    ids[0, 18] = ids[1, 10] = 2
    return model, inputs


def apply(engine, params, inputs, **more):
    """Outputs by name, those of towers too; `inputs` may be traced but for the sizes of images."""
    inputs = dict(inputs)
    outputs = engine.apply(params, inputs.pop("input_ids", None), **inputs, **more)
    return flat(outputs)


def flat(outputs, prefix=""):
    found = {}
    for name, value in outputs.items():
        found |= flat(value, f"{name}.") if hasattr(value, "items") else {prefix + name: value}
    return found


def open_engine(model, **options):
    return dualinfer.init_inference(model, backend="jax", dtype="fp32", **options)


def hf_gradients(model, loss, **options):
    """HF's gradients by our names, of its loss; those of what is no parameter of HF's are 0.

    They lie as the weights of an engine with these options do.
    """
    model.zero_grad()
    loss.backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for own, p in zip(twin.parameters(), model.parameters(), strict=True):
            own.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    model.zero_grad()
    with open_engine(twin, **options) as engine:
        found = by_name(engine.params)
        for row in engine.runner._tp_plan.table.rows:
            if row.fixed or not row.sources:
                found[row.name] = np.zeros_like(found[row.name])
    return found


def by_name(tree):
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(x, float) for p, x in paths
    }


def check_close(found, expected, limit=LIMIT):
    assert found.keys() == expected.keys()
    all_of_them = np.concatenate([x.ravel() for x in expected.values()])
    least = SMALL * np.sqrt((all_of_them**2).mean()) / limit
    for name, array in expected.items():
        assert np.isfinite(found[name]).all(), name
        error = np.sqrt(((found[name] - array) ** 2).mean())
        scale = np.sqrt((array**2).mean())
        assert error <= limit * max(scale, least), (name, error, scale)


def weigh(outputs, shown):
    """Random float32 weights for each output that both sides have, 0 where a token is padding."""
    random, weights = np.random.default_rng(1), {}
    for name, shape in outputs.items():
        weights[name] = random.standard_normal(shape).astype(np.float32)
        if shape[:2] == shown.shape:
            weights[name] *= shown.reshape(*shown.shape, *(1,) * (len(shape) - 2))
    return weights


def check_gradients(name, **options):
    """Those of weights and of inputs, with `options`, against HF's; under jax.jit."""
    model, given = make(name)
    tensors = {k: torch.tensor(v, requires_grad=v.dtype == np.float32) for k, v in given.items()}
    theirs = flat(model(**tensors))
    sizes = {k: v for k, v in given.items() if k == "spatial_shapes"}
    arrays = {k: jnp.asarray(v) for k, v in given.items() if k not in sizes}
    with open_engine(model, **options) as engine:
        mine = jax.eval_shape(lambda p, x: apply(engine, p, x | sizes), engine.params, arrays)
        shown = given.get("attention_mask", np.ones((0, 0)))
        weights = weigh({n: x.shape for n, x in mine.items()}, shown)
        assert weights

        def loss(params, arrays):
            outputs = apply(engine, params, arrays | sizes)
            return sum((outputs[n] * w).sum() for n, w in weights.items())

        of_both = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)
        value, (found, of_inputs) = jax.jit(of_both)(engine.params, arrays)
    total = sum((theirs[n] * torch.tensor(w)).sum() for n, w in weights.items())
    np.testing.assert_allclose(value, total.item(), rtol=1e-4, atol=1e-3)
    # Doge's keys have biases of e^5.8: of one's factor HF's own float32 is 9e-5 off from float64.
    limit = 3 * LIMIT if name == "doge" else LIMIT
    check_close(by_name(found), hf_gradients(model, total, **options), limit)
    for name, x in tensors.items():
        if x.requires_grad:
            check_close({name: np.asarray(of_inputs[name], float)}, {name: x.grad.numpy()})


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_gradients_are_those_of_hf(name):
    check_gradients(name)


SPLIT = {
    "llama, 2": {},  # 6 query heads and 3 KV heads: padding
    "llama, 4": {},  # KV heads that two devices hold
    "bloom, 3": {},  # slopes, biases behind sums
    "mixtral, 4": {"moe": {"ep_size": 2}},  # experts by number and by width
    "bamba, 2": {},
    "albert, 2": {},
    "gpt_oss, 4": {},
    "t5, 2": {},  # a bias of distances
}


@pytest.mark.parametrize("case", slow_but(["llama, 4", "mixtral, 4"], SPLIT))
def test_gradients_over_devices_are_those_of_hf(case):
    """Of what several devices hold each has the whole gradient, and padding has none."""
    name, devices = case.split(", ")
    check_gradients(name, tensor_parallel={"tp_size": int(devices)}, **SPLIT[case])


def test_what_two_weights_share_is_not_followed_over_devices():
    model, inputs = make("doge")
    ids = jnp.asarray(inputs["input_ids"])
    with open_engine(model, tensor_parallel={"tp_size": 3}) as engine:
        loss = jax.jit(lambda params: mean_score(engine, params, ids).sum())
        assert np.isfinite(loss(engine.params))
        with pytest.raises(UnsupportedError, match="on one device"):
            jax.grad(loss)(engine.params)


def mean_score(engine, params, ids):
    """Of each row [B, T]: its tokens' mean log-probability."""
    scores = jax.nn.log_softmax(engine.apply(params, ids).logits[:, :-1])
    return jnp.take_along_axis(scores, ids[:, 1:, None], -1)[..., 0].mean(-1)


@pytest.mark.parametrize("name", slow_but(["llama-mqa"], ["llama-mqa", "mixtral"]))
def test_transformations_compose(name):
    """Rows of their own gradients, vmap within, and jax.checkpoint around."""
    model, inputs = make(name)
    ids = jnp.asarray(inputs["input_ids"])
    with open_engine(model) as engine:
        params = engine.params

        def loss(params, ids=ids):
            return mean_score(engine, params, ids).sum()

        def mapped(params):
            return jax.vmap(lambda row: loss(params, row[None]))(ids).sum()

        expected = by_name(jax.jit(jax.grad(loss))(params))
        rows = jax.jit(jax.vmap(jax.grad(lambda p, row: loss(p, row[None])), (None, 0)))
        check_close(by_name(jax.tree.map(lambda x: x.sum(0), rows(params, ids))), expected)
        for way in (mapped, jax.checkpoint(loss)):
            check_close(by_name(jax.jit(jax.grad(way))(params)), expected)


@pytest.mark.parametrize("name", slow_but(["t5"], ["t5", "clip", "choice"]))
def test_rows_of_vmap_are_those_of_a_batch(name):
    """Of all that a model reads; pairs of a text and an image stand alone."""
    model, inputs = make(name)
    arrays = {k: jnp.asarray(v[:2]) for k, v in inputs.items()}
    with open_engine(model) as engine:

        def row(params, arrays):
            return apply(engine, params, {k: x[None] for k, x in arrays.items()})

        rows = jax.jit(jax.vmap(row, (None, 0)))(engine.params, arrays)
        expected = flat(engine(**arrays))
    for output, x in rows.items():
        whole = np.asarray(expected[output])
        if output.startswith("logits_per"):
            whole = np.diag(whole)[:, None]
        np.testing.assert_allclose(x[:, 0], whole, rtol=1e-4, atol=1e-4, err_msg=output)


def test_derivatives_forward_and_of_derivatives():
    """Against differences along a direction."""
    model, inputs = make("llama-mqa")
    ids = jnp.asarray(inputs["input_ids"])
    with open_engine(model) as engine:
        params = engine.params
        along = jax.tree.map(lambda x: x * jnp.cos(jnp.arange(x.size).reshape(x.shape)), params)

        def loss(params):
            return mean_score(engine, params, ids).sum()

        def slope(params):
            return jax.jvp(loss, (params,), (along,))[1]

        @jax.jit
        def all_of_them(params):
            value, gradient = jax.value_and_grad(loss)(params)
            product = sum(map(jnp.vdot, jax.tree.leaves(gradient), jax.tree.leaves(along)))
            return value, slope(params), product, jax.jvp(slope, (params,), (along,))[1]

        def at(step):
            return all_of_them(jax.tree.map(lambda p, d: p + step * d, params, along))

        ahead, here, behind = (at(step) for step in (3e-3, 0, -3e-3))
        assert here[1] == pytest.approx(here[2], rel=1e-4)
        assert here[1] == pytest.approx((ahead[0] - behind[0]) / 6e-3, rel=1e-2)
        assert here[3] == pytest.approx((ahead[1] - behind[1]) / 6e-3, rel=1e-2)


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_quantized_weights_leave_gradients_to_the_others(asked):
    """Norms and biases have those of the model that the codes mean; a code has none."""
    model, inputs = make("gpt2-unscaled")
    ids = jnp.asarray(inputs["input_ids"])

    def gradients(engine):
        def loss(params):
            return mean_score(engine, params, ids).sum()

        found = jax.jit(jax.grad(loss, allow_int=True))(engine.params)
        leaves = jax.tree_util.tree_leaves_with_path(found)
        floats = {str(p): np.asarray(x) for p, x in leaves if x.dtype == np.float32}
        assert all(x.dtype == jax.dtypes.float0 for p, x in leaves if str(p) not in floats)
        return floats

    with open_engine(dequantized(model, asked)) as dense, open_engine(model, quant=asked) as made:
        expected, found = gradients(dense), gradients(made)
    ours = {name: x for name, x in found.items() if name in expected}
    assert any("norm" in name for name in ours) and any("bias" in name for name in ours)
    check_close(ours, {name: expected[name] for name in ours})


def test_rounded_inputs_have_no_gradients():
    """The message's ways on are taken: weights alone are quantized, or nothing."""
    model, inputs = make("gpt2-unscaled")
    ids = jnp.asarray(inputs["input_ids"])
    inputs_too = {"activation": {"enabled": True}}

    def loss(norm, engine):
        return mean_score(engine, {**engine.params, "final_norm": norm}, ids).sum()

    for quant, works in ((inputs_too, False), ("int8", True), (None, True)):
        with open_engine(model, **({} if quant is None else {"quant": quant})) as engine:
            norm = engine.params["final_norm"]
            gradient = jax.jit(jax.grad(loss), static_argnums=1)

            if works:
                assert np.abs(gradient(norm, engine)["weight"]).max() > 0
                continue
            with pytest.raises(UnsupportedError, match="weights alone are"):
                gradient(norm, engine)
            # What it gives may be a constant in another model's loss.
            value = loss(norm, engine)
            assert jax.grad(lambda x, y=value: x * jax.lax.stop_gradient(y))(2.0) == value


def test_kernels_have_no_gradients(monkeypatch):
    """The message's way on is taken."""
    pytest.importorskip("triton")
    model, inputs = make("llama-mqa")
    ids = jnp.asarray(inputs["input_ids"])
    monkeypatch.setattr(backend, "_obstacle", lambda *args: "")
    monkeypatch.setattr(backend, "_make_kernel_ops", lambda *args: interpreted_ops())
    found = []
    for inject in (True, False):
        with open_engine(model, replace_with_kernel_inject=inject) as engine:
            gradient = jax.jit(jax.grad(lambda p, e=engine: mean_score(e, p, ids).sum()))
            if not inject:
                found = by_name(gradient(engine.params))
                continue
            with pytest.raises(UnsupportedError, match="replace_with_kernel_inject=False"):
                gradient(engine.params)
    assert all(np.isfinite(x).all() for x in found.values())
