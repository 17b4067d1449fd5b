"""Decoders with recurrences, whose caches are states: against HF's classes, row by row.

HF multiplies padding by 0 before projections that may have biases, so that its own padded batches
differ from single rows: these are the oracle.
"""

import importlib
import json

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers as hf

import dualinfer
from dualinfer.backends.base import Request
from dualinfer.backends.torch.ops.plain import PlainOps
from dualinfer.blocks import delta_rule, lightning, selective_scan, state_space
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.errors import ConfigError
from dualinfer.model.families import describe_model
from dualinfer.ops.caches import KeptIn, Room, cache_bytes, cache_specs, state_bytes, token_bytes
from dualinfer.ops.contract import ALONE
from dualinfer.parallel.sharding import make_plan

from .cases import make_model
from .cases.covering import each
from .cases.recurrent import CASES, DEFAULT, MIXED, MULTIPLIED
from .models import BACKENDS, PAD, VOCAB, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

ROUTED = ("kimi_linear with experts",)  # whose router chooses others in bfloat16
QUICK = ("lfm2 with biases", "mamba2", "mamba")
ONE_GROUP = "mamba2 of one group"  # whose norm is over all heads
# One of each kind.
ODD = ("lfm2_moe", "mamba2", "falcon_h1, normed", "nemotron_h with experts")
ODD += ("kimi_linear with experts", "falcon_mamba", "jamba", "minimax with experts")
ODD += ("nemotron_h with latent experts",)
# Of a family that has another case, whose spec alone differs: torch shows them.
VARIANTS = ("bailing_hybrid, unbounded", "jamba without experts", "olmo_hybrid without turns")
# Whose products have codes, and whose dtype is halved, on JAX, too: the text is one over Maths.
CODED = ("lfm2_moe", "mamba2", "kimi_linear with experts", "falcon_mamba")
# Which two devices share on JAX: the plan is torch's.
SPLIT = ("mamba2", "falcon_h1, normed", "kimi_linear with experts", "jamba")
LENGTHS = (11, 2, 17, 1)  # shorter than a kernel, too
NEW = 9
INJECTED = {"replace_with_kernel_inject": True}


def rows(lengths=LENGTHS):
    return [np.random.default_rng(n).integers(3, VOCAB, n) for n in lengths]


def padded(texts, left):
    """Ids and mask [B, T] of texts padded on one side."""
    width = max(map(len, texts))
    ids, mask = np.full((len(texts), width), PAD), np.zeros((len(texts), width), np.int64)
    for i, text in enumerate(texts):
        at = slice(width - len(text), width) if left else slice(0, len(text))
        ids[i, at], mask[i, at] = text, 1
    return ids, mask


def alone(model, texts, new=NEW):
    """HF's logits of each text by itself, and its greedy text."""
    with torch.no_grad():
        given = [torch.from_numpy(text[None]) for text in texts]
        logits = [model(ids).logits[0].numpy() for ids in given]
        how = {"max_new_tokens": new, "do_sample": False}
        return logits, [model.generate(ids, **how)[0, ids.shape[1] :].numpy() for ids in given]


def check_text(found, width, expected):
    for own, text in zip(np.asarray(found), expected, strict=True):
        np.testing.assert_array_equal(own[width : width + len(text)], text)


# JAX cuts and rounds as torch does, by the same plan and spec: it shows one case of each kind.
BY_KIND = [
    (case, b)
    for case in CASES
    for b in BACKENDS
    if case not in VARIANTS and (b == "torch" or case in ODD)
]


