"""Text of a growing sequence of tokens: pieces that, joined, are what the tokenizer decodes."""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from typing import Any, Protocol

from ..errors import ArgumentError, is_error, shortened, told
from .tokenizing import held_tokenizer

_CONTEXT = 1024  # tokens of a prompt that are decoded before the new ones
_WINDOW, _LONGEST_WINDOW = 16, 512  # tokens that a tokenizer with a way of its own is asked about
_PROBES = 12
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
# What transformers' clean_up_tokenization replaces in a whole text, in this order.
_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")),
    *((" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
_TRIED = " ".join(["a", *(old + "b" + old for old, _ in _CLEANED), "' ' ' '"])


class Detokenizer:
    """Makes streams of text by one tokenizer, with or without its special tokens.

    Joined, the pieces of a stream are what `tokenizer.decode` makes of prompt and new tokens
    together, behind what that shares with the text of the prompt. A character comes out as soon as
    no later token can change it: one of several tokens with its last; bytes of a tokenizer that
    falls back on bytes when their run ends, since one wrong byte makes U+FFFD of all the run; a
    blank that cleaning up may take away with what follows. `eager` streams, for those who look for
    strings, decode runs of bytes one by one and clean nothing up; `cleans` False leaves the latter
    out alone, where a grammar has said what each blank is. Time and memory for a token do not grow
    with the text.

    The decoders of the tokenizers library are followed step by step. Another tokenizer, of Python
    or with a decode of its own, is asked to decode the last tokens with some that might come next.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        eager: bool = False,
        cleans: bool = True,
    ):
        tokenizer = held_tokenizer(tokenizer)
        with _told():
            self._cleans = not eager and cleans and _cleans(tokenizer)
            self._source = _make_chain(tokenizer, skip_special_tokens, eager) or _Asked(
                tokenizer, skip_special_tokens, self._cleans or eager
            )

    def stream(self, prompt: Sequence[int] = ()) -> "TextStream":
        """The text that follows `prompt`."""
        stages = [_Replaced(*pair) for pair in _CLEANED] if self._cleans else []
        return TextStream(self._source, stages, prompt)

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token that may be a part of a character; None where they are not known."""
        return self._source.bytes_of(token) if isinstance(self._source, _Chain) else None


def _told(which: object = "") -> AbstractContextManager[None]:
    """Within it an error of the tokenizer's, which decodes these tokens, is an ArgumentError."""
    says = f"The tokenizer cannot decode tokens{which}"
    return told(lambda error: ArgumentError(f"{says}: {shortened(error)}"))


class TextStream:
    """Text of one growing sequence, behind its prompt's."""

    def __init__(self, source: "_Source", stages: Sequence["_Stage"], prompt: Sequence[int]):
        self._source, self._stages = copy(source), list(stages)
        with _told():
            self.before = _fed(self._stages, [self._source.start(prompt)])
            self._shown = self._rest()  # the prompt's last characters, which new tokens may change

    def push(self, *tokens: int) -> str:
        """The text that is complete with `tokens`; maybe empty."""
        with _told():
            return self._behind(_fed(self._stages, [self._source.feed(int(t)) for t in tokens]))

    def finish(self) -> str:
        """The rest, with U+FFFD in place of a character that never ended."""
        with _told():
            return self._behind(self._rest())

    def rest(self) -> str:
        """The text that `finish` would give now."""
        with _told():
            text = self._rest()
        return text[len(os.path.commonprefix((self._shown, text))) :]

    def _rest(self) -> str:
        """The end of the whole text that is not settled."""
        return _ended([copy(stage) for stage in self._stages], self._source.rest())

    def _behind(self, text: str) -> str:
        """`text` without what the prompt showed."""
        if not self._shown:
            return text
        known = len(os.path.commonprefix((self._shown, text)))
        self._shown = self._shown[known:] if known == len(text) else ""
        return text[known:]


class Places:
    """Tells where in a text each of its tokens begins.

    `begin` is where the text of a new `stream` begins, which should be eager. A token that goes on
    with a character begins where that does.
    """

    def __init__(self, stream: TextStream, begin: int = 0) -> None:
        self._stream, self._settled = stream, begin

    @property
    def end(self) -> int:
        """Where the text ends so far."""
        return self._settled + len(self._stream.rest())

    def push(self, token: int) -> int:
        """Where the next token begins."""
        held, piece = self._stream.rest(), self._stream.push(token)
        text = piece + self._stream.rest()
        is_behind = len(text) > len(held) and text.startswith(held)
        place = self._settled + (len(held) if is_behind else 0)
        self._settled += len(piece)
        return place


class _Source(Protocol):
    """The settled text of ids. Its state are values that do not change, so that a copy is free."""

    def start(self, prompt: Sequence[int]) -> str: ...
    def feed(self, token: int) -> str: ...
    def rest(self) -> str: ...


class _Stage(Protocol):
    """One step of decoding: pieces in, pieces out; `end` gives what was held back."""

    def feed(self, piece: str) -> Iterable[str]: ...
    def end(self) -> Iterable[str]: ...


def _fed(stages: Sequence[_Stage], pieces: Iterable[str]) -> str:
    """The text that comes out of the last stage."""
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.feed(piece)]
    return "".join(pieces)


def _ended(stages: Sequence[_Stage], *pieces: str) -> str:
    """The text that comes out of the last stage as all of them end."""
    for stage in stages:
        pieces = (*(out for piece in pieces for out in stage.feed(piece)), *stage.end())
    return "".join(pieces)


class _Chain:
    """Ids through the steps of a decoder of the tokenizers library."""

    def __init__(self, backend: Any, skips: bool, stages: Sequence[_Stage]):
        added = backend.get_added_tokens_decoder().items()
        self._hidden = {id for id, token in added if token.special} if skips else set()
        self._token_of, self._stages = backend.id_to_token, stages

    def start(self, prompt: Sequence[int]) -> str:
        """The settled end of a prompt, whose run of bytes is read from its first."""
        self._stages = [copy(stage) for stage in self._stages]
        at = max(0, len(prompt) - _CONTEXT)
        while at and _BYTE.fullmatch(self._token_of(int(prompt[at])) or ""):
            at -= 1
        return "".join(self.feed(int(token)) for token in prompt[at:])

    def feed(self, token: int) -> str:
        """The text that one more token settles."""
        piece = None if token in self._hidden or token < 0 else self._token_of(token)
        return "" if piece is None else _fed(self._stages, [piece])

    def rest(self) -> str:
        """The text that is held back."""
        return _ended([copy(stage) for stage in self._stages])

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None where they are not known."""
        piece = self._token_of(token) or ""
        if any(isinstance(stage, _Bytes) for stage in self._stages):
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else None
        if not any(isinstance(stage, _ByteLevel) for stage in self._stages):
            return None
        with suppress(KeyError):
            return bytes([_BYTE_OF[letter] for letter in piece])
        return None


class _Each:
    """Decoders that change each token by itself; some of them the first one otherwise."""

    def __init__(self, components: Sequence[tuple[Any, bool]]):
        self._components, self._is_first = components, True
        self._known: dict[str, str] = {}

    def feed(self, piece: str) -> list[str]:
        if self._is_first:
            self._is_first = False
            for decoder, _ in self._components:
                piece = decoder.decode([piece])
            return [piece]
        made = self._known.get(piece)
        if made is None:
            made = piece
            for decoder, minds_first in self._components:
                made = decoder.decode(["", made] if minds_first else [made])
            self._known[piece] = made
        return [made]

    def end(self) -> tuple[()]:
        return ()


class _Bytes:
    """Byte fallback: a run of bytes is text, or U+FFFD for each where one of it is none."""

    def __init__(self, eager: bool):
        self._run, self._eager = b"", eager

    def feed(self, piece: str) -> list[str]:
        byte = _BYTE.fullmatch(piece)
        if byte is None:
            return [*self.end(), piece]
        self._run += bytes([int(byte[1], 16)])
        if not self._eager:
            return []
        text, used = codecs.utf_8_decode(self._run, "replace", False)
        self._run = self._run[used:]
        return [text]

    def end(self) -> list[str]:
        run, self._run = self._run, b""
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _ByteLevel:
    """A letter for each byte, as of GPT-2; a token with other letters is text."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, piece: str) -> list[str]:
        try:
            self._left += bytes([_BYTE_OF[letter] for letter in piece])
        except KeyError:
            self._left += piece.encode(errors="replace")
        text, used = codecs.utf_8_decode(self._left, "replace", False)
        self._left = self._left[used:]
        return [text] if text else []

    def end(self) -> list[str]:
        left, self._left = self._left, b""
        return [left.decode(errors="replace")]


def _make_alphabet() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _make_alphabet()


class _Suffixed:
    """The ends of words of a BPE, each a blank but the last."""

    def __init__(self, suffix: str):
        self._suffix, self._if_more, self._if_last = suffix, "", ""

    def feed(self, piece: str) -> list[str]:
        more, last = piece.replace(self._suffix, " "), piece.replace(self._suffix, "")
        same = len(os.path.commonprefix((more, last)))
        settled = self._if_more + more[:same]
        self._if_more, self._if_last = more[same:], last[same:]
        return [settled]

    def end(self) -> list[str]:
        return [self._if_last]


class _Different:
    """CTC: of tokens that are the same and follow each other the first."""

    def __init__(self, decoder: Any):
        self._decoder, self._last = decoder, None

    def feed(self, piece: str) -> list[str]:
        is_new, self._last = piece != self._last, piece
        made = self._decoder.decode([piece]) if is_new else ""
        return [made] if made else []

    def end(self) -> tuple[()]:
        return ()


class _Blanks:
    """Tokens without a decoder: a blank between two."""

    def __init__(self) -> None:
        self._between = ""

    def feed(self, piece: str) -> list[str]:
        between, self._between = self._between, " "
        return [between + piece]

    def end(self) -> tuple[()]:
        return ()


class _Replaced:
    """A text in which `old` is `new`."""

    def __init__(self, old: str, new: str):
        self._old, self._new, self._held = old, new, ""

    def feed(self, piece: str) -> list[str]:
        *done, left = (self._held + piece).split(self._old)
        held = next(
            n for n in range(min(len(self._old) - 1, len(left)), -1, -1)
            if left.endswith(self._old[:n])
        )  # fmt: skip
        settled = len(left) - held
        self._held = left[settled:]
        return ["".join(part + self._new for part in done) + left[:settled]]

    def end(self) -> list[str]:
        return [self._held]


class _Stripped:
    """A text without up to `start` of a character in front, and up to `stop` at its end."""

    def __init__(self, char: str, start: int, stop: int):
        self._char, self._start, self._stop, self._held = char, start, stop, ""

    def feed(self, piece: str) -> list[str]:
        text = piece
        while self._start and text.startswith(self._char):
            text, self._start = text[1:], self._start - 1
        if not text:
            return []
        self._start, text = 0, self._held + text
        tail = len(text) - len(text.rstrip(self._char))
        settled = len(text) - min(self._stop, tail)
        self._held = text[settled:]
        return [text[:settled]]

    def end(self) -> tuple[()]:
        return ()


class _Fragments:
    """A decoder that changes the one text by its characters."""

    def __init__(self, decoder: Any):
        self._decoder = decoder

    def feed(self, piece: str) -> list[str]:
        return [self._decoder.decode([piece])]

    def end(self) -> tuple[()]:
        return ()


def _make_chain(tokenizer: Any, skips: bool, eager: bool) -> _Chain | None:
    """The steps of a tokenizer that decodes by the tokenizers library alone; None for others."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind: Any = type(tokenizer)
    if any(getattr(kind, n) is not getattr(PreTrainedTokenizerFast, n) for n in _DECODING):
        return None
    backend = tokenizer.backend_tokenizer
    stages = _make_stages(backend.decoder, eager)
    return None if stages is None else _Chain(backend, skips, stages)


_DECODING = ("decode", "_decode", "clean_up_tokenization")


def _make_stages(decoder: Any, eager: bool) -> list[_Stage] | None:
    """Each step of a decoder; None where one is not known."""
    if decoder is None:
        return [_Blanks()]
    from tokenizers import decoders

    try:
        parts = _flat(json.loads(decoder.__getstate__()))
    except Exception:  # one of the caller's own, in Python
        return None
    stages: list[_Stage] = []
    each: list[tuple[Any, bool]] = []
    is_text = False  # the tokens so far are one text
    for index, part in enumerate(parts):
        made: Any = decoders.Fuse()
        made.__setstate__(json.dumps(part).encode())
        stage = _text_stage(made, part) if is_text else _token_stage(made, part, eager)
        if stage is None:
            return None
        if isinstance(stage, bool):  # it changes each token by itself
            each.append((made, stage))
            if index + 1 < len(parts):
                continue
        if each:
            stages.append(_Each(tuple(each)))
            each = []
        if part["type"] == "BPEDecoder" and parts[index + 1 :][:1] not in ([], [{"type": "Fuse"}]):
            return None
        if not isinstance(stage, bool | str):
            stages.append(stage)
        is_text = is_text or part["type"] in ("Fuse", "ByteLevel")
    return stages


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The components of a decoder in their order."""
    if part["type"] != "Sequence":
        return [part]
    return [inner for one in part["decoders"] for inner in _flat(one)]


def _token_stage(decoder: Any, part: dict[str, Any], eager: bool) -> "_Stage | bool | str | None":
    """A step over tokens. A bool: it changes each alone, and True the first one otherwise."""
    kind = part["type"]
    if kind in ("WordPiece", "Metaspace"):
        return True
    if kind == "Replace" or (kind == "Strip" and not part["stop"]):
        return False
    if kind == "ByteFallback":
        return _Bytes(eager)
    if kind == "ByteLevel":
        return _ByteLevel()
    if kind == "CTC":
        return _Different(decoder)
    if kind == "BPEDecoder" and part["suffix"]:
        return _Suffixed(part["suffix"])
    return kind if kind == "Fuse" else None


def _text_stage(decoder: Any, part: dict[str, Any]) -> "_Stage | str | None":
    """A step over one text."""
    kind = part["type"]
    if kind == "Strip":
        return _Stripped(part["content"], part["start"], part["stop"])
    if kind == "Replace" and part["pattern"].get("String"):
        return _Replaced(part["pattern"]["String"], part["content"])
    if kind == "Metaspace":
        return _Fragments(decoder)
    return kind if kind == "Fuse" else None


class _Asked:
    """Ids whose text any tokenizer is asked for: that of the last ones, with what may come next.

    What no probe changes is settled, and older tokens are left out where that changes neither text
    nor probes. A window that cannot be shortened ends after 512 tokens.
    """

    def __init__(self, tokenizer: Any, skips: bool, is_raw: bool):
        how: dict[str, Any] = {"skip_special_tokens": skips}
        if is_raw and hasattr(tokenizer, "clean_up_tokenization_spaces"):
            how["clean_up_tokenization_spaces"] = False
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, **how)
        self._probes = self._made_probes(tokenizer)
        self._ids: tuple[int, ...] = ()
        self._text, self._done = "", 0

    def _made_probes(self, tokenizer: Any) -> tuple[int, ...]:
        """Ids from all over the vocabulary, and a byte that ends no character."""
        try:
            count = len(tokenizer)
        except TypeError:
            return ()
        ids = list(range(0, count, max(1, count // _PROBES)))
        with suppress(Exception):  # of a tokenizer without such a token
            ids.append(tokenizer.convert_tokens_to_ids("<0xFF>"))
        return tuple(id for id in ids if isinstance(id, int) and self._takes(id))

    def _takes(self, token: int) -> bool:
        return isinstance(self._tried([token]), str)

    def _tried(self, ids: list[int]) -> str | None:
        """The text of ids of which a probe is one; None where they have none."""
        try:
            return self._decode(ids)
        except BaseException as error:  # an id that the vocabulary leaves out
            if not is_error(error):
                raise
            return None

    def start(self, prompt: Sequence[int]) -> str:
        """The settled end of a prompt."""
        self._ids = tuple(map(int, prompt[-4 * _WINDOW :]))
        return self._settled()

    def feed(self, token: int) -> str:
        """The text that one more token settles."""
        self._ids += (token,)
        return self._settled()

    def rest(self) -> str:
        """The text that is held back."""
        return self._text[self._done :]

    def _settled(self) -> str:
        ids = [*self._ids]
        self._text = self._whole(ids)
        ahead = [self._tried([*ids, probe]) for probe in (*self._probes, *ids[-1:])]
        same = os.path.commonprefix([self._text, *(text for text in ahead if text is not None)])
        if same == self._text:  # what ends it may be the beginning of a character
            same = same.rstrip("\ufffd")
        begun, self._done = self._done, max(self._done, len(same))
        piece = self._text[begun : self._done]
        if len(ids) > _WINDOW:
            self._shorten(ids, ahead)
        return piece

    def _whole(self, ids: list[int]) -> str:
        """The text of ids."""
        with _told(f" {ids[-8:]}"):
            return self._decode(ids)

    def _shorten(self, ids: list[int], ahead: list[str | None]) -> None:
        """Begin the window later, where that makes no difference."""
        tail = ids[-_WINDOW // 2 :]
        text = self._whole(tail)
        left_out = len(self._text) - len(text)
        fits = self._text.endswith(text) and left_out <= self._done
        probes = (*self._probes, *ids[-1:])
        if fits and all(
            whole is None or whole[left_out:] == self._tried([*tail, probe])
            for whole, probe in zip(ahead, probes, strict=True)
        ):
            self._ids, self._text, self._done = tuple(tail), text, self._done - left_out
        elif len(ids) > _LONGEST_WINDOW:
            held = len(self._text) - self._done
            self._ids, self._text = tuple(tail), text
            self._done = max(0, len(text) - held)


def _cleans(tokenizer: Any) -> bool:
    """True if a text is cleaned up as a whole after its tokens were decoded, in HF's usual way."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    clean = getattr(tokenizer, "clean_up_tokenization", None)
    is_bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    if clean is None or (is_bpe == "BPE" and not getattr(tokenizer, forced, False)):
        return False
    stages = [_Replaced(*pair) for pair in _CLEANED]
    return clean(_TRIED) == _fed(stages, [_TRIED]) + _ended(stages)
