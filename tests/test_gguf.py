"""GGUF files give what they mean, on both backends; the package `gguf` writes and explains them."""

import json
import math
import re
import struct
from contextlib import suppress

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import gguf  # noqa: E402
import transformers as hf  # noqa: E402
from gguf import GGMLQuantizationType as Type  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import dualinfer  # noqa: E402
from dualinfer.checkpoint.described.hf_config import read_config, read_generation_config  # noqa: E402
from dualinfer.checkpoint.described.tokenizer import load_tokenizer  # noqa: E402
from dualinfer.checkpoint.files.safetensors import StoredFile  # noqa: E402
from dualinfer.checkpoint.gguf.file import GgufFile  # noqa: E402
from dualinfer.checkpoint.gguf.tensors import GgufSource  # noqa: E402
from dualinfer.cli.main import app  # noqa: E402
from dualinfer.errors import (  # noqa: E402
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DualinferError,
    UnsupportedError,
)
from dualinfer.quantization.formats.ggml import TYPES  # noqa: E402

from .cases.decoders import CASES  # noqa: E402
from .gguf_files import write_gguf  # noqa: E402
from .models import BACKENDS, on_backends, random_ids, relative_rms  # noqa: E402

LIMIT = 1e-5
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
WIDE |= {"num_key_value_heads": 2}
LARGE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
LARGE |= {"num_key_value_heads": 2}
# A type, and fields that make rows fit its blocks.
FAMILIES = {
    "llama-gqa": (Type.Q8_0, WIDE),
    "llama-bias": (Type.F16, {"hidden_act": "silu"}),
    "llama-llama3": (Type.F32, {}),
    "llama-yarn": (Type.BF16, {}),
    "llama-mqa": (Type.Q4_0, WIDE),
    "mistral": (Type.Q4_1, WIDE),
    "qwen2": (Type.Q5_0, WIDE),
    "qwen3": (Type.Q5_1, WIDE),
    "gemma2": (Type.Q8_0, {**WIDE, "query_pre_attn_scalar": 32}),
    "gemma3": (Type.F32, {"query_pre_attn_scalar": 22, "sliding_window_pattern": 6}),
    "gpt2": (Type.Q8_0, {"n_embd": 64, "n_head": 4}),
    "bloom": (Type.Q4_0, {"hidden_size": 64, "n_head": 4}),
    "neox": (Type.Q8_0, {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}),
    "bert": (Type.F16, {}),
}
BLOCKS = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K)
FIRST = ("llama-gqa", "llama-mqa", "gpt2")  # JAX shows no more of the others
pytestmark = pytest.mark.xdist_group("ranks")


def tiny(name, **changes):
    """A model of its own, whose biases and norms are no constants."""
    case = CASES[name]
    torch.manual_seed(3)
    model = case.model(case.make_config(**changes)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn_like(tensor))
    return model


def engine(path, backend, **options):
    return dualinfer.init_inference(path, backend=backend, dtype="fp32", **options)


def output(result):
    return result.logits if getattr(result, "logits", None) is not None else result[0]


