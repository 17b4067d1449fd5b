"""Live models that change under their engine: seen on the next call, and followed by refresh()."""

import copy
import gc
import warnings
import weakref

import jax
import numpy as np
import peft
import pytest
import torch
from torch import nn

import dualinfer
from dualinfer import ModelError, StaleWeightsError, UnsupportedError
from dualinfer.checkpoint.sources import TorchSource
from dualinfer.errors import DistributedError
from dualinfer.model.live import Watch

from .cases import make_model
from .cases.decoders import ALL
from .models import BACKENDS, random_ids, relative_rms
from .test_engine import make_module

pytestmark = pytest.mark.usefixtures("greedy")

NAME = "llama-gqa"
IDS = random_ids(2, 7)
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def make_engine(model, backend, dtype="fp32", **fields):
    return dualinfer.init_inference(
        model, backend=backend, dtype=dtype, replace_with_kernel_inject=True, **fields
    )


def logits_of(engine):
    return np.asarray(engine(IDS).logits, np.float32)


def other_state(factor=1.25):
    return {name: t * factor for name, t in make_model(NAME).state_dict().items()}


def first(model):
    return model.model.layers[0].self_attn.q_proj


def step(model, **how):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    model(torch.from_numpy(IDS), labels=torch.from_numpy(IDS)).loss.backward()
    optimizer.step()
    model.zero_grad()


def merge_an_adapter(model):
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
        assert peft.get_peft_model(model, config).merge_and_unload() is model


def write_in_inference_mode(model):
    with torch.inference_mode():
        first(model).weight.mul_(1.5)


def write_by_numpy(model):
    first(model).weight.detach().numpy()[:] *= 1.5


def replace_a_parameter(model):
    first(model).weight = nn.Parameter(first(model).weight.detach() * 1.5)


def replace_data(model):
    first(model).weight.data = first(model).weight.data * 1.5


def replace_a_part(model):
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)


CHANGES = {
    "load": lambda m: m.load_state_dict(other_state()),
    "load with assign": lambda m: m.load_state_dict(other_state(0.75), assign=True),
    "step": lambda m: step(m, foreach=True),
    "fused step": lambda m: step(m, fused=True),
    "merge": merge_an_adapter,
    "inference mode": write_in_inference_mode,
    "through data": lambda m: first(m).weight.data.mul_(1.5),
    "through NumPy": write_by_numpy,
    "other data": replace_data,
    "other parameter": replace_a_parameter,
    "other part": replace_a_part,
    "cast": lambda m: m.double(),
}


# They leave no version: tensors are compared in turn, all of so few by two calls.
IN_TURN = ("through data", "through NumPy", "other data")
KINDS = [(backend, dtype) for backend in BACKENDS for dtype in ("fp32", "bf16")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def changing(request):
    """A model that tests change, with an engine of it that has run."""
    backend, dtype = request.param
    model = make_model(NAME)
    with make_engine(model, backend, dtype) as engine:
        engine(IDS), engine.generate(IDS, **GREEDY)
        yield model, engine


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused_until_the_engine_is_refreshed(changing, change):
    model, engine = changing
    before = logits_of(engine)
    engine.generate(IDS, **GREEDY)  # again: conftest's `_few_maps` may have dropped what was made
    compiled = engine.report().compilations
    CHANGES[change](model)

    def twice(ids):
        return engine(ids), engine(ids)

    first = twice if change in IN_TURN else engine
    for call in (first, engine.generate, engine.stream):
        with pytest.raises(StaleWeightsError, match=r"changed since.*refresh\(\)"):
            call(IDS)
    engine.refresh()
    found = logits_of(engine)
    engine.generate(IDS, **GREEDY)
    assert engine.report().compilations == compiled
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)).logits.numpy()
    bound = 1e-5 if engine.inference_config.dtype == "float32" else 0.05
    assert relative_rms(found, expected) < bound
    assert change == "cast" or relative_rms(found, before) > 2e-3


def test_parameters_that_the_engine_shows_follow(changing):
    model, engine = changing
    model.load_state_dict(other_state(1.5), assign=True)
    torch_view = engine.inference_config.backend == "torch"
    view = engine.module if torch_view else engine.model
    if not torch_view:
        with pytest.raises(StaleWeightsError):
            _ = engine.params
    engine.refresh()

    def shown(name):
        if torch_view:
            return dict(view.named_parameters())[name].float().numpy()
        part, leaf = name.removeprefix("layers.0.").split(".")
        owner = view.layers[0] if name.startswith("layers") else view
        return np.asarray(getattr(getattr(owner, part), leaf)[...], np.float32)

    for ours, theirs in (
        ("embed.weight", model.model.embed_tokens.weight),
        ("layers.0.out.weight", model.model.layers[0].self_attn.o_proj.weight),
        ("layers.0.down.weight", model.model.layers[0].mlp.down_proj.weight),
    ):
        assert relative_rms(shown(ours), theirs.detach().float().numpy()) < 5e-3, ours


