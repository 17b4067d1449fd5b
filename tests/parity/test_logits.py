"""Forward against Hugging Face, in float32: every family, both backends, modules and folders."""

import json
import pickle
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.utils import ModelOutput

import dualinfer
from dualinfer.model.outputs import Outputs
from dualinfer.model.weights import named_arrays

from ..cases import make_model
from ..cases.covering import each
from ..cases.decoders import ALL, CASES, CAUSAL
from ..models import BACKENDS, PAD, random_ids, relative_rms

LIMIT = 1e-5  # the issue asks for 1e-4
TOKENS = 13
EACH = each(ALL, all_quick=True)
# The first of each family; of the others, tests of positions repeat what these show.
ONE_OF_EACH = tuple({CASES[name].family: name for name in reversed(CAUSAL)}.values())


def batch():
    """Ids and mask [3, T]: one whole row, one padded on the left, one on the right."""
    ids = random_ids(3, TOKENS, seed=1)
    mask = np.ones_like(ids)
    mask[1, :4] = mask[2, -5:] = 0
    return np.where(mask == 1, ids, PAD), mask


def positions_for(case, mask):
    """Position ids that no default gives: gaps, and as far out as the model reaches.

    BLOOM counts the mask's tokens and takes no others.
    """
    if case.family == "bloom":
        return np.maximum(mask.cumsum(1) - 1, 0)
    limit = getattr(case.make_config(), "max_position_embeddings", 0)
    steps = np.random.default_rng(3).integers(1, limit // TOKENS + 1, mask.shape)
    return np.where(mask == 1, np.minimum((steps * mask).cumsum(1), limit - 1), 1)


def expected(model, ids, **kwargs):
    """HF's outputs with every hidden state, as a dict of NumPy arrays."""
    with torch.no_grad():
        out = model(
            torch.tensor(ids),
            output_hidden_states=True,
            **{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()},
        )
    names = ("logits", "last_hidden_state", "pooler_output")
    fields = {name: out[name].numpy() for name in names if out.get(name) is not None}
    return {**fields, "hidden_states": tuple(h.numpy() for h in out.hidden_states)}


def check(out, reference, where=...):
    """Fields of `reference` within LIMIT at the positions `where`; pooled rows that start there."""
    assert set(out.keys()) == set(reference)
    for name, value in reference.items():
        if name == "hidden_states":
            assert len(out.hidden_states) == len(value)
            for ours, theirs in zip(out.hidden_states, value, strict=True):
                assert relative_rms(np.asarray(ours)[where], theirs[where]) < LIMIT
        elif name == "pooler_output":
            rows = ... if where is ... else where[:, 0]
            assert relative_rms(np.asarray(out[name])[rows], value[rows]) < LIMIT
        else:
            ours = np.asarray(out[name])
            assert ours.shape == value.shape
            assert relative_rms(ours[where], value[where]) < LIMIT


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize(("name", "backend"), EACH, scope="session")
def test_unpadded_batch_equals_hf(name, backend, hf_model, engine_of):
    ids = random_ids(3, TOKENS)
    out = engine_of(name, backend)(ids, output_hidden_states=True)
    check(out, expected(hf_model(name), ids))
    assert len(out.hidden_states) == len(engine_of(name, backend).runner.spec.layers) + 1


@pytest.mark.parametrize(("name", "backend"), EACH, scope="session")
def test_padded_batch_equals_hf_with_default_positions(name, backend, hf_model, engine_of):
    ids, mask = batch()
    reference = expected(hf_model(name), ids, attention_mask=mask)
    out = engine_of(name, backend)(ids, mask, output_hidden_states=True)
    check(out, reference, mask == 1)


@pytest.mark.parametrize(("name", "backend"), EACH, scope="session")
def test_padded_batch_equals_hf_with_given_positions(name, backend, hf_model, engine_of):
    ids, mask = batch()
    at = positions_for(CASES[name], mask)
    reference = expected(hf_model(name), ids, attention_mask=mask, position_ids=at)
    out = engine_of(name, backend)(
        ids, attention_mask=mask, position_ids=at, output_hidden_states=True
    )
    check(out, reference, mask == 1)


@pytest.mark.parametrize("name", ONE_OF_EACH, scope="session")
def test_left_padded_row_with_positions_from_the_mask_equals_the_row_alone(
    name, backend, hf_model, engine_of
):
    ids, mask = batch()
    at = np.maximum(mask.cumsum(1) - 1, 0)
    out = engine_of(name, backend)(ids, mask, position_ids=at, output_hidden_states=True)
    alone = expected(hf_model(name), ids[1:2, 4:])
    assert relative_rms(out[0][1:2, 4:], next(iter(alone.values()))) < LIMIT


PACKED = np.array(
    [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2], [*range(3, 13), 20, 21, 30], [5, 4, 3] * 4 + [2]]
)