def answer(model, ids):
    with torch.no_grad():
        return output(model(torch.as_tensor(ids))).numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function from a case to its file, token ids, and what HF's model makes of them."""
    files = {}

    def get(name):
        if name not in files:
            kind, changes = FAMILIES[name]
            model = tiny(name, **changes)
            path = tmp_path_factory.mktemp(name) / "model.gguf"
            write_gguf(path, model, lambda _: kind)
            ids = random_ids(2, 9)
            files[name] = path, ids, answer(model, ids)
        return files[name]

    return get


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A file of all types that are made floats, in turns, and its model."""
    model = tiny("llama-gqa", **LARGE)
    path = tmp_path_factory.mktemp("blocks") / "model.gguf"
    write_gguf(path, model, lambda name: BLOCKS[sum(map(ord, name)) % len(BLOCKS)])
    return path, model


@pytest.mark.parametrize(
    ("name", "backend"), on_backends(FAMILIES, [name for name in FAMILIES if name not in FIRST])
)
def test_files_are_what_they_mean(name, backend, made):
    path, ids, expected = made(name)
    with engine(path, backend) as small:
        assert relative_rms(output(small(ids)), expected) < LIMIT
        kind, report = FAMILIES[name][0], small.report()
    if kind in (Type.Q8_0, Type.Q4_0):
        scheme = "int8, groups of 32" if kind is Type.Q8_0 else "int4, groups of 32"
        assert {*report.weights} == {scheme, "float32", "head"}
        assert any("stay quantized" in note for note in report.notes)
    else:
        assert {*report.weights} <= {"float32", "head"}
    if kind in (Type.Q4_1, Type.Q5_0, Type.Q5_1):
        assert any(f"{kind.name} are dequantized" in note for note in report.notes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_blocks_become_floats_as_transformers_makes_them(backend, blocks):
    path, model = blocks
    theirs = hf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ids = random_ids(2, 9)
    assert relative_rms(answer(theirs, ids), answer(model, ids)) < LIMIT
    with engine(path, backend) as dense:
        assert relative_rms(dense(ids).logits, answer(theirs, ids)) < LIMIT
    with engine(path, backend, quant="int8") as small:
        assert "int8, rows" in small.report().weights
        assert relative_rms(small(ids).logits, answer(theirs, ids)) < 0.1


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "bloom", "gemma3"])
def test_parts_are_those_of_the_whole_and_no_more_is_read(name, made, blocks, monkeypatch):
    path = blocks[0] if name == "llama-gqa" else made(name)[0]
    source, generator = GgufSource(path), np.random.default_rng(2)
    for tensor in source.names():
        whole = source.read(tensor)
        assert whole.shape == source.shape(tensor) and whole.dtype == source.dtype(tensor)
        cuts = [np.sort(generator.integers(0, n + 1, 2)) for n in whole.shape]
        index = tuple(slice(int(a), int(b)) for a, b in cuts)
        np.testing.assert_array_equal(source.read(tensor, index), whole[index])
    read = []
    monkeypatch.setattr(StoredFile, "_advise", lambda self, start, count: read.append(count))
    largest = max(source.names(), key=lambda tensor: np.prod(source.shape(tensor)))
    rows = source.shape(largest)[0]
    source.read(largest, (slice(0, rows // 4), slice(None)))
    quarter = sum(read)
    source.read(largest)
    assert quarter <= 0.26 * (sum(read) - quarter)


def share_of(path, ids):
    """What a rank's engine gives."""
    with engine(path, "torch", tensor_parallel={"tp_size": 2}) as made:
        return made(ids).logits


@pytest.mark.parametrize("name", ["llama-gqa", "bloom"])
def test_files_split_over_devices(name, made, crew):
    path, ids, expected = made(name)
    for logits in crew.run(share_of, path, ids):
        assert relative_rms(logits, expected) < LIMIT
    with engine(path, "jax", tensor_parallel={"tp_size": 2}) as split:
        assert relative_rms(split(ids).logits, expected) < LIMIT


def test_quantized_files_are_not_quantized_again(made):
    with pytest.raises(ConfigError, match="quantized already \\(GGUF\\)"):
        engine(made("llama-gqa")[0], "torch", quant="int4")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_live_module_is_filled(backend, made):
    path, ids, expected = made("neox")
    with engine(tiny("neox", **FAMILIES["neox"][1]), backend, checkpoint=str(path)) as filled:
        logits = filled(torch.as_tensor(ids) if backend == "torch" else ids).logits
        assert relative_rms(np.asarray(logits), expected) < LIMIT
        if backend == "jax":  # in fused mode
            assert "int8, groups of 32" in filled.report().weights


def test_the_dtype_is_that_of_most_elements(made):
    expected = {"llama-gqa": "bfloat16", "bert": "float16", "llama-llama3": "float32"}
    for name, dtype in expected.items():
        assert str(read_config(made(name)[0]).to_dict()["dtype"]) == dtype


TEXT = "Hello <|eot|> you, 12345 don't GPU\n  x"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|eot|>{% endfor %}"
SPECIAL = ["<|bos|>", "<|end|>", "<|eot|>"]


