"""Token ids of texts, by a tokenizer of the caller's that is never changed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ArgumentError, a_type, shortened, shown, told


def tokenizer_of(given: Any) -> Any:
    """The tokenizer that was passed, or the one in a processor; ArgumentError for other objects.

    A processor called with a text takes it for an image's address.
    """
    made = held_tokenizer(given)
    if not _is_tokenizer(made):
        raise ArgumentError(
            f"tokenizer is {a_type(given)}; expected a HF tokenizer, such as "
            "AutoTokenizer.from_pretrained(...) gives, or a processor that holds one."
        )
    return made


def held_tokenizer(given: Any) -> Any:
    """The tokenizer in a processor; another object as it is."""
    inner = getattr(given, "tokenizer", None)
    return inner if _is_tokenizer(inner) else given


def _is_tokenizer(value: Any) -> bool:
    return callable(value) and hasattr(value, "decode")


def encode(given: Any, text: Any) -> list[int]:
    """Token ids of a prompt, with what the tokenizer puts around it; ArgumentError for none."""
    if not isinstance(text, str):
        raise ArgumentError(f"A prompt is {a_type(text)}; expected a str.")
    ids = ids_of(given, text)
    if not ids:
        raise ArgumentError("The prompt is empty; there is nothing to continue.")
    return ids


def ids_of(given: Any, text: str, bare: bool = False) -> list[int]:
    """Token ids of a text with what the tokenizer puts around it, unless `bare`; maybe none."""
    return ids_of_each(given, [text], None, "prompt", bare)[0]


def ids_of_each(
    given: Any, texts: Iterable[str], most: int | None, name: str, bare: bool = False
) -> list[list[int]]:
    """Token ids of each text, at most so many, cut as HF's truncation cuts.

    Errors call a text by `name`.
    """
    tokenizer = tokenizer_of(given)
    how: dict[str, Any] = {"add_special_tokens": False} if bare else {}
    found = []
    with own_tokenizer(tokenizer) as own:
        is_python = own is tokenizer
        if most is not None:
            how |= {"truncation": True, "max_length": most} if is_python else _MARKED
        how |= {} if is_python else {"verbose": False}
        for text in texts:
            with _told(text, name):
                made = own(text, **how)
            ids = list(made["input_ids"])
            if most is not None and len(ids) > most:
                ids = _cut(ids, made["special_tokens_mask"], most, tokenizer.truncation_side)
            found.append(ids)
    return found


_MARKED = {"return_special_tokens_mask": True}


def _cut(ids: list[int], mask: Sequence[int], most: int, side: str) -> list[int]:
    """At most so many ids; those that the tokenizer puts around a text stay."""
    front = next((i for i, special in enumerate(mask) if not special), len(ids))
    back = next((i for i, special in enumerate(reversed(mask)) if not special), len(ids) - front)
    if front + back > most:
        raise ArgumentError(
            f"max_length={most}: the tokenizer puts {front + back} tokens around each text. Pass "
            "more."
        )
    room = most - front - back
    inner = ids[front : len(ids) - back]
    inner = inner[:room] if side == "right" else inner[len(inner) - room :]
    return [*ids[:front], *inner, *ids[len(ids) - back :]]


@contextmanager
def own_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """A tokenizer that gives the same ids, and that no other thread uses meanwhile.

    It neither truncates nor pads: a tokenizer of Rust keeps these settings, so that the call of one
    thread obeys what another one has set. One of Python keeps none, and is given as it is.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    if not hasattr(backend, "get_added_tokens_decoder"):
        yield tokenizer
        return
    twin = _twin(tokenizer, backend)
    with twin.lock:
        yield twin.tokenizer


def _told(text: str, name: str) -> AbstractContextManager[None]:
    """Within it an error of the tokenizer's is an ArgumentError."""

    def make(error: BaseException) -> ArgumentError:
        what = f"The {name} {shown(text)} was read from bytes that are no UTF-8. Pass text."
        if not any("\ud800" <= char <= "\udfff" for char in text):
            what = f"The tokenizer does not take the {name} {shown(text)}: {shortened(error)}"
        return ArgumentError(what)

    return told(make)


class _Twin(NamedTuple):
    """A tokenizer of our own, and what it was made of."""

    key: tuple[Any, ...]
    tokenizer: Any
    lock: Lock


_twins: WeakKeyDictionary[Any, _Twin] = WeakKeyDictionary()
_making = Lock()


def _twin(tokenizer: Any, backend: Any) -> _Twin:
    """The twin of a tokenizer, made anew where that has changed."""
    parts = backend.normalizer, backend.pre_tokenizer, backend.post_processor
    size = backend.get_vocab_size(with_added_tokens=True)
    settings = [value for value in vars(tokenizer).values() if isinstance(value, bool | str)]
    key = (id(backend), size, *map(repr, parts), *settings)
    with _making:
        twin = _twins.get(tokenizer)
        if twin is None or twin.key != key:
            twin = _Twin(key, _copied(tokenizer, backend, parts), Lock())
            _twins[tokenizer] = twin
    return twin


def _copied(tokenizer: Any, backend: Any, parts: Sequence[Any]) -> Any:
    """A tokenizer of the same class and settings over the same vocabulary, which is not copied."""
    from tokenizers import Tokenizer

    own = Tokenizer(backend.model)
    for name, part in zip(("normalizer", "pre_tokenizer", "post_processor"), parts, strict=True):
        if part is not None:
            setattr(own, name, part)
    added = backend.get_added_tokens_decoder()
    run: list[Any] = []
    for _, token in sorted(added.items()):
        if run and run[-1].special != token.special:
            _add(own, run)
            run = []
        run.append(token)
    _add(own, run)
    if own.get_added_tokens_decoder() != added:  # ids with holes between them
        own = Tokenizer.from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
    copy = object.__new__(type(tokenizer))
    vars(copy).update(vars(tokenizer), _tokenizer=own)
    return copy


def _add(own: Any, tokens: list[Any]) -> None:
    if tokens and tokens[0].special:
        own.add_special_tokens(tokens)
    elif tokens:
        own.add_tokens(tokens)
