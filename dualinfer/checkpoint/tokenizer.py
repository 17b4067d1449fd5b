"""The tokenizer that lies in a checkpoint's folder, or in a GGUF file."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shortened, shown
from ..model.families import check_model_type
from .files import read_json
from .gguf_config import read_gguf_tokenizer
from .gguf_model import is_gguf
from .sources import ADAPTER, check_folder

# Classes that are tokenizer.json and nothing else. AutoTokenizer takes them too, after the import
# of every config; Mistral's may lie in a format of their own beside it.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_OF_ITS_OWN = "mistral"


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The HF tokenizer in a checkpoint's folder; CheckpointError if there is none.

    Code that lies in the folder is never run, and nobody is asked whether to.
    """
    folder = Path(path) if _is_adapter(path) else check_folder(path)
    if is_gguf(folder):
        return _load_gguf_tokenizer(folder)
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} holds no tokenizer.json, tokenizer.model or vocabulary. Save the model's "
            "tokenizer there (tokenizer.save_pretrained), or pass token ids to engine.generate()."
        )
    try:
        made = _load(folder)
        if getattr(made, "chat_template", None) is None:
            made.chat_template = _processors_template(folder)
        return made
    except Exception as error:  # transformers and tokenizers raise many kinds
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"The tokenizer in {folder} is Python code of the checkpoint's own, which "
                "dualinfer does not run. If you trust it, load it yourself with "
                "AutoTokenizer.from_pretrained(..., trust_remote_code=True) and pass it as "
                "tokenizer=, or pass token ids."
            ) from error
        raise CheckpointError(f"The tokenizer in {folder} cannot be read: {error}") from error


def _load(folder: Path) -> Any:
    if is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _processors_template(folder: Path) -> str | None:
    """The chat template that a processor was saved with, in files that tokenizers do not read."""
    for name in ("chat_template.json", "processor_config.json"):
        if (folder / name).is_file():
            template = read_json(folder / name).get("chat_template")
            if isinstance(template, str):
                return template
    return None


# Of the arguments of transformers' conversion, and of the class that it is for.
_GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_GGUF_FIELDS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "add_space_prefix": "add_prefix_space",
}
_GGUF_ALIKE = ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")


def _load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer that transformers makes of a GGUF file's fields."""
    architecture, fields = read_gguf_tokenizer(path)
    kind, tokens = fields.get("ggml.model"), fields.get("ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(
            f"{path} holds no tokenizer. Pass one as tokenizer=, or pass token ids."
        )
    names = {name: name for name in _GGUF_ALIKE} | _GGUF_FIELDS
    given = {t: fields[f"ggml.{own}"] for own, t in names.items() if f"ggml.{own}" in fields}
    settings = {"chat_template": fields.get("chat_template")}
    for name, default in (("add_bos_token", kind == "llama"), ("add_eos_token", False)):
        settings[name] = bool(fields.get(f"ggml.{name}", default))
    try:
        for own, theirs in _GGUF_TOKENS.items():
            number = fields.get(f"ggml.{own}_token_id")
            settings[f"{theirs}_token"] = None if number is None else tokens[number]
            given[f"{theirs}_token_id"] = number
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

        made, more = convert_gguf_tokenizer(architecture, given)
        return PreTrainedTokenizerFast(tokenizer_object=made, **settings, **more)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise CheckpointError(
            f"transformers makes no tokenizer of what {path} holds ({shown(kind)}): "
            f"{shortened(error)}. Pass the model's own as tokenizer=, or pass token ids."
        ) from error


def tokenizer_folder(folder: Path, adapters: Iterable[str] | None) -> Path:
    """Where the tokenizer of a model with adapters lies: in the first of them that has one.

    Else in the model's `folder`. An adapter was trained with the tokenizer beside it.
    """
    return next((Path(a) for a in adapters or () if has_tokenizer(Path(a))), folder)


def _is_adapter(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(path, ADAPTER))


def has_tokenizer(folder: Path) -> bool:
    """True if a file that holds a tokenizer's vocabulary lies in `folder`, or it is one."""
    if is_gguf(folder):
        return "ggml.tokens" in read_gguf_tokenizer(folder)[1]
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return any((folder / name).is_file() for name in names)


def is_plain(folder: Path) -> bool:
    """True where AutoTokenizer would read tokenizer.json by a class that adds nothing to it."""
    if not all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    try:
        settings = read_json(folder / "tokenizer_config.json")
        model_type = check_model_type(read_json(folder / "config.json").get("model_type"))
    except ValueError:  # AutoTokenizer says what is wrong
        return False
    is_plain = settings.get("tokenizer_class") in _PLAIN and "auto_map" not in settings
    return is_plain and model_type != _OF_ITS_OWN
