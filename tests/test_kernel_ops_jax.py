"""The JAX decoder on Triton's kernels, interpreted on the CPU, against the one on plain XLA."""

import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax import ahead, steps  # noqa: E402
from dualinfer.backends.jax.ops.kernels import KernelOps  # noqa: E402
from dualinfer.backends.jax.ops.plain import PlainOps  # noqa: E402
from dualinfer.backends.kernels import unserved  # noqa: E402
from dualinfer.config import InferenceConfig  # noqa: E402
from dualinfer.engine import loop  # noqa: E402
from dualinfer.kernels.triton import activation, linear, norm  # noqa: E402
from dualinfer.kernels.triton.launch import INTERPRETED  # noqa: E402
from dualinfer.kernels.xla import grouping, handler  # noqa: E402
from dualinfer.ops.caches import Room  # noqa: E402

from .cases import make_model  # noqa: E402
from .kernels.jax_ops import calls_for_cuda, gpu, interpreted_ops, watch_logits  # noqa: E402
from .kernels.tensors import strict  # noqa: E402
from .models import relative_rms, slow_but  # noqa: E402
from .test_blocks import fill_with_nan  # noqa: E402
from .test_kernel_ops import (  # noqa: E402
    CASES,
    ENCODER,
    MIXTURES,
    VOCAB,
    assert_same_outputs,
    batch,
    tiny,
)

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU: see test_gpu_kernels_jax.py"),
    # The interpreter divides in NumPy, which warns of what IEEE 754 defines.
    pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning"),
]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OPTIONS: dict[str, Any] = {
    "backend": "jax",
    "dtype": "fp32",
    "replace_with_kernel_inject": True,
}


@pytest.fixture
def engines(monkeypatch):
    """A function from a tiny model, or its name, to engines of it: by kernels, by plain XLA."""

    def make(model: Any, dtype: str = "fp32", **changes: Any):
        if isinstance(model, str):
            model = tiny(model, **changes)
        options = OPTIONS | {"dtype": dtype}
        plain = dualinfer.init_inference(model, **options)
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_make_ops", lambda *args: interpreted_ops())
            fast = dualinfer.init_inference(model, **options)
        assert "Triton" in fast.report().ops["matmul"]
        assert "Triton" not in plain.report().ops["matmul"]
        return fast, plain

    return make


def assert_same_text(fast: Any, plain: Any, prompts: Any, new: int, **options: Any) -> np.ndarray:
    text, expected = (
        np.asarray(e.generate(prompts, max_new_tokens=new, **options)) for e in (fast, plain)
    )
    np.testing.assert_array_equal(text, expected)
    return text


QUICK = ("llama-gqa", "gpt2", "opt", "neox", "bloom", "gemma2")


# Others show what these two launch here.
LAUNCHED_AS_OTHERS = {"afmoe", "cohere2_moe"}


@pytest.mark.parametrize(
    "name", slow_but(QUICK, [name for name in CASES | MIXTURES if name not in LAUNCHED_AS_OTHERS])
)
def test_kernels_give_what_plain_xla_gives(name, engines, monkeypatch):
    """Two prompts of different lengths, into the cache and on, with all products by the kernels."""
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    fast, plain = engines(name, **(CASES | MIXTURES)[name])
    ids = np.random.default_rng(2).integers(3, VOCAB, 13).tolist()
    text, found = with_logits(fast, [ids, ids[:7]], 4, monkeypatch)
    mask = np.ones_like(text)
    mask[1, :6] = 0
    places = np.maximum(mask.cumsum(1) - 1, 0)
    whole = plain(text, attention_mask=mask, position_ids=places).logits
    expected = np.asarray(whole)[:, 12:-1]
    np.testing.assert_array_equal(text[:, 13:], expected.argmax(-1))
    assert relative_rms(found, expected) < 3e-6


@pytest.mark.parametrize("name", ["llama-gqa", "bloom", "gemma2"])
def test_forward_hides_padding(name, engines, monkeypatch):
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    fast, plain = engines(name, **CASES[name])
    assert_same_outputs(fast, plain, batch(), "logits")


