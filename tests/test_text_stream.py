"""Text from tokens as they come: joined pieces are the whole text, for every kind of tokenizer."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualinfer import ArgumentError
from dualinfer.engine import text_stream
from dualinfer.engine.stops import StopStrings
from dualinfer.engine.text_stream import Detokenizer

from .tokenizer_kinds import KINDS, byte_fallback, byte_level, fast

TEXT = "größer 日本語 🙂🙂 it 's . ' thin do n't end"


@cache
def made(kind: str) -> Any:
    return KINDS[kind](Path(mkdtemp())) if kind == "ctrl" else KINDS[kind]()


def decoded(tokenizer: Any, prompt: Sequence[int], new: Sequence[int], skip: bool) -> str:
    """The text of `new` by whole decodes: behind what the prompt's own text shares with it."""
    how = {"skip_special_tokens": skip}
    whole, before = (
        tokenizer.decode(ids, **how) if ids else "" for ids in ([*prompt, *new], [*prompt])
    )
    return whole[len(os.path.commonprefix((whole, before))) :]


@st.composite
def sequences(draw: st.DrawFn, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of a prompt and new ones: random, of a text, or of one with an id that breaks it."""
    count = min(len(tokenizer), 1 << 11)
    anything = st.lists(st.integers(0, count - 1), max_size=24)
    text = st.text("aé日🙂 .'\n", max_size=16).map(
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    parts = draw(st.lists(anything | text, max_size=4))
    ids = [id for part in parts for id in part]
    cut = draw(st.integers(0, len(ids)))
    return ids[:cut], ids[cut:]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pieces_are_the_whole_text(kind):
    tokenizer = made(kind)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(sequences(tokenizer), st.booleans())
    def check(ids, skip):
        prompt, new = ids
        stream = Detokenizer(tokenizer, skip).stream(prompt)
        pieces = [stream.push(token) for token in new]
        assert "".join(pieces) + stream.finish() == decoded(tokenizer, prompt, new, skip)

    check()


@pytest.mark.parametrize(
    "kind", ["byte-level", "byte-fallback", "unigram", "suffixed", "ctc", "ctrl"]
)
def test_a_character_comes_as_soon_as_no_next_token_can_change_it(kind):
    """And not before, where one more token tells: each token of the vocabulary is tried."""
    tokenizer = made(kind)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = [*ids[:40], *range(0, len(tokenizer), max(1, len(tokenizer) // 9))]
    stream, shown = Detokenizer(tokenizer).stream(), ""
    for count in range(1, len(ids) + 1):
        shown += stream.push(ids[count - 1])
        nexts = [
            tokenizer.decode([*ids[:count], id], skip_special_tokens=True)
            for id in range(len(tokenizer))
        ]
        same = os.path.commonprefix(
            [tokenizer.decode(ids[:count], skip_special_tokens=True), *nexts]
        )
        assert same.startswith(shown)
        assert set(same[len(shown) :]) <= {"\ufffd"}  # two more tokens may make it a character
    assert shown


def test_bytes_of_a_run_wait_for_its_end_alone():
    tokenizer = byte_fallback()
    ids = tokenizer("日本 a")["input_ids"]
    stream = Detokenizer(tokenizer).stream(tokenizer("say ")["input_ids"])
    pieces = [stream.push(token) for token in ids[1:]]
    assert pieces == ["", "", "", "", "", "", "日本 ", "a"]
    eager = Detokenizer(tokenizer, eager=True).stream(tokenizer("say ")["input_ids"])
    assert [eager.push(token) for token in ids[1:]] == ["", "", "日", "", "", "本", " ", "a"]


def test_what_never_becomes_a_character_is_marked():
    tokenizer = byte_level()
    half, letters = tokenizer("🙂")["input_ids"][:2], tokenizer("xyz")["input_ids"]
    stream = Detokenizer(tokenizer).stream(tokenizer("a")["input_ids"])
    assert [stream.push(token) for token in (*half, *letters)] == ["", "", "\ufffdx", "y", "z"]
    assert [stream.push(token) for token in half] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_a_word_keeps_its_blank_behind_a_prompt():
    """A token of Llama's begins with its word's blank, which a text's first token does not show."""
    stream = Detokenizer(made("unigram")).stream(made("unigram")("one")["input_ids"])
    new = made("unigram")("two the", add_special_tokens=False)["input_ids"]
    assert [stream.push(token) for token in new] == [" two", " the"]


def test_a_prompt_that_ends_within_a_character_is_not_shown_again():
    tokenizer = byte_level()
    ids = tokenizer("aé日b")["input_ids"]
    for cut in range(1, len(ids)):
        stream = Detokenizer(tokenizer).stream(ids[:cut])
        text = stream.push(*ids[cut:]) + stream.finish()
        assert text == decoded(tokenizer, ids[:cut], ids[cut:], True)
        assert "aé日b".endswith(text) and text


def test_a_long_run_of_bytes_in_a_prompt_is_read_from_its_first():
    tokenizer = byte_fallback()
    ids = tokenizer("日" * 700 + "本 a")["input_ids"]
    for cut, text in ((-1, "a"), (-2, " a"), (-5, "本 a")):
        stream = Detokenizer(tokenizer).stream(ids[:cut])
        assert stream.push(*ids[cut:]) + stream.finish() == text


@pytest.mark.parametrize("cleans", [False, True])
def test_a_class_that_decodes_in_a_way_of_its_own_is_asked(cleans, monkeypatch):
    """Here with no byte among its probes but the one that ends no character."""
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(text_stream, "_PROBES", 1)

    class Own(PreTrainedTokenizerFast):
        def decode(self, token_ids: Any, **how: Any) -> Any:
            return super().decode(token_ids, **how).replace("x", "<x>")

    inner = byte_fallback().backend_tokenizer
    tokenizer = Own(tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=cleans)
    ids = tokenizer("xa 日本 x" * 12, add_special_tokens=False)["input_ids"]
    run = tokenizer("日本", add_special_tokens=False)["input_ids"]
    for more in ([], [5], [200, 5], [*run, 200, 5]):
        stream = Detokenizer(tokenizer).stream(ids[:30])
        text = "".join(stream.push(token) for token in [*ids[30:], *more]) + stream.finish()
        assert text == decoded(tokenizer, ids[:30], [*ids[30:], *more], True)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "word-piece", "byt5"])
