"""Latent attention: what its cache holds, position by position, split and quantized."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer.bench.counts import Counts
from dualinfer.bench.random_weights import plan_weights
from dualinfer.bench.shapes import open_model
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.cli.plan_table import make_plan_table
from dualinfer.errors import UnsupportedError
from dualinfer.model.families import describe_model
from dualinfer.ops.caches import CacheSpec, Room, cache_bytes, cache_specs

from .cases import CASES, make_model
from .cases.latent import WRITTEN
from .cases.relatives import OF_ALL
from .formats import check_logits
from .models import BACKENDS, noted_logits, random_ids, relative_rms
from .test_fp8_formats import FP8, blocks_of
from .test_quantize_on_load import dequantized

pytestmark = pytest.mark.usefixtures("greedy")

HOW = {"replace_with_kernel_inject": True, "dtype": "fp32"}
CASE = "deepseek_v2, dense"


def test_latents_take_a_tenth_of_what_heads_would():
    spec, table = open_model("deepseek-v2-lite").describe()
    specs = cache_specs(spec)
    held = cache_bytes(specs, Room(32, 4096), 2)
    assert held == 32 * 4096 * 27 * (512 + 64) * 2
    full = [CacheSpec("full", 16, 192, 192)] * 27
    assert held <= cache_bytes(full, Room(32, 4096), 2) / 10
    counts = Counts.of(plan_weights(open_model("deepseek-v2-lite"), "bfloat16", None), "bfloat16")
    assert counts.read_bytes(1) == pytest.approx(2.45e9 * 2, rel=0.01)  # six of 64 experts
    assert counts.kv_bytes("bfloat16", 32, 4096, 2) == held
    # Every device has all of them, and its heads' part of what reads them.
    plan = make_plan_table(table, 4, "bfloat16", 64)
    assert [part.cache for part in plan.devices] == [27 * 576 * 2] * 4
    shares = {own.name: (own.extent, own.whole) for own in plan.devices[0].shares}
    assert shares["query heads"] == (4, 16) and shares["latent width"] == (576, 576)
    assert any("latent" in note for note in plan.notes)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_files_of_axk1_may_lack_biases_of_the_choice(backend, tmp_path):
    """And have norms behind dense layers, which nothing reads."""
    model, ids = make_model("axk1"), random_ids(2, 9)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if "e_score_correction_bias" not in n}
    norm = "model.layers.{}.post_mlp_layernorm.weight"
    tensors[norm.format(0)] = torch.zeros_like(tensors[norm.format(1)])
    save_file(tensors, file, {"format": "pt"})
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits
    with dualinfer.init_inference(str(tmp_path), backend=backend, **HOW) as engine:
        assert relative_rms(engine(ids).logits, expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_position_is_that_of_hf_through_the_cache(backend):
    """By the prompt's own pass and by steps; then a stream beside longer ones, as a cache grows."""
    model, ids = make_model(CASE), random_ids(2, 7)
    how = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    with dualinfer.init_inference(model, backend=backend, **HOW) as engine:
        with noted_logits(backend) as noted:
            text = np.asarray(engine.generate(ids, **how))
        assert engine.report().cache == "latent"
        held = engine.report().cache_bytes
        assert held == engine.runner.cache_bytes_for(2, 37) == 2 * 2 * 64 * 32 * 4
        stream = engine.stream(ids[:1], **how)
        begun = [next(stream) for _ in range(3)]
        again = engine.generate(np.repeat(ids, 2, axis=0), **how)
        np.testing.assert_array_equal(np.asarray(again)[::2], text)
        np.testing.assert_array_equal(np.ravel([*begun, *stream]), text[0, 7:])
    with torch.no_grad():
        expected = model(torch.from_numpy(text)).logits.numpy()
    assert len(noted) == 30
    for at, logits in noted.items():
        assert relative_rms(logits, expected[:, at - 1]) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_are_quantized_leave_a_heads_matrices_dense(backend):
    """They are read in two ways, as they are and turned: kv_b_proj is not quantized."""
    model, ids = make_model(CASE), random_ids(2, 9)
    how = {"max_new_tokens": 5, "do_sample": False}
    with (
        torch.no_grad(),
        dualinfer.init_inference(model, backend=backend, quant="int8", **HOW) as engine,
    ):
        dense = dequantized(model, "int8", plain=("kv_b_proj",))
        assert relative_rms(engine(ids).logits, dense(torch.from_numpy(ids)).logits) < 1e-5
        text = dense.generate(torch.from_numpy(ids), pad_token_id=0, **how)
        np.testing.assert_array_equal(np.asarray(engine.generate(ids, **how)), text.numpy())
        layer = engine.runner.params.layers[1]
        assert layer["kv.weight"].scheme is None and layer["query.weight"].scheme is not None
    with pytest.raises(UnsupportedError, match="kind latent"):
        dualinfer.init_inference(model, backend=backend, kv_cache_dtype="int8", **HOW)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_heads_matrices_in_fp8_are_what_their_codes_mean(backend, tmp_path):
    """As DeepSeek-V3 is published, in blocks that heads do not end at."""
    make_model(CASE).save_pretrained(tmp_path)
    tensors, change = load_file(tmp_path / "model.safetensors"), blocks_of((23, 11))
    others = [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]
    for i in range(2):
        change(f"model.layers.{i}.self_attn.kv_b_proj", tensors)
        others.remove(f"model.layers.{i}.self_attn.kv_b_proj")
    tensors["model.layers.2.enorm.weight"] = torch.ones(3)  # of a layer behind those of the model
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    left = {"modules_to_not_convert": [*others, "lm_head"], "weight_block_size": [23, 11]}
    fields["quantization_config"] = FP8 | left
    (tmp_path / "config.json").write_text(json.dumps(fields))
    check_logits(tmp_path, backend)


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        (CASE, {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        (CASE, {"unheard_of": 3}, "unheard_of=3"),
        (
            CASE,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "mscale_all_dim": 1}},
            "positive factor",
        ),
        ("youtu", {"head_dim": 12}, "head_dim=12"),
        (
            "glm4_moe_lite",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}},
            "4 of the 10",
        ),
    ],
)
def test_what_latent_attention_does_not_honour_is_refused(case, fields, message):
    with pytest.raises(dualinfer.ModelError, match=message):
        describe_model({**CASES[case].make_config().to_dict(), **fields})