@pytest.mark.parametrize("name", ["bert", "bert-masked"])
def test_encoders_take_masks_and_token_types(name, engines, monkeypatch):
    monkeypatch.setattr(linear, "serves", lambda *shape: True)
    call = batch()
    call["token_type_ids"] = (np.arange(14) > 6).astype(np.int64)[None].repeat(2, 0)
    output = "logits" if name == "bert-masked" else "last_hidden_state"
    fast, plain = engines(name, **ENCODER)
    assert_same_outputs(fast, plain, call, output)


def test_many_rows_have_gelu_and_norms_of_sums_by_kernels(engines, monkeypatch):
    """XLA takes twice as long for these; the products are its own."""
    seen = []

    def watched(name, function):
        def run(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*args, **options)

        return run

    monkeypatch.setattr(linear, "MOST_ROWS", 4)
    monkeypatch.setattr(activation, "activation", watched("gelu", activation.activation))
    monkeypatch.setattr(norm, "layer_norm", watched("norm", norm.layer_norm))
    fast, plain = engines("bert", **ENCODER)
    assert_same_outputs(fast, plain, batch(), "last_hidden_state")
    assert sorted(seen) == ["gelu", "norm", "norm"]


def test_text_goes_on_where_one_call_of_decode_ends(engines, monkeypatch):
    """One row, and three in four slots, of which one ends early."""
    monkeypatch.setattr(steps, "MAX_STEPS", 4)
    monkeypatch.setattr(loop, "MAX_STEPS", 4)
    fast, plain = engines("llama-gqa", **CASES["llama-gqa"])
    text = assert_same_text(fast, plain, [[5, 6, 7]], 10, **GREEDY)
    assert text.shape == (1, 13)
    eos = int(text[0, 3 + 6])
    prompts = [[8, 9, 10, 11, 12], [5, 6, 7], [13]]
    text = assert_same_text(fast, plain, prompts, 10, do_sample=False, eos_token_id=eos)
    assert eos in text[1, 5 : 5 + 7]


@pytest.mark.slow
def test_a_slot_that_another_left_nan_in_changes_no_text(engines, monkeypatch):
    """Latent keys, of which pieces of a prompt make heads' keys and values beyond their own."""
    monkeypatch.setattr(backend.whole, "most_tokens", lambda *_: 8)
    fast, plain = engines(make_model("deepseek_v3"))
    ids = np.random.default_rng(4).integers(5, 40, (1, 20))
    expected = np.asarray(plain.generate(ids, max_new_tokens=3, **GREEDY))
    fast.reserve(2, 64)
    fill_with_nan(fast.runner)
    found = np.asarray(fast.generate(ids, max_new_tokens=3, **GREEDY))
    np.testing.assert_array_equal(found, expected)


def test_sampled_text_is_that_of_the_plain_ops(engines):
    fast, plain = engines("gpt2", **CASES["gpt2"])
    sampling = {"do_sample": True, "seed": 3, "temperature": 1.5, "repetition_penalty": 1.4}
    sampling |= {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "min_new_tokens": 3}
    assert_same_text(fast, plain, [[5, 6, 7], [8, 9, 10, 11, 12]], 7, **sampling)


@pytest.mark.usefixtures(strict.__name__)  # bfloat16 is rounded as on a GPU
@pytest.mark.parametrize(("name", "rows"), [("gpt2", 1), ("llama-gqa", 3)])
def test_bfloat16_is_as_near_to_float32_as_plain_xla(name, rows, engines, monkeypatch):
    model = make_model(name, vocab_size=VOCAB, **CASES[name]).bfloat16().float()
    ids = np.random.default_rng(3).integers(3, VOCAB, (rows, 9))
    fast, plain = engines(model, "bf16")
    text, found = with_logits(fast, ids.tolist(), 6, monkeypatch)
    other = np.asarray(plain(text).logits, np.float32)[:, 8:-1]
    with torch.no_grad():
        expected = model(torch.tensor(text)).logits[:, 8:-1].numpy()
    error, bound = (relative_rms(x, expected) for x in (found, other))
    assert error < 1.1 * bound < 0.05


