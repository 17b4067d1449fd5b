"""The JAX decoder by Triton's kernels on a GPU, by family; run there with `pytest -m gpu`."""

import copy
import functools
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import dualinfer  # noqa: E402

from .kernels.jax_ops import watch_logits  # noqa: E402
from .models import randomize, relative_rms  # noqa: E402
from .test_gpu import make_model  # noqa: E402
from .test_gpu_kernels import (  # noqa: E402
    FAMILIES,
    GREEDY,
    answers_of_hf,
    padded_batch,
    random_ids,
    rounded,
    strong,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
families = pytest.mark.parametrize("family", FAMILIES)
ODD = ["llama", "gpt2", "gpt-neo", "bloom", "gemma2"]  # GQA, tied, windows, ALiBi, soft caps
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Every family in bfloat16, and two in float16, whose other values are the same.
HALF = [(family, "bf16") for family in FAMILIES] + [("llama", "fp16"), ("gpt2", "fp16")]


@pytest.fixture(scope="module", autouse=True)
def jax_sees_the_card():
    assert jax.devices()[0].platform == "gpu", "JAX runs on the CPU; install jax[cuda13]."


def engine_of(model: Any, dtype: str = "fp32", **options: Any) -> Any:
    options = {"backend": "jax", "replace_with_kernel_inject": True, **options}
    return dualinfer.init_inference(model, dtype=dtype, **options)


@functools.cache
def float32_engine(family: str, use_triton: bool | None = None) -> Any:
    """An engine of `strong(family)`, made once in a process: what it compiled serves all."""
    return engine_of(strong(family), use_triton=use_triton)


def text_of(engine: Any, ids: Any, **options: Any) -> list[list[int]]:
    return engine.generate(ids, **{**GREEDY, **options}).tolist()


def with_logits(
    engine: Any, ids: torch.Tensor, new: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The greedy text of ids [B, T], and the logits float32 [B, new, V] by which it was chosen.

    They come out of the very steps that generate runs.
    """
    by_position: dict[int, np.ndarray] = {}

    def note(position: Any, logits: Any) -> None:
        by_position[int(position[0])] = np.array(logits)[: len(ids)]

    with monkeypatch.context() as patch:
        watch_logits(patch, note)
        text = torch.tensor(text_of(engine, ids, max_new_tokens=new))
        jax.effects_barrier()
    places = range(ids.shape[1], ids.shape[1] + new)
    assert sorted(by_position) == list(places) and text.shape == (len(ids), places.stop)
    found = np.stack([by_position[i] for i in places], 1)
    assert found.dtype == np.float32
    return text, torch.tensor(found)


def executables(engine: Any, what: str) -> list[Any]:
    """Compiled steps of one kind."""
    found = [made for key, made in engine.runner._executables._made.items() if key[0] == what]
    assert found
    return found


def bits(engine: Any) -> list[bytes]:
    """Every layer's keys and values."""
    return [
        np.asarray(part).tobytes() for layer in engine.runner._slots.cache.layers for part in layer
    ]


# Against HF


@families
def test_float32_is_hf_in_float64_and_writes_its_text(family):
    model = strong(family)
    ids, mask = padded_batch()
    expected, masked, texts = answers_of_hf(model)
    engine = float32_engine(family)
    assert "Triton" in engine.report().ops["decode_attention"]
    assert relative_rms(engine(ids).logits.cpu(), expected) < 1e-5
    logits = engine(ids, attention_mask=mask).logits
    assert relative_rms(logits.cpu()[mask.bool()], masked) < 2e-5
    assert text_of(engine, ids, attention_mask=mask, max_new_tokens=40) == texts[0]
    assert text_of(engine, ids[:1], max_new_tokens=40) == texts[1]


@pytest.mark.parametrize(("family", "dtype"), HALF)
def test_half_precision_is_as_near_to_float32_as_hf(family, dtype):
    low, exact = rounded(strong(family), DTYPES[dtype])
    found, hf, expected = [], [], []
    with engine_of(low, dtype) as engine, torch.no_grad():
        for seed, tokens in enumerate((1, 5, 33, 64, 100, 129, 200)):
            ids = random_ids(1, tokens, seed)
            expected.append(exact(ids).logits[0])
            hf.append(low(ids.cuda()).logits[0].float().cpu())
            logits = engine(ids.cuda()).logits[0]
            assert logits.dtype == DTYPES[dtype]
            found.append(logits.float().cpu())
    wanted = torch.cat(expected)
    error, bound = (relative_rms(torch.cat(x), wanted) for x in (found, hf))
    assert error < 1.1 * bound, (family, error, bound)


@pytest.mark.parametrize(("family", "dtype"), HALF)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_decoded_logits_are_as_near_to_float32_as_hf(family, dtype, rows, monkeypatch):
    """By the kernels of a step, from a cache that they wrote themselves."""
    low, exact = rounded(strong(family), DTYPES[dtype])
    tokens, new = 75, 40
    with engine_of(low, dtype) as engine:
        text, found = with_logits(engine, random_ids(rows, tokens), new, monkeypatch)
    with torch.no_grad():
        expected = exact(text).logits[:, tokens - 1 : -1]
        hf = low(text.cuda()).logits[:, tokens - 1 : -1].float().cpu()
    error, bound = relative_rms(found, expected), relative_rms(hf, expected)
    assert error < 1.1 * bound, (family, error, bound)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_long_prompts_are_as_near_to_float32_as_hf(family, monkeypatch):
    """Where cuDNN attends to the prompt, and the step's keys are split over many programs."""
    low, exact = rounded(strong(family, positions=2048), torch.bfloat16)
    tokens, new = 1100, 20
    with engine_of(low, "bf16") as engine:
        text, found = with_logits(engine, random_ids(1, tokens), new, monkeypatch)
    with torch.no_grad():
        expected = exact(text).logits[:, tokens - 1 : -1]
        hf = low(text.cuda()).logits[:, tokens - 1 : -1].float().cpu()
    error, bound = relative_rms(found, expected), relative_rms(hf, expected)
    assert error < 1.1 * bound, (family, error, bound)


@pytest.fixture(scope="module")
def bert():
    """A masked BERT whose every weight shows."""
    model = make_model("bert")
    torch.manual_seed(1)
    randomize(model)
    return model


def bert_calls() -> list[dict[str, torch.Tensor]]:
    """A padded batch, one of exactly a bucket's size, and one where cuDNN could attend."""
    ids, mask = padded_batch()
    types = (torch.arange(ids.shape[1]) > 60).long().expand_as(ids).contiguous()
    calls = [{"input_ids": ids, "attention_mask": mask, "token_type_ids": types}]
    return calls + [{"input_ids": random_ids(rows, n, n)} for rows, n in ((2, 128), (1, 512))]


def test_bert_in_float32_is_hf_in_float64(bert):
    wide = copy.deepcopy(bert).double()
    with engine_of(bert) as engine:
        for call in bert_calls():
            keep = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
            with torch.no_grad():
                expected = wide(**call).logits[keep]
            assert relative_rms(engine(**call).logits.cpu()[keep], expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_bert_in_half_precision_is_as_near_to_float32_as_hf(bert, dtype):
    low, exact = rounded(bert, DTYPES[dtype])
    with engine_of(low, dtype) as engine, torch.no_grad():
        for call in bert_calls():
            keep = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
            there = {name: x.cuda() for name, x in call.items()}
            expected = exact(**call).logits[keep]
            hf = low(**there).logits.float().cpu()[keep]
            found = engine(**there).logits.float().cpu()[keep]
            error, bound = relative_rms(found, expected), relative_rms(hf, expected)
            assert error < 1.1 * bound, (tuple(keep.shape), error, bound)


# Against itself


@pytest.mark.parametrize("family", ODD)
def test_rows_of_a_ragged_batch_are_those_alone(family):
    prompts = [random_ids(1, n, n)[0].tolist() for n in (1, 63, 130, 7, 64)]
    engine = float32_engine(family)
    whole = text_of(engine, prompts, max_new_tokens=30)
    for row, prompt in zip(whole, prompts, strict=True):
        (alone,) = text_of(engine, [prompt], max_new_tokens=30)
        assert row[-len(alone) :] == alone


@pytest.mark.parametrize("family", ODD)
def test_two_runs_leave_the_same_bits(family):
    """Text, keys and values; in another engine as well, which captures anew."""
    model = strong(family)
    with engine_of(model, "bf16") as first, engine_of(model, "bf16") as second:
        for rows in (1, 2, 5):
            ids = random_ids(rows, 100)
            results = []
            for engine in (first, first, second):
                results.append((text_of(engine, ids, max_new_tokens=40), bits(engine)))
            assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"do_sample": True, "seed": 7, "temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"do_sample": True, "seed": 7, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_kernels_write_the_text_of_plain_xla(family, sampling):
    prompts = [random_ids(1, n, n)[0].tolist() for n in (3, 40, 90)]
    texts = []
    for choice in (None, False):
        engine = float32_engine(family, choice)
        assert ("Triton" in engine.report().ops["matmul"]) == (choice is None)
        texts.append(
            [text_of(engine, x, max_new_tokens=40, **sampling) for x in (prompts, prompts[:1])]
        )
    assert texts[0] == texts[1]


# What is compiled

_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(")
# Those that hand an array on; what is called is there as well, line by line.
_HANDING_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "call"}
_KERNELS = 'custom_call_target="dualinfer_triton_launches"'


def made_by(text: str, shape: str) -> list[str]:
    """Lines of HLO whose op makes an array of that shape, by its own computation or a copy."""
    ops = [(line, _OP.match(line)) for line in text.splitlines()]
    return [line for line, m in ops if m and shape in m[1] and m[2] not in _HANDING_ON]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_copies_no_cache(family, rows):
    with engine_of(strong(family, positions=4096), "bf16") as engine:
        text_of(engine, random_ids(rows, 2100), max_new_tokens=40)
        keys = engine.runner._slots.cache.layers[0].k
        assert keys.shape[::2] == (rows, 4096)
        shape = f"bf16[{','.join(map(str, keys.shape))}]"
        (step,) = executables(engine, "decode")
        assert engine.runner.steps.block > 1  # one loop for blocks of steps, one for the rest
        text = step.as_text()
        assert _KERNELS in text
        writing = made_by(text, shape)
        assert writing
        assert all(_KERNELS in line and "output_to_operand_aliasing" in line for line in writing)
        analysis = step.memory_analysis()
        assert analysis.alias_size_in_bytes >= engine.report().cache_bytes
        assert analysis.temp_size_in_bytes < keys.nbytes


def test_within_the_buckets_nothing_is_compiled_once_warm():
    with engine_of(strong("llama"), "bf16") as engine:

        def run(length: int, rows: int) -> None:
            ids = random_ids(rows, length)
            engine(ids)
            for way in ({"do_sample": False}, {"do_sample": True, "top_p": 0.9, "seed": 3}):
                engine.generate(ids, max_new_tokens=20, pad_token_id=0, **way)

        for length, rows in ((10, 1), (32, 1), (10, 3), (32, 3)):
            run(length, rows)
        before = engine.report().compilations
        assert before > 0
        for length in (1, 7, 16, 17, 25):
            for rows in (1, 3, 4):
                run(length, rows)
        assert engine.report().compilations == before


def test_what_was_compiled_ahead_serves():
    sizes = {"batch_sizes": [1, 3], "prompt_lengths": [5, 40], "new_tokens": 30}
    with engine_of(strong("gpt2"), "bf16") as engine:
        engine.compile(compile_kwargs=sizes)
        before = engine.report().compilations
        assert before > 0
        for rows in (1, 3):
            for length in (5, 40):
                text_of(engine, random_ids(rows, length), max_new_tokens=30)
        assert engine.report().compilations == before
