"""Routers and experts of both backends' ops: by kernels, interpreted, against plain ones."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from dualinfer.backends.jax.ops.plain import PlainOps as JaxPlainOps  # noqa: E402
from dualinfer.backends.torch.ops.kernels import KernelOps  # noqa: E402
from dualinfer.backends.torch.ops.plain import PlainOps  # noqa: E402
from dualinfer.backends.torch.ops.split import SplitKernelOps  # noqa: E402
from dualinfer.blocks.clamped import Clamped  # noqa: E402
from dualinfer.blocks.weighed_inputs import WeighedInputs  # noqa: E402
from dualinfer.decoder.mixture import mixture_of  # noqa: E402
from dualinfer.decoder.run import Mixers, Pass, Run  # noqa: E402
from dualinfer.kernels.triton.launch import INTERPRETED  # noqa: E402
from dualinfer.kernels.triton.tuning import Configurations  # noqa: E402
from dualinfer.model.spec import Attention, Experts, Layer, Mlp, Norm, Router  # noqa: E402
from dualinfer.model.weights import Weight  # noqa: E402
from dualinfer.ops.contract import EVERY, NormOf  # noqa: E402

from .kernels.jax_ops import interpreted_ops  # noqa: E402
from .models import relative_rms, slow_but  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the interpreter's"),
    pytest.mark.filterwarnings("ignore:.*encountered in .*:RuntimeWarning"),
]
E, F, X = 24, 20, 6
SIGMOID = Router(2, "sigmoid", 3, 2, "two", 1e-20, 2.5)
LAYERS = {
    "gpt-oss": Experts(
        X, Mlp(F, "quick_gelu", True), Router(3, "chosen"), mixing=Clamped(1.0, 1.0)
    ),
    "qwen2-moe": Experts(X, Mlp(F, "silu", True), Router(2, "softmax"), shared=28),
    "deepseek": Experts(X, Mlp(F, "silu", True), SIGMOID, shared=12),
    "llama4": Experts(X, Mlp(F, "silu", True), Router(2, "gates"), mixing=WeighedInputs()),
    "deepspeed": Experts(X, Mlp(F, "gelu_tanh", False), Router(2, over_sum=0.0), blended=True),
}
FEW = [("gpt-oss", 2), ("qwen2-moe", 2), ("deepseek", 6)]


def weights(layer: Experts, put: Any) -> dict[str, Any]:
    """Of a layer, with biases where they belong and a bias of the choice as DeepSeek's."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return put(random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5))

    s, wide = layer.shared, F * (1 + layer.gated)
    found = {
        "router.weight": Weight(draw(layer.choices, E), ("choices", "embed")),
        "experts.up.weight": Weight(draw(X, wide, E), ("experts", "gate+up", "embed")),
        "experts.down.weight": Weight(draw(X, E, F), ("experts", "embed", "ffn")),
        "mlp_norm.weight": draw(E),
    }
    if isinstance(layer.mixing, Clamped) or layer.blended:
        found |= {"experts.up.bias": draw(X, wide), "experts.down.bias": draw(X, E)}
    if isinstance(layer.mixing, Clamped):
        found["router.bias"] = draw(X)
    if layer.blended:
        found |= {"sides.weight": Weight(draw(2, E), ("sides", "embed")), "sides.bias": draw(2)}
    if layer.router.groups > 1:
        found["router.choice_bias"] = draw(1, X)  # as ERNIE's; the others have no first axis
    if s:
        found["shared.up.weight"] = Weight(draw(2 * s, E), ("gate+up", "embed"))
        found["shared.down.weight"] = Weight(draw(E, s), ("embed", "ffn"))
    if s == 28:  # Qwen2's
        found["shared.gate.weight"] = Weight(draw(1, E), ("one", "embed"))
    return found


