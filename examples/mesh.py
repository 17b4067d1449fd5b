"""A model split over a mesh of JAX devices, called as a pure function: `python examples/mesh.py`.

Needs four devices: four GPUs, or a CPU that acts as four (JAX_PLATFORMS=cpu chooses the CPU).
"""

import argparse
import os

argparse.ArgumentParser(description="Score rows over a mesh of four devices.").parse_args()
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dualinfer

# Weights are split over "model", and rows of the batch over "data".
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
engine = dualinfer.init_inference(
    dualinfer.embedded_model(),
    backend="jax",
    dtype="float32",
    tensor_parallel={"mesh": mesh, "axis": "model"},
)


@jax.jit
def score(params, tokens):
    """The mean log-probability of each row's tokens."""
    scores = jax.nn.log_softmax(engine.apply(params, tokens).logits[:, :-1])
    return jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0].mean(-1)


rows = jnp.arange(2, 66).reshape(4, 16)
rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
scores = score(engine.params, rows)
print("scores:", ", ".join(f"{x:.3f}" for x in scores.tolist()))
print("a weight lies so:", engine.params["layers"][0]["qkv"]["weight"].sharding.spec)
