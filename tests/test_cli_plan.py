"""dualinfer plan: the table and its figures; dualinfer launch: real processes."""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import dualinfer
from dualinfer import CheckpointNotFoundError
from dualinfer.api import quantize_checkpoint
from dualinfer.backends.torch.module.autotp.plan import describe, make_plan
from dualinfer.backends.torch.module.autotp.surgery import split_module
from dualinfer.checkpoint.described.hf_config import read_written
from dualinfer.cli import main as cli
from dualinfer.cli.devices import plan_folder
from dualinfer.cli.plan_table import make_plan_table
from dualinfer.config import make_config
from dualinfer.model.families import describe_model

from .cases import make_model
from .cases.mixtures import CASES
from .checkpoints import write_llama
from .ranks import ROOT


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*arguments, **options):
        return CliRunner().invoke(cli.app, [str(a) for a in arguments], **options)

    return invoke


def table_of(name, size, dtype="float32", **options):
    config = make_model(name).config
    _, table = describe_model(config.to_dict(), [type(make_model(name)).__name__])
    return make_plan_table(table, size, dtype, **{"grain": 64, **options})


def row_of(table, name):
    return next(row for row in table.rows if row.name == name)


def test_equal_layers_are_one_row_each_and_shapes_are_those_of_devices():
    """Of a Llama of 6 heads and 3 KV heads of 80 over 4 devices: two share a KV head."""
    table = table_of("llama-gqa", 4)
    row = row_of(table, "layers.0-2.qkv.weight")
    assert (row.axes, row.split, row.count) == (("q+k+v", "embed"), "q+k+v", 3)
    assert (row.shape, row.size) == ((12 * 80, 96), 3 * 4 * 12 * 80 * 96)
    assert row.shapes == ((3 * 80, 96), (3 * 80, 96), (4 * 80, 96), (4 * 80, 96))
    norm = row_of(table, "layers.0-2.attn_norm.weight")
    assert norm.split is None and norm.shapes == ((96,),) * 4
    assert table.notes == ("KV heads are fewer than devices, so that several hold the same one",)
    assert table_of("llama-gqa", 3).notes == ()  # a KV head each


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "bloom", "gemma2", "bert", "gptj", "opt"])
@pytest.mark.parametrize("equal", [False, True])
def test_bytes_are_those_of_the_shapes(name, equal):
    one = table_of(name, 1)
    parameters = sum(p.numel() for p in make_model(name).parameters())
    assert one.whole == one.devices[0].weights == 4 * parameters
    assert (one.sums, one.gathers) == (0, 0)
    many = table_of(name, 3, "bfloat16", equal=equal)
    assert many.whole == 2 * parameters
    for rank, part in enumerate(many.devices):
        assert part.weights == 2 * sum(
            row.count * torch.Size(row.shapes[rank]).numel() for row in many.rows
        )
    assert len({part.weights for part in many.devices}) == 1 or not equal
    assert sum(part.weights for part in many.devices) >= many.whole


def test_cache_is_the_engines():
    one = table_of("llama-gqa", 1)
    with dualinfer.init_inference(
        make_model("llama-gqa"), dtype="fp32", replace_with_kernel_inject=True
    ) as engine:
        assert engine.runner.cache_bytes_for(1, 1024) == 1024 * one.devices[0].cache
    assert [part.cache for part in table_of("llama-gqa", 3).devices] == [
        one.devices[0].cache // 3
    ] * 3
    assert table_of("bert", 2).devices[0].cache == 0


@pytest.mark.parametrize(("name", "sums", "gathers"), [("llama-gqa", 7, 1), ("bert", 5, 0)])
def test_collectives_are_two_a_layer_and_the_embeddings(name, sums, gathers):
    table = table_of(name, 2, "float16")
    assert (table.sums, table.gathers) == (sums, gathers)
    assert table.sum_size == 2 * make_model(name).config.hidden_size


