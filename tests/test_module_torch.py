"""Module mode on torch, and the torch backend's graphs' keys, ranges, precision and memory."""

import copy
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import transformers as hf

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.backends.profiling import Profiler  # noqa: E402
from dualinfer.backends.torch import create_module_runner, join  # noqa: E402
from dualinfer.backends.torch.cache import Cache  # noqa: E402
from dualinfer.backends.torch.graphs import CallGraphs  # noqa: E402
from dualinfer.backends.torch.precision import own_precision  # noqa: E402
from dualinfer.checkpoint.sources import TorchSource, open_checkpoint  # noqa: E402
from dualinfer.config import InferenceConfig  # noqa: E402
from dualinfer.errors import (  # noqa: E402
    ArgumentError,
    CheckpointError,
    ConfigError,
    GraphError,
    ModelError,
    OutOfMemoryError,
    UnsupportedError,
)
from dualinfer.ops.caches import Room, cache_bytes, cache_specs  # noqa: E402
from dualinfer.parallel.agreement import Peers  # noqa: E402
from dualinfer.system.memory import host_free_bytes  # noqa: E402

from .cases import make_model  # noqa: E402
from .models import random_ids, randomize, slow_but  # noqa: E402

CPU = torch.device("cpu")


def runner_of(module, source=None, dtype="float32", **fields):
    config = InferenceConfig(dtype=dtype, **fields)
    return create_module_runner(config, module, source, join(config))


class Own(nn.Module):
    """Tied weights and buffers, integer, complex and transient buffers, dropout, a cache."""

    def __init__(self, width=12, vocab=31):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.arange(vocab).flip(0))
        self.register_buffer("phase", torch.polar(torch.ones(width), torch.arange(width) / 3.0))
        self.register_buffer("scale", torch.arange(width) / 11 + 0.5, persistent=False)
        self.norm.register_buffer("twin", self.phase)
        self.resets = 0

    def reset_cache(self):
        self.resets += 1

    def forward(self, ids, shift=0.0, fail=False):
        if fail:
            raise KeyError("asked to fail")
        x = self.drop(self.norm(self.inner(self.embed(self.order[ids])) * self.scale))
        turned = (x.float() * self.phase).real.to(x.dtype)
        return {"scores": self.head(turned + shift), "parts": (turned, [None, ids])}

    def generate(self, ids, steps=3):
        for _ in range(steps):
            ids = torch.cat((ids, self(ids)["scores"].argmax(-1)), 0)
        return ids


def make_own():
    torch.manual_seed(0)
    module = Own()
    module.norm.running_mean.normal_()
    return module


IDS = torch.tensor([3, 1, 4, 1, 5])


def encoder_decoder(cls, config_cls, **fields):
    config = config_cls(
        vocab_size=99,
        d_model=32,
        decoder_start_token_id=0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )
    return cls(config)


def make_hf(name):
    torch.manual_seed(1)
    layers = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 40,
    }
    if name == "t5":
        module = encoder_decoder(
            hf.T5ForConditionalGeneration, hf.T5Config, d_kv=8, d_ff=40, num_layers=2, num_heads=4
        )
    elif name == "bart":
        module = encoder_decoder(
            hf.BartForConditionalGeneration, hf.BartConfig, max_position_embeddings=64, **layers
        )
    elif name == "whisper":
        module = encoder_decoder(
            hf.WhisperForConditionalGeneration,
            hf.WhisperConfig,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=30,
            **layers,
        )
    else:
        config = hf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=40,
            image_size=30,
            patch_size=5,
            num_labels=7,
        )
        module = hf.ViTForImageClassification(config)
    with torch.no_grad():
        randomize(module)
    return module


def inputs_of(name, dtype=torch.float32):
    torch.manual_seed(2)
    ids = torch.from_numpy(random_ids(2, 7, vocab=99))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 30, 30, dtype=dtype)}
    if name == "whisper":
        return {
            "input_features": torch.randn(2, 8, 40, dtype=dtype),
            "decoder_input_ids": ids[:, :3],
        }
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :3]}


