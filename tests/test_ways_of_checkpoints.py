"""The ways on that messages of checkpoint formats name are taken, and work."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchao import quantization as ao

import dualinfer
from dualinfer import DualinferError

from . import compressed, gguf_files, test_gptq_awq
from .deepspeed_files import megatron_state, split_state, training_file
from .models import BACKENDS
from .ways import cases_of

IDS = np.arange(3, 12, dtype=np.int64)[None]
SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}
QUANT = "quantization_config"
MADE = {"quant": "int4"}  # what it should be here that the checkpoint is not


def llama() -> hf.LlamaForCausalLM:
    """A tiny Llama, the same each time."""
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).eval()


class Folder:
    """A checkpoint's folder that a case spoils and mends; another beside it is `plain`."""

    def __init__(self, path: Path):
        self.path, self.plain = path / "model", path / "plain"
        llama().save_pretrained(self.plain)
        shutil.copytree(self.plain, self.path)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors of the plain model."""
        return load_file(self.plain / "model.safetensors")

    def write(self, name: str, value) -> Path:
        """A file beside the others."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(value))
        elif path.suffix == ".safetensors":
            save_file(value, path, {"format": "pt"})
        else:
            torch.save(value, path)
        return path

    def pickled(self, value) -> None:
        """What is saved by torch in the place of the model's weights."""
        (self.path / "model.safetensors").unlink(missing_ok=True)
        self.write("pytorch_model.bin", value)

    def config(self, name: str, value) -> None:
        """A field of the config, or `quantization_config.field`; None removes it."""
        path = self.path / "config.json"
        whole = fields = json.loads(path.read_text())
        *outer, name = name.split(".")
        for field in outer:
            fields = fields[field]
        fields[name] = value
        if value is None:
            del fields[name]
        path.write_text(json.dumps(whole))

    def quantized(self, form: str) -> None:
        """Make it a checkpoint of GPTQ or AWQ, of one of the forms that other tests know."""
        shutil.rmtree(self.path)
        test_gptq_awq.write(self.path, form, np.random.default_rng(0))


CASES = {}
case = cases_of(CASES)


# --- quantized ---


@case("fields that are not known.*Remove those that do not change.*or pass the model that they")
def fields_of_tomorrow(folder):
    folder.quantized("gptq")
    folder.config(f"{QUANT}.tomorrow", 1)
    yield {}
    folder.config(f"{QUANT}.tomorrow", None)
    yield {}
    yield {"model": folder.plain}


@case("is_marlin_format=True.*Save it in the format gptq or gptq_v2")
def marlin(folder):
    folder.quantized("gptq")
    folder.config(f"{QUANT}.is_marlin_format", True)
    yield {}
    folder.quantized("gptq")
    yield {}
    folder.quantized("act-order")  # gptq_v2
    yield {}


@case("pack_dtype='int16'.*Save it with pack_dtype=int32")
def words_of_16_bits(folder):
    folder.quantized("gptq")
    folder.config(f"{QUANT}.pack_dtype", "int16")
    yield {}
    folder.config(f"{QUANT}.pack_dtype", "int32")
    yield {}


@case("bits=3.*Quantize the plain model again by GPTQ with 4 or 8 bits, or pass it as it is")
def gptq_of_3_bits(folder):
    folder.quantized("gptq")
    folder.config(f"{QUANT}.bits", 3)
    yield {}
    for form in ("gptq", "8-bits"):
        folder.quantized(form)
        yield {}
    yield {"model": folder.plain}


@case("AWQ's version gemm has 4 bits. Quantize the plain model again by GPTQ with 4 or 8 bits")
def awq_of_3_bits(folder):
    folder.quantized("awq")
    folder.config(f"{QUANT}.bits", 3)
    yield {}
    folder.quantized("8-bits")
    yield {}
    yield {"model": folder.plain}


@case("version='gemv'.*Save it in the version gemm")
def awq_of_gemv(folder):
    folder.quantized("awq")
    folder.config(f"{QUANT}.version", "gemv")
    yield {}
    folder.config(f"{QUANT}.version", "GEMM")
    yield {}


AUTO_ROUND = {
    **{"provider": "auto-round", "autoround_version": "0.12.3", "data_type": "int", "sym": True},
    **{"iters": 200, "low_gpu_mem_usage": True, "enable_quanted_input": False, "act_bits": 16},
    **{"desc_act": False, "true_sequential": False, "damp_percent": 0.01, "nsamples": 512},
}