@pytest.mark.parametrize(("case", "backend"), each(CASES))
def test_a_padded_batch_is_its_rows_alone(case, backend, monkeypatch):
    """Logits, and greedy text through the state; padding on either side enters neither."""
    for block, tokens in (
        (state_space, 7),
        (selective_scan, 6),
        (lightning, 5),
    ):  # so that prompts have several
        monkeypatch.setattr(block, "_CHUNK", tokens)
    monkeypatch.setattr(selective_scan, "_SIDE", 2)
    monkeypatch.setattr(delta_rule, "CHUNK", 8)
    monkeypatch.setattr(delta_rule, "_ROWS", 3)
    model, texts = make_model(case), rows()
    logits, expected = alone(model, texts)
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", backend=backend) as engine:
        for left in (False, True):
            ids, mask = padded(texts, left)
            found = np.asarray(engine(ids, attention_mask=mask).logits)
            for own, real, whole in zip(found, mask > 0, logits, strict=True):
                assert relative_rms(own[real], whole) < 1e-5
            text = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
            check_text(text, ids.shape[1], expected)
        assert "state" in engine.report().cache


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_other_sequences_pass_a_state_over(backend):
    """A slot whose tokens the host chooses, beside one that decodes by itself, in turns."""
    model, texts = make_model(QUICK[0]), rows((11, 5))
    _, expected = alone(model, texts)
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", backend=backend) as engine:
        runner = engine.runner
        requests = [Request(text.astype(np.int32), NEW) for text in texts]
        scores = np.asarray(runner.prefill_scores([requests[:1]], [[0]])[0])
        chosen = [int(scores[0].argmax())]
        by_itself = [runner.prefill(requests[1:], [1]).fetch()[:, 0]]
        while len(chosen) < NEW:
            by_itself.append(runner.decode(2).fetch()[:, 1])
            scores = np.asarray(runner.decode_scores([[0]], [chosen[-1:]])[0])
            chosen.append(int(scores[0].argmax()))
        by_itself = np.concatenate(by_itself)
        np.testing.assert_array_equal(chosen, expected[0])
        np.testing.assert_array_equal(by_itself[by_itself >= 0][:NEW], expected[1])


@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", QUICK)
def test_sequences_in_one_row_do_not_meet(case, backend):
    """By positions that start anew, as texts are packed for embeddings, too."""
    model, texts = make_model(case), rows((5, 1, 9))
    logits, _ = alone(model, texts)
    places = np.concatenate([np.arange(len(text)) for text in texts])[None]
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", backend=backend) as engine:
        how = {"position_ids": places, "use_cache": False}
        found = engine(np.concatenate(texts)[None], **how).logits
    assert relative_rms(np.asarray(found)[0], np.concatenate(logits)) < 1e-5


def shared(case, backend, devices):
    """Logits and text of a model that so many devices share."""
    model, (ids, mask) = make_model(case), padded(rows((11, 4)), left=True)
    how = {**INJECTED, "dtype": "fp32", "backend": backend}
    with dualinfer.init_inference(model, **how, tensor_parallel={"tp_size": devices}) as engine:
        logits = np.asarray(engine(ids, attention_mask=mask).logits)
        text = engine.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        return logits[mask > 0], np.asarray(text)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("case", "backend"), [(c, b) for c, b in BY_KIND if b == "torch" or c in SPLIT]
)
def test_several_devices_give_what_one_gives(case, backend, crew):
    """Devices share the channels of convolutions, and the heads of states."""
    if backend == "torch":
        found = crew.run(shared, case, backend, 2, world=2)
    else:
        found = [shared(case, backend, 2)]
    logits, text = shared(case, backend, 1)
    for ours, own in found:
        assert relative_rms(ours, logits) < 1e-5
        np.testing.assert_array_equal(own, text)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_the_model(case, tmp_path):
    """HF's folder is read, and what is saved HF reads; sizes of caches are those of the report."""
    model, texts = make_model(case), rows()
    ids, mask = padded(texts, left=True)
    model.save_pretrained(tmp_path / "theirs")
    with dualinfer.init_inference(str(tmp_path / "theirs"), dtype="fp32") as engine:
        logits = np.asarray(engine(ids, attention_mask=mask).logits)
        engine.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours")
    for own, real, text in zip(logits, mask > 0, texts, strict=True):
        with torch.no_grad():
            expected = again(torch.from_numpy(text[None])).logits[0].numpy()
        assert relative_rms(own[real], expected) < 1e-5