def tensors(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def same(one, other):
    """Bitwise the same tensors, and at least one."""
    one, other = tensors(one), tensors(other)
    return (
        len(one) == len(other) > 0
        and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
        and all(t.isfinite().all() for t in one if t.is_floating_point())
    )


# Casting and calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_own_module_is_cast_in_place_and_gives_its_own_output(dtype):
    wanted = getattr(torch, dtype)
    reference = make_own().eval()
    reference = {"float32": reference.float, "bfloat16": reference.bfloat16}.get(
        dtype, reference.half
    )()
    module = make_own().train()
    runner = runner_of(module, dtype=dtype)
    assert runner.module is module and not module.training and not module.drop.training
    assert (runner.dtype, runner.device) == (wanted, CPU)
    assert module.embed.weight.dtype == module.scale.dtype == wanted
    assert (module.order.dtype, module.phase.dtype) == (torch.int64, torch.complex64)
    assert module.head.weight is module.embed.weight and module.norm.twin is module.phase
    out = runner.forward((IDS,), {"shift": 0.25})
    assert not out["scores"].requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        assert same(out, reference(IDS, shift=0.25))
    assert out["parts"][1][0] is None and out["parts"][1][1] is IDS
    report = runner.report()
    assert report["parameters"] == sum(p.numel() for p in module.parameters())
    assert report["parameter_bytes"] == report["parameters"] * wanted.itemsize
    assert report["cache_bytes"] == report["compilations"] == 0


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "vit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hf_modules_give_their_own_output(name, dtype):
    module, cast = make_hf(name), getattr(torch, dtype)
    reference = copy.deepcopy(module).eval().to(cast)
    runner = runner_of(module.train(), dtype=dtype)
    out = runner.forward((), inputs_of(name, cast))
    with torch.no_grad():
        expected = reference(**inputs_of(name, cast))
    assert type(out) is type(expected)
    assert same(out.logits, expected.logits)
    assert module.dtype == cast and not module.training
    assert sorted(n for n, _ in module.named_parameters()) == sorted(
        n for n, _ in reference.named_parameters()
    )


@pytest.mark.parametrize("name", ["t5", "gpt2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_is_the_modules_own(name, beams, hf_model):
    module = make_hf("t5") if name == "t5" else copy.deepcopy(hf_model("gpt2"))
    ids = torch.from_numpy(random_ids(2, 6, vocab=99))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "num_beams": beams}
    expected = copy.deepcopy(module).eval().generate(ids, **options, do_sample=False)
    out = runner_of(module).generate((ids,), {**options, "do_sample": False})
    assert torch.equal(out, expected) and out.shape[1] > 1


def test_generate_resets_the_modules_cache_first():
    module = make_own()
    runner = runner_of(module)
    runner.generate((IDS,), {"steps": 1})
    assert module.resets == 1


def test_callers_autocast_and_precision_do_not_reach_the_module():
    module = make_own()
    runner = runner_of(module)
    with torch.autocast("cpu", torch.bfloat16):
        out = runner.forward((IDS,), {})
    assert out["scores"].dtype == torch.float32


def test_a_callers_inference_mode_leaves_ordinary_weights():
    module = make_own()
    with torch.inference_mode():
        runner = runner_of(module, dtype="bfloat16")
    assert not module.inner.weight.is_inference() and not module.scale.is_inference()
    assert runner.forward((IDS,), {})["scores"].dtype == torch.bfloat16


def test_what_is_no_module_or_is_quantized_or_spread_is_refused():
    with pytest.raises(ModelError, match=r"function.*nn\.Module"):
        runner_of(lambda x: x)
    module = make_hf("t5")
    module.is_quantized = True
    with pytest.raises(UnsupportedError, match="quantized"):
        runner_of(module, dtype="float16")
    assert module.dtype == torch.float32
    module = make_hf("t5")
    module.hf_device_map = {"encoder": 0, "decoder": 1}
    with pytest.raises(UnsupportedError, match="device_map"):
        runner_of(module)


def test_graphs_need_cuda():
    with pytest.raises(ConfigError, match="enable_cuda_graph"):
        runner_of(make_own(), enable_cuda_graph=True, keep_module_on_host=True)


def test_a_module_larger_than_the_memory_is_refused_before_it_is_touched():
    with torch.device("meta"):
        module = nn.Linear(2**25, 2**25)
    values = {"weight": torch.empty(1).expand(2**25, 2**25), "bias": torch.zeros(2**25)}
    source = TorchSource(values, "a file")
    with pytest.raises(OutOfMemoryError, match=r"4,503,599,761,588,224 bytes.*are free"):
        runner_of(module, source)
    assert module.weight.is_meta


def test_lazy_parameters_are_told_before_anything_is_touched():
    module = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    for given in ({}, {"dtype": "bfloat16"}, {"checkpoint": "none.pt"}):
        with pytest.raises(ModelError, match=r"lazy.*2: 1\.weight, 1\.bias\. Run a dummy batch"):
            dualinfer.init_inference(module, **given)
    assert module[0].weight.dtype == torch.float32
    module(torch.ones(1, 3))
    assert dualinfer.init_inference(module, dtype="fp32")(torch.ones(1, 3)).shape == (1, 2)


# What others do to the module


def test_each_call_is_in_eval_mode_whatever_the_caller_did():
    module = make_own()
    runner = runner_of(module)
    expected = runner.forward((IDS,), {}), runner.generate((IDS,), {"steps": 1})
    for call, own in zip(
        (lambda: runner.forward((IDS,), {}), lambda: runner.generate((IDS,), {"steps": 1})),
        expected,
        strict=True,
    ):
        module.train()
        assert same(call(), own) and not module.drop.training


def test_a_cast_by_another_engine_is_told_and_undone_goes_on():
    module = make_own()
    first = runner_of(module)
    expected = first.forward((IDS,), {})
    second = runner_of(module, dtype="bfloat16")
    for call in (first.forward, first.generate):
        with pytest.raises(
            ModelError, match=r"Own is in torch\.bfloat16 now.*torch\.float32.*deep"
        ):
            call((IDS,), {})
    assert second.forward((IDS,), {})["scores"].dtype == torch.bfloat16
    module.float()
    with pytest.raises(ModelError, match=r"float32 now.*made in torch\.bfloat16"):
        second.forward((IDS,), {})
    assert first.forward((IDS,), {})["scores"].shape == expected["scores"].shape
    module.to("meta")
    with pytest.raises(ModelError, match="meta device"):
        first.forward((IDS,), {})
    assert first.device == CPU


def test_what_hf_keeps_in_float32_is_no_cast_by_others(hf_model):
    runner = runner_of(copy.deepcopy(hf_model("llama-gqa")), dtype="bfloat16")
    ids = torch.from_numpy(random_ids(1, 5))
    assert runner.forward((ids,), {}).logits.dtype == torch.bfloat16
    part = runner.module.model
    part.embed_tokens = nn.Sequential(part.embed_tokens)  # the tensor looked at has another name
    assert runner.forward((ids,), {}).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["alone", "inside", "compiled"])
def test_rotary_frequencies_stay_in_float32_wherever_the_hf_model_is(kind, hf_model):
    model = copy.deepcopy(hf_model("llama-gqa"))
    expected = model.model.rotary_emb.inv_freq.clone()
    module = {"inside": lambda: nn.ModuleDict({"m": model}), "alone": lambda: model}.get(
        kind, lambda: torch.compile(model, backend="eager")
    )()
    runner_of(module, dtype="bfloat16")
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    assert model.lm_head.weight.dtype == torch.bfloat16


def change_parameter(m):
    m.inner.weight = nn.Parameter(m.inner.weight.detach().clone())


def change_buffer(m):
    m.norm.running_mean = m.norm.running_mean.clone()


def change_data(m):
    m.inner.bias.data = m.inner.bias.data.clone()


def change_part(m):
    m.drop = nn.Dropout(0.1)


def add_part(m):
    m.inner.extra = nn.Linear(1, 1)


def write_in_place(m):
    with torch.no_grad():
        m.inner.weight.add_(1)
        m.norm.running_mean.add_(1)


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        *((change_parameter, True), (change_buffer, True), (change_data, True)),
        *((change_part, True), (add_part, True), (write_in_place, False)),
    ],
)
def test_graphs_go_when_a_part_or_an_address_is_another_one(change, moved):
    module = make_own()
    runner = runner_of(module)
    runner._calls = graphs = Replayed()
    runner._check_addresses(runner._read_layout())
    for _ in range(2):
        graphs.run(runner.module, (IDS,), {})
        runner._check_addresses(runner._read_layout())
        assert len(graphs) == 1
    change(module)
    runner._check_addresses(runner._read_layout())
    assert len(graphs) == (0 if moved else 1)
    graphs.run(runner.module, (IDS,), {})
    runner._check_addresses(runner._read_layout())
    assert len(graphs) == 1


