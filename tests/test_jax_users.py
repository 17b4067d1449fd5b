"""What JAX users expect of an engine: parameters, a pure function, and memory shared with torch."""

import gc
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers as hf

pytest.importorskip("flax")
import jax
import jax.numpy as jnp
from flax import nnx

import dualinfer
from dualinfer import arrays
from dualinfer.backends.jax.functional import transformable
from dualinfer.engine.pure import make_pure_inputs
from dualinfer.errors import ArgumentError, ClosedError, LengthError
from dualinfer.model.families import describe_model
from dualinfer.model.outputs import Outputs

from .cases import make_model
from .models import random_ids, relative_rms, slow_but

CAUSAL = "llama-gqa"
CLOSE = 3e-6  # another padding, another order of sums
DOCS = Path(__file__).parents[1] / "docs"


def make_engine(model, dtype="fp32", **fields):
    return dualinfer.init_inference(model, backend="jax", dtype=dtype, **fields)


def pointer(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.unsafe_buffer_pointer()


@pytest.fixture
def engine(engine_of):
    return engine_of(CAUSAL, "jax")


@pytest.fixture
def ids():
    return jnp.asarray(random_ids(3, 7), jnp.int32)


# engine.params and engine.model.


def test_params_are_the_engines_own_buffers_by_name(engine):
    params, runner = engine.params, engine.runner
    assert params["embed"]["weight"] is runner.params.outer["embed.weight"].data
    assert isinstance(params["layers"], list) and len(params["layers"]) == 3
    for mine, theirs in zip(params["layers"], runner.params.layers, strict=True):
        assert mine["qkv"]["weight"] is theirs["qkv.weight"].data
    leaves = jax.tree.leaves(params)
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert {id(x) for x in leaves} == {id(x) for x in jax.tree.leaves(runner.params)}
    assert sum(x.size for x in leaves) == engine.report().parameters
    params["layers"].pop()
    assert len(engine.params["layers"]) == 3  # the dict is the caller's


@pytest.mark.parametrize("name", [CAUSAL, "gpt2", "opt-post", "bert-masked"])
def test_params_have_the_names_of_the_model(engine_of, name):
    engine = engine_of(name, "jax")
    params, model = engine.params, engine.model
    assert model is engine.module and isinstance(model, nnx.Module)
    found = {jax.tree_util.keystr(k, simple=True, separator="."): v for k, v in _paths(params)}
    pure = nnx.to_pure_dict(nnx.state(model))
    assert found == {
        jax.tree_util.keystr(k, simple=True, separator="."): v for k, v in _paths(pure)
    }


def _paths(tree):
    return [(path, id(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def test_models_repr_lists_what_it_holds(engine_of):
    text = repr(engine_of(CAUSAL, "jax").model)
    assert "embed.weight: float32[vocab=1001, embed=96]" in text
    assert "layers[0:3]:" in text and "qkv.weight: float32[q+k+v=960, embed=96]" in text
    assert text.startswith("FusedModule(") and len(text.splitlines()) == 12
    engine = engine_of("opt", "jax")
    assert "qkv.bias" in repr(engine.model) and repr(nnx.clone(engine.model)) == repr(engine.model)
    assert "layers[0:2]" in repr(nnx.eval_shape(lambda: nnx.clone(engine.model)))


def test_bfloat16_is_that_of_ml_dtypes(hf_model, ids):
    with make_engine(hf_model(CAUSAL), "bf16") as engine:
        params = engine.params
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(ml_dtypes.bfloat16)}
        on_host = jax.tree.map(np.asarray, params)
        found = jax.jit(engine.apply)(on_host, ids).logits
        assert found.dtype == ml_dtypes.bfloat16
        assert relative_rms(found, engine(ids).logits) < 0.02


def test_only_fused_jax_engines_have_these(engine_of):
    module = make_engine(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    for name in ("params", "model", "apply"):
        assert not hasattr(module, name)
    assert not hasattr(engine_of(CAUSAL, "torch"), "params")


# engine.apply.


@pytest.mark.parametrize(
    "name",
    slow_but(
        [CAUSAL, "bert-masked"], [CAUSAL, "gpt2-headless", "opt-post", "bloom", "bert-masked"]
    ),
)
def test_apply_under_jit_equals_forward(engine_of, name):
    engine, ids = engine_of(name, "jax"), jnp.asarray(random_ids(2, 16), jnp.int32)
    mask = np.ones((2, 16), np.int32)
    mask[1, :3] = 0
    apply = jax.jit(engine.apply, static_argnames="output_hidden_states")
    for inputs in ({}, {"attention_mask": mask}):
        found, expected = apply(engine.params, ids, **inputs), engine(ids, **inputs)
        assert type(found) is Outputs and list(found) == list(expected)
        visible = inputs.get("attention_mask", np.ones((2, 16))) != 0
        assert relative_rms(found[0][visible], expected[0][visible]) < 1e-6  # a bucket's size
    if name != CAUSAL:
        return
    ids = ids[:, :7]
    found = apply(engine.params, ids, output_hidden_states=True).hidden_states
    expected = engine(ids, output_hidden_states=True).hidden_states
    assert relative_rms(jnp.stack(found), jnp.stack(expected)) < CLOSE


@pytest.mark.parametrize("name", ["opt", "bert-types"])
def test_apply_takes_positions_and_token_types(engine_of, name):
    engine, ids = engine_of(name, "jax"), jnp.asarray(random_ids(2, 5), jnp.int32)
    inputs = {"position_ids": np.array([[3, 4, 5, 6, 7]])}
    if name == "bert-types":
        inputs["token_type_ids"] = random_ids(2, 5) % 3
    found, expected = jax.jit(engine.apply)(engine.params, ids, **inputs), engine(ids, **inputs)
    assert len(found) == len(expected)
    for mine, theirs in zip(found.to_tuple(), expected.to_tuple(), strict=True):
        assert relative_rms(mine, theirs) < CLOSE


def test_inputs_may_be_rows_lists_numpy_and_torch(engine):
    spec, ids = engine.runner.spec, random_ids(2, 5)
    for tokens in (ids, torch.from_numpy(ids), ids.tolist(), ids.astype(np.uint16)):
        for at in ([[3, 4, 5, 6, 7]], np.arange(3, 8), torch.arange(3, 8).expand(2, 5)):
            given = {"input_ids": tokens, "attention_mask": torch.ones(2, 5), "position_ids": at}
            found = make_pure_inputs(spec, given, jnp, pad=None).tokens
            np.testing.assert_array_equal(found.ids, ids)
            np.testing.assert_array_equal(found.positions, [[3, 4, 5, 6, 7]] * 2)
            np.testing.assert_array_equal(found.mask, np.ones((2, 5), bool))
            assert found.ids.dtype == found.positions.dtype == "int32"
    given = {"input_ids": ids[0], "attention_mask": np.ones(5)}
    row = make_pure_inputs(spec, given, jnp, pad=None).tokens
    np.testing.assert_array_equal(row.ids, ids[:1])
    np.testing.assert_array_equal(row.positions, [range(5)])
    assert row.mask.shape == (1, 5) and row.token_types is row.embeds is row.weights is None


def test_padding_that_no_mask_tells_of_is_hidden_where_hf_hides_it():
    for model_type, name, hides in (("xlm", "XLMModel", True), ("bert", "BertModel", False)):
        config = hf.AutoConfig.for_model(model_type).to_dict()
        spec, _ = describe_model(config, [name])
        ids = np.array([[5, 6, config["pad_token_id"], config["pad_token_id"]]])
        mask = make_pure_inputs(spec, {"input_ids": ids}, jnp, pad=None).tokens.mask
        assert (mask is None) if not hides else mask.tolist() == [[True, True, False, False]]


def test_apply_runs_without_jit(engine_of):
    engine, ids = engine_of("bert", "jax"), jnp.asarray(random_ids(1, 5), jnp.int32)
    found = engine.apply(engine.params, ids)
    assert list(found) == ["last_hidden_state", "pooler_output"]
    assert relative_rms(found[0], engine(ids)[0]) < CLOSE


@pytest.mark.parametrize("name", [CAUSAL, "opt"])
def test_apply_under_vmap_equals_row_by_row(engine_of, name):
    engine, ids = engine_of(name, "jax"), jnp.asarray(random_ids(3, 6), jnp.int32)
    mask = np.ones((3, 6), np.int32)
    mask[1, 4:] = mask[2, 1:] = 0

    def apply(tokens, mask):
        return engine.apply(engine.params, tokens, attention_mask=mask)

    found = jax.jit(jax.vmap(apply))(ids, mask)
    for i, visible in enumerate(mask != 0):
        expected = engine(ids[i : i + 1], mask[i : i + 1])
        assert found[0].shape[1:] == expected[0].shape
        assert relative_rms(found[0][i][:, visible], expected[0][:, visible]) < CLOSE


def test_apply_over_several_params(engine, ids):
    params, expected = engine.params, engine(ids).logits
    factors = jnp.array([1, 2, -1], jnp.float32)
    params["final_norm"] = {"weight": factors[:, None] * params["final_norm"]["weight"]}
    axes = jax.tree.map(lambda x: 0 if x.shape == (3, 96) else None, params)
    found = jax.jit(jax.vmap(engine.apply, in_axes=(axes, None)))(params, ids).logits
    assert relative_rms(found, factors[:, None, None, None] * expected) < CLOSE


def test_vmap_makes_rows_of_one_batch():
    shapes = []

    def forward(weights, inputs):
        ids, mask, nothing = inputs
        assert nothing is None
        shapes.append(ids.shape)
        each = weights["w"] * ids * (1 if mask is None else mask)
        return {"each": each, "sum": each.sum(1)}

    run = transformable(forward, lambda: forward)
    w, ids = {"w": jnp.float32(3)}, jnp.arange(24).reshape(2, 3, 1, 4)
    expected = np.asarray(3.0 * ids)
    found = jax.vmap(lambda x: run(w, (x, None, None)))(ids[0])
    np.testing.assert_array_equal(found["each"], expected[0])
    np.testing.assert_array_equal(found["sum"], expected[0].sum(-1))
    assert shapes == [(1, 4), (3, 4)]
    found = jax.jit(jax.vmap(jax.vmap(lambda x: run(w, (x, None, None)))))(ids)
    np.testing.assert_array_equal(found["each"], expected)
    assert shapes[-1] == (6, 4)
    mask = jnp.array([[1, 0, 1, 1], [0, 0, 1, 1]])
    found = jax.vmap(lambda m, x: run(w, (x, m, None)), in_axes=(0, None))(mask[:, None], ids[0, 1])
    np.testing.assert_array_equal(found["each"], expected[0, 1] * mask[:, None])
    several = {"w": jnp.array([1.0, 2.0])}
    for at in (0, None):
        found = jax.vmap(run, in_axes=(0, (at, None, None)))(several, (ids[:, 0], None, None))
        for i in (0, 1):
            rows = ids[i, 0] if at == 0 else ids[:, 0]
            np.testing.assert_array_equal(found["each"][i], (i + 1) * rows)


def test_changed_params_change_the_logits_and_not_the_engine(engine, ids):
    before = np.asarray(engine(ids).logits)
    params = engine.params
    params["layers"][1]["down"]["weight"] *= 2
    params["layers"] = tuple(params["layers"])  # another kind of sequence
    changed = jax.jit(engine.apply)(params, ids).logits
    assert np.abs(changed - before).max() > 0.01
    np.testing.assert_array_equal(engine(ids).logits, before)


def test_params_copied_first_can_be_donated(engine, ids):
    before = np.asarray(engine(ids).logits)
    mine = jax.tree.map(jnp.copy, engine.params)

    def step(params, ids):
        logits = engine.apply(params, ids).logits
        return jax.tree.map(lambda x: x * 0.5, params), logits

    halved, logits = jax.jit(step, donate_argnums=0)(mine, ids)
    assert all(x.is_deleted() for x in jax.tree.leaves(mine))
    assert relative_rms(logits, before) < CLOSE
    np.testing.assert_array_equal(engine(ids).logits, before)
    np.testing.assert_array_equal(halved["embed"]["weight"], engine.params["embed"]["weight"] / 2)


def test_apply_leaves_the_engine_as_it_is(hf_model, ids):
    with make_engine(hf_model(CAUSAL)) as engine:
        options = dict(max_new_tokens=5, do_sample=False)
        expected = np.asarray(engine.generate(ids[:1], **options))[0, 7:].tolist()
        stream = engine.stream(ids[:1], **options)
        tokens = [int(next(stream))]
        before = engine.report()
        for shape in ((1, 3), (2, 5)):
            jax.jit(engine.apply)(engine.params, jnp.ones(shape, jnp.int32))
        tokens += map(int, stream)
        assert tokens == expected
        assert engine.report().compilations == before.compilations
        assert engine.report().cache_bytes == before.cache_bytes


def test_jax_config_stays_as_it_is(hf_model, ids):
    def settings():
        return {k: v for k, v in jax.config.values.items() if "cache" not in k}

    before = settings()
    with make_engine(hf_model(CAUSAL)) as engine:
        jax.jit(engine.apply)(engine.params, ids)
        assert settings() == before


def test_params_that_do_not_fit_are_named(engine, ids):
    params = engine.params
    layers = params["layers"]
    cases = [
        ({**params, "layers": layers[:2]}, r"missing 6: layers\.2\.attn_norm\.weight, "),
        ({**params, "lora": {"a": layers[0]}}, r"unknown 6: lora\.a\.attn_norm\.weight"),
        (
            {**params, "final_norm": {"weight": jnp.ones(95)}},
            r"final_norm\.weight is float32\[95\], expected float32\[96\]",
        ),
        (
            jax.tree.map(lambda x: x.astype(jnp.bfloat16), params),
            r"not fitting 21: .*bfloat16\[96\], expected float32\[96\]",
        ),
        ({**params, "final_norm": {"weight": None}}, r"final_norm\.weight is a NoneType, no array"),
        (layers, r"missing 21: .*engine\.params"),
        (None, r"missing 21: .*engine\.params"),
    ]
    for tree, message in cases:
        for run in (engine.apply, jax.jit(engine.apply)):
            with pytest.raises(ArgumentError, match=message):
                run(tree, ids)


@pytest.mark.parametrize("name", [CAUSAL, "bert-masked"])
def test_float32_products_are_asked_for_in_float32(engine_of, name, ids):
    """On a GPU XLA would else compute them in TF32; a CPU gives the same either way."""
    engine = engine_of(name, "jax")
    lowered = jax.jit(engine.apply).lower(engine.params, ids).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 6
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_inputs_that_do_not_fit_are_refused(engine_of, ids):
    def refused(name, match, tokens=ids, error=ArgumentError, **inputs):
        engine = engine_of(name, "jax")
        with pytest.raises(error, match=match):
            jax.jit(engine.apply)(engine.params, tokens, **inputs)

    refused(CAUSAL, r"tokens has dtype float32; expected integers", jnp.ones((2, 3)))
    refused(CAUSAL, r"tokens has shape \(1, 2, 3\)", jnp.ones((1, 2, 3), jnp.int32))
    refused(CAUSAL, r"tokens has shape \(2, 0\)", jnp.ones((2, 0), jnp.int32))
    refused(CAUSAL, r"attention_mask has shape \(3, 6\)", attention_mask=jnp.ones((3, 6)))
    refused(CAUSAL, r"position_ids has shape \(2, 7\)", position_ids=jnp.ones((2, 7), jnp.int32))
    refused(CAUSAL, "llama family has no token types", token_type_ids=jnp.zeros_like(ids))
    refused(CAUSAL, "output_hidden_states .* static_argnames", output_hidden_states=True)
    refused(CAUSAL, "bbox: apply.. of Llama.* reads tokens, .*Leave", bbox=jnp.zeros((2, 7, 4)))
    refused(CAUSAL, "tokens is missing", None)
    refused(CAUSAL, "tokens and inputs_embeds", inputs_embeds=jnp.zeros((2, 7, 4)))
    refused("bloom", "bloom family takes no position_ids", position_ids=jnp.zeros_like(ids))
    refused("gpt2", "129 tokens, but the model has 128", jnp.ones((1, 129), jnp.int32), LengthError)
    engine = engine_of("gpt2", "jax")
    full = jax.eval_shape(engine.apply, engine.params, jnp.ones((1, 128), jnp.int32))
    assert full.logits.shape == (1, 128, 1001)
    engine = engine_of(CAUSAL, "jax")
    with pytest.raises(ArgumentError, match="tokens is a str"):
        engine.apply(engine.params, "text")


def test_closed_engine_says_so(hf_model, ids):
    engine = make_engine(hf_model(CAUSAL))
    params = engine.params
    engine.close()
    for use in (lambda: engine.apply(params, ids), lambda: engine.params, lambda: engine.model):
        with pytest.raises(ClosedError):
            use()


# Memory shared with torch.


def test_weights_on_the_cpu_are_those_of_the_torch_model():
    model = make_model(CAUSAL)
    with make_engine(model) as engine:
        _check_shared(model, engine.params)
    assert all(p.isfinite().all() for p in model.parameters())  # close() frees nothing of it


def _check_shared(model, params):
    """Weights that need no fusion lie where the torch model has them; fused ones do not."""
    inner = model.model
    assert pointer(params["embed"]["weight"]) == pointer(inner.embed_tokens.weight)
    for mine, theirs in zip(params["layers"], inner.layers, strict=True):
        assert pointer(mine["out"]["weight"]) == pointer(theirs.self_attn.o_proj.weight)
        assert pointer(mine["down"]["weight"]) == pointer(theirs.mlp.down_proj.weight)
        assert pointer(mine["attn_norm"]["weight"]) == pointer(theirs.input_layernorm.weight)
        parts = [getattr(theirs.self_attn, f"{x}_proj").weight for x in "qkv"]
        fused = arrays.to_numpy(torch.cat(parts))
        assert pointer(mine["qkv"]["weight"]) != pointer(parts[0])
        np.testing.assert_array_equal(mine["qkv"]["weight"], fused)


def _odd_tensors(device):
    """Tensors that cannot be shared as they are, and some that can."""
    x = torch.arange(48, dtype=torch.float32, device=device).reshape(6, 8)
    return {
        "plain": x,
        "parameter": torch.nn.Parameter(x),
        "transposed": x.T,
        "strided": x[::2, 1::3],
        "expanded": x[:1].expand(5, 8),
        "misaligned": x.reshape(-1)[1:],
        "float64": x.double(),
        "bfloat16": x.bfloat16(),
        "float16": x.half().requires_grad_(),
    }


def _check_odd(device, jax_device):
    for name, tensor in _odd_tensors(device).items():
        array = arrays.to_jax(tensor, jax_device)
        assert array.devices() == {jax_device}, name
        wide = arrays.to_numpy(tensor)
        np.testing.assert_array_equal(np.asarray(array), wide.astype(array.dtype), err_msg=name)
        assert array.dtype == (np.float32 if name == "float64" else wide.dtype)
        shares = name in ("plain", "parameter", "bfloat16", "float16")
        assert (pointer(array) == pointer(tensor)) == shares, name
        doubled = jax.jit(lambda x: x + x)(array)
        np.testing.assert_array_equal(np.asarray(doubled), 2 * np.asarray(array), err_msg=name)


def test_tensors_on_the_cpu_become_arrays():
    _check_odd("cpu", jax.devices("cpu")[0])


def test_tied_tensors_are_told_from_equal_and_from_different_ones():
    x = torch.rand(3, 4)
    assert arrays.same_tensor(x, x) and arrays.same_tensor(x, x.clone())
    for other in (x + 1, x.double(), x[:2], x.T, torch.full((3, 4), torch.nan)):
        assert not arrays.same_tensor(x, other)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.bfloat16, bool])
def test_arrays_keep_their_shape_and_dtype_as_tensors(shape, dtype):
    array = np.ones((2, 3), dtype).T[:0, 0] if shape == (0,) else np.ones(shape, dtype)
    tensor = arrays.from_numpy(array, "torch")
    assert tuple(tensor.shape) == shape
    assert str(tensor.dtype).removeprefix("torch.") == np.dtype(dtype).name
    np.testing.assert_array_equal(arrays.to_numpy(tensor), array)


def test_outputs_become_torch_tensors_without_a_copy(engine, ids):
    logits = engine(ids).logits
    tensor = torch.from_dlpack(logits)
    assert pointer(tensor) == pointer(logits)
    np.testing.assert_array_equal(tensor, logits)
    found = engine(torch.from_numpy(np.array(ids))).logits
    assert torch.equal(found, tensor)


# The page.


@pytest.mark.slow  # a dozen executables of the embedded model
def test_snippets_of_the_page_run():
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "jax.md").read_text(), re.M | re.S)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(compile(block, "docs/jax.md", "exec"), names)
    names["engine"].close()


