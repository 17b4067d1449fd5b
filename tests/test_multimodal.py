"""Models that see or hear, their text alone: each against HF's own class given input_ids."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers as hf

import dualinfer
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.model.families import describe_model
from dualinfer.model.families.fields import INERT, ConfigFields
from dualinfer.model.families.multimodal import TEXTS, WRAPPERS
from dualinfer.model.generation import GENERATION

from .cases import make_model, relatives
from .cases.covering import each
from .cases.sights import CASES, EXPERTS, IMAGES, MROPE, ROWS, SIZES, TEXT, WINDOWS, XDROPE
from .models import PAD, random_ids, randomize, relative_rms
from .test_gptq_awq import FORMS, random_parts

pytestmark = pytest.mark.usefixtures("greedy")

FUSED = {"replace_with_kernel_inject": True, "dtype": "fp32"}
_SOFT = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0}
_GEMMA = {**WINDOWS, "query_pre_attn_scalar": 13}
_MOE = {**TEXT, **EXPERTS}
_MIXTRAL = {**TEXT, "num_local_experts": 6, "num_experts_per_tok": 3}
# Decoders that others may be around, but for those of CASES.
WITHIN = {
    **{name: relatives.ROWS[name][1] for name in ("cohere", "exaone4", "gemma", "glm4", "granite")},
    **{
        name: relatives.ROWS[name][1]
        for name in ("ministral3", "mistral4", "olmo2", "olmo3", "phi3")
    },
    **{name: relatives.ROWS[name][1] for name in ("smollm3", "starcoder2", "deepseek_v3")},
    "deepseek_v2": relatives.ROWS["deepseek_v2, dense"][1],
    "gemma2": {**_GEMMA, **_SOFT},
    "gemma3_text": _GEMMA,
    **dict.fromkeys(("gpt_oss", "mixtral"), _MIXTRAL),
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 60},
    "qwen3_moe": {**_MOE, "norm_topk_prob": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", WITHIN)
@pytest.mark.parametrize("name", ["Llava", "Idefics3"])
def test_a_decoder_within_another_model_gives_what_it_gives_there(family, name):
    """Its own factor or cap of logits is left out, as in HF."""
    given = {**SIZES, **WITHIN[family], "model_type": family}
    config = getattr(hf, f"{name}Config")(text_config=given, vision_config=IMAGES)
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForConditionalGeneration")(config).eval()
    randomize(model)
    ids = random_ids(2, 11)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits
    with dualinfer.init_inference(model, backend="torch", **FUSED) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


@pytest.mark.parametrize(("case", "backend"), each(CASES))
def test_text_alone_is_what_hf_makes_of_ids_alone(case, backend, tmp_path):
    """Padded on the left, through the cache; by HF's file, of older names, and the live model."""
    model, ids = make_model(case), random_ids(2, 11)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    new = {"max_new_tokens": 7, "do_sample": False}
    kinds = {x: own.fields["text_config"].get("model_type", x) for x, own in CASES.items()}
    first = next(name for name, kind in kinds.items() if kind == kinds[case])
    speaks = backend == "torch" or case == first  # on JAX one of those with the same decoder
    with torch.no_grad():
        expected = model(**given).logits.numpy()
        if speaks:
            text = hf.GenerationMixin.generate(model, **given, **new).numpy()
    if backend == "torch":
        model.save_pretrained(tmp_path)
    real = mask == 1
    for source in (model, tmp_path) if backend == "torch" else (model,):
        with dualinfer.init_inference(source, backend=backend, **FUSED) as engine:
            found = np.asarray(engine(ids, attention_mask=mask).logits)
            assert relative_rms(found[real], expected[real]) < 1e-5
            if not speaks:
                continue
            found = engine.generate(ids, attention_mask=mask, pad_token_id=PAD, **new)
            np.testing.assert_array_equal(np.asarray(found), text)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == "llava" else [pytest.mark.slow]) for c in CASES]
)
def test_the_base_model_is_served_and_may_be_of_a_file_of_the_whole(case, tmp_path):
    """Of positions that start anew, too, which separate sequences or do not, as in HF."""
    whole, base, ids = make_model(case), make_model(case, headless=True), random_ids(2, 9)
    positions = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)}
    decoder = WRAPPERS[case.partition(" ")[0]].decoder
    getattr(base, decoder).load_state_dict(getattr(whole.model, decoder).state_dict())
    with torch.no_grad():
        expected = base(input_ids=torch.from_numpy(ids)).last_hidden_state
        anew = base(input_ids=torch.from_numpy(ids), **positions, use_cache=False)[0]
    base.save_pretrained(tmp_path / "base")
    whole.config.architectures = [type(base).__name__]
    whole.save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text("utf-8"))
    config["architectures"] = [type(base).__name__]
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    for source in (base, tmp_path / "base", tmp_path / "whole"):
        with dualinfer.init_inference(source, backend="torch", **FUSED) as engine:
            assert relative_rms(np.asarray(engine(ids).last_hidden_state), expected) < 1e-5
            if source is base and "qwen3_5" not in case:  # HF lets its states go on
                found = engine(torch.from_numpy(ids), **positions, use_cache=False)
                assert relative_rms(found.last_hidden_state, anew) < 1e-5


