"""Adapters of peft, merged while weights are loaded, against peft's own forward."""

import json
import shutil
import sys
import warnings

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dualinfer
from dualinfer import embedded
from dualinfer.checkpoint.described.hf_config import read_config
from dualinfer.checkpoint.described.tokenizer import load_tokenizer
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.checkpoint.views.adapted import AdaptedSource
from dualinfer.checkpoint.views.adapters import open_adapter
from dualinfer.cli.main import app
from dualinfer.errors import (
    BackendNotAvailableError,
    CheckpointError,
    ConfigError,
    ModelError,
    StaleWeightsError,
)
from dualinfer.model.families import describe_model
from dualinfer.model.peft_modules import MERGING
from dualinfer.quantization import read_quantization
from dualinfer.quantization.meaning import dequantize
from dualinfer.system.terminal import without_controls
from tests.adapters import IDS, QUIET, adapt, logits, relative, wanted
from tests.cases import make_model
from tests.models import BACKENDS, slow_but

pytestmark = [*QUIET, pytest.mark.usefixtures("greedy")]
KINDS = {
    "lora": ("llama-gqa", {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 8}),
    "rslora": (
        "llama-gqa",
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, r"layers\.1.*up_proj": 3},
            "alpha_pattern": {r"layers\.0.*v_proj": 5, "model.layers.0.self_attn.v_proj": 3},
        },
    ),
    "dora": ("llama-gqa", {"target_modules": ["q_proj", "v_proj", "o_proj"], "use_dora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "embedding": ("gpt2", {"target_modules": ["c_attn", "wte"]}),
    "embedding dora": ("gpt2", {"target_modules": ["wte"], "use_dora": True}),
    "head": ("gpt2", {"target_modules": ["c_fc"], "modules_to_save": ["lm_head"], "bias": "all"}),
    "tied": (
        "qwen2",
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    ),
    "lora bias": ("opt", {"target_modules": ["q_proj", "fc1"], "lora_bias": True}),
    "fused": ("bloom", {"target_modules": ["query_key_value"], "bias": "lora_only"}),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.mark.parametrize(
    "case", ["gte-sequence", pytest.param("jina-sequence", marks=pytest.mark.slow)]
)
def test_projections_that_files_join_are_adapted_and_quantized(case, tmp_path):
    """As those of a live module, which has each of them by itself."""
    model = make_model(case)
    model.save_pretrained(tmp_path / "base")
    live = {"replace_with_kernel_inject": True, "quant": "int8"}
    found, _ = logits(tmp_path / "base", quant="int8")
    np.testing.assert_array_equal(found, logits(model, **live)[0])
    adapted = adapt(model, target_modules=["k_proj", "v_proj", "o_proj"], bias="all")
    adapted.save_pretrained(tmp_path / "adapter")
    found, _ = logits(tmp_path / "base", adapter=tmp_path / "adapter")
    assert relative(found, wanted(adapted)) < 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind: the model's folder, the adapter's, the live PeftModel, and its logits."""
    made = {}

    def get(kind):
        if kind not in made:
            name, options = KINDS[kind]
            base, adapter = (tmp_path_factory.mktemp(part) for part in ("base", "adapter"))
            model = make_model(name)
            model.save_pretrained(base)
            plain = wanted(model)
            live = adapt(type(model).from_pretrained(base), **options)
            live.save_pretrained(adapter)
            assert relative(plain, wanted(live)) > 1e-2
            made[kind] = base, adapter, live, wanted(live)
        return made[kind]

    return get


@pytest.mark.parametrize("kind", slow_but(["rslora", "conv1d", "embedding", "head", "tied"], KINDS))
def test_an_adapter_beside_a_model_gives_what_peft_gives(folders, kind, backend):
    base, adapter, _, expected = folders(kind)
    found, notes = logits(base, adapter=adapter, backend=backend)
    assert relative(found, expected) < 1e-5
    assert any(f"merged: {adapter}, into" in note for note in notes)


@pytest.mark.parametrize("kind", slow_but(["dora", "head"], KINDS))
def test_a_live_model_with_adapters_gives_what_it_gives(folders, kind, backend):
    _, _, live, expected = folders(kind)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    found, _ = logits(live, backend=backend, replace_with_kernel_inject=True)
    assert relative(found, expected) < 1e-5
    assert all(torch.equal(before[n], t) for n, t in live.state_dict().items())


def test_an_adapters_folder_stands_for_its_model(folders, tmp_path, backend):
    base, adapter, _, expected = folders("lora")
    assert relative(logits(adapter, backend=backend)[0], expected) < 1e-5
    for folder in (base, adapter):  # both in one folder, as transformers loads them
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert relative(logits(tmp_path, backend=backend)[0], expected) < 1e-5
    found, _ = logits(
        make_model("llama-gqa", hidden_act="silu"),
        checkpoint=tmp_path,
        backend=backend,
        replace_with_kernel_inject=True,
    )
    assert relative(found, expected) < 1e-5


def test_several_adapters_are_added_each_with_its_factor(folders, tmp_path, backend):
    base, one, _, _ = folders("lora")
    model = peft.PeftModel.from_pretrained(type(make_model("llama-gqa")).from_pretrained(base), one)
    adapt(model, 5, "second", target_modules=["q_proj", "v_proj"], r=2)
    model.add_weighted_adapter(["default", "second"], [0.5, -1.5], "both", "cat")
    model.save_pretrained(tmp_path, selected_adapters=["second"])
    model.set_adapter("both")
    given = {one: 0.5, tmp_path / "second": -1.5}
    found, notes = logits(base, adapter=given, backend=backend)
    assert relative(found, wanted(model)) < 1e-5
    assert any("times 0.5" in note and "times -1.5" in note for note in notes)
    model.base_model.set_adapter(["default", "second"])
    found, _ = logits(base, adapter=[one, tmp_path / "second"], backend=backend)
    assert relative(found, wanted(model)) < 1e-5


def test_factors_of_dora_and_of_what_replaces(folders):
    """An adapter's change is W' - W, whatever makes it, and a factor multiplies it."""
    for kind, name in (("dora", "q_proj.weight"), ("head", "lm_head.weight")):
        base, adapter, _, _ = folders(kind)
        plain = open_checkpoint(base)
        table = _table(base)
        half = AdaptedSource(plain, [open_adapter(adapter, 0.5)], table)
        whole = AdaptedSource(plain, [open_adapter(adapter)], table)
        name = next(n for n in half.merged if n.endswith(name))
        stored = name if name in plain.names() else "transformer.wte.weight"
        before = plain.read(stored)
        middle = (before + whole.read(name)) / 2
        np.testing.assert_allclose(half.read(name), middle, rtol=1e-5, atol=1e-6)
        part = (slice(1, 5), slice(0, 7))
        np.testing.assert_array_equal(whole.read(name, part), whole.read(name)[part])


def _table(folder):
    config = read_config(folder)
    return describe_model(config.to_dict(), config.architectures)[1]


def test_what_is_quantized_after_the_merge_is_the_merged_model(folders, tmp_path, backend):
    base, adapter, _, _ = folders("lora")
    merged = peft.PeftModel.from_pretrained(
        type(make_model("llama-gqa")).from_pretrained(base), adapter
    )
    merged.merge_and_unload().save_pretrained(tmp_path)
    found, _ = logits(base, adapter=adapter, quant="int8", backend=backend)
    expected, _ = logits(tmp_path, quant="int8", backend=backend)
    assert relative(found, expected) < 1e-3


def test_an_adapter_of_a_quantized_model_makes_its_matrices_plain(folders, tmp_path, backend):
    """As QLoRA trains it: the codes' meaning, and the change in float32."""
    base, adapter, _, _ = folders("lora")
    result = CliRunner().invoke(
        app, ["quantize", str(base), str(tmp_path / "q"), "--scheme", "int8"]
    )
    assert result.exit_code == 0, result.output
    found, notes = logits(tmp_path / "q", adapter=adapter, backend=backend)
    matrices = read_quantization(read_config(tmp_path / "q").to_dict())
    matrices = matrices(open_checkpoint(tmp_path / "q"))
    model = type(make_model("llama-gqa")).from_pretrained(base)
    for name, tensor in model.state_dict().items():
        if (matrix := matrices(name)) is not None:
            tensor.copy_(torch.from_numpy(dequantize(matrix)))
    expected = wanted(peft.PeftModel.from_pretrained(model, adapter).eval())
    assert relative(found, expected) < 1e-5
    layers = model.config.num_hidden_layers
    assert f"{2 * layers} quantized matrices are plain here, since adapters change them" in notes


def test_a_merged_model_is_saved_and_read_again(folders, tmp_path, backend):
    base, adapter, _, expected = folders("head")
    with dualinfer.init_inference(
        base, adapter=adapter, backend=backend, dtype="float32"
    ) as engine:
        engine.save_pretrained(tmp_path / "merged")
    found, _ = logits(tmp_path / "merged", backend=backend)
    assert relative(found, expected) < 1e-5


def test_a_live_model_whose_adapters_change_is_refused_until_refresh(folders, backend):
    base, adapter, _, expected = folders("lora")
    live = peft.PeftModel.from_pretrained(
        type(make_model("llama-gqa")).from_pretrained(base), adapter
    )
    options = {"dtype": "float32", "backend": backend, "replace_with_kernel_inject": True}
    with dualinfer.init_inference(live.eval(), **options) as engine:
        first = np.asarray(engine(IDS)[0])
        assert relative(first, expected) < 1e-5
        live.base_model.disable_adapter_layers()
        with pytest.raises(StaleWeightsError, match="other adapters are in use"):
            engine(IDS)
        engine.refresh()
        assert relative(np.asarray(engine(IDS)[0]), wanted(live)) < 1e-5
        live.base_model.enable_adapter_layers()
        live.merge_adapter()
        with pytest.raises(StaleWeightsError):
            engine(IDS)
        engine.refresh()
        assert relative(np.asarray(engine(IDS)[0]), expected) < 1e-5


def test_a_folder_of_a_family_that_fused_mode_does_not_know_takes_adapters(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    few = {"vocab_size": 50, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = hf.Emu3TextConfig(**sizes, **few, pad_token_id=0)
    model = hf.Emu3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    live = adapt(model, target_modules=["q_proj", "down_proj"], use_dora=True)
    live.save_pretrained(tmp_path / "adapter")
    found, notes = logits(tmp_path / "model", adapter=tmp_path / "adapter", backend="torch")
    assert relative(found, wanted(live)) < 1e-5
    assert any("merged:" in note for note in notes)


def test_two_devices_give_what_one_gives(folders):
    base, adapter, _, expected = folders("dora")
    found, _ = logits(base, adapter=adapter, backend="jax", tensor_parallel={"tp_size": 2})
    assert relative(found, expected) < 1e-5


def test_the_command_line_takes_adapters(folders, tmp_path):
    live = adapt(
        hf.AutoModelForCausalLM.from_pretrained(embedded.path(), dtype="float32"),
        target_modules="all-linear",
    )
    live.save_pretrained(tmp_path)
    options = ["--max-new-tokens", "8", "--dtype", "fp32", "--backend", "torch"]
    plain = CliRunner().invoke(app, ["generate", "import os", *options])
    found = CliRunner().invoke(app, ["generate", "import os", *options, "--adapter", str(tmp_path)])
    alone = CliRunner().invoke(app, ["generate", str(tmp_path), "import os", *options])
    assert found.exit_code == 0, found.output
    assert alone.stdout == found.stdout != plain.stdout
    with torch.no_grad():
        tokenizer = load_tokenizer(embedded.path())
        ids = torch.tensor([tokenizer("import os")["input_ids"]])
        text = tokenizer.decode(live.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0])
    assert found.stdout.strip() == without_controls(text).strip()


# --- kinds that peft's own layers merge ----------------------------------------------------------

TWO = {"target_modules": ["q_proj", "down_proj"]}
MADE = {
    "ADALORA": {**TWO, "total_step": 5},
    "BOFT": {**TWO, "boft_block_size": 4, "init_weights": False},
    "C3A": {**TWO, "block_size": 4, "init_weights": False},
    "DEFT": TWO,
    "DELORA": {**TWO, "init_weights": False},
    "FOURIERFT": {**TWO, "n_frequency": 50},
    "GLORA": TWO,
    "GRALORA": TWO,
    "HIRA": TWO,
    "HRA": TWO,
    "IA3": {**TWO, "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "LOHA": TWO,
    "LOKR": TWO,
    "MISS": {**TWO, "r": 4},
    "OFT": {**TWO, "oft_block_size": 4, "r": 0},
    "PEANUT": TWO,
    "PVERA": TWO,
    "RANDLORA": {**TWO, "r": 4},
    "ROAD": {**TWO, "group_size": 4},
    "SHIRA": {**TWO, "r": 2},
    "SUPERTUNING": TWO,
    "UNILORA": TWO,
    "VBLORA": {**TWO, "vector_length": 4, "num_vectors": 16},
    "VERA": TWO,
    "WAVEFT": {**TWO, "n_frequency": 50},
}


@pytest.mark.parametrize(
    "name", slow_but(["ADALORA", "IA3", "LN_TUNING", "LOHA", "OFT", "VERA"], MADE)
)
@pytest.mark.filterwarnings("ignore")  # peft tells of each kind's defaults
def test_kinds_that_peft_merges_are_merged_by_its_layers(name, tmp_path):
    model = make_model("llama-gqa", intermediate_size=96)
    model.save_pretrained(tmp_path / "base")
    live = adapt(model, config=peft.PEFT_TYPE_TO_CONFIG_MAPPING[name](**MADE[name]))
    live.save_pretrained(tmp_path / "adapter")
    expected = wanted(live)
    assert relative(wanted(type(model).from_pretrained(tmp_path / "base")), expected) > 1e-4
    given = {"adapter": tmp_path / "adapter"}
    if name == "IA3":
        given |= {"backend": "jax", "tensor_parallel": {"tp_size": 2}}
    assert relative(logits(tmp_path / "base", **given)[0], expected) < 1e-5
    before = {n: tensor.clone() for n, tensor in live.state_dict().items()}
    found, _ = logits(live, replace_with_kernel_inject=True, backend="torch")
    assert relative(found, expected) < 1e-5
    assert all(torch.equal(before[n], tensor) for n, tensor in live.state_dict().items())


def test_every_kind_that_layers_merge_is_tried():
    assert MADE.keys() == MERGING.keys()


@pytest.mark.parametrize("name", slow_but(["IA3"], ["IA3", "LN_TUNING", "ROAD"]))
@pytest.mark.filterwarnings("ignore")
def test_kinds_that_change_biases_change_them(name, tmp_path):
    model = make_model("opt")
    model.save_pretrained(tmp_path / "base")
    targets = ["final_layer_norm"] if name == "LN_TUNING" else ["q_proj"]
    options = {**MADE[name], "target_modules": targets}
    if name == "IA3":
        options["feedforward_modules"] = []
    live = adapt(model, config=peft.PEFT_TYPE_TO_CONFIG_MAPPING[name](**options))
    live.save_pretrained(tmp_path / "adapter")
    found, _ = logits(tmp_path / "base", adapter=tmp_path / "adapter")
    assert relative(found, wanted(live)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_a_bias_that_changes_by_its_weight_is_refused(tmp_path):
    model = make_model("opt")
    model.save_pretrained(tmp_path / "base")
    live = adapt(model, config=peft.GloraConfig(target_modules=["fc1"]))
    live.save_pretrained(tmp_path / "adapter")
    for given in ({"model": live}, {"model": tmp_path / "base", "adapter": tmp_path / "adapter"}):
        with pytest.raises(CheckpointError, match=r"GLORA changes .*fc1\.bias by the weight"):
            dualinfer.init_inference(**given, replace_with_kernel_inject=True)


@pytest.mark.filterwarnings("ignore")
def test_files_hold_every_tensor_of_their_kind_or_what_makes_it(tmp_path):
    """One that lacks a tensor is refused; VeRA's projection may be drawn, VB-LoRA's logits cut."""
    model = make_model("llama-gqa", intermediate_size=96)
    model.save_pretrained(tmp_path / "base")
    for name, option in [("VERA", "save_projection"), ("VBLORA", "save_only_topk_weights")]:
        options = {**MADE[name], option: name == "VBLORA"}
        own = type(model).from_pretrained(tmp_path / "base")
        live = adapt(own, config=peft.PEFT_TYPE_TO_CONFIG_MAPPING[name](**options))
        live.save_pretrained(tmp_path / name)
        found, _ = logits(tmp_path / "base", adapter=tmp_path / name)
        assert relative(found, wanted(live)) < 1e-5
        tensors = load_file(tmp_path / name / "adapter_model.safetensors")
        first, *others = tensors
        save_file({n: tensors[n] for n in others}, tmp_path / name / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{name}.* .*{first.split('.')[-1]}"):
            dualinfer.init_inference(tmp_path / "base", adapter=tmp_path / name)


def test_kinds_add_up_and_need_peft(folders, tmp_path, monkeypatch):
    base, one, _, _ = folders("lora")
    model = type(make_model("llama-gqa")).from_pretrained(base)
    live = adapt(model, config=peft.LoHaConfig(target_modules=["q_proj", "v_proj"], r=3))
    live.save_pretrained(tmp_path / "two")
    states = []
    for folder in (one, tmp_path / "two"):
        model = type(make_model("llama-gqa")).from_pretrained(base)
        model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
        states.append(model.state_dict())
    own = type(model).from_pretrained(base).eval()
    state = own.state_dict()
    for name, value in state.items():
        value.copy_(value + 0.5 * (states[0][name] - value) - 2 * (states[1][name] - value))
    found, _ = logits(base, adapter={one: 0.5, tmp_path / "two": -2}, backend="torch")
    assert relative(found, wanted(own)) < 1e-5
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BackendNotAvailableError, match="peft is not installed"):
        dualinfer.init_inference(base, adapter=tmp_path / "two")


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def changed(folders, tmp_path):
    """A copy of an adapter's folder whose config has other fields."""
    adapter = folders("lora")[1]
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)

    def change(**fields):
        config = json.loads((adapter / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **fields}))
        return tmp_path

    return change


REFUSED = [
    ({"peft_type": "PROMPT_TUNING"}, r"kind PROMPT_TUNING, which adds to the text .*PeftModel"),
    ({"peft_type": "OSF"}, "kind 'OSF', which is not merged here.*merge_and_unload"),
    ({"peft_type": None}, "kind None"),
    ({"peft_type": "LOHA"}, "lora_alpha=8, .*does not merge"),
    ({"peft_type": "LOHA", "target_modules": "(a+)+b"}, "target_modules has .*may take for ever"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the model's own weights"),
    ({"layer_replication": [[0, 2]]}, r"layer_replication=\[\[0, 2\]\], which dualinfer does not"),
    ({"target_parameters": "w"}, "target_parameters is 'w', expected a list"),
    ({"something_new": {"a": 1}}, "something_new"),
    ({"use_dora": True}, "no lora_magnitude_vector, and use_dora=True"),
    ({"r": 5}, "factors of rank 4, and by adapter_config.json it is 5"),
    ({"r": "4"}, "r is '4', expected a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"alpha_pattern": [1]}, "alpha_pattern is .*expected an object"),
    ({"alpha_pattern": {r"(a)\1": 1}}, "alpha_pattern has the pattern .* refers to its own"),
    ({"rank_pattern": {"(": 1}}, r"rank_pattern has the pattern '.*\(\(\)\$', which is not tried"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[next(iter(f)) for f, _ in REFUSED])
def test_what_no_merge_takes_in_is_refused_by_name(folders, changed, fields, message):
    with pytest.raises((CheckpointError, dualinfer.UnsupportedError), match=message):
        dualinfer.init_inference(folders("lora")[0], adapter=changed(**fields))


def test_tensors_that_do_not_fit_are_named(folders, changed, tmp_path):
    base, folder = folders("lora")[0], changed()
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(n for n in whole if "lora_A" in n)

    def refused(tensors, message, model=base):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=message):
            dualinfer.init_inference(model, adapter=folder)

    refused({n: t for n, t in whole.items() if n != name}, "has lora_B; lora_A and lora_B")
    refused(
        {**whole, name: whole[name][:, :-1].contiguous()}, "The adapter .* changes .* and that of"
    )
    more = {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 8)}
    more |= {n.replace("A", "B"): torch.ones(8, 4) for n in more}
    refused({**whole, **more}, r"does not hold: 1: model\.layers\.7\.self_attn\.q_proj\.weight")
    refused({**whole, "base_model.model.score.weight": torch.ones(2, 2)}, "1: score.weight")
    again = {n.replace("lora_A.", "lora_A.other."): t.clone() for n, t in whole.items()}
    refused({**whole, **again}, "of one module twice")
    refused(whole, "does not hold", model=folders("conv1d")[0])
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither adapter_model\.safetensors nor"):
        dualinfer.init_inference(base, adapter=folder)


def test_a_bin_file_is_read_without_running_anything(folders, changed, backend):
    base, _, _, expected = folders("lora")
    folder = changed()
    state = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(state, folder / "adapter_model.bin")
    assert relative(logits(base, adapter=folder, backend=backend)[0], expected) < 1e-5
    torch.save({**state, "code": print}, folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="beside tensors"):
        dualinfer.init_inference(base, adapter=folder, backend=backend)


def test_models_that_are_not_found_are_told(folders, changed, tmp_path):
    base = folders("lora")[0]
    for name, message in (
        (None, "does not name its model"),
        ("/nowhere/at/all", "neither a folder here nor"),
        ("owner/model", "hf download owner/model"),
    ):
        with pytest.raises(CheckpointError, match=message):
            dualinfer.init_inference(changed(base_model_name_or_path=name))
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json"):
        dualinfer.init_inference(base, adapter=base)
    with pytest.raises(CheckpointError, match=r"is no folder with an adapter_config\.json"):
        dualinfer.init_inference(base, adapter=tmp_path / "none")


def test_adapters_are_refused_where_a_module_stays_as_it_is(folders):
    base, adapter, _, _ = folders("lora")
    model = type(make_model("llama-gqa")).from_pretrained(base)
    with pytest.raises(ConfigError, match=r"adapter=.*in module mode"):
        dualinfer.init_inference(model, adapter=adapter)
    with pytest.raises(ConfigError, match="expected a path, a list of paths"):
        dualinfer.init_inference(base, adapter=3)
    with pytest.raises(ConfigError, match="adapter"):
        dualinfer.init_inference(base, adapter={adapter: "much"})


@pytest.mark.parametrize("kind", ["lily", "prompt"])
def test_other_adapters_of_a_live_model_are_refused_by_name(kind, backend):
    model = make_model("llama-gqa")
    config = {
        "lily": lambda: peft.LilyConfig(target_modules=["k_proj"]),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    }[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = peft.get_peft_model(model, config)
    with pytest.raises(ModelError, match=r"merge.*\. (Leave replace_with|With backend='torch')"):
        dualinfer.init_inference(live, backend=backend, replace_with_kernel_inject=True)
