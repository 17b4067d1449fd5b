"""ModuleEngine: the guard around a module's own generate, whatever that takes."""

import copy
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer import ConfigError, ModelError, init_inference

from .checkpoints import write_llama
from .models import BACKENDS
from .test_pipelines import make_gpt2

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


class Own(torch.nn.Module):
    """Its generate shares nothing with HF's but the name."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

    def generate(self, ids, steps=3, generation_config=None):
        return torch.cat((ids, ids[:, :1].expand(-1, steps)), 1), generation_config


def make_t5():
    torch.manual_seed(0)
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    config = hf.T5Config(vocab_size=99, decoder_start_token_id=0, **sizes)
    return hf.T5ForConditionalGeneration(config).eval()


def make_whisper():
    torch.manual_seed(0)
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, decoder_ffn_dim=32)
    config = hf.WhisperConfig(
        vocab_size=99, num_mel_bins=8, max_source_positions=50, max_target_positions=40,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None, **sizes, **heads,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config).eval()


@pytest.mark.parametrize("fields", [{}, {"max_out_tokens": 12}])
def test_own_generate_takes_what_it_takes(fields):
    engine = init_inference(Own(), dtype="fp32", **fields)
    for arguments, steps, setting in [
        ((IDS,), 3, None),
        ((IDS, 5), 5, None),
        ((IDS, torch.tensor(2)), 2, None),
        ((IDS, 4, "fast"), 4, "fast"),
    ]:
        ids, seen = engine.generate(*arguments)
        assert ids.shape == (1, 6 + steps) and seen == setting
    assert engine.generate(IDS, generation_config="fast")[1] == "fast"


def test_prompt_alone_is_held_to_the_limit_where_the_length_is_the_modules_affair():
    engine = init_inference(Own(), dtype="fp32", max_out_tokens=6)
    engine.generate(IDS)
    with pytest.raises(dualinfer.LengthError, match="7 tokens leaves no room"):
        engine.generate(torch.zeros(1, 7, dtype=torch.int64))
    noise = torch.rand(3, 64)  # no tokens, however many numbers
    assert engine.generate(noise)[0].shape == (3, 67)


def test_settings_of_another_kind_are_the_modules_own_affair():
    module = Own()
    module.generation_config = object()
    engine = init_inference(module, dtype="fp32", max_out_tokens=9)
    assert engine.generation_config is module.generation_config
    engine.generate(IDS)


def test_generation_config_of_the_engine_is_the_modules():
    model = make_gpt2()
    engine = init_inference(model, dtype="fp32")
    assert engine.generation_config is model.generation_config
    engine.generation_config = hf.GenerationConfig(max_new_tokens=3, pad_token_id=0)
    assert model.generation_config is engine.generation_config
    assert engine.generate(IDS).shape == (1, 9)
    engine.generation_config.num_beams = 2
    with pytest.raises(NotImplementedError, match="num_beams"):
        engine.generate(IDS)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(max_new_tokens=4),
        dict(max_length=10),
        dict(generation_config=hf.GenerationConfig(max_new_tokens=4)),
        dict(generation_config={"max_length": 10}),
    ],
    ids=str,
)
def test_exact_limit_passes_and_one_more_does_not(arguments):
    model = make_gpt2()
    prompt = dict(pad_token_id=0, eos_token_id=None, do_sample=False)
    if isinstance(arguments.get("generation_config"), dict):
        arguments = {"generation_config": hf.GenerationConfig(**arguments["generation_config"])}
    exact = init_inference(model, dtype="fp32", max_out_tokens=10)
    assert exact.generate(IDS, **prompt, **arguments).shape == (1, 10)
    small = init_inference(model, dtype="fp32", max_out_tokens=9)
    for given in ((IDS,), ()):
        named = {} if given else {"input_ids": IDS}
        with pytest.raises(dualinfer.LengthError, match=r"make 10, over max_out_tokens \(9\)"):
            small.generate(*given, **named, **prompt, **arguments)
    embedded = model.get_input_embeddings()(IDS)
    with pytest.raises(RuntimeError, match="over max_out_tokens"):
        small.generate(inputs_embeds=embedded, **prompt, **arguments)


def test_default_length_is_capped_by_the_limit():
    engine = init_inference(make_gpt2(), dtype="fp32", max_out_tokens=9)
    assert engine.generate(IDS, pad_token_id=0, eos_token_id=None).shape == (1, 9)
    with pytest.raises(dualinfer.LengthError, match="leaves no room"):
        engine.generate(torch.zeros(1, 9, dtype=torch.int64), pad_token_id=0)


@pytest.mark.parametrize("config", [None, {"x": 1}])
def test_encoder_and_decoder_are_each_held_to_the_limit(config):
    model = make_t5()
    engine = init_inference(model, {"config": config}, dtype="fp32", max_out_tokens=6)
    ids = torch.arange(3, 9)[None]
    assert engine.generate(ids, max_new_tokens=5, min_new_tokens=5).shape == (1, 6)
    for arguments, message in [
        (dict(input_ids=ids, max_new_tokens=6), "make 7"),
        (dict(input_ids=torch.ones(1, 7, dtype=torch.int64)), "encoder's input has 7"),
        (dict(inputs_embeds=torch.rand(1, 7, 16)), "encoder's input has 7"),
        (dict(input_ids=ids, decoder_input_ids=ids[:, :4], max_new_tokens=3), "make 7"),
    ]:
        with pytest.raises(dualinfer.LengthError, match=message):
            engine.generate(**arguments)


def test_sound_has_no_tokens_but_the_prompt_of_its_decoder_has():
    model = make_whisper()
    sound = torch.rand(1, 8, 100)
    engine = init_inference(model, dtype="fp32", max_out_tokens=12)
    out = engine.generate(sound, max_new_tokens=4)
    assert torch.equal(out, model.generate(sound, max_new_tokens=4))
    with pytest.raises(dualinfer.LengthError, match="make 17"):
        engine.generate(sound, prompt_ids=torch.arange(4, 12), max_new_tokens=9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pictures_have_no_tokens(dtype):
    class Captions(Own):
        def generate(self, pictures, max_new_tokens=3):
            return pictures

    engine = init_inference(Captions(), dtype="fp32", max_out_tokens=12)
    picture = torch.ones(1, 30, 4, 4).to(dtype)
    assert engine.generate(picture) is picture
    with pytest.raises(dualinfer.LengthError):
        engine.generate(torch.ones(1, 30, dtype=torch.int64))


def test_closed_engine_tells_so_and_has_a_generate():
    engine = init_inference(make_gpt2(), dtype="fp32")
    engine.close()
    assert hasattr(engine, "generate")
    with pytest.raises(dualinfer.ClosedError, match="init_inference"):
        engine.generate(IDS)


def test_report_of_a_module_speaks_of_no_layers():
    text = str(init_inference(torch.nn.Linear(2, 2), dtype="fp32").report())
    assert "0 layers" not in text and "no limit on tokens" in text


def test_unset_dtype_warns_where_the_modules_own_is_bfloat16(monkeypatch):
    monkeypatch.setattr("dualinfer.backends.default_dtype", lambda name: "float16")  # as on a GPU
    with pytest.warns(UserWarning, match="bfloat16 and dtype is unset"):
        engine = init_inference(torch.nn.Linear(2, 2).bfloat16())
    assert engine.dtype == torch.float16


@pytest.mark.parametrize(
    ("stored", "config", "expected", "why"),
    [
        ("bfloat16", None, "bfloat16", "own"),
        ("float16", None, "float16", "own"),
        ("float32", None, "float16", "the checkpoint is float32"),
        ("float32", "bfloat16", "bfloat16", "own"),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_unset_dtype_of_a_folder_is_the_checkpoints_own_on_a_gpu(
    fused, stored, config, expected, why, monkeypatch, tmp_path
):
    monkeypatch.setattr("dualinfer.backends.default_dtype", lambda name: "float16")  # as on a GPU
    write_llama(tmp_path, 40, stored)
    fields = json.loads((tmp_path / "config.json").read_text())
    if not fused:
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "alpha": 3.0}
        fields["rope_parameters"] = rope  # of which fused mode does not honour the last
    (tmp_path / "config.json").write_text(
        json.dumps(fields | ({"dtype": config} if config else {}))
    )
    told = nullcontext() if fused else pytest.warns(UserWarning, match="rope_parameters alpha")
    with told, init_inference(tmp_path, dtype="auto") as engine:
        assert engine.dtype == getattr(torch, expected)
        assert any("dtype was unset" in n and n.endswith(why) for n in engine.report().notes)
        assert f"{'fused' if fused else 'module'} mode, torch, {expected}" in repr(engine)


def test_gpu_without_bfloat16_computes_a_bfloat16_checkpoint_in_float16(monkeypatch, tmp_path):
    def refuse(backend, dtype):
        if dtype == "bfloat16":
            raise ConfigError("not here")

    monkeypatch.setattr("dualinfer.backends.default_dtype", lambda name: "float16")
    monkeypatch.setattr("dualinfer.backends.check_dtype", refuse)
    with init_inference(write_llama(tmp_path, 40, "bfloat16")) as engine:
        assert engine.dtype == torch.float16
        assert any("in which the device does not compute" in n for n in engine.report().notes)


def test_folder_of_another_family_runs_as_the_live_module_does(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=59)
    model = hf.Emu3ForCausalLM(hf.Emu3TextConfig(**sizes, **heads, **ends)).eval()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    ids = torch.randint(2, 59, (2, 5))
    live = init_inference(copy.deepcopy(model), dtype="fp32")
    engine = init_inference(tmp_path, dtype="fp32")
    assert (
        repr(engine)
        == repr(live)
        == ("InferenceEngine(Emu3ForCausalLM, module mode, torch, float32)")
    )
    assert torch.equal(engine(ids).logits, live(ids).logits)
    assert torch.equal(engine.generate(ids), live.generate(ids))
    assert engine.generate(ids).shape == (2, 12)
    report = engine.report()
    assert report.source == str(tmp_path)
    with pytest.raises(dualinfer.UnsupportedError, match="does not read again"):
        engine.refresh()
    assert any(
        "module mode, with transformers' Emu3ForCausalLM: model_type='emu3_text_model'" in n
        for n in report.notes
    )
    assert init_inference(tmp_path, args={"rms_norm_eps": 0.5}).config.rms_norm_eps == 0.5
    for options, way in (
        ({"kernel_inject": True}, "Without replace_with_kernel_inject"),
        ({"backend": "jax"}, "With backend='torch'"),
    ):
        with pytest.raises(
            ModelError, match=f"'emu3_text_model'.*{way} transformers' own Emu3ForCausalLM runs"
        ):
            init_inference(tmp_path, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "tiny", "auto_map": {"AutoConfig": "x.y"}},
            "Python code of the checkpoint",
        ),
        ({"architectures": ["Emu3ForNothing"]}, "transformers .* has no model Emu3ForNothing"),
        ({"architectures": ["pipeline"]}, "has no model pipeline"),
        ({"architectures": None}, "model_type='emu3_text_model' is not supported"),
        ({"hidden_size": "wide"}, "is not a valid config"),
        ({"architectures": ["ViTModel"]}, "Nor does module mode.*makes no ViTModel of a config of"),
    ],
)
def test_folder_that_no_mode_serves_is_told_why(fields, message, tmp_path):
    sound = {
        "model_type": "emu3_text_model",
        "architectures": ["Emu3ForCausalLM"],
        "pad_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(sound | fields))
    with pytest.raises(ModelError, match=message):
        init_inference(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_are_wanted_for_folders_unless_they_are_refused(backend, tmp_path, hf_model):
    write_llama(tmp_path, 40)

    def wants(model, **options):
        with init_inference(model, backend=backend, dtype="fp32", **options) as engine:
            assert "fused mode" in repr(engine) and "no kernels" in repr(engine)  # on a CPU
            return engine.inference_config.replace_with_kernel_inject

    assert wants(tmp_path) is True and wants(tmp_path, kernel_inject=False) is False
    if backend == "jax":
        assert wants(hf_model("llama-mqa")) is True


def test_unset_backend_is_the_one_that_is_installed(monkeypatch, tmp_path):
    write_llama(tmp_path, 40)
    with init_inference(tmp_path) as engine:
        assert engine.report().backend == "torch"
    absent = {"torch"}
    monkeypatch.setattr("dualinfer.config.installed._is_installed", lambda m: m not in absent)
    with init_inference(tmp_path) as engine:
        assert engine.report().backend == "jax"
    absent.add("flax")
    with pytest.raises(
        dualinfer.BackendNotAvailableError, match=r"needs torch.*dualinfer\[torch\]"
    ):
        init_inference(tmp_path)


def test_jax_modules_generate_takes_what_it_takes():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(np.ones(1, np.float32))

        def __call__(self, x):
            return x

        def generate(self, x, steps):
            return x * self.scale[...] + steps

    engine = init_inference(Model(), backend="jax", dtype="fp32", max_out_tokens=4)
    np.testing.assert_array_equal(engine.generate(np.ones(3, np.float32), 5), np.full(3, 6.0))


def test_beams_and_lengths_are_seen_wherever_the_signature_has_them():
    class Searching(Own):
        def generate(self, ids, num_beams=1, max_new_tokens=2):
            return ids

    engine = init_inference(Searching(), dtype="fp32", max_out_tokens=8)
    assert engine.generate(IDS, 1, 2) is IDS
    with pytest.raises(NotImplementedError, match="num_beams=2"):
        engine.generate(IDS, 2)
    with pytest.raises(dualinfer.LengthError, match="make 9"):
        engine.generate(IDS, 1, 3)
    for ids in ([[1] * 9], [[1], [1] * 9], [1] * 9):
        with pytest.raises(dualinfer.LengthError, match="9 tokens"):
            engine.generate(ids)
    assert engine.generate([[1] * 5])


@pytest.mark.parametrize("make", [make_gpt2, make_t5])
def test_hf_modules_take_ids_in_every_form_that_fused_mode_takes(make):
    engine = init_inference(make(), dtype="fp32")
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    more = {"decoder_input_ids": torch.tensor([[0]])} if make is make_t5 else {}
    whole, logits = engine.generate(IDS, **options), engine(IDS, **more).logits
    for ids in (IDS.tolist(), IDS[0].tolist(), IDS.numpy(), IDS[0].numpy().astype(np.int32)):
        assert torch.equal(engine.generate(ids, **options), whole)
        assert torch.equal(engine.generate(inputs=ids, **options), whole)
        given = {name: value.tolist() for name, value in more.items()}
        assert torch.equal(engine(ids, attention_mask=[[1] * 6], **given).logits, logits)
    ragged = engine.generate([[3, 4], *IDS.tolist()], hf.GenerationConfig(**options))
    alone = engine.generate({"input_ids": [[3, 4]]}, **options)
    assert torch.equal(ragged[1:], whole) and torch.equal(ragged[:1, -4:], alone[:, -4:])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, "a"]], "expected integers"),
        ([[5, 99]], "is 99, outside the vocabulary of 25"),
        ([[]], "empty|no token"),
        ({"input_ids": [[5]], "more": 1}, r"\*\*inputs"),
        ("text", "generate_text"),
        (5, "input_ids is an int"),
    ],
    ids=str,
)
def test_what_cannot_be_ids_of_a_hf_module_is_refused(ids, message):
    engine = init_inference(make_gpt2(), dtype="fp32")
    with pytest.raises(dualinfer.ArgumentError, match=message):
        engine(ids)
    with pytest.raises(dualinfer.ArgumentError, match=message):
        engine.generate(inputs=ids)
    with pytest.raises(dualinfer.ArgumentError, match="rows differ in length"):
        engine([[1], [2, 3]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_modules_take_lists_or_it_is_said_that_they_do_not(backend):
    from flax import nnx

    class Embedding(nnx.Module if backend == "jax" else torch.nn.Module):
        def __init__(self):
            super().__init__()
            rngs = {"rngs": nnx.Rngs(0)} if backend == "jax" else {}
            self.embed = (nnx.Embed if backend == "jax" else torch.nn.Embedding)(9, 4, **rngs)

        def __call__(self, ids, sizes=(1,)):
            return self.embed(ids) * len(sizes)

        forward = generate = __call__

    if backend == "torch":
        del Embedding.__call__
    engine = init_inference(Embedding(), backend=backend, dtype="fp32")
    ids = torch.tensor([[1, 2]])
    assert engine(ids, sizes=[1, 2]).shape == (1, 2, 4)
    for call in (engine.forward, engine.generate):
        with pytest.raises(
            dualinfer.ArgumentError, match=f"argument 0, a list.*arrays of {backend}"
        ):
            call([[1, 2]])
        with pytest.raises(dualinfer.ArgumentError, match=f"ids, a list.*arrays of {backend}"):
            call(ids=[[1, 2]])
    with pytest.raises((TypeError, AttributeError)):  # no input's fault
        engine(ids, sizes=None)
