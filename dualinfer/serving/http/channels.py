"""gpt-oss's harmony format: answers in channels, of thoughts, of calls and of what users see.

An answer is a row of messages: a header that names a channel, and a function that is called, then
`<|message|>` and its text. https://cookbook.openai.com/articles/openai-harmony describes it.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .calls import CHANNELS, MARKS, Delta, Reply, split_at
from .tags import BLANKS

_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN = MARKS[CHANNELS]
_BEGINS = _START, _CHANNEL, "assistant", "to="  # of a header; the mark before it may be read
_MOST = 512  # characters of a header
_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_TO = re.compile(r"to=functions\.([^\s<]{1,128})")
_TEXT = r"/(?s:.+)/ & ~/(?s:.*<\|.*)/"


class ChannelReply(Reply):
    """Reads the messages of an answer: see `Reply`.

    The channel analysis is thoughts, or content unless it `thinks`; what is sent to a function is a
    call where there are `tools`. An answer ends behind a call, as the format says. Messages of a
    kind are joined by a line's end.
    """

    def __init__(self, tools: Collection[str], thinks: bool) -> None:
        super().__init__(CHANNELS, tools)
        self._keeps_thoughts, self._kind = thinks, "content"
        self._has_said, self._is_new = set[str](), False
        self._state = self._header

    def _header(self, made: Delta, final: bool) -> bool:
        """At the start of a message: a header, or content without one."""
        text = self._text.lstrip()
        at = text.find(_MESSAGE)
        begins = text.startswith(_BEGINS)
        if begins and 0 <= at <= _MOST:
            self._begin(made, text[:at])
            self._text = text[at + len(_MESSAGE) :]
            return True
        may_come = begins or any(mark.startswith(text) for mark in _BEGINS)
        if may_come and at < 0 and len(text) <= _MOST + len(_MESSAGE) and not final:
            return False
        goes_on = [_CHANNEL]
        if text.startswith(_START):
            text = text.removeprefix(_START).removeprefix("assistant").lstrip()
            self._text, goes_on = text, [_CHANNEL, "to="]
        if final and at < 0 and text.startswith(tuple(goes_on)):
            self._text = ""  # a header that was cut off
        elif text.startswith(_CHANNEL):  # what is too long for one
            self._text = text.removeprefix(_CHANNEL)
        if not self._text:
            return False
        self._message("content")
        return True

    def _begin(self, made: Delta, header: str) -> None:
        """Begin the message of a header."""
        name, to = _NAME.search(header), _TO.search(header)
        if to is not None and self._known:
            self._open(made, to[1])
            self._message("call")
        elif name is not None and name[1] == "analysis" and self._keeps_thoughts:
            self._message("thoughts")
        else:
            self._message("content")

    def _message(self, kind: str) -> None:
        self._kind, self._is_new, self._state = kind, True, self._body

    def _body(self, made: Delta, final: bool) -> bool:
        """The text of a message up to the mark that ends it."""
        marks = _END, _CALL, _RETURN, _START, _CHANNEL
        splits = [(*split_at(self._text, mark, final), mark) for mark in marks]
        found, rest, mark = min(splits, key=lambda one: len(one[0]))
        if found:
            self._give(made, found)
        self._text = self._text[len(found) :] if rest is None else rest
        is_call = self._kind == "call"
        if is_call and self._is_new and (final or rest is not None):
            self._argue(made, "{}")
        if rest is None:
            return False
        if mark in (_START, _CHANNEL):  # the mark of the end was left out
            self._text = mark + rest
        self.is_over = mark in (_CALL, _RETURN) or is_call
        self._state = self._header
        return True

    def _give(self, made: Delta, text: str) -> None:
        """Give on some of a message's text."""
        if self._kind == "call":
            self._argue(made, text)
        else:
            line = "\n" if self._is_new and self._kind in self._has_said else ""
            self._has_said.add(self._kind)
            made.add(
                Delta(thoughts=line + text) if self._kind == "thoughts" else Delta(line + text)
            )
        self._is_new = False


def channels_grammar(
    tools: Sequence[Mapping[str, Any]], must: bool, token: Callable[[str], str]
) -> str:
    """A grammar of Lark, of thoughts and then a call, or an answer unless it `must` be a call.

    `token` gives a mark as Lark has it.
    """
    channel, message, constrain = map(token, (_CHANNEL, _MESSAGE, _CONSTRAIN))
    rules = _before(token)
    for i, tool in enumerate(tools):
        schema = tool.get("parameters") or {"type": "object", "additionalProperties": False}
        head = json.dumps(f"commentary to=functions.{tool['name']} ")
        rules.append(f'call_{i}: {channel} {head} {constrain} "json" {message} args_{i}')
        rules.append(f"args_{i}: %json {json.dumps({**schema, **BLANKS})}")
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    final = "" if must else f' | {channel} "final" {message} TEXT'
    return "\n".join([f"start: before* ({calls}{final})", *rules]) + "\n"


def final_grammar(token: Callable[[str], str]) -> str:
    """A grammar of Lark, of what stands before the text that users see."""
    channel, message = token(_CHANNEL), token(_MESSAGE)
    return "\n".join([f'start: before* {channel} "final" {message}', *_before(token)]) + "\n"


def _before(token: Callable[[str], str]) -> list[str]:
    """The rules of messages before the one that matters."""
    start, channel, message, end = map(token, (_START, _CHANNEL, _MESSAGE, _END))
    is_token = end.startswith("<[")
    # Where the mark is text, one lexeme up to it: whether text goes on shows no earlier.
    closed = f"TEXT? {end}" if is_token else "CLOSED"
    rules = [
        f'before: {channel} ("analysis" | "commentary") {message} {closed} {start} "assistant"'
    ]
    rules.append(f"TEXT: {_TEXT}")
    return rules if is_token else [*rules, f"CLOSED: ({_TEXT})? {end}"]
