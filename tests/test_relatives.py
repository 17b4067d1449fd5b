"""Llama's relatives and those before it, each against HF's own class, on both backends."""

import importlib
import json

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.model.families import describe_model
from dualinfer.model.families.kinds import KINDS

from .cases import CASES as ALL
from .cases import early, latent, make_model
from .cases.covering import each
from .cases.relatives import (
    ALPHA,
    CASES,
    FEW,
    GEMMA4,
    LLAMA3,
    LONG,
    OF_ALL,
    PARTIAL,
    ROWS,
    SIZES,
    TURNS,
    WRITTEN,
)
from .models import BACKENDS, PAD, random_ids, randomize, relative_rms
from .test_pipelines import make_tokenizer

pytestmark = pytest.mark.usefixtures("greedy")

GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_config_as_its_makers_wrote_it_is_taken(family, tmp_path):
    written = {**OF_ALL, **WRITTEN[family], "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written))
    spec, table = describe_model(read_config(tmp_path).to_dict())
    assert len(spec.layers) == 2 and spec.family == family and len(table.rows) > 10


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("phi3", {"unheard_of": 3}, "unheard_of=3"),
        ("cohere2", PARTIAL, "rope_parameters partial_rotary_factor"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers="),
        ("stablelm", {"rope_parameters": PARTIAL["rope_parameters"], "head_dim": 14}, "rotates 7"),
        ("stablelm", {"num_heads": 5}, "num_heads=5"),
        ("nemotron", {"rope_percent": 0.25}, "rope_percent=0.25"),
        ("granitemoehybrid", {"layer_types": ["mambo"] * 2}, "layer_types="),
        (
            "gemma4",
            {
                "enable_moe_block": True,
                "num_experts": 2,
                "top_k_experts": 3,
                "moe_intermediate_size": 8,
            },
            "cannot choose more",
        ),
        ("gemma4", {"num_kv_shared_layers": 3}, "no layer is left to make keys"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": LLAMA3, "full_attention": 3}},
            r"rope_parameters\['full_attention'\]=3; expected an object",
        ),
        ("gemma4", {"per_layer_config": {"9": {"head_dim": 20}}}, "per_layer_config of layer '9'"),
    ],
)
def test_what_a_relative_does_not_honour_is_refused(family, fields, message):
    config = CASES[next(case for case in CASES if case.startswith(family))].make_config().to_dict()
    with pytest.raises(dualinfer.ModelError, match=message):
        describe_model({**config, **fields})


@pytest.mark.parametrize("case", ["hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl"])
def test_a_base_by_alpha_reaches_no_further_than_the_model_says(case):
    """HF takes the angles for static ones, whatever `factor` says."""
    config = ALL[case].make_config().to_dict()
    text = config.get("text_config", config)
    text["rope_parameters"] = {**ALPHA, "factor": 4.0}
    assert describe_model(config)[0].max_positions == text["max_position_embeddings"]


# Values of a field by the type of what it must be; () is for one that must be absent.
OTHERS = {
    bool: (True, False),
    int: (1, 2),
    float: (1.0, 0.5),
    str: ("another",),
    tuple: ({"rope_type": "linear"},),
}


@pytest.mark.parametrize("family", [family for family, kind in KINDS.items() if kind.always])
def test_fields_of_one_value_are_refused_with_any_other(family):
    config = CASES[family].make_config() if family in CASES else hf.CONFIG_MAPPING[family]()
    config = config.to_dict()
    if family == "deepseek_ocr2_text":  # whose own defaults make no model
        config |= {"mlp_layer_types": ["dense"] * 32, "num_experts_per_tok": 6}
    for name, value in KINDS[family].always.items():
        values = value if isinstance(value, tuple) else (value,)
        for allowed in values:
            describe_model(config | {name: allowed})
        for other in OTHERS[type(values[0]) if values else tuple]:
            if other not in values:
                with pytest.raises(dualinfer.UnservedError, match=f"{name}="):
                    describe_model(config | {name: other})


def shared(case, backend, devices):
    """Logits and text of a model that so many devices share."""
    model, ids = make_model(case), random_ids(2, 11)
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    with dualinfer.init_inference(model, **how, tensor_parallel={"tp_size": devices}) as engine:
        logits, text = np.asarray(engine(ids).logits), None
        if backend == "torch":  # on JAX it takes seconds to compile
            text = np.asarray(engine.generate(ids, max_new_tokens=3, do_sample=False))
        return logits, text


