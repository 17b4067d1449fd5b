"""`dualinfer bench`: what it counts, what it measures, and what it writes."""

import importlib.util
import io
import json
import os
import re
import stat
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

import dualinfer
from dualinfer.arrays import to_numpy
from dualinfer.bench import limits, peers, running, runs, worker
from dualinfer.bench import measure as measuring
from dualinfer.bench.case import OpCase, TracedCall
from dualinfer.bench.counts import Counts, describe_held
from dualinfer.bench.limits import Limits, open_device
from dualinfer.bench.measure import decode_row, measure, streaming_figures, text_lengths
from dualinfer.bench.ops import find_cases, measure_op
from dualinfer.bench.random_weights import (
    RandomMatrix,
    RandomSource,
    checkpoint,
    make_module,
    plan_weights,
    random_model,
)
from dualinfer.bench.shapes import SHAPES, open_model
from dualinfer.bench.tables import failure_lines, limit_lines, make_table
from dualinfer.bench.task import Task
from dualinfer.cli import main as cli
from dualinfer.errors import ArgumentError, ConfigError, UnsupportedError
from dualinfer.model.load_plan import TableSource, make_load_plan
from dualinfer.model.spec import Attention
from dualinfer.model.weights import named_arrays
from dualinfer.ops.caches import CacheSpec
from dualinfer.quantization.meaning import dequantize

from .checkpoints import EMBED, FFN, HEAD_DIM, HEADS, KV_HEADS, LAYERS, write_llama
from .models import relative_rms, slow_but

VOCAB = 50
QUERY, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
LAYER_MATRICES = (QUERY + 2 * KV) * EMBED + EMBED * QUERY + 3 * FFN * EMBED


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), VOCAB)


def bench(*arguments: object):
    """The command line's result."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", *map(str, arguments)])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` measures in this process, since new ones take seconds to import what they need."""

    def rows_of(command: object, waiting: Any) -> Iterable[worker.Row]:
        tasks = [Task(**task.to_dict()) for task in waiting]
        rows = worker.run(tasks, open_device(runs.side_of(tasks[0].system)))
        yield from (json.loads(json.dumps(row)) for _, row in rows if row is not None)
        waiting.clear()

    monkeypatch.setattr(runs, "_rows_of", rows_of)


def counts_of(name: str) -> Counts:
    return Counts.of(plan_weights(open_model(name), "float32", None), "float32")


def attention(window: int | None = None, causal: bool = True) -> Attention:
    return Attention(6, 3, 8, 1.0, causal=causal, near=window)


def test_counts_of_a_tiny_llama_by_hand(llama):
    counts = counts_of(str(llama))
    assert counts.body == LAYERS * LAYER_MATRICES
    assert counts.head == VOCAB * EMBED
    norms = (2 * LAYERS + 1) * EMBED
    read = LAYERS * LAYER_MATRICES + VOCAB * EMBED + norms
    assert counts.weight_bytes == 4 * read and counts.held_bytes == 4 * (read + VOCAB * EMBED)
    halves = Counts.of(plan_weights(open_model(str(llama)), "bfloat16", None), "bfloat16")
    assert halves.weight_bytes == 2 * read


SMALLEST = ("llama-3.2-1b", "gpt2", "opt-125m", "gpt-neo-125m", "bloom-560m", "bert-base")
LARGE = ("gpt-j-6b", "pythia-6.9b", "gemma-2-2b", "gemma-3-4b", "phi-4-mini", "falcon-7b")
LARGE += ("olmo-2-7b:2", "starcoder2-7b:2")


@pytest.mark.parametrize("name", [*SMALLEST, *LARGE])
def test_read_weights_are_hf_parameters_without_embeddings(name):
    model = open_model(name)
    with torch.device("meta"):
        module = getattr(transformers, model.class_name)(model.config)
    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    head = module.get_output_embeddings().weight
    expected = sum(p.numel() for p in module.parameters() if id(p) not in tables or p is head)
    assert counts_of(name).weight_bytes == 4 * expected


def named_shape(name):
    """The name, where transformers has its class: 5.17 lacks Kimi Linear's."""
    if not hasattr(transformers, SHAPES[name].class_name):
        pytest.skip(f"transformers {transformers.__version__} has no {SHAPES[name].class_name}")
    return name


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_hf_config_of_its_class(name):
    model = open_model(named_shape(name))
    assert issubclass(getattr(transformers, model.class_name), transformers.PreTrainedModel)
    assert model.folder is None
    assert model.config.eos_token_id is None


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_comes_in_any_depth(name):
    spec, table = open_model(f"{named_shape(name)}:2").describe()
    assert len(spec.layers) == 2
    assert spec.encoder is None or len(spec.encoder.layers) == 2
    assert {row.layer for row in table.rows} == {None, *range(len(spec.all_layers))}


@pytest.mark.parametrize("window", [None, 1, 5, 20, 63, 1000])
def test_cached_bytes_are_those_that_the_steps_read(window):
    batch, prompt, new_tokens = 3, 17, 30
    caches = (CacheSpec("full", 3, 8, 8),) * 2
    counts = Counts(0, 0, 0, 0, (attention(window), attention()), caches)
    total = 0
    for step in range(1, new_tokens):  # the token that a step feeds is at this position
        position = prompt + step - 1
        seen = position if window is None else min(position, window - 1)
        total += (seen + position) * 2 * 3 * 8 * 2
    expected = batch * total / (new_tokens - 1)
    assert counts.kv_bytes("float16", batch, prompt, new_tokens) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize("window", [None, 1, 63, 5000])
def test_flops_count_visible_pairs(tokens, window):
    counts = Counts(0, body=1000, head=500, pooler=7, attention=(attention(window),))
    pairs = sum(min(i + 1, window or tokens) for i in range(tokens))
    dense = tokens * 1000 + 500 + 7
    expected = 2 * (2 * dense + 2 * 2 * pairs * 6 * 8)
    assert counts.flops(2, tokens, head_tokens=1) == expected


def test_flops_of_a_bidirectional_layer_count_all_pairs():
    counts = Counts(0, 0, 0, 0, attention=(attention(causal=False),))
    assert counts.flops(1, 10, 10) == 4 * 100 * 6 * 8
    counts = Counts(0, 0, 0, 0, attention=(attention(3, causal=False),))
    pairs = sum(abs(i - j) < 3 for i in range(10) for j in range(10))
    assert counts.flops(1, 10, 10) == 4 * pairs * 6 * 8


def test_decode_row_takes_the_first_token_off_and_divides_by_the_bandwidth(llama):
    task = Task("decode", "torch", str(llama), None, 4, 16, 11, 3, True)
    counts = counts_of(str(llama))
    limits = Limits("torch", "CPU", "float16", read_bandwidth=1e9, matrix_rate=1e12)
    row = decode_row(task, counts, limits, [(0.1, 0.3), (0.1, 0.5), (0.2, 0.5)])
    assert row["runs_ms"]["per_token"] == pytest.approx([20.0, 40.0, 30.0])
    assert row["ms_per_token"] == pytest.approx(30.0)
    assert row["tokens_per_s"] == pytest.approx(4 * 1000 / 30)
    assert row["first_token_ms"] == pytest.approx(100.0)
    # Ten steps read 16 to 25 tokens of 2 * KV values a layer, four sequences, two bytes a value.
    kv = 4 * 20.5 * LAYERS * 2 * KV * 2
    assert row["kv_bytes"] == pytest.approx(kv)
    assert row["of_limit"] == pytest.approx((counts.weight_bytes + kv) / 0.030 / 1e9)