PACKING = tuple(name for name in CAUSAL if CASES[name].family not in ("opt", "bloom"))


@pytest.mark.parametrize(
    ("name", "backend", "use_cache"),
    [
        *(
            pytest.param(
                *(name, backend, False), marks=[] if name in ONE_OF_EACH else [pytest.mark.slow]
            )
            for name, backend in (own.values for own in each(PACKING))
        ),
        *(("llama-gqa", backend, None) for backend in BACKENDS),  # positions are only numbers then
    ],
    scope="session",
)
def test_packed_positions_without_a_mask_equal_hf(name, use_cache, backend, hf_model, engine_of):
    ids = random_ids(3, TOKENS, seed=5)
    reference = expected(hf_model(name), ids, position_ids=PACKED, use_cache=use_cache)
    out = engine_of(name, backend)(
        ids, position_ids=PACKED, use_cache=use_cache, output_hidden_states=True
    )
    check(out, reference)
    alone = next(iter(expected(hf_model(name), ids[:1, 4:10]).values()))
    separate = np.allclose(np.asarray(out[0])[:1, 4:10], alone, atol=1e-3)
    assert separate == (use_cache is False)  # HF packs only where it makes no cache


def test_packed_positions_follow_use_cache_of_the_models_config(backend):
    model = make_model("llama-gqa", use_cache=False)
    ids = random_ids(3, TOKENS, seed=5)
    reference = expected(model, ids, position_ids=PACKED)
    engine = dualinfer.init_inference(model, backend=backend, dtype="fp32", kernel_inject=True)
    check(engine(ids, position_ids=PACKED, output_hidden_states=True), reference)


@pytest.mark.parametrize("name", ["opt", "opt-headless"], scope="session")
def test_positions_of_a_family_that_does_not_pack_only_number_the_tokens(
    name, backend, hf_model, engine_of
):
    ids = random_ids(3, TOKENS, seed=5)
    reference = expected(hf_model(name), ids, position_ids=PACKED, use_cache=False)
    engine = engine_of(name, backend)
    out = engine(ids, position_ids=PACKED, use_cache=False, output_hidden_states=True)
    check(out, reference)


def test_position_ids_that_bloom_would_ignore_are_refused(backend, engine_of):
    """HF takes them and computes without them."""
    engine = engine_of("bloom", backend)
    ids, mask = batch()
    with pytest.raises(dualinfer.ArgumentError, match="bloom family takes no position_ids"):
        engine(ids, mask, position_ids=np.arange(TOKENS)[None])
    with pytest.raises(dualinfer.ArgumentError, match="bloom family takes no position_ids"):
        engine(ids, position_ids=PACKED)
    engine(ids, position_ids=np.arange(TOKENS))  # what it counts itself


@pytest.mark.parametrize("name", ["opt", "bloom", "gpt-neo", "gemma2"], scope="session")
def test_mask_with_holes_equals_hf(name, backend, hf_model, engine_of):
    ids = random_ids(3, TOKENS, seed=6)
    mask = (np.random.default_rng(6).random(ids.shape) < 0.6).astype(int)
    mask[:, 2] = 1
    reference = expected(hf_model(name), ids, attention_mask=mask)
    out = engine_of(name, backend)(ids, mask, output_hidden_states=True)
    check(out, reference, mask == 1)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "mistral-window", "gpt2", "bert", "bert-masked"], scope="session"
)
def test_position_ids_of_one_row_serve_every_row(name, backend, hf_model, engine_of):
    ids = random_ids(3, TOKENS)
    at = np.arange(2, TOKENS + 2)
    reference = expected(hf_model(name), ids, position_ids=at[None])
    engine = engine_of(name, backend)
    for given in (at, at[None], np.tile(at, (3, 1)), at.tolist()):
        check(engine(ids, position_ids=given, output_hidden_states=True), reference)