# Of 3 KV heads 4 devices hold one twice, which counts once in a norm over all of them.
DEVICES = dict.fromkeys(CASES, 2) | {"olmo2": 4, "falcon, grouped, one norm": 4, "youtu": 3}
# JAX cuts by the same plan as torch: it shows those whose splits or layers are of another kind.
CUT_ON_JAX = ("olmo2", "youtu", "falcon, grouped, one norm", "falcon with alibi", "bitnet", "doge")
CUT_ON_JAX += ("gemma3n", "gemma4", "jetmoe", "longcat_flash", "minicpm3", "nanochat")
CUT_ON_JAX += ("deepseek_v2, experts", "phi, normed", "apertus", "cohere, normed", "nemotron")
SHARED = [
    pytest.param(case, backend, marks=[] if case in ("olmo2", "youtu") else [pytest.mark.slow])
    for case in CASES
    for backend in ("torch", "jax")
    if backend == "torch" or case in CUT_ON_JAX
]


@pytest.mark.xdist_group("ranks")  # whose processes live through a run
@pytest.mark.parametrize(("case", "backend"), SHARED)
def test_several_devices_give_what_one_gives(case, backend, crew):
    """Splits of fused projections, of biases, of norms by head, and of a norm over all heads."""
    devices = DEVICES[case]
    if backend == "torch":
        found = crew.run(shared, case, backend, devices, world=devices)
    else:
        found = [shared(case, backend, devices)]
    logits, text = shared(case, "torch", 1)  # which gives what JAX gives, and compiles nothing
    for ours, own in found:
        assert relative_rms(ours, logits) < 1e-5
        if backend == "torch":
            np.testing.assert_array_equal(own, text)


