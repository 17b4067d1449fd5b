"""A kind of cache that no layer has yet: blocks of tokens in one pool, found through a table.

It is chosen for a model's layers here, and its blocks are in no order.
"""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import dualinfer  # noqa: E402
from dualinfer.backends import slots  # noqa: E402
from dualinfer.backends.jax import cache as jax_cache  # noqa: E402
from dualinfer.backends.torch import cache as torch_cache  # noqa: E402
from dualinfer.bench.counts import Counts  # noqa: E402
from dualinfer.cli.plan_table import make_plan_table  # noqa: E402
from dualinfer.errors import OutOfMemoryError, UnsupportedError  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.load_plan import TableSource, make_load_plan  # noqa: E402
from dualinfer.ops import cache_kinds, caches  # noqa: E402

from .cases import make_model  # noqa: E402
from .cases.decoders import CASES  # noqa: E402
from .models import BACKENDS, noted_logits, random_ids, relative_rms, slow_but  # noqa: E402

SIZE = 4  # tokens of a block
IN_ORDER = caches.block_table
OPTIONS = {"dtype": "fp32", "replace_with_kernel_inject": True}
FAMILIES = {case.family: case.name for case in reversed(CASES.values()) if case.generates}
# Families that on JAX show what others show.
REPEATING = ("bloom",)
# They differ from those in what never touches a cache: biases, norms, turned parts of heads.
ON_TORCH = ("qwen2", "qwen3", "opt", "gptj", "gpt_neox", "gpt2")
# And from Gemma 2, on JAX, in nothing that a kind of cache sees.
ON_TORCH += ("mistral", "gpt_neo", "gemma3_text", "llama")
PROMPTS = [random_ids(1, tokens, seed=tokens)[0].tolist() for tokens in (5, 9, 2)]


def scattered(shape: Sequence[int], held: Sequence[int] = (0, 0)) -> np.ndarray:
    """As `caches.block_table`, where the new blocks are in no order."""
    table = IN_ORDER(shape, held)
    is_new = np.ones_like(table, bool)
    is_new[: held[0], : held[1]] = False
    new = table[is_new]
    table[is_new] = np.random.default_rng(table.size).permutation(new)
    return table


@pytest.fixture
def add_blocks(monkeypatch):
    """A function that gives the kind to attentions; all of them, unless told which.

    Then there is no other kind. Blocks are small, and buckets begin at 16 tokens, so that a
    sequence has several, and a cache grows soon.
    """
    monkeypatch.setattr(slots, "RESERVED", 8)
    monkeypatch.setattr(caches, "BLOCK", SIZE)
    monkeypatch.setattr(caches, "block_table", scattered)
    monkeypatch.setattr(slots, "SMALLEST_CACHE", 16)

    def add(has_blocks=None):
        for table in (caches.LAYOUTS, torch_cache.KINDS, jax_cache.KINDS):
            if has_blocks is None:
                monkeypatch.delitem(table, "full", raising=False)

        def kind_of(a):
            return "blocks" if has_blocks is None or has_blocks(a) else "full"

        monkeypatch.setattr(caches, "kind_of", kind_of)

    return add


def texts(engine, is_new: bool = True) -> list[list[int]]:
    """A sampled stream that stays open while greedy ones come; then sampled ones in their slots.

    Prompts are of different lengths, and the cache of a new engine grows in slots and in tokens.
    """
    stream = engine.stream([PROMPTS[0]], max_new_tokens=14, do_sample=True, seed=3)
    found = [next(stream) for _ in range(3)]
    before = engine.report().cache_bytes
    how = {"pad_token_id": 0, "max_new_tokens": 20, "do_sample": False}
    greedy = np.asarray(engine.generate(PROMPTS, **how)).tolist()
    assert engine.report().cache_bytes > before or not is_new
    how["do_sample"] = True
    sampled = np.asarray(engine.generate(PROMPTS[::-1], seed=7, **how)).tolist()
    return [[*found, *stream], *greedy, *sampled]


def layers_of(engine) -> list[Any]:
    """Every layer's buffers."""
    cache = engine.runner._slots.cache
    return cache.layers if isinstance(cache, jax_cache.Cache) else cache._layers


