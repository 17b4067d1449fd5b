"""The torch decoder by Triton's kernels on a GPU, by family; run there with `pytest -m gpu`."""

import copy
import functools
import importlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import dualinfer  # noqa: E402
from dualinfer.backends.torch.ops.kernels import KernelOps  # noqa: E402
from dualinfer.ops.caches import Room  # noqa: E402

from .models import randomize, relative_rms  # noqa: E402
from .test_gpu import DECODERS, make_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FAMILIES = ("llama", "gpt2", *DECODERS)
GREEDY = {"do_sample": False, "pad_token_id": 0}
families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def strong(family: str, positions: int = 1024) -> Any:
    """A random model whose every weight shows in its logits, and which never ends a text.

    It is made once in a process and not to be changed.
    """
    model = make_model(family, positions)
    torch.manual_seed(1)
    randomize(model)
    if family == "gpt-neo":  # it does not scale its scores: with strong weights they are hundreds
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("q_proj.weight"):
                    weight *= 0.1
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = None, 0
    return model


def engine_of(model: Any, dtype: str = "fp32", **options: Any) -> Any:
    return dualinfer.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **options)


@functools.cache
def float32_engine(family: str, use_triton: bool | None = None) -> Any:
    """An engine of `strong(family)`, made once in a process."""
    return engine_of(strong(family), use_triton=use_triton)


def random_ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 4000, (rows, tokens), generator=generator)