@pytest.mark.parametrize("meets", [True, False])
def test_a_long_prompt_is_read_in_pieces_by_kernels(meets, monkeypatch):
    """They meet the cached latents of the pieces before, or keys and values are made of them."""
    pytest.importorskip("triton")
    from dualinfer.backends.torch import prompts
    from dualinfer.backends.torch.ops.kernels import KernelOps
    from dualinfer.kernels.triton import latent, linear

    model, rows = make_model("youtu"), [random_ids(1, n, seed=n)[0].tolist() for n in (21, 4)]
    how = {"max_new_tokens": 3, "do_sample": False}
    with dualinfer.init_inference(model, use_triton=False, **HOW) as plain:
        expected = np.asarray(plain.generate(rows, **how))
    make_ops = lambda config, spec, device, _: KernelOps(device)  # noqa: E731
    monkeypatch.setattr(dualinfer.backends.torch, "_make_ops", make_ops)
    monkeypatch.setattr(linear, "serves", lambda *shape: False)
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 16)
    monkeypatch.setattr(latent, "meets_latents", lambda *_: meets)
    with dualinfer.init_inference(model, **HOW) as engine:
        np.testing.assert_array_equal(np.asarray(engine.generate(rows, **how)), expected)
        assert "latent vectors" in engine.report().ops["decode_attention"]


