"""save_mp_checkpoint_path: what is written, and that it loads at any degree on either backend."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers as hf

import dualinfer
from dualinfer import CheckpointError, ConfigError
from dualinfer.api import quantize_checkpoint
from dualinfer.checkpoint.described.tokenizer_files import tokenizer_files
from dualinfer.checkpoint.files.pieces import INDEX, Box, Piece, ShardedSource, Tensor
from dualinfer.checkpoint.files.safetensors import TensorFile, write_tensors
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.checkpoint.writing import saving
from dualinfer.system import new_folder

from .cases import make_model
from .checkpoints import write_byte_tokenizer, write_llama
from .models import BACKENDS, random_ids, relative_rms
from .ranks import RankError

pytestmark = pytest.mark.xdist_group("ranks")

FAMILIES = ("llama-gqa", "gpt2", "bloom", "gemma2", "bert", "gptj")


def engine(model, tp=1, **fields):
    fields = {"dtype": "fp32", "replace_with_kernel_inject": True, **fields}
    return dualinfer.init_inference(
        model, tensor_parallel={"tp_size": tp, "timeout": 150}, **fields
    )


def save(model, path, tp=1, **fields):
    """The notes of an engine that wrote a checkpoint."""
    with engine(model, tp, save_mp_checkpoint_path=str(path), **fields) as made:
        return made.report().notes


def save_case(name, path, tp, dtype="fp32"):
    return save(make_model(name), path, tp, dtype=dtype)


def output_of(path, tp=1, **fields):
    with engine(path, tp, **fields) as made:
        return np.asarray(made(torch.tensor(random_ids(2, 9)), return_dict=False)[0])


def expected_of(module, ids):
    with torch.no_grad():
        return module(torch.tensor(ids), return_dict=False)[0].numpy()


def files_of(folder):
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_three_loads_anywhere(crew, tmp_path, hf_model, name):
    crew.run(save_case, name, tmp_path / "out", 3, world=3)
    found = files_of(tmp_path / "out")
    assert {f"shard-0{i}-of-03.safetensors" for i in range(3)} | {INDEX, "config.json"} <= found
    assert os.listdir(tmp_path) == ["out"]  # nothing temporary stays
    theirs = expected_of(hf_model(name), random_ids(2, 9))
    for backend in BACKENDS:
        assert relative_rms(output_of(tmp_path / "out", backend=backend), theirs) < 1e-5
    for ours in crew.run(output_of, tmp_path / "out", 2, world=2):
        assert relative_rms(ours, theirs) < 1e-5


def test_every_element_is_stored_once_and_as_it_was(crew, tmp_path, hf_model):
    """Of 6 heads and 3 KV heads over 4 ranks: two ranks share a KV head."""
    crew.run(save_case, "llama-gqa", tmp_path, 4, world=4)
    state = hf_model("llama-gqa").state_dict()
    source = open_checkpoint(tmp_path)
    assert isinstance(source, ShardedSource)
    stored = 0
    for file in tmp_path.glob("*.safetensors"):
        stored += sum(a.size for a in safetensors.numpy.load_file(file).values())
    assert stored == sum(t.numel() for n, t in state.items() if n in set(source.names()))
    random = np.random.default_rng(0)
    for name in source.names():
        whole = state[name].numpy()
        assert (source.shape(name), source.dtype(name)) == (whole.shape, "float32")
        np.testing.assert_array_equal(source.read(name), whole)
        for _ in range(5):
            bounds = [np.sort(random.integers(0, n + 1, 2)).tolist() for n in whole.shape]
            index = tuple(slice(a, b) for a, b in bounds)
            part = source.read(name, index)
            np.testing.assert_array_equal(part, whole[index])
            assert part.dtype == np.float32


def test_dtype_is_the_engines(crew, tmp_path, hf_model):
    crew.run(save_case, "llama-gqa", tmp_path, 2, "bf16", world=2)
    source = open_checkpoint(tmp_path)
    state = hf_model("llama-gqa").state_dict()
    for name in source.names():
        expected = state[name].to(torch.bfloat16).float().numpy()
        assert source.dtype(name) == "bfloat16"
        np.testing.assert_array_equal(source.read(name).astype(np.float32), expected)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_whole_model_with_tokenizer_and_defaults(crew, tmp_path):
    vocab = write_byte_tokenizer(tmp_path / "in")
    folder = write_llama(tmp_path / "in", vocab)
    defaults = {"temperature": 0.7, "do_sample": True, "eos_token_id": 1, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    notes = crew.run(save, folder, tmp_path / "out", 2, world=2)
    assert all(f"saved in 2 files of weights to {tmp_path / 'out'}" in own for own in notes)
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert kept <= files_of(tmp_path / "out")
    prompt = {"max_new_tokens": 8, "seed": 3}
    with engine(folder) as one, engine(tmp_path / "out") as other:
        assert other.generation_config.top_k == 7
        ids = [hf.AutoTokenizer.from_pretrained(tmp_path / "out")("héllo")["input_ids"]]
        new, old = (e.generate(ids, **prompt).tolist() for e in (one, other))
        assert new == old


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama-mqa", "gpt2", "bert-masked"])
def test_on_one_device_transformers_reads_it(tmp_path, hf_model, name, backend):
    model = hf_model(name)
    notes = save(model, tmp_path / "new" / "out", backend=backend)
    assert f"saved in 1 file of weights to {tmp_path / 'new' / 'out'}" in notes
    found = files_of(tmp_path / "new" / "out")
    assert found - {"generation_config.json"} == {"model.safetensors", "config.json"}
    again = type(model).from_pretrained(tmp_path / "new" / "out").eval()
    ids = random_ids(2, 9)
    np.testing.assert_array_equal(expected_of(again, ids), expected_of(model, ids))
    assert relative_rms(output_of(tmp_path / "new" / "out"), expected_of(model, ids)) < 1e-5


def test_jax_writes_a_file_for_each_of_its_devices(tmp_path, hf_model):
    notes = save(hf_model("llama-gqa"), tmp_path, 2, backend="jax")
    assert f"saved in 2 files of weights to {tmp_path}" in notes
    theirs = expected_of(hf_model("llama-gqa"), random_ids(2, 9))
    for backend, tp in (("torch", 1), ("jax", 3)):
        assert relative_rms(output_of(tmp_path, tp, backend=backend), theirs) < 1e-5


def test_it_fills_a_module_as_well(crew, tmp_path, hf_model):
    crew.run(save_case, "llama-gqa", tmp_path, 2, world=2)
    empty = make_model("llama-gqa")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(float("nan"))
    theirs = expected_of(hf_model("llama-gqa"), random_ids(2, 9))
    for inject in (True, False):
        fields = {"checkpoint": str(tmp_path), "replace_with_kernel_inject": inject}
        assert relative_rms(output_of(empty, **fields), theirs) < 1e-5


def test_changed_config_fields_are_written(tmp_path):
    module = make_model("llama-mqa")
    save(module, tmp_path, config={"config": {"rms_norm_eps": 0.25}})
    assert json.loads((tmp_path / "config.json").read_text())["rms_norm_eps"] == 0.25
    assert module.config.rms_norm_eps != 0.25


@pytest.mark.parametrize("content", ["folder", "file"])
def test_nothing_is_written_over(tmp_path, hf_model, content):
    target = tmp_path / "out"
    if content == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target.write_text("mine")
    with pytest.raises(
        ConfigError, match=r"save_mp_checkpoint_path=.*(holds notes\.txt|no folder)"
    ):
        save(hf_model("llama-mqa"), target)
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_is_there_and_empty_is_taken_with_usual_rights(tmp_path, hf_model):
    (tmp_path / "out").mkdir()
    save(hf_model("llama-mqa"), tmp_path / "out")
    usual = tmp_path / "usual"
    usual.mkdir()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def full_disk(path, failing, tp):
    """A save of which rank `failing` finds the disk full; the error of this rank."""
    import dualinfer.checkpoint.writing.saving

    real = dualinfer.checkpoint.writing.saving.write_tensors

    def fail(file, tensors, arrays, *_):
        real(file, dict(list(tensors.items())[:1]), [next(iter(arrays))])
        raise OSError(errno.ENOSPC, "No space left on device")

    if int(os.environ["RANK"]) == failing:
        dualinfer.checkpoint.writing.saving.write_tensors = fail
    try:
        save_case("llama-gqa", path, tp)
    finally:
        dualinfer.checkpoint.writing.saving.write_tensors = real


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_leaves_nothing_and_all_say_so(crew, tmp_path, failing):
    with pytest.raises(RankError) as error:
        crew.run(full_disk, tmp_path / "out", failing, 2, world=2)
    kinds = ["DistributedError", "DistributedError"]
    kinds[failing] = "CheckpointError"
    assert error.value.kinds == kinds
    assert f"Saving failed elsewhere. rank {failing}" in str(error.value)
    assert "No space left on device" in str(error.value)
    assert os.listdir(tmp_path) == []


def die_while_writing(path, dying, tp):
    """A save in which rank `dying` ends without a word."""
    import dualinfer.checkpoint.writing.saving

    if int(os.environ["RANK"]) == dying:
        dualinfer.checkpoint.writing.saving.write_tensors = lambda *_: os._exit(9)
    save_case("llama-gqa", path, tp)


def test_a_rank_that_dies_while_writing_leaves_nothing(crew, tmp_path):
    with pytest.raises(RankError) as error:
        crew.run(die_while_writing, tmp_path / "out", 1, 2, world=2)
    assert error.value.kinds == ["DistributedError", "Gone"]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_nobody_may_write_is_told(tmp_path, hf_model):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not written, and nothing of it is left"):
        save(hf_model("llama-mqa"), tmp_path / "file" / "out")


def test_of_two_copies_in_a_job_one_is_written(crew, tmp_path, hf_model):
    crew.run(save_case, "llama-gqa", tmp_path / "out", 2, world=4)
    assert os.listdir(tmp_path) == ["out"]
    theirs = expected_of(hf_model("llama-gqa"), random_ids(2, 9))
    assert relative_rms(output_of(tmp_path / "out"), theirs) < 1e-5


@pytest.mark.parametrize("path", ["\0x", "x" * 5000, "x" * 250, "~nobody-of-this-name/x"])
def test_a_path_that_no_folder_can_have_is_refused_before_anything_runs(hf_model, path):
    with pytest.raises(ConfigError, match=r"save_mp_checkpoint_path=.* cannot be a folder"):
        save(hf_model("llama-mqa"), path)


# Tokenizer files of a checkpoint that somebody else made


@pytest.fixture
def secret(tmp_path):
    """A file outside of the checkpoint, which is JSON as well."""
    path = tmp_path / "secret.json"
    path.write_text('{"password": "x"}')
    return path


def test_a_link_out_of_the_checkpoint_is_refused_before_anything_is_written(tmp_path, secret):
    folder = write_llama(tmp_path / "in", 61)
    (folder / "tokenizer.json").symlink_to(secret)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link to .*secret\.json"):
        save(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_links_of_hfs_cache_are_followed_and_rights_stay_as_they_were(tmp_path):
    hub = tmp_path / "models--a--b"
    folder = write_llama(hub / "snapshots" / "1f", 61)
    (hub / "blobs").mkdir()
    for name, mode in (("config.json", 0o644), ("tokenizer.json", 0o640), ("vocab.txt", 0o666)):
        blob = hub / "blobs" / name.encode().hex()
        blob.write_text("{}" if name == "tokenizer.json" else "[PAD]\n[UNK]")
        if name == "config.json":
            (folder / name).rename(blob)
        blob.chmod(mode)
        (folder / name).symlink_to(f"../../blobs/{blob.name}")
    before = os.umask(0o022)
    try:
        save(folder, tmp_path / "out")
    finally:
        os.umask(before)
    copied = {name: (tmp_path / "out" / name) for name in ("tokenizer.json", "vocab.txt")}
    assert copied["vocab.txt"].read_text() == "[PAD]\n[UNK]"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in copied.values()]
    assert modes == [0o640, 0o644]  # narrowed by the umask, never widened
    assert not any(path.is_symlink() for path in copied.values())


def test_what_is_no_tokenizer_file_is_refused_by_name(tmp_path, secret):
    hub = tmp_path / "hub" / "snapshots" / "1f"
    hub.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    (tmp_path / "hub" / "blobs" / "onward").symlink_to(secret)
    (tmp_path / "data").write_bytes(b"\xff\xfe\0")

    def link(name, target):
        return lambda: (hub / name).symlink_to(target)

    cases = {
        "onward": (link("tokenizer.json", "../../blobs/onward"), "is a link to"),
        "up": (link("vocab.json", "../../../secret.json"), "is a link to"),
        "broken": (link("vocab.txt", "nowhere"), "No such file"),
        "loop": (link("vocab.txt", "vocab.txt"), "loop|symbolic"),
        "folder": (lambda: (hub / "merges.txt").mkdir(), "Is a directory|no regular file"),
        "fifo": (lambda: os.mkfifo(hub / "tokenizer.model"), "no regular file"),
        "no JSON": (lambda: (hub / "vocab.json").write_text("root:x:0:0"), "Expecting value"),
        "a list": (lambda: (hub / "vocab.json").write_text("[]"), "no JSON object"),
        "deep": (lambda: (hub / "vocab.json").write_text("[" * 200_000), "recursion"),
        "bytes": (lambda: (hub / "vocab.txt").write_bytes(b"\xff\xfe"), "decode"),
    }
    for make, message in cases.values():
        make()
        with pytest.raises(CheckpointError, match=message):
            list(tokenizer_files(hub))
        (path,) = hub.iterdir()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


# The folder that appears

HOLD = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("new_folder", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
new = module.NewFolder(Path(sys.argv[2]))
(new.content / "model.safetensors").write_text("half")
print(new.path.name, flush=True)
time.sleep(60)
"""


