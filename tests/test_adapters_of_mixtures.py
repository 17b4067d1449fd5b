"""Adapters of peft for experts and routers (`target_parameters`), against peft and its merges."""

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dualinfer
from dualinfer.checkpoint.sources import TorchSource, open_checkpoint, open_module
from dualinfer.checkpoint.views.adapters import open_adapter, open_adapters_of
from dualinfer.checkpoint.views.quantized import open_as_held
from dualinfer.checkpoint.views.stacked import StackedSource
from dualinfer.errors import CheckpointError, StaleWeightsError
from dualinfer.model.families import describe_model
from dualinfer.model.load_plan import make_load_plan

from .adapters import IDS, QUIET, adapt, logits, relative, wanted
from .cases import make_model
from .cases.mixtures import CASES
from .models import BACKENDS, slow_but

pytestmark = QUIET
ROUTERS = ("gate.weight", "router.weight")


def parameters_of(model):
    """The parameters of experts and routers, by the last two parts of their names."""
    found = {}
    for path, part in model.named_modules():
        if not type(part).__module__.startswith("transformers."):
            continue
        for name, tensor in part.named_parameters(recurse=False):
            both = ".".join(f"{path}.{name}".split(".")[-2:])
            experts = "experts" in path and "shared" not in path
            if tensor.ndim > 1 and (experts or both in ROUTERS):
                found[both] = tensor
    return sorted(found)


def adapted(model, **options):
    """A PeftModel whose experts and routers have adapters of other ranks and scales."""
    given = {"target_modules": [], "target_parameters": parameters_of(model), "lora_alpha": 9}
    given |= {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.1\..*gate_up_proj": 30}}
    return adapt(model, **{**given, **options})


def merged(adapter, base):
    """HF's model with what peft merges into it."""
    model = type(adapter.get_base_model()).from_pretrained(base, experts_implementation="eager")
    adapter.save_pretrained(base / "adapter")
    return peft.PeftModel.from_pretrained(model, base / "adapter").merge_and_unload().eval()


def matrices(source, model):
    """Every matrix of a source by HF's names for an expert's own, and others as they are."""
    _, table = describe_model(model.config.to_dict(), [type(model).__name__])
    shown = StackedSource(source, table)
    own = {}
    for row in table.rows:
        for part in row.sources:
            name = next((n for n in table.candidates(part.name) if n in {*shown.names()}), None)
            if name is not None:
                own[part.name] = np.asarray(shown.read(name), np.float32)
    return own


ODD = (
    "mixtral",
    "gpt_oss",
    "llama4",
    "dbrx",
    "longcat_flash with more experts",
    "gemma4 with experts",
    "granitemoe",
    "hy_v3",
)
PLAIN = [case for case in CASES if case not in ODD and "," not in case and "without" not in case]


@pytest.mark.parametrize(
    "case", [*ODD, *(pytest.param(case, marks=pytest.mark.slow) for case in PLAIN)]
)
def test_parameters_are_merged_as_peft_merges_them(case, tmp_path):
    """Of a folder, whose files have experts one by one or not, and of a live model."""
    model = make_model(case)
    model.save_pretrained(tmp_path)
    live = adapted(model)
    expected = matrices(TorchSource(merged(live, tmp_path).state_dict(), "peft's"), model)
    config, names = model.config.to_dict(), [type(model).__name__]
    _, table = describe_model(config, names)
    for source, adapters in (
        (open_checkpoint(tmp_path), [open_adapter(tmp_path / "adapter")]),
        (open_module(live), open_adapters_of(live)),
    ):
        source, own, _ = open_as_held(source, table, config, None, adapters=adapters)
        make_load_plan(own, source)
        found = matrices(source, model)
        assert found.keys() == expected.keys()
        for name, matrix in expected.items():
            np.testing.assert_allclose(found[name], matrix, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(("mixtral", "torch"), ("mixtral", "jax"), ("gpt_oss", "torch")),
        pytest.param("llama4", "jax", marks=pytest.mark.slow),
    ],
)
def test_experts_with_adapters_give_what_peft_gives(case, backend, tmp_path):
    model = make_model(case)
    plain = wanted(model)
    model.save_pretrained(tmp_path)
    live = adapted(model)
    live.save_pretrained(tmp_path / "adapter")
    expected = wanted(live)
    assert relative(plain, expected) > 0.05
    folder = {"adapter": tmp_path / "adapter"}
    saved = tmp_path / "saved"
    with dualinfer.init_inference(tmp_path, backend=backend, dtype="float32", **folder) as engine:
        assert relative(np.asarray(engine(IDS)[0]), expected) < 1e-5
        engine.save_pretrained(saved)
    names = {"experts_implementation": "eager", "dtype": torch.float32}
    assert relative(wanted(type(model).from_pretrained(saved, **names).eval()), expected) < 1e-5
    found, _ = logits(live, backend=backend, replace_with_kernel_inject=True)
    assert relative(found, expected) < 1e-5


