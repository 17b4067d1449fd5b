"""Text from tokens as they come: whole characters only, nothing lost."""

import json

import pytest

import dualinfer
from dualinfer import CheckpointError
from dualinfer.checkpoint.tokenizer import load_tokenizer
from dualinfer.engine.text import TextStream

from .checkpoints import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(folder)


@pytest.mark.parametrize("prompt", ["", "a", "Straße ", "🙂" * 5])
@pytest.mark.parametrize("text", ["plain", "größer → 日本語 🙂🙂 end", "\n\n  é", "🙂"])
def test_text_stream_gives_whole_characters_only(tokenizer, prompt, text):
    stream = TextStream(tokenizer, tokenizer(prompt)["input_ids"])
    pieces = [stream.push(token) for token in tokenizer(text)["input_ids"]]
    assert len(pieces) == len(text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert stream.finish() == ""


def test_text_stream_marks_a_character_that_never_ends(tokenizer):
    stream = TextStream(tokenizer, tokenizer("a")["input_ids"])
    half = tokenizer("🙂")["input_ids"][:2]
    assert [stream.push(token) for token in half] == ["", ""]
    assert set(stream.finish()) == {"\ufffd"}


def test_text_stream_goes_on_after_bytes_that_are_no_text(tokenizer):
    stream = TextStream(tokenizer, tokenizer("a")["input_ids"])
    broken, letters = tokenizer("é")["input_ids"][:1], tokenizer("xyz")["input_ids"]
    pieces = [stream.push(token) for token in (*broken, *letters)]
    assert pieces == ["", "\ufffdx", "y", "z"]


def test_text_stream_keeps_the_blanks_between_words():
    """A token of Llama's begins with its word's blank, which a text's first token does not show."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"\u2581one": 0, "\u2581two": 1, "\u2581three": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="\u2581one"))
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([0, 1, 2]) == "one two three"
    stream = TextStream(tokenizer, [0])
    assert [stream.push(token) for token in (1, 2, 1)] == [" two", " three", " two"]


def test_a_vocabulary_of_berts_is_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    assert load_tokenizer(tmp_path)("one two")["input_ids"] == [2, 5, 6, 3]


def test_load_tokenizer_names_a_folder_without_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(dualinfer.CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_names_a_broken_one(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(dualinfer.CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_runs_no_code_of_the_folder(tmp_path, monkeypatch):
    """Nobody is asked whether to: with "y" on the terminal it does not run either."""
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
