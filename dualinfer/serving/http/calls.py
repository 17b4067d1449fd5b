"""Tools: calls of functions and thoughts in the text of an answer."""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .tags import (
    ANOTHER,
    CUT,
    FUNCTION,
    FUNCTION_END,
    NEXT,
    PARAMETER,
    PARAMETER_END,
    TAGGED,
    properties_of,
    value_of,
)

THINK = ("<think>", "</think>")
CHANNELS = "harmony"  # the format in which all of an answer stands in channels
# What marks calls, and may be a special token, by the name of the format.
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    CHANNELS: (
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
}
_FEW = r"\s{0,64}"  # blanks: a model may write them without an end
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){0,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*'.replace(
        r"\s*", _FEW
    )
    + r"(?=\{)",
    re.S,
)
_NAMED = re.compile(
    r"\s*([A-Za-z0-9_.\-]{1,128})\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)"
)


@dataclass
class Delta:
    """Holds the content, the thoughts and the parts of calls that a piece of an answer says."""

    content: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True if it says anything."""
        return bool(self.content or self.thoughts or self.calls)

    def add(self, other: "Delta") -> None:
        """Join what comes next, each call with its earlier parts."""
        self.content += other.content
        self.thoughts += other.thoughts
        for part in other.calls:
            known = next((x for x in self.calls if x["index"] == part["index"]), None)
            if known is None:
                self.calls.append({**part, "function": {**part["function"]}})
            else:
                known["function"]["arguments"] += part["function"]["arguments"]

    def message(self) -> dict[str, Any]:
        """The fields of a whole message."""
        made: dict[str, Any] = {"content": self.content}
        if self.thoughts:
            made["reasoning_content"] = self.thoughts
        if self.calls:
            made["content"] = self.content or None
            made["tool_calls"] = [
                {k: v for k, v in call.items() if k != "index"} for call in self.calls
            ]
        return made

    def delta(self) -> dict[str, Any]:
        """The fields of the delta of a stream."""
        made: dict[str, Any] = {"content": self.content} if self.content else {}
        if self.thoughts:
            made["reasoning_content"] = self.thoughts
        if self.calls:
            made["tool_calls"] = self.calls
        return made


class _Scan:
    """Follows JSON through its text: how deep, and whether amid of a string."""

    def __init__(self, depth: int = 0) -> None:
        self.depth, self._quoted, self._escaped = depth, False, False

    def until(self, text: str, depth: int) -> int:
        """The number of characters that lead down to `depth`; -1 where they do not."""
        for i, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= depth:
                    return i + 1
        return -1


class Reply:
    """Reads the text of an answer as it comes; in which pieces does not matter.

    `style` is a format of MARKS or None for no calls, `known` the names of the tools, or these with
    the schemas of their arguments, by which tags of Qwen3-Coder's are read. Thoughts are
    what stands in `<think>`, which a prompt `opened` already; with `thinks` False they are content.
    With `one` it `is_over` behind the first call. Where the answer `must` be calls, what was cut
    off of one is no content.
    """

    def __init__(
        self,
        style: str | None,
        known: Collection[str] = (),
        thinks: bool = False,
        opened: bool = False,
        one: bool = False,
        must: bool = False,
    ) -> None:
        self._style, self._known, self._one = style, frozenset(known), one
        self._must = must
        self._schemas = known if isinstance(known, Mapping) else {}
        tags = [f"{FUNCTION}{name}>" for name in known] if style == "qwen3_coder" else []
        self._marks = [MARKS[style][0], *tags] if style else []
        self._schema: Mapping[str, Any] = {}  # of the function that is called
        self._properties: Mapping[str, Any] = {}
        self._given: set[str] = set()  # the arguments that the call has
        self.count, self.is_over = 0, False
        self._text, self._blanks, self._trims = "", "", False
        self._scan, self._whole = _Scan(), ""
        self._seen = 0  # characters of an object that was scanned without a header
        self._in_list = self._has_header = False
        after = self._thinking if opened else self._before
        self._state: Callable[[Delta, bool], bool] = after if thinks else self._first()

    def push(self, piece: str) -> Delta:
        """The parts that are certain with another piece."""
        self._text += piece
        return self._read(False)

    def finish(self) -> Delta:
        """The rest."""
        made = self._read(True)
        if self._must:
            made.content = ""  # all that is held back is of marks
        return made

    def _read(self, final: bool) -> Delta:
        made = Delta()
        while not self.is_over and self._state(made, final):
            pass
        if self.is_over:
            self._text = ""
        elif final:
            made.content += self._blanks
            self._blanks = ""
        return made

    def _first(self) -> Callable[[Delta, bool], bool]:
        """The state where no thoughts are open."""
        if self._style is None:
            return self._plain
        return self._start if self._style == "llama3" else self._content

    # Thoughts

    def _before(self, made: Delta, final: bool) -> bool:
        """Nothing but blanks so far: there may be thoughts."""
        text = self._text.lstrip()
        if THINK[0].startswith(text) and not final and text != THINK[0]:
            return False
        if text.startswith(THINK[0]):
            self._text, self._state = text[len(THINK[0]) :], self._thinking
        else:
            self._state = self._first()
        return True

    def _thinking(self, made: Delta, final: bool) -> bool:
        """Within thoughts, whose blanks at both ends are nobody's."""
        found, rest = split_at(self._text, THINK[1], final)
        said = found if rest is None else found.rstrip()
        text = self._blanks + said
        if not self._trims:
            text = text.lstrip()
            self._trims = bool(text)
        kept = text.rstrip()
        made.thoughts += kept
        self._blanks = "" if rest is not None else text[len(kept) :]
        self._text = self._text[len(found) :] if rest is None else rest
        if rest is None:
            if final:
                self._blanks = ""
            return False
        self._state, self._trims = self._first(), True
        return True

    # Content

    def _say(self, made: Delta, text: str) -> None:
        """Content, without the blanks before a call and behind one."""
        text = self._blanks + text
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        made.content += kept

    def _plain(self, made: Delta, final: bool) -> bool:
        """Content to the end."""
        self._say(made, self._text)
        self._text = ""
        return False

    def _content(self, made: Delta, final: bool) -> bool:
        """Content up to the mark of a call."""
        splits = [(*split_at(self._text, mark, final), mark) for mark in self._marks]
        found, rest, mark = min(splits, key=lambda one: len(one[0]))
        self._say(made, found)
        self._text = self._text[len(found) :] if rest is None else rest
        if rest is None:
            return False
        if mark.startswith(FUNCTION):
            self._text, mark = mark + self._text, ""
        self._whole, self._in_list = "" if self._style == "llama3" else mark, False
        states = {"hermes": self._object, "llama3": self._start, "mistral": self._listed}
        states["qwen3_coder"] = self._function
        self._state = states[self._style or ""]
        return True

    def _start(self, made: Delta, final: bool) -> bool:
        """The start of an answer of Llama 3's, which may be an object."""
        text, mark = self._text.lstrip(), MARKS["llama3"][0]
        if not final and (not text or (mark.startswith(text) and text != mark)):
            return False
        if text.startswith(mark):
            self._text = text[len(mark) :]
            return True
        self._state = self._object if text.startswith("{") else self._content
        return True

    def _listed(self, made: Delta, final: bool) -> bool:
        """Behind Mistral's mark: a list of objects, or a name and its arguments."""
        text = self._text.lstrip()
        if not text and not final:
            return False
        if text.startswith("["):
            self._whole += self._text[: len(self._text) - len(text) + 1]
            self._text, self._state, self._in_list = text[1:], self._object, True
            return True
        if (found := _NAMED.match(self._text)) is None:
            return self._give_up(made) if final else False
        self._open(made, found[1])
        self._text, self._scan = self._text[found.end() :], _Scan()
        self._has_header, self._state = False, self._arguments
        return True

    # Calls

    def _object(self, made: Delta, final: bool) -> bool:
        """At an object that says a name and arguments."""
        if not self._seen and self._text[:1].isspace():  # kept apart: it is looked at once
            text = self._text.lstrip()
            self._whole += self._text[: len(self._text) - len(text)]
            self._text = text
        found = _HEADER.match(self._text)
        if found is not None:
            name = _text_of(found[1])
            if name is None or not self._is_known(name):
                return self._give_up(made)
            self._open(made, name)
            self._text, self._scan = self._text[found.end() :], _Scan(1)
            self._seen, self._has_header, self._state = 0, True, self._arguments
            return True
        text = self._text.lstrip()
        if text and text[0] != "{":
            return self._give_up(made)
        if self._seen == 0:
            self._scan = _Scan()
        self._seen = max(self._seen, len(self._text) - len(text))
        size = self._scan.until(self._text[self._seen :], 0)
        if size < 0:
            self._seen = len(self._text)
            return self._give_up(made) if final else False
        end, self._seen = self._seen + size, 0
        call = _call_of(self._text[:end])
        if call is None or not self._is_known(call[0]):
            return self._give_up(made)
        self._open(made, *call)
        self._text = self._text[end:]
        return self._close()

    def _arguments(self, made: Delta, final: bool) -> bool:
        """Within arguments, which are given on as they come."""
        level = 1 if self._has_header else 0
        size = self._scan.until(self._text, level)
        said = self._text if size < 0 else self._text[:size]
        self._text = self._text[len(said) :]
        if said:
            self._argue(made, said)
        if size < 0:
            return False
        if not self._has_header:
            return self._close()
        self._state = self._tail
        return True

    def _function(self, made: Delta, final: bool) -> bool:
        """At a tag with a function's name: behind Qwen3-Coder's mark, or where that was left out.

        Without the mark an argument or an end must follow, or it is content.
        """
        text = self._text.lstrip()
        found = TAGGED.match(text, len(FUNCTION)) if text.startswith(FUNCTION) else None
        if found is None:
            may_come = FUNCTION.startswith(text) or (
                text.startswith(FUNCTION) and ">" not in text and len(text) < 160
            )
            return False if may_come and not final else self._give_up(made)
        rest = text[found.end() :].lstrip()
        if not self._whole and not rest.startswith((PARAMETER, FUNCTION_END)):
            may_come = any(mark.startswith(rest) for mark in (PARAMETER, FUNCTION_END))
            return False if may_come and not final else self._give_up(made)
        self._open(made, found[1])
        self._schema, self._given = self._schemas.get(found[1]) or {}, set()
        self._properties = properties_of(self._schema)
        self._text, self._state = rest, self._tagged
        return True

    def _tagged(self, made: Delta, final: bool) -> bool:
        """Within a call of tags, each of whose arguments is given on once it is whole."""
        text = self._text = self._text.lstrip()
        if text.startswith(FUNCTION_END):
            self._argue(made, "}" if self._given else "{}")
            self._text = text[len(FUNCTION_END) :]
            return self._close()
        if text.startswith(PARAMETER):
            found = TAGGED.match(text, len(PARAMETER))
            key, begin = (found[1], found.end()) if found else ("", len(PARAMETER))
            if (ends := self._end_of(text, begin, key, final)) is not None:
                if found is not None:
                    self._parameter(made, key, text[begin : ends[0]])
                self._text = text[ends[1] :]
                return True
        elif not any(mark.startswith(text) for mark in (FUNCTION_END, PARAMETER)):
            self._argue(made, "}" if self._given else "{}")  # it is over without a mark
            return self._close()
        if final:  # it was cut off
            self._text = ""
            if not self._given:
                self._argue(made, "{}")
        return False

    def _end_of(self, text: str, begin: int, key: str, final: bool) -> tuple[int, int] | None:
        """The end of the value that begins there, and where the text goes on; None while unknown.

        A model may leave `</parameter>` out. So a value is over, too, where another argument of
        the function begins, and at a line's tag if `</tool_call>` or the end of the text comes
        before its own.
        """
        closed, over = text.find(PARAMETER_END, begin), text.find(MARKS["qwen3_coder"][1], begin)
        bound = min((x for x in (closed, over) if x >= 0), default=len(text))
        for found in NEXT.finditer(text, begin, bound):
            if found[1] in self._properties and found[1] not in {key, *self._given}:
                return found.start(), found.start()
        if closed >= 0 and bound == closed:
            return closed, closed + len(PARAMETER_END)
        if (over >= 0 or final) and (found := CUT.search(text, begin, bound)):
            return found.start(), found.start()
        if over >= 0 and ANOTHER.match(text, over):
            return over, over
        if closed >= 0:
            return closed, closed + len(PARAMETER_END)
        return (over, over) if final and over >= 0 else None

    def _parameter(self, made: Delta, key: str, value: str) -> None:
        """Give on one argument of a call of tags; the first one of a name."""
        if key in self._given:
            return
        value = value.removeprefix("\n").removesuffix("\n")
        said = json.dumps(value_of(value, self._properties.get(key), self._schema))
        self._argue(made, f"{', ' if self._given else '{'}{json.dumps(key)}: {said}")
        self._given.add(key)

    def _argue(self, made: Delta, said: str) -> None:
        """Give on a part of the arguments of the call that is read."""
        made.add(Delta(calls=[{"index": self.count - 1, "function": {"arguments": said}}]))

    def _tail(self, made: Delta, final: bool) -> bool:
        """The rest of an object behind its arguments."""
        size = self._scan.until(self._text, 0)
        self._text = "" if size < 0 else self._text[size:]
        return False if size < 0 else self._close()

    def _close(self) -> bool:
        """A call is whole."""
        self._whole, self.is_over, self._state = "", self._one, self._behind
        return True

    def _behind(self, made: Delta, final: bool) -> bool:
        """Behind a call: its closing mark, another call, or content."""
        text = self._text.lstrip()
        ends = dict.fromkeys(("hermes", "qwen3_coder"), ("</tool_call>",))
        ends |= {"llama3": (";", ","), "mistral": (",", "]")}
        marks = ends[self._style or ""]
        if not final and (not text or any(m.startswith(text) and m != text for m in marks)):
            return False
        mark = next((m for m in marks if text.startswith(m)), "")
        is_next = (self._style == "llama3" and (mark or text.startswith("{"))) or (
            self._style == "mistral" and self._in_list and mark == ","
        )
        if self._style == "mistral" and not self._in_list:
            mark = ""
        self._text, self._trims = text[len(mark) :], True
        if is_next:
            self._whole = mark
            self._state = self._start if self._style == "llama3" else self._object
        else:
            self._state = self._content
        return True

    def _give_up(self, made: Delta) -> bool:
        """Give as content what looked like a call."""
        self._text, self._whole = self._whole + self._text, ""
        size, self._seen = next((len(x) for x in self._marks if self._text.startswith(x)), 0), 0
        self._say(made, self._text[:size])
        self._text, self._state = self._text[size:], self._content
        return True

    def _is_known(self, name: str) -> bool:
        """Objects without a mark are calls of tools that there are alone."""
        return self._style != "llama3" or name in self._known

    def _open(self, made: Delta, name: str, arguments: str = "") -> None:
        """Begin a call."""
        self._blanks = ""
        function = {"name": name, "arguments": arguments}
        call = {"index": self.count, "id": self._new_id(), "type": "function"}
        made.calls.append({**call, "function": function})
        self.count += 1

    def _new_id(self) -> str:
        """Mistral's templates take nine letters and digits alone."""
        if self._style == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def split_at(text: str, mark: str, final: bool) -> tuple[str, str | None]:
    """The text before a mark and behind it; the certain part and None without one."""
    at = text.find(mark)
    if at >= 0:
        return text[:at], text[at + len(mark) :]
    if final:
        return text, None
    most = min(len(text), len(mark) - 1)
    held = next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - held], None


def _text_of(quoted: str) -> str | None:
    try:
        name = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return name if name.isprintable() else None  # half of a pair of surrogates is not


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, that an object says."""
    try:
        made = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    name = made.get("name") if isinstance(made, dict) else None
    if not isinstance(name, str) or not name.isprintable():
        return None
    given = made.get("arguments", made.get("parameters", {}))
    return name, given if isinstance(given, str) else json.dumps(given)