def shared(folder, backend, devices=1, **options):
    """What an engine over several devices gives of a folder and the adapter in it."""
    given = {"backend": backend, "tensor_parallel": {"tp_size": devices}, **options}
    return logits(folder, adapter=folder / "adapter", **given)[0]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("backend", slow_but(["jax"], BACKENDS))
def test_devices_share_adapted_experts(backend, tmp_path, crew):
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    live = adapted(model)
    live.save_pretrained(tmp_path / "adapter")
    expected = wanted(live)
    if backend == "torch":
        found = crew.run(shared, tmp_path, backend, 2, world=2)
    else:
        found = [shared(tmp_path, backend, 2)]
    for own in (*found, shared(tmp_path, "torch", keep_module_on_host=True)):
        assert relative(own, expected) < 1e-5


@pytest.mark.parametrize("case", ["gpt_oss", "llama4", "mixtral"])
@pytest.mark.parametrize("version", ["0.21.2", "0.18.1"])
def test_factors_of_square_experts_are_of_what_peft_has_them_of(case, version, tmp_path):
    """Where no shape tells it: what HF's class says, and before peft 0.19 always [in, out]."""
    model = make_model(case, hidden_size=60, intermediate_size=60)
    model.save_pretrained(tmp_path)
    live = adapted(model, target_parameters=["experts.down_proj"])
    live.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_version": version}))
    config, names = model.config.to_dict(), [type(model).__name__]
    _, table = describe_model(config, names)
    source = open_checkpoint(tmp_path)
    adapters = [open_adapter(tmp_path / "adapter")]
    found = matrices(open_as_held(source, table, config, None, adapters=adapters)[0], model)
    before = matrices(source, model)
    wrapper = next(m for m in live.modules() if type(m).__name__ == "ParamWrapper")
    delta = wrapper.get_delta_weight("default")[3].detach().numpy()
    if version == "0.18.1" and wrapper._did_swap_in_out_features:
        delta = delta.T
    name = next(n for n in found if ".experts.3." in n and ("down" in n or "w2" in n))
    stored = delta if case == "mixtral" else delta.T  # the others lie turned
    np.testing.assert_allclose(found[name] - before[name], stored, rtol=1e-4, atol=1e-6)


def test_adapters_of_each_expert_are_merged_into_tensors_of_all(tmp_path):
    """As transformers 4 has experts, and peft reads them with transformers 5."""
    model = make_model("mixtral")
    model.save_pretrained(tmp_path)
    folder, tensors = tmp_path / "adapter", {}
    folder.mkdir()
    draw = torch.Generator().manual_seed(7)
    for i in range(2):
        block = f"base_model.model.model.layers.{i}.block_sparse_moe"
        sizes = {f"experts.{x}.{w}": (31, 60) for x in range(5) for w in ("w1", "w3")}
        sizes |= {f"experts.{x}.w2": (60, 31) for x in range(5)} | {"gate": (5, 60)}
        for name, (out, inner) in sizes.items():
            for part, shape in (("A", (3, inner)), ("B", (out, 3))):
                noise = torch.randn(shape, generator=draw)
                tensors[f"{block}.{name}.lora_{part}.weight"] = noise * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["w1", "w2", "w3"]}
    targets["target_modules"].append("gate")
    (folder / "adapter_config.json").write_text(json.dumps({**targets, "task_type": "CAUSAL_LM"}))
    expected = wanted(peft.PeftModel.from_pretrained(make_model("mixtral"), folder).eval())
    assert relative(wanted(model), expected) > 0.1
    for where in (tmp_path, model):
        found, _ = logits(where, backend="torch", adapter=folder, replace_with_kernel_inject=True)
        assert relative(found, expected) < 1e-5
    one = {n: t for n, t in tensors.items() if ".experts.2.w1." in n and ".layers.1." in n}
    save_file(one, folder / "adapter_model.safetensors")
    with torch.no_grad():
        up, down = (one[n] for n in sorted(one, reverse=True))
        model.model.layers[1].mlp.experts.gate_up_proj[2, :31] += 2 * up @ down
    found, _ = logits(tmp_path, backend="torch", adapter=folder)
    assert relative(found, wanted(model)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_in_four_bits_become_plain_where_adapters_change_them(backend, tmp_path):
    """GPT-OSS's mxfp4: what the codes mean, and the change; a layer's others stay in codes."""
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=64, head_dim=16)
    random, tensors = torch.Generator().manual_seed(5), dict(model.state_dict())
    for i, layer in enumerate(model.model.layers):
        for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
            whole, how = f"model.layers.{i}.mlp.experts.{name}", {"generator": random}
            blocks = torch.randint(0, 256, (5, rows, 2, 16), dtype=torch.uint8, **how)
            scales = torch.randint(121, 126, (5, rows, 2), dtype=torch.uint8, **how)
            del tensors[whole]
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(values)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    live = adapted(model, target_parameters=["experts.down_proj", "router.weight"])
    live.save_pretrained(tmp_path / "adapter")
    found, notes = logits(tmp_path, backend=backend, adapter=tmp_path / "adapter")
    assert relative(found, wanted(live)) < 1e-5
    assert "10 quantized matrices are plain here, since adapters change them" in notes