def test_a_token_that_noise_hides_takes_at_most_its_share_of_the_call(llama):
    task = Task("decode", "torch", str(llama), None, 4, 16, 11, 3, True)
    limits = Limits("torch", "CPU", "float16", read_bandwidth=1e9, matrix_rate=1e12)
    row = decode_row(task, counts_of(str(llama)), limits, [(0.3, 0.22), (0.2, 0.2), (0.1, 0.33)])
    assert row["ms_per_token"] == pytest.approx(20.0) and row["at_most"]
    (line,) = failure_lines([{"system": "torch", "kernels": True, "kind": "decode"} | row])
    assert line.startswith("dualinfer torch: all tokens took no longer than one")


def test_a_row_of_streamed_layers_is_divided_by_the_slower_of_reading_and_copying():
    row = {"limit_ms": 2.0, "ms_per_token": 10.0}
    assert streaming_figures(row, 8 * 10**6, 1e9)["of_limit"] == pytest.approx(0.8)
    assert streaming_figures(row, 10**6, 1e9)["of_limit"] == pytest.approx(0.2)


@pytest.mark.slow
def test_bench_decode_of_streamed_layers_measures_the_rate_that_it_divides_by(tmp_path):
    out = tmp_path / "out.json"
    result = bench(
        *("decode", "--resident-layers", 1, "--backend", "both", "--batch", 3),
        *("--prompt", 9, "--new-tokens", 4, "--repeats", 1, "--json", out),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 and "GB/s from the host" in " ".join(result.stdout.split())
    for row in rows:
        assert row["streamed_bytes"] == row["system_facts"]["streamed_bytes"] > 0
        read = (row["weight_bytes"] + row["kv_bytes"]) / row["read_bandwidth"]
        least = max(read, row["streamed_bytes"] / row["host_rate"])
        assert row["of_limit"] == pytest.approx(least / row["ms_per_token"] * 1e3)


def test_warm_ups_do_not_count(monkeypatch):
    clock, durations = [0.0], iter([9.0, 5.0, 1.0, 2.0, 3.0])

    def call():
        clock[0] += next(durations)

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    assert measuring._times(call, 2, 3) == (9.0, [1.0, 2.0, 3.0])


def test_sets_of_inputs_fill_four_times_the_cache():
    cache = 50 * 2**20
    found = [limits._sets(nbytes, cache) for nbytes in (2**40, cache, cache // 8, 0)]
    assert found == [2, 4, 32, 64]  # at most 64


def test_limits_are_said_to_be_those_of_the_framework_that_measured_them():
    row = {"device": "X", "dtype": "float16", "read_bandwidth": 3e12, "matrix_rate": 7e14}
    rows = [row | {"system": system} for system in ("torch", "hf-eager", "jax", "keras-hub")]
    measured = [line for r in rows for line in limit_lines([r, {"system": "torch", "error": "-"}])]
    by = [re.search("measured by (\\w+): reads 3 TB/s, multiplies 700", line) for line in measured]
    assert [found[1] for found in by] == ["torch", "torch", "jax", "jax"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_random_checkpoint_is_one_that_hf_and_dualinfer_read_alike(dtype):
    model = open_model("tiny")
    ids = np.arange(1, 64)[None]
    with checkpoint(model, dtype) as folder:
        module = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with dualinfer.init_inference(folder, dtype="fp32") as engine:
            logits = engine(ids).logits
    assert not folder.exists()
    assert all(p.isfinite().all() for p in module.parameters())
    assert module.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


QUANTS = ["int8", "int4", "fp8", "nvfp4"]


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", ["tiny", "embedded"])
def test_a_step_reads_the_packed_bytes_that_the_engine_holds(name, quant):
    """Of a head of its own, and of the embedding as one; `tiny` has random codes alone."""
    model = open_model(name)
    counts = Counts.of(plan_weights(model, "float16", quant), "float16")
    given = model.folder or random_model(model, "float16")
    with dualinfer.init_inference(given, backend="torch", dtype="fp16", quant=quant) as engine:
        params, held = engine.runner.params, engine.report().parameter_bytes
    assert counts.held_bytes == held
    tied = model.config.tie_word_embeddings
    assert tied == (name == "embedded")
    looked_up = 0 if tied else 2 * model.vocab * model.config.hidden_size
    assert counts.weight_bytes == held - looked_up
    assert params.outer["embed.weight"].scheme is None or tied


def test_a_quantized_folder_is_counted_as_it_is_held(llama, tmp_path):
    folder = tmp_path / "int8"
    made = CliRunner().invoke(cli.app, ["quantize", str(llama), str(folder), "--scheme", "int8"])
    assert made.exit_code == 0, made.output
    counts = counts_of(str(folder))
    with dualinfer.init_inference(folder, dtype="fp32") as engine:
        held = engine.report().parameter_bytes
    assert (counts.held_bytes, counts.weight_bytes) == (held, held - 4 * VOCAB * EMBED)
    assert counts.weight_bytes < 0.4 * counts_of(str(llama)).weight_bytes
    tasks = [Task("decode", s, str(folder), None, 1, 8, 4, 1, True) for s in ("torch", "hf-eager")]
    ours, peer = (row for _, row in worker.run(tasks, open_device("torch")) if row is not None)
    assert (ours["scheme"], ours["group"], ours["head"]) == ("int8, rows", None, "int8, rows")
    assert (peer["scheme"], peer["head"]) == ("as hf-eager holds it", None)  # it unpacks this one
    assert peer["weight_bytes"] == ours["weight_bytes"] == counts.weight_bytes
    assert peer["system_facts"]["parameter_bytes"] > 2 * held
    assert [*make_table("decode", [ours, peer]).columns[1].cells] == [
        "int8, rows;\nhead int8, rows",
        "as hf-eager holds it",
    ]
    with pytest.raises(ConfigError, match="quant is given, and the weights of"):
        plan_weights(open_model(str(folder)), "float32", "int4")


@pytest.mark.parametrize("quant", QUANTS)
def test_random_codes_are_uniform_and_alike_on_both_backends_without_weights(quant, monkeypatch):
    read = []
    real = RandomSource.read
    monkeypatch.setattr(RandomSource, "read", lambda s, n, i=None: read.append(n) or real(s, n, i))
    model, found = open_model("tiny"), []
    for backend in ("torch", "jax"):
        given = random_model(model, "float32")
        with dualinfer.init_inference(given, backend=backend, dtype="fp32", quant=quant) as engine:
            layer = engine.runner.params.layers[1]
            found.append({n: to_numpy(a) for n, a in named_arrays(layer).items()})
            logits = to_numpy(engine(np.arange(40)[None])[0])
        assert np.isfinite(logits).all() and logits.std() > 0.01
    assert {name for name in read if "proj" in name or "lm_head" in name} == set()
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    codes = found[0]["up.weight"].view(np.uint8)  # two of 4 bits in each byte
    halves = [codes] if quant in ("int8", "fp8") else [codes & 15, codes >> 4]
    for values in halves:
        counts = np.unique(values, return_counts=True)[1]
        assert len(counts) == {"int8": 256, "fp8": 254}.get(quant, 16)
        assert counts.min() > 0.5 * values.size / len(counts)
    matrices = plan_weights(model, "float32", quant).table.matrices
    assert matrices is not None
    one = RandomMatrix(matrices("model.layers.1.mlp.up_proj.weight"))  # pyright: ignore
    assert dequantize(one).std() == pytest.approx(0.02, rel=0.1)
    np.testing.assert_array_equal(  # a share is a part of the whole
        one.codes(slice(7, 30), slice(5, 50)), one.codes(slice(0, 200), slice(0, 96))[7:30, 5:50]
    )


def test_bench_decode_of_quantized_weights_names_how_they_are_held(here, tmp_path):
    out = tmp_path / "out.json"
    result = bench(
        *("decode", "--shape", "tiny", "--quant", "int4"),
        *("--peer", "hf-eager", "--prompt", 9, "--new-tokens", 6, "--repeats", 1, "--json", out),
    )
    assert result.exit_code == 0, result.output
    row, peer = json.loads(out.read_text())["rows"]
    check_row(row, "decode")
    names = {"quant": "int4", "scheme": "int4, groups of 64", "group": 64, "head": "int8, rows"}
    assert {name: row[name] for name in names} == names
    plan = plan_weights(open_model("tiny"), "float32", "int4")
    assert row["weight_bytes"] == Counts.of(plan, "float32").weight_bytes
    facts = row["system_facts"]
    assert facts["weights"] == {**row["weights"], "head": row["head"]}
    assert facts["load_seconds"] is None
    check_row(peer, "decode")
    assert (peer["quant"], peer["scheme"], peer["head"]) == (None, None, "float32")
    assert peer["weight_bytes"] == counts_of("tiny").weight_bytes > 3 * row["weight_bytes"]
    text = result.stdout
    assert "int4, groups of 64;" in text and "head int8, rows" in text
    assert any("hf-eager" in line and "float32" in line for line in text.splitlines())


def test_gpt_oss_as_published_has_its_experts_alone_in_codes(monkeypatch):
    """Read as its checkpoints are, of random blocks and scales: both backends give finite text."""
    small = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {"num_local_experts": 5, "num_experts_per_tok": 3}
    shape = SHAPES["gpt-oss-20b-mxfp4"]
    monkeypatch.setitem(SHAPES, "small", replace(shape, fields=shape.fields | small))
    model = open_model("small")
    held = describe_held(plan_weights(model, "float32", None), "float32")
    assert held["scheme"] == "fp4, groups of 32" and held["head"] == "float32"
    found = []
    for backend in ("torch", "jax"):
        given = random_model(model, "float32")
        with dualinfer.init_inference(given, backend=backend, dtype="fp32") as engine:
            found.append(to_numpy(engine(np.arange(40)[None])[0]))
    assert np.isfinite(found[0]).all() and found[0].std() > 0.01
    assert relative_rms(found[1], found[0]) < 1e-5


def test_random_module_has_the_dtype_and_leaves_the_default_alone():
    module = make_module(open_model("tiny"), "bfloat16", "cpu")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def check_row(row: dict, kind: str) -> None:
    assert row["kind"] == kind
    assert row["device"] == "CPU"
    least = row["flops"] / row["matrix_rate"] if kind != "decode" else 0
    read = row["weight_bytes"] + row.get("kv_bytes", 0)
    least = max(least, read / row["read_bandwidth"])
    ms = row["ms_per_token"] if kind == "decode" else row["ms"]
    assert row["of_limit"] == pytest.approx(least / ms * 1e3)
    assert row["limit_ms"] == pytest.approx(least * 1e3)
    for times in row["runs_ms"].values():
        assert len(times) == row["repeats"]
    assert row["peak_bytes"] is None


def test_bench_decode_writes_every_row_of_both_backends_and_a_peer(here, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    pytest.importorskip("matplotlib")
    result = bench(
        *("decode", "--shape", "tiny", "--backend", "both", "--peer", "hf-eager"),
        *("--batch", 1, "--batch", 3, "--prompt", 9, "--new-tokens", 12, "--repeats", 2),
        *("--json", out, "--plot", plot),
    )
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["schema"] == 1
    assert written["kind"] == "decode"
    assert written["versions"]["torch"] == torch.__version__
    assert written["devices"] == ["CPU"]
    found = [(row["system"], row["batch"]) for row in written["rows"]]
    assert found == [(s, b) for s in ("torch", "hf-eager", "jax") for b in (1, 3)]
    for row in written["rows"]:
        check_row(row, "decode")
        assert row["dtype"] == "float32"
        assert row["new_tokens"] == 12
    assert {row["weight_bytes"] for row in written["rows"]} == {counts_of("tiny").weight_bytes}
    assert "matmul" in written["rows"][0]["system_facts"]["ops"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for part in ("dualinfer torch", "hf-eager", "dualinfer jax", "no benchmark"):
        assert part in result.stdout


@pytest.mark.slow
def test_kernels_of_jax_stand_beside_each_other(here, tmp_path, monkeypatch):
    """A row each; those that cannot run here say why."""
    from dualinfer.kernels.pallas.launch import VARIABLE

    monkeypatch.setenv(VARIABLE, "1")
    out, names = tmp_path / "out.json", ("triton", "pallas", "xla")
    result = bench(
        *("decode", "--shape", "tiny", "--backend", "jax", "--prompt", 3, "--new-tokens", 2),
        *("--repeats", 1, "--json", out, *(x for name in names for x in ("--kernels", name))),
    )
    rows = {row["by"]: row for row in json.loads(out.read_text())["rows"]}
    assert result.exit_code == 1 and "kernels='triton'" in rows["triton"]["error"]
    for name, served in (("pallas", "Pallas, fused"), ("xla", "XLA dot")):
        check_row(rows[name], "decode")
        assert served in rows[name]["system_facts"]["ops"]["matmul"]
        assert f"dualinfer jax, {name}" in result.stdout


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--kernels", "xla"), "Add --backend jax"),
        (("--kernels", "xla", "--backend", "jax", "--no-kernels"), "say two things"),
        (("--kernels", "cuda", "--backend", "jax"), "cuda"),
    ],
)
def test_kernels_that_cannot_be_meant_are_refused(given, why):
    result = bench("decode", "--shape", "tiny", *given)
    assert result.exit_code != 0 and why in " ".join(result.stderr.split())


def test_bench_goes_on_after_a_row_that_fails(llama, tmp_path):
    out = tmp_path / "out.json"
    result = bench(
        *("prefill", llama, "--shape", "tiny", "--no-kernels", "--prompt", 200),
        *("--peer", "hf-compile", "--repeats", 1, "--json", out),
    )
    assert result.exit_code == 1
    rows = json.loads(out.read_text())["rows"]
    by_system = {(row["model"], row["system"]): row for row in rows}
    assert len(by_system) == 4
    assert (
        "over the model's max_position_embeddings (128)" in by_system[str(llama), "torch"]["error"]
    )
    check_row(by_system["tiny", "torch"], "prefill")
    assert by_system["tiny", "torch"]["kernels"] is False
    for model in (str(llama), "tiny"):
        assert "needs a CUDA device" in by_system[model, "hf-compile"]["error"]
    assert result.stdout.count("failed") == 3
    assert "max_position_embeddings" in result.stderr


def test_bench_forward_beside_hf(here, tmp_path):
    out = tmp_path / "out.json"
    result = bench(
        *("forward", "--shape", "tiny", "--prompt", 31, "--repeats", 3, "--dtype", "bf16"),
        *("--peer", "hf-eager", "--json", out),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["torch", "hf-eager"]
    for row in rows:
        check_row(row, "forward")
        assert row["dtype"] == "bfloat16"


def test_bench_embed_counts_tokens_that_are_no_padding(here, tmp_path):
    out = tmp_path / "out.json"
    result = bench(
        *("embed", "--shape", "tiny", "--prompt", 40, "--batch", 9, "--repeats", 2),
        *("--peer", "hf-eager", "--json", out),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["torch", "hf-eager"]
    total = int(text_lengths(9, 40).sum())
    for row in rows:
        assert row["text_tokens"] == total
        assert row["tokens_per_s"] == pytest.approx(total / row["ms"] * 1e3)
        assert 0 < row["of_limit"] < 2
    lengths = text_lengths(4000, 512)
    assert 110 < lengths.mean() < 130 and lengths.max() == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--shape", "lama-2-7b"), "Did you mean llama-2-7b?"),
        (("decode", "--shape", "gpt2:x"), "'x' is no number of layers of gpt2. Pass one"),
        (("decode", "--shape", "gpt-neo-125m:3"), "gpt-neo-125m, which has pairs of them"),
        (("decode", "nowhere"), "'nowhere' is no folder with a config.json"),
        (("prefill", "--peer", "vllm"), "--peer vllm is not known. Peers: hf-eager"),
        (("forward", "--dtype", "int3"), "--dtype int3"),
        (("decode", "--quant", "int3"), "--quant int3: input should be 'int8', 'int4', 'fp8'"),
        (("decode", "--json", "nowhere/out.json"), "the folder does not exist"),
    ],
)
def test_bench_refuses_before_anything_runs(arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr.replace("\n", " ")


def test_bench_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    result = bench("decode", "--plot", tmp_path / "out.png")
    assert result.exit_code == 1
    assert "Install `dualinfer[bench]`" in result.stderr


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("hf-compile", "needs a CUDA device"),
        ("flax", "no Flax models since version 5"),
        ("keras-hub", "Install keras-hub"),
    ],
)
def test_peer_that_cannot_run_says_why(peer, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=message):
        peers.make_peer(peer, open_model("tiny"), "float32", "decode")


def make_case(backend: str) -> tuple[OpCase, list[int]]:
    """A matrix product, and how many sets of inputs were made."""
    made = []

    def prepare():
        made.append(1)
        if backend == "torch":
            a, b = torch.randn(63, 1000), torch.randn(1000, 17)
            return lambda: a @ b
        import jax.numpy as jnp

        x, y = jnp.ones((63, 1000)), jnp.ones((1000, 17))
        return TracedCall(lambda state, x, y: (x @ y, state), None, (x, y))

    moved = 4 * (63 * 1000 + 1000 * 17 + 63 * 17)
    case = OpCase("matmul", "63x1000x17", moved, 2 * 63 * 1000 * 17, prepare, "torch")
    return case, made


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_op_row_is_time_and_its_fraction_of_the_slower_limit(backend):
    case, made = make_case(backend)
    device = open_device(backend)
    row = measure_op(case, device, "float32")
    limits = device.limits("float32")
    seconds = row["us"] / 1e6
    assert len(made) >= 2  # inputs take turns
    assert row["gb_per_s"] == pytest.approx(case.bytes / seconds / 1e9)
    assert row["tflops"] == pytest.approx(case.flops / seconds / 1e12)
    least = max(case.bytes / limits.read_bandwidth, case.flops / limits.matrix_rate)
    assert row["of_limit"] == pytest.approx(least / seconds)
    assert row["by"] == "torch"


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch backend that offers one op."""
    name = "dualinfer.bench.torch.ops"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.bench_cases = lambda dtype, quant: iter([make_case("torch")[0]])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def on_cpu():
    """Torch's ops in float32 on the CPU, by Triton's interpreter."""
    pytest.importorskip("triton")
    from dualinfer.bench.torch.inputs import Bench
    from dualinfer.kernels.triton.launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    return Bench(torch.float32, torch.device("cpu"))


def by_op(cases: Iterable[OpCase]) -> dict[tuple[str, str], list[OpCase]]:
    """The cases of each op and size: ours, then its references."""
    ops: dict[tuple[str, str], list[OpCase]] = {}
    for case in cases:
        ops.setdefault((case.name, case.description), []).append(case)
    for ours, *references in ops.values():
        assert not ours.reference
        assert references
        assert all(case.reference for case in references)
        assert {(case.bytes, case.flops) for case in references} == {(ours.bytes, ours.flops)}
    return ops


def check_agree(cases: list[OpCase], most: float) -> None:
    """Every reference gives what ours does, to this relative RMS."""
    results = [case.prepare()() for case in cases]
    ours, *others = [r if isinstance(r, tuple) else (r,) for r in results]
    for case, theirs in zip(cases[1:], others, strict=True):
        for found, wanted in zip(ours, theirs, strict=True):
            found, wanted = (
                (part if torch.is_tensor(part) else torch.tensor(np.asarray(part, np.float32)))
                .float()
                .flatten()
                for part in (found, wanted)
            )
            error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
            assert error <= most, f"{case.name} {case.description} by {case.reference}: {error:.2g}"


TINY = ("tiny", 48, 6, 3, 16, 40, 101)


@pytest.mark.parametrize("rows", [1, 5])
def test_products_and_what_stands_between_them_agree_with_torch(on_cpu, rows):
    from dualinfer.bench.torch import ops as bench_ops

    shape = bench_ops.Shape(*TINY)
    cases = [
        *bench_ops.products(on_cpu, shape, rows),
        *bench_ops.between_products(on_cpu, shape, rows),
    ]
    ops = by_op(cases)
    assert len(ops) == 10
    for group in ops.values():
        check_agree(group, 1e-5)
    bytes_of = {case.description: case.bytes for case in cases}
    qkv = f"tiny qkv 192 x 48, {bench_ops.rows_of(rows)}, norm"
    assert bytes_of[qkv] == 4 * (192 * 48 + rows * 48 + 48 + rows * 192)
    gated = f"tiny gate and up 80 x 48, {bench_ops.rows_of(rows)}, norm, SiLU gate"
    assert bytes_of[gated] == 4 * (80 * 48 + rows * 48 + 48 + rows * 40)
    down = f"tiny down 48 x 40, {bench_ops.rows_of(rows)}, residual"
    assert bytes_of[down] == 4 * (48 * 40 + rows * 40 + 2 * rows * 48)


QUANTIZED = ("int4", "fp8", "nvfp4", "int8_w8a8")


@pytest.mark.parametrize("quant", QUANTIZED)
def test_quantized_products_are_those_of_their_codes(on_cpu, quant):
    """Beside plain ops with the same arrays; the limit counts codes and scales."""
    from dualinfer.backends.torch.ops.plain import PlainOps
    from dualinfer.bench.case import recipe_of
    from dualinfer.bench.torch import ops as bench_ops

    shape = bench_ops.Shape("tiny", 64, 4, 2, 16, 96, 101)
    cases = list(bench_ops.products(on_cpu, shape, 3, recipe_of(quant)))
    plain = ("dualinfer, plain weights", "torch, cuBLAS, plain weights")
    for ours, *others in by_op(cases).values():
        assert [case.reference for case in others] == [*plain]
        call = ours.prepare()
        found = call()
        with mock.patch.object(on_cpu, "ops", PlainOps()):
            expected = call()
        size = found.square().mean().sqrt()
        assert size > 1e-3 and (found - expected).square().mean().sqrt() < 1e-4 * size
        check_agree(others, 1e-5)
    held = {"int4": 64 // 2 + 4, "nvfp4": 64 // 2 + 64 // 16 + 4}
    row = held.get(quant, 64 + 4)
    qkv = next(case for case in cases if " qkv " in case.description)
    assert qkv.bytes == 128 * row + 4 * (3 * 64 + 64 + 3 * 128)


@pytest.mark.parametrize("quant", slow_but([None], [None, "int4"]))
def test_routers_and_experts_agree_with_torch(quant, on_cpu):
    """Those of few rows and of many; the limit counts each expert that some row chose once."""
    from dualinfer.bench.case import recipe_of
    from dualinfer.bench.mixtures import RouterOp, mixture_ops
    from dualinfer.bench.torch.mixtures import experts, router

    read = {}
    for own in mixture_ops(4, recipe_of(quant), is_tiny=True):
        if isinstance(own, RouterOp):
            ours, theirs = (case.prepare()() for case in router(on_cpu, own))
            order = theirs.experts.argsort(-1)
            torch.testing.assert_close(ours.experts.long(), theirs.experts.gather(-1, order))
            torch.testing.assert_close(ours.weights, theirs.weights.gather(-1, order))
            continue
        cases = list(experts(on_cpu, own))
        by_op(cases)
        check_agree(cases[own.is_quantized :], 1e-5)
        read[own.rows] = cases[0].bytes
    expert = (48 + 32) * (16 + 4) if quant else 4 * 3 * 24 * 32
    row, norm = 3 * 32 * 4 + 3 * 8, 32 * 4  # x, residual, result and routing
    assert read == {1: 3 * expert + row + norm, 8: 6 * expert + 8 * row + norm}
    assert not list(mixture_ops(4, recipe_of("int8_w8a8"), is_tiny=True))


@pytest.mark.parametrize("tokens", [1, 63])
def test_decode_attention_agrees_with_sdpa(on_cpu, tokens, monkeypatch):
    from dualinfer.bench.torch import attention as bench_attention
    from dualinfer.bench.torch import ops as bench_ops

    monkeypatch.setattr(bench_attention, "_WIDE_SDPA", {"math": SDPBackend.MATH})
    cases = list(bench_attention.decode(on_cpu, bench_ops.Shape(*TINY), 2, tokens))
    for group in by_op(cases).values():
        check_agree(group, 1e-5)
    read = 192 + 2 * (tokens - 1) * 48  # the new token's row, and the others' keys and values
    assert cases[0].bytes == 2 * (4 * (read + 96 + 2 * 48) + 8)
    assert cases[0].flops == 2 * 4 * tokens * 6 * 16


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("options", "dispatched"),
    [({}, True), ({"near": 20}, False), ({"softcap": 5.0}, False), ({"causal": False}, False)],
)
def test_attention_of_prompts_agrees_with_torch(on_cpu, options, dispatched, monkeypatch):
    from dualinfer.bench.torch import attention as bench_attention

    monkeypatch.setattr(bench_attention, "_WIDE_SDPA", {"math": SDPBackend.MATH})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    a = Attention(4, 2, 16, 0.25, **options)
    cases = list(bench_attention.prompts(on_cpu, 2, 63, a, dispatched))
    assert len(cases) == 2 + dispatched
    for group in by_op(cases).values():
        check_agree(group, 1e-5)
    pairs = sum(min(i + 1, a.window or 63) for i in range(63)) if a.causal else 63 * 63
    assert cases[0].flops == 2 * 4 * pairs * 4 * 16
    assert cases[0].bytes == 2 * 63 * 4 * (8 * 16 + 4 * 16)


def test_sampled_tokens_are_among_those_that_torch_may_choose(on_cpu):
    from dualinfer.bench.torch.ops import samples

    logits = on_cpu.draws(torch.float32)(3, 1001, scale=4.0)
    for (_, description), group in by_op(samples(on_cpu, 3, 1001)).items():
        most = 1 if "greedy" in description else 50 if "top-k 50" in description else 1001
        for case in group:
            assert case.bytes == 3 * (4 * 1001 + 8)
            token = case.prepare()()
            assert token.shape == (3,)
            better = (logits > logits.gather(1, token[:, None])).sum(1)
            assert (better < most).all(), f"{description} by {case.reference or 'ours'}"


@pytest.fixture
def all_cases(on_cpu, monkeypatch) -> list[OpCase]:
    """Those of bfloat16, as on a GPU; they are not run."""
    from dualinfer.bench.torch import ops as bench_ops

    monkeypatch.setattr(bench_ops, "runs_kernels", lambda device: True)
    return bench_ops.bench_cases("bfloat16")


def test_ops_on_a_gpu_are_those_of_the_shapes_that_decode_measures(all_cases):
    ops = by_op(all_cases)
    assert len({(*key, case.reference) for key in ops for case in ops[key]}) == len(all_cases)
    for label, name, layers in (
        ("8B", "llama-3-8b", 32),
        ("7B", "llama-2-7b", 32),
        ("1B", "llama-3.2-1b", 16),
    ):
        mine = {
            d: group[0].flops
            for (op, d), group in ops.items()
            if op == "linear" and d.startswith(label) and ", 1 row," in d
        }
        head = next(flops for d, flops in mine.items() if " head " in d)
        counts = counts_of(name)
        assert head == 2 * counts.head
        assert sum(mine.values()) - head == 2 * counts.body / layers
    cached = {d: g[0].bytes for (op, d), g in ops.items() if op == "decode_attention"}
    assert next(n for d, n in cached.items() if d.startswith("8B, 32 x 1,024")) > 128e6


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # flex_attention, compiled
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
@pytest.mark.parametrize("part", range(2))
def test_every_op_on_the_gpu_agrees_with_its_references(part):
    from dualinfer.bench.torch.ops import bench_cases

    for (name, _), group in list(by_op(bench_cases("bfloat16")).items())[part::2]:
        if name not in ("sample", "router"):  # whose noise, or whose product's dtype, differs
            # Plain weights beside codes are other weights: they are there for their time.
            check_agree([c for c in group if "plain weights" not in c.reference], 0.02)


@pytest.fixture
def jax_bench(monkeypatch):
    """JAX's ops on the CPU, by Triton's interpreter, with cuDNN's dtypes and XLA in its place."""
    jax = pytest.importorskip("jax")
    from dualinfer.bench.jax import attention
    from dualinfer.bench.jax.inputs import Bench

    from .kernels.jax_ops import interpreted_ops

    monkeypatch.setattr(attention, "_CUDNN", "xla")
    monkeypatch.setattr(attention, "_CUDNN_DTYPES", ("float32",))
    made = Bench("float32", jax.devices("cpu")[0])
    made.obstacle, made.kernels = "", interpreted_ops()
    return made


@pytest.mark.parametrize(("rows", "gated"), [(1, False), (5, True)])
def test_jax_products_and_norms_agree_with_xla(rows, gated, jax_bench):
    made = jax_bench
    from dualinfer.bench.jax import ops as bench_ops

    shape = bench_ops.Shape(*TINY, gated=gated)
    ops = by_op([*bench_ops.products(made, shape, rows), *bench_ops.norms_of(made, 48, rows)])
    assert len(ops) == 7
    for group in ops.values():
        check_agree(group, 1e-5)
    words = bench_ops.rows_of(rows)
    vectors = ("norm", 48) if gated else ("norm, bias", 2 * 48 + 192)
    qkv = ops["linear", f"tiny qkv 192 x 48, {words}, {vectors[0]}"][0]
    assert qkv.bytes == 4 * (192 * 48 + rows * 48 + vectors[1] + rows * 192)
    assert qkv.flops == 2 * rows * 192 * 48


@pytest.mark.parametrize("quant", slow_but(["int4"], QUANTIZED))
def test_jax_quantized_products_agree_with_xla(quant, jax_bench):
    from dualinfer.bench.case import recipe_of
    from dualinfer.bench.jax import ops as bench_ops

    cases = bench_ops.products(jax_bench, bench_ops.TINY, 3, recipe_of(quant))
    for group in by_op(cases).values():
        assert [case.reference for case in group] == ["", "XLA", "dualinfer, plain weights"]
        check_agree(group[:2], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("quant", [None, "int4"])
def test_jax_routers_and_experts_agree_with_xla(quant, jax_bench):
    from dualinfer.bench.case import recipe_of
    from dualinfer.bench.jax import ops as bench_ops

    ops = by_op(bench_ops.mixtures(jax_bench, recipe_of(quant), is_tiny=True))
    assert [name for name, _ in ops] == (["experts"] if quant else ["router", "experts"]) * 2
    for group in list(ops.values())[0 if quant else 2 :]:
        check_agree(group[:2], 1e-4 if quant else 1e-5)


@pytest.mark.parametrize(("tokens", "gated"), [(16, True), (63, False)])
def test_jax_decode_attention_agrees_with_what_stands_beside_it(tokens, gated, jax_bench):
    made = jax_bench
    from dualinfer.bench.jax import attention as bench_attention
    from dualinfer.bench.jax import ops as bench_ops

    shape = bench_ops.Shape(*TINY, gated=gated)
    cases = list(bench_attention.decode(made, shape, 2, tokens))
    assert [case.reference for case in cases] == ["", "XLA", "cuDNN"]
    for group in by_op(cases).values():
        check_agree(group, 1e-5)
    read = 192 + 2 * (tokens - 1) * 48
    assert cases[0].bytes == 2 * (4 * (read + 96 + 2 * 48) + 4)


@pytest.mark.parametrize("options", [{}, {"near": 20}, {"softcap": 5.0}, {"causal": False}])
def test_jax_attention_of_prompts_agrees_with_what_stands_beside_it(options, jax_bench):
    made = jax_bench
    from dualinfer.bench.jax import attention as bench_attention

    a = Attention(4, 2, 16, 0.25, **options)
    cases = list(bench_attention.prompts(made, 2, 63, a))
    assert len(cases) == 3 - bool(a.softcap)
    for group in by_op(cases).values():
        check_agree(group, 1e-5)
    pairs = sum(min(i + 1, a.window or 63) for i in range(63)) if a.causal else 63 * 63
    assert cases[0].flops == 2 * 4 * pairs * 4 * 16
    assert cases[0].bytes == 2 * 63 * 4 * (8 * 16 + 4 * 16)


def test_jax_ops_on_a_gpu_can_be_chained_there(monkeypatch):
    """Every kernel's case lowers for CUDA, many calls in one executable; nothing is allocated."""
    jax = pytest.importorskip("jax")
    from dualinfer.backends import jax as backend
    from dualinfer.bench.chain import Chain
    from dualinfer.bench.jax import ops as bench_ops
    from dualinfer.bench.jax.inputs import Bench

    from .kernels.jax_ops import calls_for_cuda, gpu

    device = gpu(core_count=132)
    made = Bench("bfloat16", device)
    assert not made.obstacle and made.kernels.sms == 132
    made.device = jax.devices("cpu")[0]
    monkeypatch.setattr(backend, "default_device", lambda: device)
    monkeypatch.setattr(bench_ops, "Bench", lambda dtype, device: made)
    cases = bench_ops.bench_cases("bfloat16")
    ops = by_op(cases)
    assert len({(*key, case.reference) for key in ops for case in ops[key]}) == len(cases)
    cached = {d: g[0].bytes for (op, d), g in ops.items() if op == "decode_attention"}
    assert next(n for d, n in cached.items() if d.startswith("8B, 32 x 1,024")) > 128e6
    for (name, described), group in ops.items():
        if name in ("router", "experts") and ", 8 rows" not in described:
            continue  # the launches of other sizes differ by numbers
        ours = [case for case in group if case.reference in ("", "dualinfer's Triton kernel")]
        made_calls: list[Any] = []

        def inputs(case: OpCase = ours[-1], made_calls: list[Any] = made_calls):
            made_calls.append(case.prepare())
            return made_calls[0].state, made_calls[0].inputs

        shapes = jax.eval_shape(inputs)
        chain = Chain([TracedCall(made_calls[0].function, *shapes)] * 2, 3)
        calls, _ = calls_for_cuda(chain.run, ([shapes[0]] * 2, [shapes[1]] * 2), monkeypatch)
        assert len(calls) >= 2, (name, ours[-1].description)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", range(5))
def test_every_jax_op_on_the_gpu_agrees_with_what_stands_beside_it(part):
    jax = pytest.importorskip("jax")
    from dualinfer.bench.jax.ops import bench_cases

    assert jax.devices()[0].platform == "gpu", "JAX runs on the CPU; install jax[cuda13]."
    for group in list(by_op(bench_cases("bfloat16")).values())[part::5]:
        check_agree([c for c in group if "plain weights" not in c.reference], 0.02)


def test_chained_calls_all_run_and_their_states_go_on():
    jnp = pytest.importorskip("jax.numpy")
    from dualinfer.bench.chain import Chain

    def op(state, x, weight):
        return jnp.tanh(weight @ x), state + 1

    weights = np.random.default_rng(0).normal(size=(3, 63, 17)).astype(np.float32)
    calls = [
        TracedCall(op, jnp.int32(i), (jnp.ones(17), jnp.asarray(w))) for i, w in enumerate(weights)
    ]
    chain = Chain(calls, 5)
    assert chain.count == 15
    for turn in (1, 2):
        results = chain()
        for result, weight in zip(results, weights, strict=True):
            np.testing.assert_allclose(result, np.tanh(weight.sum(1)), rtol=1e-4)
        assert [int(state) for state in chain._states] == [5 * turn + i for i in range(3)]
    lowered = chain.run.lower(chain._states, chain._inputs)
    assert lowered.as_text().count("optimization_barrier") >= 6  # in front of every call
    compiled = lowered.compile().as_text()
    assert '"known_trip_count":{"n":"4"}' in compiled  # no look at the count on the device
    assert not re.search(r"f32\[63,17\]\S* copy\(", compiled)
    assert all(seconds > 0 for seconds in chain.seconds())


def test_read_streams_read_every_byte_once():
    jax = pytest.importorskip("jax")
    from dualinfer.bench.jax import ops as bench_ops

    streams = bench_ops.read_streams(1 << 20, jax.devices("cpu")[0])
    assert set(streams) == {"sum of float32", "sum of int32", "maximum of float32"}
    for prepare in streams.values():
        assert sum(x.nbytes for x in prepare().inputs) == 1 << 20
    elements = 1 << 18
    found = {name: np.asarray(prepare()()) for name, prepare in streams.items()}
    assert found["sum of float32"] == elements
    assert found["maximum of float32"] == 1
    ones = np.full(elements, np.float32(1).view(np.int32))
    assert found["sum of int32"] == ones.sum(dtype=np.int32)
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    assert "matrix-vector products" in bench_ops.read_streams(1 << 20, gpu)


def test_ops_that_cannot_run_are_skipped_with_the_reason(monkeypatch):
    pytest.importorskip("jax")
    device = open_device("jax")
    monkeypatch.setattr(device, "limits", lambda dtype: Limits("jax", "CPU", dtype, 1e9, 1e9))
    task = Task("ops", "jax", "rms_norm", None, 0, 0, 0, 0, True)
    rows = [row for _, row in worker.run([task], device) if row is not None]
    assert [row["by"] for row in rows] == ["dualinfer", "XLA"]
    assert rows[0]["skipped"].endswith("data-centre GPUs, and this is a CPU")
    assert rows[1]["us"] > 0
    assert not any("error" in row for row in rows)
    assert "skipped: it runs on" in running._line(rows[0])
    table = make_table("ops", rows)
    assert next(iter(table.columns[3].cells)) == "[dim]skipped[/]"
    assert list(table.columns[2].cells) == ["dualinfer jax", "XLA"]
    assert table.caption == "dtype float32"  # the same in all rows


def test_rows_of_quantized_ops_say_how_they_are_quantized(monkeypatch):
    pytest.importorskip("jax")
    device = open_device("jax")
    monkeypatch.setattr(device, "limits", lambda dtype: Limits("jax", "CPU", dtype, 1e9, 1e9))
    monkeypatch.setattr(device, "op_seconds", lambda prepare, moved: 1e-3)
    monkeypatch.setattr(device, "settle", lambda: None)  # it collects garbage, row by row
    task = Task("ops", "jax", "", None, 0, 0, 0, 0, True, quant="fp8")
    rows = [row for _, row in worker.run([task], device) if row is not None]
    assert len(rows) == 2 * (5 + 1) * 3 and not any("error" in row for row in rows)
    assert {row["quant"] for row in rows} == {"fp8"}
    assert all(row["us"] > 0 for row in rows if row["by"] == "XLA")
    assert sum("fp8, rows" in row["description"] for row in rows) == 2 * (4 + 1) * 3


def test_ops_need_a_device_that_runs_kernels(monkeypatch):
    from dualinfer.bench.torch import ops as bench_ops

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="run on CUDA devices from Ampere on, and this is"):
        bench_ops.bench_cases("float32")


def test_ops_are_found_by_part_of_their_name(offered):
    assert [case.name for case in find_cases("torch", "float32", "mat")] == ["matmul"]
    assert len(find_cases("torch", "float32", None)) == 1
    with pytest.raises(ArgumentError, match=r"no op's name holds 'norm'\. Ops: matmul\."):
        find_cases("torch", "float32", "norm")


def test_a_process_that_dies_costs_the_row_it_was_at(monkeypatch, tmp_path):
    """A stand-in for the process: task 1 kills it, task 3 ends it by plan, chatter is passed on."""
    script = tmp_path / "worker"
    script.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(
            """
            import json, os, sys
            tasks = json.load(open(sys.argv[-1]))["tasks"]
            say = lambda message: print("BENCH " + json.dumps(message), flush=True)
            print("chatter", flush=True)
            for i, task in enumerate(tasks):
                if task["batch"] == 1:
                    os._exit(9)
                say(task | {"ok": os.getpid()})
                last = task["batch"] == 3 or i + 1 == len(tasks)
                say({"done": i + 1, "ended": last})
                if last:
                    os._exit(int(task["batch"] == 3))
            """
        )
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    tasks = [Task("decode", "torch", "tiny", None, i, 8, 8, 1, True) for i in range(6)]
    seen: list[dict] = []
    rows = runs.run_tasks(tasks, seen.append)
    assert rows == seen
    assert [row["batch"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert ["error" in row for row in rows] == [False, True, False, False, False, False]
    assert "code 9" in rows[1]["error"]
    processes = [row.get("ok") for row in rows]
    assert processes[2] == processes[3] != processes[4] == processes[5]


@pytest.mark.parametrize("kind", ["prefill", "forward"])
@pytest.mark.parametrize(("flops", "nbytes", "seconds"), [(600, 10, 6.0), (1, 400, 4.0)])
def test_devices_that_share_a_pass_have_the_limit_of_all(kind, flops, nbytes, seconds):
    call = lambda *args: lambda: None  # noqa: E731
    system: Any = SimpleNamespace(prefill=call, forward=call, facts=dict)
    facts = {"weight_bytes": nbytes, "read_bytes": lambda tokens: nbytes, "once": None}
    counts: Any = SimpleNamespace(flops=lambda *args, **kwargs: flops, **facts)
    device: Any = SimpleNamespace(start_peak=lambda: None, peak_bytes=lambda: 0)
    limits = Limits("torch", "cpu", "float32", read_bandwidth=100.0, matrix_rate=100.0)
    for tp in (1, 2):
        task = Task(kind, "torch", "tiny", "float32", 1, 4, 0, 3, True, tp)
        row = measure(task, SimpleNamespace(vocab=9), counts, system, device, limits)  # pyright: ignore
        assert row["limit_ms"] == pytest.approx(seconds / tp * 1e3)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_processes_share_a_model_and_one_speaks(tmp_path):
    tasks = [Task("decode", "torch", "tiny", "float32", 1, 8, 4, 1, True, tp) for tp in (2, 1)]
    one, two = runs.run_tasks(tasks, lambda row: None)
    assert (one["tp"], two["tp"]) == (1, 2)
    assert "error" not in one and "error" not in two
    assert two["system_facts"]["parameter_bytes"] < 0.6 * one["system_facts"]["parameter_bytes"]
    assert two["weight_bytes"] == one["weight_bytes"] and two["system_facts"]["load_seconds"] > 0
    limits = [row["limit_ms"] * row["read_bandwidth"] for row in (one, two)]
    assert limits[0] == pytest.approx(2 * limits[1])
    labels = list(make_table("decode", [one, two]).columns[0].cells)
    assert labels == ["dualinfer torch", "dualinfer torch on 2"]


@pytest.mark.parametrize("models", [1, 2])
def test_a_table_fits_a_terminal_of_80_columns(models):
    """What is the same in all rows, and what has no room, is said below."""
    about = {"kind": "decode", "dtype": "bfloat16", "batch": 1, "tokens": 128, "tp": 1}
    figures = {"ms_per_token": 5.1, "tokens_per_s": 1960.0, "of_limit": 0.95, "weight_bytes": 1e10}
    figures |= {"kv_bytes": 1e8, "first_token_ms": 208.5, "peak_bytes": None if models == 1 else 1}
    rows = [
        about | figures | {"system": system, "model": model, "kernels": False}
        for model in ("gpt-neo-1.3b", "llama-3-8b")[:models]
        for system in ("torch", "hf-compile")
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(make_table("decode", rows, 80))
    shown = console.file.getvalue()
    assert "…" not in shown and "dualinfer torch, no kernels" in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())
    assert "ms/token" in shown and "tokens/s" in shown
    assert ("model gpt-neo-1.3b" in shown) == (models == 1)
    assert ("no room for: " in shown) == (models == 2)
    assert "peak" not in shown or models == 2


def test_a_shape_that_the_host_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr(worker, "host_free_bytes", lambda: 1000)
    monkeypatch.setattr(worker, "opened", lambda *args: pytest.fail("weights were made"))
    device: Any = SimpleNamespace(
        kind="cpu", name="CPU", backend="torch", settle=lambda: None, limits=lambda dtype: None
    )
    task = Task("decode", "torch", "tiny", "float32", 1, 4, 2, 1, True)
    ((_, row), _) = worker.run([task], device)
    assert row and "It is a shape for a GPU" in row["error"]


def test_bench_ops_names_the_command_of_a_whole_model():
    result = bench("ops", "prefill")
    assert result.exit_code == 1 and "dualinfer bench prefill" in result.stderr


def test_json_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "out.json"
    for rows in ([], [{"device": "CPU"}]):
        runs.write_json(path, runs.document("decode", rows, ["bench"]))
        assert json.loads(path.read_text())["rows"] == rows
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_step_of_a_decoder_reads_no_weight_of_its_encoder():
    """Of a T5: its decoder's layers and head, and what the encoder left behind, each step."""
    spec, table = open_model("flan-t5-large:2").describe()
    plan = make_load_plan(table, TableSource(table, "float16", "no values"))
    counts = Counts.of(plan, "float16")
    embed, inner, ffn = 1024, 16 * 64, 2816
    layer = 4 * embed * inner + 2 * embed * inner + 3 * embed * ffn  # without keys across
    small = 2 * (16 * 257 + 3 * embed) + embed
    assert counts.weight_bytes == 2 * (2 * layer + 32128 * embed + small)
    batch, prompt, new_tokens = 3, 40, 6
    own = sum(range(1, new_tokens)) / (new_tokens - 1)
    kept = prompt * inner * 2 * 2 + 4 / 1  # with their number, int32
    expected = batch * 2 * (own * inner * 2 * 2 + kept)
    assert counts.kv_bytes("float16", batch, prompt, new_tokens) == pytest.approx(expected)
    assert counts.once is not None and spec.encoder is not None
    read = 2 * (4 * embed * inner + 3 * embed * ffn) + 2 * 2 * embed * inner
    assert counts.once.body == read


@pytest.mark.slow
def test_an_estimate_reads_the_compiled_program(tmp_path, monkeypatch):
    """Which holds the weights and the cache as they were counted, and little beside."""
    tpu = pytest.importorskip("dualinfer.bench.jax.tpu")
    if tpu.library() is None:
        pytest.skip("`make test-tpu` brings libtpu")
    asked = ("decode", "--shape", "gpt2:1", "--prompt", 100, "--new-tokens", 2, "--quant", "int8")
    file, sheet = tmp_path / "rows.json", ("--device", "tpu-v5e", "--estimate")
    shown = bench(*asked, *sheet, "--compile", "--json", file)
    assert shown.exit_code == 0, shown.output
    assert "by the compiled program of one chip, not measured" in shown.stdout
    (row,) = json.loads(file.read_text())["rows"]
    made, cache = row["compiled"], 2 * 12 * 128 * 64 * 2  # of the bucket of 102 tokens
    assert row["held_bytes"] + cache <= made["argument_bytes"] < 1.1 * row["held_bytes"] + cache
    assert made["temp_bytes"] < 0.2 * made["argument_bytes"]
    assert made["kernels"] >= 6 and made["accessed_bytes"] > row["weight_bytes"]
    assert row["flops"] < made["flops"] < 1.5 * row["flops"]
    assert made["cycles"] > 0
    monkeypatch.setattr(tpu, "chips", lambda name: 1 / 0)  # any error is the row's
    shown = bench(*asked, *sheet, "--compile", "--no-kernels", "--json", file)
    assert shown.exit_code == 0, shown.output
    failed = {"by": "xla", "error": "division by zero"}
    assert json.loads(file.read_text())["rows"] == [row | {"compiled": failed}]


def test_an_estimate_counts_bytes_and_flops_against_the_data_sheet(tmp_path, monkeypatch):
    """Of Llama 3 8B, by hand: every matrix but the embedding once, and 32 heads of 32 layers."""
    file, sheet = tmp_path / "rows.json", ("--device", "tpu-v5e", "--estimate")
    asked = ("decode", "--shape", "llama-3-8b", "--prompt", 1000, "--new-tokens", 3, "--tp", 4)
    shown = bench(*asked, *sheet, "--json", file)
    assert shown.exit_code == 0 and "computed from the data sheet, not measured" in shown.stdout
    (row,) = json.loads(file.read_text())["rows"]
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    matrices, norms = 32 * layer + 128256 * 4096, 65 * 4096
    assert row["weight_bytes"] == 2 * (matrices + norms)
    assert row["kv_bytes"] == 1000.5 * 32 * 2 * 1024 * 2  # the mean of two steps
    assert row["flops"] == 2 * matrices + 32 * 4 * 4096 * 1002
    read = (row["weight_bytes"] + row["kv_bytes"]) / (4 * 819e9) * 1e3
    assert row["computed"] and row["fits"] and row["limit_ms"] == pytest.approx(read)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "")  # which means none, whatever is installed
    for more, why in (
        (sheet[:2], "add --estimate"),
        (sheet[2:], "needs --device"),
        (("--compile",), "Add --estimate"),
        ((*sheet, "--compile"), "needs libtpu"),
        ((*sheet, "--no-kernels"), "add --compile"),
        ((*sheet, "--kernels", "xla"), "add --compile"),
        ((*sheet, "--compile", "--kernels", "triton"), "is of GPUs"),
    ):
        assert why in " ".join(bench("decode", *more).stderr.split())
    monkeypatch.setattr("dualinfer.bench.estimate.find_spec", lambda name: None)
    assert "needs JAX" in " ".join(bench("decode", *sheet, "--compile").stderr.split())
    assert bench(*asked[:3], *sheet).exit_code == 0