def with_logits(
    engine: Any, prompts: list[list[int]], new: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, np.ndarray]:
    """The greedy text of prompts, and the logits float32 [B, new, V] by which it was chosen."""
    by_position: dict[int, np.ndarray] = {}

    def note(position: Any, logits: Any) -> None:
        by_position[int(position[0])] = np.asarray(logits)[: len(prompts)]

    with monkeypatch.context() as patch:
        watch_logits(patch, note)
        text = np.asarray(engine.generate(prompts, max_new_tokens=new, **GREEDY))
        jax.effects_barrier()
    first = len(prompts[0])
    assert sorted(by_position) == list(range(first, first + new))
    return text, np.stack([by_position[first + i] for i in range(new)], 1)


def test_triton_is_looked_through_while_weights_are_read(monkeypatch):
    """On a GPU, and only where its kernels are wanted."""
    read = backend.load_params

    def load(*args: Any) -> Any:
        for thread in begun_threads():
            thread.join()
        order.append("weights")
        return read(*args)

    def begun_threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "dualinfer-triton"]

    order: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_make_ops", lambda *args: KernelOps(gpu(core_count=132)))
        patch.setattr(backend, "runs_kernels", lambda device: True)
        patch.setattr(backend, "_prepare_kernels", lambda device: order.append("Triton"))
        patch.setattr(backend, "load_params", load)
        model = make_model("llama-gqa", vocab_size=VOCAB)
        dualinfer.init_inference(model, **OPTIONS).close()
        assert order == ["Triton", "weights"]
        dualinfer.init_inference(model, **OPTIONS | {"replace_with_kernel_inject": False}).close()
    assert order == ["Triton", "weights", "weights"]


# What is compiled


def jobs(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], **more: Any
) -> Any:
    """The steps of a tiny model as they are compiled on a GPU, by name and rows; none is run."""
    model = make_model(name, vocab_size=VOCAB, **CASES[name])
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_make_ops", lambda *args: KernelOps(gpu(core_count=132)))
        engine = dualinfer.init_inference(model, **OPTIONS | {"dtype": dtype} | more)
    wanted = ahead.Wanted(rows, (5,), 4)
    for job in ahead.jobs(engine.runner, wanted, 4):
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.args)
        key: Any = job.key
        yield key[0], args[2].active.shape[0], job.function, args


# A family's own sizes, each in one dtype; every dtype for one of them.
_LOWERED = [(name, "bf16") for name in CASES] + [("llama-gqa", "fp16"), ("llama-gqa", "fp32")]


@pytest.mark.parametrize(("name", "dtype"), _LOWERED)
def test_every_step_lowers_for_cuda(name, dtype, monkeypatch):
    """Without a GPU; all of a step is one call, which changes caches and counters in place.

    Gemma 2's is not: XLA adds what it norms to the residual.
    """
    layers = CASES[name].get("num_hidden_layers", CASES[name].get("n_layer", 2))
    for what, rows, step, args in jobs(name, dtype, monkeypatch, (1, 3)):
        if what == "prefill" and rows == 1:
            continue  # nothing of its own
        calls, _ = calls_for_cuda(step, args, monkeypatch)
        kernels = [kernel for call in calls for kernel in call.kernels]
        if what == "prefill":
            assert kernels.count("attention_kernel") == layers
            continue
        modes = len(KernelOps.modes)  # of sampling, a loop for each
        assert kernels.count("decode_attention_kernel") == modes * layers
        products, least = "matvec_kernel" if rows == 1 else "tile_kernel", 4 * layers + 1
        assert kernels.count(products) >= (modes * least if rows == 1 or dtype != "fp32" else 0)
        if rows == 1 and name == "opt-post":  # products make the norms behind the layers' parts
            assert kernels.count("norm_kernel") == modes
        if (rows == 1 or dtype != "fp32") and name not in ("gemma2", "opt-post"):
            assert len(calls) == modes
            assert all(call.changed >= 2 * layers + 1 for call in calls)
            assert all(call.kernels[-1] == "choose_kernel" for call in calls)