# On a GPU.


def on_a_gpu(test):
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(absent(test))


@pytest.fixture
def gpu():
    device = jax.devices()[0]
    assert device.platform == "gpu", "JAX runs on the CPU; install jax[cuda13]."
    return device


def make_card_model(dtype=torch.float32):
    from .test_gpu import make_model as make_wide

    return make_wide("llama").to("cuda", dtype)


def _no_host(*args, **kwargs):
    raise AssertionError("This goes through the host.")


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_on_the_card_are_those_of_the_torch_model(gpu, dtype, monkeypatch):
    model = make_card_model(dtype)
    gc.collect()
    before = gpu.memory_stats()["bytes_in_use"]
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "to_numpy", _no_host)
        engine = make_engine(model, dtype, kernel_inject=True)
    _check_shared(model, jax.tree.map(lambda x: x, engine.params))
    gc.collect()
    added = gpu.memory_stats()["bytes_in_use"] - before
    own = {p.data_ptr() for p in model.parameters()}
    fused = sum(x.nbytes for x in jax.tree.leaves(engine.params) if pointer(x) not in own)
    print(f"{added} bytes for {fused} of fused weights, {engine.report().parameter_bytes} in all")
    assert fused < engine.report().parameter_bytes / 1.5
    assert added < fused + 2**24  # and what XLA keeps for itself: 11 MB were seen
    ids = torch.tensor([[5, 6, 7, 8]]).cuda()
    expected = model(ids).logits.float()
    error = relative_rms(engine(ids).logits.float().cpu(), expected.detach().cpu())
    assert error < (1e-4 if dtype == torch.float32 else 0.03)
    engine.close()
    assert torch.equal(model(ids).logits.float(), expected)


