"""Files made to fill a machine's time or memory: each is told within a second, of any format."""

import json
import pickle
import random
import re
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dualinfer.errors import DualinferError

from . import fuzz_files as forms
from .models import A_SECOND, BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore")  # of what a file lacks
MOST, ALWAYS = 50, 32 << 20  # bytes of memory for a byte that is read, and beside them
N = 2000
MANY = 10_000

# --- pickles -------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    """Opcodes that push a text."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(times: int, what: bytes) -> bytes:
    """A list of what was remembered as number 0, or of what is made of it."""
    return b"](" + what * times + b"e"


ITEMS = b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(N))
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
PICKLES = {
    "a dict of one list, many times": b"]q\0("
    + ITEMS
    + b"e0"
    + named(N, b"ccollections\nOrderedDict\nh\0\x85R"),
    "a list of one list": b"]q\0(" + b"N" * N + b"e" + named(N, b"h\0"),
    "a long tuple as a key": b"(" + b"N" * N + b"tq\0" + b"0}(" + b"h\0N" * N + b"u",
    "a long int as a key": b"\x8b"
    + struct.pack("<i", 4000)
    + b"w" * 4000
    + b"q\0"
    + b"0}("
    + b"h\0N" * N
    + b"u",
    "a shape of many axes": STORAGE
    + b"tQq\1("
    + b"K\1" * N
    + b"tq\0000"
    + TENSOR
    + b"q\2000"
    + named(N, b"h\2(h\1K\0h\0h\0NNtR"),
    "long names of classes": text("a" * 4000) + b"q\0000" + named(N, b"h\0h\0\x93)\x81"),
    "many arguments": b"(" + b"N" * N + b"tq\0000" + TENSOR + b"q\2000" + named(N, b"h\2h\0R"),
    "a long storage": STORAGE + b"N" * N + b"tq\0000" + named(N, b"h\0Q"),
    "tuples in one another": b")" + b"\x85" * 50_000,
    "lists in one another, as text": b"(" * 50_000,
    "tuples of tuples as a key": b")q\0"
    + b"h\0\x86q\0"[1:1]
    + b"".join(b"h\0h\0\x86q\0000" for _ in range(60))
    + b"}h\0Ns",
    "a number of digits": b"L" + b"9" * 500_000 + b"L\n",
    "names of a megabyte": b"}(" + text("a" * 1_000_000) + b"Nu",
    "sizes without end": b"\x96" + struct.pack("<Q", 2**62),
    "a memo of all numbers": b"}"
    + b"".join(b"r" + struct.pack("<I", i * 7919) for i in range(50_000)),
}


def as_archive(body: bytes, folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + body + b".")
        archive.writestr("archive/version", "3\n")


