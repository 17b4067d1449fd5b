"""Random changes of a folder's files and of requests: each is served, or refused with a sentence.

The changes are drawn from a seed, the same in every run. A step that fails is told by its number
and what it changed.
"""

import copy
import json
import logging
import random
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dualinfer
from dualinfer.checkpoint.described.hf_config import read_config, read_generation_config
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.engine.checks import check_mask
from dualinfer.engine.options import make_options
from dualinfer.engine.prompts import make_prompts
from dualinfer.errors import DualinferError
from dualinfer.model.families import describe_model
from dualinfer.model.families.fields import INERT
from dualinfer.model.generation import GENERATION
from dualinfer.model.load_plan import make_load_plan

from . import fuzz_files
from .cases import make_model
from .cases.decoders import CASES
from .models import BACKENDS, VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what is drawn here
MANY = pytest.mark.slow
CAUSAL = "llama-mqa"
LONGEST = 3.0  # seconds of the CPU that a step may take; a loop that was asked for takes more

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**31 - 1, 2**32, 2**63, 2**64, 10**18),
    *(0.0, -0.0, 0.5, 1.5, -3.0, 1e-300, 1e-45, 1e38, 1e308, float("nan"), float("inf")),
    *("", "x", "0", "1e4", "nan", "linear", "yarn", "llama3", "default", "float32", "../x", "\0"),
    *("\ud800", "[/red]", "a" * 3000, "gelu", "full_attention", "sliding_attention", "global"),
    *([], {}, [[]], [1], ["a"], [None], {"a": 1}, {"0": "x"}, [1] * 50, [["global"], 3]),
    *([float("nan")], [[["global", "local"], 1]], {"rope_type": "yarn", "factor": 4}),
    {"rope_type": "linear", "factor": float("inf"), "rope_theta": 1e4},
]
FIELDS = sorted(
    {name for case in CASES.values() for name in case.make_config().to_dict()}
    | {"to_dict", "self", "__class__", "__dict__", "per_layer_config", "quantization_config"}
    | {"rope_scaling", "attribute_map", "sub_configs", "auto_map", "num_labels", "rope_theta"}
    | {"partial_rotary_factor", "text_config", "kwargs", "model_type", "use_return_dict"}
    | {*GENERATION, *INERT}
)
ROPE = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "mystery"),
)


@pytest.fixture(autouse=True)
def quiet(capfd):
    """What transformers prints and logs of the values here is no text that workers can send."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    capfd.readouterr()


def attempt(what: Any, step: Callable[[], Any]) -> bool:
    """True if `step` went through; a refusal must be dualinfer's, and say something."""
    start, refusal = time.process_time(), None
    try:
        step()
    except DualinferError as error:
        refusal = str(error)
    except Exception as error:
        raise AssertionError(ascii(f"{what!r:.600}: {type(error).__name__}: {error}")) from error
    if refusal is not None:
        assert len(refusal.split()) > 3, f"{what!r:.300}: {refusal}"
        assert len(refusal) < 6000, f"{what!r:.300}: {len(refusal)} letters"
    taken = time.process_time() - start
    assert taken < LONGEST, f"{what!r:.300} took {taken:.1f} s"
    return refusal is None


def changed(draw: random.Random, written: dict[str, Any], names: Any) -> dict[str, Any]:
    """`written` with one to three changes: another value, one less, another key."""
    result = copy.deepcopy(written)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        name = draw.choice((*names, *result))
        kind = draw.random()
        if kind < 0.1:
            result.pop(name, None)
        elif kind < 0.2 and isinstance(result.get(name), int):
            result[name] = result[name] + draw.choice((-1, 1, 2**31, 2**40))
        elif kind < 0.4:
            keys = draw.sample(ROPE, draw.randint(1, 4))
            result["rope_parameters"] = {key: draw.choice(VALUES) for key in keys}
            result["rope_parameters"].setdefault("rope_theta", 1e4)
            result["rope_parameters"].setdefault("rope_type", draw.choice(("yarn", "llama3")))
        else:
            result[name] = copy.deepcopy(draw.choice(VALUES))
    return result


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of a case each family, saved once, with their configs and open weights."""
    found = []
    for name in (
        CAUSAL,
        "qwen2-mixed",
        "gemma2",
        "gpt2",
        "gpt-neo",
        "neox",
        "gptj",
        "opt",
        "bloom",
    ):
        path = tmp_path_factory.mktemp(name)
        make_model(name).save_pretrained(path)
        found.append((path, json.loads((path / "config.json").read_text()), open_checkpoint(path)))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of its own, and what its files hold."""
    path = tmp_path_factory.mktemp("whole")
    make_model(CAUSAL).save_pretrained(path)
    return path, load_file(path / "model.safetensors")