@on_a_gpu
def test_cast_and_transposed_weights_are_copied_on_the_card(gpu, monkeypatch):
    from .test_gpu import make_model as make_wide

    model = make_wide("gpt2").cuda()
    monkeypatch.setattr(arrays, "to_numpy", _no_host)
    engine = make_engine(model, "bf16", kernel_inject=True)
    monkeypatch.undo()
    found = engine.params["layers"][1]["qkv"]["weight"]
    expected = model.transformer.h[1].attn.c_attn.weight.detach().T.bfloat16()
    np.testing.assert_array_equal(np.asarray(found), arrays.to_numpy(expected))
    engine.close()


@on_a_gpu
def test_tensors_on_the_card_become_arrays(gpu):
    _check_odd("cuda", gpu)
    _check_odd("cpu", jax.devices("cpu")[0])
    x = torch.arange(5.0)
    for tensor, device in ((x, gpu), (x.cuda(), jax.devices("cpu")[0])):
        array = arrays.to_jax(tensor, device)
        assert array.devices() == {device} and np.asarray(array).tolist() == x.tolist()


@on_a_gpu
def test_jax_waits_for_torchs_work_on_a_tensor(gpu):
    source = torch.zeros(2**20, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            source += 1
            array = arrays.to_jax(source, gpu) * 1
        np.testing.assert_array_equal(np.asarray(array), source.cpu().numpy())


@on_a_gpu
def test_engine_outlives_the_torch_model(gpu):
    model, ids = make_card_model(torch.bfloat16), torch.tensor([[5, 6, 7, 8]]).cuda()
    with make_engine(model, "bf16", kernel_inject=True) as engine:
        expected = engine(ids).logits.clone()
        shared = sum(p.nbytes for p in model.parameters())
        del model
        gc.collect()
        torch.cuda.empty_cache()
        garbage = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(shared // 2**22)]
        assert torch.equal(engine(ids).logits, expected)
        del garbage


@on_a_gpu
def test_outputs_stay_on_the_card(gpu, monkeypatch):
    with make_engine(make_card_model(torch.bfloat16), "bf16", kernel_inject=True) as engine:
        ids = torch.tensor([[5, 6, 7, 8]]).cuda()
        lent = jax.dlpack.from_dlpack(ids.int())
        logits = engine(lent).logits
        tensor = torch.from_dlpack(logits)
        assert tensor.is_cuda and pointer(tensor) == pointer(logits)
        monkeypatch.setattr(arrays, "_numpy_to_torch", _no_host)
        found = engine(ids, output_hidden_states=True)
        assert found.logits.is_cuda and found.logits.dtype == torch.bfloat16
        assert torch.equal(found.logits, tensor) and found.hidden_states[0].is_cuda
        monkeypatch.undo()
        assert engine.generate(ids, max_new_tokens=4, pad_token_id=0).is_cuda


@on_a_gpu
@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_apply_on_the_card_equals_forward(gpu, dtype, inject):
    with make_engine(make_card_model(), dtype, kernel_inject=inject) as engine:
        ids = jnp.asarray(random_ids(4, 40), jnp.int32)
        expected = engine(ids).logits.astype(jnp.float32)
        bound = 1e-5 if dtype == "fp32" else 0.03
        found = jax.jit(engine.apply)(engine.params, ids).logits
        assert relative_rms(np.asarray(found, np.float32), expected) < bound
        rows = jax.jit(jax.vmap(lambda row: engine.apply(engine.params, row).logits[0]))(ids)
        assert relative_rms(np.asarray(rows, np.float32), expected) < bound
        compilations = engine.report().compilations
        jax.jit(engine.apply)(engine.params, ids[:, :33])
        assert engine.report().compilations == compilations
