"""Folders that engines and `dualinfer quantize` write mean the same to transformers and to us."""

import copy
import json
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
hf = pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from dualinfer import ArgumentError, ConfigError, UnsupportedError  # noqa: E402
from dualinfer.checkpoint.sources import open_checkpoint  # noqa: E402
from dualinfer.cli.main import app  # noqa: E402
from dualinfer.quantization import METHODS  # noqa: E402
from dualinfer.quantization.meaning import dequantize  # noqa: E402

from .cases import make_model  # noqa: E402
from .compressed import write  # noqa: E402
from .models import BACKENDS, random_ids, relative_rms  # noqa: E402
from .test_compressed_tensors import FORMS, emulated, logits_of_hf  # noqa: E402
from .test_quantize_on_load import ASYMMETRIC, engine, hashes  # noqa: E402

# Groups of 32 divide all of its widths; the head is a weight of its own.
SIZES = {"hidden_size": 96, "intermediate_size": 160, "tie_word_embeddings": False}
OF_16 = {"weight": {"num_bits": 4, "q_type": "asymmetric", "group_size": 16}}
INT4 = {"weight": {"num_bits": 4, "q_groups": 1}}
INPUTS = {"weight": {"num_bits": 8}, "activation": {"enabled": True}}
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("greedy")]


@pytest.fixture(scope="module")
def model():
    return make_model("llama-gqa", **SIZES)


