"""Launches compile for GPUs that are not there, as Triton's launcher would compile them.

And the handler that launches them, as far as XLA calls it on a CPU.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
jax = pytest.importorskip("jax")

from dualinfer.kernels.triton import (  # noqa: E402
    ahead,
    attention,
    compiling,
    decode_attention,
    exchange,
    latent,
    linear,
    rotary,
)
from dualinfer.kernels.triton import embedding as embeddings  # noqa: E402
from dualinfer.kernels.triton import norm as norms  # noqa: E402
from dualinfer.kernels.triton.ahead import POINTER, Code  # noqa: E402
from dualinfer.kernels.triton.operands import Launch, Pointer, Recording  # noqa: E402
from dualinfer.kernels.xla import handler  # noqa: E402
from dualinfer.kernels.xla.ffi import ADDRESS, LaunchConfig, StreamGet  # noqa: E402

pytestmark = pytest.mark.xdist_group("lowering")


def recorded(dtype: str, early: bool) -> list[Launch]:
    """Launches of each kernel of a small Llama's steps, and of a GPT-J's."""
    made = Recording()

    def x(*shape: int, dtype: str = dtype) -> Any:
        return made.operand(shape, dtype)

    ids, counters = x(2, 5, dtype="int32"), x(64, dtype="int32")
    how: dict[str, Any] = {"counters": counters, "pdl": early}
    rms = linear.NormArguments("rms", x(256), None, 1e-5)
    embeddings.embed(ids, x(1000, 256), scale=2.0)
    norms.rms_norm(x(2, 256), x(256), 1e-5, residual=x(2, 256), pdl=early)
    norms.layer_norm(x(2, 256), x(256), x(256), 1e-5, pdl=early)
    norms.rms_norm(x(2, 300).narrow(1, 1, 256), x(256), 1e-5, pdl=early)  # 2 bytes off
    linear.linear(x(1, 256), x(512, 256), norm=rms, activation="silu", gated=True, **how)
    linear.linear(x(1, 256), x(1000, 256), residual=x(1, 1000), dtype="float32", **how)
    linear.linear(x(8, 256), x(512, 256), x(512), activation="gelu", **how)
    cache = x(4, 1, 64, 64), x(4, 1, 64, 64)
    turn: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 64, "pdl": early}
    turn |= {"inv_freq": x(32, dtype="float32"), "cache": cache, "slots": x(2, dtype="int32")}
    qkv = x(2, 5, 6 * 64)
    rotary.rotary_append(qkv, ids, **turn)
    q, k, v = (part.unflatten(-1, (-1, 64)) for part in qkv.split((256, 64, 64), dim=-1))
    attention.attention(q, k, v, scale=0.1, causal=True, mask=x(2, 5, dtype="bool"), pdl=early)
    attention.attention(q, k, v, scale=0.1, causal=True, window=1, softcap=9.0, pdl=early)
    decode_attention.decode_attention(
        x(4, 6 * 64), cache, x(4, dtype="int32"), heads=4, scale=0.1, **how
    )
    queries, latents = x(4, 1, 4 * 96), x(4, 64, 160)
    turn = {"heads": 4, "rank": 128, "norm": x(128), "eps": 1e-6, "cache": latents}
    turn |= {"inv_freq": x(16, dtype="float32"), "pdl": early}
    latent.turn_latents(queries, x(4, 1, 160), x(4, 1, dtype="int32"), **turn)
    given = queries, latents, x(4, dtype="int32"), x(4 * 128, 128)
    latent.decode_latents(*given, heads=4, turning=32, scale=0.1, pdl=early)
    given = x(2, 5, 4 * 96), latents, x(2, dtype="int32"), given[3]
    where = {"slots": x(2, dtype="int32"), "pdl": early}
    latent.decode_latents(*given, heads=4, turning=32, scale=0.1, **where)
    box = exchange.Mailbox(None, 3, 1 << 17, 9, x(12, dtype="int32"), order=counters)
    wide, added = x(2, 255, dtype="float32"), x(2, 255)
    exchange.sum_ranks(wide, box, x(255), added, dtype, pdl=early)
    exchange.gather_ranks(added, box, x(4, dtype="int32"), (255, 255, 200), pdl=early)
    exchange.given_up(box, pdl=early)
    return made.launches


_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "bool": "i1"}
_TYPES |= {"int32": "i32", "int64": "i64"}


def as_triton_would(launch: Launch) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes that Triton's own launcher makes of the arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    class Memory(MockTensor):
        def __init__(self, pointer: Pointer) -> None:
            import torch

            super().__init__(getattr(torch, pointer.dtype))
            self.data_ptr = lambda: (1 << 20) + pointer.offset

    backend = make_backend(GPUTarget("cuda", 90, 32))
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {n: Memory(x) if isinstance(x, Pointer) else x for n, x in launch.arguments}
    bound, specialization, options = binder(**given)
    _, signature, constants, attributes = kernel._pack_args(
        backend, {}, bound, specialization, options
    )
    # How newer versions call bool; both are loaded as bytes.
    signature = {k: "*i1" if v == "*u1" else v for k, v in signature.items()}
    return signature, constants, attributes


def compile_all() -> None:
    """Print what became of each launch as a line of JSON, and numbers of programs."""
    sources: list[Any] = []
    made = compiling.compile

    def compiled(source: Any, **how: Any) -> Any:
        sources.append(source)
        return made(source, **how)

    compiling.compile = compiled  # pyright: ignore
    for capability, dtype in ((90, "bfloat16"), (80, "float16")):
        launches = recorded(dtype, capability >= 90)
        for launch in launches:
            del sources[:]
            code = ahead.code(launch, capability)
            if capability == 90 and sources:
                source = sources[-1]
                ours = source.signature, source.constants, source.attrs
                for mine, theirs in zip(ours, as_triton_would(launch), strict=True):
                    differ = {k: (v, theirs[k]) for k, v in mine.items() if theirs[k] != v}
                    rest = {k: v for k, v in theirs.items() if k not in mine and v}
                    assert not differ and not rest, (code.name, differ, rest)
            kind = f"sm_{capability}" in code.cubin.decode("latin-1")
            print(json.dumps([code.name, capability, kind, len(code.parameters), code.threads]))
        print(json.dumps(["program", handler.program(tuple(launches), capability)]))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Of two processes, without the interpreter; the second finds the first one's code."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    found = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, __file__],
            env=environment | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        found.append([json.loads(line) for line in run.stdout.splitlines()])
    return found


def test_every_kernel_compiles_for_hopper_and_ampere(reports):
    lines = [line for line in reports[0] if line[0] != "program"]
    for capability in (80, 90):
        mine = [line for line in lines if line[1] == capability]
        assert len({name for name, *_ in mine}) == 14 and all(kind for _, _, kind, _, _ in mine)


def test_a_program_has_the_same_number_in_every_process(reports):
    numbers = [[line[1] for line in lines if line[0] == "program"] for lines in reports]
    assert numbers[0] == numbers[1] and len(set(numbers[0])) == 2
    assert all(0 <= number < 1 << 63 for number in numbers[0])


# The handler


@pytest.fixture(scope="module")
def on_cpu():
    """A function of an array and a program's number, which XLA's custom call on the CPU makes."""
    name = "dualinfer_triton_launches_on_cpu"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler._handler), platform="cpu")

    def run(number: int, x: Any) -> Any:
        results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((2,), np.int32)
        call = jax.ffi.ffi_call(name, results, has_side_effect=True)
        return jax.jit(lambda x: call(x, program=np.int64(number)))(x)

    return run


def test_an_exception_in_the_handler_is_an_error_of_jax(on_cpu):
    with pytest.raises(jax.errors.JaxRuntimeError, match="XLA gave no stream"):
        jax.block_until_ready(on_cpu(3, np.arange(4.0, dtype=np.float32)))


def test_the_handler_gives_a_program_its_buffers(on_cpu, monkeypatch):
    """XLA's inputs, then its outputs; the stream stands in, since the CPU has none."""
    number, seen = (1 << 62) + 5, []

    class Doubling:
        def run(self, stream: Any, buffers: list[int]) -> None:
            seen.append(len(buffers))
            x, y, z = (ctypes.cast(b, ctypes.POINTER(ctypes.c_float)) for b in buffers)
            for i in range(4):
                y[i] = 2 * x[i]
            ctypes.cast(z, ctypes.POINTER(ctypes.c_int32))[1] = 7

    original = handler._api
    monkeypatch.setattr(
        handler,
        "_api",
        lambda frame, n: (lambda _: 0) if n == handler._STREAM_GET else original(frame, n),
    )
    monkeypatch.setitem(handler._programs, number, Doubling())
    doubled, other = on_cpu(number, np.arange(4.0, dtype=np.float32))
    np.testing.assert_array_equal(doubled, [0, 2, 4, 6])
    assert seen == [3] and int(other[1]) == 7
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: 12"):
        jax.block_until_ready(on_cpu(12, np.arange(4.0, dtype=np.float32)))


