"""Qwen3-Coder's calls in tags: the values of arguments by their schemas, and rules of grammars."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAGGED = re.compile(r"([^<>\n]{1,128})>")
NEXT = re.compile(r"\n<parameter=([^<>\n]{1,128})>")
CUT = re.compile(r"\n(?=<parameter=|</function>)")
ANOTHER = re.compile(r"</tool_call>\s*<tool_call>\s*<function=")
# Texts that hold what ends a value, as grammars have it.
_ENDING = r"(?s:(.*\n)?<(parameter=|\/function>).*|.*<\/(parameter>|tool_call>\s*<tool_call>).*)"
_WORDS = {"True": True, "False": False, "None": None}  # as templates write what is no JSON
Kinds = frozenset[str] | None  # names of JSON's types
BLANKS = {"x-guidance": {"whitespace_pattern": r"\x20|\r?\n[\x20\x09]{0,32}", "lenient": False}}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one that its `$ref` names in `root`."""
    for _ in range(8):
        name = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(name, str) or not name.startswith("#/"):
            break
        there: Any = root
        for part in name[2:].split("/"):
            there = there.get(part) if isinstance(there, Mapping) else None
        schema = there
    return schema if isinstance(schema, Mapping) else {}


def properties_of(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The schemas of a function's arguments, by their names."""
    given = schema.get("properties")
    return {k: resolved(v, schema) for k, v in given.items()} if isinstance(given, Mapping) else {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """True for a schema of texts alone, which stand in tags without quotes."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(choices, list) and choices:
        return all(isinstance(x, str) for x in choices)
    return schema.get("type") in ("string", ["string"])


def kinds_of(
    schema: Any, root: Mapping[str, Any], known: dict[int, Kinds] | None = None, depth: int = 32
) -> Kinds:
    """JSON's types that a schema in `root` names; None where it names none, and all may be.

    `known` are those of schemas that were met, each of which is looked at once.
    """
    known = {} if known is None else known
    schema = resolved(schema, root)
    if id(schema) in known or not schema or not depth:
        return known.get(id(schema)) if schema else None
    known[id(schema)] = frozenset()  # for one that has itself as a part
    known[id(schema)] = found = _named_kinds(
        schema, lambda part: kinds_of(part, root, known, depth - 1)
    )
    return found


def _named_kinds(schema: Mapping[str, Any], of: Callable[[Any], Kinds]) -> Kinds:
    """JSON's types that a schema names, with those `of` its parts."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(choices, list) and choices:
        return frozenset(_kind_of(x) for x in choices)
    if (named := schema.get("type")) is not None:
        listed = named if isinstance(named, list) else [named]
        return frozenset(x for x in listed if isinstance(x, str))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        found = [of(part) for part in parts] if isinstance(parts, list) else []
        said = [kinds for kinds in found if kinds is not None]
        if said and key == "allOf":
            return frozenset.intersection(*said)
        if said and len(said) == len(found):
            return frozenset().union(*said)
    return None


def _kind_of(value: Any) -> str:
    """JSON's type of a value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "null" if value is None else "object")


def _fits(value: Any, kinds: Collection[str]) -> bool:
    """True for a value of one of JSON's types; 1.0 is an integer, too."""
    if type(value) in (int, float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    return _kind_of(value) in kinds


def value_of(text: str, schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> Any:
    """The value of an argument in tags: JSON of a type that its schema in `root` names, or text.

    Where that may not be a text, JSON of other types is kept, and Python's words are understood.
    """
    if schema is not None and is_text(schema):
        return text
    kinds = None if schema is None else kinds_of(schema, root)
    takes_text = kinds is None or "string" in kinds
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except OverflowError:
        value = None if kinds is not None and "null" in kinds and not takes_text else text
    except (ValueError, RecursionError):
        value = text if takes_text else _WORDS.get(text.strip(), text)
        return value if kinds is None or _fits(value, kinds) else text
    return value if kinds is None or not takes_text or _fits(value, kinds) else text


def _finite(text: str) -> float:
    """A number; OverflowError for infinities and NaN, for which JSON has no names."""
    if math.isfinite(value := float(text)):
        return value
    raise OverflowError(text)


def rules_of(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """The rules of Lark of a call in tags; ValueError for what tags cannot be held to."""
    rules, parts = [], []
    if several := {"anyOf", "oneOf", "allOf", "$ref"} & set(schema):
        raise ValueError(
            f"the parameters of {name} have {min(several)}, which calls in tags cannot be held to. "
            "Name them by properties."
        )
    properties, needed = properties_of(schema), schema.get("required") or []
    more = schema.get("additionalProperties") not in (None, False)
    if not properties and (more or schema.get("patternProperties")):
        raise ValueError(
            f"the parameters of {name} have any names, which calls in tags cannot be held to. Name "
            "them by properties."
        )
    if not isinstance(needed, list) or any(key not in list(properties) for key in needed):
        raise ValueError(f"required of {name} is no list of its properties' names.")
    rest = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
    for j, (key, value) in enumerate(properties.items()):
        begin, end = f"<parameter={key}>\n", f"\n{PARAMETER_END}\n"
        if is_text(value):
            rules.append(f"P_{i}_{j}: {_text_rule(name, key, value)} {json.dumps(end)}")
            parts.append((key, f"{json.dumps(begin)} P_{i}_{j}"))
        else:
            rules.append(f"v_{i}_{j}: %json {json.dumps({**value, **rest, **BLANKS})}")
            parts.append((key, f"{json.dumps(begin)} v_{i}_{j} {json.dumps(end)}"))
    body = " ".join(part if key in needed else f"({part})?" for key, part in parts)
    begins = json.dumps(f"{FUNCTION}{name}>\n")
    return [*rules, f"call_{i}: {begins} {body} {json.dumps(FUNCTION_END)}"]


def _text_rule(name: str, key: str, schema: Mapping[str, Any]) -> str:
    """The rule of a text in tags."""
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return "(" + " | ".join(json.dumps(x, ensure_ascii=False) for x in choices) + ")"
    if other := {"pattern", "format"} & set(schema):
        raise ValueError(
            f"{key} of {name} has a {min(other)}, which calls in tags cannot be held to. Leave it "
            "out, or take an enum."
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(/(?s:.{{{least},{most}}})/ & ~/{_ENDING}/)"
