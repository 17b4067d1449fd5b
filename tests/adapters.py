"""Adapters of peft over tiny models, and what peft computes with them."""

import numpy as np
import peft
import pytest
import torch

import dualinfer

# peft asks for what transformers has renamed, and says what it sets of its own accord.
QUIET = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LoRA tensor.s. have invalid shape"),  # lora_bias is of one
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),  # parameters
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but"),  # where there is no bias
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying:UserWarning"),
]
IDS = np.arange(3, 19, dtype=np.int64)[None]


def adapt(model, seed=1, name="default", config=None, **options):
    """A PeftModel over `model` whose adapter changes what it computes."""
    if config is None:
        config = peft.LoraConfig(r=options.pop("r", 4), init_lora_weights=False, **options)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
    else:
        model = peft.get_peft_model(model, config, adapter_name=name)
    draw = torch.Generator().manual_seed(seed)
    for key, value in model.named_parameters():
        own = value.requires_grad or f".{name}." in f"{key}."
        if not own or ("lora" in key and f".{name}" not in key):
            continue
        noise = torch.randn(value.shape, generator=draw)
        if "magnitude" in key:
            value.data *= 1 + 0.1 * noise
        else:
            value.data.add_(noise, alpha=0.03)
    return model.eval()


def logits(model, ids=IDS, **options):
    """What an engine gives for `ids`, and the notes of its report."""
    with dualinfer.init_inference(model, dtype="float32", **options) as engine:
        out = engine(ids)[0]
        return np.asarray(out.cpu() if hasattr(out, "cpu") else out), engine.report().notes


def wanted(model, ids=IDS):
    """What the model itself gives."""
    with torch.no_grad():
        return model(torch.from_numpy(ids))[0].numpy()


def relative(found, expected):
    """The relative RMS of a difference."""
    assert found.shape == expected.shape
    return np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
