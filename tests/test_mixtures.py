"""Mixtures of experts: every family against HF's own eager experts, on both backends."""

import json
import re

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dualinfer
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.model.families import describe_model
from dualinfer.ops import mixtures

from .cases import make_model
from .cases.covering import each
from .cases.mixtures import CASES, LONGROPE, VOCAB, chosen_by
from .models import BACKENDS, random_ids, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

FUSED = {"dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def remember_routes(backend, monkeypatch):
    """The experts of each layer's tokens, in order, of what an engine runs from here on."""
    found, route = [], mixtures.route

    def remember(*args):
        routing = route(*args)
        if backend == "torch":
            found.append(routing.experts.numpy())
        else:
            import jax

            jax.debug.callback(lambda e: found.append(np.asarray(e)), routing.experts, ordered=True)
        return routing

    monkeypatch.setattr(mixtures, "route", remember)
    return found


@pytest.mark.parametrize(("case", "backend"), each(CASES))
def test_a_mixture_is_that_of_transformers(case, backend, monkeypatch, tmp_path):
    """A live module, whose experts are one tensor, and a folder, where each has its own."""
    model, ids = make_model(case), random_ids(2, 11, vocab=VOCAB)
    logits, chosen = chosen_by(model, ids)
    with torch.no_grad():
        text = model.generate(torch.tensor(ids), **GREEDY).numpy()
    routes = remember_routes(backend, monkeypatch)
    with dualinfer.init_inference(model, backend=backend, **FUSED) as engine:
        assert relative_rms(engine(ids).logits, logits) < 1e-5
        mine = [own[:2, :11].reshape(22, -1) for own in routes]  # on JAX T is a bucket
        assert len(mine) == len(chosen)
        for ours, theirs in zip(mine, chosen, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(engine.generate(ids, **GREEDY), text)
    if backend == "jax" and case not in ("qwen2_moe", "gpt_oss"):
        return  # the plan by which torch has read it is JAX's, too
    model.save_pretrained(tmp_path)
    with dualinfer.init_inference(str(tmp_path), backend=backend, **FUSED) as engine:
        assert relative_rms(engine(ids).logits, logits) < 1e-5


@pytest.mark.parametrize(
    ("backend", "case", "count"),
    [
        ("torch", "qwen2_moe", "num_experts"),
        ("jax", "qwen2_moe", "num_experts"),
        ("torch", "llama4", "num_local_experts"),
        pytest.param("jax", "llama4", "num_local_experts", marks=pytest.mark.slow),
        ("torch", "phimoe", "num_local_experts"),
        pytest.param("jax", "phimoe", "num_local_experts", marks=pytest.mark.slow),
        *(
            pytest.param(name, case, "num_experts", marks=pytest.mark.slow)
            for name in BACKENDS
            for case in ("afmoe", "cohere2_moe")
        ),
    ],
)
def test_experts_that_no_token_chose_change_no_bit(backend, case, count, monkeypatch):
    model, ids = make_model(case, **{count: 24}, num_experts_per_tok=1), random_ids(1, 2, vocab=9)
    routes = remember_routes(backend, monkeypatch)
    with dualinfer.init_inference(model, backend=backend, **FUSED) as engine:
        expected = np.asarray(engine(ids).logits)
    with torch.no_grad():
        stacks = [m for n, m in model.named_modules() if n.endswith(".experts")]
        for experts, own in zip(stacks, routes, strict=True):
            unread = np.setdiff1d(np.arange(24), own)  # on JAX padding chooses, too
            assert len(unread) >= 7
            for part in ("gate_up_proj", "down_proj"):
                getattr(experts, part)[unread] = torch.nan
    with dualinfer.init_inference(model, backend=backend, **FUSED) as engine:
        np.testing.assert_array_equal(np.asarray(engine(ids).logits), expected)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_of_a_llama4_that_sees_images_the_text_is_served(backend, tmp_path):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 16, "vision_output_dim": 16, "image_size": 28, "patch_size": 14}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    vision |= {"pixel_shuffle_ratio": 1.0, "rope_parameters": {"rope_theta": 1e4}}
    config = hf.Llama4Config(
        text_config=CASES["llama4"].make_config(), vision_config=vision, image_token_index=VOCAB - 1
    )
    model = hf.Llama4ForConditionalGeneration(config)
    model.language_model.load_state_dict(make_model("llama4").state_dict())
    model, ids = model.eval(), random_ids(2, 11, vocab=VOCAB - 1)
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits.numpy()
    model.save_pretrained(tmp_path)
    for where in (model, str(tmp_path)):
        with dualinfer.init_inference(where, backend=backend, **FUSED) as engine:
            assert relative_rms(engine(ids).logits, logits) < 1e-5


def shared(case, backend, devices):
    """Logits and text of a model that so many devices share, and the bytes that each reads."""
    model, ids = make_model(case), random_ids(2, 11, vocab=VOCAB)
    how = {**FUSED, "backend": backend, "tensor_parallel": {"tp_size": devices}}
    with dualinfer.init_inference(model, **how) as engine:
        logits, text = np.asarray(engine(ids).logits), None
        if backend == "torch":  # on JAX it takes seconds to compile
            text = np.asarray(engine.generate(ids, **GREEDY))
        return logits, text


SHARED = [
    pytest.param(case, backend, devices, marks=[] if quick else [pytest.mark.slow])
    for case, backend, devices, quick in (
        ("qwen2_moe", "torch", 3, True),
        ("qwen2_moe", "jax", 3, True),
        ("qwen2_moe", "torch", 2, False),
        ("qwen2_moe", "jax", 2, False),
        ("gpt_oss", "torch", 3, False),
        ("gpt_oss", "jax", 3, False),
        ("glm4_moe", "torch", 2, False),
        ("glm4_moe", "jax", 3, False),
        ("llama4", "torch", 2, False),
        ("llama4", "jax", 3, False),
        ("phimoe, longrope", "torch", 2, False),
        ("phimoe, longrope", "jax", 2, False),
        ("afmoe", "torch", 3, False),
        ("afmoe", "jax", 2, False),
        ("cohere2_moe", "torch", 2, False),
        ("granitemoe_swa", "jax", 3, False),
        ("dbrx", "torch", 3, False),
        ("gemma4 with experts", "torch", 2, False),
        ("gemma4 with experts", "jax", 3, False),
        ("laguna", "torch", 2, False),
        ("laguna", "jax", 2, False),
        ("longcat_flash with more experts", "torch", 3, False),
        ("longcat_flash with more experts", "jax", 2, False),
        ("mimo_v2_flash", "torch", 2, False),
        ("mimo_v2_flash", "jax", 2, False),
        ("mixtral", "torch", 3, False),
        ("mixtral", "jax", 2, False),
    )
]


@pytest.mark.xdist_group("ranks")  # whose processes live through a run
@pytest.mark.parametrize(("case", "backend", "devices"), SHARED)
def test_several_devices_give_what_one_gives(case, backend, devices, crew):
    """Each has its share of every expert and of the shared one: uneven, on JAX with zeros."""
    if backend == "torch":
        found = crew.run(shared, case, backend, devices, world=devices)
    else:
        found = [shared(case, backend, devices)]
    logits, text = shared(case, "torch", 1)  # which gives what JAX gives, and compiles nothing
    for ours, own in found:
        assert relative_rms(ours, logits) < 1e-5
        if backend == "torch":
            np.testing.assert_array_equal(own, text)


def test_a_device_reads_its_slices_of_every_expert_alone():
    from dualinfer.model.load_plan import TableSource, make_load_plan
    from dualinfer.parallel.sharding import make_plan

    _, table = describe_model(make_model("qwen2_moe").config.to_dict())
    plan = make_load_plan(table, TableSource(table, "float32", "a test"))
    rows = {row.name: row for row, _ in plan.rows}
    up, down = (rows[f"layers.1.experts.{part}.weight"] for part in ("up", "down"))
    read = []
    for shard in make_plan(table, 3, grain=1).shards:
        sizes = [read.index for part in up.sources for read in shard.reads(up, part)]
        assert len(up.sources) == len(sizes) == 10
        assert all(own == (sizes[0][0], slice(0, 60)) for own in sizes)
        columns = [read.index[1] for part in down.sources for read in shard.reads(down, part)]
        assert columns == [sizes[0][0]] * 5
        read.append(columns[0])
        mine = shard.spec.layers[1].mlp
        assert (mine.ffn, mine.shared) == (shard.extent("up", 1), shard.extent("shared", 1))
    assert [(own.start, own.stop) for own in read] == [(0, 7), (7, 13), (13, 19)]


NOAUX = {"first_k_dense_replace": 0, "moe_intermediate_size": 48, "n_routed_experts": 8}
NOAUX |= {"n_shared_experts": 1, "num_experts_per_tok": 4, "norm_topk_prob": True}
NOAUX |= {"routed_scaling_factor": 2.5, "topk_method": "noaux_tc"}
WRITTEN = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    | {"router_aux_loss_coef": 0.02, "rms_norm_eps": 1e-5, "sliding_window": None},
    "qwen2_moe": {"decoder_sparse_step": 1, "moe_intermediate_size": 44, "norm_topk_prob": False}
    | {"num_experts": 8, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 56}
    | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21},
    "qwen3_moe": {"decoder_sparse_step": 1, "head_dim": 32, "mlp_only_layers": []}
    | {"moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 8}
    | {"num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "max_window_layers": 48}
    | {"use_sliding_window": False, "sliding_window": None, "rope_scaling": None}
    | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False, "num_experts": 8}
    | {"num_experts_per_tok": 4, "output_router_logits": False, "rope_scaling": None},
    "afmoe": {"global_attn_every_n_layers": 4, "head_dim": 16, "load_balance_coeff": 5e-4}
    | {"moe_intermediate_size": 48, "mup_enabled": True, "n_group": 1, "num_dense_layers": 0}
    | {"num_expert_groups": 1, "num_experts": 8, "num_experts_per_tok": 4, "route_norm": True}
    | {"num_limited_groups": 1, "num_shared_experts": 1, "route_scale": 2.5, "topk_group": 1}
    | {"score_func": "sigmoid", "sliding_window": 2048, "use_grouped_mm": True},
    "exaone_moe": {"first_k_dense_replace": 0, "moe_intermediate_size": 48, "n_group": 1}
    | {"num_experts": 8, "num_experts_per_tok": 4, "num_shared_experts": 1, "topk_group": 1}
    | {"is_moe_layer": [True, True], "norm_topk_prob": True, "num_nextn_predict_layers": 1}
    | {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    | {"sliding_window": 128, "sliding_window_pattern": "LLLG"}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "solar_open": {**NOAUX, "head_dim": 16, "partial_rotary_factor": 1.0, "use_qk_norm": False},
    "dots1": {**NOAUX, "moe_layer_freq": 1, "scoring_func": "noaux_tc", "max_window_layers": 62},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 4, "moe_layer_start_index": 0}
    | {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True}
    | {"moe_intermediate_size": 48, "moe_layer_end_index": 1, "use_bias": False},
    "gpt_oss": {"experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 8}
    | {"head_dim": 16, "initial_context_length": 4096, "swiglu_limit": 7.0}
    | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
    "hunyuan_v1_moe": {"attention_head_dim": 16, "head_dim": 16, "norm_topk_prob": True}
    | {"moe_intermediate_size": [96, 96], "moe_topk": [4, 4], "num_shared_expert": [1, 1]}
    | {"moe_layer_num_skipped": 0, "norm_type": "hf_rms", "num_experts": 8, "use_cla": False}
    | {"num_media_embeds": 257, "use_mixed_mlp_moe": True, "vit_patch": 1},
    "mimo_v2_flash": {"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True}
    | {"attention_chunk_size": 128, "attention_value_scale": 0.707, "head_dim": 24, "n_group": 1}
    | {"hybrid_block_size": None, "hybrid_layer_pattern": [0, 1], "layernorm_epsilon": 1e-5}
    | {"moe_intermediate_size": 48, "moe_layer_freq": [1, 1], "n_routed_experts": 8}
    | {"mlp_layer_types": ["sparse", "sparse"]}
    | {"n_shared_experts": None, "norm_topk_prob": True, "num_experts_per_tok": 4, "topk_group": 1}
    | {"partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None}
    | {"scoring_func": "sigmoid", "sliding_window_size": 128, "swa_head_dim": 24}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_rope_theta": 10000}
    | {"swa_v_head_dim": 16, "topk_method": "noaux_tc", "v_head_dim": 16},
    "minimax_m2": {"attn_type_list": [1, 1], "head_dim": 16, "layernorm_mlp_beta": 1.0}
    | {"layernorm_full_attention_beta": 1.0, "mtp_transformer_layers": 1, "num_mtp_modules": 3}
    | {"num_experts_per_tok": 4, "num_local_experts": 8, "qk_norm_type": "per_layer"}
    | {"mlp_intermediate_size": 8192, "rotary_dim": 8, "scoring_func": "sigmoid"}
    | {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_mtp": True}
    | {"use_qk_norm": True, "use_routing_bias": True},
}
COMMON = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    **{"rope_theta": 10000.0, "torch_dtype": "bfloat16", "use_cache": True, "hidden_act": "silu"},
}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_config_as_its_makers_wrote_it_is_taken(family, tmp_path):
    written = {**COMMON, **WRITTEN[family], "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written))
    spec, _ = describe_model(read_config(tmp_path).to_dict())
    assert [layer.mlp.count for layer in spec.layers] == [8, 8]


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("olmoe", {"clip_qkv": -8.0}, "clip_qkv=-8.0"),
        ("afmoe", {"route_norm": False}, "route_norm=False"),
        ("cohere2_moe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling="),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn='tanh'"),
        ("dbrx", {"attn_config": {"kv_n_heads": 3, "rope_theta": 5e5}}, "for the makers' text"),
        ("dbrx", {"ffn_config": {"moe_num_experts": 2, "moe_top_k": 3}}, "cannot choose more"),
        ("granitemoe_swa", {"layer_rope_theta": [0, 1e4]}, "layer_rope_theta="),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias=True"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace=1"),
        ("mixtral", {"num_experts_per_tok": 6}, "cannot choose more experts"),
        ("glm4_moe", {"topk_group": 4}, "groups of one size"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "expected a list of layers"),
        ("llama4", {"moe_layers": "all"}, "expected a list of layers"),
        ("llama4", {"no_rope_layers": [1, 0]}, "expected a 0 or 1 for each of 3"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size=None"),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ("hunyuan_v1_moe", {"moe_topk": [1, 0]}, "moe_topk="),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2]}, "num_shared_expert="),
        ("gpt_oss", {"experts_per_token": 5}, "experts_per_token=5"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise=-0.1"),
        ("phimoe", {"num_local_experts": 1}, "cannot choose more experts"),
        ("phimoe", {"rope_parameters": {**LONGROPE, "long_mscale": 1.3}}, "long_mscale=1.3"),
        ("phimoe", {"rope_parameters": {**LONGROPE, "long_mscale": None}}, "long_mscale=None"),
        ("phimoe", {"rope_parameters": LINEAR}, "rope_type='linear'"),
    ],
)
def test_what_a_mixture_does_not_honour_is_refused(case, fields, message):
    config = CASES[case].make_config().to_dict()
    with pytest.raises(dualinfer.ModelError, match=message):
        describe_model({**config, **fields})


@pytest.mark.parametrize(
    ("backend", "devices", "parts"),
    [
        *(("torch", 1, 1), ("jax", 1, 1)),
        *(pytest.param("jax", n, parts, marks=pytest.mark.slow) for n, parts in ((3, 1), (4, 2))),
    ],
)
def test_experts_of_gpt_oss_are_read_in_four_bits(backend, devices, parts, tmp_path):
    """MXFP4's blocks and scales, as transformers makes values of them."""
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16)
    random, tensors = torch.Generator().manual_seed(5), dict(model.state_dict())
    for i, layer in enumerate(model.model.layers):
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            shape, whole = (5, rows, columns // 32), f"model.layers.{i}.mlp.experts.{name}"
            how = {"dtype": torch.uint8, "generator": random}
            blocks = torch.randint(0, 256, (*shape, 16), **how)
            scales = torch.randint(121, 126, shape, **how)
            del tensors[whole]
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(values)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router"]}
    fields = model.config.to_dict() | {"quantization_config": quantization}
    fields["architectures"] = ["GptOssForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ids = random_ids(2, 9, vocab=VOCAB)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    how = {"backend": backend, "tensor_parallel": {"tp_size": devices}, **FUSED}
    with dualinfer.init_inference(str(tmp_path), moe={"ep_size": parts}, **how) as engine:
        assert any("fp4" in kind for kind in engine.report().weights)
        assert relative_rms(engine(ids).logits, expected) < 1e-5


def test_bytes_of_active_experts_by_hand():
    """OLMoE: 16 layers of 64 experts of 3 x 1024 x 2048, of which a token chooses 8."""
    pytest.importorskip("typer")
    from dualinfer.bench.counts import Counts
    from dualinfer.bench.random_weights import plan_weights
    from dualinfer.bench.shapes import open_model

    counts = Counts.of(plan_weights(open_model("olmoe-1b-7b"), "bfloat16", None), "bfloat16")
    expert, vocab = 3 * 1024 * 2048, 50304 * 2048
    layer = 4 * 2048 * 2048 + 64 * 2048 + 4 * 2048  # attention, router and four norms
    rest = 16 * layer + vocab + 2048
    assert counts.weight_bytes == 2 * (rest + 16 * 64 * expert)
    assert counts.read_bytes(1) == 2 * (rest + 16 * 8 * expert)
    distinct = 64 * (1 - (1 - 8 / 64) ** 32)  # of 32 sequences
    assert abs(counts.read_bytes(32) - 2 * (rest + 16 * distinct * expert)) <= 1
    assert counts.body == 16 * (4 * 2048 * 2048 + 64 * 2048 + 8 * expert)


def test_plan_says_what_a_step_reads_of_a_mixture(tmp_path):
    testing = pytest.importorskip("typer.testing")
    from dualinfer.cli.main import app

    make_model("qwen3_moe").config.save_pretrained(tmp_path)
    result = testing.CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["plan", str(tmp_path), "--tp", "1"]
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "layers.0-1.experts.up.weight [5, 38, 60]" in text
    assert re.search(
        r"active: a step reads [\d.]+ \w+ of [\d.]+ \w+ for one token, .* tokens", text
    )


def test_mixtures_of_an_encoder_are_counted():
    """Switch Transformers: the encoder's layers have the numbers behind the decoder's."""
    from dualinfer.backends.held import read_share

    config = hf.SwitchTransformersConfig(
        **{"num_experts": 4, "num_layers": 2, "num_decoder_layers": 2, "vocab_size": 99},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    )
    name = ["SwitchTransformersForConditionalGeneration"]
    spec, table = describe_model(config.to_dict(), name)
    rows = [row for row in table.rows if row.local_name == "experts.up.weight"]
    assert {read_share(spec, row, 1) for row in rows} == {1 / 4}
    assert max(row.layer for row in rows if row.layer is not None) == 3