def test_collectives_of_layers_of_other_builds():
    """LongCat's mixture is summed beside the MLP; MobileBERT has several MLPs a layer.

    And T5Gemma's encoder has a table of its own, of which devices share the rows.
    """
    longcat = CASES["longcat_flash with more experts"].make_config()
    bert = hf.MobileBertConfig(num_hidden_layers=3, num_feedforward_networks=4)
    half = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100, "head_dim": 16}
    half |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
    t5gemma = hf.T5GemmaConfig(encoder=half, decoder=half)
    for config, name, sums in (
        (longcat, "LongcatFlashForCausalLM", 1 + 5 * longcat.num_layers),
        (bert, "MobileBertModel", 1 + 3 * 5),
        (t5gemma, "T5GemmaForConditionalGeneration", 2 + 2 + 3),
    ):
        _, table = describe_model(config.to_dict(), [name])
        assert make_plan_table(table, 2, "float32", grain=1).sums == sums


def test_plan_prints_what_goes_where(run, tmp_path, monkeypatch):
    folder = write_llama(tmp_path, 101)
    (folder / "model.safetensors").unlink()  # a config is enough
    result = run("plan", folder, "--tp", 4)
    assert result.exit_code == 0, result.output
    text = re.sub(r"\s+", " ", result.stdout)
    assert "LlamaForCausalLM in float16 on 4 devices, torch" in text
    assert "layers.0-1.qkv.weight [96, 48] [24 | 24 | q+k+v 2 x 9.0 KiB 32 | 32, 48]" in text
    assert "embed.weight [101, 48] [26 | 25 | vocab 9.5 KiB 25 | 25, 48]" in text
    assert "final_norm.weight [48] [48] replicated 96 B" in text
    assert "…" not in text and max(map(len, result.stdout.splitlines()[:24])) <= 80
    assert not re.search(r"[ \t]$", result.stdout, re.MULTILINE)
    assert "all devices together: " in text and "the rest being what several hold" in text
    assert "per token: 5 sums of 96 B over the devices and one gather of the logits" in text
    assert "note: KV heads are fewer than devices" in text
    meaning = "26 | 25 | 25 | 25 in a shape: 26 on device 0, 25 on device 1 and so on"
    assert text.count(meaning) == 1
    assert max(map(len, result.stdout.splitlines())) <= 80
    on_jax = re.sub(r"\s+", " ", run("plan", folder, "--tp", 4, "--backend", "jax").stdout)
    assert "note: padding with zeros, over all devices: " in on_jax
    assert "[26, 48]" in on_jax
    many = " ".join(run("plan", folder, "--tp", 6).stdout.split())
    assert "5x17 | 1x16 in a shape: 17 on the first 5, 16 on 1 more and so on" in many
    alone = run("plan", folder, "--dtype", "bf16").stdout
    assert "in bfloat16 on one device" in alone and "sums" not in alone
    assert "counted in" not in alone and " in a shape" not in alone
    monkeypatch.setenv("COLUMNS", "37")
    narrow = run("plan", folder, "--tp", 4).stdout
    assert max(map(len, narrow.splitlines())) <= 37
    letters, all_of_them = (sorted(re.sub(r"[\s─]", "", x)) for x in (narrow, result.stdout))
    assert letters == all_of_them


@pytest.mark.parametrize(
    ("own", "asked", "counted", "why"),
    [
        ("bfloat16", None, "bfloat16", "the checkpoint's own"),
        ("float32", "auto", "float16", "the checkpoint is float32"),
        (None, None, "float16", "config.json names no dtype"),
        ("bfloat16", "fp32", "float32", None),
    ],
)
def test_plan_counts_in_the_dtype_that_a_gpu_would_take(run, tmp_path, own, asked, counted, why):
    folder = write_llama(tmp_path, 101)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": own}))
    options = ["--dtype", asked] if asked else []
    text = " ".join(run("plan", folder, "--tp", 2, *options).stdout.split())
    assert f"LlamaForCausalLM in {counted} on 2 devices" in text
    note = f"note: counted in {counted}, as a GPU takes it ({why}); `--dtype NAME` asks for another"
    assert (note in text) == (why is not None) == ("counted in" in text)