def padded_batch(tokens: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of three rows, one with padding on its left."""
    ids = random_ids(3, tokens)
    mask = torch.ones_like(ids)
    mask[1, : tokens // 4] = 0
    return ids, mask


def cached(engine: Any, slots: int, tokens: int) -> list[torch.Tensor]:
    """Copies of every layer's keys and values."""
    layers = engine.runner._slots.cache.view(Room(slots, tokens))
    return [part.clone() for layer in layers for part in layer if part is not None]


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels launched from Python, in their order."""
    names: list[str] = []
    for name in ("activation", "attention", "decode_attention", "embedding", "filters", "linear"):
        note_launches(monkeypatch, name, names)
    for name in ("norm", "rotary", "sampling"):
        note_launches(monkeypatch, name, names)
    return names


def note_launches(monkeypatch: pytest.MonkeyPatch, name: str, names: list[str]) -> None:
    module = importlib.import_module(f"dualinfer.kernels.triton.{name}")
    launch = module.launch

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **kwargs)

    monkeypatch.setattr(module, "launch", noted)


# Against HF


def answers_of_hf(model: Any) -> tuple[Any, Any, list[list[list[int]]]]:
    """HF's answers to `padded_batch`, by the GPU, without TF32.

    Logits in float64 without its mask [B, T, V], those in float32 of its real tokens, and the
    texts of 40 tokens after the padded batch and after its first row.
    """
    ids, mask = (x.cuda() for x in padded_batch())
    model = copy.deepcopy(model).cuda()
    with torch.no_grad():
        # With padding, HF's eager attention in float64 is NaN.
        expected = copy.deepcopy(model).double()(ids).logits.cpu()
        masked = model(ids, attention_mask=mask).logits[mask.bool()].cpu()
        texts = [
            model.generate(ids, attention_mask=mask, max_new_tokens=40, **GREEDY).tolist(),
            model.generate(ids[:1], max_new_tokens=40, **GREEDY).tolist(),
        ]
    return expected, masked, texts


@families
def test_float32_is_hf_in_float64_and_writes_its_text(family):
    model = strong(family)
    ids, mask = padded_batch()
    expected, masked, texts = answers_of_hf(model)
    engine = float32_engine(family)
    logits = engine(ids).logits
    assert logits.is_cuda and relative_rms(logits.cpu(), expected) < 1e-5
    logits = engine(ids, attention_mask=mask).logits
    assert relative_rms(logits.cpu()[mask.bool()], masked) < 2e-5
    for _ in range(3):  # prompts: as they are, captured, replayed
        whole = engine.generate(ids, attention_mask=mask, max_new_tokens=40, **GREEDY)
        assert whole.tolist() == texts[0]
        assert engine.generate(ids[:1], max_new_tokens=40, **GREEDY).tolist() == texts[1]


def rounded(model: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model in `dtype` on the GPU, and in float32 on the CPU with the same weights.

    Buffers, such as rotary frequencies, stay in float32, as `from_pretrained` leaves them.
    """
    low = copy.deepcopy(model)
    for p in low.parameters():
        p.data = p.data.to(dtype)
    exact = copy.deepcopy(low)
    for p in exact.parameters():
        p.data = p.data.float()
    return low.cuda(), exact


@families
def test_half_precision_is_as_near_to_float32_as_hf(family):
    low, exact = rounded(strong(family), torch.bfloat16)
    engine = engine_of(low, "bf16")
    found, hf, expected = [], [], []
    with torch.no_grad():
        for seed, tokens in enumerate((1, 5, 17, 33, 64, 100, 129, 200)):
            ids = random_ids(1, tokens, seed)
            expected.append(exact(ids).logits[0])
            hf.append(low(ids.cuda()).logits[0].float().cpu())
            logits = engine(ids.cuda()).logits[0]
            assert logits.is_cuda and logits.dtype == torch.bfloat16
            found.append(logits.float().cpu())
    wanted = torch.cat(expected)
    error, bound = (relative_rms(torch.cat(x), wanted) for x in (found, hf))
    assert error < 1.1 * bound, (family, error, bound)


@families
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_decoded_logits_are_as_near_to_float32_as_hf(family, rows, monkeypatch):
    """By the kernels of a step, from a cache that they wrote themselves."""
    low, exact = rounded(strong(family), torch.bfloat16)
    steps: list[torch.Tensor] = []
    for name in ("sample", "advance"):
        original = getattr(KernelOps, name)

        def noted(self, logits, *args, original=original):
            steps.append(logits.clone())
            return original(self, logits, *args)

        monkeypatch.setattr(KernelOps, name, noted)
    tokens, new = 75, 30
    ids = random_ids(rows, tokens)
    engine = engine_of(low, "bf16", enable_cuda_graph=False)
    text = torch.tensor(engine.generate(ids, max_new_tokens=new, **GREEDY).tolist())
    assert text.shape == (rows, tokens + new)
    found = torch.stack([x[:rows] for x in steps[:new]], 1)
    assert found.dtype == torch.float32
    with torch.no_grad():
        expected = exact(text).logits[:, tokens - 1 : -1]
        hf = low(text.cuda()).logits[:, tokens - 1 : -1].float().cpu()
    error, bound = relative_rms(found.cpu(), expected), relative_rms(hf, expected)
    assert error < 1.1 * bound, (family, error, bound)


@families
def test_rows_of_a_ragged_batch_are_those_alone(family):
    engine = float32_engine(family)
    prompts = [random_ids(1, n, n)[0].tolist() for n in (1, 63, 130, 7, 64)]
    whole = engine.generate(prompts, max_new_tokens=30, **GREEDY).tolist()
    for row, prompt in zip(whole, prompts, strict=True):
        alone = engine.generate([prompt], max_new_tokens=30, **GREEDY).tolist()[0]
        assert row[-len(alone) :] == alone


def test_a_prompt_may_be_padded_beyond_the_positions_a_model_has():
    model = strong("gpt2", positions=100)
    ids = random_ids(1, 70)
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=30, **GREEDY).tolist()
    engine = engine_of(model)
    for _ in range(3):
        assert engine.generate(ids, max_new_tokens=30, **GREEDY).tolist() == expected


# Graphs