@case("auto-round.*is not read here.*auto-round: format='auto_gptq'")
def auto_round(folder):
    folder.quantized("gptq")
    for name, value in AUTO_ROUND.items():
        folder.config(f"{QUANT}.{name}", value)
    folder.config(f"{QUANT}.quant_method", "auto-round")
    yield {}
    folder.config(f"{QUANT}.quant_method", "gptq")
    folder.config(f"{QUANT}.dynamic", {r"-:.*model\.layers\.0\.vision.*": {}})
    yield {}


@case("data_type='fp'.*by GPTQ with 4 or 8 bits, or pass it as it is")
def auto_round_of_floats(folder):
    folder.quantized("awq")
    for name, value in (AUTO_ROUND | {"data_type": "fp"}).items():
        folder.config(f"{QUANT}.{name}", value)
    yield {}
    folder.config(f"{QUANT}.data_type", "int")
    yield {}


@case(r"\(eetq\) is not read here.*Pass the model that it was made from; quantize it here")
def eetq(folder):
    folder.config(QUANT, {"quant_method": "eetq"})
    yield {}
    yield {"model": folder.plain}
    yield {"model": folder.plain, **MADE}


@case(r"\(gguf\) is not read here.*Pass the path of the \.gguf file itself")
def gguf_in_a_config(folder):
    folder.config(QUANT, {"quant_method": "gguf"})
    path = gguf_files.write_gguf(folder.path / "tiny.gguf", llama())
    yield {}
    yield {"model": path}


@case("quant is given, and the weights .* quantized already.*Leave it unset, or pass the model")
def quantized_twice(folder):
    folder.quantized("gptq")
    yield MADE
    yield {}
    yield {"model": folder.plain, **MADE}


@case("Expected its fields; write out what the name of a preset stands for")
def presets(folder):
    made = preset_name_to_scheme("W8A8", ["Linear"])
    compressed.write(folder.path / "own", {"group_0": made})
    folder.path /= "own"
    folder.config(f"{QUANT}.config_groups", {"W8A8": ["Linear"]})
    yield {}
    folder.config(f"{QUANT}.config_groups", {"group_0": made.model_dump(mode="json")})
    yield {}


@case("fbgemm_fp8.*llm-compressor, whose FP8_DYNAMIC is the same")
def fbgemm(folder):
    folder.config(QUANT, {"quant_method": "fbgemm_fp8"})
    yield {}
    made = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    yield {"model": compressed.write(folder.path / "own", {"group_0": made})}


@case("fp_quant.*llm-compressor, whose NVFP4 and MXFP4 are read")
def fp_quant(folder):
    folder.config(QUANT, {"quant_method": "fp_quant"})
    yield {}
    for name in ("NVFP4A16", "MXFP4A16"):
        made = preset_name_to_scheme(name, ["Linear"])
        yield {"model": compressed.write(folder.path / name, {"group_0": made})}


TORCHAO = {
    "Int8WeightOnlyConfig": ao.Int8WeightOnlyConfig,
    "Float8WeightOnlyConfig": ao.Float8WeightOnlyConfig,
    "IntxWeightOnlyConfig": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
}


@case("Save it in a plain layout .*" + ", ".join(TORCHAO))
def torchao_of_kernels(folder):
    for name, how in TORCHAO.items():
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder.plain, quantization_config=hf.TorchAoConfig(how()), dtype=torch.float32
        )
        model.save_pretrained(folder.path / name)
    path = folder.path / "IntxWeightOnlyConfig" / "model.safetensors"
    with safe_open(path, "pt") as file:
        told = file.metadata()
    kind = {n: json.dumps({"_type": "MXTensor", "_data": {}}) for n in told if "q_proj" in n}
    shutil.copytree(path.parent, folder.path / "odd")
    save_file(load_file(path), folder.path / "odd" / path.name, told | kind)
    yield {"model": folder.path / "odd"}
    for name in TORCHAO:
        yield {"model": folder.path / name}


# --- GGUF ---


@case("holds 2 GGUF models.*Pass the path of one of them")
def two_gguf(folder):
    for name in ("a", "b"):
        gguf_files.write_gguf(folder.path / f"{name}.gguf", llama())
    (folder.path / "model.safetensors").unlink()
    (folder.path / "config.json").unlink()
    yield {}
    yield {"model": folder.path / "b.gguf"}