def as_old(body: bytes, folder: Path) -> None:
    parts = [pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)]
    sizes = {"short": 2, "int": 4, "long": 4}
    said = {"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}
    parts += [pickle.dumps(said, 2), b"\x80\2" + body + b".", pickle.dumps([], 2)]
    (folder / "pytorch_model.bin").write_bytes(b"".join(parts))


def beside(body: bytes) -> bytes:
    """A state dict with something else beside it."""
    return b"}(" + text("module") + b"}(" + text("y") + body + b"u" + text("x") + b"Nu"


# --- archives ------------------------------------------------------------------------------------


def many_records(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2}.")
        for i in range(MANY // 4):
            archive.writestr(f"archive/data/{i}", b"")


def bomb(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + b"(" * (64 << 20) + b".")


# --- safetensors ---------------------------------------------------------------------------------


def header(said: str | dict, folder: Path, more: bytes = b"", file: str = "") -> None:
    """A safetensors file of a header."""
    raw = (said if isinstance(said, str) else json.dumps(said)).encode()
    path = folder / (file or "model.safetensors")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + more)


def empty(*names: str, shape: tuple[int, ...] = (0,)) -> dict:
    """A header of tensors without elements."""
    one = {"dtype": "F32", "shape": [*shape], "data_offsets": [0, 0]}
    return dict.fromkeys(names, one)


EVIL = ".base_layer" * 90_000 + "x"
HEADERS: dict[str, str | dict] = {
    "lists in one another": "[" * 1_000_000,
    "objects in one another": '{"a":' * 50_000,
    "a number of digits": '{"a": {"shape": [' + "9" * 1_000_000 + "]}}",
    "a name of a megabyte": empty(EVIL),
    "names of words": empty(*(f"{'a.' * 400}{i}" for i in range(1000))),
    "many names": empty(*(f"model.layers.{i}.x" for i in range(MANY))),
    "many experts": empty(*(f"model.layers.0.experts.{i}.w" for i in range(MANY))),
    "many axes": empty("a", shape=(0, *[2**62] * 100_000)),
    "many of one end": empty(*(f"{'a' * i}" for i in range(900))),
    "many notes": {"__metadata__": {str(i): "x" for i in range(MANY)}},
}


def index(weight_map: object, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    said = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(said))


INDEXES: dict[str, object] = {
    "of many files": {f"w{i}": f"{i}.safetensors" for i in range(MANY)},
    "of one file": dict.fromkeys(map(str, range(MANY)), "model-1.safetensors"),
    "of a long file": {"a": "a" * 1_000_000},
    "of many folders": {"a": "a/" * 500_000},
}

# --- JSON ----------------------------------------------------------------------------------------


def say(file: str, fields: dict, folder: Path) -> None:
    """Fields of a JSON file of the folder's, in the place of its own or beside them."""
    path = folder / file
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(said | fields))


def write(file: str, text: str, folder: Path) -> None:
    """A file of a text."""
    (folder / file).write_text(text)


SPOILT: dict[str, Callable[[Path], None]] = {
    "config: lists in one another": partial(write, "config.json", "[" * 1_000_000),
    "config: digits": partial(write, "config.json", '{"a": ' + "9" * 1_000_000 + "}"),
    "config: many fields": partial(say, "config.json", {f"field{i}": i for i in range(5000)}),
    "config: many layers": partial(say, "config.json", {"num_hidden_layers": 10**9}),
    "config: kinds of layers": partial(say, "config.json", {"layer_types": ["x"] * 200_000}),
    "config: labels": partial(say, "config.json", {"num_labels": 10**9}),
    "config: many labels": partial(
        say, "config.json", {"id2label": {str(i): "x" for i in range(MANY)}}
    ),
    "config: architectures": partial(say, "config.json", {"architectures": ["x"] * 200_000}),
    "generation: ends": partial(say, "generation_config.json", {"eos_token_id": [*range(200_000)]}),
    "generation: words": partial(say, "generation_config.json", {"bad_words_ids": [[1]] * 200_000}),
    "generation: digits": partial(
        write, "generation_config.json", '{"top_k": ' + "9" * 10**6 + "}"
    ),
}
TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "lists in one another": partial(write, "tokenizer.json", "[" * 1_000_000),
    "settings in one another": partial(
        write, "tokenizer_config.json", '{"a":' * 200_000 + "1" + "}" * 200_000
    ),
    "many added tokens": partial(
        say, "tokenizer_config.json", {"extra_special_tokens": {str(i): "x" for i in range(2000)}}
    ),
    "a length of digits": partial(
        write, "tokenizer_config.json", '{"model_max_length": ' + "9" * 10**6 + "}"
    ),
}

# --- GGUF ----------------------------------------------------------------------------------------


def field(name: str, kind: int, value: bytes) -> bytes:
    """A field of a GGUF header."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def gguf(tensors: int, fields: int, body: bytes, folder: Path) -> None:
    """A GGUF file."""
    start = b"GGUF" + struct.pack("<IQQ", 3, tensors, fields)
    (folder / "model.gguf").write_bytes(start + body)


def info(name: str, *shape: int, kind: int = 0, at: int = 0) -> bytes:
    """The description of a tensor in a GGUF header."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name.encode() + axes + struct.pack("<IQ", kind, at)