def test_hidden_states_that_are_shown_are_not_added_to(monkeypatch):
    """Where ops write a sum into the residual, as cuBLAS does; some layers have an MLP alone."""
    model, text = make_model("nemotron_h"), torch.from_numpy(rows((11,))[0][None])
    with torch.no_grad():
        expected = model(text, output_hidden_states=True).hidden_states
    linear, written = PlainOps.linear, []

    def adding(self, x, weight, epilogue=ALONE):
        y = linear(self, x, weight, epilogue)
        if epilogue.residual is None or not epilogue.spend:
            return y
        written.append(y)
        return epilogue.residual.copy_(y)

    monkeypatch.setattr(PlainOps, "linear", adding)
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32") as engine:
        found = engine(text, output_hidden_states=True).hidden_states
        assert not written
        for own, theirs in zip(found, expected, strict=True):
            assert relative_rms(own, theirs) < 1e-5
        engine(text)
    assert len(written) == model.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"),
    [(c, b) for c, b in BY_KIND if c not in ROUTED and (b == "torch" or c in CODED)],
)
def test_half_precision_is_as_exact_as_hf(case, backend):
    """Whole prompts, and steps through the state, beside HF's own error in bfloat16."""
    model, texts = make_model(case), rows((40, 33))
    logits, _ = alone(model, texts)
    half, begun = make_model(case).bfloat16(), 20
    theirs, ours, stepped = [], [], []
    with dualinfer.init_inference(half, **INJECTED, dtype="bf16", backend=backend) as engine:
        for text, whole in zip(texts, logits, strict=True):
            with torch.no_grad():
                found = half(torch.from_numpy(text[None])).logits[0].float()
            theirs.append(relative_rms(found, whole))
            found = np.asarray(engine(text[None]).logits[0], np.float32)
            ours.append(relative_rms(found, whole))
            request = Request(text[:begun].astype(np.int32), len(text))
            scores = engine.runner.prefill_scores([[request]], [[0]])
            for token in text[begun:]:
                scores.append(engine.runner.decode_scores([[0]], [[int(token)]])[0])
            engine.runner.release([0])
            found = np.concatenate([np.asarray(x, np.float32) for x in scores])
            stepped.append(relative_rms(found, whole[begun - 1 :]))
    assert np.mean(ours) < 1.1 * np.mean(theirs)
    assert np.mean(stepped) < 1.2 * np.mean(theirs)  # fewer tokens, by chance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, b) for case in ODD for b in BACKENDS if b == "torch" or case in CODED],
)
def test_products_of_recurrences_are_quantized(case, backend):
    """8-bit codes of every product; the state, convolutions and norms stay as they are."""
    model, texts = make_model(case), rows((11,))
    logits, _ = alone(model, texts)
    how = {**INJECTED, "dtype": "fp32", "backend": backend}
    codes = {} if case.startswith("kimi") else {"kv_cache_dtype": "int8"}  # latent ones have none
    with dualinfer.init_inference(model, **how, quant="int8", **codes) as engine:
        found = np.asarray(engine(texts[0][None]).logits[0])
        most = 0.5 if "moe" in case or "experts" in case else 0.1  # routers may choose others
        assert 1e-4 < relative_rms(found, logits[0]) < most
        text = engine.generate(texts[0][None], max_new_tokens=3, do_sample=False)
        assert np.asarray(text).shape[1] == len(texts[0]) + 3


