"""Several JAX processes that share a model: two real ones on this host, of two virtual CPUs each.

Both are started once and go through every scene; a test looks at what they said of one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .checkpoints import write_llama
from .ranks import free_port, listeners

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")

pytestmark = pytest.mark.xdist_group("processes")  # which are started once

ROOT = Path(__file__).parents[1]
WORLD, VOCAB, PATIENCE = 2, 131, 180
TWO = "--xla_force_host_platform_device_count=2"  # the last one counts
OPTIONS: dict[str, Any] = {"backend": "jax", "dtype": "fp32", "kernel_inject": True}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
SAMPLED: dict[str, Any] = GREEDY | {"do_sample": True, "top_k": 0}
LOOPBACK_6 = "0" * 16 + "FFFF00000100007F"  # the same in /proc/net/tcp6
IDS = np.random.default_rng(1).integers(3, VOCAB, (2, 7))


def make(model: Any, **tp: Any) -> Any:
    import dualinfer

    return dualinfer.init_inference(model, tensor_parallel={"timeout": 150, **tp}, **OPTIONS)


def make_module() -> Any:
    from flax import nnx

    class Mlp(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up, self.down = nnx.Linear(7, 12, rngs=rngs), nnx.Linear(12, 5, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.down(nnx.relu(self.up(x))))

    return Mlp()


def error_of(call: Any) -> str:
    """The kind and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# What each process does; scenes run in this order.


def scene_a_device_of_each(me: int, folder: str) -> Any:
    devices = [next(d for d in jax.devices() if d.process_index == p) for p in range(WORLD)]
    mesh = jax.sharding.Mesh(np.array(devices), ("model",))
    with make(folder, mesh=mesh, axis="model") as engine:
        drawn = np.asarray(engine.generate(IDS, **SAMPLED, seed=None))
        return answers(engine, me, SAMPLED | {"seed": 3}) | {"drawn": drawn.tolist()}


def scene_all_devices(me: int, folder: str) -> Any:
    with make(folder, tp_size=4) as engine:
        streamed = list(engine.stream(IDS[:1], **GREEDY))
        said = {"streamed": streamed, "interrupted": interrupted(engine, me)}
        return answers(engine, me, GREEDY) | said | {"listens on": listeners()}


def interrupted(engine: Any, me: int) -> str:
    """What forward raises where process 1 is interrupted while it prepares the inputs."""
    from dualinfer.engine import readers

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    original = readers.make_forward_inputs
    try:
        if me == 1:
            readers.make_forward_inputs = interrupt
        return error_of(lambda: engine(IDS))
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    finally:
        readers.make_forward_inputs = original


def answers(engine: Any, me: int, options: dict[str, Any]) -> dict[str, Any]:
    logits = engine(IDS).logits
    text = engine.generate(IDS if me == 0 else None, **options)
    report = engine.report()
    return {
        "logits": np.asarray(logits).tolist(),
        "text": np.asarray(text).tolist(),
        "forward of others": error_of(lambda: engine(IDS + me)),
        "generate of others": error_of(lambda: engine.generate(IDS, max_new_tokens=3 + me)),
        "device": str(engine.device),
        "report": report.device,
        "bytes": report.parameter_bytes,
    }


def scene_own_devices(me: int, folder: str) -> Any:
    with make(folder, tp_size=2) as engine:
        return [np.asarray(engine(IDS[me : me + 1]).logits).tolist(), engine.report().device]


def scene_a_flax_module(me: int, folder: str) -> Any:
    import dualinfer

    policy = {"up.kernel": (None, "tp"), "down.kernel": ("tp", None)}
    tp = {"tp_size": 4, "timeout": 60}
    options = {"backend": "jax", "dtype": "fp32", "injection_policy": policy}
    with dualinfer.init_inference(make_module(), tensor_parallel=tp, **options) as engine:
        x = IDS.astype(np.float32) / VOCAB
        return [np.asarray(engine(x)).tolist(), error_of(lambda: engine(x + me))]


def scene_refusals(me: int, folder: str) -> Any:
    return [
        error_of(lambda: make(folder, tp_size=3)),
        error_of(lambda: make(folder, tp_size=4, axis="xy"[me])),
        error_of(lambda: make(folder if me == 0 else folder + "-gone", tp_size=4)),
    ]


def scene_a_process_that_ends(me: int, folder: str) -> Any:
    engine = make(folder, tp_size=4, timeout=2)
    if me == 1:
        os._exit(0)
    return error_of(lambda: engine(IDS))


SCENES = {name: scene for name, scene in globals().items() if name.startswith("scene_")}