TEXTS = struct.pack("<IQ", 8, 100_000) + bytes(8 * 100_000)
GGUFS: dict[str, tuple[int, int, bytes]] = {
    "many fields": (0, 2**63, b""),
    "many tensors": (2**63, 0, b""),
    "thousands of fields": (
        0,
        1 << 14,
        b"".join(field(f"f{i}", 4, bytes(4)) for i in range(1 << 14)),
    ),
    "arrays in one another": (0, 1, field("a", 9, struct.pack("<IQ", 9, 1) * 100_000)),
    "a text without end": (0, 1, field("a", 8, struct.pack("<Q", 2**62))),
    "an array without end": (0, 1, field("a", 9, struct.pack("<IQ", 12, 2**61))),
    "texts without end": (0, 1, field("a", 9, struct.pack("<IQ", 8, 2**61))),
    "empty texts": (
        0,
        2,
        field("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
        + field("tokenizer.ggml.tokens", 9, TEXTS),
    ),
    "a name of a megabyte": (0, 1, field("a" * 1_000_000, 4, bytes(4))),
    "a tensor's long name": (1, 0, info("blk.0." * 5000, 32) + bytes(256)),
    "a tensor of many elements": (1, 0, info("a", 2**47)),
    "a tensor of too many": (1, 0, info("a", 2**63, 2**63)),
    "many small tensors": (
        MANY,
        0,
        b"".join(info(f"blk.{i}.attn_q.weight", 8, at=32 * i) for i in range(MANY)),
    ),
}

# --- others --------------------------------------------------------------------------------------

LONG = "base_model.model." + "a.b_" * 200
HANGING = r"(.*)*(.+)+.*.*.*!"
ADAPTERS: dict[str, Callable[[Path], None]] = {
    "a pattern that hangs": partial(say, "adapter_config.json", {"rank_pattern": {HANGING: 4}}),
    "short patterns": partial(
        say, "adapter_config.json", {"rank_pattern": {f".*a.*b.*{i}": 4 for i in range(300)}}
    ),
    "a pattern that grows": partial(
        say, "adapter_config.json", {"alpha_pattern": {"(a{1,90}){1,90}{1,90}": 4}}
    ),
    "digits": partial(write, "adapter_config.json", '{"r": ' + "9" * 1_000_000 + "}"),
    "a name of 20,000 letters": partial(
        header,
        empty(f"base_model.model.{'a.' * 10_000}lora_A.weight"),
        file="adapter_model.safetensors",
    ),
    "layers in one another": partial(
        header, empty(f"base_model.model.{EVIL}.lora_A.weight"), file="adapter_model.safetensors"
    ),
    "long names and a pattern": lambda folder: (
        say("adapter_config.json", {"rank_pattern": {HANGING: 4, ".*a.*b.*c": 4}}, folder),
        header(
            empty(
                *(f"{LONG}{i}.lora_{part}.weight" for i in range(400) for part in "AB"),
                shape=(4, 0),
            ),
            folder,
            file="adapter_model.safetensors",
        ),
    ),
}
SENTENCES: dict[str, Callable[[Path], None]] = {
    "many modules": partial(
        write,
        "modules.json",
        json.dumps([{"idx": 0, "name": "", "path": "", "type": "x.Dense"}] * MANY),
    ),
    "prompts": partial(
        say, "config_sentence_transformers.json", {"prompts": {str(i): "x" for i in range(MANY)}}
    ),
}
SHARDS: dict[str, Callable[[Path], None]] = {
    "many files": partial(say, "ds.json", {"checkpoints": [f"{i}.pt" for i in range(MANY)]}),
    "one file many times": partial(say, "ds.json", {"checkpoints": ["mp_rank_00.pt"] * MANY}),
    "many devices": partial(say, "ds.json", {"mp_size": 10**9}),
    "digits": partial(write, "ds.json", '{"mp_size": ' + "9" * 1_000_000 + "}"),
}
METAS: dict[str, Callable[[Path], None]] = {
    "many layers": partial(say, "params.json", {"n_layers": 10**9}),
    "wide": partial(say, "params.json", {"dim": 2**62, "n_heads": 2**61}),
    "a step of 1": partial(say, "params.json", {"multiple_of": 1, "ffn_dim_multiplier": 1e300}),
}


FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"pickle: {n}": ("bin", partial(as_archive, body)) for n, body in PICKLES.items()},
    **{f"pickle beside: {n}": ("bin", partial(as_archive, beside(b))) for n, b in PICKLES.items()},
    **{"archive: many records": ("bin", many_records), "archive: a bomb": ("bin", bomb)},
    **{f"old: {n}": ("bin", partial(as_old, PICKLES[n])) for n in [*PICKLES][:2]},
    **{f"safetensors: {n}": ("plain", partial(header, said)) for n, said in HEADERS.items()},
    **{f"index: {n}": ("plain", partial(index, said)) for n, said in INDEXES.items()},
    **{n: ("plain", spoil) for n, spoil in SPOILT.items()},
    **{f"tokenizer: {n}": ("plain", spoil) for n, spoil in TOKENIZERS.items()},
    **{f"gguf: {n}": ("gguf", partial(gguf, *parts)) for n, parts in GGUFS.items()},
    **{f"adapter: {n}": ("adapter", spoil) for n, spoil in ADAPTERS.items()},
    **{f"sentences: {n}": ("sentences", spoil) for n, spoil in SENTENCES.items()},
    **{f"megatron: {n}": ("megatron", spoil) for n, spoil in SHARDS.items()},
    **{f"meta: {n}": ("meta", spoil) for n, spoil in METAS.items()},
}
# What these say much of changes nothing, or is taken.
HARMLESS = {
    *("config: many labels", "config: many fields", "generation: ends", "generation: words"),
    *("tokenizer: many added tokens", "adapter: a pattern that hangs", "adapter: short patterns"),
    *("sentences: prompts", "meta: a step of 1"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """From a form of fuzz_files and a backend, a folder that was loaded once, and its seconds."""
    made: dict[str, Path] = {}
    warm: dict[tuple[str, str], float] = {}

    def get(form: str, backend: str) -> tuple[Path, float]:
        if form not in made:
            made[form] = tmp_path_factory.mktemp("whole")
            forms.FORMS[form](made[form])
        if (form, backend) not in warm:
            start = time.process_time()
            forms.serve(form, made[form], backend, random.Random(0))
            warm[form, backend] = time.process_time() - start
        return made[form], warm[form, backend]

    return get


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_takes_no_second_and_no_memory(case, whole, tmp_path):
    form, spoil = FILES[case]
    # Readers are the same for both; texts are embedded by torch alone here.
    backend = "torch" if form == "sentences" else BACKENDS[[*FILES].index(case) % 2]
    folder = tmp_path / "folder"
    sound, loading = whole(form, backend)
    shutil.copytree(sound, folder)
    spoil(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    held = memory(anew=True)
    start, said = time.process_time(), None
    try:
        forms.serve(form, folder, backend, random.Random(0))
    except DualinferError as error:
        said = str(error)
    taken, more = time.process_time() - start, memory() - held
    assert taken < A_SECOND + (loading if case in HARMLESS else 0)
    assert more < ALWAYS + MOST * size, f"{more >> 20} MB for {size >> 10} KB"
    assert said is not None or case in HARMLESS
    assert said is None or len(said) < 4000, said


def memory(anew: bool = False) -> int:
    """The most bytes of memory that the process has held since it was asked `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10
