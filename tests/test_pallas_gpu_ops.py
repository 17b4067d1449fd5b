"""The JAX decoder on Pallas' kernels for NVIDIA's GPUs, simulated by JAX on a CPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends import jax as backend  # noqa: E402
from dualinfer.backends.jax.ops.pallas_gpu import PallasGpuOps  # noqa: E402
from dualinfer.kernels.pallas import ring, tiles  # noqa: E402
from dualinfer.model.families import describe_model  # noqa: E402
from dualinfer.model.weights import Weight  # noqa: E402
from dualinfer.quantization import Blocks  # noqa: E402
from dualinfer.quantization.quantize import SCHEMES  # noqa: E402

from .cases import make_model  # noqa: E402

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "head_dim": 128}
WIDE |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 256}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "count"), [(None, 1), (None, 3), ("int8", 3), ("int4", 1)])
def test_a_simulated_gpu_gives_what_plain_xla_gives(quant, count, monkeypatch):
    """A prompt's rows go through tiles, and so does a row of codes in blocks; others in a ring."""
    ran = set()

    def noted(kernel: Any) -> None:
        product = kernel.product

        def run(*args: Any, **how: Any) -> Any:
            ran.add(kernel)
            return product(*args, **how)

        monkeypatch.setattr(kernel, "product", run)

    noted(ring)
    noted(tiles)
    model, how = make_model("llama-gqa", **WIDE), {"sms": 2, "interpret": InterpretGPUParams()}
    ids = np.random.default_rng(3).integers(3, 256, (count, 9))

    def text() -> np.ndarray:
        with dualinfer.init_inference(model, backend="jax", dtype="bf16", quant=quant) as engine:
            return np.asarray(engine.generate(ids, max_new_tokens=3, **GREEDY))

    wanted = text()
    assert not ran
    monkeypatch.setattr(backend, "_make_ops", lambda *args: PallasGpuOps(args[3], **how))
    np.testing.assert_array_equal(text(), wanted)
    assert ran == ({ring, tiles} if count == 1 else {tiles})


@pytest.mark.parametrize(
    ("capability", "rows", "blocks"),
    [("9.0", "up to 256 rows", "up to 256 rows"), ("10.0", "a single row", None)],
)
def test_what_a_gpu_has_no_instructions_for_is_left_to_xla(capability, rows, blocks):
    """Of a device, its capability alone is read, and how many multiprocessors it has."""
    spec = describe_model(make_model("llama-gqa", **WIDE).config.to_dict())[0]
    device: Any = SimpleNamespace(platform="gpu", core_count=148, compute_capability=capability)
    ops = backend._make_pallas_ops(spec, device, None)

    def told(quant: str, width: int = 512) -> str | None:
        """How a matrix [64, width] is read."""
        scheme = SCHEMES[quant]
        data = jnp.zeros((64, scheme.code.packing.width(width)), scheme.code.stored)
        own = Blocks(1, scheme.columns or width, width)
        scale = jnp.ones((64, width // own.columns))
        weight = Weight(data, ("out", "in"), scheme, {"scale": scale}, jnp.dtype("bfloat16"), own)
        return ops.reads_codes(weight, spec, [])

    for quant, said in (("int8", rows), ("fp8_w8a8", rows), ("int4", blocks)):
        assert said is None if told(quant) is None else f", {said};" in str(told(quant)), quant
    assert told("nvfp4") is told("int8", 48) is None