@pytest.mark.parametrize("codes", ["fp8_e4m3", "int8"])
def test_steps_change_codes_and_scales_in_place(codes, monkeypatch):
    layers = CASES["llama-gqa"]["num_hidden_layers"]
    for what, _, step, args in jobs("llama-gqa", "bf16", monkeypatch, (1,), kv_cache_dtype=codes):
        calls, _ = calls_for_cuda(step, args, monkeypatch)
        kernels = [kernel for call in calls for kernel in call.kernels]
        kernel = "attention_kernel" if what == "prefill" else "decode_attention_kernel"
        assert kernels.count(kernel) == layers * (1 if what == "prefill" else len(KernelOps.modes))
        if what == "decode":
            assert all(call.changed >= 4 * layers + 1 for call in calls)


def test_kernels_lower_where_the_caller_counts_in_64_bits(monkeypatch):
    with jax.enable_x64(True):
        for _, _, step, args in jobs("llama-gqa", "bf16", monkeypatch, (3,)):
            assert calls_for_cuda(step, args, monkeypatch)[0]


def test_the_cache_is_donated_to_each_step(engines):
    fast, _ = engines("llama-gqa", **CASES["llama-gqa"])
    fast.generate([[5, 6, 7]], max_new_tokens=4, **GREEDY)
    made = fast.runner._executables._made
    assert {"prefill", "decode"} <= {key[0] for key in made}
    shape = ",".join(map(str, fast.runner._slots.cache.layers[0].k.shape))
    for executable in (x for key, x in made.items() if key[0] in ("prefill", "decode")):
        (head,) = re.findall("^HloModule .*$", executable.as_text(), re.MULTILINE)
        aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", head)
        layout = re.search(r"entry_computation_layout=\{\((.*)\)->", head)
        assert aliases and layout
        given = re.findall(r"\w+\[[\d,]*\]", layout[1])
        taken = [given[int(at)] for at in re.findall(r": \((\d+), \{\}", aliases[1])]
        assert taken.count(f"f32[{shape}]") == 2


@pytest.mark.parametrize("step", ["decode", "decode_one"])
def test_no_step_copies_the_cache(step, engines, monkeypatch):
    """As XLA sees it on a GPU: loops of each mode, and calls that change the cache in place."""
    name = "dualinfer_never_called"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler._handler), platform="cpu")

    def as_on_gpu(run: Any, results: Any, *arrays: Any) -> Any:
        _, _, aliases = run.args
        made = jax.ffi.ffi_call(name, results, input_output_aliases=dict(aliases))
        return made(*arrays, program=np.int64(0))

    monkeypatch.setattr(jax, "pure_callback", as_on_gpu)
    _, plain = engines("llama-gqa", **CASES["llama-gqa"])
    runner = plain.runner
    ops = KernelOps(gpu(core_count=132))
    buffers = jax.eval_shape(lambda: runner.make_buffers(Room(4, 8192), 1))
    args = *buffers, jax.ShapeDtypeStruct((2,) if step == "decode" else (), np.int32)
    function = getattr(steps.Steps(runner.spec, ops, on_gpu=True), step)
    jitted = jax.jit(grouping.grouped(function), donate_argnums=(1, 2))
    analysis = jitted.lower(runner.params, *args).compile().memory_analysis()
    layer = buffers[0].layers[0].k
    assert analysis.temp_size_in_bytes < layer.size * layer.dtype.itemsize / 2
    assert analysis.alias_size_in_bytes > 2 * layer.size * layer.dtype.itemsize


# Which ops


@pytest.fixture(scope="module")
def spec():
    """A model that the kernels serve."""
    model = make_model("llama-gqa", vocab_size=VOCAB, **CASES["llama-gqa"])
    with dualinfer.init_inference(model, **OPTIONS) as engine:
        return engine.runner.spec


REQUIRED = InferenceConfig(backend="jax", use_triton=True, replace_with_kernel_inject=True)


def chosen(spec: Any, device: Any, **options: Any) -> Any:
    settings = {"backend": "jax", "replace_with_kernel_inject": True, **options}
    return backend._make_ops(InferenceConfig(**settings), spec, device)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "10.3"])
def test_data_centre_gpus_from_ampere_on_get_kernels(capability, spec):
    ops = chosen(spec, gpu(capability, core_count=108))
    assert type(ops) is KernelOps and ops.sms == 108
    assert ops.capability == int(capability.replace(".", ""))
    assert chosen(spec, gpu(capability)).sms == 132