@pytest.mark.parametrize(
    "name",
    ["bert", "bert-types", "bert-masked", "gpt2", "gpt2-headless", "gptj", "gpt-neo"],
    scope="session",
)
def test_token_types_equal_hf(name, backend, hf_model, engine_of):
    ids, mask = batch()
    kinds = {"bert-types": 3}.get(name, 2 if name.startswith("bert") else 1001)
    types = np.random.default_rng(9).integers(0, kinds, ids.shape)
    plain = expected(hf_model(name), ids, attention_mask=mask)
    engine, key = engine_of(name, backend), next(iter(plain))
    for given in (types, np.zeros_like(types)):
        reference = expected(hf_model(name), ids, attention_mask=mask, token_type_ids=given)
        out = engine(
            input_ids=ids, attention_mask=mask, token_type_ids=given, output_hidden_states=True
        )
        check(out, reference, mask == 1)
        # They matter; but zeros are what BERT takes by default.
        is_default = name.startswith("bert") and not given.any()
        assert is_default or np.abs(plain[key] - reference[key]).max() > 0.1


@pytest.mark.parametrize("name", ["llama-mha", "gpt2", "bert"], scope="session")
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 17)])
def test_any_shape_equals_hf(name, shape, hf_model, engine_of):
    ids = random_ids(*shape, seed=sum(shape))
    for backend in BACKENDS:
        out = engine_of(name, backend)(ids, output_hidden_states=True)
        check(out, expected(hf_model(name), ids))


@pytest.mark.parametrize(
    "name",
    ["mistral-window", "qwen2-mixed", "llama-yarn", "gpt-neo", "gemma2", "bloom", "gptj", "opt"],
    scope="session",
)
def test_sequence_far_beyond_window_and_original_length_equals_hf(name, hf_model, engine_of):
    ids = random_ids(1, 120, seed=8)
    for backend in BACKENDS:
        check(
            engine_of(name, backend)(ids, output_hidden_states=True), expected(hf_model(name), ids)
        )


@pytest.mark.parametrize("window", [1, 2])
def test_smallest_windows_equal_hf(window, backend):
    model = make_model("mistral-window", sliding_window=window, num_hidden_layers=1)
    engine = dualinfer.init_inference(model, backend=backend, kernel_inject=True)
    ids, mask = batch()
    out = engine(ids, mask, output_hidden_states=True)
    check(out, expected(model, ids, attention_mask=mask), mask == 1)


def test_fields_that_hf_ignores_change_nothing():
    # A window that hides nothing of the longest sequence, and no kind of layer but the usual one.
    reach = make_model("llama-mqa").config.max_position_embeddings
    fields = {"sliding_window": reach, "layer_types": ["full_attention"], "pretraining_tp": 2}
    model = make_model("llama-mqa", **fields)
    engine = dualinfer.init_inference(model, kernel_inject=True)
    ids = random_ids(2, TOKENS)
    check(engine(ids, output_hidden_states=True), expected(model, ids))


# --- what comes in, what comes out ---------------------------------------------------------------

