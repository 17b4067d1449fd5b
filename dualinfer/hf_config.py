"""A checkpoint folder's config.json and generation_config.json as HF's objects."""

from pathlib import Path
from typing import Any

from .checkpoint_files import read_json
from .errors import ModelError
from .families import check_model_type


def read_config(folder: Path) -> Any:
    """config.json in transformers' present form: defaults filled in, old names moved."""
    from transformers import AutoConfig

    written = read_json(folder / "config.json")
    model_type = check_model_type(written.get("model_type"))
    fields = {name: value for name, value in written.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # transformers' validation raises many kinds
        raise ModelError(f"{folder / 'config.json'} is not a valid config: {error}") from error


def read_generation_config(folder: Path, config: Any) -> Any:
    """generation_config.json; without one, what config.json says of generation, as in HF."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if path.is_file():
        return GenerationConfig(**read_json(path))
    written = read_json(folder / "config.json")
    known = GenerationConfig().to_dict().keys() - {"output_hidden_states", "output_attentions"}
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(
        **{name: getattr(config, name, None) for name in special},
        **{n: v for n, v in written.items() if n in known and n not in special},
    )
