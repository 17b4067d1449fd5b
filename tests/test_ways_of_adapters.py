"""The ways on that messages of adapters and of vectors name work."""

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer import DualinferError
from tests.adapters import QUIET, adapt, logits, relative, wanted
from tests.cases import make_model

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore")]
LIVE = {"replace_with_kernel_inject": True, "backend": "torch"}


@pytest.fixture
def base(tmp_path):
    """A folder with a tiny Llama."""
    make_model("llama-gqa").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def llama(base):
    """The model of that folder."""
    return type(make_model("llama-gqa")).from_pretrained(base).eval()


def refused(said, model, **options):
    with pytest.raises(DualinferError, match=f"(?s){said}"):
        logits(model, **options)


def test_a_kind_that_is_not_merged_is_merged_by_peft_and_passed():
    live = adapt(make_model("opt"), config=peft.GloraConfig(target_modules=["fc1"]))
    refused(r"merge_and_unload\(\)\), and pass what comes back", live, **LIVE)
    expected = wanted(live)
    assert relative(logits(live.merge_and_unload(), **LIVE)[0], expected) < 1e-5


def test_factors_that_began_in_the_weights_are_saved_beside_where_they_began(base, tmp_path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=["q_proj", "up_proj"])
    live = peft.get_peft_model(llama(base), config)
    live.peft_config["default"].init_lora_weights = True
    live.save_pretrained(tmp_path / "initial")
    live.peft_config["default"].init_lora_weights = "pissa"
    for name, value in live.named_parameters():
        if "lora" in name:
            value.data.add_(torch.randn_like(value), alpha=0.03)
    live.save_pretrained(tmp_path / "pissa")
    refused("path_initial_model_for_weight_conversion", base, adapter=tmp_path / "pissa")
    # What peft subtracts is of the adapter that it reads again.
    live.save_pretrained(
        tmp_path / "saved", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    found, _ = logits(base, adapter=tmp_path / "saved")
    assert relative(found, wanted(live.eval())) < 1e-5


def test_adapters_of_one_file_are_saved_each_in_a_folder_and_passed_together(base, tmp_path):
    live = adapt(llama(base), target_modules=["q_proj"])
    live.save_pretrained(tmp_path / "first")
    file = tmp_path / "first" / "adapter_model.safetensors"
    whole = load_file(file)
    save_file(whole | {n.replace("lora_A.", "lora_A.b."): t + 1 for n, t in whole.items()}, file)
    refused("Save each in a folder of its own", base, adapter=tmp_path / "first")
    both = adapt(live, 2, "second", target_modules=["up_proj"])
    both.save_pretrained(tmp_path / "each", selected_adapters=["default", "second"])
    both.base_model.set_adapter(["default", "second"])
    found, _ = logits(base, adapter=[tmp_path / "each", tmp_path / "each" / "second"])
    assert relative(found, wanted(both.eval())) < 1e-5


@pytest.mark.parametrize("way", ["unmerge_adapter", "enable_adapter_layers"])
def test_adapters_that_are_merged_and_off_are_unmerged_or_enabled(way, base):
    live = adapt(llama(base), target_modules=["q_proj"])
    live.merge_adapter()
    for layer in live.modules():
        if isinstance(layer, peft.tuners.lora.Linear):
            layer._disable_adapters = True
    refused(r"Call peft_model\.unmerge_adapter\(\) or enable them", live, **LIVE)
    getattr(live, way, getattr(live.base_model, way, None))()
    assert relative(logits(live, **LIVE)[0], wanted(live)) < 1e-5


def test_vectors_are_had_as_messages_say(base):
    with dualinfer.init_inference(base, backend="torch", dtype="fp32") as engine:
        ids = [[3, 4, 5], [6, 7]]
        with pytest.raises(DualinferError, match="or ids that have the prompt in front"):
            engine.embed(ids, prompt="say", pooling="mean")
        found = engine.embed([[9, *row] for row in ids], pooling="mean")
        with pytest.raises(DualinferError, match="Leave bbox out"):
            engine.embed({"input_ids": np.array(ids[:1]), "bbox": np.ones((1, 3, 4), int)})
        placed = {"input_ids": np.array([[9, *ids[0]]]), "position_ids": np.array([[4, 5, 6, 7]])}
        for call in (engine.embed, engine.generate):
            with pytest.raises(DualinferError, match="or leave it out"):
                call(placed)
        del placed["position_ids"]
        assert len(engine.generate(placed, max_new_tokens=2)[0]) == 6
        one = engine.embed(placed, pooling="mean")
        assert relative(np.asarray(one), np.asarray(found)[:1]) < 1e-5