def test_an_expert_of_a_quantized_mixture_makes_its_layers_others_plain(tmp_path):
    model = make_model("qwen3_moe", moe_intermediate_size=32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        codes = (tensors[name] / scale).round()
        tensors |= {name: codes.to(torch.int8), f"{name}_scale": scale}
        _, _, layer, _, _, expert, part, _ = name.split(".")
        experts = model.model.layers[int(layer)].mlp.experts
        rows = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64)}.get(part, slice(None))
        whole = experts.down_proj if part == "down_proj" else experts.gate_up_proj
        whole.data[int(expert), rows] = codes * scale
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": [r"re:.*experts\.\d+\..*"], "weights": weights}
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {
        **{"quant_method": "compressed-tensors", "format": "naive-quantized"},
        **{"config_groups": {"group_0": group}, "quantization_status": "compressed"},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    live = adapted(model, target_parameters=["layers.1.mlp.experts.gate_up_proj"])
    live.save_pretrained(tmp_path / "adapter")
    found, notes = logits(tmp_path, backend="torch", adapter=tmp_path / "adapter")
    assert relative(found, wanted(live)) < 1e-5
    assert "10 quantized matrices are plain here, since adapters change them" in notes


def test_a_live_mixture_is_read_by_its_adapters_in_use():
    """Several, one of them, none, or merged; peft's own forward leaves the model as it is."""
    live = adapted(make_model("mixtral"))
    adapt(
        live,
        5,
        "second",
        r=2,
        target_modules=[],
        target_parameters=parameters_of(make_model("mixtral")),
    )
    options = {"dtype": "float32", "backend": "torch", "replace_with_kernel_inject": True}
    with dualinfer.init_inference(live, **options) as engine:

        def check():
            expected = wanted(live)
            assert relative(np.asarray(engine(IDS)[0]), expected) < 1e-5
            assert relative(np.asarray(engine(IDS)[0]), wanted(live)) < 1e-5

        check()
        live.base_model.set_adapter(["default", "second"])
        with pytest.raises(StaleWeightsError, match="other adapters are in use"):
            engine(IDS)
        engine.refresh()
        check()
        with live.disable_adapter():
            engine.refresh()
            check()
        live.merge_adapter()
        engine.refresh()
        check()
        live.unmerge_adapter()
        live.set_adapter("second")
        engine.refresh()
        check()
        wrapper = next(m for m in live.modules() if type(m).__name__ == "ParamWrapper")
        with torch.no_grad():
            wrapper.lora_B["second"].weight.mul_(2)
        with pytest.raises(StaleWeightsError, match="was written to"):
            engine(IDS)


def test_adapters_of_parameters_that_do_not_fit_are_told(tmp_path):
    make_model("mixtral").save_pretrained(tmp_path / "base")
    live = adapted(make_model("mixtral"), target_parameters=["experts.gate_up_proj"])
    folder = tmp_path / "adapter"
    live.save_pretrained(folder)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, fields = load_file(file), json.loads(config.read_text())

    def refused(message, tensors=whole, **changes):
        save_file(tensors, file)
        config.write_text(json.dumps({**fields, **changes}))
        with pytest.raises(CheckpointError, match=message):
            dualinfer.init_inference(tmp_path / "base", adapter=folder)

    refused(
        "changes 1 parameters of .*, and its config names gate_up_proj, down_proj there",
        target_parameters=["experts.gate_up_proj", "down_proj"],
    )
    refused("changes 1 parameters of .*, and the model has none there", target_parameters=["other"])
    refused("by adapter_config.json r is 7", r=7, rank_pattern={})
    name = next(n for n in whole if "lora_A" in n)
    refused("is expected|are expected", {**whole, name: whole[name][:-1].contiguous()})
    cut = {**whole, name: whole[name][:, :-1].contiguous()}
    refused(r"changes .*gate_up_proj by \(5, 62, 59\), and that of .* is \(5, 62, 60\)", cut)
    twice = {n.replace(".lora_", ".base_layer.base_layer.lora_"): t for n, t in whole.items()}
    refused("factors in 1 layers, one in another", twice)