def test_graphs_on_the_host_stay_refused():
    runner = runner_of(make_own())
    runner._calls = Replayed()
    with pytest.raises(ConfigError, match="stays on cpu"):
        runner.forward((IDS,), {})


# Filling


class Sharing(nn.Module):
    """One part of two names, and a part inside of it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.b = self.a
        self.last = self.a[0]

    def forward(self, x):
        return self.last(self.b(self.a(x)))


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("names", ["all", "a", "b"])
def test_shared_parts_are_filled_and_stay_shared(meta, names):
    torch.manual_seed(4)
    known = Sharing().eval()
    with torch.device("meta" if meta else "cpu"):
        module = Sharing()
    state = {n: t for n, t in known.state_dict().items() if names == "all" or n[0] == names}
    runner = runner_of(module, TorchSource(state, "a file"))
    assert module.b is module.a and module.last is module.a[0]
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert same(runner.forward((x,), {}), known(x))
    assert runner.report()["parameters"] == sum(p.numel() for p in known.parameters()) == 18


def test_shared_parts_that_do_not_fit_are_named_by_each_name():
    state = Sharing().state_dict()
    state["b.0.weight"] = torch.zeros(3, 3)
    del state["a.0.bias"], state["b.0.bias"], state["last.bias"]
    with pytest.raises(CheckpointError) as error:
        runner_of(Sharing(), TorchSource(state, "a file"))
    assert "missing 3: a.0.bias, b.0.bias, last.bias" in str(error.value)
    assert "tied in the module, but different 1: b.0.weight and a.0.weight" in str(error.value)


def test_shared_parts_of_a_hf_module_are_filled():
    class Twice(Custom):
        def __init__(self, config):
            super().__init__(config)
            del self.table, self.places
            self.again = self.inner

        def forward(self, x):
            return self.again(self.inner(x))

    known = Twice(hf.BertConfig())
    with torch.device("meta"):
        module = Twice(hf.BertConfig())
    runner = runner_of(module, TorchSource(known.state_dict(), "a file"))
    assert module.again is module.inner
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert same(runner.forward((x,), {}), known(x))


def test_filling_draws_nothing_from_the_callers_generator(hf_model):
    known = hf_model("bert-masked")
    module = on_meta(known)
    before = torch.get_rng_state()
    runner_of(module, TorchSource(known.state_dict(), "a file"))
    assert torch.equal(torch.get_rng_state(), before)


def on_meta(module):
    """Another module of the same class and config, made on the meta device."""
    with torch.device("meta"):
        return type(module)(module.config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-llama3", "qwen2", "gpt2", "bert-masked", "t5", "vit"])
def test_meta_hf_module_is_filled_from_a_folder(name, dtype, hf_model, tmp_path, capfd):
    known = make_hf(name) if name in ("t5", "vit") else copy.deepcopy(hf_model(name))
    known.save_pretrained(tmp_path)
    known = type(known).from_pretrained(tmp_path, dtype=getattr(torch, dtype)).eval()
    capfd.readouterr()
    module = on_meta(known)
    buffers = [n for n, b in module.named_buffers() if b.is_meta]
    assert buffers or name in ("t5", "vit", "gpt2")
    runner = runner_of(module, open_checkpoint(tmp_path), dtype=dtype)
    assert runner.module is module and not any(t.is_meta for t in module.state_dict().values())
    for (n, b), (m, c) in zip(module.named_buffers(), known.named_buffers(), strict=True):
        assert n == m and torch.equal(b, c) and b.dtype == c.dtype
    assert len(list(module.parameters())) == len(list(known.parameters()))  # ties
    assert all(p.requires_grad for p in module.parameters())
    given = inputs_of(name, known.dtype) if name in ("t5", "vit") else {}
    given = given or {"input_ids": torch.from_numpy(random_ids(2, 20))}
    with torch.no_grad():
        assert same(runner.forward((), given).logits, known(**given).logits)
    assert runner.notes == ()
    assert capfd.readouterr() == ("", "")  # no bars, no tables


def test_headless_module_takes_what_it_needs_of_a_headed_checkpoint(hf_model, tmp_path):
    known = hf_model("bert-masked")
    known.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = hf.BertModel(known.config, add_pooling_layer=True)
    with pytest.raises(CheckpointError, match=r"missing 2: pooler\.dense\.bias, pooler"):
        runner_of(module, open_checkpoint(tmp_path))
    assert module.embeddings.word_embeddings.weight.is_meta


def test_hf_checkpoint_that_does_not_fit_is_refused_and_extra_tensors_are_told(hf_model):
    known = hf_model("llama-gqa")
    state = dict(known.state_dict())
    extra = {**state, "visitor.weight": torch.zeros(3)}
    runner = runner_of(on_meta(known), TorchSource(extra, "a file"))
    assert runner.notes == ("tensors of a file without use here, 1: visitor.weight",)
    for name in [n for n in state if ".mlp." in n]:
        del state[name]
    state["model.norm.weight"] = torch.zeros(5)
    module = on_meta(known)
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    with pytest.raises(CheckpointError) as error:
        runner_of(module, TorchSource(state, "a file"))
    text = str(error.value)
    assert "missing 9: model.layers.0.mlp.down_proj.weight" in text and "and 1 more" in text
    assert "misshaped 1: model.norm.weight is (5,), expected (96,)" in text
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(after[n] is t and t.is_meta for n, t in held.items())


def test_hf_module_that_is_not_what_its_config_makes_is_refused(hf_model):
    known = hf_model("llama-gqa")
    module = on_meta(known)
    module.lm_head = nn.Linear(96, 5, device="meta")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(5, 96\).*not what its config"):
        runner_of(module, TorchSource(known.state_dict(), "a file"))
    assert module.model.norm.weight.is_meta


class Custom(hf.PreTrainedModel):
    """A transient buffer that its own _init_weights does not know of."""

    config_class = hf.BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("places", torch.arange(3), persistent=False)
        self.post_init()

    def forward(self, x):
        return self.inner(x) + self.table + self.places


def test_buffers_that_nobody_computes_are_named_and_not_left_to_chance():
    known = Custom(hf.BertConfig())
    with pytest.raises(CheckpointError, match=r"_init_weights.*2: table, places"):
        runner_of(on_meta(known), TorchSource(known.state_dict(), "a file"))
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.device("meta"):
        live = Custom(hf.BertConfig())
    live.table, live.places = torch.arange(3.0), torch.arange(3)  # as with DeepSpeed's OnDevice
    with pytest.raises(CheckpointError, match="table"):
        runner_of(live, TorchSource(known.state_dict(), "a file"))


def meta_own():
    """On the meta device but for the transient buffer, as with accelerate's init_empty_weights."""
    with torch.device("meta"):
        module = Own()
    module.scale = torch.arange(12) / 11 + 0.5
    return module


