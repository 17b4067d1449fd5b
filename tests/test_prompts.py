"""How runners cut prompts: groups of them, and on torch pieces of a long one, give the whole.

What is replayed from a graph is in test_gpu_kernels.py.
"""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402
from dualinfer.backends import torch as backend  # noqa: E402
from dualinfer.backends.torch import prompts  # noqa: E402
from dualinfer.backends.torch.cache import Cache  # noqa: E402
from dualinfer.backends.torch.ops.kernels import KernelOps  # noqa: E402
from dualinfer.ops.caches import Room, cache_specs  # noqa: E402
from dualinfer.parallel.agreement import Peers  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import random_ids, relative_rms  # noqa: E402
from .test_kernel_ops import CASES, NO_EOS, VOCAB  # noqa: E402

LENGTHS = (5, 9, 3, 9, 1)
PLACES = 48


@pytest.fixture
def engine_of(monkeypatch):
    """A function from a case to an engine without graphs, by the kernels or by plain torch."""

    def make(name: str, kernels: bool = True):
        options = {"dtype": "fp32", "replace_with_kernel_inject": True, "enable_cuda_graph": False}
        with monkeypatch.context() as patch:
            if kernels:
                patch.setattr(
                    backend, "_make_ops", lambda config, spec, device, _: KernelOps(device)
                )
            else:
                options["use_triton"] = False
            return dualinfer.init_inference(
                make_model(name, vocab_size=VOCAB, **CASES[name]), **options
            )

    return make


@pytest.fixture
def passes(monkeypatch):
    """Rows, tokens and start of every pass over the decoder."""
    made: list[tuple[int, int, int]] = []
    one = prompts.Prompts._pass

    def noted(self, params, cache, rows, *how, **more):
        start = 0 if rows.starts is None else int(rows.starts.min())
        made.append((*rows.ids.shape, start))
        return one(self, params, cache, rows, *how, **more)

    monkeypatch.setattr(prompts.Prompts, "_pass", noted)
    return made


def rows_of(*lengths: int) -> list[np.ndarray]:
    return [random_ids(1, n, seed=i, vocab=VOCAB)[0] for i, n in enumerate(lengths)]


