"""The class that a folder runs as is the one that transformers' Auto classes would make."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.auto import modeling_auto

import dualinfer
from dualinfer.checkpoint.described.auto_class import as_auto
from dualinfer.errors import ModelError

from .models import BACKENDS, randomize, relative_rms

AUTOS = {
    name: {t: c if isinstance(c, tuple) else (c,) for t, c in mapping._model_mapping.items()}
    for name, auto in vars(modeling_auto).items()
    if name.startswith("AutoModel") and (mapping := auto._model_mapping) is not None
}
SMALL = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(vocab_size=67, num_key_value_heads=2, pad_token_id=0)


def named(model_type, *names, **more):
    """The architectures of a config as it is read."""
    return as_auto({"model_type": model_type, "architectures": [*names], **more})["architectures"]


def made_by_hf(auto, model_type, names):
    """As `auto_factory._get_model_class` chooses among the classes of an Auto class, by name."""
    own = AUTOS[auto].get(model_type)
    return own and next((name for name in names if name in own), own[0])


def test_a_name_of_the_type_stays_whatever_is_before_it():
    """Of every class that an Auto class has; wrappers and FSDP put a word in front of it."""
    for classes in AUTOS.values():
        for model_type, own in classes.items():
            for name in own:
                for names in ([name], ["Gone", name], [f"FSDP{name}"]):
                    assert named(model_type, *names) == [name]


def test_a_name_of_another_type_gives_what_its_auto_classes_make():
    """Of every task and type; where no Auto class has both, the name stays and is refused."""
    tried = set()
    for auto, classes in AUTOS.items():
        for model_type, other in zip(classes, [*classes][1:] + [*classes][:1], strict=True):
            name = classes[other][0]
            tasks = [a for a in AUTOS if any(name in own for own in AUTOS[a].values())]
            made = {made_by_hf(a, model_type, [name]) for a in tasks} - {None}
            assert auto in tasks and named(model_type, name)[0] in made, (model_type, name)
            tried.add(model_type)
    assert len(tried) > 600
    assert named("cohere", "BertForMultipleChoice") == ["BertForMultipleChoice"]


@pytest.mark.parametrize("end", ["ForCausalLM", "ForSequenceClassification", "ForMaskedLM"])
def test_an_unknown_name_goes_by_its_end(end):
    for model_type, own in AUTOS[f"AutoModel{end}"].items():
        assert named(model_type, f"MyOwn{end}") == [own[0]]


def test_names_that_say_nothing_are_as_if_there_were_none():
    assert named("gpt2", "DistributedDataParallel") == ["GPT2LMHeadModel"]
    assert as_auto({"model_type": "llama", "architectures": []})["architectures"] == []
    own = {"auto_map": {"AutoModel": "modeling.LlamaForRewards"}}
    assert named("llama", "LlamaForCausalLM", **own) == ["LlamaForCausalLM"]
    with pytest.raises(ModelError, match=r"LlamaForRewards, which is code of the checkpoint's own"):
        named("llama", "LlamaForRewards", **own)


def make(config, auto=hf.AutoModelForCausalLM):
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    randomize(model)
    return model


MINISTRAL = hf.MinistralConfig(
    **SMALL, head_dim=8, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
)
XLNET = hf.XLNetConfig(vocab_size=67, d_model=32, n_layer=1, n_head=4, d_inner=40)
# The config, what its file says of the class, and the Auto class that makes the same.
FOLDERS = {
    "mistral with layer_types": (
        *(MINISTRAL, {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}),
        hf.AutoModelForCausalLM,
    ),
    "llama by mistral's class": (
        *(hf.LlamaConfig(**SMALL), {"architectures": ["MistralForCausalLM"]}),
        hf.AutoModelForCausalLM,
    ),
    "mistral by llama's class, for labels": (
        hf.MistralConfig(**SMALL, sliding_window=3),
        {"architectures": ["FSDPLlamaForSequenceClassification"]},
        hf.AutoModelForSequenceClassification,
    ),
    "xlnet, in module mode": (
        *(XLNET, {"architectures": ["LlamaForCausalLM"]}),
        hf.AutoModelForCausalLM,
    ),
    "xlnet without a name": (XLNET, {"architectures": None}, hf.AutoModelForCausalLM),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_give_what_the_auto_class_gives(case, tmp_path):
    """On both backends where fused mode knows the family; the report tells how it was taken."""
    config, changes, auto = FOLDERS[case]
    make(config, auto).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(written | changes))
    theirs = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = np.arange(3, 19).reshape(2, 8)[:1]
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)).logits.numpy()
    for backend in BACKENDS if "xlnet" not in case else ("torch",):
        with dualinfer.init_inference(tmp_path, backend=backend, dtype="fp32") as engine:
            found = engine(torch.from_numpy(ids)).logits
            assert relative_rms(np.asarray(found), wanted) < 1e-5
            assert engine.report().architecture == type(theirs).__name__
            assert any(
                type(theirs).__name__ in n or "ministral" in n for n in engine.report().notes
            )
    if "xlnet" in case:
        with pytest.raises(ModelError, match="With backend='torch' transformers' own XLNetLMHead"):
            dualinfer.init_inference(tmp_path, backend="jax")


def test_args_name_a_class_of_the_folders_type(tmp_path):
    """A base model of a file with a head; a live model stays what it is."""
    model = make(hf.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path)
    for name in ("LlamaModel", "FSDPMistralModel"):
        with dualinfer.init_inference(tmp_path, args={"architectures": [name]}) as engine:
            assert engine.report().architecture == "LlamaModel"
    with pytest.raises(dualinfer.ConfigError, match="a live LlamaForCausalLM, and stays one"):
        dualinfer.init_inference(
            model, args={"architectures": ["LlamaModel"]}, replace_with_kernel_inject=True
        )