@case(r"which is not read here; these are.*in one of them \(Q4_K_M, Q8_0\)")
def gguf_of_an_odd_type(folder):
    kinds, wide = gguf.GGMLQuantizationType, hf.LlamaConfig(**SMALL | {"hidden_size": 256})
    for kind in (kinds.Q8_0, kinds.Q4_K):
        model = hf.LlamaForCausalLM(wide)
        path = folder.path / f"{kind.name}.gguf"
        gguf_files.write_gguf(
            path, model, lambda name, k=kind: k if "attn_q" in name else kinds.F32
        )
    odd = bytearray(path.read_bytes())
    at = odd.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    odd[at : at + 4] = int(kinds.IQ1_M).to_bytes(4, "little")
    (folder.path / "odd.gguf").write_bytes(bytes(odd))
    yield {"model": folder.path / "odd.gguf"}
    yield {"model": folder.path / "Q4_K.gguf"}
    yield {"model": folder.path / "Q8_0.gguf"}


# --- files of torch ---


@case(r"a whole pickled module; expected a dict of tensors\. Save module\.state_dict\(\) instead")
def whole_modules(folder):
    folder.pickled(nn.Linear(3, 3))
    yield {}
    folder.pickled(llama().state_dict())
    yield {}


@case(r"holds no tensors by name, but .*Save the state dict itself")
def nested_states(folder):
    folder.pickled({"epoch": 3, "weights": {"net": folder.state}})
    yield {}
    folder.pickled(folder.state)
    yield {}


@case(r"it was expanded\. Save a copy of it, tensor\.contiguous\(\)")
def expanded_tensors(folder):
    name, state = "lm_head.weight", folder.state
    state[name] = torch.ones(1, 32).expand(64, 32)
    folder.pickled(state)
    yield {}
    folder.pickled(state | {name: state[name].contiguous()})
    yield {}


@case(r"tensors under keys of type int, expected names\. Save module\.state_dict\(\)")
def numbered_tensors(folder):
    folder.pickled(dict(enumerate(folder.state.values())))
    yield {}
    folder.pickled(llama().state_dict())
    yield {}


@case(r"is a sparse tensor\. Save the model again once its weights are dense")
def sparse_tensors(folder):
    state = folder.state
    name = "model.layers.0.mlp.up_proj.weight"
    folder.pickled(state | {name: state[name].to_sparse()})
    yield {}
    folder.write("model.safetensors", state)
    yield {}


@case(r"names in the file begin with 'net\.'.*save it again without, by \{name\.removeprefix")
def prefixed_names(folder):
    state = {f"net.{name}": tensor for name, tensor in folder.state.items()}
    folder.write("model.safetensors", state)
    yield {}
    with pytest.raises(DualinferError) as told:
        dualinfer.init_inference(folder.path, dtype="fp32")
    code = re.search(r"by (\{.*items\(\)\})", str(told.value)).group(1)
    folder.write("model.safetensors", eval(code, {"state": state}))
    yield {}


# --- files of DeepSpeed ---


def bloom():
    """A tiny Bloom on the meta device, and the model whose weights are to fill it."""
    config = hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    torch.manual_seed(0)
    model = hf.BloomForCausalLM(config).eval()
    with torch.device("meta"):
        return hf.BloomForCausalLM(config).eval(), model