def test_codes_beside_plain_tensors_give_what_they_mean(tmp_path):
    """Of projections that lie by key heads, one of two that are one weight here is quantized."""
    model, text = make_model("qwen3_next with experts"), rows((11,))[0][None]
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", quant="int8") as engine:
        engine.save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.linear_attn.in_proj_ba"
    stored = safetensors.torch.load_file(file)
    codes, scales = (stored[f"{name}.weight_{part}"] for part in ("packed", "scale"))
    meant = codes.view(torch.uint8).int() - 128
    kept = {key: own for key, own in stored.items() if not key.startswith(name)}
    kept[f"{name}.weight"] = (meant * scales).contiguous()
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    with dualinfer.init_inference(str(tmp_path), dtype="fp32") as engine:
        expected = np.asarray(engine(text).logits)
    safetensors.torch.save_file(kept, file, {"format": "pt"})
    config["quantization_config"].setdefault("ignore", []).append(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with dualinfer.init_inference(str(tmp_path), dtype="fp32") as engine:
        assert relative_rms(np.asarray(engine(text).logits), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend) for case in (QUICK[0], ONE_GROUP, "mamba") for backend in BACKENDS]
    + [("qwen3_next with experts", "jax"), ("kimi_linear with experts", "torch")],
)
def test_kernels_serve_recurrences(case, backend, monkeypatch):
    """And a long prompt is read in pieces, the last shorter than a kernel."""
    model, texts = make_model(case), rows((11, 9))
    logits, expected = alone(model, texts, new=3)
    own = importlib.import_module(f"dualinfer.backends.{backend}")
    if backend == "torch":
        ops = importlib.import_module("dualinfer.backends.torch.ops.kernels").KernelOps
        monkeypatch.setattr(own, "_make_ops", lambda config, spec, device, _: ops(device))
        prompts = importlib.import_module("dualinfer.backends.torch.prompts")
        monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 8)
    else:
        ops = importlib.import_module("tests.kernels.jax_ops").interpreted_ops
        monkeypatch.setattr(own, "_make_ops", lambda *args: ops())
        monkeypatch.setattr(own.whole, "most_tokens", lambda *_: 8)
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", backend=backend) as engine:
        served = engine.report().ops
        assert "Triton" in served["matmul"]
        assert "Triton" in served["recurrence"]
        ids, mask = padded(texts, left=True)
        found = np.asarray(engine(ids, attention_mask=mask).logits)
        for row, real, whole in zip(found, mask > 0, logits, strict=True):
            assert relative_rms(row[real], whole) < 1e-5
        text = engine.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        check_text(text, ids.shape[1], expected)
        if case == ONE_GROUP:  # the product behind makes the norm of a single row
            text = engine.generate(texts[0][None], max_new_tokens=3, do_sample=False)
            check_text(text, len(texts[0]), expected[:1])


