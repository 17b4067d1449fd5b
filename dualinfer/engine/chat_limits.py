"""Chat templates of strangers, rendered within bounds: turns of loops, time, and text made."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from ..errors import ArgumentError

_SOURCE = 1 << 17  # characters of a template
_TURNS, _SECONDS = 200_000, 5.0
_CHARS, _MADE = 1 << 24, 1 << 28  # of one text, and of all that are made on the way
_BITS = 10_000  # of an integer
_PARTS = 100_000  # of a value that is looked at
_SIZED = ("center", "indent", "wordwrap", "batch", "slice", "tojson")  # filters, by an int
_TEXTUAL = ("tojson", "string", "pprint", "join", "format", "xmlattr", "urlencode", "replace")
_METHODS = (str, bytes, int)
_HOLDING = (str, Mapping, list, tuple)
# Widths in the two ways to write a text with places for values.
_WIDTH = re.compile(r"%[-+ #0-9.]*(\*|\d{5})|\{[^{}]*:[^{}]*(\d{5}|\{)")
_SIZED_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes")


class _TooMuch(Exception):
    """A bound that a template passed, in words."""


class _Budget:
    """The work and memory that one rendering may use, by the size of the messages."""

    def __init__(self, messages: Any):
        count, size = len(messages), _extent(messages, _MADE)
        self.chars = _CHARS + 8 * size
        self._left = _MADE + 4 * count * size
        self._turns = _TURNS + 4 * size + 50 * count * count
        self._end = time.monotonic() + _SECONDS

    def turn(self) -> None:
        """Count a turn of a loop or a call."""
        self._turns -= 1
        if self._turns < 0:
            raise _TooMuch("its loops do not end")
        if time.monotonic() > self._end:
            raise _TooMuch(f"it takes more than {_SECONDS:.0f} seconds")

    def take(self, size: int) -> None:
        """Count a text or list of so many characters or elements, before it is made."""
        self._left -= max(0, size)
        if size > self.chars or self._left < 0:
            raise _TooMuch("it makes a text of millions of characters")


_budget: ContextVar[_Budget] = ContextVar("dualinfer_template")


@contextmanager
def _within(messages: Any) -> Iterator[None]:
    token = _budget.set(_Budget(messages))
    try:
        yield
    finally:
        _budget.reset(token)


def _extent(value: Any, most: int) -> int:
    """About how many characters a value has as a text; more than `most` if it has very many parts.

    A list that holds itself twice, many times over, has more parts than memory has bytes.
    """
    count, left, parts = 0, [value], _PARTS
    while left and count <= most:
        one = left.pop()
        count, parts = count + 2, parts - 1
        if not parts:
            return most + 1
        if isinstance(one, str | bytes):
            count += len(one)
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif isinstance(one, int):
            count += one.bit_length() // 3
    return count


def check_source(source: str) -> None:
    """Raise ArgumentError for a template that is too long to be one."""
    if len(source) > _SOURCE:
        raise ArgumentError(
            f"The chat template has {len(source):,} characters; at most {_SOURCE:,} are read."
        )


def render(source: str, messages: Any, variables: Mapping[str, Any]) -> str:
    """The text that a template makes, as transformers renders it; jinja's errors are raised.

    Raises ArgumentError for a template that does not end, or makes more text than any chat needs.
    """
    with _within(messages):
        try:
            return _compiled(source).render(messages=messages, **variables)
        except (_TooMuch, MemoryError, RecursionError) as error:
            why = str(error) if isinstance(error, _TooMuch) else "it recurses without end"
            raise ArgumentError(
                f"The chat template was stopped: {why}. Pass another one as "
                "template_options={'chat_template': ...}, or write the prompt yourself for "
                "generate_text()."
            ) from error


def names_read(source: str) -> set[str]:
    """The variables that a template takes from outside; jinja's errors are raised."""
    from jinja2 import meta

    return meta.find_undeclared_variables(_environment().parse(source))


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Transformers' own environment of chat templates, with bounds on what it does."""
    from transformers.utils import chat_template_utils

    kind, known = _make_kind(), chat_template_utils._compile_jinja_template("").environment
    made = kind(
        trim_blocks=known.trim_blocks,
        lstrip_blocks=known.lstrip_blocks,
        extensions=[type(one) for one in known.extensions.values()],
        finalize=_shown,
    )
    made.filters = {name: _bounded(name, f) for name, f in known.filters.items()}
    made.tests = dict(known.tests)
    made.globals = {name: value for name, value in known.globals.items() if name != "lipsum"}
    return made


def _shown(value: Any) -> Any:
    """A value that is about to be written."""
    if not isinstance(value, str):
        budget = _budget.get()
        budget.take(_extent(value, budget.chars))
    return value


