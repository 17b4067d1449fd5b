"""Experts in codes: quantized while they are loaded, and those of a checkpoint."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer.checkpoint.sources import TorchSource, open_checkpoint
from dualinfer.checkpoint.views.quantized import open_as_held
from dualinfer.checkpoint.views.stacked import StackedSource
from dualinfer.model.families import describe_model
from dualinfer.model.load_plan import make_load_plan
from dualinfer.parallel.shard import fit_row, whole
from dualinfer.quantization.meaning import dequantize
from dualinfer.quantization.quantize import SCHEMES
from dualinfer.quantization.recipe import Recipe

from .cases import make_model
from .cases.mixtures import VOCAB
from .models import BACKENDS, random_ids, relative_rms

pytestmark = pytest.mark.usefixtures("greedy")

FUSED = {"dtype": "fp32", "replace_with_kernel_inject": True}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
WIDE = SIZES | {"moe_intermediate_size": 64}
SHARED = WIDE | {"shared_expert_intermediate_size": 64}
IDS = random_ids(2, 7, vocab=VOCAB)


def opened(model, codes):
    """A live module's quantized source and the rows that it fills."""
    config = model.config.to_dict()
    _, table = describe_model(config, [type(model).__name__])
    source = TorchSource(dict(model.state_dict()), "a test")
    source, table, _ = open_as_held(source, table, config, Recipe(SCHEMES[codes]))
    return source, make_load_plan(table, source)


def decoded(model, codes):
    """A copy of the model with what its quantized matrices mean, and how many there are."""
    source, _ = opened(model, codes)
    found, tensors = 0, {}
    for name in source.names():
        matrix = source.matrix(name)
        if matrix is not None:
            tensors[name] = torch.from_numpy(dequantize(matrix))
            found += 1
    state = model.state_dict()
    for name, value in tensors.items():
        head, _, last = name.partition(".experts.")
        if not last:
            state[name] = value
            continue
        expert, part, _ = last.split(".")
        whole = "down_proj" if part == "down_proj" else "gate_up_proj"
        rows = state[f"{head}.experts.{whole}"][int(expert)]
        half = len(rows) // 2
        own = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}.get(part, slice(None))
        rows[own] = value
    model.load_state_dict(state)
    return model, found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "codes", ["int8", *(pytest.param(c, marks=pytest.mark.slow) for c in ("int4", "fp8"))]
)
def test_experts_quantized_on_load_are_what_their_codes_mean(codes, backend):
    """Routers and the gate of the shared expert stay as they are."""
    model = make_model("qwen2_moe", **SHARED)
    with dualinfer.init_inference(model, backend=backend, quant=codes, **FUSED) as engine:
        found = np.asarray(engine(IDS).logits)
    plain = np.asarray(model(torch.tensor(IDS)).logits.detach())
    meant, count = decoded(model, codes)
    # Of two layers q, k, v, out; gate, up, down of five experts and of the shared one; the head.
    assert count == 2 * (4 + 3 * 6) + 1
    with torch.no_grad():
        expected = meant(torch.tensor(IDS)).logits.numpy()
    assert relative_rms(found, expected) < 1e-5 < relative_rms(found, plain)


def test_granites_experts_are_quantized_though_files_have_them_in_one_tensor(tmp_path):
    model = make_model("granitemoe", **SIZES)
    model.save_pretrained(tmp_path)
    _, plan = opened(model, "int8")
    schemes = {row.local_name: row.scheme for row, _ in plan.rows if row.layer == 1}
    assert schemes["experts.up.weight"] is not None and schemes["experts.down.weight"] is not None
    assert schemes["router.weight"] is None
    logits = []
    for where in (model, str(tmp_path)):
        with dualinfer.init_inference(where, backend="torch", quant="int8", **FUSED) as engine:
            logits.append(np.asarray(engine(IDS).logits))
    np.testing.assert_array_equal(*logits)


def test_a_stacked_tensor_is_shown_as_matrices_by_any_part(tmp_path):
    model = make_model("mixtral")
    _, table = describe_model(model.config.to_dict(), ["MixtralForCausalLM"])
    shown = StackedSource(TorchSource(dict(model.state_dict()), "a test"), table)
    model.save_pretrained(tmp_path)
    stored = open_checkpoint(tmp_path)
    for part in ("w1", "w2", "w3"):
        name = f"model.layers.1.mlp.experts.3.{part}.weight"
        theirs = stored.read(name.replace(".mlp.", ".block_sparse_moe."))
        assert shown.shape(name) == theirs.shape and shown.dtype(name) == "float32"
        for index in (None, (slice(3, 20), slice(5, 11)), (slice(4, 4), slice(None))):
            whole = (slice(None), slice(None))
            np.testing.assert_array_equal(shown.read(name, index), theirs[index or whole])
    assert not any(name.endswith(("gate_up_proj", "down_proj")) for name in shown.names())


