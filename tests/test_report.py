"""What report() says: that ours ran, on what, and how much memory it took."""

import numpy as np
import pytest

import dualinfer

from .cases.decoders import ALL, CASES
from .models import BACKENDS, random_ids


@pytest.mark.parametrize("name", ALL)
def test_report_counts_what_the_model_holds(name, hf_model):
    engine = dualinfer.init_inference(hf_model(name), kernel_inject=True)
    report = engine.report()
    case = CASES[name]
    assert (report.mode, report.backend, report.family) == ("fused", "torch", case.family)
    assert report.architecture == case.model.__name__
    assert report.layers == case.make_config().num_hidden_layers
    unread = 1001 if name == "bert-masked-untied" else 0  # HF makes a bias that it never reads
    if name == "opt-bare":
        unread = -5 * 2 * 60  # we give its LayerNorms weights and biases
    assert report.parameters == sum(p.numel() for p in hf_model(name).parameters()) - unread
    assert report.parameter_bytes == 4 * report.parameters
    assert report.cache_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_report_follows_the_cache_and_names_each_op(backend, hf_model):
    engine = dualinfer.init_inference(
        hf_model("llama-mqa"), backend=backend, dtype="bf16", kernel_inject=True, max_tokens=99
    )
    first = engine.report()
    assert (first.dtype, first.max_tokens, first.cache_bytes) == ("bfloat16", 99, 0)
    assert first.parameter_bytes == 2 * first.parameters
    assert first.device.startswith("cpu") and "live LlamaForCausalLM" in first.source
    needed = {"matmul", "embed", "rms_norm", "rotary", "attention", "decode_attention", "sampling"}
    assert needed <= first.ops.keys() and all(first.ops.values())
    engine.generate(random_ids(2, 5), max_new_tokens=3)
    grown = engine.report()
    spec = engine.runner.spec.layers[0].attention
    assert grown.cache_bytes >= 2 * 2 * spec.kv_heads * spec.head_dim * 2 * 7
    text = str(grown)
    for word in ("LlamaForCausalLM", "fused", backend, "bfloat16", "matmul", "99"):
        assert word in text
    assert grown.to_dict()["cache_bytes"] == grown.cache_bytes


def test_jax_model_is_there_to_inspect(engine_of, hf_model):
    engine = engine_of("llama-gqa", "jax")
    weights = hf_model("llama-gqa").state_dict()
    attention = "model.layers.1.self_attn."
    layer = engine.module.layers[1]
    for part in ("q", "k", "v"):
        np.testing.assert_array_equal(
            getattr(layer, part), weights[f"{attention}{part}_proj.weight"].numpy()
        )
    np.testing.assert_array_equal(layer.out.weight[...], weights[f"{attention}o_proj.weight"])


def test_bucket_is_compiled_once(hf_model):
    """After the first call of a size, no call inside the same buckets compiles again."""
    engine = dualinfer.init_inference(hf_model("llama-mqa"), backend="jax", kernel_inject=True)
    engine(random_ids(3, 9))
    engine.generate(random_ids(3, 9), max_new_tokens=20)
    list(engine.stream(random_ids(3, 9), max_new_tokens=4))
    before = engine.runner.compilations
    assert before > 0
    for rows, tokens, new in ((3, 9, 20), (4, 16, 40), (3, 1, 3), (4, 12, 33)):
        engine(random_ids(rows, tokens))
        engine.generate(random_ids(rows, tokens), max_new_tokens=new)
        list(engine.stream(random_ids(rows, tokens), max_new_tokens=4))
    assert engine.runner.compilations == before


def test_ops_name_what_kernels_leave_to_plain_ones_where_a_model_has_it():
    """Heads too wide in some layers, in none; experts that weigh their inputs are the kernels'."""
    pytest.importorskip("triton")
    import transformers as hf

    from dualinfer.backends.jax.ops.kernels import KernelOps
    from dualinfer.backends.jax.ops.plain import PlainOps
    from dualinfer.backends.kernels import left_plain
    from dualinfer.model.families import describe_model
    from dualinfer.ops.caches import served

    def ops(config):
        left = left_plain(describe_model(config.to_dict())[0])
        return served(KernelOps.implementations, PlainOps.implementations, None, [], left)

    wide, plain = PlainOps.implementations["attention"], PlainOps.implementations["experts"]
    assert f"; {wide} for heads of over 256" in ops(hf.Gemma4TextConfig())["attention"]
    assert wide not in ops(hf.Gemma2Config())["attention"]
    for chosen in (1, 2):
        config = hf.Llama4TextConfig(num_experts_per_tok=chosen)
        assert plain not in ops(config)["experts"]


@pytest.mark.parametrize(("quant", "plain"), [("int8", False), ("int8_w8a8", True)])
def test_experts_are_plain_where_kernels_do_not_read_how_they_are_held(quant, plain):
    pytest.importorskip("triton")
    from dualinfer.backends.kernels import left_plain

    from .cases import make_model

    how = {"backend": "torch", "replace_with_kernel_inject": True, "quant": quant}
    engine = dualinfer.init_inference(make_model("qwen2_moe"), **how)
    left = left_plain(engine.runner.spec, engine.runner.params.layers)
    assert left == ({"experts": ""} if plain else {})