STREAM = 77
_PASSED = (ADDRESS, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ADDRESS, ADDRESS, ADDRESS)
SCALED = Code(
    "scaled",
    b"scaled's cubin",
    threads=64,
    shared=50 << 10,
    parameters=(("x", POINTER), ("n", "i32"), ("far", "i64"), ("by", "fp32"), ("out", POINTER)),
)


class Driver:
    """CUDA's, as the handler calls it, of one kernel: out[i] = by * x[i] for each i of a grid."""

    def __init__(self) -> None:
        self.device, self.answer = 0, 0
        self.calls: list[Any] = []
        self.launched: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """A call of no other effect; what it makes has the number of the call."""
        if not name.startswith("cu") or name == "cuFuncLoad":
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if hasattr(arguments[0], "_obj"):
                arguments[0]._obj.value = 1000 + len(self.calls)
            given = (x.value if hasattr(x, "value") else x for x in arguments)
            self.calls.append((name, *(x for x in given if not hasattr(x, "_obj"))))
            return self.answer

        return call

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = self.device
        return 0

    def cuLaunchKernelEx(self, at: Any, function: Any, pointers: Any, extra: Any) -> int:
        config: LaunchConfig = at._obj
        kinds = enumerate(_PASSED)
        x, n, far, by, out, *scratch = (kind.from_address(pointers[i]).value for i, kind in kinds)
        assert scratch == [None, None] and extra is None
        early = [config.attributes[i].id for i in range(config.count)]
        grid, block = list(config.grid), list(config.block)
        self.launched.append((grid, block, config.shared, config.stream, early, n, far))
        given, made = (ctypes.cast(a, ctypes.POINTER(ctypes.c_float)) for a in (x, out))
        for i in range(grid[0]):
            made[i] = by * given[i]
        return self.answer

    def named(self, name: str) -> list[Any]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def driver(monkeypatch):
    """In CUDA's place, with a stream in place of XLA's and with no program made before."""
    made, original = Driver(), handler._api

    def stream(at: int) -> int:
        StreamGet.from_address(at).stream = STREAM
        return 0

    for function in (handler._function, handler._allow_shared):
        function.cache_clear()
    monkeypatch.setattr(handler, "_cuda", lambda: made)
    monkeypatch.setattr(handler, "begin", lambda *_: None)
    monkeypatch.setattr(handler, "code", lambda launch, _: launch.kernel)
    monkeypatch.setattr(handler, "_source", lambda kernel: repr(kernel).encode())
    monkeypatch.setattr(handler, "_programs", {})
    monkeypatch.setattr(handler, "_finished", set())
    monkeypatch.setattr(handler, "_loaded", handler.defaultdict(set))
    monkeypatch.setattr(
        handler, "_api", lambda f, n: stream if n == handler._STREAM_GET else original(f, n)
    )
    yield made
    for function in (handler._function, handler._allow_shared):
        function.cache_clear()