def write_as(folder, model, rename, turn=()):
    """The model's folder with tensors by other names, and some with columns before rows."""
    model.save_pretrained(folder)
    tensors = {rename(name): t.contiguous() for name, t in model.state_dict().items()}
    if model._tied_weights_keys and model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    tensors = {
        name: t.transpose(1, 2).contiguous() if name.endswith(turn) and turn else t
        for name, t in tensors.items()
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def as_today(name):
    return name


def flat(name):
    name = name.replace("model.language_model.", "model.").replace("model.visual", "visual")
    return name.replace("model.audio_tower", "audio_tower")


def nested(name):
    name = name.replace("model.language_model.", "language_model.model.")
    name = name.replace("lm_head.", "language_model.lm_head.")
    return name.removeprefix("model.")


@pytest.mark.parametrize(
    ("case", "rename", "turned"),
    [
        ("llava", as_today, ()),
        ("llava", nested, ()),
        ("qwen2_vl", as_today, ()),
        ("qwen2_vl", flat, ()),
        ("qwen3_vl_moe", as_today, ("experts.gate_up_proj", "experts.down_proj")),
    ],
)
def test_files_of_older_and_newer_versions_give_the_same(case, rename, turned, tmp_path):
    """transformers' own names of today, before 4.52, and Qwen3-VL's experts as on the hub."""
    model, ids = make_model(case), random_ids(1, 7)
    write_as(tmp_path, model, rename, turned)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits
    with dualinfer.init_inference(tmp_path, backend="torch", **FUSED) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_what_thinks_is_served_of_a_folder_of_what_speaks_too(case, tmp_path):
    """Names and config as the makers' folders have them, with a part of what speaks."""
    model, ids = make_model(case), random_ids(1, 7)
    write_as(tmp_path, model, lambda name: f"thinker.{flat(name)}")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors |= {name: torch.zeros(3) for name in ("talker.model.norm.weight", "code2wav.x")}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    thinker = json.loads((tmp_path / "config.json").read_text("utf-8"))
    whole = {"model_type": case.removesuffix("_thinker"), "thinker_config": thinker}
    whole |= {
        "architectures": ["Qwen2_5OmniModel"],
        "talker_config": {},
        "enable_audio_output": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits
    with dualinfer.init_inference(tmp_path, backend="torch", **FUSED) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "qwen2_vl_text" else [pytest.mark.slow]) for f in TEXTS],
)
def test_a_decoder_of_its_own_type_is_served_alone(family, tmp_path):
    """HF's TextModel, of ids, and of positions that start anew."""
    case = family.removesuffix("_text")
    case += "_thinker" if "omni" in case else ""
    config = hf.CONFIG_MAPPING[family](**ROWS[case][1])
    torch.manual_seed(0)
    model = getattr(hf, TEXTS[family].classes[0])(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    ids, positions = random_ids(1, 9), np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    given = {"input_ids": torch.from_numpy(ids), "use_cache": False}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        anew = model(**given, position_ids=torch.from_numpy(positions)).last_hidden_state
    with dualinfer.init_inference(tmp_path, backend="torch", **FUSED) as engine:
        found = engine(ids, use_cache=False).last_hidden_state
        assert relative_rms(np.asarray(found), expected) < 1e-5
        found = engine(ids, position_ids=positions, use_cache=False).last_hidden_state
        assert relative_rms(np.asarray(found), anew) < 1e-5


def test_what_is_seen_or_heard_is_refused_by_name():
    ids, zeros = random_ids(1, 5), np.zeros((1, 5), np.int64)
    pixels = np.zeros((1, 3, 28, 28), np.float32)
    with dualinfer.init_inference(make_model("qwen2_vl"), backend="torch", **FUSED) as engine:
        plain = np.asarray(engine(ids).logits)
        np.testing.assert_array_equal(
            np.asarray(engine(ids, mm_token_type_ids=zeros).logits), plain
        )
        engine.generate(ids, mm_token_type_ids=zeros, max_new_tokens=1)
        for name, value in {
            "pixel_values": pixels,
            "input_features": pixels[0],
            "image_grid_thw": np.array([[1, 2, 2]]),
            "mm_token_type_ids": zeros + 1,
        }.items():
            with pytest.raises(dualinfer.ArgumentError, match=rf"{name}.*serves the text alone"):
                engine(ids, **{name: value})
        with pytest.raises(dualinfer.ArgumentError, match=r"pixel_values.*the text alone"):
            engine.generate(ids, pixel_values=pixels, max_new_tokens=1)
        processed = {"input_ids": ids, "mm_token_type_ids": zeros}  # as one argument
        engine.generate(processed, max_new_tokens=1)
        engine.embed(processed, pooling="mean")
        processed["image_grid_thw"] = np.array([[1, 2, 2]])
        with pytest.raises(dualinfer.ArgumentError, match=r"image_grid_thw.*the text alone"):
            engine.generate(processed, max_new_tokens=1)
        with pytest.raises(dualinfer.ArgumentError, match=r"embed.* Leave image_grid_thw out"):
            engine.embed(processed, pooling="mean")
        with pytest.raises(dualinfer.ArgumentError, match="position_ids has shape"):
            engine(ids, position_ids=np.zeros((3, 1, 5), np.int64))
    assert {name.partition(" ")[0] for name in CASES} == set(WRAPPERS)
    with dualinfer.init_inference(make_model("paligemma"), backend="torch", **FUSED) as engine:
        given = {"input_ids": ids, "token_type_ids": zeros}  # 0 is a prefix there
        for call in (engine, engine.generate, lambda **given: engine.embed(given)):
            with pytest.raises(dualinfer.ArgumentError, match=r"token_type_ids: in the paligemma"):
                call(**given)
    config = {"model_type": "llava", "text_config": {"model_type": "phi"}}
    with pytest.raises(dualinfer.ModelError, match="model_type='phi'; the llava family honours"):
        describe_model(hf.LlavaConfig(**config).to_dict())


def test_layers_of_a_text_without_end_are_refused_before_hf_counts_them(tmp_path):
    text = {"model_type": "qwen2_vl_text", "num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2_vl", "text_config": text})
    )
    with pytest.raises(dualinfer.ModelError, match="num_hidden_layers=1000000000"):
        read_config(tmp_path)


