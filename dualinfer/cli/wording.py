"""Errors in the words of the command line: options, where Python has arguments."""

import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ..config import InferenceConfig
from ..engine.arguments import GenerationArguments
from ..errors import DualinferError
from ..system.terminal import print_folded

# What the Python interface calls an option, where that is not the option's own name.
_NAMES = {
    "replace_with_kernel_inject": "kernels",
    "stop_strings": "stop",
    "tp_size": "tp",
    "ep_size": "ep",
    "quant.scheme": "quant",
}
_VALUE = r"(['\"]?)(-?\w(?:[\w.+-]*\w)?)\1"
_COMMANDS = {"generate_text()": "`dualinfer generate` without --chat"}
_SENTENCES = re.compile(r"(?<=[.:]) ")
_ADVICE = re.compile(r"(?:call|if|leave|load|make|pass|save|set|use)\b", re.IGNORECASE)
_FIELDS = (*InferenceConfig.model_fields, *GenerationArguments.__annotations__)
# What only Python has: a call, an attribute, an argument that is no option, a live module.
_PYTHON = "|".join(
    [
        r"\b[a-z_]+[(=]",
        r"\b(?:engine|tokenizer)\.[a-z]+_",
        r"\binit_inference\b",
        r"\bthe module\b",
        r"\bthe live\b",
        *(rf"\b{name}\b" for name in _FIELDS if "_" in name),
    ]
)
_OTHER_WAY = re.compile(rf"(?:, ([^,]+))?, or (?=.*(?:{_PYTHON}))[^,;]*(?=\.$)")


def print_error(error: DualinferError, command: Any) -> None:
    """One message on stderr, in the words of the `command` that failed."""
    message = explain(str(error), command)
    print_folded(Console(stderr=True), f"error: {message}", head="bold red")


def explain(message: str, command: Any) -> str:
    """An error of the Python interface for those who typed `command`: its options, by their names.

    Where a sentence names several ways on, one that only Python has is left out.
    """
    options = _options(command)
    return " ".join(_in_options(sentence, options) for sentence in _SENTENCES.split(message))


def _in_options(sentence: str, options: Mapping[str, tuple[str, str]]) -> str:
    before = sentence
    for name, (on, off) in options.items():
        word = rf"(?<![\w./'\"-]){name}"  # and no part of a path
        if off:
            sentence = re.sub(rf"{word}=True\b", on, sentence)
            sentence = re.sub(rf"{word}=False\b", off, sentence)
        sentence = re.sub(rf"{word}={_VALUE}", rf"{on} \2", sentence)
        sentence = re.sub(rf"{word}=(?=[^\s,.])", f"{on} ", sentence)
        if "_" in name:
            sentence = re.sub(rf"{word}\b(?!=)", on, sentence)
    for call, typed in _COMMANDS.items():
        sentence = sentence.replace(call, typed)
    sentence = _OTHER_WAY.sub(lambda way: f" or {way[1]}" if way[1] else "", sentence)
    if _ADVICE.match(sentence) and re.search(_PYTHON, sentence):
        start = "In" if before[0].isupper() else "in"
        return f"{start} Python, {before[0].lower()}{before[1:]}"
    return sentence


def _options(command: Any) -> dict[str, tuple[str, str]]:
    """The command-line options that set each argument of Python's, and that unset it, or ""."""
    commands = getattr(command, "commands", None)
    parts = [command] if commands is None else list(commands.values())
    typed = {p.name: p for part in parts for p in part.params if p.opts[0].startswith("--")}
    python = {name: name for name in typed} | {k: v for k, v in _NAMES.items() if v in typed}
    return {
        name: (typed[own].opts[0], (typed[own].secondary_opts or [""])[0])
        for name, own in python.items()
    }