def check_scattered(table) -> None:
    """Each block has one owner, and those of a slot lie apart."""
    table = np.asarray(table)
    assert sorted(table.flat) == list(range(table.size))
    assert all((np.diff(row) != 1).any() for row in table)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, b, marks=[pytest.mark.slow] if b == "jax" and f in REPEATING else [])
        for f, name in FAMILIES.items()
        for b in BACKENDS
        if b == "torch" or f not in ON_TORCH
    ],
)
def test_blocks_give_the_text_of_the_full_cache(name, backend, hf_model, engine_of, add_blocks):
    expected = texts(engine_of(name, "torch"), is_new=False)
    add_blocks()
    with dualinfer.init_inference(hf_model(name), backend=backend, **OPTIONS) as engine:
        assert texts(engine) == expected
        layers = layers_of(engine)
        assert len(layers) == engine.report().layers
        assert {layer.kind for layer in layers} == {"blocks"}
        for layer in layers:
            check_scattered(layer.table)
            assert np.asarray(layer.k).any() and np.asarray(layer.v).any()
        slots, tokens = layers[0].table.shape[0], layers[0].capacity
        held = engine.report().cache_bytes
        assert held == engine.runner.cache_bytes_for(slots, tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_that_read_blocks_are_replayed_from_graphs(hf_model, engine_of, add_blocks):
    expected = texts(engine_of("gemma2", "torch"), is_new=False)
    add_blocks()
    with dualinfer.init_inference(hf_model("gemma2"), **OPTIONS) as engine:
        for turn in range(3):  # a prompt of a size that comes again is captured too
            assert texts(engine, is_new=turn == 0) == expected
        before = engine.report().compilations
        assert texts(engine, is_new=False) == expected
        assert engine.report().compilations == before > 0


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
def test_logits_from_blocks_are_those_from_a_full_cache(backend, hf_model, add_blocks):
    def logits() -> dict[int, np.ndarray]:
        with (
            dualinfer.init_inference(hf_model("qwen3"), backend=backend, **OPTIONS) as engine,
            noted_logits(backend) as noted,
        ):
            engine.generate(PROMPTS, max_new_tokens=20, do_sample=False, eos_token_id=None)
        return {position: scores[:3] for position, scores in noted.items()}

    expected = logits()
    add_blocks()
    found = logits()
    assert list(found) == list(expected) and len(found) == 20
    for position, scores in expected.items():
        assert relative_rms(found[position], scores) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_have_caches_of_different_kinds(backend, hf_model, engine_of, add_blocks):
    expected = texts(engine_of("gemma2", "torch"), is_new=False)
    add_blocks(lambda a: a.window is not None)
    with dualinfer.init_inference(hf_model("gemma2"), backend=backend, **OPTIONS) as engine:
        assert texts(engine) == expected
        assert [layer.kind for layer in layers_of(engine)] == ["blocks", "full"]


def test_two_devices_share_the_pools_and_have_the_table_each(hf_model, engine_of, add_blocks):
    expected = texts(engine_of("llama-gqa", "torch"), is_new=False)
    add_blocks()
    how = {"backend": "jax", "tensor_parallel": {"tp_size": 2}, **OPTIONS}
    with dualinfer.init_inference(hf_model("llama-gqa"), **how) as engine:
        assert texts(engine) == expected
        k, v, table, *_ = layers_of(engine)[0]
        check_scattered(table)
        for pool in (k, v):
            assert pool.addressable_data(0).shape[1] == pool.shape[1] // 2
        assert table.addressable_data(0).shape == table.shape


@pytest.fixture
def by_kernels(monkeypatch):
    """A function that makes engines of a tiny model run by kernels; a prompt goes in pieces."""

    def patch(backend: str) -> Any:
        if backend == "torch":
            pytest.importorskip("triton")
            from dualinfer.backends.torch.ops.kernels import KernelOps

            monkeypatch.setattr(
                dualinfer.backends.torch,
                "_make_ops",
                lambda config, spec, device, _: KernelOps(device),
            )
            monkeypatch.setattr(dualinfer.backends.torch.prompts, "_MOST_AT_ONCE", 4)
        else:
            from dualinfer.backends.jax.ops.kernels import KernelOps

            from .kernels.jax_ops import interpreted_ops

            monkeypatch.setattr(
                dualinfer.backends.jax, "_make_ops", lambda *args: interpreted_ops()
            )
            monkeypatch.setattr(dualinfer.backends.jax.whole, "most_tokens", lambda *_: 8)
        return KernelOps

    return patch


@pytest.fixture(scope="module")
def windowed() -> tuple[Any, np.ndarray]:
    """A tiny model whose first layer has a window, and its text for SHORT."""
    from .test_kernel_ops import CASES as TINY
    from .test_kernel_ops import VOCAB

    model = make_model("gemma2", vocab_size=VOCAB, **TINY["gemma2"])
    with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
        return model, np.asarray(engine.generate(SHORT, **GREEDY))


SHORT = [[5, 6, 7, 8, 9, 10, 11, 15, 16, 17, 18, 19, 20, 21], [12, 13, 14]]
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_write_and_read_blocks(backend, windowed, add_blocks, by_kernels, monkeypatch):
    """The longer prompt goes in pieces, and grows into a second block of 16 tokens."""
    model, expected = windowed
    ops = by_kernels(backend)
    add_blocks(lambda a: a.window is not None)
    monkeypatch.setattr(caches, "BLOCK", 16)
    for method in ("read", "append", "extend", "write"):
        monkeypatch.delattr(cache_kinds.BlockCache, method)
    with dualinfer.init_inference(model, backend=backend, **OPTIONS) as engine:
        np.testing.assert_array_equal(np.asarray(engine.generate(SHORT, **GREEDY)), expected)
        assert ops.cache_kinds == {"full", "blocks", "cross", "latent", "latent_blocks"}
        assert "plain" not in engine.report().ops["decode_attention"]
        layer = layers_of(engine)[0]
        assert layer.kind == "blocks" and layer.table.shape[1] > 1


@pytest.mark.parametrize("backend", slow_but(["torch"], BACKENDS))
def test_kernels_read_grains_side_by_side_and_steps_over_a_part_of_a_pool(
    backend, windowed, by_kernels, monkeypatch
):
    """Panels are filled up by rows of a slot that there is not."""
    import dualinfer.backends.jax.prompts as jax_prompts
    import dualinfer.backends.torch.prompts as torch_prompts
    from dualinfer.backends import slots
    from dualinfer.backends.base import Pool, Request

    from .test_kernel_ops import VOCAB
    from .test_pieces import serve

    rows = [random_ids(1, n, seed=n, vocab=VOCAB)[0].astype(np.int32) for n in (30, 14, 18, 5)]
    requests = [Request(row, 3) for row in rows]
    with dualinfer.init_inference(windowed[0], backend="torch", **OPTIONS) as engine:
        expected = serve(engine.runner, requests, 2)
    by_kernels(backend)
    for module in (slots, torch_prompts, jax_prompts):
        monkeypatch.setattr(module, "GRAIN", 16)
    for module in (slots, torch_prompts):
        monkeypatch.setattr(module, "PANELS", (64,))
    monkeypatch.setattr(slots, "_SMALLEST_REACH", 16)
    panel = torch_prompts.Prompts._panel  # as on a GPU
    monkeypatch.setattr(torch_prompts.Prompts, "_panel", lambda *args: panel(*args[:-1], 64))
    monkeypatch.setattr(torch_prompts, "_MOST_AT_ONCE", 64)
    with dualinfer.init_inference(windowed[0], backend=backend, **OPTIONS) as engine:
        engine.runner.open(Pool(3, 64))
        assert serve(engine.runner, requests, 2) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_kernels_are_coarse_and_those_of_plain_ops_read_no_farther(backend, by_kernels):
    from dualinfer.backends.base import Pool

    def reaches() -> set[int]:
        with dualinfer.init_inference(make_model("llama-gqa"), backend=backend, **OPTIONS) as own:
            own.runner.open(Pool(2, 1024))
            return {part.tokens for part in own.runner._slots.live.parts()}

    assert reaches() == {512, 1024}
    by_kernels(backend)
    assert reaches() == {1024}


@pytest.mark.parametrize("backend", slow_but(["torch"], [*BACKENDS, "jax by pallas"]))
def test_kernels_write_and_read_latent_vectors_in_blocks_of_a_pool(
    backend, by_kernels, monkeypatch
):
    """A prompt goes in two pieces, beside another one, and tokens follow."""
    from dualinfer.backends.base import Piece, Pool, Request

    backend, _, kernels = backend.partition(" by ")
    long, short = (np.arange(5, 5 + n).astype(np.int32) for n in (70, 5))
    request, beside = Request(long, 6), Request(short, 6)

    def text(runner: Any, blocks: int) -> list[list[int]]:
        runner.open(Pool(2, 128, spare=1, blocks=blocks))
        runner.extend([Piece(request, 0, 0, 64)])
        first = runner.extend([Piece(request, 0, 64, 70), Piece.whole(beside, 1)]).fetch()
        found = [*first.tolist(), *runner.decode(4).fetch()[:, :2].tolist()]
        runner.release([0, 1])
        return found

    model = make_model("youtu", vocab_size=101)
    with dualinfer.init_inference(model, backend="torch", **OPTIONS) as engine:
        expected = text(engine.runner, 0)
        assert text(engine.runner, 4) == expected
    by_kernels(backend)
    if kernels:
        from dualinfer.backends.jax.ops.pallas import PallasOps

        make: Any = lambda *_: PallasOps(interpret=True)  # noqa: E731
        monkeypatch.setattr(dualinfer.backends.jax, "_make_ops", make)
    with dualinfer.init_inference(model, backend=backend, **OPTIONS) as engine:
        assert text(engine.runner, 4) == expected
        report = engine.report()
        assert report.cache == "latent_blocks"
        assert ("Pallas" if kernels else "Triton") in report.ops["decode_attention"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_leave_what_they_do_not_know_to_plain_ops(
    backend, windowed, add_blocks, by_kernels, monkeypatch
):
    model, expected = windowed
    monkeypatch.setattr(by_kernels(backend), "cache_kinds", frozenset({"full"}))
    add_blocks(lambda a: a.window is not None)
    with dualinfer.init_inference(model, backend=backend, **OPTIONS) as engine:
        np.testing.assert_array_equal(np.asarray(engine.generate(SHORT, **GREEDY)), expected)
        ops = engine.report().ops
    kernels, _, plain = ops["decode_attention"].partition("; ")
    assert "split KV" in kernels and plain.endswith(" for a cache of kind blocks")
    assert ops["rotary"].endswith("the append to a cache of kind blocks is plain")
    add_blocks()
    with dualinfer.init_inference(model, backend=backend, **OPTIONS) as engine:
        assert engine.report().ops["decode_attention"] == plain


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kind_that_one_backend_lacks_is_refused_there_alone(
    backend, hf_model, add_blocks, monkeypatch
):
    add_blocks()
    monkeypatch.delitem((torch_cache if backend == "torch" else jax_cache).KINDS, "blocks")
    other = next(name for name in BACKENDS if name != backend)
    with pytest.raises(
        UnsupportedError,
        match=f"backend='{backend}' has no cache of kind blocks.*Use backend='{other}'",
    ):
        dualinfer.init_inference(hf_model("llama-mqa"), backend=backend, **OPTIONS)
    dualinfer.init_inference(hf_model("llama-mqa"), backend=other, **OPTIONS).close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_without_room_are_refused_before_they_are_made(
    backend, hf_model, add_blocks, monkeypatch
):
    add_blocks()
    name = "free_bytes" if backend == "torch" else "host_free_bytes"
    with dualinfer.init_inference(hf_model("llama-mqa"), backend=backend, **OPTIONS) as engine:
        needed = engine.runner.cache_bytes_for(1, 64)
        ids = [PROMPTS[0]]
        with monkeypatch.context() as patch:
            patch.setattr(f"dualinfer.backends.{backend}.cache.{name}", lambda *_: needed - 1)
            with pytest.raises(OutOfMemoryError, match=rf"64 tokens needs {needed:,} bytes"):
                engine.generate([PROMPTS[0] * 10], max_new_tokens=5)
        assert engine.report().cache_bytes == 0
        assert np.asarray(engine.generate(ids, max_new_tokens=1, do_sample=False)).shape == (1, 6)


def test_the_plan_and_the_bench_count_what_the_kind_takes(hf_model, add_blocks):
    config = hf_model("llama-mha").config.to_dict()
    spec, table = describe_model(config, ["LlamaForCausalLM"])
    plan = make_load_plan(table, TableSource(table, "float32", "none"))
    full = make_plan_table(table, 2, "float32", 64).devices[1].cache
    read = Counts.of(plan, "float32").kv_bytes("float32", 3, 5, 9)
    add_blocks()
    # The number of a block is 4 bytes, for the 4 tokens in it.
    assert make_plan_table(table, 2, "float32", 64).devices[1].cache == full + len(spec.layers)
    per_token = len(spec.layers) * 3 * np.mean([5 + k for k in range(8)])
    assert Counts.of(plan, "float32").kv_bytes("float32", 3, 5, 9) == pytest.approx(
        read + per_token
    )


# Who knows what a cache is made of.

ROOT = Path(dualinfer.__file__).parent
INSIDE = {
    f"backends/{backend}/{file}.py"
    for backend in BACKENDS
    for file in ("cache", "ops/kernel_attention")
} | {  # who gives kernels arrays
    "ops/cache_kinds.py",
    *(f"backends/jax/ops/{file}.py" for file in ("pallas_attention", "pallas_gpu_attention")),
}
ELSEWHERE = (
    "kernels",
    "module",
    "deepspeed_moe.py",
)  # kernels are given arrays, modules have caches of their own, and k is a gate's number of experts


def reaches_in(node: ast.AST) -> bool:
    """Whether a node reads `.k` or `.v`, or takes apart what is called a cache."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("k", "v") or (node.attr == "shape" and is_cache(node.value))
    if isinstance(node, ast.Starred):
        return is_cache(node.value)
    if isinstance(node, ast.For | ast.comprehension):
        return is_cache(node.iter)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Tuple) and is_cache(node.value)
    return False


def is_cache(node: ast.AST) -> bool:
    """True for `cache`, `self._cache`, `cache[i]` and `filled[i]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name in ("cache", "_cache", "filled")


def test_only_cache_files_and_kernels_reach_into_a_cache():
    reaching = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if not set(path.relative_to(ROOT).parts) & {*ELSEWHERE}
        and any(map(reaches_in, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert reaching <= INSIDE
    for source in (
        "cache.k",
        "cache[0].shape",
        "f(*cache)",
        "a, b = cache",
        "[0 for x in cache]",
    ):
        assert any(map(reaches_in, ast.walk(ast.parse(source)))), source