def _joined(parts: Iterable[str]) -> str:
    """The texts in one, as jinja puts them together."""
    budget, found, size = _budget.get(), [], 0
    for part in parts:
        size += len(part)
        if size > budget.chars:
            budget.take(size)
        found.append(part)
    budget.take(size)
    return "".join(found)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is counted before it is made where that can be, else after."""

    @wraps(function)  # jinja reads what its functions are marked with
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.turn()
        given = [*args, *kwargs.values()]
        if name in _SIZED:
            _check_numbers(given)
            sizes = [one for one in given if isinstance(one, int)]
            parts = sum(_extent(one, budget.chars) for one in given if isinstance(one, _HOLDING))
            budget.take(max(sizes, default=0) * parts)
        if name in _TEXTUAL:
            texts = [one for one in given if not hasattr(one, "environment")]
            size = sum(_extent(one, budget.chars) for one in texts)
            budget.take(size)
            if name == "replace":
                _check_replaced(texts)
            if name == "join":
                longest = max((len(one) for one in texts[1:] if isinstance(one, str)), default=0)
                budget.take(longest * (_extent(texts[0], budget.chars) if texts else 0))
            if name == "format":
                _check_format(texts[0] if texts else "")
        result = function(*args, **kwargs)
        if isinstance(result, str | list):
            budget.take(len(result))
        return result

    return run


def _check_numbers(values: Iterable[Any]) -> None:
    """Refuse a number that is the size of a text."""
    for value in values:
        if isinstance(value, int) and abs(value) > _CHARS >> 8:
            raise _TooMuch("it asks for a text of millions of characters")


def _check_replaced(values: Sequence[Any]) -> None:
    """Refuse a text in which so much would be replaced that it grows too long."""
    text, old, new = (str(value) for value in [*values, "", "", ""][:3])
    _budget.get().take(len(text) + text.count(old) * len(new))


def _check_format(text: Any) -> None:
    """Refuse widths that no chat needs, and those that a value says."""
    if _WIDTH.search(str(text)):
        raise _TooMuch("it asks for a text of millions of characters")


def _check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what a method of a text or a number would make too long."""
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    if not isinstance(owner, _METHODS):
        return
    budget, values = _budget.get(), [*args, *kwargs.values()]
    name = getattr(function, "__name__", "")
    if name in _SIZED_METHODS:
        _check_numbers(values)
    if name in ("format", "format_map"):
        _check_format(owner)
        budget.take(sum(_extent(one, budget.chars) for one in values))
    elif isinstance(owner, str | bytes):
        longest = max((_extent(one, budget.chars) for one in values), default=1)
        if name == "replace":
            _check_replaced([owner, *values])
        elif name == "translate":
            budget.take(len(owner) * longest)
        elif name == "expandtabs":
            budget.take(len(owner) * max((n for n in values if isinstance(n, int)), default=8))
        elif name == "join":
            items = values[0] if values and isinstance(values[0], list | tuple | str) else ()
            budget.take(len(owner) * len(items) + _extent(items, budget.chars))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too long; count it."""
    budget = _budget.get()
    take = budget.take
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        take(len(left) + _extent(right, budget.chars))
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        take(len(left) + len(right))
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                take(len(one) * other)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        if (sum(bits) if operator == "*" else bits[0] * max(0, right)) > _BITS:
            raise _TooMuch("it makes a number of thousands of digits")


@lru_cache(maxsize=1)
def _make_kind() -> type:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def own(name: str, *args: Any) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)

    def bounded(tree: nodes.Template) -> nodes.Template:
        """The template with a count in each loop and macro, and our own way to join texts."""
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(own("turn")))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(own("turn"), node.test)
        for parent in [tree, *tree.find_all(nodes.Node)]:
            for field in parent.fields:
                value = getattr(parent, field, None)
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, own("concatenated", *value.nodes))
                elif isinstance(value, list):
                    value[:] = [
                        own("concatenated", *one.nodes) if isinstance(one, nodes.Concat) else one
                        for one in value
                    ]
        return tree

    class Bounded(ImmutableSandboxedEnvironment):
        """Jinja's sandbox; what runs in it is counted."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))
        concat = staticmethod(_joined)

        def _generate(self, source: Any, *args: Any, **kwargs: Any) -> str:
            tree = bounded(source)
            tree.set_environment(self)
            return super()._generate(tree, *args, **kwargs)

        @staticmethod
        def turn() -> bool:
            _budget.get().turn()
            return True

        @staticmethod
        def concatenated(*parts: Any) -> str:
            return _joined([str(_shown(part)) for part in parts])

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            _budget.get().turn()
            _check_call(__obj, args, kwargs)
            return super().call(__context, __obj, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

    return Bounded