def describe_tokens(writer):
    """A tokenizer as llama.cpp writes GPT-2's, trained on few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, TEMPLATE, __doc__], trainer)
    held = json.loads(tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(sorted(held["vocab"], key=held["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in held["merges"]])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(held["vocab"]) - len(SPECIAL)))
    for number, name in enumerate(("bos", "eos", "eot")):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template(TEMPLATE)
    writer.add_float32("general.sampling.temp", 0.5)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A file with a tokenizer, the only one in its folder."""
    path = tmp_path_factory.mktemp("speaking") / "model.gguf"
    return write_gguf(path, tiny("llama-mqa", **WIDE), lambda _: Type.F16, describe_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_with_one_file_is_a_model(backend, speaking, tmp_path):
    with engine(speaking.parent, backend) as made:
        assert made.generation_config.eos_token_id == [1, 2]
        assert made.generation_config.do_sample and made.generation_config.temperature == 0.5
        text = made.generate_text("Hello", max_new_tokens=5, do_sample=False)
        made.save_pretrained(tmp_path / "saved")
    with engine(tmp_path / "saved", backend) as again:
        assert again.generate_text("Hello", max_new_tokens=5, do_sample=False) == text


def test_commands_take_a_file(speaking, made, tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, [str(part) for part in arguments])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    text = ("generate", speaking, "Hello", "--max-new-tokens", 3, "--backend", "both")
    assert "The texts agree." in run(*text)
    held = run("plan", made("llama-gqa")[0], "--tp", 2)
    assert "8.50 bits an element" in held and "stay quantized" in held
    assert "int8" in run("quantize", speaking, tmp_path / "small", "--scheme", "int8")
    assert load_tokenizer(tmp_path / "small")(TEXT) == load_tokenizer(speaking)(TEXT)


def test_split_files_are_one_model(tmp_path):
    model = tiny("llama-mqa", **WIDE)
    write_gguf(tmp_path / "m.gguf", model, split_max_tensors=5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[1] == f"m-00002-of-{len(names):05}.gguf"
    ids = random_ids(1, 5)
    for path in (tmp_path, tmp_path / names[1]):
        with engine(path, "torch") as made:
            assert relative_rms(made(ids).logits, answer(model, ids)) < LIMIT
    (tmp_path / names[2]).unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"{names[2]} lie not beside"):
        engine(tmp_path / names[0], "torch")


def test_of_several_files_one_must_be_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointNotFoundError, match=r"2 GGUF models: a.gguf, b.gguf\. Pass"):
        engine(tmp_path, "torch")


