"""A checkpoint's tokenizer files, as they may be copied into another folder."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ..gguf.model import is_gguf
from .tokenizer import has_tokenizer, load_tokenizer, processors_template

NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
)


class TokenizerFile(NamedTuple):
    """One file; `mode` are the rights that it has."""

    name: str
    content: bytes
    mode: int


def tokenizer_files(folder: Any) -> Iterator[TokenizerFile]:
    """The tokenizer files in `folder`, if it is one; of a GGUF file those that transformers writes.

    A link may lead to a file of the folder itself, or as in HF's cache from snapshots/X to blobs:
    a checkpoint from elsewhere must not get other files of the user's copied. Raises
    CheckpointError for other links, and for what is not what its name says.
    """
    path = "" if folder is None else os.path.expanduser(str(folder))
    if is_gguf(path) and has_tokenizer(Path(path)):
        with TemporaryDirectory() as made:
            load_tokenizer(path).save_pretrained(made)
            yield from tokenizer_files(made)
    if not os.path.isdir(path):
        return
    home = Path(path).resolve()
    for name in NAMES:
        if os.path.lexists(home / name):
            try:
                content, mode = _read(home / name, home)
                _check(name, content)
            except (OSError, ValueError, RuntimeError, RecursionError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(
                    f"{home / name} cannot be copied beside the saved weights: {error}. Replace "
                    "or remove the file."
                ) from error
            yield TokenizerFile(name, content, mode)
    name = "chat_template.json"
    if not (home / name).is_file() and (template := processors_template(home)) is not None:
        yield TokenizerFile(name, json.dumps({"chat_template": template}).encode(), 0o644)


def _read(path: Path, home: Path) -> tuple[bytes, int]:
    real = path.resolve(strict=True)
    is_of_hub = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not (real.is_relative_to(home) or is_of_hub):
        raise CheckpointError(
            f"{path} is a link to {real}, outside of the checkpoint's folder, and is not copied "
            "beside the saved weights. Put the file itself into the folder, or remove the link."
        )
    # Follows no link that was laid since, and waits for no FIFO.
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        return file.read(), stat.S_IMODE(status.st_mode) & 0o777


def _check(name: str, content: bytes) -> None:
    """ValueError where the content cannot be that of a file of this name."""
    if name.endswith(".json"):
        if not isinstance(json.loads(content), dict):
            raise ValueError("it holds no JSON object")
    elif not name.endswith(".model"):  # which is binary
        content.decode("utf-8")
