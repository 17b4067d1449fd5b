"""Loading: parts of files, read ahead in threads, in little memory."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers as hf

from dualinfer import CheckpointError
from dualinfer.arrays import numpy_dtype
from dualinfer.checkpoint.files.safetensors import TensorFile, write_tensors
from dualinfer.checkpoint.reader import RowReader, is_finite
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.model.families import describe_model
from dualinfer.model.load_plan import make_load_plan
from dualinfer.parallel.sharding import make_plan

from .checkpoints import write_llama

VOCAB = 101


def described(folder):
    """Spec, load plan and source of a folder."""
    import dualinfer.checkpoint.described.hf_config

    config = dualinfer.checkpoint.described.hf_config.read_config(folder)
    _, table = describe_model(config.to_dict(), config.architectures)
    source = open_checkpoint(folder)
    return make_load_plan(table, source), source


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return described(write_llama(tmp_path_factory.mktemp("llama"), VOCAB))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool", "float64"])
def test_parts_of_a_file_are_those_of_the_tensor(tmp_path, dtype):
    kind = numpy_dtype(dtype)
    random = np.random.default_rng(0)
    tensors = {
        "matrix": random.normal(size=(63, 1000)).astype(kind),
        "cube": random.normal(size=(3, 5, 7)).astype(kind),
        "number": random.normal(size=()).astype(kind),
        "empty": np.empty((0, 4), kind),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    assert set(file.names()) == set(tensors)
    for name, index in (
        ("matrix", None),
        ("matrix", np.s_[10:20, :]),
        ("matrix", np.s_[:, 900:1000]),
        ("matrix", np.s_[62:63, 999:1000]),
        ("matrix", np.s_[7:7, :]),
        ("cube", np.s_[1:3, 0:5, 2:4]),
        ("number", None),
        ("number", ()),
        ("empty", None),
    ):
        part = file.read(name, index)
        assert (part.dtype, file.dtype(name), file.shape(name)) == (
            (kind, dtype, tensors[name].shape)
        )
        np.testing.assert_array_equal(part, tensors[name][index or ...])
        assert part.flags.writeable and part.flags.c_contiguous


def test_a_part_is_written_to_the_array_that_is_given(tmp_path):
    values = np.arange(35, dtype=np.float32).reshape(5, 7)
    safetensors.numpy.save_file({"x": values}, tmp_path / "x.safetensors")
    out = np.full((9, 9), np.nan, np.float32)
    TensorFile(tmp_path / "x.safetensors").read("x", np.s_[1:3, 2:6], out[4:6, 0:4])
    np.testing.assert_array_equal(out[4:6, 0:4], values[1:3, 2:6])
    assert np.isnan(out).sum() == 81 - 8


def test_blocks_of_a_large_tensor_join_without_a_seam(tmp_path, monkeypatch):
    monkeypatch.setattr("dualinfer.checkpoint.files.safetensors._BLOCK", 40_000)
    values = np.random.default_rng(0).integers(0, 2**15, (1000, 333), np.int16)
    write_tensors(tmp_path / "x", {"x": ("int16", values.shape)}, [values])
    for index in (np.s_[3:999, :], np.s_[:, 5:331]):
        np.testing.assert_array_equal(TensorFile(tmp_path / "x").read("x", index), values[index])


def test_written_files_are_safetensors(tmp_path):
    arrays = {"a": np.ones((3, 5), ml_dtypes.bfloat16), "ä[0:1]": np.arange(7, dtype=np.int8)}
    tensors = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    write_tensors(tmp_path / "x", tensors, iter(arrays.values()))
    read = safetensors.numpy.load_file(tmp_path / "x")
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", tensors, iter(arrays.values()))


def test_a_file_that_was_cut_short_is_told(tmp_path):
    safetensors.numpy.save_file({"x": np.ones(100)}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for size in (0, 7, 20, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"x \\({size} bytes\\) is not a whole"):
            TensorFile(tmp_path / "x")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype):
    kind = numpy_dtype(dtype)
    most = ml_dtypes.finfo(kind).max
    for size in (1, 63, 300_000):  # several parts of it
        values = np.full((size, 1), most, kind)
        values[::2] = -most
        assert is_finite(values) and is_finite(values[:0]) and is_finite(values.T[0])
        for place in (0, size // 2, size - 1):
            for odd in (np.nan, -np.nan, np.inf, -np.inf):
                harmed = values.copy()
                harmed[place] = odd
                assert not is_finite(harmed)
    assert is_finite(np.full(9, 255, np.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("equal", [False, True])
def test_rows_come_in_order_with_what_each_shard_reads(llama, size, equal):
    plan, source = llama
    shards = make_plan(plan.table, size, equal=equal).shards
    with RowReader(shards, plan, source) as reader:
        rows = []
        for row, found in reader:
            rows.append(row)
            names = dict(plan.rows)[row]
            for shard, own in zip(shards, found, strict=True):
                wanted = [
                    (name, read)
                    for part, name in zip(row.sources, names, strict=True)
                    for read in shard.reads(row, part)
                ]
                for (name, read), (given, array) in zip(wanted, own, strict=True):
                    assert given == read
                    np.testing.assert_array_equal(array, source.read(name)[read.index])
                    assert array.dtype == np.float32  # of an idle device's empty part as well
    assert rows == [row for row, _ in plan.rows]
    assert re.fullmatch(r"loaded 0\.\d MB in 0\.\d\d s \(.* [MG]B/s\)", reader.notes()[0])


def test_what_shards_read_alike_is_read_once(llama):
    plan, source = llama
    reads = []

    class Counting(Slow):
        def read(self, name, index=None):
            reads.append((name, tuple((s.start, s.stop) for s in index)))
            return super().read(name, index)

    shards = make_plan(plan.table, 4).shards
    with RowReader(shards, plan, Counting(source, 0)) as reader:
        for _row, _found in reader:
            pass
    assert len(reads) == len(set(reads))


class Slow:
    """A source whose reads take a while, and which knows how many bytes are on their way."""

    def __init__(self, source, seconds, fails=None):
        self._source, self._seconds, self._fails = source, seconds, fails
        self.description, self.threads, self.begun, self.most, self.now = "slow", set(), [], 0, 0
        self._lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read(self, name, index=None):
        with self._lock:
            self.threads.add(threading.get_ident())
            self.begun.append(name)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self._seconds)
        if name == self._fails:
            raise OSError("the disk is gone")
        with self._lock:
            self.now -= 1
        return self._source.read(name, index)


def test_reads_overlap_and_keep_to_a_layer_in_memory(llama):
    plan, source = llama
    slow = Slow(source, 0.005)
    order = [row.name for row, _ in plan.rows]
    owner = {name: row.name for row, names in plan.rows for name in names}
    sizes = {r.name: sum(source.read(name).nbytes for name in names) for r, names in plan.rows}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    ahead = []
    with RowReader(make_plan(plan.table).shards, plan, slow) as reader:
        for i, (row, _found) in enumerate(reader):
            assert row.name == order[i]
            time.sleep(0.02)  # what may be read meanwhile is
            held = {owner[name] for name in slow.begun} - set(order[:i])
            assert sum(sizes[name] for name in held) <= max(layer, sizes[row.name])
            ahead.append(len(held))
    assert max(ahead) > 3 and slow.most > 1 and len(slow.threads) > 1


def test_a_read_that_fails_is_raised_and_no_thread_stays(llama):
    plan, source = llama
    before = set(threading.enumerate())
    name = "model.layers.0.self_attn.o_proj.weight"
    shards = make_plan(plan.table).shards

    def read_all():
        with RowReader(shards, plan, Slow(source, 0, name)) as reader:
            for row, _found in reader:
                assert row.name != "layers.1.qkv.weight"

    with pytest.raises(OSError, match="the disk is gone"):
        read_all()
    with RowReader(shards, plan, source) as reader:
        next(iter(reader))  # a consumer that gives up
    assert set(threading.enumerate()) == before


def test_the_bar_shows_bytes_and_rate_on_a_terminal_and_on_one_rank(llama, monkeypatch, capsys):
    import rich.console

    plan, source = llama
    shards = make_plan(plan.table, 2).shards

    def shown(rank):
        with RowReader([shards[rank]], plan, source, shown=rank == 0) as reader:
            for _row, _found in reader:
                pass
        return capsys.readouterr().err

    assert shown(0) == ""
    monkeypatch.setattr(rich.console.Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "200")
    assert "Loading" in (text := shown(0)) and "kB" in text
    assert shown(1) == ""


PEAK = """
import json, sys
import numpy as np
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
from tests.test_loading import described
from dualinfer.backends.torch.params import load_params
from dualinfer.model.weights import count_leaves
from dualinfer.parallel.sharding import make_plan
from pathlib import Path