@pytest.mark.parametrize("case", ["qwen2_audio", pytest.param("llava", marks=pytest.mark.slow)])
def test_labels_that_the_mask_hides_count_where_they_do_in_hf(case):
    model, ids = make_model(case), random_ids(2, 8)
    mask = np.ones_like(ids)
    mask[1, -3:] = 0
    names = ("input_ids", "attention_mask", "labels")
    arrays = dict(zip(names, (ids, mask, ids), strict=True))
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(x) for name, x in arrays.items()}).loss
    with dualinfer.init_inference(model, backend="torch", **FUSED) as engine:
        for how in ({}, {"logits_to_keep": 8}):  # which are all
            assert float(engine(**arrays, **how).loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2_vl", "qwen3_vl_moe", "idefics3"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_quantized_on_load_split_and_saved_again(case, backend, tmp_path):
    """int8 of a folder, saved and opened again; on JAX over two devices, which give the same."""
    model, ids = make_model(case), random_ids(2, 9)
    turned = ("experts.gate_up_proj", "experts.down_proj") if "moe" in case else ()
    write_as(tmp_path / "own", model, as_today, turned)
    how = {**FUSED, "backend": backend}
    with dualinfer.init_inference(tmp_path / "own", quant="int8", **how) as engine:
        wanted = np.asarray(engine(ids).logits)
        assert "int8" in str(engine.report())
        engine.save_pretrained(tmp_path / "saved")
    with dualinfer.init_inference(tmp_path / "saved", **how) as engine:
        np.testing.assert_array_equal(np.asarray(engine(ids).logits), wanted)
    if backend == "jax":
        how["tensor_parallel"] = {"tp_size": 3 if case == "idefics3" else 1}
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(ids)).logits
        with dualinfer.init_inference(tmp_path / "own", **how) as engine:
            assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5


