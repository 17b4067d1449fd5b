"""The messages of a chat as one prompt: what the template takes, and that it loses none of it."""

import difflib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, UnsupportedError, a_type, listing, shown, told
from . import chat_limits
from .tokenizing import ids_of, own_tokenizer, tokenizer_of

Messages = Sequence[Mapping[str, Any]]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXTS = (None, "text", "input_text", "output_text")  # types of a part that is a text
_MEDIA = ("image", "video", "audio", "file")
# Of apply_chat_template, about what chat() does itself.
_OF_TOKENS = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
_OF_TOKENS += ("tokenizer_kwargs", "return_assistant_tokens_mask")
_UNMARKED = ("role", "type", "id", "tool_call_id")
_SUFFIXES = (".jinja", ".jinja2", ".json", ".txt")


def encode_chat(
    given: Any, messages: Messages, options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat up to where the answer begins, by a tokenizer or a processor.

    A content is passed as a str or as a list of parts, whichever the template reads. Raises
    ArgumentError without a chat template, for options that it does not read, and for messages of
    which something would not be in the prompt.
    """
    tokenizer = tokenizer_of(given)
    prompt = _Prompt(given, tokenizer, options or {})
    messages = [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]
    ids = prompt.ids(_readable(messages, prompt))
    if not ids:
        raise ArgumentError("The chat template makes no text of these messages.")
    return ids


def find_template(given: Any, options: Mapping[str, Any]) -> str | None:
    """The chat template: the one that the options name, the processor's, or the tokenizer's.

    An option is a template, the name of one of the tokenizer's, or the path of a file.
    """
    asked = options.get("chat_template")
    own = [getattr(one, "chat_template", None) for one in (given, tokenizer_of(given))]
    template: Any = next((one for one in own if one), None)
    names: Mapping[str, Any] = template if isinstance(template, Mapping) else {}
    if asked is None and names:
        asked = "tool_use" if options.get("tools") and "tool_use" in names else "default"
        if asked not in names:
            raise ArgumentError(
                f"The tokenizer has several chat templates, {listing(sorted(names))}, and none is "
                "the default. Name one: template_options={'chat_template': ...}."
            )
    if asked is None:
        return template if isinstance(template, str) else None
    if isinstance(asked, str) and asked in names:
        return names[asked]
    if not isinstance(asked, str | os.PathLike):
        raise ArgumentError(
            f"chat_template is {a_type(asked)}; expected a template as a str, or the path of a "
            "file that holds one."
        )
    is_path = not isinstance(asked, str) or ("{" not in asked and asked.endswith(_SUFFIXES))
    return read_template(Path(asked).expanduser()) if is_path else str(asked)


def read_template(path: Path) -> str:
    """The template in a file: Jinja, or JSON with `chat_template`; ArgumentError for others."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            text = json.loads(text)
            text = text["chat_template"] if isinstance(text, dict) else text
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ArgumentError(f"No chat template can be read from {path}: {error!r}.") from error
    if not isinstance(text, str):
        raise ArgumentError(f"{path} holds {a_type(text)} as chat_template; expected a str.")
    return text


class _Prompt:
    """One tokenizer's way from messages to a prompt, with the caller's options."""

    def __init__(self, given: Any, tokenizer: Any, options: Mapping[str, Any]):
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        own = getattr(type(tokenizer), "apply_chat_template", None)
        self.source = find_template(given, options)
        self._is_own = own not in (None, PreTrainedTokenizerBase.apply_chat_template)
        if own is None or not (self.source or self._is_own):
            raise ArgumentError(
                "The tokenizer has no chat template, as those of base models have none. Continue a "
                "text with generate_text() instead, set tokenizer.chat_template, or pass "
                "template_options={'chat_template': ...}, a template or a file that holds one."
            )
        chat_limits.check_source(self.source or "")
        self._settings = self._checked_options(options)

    def _checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that apply_chat_template takes; ArgumentError for one that does nothing."""
        settings = {k: v for k, v in options.items() if k != "chat_template"}
        for name in _OF_TOKENS:
            given = settings.pop(name, None)
            if not (given is None or given is False):
                raise ArgumentError(
                    f"template_options: {name} is about token ids, which chat() makes of the whole "
                    "prompt itself. Leave it out."
                )
        tools = settings.get("tools")
        if not isinstance(tools, list | tuple | None):
            raise ArgumentError(f"template_options: tools is {a_type(tools)}; expected a list.")
        if tools:
            settings["tools"] = [_schema(tool) for tool in tools]
        if not self._is_own:
            self._refuse_unread(settings)
        continued = settings.get("continue_final_message")
        if not isinstance(continued, bool | str | None):
            raise ArgumentError(
                f"template_options: continue_final_message={shown(continued)}; expected True, or "
                "the name of the last message's text."
            )
        is_continued = bool(continued)
        if is_continued and settings.get("add_generation_prompt"):
            raise ArgumentError(
                "template_options: continue_final_message goes on with the last message, and "
                "add_generation_prompt begins another. Pass one of them."
            )
        return {"add_generation_prompt": not is_continued, **settings}

    def _refuse_unread(self, settings: Mapping[str, Any]) -> None:
        """Raise ArgumentError for an option that the template never reads."""
        with _told():
            read = chat_limits.names_read(self.source or "")
        for name, value in settings.items():
            is_off = name in ("tools", "documents") and not value
            is_default = name == "add_generation_prompt" and value is True
            if name in read or name in _OF_MESSAGES or is_off or is_default:
                continue
            near = difflib.get_close_matches(name, read - {"messages"}, 1, 0.6)
            way = f"Did you mean {near[0]}?" if near else "Leave it out, or pass another template."
            raise ArgumentError(
                f"template_options: the chat template does not read {name}, so that it does "
                f"nothing. {way}"
            )

    def text(self, messages: Messages) -> str:
        """The text that the template makes, within bounds; by transformers' own rules."""
        if self._is_own or self.source is None:
            template = {} if self.source is None else {"chat_template": self.source}
            with _told():
                apply = self._tokenizer.apply_chat_template
                return apply([*messages], **template, **self._settings | {"tokenize": False})
        given = {k: v for k, v in self._settings.items() if k not in _OF_MESSAGES}
        variables = {"tools": None, "documents": None, **self._tokenizer.special_tokens_map}
        variables |= {name: _plain(value) for name, value in given.items()}
        made, mark = [_as_hf(_plain(message)) for message in messages], None
        if asked := self._settings.get("continue_final_message"):
            mark = _continued(made, "content" if asked is True else asked)
        with _told():
            text = chat_limits.render(self.source, made, variables)
        if mark is None:
            return text
        if mark not in text:
            raise ArgumentError("The chat template leaves out the message that is to be continued.")
        before, _, after = text.rpartition(mark)
        return before if after.startswith(" ") else before.rstrip()  # as the template trims it

    def ids(self, messages: Messages) -> list[int]:
        """Token ids of the prompt."""
        if not self._settings.get("sanitize_control_tokens"):
            return ids_of(self._tokenizer, self.text(messages), bare=True)
        from transformers.utils import chat_template_utils as theirs

        try:
            control = self._tokenizer._get_control_tokens(self.source or "")
            pattern, _ = theirs._get_control_token_patterns(control)
            mark, encode_marked = theirs.mark_control_tokens, theirs.encode_marked_chat
        except AttributeError as error:
            raise UnsupportedError(
                "sanitize_control_tokens needs a newer transformers, which knows it. Leave it out."
            ) from error
        text = self.text(mark([*messages], pattern))
        with own_tokenizer(self._tokenizer) as own:
            return list(encode_marked(own, text))


_OF_MESSAGES = ("continue_final_message", "sanitize_control_tokens")


def _plain(value: Any) -> Any:
    """A value of plain types alone: a template may call what other objects have."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_key(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    bare: dict[Any, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
    for kind, plain in bare.items():
        if isinstance(value, kind):  # an enum, say
            return plain(value)
    return f"<{type(value).__name__}>"


def _key(value: Any) -> Any:
    plain = _plain(value)
    return f"<{type(value).__name__}>" if isinstance(plain, dict | list) else plain


def _continued(messages: list[dict[str, Any]], name: str) -> str:
    """The mark that was put behind the last message's text, and a blank behind it."""
    last, mark = messages[-1], _Marks().new()
    value = last.get(name)
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "text" in value[-1]:
        value[-1]["text"] += mark + " "
    elif isinstance(value, str):
        names = _REASONING if name in _REASONING else (name,)
        last.update({n: value + mark + " " for n in names if last.get(n) == value})
    else:
        raise ArgumentError(
            f"continue_final_message: the last message has no {name} that is a text to continue."
        )
    return mark


def _told() -> AbstractContextManager[None]:
    """Within it what jinja and templates raise is an ArgumentError."""
    says = "The chat template does not take these messages"
    return told(lambda error: ArgumentError(f"{says}: {error}"))


def _schema(tool: Any) -> Any:
    """A tool's JSON schema; that of a function is made of its annotations and docstring."""
    if isinstance(tool, Mapping):
        return dict(tool)
    if not callable(tool):
        raise ArgumentError(f"A tool is {a_type(tool)}; expected a function or a JSON schema.")
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of its docstring or its types
        raise ArgumentError(f"The tool {shown(tool)} cannot be described: {error}") from error


def _as_hf(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers gives it to a template."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _checked(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A message with its parts in one form; ArgumentError for what no template could take."""
    if "role" not in message:
        raise ArgumentError(f"{name} has no role. Give it one, as 'user'.")
    role, content = message["role"], message.get("content")
    if not isinstance(role, str):
        raise ArgumentError(f"{name} has the role {shown(role)}; expected a str.")
    if media := [key for key in message if str(key).rstrip("s") in _MEDIA and message[key]]:
        raise _no_media(name, role, f"{media[0]}={shown(message[media[0]])}")
    if content is None:
        if not any(value for key, value in message.items() if key not in _UNMARKED):
            raise ArgumentError(f"{name}, the {role}'s, has no content. Give it a text as content.")
        return dict(message)
    if isinstance(content, list | tuple):
        content = [_part(part, name, role) for part in content]
    elif not (_is_text(content) or isinstance(content, Mapping)):
        raise _no_text(name, role, content)
    return {**message, "content": content}


def _part(part: Any, name: str, role: str) -> Any:
    """One of the parts of a content."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    is_media = isinstance(part, Mapping) and (
        any(medium in str(kind) for medium in _MEDIA)
        or (kind not in _TEXTS[1:] and any(medium in part for medium in _MEDIA))
    )
    if is_media:
        raise _no_media(name, role, shown(part))
    if not isinstance(part, Mapping) or (kind in _TEXTS and not _is_text(part.get("text"))):
        raise _no_text(name, role, part)
    return {"type": "text", "text": part["text"]} if kind in _TEXTS else dict(part)


def _no_media(name: str, role: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"{name}, the {role}'s, has content that is no text: {what}. chat() reads texts alone. "
        "Give ids and pixel values that a processor made to generate()."
    )


def _no_text(name: str, role: str, content: Any) -> ArgumentError:
    return ArgumentError(
        f"{name}, the {role}'s, has content that is no text: {shown(content)}. A str is expected, "
        "or a list of parts such as {'type': 'text', 'text': '...'}."
    )


def _is_text(value: Any) -> bool:
    """True for a str that is Unicode throughout; half a surrogate pair is none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


# --- what a template reads -----------------------------------------------------------------------


class _Loss(NamedTuple):
    """Something of a message that would not be in the prompt."""

    message: int
    why: str
    turns: bool = False  # its content may be there in the other form


def _readable(messages: list[dict[str, Any]], prompt: _Prompt) -> list[dict[str, Any]]:
    """The messages, each content in the form of which the template loses nothing."""
    _check_roles(messages, prompt)
    waiting, tried = deque(_forms(messages)), []
    first: list[_Loss] = []
    failure: ArgumentError | None = None
    while waiting:
        made = waiting.popleft()
        if made in tried:
            continue
        tried.append(made)
        try:
            losses = _losses(made, prompt)
        except ArgumentError as error:
            failure = failure or error
            continue
        if not losses:
            return made
        first = first or losses
        turns = {loss.message for loss in losses if loss.turns}
        if turns:
            waiting.append([_turned(m) if i in turns else m for i, m in enumerate(made)])
    if not first and failure is not None:
        raise failure
    index, why, _ = first[0]
    raise ArgumentError(f"messages[{index}], the {messages[index]['role']}'s, {why}")


def _forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages as they are, all contents as texts, and all as parts."""
    is_text = [isinstance(message.get("content"), str) for message in messages]
    return [
        messages,
        [m if text else _turned(m) for m, text in zip(messages, is_text, strict=True)],
        [_turned(m) if text else m for m, text in zip(messages, is_text, strict=True)],
    ]


def _turned(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a str in the place of texts in parts, or the other way round."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


class _Marks:
    """Words that stand nowhere else, put behind texts to see where these go."""

    def __init__(self) -> None:
        self._word = "zq" + secrets.token_hex(5)
        self._behind: dict[str, str] = {}  # each mark's text
        self.key = self._word + "k"

    def new(self, text: str = "") -> str:
        """A mark that stands behind `text`."""
        mark = f"{self._word}x{len(self._behind)}z"
        self._behind[mark] = text
        return mark

    def written(self, prompt: str) -> str:
        """The marks of those texts that stand in a prompt."""
        return " ".join(mark for mark, text in self._behind.items() if text.strip() in prompt)

    def put(self, value: Any, found: list[str]) -> Any:
        """The value with a mark behind each text in it; `found` gets the marks."""
        if isinstance(value, str):
            if not value.strip():
                return value
            found.append(self.new(value))
            return value + found[-1]
        if isinstance(value, Mapping):
            return {k: v if k in _UNMARKED else self.put(v, found) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(one, found) for one in value]
        return value


def _losses(messages: list[dict[str, Any]], prompt: _Prompt) -> list[_Loss]:
    """The parts of messages that the prompt would not have, or as Python or JSON."""
    marks = _Marks()
    checks: list[Callable[[str], Iterator[_Loss]]] = []
    marked = []
    for index, message in enumerate(messages):
        content, made = message.get("content"), dict(message)
        if isinstance(content, str):
            made["content"] = marks.put(content, found := [])
            checks.append(partial(_lost_text, index, found))
        elif content is not None:
            made["content"], found = _marked(content, marks)
            check = _lost_mapping if isinstance(content, Mapping) else _lost_parts
            checks.append(partial(check, index, found, marks.key, content))
        if calls := message.get("tool_calls"):
            made["tool_calls"], names = _marked_calls(calls, marks)
            checks.append(partial(_lost_calls, index, names))
        elif content is None:
            others = {k: v for k, v in message.items() if k not in _UNMARKED}
            found = []
            made |= {name: marks.put(value, found) for name, value in others.items()}
            checks.append(partial(_lost_others, index, found, list(others.values())))
        marked.append(made)
    try:
        text = prompt.text(marked)
    except ArgumentError:
        # The template may look at texts themselves; then they must stand in the prompt as they are.
        text = marks.written(prompt.text(messages))
    return [loss for check in checks for loss in check(text.casefold())]


def _marked(content: Any, marks: _Marks) -> tuple[Any, list[list[str]]]:
    """A content of parts, or a mapping, with marks in its texts and a key that nobody reads."""
    parts = [content] if isinstance(content, Mapping) else content
    found: list[list[str]] = [[] for _ in parts]
    made = [
        {**marks.put(part, own), marks.key: marks.key}
        for part, own in zip(parts, found, strict=True)
    ]
    return (made[0] if isinstance(content, Mapping) else made), found


def _marked_calls(calls: Any, marks: _Marks) -> tuple[Any, list[str]]:
    """Calls of tools with marks behind the names of the functions."""
    names: list[str] = []
    made = []
    for call in calls if isinstance(calls, list | tuple) else []:
        inner = call.get("function") if isinstance(call, Mapping) else None
        where = inner if isinstance(inner, Mapping) else call
        if not isinstance(where, Mapping) or not isinstance(where.get("name"), str):
            made.append(call)
            continue
        named = {**where, "name": marks.put(where["name"], names)}
        made.append({**call, "function": named} if where is inner else named)
    return made or calls, names


_GONE = "has content that the chat template leaves out of the prompt"


def _lost_text(index: int, found: list[str], text: str) -> Iterator[_Loss]:
    if any(mark not in text for mark in found):
        yield _Loss(index, f"{_GONE}. Does it read this role?", True)


def _lost_parts(
    index: int, found: list[list[str]], key: str, content: Any, text: str
) -> Iterator[_Loss]:
    is_json = any(part.get("type") != "text" for part in content) and f"'{key}'" not in text
    if key in text and not is_json:
        yield _Loss(index, "has content that is no text to the chat template: it prints the "
                    "list as Python shows it. Pass a str.", True)  # fmt: skip
    elif any(mark not in text for part in found for mark in part):
        yield _Loss(index, f"{_GONE}. Does it read this role, and parts of these types?", True)


def _lost_mapping(
    index: int, found: list[list[str]], key: str, content: Any, text: str
) -> Iterator[_Loss]:
    marks = [mark for part in found for mark in part]
    as_python = f"'{key}'" in text
    is_read = key in text or any(mark in text for mark in marks) or _appears(content, text)
    if as_python or not is_read:
        yield _Loss(index, f"has content that is no text: {shown(content)}. A str is expected.")


def _lost_calls(index: int, names: list[str], text: str) -> Iterator[_Loss]:
    if not names or any(mark not in text for mark in names):
        yield _Loss(
            index,
            "has tool_calls that the chat template leaves out of the prompt. Write the calls into "
            "its content, or pass a template that reads them.",
        )


def _lost_others(index: int, found: list[str], values: list[Any], text: str) -> Iterator[_Loss]:
    if not any(mark in text for mark in found) and not _appears(values, text):
        yield _Loss(
            index,
            "has no content, and the chat template reads nothing else of it. Give it a text as "
            "content.",
        )


def _appears(value: Any, text: str) -> bool:
    """True if a number somewhere in `value` stands in the text."""
    if isinstance(value, Mapping):
        return any(_appears(one, text) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_appears(one, text) for one in value)
    return isinstance(value, int | float) and str(value).casefold() in text


def _check_roles(messages: list[dict[str, Any]], prompt: _Prompt) -> None:
    """Raise ArgumentError for a role that the template neither names nor writes."""
    known = {*_ROLES}
    for index, message in enumerate(messages):
        role = message["role"]
        if role in known or prompt.source is None or _is_named(role, prompt.source):
            continue
        if not any(_writes_role(form, index, prompt) for form in _forms(messages)):
            raise ArgumentError(
                f"messages[{index}] has the role {shown(role)}, which the chat template does not "
                f"read. Usual are {', '.join(_ROLES)}."
            )
        known.add(role)


def _writes_role(messages: list[dict[str, Any]], index: int, prompt: _Prompt) -> bool:
    """True if another role of this message would stand in the prompt."""
    mark, trial = _Marks().new(), [*messages]
    trial[index] = {**trial[index], "role": trial[index]["role"] + mark}
    try:
        return mark in prompt.text(trial).casefold()
    except ArgumentError:
        return False


def _is_named(role: str, source: str) -> bool:
    """True if a template holds the role as a constant."""
    from jinja2 import Environment

    with _told():
        tokens = Environment().lex(source)
        return any(kind == "string" and text[1:-1] == role for _, kind, text in tokens)
