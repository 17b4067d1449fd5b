"""The tokenizer that lies in a checkpoint's folder, or in a GGUF file."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, is_error, reads
from ...model.families import check_model_type
from ..files.safetensors import read_json
from ..gguf.config import read_gguf_tokenizer
from ..gguf.model import is_gguf
from ..gguf.tokenizer import load_gguf_tokenizer
from ..sources import ADAPTER, check_folder

# Classes that are tokenizer.json and nothing else. AutoTokenizer takes them too, after the import
# of every config; Mistral's may lie in a format of their own beside it.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_OF_ITS_OWN = "mistral"
PROCESSOR = "processor_config.json"


@reads("tokenizer.json")
def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The HF tokenizer in a checkpoint's folder; CheckpointError if there is none.

    Code that lies in the folder is never run, and nobody is asked whether to.
    """
    folder = Path(path) if _is_adapter(path) else check_folder(path)
    if is_gguf(folder):
        return load_gguf_tokenizer(folder)
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} holds no tokenizer.json, tokenizer.model or vocabulary. Save the model's "
            "tokenizer there (tokenizer.save_pretrained), or pass token ids to engine.generate()."
        )
    try:
        made = _load(folder)
        if getattr(made, "chat_template", None) is None:
            made.chat_template = processors_template(folder)
        return made
    except BaseException as error:  # transformers and tokenizers raise many kinds
        if not is_error(error):
            raise
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


def processors_template(folder: Path) -> str | None:
    """The chat template in a processor's own files, which tokenizers do not read; None if none is.

    Those of transformers from before chat_template.jinja.
    """
    if (folder / "chat_template.jinja").is_file():
        return None
    for name in ("chat_template.json", PROCESSOR):
        if (folder / name).is_file():
            template = read_json(folder / name).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def tokenizer_folder(folder: Path, adapters: Iterable[str] | None) -> Path:
    """The folder with the tokenizer of a model with adapters: the first adapter that has one.

    Else the model's `folder`. An adapter was trained with the tokenizer beside it.
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