WIDE = {"hidden_size": 96, "intermediate_size": 104, "num_attention_heads": 4, "head_dim": 24}
WIDE |= {"num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("case", "form", "rename", "where", "backend"),
    [
        ("qwen2_5_vl", "awq", flat, None, "torch"),
        pytest.param("qwen2_5_vl", "gptq", as_today, None, "jax", marks=pytest.mark.slow),
        pytest.param("llava", "gptq", nested, "text_config", "torch", marks=pytest.mark.slow),
        pytest.param("llava", "awq", as_today, None, "jax", marks=pytest.mark.slow),
    ],
)
def test_folders_of_gptq_and_awq_hold_the_text_quantized(
    case, form, rename, where, backend, tmp_path
):
    """By names of today and of older versions; GPTQ's, of some layers of the tower as well."""
    changes = {"text_config": {**CASES[case].fields["text_config"], **WIDE}}
    if case == "qwen2_5_vl":
        changes["vision_config"] = {**CASES[case].fields["vision_config"], "out_hidden_size": 96}
        sections = {**MROPE["rope_parameters"], "mrope_section": [4, 4, 4]}
        changes["text_config"]["rope_parameters"] = sections
    model, random, ids = make_model(case, **changes), np.random.default_rng(0), random_ids(2, 9)
    tower = ("visual.blocks",) if form == "gptq" else ()
    tensors = {}
    for own, tensor in model.state_dict().items():
        of_text = "language_model.layers" in own and own.endswith("_proj.weight")
        whole = tensor.ndim == 2 and not any(n % 8 for n in tensor.shape)
        if of_text or (whole and any(part in own for part in tower) and "weight" in own):
            parts, means = random_parts(tensor.shape, form, random)
            with torch.no_grad():
                tensor.copy_(means)
            module = rename(own).removesuffix(".weight")
            tensors |= {f"{module}.{part}": x for part, x in parts.items()}
        elif not (own == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[rename(own)] = tensor.contiguous()
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    fields = {"quant_method": form, **FORMS[form], "modules_to_not_convert": ["visual", "lm_head"]}
    if form == "gptq":
        fields = {"quant_method": form, **FORMS[form], "lm_head": False}
    config["architectures"] = [type(model).__name__]
    (config[where] if where else config)["quantization_config"] = fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits
    with dualinfer.init_inference(tmp_path, backend=backend, **FUSED) as engine:
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5
        assert "int4" in str(engine.report().weights)


# Some that the makers' files hold and HF does not read, beside those that all have.
ROPE = {"rope_theta": 1e6, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SMALL |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 100, **ROPE}
FLAT = {**SMALL, "max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False}
FLAT |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_token_id": 98}
FLAT |= {"attention_dropout": 0.0, "tie_word_embeddings": True, "vision_config": {"depth": 1}}
LLAMA = {"model_type": "llama", "_name_or_path": "x", "torch_dtype": "float16", **SMALL}
IDEFICS = {"_flash_attn_2_enabled": True, "is_llama_config": True, "neftune_noise_alpha": 0.0}
IDEFICS |= {"perceiver_config": {"model_type": "vllama3", "resampler_depth": 6}, "head_dim": 16}
IDEFICS |= {"pixel_shuffle_factor": 4, "qk_layer_norms": False, "use_resampler": False}
IDEFICS |= {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}
WRITTEN = {
    "glm4v": {
        "text_config": {
            **{"model_type": "glm4v_text", **SMALL, "partial_rotary_factor": 0.5},
            **{"attention_bias": True, "head_dim": 16, "pad_token_id": 1, "rope_theta": 1e4},
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
    },
    "hunyuan_vl": {  # flat, as the makers' own
        **{name: own for name, own in SMALL.items() if name != "rope_theta"},
        **{"attention_head_dim": 16, "use_qk_norm": True, "use_cla": False, "norm_type": "rms"},
        **{"anyres_pooling_size": 2, "vit_patch": 1, "num_media_embeds": 257, "pad_id": 3},
        "rope_scaling": {
            **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "type": "xdrope", "xdrope_section": [2, 2, 2, 2]},
        },
        "rope_theta": 1e4,
    },
    "idefics3": {"text_config": {**LLAMA, **IDEFICS}, "scale_factor": 4, "vocab_size": 100},
    "internvl": {"text_config": {"model_type": "qwen2", **SMALL, "layer_types": None}},
    "llava": {"text_config": LLAMA, "ignore_index": -100, "vocab_size": 100},
    "llava_next": {
        **{"text_config": LLAMA, "ignore_index": -100, "use_image_newline_parameter": True},
        "vocab_size": 100,
    },
    "qwen2_5_vl": FLAT,
    "qwen2_5_vl of a later version": {
        **{name: own for name, own in FLAT.items() if name != "rope_scaling"},
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]},
        "text_config": {
            **{name: own for name, own in FLAT.items() if name != "vision_config"},
            **{"model_type": "qwen2_5_vl_text", "image_token_id": 97},
        },
    },
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2", **SMALL, "use_mrope": False},
        **{"ignore_index": -100, "vocab_size": 100, "hidden_size": 64},
    },
    "qwen2_vl": FLAT,
    "qwen3_vl": {
        "text_config": {
            **{"model_type": "qwen3_vl_text", **SMALL, "head_dim": 16, "attention_bias": False},
            "rope_scaling": {
                **{"mrope_interleaved": True, "mrope_section": [3, 3, 2]},
                "rope_type": "default",
            },
        },
    },
    "smolvlm": {
        "text_config": {**LLAMA, **IDEFICS},
        **{"scale_factor": 4, "use_reentrant_checkpointing": False, "pad_token_id": 2},
    },
    "voxtral": {
        "text_config": {**LLAMA, "head_dim": 16, "sliding_window": None, "mlp_bias": False},
        **{"hidden_size": 64, "vocab_size": 100, "audio_token_id": 24},
    },
}