def test_plan_splits_by_the_grain(run, tmp_path):
    folder = write_llama(tmp_path, 130)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 130}))
    wide = {"env": {"COLUMNS": "120"}}
    shown = run("plan", folder, "--tp", 2, **wide).stdout
    assert "[48, 64 | 66]" in shown and "[64 | 66, 48]" in shown
    by_one = run("plan", folder, "--tp", 2, "--tp-grain-size", 1, **wide).stdout
    assert "[48, 65]" in by_one and "[65, 48]" in by_one


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ("--tp", "200"), "vocab of 101, which is less than one for each of the 200 devices"),
        ({}, ("--tp", "2", "--dtype", "int8", "--quant", "int4"), "--dtype int8 asks for"),
        ({}, ("--tp", "2", "--quant", "int3"), "--quant int3: input should be 'int8', 'int4'"),
        (
            {"model_type": "emu3_text_model"},
            ("--tp", "2", "--quant", "int4"),
            "--quant int4: a plan of module mode",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ("--tp", "2", "--quant", "int4"),
            "quant is given, and the weights of",
        ),
        ({"model_type": "t5"}, ("--tp", "2"), "Module mode does not know it either"),
        ({"model_type": "t5"}, ("--tp", "2", "--backend", "jax"), "shows what module mode makes"),
        ({"rope_parameters": {"rope_type": "x"}}, ("--tp", "2"), "rope"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            ("--tp", "2"),
            "hqq",
        ),
    ],
)
def test_plan_fails_with_one_message(run, tmp_path, change, arguments, message):
    folder = write_llama(tmp_path, 101)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    result = run("plan", folder, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints with a head of their own and with a tied one, and each in int4."""
    top = tmp_path_factory.mktemp("plans")
    for name, groups in (("llama-gqa", 2), ("gemma2", 1)):
        make_model(name).save_pretrained(top / name)
        out = str(top / f"{name}-int4")
        quant = {"weight": {"num_bits": 4, "q_groups": groups}}
        quantize_checkpoint(top / name, out, quant, None, lambda _: None)
    return top


def planned(folder, **fields):
    settings = make_config({"backend": "torch", "dtype": "bf16", **fields}, {})
    return plan_folder(folder, read_written(folder), settings, "bfloat16")[0]


def loaded(folder, **fields):
    parallel = {"tp_size": fields.pop("tp_size", 1), "timeout": 60}
    fields |= {"dtype": "bf16", "tensor_parallel": parallel}
    with dualinfer.init_inference(folder, **fields) as engine:
        return engine.report()


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8", "nvfp4", None])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_bytes_of_quantized_weights_are_those_that_an_engine_reports(name, quant, folders):
    """Quantized while loading, or, without `quant`, of a checkpoint that is quantized already."""
    folder = folders / (name if quant else f"{name}-int4")
    plan, report = planned(folder, quant=quant), loaded(folder, backend="torch", quant=quant)
    assert plan.whole == plan.devices[0].weights == report.parameter_bytes
    assert plan.weights == report.weights and report.weights["head"] == "int8, rows"


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("quantized", [False, True])
def test_devices_hold_the_quantized_bytes_that_the_plan_says(quantized, folders, crew):
    folder = folders / ("llama-gqa-int4" if quantized else "llama-gqa")
    quant = None if quantized else "int4"
    for backend in ("torch", "jax"):
        fields = {"backend": backend, "quant": quant}
        plan = planned(folder, tensor_parallel={"tp_size": 2}, **fields)
        if backend == "jax":
            held = [loaded(folder, tp_size=2, **fields).parameter_bytes] * 2
        else:
            held = crew.run(bytes_of, folder, fields, world=2)
        assert [part.weights for part in plan.devices] == held


def bytes_of(folder, fields):
    return loaded(folder, tp_size=2, **fields).parameter_bytes


def test_a_plan_of_weights_to_be_quantized_needs_none(run, folders, tmp_path):
    """Their config says what they are; dtype=int8 asks for the same as quant."""
    shutil.copy(folders / "llama-gqa" / "config.json", tmp_path)
    assert planned(tmp_path, quant="int4") == planned(folders / "llama-gqa", quant="int4")
    shutil.copy(folders / "llama-gqa-int4" / "config.json", tmp_path)
    with pytest.raises(CheckpointNotFoundError):  # these say themselves how they are quantized
        planned(tmp_path)
    shown = run("plan", folders / "llama-gqa", "--tp", 1, "--quant", "int8").stdout
    assert shown == run("plan", folders / "llama-gqa", "--tp", 1, "--dtype", "int8").stdout
    assert "weights, head: int8, rows" in shown and "weights, float16: " in shown


def test_plan_of_a_quantized_model_says_that_it_needs_the_weights(run, tmp_path):
    folder = write_llama(tmp_path, 101)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    result = run("plan", folder, "--tp", 2)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "quantized, so that a plan needs its weights" in said
    assert said.endswith("Copy them into that folder, and plan again.")


def test_plan_shows_what_module_mode_makes_of_other_models(run, tmp_path):
    sizes = {"vocab_size": 1000, "hidden_size": 96, "intermediate_size": 200}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
    config = hf.NemotronConfig(**sizes, **heads, unheard_of=3)  # which fused mode refuses
    config.architectures = ["NemotronForCausalLM"]
    config.save_pretrained(tmp_path)
    shown = run("plan", tmp_path, "--tp", 3).stdout
    assert "NemotronForCausalLM in float16 on 3 devices in module mode" in shown
    lines = shown.splitlines()
    for path, kind, size in (("self_attn.q_proj", "column", 96), ("mlp.down_proj", "row", 200)):
        bias = 96 if kind == "row" else size
        held = f"{2 * (96 * size + bias) / 1024:.1f} KiB"
        at = lines.index(f"2 x model.layers.*.{path}, {held} each")
        assert f" becomes {kind}: " in lines[at + 1]
    parameters = sum(p.numel() for p in hf.NemotronForCausalLM(config).parameters())
    text = " ".join(shown.split())
    assert f", of a model of {2 * parameters / 1024:.1f} KiB, the rest being" in text
    assert "note: counted in float16, as a GPU takes it" in text
    assert "64 | 64 | 72 along" not in text and "320 | 320 | 360 in a shape: 320 on" in text
    assert max(map(len, lines)) <= 80
    by_one = run("plan", tmp_path, "--tp", 3, "--dtype", "fp32", "--tp-grain-size", 1).stdout
    assert "[67 | 67 | 66, 96]" in by_one and "NemotronForCausalLM in float32" in by_one


@pytest.mark.parametrize("name", ["mixtral", "qwen3-tied"])
def test_bytes_of_a_split_module_are_those_that_ranks_keep(name):
    """Of experts, of norms by head and of tied weights too."""
    sizes = {"vocab_size": 130, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    if name == "mixtral":
        kind, config = hf.MixtralForCausalLM, hf.MixtralConfig(**sizes, **heads)
    else:
        config = hf.Qwen3Config(**sizes, **heads, head_dim=8, tie_word_embeddings=True)
        kind = hf.Qwen3ForCausalLM
    with torch.device("meta"):
        module = kind(config)
    found = describe(module, 3)
    assert found.whole == sum(p.numel() for p in module.parameters())
    assert bool(found.notes) == (name == "qwen3-tied")
    plan, _ = make_plan(module, 3, 64, {})
    for rank, held in enumerate(found.by_rank):
        part = copy.deepcopy(module)
        split_module(part, plan.changes, rank, NoSeam())
        assert held == sum(p.numel() for p in part.parameters())


class NoSeam:
    """What joins nothing: no pass is run."""

    def sum(self, x):
        raise NotImplementedError

    def join_last(self, x, widths):
        raise NotImplementedError


CODE = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.mark.parametrize("model_type", ["evilmodel", "emu3_text_model"])
def test_plan_runs_no_code_of_the_folder_and_asks_for_none(run, tmp_path, monkeypatch, model_type):
    """With "y" on the terminal, and a name of attention that HF would fetch from the hub."""
    from transformers.integrations import hub_kernels

    def fetch(*args, **kwargs):
        raise AssertionError("HF went for a kernel")

    monkeypatch.setattr(hub_kernels, "get_kernel", fetch, raising=False)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = {
        **hf.Emu3TextConfig(**sizes).to_dict(),
        "model_type": model_type,
        "architectures": ["Emu3ForCausalLM"],
        "auto_map": {"AutoConfig": "evil.C"},
        "_attn_implementation": "attacker/kernel",
        "attn_implementation": "attacker/kernel",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(CODE)
    result = run("plan", tmp_path, "--tp", 2, input="y\ny\n")
    assert not (tmp_path / "ran").exists()
    if model_type == "emu3_text_model":
        assert "Emu3ForCausalLM in float16 on 2 devices in module mode" in result.stdout
    else:
        assert result.exit_code == 1 and "trust_remote_code=True" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["pipeline"]}, "has no model pipeline"),
        ({"architectures": ["AutoModel"]}, "has no model AutoModel"),
        ({"architectures": "Emu3ForCausalLM"}, "architectures"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": "[/red]"}, "[/red]"),
    ],
)
def test_plan_of_module_mode_makes_models_alone(run, tmp_path, change, message):
    config = {**hf.Emu3TextConfig().to_dict(), "architectures": ["Emu3ForCausalLM"], **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("plan", tmp_path, "--tp", 2)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and message in " ".join(result.stderr.split())


def test_plan_shows_names_as_they_are(run, tmp_path):
    """Neither rich's markup nor a terminal's codes in a field's name come into effect."""
    folder = write_llama(tmp_path, 101)
    config = json.loads((folder / "config.json").read_text())
    for name in ("[/red]", "[bold]x", ":smile:", "\x1b[31mred", "\ud800"):
        (folder / "config.json").write_text(json.dumps({**config, name: "[/bold] " + name}))
        result = run("plan", folder, "--tp", 2)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        shown = name.encode("unicode_escape").decode()
        assert result.exit_code in (0, 1) and shown in result.stdout + result.stderr
        assert "\x1b" not in result.stdout + result.stderr


def test_plan_of_very_many_devices_answers_at_once(run, tmp_path):
    folder = write_llama(tmp_path, 101)
    result = run("plan", folder, "--tp", 10**9)
    assert result.exit_code == 2 and "1024" in result.stderr


def test_plan_says_what_is_streamed_and_how_long_it_takes(run, tmp_path):
    make_model("llama-gqa", num_hidden_layers=5).config.save_pretrained(tmp_path)
    table = table_of("llama-gqa", 1)
    layer = sum(row.size // row.count for row in table.rows if ".0-2." in row.name)
    asked = "plan", tmp_path, "--tp", 1, "--dtype", "float32"
    result = run(*asked, "--resident-layers", 1, "--host-rate", 0.001)
    matrices = layer - sum(
        r.size // r.count for r in table.rows if "norm" in r.name and r.count > 1
    )
    text = " ".join(result.output.split())
    assert f"the matrices of 4 of 5 layers, {4 * matrices / 2**20:,.1f} MiB, stay" in text
    assert f"at least {4 * matrices / 1e3:,.1f} ms at 0.001 GB/s" in text
    text = " ".join(run(*asked, "--device-memory", 1000).output.split())
    assert "all 5 layers fit on the device" in text and "per token" not in text.partition("fit")[2]
    result = run(*asked, "--host-rate", 3)
    assert result.exit_code == 1 and "Pass --resident-layers or" in " ".join(result.stderr.split())


def test_plan_needs_a_folder(run, tmp_path):
    result = run("plan", tmp_path / "nowhere", "--tp", 2)
    assert result.exit_code == 1 and "does not exist" in " ".join(result.stderr.split())


LOOPBACK = "0100007F"  # 127.0.0.1 in /proc/net/tcp; of tcp6 nothing is wanted

GENERATE = """
import json, os, sys
import torch
import dualinfer
from tests.ranks import listeners
from dualinfer import embedded
from dualinfer.checkpoint.described.tokenizer import load_tokenizer

torch.set_num_threads(1)
assert sys.argv[1:] == ["--seed", "3", "--", "--tp"], sys.argv
tokenizer = load_tokenizer(embedded.path())
prompt = [tokenizer("import os\\nimport ")["input_ids"]]
parallel = {"tp_size": 2, "timeout": 60}
with dualinfer.init_inference(embedded.path(), dtype="fp32", tensor_parallel=parallel) as engine:
    ids = engine.generate(prompt, max_new_tokens=12, do_sample=False)
    if os.environ["RANK"] == "0":
        print(tokenizer.decode(ids[0]))
    sockets = {"own": listeners(), "launcher": listeners(os.getppid())}
    os.write(2, (json.dumps(sockets) + "\\n").encode())  # at once: two processes write
    if os.environ["RANK"] == "0":
        store = torch.distributed.distributed_c10d._get_default_store().underlying_store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        kept = [store.get(key) for key in store.list_keys()]
        assert kept and not [value for value in kept if value[:1] == b"\\x80"], kept
"""

DYING = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
if os.environ["RANK"] == "2":  # it fails by what happened there, and may say so
    time.sleep(0.3)
    print("rank 1 is gone", file=sys.stderr)
    os.kill(os.getpid(), 9)
time.sleep(60)
"""

WAITING = """
import os, time
os.write(1, b"up\\n")  # at once, whatever the other process writes
time.sleep(60)
"""


def launch(tmp_path, text, *arguments, tp=2):
    """The command as a process of its own."""
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "dualinfer", "launch", "--tp", str(tp), "--oversubscribe"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, str(script), *arguments], env=environment, **pipes)


def test_launch_runs_one_model_in_two_processes_that_listen_on_the_loopback_alone(run, tmp_path):
    process = launch(tmp_path, GENERATE, "--seed", "3", "--", "--tp")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said = [json.loads(line) for line in err.splitlines() if line.startswith('{"own"')]
    assert len(said) == 2, err
    for sockets in said:
        assert sockets["own"] and set(sockets["own"]) == {LOOPBACK}  # gloo's
        assert sockets["launcher"] == [LOOPBACK]  # the store
    alone = run("generate", "import os\nimport ", "--max-new-tokens", 12, "--dtype", "fp32")
    assert out == alone.stdout


def test_a_process_that_dies_ends_the_job_with_its_rank_and_code(tmp_path):
    start = time.monotonic()
    process = launch(tmp_path, DYING, tp=3)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "rank 1 is gone" in err
    assert "error: rank 1 of 3 ended with exit code 7, rank 2 with SIGKILL, and the others" in err
    assert time.monotonic() - start < 30
    assert "Traceback" not in err


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="a job in the background ignores it"
)
def test_ctrl_c_ends_all(tmp_path):
    process = launch(tmp_path, WAITING)
    assert process.stdout.readline() == process.stdout.readline() == "up\n"
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert not any(os.path.exists(f"/proc/{child}") for child in children)


def test_launch_refuses_what_cannot_run(run, tmp_path, monkeypatch):
    missing = run("launch", "--tp", 2, tmp_path / "no.py")
    assert missing.exit_code == 1 and "is no file" in " ".join(missing.stderr.split())
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    many = run("launch", "--tp", 3, tmp_path / "script.py")
    assert many.exit_code == 1
    assert "--tp 3, but this machine has 2 GPUs" in " ".join(many.stderr.split())


def test_launch_needs_torch(run, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr("dualinfer.config.installed._is_installed", lambda module: False)
    result = run("launch", "--tp", 2, tmp_path / "script.py")
    assert result.exit_code == 1
    assert "Install `dualinfer[torch]`" in " ".join(result.stderr.split())
