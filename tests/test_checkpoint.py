"""Checkpoints as they are found in the wild: older names, other prefixes, heads and buffers."""

import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer import CheckpointError
from dualinfer.arrays import from_numpy
from dualinfer.checkpoint.files.pieces import INDEX
from dualinfer.checkpoint.sources import open_checkpoint, open_module, open_weights

from .cases import make_model
from .models import BACKENDS, random_ids, relative_rms


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def rename(folder, change):
    """Save a folder's tensors anew, each under `change(name)`; None drops it."""
    path = folder / "model.safetensors"
    tensors = {change(k): v.clone() for k, v in load_file(path).items()}
    tensors.pop(None, None)
    save_file(tensors, path, metadata={"format": "pt"})


def add(folder, **tensors):
    path = folder / "model.safetensors"
    old = {k: v.clone() for k, v in load_file(path).items()}
    save_file({**old, **tensors}, path, metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def check(folder, reference, backend="torch"):
    """The engine of `folder` gives what HF's `reference` gives; returns the engine."""
    engine = dualinfer.init_inference(folder, backend=backend)
    ids = random_ids(2, 9)
    with torch.no_grad():
        theirs = reference(torch.tensor(ids), return_dict=False)[0].numpy()
    assert relative_rms(engine(ids)[0], theirs) < 1e-5
    return engine


def test_gpt2_names_without_prefix_and_with_mask_buffers(tmp_path, backend, hf_model):
    """As OpenAI's checkpoints on the hub have them."""
    hf_model("gpt2").save_pretrained(tmp_path)
    rename(tmp_path, lambda name: name.removeprefix("transformer."))
    buffers = {
        "h.0.attn.bias": torch.ones(1, 1, 128, 128),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    add(tmp_path, **buffers)
    engine = check(tmp_path, hf_model("gpt2"), backend)
    assert any("h.0.attn.bias" in note for note in engine.report().notes)


def test_llama_buffers_of_older_versions(tmp_path, hf_model):
    hf_model("llama-gqa").save_pretrained(tmp_path)
    add(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(40)})
    check(tmp_path, hf_model("llama-gqa"))


def test_bert_names_of_the_first_release(tmp_path, backend, hf_model):
    hf_model("bert").save_pretrained(tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def change(name):
        for new, before in old.items():
            name = name.replace(new, before)
        return f"bert.{name}"

    rename(tmp_path, change)
    add(tmp_path, **{"bert.embeddings.position_ids": torch.arange(63)[None]})
    check(tmp_path, hf_model("bert"), backend)


def test_bert_of_the_pretraining_task_serves_each_of_its_parts(tmp_path):
    config = make_model("bert").config
    model = hf.BertForPreTraining(config).eval()
    model.save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["BertModel"])
    check(tmp_path, model.bert)
    change_config(tmp_path, architectures=["BertForMaskedLM"])
    check(tmp_path, hf.BertForMaskedLM.from_pretrained(tmp_path).eval())
    change_config(tmp_path, architectures=["BertForPreTraining"])
    with pytest.raises(dualinfer.ModelError, match=r"BertForPreTraining.*BertForMaskedLM"):
        dualinfer.init_inference(tmp_path, kernel_inject=True)


@pytest.mark.parametrize("name", ["llama-mqa", "gpt2", "bert-masked"])
def test_tied_head_that_is_stored_as_well_is_no_surplus(name, tmp_path, hf_model):
    model = hf_model(name)
    model.save_pretrained(tmp_path)
    embedding = model.get_input_embeddings().weight.detach().clone()
    head = "cls.predictions.decoder.weight" if name == "bert-masked" else "lm_head.weight"
    add(tmp_path, **{head: embedding})
    engine = check(tmp_path, model)
    unique = sum(p.numel() for p in model.parameters())
    assert engine.report().parameters == unique


@pytest.mark.parametrize("name", ["llama-mqa", "gpt2", "bert-masked"])
def test_tied_head_that_is_stored_with_other_values_is_taken_as_hf_takes_it(
    name, tmp_path, hf_model
):
    model = hf_model(name)
    model.save_pretrained(tmp_path)
    head = "cls.predictions.decoder.weight" if name == "bert-masked" else "lm_head.weight"
    add(tmp_path, **{head: torch.randn_like(model.get_input_embeddings().weight)})
    check(tmp_path, type(model).from_pretrained(tmp_path).eval())


@pytest.mark.parametrize("name", ["llama-mqa", "gpt2"])
def test_file_that_holds_a_tied_tensor_under_the_heads_name_only(name, tmp_path, hf_model):
    """save_file keeps one name of two that share memory, and it may be the other one."""
    model = hf_model(name)
    model.save_pretrained(tmp_path)
    embedding = {"llama-mqa": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[name]
    rename(tmp_path, lambda key: "lm_head.weight" if key == embedding else key)
    check(tmp_path, model)


def test_live_model_whose_head_was_untied_by_hand(backend):
    model = make_model("llama-mqa")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    engine = dualinfer.init_inference(model, backend=backend, kernel_inject=True)
    ids = random_ids(2, 9)
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    assert relative_rms(engine(ids).logits, theirs) < 1e-5


def test_live_model_of_float64_and_of_strided_weights(backend):
    model = make_model("llama-mqa").double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.data = p.data.T.contiguous().T
    engine = dualinfer.init_inference(model, backend=backend, dtype="fp32", kernel_inject=True)
    ids = random_ids(2, 9)
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    assert relative_rms(engine(ids).logits, theirs) < 1e-5


def test_config_without_architectures_is_taken_as_the_familys_default(tmp_path, hf_model):
    hf_model("llama-mqa").save_pretrained(tmp_path)
    change_config(tmp_path, architectures=None)
    engine = check(tmp_path, hf_model("llama-mqa"))
    assert any("LlamaForCausalLM" in note for note in engine.report().notes)


def test_fields_that_change_nothing_are_no_obstacle(tmp_path, hf_model):
    hf_model("llama-mqa").save_pretrained(tmp_path)
    change_config(
        tmp_path,
        torch_dtype="float32",
        pretraining_tp=1,
        attention_dropout=0.3,
        initializer_range=0.5,
        use_cache=False,
        auto_map={"AutoModel": "x.Y"},
        unsloth_version="1",
        _name_or_path="somewhere",
        problem_type=None,
        some_new_flag=False,
    )
    check(tmp_path, hf_model("llama-mqa"))


def test_folder_given_with_a_tilde(tmp_path, hf_model, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    hf_model("llama-mqa").save_pretrained(tmp_path / "m")
    assert check("~/m", hf_model("llama-mqa"))


def test_sources_name_shape_and_dtype_without_reading(tmp_path):
    model = make_model("llama-mqa").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    file, live = open_checkpoint(tmp_path), open_module(model)
    assert set(file.names()) == set(live.names()) - {"lm_head.weight"}
    for name in file.names():
        assert file.shape(name) == live.shape(name) and file.dtype(name) == live.dtype(name)
        assert file.dtype(name) == "bfloat16"
        value = file.read(name)
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value.astype(np.float32), live.read(name).float().numpy())
        assert not live.read(name).requires_grad


def test_safetensors_are_not_read_whole(tmp_path):
    """Opening a file of which most bytes are never touched takes no memory for them."""
    import resource

    import safetensors.numpy

    big = np.zeros((64, 1024, 1024), np.float32)  # 256 MiB
    safetensors.numpy.save_file({"big": big, "small": np.ones(3)}, tmp_path / "model.safetensors")
    del big
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = open_checkpoint(tmp_path)
    assert source.shape("big") == (64, 1024, 1024)
    np.testing.assert_array_equal(source.read("small"), np.ones(3))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024  # KiB


# --- several checkpoints, adapters, files that contradict each other ------------------------------

EMBEDDING = "model.embed_tokens.weight"


def save_as(form, model, folder):
    """Save a model as one of the forms that transformers looks for; its index names one file."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    file = form.removesuffix(".index.json")
    if form != file:
        weight_map = dict.fromkeys(state, f"part.{file}")
        (folder / form).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        file = f"part.{file}"
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file, metadata={"format": "pt"})


FORMS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


@pytest.mark.parametrize(
    "forms", [(a, b) for i, a in enumerate(FORMS) for b in FORMS[i + 1 :]], ids="+".join
)
def test_of_two_checkpoints_in_a_folder_that_of_transformers_is_read(forms, tmp_path, hf_model):
    hf_model("llama-mqa").config.to_json_file(tmp_path / "config.json")
    for seed, form in enumerate(forms):
        torch.manual_seed(seed)
        save_as(form, hf.LlamaForCausalLM(hf_model("llama-mqa").config), tmp_path)
    theirs = hf.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for source in (open_checkpoint(tmp_path), open_weights(tmp_path)):
        np.testing.assert_array_equal(source.read(EMBEDDING), theirs[EMBEDDING].numpy())
        assert source.notes == (f"{forms[0]} was read, as transformers does, not {forms[1]}",)


def test_the_report_says_which_of_two_checkpoints_was_read(tmp_path, hf_model):
    model = hf_model("llama-mqa")
    model.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    notes = check(tmp_path, model).report().notes
    assert sum("model.safetensors was read" in note for note in notes) == 1
    with dualinfer.init_inference(make_model("llama-mqa"), checkpoint=tmp_path) as engine:
        assert sum("model.safetensors was read" in note for note in engine.report().notes) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_sharded_checkpoint_beside_another_is_refused(form, tmp_path):
    (tmp_path / form).touch()
    (tmp_path / INDEX).touch()
    with pytest.raises(CheckpointError, match=f"two checkpoints, {INDEX} and {form}"):
        open_checkpoint(tmp_path)


def test_weights_that_are_no_file_or_lack_their_index_are_told(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    (whole / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=r"a link to \.\./blobs/gone, where no file is"):
        open_weights(whole)
    parts.mkdir()
    for i in (1, 2):
        (parts / f"model-0000{i}-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match="parts whose index is missing"):
        open_weights(parts)


def test_weights_of_another_name_are_listed(tmp_path):
    (tmp_path / "model.fp16.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"It holds model\.fp16\.safetensors: rename"):
        open_checkpoint(tmp_path)


# peft asks for what transformers has renamed.
of_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A folder of a model, and an adapter that peft wrote for it; what transformers makes of it."""
    from peft import LoraConfig, get_peft_model

    folder, adapter = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapter")
    make_model("llama-mqa").save_pretrained(folder)
    base = hf.LlamaForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        get_peft_model(base, config).save_pretrained(adapter)
    return folder, adapter


@of_peft
def test_an_adapter_that_is_no_json_is_refused_beside_a_model(adapted, tmp_path):
    shutil.copytree(adapted[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not JSON"):
        dualinfer.init_inference(tmp_path)


def test_an_adapter_as_the_weights_of_a_module_is_told_with_its_model(adapted, tmp_path):
    folder, adapter = adapted
    shutil.copy(adapter / "adapter_model.safetensors", tmp_path / "mine.safetensors")
    torch.save(load_file(tmp_path / "mine.safetensors"), tmp_path / "mine.bin")
    files = (adapter / "adapter_model.safetensors", tmp_path / "mine.safetensors")
    for file in (adapter, *files, tmp_path / "mine.bin"):
        of = f"LORA adapter for {folder}" if adapter in (file, file.parent) else "adapter of peft"
        with pytest.raises(CheckpointError, match=f"no model.*{of}.* and adapter="):
            dualinfer.init_inference(make_model("llama-mqa"), checkpoint=file)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_files_that_contradict_their_index_are_refused(form, tmp_path):
    name = "model.safetensors" if form == "safetensors" else "pytorch_model.bin"
    parts = {"one": {"a": torch.zeros(2), "b": torch.zeros(2)}, "two": {"c": torch.ones(3)}}

    def open_with(weight_map, **added):
        for part, tensors in parts.items():
            save = save_file if form == "safetensors" else torch.save
            save({**tensors, **added.get(part, {})}, tmp_path / f"{part}.{form}")
        weight_map = {k: f"{v}.{form}" for k, v in weight_map.items()}
        (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return open_checkpoint(tmp_path)

    right = {"a": "one", "b": "one", "c": "two"}
    assert sorted(open_with(right).names()) == ["a", "b", "c"]
    assert "d" in open_with(right, two={"d": torch.ones(1)}).names()  # as transformers reads it
    twice = rf"held by two files 1: b \(one\.{form}, two\.{form}\)"
    with pytest.raises(CheckpointError, match=twice):
        open_with(right, two={"b": torch.ones(2)})
    with pytest.raises(CheckpointError, match=rf"not in the file that .* 1: b \(two\.{form}\)"):
        open_with({**right, "b": "two"})
    with pytest.raises(CheckpointError, match=rf"not in the file that .* 1: z \(one\.{form}\)"):
        open_with({**right, "z": "one"})


# --- what was read stays as it was ----------------------------------------------------------------

WAYS = {
    "torch": dict(backend="torch", kernel_inject=True),
    "jax": dict(backend="jax"),
    "module": dict(backend="torch"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", ["state.safetensors", "state.bin", "old.pt"])
def test_an_engine_keeps_its_weights_whatever_becomes_of_the_file(file, way, tmp_path, hf_model):
    """In float32 on a CPU, where nothing else would copy them."""
    model, path = hf_model("llama-mqa"), tmp_path / file
    state = {name: p.detach() for name, p in model.named_parameters()}
    if file.endswith(".safetensors"):
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=file != "old.pt")
    empty = make_model("llama-mqa")
    for parameter in empty.parameters():
        parameter.data.zero_()
    ids = torch.tensor(random_ids(2, 9))
    with dualinfer.init_inference(empty, dtype="fp32", checkpoint=path, **WAYS[way]) as engine:
        before = np.asarray(engine(ids, return_dict=False)[0]).copy()
        with open(path, "r+b") as stored:
            stored.write(b"\xff" * path.stat().st_size)
        np.testing.assert_array_equal(np.asarray(engine(ids, return_dict=False)[0]), before)
        os.truncate(path, 100)
        np.testing.assert_array_equal(np.asarray(engine(ids, return_dict=False)[0]), before)
    with torch.no_grad():
        assert relative_rms(before, model(ids).logits.numpy()) < 1e-5


@pytest.mark.parametrize("file", ["x.safetensors", "x.bin"])
@pytest.mark.parametrize("harm", ["cut", "written"])
def test_a_file_that_changes_while_it_is_read_is_told(file, harm, tmp_path):
    """A memory map would end the process where the file was cut."""
    path, save = tmp_path / file, save_file if "safetensors" in file else torch.save
    save({"x": torch.ones(1 << 20), "y": torch.ones(8)}, path)
    source = open_weights(path)
    source.read("y")
    if harm == "cut":
        os.truncate(path, 5000)
    else:
        with open(path, "r+b") as stored:
            stored.write(b"\0")
        os.utime(path, (0, 0))
    with pytest.raises(CheckpointError, match="changed or cut short while it was read"):
        source.read("x", np.s_[0:1000,] if harm == "written" else None)


# --- files of torch.save --------------------------------------------------------------------------


def zip_again(path, state, method=zipfile.ZIP_STORED, change=lambda name, data: data):
    """Save with torch, and write the records to a new archive."""
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in sorted(records.items(), reverse=True):
            archive.writestr(name, change(name, data))


ZIPPED = {
    "compressed": (dict(method=zipfile.ZIP_DEFLATED), "is compressed or damaged"),
    "short": (
        dict(change=lambda name, data: data[:-4] if name.endswith("data/3") else data),
        r"lies in data/3 of [\d,]+ bytes, expected",
    ),
    "long": (
        dict(change=lambda name, data: data + data if name.endswith("data/3") else data),
        r"lies in data/3 of [\d,]+ bytes, expected",
    ),
    "other order of bytes": (
        dict(change=lambda name, data: b"big" if name.endswith("byteorder") else data),
        "big-endian",
    ),
}


@pytest.mark.parametrize("case", ZIPPED)
def test_a_bin_file_that_was_zipped_anew_is_refused_where_it_differs(
    case, backend, tmp_path, hf_model
):
    changes, message = ZIPPED[case]
    hf_model("llama-mqa").config.to_json_file(tmp_path / "config.json")
    zip_again(tmp_path / "pytorch_model.bin", hf_model("llama-mqa").state_dict(), **changes)
    with pytest.raises(CheckpointError, match=message):
        dualinfer.init_inference(tmp_path, backend=backend)


def test_a_bin_file_that_was_zipped_anew_without_compression_is_read_rightly(tmp_path, hf_model):
    state = hf_model("llama-mqa").state_dict()
    zip_again(tmp_path / "x.bin", state)
    source = open_weights(tmp_path / "x.bin")
    for name, tensor in state.items():
        np.testing.assert_array_equal(source.read(name), tensor.numpy())


ODD_TENSORS = {
    "expanded": ({"x": torch.zeros(1).expand(20_000_000, 16)}, "x .*320,000,000 elements, and 1 "),
    "a row of its own, expanded": ({"x": torch.zeros(1, 9).expand(9, 9)}, "81 elements, and 9 are"),
    "sparse": ({"x": torch.eye(3).to_sparse()}, "x is a sparse tensor"),
    "meta": ({"x": torch.empty(3, device="meta")}, "x was saved on the meta device"),
    "conjugated": ({"x": torch.ones(3, dtype=torch.complex64).conj()}, "x is a lazily conjugated"),
    "number": ({"a": torch.zeros(1), 3: torch.zeros(1)}, "1 tensors under keys of type int"),
    "None": ({None: torch.zeros(1), 2.5: torch.zeros(1)}, "keys of type NoneType and float"),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("case", ODD_TENSORS)
def test_what_a_bin_file_may_hold_beside_tensors_is_refused(case, old, tmp_path):
    state, message = ODD_TENSORS[case]
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path / "x.bin")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128"])
def test_tensors_of_a_bin_file_are_read_however_they_lie(dtype, tmp_path, monkeypatch):
    whole = torch.randn(7, 11, 5).to(getattr(torch, dtype))
    state = {
        "whole": whole,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "transposed": whole.transpose(0, 2),
        "cut": whole[2:, 1::2, :3],
        "number": whole[1, 2, 3],
        "empty": whole[:0],
        "one row more": torch.arange(5).expand(1, -1),
    }
    torch.save(state, tmp_path / "x.bin")
    source = open_weights(tmp_path / "x.bin")
    for block in (4 << 20, 200, 32):
        monkeypatch.setattr("dualinfer.checkpoint.files.safetensors._BLOCK", block)
        for name, tensor in state.items():
            assert source.shape(name) == tensor.shape
            read = source.read(name)
            assert torch.equal(from_numpy(read, "torch"), tensor) and read.flags.c_contiguous
            if tensor.ndim == 3 and tensor.numel():
                part = from_numpy(source.read(name, np.s_[1:3, 0:2, 1:3]), "torch")
                assert torch.equal(part, tensor[1:3, 0:2, 1:3])


def test_a_bin_file_is_not_read_whole(tmp_path):
    """Opening one whose elements nobody asks for takes no memory for them."""

    def kib(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    torch.save({"big": torch.zeros(32, 1024, 1024), "small": torch.ones(3)}, tmp_path / "x.bin")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = kib("VmRSS")
    np.testing.assert_array_equal(open_weights(tmp_path / "x.bin").read("small"), np.ones(3))
    assert kib("VmHWM") - before < 32 * 1024  # of 128 MiB


# --- NaN and inf ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_inf_in_weights_are_noted_and_warned_of(way, tmp_path, hf_model):
    model = hf_model("llama-mqa")
    model.save_pretrained(tmp_path)
    down, norm = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
    harmed = {down: model.state_dict()[down].clone(), norm: torch.full((60,), -torch.inf)}
    harmed[down][-1, -1] = torch.nan
    add(tmp_path, **harmed)
    with pytest.warns(UserWarning, match=r"NaN or inf in 2 of the tensors") as warned:
        engine = dualinfer.init_inference(
            make_model("llama-mqa"), dtype="fp32", checkpoint=tmp_path, **WAYS[way]
        )
    assert [Path(w.filename).name for w in warned if "NaN" in str(w.message)] == [
        Path(__file__).name
    ]
    (note,) = [n for n in engine.report().notes if "NaN or inf" in n]
    assert down in note and norm in note and str(tmp_path) in note


def test_nan_in_the_weights_of_any_module_is_warned_of(tmp_path):
    module = torch.nn.Linear(3, 2)
    weight = torch.full((2, 3), torch.nan)
    torch.save({"weight": weight, "bias": torch.ones(2)}, tmp_path / "x.bin")
    with pytest.warns(UserWarning, match=r"NaN or inf in 1 of the tensors .*: weight"):
        dualinfer.init_inference(module, dtype="fp32", checkpoint=str(tmp_path / "x.bin")).close()


def test_minus_infinity_in_a_buffer_is_no_mistake(tmp_path):
    """A causal mask, for instance."""

    class Masked(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

    save_file(Masked().state_dict(), tmp_path / "x.safetensors")
    engine = dualinfer.init_inference(Masked(), checkpoint=tmp_path / "x.safetensors")
    assert not any("NaN" in note for note in engine.report().notes)
