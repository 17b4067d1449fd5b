"""The torch engine as an nn.Module: what it takes of one, and what it refuses."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dualinfer import init_inference  # noqa: E402
from dualinfer.errors import UnsupportedError  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import random_ids  # noqa: E402

INJECT = {"replace_with_kernel_inject": True}
IDS = torch.from_numpy(random_ids(1, 6))


@pytest.fixture(scope="module", params=["fused", "module"])
def engine(request):
    with init_inference(
        make_model("llama-gqa"), dtype="bf16", **(INJECT if request.param == "fused" else {})
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.half(),
        lambda e: e.double(),
        lambda e: e.float(),
        lambda e: e.to(torch.float32),
        lambda e: e.to("cpu", torch.float16),
        lambda e: e.to("meta"),
        lambda e: e.type(torch.float16),
    ],
)
def test_casts_and_the_meta_device_are_refused(engine, change):
    before = {n: (p.dtype, p.device, p.data_ptr()) for n, p in engine.named_parameters()}
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match=r"cannot go elsewhere: torch says .*CUDA"):
            engine.to("cuda")
    with pytest.raises(UnsupportedError, match=r"made in torch\.bfloat16.*init_inference"):
        change(engine)
    after = {n: (p.dtype, p.device, p.data_ptr()) for n, p in engine.named_parameters()}
    assert after == before and engine(IDS).logits.dtype == torch.bfloat16


def test_weights_are_never_left_without_values(engine):
    before = engine(IDS).logits
    with pytest.raises(UnsupportedError, match="without values"):
        engine.to_empty(device="cpu")
    assert torch.equal(engine(IDS).logits, before)


def test_moves_to_where_it_is_change_nothing(engine):
    held = {n: (b.dtype, b.data_ptr()) for n, b in engine.module.named_buffers()}
    for moved in (engine.to("cpu"), engine.bfloat16(), engine.to(torch.bfloat16), engine.cpu()):
        assert moved is engine
    # HF's rotary frequencies are float32 in a bfloat16 engine, and stay so.
    assert {n: (b.dtype, b.data_ptr()) for n, b in engine.module.named_buffers()} == held


def test_module_is_neither_set_nor_deleted(engine):
    module = engine.module
    for other in (nn.Linear(2, 2), None, module):
        with pytest.raises(UnsupportedError, match=r"engine\.module cannot be set.*init_infer"):
            engine.module = other
    with pytest.raises(UnsupportedError, match=r"engine\.module cannot be deleted"):
        del engine.module
    assert engine.module is module and len(list(engine.children())) == 1
    engine.note = 3
    del engine.note


def test_engines_are_neither_copied_nor_pickled(engine):
    parts = [engine, engine.module] if "_FusedModule" in repr(type(engine.module)) else [engine]
    for part in parts:
        for copied in (
            copy.deepcopy,
            copy.copy,
            pickle.dumps,
            lambda e: torch.save(e, io.BytesIO()),
        ):
            with pytest.raises(
                UnsupportedError, match=r"neither copied nor pickled.*init_inference"
            ):
                copied(part)
    assert copy.deepcopy(engine.state_dict()).keys() == engine.state_dict().keys()


def test_fused_weights_are_not_written_over():
    model = make_model("llama-gqa")
    before = copy.deepcopy(model.state_dict())
    with init_inference(model, dtype="fp32", **INJECT) as engine:
        for part in (engine, engine.module):
            state = {n: torch.zeros_like(t) for n, t in part.state_dict().items()}
            with pytest.raises(UnsupportedError, match="Load them into the model, then call"):
                part.load_state_dict(state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_module_engine_loads_weights_into_its_module():
    model, other = make_model("llama-gqa"), make_model("llama-gqa")
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
        expected = other(IDS).logits
    with init_inference(model, dtype="fp32") as engine:
        engine.load_state_dict({f"module.{n}": t for n, t in other.state_dict().items()})
        assert torch.equal(engine(IDS).logits, expected)


def test_module_mode_says_what_fused_engines_alone_have():
    engine = init_inference(nn.Linear(4, 3), dtype="fp32")
    with pytest.raises(AttributeError, match=r"'reserve': this engine is in module mode"):
        engine.reserve(1, 8)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        engine.nothing  # noqa: B018
    assert engine.in_features == 4
