"""Grammars of calls and thoughts, and the format of calls that a chat template has."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .calls import CHANNELS, MARKS
from .channels import channels_grammar
from .tags import BLANKS, FUNCTION, rules_of


def style_of(template: str) -> str | None:
    """The format of calls that a chat template writes; None where it knows none."""
    if "<|channel|>" in template and "<|message|>" in template:
        return CHANNELS
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if FUNCTION in template else "hermes"
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return "llama3"
    return None


def calls_grammar(
    style: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    must: bool,
    one: bool,
    has_args: bool,
    token: Callable[[str], str],
) -> str:
    """A grammar of Lark, of calls of these functions, or of text and calls unless they `must` be.

    `has_args` says that Mistral's template writes a name before its arguments. `token` gives a mark
    as Lark has it.
    """
    if style == CHANNELS:
        return channels_grammar(tools, must, token)
    key = "parameters" if style == "llama3" else "arguments"
    named, rules = style == "mistral" and has_args, []
    for i, tool in enumerate(tools):
        schema = tool.get("parameters") or {"type": "object", "additionalProperties": False}
        name = tool["name"]
        if style == "qwen3_coder":
            rules += rules_of(i, name, schema)
            continue
        rules.append(f"args_{i}: %json {json.dumps({**schema, **BLANKS})}")
        if named:
            rules.append(f"call_{i}: {json.dumps(name)} {token('[ARGS]')} args_{i}")
            continue
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        rules.append(f'call_{i}: {head} args_{i} "}}"')
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    return "\n".join([*_starts(style, must, one, named, token), *rules]) + "\n"


def _starts(
    style: str, must: bool, one: bool, named: bool, token: Callable[[str], str]
) -> list[str]:
    """The rules that say where calls may stand."""
    again = "" if one else "*"
    if style in ("hermes", "qwen3_coder"):
        begin, end = (token(mark) for mark in MARKS["hermes"])
        block = f'{begin} "\\n" call "\\n" {end}'
        if must:
            more = "" if one else f' ("\\n" {block})*'
            return [f"start: {block}{more}"]
        opening = "FREE?" if begin.startswith("<[") else ""
        no = r"~/(?s:.*<tool_call>.*)/" + (
            r" & ~/(?s:.*<function=.*)/" if style == "qwen3_coder" else ""
        )
        free = f"FREE: /(?s:.+)/ & {no}"
        if opening:
            return [f"start: (FREE? {block}){again or '?'} FREE?", free]
        # One lexeme up to the mark: whether text goes on shows no earlier.
        until = f'OPEN: (/(?s:.*)/ & {no}) "<tool_call>\\n"'
        block = f'OPEN call "\\n" {end}'
        return [f"start: ({block}){again or '?'} FREE?", until, free]
    if style == "llama3":
        calls = "call" if one else 'call ("; " call)*'
        if must:
            return [f"start: {calls}"]
        return [f"start: {calls} | FREE", r"FREE: /(?s:.+)/ & ~/(?s:\s*\{.*)/"]
    mark = token("[TOOL_CALLS]")
    if named:
        calls = f"({mark} call)" + ("" if one else "+")
    else:
        calls = f'{mark} "[" call "]"' if one else f'{mark} "[" call (", " call)* "]"'
    if must:
        return [f"start: {calls}"]
    return [f"start: {calls} | FREE ({calls})?", r"FREE: /(?s:.+)/ & ~/(?s:.*\[TOOL_CALLS\].*)/"]


def thoughts_grammar(opened: bool) -> str:
    """A grammar of Lark, of the thoughts that come before what must be."""
    inner = r'(/(?s:.*)/ & ~/(?s:.*<\/think>.*)/) "</think>" /\s{0,4}/'
    if opened:
        return f"start: THOUGHTS\nTHOUGHTS: {inner}\n"
    return f'start: THOUGHTS?\nTHOUGHTS: "<think>" {inner}\n'
