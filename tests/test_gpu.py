"""What must hold on a GPU; run there with `pytest -m gpu`."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from .cases import CASES, OUT  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BACKENDS = ["torch", "jax"]


def relative_rms(value, reference) -> float:
    difference = np.asarray(value, np.float64) - np.asarray(reference, np.float64)
    return float(np.sqrt((difference**2).mean() / (np.asarray(reference, np.float64) ** 2).mean()))


_SIZES = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
_BERT = _SIZES | {"intermediate_size": 3072, "max_position_embeddings": OUT, "layer_norm_eps": OUT}
_GEMMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256}
_GEMMA |= {"intermediate_size": 1500, "sliding_window": 40, "query_pre_attn_scalar": 100}
_GEMMA |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
# The case that a model is, and its fields where they are wider.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", _SIZES | {"ffn_dim": 2000, "word_embed_proj_dim": OUT}),
    "opt-post": (
        "opt-post",
        _SIZES | {"ffn_dim": 3072, "word_embed_proj_dim": 512, "activation_function": OUT},
    ),
    "gptj": ("gptj", {"n_embd": 1024, "n_layer": 4, "n_head": 4, "rotary_dim": 64}),
    "gpt-neo": (
        "gpt-neo",
        {"hidden_size": 768, "num_layers": 4, "num_heads": 12, "window_size": 40}
        | {"attention_types": [[["global", "local"], 2]]},
    ),
    "neox": ("neox", _SIZES | {"hidden_size": 960, "intermediate_size": 2000}),
    "bloom": ("bloom", {"hidden_size": 768, "n_layer": 4, "n_head": 12}),
    "gemma2": ("gemma2", _SIZES | _GEMMA),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama-gqa",
        _SIZES
        | {"hidden_size": 960, "intermediate_size": 2000, "num_key_value_heads": 4, "head_dim": 80},
    ),
    "deepseek": (
        "deepseek_v2, dense",
        {"hidden_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8}
        | {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
        | {"intermediate_size": 1500, "rope_parameters": OUT, "max_position_embeddings": 1024},
    ),
    "gpt2": ("gpt2", {"n_embd": 768, "n_layer": 4, "n_head": 12}),
    "t5": (
        "t5",
        {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 3, "num_heads": 8}
        | {"num_decoder_layers": 3, "decoder_start_token_id": 0}
        | {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    ),
    "bert": ("bert-masked", _BERT),
    "bert-classifier": ("bert-sequence", _BERT | {"num_labels": 5}),
}
_LIMITS = ("max_position_embeddings", "n_positions")  # names of the field that limits positions


def make_model(family: str, positions: int = 1024):
    """A random model, wide enough that TF32 or a bfloat16 sum would show.

    Its weights are as HF draws them, and its ids of a beginning, an end and padding HF's.
    """
    name, fields = (DECODERS | OTHERS)[family]
    case = CASES[name]
    limits = {limit: positions for limit in _LIMITS if limit in case.fields}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), OUT)
    config = case.make_config(**limits | ids | {"vocab_size": 4001} | fields)
    if family == "gemma2":  # transformers 5.17 picks SDPA, which drops the soft cap
        config._attn_implementation = "eager"
    torch.manual_seed(0)
    return case.model(config).eval()


@pytest.fixture(scope="module", params=["llama", "gpt2", "bert"])
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="module")
def batch():
    """Left-padded ids and mask on the CPU."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 4000, (3, 150), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    return ids, mask


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_float32_even_where_tf32_is_on(model, batch, backend):
    import dualinfer

    ids, mask = batch
    with torch.no_grad():
        hf_logits = model(ids, attention_mask=mask).logits[mask.bool()]
        # In float64, where no setting of the process can change what is multiplied.
        expected = copy.deepcopy(model).double()(ids, attention_mask=mask).logits[mask.bool()]
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        options = dict(backend=backend, dtype="fp32", replace_with_kernel_inject=True)
        with dualinfer.init_inference(model, **options) as engine:
            logits = engine(ids, attention_mask=mask).logits
            if engine.runner.spec.can_generate:
                mine = engine.generate(
                    ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=0
                )
                hf = model.generate(
                    ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=0
                )
                assert torch.equal(mine.cpu(), hf)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert logits.is_cuda
    error = relative_rms(logits.cpu()[mask.bool()], expected)
    settings = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    assert error < 1e-5, (error, relative_rms(hf_logits, expected), settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_near_to_float32_as_hf(model, batch, dtype):
    import dualinfer

    ids, mask = batch
    torch_dtype = getattr(torch, dtype)
    low = type(model)(model.config).eval().to("cuda", torch_dtype)
    low.load_state_dict({k: v.to(torch_dtype) for k, v in model.state_dict().items()})
    exact = type(model)(model.config).eval()
    exact.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    keep = mask.bool()
    with torch.no_grad():
        expected = exact(ids, attention_mask=mask).logits[keep]
        hf = low(ids.cuda(), attention_mask=mask.cuda()).logits.float().cpu()[keep]
    bound = 1.1 * relative_rms(hf, expected)
    for backend in BACKENDS:
        options = dict(backend=backend, dtype=dtype, replace_with_kernel_inject=True)
        with dualinfer.init_inference(low, **options) as engine:
            logits = engine(ids.cuda(), attention_mask=mask.cuda()).logits
            assert logits.is_cuda and logits.dtype == torch_dtype
        error = relative_rms(logits.float().cpu()[keep], expected)
        print(f"{type(model).__name__} {dtype} {backend}: {error:.5f}, bound {bound:.5f}")
        assert error < bound, (backend, error, bound)


def test_a_seed_gives_the_same_text_on_both_backends_and_in_any_batch():
    import dualinfer

    folder = dualinfer.embedded_model()
    prompts = [[5, 6, 7, 8], [100, 200, 300, 400, 500, 600, 700], [42]]
    options = dict(max_new_tokens=60, do_sample=True, temperature=0.8, top_p=0.95, seed=7)
    texts = []
    for backend in BACKENDS:
        with dualinfer.init_inference(folder, backend=backend, dtype="fp32") as engine:
            whole = np.asarray(engine.generate(prompts, **options).tolist())
            alone = [np.asarray(engine.generate([p], **options).tolist())[0] for p in prompts]
        for row, one, prompt in zip(whole, alone, prompts, strict=True):
            width = whole.shape[1] - 7 + len(prompt)
            assert row[-width:].tolist()[: len(one)] == one.tolist()
        texts.append(whole)
    assert np.array_equal(*texts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek"])
def test_room_for_many_gives_each_the_text_that_it_has_alone(family, dtype, backend):
    """Two of Gemma 2's layers see a window, of which blocks keep no more.

    Short pieces of DeepSeek's prompts meet latent vectors themselves.
    """
    import dualinfer

    draw, slots, room = np.random.default_rng(2), 24, 448
    prompts = [draw.integers(3, 4000, n).tolist() for n in draw.integers(5, 380, slots)]
    # Random weights say one token again and again where the likeliest is taken. In 16 bits who is
    # beside whom rounds otherwise, from some token on.
    count, least = (60, 0.95) if dtype == "fp32" else (12, 0.5)
    how = dict(max_new_tokens=60, do_sample=True, temperature=1.5, seed=7, eos_token_id=None)
    options = dict(backend=backend, dtype=dtype, replace_with_kernel_inject=True)
    with dualinfer.init_inference(make_model(family), **options) as engine:

        def text(prompt):
            made = np.asarray(engine.generate([prompt], **how).tolist())
            return made[0, len(prompt) :][:count].tolist()

        alone = [text(prompt) for prompt in prompts]
        assert len({token for own in alone for token in own}) > 100
        # A slot's own room, and blocks for half of them: some wait, and go on.
        for more in ({}, {"cache_tokens": slots * room // 2}):
            engine.reserve(slots, room, prepare=False, **more)
            with ThreadPoolExecutor(slots) as threads:
                texts = list(threads.map(text, prompts))
            same = np.mean([a == b for a, b in zip(alone, texts, strict=True)])
            assert same >= least, (more, same)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_graphs_give_what_the_same_launches_give_uncaptured(family):
    import dualinfer
    from dualinfer.ops.caches import Room

    model = make_model(family)
    settings = dict(dtype="bf16", replace_with_kernel_inject=True)
    plain = dualinfer.init_inference(model, enable_cuda_graph=False, **settings)
    graphs = dualinfer.init_inference(model, **settings)
    calls = [
        dict(input_ids=[[5, 6, 7]], max_new_tokens=70),
        dict(input_ids=[[5, 6, 7], [9] * 40, [11]], max_new_tokens=50),
        dict(input_ids=[[5, 6, 7]], max_new_tokens=70, do_sample=True, top_p=0.9, seed=3),
        dict(input_ids=[[5, 6]], max_new_tokens=90, repetition_penalty=1.3, min_new_tokens=5),
        dict(input_ids=[[8, 6, 7]], max_new_tokens=70, do_sample=True, seed=4),
    ]
    for engine in (plain, graphs):
        engine.texts = [engine.generate(pad_token_id=0, **call).tolist() for call in calls]
    assert plain.texts == graphs.texts
    # State of the last call, down to the bit.
    views = (engine.runner._slots.cache.view(Room(1, 64)) for engine in (graphs, plain))
    for mine, other in zip(*views, strict=True):
        assert torch.equal(mine.k, other.k) and torch.equal(mine.v, other.v)
    assert plain.report().compilations == 0
    before = graphs.report().compilations
    assert before > 0
    for _ in range(2):  # warm: the same buckets capture nothing new
        for call in (calls[0], calls[4]):
            graphs.generate(pad_token_id=0, **call)
    after = graphs.report().compilations
    graphs.generate(pad_token_id=0, **calls[0])
    assert graphs.report().compilations == after
    stream = graphs.stream([[5, 6, 7]], max_new_tokens=20)
    first = [next(stream) for _ in range(4)]
    graphs.generate([[1, 2, 3]] * 5, max_new_tokens=300, pad_token_id=0)  # grows under the stream
    assert first + list(stream) == plain.generate([[5, 6, 7]], max_new_tokens=20)[0, 3:].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_streamed_layers_answer_as_those_on_the_card(backend, quant):
    import dualinfer

    settings = dict(backend=backend, dtype="bf16", replace_with_kernel_inject=True, quant=quant)
    on_host = dict(keep_module_on_host=True, resident_layers=0)
    ids = np.random.default_rng(0).integers(0, 4001, (3, 70))
    answers = []
    for more in ({}, on_host):
        with dualinfer.init_inference(make_model("llama"), **settings, **more) as engine:
            for _ in range(2):  # the second time buffers are used again
                logits = np.asarray(engine(ids).logits, np.float32)
                answers.append([logits, engine.generate(ids, max_new_tokens=20)])
            assert bool(engine.report().streamed_bytes) == bool(more)
            if more and backend == "torch":
                assert all(block.is_pinned() for block in engine.runner.params.blocks.values())
    for other in answers[1:]:
        np.testing.assert_array_equal(answers[0][1], other[1])
        np.testing.assert_array_equal(answers[0][0], other[0])


@pytest.mark.filterwarnings("ignore:__array_wrap__")  # transformers 5.17 repeats a tensor by NumPy
@pytest.mark.parametrize("backend", BACKENDS)
def test_speech_is_that_of_transformers(backend):
    """Timestamps, by steps whose tokens the host chooses, and times by the weights of heads."""
    import dualinfer

    from .speech import features_of, make_sound, make_whisper

    model = make_whisper(0, ends=2, stamps=-1)
    sounds = features_of(make_sound(5, 1), make_sound(3.6, 2), long=True)
    how = {"max_new_tokens": 20, "return_timestamps": True, "return_token_timestamps": True}
    wanted = model.generate(**sounds, **how)
    options = {"dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(copy.deepcopy(model), backend=backend, **options) as engine:
        found = engine.generate(**sounds, **how)
        assert found["sequences"].tolist() == wanted["sequences"].tolist()
        times = np.asarray(found["token_timestamps"].cpu())
        np.testing.assert_allclose(times, wanted["token_timestamps"].numpy(), atol=1e-4)
        plain = engine.generate(**sounds | {"input_features": sounds["input_features"][..., :200]})
        assert len(plain) == 2


def test_close_frees_the_card():
    import dualinfer

    model = make_model("llama")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = dualinfer.init_inference(model, dtype="bf16", replace_with_kernel_inject=True)
    engine.generate([[1, 2, 3]], max_new_tokens=5)
    assert torch.cuda.memory_allocated() > before
    engine.close()
    assert torch.cuda.memory_allocated() == before