def check_by_compressed_tensors(folder):
    """Each matrix of the folder is to its library what it is to us."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    open_matrix = METHODS["compressed-tensors"](said, open_checkpoint(folder))
    tensors = load_file(folder / "model.safetensors")
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    asked = ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")
    assert len(modules.intersection(asked)) > 1
    for name in modules.intersection(asked):
        for group in said["config_groups"].values():
            if any(
                re.match(t.removeprefix("re:"), name) or t == "Linear" for t in group["targets"]
            ):
                break
        parts = {
            k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")
        }
        compressor = BaseCompressor.get_value_from_registry(group["format"])
        scheme = QuantizationScheme(**{k: v for k, v in group.items() if v is not None})
        theirs = compressor.decompress(parts, scheme)["weight"].float().numpy()
        ours = dequantize(open_matrix(f"{name}.weight"))
        limit = 1e-2 if "fp4" in group["format"] else 1e-6  # made in bfloat16
        assert relative_rms(ours, theirs) < limit, name


@pytest.mark.parametrize("asked", ["int8", "fp8", "nvfp4", "mxfp4", INT4, ASYMMETRIC], ids=str)
def test_transformers_loads_the_same_values(asked, model, tmp_path):
    """And engines of both backends the same bytes."""
    folder, ids = tmp_path / "out", random_ids(2, 9)
    with engine(model, quant=asked) as made:
        expected, held = np.asarray(made(ids).logits), hashes(made)
        made.save_pretrained(folder)
    if asked not in ("nvfp4", "mxfp4", ASYMMETRIC):  # which transformers 5.23 cannot run in float32
        # It dequantizes by the first group alone; running compressed it knows all of them.
        theirs = logits_of_hf(folder, ids, dequantize=asked == "int8")
        assert relative_rms(expected, theirs) < 1e-5
    check_by_compressed_tensors(folder)
    for backend in BACKENDS:
        with engine(folder, backend) as again:
            assert relative_rms(again(ids).logits, expected) < 1e-6
            assert hashes(again) == held
            assert again.report().weights["head"] == "int8, rows"
    with engine(folder, "jax", tp=2) as again:
        assert relative_rms(again(ids).logits, expected) < 1e-5


@pytest.mark.parametrize(
    "form",
    ["FP8", "FP8-blocks", "FP8-odd-blocks", "W4A16-tensor", "NVFP4", "MXFP4", "MXFP8", "MXFP4A16"],
)
def test_checkpoints_are_written_as_they_are(form, tmp_path):
    """With what scales the inputs, and by two devices where groups of inputs can be shared."""
    path, out, ids = tmp_path / "in", tmp_path / "out", random_ids(2, 9)
    seed = 3 if form == "FP8-blocks" else 0  # so that no input lies near a tie
    narrow = {"hidden_size": 32} if form == "MXFP4A16" else {}  # rows of one group
    write(path, {"group_0": FORMS[form][0][0]}, seed=seed, **narrow)
    with engine(path, "jax", tp=1 if form in ("FP8-blocks", "MXFP4", "MXFP8") else 2) as made:
        made.save_pretrained(out)
    with engine(path) as one, engine(out) as again:
        expected = np.asarray(one(ids).logits)
        assert hashes(again) == hashes(one)
        assert relative_rms(again(ids).logits, expected) < 1e-6
        assert again.report().weights == one.report().weights
    check_by_compressed_tensors(out)
    if form[:2] in ("NV", "MX"):  # which transformers 5.23 cannot run in float32
        with torch.no_grad():
            theirs = emulated(out)(torch.tensor(ids)).logits.numpy()
    else:
        theirs = logits_of_hf(out, ids, dequantize=False)
    assert relative_rms(expected, theirs) < 1e-5


def test_a_tied_head_becomes_a_weight_of_its_own(tmp_path):
    model, ids = make_model("llama-gqa", **SIZES | {"tie_word_embeddings": True}), random_ids(2, 9)
    with engine(model, quant="int8") as made:
        expected = np.asarray(made(ids).logits)
        made.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    theirs = logits_of_hf(tmp_path / "out", ids, dequantize=True)
    assert relative_rms(expected, theirs) < 1e-5
    with engine(tmp_path / "out", "jax") as again:
        assert relative_rms(again(ids).logits, expected) < 1e-6


@pytest.mark.parametrize(
    "case", ["ernie-masked", pytest.param("nomic_bert-masked", marks=pytest.mark.slow)]
)
def test_a_tied_masked_head_becomes_weights_of_its_own(case, tmp_path):
    """With its bias, where HF ties that as well."""
    model, ids = make_model(case), random_ids(2, 9, vocab=99)
    with engine(model, quant="int8") as made:
        expected = np.asarray(made(ids).logits)
        made.save_pretrained(tmp_path)
    with engine(tmp_path) as again:
        assert relative_rms(again(ids).logits, expected) < 1e-6
    theirs = logits_of_hf(tmp_path, ids, dequantize=True, model_class=type(model))
    assert relative_rms(expected, theirs) < 1e-5


def test_scales_keep_their_dtype(tmp_path):
    model = make_model("llama-gqa", **SIZES).bfloat16()
    with engine(model, quant=ASYMMETRIC) as made:
        held = hashes(made)
        made.save_pretrained(tmp_path / "out")
    assert (
        load_file(tmp_path / "out" / "model.safetensors")[
            "model.layers.0.mlp.up_proj.weight_scale"
        ].dtype
        == torch.bfloat16
    )
    with engine(tmp_path / "out") as again:
        assert hashes(again) == held


def test_quantized_inputs_are_said(model, tmp_path):
    with engine(model, quant=INPUTS) as made:
        made.save_pretrained(tmp_path / "out")
        scheme = made.runner.params.layers[0]["up.weight"].scheme
        held = hashes(made)
    with engine(tmp_path / "out") as again:
        assert again.runner.params.layers[0]["up.weight"].scheme == scheme
        assert hashes(again) == held


def share_of(model, asked, out):
    """What a rank has, which writes the model, too: while it is made, and when it is asked to."""
    with engine(model, quant=asked, tp=2, save_mp_checkpoint_path=str(out / "mp")) as made:
        made.save_pretrained(out / "whole")
        return np.asarray(made(random_ids(2, 9)).logits), made.report().notes


def test_several_devices_write_what_one_device_has(model, crew, tmp_path):
    with engine(model, quant=INT4) as one:
        held, ids = hashes(one), random_ids(2, 9)
        expected = np.asarray(one(ids).logits)
    # A copy: what goes to other processes is moved to memory that they share.
    for logits, notes in crew.run(share_of, copy.deepcopy(model), INT4, tmp_path, world=2):
        assert relative_rms(logits, expected) < 1e-5
        assert any("saved quantized, in 1 file" in note for note in notes)
    jax_out = str(tmp_path / "jax mp")
    with engine(model, "jax", tp=2, quant=INT4, save_mp_checkpoint_path=jax_out) as made:
        made.save_pretrained(tmp_path / "jax whole")
    for name in ("mp", "whole", "jax mp", "jax whole"):
        with engine(tmp_path / name) as again:
            assert hashes(again) == held
            assert relative_rms(again(ids).logits, expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_engine_writes_a_plain_folder(backend, tmp_path):
    model, ids = make_model("gpt2"), random_ids(2, 9)
    with engine(model, backend) as made:
        expected = np.asarray(made(ids).logits)
        made.save_pretrained(tmp_path / "out", max_shard_size=300_000)
        with pytest.raises(ConfigError, match=r"folder=.*holds"):
            made.save_pretrained(tmp_path / "out")
        with pytest.raises(ArgumentError, match="max_shard_size='much'"):
            made.save_pretrained(tmp_path / "more", max_shard_size="much")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert relative_rms(expected, theirs(torch.tensor(ids)).logits.numpy()) < 1e-4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        (
            "gpt2",
            "int8",
            "is a Conv1D of transformers, which compressed-tensors.*Keep the plain model",
        ),
        ("llama-gqa", "int4", "compressed-tensors has whole groups alone"),
    ],
)
def test_what_the_format_cannot_say_is_refused_and_leaves_nothing(name, asked, said, tmp_path):
    model = make_model(name)  # it must live: what is saved is read from it
    with (
        engine(model, quant=asked) as made,
        pytest.raises(UnsupportedError, match=said),
    ):
        made.save_pretrained(tmp_path / "out")
    with pytest.raises(UnsupportedError, match=said):
        engine(model, quant=asked, save_mp_checkpoint_path=str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [("--scheme", "int8"), ("--group-size", "16", "--asymmetric")])
def test_the_command_writes_what_an_engine_runs(options, model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("plain")
    done = CliRunner().invoke(app, ["quantize", "plain", "out", *options])
    assert done.exit_code == 0, done.output
    assert "down_proj" in done.output and "lm_head: int8, rows" in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines())
    assert "`dualinfer chat out` runs it." in " ".join(done.output.split())
    asked = "int8" if "int8" in options else OF_16
    with engine("plain", quant=asked) as one, engine("out") as other:
        assert hashes(one) == hashes(other)
        ids = random_ids(2, 9)
        assert relative_rms(one(ids).logits, other(ids).logits) < 1e-6
    again = CliRunner().invoke(app, ["quantize", "plain", "out"])
    assert again.exit_code == 1 and "OUT='out' holds config.json" in again.output


def test_the_command_refuses_a_scheme_that_is_none():
    done = CliRunner().invoke(app, ["quantize", "a", "b", "--scheme", "int3"])
    assert done.exit_code == 2 and "int3: expected one of int8, int4, fp8" in done.output


def test_the_command_refuses_groups_of_floats():
    done = CliRunner().invoke(app, ["quantize", "a", "b", "--scheme", "fp8", "--group-size", "4"])
    assert done.exit_code == 2 and "--group-size and --asymmetric go with int8 and" in done.output
