"""Token ids of texts, by a tokenizer of the caller's that is never changed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ArgumentError, a_type, shown


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


def ids_of(
    given: Any, text: str, most: int | None = None, name: str = "prompt", bare: bool = False
) -> list[int]:
    """Token ids of a text, at most so many, with what the tokenizer puts around it; maybe none.

    A text that is cut is cut as HF's truncation does it. With `bare` nothing is put around.
    """
    tokenizer = tokenizer_of(given)
    with _told(f"The tokenizer does not take the {name} {shown(text)}", text, name):
        how: dict[str, Any] = {"add_special_tokens": False} if bare else {}
        with own_tokenizer(tokenizer) as own:
            if own is tokenizer:
                cut = {} if most is None else {"truncation": True, "max_length": most}
                return list(tokenizer(text, **how, **cut)["input_ids"])
            made = own(text, **how, return_special_tokens_mask=most is not None, verbose=False)
    ids = list(made["input_ids"])
    if most is None or len(ids) <= most:
        return ids
    return _cut(ids, made["special_tokens_mask"], most, tokenizer.truncation_side)


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


@contextmanager
def _told(what: str, text: str, name: str) -> Iterator[None]:
    """Within it an error of the tokenizer's is an ArgumentError."""
    try:
        yield
    except BaseException as error:  # tokenizers raises many kinds, and panics with one of its own
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if any("\ud800" <= char <= "\udfff" for char in text):
            what = f"The {name} {shown(text)} was read from bytes that are no UTF-8. Pass text."
        else:
            what = f"{what}: {error}"
        raise ArgumentError(what) from error


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
    own.encode_special_tokens = tokenizer.split_special_tokens
    copy = object.__new__(type(tokenizer))
    vars(copy).update(vars(tokenizer), _tokenizer=own)
    return copy


def _add(own: Any, tokens: list[Any]) -> None:
    if tokens and tokens[0].special:
        own.add_special_tokens(tokens)
    elif tokens:
        own.add_tokens(tokens)
