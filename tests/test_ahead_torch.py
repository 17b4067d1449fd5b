"""Kernels that torch's first passes launch are known before these run, as on a GPU with no disk."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("lowering")


class Driver:
    """What Triton's launcher asks before it compiles, of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def first_calls() -> None:
    """Print what first calls know ahead; each ends with its first launch, which needs a GPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers import LlamaConfig, LlamaForCausalLM
    from triton import knobs
    from triton.runtime.driver import driver

    import dualinfer
    from dualinfer.backends import torch as backend
    from dualinfer.backends.torch.ops.kernels import KernelOps
    from dualinfer.kernels.triton import ahead
    from dualinfer.kernels.triton.processes import Compilers

    wanted: list[str] = []

    class Few(Compilers):
        """Of which a process compiles one kernel, so that this ends soon."""

        def compile(self, line: bytes, least: int = 1) -> bool:
            wanted.append(line.decode().split("'")[3])
            return wanted[-1] == "_embed_kernel" and super().compile(line, least)

    compilers = Few(4)
    driver.set_active(Driver())
    ahead._compilers = lambda: compilers  # pyright: ignore[reportAttributeAccessIssue]
    backend._make_ops = lambda config, spec, device, split: KernelOps(device)
    backend.prepare = lambda device: None
    launched: list[Any] = []
    knobs.compilation.listener = lambda **how: launched.append(
        [how["src"].name, how["cache_hit"]] if type(how["src"]).__name__ == "ASTSource" else None
    )
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    engine = dualinfer.init_inference(
        model, backend="torch", dtype="bfloat16", replace_with_kernel_inject=True
    )
    ahead._new_here.set()
    calls: Any = engine, engine.generate
    kinds, errors = [], []
    for call in calls:
        wanted.clear()
        try:
            call([[5, 6, 7]])
        except AttributeError as error:
            errors.append(str(error))
        for coming in ahead._expected.values():
            coming.result()
        kinds.append(sorted({*wanted}))
    gc.collect()
    left = sum(isinstance(x, FakeTensor) for x in gc.get_objects())
    runner: Any = engine.runner
    cache = sum(float(x.abs().sum()) for own in runner._slots.cache._layers for x in own[:2])
    print(json.dumps([kinds, [x for x in launched if x], compilers.usable, left, cache, errors]))


def test_first_calls_know_their_kernels_and_leave_nothing_behind(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    command = [sys.executable, __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    (whole, more), launched, usable, left, cache, errors = json.loads(run.stdout.splitlines()[-1])
    assert {"_embed_kernel", "_norm_kernel", "attention_kernel"} <= {*whole}
    assert {"_rotary_append_kernel", "decode_attention_kernel", "matvec_kernel"} <= {*more}
    assert {"_choose_kernel", "_best_kernel"} <= {*more}  # of steps, and of draws
    # Triton's own launcher finds by its key what a process has compiled.
    assert launched == [["_embed_kernel", True]] * 2 and usable and len(errors) == 2
    assert left == 0 and cache == 0


if __name__ == "__main__":
    first_calls()
