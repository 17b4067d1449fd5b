"""A page of user code for `make lint`: pyright reads it strictly, and nobody runs it.

Each line that is wrong carries the error that pyright must tell; one that it does not is an error.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnknownMemberType=false

from typing import Any, assert_type

import jax
import numpy as np
import torch

import dualinfer
from dualinfer import ConfigError, InferenceConfig, JaxEngine, TorchEngine

HELLO = [{"role": "user", "content": "Hello"}]


def on_torch(folder: str) -> list[str]:
    engine = dualinfer.init_inference(
        folder,
        backend="torch",
        dtype=torch.bfloat16,
        tensor_parallel={"tp_size": 2},
        quant={"scheme": "int4", "weight": {"group_size": 64}},
    )
    assert_type(engine, TorchEngine)
    assert_type(engine.generate([[1, 2], [3]], max_new_tokens=4), torch.Tensor)
    assert_type(engine.generate(torch.tensor([[1]]), num_return_sequences=2), torch.Tensor)
    assert_type(engine.generate(return_dict_in_generate=True), Any)
    ids: np.ndarray = engine.generate(np.array([[1, 2]]), do_sample=True, seed=3)
    vectors: np.ndarray = engine.embed(["one", "two"], normalize=True)
    print(ids.shape, vectors.shape, engine.device.type, engine.dtype.itemsize)
    print(sum(parameter.numel() for parameter in engine.eval().parameters()))
    assert_type(engine.generate_text("a", num_return_sequences=2), str | list[str])
    return engine.generate_text(["one", "two"], max_new_tokens=8)


def on_jax(folder: str, config: InferenceConfig) -> str:
    with dualinfer.init_inference(folder, config, "jax") as engine:
        assert_type(engine, JaxEngine)
        assert_type(engine.params, dict[str, Any])
        assert_type(engine.generate([1, 2]), jax.Array)
        print(engine.apply(engine.params, [[1, 2]]).logits)
        for piece in engine.stream_chat(HELLO, max_new_tokens=8):
            print(piece.strip(), end="")
        assert_type(engine.chat([HELLO, HELLO]), list[str])
        return engine.chat(HELLO, temperature=0.5, template_options={"enable_thinking": False})


def on_either(folder: str, backend: str) -> str:
    engine = dualinfer.init_inference(folder, backend=backend, kv_cache_dtype="fp8", adapter="a")
    try:
        print(engine.report().mode)
        return engine.generate_text("a")
    except ConfigError:
        return ""
    finally:
        engine.close()


def mistakes(engine: JaxEngine) -> None:
    dualinfer.init_inference("a", backend="jax", dtyp="bf16")  # pyright: ignore[reportCallIssue]
    dualinfer.init_inference("a", tp={"size": 2})  # pyright: ignore[reportArgumentType]
    dualinfer.init_inference("a", quant="int3")  # pyright: ignore[reportArgumentType]
    engine.aply()  # pyright: ignore[reportAttributeAccessIssue]
    engine.generate_text("a", max_new_token=8)  # pyright: ignore[reportCallIssue]
    engine.generate_text(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