@pytest.mark.parametrize("steps", [300, pytest.param(1500, marks=MANY)])
def test_config_json(steps, checkpoints, tmp_path):
    draw, fine = random.Random(16), 0
    for step in range(steps):
        path, written, source = checkpoints[0 if step % 3 else step // 3 % len(checkpoints)]
        config = changed(draw, written, FIELDS)
        (tmp_path / "config.json").write_text(json.dumps(config))

        def load(source: Any = source) -> None:
            read = read_config(tmp_path)
            _, table = describe_model(read.to_dict(), read.architectures)
            read_generation_config(tmp_path, read).to_dict()
            make_load_plan(table, source)

        difference = {k: v for k, v in config.items() if written.get(k, 0) != v}
        fine += attempt((step, path.name, difference), load)
    assert fine > steps / 20  # the changes are not all refused for one reason


@pytest.mark.parametrize("steps", [150, pytest.param(1500, marks=MANY)])
def test_generation_config_json(steps, tmp_path):
    draw, fine = random.Random(17), 0
    names = (*GENERATION, "eos_token_id", "pad_token_id", "bos_token_id", "chat_format", "self")
    for step in range(steps):
        written = changed(draw, {"eos_token_id": 2, "do_sample": True}, names)
        written.pop("rope_parameters", None)
        (tmp_path / "generation_config.json").write_text(json.dumps(written))

        def load() -> None:
            defaults = read_generation_config(tmp_path, None).to_dict()
            make_options(defaults, None, {}, VOCAB).new_tokens(5, 100)

        fine += attempt((step, written), load)
    assert fine > steps / 20


@pytest.mark.parametrize("steps", [400, pytest.param(2500, marks=MANY)])
def test_options_of_requests(steps):
    draw = random.Random(18)
    odd = [*VALUES, 10**400, 10**5000, -(10**5000), np.int64(3), np.array([1, 2]), object(), b"x"]
    odd += [torch.tensor(3), torch.ones((), device="meta"), torch.ones(2).to_sparse(), ("a", 1)]
    names = (*GENERATION, "eos_token_id", "pad_token_id", "logits_processor", "mystery", "seed")
    fine = 0
    for step in range(steps):
        kwargs = {draw.choice(names): draw.choice(odd) for _ in range(draw.randint(1, 3))}
        config = {draw.choice(names): draw.choice(odd)} if draw.random() < 0.3 else None

        def make(kwargs: Any = kwargs, config: Any = config) -> None:
            options = make_options({"eos_token_id": 2}, config, kwargs, VOCAB)
            options.new_tokens(5, 100)
            options.least_tokens(5)
            options.check_sequences(2)

        fine += attempt((step, list(kwargs), config), make)
    assert fine > steps / 20


def _some_ids(draw: random.Random) -> Any:
    rows, width = draw.randint(0, 3), draw.randint(0, 5)
    ids: Any = [[draw.choice((0, 5, 7, VOCAB - 1)) for _ in range(width)] for _ in range(rows)]
    for _ in range(draw.randint(0, 2)):  # ragged, or with something else in it
        if ids and draw.random() < 0.5:
            ids[draw.randrange(len(ids))].append(draw.choice([5, -1, 2**70, None, "x", 1.5, [3]]))
    kind = draw.random()
    try:
        if kind < 0.2:
            ids = np.array(
                ids, draw.choice((None, "int8", "float32", "bool", "object", "complex64"))
            )
        elif kind < 0.4:
            ids = torch.tensor(ids).to(draw.choice((torch.int32, torch.float16, torch.bool)))
            ids = draw.choice((ids, ids.to("meta"), ids.to_sparse(), ids.T, ids[..., None]))
        elif kind < 0.5:
            ids = [torch.tensor(row) for row in ids]
    except (ValueError, TypeError, RuntimeError, OverflowError, IndexError):
        pass  # no such array can be made
    return draw.choice((ids, ids, ids, ids, draw.choice(VALUES)))


@pytest.mark.parametrize("steps", [500, pytest.param(2500, marks=MANY)])
def test_ids_and_masks_of_requests(steps):
    draw, fine = random.Random(19), 0
    for step in range(steps):
        ids, mask = _some_ids(draw), _some_ids(draw) if draw.random() < 0.3 else None

        def make(ids: Any = ids, mask: Any = mask) -> None:
            make_prompts(ids, mask, VOCAB, draw.choice((None, 0)), (2,))

        fine += attempt((step, ids, mask), make)
        attempt((step, mask), lambda mask=mask: check_mask(mask, (2, 3)))
    assert fine > steps / 20


def _changed_header(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file with another header, or with bytes of it changed or cut."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = draw.random()
    if kind < 0.2:
        size = draw.choice((0, 1, 2**20, 2**40, 2**63, length - 1, length + 1))
        return struct.pack("<Q", size) + content[8:]
    if kind < 0.3:
        return content[: draw.randrange(len(content))]
    name = draw.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    key = draw.choice(("dtype", "shape", "data_offsets", "name", "gone", "extra"))
    if key == "name":
        header[draw.choice(("", "x", "model.norm.weight", "\ud800", "a" * 5000))] = header.pop(name)
    elif key == "gone":
        del entry[draw.choice(list(entry))]
    elif key == "extra":
        header[draw.choice(("__metadata__", "x"))] = draw.choice(VALUES)
    elif key == "dtype":
        entry[key] = draw.choice(("F16", "BF16", "I8", "F8_E4M3", "F4", "C64", "x", None, 3))
    else:
        numbers = list(entry[key])
        at = draw.randrange(len(numbers))
        numbers[at] = draw.choice((0, -1, 1, numbers[at] + 1, 2**40, 2**63, None, "x", 0.5))
        entry[key] = draw.choice((numbers, numbers[::-1], numbers * 2, draw.choice(VALUES)))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _changed_index(draw: random.Random, weight_map: dict[str, Any]) -> Any:
    content: Any = {"metadata": {}, "weight_map": dict(weight_map)}
    name = draw.choice(list(weight_map))
    odd = [*VALUES, "../model.safetensors", "/etc/passwd", "a" * 5000, "model.safetensors/x", "C:x"]
    kind = draw.random()
    if kind < 0.6:
        content["weight_map"][name] = draw.choice(odd)
    elif kind < 0.7:
        del content["weight_map"][name]
    elif kind < 0.8:
        content["weight_map"] = draw.choice(odd)
    elif kind < 0.9:
        content = draw.choice(odd)
    else:
        content["weight_map"][draw.choice(("x", "", "\ud800"))] = "model.safetensors"
    return content


def _changed_state(draw: random.Random, state: dict[str, Any]) -> Any:
    """A pickled file's contents: other tensors, keys, or something else around them."""
    result: Any = dict(state)
    name = draw.choice(list(result))
    tensor = result[name]
    odd = [
        *(None, 3, "x", [], {}, tensor.double(), tensor.to(torch.int8), tensor[:0], tensor[0]),
        *(tensor.to_sparse(), tensor.to("meta"), tensor.flatten(), tensor[None], tensor.bool()),
        *(torch.zeros(1).expand(tensor.shape), tensor.to(torch.complex64), tensor * float("nan")),
        *(torch.zeros(1).expand(2**20, 2**10), torch.nn.Parameter(tensor), [tensor]),
        torch.quantize_per_tensor(tensor.float(), 1.0, 0, torch.qint8),
    ]
    kind = draw.random()
    if kind < 0.6:
        result[name] = draw.choice(odd)
    elif kind < 0.8:
        result[draw.choice((3, None, ("a", 1), "", "x", 2.5))] = draw.choice(odd)
    else:
        around = draw.choice(("module", "model", "state_dict", 3))
        result = draw.choice(({around: result}, {around: odd[draw.randrange(5)]}, [result], tensor))
    return result


def test_files_of_weights(whole, tmp_path):
    path, tensors = whole
    content = (path / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    config = read_config(tmp_path)
    _, table = describe_model(config.to_dict(), config.architectures)
    matrices = {name: t for name, t in tensors.items() if t.ndim > 1}
    draw, fine = random.Random(20), 0
    for step in range(90):
        for old in tmp_path.glob("*model*"):
            old.unlink()
        kind = step % 3
        if kind == 0:
            (tmp_path / "model.safetensors").write_bytes(_changed_header(draw, content))
        elif kind == 1:
            (tmp_path / "pytorch_model.bin").unlink(missing_ok=True)
            torch.save(
                _changed_state(draw, {**tensors, **matrices}), tmp_path / "pytorch_model.bin"
            )
        else:
            name = "one.safetensors"
            (tmp_path / "one.safetensors").write_bytes(content)
            index = _changed_index(draw, dict.fromkeys(tensors, name))
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

        def load() -> None:
            source = open_checkpoint(tmp_path)
            plan = make_load_plan(table, source)
            for _, names in plan.rows:
                for name in names:
                    source.read(name)

        fine += attempt((step, ("header", "bin", "index")[kind]), load)
        for old in tmp_path.glob("one.safetensors"):
            old.unlink()
    assert fine > 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [8, pytest.param(60, marks=MANY)])
def test_folders_as_engines(steps, backend, checkpoints, tmp_path):
    """What the descriptions let through is loaded, and in many steps serves a request as well."""
    path, written, _ = checkpoints[0]
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    draw = random.Random(21)
    for step in range(steps):
        config = changed(draw, written, (*INERT, *GENERATION, "rms_norm_eps", "hidden_act"))
        (tmp_path / "config.json").write_text(json.dumps(config))

        def serve() -> None:
            with dualinfer.init_inference(tmp_path, backend=backend, dtype="fp32") as engine:
                if steps > 8:
                    engine([[5, 6, 7]])

        attempt((step, {k: v for k, v in config.items() if written.get(k, 0) != v}), serve)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A function from a backend to an engine with a tokenizer."""
    folder, made = tmp_path_factory.mktemp("speaking"), {}
    fuzz_files.plain(folder)

    def get(backend):
        if backend not in made:
            made[backend] = dualinfer.init_inference(folder, backend=backend, dtype="fp32")
        return made[backend]

    yield get
    for engine in made.values():
        engine.close()


ODD = [7, 1.5, float("nan"), [], [1], {"a": []}, {1}, b"\xff", object, np.zeros((2, 3)), "\ud800"]
OF_CALLS = {
    "forward": ("attention_mask", "position_ids", "labels", "logits_to_keep"),
    "generate": ("eos_token_id", "stop_strings", "attention_mask", "streamer", "output_scores"),
    "stream_text": ("return_dict_in_generate", "output_scores", "tokenizer", "stop_strings"),
    "embed": ("prompt", "prompt_name", "pooling", "normalize", "batch_size", "max_length"),
    "encode": ("convert_to_tensor", "precision", "output_value", "show_progress_bar"),
    "save_pretrained": ("folder", "max_shard_size"),
    "compile": ("backend", "compile_kwargs"),
    "to": ("device", "dtype"),
    "chat": ("tools", "continue_final_message", "chat_template", "tokenize"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", OF_CALLS)
def test_no_argument_of_any_call_makes_another_librarys_error(call, backend, speaking, tmp_path):
    """What is odd is refused, or taken where it means something."""
    engine, refused = speaking(backend), []
    ids, messages = [[3, 4]], [{"role": "user", "content": "a"}]
    args = {
        **{"forward": [ids], "generate": [ids], "save_pretrained": [tmp_path / "out"]},
        **{"embed": [["ab"]], "encode": [["ab"]], "stream_text": ["ab"], "chat": [messages]},
    }.get(call, [])
    for name in OF_CALLS[call]:
        for value in ODD:
            given = {"template_options": {name: value}} if call == "chat" else {name: value}
            own = [] if name == "folder" else args
            try:
                found = getattr(engine, call)(*own, **given)
                if call == "stream_text":
                    list(found)
            except dualinfer.DualinferError as error:
                refused.append(str(error))
    assert all(len(text.split()) > 3 and len(text) < 1500 for text in refused)
    assert len(refused) > len(OF_CALLS[call]) * len(ODD) // 3


@MANY
@pytest.mark.parametrize("backend", BACKENDS)
def test_folders_of_every_form(backend):
    """A few of what `python -m tests.fuzz_files` draws."""
    found = fuzz_files.run(backend, 4 * len(fuzz_files.FORMS), [*fuzz_files.FORMS], keep_on=False)
    assert found["loaded"] > len(fuzz_files.FORMS) // 4
    assert found["refused"] > len(fuzz_files.FORMS)