def block(
    mixture: Experts, w: dict[str, Any], ops: Any, x: Any, norm: NormOf, residual: Any
) -> Any:
    """What a mixture makes of norm(x), and the residual, as a layer's only part."""
    layer = Layer(Attention(1, 1, E, 1.0), mixture, Norm("rms", 1e-5), "pre")
    run = Run(layer, w, 0, ops, Pass(Mixers(None), EVERY, True, {}, []))
    return mixture_of(mixture)(run, x, norm, residual, True)


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("name", slow_but([n for n in LAYERS if n != "deepspeed"], LAYERS))
def test_kernels_give_what_plain_ops_give(name, tokens, backend):
    layer = LAYERS[name]
    if backend == "torch":
        put, fast, plain = torch.tensor, KernelOps(torch.device("cpu")), PlainOps()
    else:
        put, fast, plain = jax.numpy.asarray, interpreted_ops(), JaxPlainOps()
        fast = fast.using(fast.make_scratch(1))
    w = weights(layer, put)
    x = np.random.default_rng(1).standard_normal((2, tokens // 2, E), np.float32)
    norm = NormOf(Norm("rms", 1e-5), w["mlp_norm.weight"], None)

    def run(ops: Any) -> np.ndarray:
        return np.asarray(block(layer, w, ops, put(x), norm, put(x)))

    found, wanted = run(fast), run(plain)
    assert relative_rms(found, wanted) < 1e-6
    assert all("Triton" in fast.implementations[op] for op in ("router", "experts"))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(("name", "tokens"), FEW)
def test_biases_and_residuals_are_added_once_after_the_sum_over_devices(name, tokens, backend):
    layer, split = (
        LAYERS[name],
        SimpleNamespace(
            sum=lambda y: y * 2, most=lambda a: a, plan=None, own_experts=lambda count: None
        ),
    )
    if backend == "torch":
        put, plain = torch.tensor, PlainOps()
        fast: Any = SplitKernelOps(torch.device("cpu"), Configurations(), split, None)
    else:
        put, plain, fast = jax.numpy.asarray, JaxPlainOps(), interpreted_ops()
        fast = fast.using(fast.make_scratch(1))
    plain.split = fast.split = split
    w = weights(layer, put)
    x = put(np.random.default_rng(1).standard_normal((1, tokens, E), np.float32))
    norm = NormOf(Norm("rms", 1e-5), w["mlp_norm.weight"], None)
    found, wanted = (np.asarray(block(layer, w, ops, x, norm, x)) for ops in (fast, plain))
    assert relative_rms(found, wanted) < 1e-6


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(("name", "tokens"), [*FEW, ("deepspeed", 2)])
def test_a_device_with_some_of_the_experts_gives_what_plain_ops_give(name, tokens, backend):
    layer, own = LAYERS[name], (1, 5)
    spec = SimpleNamespace(all_layers=[SimpleNamespace(experts=X)])
    split: Any = SimpleNamespace(sum=lambda y: y * 1.5, most=lambda a: a)
    split.plan = SimpleNamespace(table=SimpleNamespace(spec=spec))
    if backend == "torch":
        put, plain = torch.tensor, PlainOps()
        split.own_experts = lambda count: own
        fast: Any = SplitKernelOps(torch.device("cpu"), Configurations(), split, None)
    else:
        put, plain, fast = jax.numpy.asarray, JaxPlainOps(), interpreted_ops()
        split.own_experts = lambda count: jax.numpy.asarray(own)
        fast = fast.using(fast.make_scratch(1))
    plain.split = fast.split = split
    w = weights(layer, put)
    for part in ("up.weight", "down.weight", "up.bias"):
        held = w.get(f"experts.{part}")
        if held is not None:
            bare = held.data if isinstance(held, Weight) else held
            cut = bare[slice(*own)]
            w[f"experts.{part}"] = Weight(cut, held.axes) if isinstance(held, Weight) else cut
    x = put(np.random.default_rng(1).standard_normal((1, tokens, E), np.float32))
    norm = NormOf(Norm("rms", 1e-5), w["mlp_norm.weight"], None)
    found, wanted = (np.asarray(block(layer, w, ops, x, norm, x)) for ops in (fast, plain))
    assert relative_rms(found, wanted) < 1e-6


def test_an_expert_of_all_tokens_has_no_launches_of_its_own_for_few(monkeypatch):
    ops, layer = KernelOps(torch.device("cpu")), LAYERS["qwen2-moe"]
    w = weights(layer, torch.tensor)
    monkeypatch.setattr(ops, "linear", None)
    x = torch.ones(2, 1, E)
    y = block(layer, w, ops, x, NormOf(Norm("rms", 1e-5), w["mlp_norm.weight"], None), x)
    assert y.shape == x.shape
