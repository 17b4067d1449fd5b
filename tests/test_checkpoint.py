"""Checkpoints as they are found in the wild: older names, other prefixes, heads and buffers."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer.checkpoint import open_checkpoint, open_module

from .models import BACKENDS, make_model, random_ids, relative_rms


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
        dualinfer.init_inference(tmp_path)


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


def test_safetensors_are_mapped_and_not_read_whole(tmp_path):
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