@torch.inference_mode()
def prefill(engine: Any, rows: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The last hidden states [B, E], and the keys and values of every prompt's own tokens.

    Prompt i goes to the slot i places before the last one; a free slot stays as it was.
    """
    runner = engine.runner
    specs = cache_specs(runner.spec)
    cache = Cache(specs, torch.float32, runner.device, Peers())
    cache.grow(Room(len(rows) + 1, PLACES))
    slots = torch.arange(len(rows), 0, -1, device=runner.device)
    last = runner._prompts.run(runner.params, cache, rows, slots)
    written = []
    for layer in cache.view(Room(len(rows) + 1, PLACES)):
        for part in (layer.k, layer.v):
            assert not part[0].any()
            written += [
                part[slot, :, : len(row)].flatten()
                for slot, row in zip(slots.tolist(), rows, strict=True)
            ]
    return last.cpu().numpy(), [torch.cat(written).cpu().numpy()]


def assert_same(found: Any, expected: Any) -> None:
    assert relative_rms(found[0], expected[0]) < 1e-5
    assert relative_rms(found[1][0], expected[1][0]) < 1e-5


def test_a_large_batch_is_cut_into_groups(engine_of, passes, monkeypatch):
    engine = engine_of("llama-gqa")
    rows = rows_of(*LENGTHS)
    whole = prefill(engine, rows)
    assert passes == [(5, 9, 0)]
    passes.clear()
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 20)
    assert_same(prefill(engine, rows), whole)
    assert passes == [(2, 9, 0), (2, 9, 0), (1, 1, 0)]  # no wider than its own longest


# Rotary, learned positions, ALiBi by position, windows with soft caps, windows of some layers.
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gptj", "bloom", "gemma2", "gpt-neo"])
def test_a_long_prompt_is_read_in_pieces(name, engine_of, passes, monkeypatch):
    engine = engine_of(name)
    rows = rows_of(21)
    whole = prefill(engine, rows)
    passes.clear()
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 16)
    assert_same(prefill(engine, rows), whole)
    assert passes == [(1, 8, 0), (1, 8, 8), (1, 5, 16)]


@pytest.mark.parametrize("length", [15, 16, 17, 24, 25])
def test_pieces_begin_where_the_limit_is_passed_and_end_anywhere(
    length, engine_of, passes, monkeypatch
):
    engine = engine_of("bloom")
    rows = rows_of(length)
    whole = prefill(engine, rows)
    passes.clear()
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 16)
    assert_same(prefill(engine, rows), whole)
    assert sum(tokens for _, tokens, _ in passes) == length
    assert len(passes) == (1 if length <= 16 else -(-length // 8))


def test_short_prompts_beside_a_long_one_stay_whole(engine_of, passes, monkeypatch):
    engine = engine_of("llama-gqa")
    rows = rows_of(4, 18, 2)
    whole = prefill(engine, rows)
    passes.clear()
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 16)
    assert_same(prefill(engine, rows), whole)
    assert passes == [(1, 4, 0), (1, 8, 0), (1, 8, 8), (1, 2, 16), (1, 2, 0)]


def test_plain_torch_reads_in_pieces_too(engine_of, passes, monkeypatch):
    engine = engine_of("llama-gqa", kernels=False)
    rows = rows_of(4, 18, 2)
    whole = prefill(engine, rows)
    passes.clear()
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 16)
    assert_same(prefill(engine, rows), whole)
    assert passes == [(1, 4, 0), (1, 8, 0), (1, 8, 8), (1, 2, 16), (1, 2, 0)]


def test_text_does_not_depend_on_how_prompts_were_cut(engine_of, passes, monkeypatch):
    engine, plain = engine_of("gemma2"), engine_of("gemma2", kernels=False)
    rows = [row.tolist() for row in rows_of(3, 19, 7)]
    how = {"max_new_tokens": 4, "do_sample": False, **NO_EOS}
    expected = plain.generate(rows, **how)
    passes.clear()
    monkeypatch.setattr(prompts, "_MOST_AT_ONCE", 16)
    np.testing.assert_array_equal(np.asarray(engine.generate(rows, **how)), np.asarray(expected))
    assert len(passes) == 5


@pytest.fixture(scope="module")
def jax_engine():
    pytest.importorskip("flax")
    model = make_model("llama-mqa", num_hidden_layers=1, vocab_size=VOCAB)
    with dualinfer.init_inference(model, backend="jax", dtype="fp32") as engine:
        yield engine


def bound(monkeypatch: pytest.MonkeyPatch, engine: Any, tokens: int, outputs: int = 0) -> None:
    """Have a pass of JAX take so many tokens of sequences of 64."""
    from dualinfer.backends.jax import prompts as panels

    monkeypatch.setattr(panels, "MOST_BYTES", 1 << 40)
    monkeypatch.setattr(panels, "_MOST_TOKENS", tokens)
    runner, known = engine.runner, engine.runner._passes  # which has counted already
    runner._fit_passes()
    anew, runner._passes = runner._passes, known
    monkeypatch.setattr(runner, "_passes", anew)
    assert engine.runner._most_tokens_of(64, outputs) == tokens


def temporaries(engine: Any, step: str) -> list[int]:
    """Bytes that each executable of a kind holds while it runs, in the order of compiling."""
    made = engine.runner._executables._made
    found = [x.memory_analysis() for key, x in made.items() if key[0] == step]
    return [x.temp_size_in_bytes for x in found]


def test_a_batch_in_panels_on_jax_says_what_it_says_as_one(jax_engine, monkeypatch):
    ways = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5, "seed": 9}
    rows = [row.tolist() for row in rows_of(5, 40, 9, 17, 33, 40, 1)]
    for sampling in ({"do_sample": False}, {"do_sample": True, "repetition_penalty": 1.3}):
        monkeypatch.undo()
        expected = np.asarray(jax_engine.generate(rows, **ways, **sampling))
        bound(monkeypatch, jax_engine, 64)
        found = np.asarray(jax_engine.generate(rows, **ways, **sampling))
        np.testing.assert_array_equal(found, expected)
    whole, *parts = temporaries(jax_engine, "prefill")
    assert parts and max(parts) < whole / 4


def test_panels_hold_prompts_of_like_lengths():
    from dualinfer.backends.jax.prompts import panels

    assert panels([5, 30, 9], 128) == [[0, 1, 2]]
    assert panels([5, 30, 9, 17, 3, 100, 2], 64) == [[5], [1, 3], [2, 0, 4, 6]]


def test_forward_in_panels_on_jax_gives_what_it_gives_as_one(jax_engine, monkeypatch):
    ids = random_ids(5, 50, seed=3, vocab=VOCAB)
    mask = np.ones_like(ids)
    mask[1, :7] = 0
    how = {"attention_mask": mask, "output_hidden_states": True}
    expected = jax_engine(ids, **how)
    bound(monkeypatch, jax_engine, 64)
    found = jax_engine(ids, **how)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    for mine, its in zip(found.hidden_states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-5)


def test_the_size_that_was_used_longest_ago_goes_with_its_graph(engine_of, passes, monkeypatch):
    """It is new again then: it has to come twice before it is captured."""

    class Graphs(dict):
        def capture(self, key, work):
            self[key] = work

        def replay(self, key):
            self[key]()

        def drop(self, key):
            self.pop(key, None)

    monkeypatch.setattr(prompts, "MOST_STEPS", 2)
    engine = engine_of("llama-gqa")
    runner, graphs = engine.runner, Graphs()
    monkeypatch.setattr(runner._prompts, "graphs", graphs)
    cache = Cache(cache_specs(runner.spec), torch.float32, runner.device, Peers())
    cache.grow(Room(2, PLACES))
    args = runner.params, cache, rows_of(5), torch.tensor([0])
    found = []
    with torch.inference_mode():
        for width in (16, 16, 16, 32, 48, 16, 16):
            y = runner._prompts._replayed(*args, width, None, 0, False)
            found.append((len(graphs), y.clone()))
    assert [count for count, _ in found] == [0, 1, 1, 1, 0, 0, 1]
    assert [width for _, width, _ in passes] == [16, 16, 16, 32, 48, 16, 16]
    assert all(relative_rms(y, found[0][1]) < 1e-5 for _, y in found)
    assert len(runner._prompts._buffers) == 2


def test_more_tokens_are_replayed_where_kernels_hold_no_scores(engine_of):
    by_kernels, plain = (engine_of("llama-gqa", kernels) for kernels in (True, False))
    assert by_kernels.runner._prompts._most_replayed == prompts._MOST_REPLAYED_OF_FEW
    assert plain.runner._prompts._most_replayed == prompts._MOST_REPLAYED