def test_a_token_costs_the_same_however_long_the_text_is(kind):
    """Counted in tokens that are decoded, not in seconds."""
    tokenizer, count = made(kind), 0
    ids = tokenizer("the thin cat 日 do n't " * 50, add_special_tokens=False)["input_ids"]
    stream = Detokenizer(tokenizer).stream(ids[:9])
    source = stream._source
    if hasattr(source, "_decode"):
        decode = source._decode

        def counted(given):
            nonlocal count
            count = max(count, len(given))
            return decode(given)

        source._decode = counted
    held = max(
        sum(len(piece) for piece in _held(stream))
        for token in ids[9:]
        if stream.push(token) is not None
    )
    assert count < 40 and held < 100


def _held(stream: Any) -> list[Any]:
    """What a stream remembers of the text."""
    stages = [*getattr(stream._source, "_stages", ()), *stream._stages]
    return [v for stage in stages for k, v in vars(stage).items() if isinstance(v, str | bytes)]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "gemma", "perceiver"])
def test_a_stop_string_is_seen_in_the_token_that_ends_it(kind):
    tokenizer = made(kind)
    ids = tokenizer("x é → 你好 日本語!", add_special_tokens=False)["input_ids"]
    for stop in ("é", "→", "你好", "é →", "語", "本語!"):
        for begun in (0, 5, len(ids) - 2):
            watch = StopStrings((stop,), tokenizer).watch(ids[:begun])
            ends = [i for i in range(begun, len(ids)) if watch.is_completed(ids[i])]
            whole = [stop in tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
            last = whole.index(True)
            assert ends == ([last] if last >= begun else [])


def test_a_special_token_may_be_a_stop_string():
    tokenizer = byte_level()
    watch = StopStrings(("b<|eot|>",), tokenizer).watch(tokenizer("a")["input_ids"])
    assert [watch.is_completed(id) for id in tokenizer("b<|eot|>")["input_ids"]] == [False, True]


def test_a_decoder_that_panics_is_told():
    """The library of tokenizers takes away blanks behind an empty token, and panics."""
    from tokenizers import Tokenizer, decoders, models

    inner = Tokenizer(models.WordLevel({"": 0, "a ": 1, "b": 2}, unk_token="b"))
    inner.decoder = decoders.Strip(" ", 0, 1)
    stream = Detokenizer(fast(inner)).stream()
    assert "".join(map(stream.push, (1, 2, 1))) == "aba"
    with pytest.raises(ArgumentError, match=r"cannot decode tokens \[1, 2, 1, 0\]"):
        stream.push(0)


def test_runs_of_special_tokens_leave_no_trace():
    tokenizer = byte_level()
    eot = tokenizer.eos_token_id
    ids = tokenizer("é")["input_ids"]
    new = [eot] * 20 + ids[:1] + [eot] * 20 + ids[1:] + tokenizer("a")["input_ids"]
    stream = Detokenizer(tokenizer).stream(tokenizer("q")["input_ids"])
    assert "".join(map(stream.push, new)) + stream.finish() == "éa"
    kept = Detokenizer(tokenizer, skip_special_tokens=False).stream()
    other = tokenizer("<日><think>")["input_ids"]  # tokens of letters that stand for no bytes
    assert "".join(map(kept.push, [*ids, eot, *other, *ids])) == "é<|eot|><日><think>é"
