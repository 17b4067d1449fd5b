"""The ways on that messages of module mode, and of engines of live modules, name work."""

import copy
import tempfile
import warnings

import accelerate
import flax
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer import DualinferError

from .ways import cases_of

IDS = np.arange(3, 12, dtype=np.int64)[None]
GIVEN = torch.from_numpy(IDS)
X = np.ones((2, 4), np.float32)
FUSED = {"replace_with_kernel_inject": True}
SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
CASES = {}
case = cases_of(CASES)


def llama() -> hf.LlamaForCausalLM:
    """A tiny Llama."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).eval()


def make(model, backend="torch", **given):
    """An engine in float32."""
    return dualinfer.init_inference(model, **{"backend": backend, "dtype": "fp32"} | given)


# --- modules of Flax ---


class Net(nn.Module):
    """A layer, statistics beside its parameters, and a decision in Python."""

    @nn.compact
    def __call__(self, x, more=False):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(8)(x))
        return x + 1 if more else x


def net():
    """It and its variables."""
    return Net(), Net().init(jax.random.key(0), X)


@case(r"has no variables\. Pass \(module, variables\), or module\.bind\(variables\)")
def modules_without_variables():
    module, variables = net()
    yield lambda: make(module, "jax")
    yield lambda: make((module, variables), "jax")(X)
    yield lambda: make(module.bind(variables), "jax")(X)


@case(r"Pass all of its collections, as \{\"params\": \.\.\., \"batch_stats\"")
def parameters_without_statistics():
    module, variables = net()
    yield lambda: make((module, {"params": variables["params"]}), "jax")(X)
    yield lambda: make((module, dict(variables)), "jax")(X)


@case("or pass that argument as a Python value: each value is compiled on its own")
def decisions_by_arrays():
    engine = make(net(), "jax")
    yield lambda: engine(X, jnp.array(True))
    yield lambda: engine(X, True)


@flax.struct.dataclass
class Kept:
    """Of an array, as JAX knows it."""

    y: jax.Array


class Odd:
    """Of an array, as JAX does not know it."""

    def __init__(self, y):
        self.y = y


@case(r"Return a dict or a tuple, or make the class a flax\.struct\.dataclass")
def results_of_odd_classes():
    class Own(nnx.Module):
        def __init__(self, kind):
            self.inner, self.kind = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), kind

        def __call__(self, x):
            return self.kind(self.inner(x))

    yield lambda: make(Own(Odd), "jax")(X)
    for kind in (Kept, lambda y: {"y": y}, lambda y: (y,)):
        yield lambda kind=kind: make(Own(kind), "jax")(X)


@case(r"Pass patterns of their paths, as injection_policy=")
def flax_modules_over_devices():
    over = {"tensor_parallel": {"tp_size": 2}}
    yield lambda: make(net(), "jax", **over)
    yield lambda: make(net(), "jax", **over, injection_policy={"*.kernel": (None, "tp")})(X)


@case("does not divide by the 2 devices along 'tp'. Split another axis of it, or none")
def axes_that_do_not_divide():
    module = nnx.Linear(4, 7, rngs=nnx.Rngs(0))

    def over(*axes):
        how = {"tensor_parallel": {"tp_size": 2}, "injection_policy": {"kernel": axes}}
        return make(module, "jax", **how)(X)

    yield lambda: over(None, "tp")
    yield lambda: over("tp", None)
    yield lambda: over(None, None)


@case("Adapters are of HF models: pass one of those, or leave it unset")
def adapters_of_flax_modules():
    module = nnx.Linear(4, 7, rngs=nnx.Rngs(0))
    with warnings.catch_warnings(action="ignore"):  # of a model without a name
        tuned = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with tempfile.TemporaryDirectory() as path:
        tuned.save_pretrained(path)
        yield lambda: make(module, "jax", adapter=path)
        yield lambda: make(llama(), "jax", adapter=path)
        yield lambda: make(module, "jax")(X)


# --- engines of JAX ---


@case(r"Turn it off around the engine; to follow a pass op by op, call engine\.apply within it")
def engines_within_disable_jit():
    engine = make(llama(), "jax")

    def within(call):
        with jax.disable_jit():
            return call()

    yield lambda: within(lambda: engine(IDS))
    yield lambda: engine(IDS)
    yield lambda: within(lambda: engine.apply(engine.params, IDS))


@case(r"Make it static: jax\.jit\(engine\.apply, static_argnames=\"output_hidden_states\"\)")
def traced_words():
    engine, ids = make(llama(), "jax"), jnp.asarray(IDS)
    yield lambda: jax.jit(engine.apply)(engine.params, ids, output_hidden_states=True)
    static = jax.jit(engine.apply, static_argnames="output_hidden_states")
    yield lambda: static(engine.params, ids, output_hidden_states=True)


# --- modules of torch ---


@case(r"Give each engine a copy of its own \(copy\.deepcopy\(model\)\), or make a new engine")
def one_module_of_two_engines():
    model = llama()
    engine = make(model)
    make(model, dtype="bf16")
    yield lambda: engine(GIVEN)
    yield lambda: make(model)(GIVEN)
    first = make(copy.deepcopy(model))
    make(copy.deepcopy(model), dtype="bf16")
    yield lambda: first(GIVEN)


@case(r"TorchScript, which torch\.compile does not take\. Make the engine of the module that was")
def compiled_scripts():
    plain = torch.nn.Linear(3, 3)
    with warnings.catch_warnings(action="ignore"):  # of what torch will give up
        traced = torch.jit.trace(plain, torch.ones(1, 3))
    yield lambda: make(traced).compile()
    engine = make(plain)
    engine.compile(backend="eager")
    yield lambda: engine(torch.ones(1, 3))


@case(r"Pass the module itself: model\._orig_mod")
def compiled_modules():
    model = torch.compile(llama(), backend="eager")
    yield lambda: make(model, **FUSED)
    yield lambda: make(model._orig_mod, **FUSED)(GIVEN)


@case(r"Pass the module itself: model\.module")
def wrapped_modules():
    model = torch.nn.DataParallel(llama())
    yield lambda: make(model, **FUSED)
    yield lambda: make(model.module, **FUSED)(GIVEN)


@case(r"bring them back: accelerate\.hooks\.remove_hook_from_module\(model, recurse=True\)")
def offloaded_modules():
    model = accelerate.cpu_offload(llama(), execution_device="cpu")
    yield lambda: make(model, **FUSED)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    yield lambda: make(model, **FUSED)(GIVEN)


@case("quantized already.*Leave it unset, or pass the module that they were made from")
def modules_that_are_quantized():
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with warnings.catch_warnings(action="ignore"):
        odd = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {torch.nn.Linear})
    yield lambda: make(odd, quant="int8")
    yield lambda: make(odd)(torch.ones(1, 4))
    yield lambda: make(plain, quant="int8")(torch.ones(1, 4))


@case(
    r"Call engine\.refresh\(\) to take the new weights\. To keep the old ones, make the engine of"
)
def weights_that_change():
    model = llama()
    engine, kept = make(model, **FUSED), make(copy.deepcopy(model), **FUSED)
    before = kept(GIVEN).logits.clone()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    yield lambda: engine(GIVEN)
    yield engine.refresh
    yield (
        lambda: (
            torch.equal(kept(GIVEN).logits, before)
            and not torch.equal(engine(GIVEN).logits, before)
        )
    )


@case(r"Load them into the model, then call engine\.refresh\(\)")
def states_of_fused_engines():
    model, other = llama(), llama()
    engine = make(model, **FUSED)
    yield lambda: engine.load_state_dict(other.state_dict())
    model.load_state_dict(other.state_dict())
    engine.refresh()
    yield lambda: torch.equal(engine(GIVEN).logits, make(other, **FUSED)(GIVEN).logits)


@case(r"Call profile_model_time\(\) first, then run the model")
def times_that_nobody_took():
    engine = make(llama())
    yield engine.model_times
    engine.profile_model_time()
    engine(GIVEN)
    yield lambda: len(engine.model_times()) == 1


@pytest.mark.parametrize("name", CASES)
def test_ways_of_modules_work(name):
    said, calls = CASES[name]
    steps = calls()
    with pytest.raises(DualinferError, match=f"(?s){said}"):
        next(steps)()
    assert [call() for call in steps if call() is False] == []
