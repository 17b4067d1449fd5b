"""Folders that engines write hold what transformers reads, under its names."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.checkpoint.sources import open_checkpoint  # noqa: E402

from .models import BACKENDS, relative_rms  # noqa: E402

pytestmark = pytest.mark.xdist_group("ranks")

LATENT = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1},
    **{"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 1},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [12, 12]}


def write_fp8(folder):
    """Turn a folder's projections into codes with a scale for each block of [12, 12]."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".self_attn." in n and tensors[n].ndim == 2]:
        if name.endswith("weights_proj.weight"):  # plain in DeepSeek's files
            continue
        matrix = tensors[name]
        rows, columns = (-(-n // 12) for n in matrix.shape)
        scale = torch.rand(rows, columns) / 448 + 1e-3
        wide = scale.repeat_interleave(12, 0).repeat_interleave(12, 1)
        codes = (matrix / wide[: matrix.shape[0], : matrix.shape[1]]).clamp(-448, 448)
        tensors[name] = codes.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    plain = ["mlp", "weights_proj", "embed_tokens"]
    fields["quantization_config"] = FP8 | {"modules_to_not_convert": plain}
    (folder / "config.json").write_text(json.dumps(fields))


# What is said of each: HF's class, the fields of its config, and whether a live model is saved.
SAVED = {
    "DBRX's experts, which lie in one tensor": (
        *("DbrxModel", "DbrxConfig", False),
        {"vocab_size": 61, "d_model": 48, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "LongCat's experts without weights": (
        *("LongcatFlashModel", "LongcatFlashConfig", True),
        {"vocab_size": 61, "hidden_size": 48, "num_layers": 1, "num_attention_heads": 3}
        | {"num_key_value_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 16, "v_head_dim": 12}
        | {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "head_dim": 8, "ffn_hidden_size": 40}
        | {"expert_ffn_hidden_size": 20, "moe_topk": 2, "n_routed_experts": 4}
        | {"zero_expert_num": 2},
    ),
    "what chooses DeepSeek-V3.2's tokens": (
        *("DeepseekV32Model", "DeepseekV32Config", False),
        LATENT,
    ),
    "BART's two embeddings that differ": (
        *("BartModel", "BartConfig", False),
        {"vocab_size": 61, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40}
        | {"decoder_ffn_dim": 40, "max_position_embeddings": 64, "tie_word_embeddings": False},
    ),
}


@pytest.mark.parametrize("case", SAVED)
def test_transformers_reads_all_of_it(case, tmp_path):
    class_name, config_name, is_live, fields = SAVED[case]
    torch.manual_seed(3)
    model = getattr(hf, class_name)(getattr(hf, config_name)(**fields)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    ids = np.random.default_rng(0).integers(3, 60, (2, 7))
    given = {"input_ids": torch.tensor(ids)}
    expected = model(**given)[0].detach()
    model.save_pretrained(tmp_path / "hf")
    how = {"dtype": "float32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(model if is_live else tmp_path / "hf", **how) as engine:
        engine.save_pretrained(tmp_path / "ours")
    read, told = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    lacking = {name for name in told["missing_keys"] if name != "shared.weight"}  # read by nobody
    assert not lacking and not told["unexpected_keys"]
    assert relative_rms(read.eval()(**given)[0].detach(), expected) < 1e-5
    with dualinfer.init_inference(tmp_path / "ours", **how) as engine:
        assert relative_rms(engine(ids)[0], expected) < 1e-5


def save_in_two(folder, out, backend):
    fields = {"save_mp_checkpoint_path": str(out), "backend": backend, "dtype": "float32"}
    fields["tensor_parallel"] = {"tp_size": 2, "timeout": 150}
    with dualinfer.init_inference(folder, replace_with_kernel_inject=True, **fields):
        pass


def contents(folder):
    """The dtype of each tensor, and its values in float32."""
    source = open_checkpoint(folder)
    return {n: (source.dtype(n), np.asarray(source.read(n), "f4")) for n in source.names()}


@pytest.mark.parametrize(
    "in_fp8",
    [pytest.param(False, id="plain"), pytest.param(True, id="fp8", marks=pytest.mark.slow)],
)
def test_files_of_two_devices_hold_what_the_engine_does_not_read(in_fp8, tmp_path, crew):
    """V3.2's indexer: of a checkpoint in fp8 its codes and scales, too, as they are stored.

    As those of kv_b_proj are, of which the engine takes the values.
    """
    torch.manual_seed(3)
    model = hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**LATENT)).eval()
    model.save_pretrained(tmp_path / "hf")
    if in_fp8:
        write_fp8(tmp_path / "hf")
    held = contents(tmp_path / "hf")
    assert sum(".indexer." in name for name in held) == (14 if in_fp8 else 10)
    for backend in BACKENDS:
        where = tmp_path / "hf", tmp_path / backend, backend
        crew.run(save_in_two, *where, world=2) if backend == "torch" else save_in_two(*where)
        found = contents(tmp_path / backend)
        assert found.keys() == held.keys()
        for name, (dtype, values) in held.items():
            assert found[name][0] == dtype, name
            np.testing.assert_array_equal(found[name][1], values)
    if in_fp8:
        return
    with dualinfer.init_inference(tmp_path / "jax", dtype="float32") as engine:
        engine.save_pretrained(tmp_path / "again")
    read, told = type(model).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    given = {"input_ids": torch.arange(3, 17).view(2, 7)}
    assert relative_rms(read.eval()(**given)[0].detach(), model(**given)[0].detach()) < 1e-5


@pytest.mark.parametrize("by", ["save_pretrained", "save_mp_checkpoint_path"])
def test_rows_of_experts_from_files_of_two_devices_are_one_tensor_again(by, tmp_path):
    """DBRX's, which files of several devices hold expert by expert."""
    fields = SAVED["DBRX's experts, which lie in one tensor"][-1]
    torch.manual_seed(3)
    model = hf.DbrxForCausalLM(hf.DbrxConfig(**fields)).eval()
    model.save_pretrained(tmp_path / "hf")
    save_in_two(tmp_path / "hf", tmp_path / "two", "jax")
    given = {"save_mp_checkpoint_path": str(tmp_path / "one")} if "mp" in by else {}
    with dualinfer.init_inference(tmp_path / "two", dtype="float32", **given) as engine:
        if not given:
            engine.save_pretrained(tmp_path / "one")
    held, found = (contents(tmp_path / folder) for folder in ("hf", "one"))
    assert found.keys() == held.keys()
    for name, (dtype, values) in held.items():
        assert found[name][0] == dtype
        np.testing.assert_array_equal(found[name][1], values)


@pytest.mark.slow
def test_files_of_two_devices_hold_experts_without_a_use(tmp_path):
    """Those of a live LongCat, which has one tensor of all experts."""
    _, _, _, fields = SAVED["LongCat's experts without weights"]
    torch.manual_seed(3)
    model = hf.LongcatFlashModel(hf.LongcatFlashConfig(**fields)).eval()
    save_in_two(model, tmp_path / "two", "jax")
    with dualinfer.init_inference(tmp_path / "two", dtype="float32") as engine:
        engine.save_pretrained(tmp_path / "one")
    read, told = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DiffLlama", "Ultrabert"])
def test_heads_for_questions_whose_base_has_another_name(family, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 40}
    if family == "Qwen3Moe":
        sizes |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    if family == "Ultrabert":
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(hf, f"{family}Config")(**sizes)
    model = getattr(hf, f"{family}ForQuestionAnswering")(config).eval()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(3, 60, (2, 7))
    expected = model(torch.tensor(ids)).start_logits.detach()
    with dualinfer.init_inference(tmp_path, dtype="float32") as engine:
        assert relative_rms(engine(ids).start_logits, expected) < 1e-5