KINDS = {
    "torch": (torch.tensor, torch.Tensor),
    "numpy": (np.asarray, np.ndarray),
    "jax": (jnp.asarray, jnp.ndarray),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-gqa", "bert"], scope="session")
def test_outputs_are_of_the_callers_framework(name, kind, backend, hf_model, engine_of):
    ids, mask = batch()
    make, kept = KINDS[kind]
    out = engine_of(name, backend)(make(ids), make(mask), output_hidden_states=True)
    reference = expected(hf_model(name), ids, attention_mask=mask)
    assert all(isinstance(x, kept) for x in (out[0], *out.hidden_states))
    assert str(out[0].dtype).endswith("float32")
    key = next(iter(reference))
    assert relative_rms(np.asarray(out[key])[mask == 1], reference[key][mask == 1]) < LIMIT


@pytest.mark.parametrize("name", ["llama-gqa", "bert"], scope="session")
def test_lists_and_tuples_give_the_backends_own_arrays(name, backend, hf_model, engine_of):
    ids, mask = batch()
    engine = engine_of(name, backend)
    own = KINDS[backend][1]
    reference = expected(hf_model(name), ids, attention_mask=mask)
    key = next(iter(reference))
    tuples = tuple(map(tuple, ids.tolist()))
    for given in (ids.tolist(), tuples, list(map(np.asarray, ids))):
        out = engine(given, mask.tolist())
        assert isinstance(out[0], own)
        assert relative_rms(np.asarray(out[0])[mask == 1], reference[key][mask == 1]) < LIMIT


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint32"])
def test_every_integer_dtype_is_taken(dtype, backend, engine_of):
    engine = engine_of("llama-mqa", backend)
    ids = random_ids(2, 5, vocab=100)
    out = engine(ids.astype(dtype), np.ones_like(ids).astype(dtype))
    np.testing.assert_array_equal(out.logits, engine(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.uint8])
def test_every_mask_dtype_is_taken(dtype, backend, engine_of):
    engine = engine_of("llama-mqa", backend)
    ids, mask = batch()
    out = engine(torch.tensor(ids), torch.tensor(mask).to(dtype))
    np.testing.assert_array_equal(out.logits.numpy(), np.asarray(engine(ids, mask).logits))


def test_strided_and_readonly_arrays_are_taken(backend, engine_of):
    engine = engine_of("llama-mqa", backend)
    ids, mask = batch()
    frozen = ids.copy()
    frozen.flags.writeable = False
    for a, b in (
        (np.asfortranarray(ids), np.asfortranarray(mask)),
        (frozen, mask),
        (torch.tensor(ids.T.copy()).T, torch.tensor(mask.T.copy()).T),
        (np.repeat(ids, 2, axis=1)[:, ::2], mask),
    ):
        np.testing.assert_array_equal(engine(a, b).logits, engine(ids, mask).logits)


def test_outputs_may_be_written_to_and_kept(backend, engine_of):
    engine = engine_of("llama-mqa", backend)
    ids = torch.tensor(random_ids(2, 5))
    first = engine(ids).logits
    kept = first.clone()
    engine(ids + 1)
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(engine(ids).logits, kept)


@pytest.mark.parametrize(
    "name", ["llama-mha", "bert", "bert-masked", "gpt2-headless"], scope="session"
)
def test_output_is_what_hf_gives(name, backend, hf_model, engine_of):
    ids = random_ids(2, 7)
    engine = engine_of(name, backend)
    reference = expected(hf_model(name), ids)
    names = [n for n in reference if n != "hidden_states"]
    out = engine(ids)
    assert isinstance(out, ModelOutput) and len(out) == len(names)
    assert list(out.keys()) == names
    for i, field in enumerate(names):
        assert out[i] is out[field] is getattr(out, field)
    assert out.hidden_states is None
    assert out.to_tuple()[0] is out[0]
    out["input_ids"] = ids  # as the fill-mask pipeline does
    assert out.input_ids is ids
    again = pickle.loads(pickle.dumps(out))
    assert isinstance(again, Outputs) and list(again) == list(out)
    with pytest.raises(AttributeError, match="nothing"):
        out.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["llama-mha", "bert"], scope="session")
def test_return_dict_false_gives_a_plain_tuple_in_hf_order(name, backend, hf_model, engine_of):
    ids = random_ids(2, 7)
    out = engine_of(name, backend)(ids, return_dict=False, output_hidden_states=True)
    with torch.no_grad():
        reference = hf_model(name)(
            torch.tensor(ids), return_dict=False, output_hidden_states=True, use_cache=False
        )
    assert type(out) is tuple and len(out) == len(reference)
    for ours, theirs in zip(out, reference, strict=True):
        if isinstance(theirs, tuple):
            assert type(ours) is tuple and len(ours) == len(theirs)
            assert relative_rms(ours[-1], theirs[-1].numpy()) < LIMIT
        else:
            assert relative_rms(ours, theirs.numpy()) < LIMIT