def scaled(x: tuple[int, int], out: tuple[int, int], grid: int, by: float, **facts: Any) -> Launch:
    """A launch from and to buffers with offsets."""
    named = {"x": Pointer(*x, "float32"), "BLOCK": 16, "n": -5, "far": 1 << 40, "by": by}
    named["out"] = Pointer(*out, "float32")
    how = {"kernel": SCALED, "grid": (grid, 3, 2), "options": (), "early": False} | facts
    return Launch(arguments=tuple(named.items()), **how)


def test_a_launch_has_its_buffers_numbers_and_grid(on_cpu, driver):
    """Two in their order, the second one early; each run has buffers of its own."""
    first = scaled((0, 4), (1, 4), 3, 2.0)
    number = handler.program((first, scaled((1, 12), (1, 0), 1, 10.0, early=True)), 90)
    for x in (np.arange(4), np.arange(4) + 5):
        found = on_cpu(number, x.astype(np.float32))[0]
        np.testing.assert_array_equal(found, [20 * x[3], *(2 * x[1:])])
    passed = [[64, 1, 1], SCALED.shared, STREAM]
    one = [3, 3, 2], *passed, [], -5, 1 << 40
    other = [1, 3, 2], *passed, [handler._SERIALIZATION], -5, 1 << 40
    assert driver.launched == [one, other] * 2
    assert driver.named("cuLibraryLoadData") == [(SCALED.cubin, None, None, 0, None, None, 0)]
    assert [name for _, name in driver.named("cuLibraryGetKernel")] == [b"scaled"]
    driver.device = 1
    jax.block_until_ready(on_cpu(number, np.zeros(4, np.float32)))
    asked = driver.named("cuKernelSetAttribute")
    assert [(call[0], call[1], call[3]) for call in asked] == [
        (8, SCALED.shared, n) for n in (0, 1)
    ]
    driver.answer = 700
    with pytest.raises(jax.errors.JaxRuntimeError, match="driver answered 700"):
        jax.block_until_ready(on_cpu(number, np.zeros(4, np.float32)))