def test_own_meta_module_is_filled_from_a_state_dict_and_stays_tied():
    known, module = make_own().eval(), meta_own()
    state = {n: t for n, t in known.state_dict().items() if n not in ("head.weight", "norm.twin")}
    module.inner.weight.requires_grad_(False)
    runner = runner_of(module, TorchSource(state, "a file"))
    assert module.head.weight is module.embed.weight and module.norm.twin is module.phase
    assert module.embed.weight.requires_grad and not module.inner.weight.requires_grad
    with torch.no_grad():
        assert same(runner.forward((IDS,), {}), known(IDS))


def test_live_module_is_filled_as_well():
    known, module = make_own().eval(), make_own()
    for p in module.parameters():
        nn.init.zeros_(p)
    runner = runner_of(module, TorchSource(known.state_dict(), "a file"))
    with torch.no_grad():
        assert same(runner.forward((IDS,), {}), known(IDS))


def test_own_module_takes_its_weights_exactly_or_not_at_all():
    state = dict(make_own().state_dict())
    del state["inner.bias"], state["norm.running_var"]
    state |= {
        "inner.weight": torch.zeros(3),
        "order": torch.zeros(31),
        "head.weight": torch.zeros(31, 12),
        "stranger": torch.zeros(1),
    }
    module = meta_own()
    with pytest.raises(CheckpointError) as error:
        runner_of(module, TorchSource(state, "a file"))
    assert str(error.value) == (
        "The weights of a file do not fit the Own: missing 2: inner.bias, norm.running_var; "
        "misshaped 1: inner.weight is (3,), expected (12, 12); of another dtype 1: order is "
        "float32, expected int64; tied in the module, but different 1: head.weight and "
        "embed.weight; left over 1: stranger."
    )
    assert module.embed.weight.is_meta


def test_meta_tensors_that_no_checkpoint_fills_are_named():
    with torch.device("meta"):
        module = Own()
        module.inner.loose = torch.zeros(3)
    state = make_own().state_dict()
    with pytest.raises(CheckpointError, match=r"no state dict.*2: scale, inner\.loose"):
        runner_of(module, TorchSource(state, "a file"))
    with pytest.raises(CheckpointError, match=r"meta device.*14: order, .*and 6 more.*checkpoint="):
        runner_of(module)
    partly = make_own()
    partly.inner.weight = nn.Parameter(torch.zeros(12, 12, device="meta"))
    with pytest.raises(CheckpointError, match=r"meta device.*1: inner\.weight"):
        runner_of(partly, dtype="bfloat16")
    assert partly.embed.weight.dtype == torch.float32


def test_int8_weights_of_a_hf_model_are_refused(hf_model, tmp_path):
    """As bitsandbytes saves them: taken as numbers they would be weights of another size."""
    model = hf_model("llama-mqa")
    state = {
        name: x.to(torch.int8) if name.endswith("proj.weight") else x
        for name, x in model.state_dict().items()
    }
    torch.save(state, tmp_path / "model.bin")
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(CheckpointError, match=r"int8 weights.*q_proj"):
        dualinfer.init_inference(empty, checkpoint=str(tmp_path / "model.bin"))


def test_float8_checkpoints_are_refused():
    state = {"weight": torch.zeros(3, 3).to(torch.float8_e4m3fn), "bias": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"float8.*weight"):
        runner_of(nn.Linear(3, 3), TorchSource(state, "a file"))


# Injection policy