def test_experts_that_lie_turned_are_quantized_row_by_row():
    """GPT-OSS's [X, in, out]: the codes are those of each expert's transpose."""
    model = make_model("gpt_oss", **SIZES)
    source, plan = opened(model, "int8")
    rows = {row.local_name: row for row, _ in plan.rows if row.layer == 1}
    assert rows["experts.up.weight"].scheme is not None
    _, grouped = opened(model, "mxfp4")
    for own in (row for row, _ in grouped.rows if row.local_name.startswith("experts.")):
        # That gates and ups lie by turns along the rows cuts no group of columns.
        assert fit_row(own, [whole(grouped.table)]).blocks == own.blocks
    experts = model.model.layers[1].mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        matrix = source.matrix(f"model.layers.1.mlp.experts.2.{part}.weight")
        wanted = getattr(experts, part)[2].T.detach().numpy()
        assert matrix.shape == wanted.shape
        assert relative_rms(dequantize(matrix), wanted) < 0.02
    with dualinfer.init_inference(model, backend="torch", quant="int8", **FUSED) as engine:
        found = np.asarray(engine(IDS).logits)
    with torch.no_grad():
        assert 1e-4 < relative_rms(found, model(torch.tensor(IDS)).logits.numpy()) < 0.1


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_gates_and_ups_that_lie_turned_are_quantized_apart(backend):
    """Llama 4's [X, in, gate + up]."""
    model = make_model("llama4", **SIZES)
    source, _ = opened(model, "int8")
    with torch.no_grad():
        for i in (0, 1):
            name, experts = f"model.layers.{i}.feed_forward", model.model.layers[i].feed_forward
            for x in range(5):
                parts = [f"{name}.experts.{x}.{p}_proj.weight" for p in ("gate", "up", "down")]
                gate, up, down = (dequantize(source.matrix(part)) for part in parts)
                experts.experts.gate_up_proj[x] = torch.from_numpy(np.concatenate((gate, up)).T)
                experts.experts.down_proj[x] = torch.from_numpy(down.T)
        state = model.state_dict()
        for part in state:
            matrix = source.matrix(part)
            if matrix is not None:
                state[part].copy_(torch.from_numpy(dequantize(matrix)))
        expected = model(torch.tensor(IDS)).logits.numpy()
    with dualinfer.init_inference(
        make_model("llama4", **SIZES), backend=backend, quant="int8", **FUSED
    ) as engine:
        assert relative_rms(engine(IDS).logits, expected) < 1e-5


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A checkpoint of compressed-tensors, int8 by rows, and the HF model that it means."""
    folder = tmp_path_factory.mktemp("compressed")
    model = make_model("qwen3_moe", **WIDE, head_dim=16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    meant = {
        name: value * tensors[f"{name}_scale"] if f"{name}_scale" in tensors else value
        for name, value in tensors.items()
        if not name.endswith("_scale")
    }
    dense = tmp_path_factory.mktemp("dense")
    model.config.save_pretrained(dense)
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    expected = type(model).from_pretrained(dense, experts_implementation="eager").eval()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    with torch.no_grad():
        return folder, expected(torch.tensor(IDS)).logits.numpy()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_quantized_experts_is_what_its_codes_mean(backend, compressed):
    folder, expected = compressed
    with dualinfer.init_inference(str(folder), backend=backend, **FUSED) as engine:
        assert relative_rms(engine(IDS).logits, expected) < 1e-5


def shared(folder, backend, devices):
    how = {**FUSED, "backend": backend, "tensor_parallel": {"tp_size": devices}}
    with dualinfer.init_inference(folder, **how, quant="int4") as engine:
        return np.asarray(engine(IDS).logits)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("backend", BACKENDS)
def test_devices_share_quantized_experts(backend, crew, tmp_path):
    """64 elements of a group in three shares: scales are repeated for smaller blocks."""
    make_model("qwen2_moe", **SHARED).save_pretrained(tmp_path)
    folder = str(tmp_path)
    if backend == "torch":
        found = crew.run(shared, folder, backend, 3, world=3)
    else:
        found = [shared(folder, backend, 3)]
    alone = shared(folder, backend, 1)
    for logits in found:
        assert relative_rms(logits, alone) < 1e-5