# Of HF's classes that turn by length: a part of each head, pairs, one kind of layer alone, latents.
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
_SHORT = {"max_position_embeddings": 14, "rope_parameters": DYNAMIC}
BY_LENGTH = {
    "internlm3": ("Llama", _SHORT),
    "phi": ("Phi", {**_SHORT, **FEW, "rope_parameters": {**DYNAMIC, "partial_rotary_factor": 0.5}}),
    "cohere, dynamic": ("Cohere", {**_SHORT, "logit_scale": 0.3}),
    "minicpm3, long": (
        "MiniCPM3",
        {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "kv_lora_rank": 20}
        | {"q_lora_rank": 24, "v_head_dim": 10, "num_key_value_heads": 6}
        | {"rope_parameters": {**LONG, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4, 8]}},
    ),
    "nanochat, long": ("NanoChat", {"rope_parameters": LONG}),
    "gemma3": (
        "Gemma3Text",
        {**_SHORT, "head_dim": 22, "sliding_window": 5, "layer_types": TURNS}
        | {"rope_parameters": dict(zip(TURNS, (LLAMA3, DYNAMIC), strict=True))},
    ),
    "deepseek_v3, dynamic": (
        "DeepseekV3",
        {**_SHORT, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
        | {"kv_lora_rank": 20, "q_lora_rank": None, "num_key_value_heads": 6}
        | {"first_k_dense_replace": 2},
    ),
}
SMALL = {"hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 97}


# Each of these launches a kernel in a way that no other does; `tests.launched` tells which do.
BY_KERNELS = {
    "torch": (
        *("apertus", "arcee", "bitnet", "cohere, dynamic", "cohere, normed", "doge"),
        *(
            "deepseek_v2, experts",
            "falcon with alibi",
            "gemma3n",
            "jetmoe",
            "minicpm3",
            "ministral3",
            "nanochat",
            "nemotron",
            "olmo2",
        ),
        *("phi, normed", "phi3, long"),
    ),
    "jax": (
        *("apertus", "cohere, dynamic", "cohere, normed", "deepseek_v3, dynamic"),
        *("falcon with alibi", "gemma3n", "gemma4", "longcat_flash", "minicpm3", "ministral3"),
        *("nanochat", "nemotron", "phi, normed"),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend) for backend, cases in BY_KERNELS.items() for case in cases],
)
def test_kernels_give_what_plain_ops_give(case, backend, monkeypatch):
    """Norms behind, layers without rotary, factors of residuals and logits, relu2, ALiBi."""
    pytest.importorskip("triton")
    from dualinfer.kernels.triton import attention, linear

    own = importlib.import_module(f"dualinfer.backends.{backend}")

    name, fields = (ROWS | BY_LENGTH)[case]
    odd = {"head_dim": 12} if "head_dim" in fields and case not in latent.ROWS else {}
    if case in BY_LENGTH:
        odd["max_position_embeddings"] = 7
    if case == "phi3, long":
        odd = {"hidden_size": 56}  # two heads of as many elements that turn
    small = SMALL
    if case in early.ROWS | latent.ROWS or name.startswith("Deepseek"):
        small = {"vocab_size": SMALL["vocab_size"]}
    if case == "gemma4":  # of whose heads, as of real ones, some are too wide for the kernels
        monkeypatch.setattr(attention, "LARGEST_HEAD", 16)
        odd["vocab_size_per_layer_input"] = SMALL["vocab_size"]
    config = getattr(hf, f"{name}Config")(**{**SIZES, **fields, **small, **odd})
    torch.manual_seed(0)
    model = getattr(hf, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    randomize(model)
    how = {"dtype": "fp32", "replace_with_kernel_inject": True, "backend": backend}
    ids, new = random_ids(1, 9, vocab=97), 9 if case == "phi3, long" else 3
    # Torch's plain ops give what JAX's give, and compile nothing.
    with dualinfer.init_inference(model, use_triton=False, **how | {"backend": "torch"}) as plain:
        expected = np.asarray(plain(ids).logits)
        text = np.asarray(plain.generate(ids, max_new_tokens=new, do_sample=False))
        turns, long = plain.runner.spec.turns_by_length, random_ids(1, 16, vocab=97)
        behind = np.asarray(plain.generate(long, max_new_tokens=2, do_sample=False))
    if backend == "torch":
        prompts = importlib.import_module("dualinfer.backends.torch.prompts")
        monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 8 if turns else 32768)
        ops = importlib.import_module("dualinfer.backends.torch.ops.kernels").KernelOps
        monkeypatch.setattr(own, "_make_ops", lambda config, spec, device, _: ops(device))
    else:
        ops = importlib.import_module("tests.kernels.jax_ops").interpreted_ops
        monkeypatch.setattr(own, "_make_ops", lambda *args: ops())
        if turns:
            monkeypatch.setattr(own.whole, "most_tokens", lambda *_: 8)
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    with dualinfer.init_inference(model, **how) as fast:
        assert "Triton" in fast.report().ops["matmul"]
        assert relative_rms(np.asarray(fast(ids).logits), expected) < 3e-6
        found = fast.generate(ids, max_new_tokens=new, do_sample=False)
        np.testing.assert_array_equal(np.asarray(found), text)
        if turns and backend == "torch":  # each piece by the length of the whole prompt
            found = fast.generate(long, max_new_tokens=2, do_sample=False)
            np.testing.assert_array_equal(np.asarray(found), behind)


def test_a_relative_without_a_head_gives_its_last_hidden_state():
    model, ids = make_model("cohere", headless=True), random_ids(2, 7)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).last_hidden_state
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": "torch"}
    with dualinfer.init_inference(model, **how) as engine:
        assert relative_rms(np.asarray(engine(ids).last_hidden_state), expected) < 1e-5


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_longrope_turns_all_of_a_sequence_by_its_length(backend, drawing):
    """Below the original length, at it, beyond it from the start, and across it as text grows."""
    model = make_model("phi3, long")
    lengths, options = (5, 13, 14, 15, 20), {"max_new_tokens": 12, "do_sample": False}
    options |= {"repetition_penalty": 1.3, "min_new_tokens": 11, "pad_token_id": PAD}
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    with dualinfer.init_inference(model, **how) as engine:
        for ids in prompts:
            with torch.no_grad():
                expected = model(torch.from_numpy(ids)).logits
            assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5
        texts = engine.generate([ids[0].tolist() for ids in prompts], **options)
        alone = np.asarray(list(engine.stream(prompts[0], **options))).ravel()
        embeds = model.get_input_embeddings()(torch.from_numpy(prompts[0])).detach().numpy()
        for given in ({"inputs_embeds": embeds}, {"inputs": prompts[0], "output_scores": True}):
            given["return_dict_in_generate"] = True
            with pytest.raises(dualinfer.UnsupportedError, match=r"past 14 tokens.*at most 10 new"):
                engine.generate(**given, **options)
            few = engine.generate(**given, **options | {"max_new_tokens": 10, "min_new_tokens": 9})
            np.testing.assert_array_equal(np.asarray(few.sequences)[0, -10:], alone[:10])
    for n, ids, text in zip(lengths, prompts, np.asarray(texts), strict=True):
        whole = model.generate(torch.from_numpy(ids), **options)[0, n:].numpy()
        np.testing.assert_array_equal(text[20 : 20 + len(whole)], whole)
        if n == 5:
            np.testing.assert_array_equal(alone, whole)