@pytest.mark.parametrize(
    "device",
    [gpu("7.5"), gpu("8.6"), gpu("8.9"), gpu("12.0"), gpu("7.0"), gpu("gfx942"), gpu("")]
    + [SimpleNamespace(platform=name, device_kind=name) for name in ("gpu", "cpu")],
    ids=str,
)
def test_other_devices_get_plain_xla(device, spec):
    assert type(chosen(spec, device)) is PlainOps


def test_a_tpu_gets_the_kernels_of_pallas(spec, monkeypatch):
    tpu = SimpleNamespace(platform="tpu", device_kind="tpu")
    assert chosen(spec, tpu).kernels == "Pallas"
    assert type(chosen(spec, tpu, dtype="fp16")) is PlainOps
    asked = InferenceConfig(dtype="fp16", kernels="pallas", replace_with_kernel_inject=True)
    with pytest.raises(dualinfer.ConfigError, match="takes no float16"):
        backend._check_kernels(asked, spec, tpu)
    monkeypatch.setattr(backend, "default_device", lambda: tpu)
    assert backend.default_dtype() == "bfloat16"


@pytest.mark.parametrize("refused", [{"replace_with_kernel_inject": False}, {"use_triton": False}])
def test_kernels_can_be_refused(refused, spec):
    assert type(chosen(spec, gpu("9.0"), **refused)) is PlainOps


def test_models_beyond_the_kernels_get_plain_xla(spec):
    layer = spec.layers[0]
    for dim in (256, 257):
        attention = replace(layer.attention, head_dim=dim, rope=None)
        own = replace(layer, attention=attention)
        assert type(chosen(replace(spec, layers=(layer, own)), gpu("9.0"))) is KernelOps
        wide = replace(spec, layers=(own, own))
        assert (unserved(wide) is None) == (dim == 256)
        assert (type(chosen(wide, gpu("9.0"))) is KernelOps) == (dim == 256)
    for embed in (norm.WIDEST, norm.WIDEST + 1):
        fits = embed == norm.WIDEST
        assert (unserved(replace(spec, embed=embed)) is None) == fits
        assert (type(chosen(replace(spec, embed=embed), gpu("9.0"))) is KernelOps) == fits


def test_without_triton_plain_xla_serves_and_says_so(spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert type(chosen(spec, gpu())) is PlainOps
    with monkeypatch.context() as patch:
        patch.setattr(backend, "default_device", gpu)
        said = backend.describe_kernels()
    assert said == "Triton is not installed (pip install triton); plain XLA"
    with pytest.raises(dualinfer.ConfigError, match="use_triton=True: Triton is not installed"):
        backend._check_kernels(REQUIRED, spec, gpu())
    monkeypatch.setattr(backend, "runs_kernels", lambda device: True)
    model = make_model("llama-gqa", vocab_size=VOCAB, **CASES["llama-gqa"])
    with dualinfer.init_inference(model, **OPTIONS) as engine:
        report = engine.report()
    assert not any("Triton" in by for by in report.ops.values())
    said = "no kernels run, plain operations serve: Triton is not installed (pip install triton)"
    assert said in report.notes


def test_required_kernels_that_cannot_run_are_an_error(spec):
    assert type(chosen(spec, gpu(), use_triton=True)) is KernelOps
    with pytest.raises(dualinfer.ConfigError, match=r"data-centre GPUs .* this is a NVIDIA L4"):
        backend._check_kernels(REQUIRED, spec, gpu("8.9", device_kind="NVIDIA L4"))
    wide = replace(spec, embed=norm.WIDEST + 1)
    with pytest.raises(dualinfer.ConfigError, match="do not serve a hidden size of"):
        backend._check_kernels(REQUIRED, wide, gpu())


def test_the_report_names_what_serves(engines):
    fast, plain = (e.report().ops for e in engines("gpt2", **CASES["gpt2"]))
    assert fast.keys() == plain.keys()
    assert {op for op, by in fast.items() if "Triton" in by} == {
        *("embed", "matmul", "rms_norm", "layer_norm", "rotary", "activation"),
        *("attention", "decode_attention", "sampling", "qk_norm", "router", "experts"),
    }
    assert not any("Triton" in by for by in plain.values())