def test_short_pieces_go_side_by_side_where_queries_meet_latent_vectors():
    """On JAX, where panels are known before; plain ops make keys of all that a slot has."""
    pytest.importorskip("triton")
    from dualinfer.backends.base import Piece, Request
    from dualinfer.backends.jax.ops.plain import PlainOps
    from dualinfer.backends.jax.prompts import Passes

    from .kernels.jax_ops import interpreted_ops

    spec = describe_model(CASES["youtu"].make_config().to_dict())[0]
    room, request = Room(4, 2048), Request(np.zeros(2000, np.int32), 1)
    first, later, long = (
        Piece(request, slot, *where)
        for slot, where in enumerate(((0, 850), (1800, 1900), (1000, 2000)))
    )
    found = {}
    for ops in (interpreted_ops(), PlainOps()):
        passes = Passes(spec, ops, cache_specs(spec), lambda width: 4096)
        pieces = [first, later], [first, long]
        found[type(ops)] = shapes = [[p.shape for p in passes.of(x, room)] for x in pieces]
        used = [(p.shape, p.reach) for x in pieces for p in passes.of(x, room)]
        assert set(used) <= set(passes.sizes(room))
        assert shapes[1] == [(1, 1024), (1, 1024)]
    by_kernels, plain = found.values()
    assert by_kernels[0] == [(16, 64)] and plain[0] == [(1, 1024), (1, 256)]


def test_a_step_looks_up_what_was_measured(monkeypatch):
    pytest.importorskip("triton")
    from dualinfer.backends.torch.ops.kernels import KernelOps
    from dualinfer.backends.torch.tuning.cases import tuning_cases
    from dualinfer.kernels.triton.tuning import Configurations, candidates

    with dualinfer.init_inference(make_model("minicpm3"), **HOW) as engine:
        ops, runner = KernelOps(torch.device("cpu")), engine.runner
        how = {"rows": (1,), "reaches": (64,), "prompts": (8,)}
        found = tuning_cases(runner.spec, runner.params, ops, **how)
        (case,) = (case for case in found if case.key[0] == "latent_attention")
        assert {"attention", "latent_attention"} <= {case.key[0] for case in found}
        assert len(candidates(case.key, 132)) > 4
        asked = []
        monkeypatch.setattr(
            Configurations, "look_up", lambda self, key: (asked.append(key), (None,) * 2)[1]
        )
        run, _ = case.prepare()
        run(None)
    assert set(asked) == {case.key}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_config_as_its_makers_wrote_it_is_taken(family, tmp_path):
    written = {**OF_ALL, **WRITTEN[family], "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written))
    spec, _ = describe_model(read_config(tmp_path).to_dict())
    assert len(spec.layers) == 2 and spec.layers[0].attention.latent is not None


def test_a_step_of_jax_is_one_call_that_changes_the_cache_in_place(monkeypatch):
    """As it is lowered for CUDA, by mode of sampling; nothing runs."""
    pytest.importorskip("triton")
    import jax

    from dualinfer.backends.jax import ahead
    from dualinfer.backends.jax.ops.kernels import KernelOps

    from .kernels.jax_ops import calls_for_cuda, gpu

    ops = KernelOps(gpu(core_count=132))
    monkeypatch.setattr(dualinfer.backends.jax, "_make_ops", lambda *args: ops)
    with dualinfer.init_inference(
        make_model(CASE), backend="jax", **HOW | {"dtype": "bf16"}
    ) as engine:
        found = list(ahead.jobs(engine.runner, ahead.Wanted((1,), (5,), 4), 4))
    modes, seen = len(KernelOps.modes), set()
    for job in found:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
        calls, _ = calls_for_cuda(job.function, args, monkeypatch)
        kernels = [kernel for call in calls for kernel in call.kernels]
        seen.add(job.key[0])
        if job.key[0] == "prefill":
            assert kernels.count("attention_kernel") == kernels.count("turn_latents_kernel") == 2
            continue
        for name in ("turn_latents", "absorb", "decode_latents", "join_latents"):
            assert kernels.count(f"{name}_kernel") == modes * 2
        assert len(calls) == modes and all(call.changed >= 3 for call in calls)
    assert {"prefill", "decode"} <= seen