def kib(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1])

plan, source = described(Path(sys.argv[1]))
shards = make_plan(plan.table, int(sys.argv[2])).shards
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = kib("VmRSS")
params = load_params(shards[-1], plan, source, torch.float32, torch.device("cpu"))
stays = count_leaves(params.leaves())["parameter_bytes"]
print(json.dumps({"stays": stays, "peak": (kib("VmHWM") - before) * 1024}))
"""


def write_zeros(folder, vocab, embed, ffn, layers):
    """A Llama of 8 heads whose weights are zeros, float32."""
    config = hf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=embed,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    config.to_json_file(folder / "config.json")
    _, table = describe_model(config.to_dict(), config.architectures)
    tensors = {
        source.name: ("float32", table.shape(row, source.axes))
        for row in table.rows
        for source in row.sources
    }
    arrays = (np.zeros(shape, np.float32) for _, shape in tensors.values())
    write_tensors(folder / "model.safetensors", tensors, arrays)


@pytest.mark.parametrize("tall", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_of_a_load_is_the_share_and_one_layer(tmp_path, tall):
    """Of 200 MB at tp 2; `tall`: one layer's matrices are most of them, one read by columns."""
    vocab, embed, ffn, layers = (301, 64, 260_000, 1) if tall else (8001, 768, 2048, 5)
    write_zeros(tmp_path, vocab, embed, ffn, layers)
    total = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", PEAK, tmp_path, "2", Path(__file__).parents[1]]
    # glibc keeps what was freed of smaller arrays in its heaps: up to 28 MB here.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    layer = 4 * embed * (4 * embed + 3 * ffn) // 2
    largest = max(layer, 4 * vocab * embed // 2)
    print({**found, "largest": largest, "total": total})
    assert 1.7e8 < total < 2.4e8
    assert found["stays"] < 0.52 * total
    assert found["peak"] < found["stays"] + largest + 20e6