@pytest.mark.parametrize("case", WRITTEN)
def test_configs_as_the_makers_wrote_them_are_read(case, tmp_path):
    written = {
        "model_type": case.partition(" ")[0],
        "transformers_version": "4.49.0",
        **WRITTEN[case],
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    spec, _ = describe_model(read_config(tmp_path).to_dict())
    assert spec.vocab == 100 and len(spec.layers) == 2


@pytest.mark.parametrize("family", WRAPPERS)
def test_a_wrapper_reads_every_field_of_its_config(family, monkeypatch):
    """Of the installed transformers: a field that comes with a new version is looked at by us."""
    unread, finish = {}, ConfigFields.finish

    def remember(fields):
        finish(fields)
        left = set(fields._values) - fields._read - INERT - GENERATION
        unread[fields.family] = left

    monkeypatch.setattr(ConfigFields, "finish", remember)
    if family == "cohere_compass":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        text = {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
        config = hf.CohereCompassConfig(text_config=text)
    elif family in ("deepseek_ocr2", "granite4_vision"):
        config = make_model(family).config
    elif family in ("glm4v_moe", "qwen3_omni_moe_thinker"):  # HF's default turns an odd number
        config = hf.CONFIG_MAPPING[family](text_config={"head_dim": 128})
    elif family == "hunyuan_vl":
        config = hf.HunYuanVLConfig(text_config={**TEXT, **XDROPE})
    else:
        config = hf.CONFIG_MAPPING[family]()
    spec, _ = describe_model(config.to_dict())
    assert spec.family == family and not any(unread.values())
