"""bitsandbytes checkpoints that transformers wrote mean what bitsandbytes takes them for."""

import numpy as np
import pytest
import torch
import transformers as hf
from bitsandbytes import functional

import dualinfer
from dualinfer import CheckpointError, UnsupportedError
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.quantization.formats.bitsandbytes import PLAIN, opener

from .formats import check_logits, check_shapes, check_slices, edit, open_folder, values
from .models import BACKENDS, VOCAB, random_ids, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

MODULES = ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
# hidden 96: blocks of 64 end within rows. inner 100: a divisor of 4 alone. head of 32.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
FORMS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4-in-bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "int8": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "up_proj"]},
}


def load(folder, form, **more):
    dtype = torch.float16 if form == "int8" else torch.float32
    return hf.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=dtype, **more)


def dequantize_4bit(data, state, *_, **__):
    """By bitsandbytes' own tensor operations.

    Its kernels for CPUs with AVX-512 take rows for whole blocks.
    """
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    codes, code = data.reshape(-1).view(torch.uint8), _get_4bit_code(state.quant_type, data.device)
    about = absmax.float(), code, state.blocksize, state.shape, state.dtype
    matrix = _dequantize_4bit_compute(codes, *about)
    return matrix.t() if len(data) == 1 else matrix  # as bitsandbytes' own gives it


@pytest.fixture(scope="module", autouse=True)
def portable():
    """What bitsandbytes computes does not depend on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "dequantize_4bit", dequantize_4bit)
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a form to a folder that transformers wrote, before any forward pass."""
    top = tmp_path_factory.mktemp("bitsandbytes")
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).save_pretrained(top / "plain")

    def make(form):
        if not (top / form).exists():
            config = hf.BitsAndBytesConfig(**FORMS[form])
            load(top / "plain", form, quantization_config=config).save_pretrained(top / form)
        return top / form

    return make


def dequantized(weight):
    """What bitsandbytes takes a parameter for."""
    if weight.dtype == torch.int8:
        return functional.int8_vectorwise_dequant(weight.data, weight.SCB).numpy()
    return functional.dequantize_4bit(weight.data, weight.quant_state).float().numpy()


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_what_bitsandbytes_dequantizes(form, folders):
    folder = folders(form)
    opener, oracle = open_folder(folder), load(folder, form)
    for module in MODULES:
        name = f"model.layers.1.{module}"
        matrix = opener(f"{name}.weight")
        expected = dequantized(oracle.get_submodule(name).weight)
        assert matrix.shape == expected.shape
        assert matrix.scheme.codes == ("int8" if form == "int8" else "table")
        exact = 1e-6 if form == "int8" else 0
        np.testing.assert_allclose(values(matrix), expected, rtol=exact, atol=0)
        check_slices(matrix)
    check_shapes(folder, f"{name}.weight")
    assert opener("model.embed_tokens.weight") is None
    assert opener("lm_head.weight") is None
    assert bool(opener.notes) == (form == "int8")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["nf4-double", "int8"])
def test_logits_are_those_of_the_dequantized_weights(form, backend, folders):
    notes = check_logits(folders(form), backend).notes
    assert any("only the weights are in 8 bits" in note for note in notes) == (form == "int8")


def test_gpt2_whose_weights_are_transposed(tmp_path):
    """bitsandbytes holds Conv1D's as those of Linear are; rows are whole blocks: see above."""
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
    )
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    quantized = hf.BitsAndBytesConfig(**FORMS["nf4"])
    model, ids = load(tmp_path / "plain", "nf4", quantization_config=quantized), random_ids(2, 9)
    model.save_pretrained(tmp_path / "nf4")
    with torch.no_grad(), dualinfer.init_inference(str(tmp_path / "nf4"), dtype="fp32") as engine:
        expected = model(torch.as_tensor(ids)).logits.numpy()
        assert relative_rms(engine(ids).logits, expected) < 1e-5
        assert any("4-bit table" in kind for kind in engine.report().ops)


def test_blocks_are_those_that_rows_and_blocks_share(folders):
    opener = open_folder(folders("nf4"))
    assert opener("model.layers.0.self_attn.q_proj.weight").scheme.columns == 32
    assert opener("model.layers.0.mlp.down_proj.weight").scheme.columns == 4


def test_older_configs_name_no_method(folders):
    opener = open_folder(folders("nf4"), quant_method=None)
    assert opener("model.layers.0.self_attn.q_proj.weight") is not None


def test_plain_weights_under_a_config_of_codes_are_told(folders):
    plain = open_checkpoint(folders("nf4").parent / "plain")
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = opener(how, plain)
    assert found("model.layers.0.mlp.up_proj.weight") is None
    assert found.notes == (PLAIN,)
    assert PLAIN not in open_folder(folders("nf4")).notes
    with pytest.raises(UnsupportedError, match=r"bnb_4bit_quant_type=.*zz.*It is nf4 or fp4"):
        opener({**how, "bnb_4bit_quant_type": "zz"}, plain)


def test_what_contradicts_the_config_is_an_error(folders):
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match="llm_int8_skip_modules"):
        open_folder(folders("nf4"), llm_int8_skip_modules=["q_proj"])(name)
    with pytest.raises(UnsupportedError, match="load_in_4bit"):
        open_folder(folders("nf4"), load_in_8bit=True)
    with pytest.raises(UnsupportedError, match="bnb_5bit"):
        open_folder(folders("nf4"), bnb_5bit=True)
    assert open_folder(folders("int8"))("model.layers.0.mlp.up_proj.weight") is None


Q = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "no absmax": ("nf4", lambda t: t.pop(f"{Q}.weight.absmax"), "absmax is missing"),
    "no map": ("nf4", lambda t: t.pop(f"{Q}.weight.quant_map"), "quant_map is missing"),
    "no state": (
        "nf4",
        lambda t: t.pop(f"{Q}.weight.quant_state.bitsandbytes__nf4"),
        "bitsandbytes__nf4 is missing",
    ),
    "a torn state": (
        "nf4",
        lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].fill_(7),
        "holds no state",
    ),
    "NaN": ("nf4", lambda t: t[f"{Q}.weight.absmax"].fill_(torch.nan), "absmax holds nan"),
    "NaN in the second": (
        "nf4-double",
        lambda t: t[f"{Q}.weight.nested_absmax"].fill_(torch.nan),
        "nested_absmax holds nan",
    ),
    "fewer codes": (
        "nf4",
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:-1].clone()}),
        "q_proj.weight has the shape",
    ),
    "fewer scales": (
        "fp4",
        lambda t: t.update({f"{Q}.weight.absmax": t[f"{Q}.weight.absmax"][:-1].clone()}),
        "absmax is float32",
    ),
    "saved after a forward pass on a CPU": (  # which changes the layout
        "nf4",
        lambda t: t.update({f"{Q}.weight.absmax": torch.ones(4, 36, dtype=torch.bfloat16)}),
        "save the model before any",
    ),
    "another layout": ("int8", lambda t: t[f"{Q}.weight_format"].fill_(2), "weight_format"),
    "no SCB": ("int8", lambda t: t.pop(f"{Q}.SCB"), "SCB is missing"),
    "NaN in SCB": ("int8", lambda t: t[f"{Q}.SCB"].fill_(torch.nan), "SCB holds nan"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_tensors_are_named(case, folders):
    form, change, message = DAMAGE[case]
    folder = edit(folders(form), change)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        open_folder(folder)(f"{Q}.weight").scale()


def test_a_file_that_is_cut_short_is_an_error(folders):
    folder = edit(folders("nf4"), lambda tensors: None)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        open_folder(folder)
