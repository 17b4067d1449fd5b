"""Regular expressions that a checkpoint brings, tried without backtracking.

Python's own matcher may try for ever: twelve letters are enough, and no check of a pattern's form
parts those that do from those that tools write. Here a pattern in Python's words becomes an
automaton, whose states are followed all at once. What it does for the first time is counted, so
that work is linear in the letters of patterns and names.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

from ..errors import UnsupportedError, shortened

_MOST_PARTS = 20_000  # of all automata of one pattern
_PER_LETTER, _PER_NAMED = 400, 8  # steps for a letter of a pattern, and for one of a name
_LONGEST = 10_000  # letters of a name
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_OF_LETTERS = re.IGNORECASE | re.DOTALL | re.ASCII


class Patterns:
    """Several patterns, which `find` tries on a name at once.

    Raises UnsupportedError, which begins with `where`, for a pattern that is no regular expression,
    unless it may be `or_none`, has references to its own groups, or would take too long.
    """

    def __init__(self, texts: Sequence[str], where: str, or_none: bool = False):
        self._where, self._texts = where, tuple(texts)
        plain, self._parts = [], []
        for i, text in enumerate(self._texts):
            tree = self._parse(text, or_none)
            if tree is None:
                continue
            if all(kind in (op.LITERAL, op.ANY) for kind, _ in tree):
                plain.append((i, tree))  # lists may have thousands of names
            else:
                self._parts.append(self._make([(i, tree)]))
        if plain:
            self._parts.append(self._make(plain))

    def _parse(self, text: str, or_none: bool) -> Any:
        try:
            with warnings.catch_warnings():  # of what may mean something else one day
                warnings.simplefilter("ignore")
                return _parser.parse(text)
        except re.error as error:
            if or_none:
                return None
            raise self._refused([text], f"it is no regular expression: {error}") from error
        except (OverflowError, RecursionError) as error:
            raise self._refused([text], "it counts too high, or lies in itself too deep") from error

    def _make(self, trees: list[tuple[int, Any]]) -> "_Automaton":
        texts = [self._texts[i] for i, _ in trees]
        try:
            return _Automaton(trees, _Budget(sum(map(len, texts)) + 50 * len(texts)))
        except (_Refused, RecursionError) as error:
            raise self._refused(texts, str(error)) from error

    def _refused(self, texts: Sequence[str], reason: str) -> UnsupportedError:
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        return UnsupportedError(
            f"{self._where} has the pattern {shortened(texts[0])!r}{more}, which is not tried: "
            f"{shortened(reason)}. Name the modules themselves."
        )

    def find(self, name: str) -> list[int]:
        """The numbers of the patterns that match the name from its start on, as re.match does."""
        if len(name) > _LONGEST:
            raise UnsupportedError(
                f"{self._where} has patterns, and a name of {len(name):,} letters is there to try "
                f"them on: {shortened(name)}. Fetch the checkpoint again."
            )
        found: list[int] = []
        for part in self._parts:
            part.budget.left += _PER_NAMED * len(name)
            try:
                found += part.find(name, 0)
            except _Refused as error:
                texts = [self._texts[i] for i in part.numbers]
                raise self._refused(texts, str(error)) from error
        return sorted(found)


class _Refused(Exception):
    """Why a pattern is not tried."""


class _Budget:
    """Steps that may still be taken for the first time, and parts that may be made."""

    def __init__(self, letters: int):
        self.left, self.parts = _PER_LETTER * letters, _MOST_PARTS + letters

    def step(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise _Refused("it takes more steps than its letters and the names' allow")

    def part(self) -> None:
        self.parts -= 1
        if self.parts < 0:
            raise _Refused("its repetitions make it too long")


class _Look(NamedTuple):
    """A condition on what lies before or behind a place; `width` is that of what lies before."""

    inner: "_Automaton"
    width: int | None
    negated: bool


class _Anchor(NamedTuple):
    """A condition on what a place is; whether words are of ASCII alone, and lines count."""

    kind: Any
    ascii: bool
    lines: bool


# What a place in a name is: its first, behind its last letter, or before a newline there.
_FIRST, _LAST, _LINE = 1, 2, 4


class _Automaton:
    """Patterns by number as one program; see Thompson's construction.

    Each of its codes is a letter's test, which leads to the next code, a tuple of codes to go on
    at, a condition before the next code, or the number of a pattern that ends there.
    """

    def __init__(self, trees: Iterable[tuple[int, Any]], budget: _Budget):
        self.budget, self._is_inner = budget, False
        self._code: list[Any] = []
        self.numbers, starts = list[int](), list[int]()
        for number, tree in trees:
            self.numbers.append(number)
            starts.append(len(self._code))
            self._add(tree, tree.state.flags)
            self._code.append(("end", number))
        self._reached: dict[frozenset[int], _Reached] = {}
        self._start = self._at(starts)

    def _add(self, tree: Iterable[tuple[Any, Any]], flags: int) -> None:
        self.budget.part()
        for kind, value in tree:
            self.budget.part()
            self._add_one(kind, value, flags)

    def _add_one(self, kind: Any, value: Any, flags: int) -> None:
        code = self._code
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            self._repeat(least, most, inner, flags)
        elif kind is op.SUBPATTERN:
            _, more, less, inner = value
            self._add(inner, (flags | more) & ~less)
        elif kind is op.BRANCH:
            self._branch(value[1], flags)
        elif kind is op.AT:
            code.append(("at", _Anchor(value, bool(flags & re.ASCII), bool(flags & re.MULTILINE))))
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            direction, inner = value
            made = _Automaton([(0, _with_flags(inner, flags))], self.budget)
            made._is_inner = True
            width = inner.getwidth()[1] if direction < 0 else None
            code.append(("look", _Look(made, width, kind is op.ASSERT_NOT)))
        elif kind is op.LITERAL and not flags & re.IGNORECASE:
            code.append(("letter", chr(value)))
        else:
            code.append(("letter", _test(_letter(kind, value), flags & _OF_LETTERS)))

    def _repeat(self, least: int, most: Any, inner: Any, flags: int) -> None:
        for _ in range(least):
            self._add(inner, flags)
        start, code = len(self._code), self._code
        if most is op.MAXREPEAT:
            code.append(None)
            self._add(inner, flags)
            code.append(("split", (start,)))
            code[start] = ("split", (start + 1, len(code)))
            return
        splits = []
        for _ in range(most - least):
            splits.append(len(code))
            code.append(None)
            self._add(inner, flags)
        for place in splits:
            code[place] = ("split", (place + 1, len(code)))

    def _branch(self, ways: Sequence[Any], flags: int) -> None:
        start, code, starts, ends = len(self._code), self._code, [], []
        code.append(None)
        for way in ways:
            starts.append(len(code))
            self._add(way, flags)
            ends.append(len(code))
            code.append(None)
        code[start] = ("split", tuple(starts))
        for place in ends:
            code[place] = ("split", (len(code),))

    def find(self, text: str, first: int, last: int | None = None) -> set[int]:
        """The numbers of patterns that match from a place on, if anywhere, or up to `last`."""
        found: set[int] = set()
        reached, stop, place = self._start, len(text), first
        for place in range(first, (stop if last is None else last) + 1):
            state = reached.state
            if state is None:
                state = self._close(reached, text, place)
            if state.ends and last in (None, place):
                found |= state.ends
            if place == stop or not state.letters:
                break
            following = state.following.get(text[place])
            if following is None:
                self.budget.step(len(state.letters))
                following = self._at(state.accepting(text[place]))
                state.following[text[place]] = following
            reached = following
        if self._is_inner:  # it may begin at every letter of a name
            self.budget.step(place - first)
        return found

    def _at(self, codes: Iterable[int]) -> "_Reached":
        key = frozenset(codes)
        found = self._reached.get(key)
        if found is None:
            found = self._reached[key] = _Reached(key)
        return found

    def _close(self, reached: "_Reached", text: str, place: int) -> "_State":
        """The state at a place, all conditions there tried; kept where others would be the same."""
        stop = len(text)
        kind = _FIRST * (place == 0) | _LAST * (place == stop)
        kind |= _LINE * (place == stop - 1 and text[place] == "\n")
        state = reached.by_kind.get(kind)
        if state is not None:
            return state
        seen, waiting = set(reached.codes), [*reached.codes]
        letters, ends, is_free, is_kept = [], set(), True, True
        while waiting:
            at = waiting.pop()
            self.budget.step(1)
            what, value = self._code[at]
            if what == "letter":
                letters.append((at + 1, value))
                continue
            if what == "end":
                ends.add(value)
                continue
            further: Iterable[int] = value if what == "split" else (at + 1,)
            if what == "at":
                is_free = False
                is_kept &= value.kind in _ENDS and not value.lines
                further = further if _is_at(value, text, place, kind) else ()
            elif what == "look":
                is_free = is_kept = False
                further = further if self._looks(value, text, place) else ()
            for other in further:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        state = _State(letters, ends)
        if is_free:
            reached.state = state
        elif is_kept:
            reached.by_kind[kind] = state
        return state

    def _looks(self, look: _Look, text: str, place: int) -> bool:
        inner, width, negated = look
        if width is None:
            found = bool(inner.find(text, place))
        else:
            found = place >= width and bool(inner.find(text, place - width, place))
        return found != negated


class _Reached:
    """Codes that a letter leads to; `state` is what follows where no condition is among them."""

    __slots__ = ("by_kind", "codes", "state")

    def __init__(self, codes: frozenset[int]):
        self.codes = codes
        self.state: _State | None = None
        self.by_kind: dict[int, _State] = {}


class _State:
    """A state of the automaton: tests of the next letter with the code behind each, and ends."""

    __slots__ = ("ends", "following", "letters")

    def __init__(self, letters: list[tuple[int, Any]], ends: set[int]):
        self.letters, self.ends = letters, ends
        self.following: dict[str, _Reached] = {}

    def accepting(self, letter: str) -> Iterator[int]:
        """The codes behind the tests that a letter passes."""
        for code, test in self.letters:
            if test == letter if isinstance(test, str) else test.match(letter):
                yield code


_ENDS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING, op.AT_END, op.AT_END_STRING)
_WORDS = {False: re.compile(r"\w"), True: re.compile(r"\w", re.ASCII)}


def _is_at(anchor: _Anchor, text: str, place: int, kind: int) -> bool:
    """True if a place is one that an anchor, or a boundary of words, stands for."""
    what, ascii, lines = anchor
    if what in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        after_line = lines and what is op.AT_BEGINNING and text[place - 1 : place] == "\n"
        return bool(kind & _FIRST or after_line)
    if what is op.AT_END_STRING:
        return bool(kind & _LAST)
    if what is op.AT_END:
        return bool(kind & (_LAST | _LINE) or (lines and text[place : place + 1] == "\n"))
    word = _WORDS[ascii]
    before = place > 0 and word.match(text[place - 1]) is not None
    behind = place < len(text) and word.match(text[place]) is not None
    return (before != behind) == (what is op.AT_BOUNDARY)


def _with_flags(tree: Any, flags: int) -> Any:
    """A part of a pattern as one of its own."""
    made = _parser.SubPattern(_parser.State(), list(tree))
    made.state.flags = flags
    return made


def _letter(kind: Any, value: Any) -> str:
    """The pattern of one letter."""
    if kind is op.ANY:
        return "."
    if kind is op.IN:
        return f"[{''.join(_in_class(*part) for part in value)}]"
    if kind in (op.LITERAL, op.NOT_LITERAL):
        return f"[{'^' if kind is op.NOT_LITERAL else ''}{_escaped(value)}]"
    raise _Refused("it refers to its own groups, or forbids going back")


def _in_class(kind: Any, value: Any) -> str:
    if kind is op.NEGATE:
        return "^"
    if kind is op.RANGE:
        return f"{_escaped(value[0])}-{_escaped(value[1])}"
    return _CATEGORIES[value] if kind is op.CATEGORY else _escaped(value)


def _escaped(letter: int) -> str:
    return f"\\U{letter:08x}"


@lru_cache(4096)
def _test(letter: str, flags: int) -> re.Pattern[str]:
    return re.compile(letter, flags)