def test_one_of_several_processes_saves_and_killed_ones_leave_nothing(tmp_path, hf_model):
    """Who comes second is told at once, before the work; who is overtaken is told at the end."""

    def hold(name):
        command = [sys.executable, "-c", HOLD, new_folder.__file__, str(tmp_path / name)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return process, process.stdout.readline().strip()

    (killed, gone), (other, beside) = hold("out"), hold("else")
    killed.kill()
    killed.wait()
    (tmp_path / ".out-12345678").mkdir()  # the user's own
    running, kept = hold("out")
    try:
        other.kill()
        other.wait()
        others = {".out-12345678", kept, beside}
        assert set(os.listdir(tmp_path)) == others and gone not in others
        for write in (save, quantize):
            with pytest.raises(CheckpointError, match=r"is writing it at this moment\. Wait until"):
                write(hf_model("llama-mqa"), tmp_path / "out")
            assert set(os.listdir(tmp_path)) == others
        running.kill()
        running.wait()
        save(hf_model("llama-mqa"), tmp_path / "out")
        assert set(os.listdir(tmp_path)) == {"out", ".out-12345678", beside}
    finally:
        for process in (killed, running, other):
            process.kill()
            process.communicate()


def quantize(model, path):
    model.save_pretrained(path.parent.parent / "plain")
    quantize_checkpoint(path.parent.parent / "plain", str(path), "int8", None, lambda _: None)


def test_what_another_process_has_written_meanwhile_stays(tmp_path, hf_model, monkeypatch):
    def meanwhile(folder, *arguments, **more):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
        return write(folder, *arguments, **more)

    write = saving.write_tensors
    monkeypatch.setattr(saving, "write_tensors", meanwhile)
    with pytest.raises(CheckpointError, match=r"has written there meanwhile.*Use that, or pass an"):
        save(hf_model("llama-mqa"), tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["theirs"]


def test_what_appears_is_on_the_disk_before_and_its_name_after(tmp_path, monkeypatch):
    done = []

    def synced(descriptor):
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def renamed(old, new, rename=os.rename):
        done.append(("rename", Path(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    folder = write_llama(tmp_path / "in", 61)
    (folder / "tokenizer.json").write_text("{}")
    target = tmp_path / "new" / "out"
    save(folder, target)
    at = done.index(("rename", target))
    before = {path.name for what, path in done[:at] if what == "sync"}
    assert {"model.safetensors", "config.json", "tokenizer.json", "content"} <= before
    assert ("sync", tmp_path) in done[:at]  # where the parent has its name
    assert done[at + 1] == ("sync", target.parent)


def test_module_mode_refuses(hf_model):
    with pytest.raises(ConfigError, match=r"save_mp_checkpoint_path='x'.*save_pretrained"):
        dualinfer.init_inference(make_model("llama-mqa"), save_mp_checkpoint_path="x")


@pytest.fixture(scope="module")
def written(crew, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    crew.run(save_case, "llama-gqa", folder, 2, world=2)
    return folder


def edit(change):
    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def pieces(index):
    return index["tensors"]["model.layers.0.mlp.down_proj.weight"]["pieces"]


def rewrite(change):
    def damage(folder):
        path = folder / "shard-01-of-02.safetensors"
        tensors = safetensors.numpy.load_file(path)
        change(tensors)
        safetensors.numpy.save_file(tensors, path)

    return damage


DAMAGE = {
    "file gone": (lambda f: (f / "shard-01-of-02.safetensors").unlink(), "is not there"),
    "file cut": (
        lambda f: os.truncate(f / "shard-01-of-02.safetensors", 5000),
        r"\(5000 bytes\) is not a whole safetensors file",
    ),
    "index cut": (lambda f: os.truncate(f / INDEX, 500), "is not JSON"),
    "piece gone": (edit(lambda i: pieces(i).pop()), r"pieces of \d+ elements, expected"),
    "pieces overlap": (edit(lambda i: pieces(i).append(pieces(i)[0])), "pieces that overlap"),
    "piece shifted over its neighbour": (
        edit(lambda i: pieces(i)[1]["offset"].__setitem__(1, pieces(i)[1]["offset"][1] - 1)),
        "pieces that overlap",
    ),
    "pieces without elements": (
        edit(lambda i: pieces(i).extend([{**pieces(i)[0], "shape": [0, 0]}] * 20_000)),
        "a piece without elements",
    ),
    "piece outside": (
        edit(lambda i: pieces(i)[1].update(offset=[0, 90])),
        "has a piece outside of it",
    ),
    "piece of other axes": (
        edit(lambda i: pieces(i)[1].update(offset=[0], shape=[3])),
        "has a piece outside of it",
    ),
    "unknown key": (edit(lambda i: pieces(i)[1].update(key="x")), "x, which the index names"),
    "other dtype": (
        edit(lambda i: i["tensors"]["model.norm.weight"].update(dtype="float16")),
        r"is float32 \(96,\), expected float16",
    ),
    "other shape": (rewrite(lambda t: t.update({k: v[:1] for k, v in t.items()})), "expected"),
    "path": (edit(lambda i: pieces(i)[1].update(file="../x.safetensors")), "outside the check"),
    "absolute": (edit(lambda i: pieces(i)[1].update(file="/etc/passwd")), "outside the check"),
    "no shape": (edit(lambda i: pieces(i)[1].pop("shape")), "not described in full"),
    "negative": (edit(lambda i: pieces(i)[1].update(offset=[0, -1])), "not described in full"),
    "no tensors": (edit(lambda i: i.pop("tensors")), "not described in full"),
    "version": (edit(lambda i: i.update(version=2)), "is of version 2"),
    "format": (edit(lambda i: i.update(format="x")), "its format is 'x'"),
    "tensor gone": (
        edit(lambda i: i["tensors"].pop("model.norm.weight")),
        "missing 1: model.norm.weight",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_told(written, tmp_path, kind):
    damage, message = DAMAGE[kind]
    shutil.copytree(written, tmp_path / "x")
    damage(tmp_path / "x")
    with pytest.raises(CheckpointError, match=message):
        engine(tmp_path / "x")


@pytest.mark.parametrize("shift", [0, 1])
def test_many_pieces_are_checked_in_little_time(shift):
    """20,000 of a grid; the last one may lie over its neighbour."""
    boxes = [Box((i, j), (i + 2, j + 2)) for i in range(0, 400, 2) for j in range(0, 200, 2)]
    boxes[-1] = Box((398 - shift, 198), (400 - shift, 200))
    tensor = Tensor((400, 200), "float32", tuple(Piece(box, "file", str(box)) for box in boxes))
    start = time.process_time()
    if shift:
        with pytest.raises(CheckpointError, match=r"overlap: .*396, 198.*397, 198"):
            tensor.check("x", Path(INDEX))
    else:
        tensor.check("x", Path(INDEX))
    assert time.process_time() - start < 3  # pairs would take minutes


def test_two_pieces_of_a_single_number_overlap():
    piece = Piece(Box((), ()), "file", "key")
    Tensor((), "float32", (piece,)).check("x", Path(INDEX))
    with pytest.raises(CheckpointError, match="pieces that overlap"):
        Tensor((), "float32", (piece, piece)).check("x", Path(INDEX))


def test_a_file_that_is_gone_before_the_end_is_told(tmp_path, hf_model, monkeypatch):
    """What another process wrote, on a disk that lost it."""

    def write_one(path, *rest):
        if "shard-01" not in path.name:
            write_tensors(path, *rest)

    monkeypatch.setattr("dualinfer.checkpoint.writing.saving.write_tensors", write_one)
    with pytest.raises(CheckpointError, match=r"shard-01-of-02\.safetensors of another process"):
        save(hf_model("llama-gqa"), tmp_path / "out", 2, backend="jax")
    assert os.listdir(tmp_path) == []


def test_reading_a_part_touches_only_the_pieces_that_hold_it(written, monkeypatch):
    source = ShardedSource(written)
    source._files.pop("shard-01-of-02.safetensors")
    whole = TensorFile(written / "shard-00-of-02.safetensors")
    key = next(n for n in whole.names() if n.startswith("model.embed_tokens.weight["))
    rows = whole.shape(key)[0]
    part = source.read("model.embed_tokens.weight", np.s_[3:rows, 0:84])
    np.testing.assert_array_equal(part, whole.read(key, np.s_[3:rows, 0:84]))
    with pytest.raises(KeyError):
        source.read("model.embed_tokens.weight", np.s_[3 : rows + 1, 0:84])
