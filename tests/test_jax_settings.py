"""What a JAX program has set around an engine: meshes, guards, promotion, jit turned off."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import dualinfer  # noqa: E402
from dualinfer.cli.environment import describe_backend  # noqa: E402
from dualinfer.errors import UnsupportedError  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import random_ids, relative_rms, slow_but  # noqa: E402

OPTIONS = {"backend": "jax", "dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SETTINGS = {
    "a mesh of two": lambda: jax.set_mesh(jax.make_mesh((2,), ("b",))),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "no transfers": lambda: jax.transfer_guard("disallow"),
}


def results(model, inside):
    """Logits and text of an engine made within `inside`, where it computes as well."""
    with inside(), dualinfer.init_inference(model, **OPTIONS) as engine:
        logits = engine(random_ids(2, 9)).logits
        text = engine.generate(random_ids(2, 9).tolist(), **GREEDY)
        streamed = list(engine.stream(random_ids(1, 5), **GREEDY))
    return np.asarray(logits), np.asarray(text), np.asarray(streamed)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", slow_but(["llama-gqa"], ["llama-gqa", "gemma2"]))
def test_an_engine_works_whatever_is_set_around_it(name, setting):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    model = make_model(name)
    expected = results(model, lambda: jax.default_device(None))
    for found, wanted in zip(results(model, SETTINGS[setting]), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("error", [RuntimeError("no backend 'foo'"), AssertionError()])
def test_a_platform_that_is_not_there_is_told(error, monkeypatch):
    """As JAX raises with JAX_PLATFORMS=foo, and with cuda where there is none."""

    def local_devices(backend=None):
        raise error

    monkeypatch.setattr(jax, "local_devices", local_devices)
    why = str(error) or "a platform that was asked for is not there"
    with pytest.raises(UnsupportedError, match=f"JAX finds no device: {why}.*JAX_PLATFORMS"):
        dualinfer.init_inference(dualinfer.embedded_model(), backend="jax")
    assert dict(describe_backend("jax"))["jax devices"].startswith("none can be used: JAX finds no")


def test_without_jit_an_engine_says_so_and_apply_works():
    model, ids = make_model("llama-gqa"), random_ids(1, 7)
    with dualinfer.init_inference(model, **OPTIONS) as engine:
        expected = np.asarray(engine(ids).logits)
        with jax.disable_jit():
            for call in (lambda: engine(ids), lambda: engine.generate(ids, **GREEDY)):
                with pytest.raises(dualinfer.UnsupportedError, match=r"disable_jit.*engine\.apply"):
                    call()
            found = engine.apply(engine.params, ids)["logits"]
        assert relative_rms(np.asarray(found), expected) < 1e-5
        np.testing.assert_array_equal(np.asarray(engine(ids).logits), expected)


def test_apply_takes_tensors_wherever_the_engine_is_and_ids_come_back_there():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    ids = random_ids(2, 7)
    with (
        jax.default_device(jax.devices()[1]),
        dualinfer.init_inference(make_model("llama-gqa"), **OPTIONS) as engine,
    ):
        found = engine.apply(engine.params, torch.from_numpy(ids))["logits"]
        assert relative_rms(np.asarray(found), np.asarray(engine(ids).logits)) < 1e-5
        assert found.devices() == {jax.devices()[1]}
        with jax.default_device(jax.devices()[0]):
            assert engine.generate(ids.tolist(), **GREEDY).devices() == {jax.devices()[1]}


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_is_no_seed(make):
    with (
        dualinfer.init_inference(make_model("llama-gqa"), **OPTIONS) as engine,
        pytest.raises(dualinfer.ArgumentError, match="as keys are; expected an int"),
    ):
        engine.generate(random_ids(2, 5), do_sample=True, seed=make(5), max_new_tokens=2)