def work(me: int, port: str, folder: str) -> None:
    """One process: every scene, and what it gave as a line of JSON."""
    here = f"127.0.0.1:{port}"
    jax.distributed.initialize(here, WORLD, me, coordinator_bind_address=here)
    for name, scene in SCENES.items():
        print(json.dumps([name, scene(me, folder)]), flush=True)
    os._exit(0)  # the other one is gone, so that jax.distributed cannot be shut down in order


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each process said of a scene: said[rank][scene]."""
    folder = write_llama(tmp_path_factory.mktemp("llama"), VOCAB)
    port = str(free_port())
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {TWO}",
    }
    command = [sys.executable, "-m", "tests.test_processes_jax"]
    outputs = [folder / f"output-{rank}" for rank in range(WORLD)]
    started = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            arguments = [*command, str(rank), port, str(folder)]
            environment = os.environ | variables
            process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
            started.append(process)
    for process in started:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    found = []
    for output in outputs:
        text = output.read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('["scene')]
        assert len(lines) >= len(SCENES) - 1, text[-5000:]
        found.append({name.removeprefix("scene_"): result for name, result in lines})
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The answers of a single process with one device."""
    with make(write_llama(tmp_path_factory.mktemp("llama"), VOCAB)) as engine:
        return SimpleNamespace(
            logits=np.asarray(engine(IDS).logits),
            sampled=np.asarray(engine.generate(IDS, **SAMPLED, seed=3)),
            greedy=np.asarray(engine.generate(IDS, **GREEDY)),
            bytes=engine.report().parameter_bytes,
        )


@pytest.mark.parametrize("scene", ["a_device_of_each", "all_devices"])
def test_answers_are_those_of_one_process(scene, said, alone):
    text = alone.sampled if scene == "a_device_of_each" else alone.greedy
    for process in said:
        found = process[scene]
        np.testing.assert_allclose(found["logits"], alone.logits, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["text"], text)
        assert found.get("streamed", text[0, 7:].tolist()) == text[0, 7:].tolist()
        assert alone.bytes / 4 < found["bytes"] < alone.bytes


def test_draws_are_those_of_the_first_process(said):
    first, second = (process["a_device_of_each"] for process in said)
    assert first["drawn"] == second["drawn"] != first["text"]


def test_each_process_hands_out_on_its_own_device(said):
    first, second = (process["all_devices"] for process in said)
    assert first["device"] != second["device"] and first["report"] == second["report"]
    assert len(first["report"].split(",")) == 4


def test_different_calls_are_refused_in_both(said):
    for process in said:
        found = process["all_devices"]
        for call, what in (
            ("forward", "arguments of forward"),
            ("generate", "arguments of generate"),
        ):
            message = found[f"{call} of others"]
            assert message.startswith("DistributedError") and what in message
            assert "rank 1 from rank 0" in message


def test_an_interrupt_of_one_process_is_told_and_leaves_the_engine_to_both(said):
    told, own = (process["all_devices"]["interrupted"] for process in said)  # answers came after
    assert own == "KeyboardInterrupt"
    assert told.startswith("DistributedError") and "rank 1: KeyboardInterrupt" in told


def test_processes_of_one_host_listen_on_the_loopback_alone(said):
    """As docs/many-devices.md says to start them."""
    first, second = (set(process["all_devices"]["listens on"]) for process in said)
    assert "0100007F" in first and first | second <= {"0100007F", LOOPBACK_6}


def test_as_few_devices_as_a_process_has_are_its_own(said, alone):
    for rank, process in enumerate(said):
        logits, device = process["own_devices"]
        np.testing.assert_allclose(logits, alone.logits[rank : rank + 1], rtol=1e-4, atol=1e-5)
        assert len(device.split(",")) == 2
    assert said[0]["own_devices"][1] != said[1]["own_devices"][1]


def test_a_flax_module_is_shared(said):
    module = make_module()
    module.eval()
    expected = module(IDS.astype(np.float32) / VOCAB)
    for process in said:
        result, refused = process["a_flax_module"]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
        assert refused.startswith("DistributedError") and "differ" in refused


def test_what_cannot_be_is_refused_in_both(said):
    for rank, process in enumerate(said):
        size, axis, folder = process["refusals"]
        assert size.startswith("ConfigError") and "2 cpu devices in this process" in size
        assert "and 4 in all 2" in size
        assert axis.startswith("ConfigError") and "process 1" in axis and "'axis': 'y'" in axis
        kind = "CheckpointNotFoundError" if rank else "DistributedError"
        assert folder.startswith(kind) and "llama" in folder


def test_a_process_that_ends_is_told_within_the_timeout(said):
    message = said[0]["a_process_that_ends"]
    assert message.startswith("DistributedError") and "Process 1" in message
    assert "within 2 seconds, or is gone" in message and "a_process_that_ends" not in said[1]


if __name__ == "__main__":
    work(int(sys.argv[1]), *sys.argv[2:4])