_SLOWER = ("phi", "nanochat, long", "minicpm3, long", "cohere, dynamic", "deepseek_v3, dynamic")


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(
    "case",
    [
        "phi3, long",
        *(pytest.param(x, marks=[pytest.mark.slow] if x in _SLOWER else []) for x in BY_LENGTH),
    ],
)
def test_a_sequence_turns_by_its_own_length_whatever_is_beside_it(case, backend, drawing):
    """HF's rotary embedding takes the longest of a batch, and remembers that of earlier calls."""
    if case in BY_LENGTH:
        name, fields = BY_LENGTH[case]
        torch.manual_seed(0)
        config = getattr(hf, f"{name}Config")(**{**SIZES, **fields})
        model = getattr(hf, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
        randomize(model)
    else:
        model = make_model(case)
    lengths, wanted, options = (5, 13, 14, 15, 20), [], {"max_new_tokens": 12, "do_sample": False}
    options |= {"repetition_penalty": 1.3, "min_new_tokens": 11, "pad_token_id": PAD}
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    ids, mask, positions = (np.zeros((2, 5, 20), np.int64) for _ in range(3))
    for i, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        for side, here in enumerate((slice(20 - n, 20), slice(n))):
            ids[side, i, here], mask[side, i, here] = prompt[0], 1
            positions[side, i, here] = np.arange(n)
        with torch.no_grad():
            model(torch.ones((1, 3), dtype=torch.long))  # which forgets longer ones
            wanted.append(model(torch.from_numpy(prompt)).logits[0].numpy())
            model(torch.ones((1, 3), dtype=torch.long))
            wanted.append(model.generate(torch.from_numpy(prompt), **options)[0, n:].numpy())
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    with dualinfer.init_inference(model, **how) as engine:
        for side in range(2):
            given = {"attention_mask": mask[side], "position_ids": positions[side]}
            logits = np.asarray(engine(ids[side], **given).logits)
            for i, expected in enumerate(wanted[::2]):
                assert relative_rms(logits[i, mask[side, i] == 1], expected) < 1e-5
        if case in ("phi3, long", "internlm3"):  # positions are 0 to T-1 without the caller's too
            logits = np.asarray(engine(ids[1], attention_mask=mask[1]).logits)
            for i, expected in enumerate(wanted[::2]):
                assert relative_rms(logits[i, mask[1, i] == 1], expected) < 1e-5
        texts = np.asarray(engine.generate([ids[0].tolist() for ids in prompts], **options))
    for text, expected in zip(texts, wanted[1::2], strict=True):
        np.testing.assert_array_equal(text[20 : 20 + len(expected)], expected)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_text_of_a_gemma_3_that_sees_images(backend, tmp_path):
    """By a folder, whose tensors have older names, on torch; by the live model on JAX."""
    sizes = {**SIZES, "head_dim": 22, "num_hidden_layers": 2, "layer_types": TURNS}
    text = {**sizes, "sliding_window": 5, "query_pre_attn_scalar": 13}
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision = {"hidden_size": 16, "intermediate_size": 20, **few}
    torch.manual_seed(0)
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 11)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits
        whole = model.generate(torch.from_numpy(ids), max_new_tokens=5, do_sample=False)
    how = {"dtype": "fp32", "backend": backend, "replace_with_kernel_inject": True}
    with dualinfer.init_inference(tmp_path if backend == "torch" else model, **how) as engine:
        assert engine.report().mode == "fused"
        assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5
        found = engine.generate(ids, max_new_tokens=5, do_sample=False)
        np.testing.assert_array_equal(np.asarray(found), whole.numpy())
        with pytest.raises(dualinfer.ArgumentError, match=r"pixel_values.*reads input_ids"):
            engine(ids, pixel_values=np.zeros((1, 3, 28, 28), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("unified", [False, True])
def test_text_of_a_gemma_4_that_sees_and_hears(unified, tmp_path):
    """By a folder on both backends; what layers read of ids no embeddings give.

    A unified one has no such layers; its global ones have keys for values, and heads of their own.
    """
    text = {**SIZES, **GEMMA4}
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    vision = {**few, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16}
    audio = {**few, "output_proj_dims": 16, "subsampling_conv_channels": [4, 4]}
    if unified:
        text = {name: own for name, own in text.items() if "per_layer" not in name}
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "attention_bias": True}
        text["num_kv_shared_layers"] = 0
        config = hf.Gemma4UnifiedConfig(text_config=text)
        model = hf.Gemma4UnifiedForConditionalGeneration(config)
    else:
        vision["position_embedding_size"] = 16
        config = hf.Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
        model = hf.Gemma4ForConditionalGeneration(config)
    torch.manual_seed(0)
    randomize(model.eval())
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 11)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits
        whole = model.generate(torch.from_numpy(ids), max_new_tokens=5, do_sample=False)
    how = {"dtype": "fp32", "replace_with_kernel_inject": True}
    for backend in ("torch", "jax"):
        with dualinfer.init_inference(tmp_path, **how, backend=backend) as engine:
            assert relative_rms(np.asarray(engine(ids).logits), expected) < 1e-5
            found = engine.generate(ids, max_new_tokens=5, do_sample=False)
            np.testing.assert_array_equal(np.asarray(found), whole.numpy())
            if not unified:
                with pytest.raises(dualinfer.ArgumentError, match=r"inputs_embeds.*of every id"):
                    engine(inputs_embeds=np.zeros((1, 3, 84), np.float32))
    how |= {"keep_module_on_host": True, "resident_layers": 0, "backend": "jax"}
    if not unified:
        with pytest.raises(dualinfer.UnsupportedError, match="read what others made"):
            dualinfer.init_inference(tmp_path, **how)