def test_policy_is_checked_and_splits_nothing_on_one_device():
    module = make_hf("t5")
    block = hf.models.t5.modeling_t5.T5Block
    policy = {block: ("SelfAttention.o", ".EncDecAttention.o", "DenseReluDense.wo")}
    runner = runner_of(module, injection_policy=policy)
    assert runner.notes == ("injection_policy: with one device nothing is split",)
    both = {block: "wo", hf.models.bart.modeling_bart.BartEncoderLayer: ["wo"]}
    assert "no BartEncoderLayer" in runner_of(module, injection_policy=both).notes[1]
    assert runner_of(module, injection_policy={}).notes == ()
    assert runner_of(module, injection_policy={block: ".shared"}).notes  # a direct child


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"T5Block": "wo"}, "'T5Block' is no class of layers"),
        ({dict: "wo"}, "no class of layers"),
        ({nn.Linear: "nowhere.o"}, r"ends with 'nowhere\.o' \(given for Linear\)"),
        ({nn.Linear: ("wo", 3)}, "expected names of linear layers"),
        ({nn.Linear: ()}, "expected names of linear layers"),
        ({nn.Linear: nn.Linear}, "DeepSpeed's policy classes"),
        ({nn.Conv3d: "wo"}, "has no layer of class Conv3d"),
    ],
)
def test_policy_that_says_nothing_about_the_model_is_refused(policy, text):
    module = make_hf("t5")
    with pytest.raises(ConfigError, match=text):
        runner_of(module, injection_policy=policy, dtype="bfloat16")
    assert module.dtype == torch.float32


# Times


def watched(runner, enabled=True):
    profiler = Profiler(runner.stopwatch)
    profiler.switch(enabled)
    runner.watch(profiler)
    return profiler


@pytest.mark.parametrize("use_events", [True, False])
def test_each_forward_pass_is_an_entry_while_profiling_is_on(use_events):
    module = make_own()
    runner = runner_of(module)
    profiler = watched(runner)
    profiler.switch(True, use_events)
    start = time.perf_counter()
    runner.forward((IDS,), {})
    runner.generate((IDS,), {"steps": 4})
    whole = (time.perf_counter() - start) * 1e3
    times = profiler.take()
    assert len(times) == 5 and all(t > 0 for t in times) and sum(times) <= whole
    assert profiler.take() == []
    profiler.switch(False)
    runner.watch(profiler)
    runner.forward((IDS,), {})
    assert "_compiled_call_impl" not in vars(module)
    profiler.switch(True)
    assert profiler.take() == []


def test_hf_generate_of_n_tokens_is_n_entries(hf_model):
    runner = runner_of(copy.deepcopy(hf_model("gpt2")))
    profiler = watched(runner)
    ids = torch.from_numpy(random_ids(1, 5))
    options = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False}
    runner.generate((ids,), {"attention_mask": torch.ones_like(ids), **options})
    assert len(profiler.take()) == 6


def test_a_pass_that_fails_is_no_entry_and_leaves_nothing_behind():
    class Outer(Own):
        def forward(self, ids, depth=0, **options):
            if depth:
                self(ids, depth - 1, **options)
            return super().forward(ids, **options)

    runner = runner_of(Outer())
    profiler = watched(runner)
    for depth in (0, 2):
        with pytest.raises(KeyError, match="asked to fail"):
            runner.forward((IDS,), {"depth": depth, "fail": True})
    assert profiler.take() == []
    try:
        raise KeyError
    except KeyError:  # a pass within a handler is no failed one
        runner.forward((IDS,), {})
    assert len(profiler.take()) == 1
    runner.forward((IDS,), {"depth": 2})
    inner, middle, outer = profiler.take()
    assert inner < middle < outer


def test_close_lets_go_of_the_module_and_stops_timing_it():
    module = make_own()
    runner = runner_of(module)
    before = dict(vars(module))
    profiler = watched(runner)
    assert vars(module) != before
    runner.close()
    assert runner.module is None and vars(module) == before
    module(IDS)
    assert profiler.take() == []


def test_an_interrupted_pass_leaves_nothing_behind():
    class Slow(Own):
        def forward(self, ids, stop=False):
            if stop:
                raise KeyboardInterrupt
            return super().forward(ids)

    runner = runner_of(Slow())
    profiler = watched(runner)
    with pytest.raises(KeyboardInterrupt):
        runner.forward((IDS,), {"stop": True})
    assert profiler.take() == []
    runner.forward((IDS,), {})
    assert len(profiler.take()) == 1


def test_an_engine_dropped_while_profiling_is_freed_and_times_no_more():
    module = make_own()
    engine = dualinfer.init_inference(module, dtype="fp32")
    engine.profile_model_time()
    engine(IDS)
    held = weakref.ref(engine), weakref.ref(engine.runner)
    assert "_compiled_call_impl" in vars(module)
    del engine
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert "_compiled_call_impl" not in vars(module)


def test_a_module_is_copied_and_saved_while_its_engine_profiles(tmp_path):
    plain = make_own().eval()
    for module in (make_own(), torch.compile(make_own(), backend="eager")):
        runner = runner_of(module)
        profiler = watched(runner)
        torch.save(getattr(module, "_orig_mod", module), tmp_path / "m.pt")
        loaded = torch.load(tmp_path / "m.pt", weights_only=False)
        for other in (loaded, copy.deepcopy(getattr(module, "_orig_mod", module))):
            with torch.no_grad():
                assert same(other(IDS), plain(IDS))
        assert profiler.take() == []
        runner.forward((IDS,), {})
        assert len(profiler.take()) == 1
    torch._dynamo.reset()


def test_two_engines_time_one_module_and_end_in_any_order():
    module = make_own()
    runners = [runner_of(module) for _ in range(2)]
    first, second = map(watched, runners)
    runners[0].close()
    runners[1].forward((IDS,), {})
    assert first.take() == [] and len(second.take()) == 1 and not runners[1].is_compiled
    runners[1].close()
    module(IDS)
    assert second.take() == []


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_timed_and_not_compiled():
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(2, 3)
    for script in (torch.jit.script(module), torch.jit.trace(module, x)):
        runner = runner_of(script)
        profiler = watched(runner)
        with torch.no_grad():
            assert same(runner.forward((x,), {}), module(x))
        assert len(profiler.take()) == 1 and not runner.is_compiled
        with pytest.raises(UnsupportedError, match="TorchScript"):
            runner.compile("eager", {})


# torch.compile