def minimal(path, architecture="llama", kind=0, version=3, fields=(), alignment=32):
    """A file of one tensor, and fields of whole numbers."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", version, 1, 1 + len(fields))
    head += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    for name, value in fields:
        head += text(name) + struct.pack("<II", 4, value)
    head += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 256, 4, kind, 0)
    path.write_bytes(head + bytes(-len(head) % alignment + 4 * 4 * 256))
    return path


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (UnsupportedError, {"kind": 23}, r"token_embd.weight is IQ4_XS.*Q4_K.*Take the model's"),
        (UnsupportedError, {"version": 1}, "version 1.*Convert the model again"),
        (UnsupportedError, {"version": 3 << 24}, "big-endian"),
        (dualinfer.ModelError, {"architecture": "mamba"}, "of 'mamba'.*gptneox.*HF checkpoint"),
        (dualinfer.ModelError, {}, "llama.embedding_length=None; expected a positive number"),
        (CheckpointError, {"fields": [("general.alignment", 5)]}, "alignment is 5"),
        (CheckpointError, {"fields": [("a", 1), ("a", 2)]}, "names 'a' twice"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named(error, options, message, tmp_path):
    with pytest.raises(error, match=message):
        engine(minimal(tmp_path / "m.gguf", **options), "jax")


def test_fields_and_tensors_must_fit_the_family(tmp_path):
    model = tiny("llama-mqa")
    path = tmp_path / "m.gguf"
    write_gguf(path, model, describe=lambda w: w.add_uint32("llama.expert_count", 8))
    with pytest.raises(dualinfer.ModelError, match=r"llama.expert_count=8.*not honoured"):
        engine(path, "jax")
    extra = np.ones((2, 2), np.float32)
    write_gguf(path, model, describe=lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", extra))
    with pytest.raises(CheckpointError, match=r"left over 1: blk.0.ffn_gate_inp.weight"):
        engine(path, "jax")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"ffn_up.weight", b"ffn_ap.weight"))
    with pytest.raises(CheckpointError, match=r"missing 1: model.layers.0.mlp.up_proj.weight"):
        engine(path, "jax")
    path.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=r"ends at byte.*cut short"):
        engine(path, "jax")


def places_of(path):
    """Where a file's header says each tensor's type; its offset follows."""
    raw = path.read_bytes()
    return {
        name: raw.index(name.encode()) + len(name) + 4 + 8 * len(file_shape)
        for name, file_shape in GgufFile(path)._shapes.items()
    }


def test_tensors_fill_the_file(tmp_path):
    """A hole, a tensor within another, one of another type, and bytes between or behind."""
    path = write_gguf(tmp_path / "m.gguf", tiny("llama-mqa", **WIDE), lambda _: Type.Q8_0)
    raw, file, bad = path.read_bytes(), GgufFile(path), tmp_path / "bad.gguf"
    starts = sorted(entry.start for entry in file._entries.values())

    def refused(content):
        bad.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"begins at byte|end at byte|ends at byte|rows"):
            GgufFile(bad)

    for place in places_of(path).values():
        offset = int.from_bytes(raw[place + 4 : place + 12], "little")
        for wrong in (offset + 32, max(0, offset - 32)):
            if wrong != offset:
                refused(raw[: place + 4] + wrong.to_bytes(8, "little") + raw[place + 12 :])
        kind = raw[place]
        for other in TYPES.keys() - {kind}:
            refused(raw[:place] + bytes([other]) + raw[place + 1 :])
    for at in (*starts, len(raw)):
        refused(raw[:at] + bytes(32) + raw[at:])


# Of the makers' config.json: layers, width, heads, what a head has, and what scores are scaled by.
GEMMAS = {
    "gemma-2-2b": ("gemma2", 26, 2304, 8, 256, 256),
    "gemma-2-27b": ("gemma2", 46, 4608, 32, 128, 144),
    "gemma-3-12b": ("gemma3", 48, 3840, 16, 256, 256),
    "gemma-3-27b": ("gemma3", 62, 5376, 32, 128, 168),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_gemmas_are_what_their_makers_say(name, tmp_path):
    kind, layers, width, heads, head_dim, scalar = GEMMAS[name]
    fields = {"embedding_length": width, "block_count": layers, "feed_forward_length": 64}
    fields |= {"context_length": 8192, "attention.head_count": heads}
    fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", kind)
    for field, value in fields.items():
        writer.add_uint32(f"{kind}.{field}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((4, 256), np.float32))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    found = read_config(tmp_path / "m.gguf").to_dict()
    assert found["query_pre_attn_scalar"] == scalar
    # What the file leaves out: llama.cpp's soft cap, and Gemma 3's five windows to one whole layer.
    assert found.get("attn_logit_softcapping") == (50.0 if kind == "gemma2" else None)
    every = 2 if kind == "gemma2" else 6
    wanted = [("sliding", "full")[(i + 1) % every == 0] + "_attention" for i in range(layers)]
    assert found["layer_types"] == wanted


def test_yarns_own_factor_scales_what_it_makes_of_its_length(tmp_path):
    """llama.cpp: both factors, times 1 + 0.1 ln of how much longer texts become."""
    model = tiny("llama-yarn-factor")
    rope = model.config.rope_parameters

    def describe(writer):
        own = rope["attention_factor"] / (1 + 0.1 * math.log(rope["factor"]))
        writer.add_float32("llama.rope.scaling.attn_factor", own / 2)
        writer.add_float32("llama.rope.scaling.yarn_attn_factor", 2.0)
        for name in ("beta_fast", "beta_slow"):
            writer.add_float32(f"llama.rope.scaling.yarn_{name}", rope[name])

    path, ids = tmp_path / "m.gguf", random_ids(2, 9)
    write_gguf(path, model, describe=describe)
    with engine(path, "torch") as made:
        assert relative_rms(made(ids).logits, answer(model, ids)) < LIMIT


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, False), (0.5, True)])
def test_a_makers_temperature_of_zero_is_no_sampling(temperature, samples, tmp_path):
    def describe(writer):
        writer.add_float32("general.sampling.temp", temperature)
        writer.add_float32("general.sampling.top_p", 0.9)

    path = write_gguf(tmp_path / "m.gguf", tiny("llama-mqa"), describe=describe)
    found = read_generation_config(path, read_config(path)).to_dict()
    assert bool(found.get("do_sample")) == samples
    assert (found.get("top_p") == pytest.approx(0.9)) == samples


@pytest.mark.parametrize(
    ("name", "field", "own", "other"),
    [
        ("bloom", "attention.max_alibi_bias", 8.0, 4.0),
        ("bert", "attention.causal", False, True),
    ],
)
def test_attention_is_the_familys_own(name, field, own, other, tmp_path):
    model = tiny(name)
    field = f"{model.config.model_type}.{field}"
    for value in (own, other):

        def describe(writer, value=value):
            for data in writer.kv_data:
                data.pop(field, None)
            (writer.add_bool if type(value) is bool else writer.add_float32)(field, value)

        path = write_gguf(tmp_path / f"{value}.gguf", model, describe=describe)
        if value == own:
            read_config(path)
    with pytest.raises(DualinferError, match=re.escape(f"{field}={other}, which is not honoured")):
        read_config(path)


def test_hostile_headers_are_told(speaking, tmp_path):
    raw, generator = speaking.read_bytes(), np.random.default_rng(7)
    end = min(entry.start for entry in GgufFile(speaking)._entries.values())
    path = tmp_path / "m.gguf"
    for i in range(60):
        bad, at = bytearray(raw), int(generator.integers(4, end))
        if i % 3 == 0:
            bad = bad[:at]
        else:
            bad[at : at + 8] = b"\xff" * 8 if i % 3 == 1 else bytes([i, *bytes(7)])
        path.write_bytes(bad)
        with suppress(DualinferError):  # what does not matter may be read; no other error is raised
            GgufSource(path)
            load_tokenizer(path)
