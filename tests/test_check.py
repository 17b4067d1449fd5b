"""`dualinfer check`, the small configs that it makes, and the fields of transformers' configs."""

import json

import numpy as np
import pytest
import transformers as hf
from typer.testing import CliRunner

from dualinfer.cli import check as command
from dualinfer.cli.main import app
from dualinfer.cli.tiny import text_config, tiny_config
from dualinfer.model.families import describe_model, served_types
from dualinfer.model.families.fields import INERT, ConfigFields
from dualinfer.model.families.multimodal import WRAPPERS  # of which test_multimodal is
from dualinfer.model.generation import GENERATION

# Fields that HF's models read and a family refuses where they are set.
REFUSED = {"cwm": {"mlp_bias"}}
# Of which HF's default is a model that is not served.
_BERT = {"model_type": "bert"}
PAIR = {"decoder": _BERT | {"is_decoder": True, "add_cross_attention": True}, "encoder": _BERT}
ROTARY = {"position_embedding_type": "rotary", "vocab_size": 33}
SERVED = {
    "encoder-decoder": PAIR,
    "esm": ROTARY,
    "xmod": {"default_language": "en_XX"},
    "granitemoehybrid": {"layer_types": ["attention"] * 32, "num_local_experts": 0},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SERVED["cohere_compass_text"] = {"rope_parameters": {"full_attention": ROPE}}


def family_config(family):
    return text_config(hf.CONFIG_MAPPING[family](**SERVED.get(family, {})))


# transformers 5.17 has no InternLM3 and no IQuestCoder.
@pytest.mark.parametrize(
    "family", [n for n in served_types() if n in hf.CONFIG_MAPPING and n not in WRAPPERS]
)
def test_a_family_reads_every_field_of_its_config(family, monkeypatch):
    """Of the installed transformers: a field that comes with a new version is looked at by us."""
    unread = {}
    finish = ConfigFields.finish

    def remember(fields):
        finish(fields)
        unread["fields"] = set(fields._values) - fields._read - INERT - GENERATION

    monkeypatch.setattr(ConfigFields, "finish", remember)
    tiny = tiny_config(family_config(family))
    spec, _ = describe_model(tiny.to_dict())
    assert 2 <= len(spec.layers) <= 6 and spec.vocab < 200 and spec.embed < 500
    assert unread["fields"] == REFUSED.get(family, set())


def test_a_small_config_has_a_layer_of_each_kind():
    config = hf.Gemma3TextConfig(num_hidden_layers=12)
    assert tiny_config(config).layer_types == ["sliding_attention", "full_attention"]
    neo = tiny_config(hf.GPTNeoConfig())
    assert neo.attention_layers == ["global", "local"] and neo.num_layers == 2
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "num_kv_heads": 8}
    falcon = hf.FalconConfig(**sizes, new_decoder_architecture=True)
    assert tiny_config(falcon).num_kv_heads == 3
    turned = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48}
    turned |= {"long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}
    phi = hf.Phi3Config(rope_parameters=turned, max_position_embeddings=131072)
    assert len(tiny_config(phi).rope_parameters["long_factor"]) == 20


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["check", *map(str, arguments)])


def test_a_folder_that_agrees_passes_and_one_that_does_not_fails(tmp_path, monkeypatch):
    fields = hf.Qwen3Config(num_hidden_layers=3).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    # Of a quantized checkpoint the family is checked.
    fields["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    seen = {}

    def remember(model, backend, *how):
        seen[backend] = found = right(model, backend, *how)
        return found

    right = command._of_backend
    monkeypatch.setattr(command, "_of_backend", remember)
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["text", "equal", "equal"] in lines
    assert sum(line[:1] == ["layer"] for line in lines) == 2
    seen["jax"]["states"]["layer 1"] = seen["jax"]["states"]["layer 1"] * 1.001
    seen["jax"]["text"] = seen["jax"]["text"] + (np.arange(29) == 28)
    monkeypatch.setattr(command, "_of_backend", lambda model, backend, *how: seen[backend])
    result = invoke(tmp_path)
    assert result.exit_code == 1 and "1.0e-03" in result.output
    assert "differs at 11" in result.output and "Not as transformers has it" in result.output


def test_what_is_not_served_or_not_there_is_said():
    result = invoke("cpmant")
    assert result.exit_code == 1 and "cpmant on torch" in result.output
    assert "not supported in fused mode" in result.output
    result = invoke("no-such-family")
    assert result.exit_code == 1 and "no folder with a config.json" in result.output