@pytest.mark.parametrize("kind", ["in place", "wrapped"])
def test_a_module_compiled_before_is_timed_and_stays_compiled(kind, recwarn):
    module = make_own()
    if kind == "wrapped":
        module = torch.compile(module, backend="eager")
    else:
        module.compile(backend="eager", dynamic=False)
    runner = runner_of(module)
    assert runner.is_compiled
    before = vars(module).get("_compiled_call_impl")
    runner.compile("aot_eager", {})
    assert vars(module).get("_compiled_call_impl") is before
    profiler = watched(runner)
    runner.forward((IDS,), {})
    runner.generate((IDS,), {"steps": 2})
    assert len(profiler.take()) == 3 and runner.is_compiled
    runner.close()
    assert vars(module).get("_compiled_call_impl") is before and not recwarn.list
    torch._dynamo.reset()


def test_a_module_inside_of_what_the_caller_compiled_is_not_disturbed_by_profiling():
    module = nn.Linear(3, 2)
    profiler = watched(runner_of(module))
    x = torch.randn(2, 3)
    call = torch.compile(module.__call__, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(x), module(x))
    assert len(profiler.take()) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_module_is_compiled_in_place_once_and_still_timed(backend):
    module = make_own()
    runner = runner_of(module)
    plain = runner.forward((IDS,), {})
    profiler = watched(runner)
    assert not runner.is_compiled
    runner.compile(backend, {"dynamic": False})
    first = module._compiled_call_impl
    runner.compile(backend, {})
    assert runner.is_compiled and module._compiled_call_impl is first
    for a, b in zip(tensors(runner.forward((IDS,), {})), tensors(plain), strict=True):
        torch.testing.assert_close(a, b)
    runner.forward((IDS,), {})
    assert len(profiler.take()) == 2
    watched(runner, enabled=False)
    runner.forward((IDS,), {})
    assert profiler.take() == []
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_positions_of_an_encoder_are_those_of_hf_as_well(side, hf_model, engine_of):
    ids = torch.from_numpy(random_ids(2, 9))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mask = mask.flip(1) if side == "left" else mask
    with torch.no_grad():
        expected = hf_model("bert-masked")(ids, attention_mask=mask).logits
    out = engine_of("bert-masked", "torch")(ids, attention_mask=mask).logits
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt2"])
def test_padding_before_a_causal_text_gives_numbers(name, hf_model, engine_of):
    ids = torch.from_numpy(random_ids(2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    out = engine_of(name, "torch")(ids, attention_mask=mask, position_ids=places).logits
    assert out.isfinite().all()
    alone = engine_of(name, "torch")(ids[1:, 4:]).logits
    torch.testing.assert_close(out[1:, 4:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", slow_but(["llama-gqa", "bert"], ["llama-gqa", "mistral-window", "gpt2", "bert"])
)
def test_fused_forward_is_compiled_without_a_break(name, hf_model):
    ids = torch.from_numpy(random_ids(2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(hf_model(name), **options) as engine:
        plain = [engine(ids, output_hidden_states=True), engine(ids, attention_mask=mask)]
        engine.compile("eager", {"fullgraph": True, "dynamic": False})
        assert engine.is_compiled
        engine.compile("eager")
        after = [engine(ids, output_hidden_states=True), engine(ids, attention_mask=mask)]
        assert same(plain, after)
        with torch.compiler.set_stance("fail_on_recompile"):
            engine(ids + 1, attention_mask=mask)
        if engine.can_generate():
            kept = engine.generate(ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(kept[:, :9], ids)
    torch._dynamo.reset()


# Graphs: keys, buffers and copies. Capture is played by a second run over the same buffers.


class Replayed(CallGraphs):
    """As with a graph, a replay reads the buffers and writes the first run's tensors."""

    def __init__(self, most=16):
        super().__init__(CPU, "Own.forward", most)

    def _capture(self, call):
        outputs = call()

        def replay():
            self._write(outputs, call())

        return replay, outputs

    def _write(self, old, new):
        if isinstance(old, hf.DynamicCache):
            old, new = ([[x.keys, x.values] for x in c.layers] for c in (old, new))
        elif not isinstance(old, torch.Tensor) and isinstance(old, dict | list | tuple):
            old, new = ([*(x.values() if isinstance(x, dict) else x)] for x in (old, new))
        if isinstance(old, torch.Tensor):
            old.copy_(new)
        elif isinstance(old, list):
            for a, b in zip(old, new, strict=True):
                self._write(a, b)


def test_outputs_are_copies_and_the_callers_tensors_stay_its_own():
    module, graphs = make_own().eval(), Replayed()
    expected = [module(ids) for ids in (IDS, IDS + 1)]
    given = IDS.clone()
    first = graphs.run(module, (given,), {})
    kept = copy.deepcopy(first)
    second = graphs.run(module, (given + 1,), {})
    assert torch.equal(given, IDS) and graphs.captures == len(graphs) == 1
    assert same(first, kept) and same(first, expected[0]) and same(second, expected[1])
    assert all(t.data_ptr() != given.data_ptr() for t in tensors(first))
    assert not first["scores"].requires_grad
    assert type(first["parts"]) is tuple and first["parts"][1][0] is None


def test_hf_outputs_and_caches_are_copied_whole(hf_model):
    module = hf_model("gpt2")
    graphs = Replayed()
    runs = [torch.from_numpy(random_ids(1, 6, seed)) for seed in range(2)]
    options = {"output_hidden_states": True, "use_cache": True}
    results = [graphs.run(module, (), {"input_ids": ids, **options}) for ids in runs]
    with torch.no_grad():
        expected = [module(input_ids=ids, **options) for ids in runs]
    assert graphs.captures == 1
    for out, own in zip(results, expected, strict=True):
        assert type(out) is type(own) and same(out.logits, own.logits)
        assert same(out.hidden_states, own.hidden_states)
        cache, other = out.past_key_values, own.past_key_values
        assert isinstance(cache, hf.DynamicCache) and cache.get_seq_length() == 6
        for a, b in zip(cache.layers, other.layers, strict=True):
            assert same([a.keys, a.values], [b.keys, b.values])
    with torch.no_grad():  # a copied cache can be used
        module(torch.tensor([[5]]), past_key_values=results[0].past_key_values)
    again = graphs.run(module, (), {"input_ids": runs[0], **options})
    assert again.past_key_values.get_seq_length() == 6


def test_a_tensor_returned_twice_stays_one():
    def call(x):
        y = x + 1
        return {"a": y, "b": [y, (y, x)]}

    out = Replayed().run(call, (torch.ones(3),), {})
    assert out["a"] is out["b"][0] is out["b"][1][0] and out["b"][1][1] is not out["a"]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(2, 4),), {}),
        ((torch.ones(2, 3, dtype=torch.float64),), {}),
        ((torch.ones(2, 3), torch.ones(1)), {}),
        ((torch.ones(2, 3), 1), {}),
        ((torch.ones(2, 3), True), {}),
        ((torch.ones(2, 3), 1.0), {}),
        ((torch.ones(2, 3), None), {}),
        ((torch.ones(2, 3), "x"), {}),
        ((torch.ones(2, 3), torch.float16), {}),
        ((torch.ones(2, 3), 0.0), {}),
        ((torch.ones(2, 3), -0.0), {}),
        ((torch.ones(2, 3), float("nan")), {}),
        ((torch.ones(2, 3),), {"x": 1}),
        ((torch.ones(2, 3),), {"x": torch.ones(1)}),
        (([torch.ones(2, 3)],), {}),
        (({"a": torch.ones(2, 3)},), {}),
        (({"b": torch.ones(2, 3)},), {}),
        ((hf.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(2, 3)),), {}),
    ],
)
def test_whatever_differs_in_kind_or_value_is_captured_anew_and_found_again(args, kwargs):
    def call(*args, **kwargs):
        return torch.zeros(1)

    graphs = Replayed()
    graphs.run(call, (torch.ones(2, 3),), {})
    for _ in range(3):
        graphs.run(call, args, kwargs)
    graphs.run(call, (torch.zeros(2, 3),), {})
    assert graphs.captures == 2


def test_the_order_of_keyword_arguments_does_not_matter():
    graphs = Replayed()
    for kwargs in ({"a": torch.ones(1), "b": 2}, {"b": 2, "a": torch.zeros(1)}):
        out = graphs.run(lambda a, b: a * b, (), kwargs)
    assert graphs.captures == 1 and out == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, torch.zeros(2, device="meta")), {}, r"args\[1\] lies on meta.*args\[1\]\.to\('cpu'\)"),
        ((), {"mask": {"x": [None, np.zeros(2)]}}, r"mask\['x'\]\[1\] is an ndarray"),
        ((), {"past_key_values": hf.DynamicCache()}, "past_key_values is a DynamicCache"),
        ((torch.zeros(2).to_sparse(),), {}, r"args\[0\] is a Tensor of layout torch\.sparse_coo"),
        ((object(),), {}, r"args\[0\] is an object"),
    ],
)
def test_arguments_that_a_graph_cannot_take_are_named(args, kwargs, text):
    graphs = Replayed()
    with pytest.raises(ArgumentError, match=text):
        graphs.run(lambda *a, **k: None, args, kwargs)
    assert graphs.captures == 0