@pytest.mark.parametrize("name", ["llama-mha", "bert", "gpt2-headless"], scope="session")
def test_return_tuple_false_gives_the_bare_array(name, backend, engine_of):
    ids = random_ids(2, 7)
    engine = engine_of(name, backend)
    bare = engine(torch.tensor(ids), return_tuple=False)
    assert isinstance(bare, torch.Tensor)
    np.testing.assert_array_equal(bare.numpy(), np.asarray(engine(ids)[0]))


def test_return_tuple_of_the_config_is_the_default(backend, hf_model):
    engine = dualinfer.init_inference(
        hf_model("llama-mqa"), {"return_tuple": False}, backend, kernel_inject=True
    )
    ids = random_ids(1, 4)
    assert isinstance(engine(ids), np.ndarray)
    assert engine(ids, return_tuple=True).logits.shape == (1, 4, 1001)


def test_models_own_output_settings_are_the_defaults(backend):
    model = make_model("llama-mqa", output_hidden_states=True, return_dict=False)
    engine = dualinfer.init_inference(model, backend=backend, kernel_inject=True)
    out = engine(random_ids(1, 4))
    assert type(out) is tuple and len(out) == 2 and len(out[1]) == 2
    named = engine(random_ids(1, 4), return_dict=True, output_hidden_states=False)
    assert list(named.keys()) == ["logits"]


def test_positional_arguments_are_ids_and_mask(backend, engine_of):
    engine = engine_of("llama-gqa", backend)
    ids, mask = batch()
    np.testing.assert_array_equal(
        engine(ids, mask).logits, engine(input_ids=ids, attention_mask=mask).logits
    )


def test_one_row_of_ids_is_a_batch_of_one(backend, engine_of):
    engine = engine_of("llama-gqa", backend)
    ids = random_ids(1, 6)
    np.testing.assert_array_equal(engine(ids[0]).logits, engine(ids).logits)
    np.testing.assert_array_equal(engine(ids[0].tolist()).logits, engine(ids).logits)


# --- folders -------------------------------------------------------------------------------------