_OF_ALL = {
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02},
    **{"hidden_size": 64, "num_hidden_layers": 2, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.55.0", "vocab_size": 100},
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
_MAMBA = {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16}
_MAMBA |= {"mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8}
_MAMBA |= {"mamba_proj_bias": False, "rms_norm_eps": 1e-5, "attention_dropout": 0.0}
_MAMBA |= {"hidden_act": "silu", "attention_bias": False, "intermediate_size": 96}
_STEPS = {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 0.001}
_STEPS |= {"time_step_rank": 256, "rescale_prenorm_residual": True}
# Fields of config.json as the makers wrote them, beside those that all have.
WRITTEN = {
    "bamba": {**_HEADS, **_MAMBA, "attn_layer_indices": [1], "attn_rotary_emb": 8}
    | {"mlp_bias": False, "num_logits_to_keep": 1, "rope_theta": 1e4, "rope_scaling": None},
    "falcon_h1": {**_HEADS, **_MAMBA, "attn_layer_indices": None, "mamba_use_mlp": True}
    | {"mlp_expansion_factor": 8, "mamba_d_ssm": 128, "mamba_norm_before_gate": False}
    | {"mamba_rms_norm": False, "projectors_bias": False, "rope_theta": 1e11, "head_dim": 16}
    | {"mlp_multipliers": [0.9, 0.1], "ssm_multipliers": [0.4, 0.3, 0.2, 0.5, 0.4]}
    | {"key_multiplier": 0.4, "lm_head_multiplier": 0.04, "embedding_multiplier": 5.6},
    "granitemoehybrid": {**_HEADS, **_MAMBA, **MULTIPLIED, "layer_types": ["mamba", "attention"]}
    | {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 96}
    | {"init_method": "mup", "normalization_function": "rmsnorm", "rope_theta": 1e4}
    | {"position_embedding_type": "nope", "output_router_logits": False},
    "lfm2": {**_HEADS, "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96}
    | {"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 16}
    | {"block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True}
    | {"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64}
    | {"conv_dim_out": 64, "conv_use_xavier_init": True, "full_attn_idxs": [1], "num_heads": 4}
    | {"norm_eps": 1e-5, "rope_theta": 1e6, "theta": 1e6, "tie_embedding": True}
    | {"use_pos_enc": True},
    "minimax": {**_HEADS, "attention_dropout": 0.0, "block_size": 256, "head_dim": 16}
    | {"full_attn_alpha_factor": 3.5, "full_attn_beta_factor": 1, "hidden_act": "silu"}
    | {"intermediate_size": 96, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_attn_alpha_factor": 3.5, "linear_attn_beta_factor": 1, "mlp_alpha_factor": 3.5}
    | {"mlp_beta_factor": 1, "num_experts_per_tok": 2, "num_local_experts": 4}
    | {"output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1e7}
    | {"rotary_dim": 16, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
    | {"sliding_window": None, "tie_word_embeddings": False},
    "mamba": {**_STEPS, "conv_kernel": 4, "d_inner": 128, "d_model": 64, "expand": 2, "n_layer": 2}
    | {"fused_add_norm": True, "hidden_act": "silu", "intermediate_size": 128, "ssm_cfg": {}}
    | {"layer_norm_epsilon": 1e-5, "pad_vocab_size_multiple": 8, "residual_in_fp32": True}
    | {"rms_norm": True, "state_size": 8, "time_step_init_scheme": "random"}
    | {"time_step_scale": 1.0, "use_bias": False, "use_conv_bias": True},
    "falcon_mamba": {**_STEPS, "conv_kernel": 4, "expand": 16, "hidden_act": "silu"}
    | {"intermediate_size": 128, "layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-6}
    | {"residual_in_fp32": True, "state_size": 16, "tie_word_embeddings": False}
    | {"time_step_init_scheme": "random", "time_step_scale": 1.0, "use_falcon_mambapy": False}
    | {"use_bias": False, "use_conv_bias": True},
    "jamba": {**_HEADS, "attention_dropout": 0.0, "attn_layer_offset": 1, "attn_layer_period": 2}
    | {"calc_logits_for_entire_prompt": False, "expert_layer_offset": 1, "hidden_act": "silu"}
    | {"expert_layer_period": 2, "intermediate_size": 96, "mamba_conv_bias": True}
    | {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_expand": 2}
    | {"mamba_inner_layernorms": True, "mamba_proj_bias": False, "n_ctx": 262144}
    | {"num_experts": 4, "num_experts_per_tok": 2, "num_logits_to_keep": 1}
    | {"output_router_logits": False, "rms_norm_eps": 1e-6, "router_aux_loss_coef": 0.001}
    | {"sliding_window": None, "tie_word_embeddings": False, "use_mamba_kernels": True},
    "mamba2": {**_STEPS, "chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 16}
    | {"hidden_act": "silu", "intermediate_size": 128, "layer_norm_epsilon": 1e-5, "n_groups": 2}
    | {"norm_before_gate": True, "num_heads": 8, "residual_in_fp32": True, "rms_norm": True}
    | {"state_size": 8, "tie_word_embeddings": False, "use_bias": False, "use_conv_bias": True},
    "nemotron_h": {**_HEADS, **_STEPS, "attention_head_dim": 16, "head_dim": 16, "chunk_size": 128}
    | {"conv_kernel": 4, "hybrid_override_pattern": "M-", "hidden_dropout": 0.0, "n_groups": 2}
    | {"intermediate_size": 96, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 16}
    | {"mamba_hidden_act": "silu", "mamba_num_heads": 8, "mamba_proj_bias": False}
    | {"mlp_hidden_act": "relu2", "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"ssm_state_size": 8, "residual_in_fp32": False, "use_mamba_kernels": True},
}


_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2}
_DELTA |= {"linear_num_value_heads": 4, "linear_value_head_dim": 16, "rms_norm_eps": 1e-6}
_DELTA |= {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
_QWEN = {**_HEADS, **_DELTA, "full_attention_interval": 2, "head_dim": 32, "mlp_only_layers": []}
_QWEN |= {"tie_word_embeddings": False}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_MOE |= {"router_aux_loss_coef": 0.001, "output_router_logits": False}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 32}
_MTP = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
_MTP |= {"mtp_use_dedicated_embeddings": False, "layer_types": MIXED[:2]}
_MTP |= {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}}
_MTP["rope_parameters"] |= {"mrope_interleaved": True}
_KIMI = {**_HEADS, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
_KIMI |= {"v_head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}
_KIMI |= {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4}
_KIMI |= {"num_shared_experts": 1, "routed_scaling_factor": 2.4, "num_nextn_predict_layers": 0}
_KIMI |= {"num_key_value_heads": 4}
_LAYERS = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1]}
WRITTEN |= {
    "qwen3_next": {**_QWEN, **_SHARED, "decoder_sparse_step": 1, "intermediate_size": 96}
    | {"norm_topk_prob": True, "partial_rotary_factor": 0.25, "rope_scaling": None}
    | {"rope_theta": 1e7, "use_sliding_window": False},
    "qwen3_5_text": {**_QWEN, **_MTP, "intermediate_size": 96},
    "qwen3_5_moe_text": {**_QWEN, **_MTP, **_SHARED},
    "kimi_linear": {**_KIMI, "linear_attn_config": {**_LAYERS, "full_attn_layers": [2]}}
    | {"head_dim": 18, "mla_use_nope": True, "model_max_length": 4096, "moe_layer_freq": 1}
    | {"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1}
    | {"num_experts_per_token": 2, "q_lora_rank": None, "topk_group": 1}
    | {"rope_theta": 1e4, "use_grouped_topk": True},
    "bailing_hybrid": {**_KIMI, "head_dim": 16, "layer_group_size": 2, "n_group": 2}
    | {"topk_group": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_theta": 6e6}
    | {"kda_safe_gate": True, "kda_lower_bound": -5.0, "short_conv_kernel_size": 4},
    "olmo_hybrid": {**_HEADS, **_DELTA, "intermediate_size": 96, "layer_types": MIXED[:2]}
    | {"linear_a_log_max": 16.0, "linear_allow_neg_eigval": True, "linear_dt_max": 0.1}
    | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_config_as_its_makers_wrote_it_is_taken(family, tmp_path):
    if family not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {family}")
    written = {**_OF_ALL, **WRITTEN[family], "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written))
    spec, table = describe_model(read_config(tmp_path).to_dict())
    assert len(spec.layers) == 2 and spec.family == family and len(table.rows) > 10
    assert spec.state_numbers and len(cache_specs(spec)) == len(spec.caches)


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "mamba"] * 2}, "layer_types=.*conv and full_attention"),
        ("lfm2", {"unheard_of": 3}, "unheard_of=3"),
        ("lfm2_moe", {"num_experts_per_tok": 9}, "cannot choose more"),
        ("mamba", {"d_inner": 7}, "d_inner=7.*192 only"),
        ("minimax with experts", {"rotary_dim": 7}, "rotary_dim=7.*14 only"),
        ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False"),
        ("mamba2", {"num_heads": 7}, "num_heads=7, no multiple of 2 groups"),
        ("mamba2", {"head_dim": 10}, "8 heads of 10 elements, which are not the 192"),
        ("mamba2", {"time_step_limit": [0.1]}, "time_step_limit=.*two numbers"),
        ("falcon_h1", {"mamba_proj_bias": True}, "ssm_in_multiplier=1.4"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "5 positive numbers"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "value_heads=5, no multiple of 2 key heads"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ("kimi_linear with experts", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("bailing_hybrid with experts", {"kda_lower_bound": 5.0}, "kda_lower_bound=5.0"),
        ("nemotron_h with experts", {"moe_latent_size": 0}, "moe_latent_size=0.*positive int"),
        ("nemotron_h with experts", {"n_group": 4}, "groups of one size"),
    ],
)
def test_what_is_not_honoured_is_refused(case, fields, message):
    with pytest.raises(dualinfer.ModelError, match=message):
        describe_model({**CASES[case].make_config().to_dict(), **fields})


def test_a_state_is_counted_once_for_a_sequence():
    """Of 96 channels by 3 taps before the last, and of 8 heads of 24 by 10 elements in float32."""
    short, _ = describe_model(CASES["lfm2 with biases"].make_config().to_dict())
    assert state_bytes(cache_specs(short), 2) == 3 * 3 * 96 * 2
    assert token_bytes(cache_specs(short), 2) == 2 * 3 * 16 * 2
    spec, _ = describe_model(CASES["mamba2"].make_config().to_dict())
    each = 4 * (3 * (192 + 2 * 2 * 10) * 2 + 4 * 8 * 24 * 10)
    assert state_bytes(cache_specs(spec), 2) == each and token_bytes(cache_specs(spec), 2) == 0
    assert cache_bytes(cache_specs(spec), Room(5, 999), 2) == 5 * each


def test_channels_have_a_state_of_their_own():
    """Of 2 * 96 channels by 2 taps before the last, and by 5 elements in float32, in 4 layers."""
    _, table = describe_model(CASES["mamba"].make_config().to_dict())
    assert state_bytes(cache_specs(table.spec), 2) == 4 * (192 * 2 * 2 + 4 * 192 * 5)
    shares = [own.share("scan", 0).real for own in make_plan(table, 3).shards]
    assert shares == [64, 64, 64]
    with pytest.raises(ConfigError, match=r"tp_size=193.*state channels of 192.*Use fewer"):
        make_plan(table, 193)


def test_devices_share_whole_groups_of_states():
    _, table = describe_model(CASES["mamba2"].make_config().to_dict())
    assert [own.share("states", 0).real for own in make_plan(table, 2).shards] == [4, 4]
    with pytest.raises(ConfigError, match=r"tp_size=3.*2 groups of heads.*at most 2"):
        make_plan(table, 3)
    _, table = describe_model(CASES["mamba2 of one group"].make_config().to_dict())
    assert [own.share("states", 0).real for own in make_plan(table, 3).shards] == [3, 3, 2]


@pytest.mark.slow
def test_a_long_prompt_goes_on_from_its_own_state(monkeypatch):
    """In pieces, by plain operations, as no layer attends; the slot has had another's state."""
    model, texts = make_model("mamba2"), rows((17, 12))
    _, expected = alone(model, texts)
    prompts = importlib.import_module("dualinfer.backends.torch.prompts")
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 8)
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", backend="torch") as engine:
        for text, whole in zip(texts, expected, strict=True):
            found = engine.generate(text[None], max_new_tokens=NEW, do_sample=False)
            check_text(found, len(text), [whole])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"),
    [("lfm2", "torch"), ("lfm2", "jax"), ("mamba2", "jax"), ("nemotron_h", "torch")],
)
def test_layers_in_host_memory_answer_as_others(case, backend):
    """And hidden states are HF's, which of Mamba-2 begin behind the first layer."""
    model, texts = make_model(case), rows((11,))
    with torch.no_grad():
        states = model(torch.from_numpy(texts[0][None]), output_hidden_states=True).hidden_states
    _, expected = alone(model, texts)
    how = {**INJECTED, "dtype": "fp32", "backend": backend, "resident_layers": 0}
    with dualinfer.init_inference(model, **how, keep_module_on_host=True) as engine:
        assert engine.report().streamed_bytes > 0
        found = engine(texts[0][None], output_hidden_states=True).hidden_states
        for own, whole in zip(found, states, strict=True):
            assert relative_rms(own, whole) < 1e-5
        text = engine.generate(texts[0][None], max_new_tokens=NEW, do_sample=False)
        check_text(text, len(texts[0]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["falcon_h1", "nemotron_h"])
def test_jax_streams_layers_with_one_cache_each(case):
    how = {**INJECTED, "dtype": "fp32", "backend": "jax", "resident_layers": 0}
    with pytest.raises(dualinfer.UnsupportedError, match="two caches each, or none"):
        dualinfer.init_inference(make_model(case), **how, keep_module_on_host=True)


def on_host(x):
    return np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_steps_on_a_gpu_are_those_of_hf(case, backend):
    """By kernels around the recurrence; on torch prompts and steps are replayed from graphs."""
    model, texts = make_model(case), rows()
    logits, expected = alone(model, texts)
    with dualinfer.init_inference(model, **INJECTED, dtype="fp32", backend=backend) as engine:
        ids, mask = padded(texts, left=True)
        found = on_host(engine(ids, attention_mask=mask).logits)
        for own, real, whole in zip(found, mask > 0, logits, strict=True):
            assert relative_rms(own[real], whole) < 1e-4
        how = {"max_new_tokens": NEW, "do_sample": False}
        for _ in range(3):  # the second time a prompt's pass is captured, the third it is replayed
            text = engine.generate(ids, attention_mask=mask, **how)
            check_text(on_host(text), ids.shape[1], expected)
        for text, whole in zip(texts, expected, strict=True):  # by the host's choice, from graphs
            found = engine.generate(text[None], **how, no_repeat_ngram_size=30)
            check_text(on_host(found), len(text), [whole])


@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, "torch") for case in ("mamba2", "qwen3_5", "mamba", "minimax with experts")]
    + [pytest.param(case, "jax", marks=pytest.mark.slow) for case in ("mamba2", "qwen3_5")],
)
def test_states_in_16_bits_are_rounded_once_in_each_step(case, backend):
    text, begun = rows((9,))[0], 6
    found = []
    for dtype in (None, "bfloat16"):
        own = backend if dtype else "torch"
        how = {**INJECTED, "dtype": "fp32", "backend": own, "state_dtype": dtype}
        with dualinfer.init_inference(make_model(case), **how) as engine:
            runner = engine.runner
            assert ("state in bfloat16" in engine.report().cache) == bool(dtype)
            request = Request(text[:begun].astype(np.int32), len(text))
            logits = [np.asarray(runner.prefill_scores([[request]], [[0]])[0], np.float32)]
            for token in text[begun:]:
                if dtype is None:  # float32 states, which are rounded here
                    for number in runner.spec.state_numbers.values():
                        state = runner._slots.cache.number(number).arrays[-1]
                        with torch.inference_mode():
                            state.copy_(state.bfloat16().float())
                scores = np.asarray(runner.decode_scores([[0]], [[int(token)]])[0], np.float32)
                logits.append(scores.copy())  # the next step's lie there, too
            found.append(np.concatenate(logits))
    plain, kept = found
    assert relative_rms(kept, plain) < 1e-5


def test_states_that_there_are_not_have_no_dtype(tmp_path):
    for case in ("lfm2 with biases", "llama-gqa"):
        model = make_model(case)
        with pytest.raises(ConfigError, match=r"state_dtype='bfloat16': no layer of .* keeps f"):
            dualinfer.init_inference(model, **INJECTED, state_dtype="bf16")
    with pytest.raises(ConfigError, match='as "float32" or "bfloat16"'):
        dualinfer.init_inference(model, state_dtype="fp8")
    with pytest.raises(ConfigError, match="in module mode states are the module's own"):
        dualinfer.init_inference(model, backend="torch", state_dtype="bfloat16")
    spec, _ = describe_model(CASES["mamba2"].make_config().to_dict())
    each = 4 * (3 * (192 + 2 * 2 * 10) * 2 + 2 * 8 * 24 * 10)
    assert state_bytes(cache_specs(spec, KeptIn(states="bfloat16")), 2) == each