@pytest.mark.parametrize("name", ALL)
def test_a_models_own_work_is_no_change(name):
    model = make_model(name)
    watch = Watch(model)
    ids = torch.from_numpy(IDS)
    model.train()
    model(ids)[0].float().mean().backward()
    model.eval()
    with torch.no_grad():
        model(ids, output_hidden_states=True)
    if model.can_generate():
        model.generate(ids, **GREEDY)
    model.zero_grad()
    model.requires_grad_(False)
    assert [watch.change() for _ in range(3)] == [None] * 3


def test_of_many_tensors_values_are_compared_in_turn():
    model = nn.ModuleList([nn.Linear(3, 5) for _ in range(125)])
    watch = Watch(model)
    model[60].weight.data.add_(1)
    assert any(watch.change() for _ in range(16))
    assert watch.change() == watch.change() is not None
    watch.look()
    assert [watch.change() for _ in range(17)] == [None] * 17
    with torch.no_grad():
        model[61].bias[2] = 7
    assert "61.bias was written to" in (watch.change() or "")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(5, 7).t(),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(0, 3),
        torch.zeros(2, 3, 64, dtype=torch.bfloat16)[:, :, 1:50],
    ],
    ids=lambda t: f"{tuple(t.shape)}",
)
def test_values_of_tensors_of_any_layout_are_compared(tensor):
    holder = nn.Module()
    holder.register_buffer("held", tensor)
    watch = Watch(holder)
    assert watch.change() is None
    tensor.data.fill_(1)
    assert bool(watch.change()) == bool(tensor.numel())


