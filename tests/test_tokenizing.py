"""Ids of texts: those of the caller's tokenizer, which stays as it is."""

import threading
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

import dualinfer
from dualinfer import ArgumentError
from dualinfer.engine.tokenizing import encode, ids_of, ids_of_each

from .models import BACKENDS
from .tokenizer_kinds import KINDS, llama3, word_piece

TEXTS = ("", "one two the cat", "thin 日本 thinthin <|eot|> x [SEP] y", "do n't " * 9)


@cache
def made(kind: str) -> Any:
    return KINDS[kind](Path(mkdtemp())) if kind == "ctrl" else KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_tokenizer(kind):
    """Whole and cut from either side, with and without what it puts around a text."""
    tokenizer = made(kind)
    for side in ("right", "left"):
        tokenizer.truncation_side = side
        for text in TEXTS:
            assert ids_of(tokenizer, text) == tokenizer(text)["input_ids"]
            bare = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids_of(tokenizer, text, bare=True) == bare
            for most in (2, 3, 5, 50):
                cut = tokenizer(text, truncation=True, max_length=most)["input_ids"]
                assert ids_of_each(tokenizer, [text], most, "text") == [cut]


def test_a_tokenizer_stays_as_it_is():
    """What the caller has set for calls of their own is neither obeyed nor changed."""
    tokenizer = word_piece()
    whole = tokenizer(TEXTS[1])["input_ids"]
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    before = backend.truncation, backend.padding, vars(tokenizer).copy()
    assert ids_of(tokenizer, TEXTS[1]) == whole
    assert ids_of_each(tokenizer, [TEXTS[1]], 4, "text") == [[*whole[:3], whole[-1]]]
    assert (backend.truncation, backend.padding, vars(tokenizer)) == before


def test_changes_of_a_tokenizer_are_followed():
    tokenizer = llama3()
    assert encode(tokenizer, "a new word") == tokenizer("a new word")["input_ids"]
    tokenizer.add_tokens(["new"])
    ids = tokenizer("a new word")["input_ids"]
    assert encode(tokenizer, "a new word") == ids and len(tokenizer) - 1 in ids
    tokenizer.backend_tokenizer.post_processor = None
    assert encode(tokenizer, "a new word") == tokenizer("a new word")["input_ids"] == ids[1:]
    tokenizer.split_special_tokens = True
    split = tokenizer("a<|eot|>")["input_ids"]
    assert encode(tokenizer, "a<|eot|>") == split and len(split) > 2


def test_a_tokenizer_that_panics_is_told():
    """By a table of characters that ends too soon."""
    tokenizer = word_piece()
    table = (4).to_bytes(4, "little") + bytes(4)
    tokenizer.backend_tokenizer.normalizer = normalizers.Precompiled(table)
    with pytest.raises(ArgumentError, match="does not take the prompt 'one two': index out of"):
        encode(tokenizer, "one two")


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a*a*)*[bc]$"])
def test_a_pattern_that_tries_for_ever_is_told_in_time(pattern, place):
    """The library gives up at a place in a text, where a run of letters doubles work with each."""
    tokenizer = word_piece()
    own = {
        "normalizer": normalizers.Replace(Regex(pattern), "x"),
        "pre_tokenizer": pre_tokenizers.Split(Regex(pattern), "isolated"),
    }
    setattr(tokenizer.backend_tokenizer, place, own[place])
    start = time.process_time()
    with pytest.raises(ArgumentError, match=r"does not take the prompt .*retry-limit-in-match"):
        encode(tokenizer, "a" * 4000 + "ba")
    assert time.process_time() - start < 2  # a fifth of a second


def test_a_length_that_leaves_no_room_for_a_text_is_refused():
    with pytest.raises(ArgumentError, match="max_length=1: the tokenizer puts 2 tokens around"):
        ids_of_each(word_piece(), ["one two"], 1, "text")


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_do_not_depend_on_what_other_threads_ask_of_the_tokenizer(backend):
    """Some embed texts cut to one length or another, others count tokens with the same object."""
    from transformers import BertConfig, BertModel

    tokenizer = word_piece()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(tokenizer)}
    how = {"backend": backend, "dtype": "fp32", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(BertModel(BertConfig(**sizes)).eval(), **how) as engine:
        engine.tokenizer, text = tokenizer, "one two the cat " * 20
        right = {most: engine.embed(text, max_length=most) for most in (12, 40)}
        processor = SimpleNamespace(tokenizer=tokenizer)  # which is not called
        assert (engine.embed(text, max_length=12, tokenizer=processor) == right[12]).all()
        found: list[bool] = []

        def embed(most: int) -> None:
            for _ in range(60):
                vector = engine.embed(text, max_length=most)
                found.append(bool(np.allclose(vector, right[most], atol=1e-5)))

        def count() -> None:
            for _ in range(300):
                ids = tokenizer(text, truncation=True, max_length=7)["input_ids"]
                found.append(len(ids) == 7)

        threads = [threading.Thread(target=embed, args=(most,)) for most in right]
        threads += [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(found) and len(found) == 2 * 60 + 2 * 300
        assert tokenizer.backend_tokenizer.truncation["max_length"] == 7