def test_sequences_of_which_layers_choose_tokens_are_refused():
    """DeepSeek-V3.2 sees all of at most index_topk tokens, whatever length a caller asks for."""
    how = {"backend": "torch", "dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(make_model("deepseek_v32"), **how, max_out_tokens=99) as engine:
        engine.generate(random_ids(1, 20), max_new_tokens=5)
        with pytest.raises(dualinfer.LengthError, match="index_topk"):
            engine.generate(random_ids(1, 20), max_new_tokens=6)
        with pytest.raises(dualinfer.LengthError, match=r"index_topk=24.*choose"):
            engine(random_ids(1, 25))
        with pytest.raises(dualinfer.LengthError, match=r"Text 0 has 25 .*index_topk=24"):
            engine.embed(random_ids(1, 25), pooling="mean")
        # A text is cut where somebody has said how long it may be, and else is refused.
        texts, words = [" ".join("the" for _ in range(n)) for n in (3, 25)], make_tokenizer()
        words.model_max_length = 10**30
        for asked, match in ((None, "Text 1 has 25 .*index_topk=24"), (25, "max_length=25")):
            with pytest.raises(dualinfer.LengthError, match=match):
                engine.embed(texts, pooling="mean", max_length=asked, tokenizer=words)
        found = engine.embed(texts, pooling="mean", max_length=24, tokenizer=words)
        whole = engine.embed([[5] * 3, [5] * 24], pooling="mean")
        np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.slow
def test_text_of_a_gemma_3n_that_sees_and_hears(tmp_path, monkeypatch):
    """By a folder with parts of the towers, quantized and streamed as well, with ids of images.

    HF's towers need timm; without pixels and sounds it asks them nothing.
    """
    text, sees, hears = (
        make_model("gemma3n").config.to_dict(),
        *({"vocab_size": 8} for _ in range(2)),
    )
    text["final_logit_softcapping"] = 1000.0  # a small one makes large logits alike
    sees |= {"vocab_offset": 985, "hidden_size": 36, "rms_norm_eps": 1e-3}
    hears |= {"vocab_offset": 993, "hidden_size": 44, "rms_norm_eps": 1e-2}
    config = hf.Gemma3nConfig(text_config=text, vision_config=sees, audio_config=hears)
    module = importlib.import_module("transformers.models.gemma3n.modeling_gemma3n")
    from_config, towers = hf.AutoModel.from_config, (config.vision_config, config.audio_config)

    def make_part(own):
        return torch.nn.Linear(2, 2) if own in towers else from_config(own)

    monkeypatch.setattr(module.AutoModel, "from_config", make_part)
    torch.manual_seed(0)
    model = hf.Gemma3nForConditionalGeneration(config).eval()
    randomize(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[985:] *= 2  # so that they are spoken, too
    model.generation_config.update(eos_token_id=None, pad_token_id=PAD)
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 11)
    ids[0, 3:6] = 985, 992, 1000
    with torch.no_grad():
        given = torch.from_numpy(ids)
        expected, words = model(given).logits, model.generate(given, **GREEDY)
    assert (words[:, 11:] >= 993).any() and (words[:, 11:] < 985).any()
    for how in (
        {"backend": "torch"},
        {"backend": "jax"},
        {"backend": "torch", "keep_module_on_host": True, "resident_layers": 1},
        {"backend": "torch", "quant": "int8"},
    ):
        how |= {"dtype": "fp32", "replace_with_kernel_inject": True}
        with dualinfer.init_inference(tmp_path, **how) as engine:
            limit = 0.1 if "quant" in how else 1e-5
            assert relative_rms(np.asarray(engine(ids).logits), expected) < limit
            if "quant" not in how:
                np.testing.assert_array_equal(engine.generate(ids, **GREEDY), words)


@pytest.mark.parametrize(("case", "backend"), each(CASES))
def test_a_relative_gives_what_hf_gives(case, backend):
    """Logits and hidden states, padded on either side, past the window; text through the cache."""
    model, ids = make_model(case), random_ids(3, 11)
    mask = np.ones_like(ids)
    mask[1, :4] = mask[2, -3:] = 0
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    kept = {"output_hidden_states": True, "use_cache": False}
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **kept)
    with dualinfer.init_inference(model, **how) as engine:
        assert engine.report().mode == "fused"
        found = engine(ids, attention_mask=mask, output_hidden_states=True)
        real = mask.astype(bool)
        assert relative_rms(np.asarray(found.logits)[real], expected.logits.numpy()[real]) < 1e-5
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            where = (
                (slice(None), real) if theirs.ndim == 4 else real
            )  # Gemma 3n's streams come first
            assert ours.shape == theirs.shape
            assert relative_rms(np.asarray(ours)[where], theirs.numpy()[where]) < 1e-5
        ids, mask = ids[:2], mask[:2]
        text = engine.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD}
    if getattr(model.config, "sliding_window", None) == 1:
        options["use_cache"] = False  # HF's cache keeps all tokens of such a window
    rows = [(ids, mask, np.asarray(text))]
    if case == "phi3, long":  # of a batch HF begins all sequences anew with the longest
        rows = [tuple(x[i, None, n:] for x in rows[0]) for i, n in enumerate((0, 4))]
    for *given, found in rows:
        with torch.no_grad():
            args = [torch.from_numpy(x) for x in given]
            whole = model.generate(args[0], attention_mask=args[1], **options)
        np.testing.assert_array_equal(found, whole.numpy())