@families
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replays_leave_the_bits_of_the_same_launches_uncaptured(family, dtype):
    """Prompts are multiples of what a graph pads to, so that both see the same shapes."""
    model = strong(family)
    plain = engine_of(model, dtype, enable_cuda_graph=False)
    graphs = engine_of(model, dtype)
    for rows, tokens in ((1, 64), (2, 128)):
        ids = random_ids(rows, tokens)
        results, captures = [], []
        for engine in (plain, graphs, graphs, graphs):  # as they are, captured, replayed
            text = engine.generate(ids, max_new_tokens=40, **GREEDY).tolist()
            results.append((text, cached(engine, rows, tokens + 38)))
            captures.append(engine.report().compilations)
        assert captures[0] == 0 < captures[1] < captures[2] == captures[3]
        for text, parts in results[1:]:
            assert text == results[0][0]
            assert all(map(torch.equal, parts, results[0][1]))


def test_within_the_buckets_nothing_is_captured_once_warm():
    engine = engine_of(strong("llama"), "bf16")
    options = {"max_new_tokens": 20, "pad_token_id": 0}
    sampled = {"do_sample": True, "top_p": 0.9, "seed": 3}

    def run(length: int, rows: int) -> None:
        for way in ({"do_sample": False}, sampled):
            engine.generate(random_ids(rows, length), **way, **options)

    for _ in range(2):
        run(20, 1)
        run(44, 3)
    before = engine.report().compilations
    assert before > 0
    for length in (1, 7, 33, 44):
        run(length, 1)
        run(length, 3)
    assert engine.report().compilations == before


def test_prompts_graphs_outlive_no_buffer():
    model = strong("llama")
    engine = engine_of(model)
    plain = engine_of(model, enable_cuda_graph=False, use_triton=False)
    small, large = random_ids(1, 50), random_ids(9, 30, 2)
    expected = [plain.generate(x, max_new_tokens=20, **GREEDY).tolist() for x in (small, large)]
    for _ in range(3):
        assert engine.generate(small, max_new_tokens=20, **GREEDY).tolist() == expected[0]
    captures = engine.report().compilations
    for _ in range(3):  # the cache grows: what was captured on the old one goes
        assert engine.generate(large, max_new_tokens=20, **GREEDY).tolist() == expected[1]
        assert engine.generate(small, max_new_tokens=20, **GREEDY).tolist() == expected[0]
    assert engine.report().compilations > captures


# Which ops


@families
def test_a_step_is_a_handful_of_launches(family, launched):
    engine = engine_of(strong(family), "bf16", enable_cuda_graph=False)
    assert "Triton" in engine.report().ops["matmul"]
    assert "Triton" in engine.report().ops["decode_attention"]
    engine.generate(random_ids(1, 10), max_new_tokens=10, **GREEDY)
    before, last = [i for i, name in enumerate(launched) if name == "_choose_kernel"][-2:]
    step, layers = launched[before + 1 : last + 1], len(engine.runner.spec.layers)
    assert step.count("decode_attention_kernel") == layers
    norms = {"bloom": 1, "gemma2": 2 * layers, "opt-post": 1}  # behind a sum, or alone
    assert len(step) == 5 * layers + 3 + norms.get(family, 0), step


def test_triton_is_used_unless_refused(launched):
    model = strong("llama")
    ids = random_ids(1, 10)
    texts = []
    for choice in (None, True, False):
        launched.clear()
        engine = engine_of(model, use_triton=choice)
        ops = engine.report().ops
        texts.append(engine.generate(ids, max_new_tokens=10, **GREEDY).tolist())
        engine(ids)
        named = any("Triton" in text for text in ops.values())
        assert bool(launched) == named == (choice is not False)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "top_k": 40, "top_p": 0.9}, {"repetition_penalty": 1.3}],
    ids=str,
)
def test_a_seed_gives_the_same_text_by_kernels_and_by_plain_torch(family, sampling):
    prompts = [random_ids(1, n, n)[0].tolist() for n in (3, 40, 90)]
    texts = []
    for choice in (None, False):
        engine = float32_engine(family, choice)
        made = engine.generate(
            prompts, max_new_tokens=40, do_sample=True, seed=7, pad_token_id=0, **sampling
        )
        texts.append(np.asarray(made.tolist()))
    np.testing.assert_array_equal(*texts)