def listed(folder):
    """A tiny Bloom on the meta device, and DeepSpeed's JSON of one file with its tensors."""
    empty, model = bloom()
    state = {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    (folder.path / "files").mkdir()
    torch.save(state, folder.path / "files" / "a.bin")
    said = {"type": "ds_model", "checkpoints": ["a.bin"], "version": 1.0}
    return empty, said


@case("has mystery, which is no key of DeepSpeed's checkpoint JSON.*Remove it")
def keys_of_no_json(folder):
    model, said = listed(folder)
    folder.write("files/ckpt.json", said | {"mystery": 1})
    call = {"model": model, "checkpoint": str(folder.path / "files" / "ckpt.json")}
    yield call
    folder.write("files/ckpt.json", said)
    yield call


@case(r'int8 shards are not read\. Save them with dtype fp16 or bf16, and.*quant="int8"')
def int8_shards(folder):
    model, said = listed(folder)
    call = {"model": model, "checkpoint": str(folder.path / "files" / "ckpt.json")}
    folder.write("files/ckpt.json", said | {"dtype": "int8"})
    yield call
    folder.write("files/ckpt.json", said | {"dtype": "fp16"})
    state = torch.load(folder.path / "files" / "a.bin")
    torch.save({n: t.half() for n, t in state.items()}, folder.path / "files" / "a.bin")
    yield call | {"quant": "int8"}


@case("outside of .*Set base_dir to the folder that holds them all")
def files_elsewhere(folder):
    model, said = listed(folder)
    path = folder.write("json/ckpt.json", said | {"checkpoints": ["../files/a.bin"]})
    yield {"model": model, "checkpoint": str(path)}
    folder.write("json/ckpt.json", said | {"checkpoints": ["files/a.bin"]})
    yield {"model": model, "checkpoint": str(path), "base_dir": str(folder.path)}


@case("base_dir=.* is no folder here. Name the one that holds the files")
def base_dirs_that_are_not_there(folder):
    model, said = listed(folder)
    path = folder.write("ckpt.json", said)
    call = {"model": model, "checkpoint": str(path)}
    yield call | {"base_dir": str(folder.path / "gone")}
    yield call | {"base_dir": str(folder.path / "files")}


@case("tp_size=2, and parallelization is 'pp'.*Set parallelization to 'tp' if the files hold ranks")
def ranks_of_whole_tensors(folder):
    empty, model = bloom()
    for rank in range(2):
        torch.save(split_state(model, rank, 2), folder.path / f"{rank}.bin")
    said = {"type": "ds_model", "checkpoints": ["0.bin", "1.bin"], "version": 1.0, "tp_size": 2}
    call = {"model": empty, "checkpoint": str(folder.path / "ckpt.json")}
    folder.write("ckpt.json", said)
    yield call
    folder.write("ckpt.json", said | {"parallelization": "tp"})
    yield call
    torch.save(model.state_dict(), folder.path / "0.bin")
    folder.write("ckpt.json", said | {"checkpoints": ["0.bin"], "tp_size": 1})
    yield call
    del said["tp_size"]
    folder.write("ckpt.json", said | {"checkpoints": ["0.bin"]})
    yield call


@case("lists files with Megatron's names. Set type to 'Megatron', and checkpoints to the list of")
def megatron_by_another_name(folder):
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    for rank in range(2):
        state = training_file(megatron_state(model, rank, 2, 2), 2, "model", checkpoint_version=2.0)
        torch.save(state, folder.path / f"{rank}.pt")
    said = {"type": "ds_model", "checkpoints": {"tp": ["0.pt", "1.pt"]}, "version": 1.0}
    call = {"model": model, "checkpoint": said, "base_dir": str(folder.path)}
    yield call
    own = said | {"type": "Megatron", "checkpoints": ["0.pt", "1.pt"], "version": 2.0}
    yield call | {"checkpoint": own}


@case("version=1, and its files say checkpoint_version=2.*Write the files' version, or leave it")
def megatron_of_another_version(folder):
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    state = training_file(megatron_state(model, 0, 1, 2), 1, "model", checkpoint_version=2.0)
    torch.save(state, folder.path / "0.pt")
    said = {"type": "Megatron", "checkpoints": ["0.pt"]}
    call = {"model": model, "base_dir": str(folder.path)}
    yield call | {"checkpoint": said | {"version": 1.0}}
    yield call | {"checkpoint": said | {"version": 2.0}}
    yield call | {"checkpoint": said}


# --- saving ---


@case(r"nothing is written over. Pass a folder that is empty or not there, or empty this one")
def folders_that_are_taken(folder):
    taken = folder.path / "taken"
    folder.write("taken/note.json", {})
    yield {"save_mp_checkpoint_path": str(taken)}
    yield {"save_mp_checkpoint_path": str(folder.path / "new")}
    (taken / "note.json").unlink()
    yield {"save_mp_checkpoint_path": str(taken)}
    yield {"model": taken}


@case("is no folder. Pass another path")
def files_in_place_of_folders(folder):
    yield {"save_mp_checkpoint_path": str(folder.path / "config.json")}
    yield {"save_mp_checkpoint_path": str(folder.path / "other")}


@pytest.mark.parametrize("name", CASES)
def test_ways_of_checkpoints_work(name, tmp_path):
    said, calls = CASES[name]
    backend = BACKENDS[list(CASES).index(name) % 2]  # files are read by one code for both
    folder = Folder(tmp_path)
    steps = calls(folder)

    def run(given):
        fused = {} if "model" not in given else {"replace_with_kernel_inject": True}
        given = {"model": folder.path, "backend": backend, "dtype": "fp32"} | fused | given
        with dualinfer.init_inference(**given) as engine:
            if backend == "torch":  # JAX would compile each
                assert np.isfinite(np.asarray(engine(IDS).logits)).all()

    with pytest.raises(DualinferError, match=f"(?s){said}"):
        run(next(steps))
    assert [run(given) for given in steps]