def bin_weights(model, folder, shards=1):
    """The model's state dict as .bin files, in place of its safetensors."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    names = list(state)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    weight_map = {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        part = {n: state[n] for n in names[i::shards]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def save(model, folder, form):
    if form == "sharded":
        model.save_pretrained(folder, max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        assert (folder / "model.safetensors.index.json").exists()
        return
    model.save_pretrained(folder)
    if form.startswith("bin"):
        bin_weights(model, folder, 3 if form == "bin-sharded" else 1)


def leaves(engine):
    """Every weight of an engine, by name, as NumPy arrays."""
    params = engine.runner.params
    groups = {"": params.outer, **{f"{i}.": p for i, p in enumerate(params.layers)}}
    return {
        f"{g}{n}": np.asarray(a) for g, ws in groups.items() for n, a in named_arrays(ws).items()
    }


# What files hold the tensors is nothing of a case's weights: one of each family shows it.
FOLDERS = [(name, "single") for name in ALL]
FOLDERS += [(name, form) for name in (*ONE_OF_EACH, "bert") for form in ("sharded", "bin")]


@pytest.mark.parametrize(("name", "form"), FOLDERS, scope="session")
def test_folder_gives_the_live_models_engine(name, form, tmp_path, hf_model, engine_of):
    save(hf_model(name), tmp_path, form)
    ids = random_ids(3, TOKENS)
    for backend in BACKENDS:
        engine = dualinfer.init_inference(str(tmp_path), backend=backend)
        live = engine_of(name, backend)
        assert engine.report().mode == "fused"
        assert engine.runner.spec == live.runner.spec
        ours, theirs = leaves(engine), leaves(live)
        assert ours.keys() == theirs.keys()
        for key in ours:
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
        if backend == "torch":
            check(engine(ids, output_hidden_states=True), expected(hf_model(name), ids))


@pytest.mark.parametrize("form", ["single", "sharded", "bin", "bin-sharded"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "bert-masked"], scope="session")
def test_folder_runs_on_jax_without_injection(name, form, tmp_path, hf_model):
    save(hf_model(name), tmp_path, form)
    engine = dualinfer.init_inference(tmp_path, backend="jax", dtype="float32")
    ids, mask = batch()
    out = engine(ids, mask, output_hidden_states=True)
    check(out, expected(hf_model(name), ids, attention_mask=mask), mask == 1)
    assert engine.report().source == str(tmp_path)


@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "bert-masked"], scope="session")
def test_bfloat16_folder_in_float32_equals_hf(name, backend, tmp_path):
    model = make_model(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    reference = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = random_ids(3, TOKENS)
    engine = dualinfer.init_inference(tmp_path, backend=backend, dtype=torch.float32)
    out = engine(ids, output_hidden_states=True)
    check(out, expected(reference, ids))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-gqa", "bfloat16"),
        ("llama-gqa", "float16"),
        ("gpt2", "bfloat16"),
        ("bert-masked", "bfloat16"),
        ("opt-post", "float16"),
        ("gptj-tied", "bfloat16"),
        ("gpt-neo", "float16"),
        ("neox", "bfloat16"),
        ("bloom", "bfloat16"),
        ("gemma2", "bfloat16"),
    ],
)
def test_half_precision_is_as_near_to_float32_as_hf_is(name, dtype, backend, tmp_path, hf_model):
    ids = random_ids(4, 16, seed=11)
    low = make_model(name).to(getattr(torch, dtype))
    # The same rounded weights in float32, so that only the arithmetic differs.
    exact = make_model(name)
    exact.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    engine = dualinfer.init_inference(low, backend=backend, dtype=dtype, kernel_inject=True)
    with torch.no_grad():
        reference = exact(torch.tensor(ids)).logits
        theirs = low(torch.tensor(ids)).logits.float()
    ours = engine(torch.tensor(ids)).logits
    assert ours.dtype == getattr(torch, dtype)
    error, peer = relative_rms(ours.float(), reference), relative_rms(theirs, reference)
    assert error < 1.1 * peer


def test_default_dtype_on_a_cpu_is_float32_whatever_is_stored(backend, tmp_path):
    model = make_model("llama-mqa").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    engine = dualinfer.init_inference(tmp_path, backend=backend)
    assert engine.report().dtype == "float32"
    assert engine(random_ids(1, 3)).logits.dtype == np.float32
    assert any("float32" in note for note in engine.report().notes)


def test_headless_checkpoint_of_a_model_with_a_head_and_the_reverse(tmp_path, backend):
    full = make_model("llama-mqa")
    base = full.model
    base.save_pretrained(tmp_path / "base")
    ids = random_ids(1, 5)
    reference = expected(base, ids)
    live = dualinfer.init_inference(base, backend=backend, kernel_inject=True)
    check(live(ids, output_hidden_states=True), reference)
    folder = dualinfer.init_inference(tmp_path / "base", backend=backend)
    check(folder(ids, output_hidden_states=True), reference)
    # The full checkpoint, read as its base model.
    full.save_pretrained(tmp_path / "full")
    path = tmp_path / "full" / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "LlamaModel"))
    check(
        dualinfer.init_inference(tmp_path / "full", backend=backend)(
            ids, output_hidden_states=True
        ),
        reference,
    )


def test_folder_with_links_to_another_folder_is_read(tmp_path, hf_model):
    """HF's own cache is made of such links."""
    real, linked = tmp_path / "blobs", tmp_path / "snapshot"
    hf_model("llama-mqa").save_pretrained(real)
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    engine = dualinfer.init_inference(linked, backend="torch")
    ids = random_ids(1, 5)
    check(engine(ids, output_hidden_states=True), expected(hf_model("llama-mqa"), ids))


def test_safetensors_wins_over_bin(tmp_path, hf_model):
    model = hf_model("llama-mqa")
    model.save_pretrained(tmp_path)
    torch.save({"nonsense": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    engine = dualinfer.init_inference(tmp_path)
    ids = random_ids(1, 5)
    check(engine(ids, output_hidden_states=True), expected(model, ids))


def test_moved_and_deleted_folder_does_not_matter_after_loading(tmp_path, hf_model, backend):
    folder = tmp_path / "model"
    hf_model("llama-mqa").save_pretrained(folder)
    engine = dualinfer.init_inference(folder, backend=backend)
    shutil.rmtree(folder)
    ids = random_ids(1, 5)
    check(engine(ids, output_hidden_states=True), expected(hf_model("llama-mqa"), ids))