def test_results_that_cannot_be_copied_are_refused():
    with pytest.raises(GraphError, match=r"Own\.forward returned.*generator"):
        Replayed().run(lambda: (x for x in "ab"), (), {})


def test_the_least_recently_used_graph_goes_first():
    graphs = Replayed(most=2)

    def run(size):
        graphs.run(lambda x: x, (torch.ones(size),), {})
        return graphs.captures

    assert [run(size) for size in (1, 2, 1, 3, 1, 2, 1)] == [1, 2, 2, 3, 3, 4, 4]
    assert len(graphs) == 2
    graphs.clear()
    assert len(graphs) == 0 and run(1) == 5


def test_a_callers_inference_mode_does_not_reach_the_buffers():
    graphs = Replayed()
    with torch.inference_mode():
        graphs.run(lambda x: x + 1, (torch.ones(2),), {})
    out = graphs.run(lambda x: x + 1, (torch.full((2,), 5.0),), {})
    assert out.tolist() == [6, 6] and not out.is_inference()


# Named ranges


def ranges(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [e.name for e in profile.events() if e.name.startswith("dualinfer::")]


def test_layers_and_ops_are_named_ranges_in_a_profile(engine_of):
    engine = engine_of("llama-gqa", "torch")
    names = ranges(lambda: engine(random_ids(1, 5)))
    for layer in range(3):
        assert names.count(f"dualinfer::layer.{layer}") == 1
    assert names.count("dualinfer::matmul") == 3 * 4 + 1
    assert names.count("dualinfer::rms_norm") == 3 * 2 + 1
    assert names.count("dualinfer::rotary") == 3 * 2
    assert names.count("dualinfer::attention") == names.count("dualinfer::gated_activation") == 3
    assert names.count("dualinfer::embed") == 1
    names = ranges(lambda: engine.generate([[5, 6]], max_new_tokens=2, do_sample=False))
    assert {f"dualinfer::{op}" for op in ("sampling", "append", "decode_attention")} <= {*names}
    engine = engine_of("bert-masked", "torch")
    names = ranges(lambda: engine(random_ids(1, 5)))
    assert {"dualinfer::layer_norm", "dualinfer::activation"} <= {*names}


def test_ranges_are_not_entered_while_nobody_looks(engine_of, monkeypatch):
    monkeypatch.setattr(
        "dualinfer.backends.torch.profiling.record_function",
        lambda name: pytest.fail(f"entered {name}"),
    )
    engine_of("llama-gqa", "torch")(random_ids(1, 5))


# Precision


SETTINGS = {
    "old": lambda: torch.set_float32_matmul_precision("high"),
    "new": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "exact": lambda: None,
}


def precision():
    b = torch.backends
    parts = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
    return [part.fp32_precision for part in parts]


@pytest.fixture
def restored():
    b = torch.backends
    parts = (b.cuda.matmul, b.mkldnn.matmul)
    before = [part.fp32_precision for part in parts]
    yield
    torch.set_float32_matmul_precision("highest")
    for part, value in zip(parts, before, strict=True):
        part.fp32_precision = value


@pytest.mark.parametrize("kind", SETTINGS)
def test_float32_is_exact_inside_and_as_before_outside(kind, restored):
    SETTINGS[kind]()
    before, old_name = precision(), torch.backends.cudnn.allow_tf32
    with own_precision(torch.float32, CPU):
        assert set(precision()) == {"ieee"}
        assert not torch.backends.cudnn.allow_tf32  # raises where old and new names disagree
        assert not torch.backends.cuda.matmul.allow_tf32
        with own_precision(torch.float16, CPU), own_precision(torch.float32, CPU):
            assert set(precision()) == {"ieee"}
        assert set(precision()) == {"ieee"}
    assert precision() == before and torch.backends.cudnn.allow_tf32 == old_name
    with own_precision(torch.float16, CPU):
        assert precision() == before


def test_two_threads_restore_what_was_there_before_both(restored):
    torch.set_float32_matmul_precision("high")
    before = precision()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with own_precision(torch.float32, CPU):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with own_precision(torch.float32, CPU):
        thread.start()
        assert inside.wait(10)
    assert set(precision()) == {"ieee"}  # the other one is still at work
    leave.set()
    thread.join()
    assert precision() == before


# Memory


def test_host_memory_is_the_least_of_what_system_and_cgroups_leave(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    own = groups / "a" / "b"
    own.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:   50 kB\n")
    assert host_free_bytes(proc, groups) == 50 * 1024
    (proc / "self" / "cgroup").write_text("4:cpu:/x\n0::/a/b\n")

    def limit(folder, most, used, cached):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")

    limit(own, "max", 100, 0)
    assert host_free_bytes(proc, groups) == 50 * 1024
    limit(own.parent, 10_000, 9_000, 500)
    assert host_free_bytes(proc, groups) == 1_500
    limit(own, 3_000, 2_900, 0)
    assert host_free_bytes(proc, groups) == 100
    assert (host_free_bytes() or 0) > 2**20


def test_cache_says_what_it_needs_before_it_allocates(hf_model, engine_of):
    runner = engine_of("llama-gqa", "torch").runner
    specs = cache_specs(runner.spec)
    cache = Cache(specs, torch.bfloat16, CPU, Peers())
    room = Room(2, 64)
    cache.grow(room)
    assert cache.bytes == cache.bytes_for(room) == cache_bytes(specs, room, 2)
    assert runner.cache_bytes_for(2, 64) == 2 * cache.bytes  # float32
    needed = cache.bytes_for(Room(2**20, 2**20))
    with pytest.raises(OutOfMemoryError, match=rf"1048576 .* 1048576 tokens needs {needed:,} byt"):
        cache.grow(Room(2**20, 2**20))
    assert cache.room == room and cache.view(room)[0].capacity == 64
    assert runner.free_bytes() == pytest.approx(host_free_bytes(), rel=0.2)


def test_an_engine_without_room_refuses_and_goes_on(hf_model, monkeypatch):
    options = {"dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(make_model("llama-gqa"), **options) as engine:
        ids = random_ids(2, 20)
        expected = engine.generate(ids, max_new_tokens=20, do_sample=False)
        held = engine.report().cache_bytes
        free = engine.runner.cache_bytes_for(2, 512) - 1
        with monkeypatch.context() as patch:
            patch.setattr("dualinfer.backends.torch.cache.free_bytes", lambda device: free)
            with pytest.raises(OutOfMemoryError, match=rf"{free + 1:,} bytes.*{free:,}.*fewer"):
                engine.generate(ids, max_new_tokens=400, do_sample=False)
            stream = engine.stream(random_ids(1, 5), max_new_tokens=30, do_sample=False)
            assert isinstance(next(stream), int)
            stream.close()
        np.testing.assert_array_equal(
            engine.generate(ids, max_new_tokens=20, do_sample=False), expected
        )
        assert engine.report().cache_bytes <= max(held, free)


def test_part_in_train_mode_goes_back_to_eval():
    module = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.Dropout(0.5)))
    runner = runner_of(module)
    x = torch.ones(3, 12)
    expected = runner.forward((x,), {})
    module[1].train()
    assert torch.equal(runner.forward((x,), {}), expected) and not module[1].training
    module[1].add_module("more", nn.Dropout(0.5))  # a new part is in train mode
    assert torch.equal(runner.forward((x,), {}), expected)


def test_two_engines_time_one_module_and_leave_nothing_behind():
    module = nn.Linear(12, 12)
    engines = [dualinfer.init_inference(module, dtype="fp32") for _ in range(2)]
    x = torch.ones(3, 12)
    for engine in engines:
        engine.profile_model_time()
    module(x)
    assert [len(engine.model_times()) for engine in engines] == [1, 1]
    for engine in engines:
        engine.profile_model_time(enabled=False)
    assert "_compiled_call_impl" not in vars(module)
    for _ in range(300):  # no chain grows
        for engine in engines:
            engine.profile_model_time()
        module(x)
    assert [len(engine.model_times()) for engine in engines] == [300, 300]
    for engine in engines:
        engine.close()
    assert "_compiled_call_impl" not in vars(module)


def test_profiler_sees_a_modules_pass_and_its_parts():
    engine = dualinfer.init_inference(make_hf("t5"), dtype="fp32")
    inputs = inputs_of("t5", torch.float32)
    with torch.profiler.profile(acc_events=True) as profile:
        engine(**inputs)
    names = {event.name for event in profile.events()}
    assert {"dualinfer::forward", "dualinfer::encoder.block.0.layer.0.SelfAttention"} <= names
    hooks = [m for m in engine.module.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks
    engine.compile(backend="eager")
    with torch.profiler.profile(acc_events=True) as profile:
        engine(**inputs)
    assert any(event.name == "dualinfer::forward" for event in profile.events())