@pytest.mark.parametrize("case", ["falcon, grouped", "gpt_bigcode", "openai-gpt", "xglm"])
def test_positions_that_start_anew_separate_sequences_where_they_do_in_hf(case):
    """GPT-BigCode packs; Falcon, GPT and XGLM see all tokens before, whatever their positions."""
    model, ids = make_model(case), random_ids(1, 9)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": "torch"}
    given = {"position_ids": torch.from_numpy(positions), "use_cache": False}
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), **given).logits
    with dualinfer.init_inference(model, **how) as engine:
        found = engine(ids, position_ids=positions, use_cache=False).logits
        assert relative_rms(np.asarray(found), expected) < 1e-5
    with torch.no_grad():
        alone = model(torch.from_numpy(ids[:, 4:]), use_cache=False).logits
    assert (relative_rms(expected[:, 4:], alone) < 1e-5) == (case == "gpt_bigcode")


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_share_keys_and_values_share_a_cache(backend):
    """Gemma 4's last layers keep nothing of their own: two caches serve four layers."""
    model = make_model("gemma4")
    how = {"replace_with_kernel_inject": True, "dtype": "fp32", "backend": backend}
    with dualinfer.init_inference(model, **how) as engine:
        elements = 12 + 20  # of a head in a layer with a window and in one without
        needed = 64 * 2 * model.config.num_key_value_heads * elements * 4
        assert engine.runner.cache_bytes_for(1, 64) == needed
        if backend == "jax":  # whose GPUs run layers that read no others' values in two parts
            from dualinfer.backends.jax.steps import Steps

            cut = Steps(engine.runner.spec, engine.runner.steps.ops, on_gpu=True)
            assert cut.parts == [range(4)]
