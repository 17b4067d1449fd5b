"""A checkpoint's tokenizer, and text from tokens as they come, for the command line."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.sources import check_folder
from ..errors import CheckpointError

_CONTEXT = 8  # tokens decoded before the new ones, since a tokenizer may join words by a blank


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The HF tokenizer in a checkpoint's folder; CheckpointError if there is none.

    Code that lies in the folder is never run, and nobody is asked whether to.
    """
    from transformers import AutoTokenizer

    folder = check_folder(path)
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} holds no tokenizer.json, tokenizer.model or vocabulary.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"The tokenizer in {folder} is Python code of the checkpoint's own, which "
                "dualinfer does not run. If you trust it, load it yourself with "
                "AutoTokenizer.from_pretrained(..., trust_remote_code=True) and pass token ids."
            ) from error
        raise CheckpointError(f"The tokenizer in {folder} cannot be read: {error}") from error


def has_tokenizer(folder: Path) -> bool:
    """True if a file that holds a tokenizer's vocabulary lies in `folder`."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return any((folder / name).is_file() for name in names)


class TextStream:
    """Text of a growing sequence, handed out in whole characters: a token may be part of one."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._read = len(self._ids)
        self._start = max(0, self._read - _CONTEXT)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._ids.append(int(token))
        return self._take(finished=False)

    def finish(self) -> str:
        """What is left, with U+FFFD in place of a character that never ended."""
        return self._take(finished=True)

    def _take(self, finished: bool) -> str:
        old = self._decode(self._ids[self._start : self._read])
        new = self._decode(self._ids[self._start :])
        if new.endswith("\ufffd") and not finished:
            return ""
        self._read = len(self._ids)
        self._start = max(0, self._read - _CONTEXT)
        return new[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
