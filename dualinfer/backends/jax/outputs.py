"""The results of forward: outputs cut back from their bucket, and the loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..base import NO_LABEL, ForwardInputs
from .executables import jit_few
from .padding import Padded, fill_up


@jit_few
def cut(
    batch: int, tokens: int, kept: int | None = None, read: int | None = None, flat: bool = False
) -> Callable[[Any], Any]:
    """Outputs without the rows and tokens that a bucket added; logits of the `kept` tokens.

    Those of an encoder have the tokens that it `read`. With `flat` there is one score of a token,
    not several.
    """

    def part(name: str, value: Any) -> Any:
        count = tokens if kept is None or name != "logits" else kept
        count = read if name.startswith("encoder_") else count
        axes = int(not (flat and name.endswith("logits")))
        return jax.tree.map(lambda x: x[(slice(batch), slice(count))[: x.ndim - axes]], value)

    return lambda outputs: {name: part(name, value) for name, value in outputs.items()}


@jax.jit
def _cross_entropy(logits: jax.Array, labels: jax.Array, count: jax.Array | None) -> jax.Array:
    """Cross-entropy float32 [] of logits [..., V], its sum divided by `count` if given."""
    real = labels != NO_LABEL
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    found = jnp.take_along_axis(scores, jnp.where(real, labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(real, found, 0).sum() / (real.sum() if count is None else count)


@partial(jax.jit, static_argnums=2)
def _loss_of_numbers(logits: jax.Array, wanted: jax.Array, several: bool) -> jax.Array:
    """Mean float32 [] over logits and `wanted` [B, labels]: of squared differences, or `several`.

    These are cross-entropies of a yes or no for each label.
    """
    x = logits.astype(jnp.float32)
    if several:
        return (jax.nn.softplus(x) - x * wanted).mean()
    return jnp.square(x - wanted).mean()


def make_loss(
    inputs: ForwardInputs, padded: Padded, results: Mapping[str, Any], logits: jax.Array | None
) -> jax.Array:
    """The loss float32 [] that labels ask for, of the results and of `logits` not cut back yet."""
    labels = inputs.labels
    assert labels is not None
    if "start_logits" in results:
        ends = results["start_logits"], results["end_logits"]
        parts = [_cross_entropy(x, labels[:, i], inputs.loss_count) for i, x in enumerate(ends)]
        return (parts[0] + parts[1]) / 2
    if inputs.loss != "classes":
        return _loss_of_numbers(results["logits"], labels, inputs.loss == "several")
    if labels.ndim == 1:
        return _cross_entropy(results["logits"], labels, inputs.loss_count)
    labels = fill_up(labels, (padded.size[0], padded.places), NO_LABEL)
    return _cross_entropy(logits, labels, inputs.loss_count)  # in a bucket, too
