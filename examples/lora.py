"""A text learned by LoRA, with gradients of `engine.apply`: `python examples/lora.py [TEXT]`."""

import argparse

import jax
import jax.numpy as jnp
import optax  # comes with flax, which the JAX backend needs

import dualinfer

parser = argparse.ArgumentParser(description="Teach a text to the embedded model by LoRA.")
parser.add_argument("text", nargs="?", default="def greet(name):\n    print('Bonjour, ' + name)\n")
text, optimizer = parser.parse_args().text, optax.adam(0.01)
# Plain XLA has derivatives, kernels have none.
how = {"backend": "jax", "dtype": "float32", "replace_with_kernel_inject": False}
engine = dualinfer.init_inference(dualinfer.embedded_model(), **how)
ids = jnp.array([engine.tokenizer(text)["input_ids"]])


@jax.jit
def step(lora, state, params):
    def loss(lora):  # with B times A added to the weights that make q, k and v
        layers = [dict(layer) for layer in params["layers"]]
        for layer, a, b in zip(layers, *lora, strict=True):
            layer["qkv"] = {"weight": layer["qkv"]["weight"] + b @ a}
        logits = engine.apply(params | {"layers": layers}, ids).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(lora)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(lora, updates), state, value


count, (outputs, inputs) = len(engine.params["layers"]), engine.model.layers[0].qkv.weight.shape
drawn = jax.random.normal(jax.random.key(0), (count, 4, inputs)) / inputs**0.5
state = optimizer.init(lora := (drawn, jnp.zeros((count, outputs, 4))))
for i in range(20):
    lora, state, value = step(lora, state, engine.params)
    print(f"step {i}: loss {value:.3f}")