def test_programs_that_differ_have_other_numbers(driver):
    """An executable that XLA has kept would else run another one."""
    launches = [
        one := scaled((0, 4), (1, 4), 3, 2.0),
        scaled((0, 4), (1, 4), 2, 2.0),
        scaled((0, 4), (1, 4), 3, 2.5),
        scaled((0, 4), (1, 8), 3, 2.0),
        scaled((0, 4), (2, 4), 3, 2.0),
        one._replace(grid=(3, 3, 1)),
        one._replace(early=True),
        one._replace(kernel=SCALED._replace(cubin=b"of another kernel")),
        one._replace(options=(("num_warps", 8),)),
    ]
    programs = [(launch,) for launch in launches] + [(launches[0],) * 2, tuple(launches[:2])]
    numbers = [handler.program(program, 90) for program in programs]
    assert len({*numbers}) == len(numbers)
    assert [handler.program(program, 90) for program in programs] == numbers


def test_code_is_loaded_for_each_device_once_before_a_run(driver):
    """That of programs which are finished: a run does not wait for the kernels of another step."""
    with handler.noted() as numbers:
        handler.program((scaled((0, 4), (1, 4), 3, 2.0),), 90)
        handler.program((scaled((0, 4), (1, 4), 2, 2.0),), 90)
    handler.finish(numbers[:1])
    for devices, loaded in (((0,), [0]), ((0,), [0]), ((0, 2), [0, 2])):
        handler.load(devices)
        assert [device for *_, device in driver.named("cuDevicePrimaryCtxRetain")] == loaded
        for name in ("cuCtxPushCurrent_v2", "cuKernelGetFunction", "cuCtxPopCurrent_v2"):
            assert len(driver.named(name)) == len(loaded)
        assert driver.named("cuDevicePrimaryCtxRelease_v2") == [(n,) for n in loaded]
    handler.program((scaled((0, 4), (1, 4), 1, 2.0),), 90)  # a new one
    driver.answer = 2
    with pytest.raises(RuntimeError, match="driver answered 2"):
        handler.load((0,))
    driver.answer = 0
    handler.load((0,))
    assert len(driver.named("cuCtxPopCurrent_v2")) == 3


def test_threads_make_code_and_who_needs_it_waits(monkeypatch):
    """Once for launches that differ in their buffers; what failed is made anew."""
    go, made = threading.Event(), []

    def compiled(kind: ahead._Kind) -> Code:
        made.append(kind.options)
        assert go.wait(60)
        if len(made) == 1:
            raise ValueError("a first time")
        return SCALED

    monkeypatch.setattr(ahead, "_compiled", compiled)
    monkeypatch.setattr(ahead, "_codes", {})
    one, same = scaled((0, 0), (1, 0), 3, 2.0), scaled((5, 0), (2, 0), 9, 2.0, early=True)
    ahead.begin([one, same], 90)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ahead.code, one, 90)
        go.set()
        with pytest.raises(ValueError, match="a first time"):
            waiting.result(60)
    ahead.begin([one], 90)
    assert ahead.code(same, 90) is ahead.code(one, 90) is SCALED and len(made) == 2


if __name__ == "__main__":
    compile_all()