def test_tensors_without_a_version_are_watched():
    with torch.inference_mode():
        linear = nn.Linear(3, 5)
    watch = Watch(linear)
    assert watch.change() is None
    with torch.inference_mode():
        linear.weight.add_(1)
    assert watch.change()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_engine_does_not_keep_the_model(backend):
    model = make_model(NAME)
    with make_engine(model, backend, "bf16") as engine:
        before = logits_of(engine)
        held = weakref.ref(first(model).weight)
        del model
        gc.collect()
        assert held() is None
        np.testing.assert_array_equal(logits_of(engine), before)
        with pytest.raises(ModelError, match="is gone"):
            engine.refresh()
        np.testing.assert_array_equal(logits_of(engine), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_between_two_tokens_ends_the_stream(backend):
    model = make_model(NAME)
    with make_engine(model, backend) as engine:
        stream = engine.stream(IDS, max_new_tokens=20, do_sample=False)
        next(stream)
        with pytest.raises(UnsupportedError, match="generation is under way"):
            engine.refresh()
        assert next(stream)
        write_in_inference_mode(model)
        with pytest.raises(StaleWeightsError):
            next(stream)
        engine.refresh()
        unstarted = engine.stream(IDS, **GREEDY)
        write_in_inference_mode(model)
        with pytest.raises(StaleWeightsError):
            next(unstarted)
        engine.refresh()
        assert len(list(engine.stream(IDS, **GREEDY))) == 3


def resize(model):
    model.resize_token_embeddings(model.config.vocab_size + 7)


def tie(model):
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", [resize, tie, lambda m: setattr(m.config, "rms_norm_eps", 0.5)])
def test_another_model_is_not_refreshed_from(backend, change):
    model = make_model(NAME)
    with make_engine(model, backend) as engine:
        change(model)
        write_in_inference_mode(model)
        with pytest.raises(ModelError, match=r"by its config|another shape or config"):
            engine.refresh()
        with pytest.raises(StaleWeightsError):
            engine(IDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_that_fails_half_way_leaves_no_engine_that_runs(backend, monkeypatch):
    model = make_model(NAME)
    with make_engine(model, backend) as engine:
        model.load_state_dict(other_state())
        read = TorchSource.read

        def fail(self, name, index=None):
            if ("layers.1" in name and index is None) or name == "lm_head.weight":
                raise OSError("the disk is gone")
            return read(self, name, index)

        with monkeypatch.context() as patch:
            patch.setattr("dualinfer.engine.origin.marks_of", lambda *_: None)
            patch.setattr(TorchSource, "read", fail)
            with pytest.raises(OSError, match="disk"):
                engine.refresh()
        for call in (engine, engine.generate):
            with pytest.raises(StaleWeightsError, match=r"some weights old and some new.*disk"):
                call(IDS)
        engine.refresh()
        with torch.no_grad():
            assert relative_rms(logits_of(engine), model(torch.from_numpy(IDS)).logits) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_is_read_again(backend, tmp_path):
    model = make_model(NAME)
    model.save_pretrained(tmp_path)
    with dualinfer.init_inference(tmp_path, backend=backend, dtype="fp32") as engine:
        before = logits_of(engine)
        model.load_state_dict(other_state())
        model.save_pretrained(tmp_path)
        np.testing.assert_array_equal(logits_of(engine), before)
        engine.refresh()
        with torch.no_grad():
            expected = model(torch.from_numpy(IDS)).logits
        assert relative_rms(logits_of(engine), expected) < 1e-5 < relative_rms(before, expected)
        make_model("gpt2").save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="another shape or config"):
            engine.refresh()
        assert relative_rms(logits_of(engine), expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_filled_from_a_file_is_filled_again(backend, tmp_path):
    file = tmp_path / "weights.pt"
    torch.save(make_model(NAME).state_dict(), file)
    with torch.device("meta"):
        empty = make_model(NAME)
    with make_engine(empty, backend, checkpoint=str(file)) as engine:
        del empty
        torch.save(other_state(), file)
        engine.refresh()
        model = make_model(NAME)
        model.load_state_dict(other_state())
        with torch.no_grad():
            assert relative_rms(logits_of(engine), model(torch.from_numpy(IDS)).logits) < 1e-5


def test_tensors_that_the_model_gave_up_are_not_written():
    model = make_model(NAME)
    old = {name: (t, t.clone()) for name, t in model.state_dict().items()}
    new = {name: (t, t.clone()) for name, t in other_state().items()}
    with make_engine(model, "torch") as engine:
        model.load_state_dict({name: t for name, (t, _) in new.items()}, assign=True)
        engine.refresh()
        model.load_state_dict(other_state(0.5), assign=True)
        engine.refresh()
    assert all(torch.equal(t, before) for t, before in (*old.values(), *new.values()))


def changed_in(ranks):
    """What each rank says when the model has changed in some, and after all have refreshed."""
    model = make_model(NAME)
    with make_engine(model, "torch", tensor_parallel={"tp_size": 2, "timeout": 60}) as engine:
        rank, said = engine._turns.peers.rank, []

        def ask(call, *args):
            try:
                call(*args)
            except dualinfer.DualinferError as error:
                said.append(type(error))

        if rank in ranks:
            model.load_state_dict(other_state())
        ask(engine, IDS)
        ask(engine.generate, IDS)
        ask(engine.refresh)  # refused where the models differ
        if rank not in ranks:
            model.load_state_dict(other_state())
        ask(engine.refresh)
        with torch.no_grad():
            expected = model(torch.from_numpy(IDS)).logits
        return said, relative_rms(logits_of(engine), expected)


@pytest.mark.xdist_group("ranks")
def test_ranks_refuse_and_refresh_together(crew):
    for said, error in crew.run(changed_in, (0, 1), world=2):
        assert said == [StaleWeightsError, StaleWeightsError] and error < 1e-5
    (own, first_error), (other, second_error) = crew.run(changed_in, (0,), world=2)
    assert own == [StaleWeightsError, StaleWeightsError, DistributedError]
    assert other == [DistributedError] * 3
    assert max(first_error, second_error) < 1e-5


def test_devices_that_share_a_model_are_refreshed():
    model = make_model(NAME)
    with make_engine(model, "jax", tensor_parallel={"tp_size": 2}) as engine:
        logits_of(engine)
        compiled = engine.report().compilations
        model.load_state_dict(other_state())
        with pytest.raises(StaleWeightsError):
            engine(IDS)
        engine.refresh()
        with torch.no_grad():
            expected = model(torch.from_numpy(IDS)).logits
        assert relative_rms(logits_of(engine), expected) < 1e-5
        assert engine.report().compilations == compiled


def test_a_torch_module_of_the_users_is_followed():
    module, x = make_module("torch")
    with dualinfer.init_inference(module, dtype="fp32") as engine:
        before = engine(x)
        with torch.no_grad():
            module[0].weight.mul_(2)
        module[3].weight = nn.Parameter(module[3].weight.detach() * 2)
        engine.refresh()
        torch.testing.assert_close(engine(x), copy.deepcopy(module)(x))
        assert not torch.equal(engine(x), before)


def test_a_flax_module_is_followed_by_refresh():
    module, x = make_module("jax")
    with dualinfer.init_inference(module, backend="jax", dtype="fp32") as engine:
        before, compiled = np.asarray(engine(x)), engine.report().compilations
        module.first.kernel[...] = module.first.kernel[...] * 2
        np.testing.assert_array_equal(engine(x), before)
        engine.refresh()
        np.testing.assert_allclose(engine(x), module(jax.numpy.asarray(x)), rtol=1e-5, atol=1e-6)
        assert engine.report().compilations == compiled and not np.array_equal(engine(x), before)
        module.first.extra = module.second.kernel
        with pytest.raises(ModelError, match="other parts"):
            engine.refresh()
        del module
        gc.collect()
        with pytest.raises(ModelError, match="is gone"):
            engine.refresh()
