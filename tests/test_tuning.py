"""The search for kernel configurations, and the user's cache of them on disk."""

import fcntl
import json
import os
import runpy
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from dualinfer import decoder, init_inference
from dualinfer.backends import torch as backend
from dualinfer.backends.torch.cache import KINDS
from dualinfer.backends.torch.ops.kernels import KernelOps
from dualinfer.backends.torch.tuning import cases, search, store
from dualinfer.bench.shapes import SHAPES
from dualinfer.config import InferenceConfig
from dualinfer.decoder import Mixers
from dualinfer.errors import ConfigError
from dualinfer.kernels.triton.linear import TileConfig, VectorConfig
from dualinfer.kernels.triton.tuning import Configurations, Measured
from dualinfer.model.weights import parts_of, with_parts
from dualinfer.ops.contract import Tokens

from .cases import make_model
from .models import slow_but
from .test_deepspeed_moe_fused import make as make_deepspeed

MACHINE = store.Machine("NVIDIA H100 80GB HBM3", 132, "2.11.0+cu130", "3.6.0", "abc")
KEY = ("linear", 1, 4096, 11008, 2, False)
MIXTURES = ("qwen2_moe", "deepspeed")  # which have an expert of all tokens
SMALL = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1}
TABLE = {KEY: Measured(VectorConfig(2, 16), 31.25)}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The cache's folder, which does not exist yet."""
    monkeypatch.setenv("DUALINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def table_of(rows):
    return {("linear", rows, 64, 64, 2, False): Measured(TileConfig(16, 32, 128, 4, 4), 1.0)}


# The cache


def test_cache_gives_what_was_saved_for_this_machine_only(folder):
    assert store.load_cache(MACHINE) == {}
    assert store.save_cache(MACHINE, TABLE)
    assert store.load_cache(MACHINE) == TABLE
    for change in ({"device": "NVIDIA H200"}, {"processors": 66}, {"torch": "2.12"}):
        assert store.load_cache(replace(MACHINE, **change)) == {}
    for change in ({"triton": "3.7"}, {"kernels": "abd"}):
        assert store.load_cache(replace(MACHINE, **change)) == {}
    (path,) = folder.glob("*.json")
    assert path.name.startswith("nvidia-h100-80gb-hbm3-")


def test_cache_is_the_users_alone(folder):
    before = os.umask(0)
    try:
        store.save_cache(MACHINE, TABLE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert store.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DUALINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder() == tmp_path / "xdg" / "dualinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / ".cache" / "dualinfer"


def test_machine_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store, "cache_folder", no_home)
    assert store.load_cache(MACHINE) == {}
    with pytest.warns(UserWarning, match="cannot be kept.*DUALINFER_CACHE"):
        assert not store.save_cache(MACHINE, TABLE)


def spoil(path: Path, how: str) -> None:
    text = path.read_text()
    content = json.loads(text)
    facts = content[MACHINE.device]
    if how == "cut":
        path.write_text(text[: len(text) // 2])
    elif how == "binary":
        path.write_bytes(b"\x00\xff\xfe" * 100)
    elif how == "nested":
        path.write_text("[" * 200_000)
    elif how == "list":
        path.write_text("[]")
    elif how == "flat":
        path.write_text('{"a": 1}')
    elif how == "other machine":
        facts["device"] = "NVIDIA H200"
        path.write_text(json.dumps(content))
    elif how == "value":
        facts["entries"][0]["config"]["warps"] = 1 << 20
        path.write_text(json.dumps(content))
    elif how == "writable":
        path.chmod(0o666)
    elif how == "writable folder":
        path.parent.chmod(0o777)
    elif how == "writable parent":
        path.parents[1].chmod(0o777)
    elif how == "huge":
        os.truncate(path, 1 << 30)
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "fifo":
            os.mkfifo(path, 0o600)
        elif how == "link":
            target = path.with_name("elsewhere")
            target.write_text(text)
            path.symlink_to(target)


SPOILS = [
    *("cut", "binary", "nested", "list", "flat", "other machine", "value"),
    *("writable", "writable folder", "writable parent", "huge", "folder", "fifo", "link"),
]


@pytest.mark.parametrize("how", SPOILS)
def test_file_that_cannot_be_trusted_is_ignored_with_one_warning(how, folder):
    store.save_cache(MACHINE, TABLE)
    (path,) = folder.glob("*.json")
    spoil(path, how)
    with pytest.warns(UserWarning, match=r"not used: .*Delete the file.*DUALINFER_CACHE") as caught:
        assert store.load_cache(MACHINE) == {}
    assert len(caught) == 1 and caught[0].filename == __file__


def test_what_belongs_to_somebody_else_is_neither_read_nor_written(monkeypatch, folder):
    store.save_cache(MACHINE, TABLE)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.warns(UserWarning, match=f"belongs to user {mine}, not to you"):
        assert store.load_cache(MACHINE) == {}
    with pytest.warns(UserWarning, match=f"cannot be kept in .*belongs to user {mine}"):
        assert not store.save_cache(MACHINE, TABLE)


@pytest.mark.parametrize(("mode", "safe"), [(0o777, False), (0o775, False), (0o1777, True)])
def test_a_folder_that_others_can_replace_is_not_used(folder, mode, safe):
    folder.parent.chmod(mode)
    os.chown(folder.parent, -1, 12345 if os.geteuid() == 0 else -1)
    if safe:
        assert store.save_cache(MACHINE, TABLE)
        return
    with pytest.warns(UserWarning, match=r"lies in .*where others can put another in its place"):
        assert not store.save_cache(MACHINE, TABLE)
    folder.parent.chmod(0o700)


def test_a_relative_folder_stays_where_it_was_first_asked_for(monkeypatch, tmp_path):
    for name in ("first", "second", "gone"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DUALINFER_CACHE", "relative")
    monkeypatch.chdir(tmp_path / "first")
    assert store.save_cache(MACHINE, TABLE)
    monkeypatch.chdir(tmp_path / "second")
    assert store.load_cache(MACHINE) == TABLE
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert store.load_cache(MACHINE) == TABLE
    monkeypatch.setenv("DUALINFER_CACHE", "another")
    assert store.load_cache(MACHINE) == {}
    with pytest.warns(UserWarning, match="'another' is relative, and the working folder is gone"):
        assert not store.save_cache(MACHINE, TABLE)


def test_a_lock_that_is_not_given_back_costs_a_warning(monkeypatch, folder):
    store.save_cache(MACHINE, TABLE)
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    with (folder / ".lock").open("r+") as held:
        assert held.read() == str(os.getpid())  # so that others can say who has it
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.warns(
            UserWarning, match=rf"\.lock has been held for 0\.1 seconds by process {os.getpid()}"
        ):
            assert not store.save_cache(MACHINE, table_of(8))
    assert store.load_cache(MACHINE) == TABLE
    assert store.save_cache(MACHINE, table_of(8))


def test_folder_that_cannot_be_made_costs_a_warning(folder):
    folder.write_text("a file stands here")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert not store.save_cache(MACHINE, TABLE)


def test_saving_keeps_what_is_there_and_repairs_what_is_broken(folder):
    store.save_cache(MACHINE, TABLE)
    store.save_cache(MACHINE, table_of(8))
    assert store.load_cache(MACHINE) == TABLE | table_of(8)
    (path,) = folder.glob("*.json")
    path.write_text("{")
    store.save_cache(MACHINE, table_of(16))
    assert store.load_cache(MACHINE) == table_of(16)
    assert sorted(p.name for p in folder.iterdir()) == [".lock", path.name]


def test_writers_at_once_lose_nothing(folder):
    tables = [table_of(1 << i) for i in range(1, 17)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda table: store.save_cache(MACHINE, table), tables))
    assert store.load_cache(MACHINE) == {key: m for table in tables for key, m in table.items()}


def test_failed_write_leaves_the_old_file(monkeypatch, folder):
    store.save_cache(MACHINE, TABLE)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert not store.save_cache(MACHINE, table_of(8))
    assert store.load_cache(MACHINE) == TABLE
    assert len(list(folder.iterdir())) == 2


# The search


class FakeRun:
    """Candidates by what they do: a time in seconds, and a result or an error."""

    def __init__(self, plan):
        self.plan, self.ran = plan, []

    def case(self, key=KEY):
        return cases.TuningCase(key, list(self.plan), lambda: (self.run, 4))

    def run(self, config):
        self.ran.append(config)
        result = self.plan[config][1]
        if isinstance(result, Exception):
            raise result
        return torch.tensor([result, 2.0])

    def seconds(self, call, repeats):
        call()
        return self.plan[self.ran[-1]][0]


def best_of(*outcomes):
    fake = FakeRun({VectorConfig(1 << i, 4): outcome for i, outcome in enumerate(outcomes)})
    found = {}
    assert search.search([fake.case()], found, fake.seconds)
    return found[KEY]


def test_search_takes_the_fastest_candidate():
    assert best_of((8e-6, 1.0), (4e-6, 1.0), (6e-6, 1.0)) == Measured(VectorConfig(2, 4), 1.0)


def test_search_skips_what_fails_or_is_wrong():
    wrong = [(1e-9, RuntimeError("out of resource: shared memory")), (1e-9, 1.1)]
    wrong += [(1e-9, float("nan")), (1e-9, float("inf"))]
    assert best_of((8e-6, 1.0), *wrong, (4e-6, 1.0)).config == VectorConfig(32, 4)


def test_search_keeps_the_default_where_the_gain_is_noise():
    assert best_of((8e-6, 1.0), (7.99e-6, 1.0)) == Measured(VectorConfig(1, 4), 2.0)
    assert best_of((8e-6, float("nan")), (1e-6, float("nan"))).config == VectorConfig(1, 4)


def test_search_begins_nothing_after_its_time(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(search.time, "monotonic", lambda: next(clock))
    fakes = [FakeRun({VectorConfig(1, 4): (1e-6, 1.0)}) for _ in range(5)]
    keys = [("linear", 1 << i, 64, 64, 2, False) for i in range(5)]
    found = {}
    parts = [fake.case(key) for fake, key in zip(fakes, keys, strict=True)]
    assert not search.search(parts, found, lambda call, repeats: 1e-6, 2.5)
    assert list(found) == keys[:2]


@pytest.fixture(scope="module")
def runner_of(engine_of):
    """A function from a case to its model's spec and weights."""

    def get(name):
        if name in MIXTURES:
            how = {"dtype": "fp32", "replace_with_kernel_inject": True}
            if name == "deepspeed":
                model = make_deepspeed("gpt2")
            else:
                model = make_model(name, moe_intermediate_size=10, **SMALL)
            runner = init_inference(model, **how).runner
        else:
            runner = engine_of(name, "torch").runner
        return runner.spec, runner.params

    return get


def half(params):
    """Weights in bfloat16, so that several rows have a kernel."""

    def cast(weights):
        return {
            name: with_parts(leaf, {"data": parts_of(leaf)["data"].bfloat16()})
            for name, leaf in weights.items()
        }

    outer, layers = cast(params.outer), [cast(layer) for layer in params.layers]
    return params._replace(outer=outer, layers=layers)


@pytest.mark.parametrize(
    ("how", "ops"),
    [
        ((), {"linear", "decode_attention", "attention"}),
        (("int4",), {"quantized_linear"}),
        ((None, "int8"), {"decode_attention"}),
        (("fp8", "fp8_e4m3"), {"quantized_linear", "decode_attention"}),
        (("mxfp4",), {"experts"}),
        ((), {"linear", "decode_attention", "attention", "route", "experts"}),
    ],
)
def test_the_packages_own_search_has_the_ops_of_codes_and_of_experts(how, ops, monkeypatch):
    """Their keys are apart from those of 16 bits, so that one table holds both."""
    if "experts" in ops:
        small = {**SMALL, "intermediate_size": 10, "head_dim": 12, "num_local_experts": 6}
        shape = replace(SHAPES["gpt-oss-20b"], fields=SHAPES["gpt-oss-20b"].fields | small)
        monkeypatch.setitem(SHAPES, "tiny", shape)
    script = Path(__file__).parents[1] / "benchmarks" / "tune.py"
    tune = runpy.run_path(str(script), run_name="tune")
    part = tune["Part"]("tiny", 1, *how, ep=2 if "route" in ops else 1)
    found = tune["cases_of"](part, torch.device("cpu"))
    assert {case.key[0] for case in found} == ops
    itemsizes = {case.key[-1] for case in found if case.key[0] == "decode_attention"}
    assert itemsizes <= ({1} if len(how) > 1 else {2})
    experts = [case.key for case in found if case.key[0] == "experts" and case.key[1] == 8]
    assert [key[2:4] + key[7:9] for key in experts] == (
        [(4, 6, 4, 32)] if "mxfp4" in how else [(2, 3, 16, 24)] if experts else []
    )
    products = [case.key for case in found if case.key[0] == "quantized_linear"]
    assert {key[1] for key in products} == ({1, 2, 4, 8, 16, 32, 64, 128} if products else set())


LOOKED_UP = ["llama-gqa", "gpt2-inverse", "gemma2", "opt-post", "bert-masked", *MIXTURES]


@pytest.mark.parametrize("name", slow_but({*LOOKED_UP} - {"gemma2", "deepspeed"}, LOOKED_UP))
def test_cases_are_those_that_the_models_steps_look_up(name, runner_of, monkeypatch):
    """Every configuration that a step asks for has been measured under the same key."""
    spec, params = runner_of(name)
    params = half(params)
    ops = KernelOps(torch.device("cpu"))
    found = cases.tuning_cases(spec, params, ops, rows=(1, 8), reaches=(64,), prompts=(8,))
    keys = [case.key for case in found]
    assert len(set(keys)) == len(keys)
    assert {key[0] for key in keys} >= {"linear", "attention"}
    assert ("decode_attention" in {key[0] for key in keys}) == spec.causal
    tokens = {op: {key[1] for key in keys if key[0] == op} for op in ("route", "experts")}
    assert tokens == dict.fromkeys(tokens, {1, 8} if name in MIXTURES else set())
    asked = []
    monkeypatch.setattr(
        Configurations, "look_up", lambda self, key: (asked.append(key), (None,) * 2)[1]
    )
    ids = torch.zeros((1, 8), dtype=torch.int64)
    positions = torch.arange(8)[None]

    def attend(i, qkv):
        layer = ops.layer_attention(spec, params, i)
        return ops.attend(layer, qkv, positions, positions=positions)[0]

    x = decoder.hidden_states(spec, params, ops, Tokens(ids, positions), Mixers(attend))[-1]
    decoder.logits(spec, params, ops, x[:, 0] if spec.causal else x, wide=spec.causal)
    if spec.causal:
        layer = ops.layer_attention(spec, params, 0)
        a = layer.spec
        cache = KINDS["full"](
            *torch.zeros((2, 1, a.kv_heads, 64, a.head_dim), dtype=torch.bfloat16)
        )
        qkv = torch.zeros((1, 1, sum(a.qkv_sizes)), dtype=torch.bfloat16)
        ops.attend_token(layer, qkv, positions, cache, torch.zeros(1, dtype=torch.int64))
    assert len(asked) > 2 and set(asked) <= set(keys)


@pytest.mark.parametrize("codes", ["fp8_e4m3", "int8"])
def test_cases_of_a_cache_in_codes_run_under_the_keys_that_a_step_looks_up(
    codes, runner_of, monkeypatch
):
    spec, params = runner_of("llama-gqa")
    params, ops = half(params), KernelOps(torch.device("cpu"))
    how: dict[str, Any] = {"rows": (1,), "reaches": (64,), "prompts": (8,)}
    found = cases.tuning_cases(spec, params, ops, **how, cache_codes=codes)
    (case,) = (case for case in found if case.key[0] == "decode_attention")
    assert case.key[-1] == 1
    asked = []
    monkeypatch.setattr(
        Configurations, "look_up", lambda self, key: (asked.append(key), (None,) * 2)[1]
    )
    run, _ = case.prepare()
    run(None)
    assert set(asked) == {case.key}
    ops.cache_codes = frozenset()
    found = cases.tuning_cases(spec, params, ops, **how, cache_codes=codes)
    assert "decode_attention" not in {case.key[0] for case in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2_moe"])
def test_search_runs_a_models_own_products_attention_and_experts(name, runner_of):
    spec, params = runner_of(name)
    ops = KernelOps(torch.device("cpu"))
    found = cases.tuning_cases(spec, half(params), ops, rows=(1, 5), reaches=(64,), prompts=(8,))
    parts, ops_seen = [], set()
    for case in found:  # one of each kind: they are interpreted
        kind = case.key[0], case.key[1] == 1
        if kind not in ops_seen:
            parts.append(case._replace(candidates=case.candidates[:3]))
        ops_seen.add(kind)
    table, timed = {}, []

    def seconds(call, repeats):
        timed.append(repeats)
        return 1.0 / len(timed)

    assert search.search(parts, table, seconds)
    assert list(table) == [case.key for case in parts]
    assert len(timed) >= 2 * len(parts) + 4  # candidates beside the defaults agreed with them


def test_autotune_measures_once_and_reads_the_cache_from_then_on(runner_of, monkeypatch, folder):
    spec, params = runner_of("llama-gqa")
    fake = FakeRun({VectorConfig(1, 4): (8e-6, 1.0), VectorConfig(2, 4): (4e-6, 1.0)})
    monkeypatch.setattr(search, "tuning_cases", lambda *args, **how: [fake.case()])
    monkeypatch.setattr(search, "graph_seconds", lambda device: fake.seconds)
    device = torch.device("cpu")
    for _ in range(2):
        machine = store.Machine.of(device)
        known = Configurations([(store.HERE, store.load_cache(machine))])
        ops = KernelOps(device, known)
        search.autotune(spec, params, ops)
        assert ops.configurations.find(KEY) == VectorConfig(2, 4)
        report = ops.implementations["configurations"]
        assert report == "1 tuned on this machine, defaults; in use: 1 tuned on this machine"
        ran, fake.ran = fake.ran, []
    assert not ran
    assert machine.kernels == store.Machine.of(device).kernels and len(machine.kernels) == 64


def test_autotune_tries_what_is_shipped_as_well(runner_of, monkeypatch):
    spec, params = runner_of("llama-gqa")
    shipped = VectorConfig(8, 8)
    plan = {VectorConfig(1, 4): (8e-6, 1.0), VectorConfig(2, 4): (4e-6, 1.0)}
    fake = FakeRun(plan)
    case = fake.case()
    fake.plan = {**plan, shipped: (2e-6, 1.0)}
    monkeypatch.setattr(search, "tuning_cases", lambda *args, **how: [case])
    monkeypatch.setattr(search, "graph_seconds", lambda device: fake.seconds)
    known = Configurations([("shipped for H100", {KEY: Measured(shipped, 1.0)})])
    ops = KernelOps(torch.device("cpu"), known)
    search.autotune(spec, params, ops)
    assert ops.configurations.table(store.HERE) == {KEY: Measured(shipped, 0.5)}


def test_search_out_of_time_says_so_and_uses_what_it_has(runner_of, monkeypatch):
    spec, params = runner_of("llama-gqa")
    fake = FakeRun({VectorConfig(1, 4): (8e-6, 1.0), VectorConfig(2, 4): (4e-6, 1.0)})
    parts = [fake.case(), fake.case(("linear", 2, *KEY[2:]))]
    monkeypatch.setattr(search, "tuning_cases", lambda *args, **how: parts)
    monkeypatch.setattr(search, "graph_seconds", lambda device: fake.seconds)
    clock = iter([0.0, 1.0, 1e6])
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    ops = KernelOps(torch.device("cpu"))
    with pytest.warns(UserWarning, match="1 of 2 shapes.*next start"):
        search.autotune(spec, params, ops)
    assert ops.configurations.find(KEY) == VectorConfig(2, 4)
    assert list(store.load_cache(store.Machine.of(ops.device))) == [KEY]


@pytest.mark.parametrize("name", ["use_triton", "triton_autotune"])
def test_device_that_runs_no_kernels_refuses_what_asks_for_them(name):
    config = InferenceConfig(**{name: True, "replace_with_kernel_inject": True})
    with pytest.raises(ConfigError, match=f"{name}=True: the kernels run on CUDA devices from Am"):
        backend._make_ops(config, None, torch.device("cpu"), None)
