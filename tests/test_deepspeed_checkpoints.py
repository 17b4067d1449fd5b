"""Checkpoints of DeepSpeed, Megatron-LM and Meta fill models; hostile ones are refused."""

import argparse
import io
import json
import os
import pickle
import shutil
import struct
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

import dualinfer
from dualinfer.checkpoint.files.inert import Inert, read_pickle
from dualinfer.checkpoint.files.safetensors import StoredFile
from dualinfer.checkpoint.files.torch_files import open_torch_file
from dualinfer.checkpoint.foreign.fitting import Wanted, fit, wanted_by_table
from dualinfer.checkpoint.sources import open_weights
from dualinfer.errors import CheckpointError, ConfigError, UnsupportedError
from dualinfer.model.families import describe_model

from .cases import make_model
from .deepspeed_files import (
    Scheduler,
    megatron_state,
    part,
    save_injected,
    save_meta,
    save_training,
    split_state,
    training_file,
)
from .models import BACKENDS, random_ids, relative_rms

pytestmark = pytest.mark.xdist_group("ranks")

SIZES = {
    "bloom": {"n_head": 6},
    "gpt2": {"n_head": 6},
    "opt": {"num_attention_heads": 6, "ffn_dim": 78},
    "llama-gqa": {"num_key_value_heads": 2, "head_dim": 16},
    "llama-mha": {},
    "neox": {},
    "gptj": {},
    "gpt-neo": {},
}
IDS = torch.tensor(random_ids(2, 9))


@pytest.fixture(scope="session")
def model_of():
    """A function from a case's name to its model, which two ranks can share, and its logits."""
    made = {}

    def get(name):
        if name not in made:
            model = make_model(name, **SIZES[name])
            with torch.no_grad():
                made[name] = model, model(IDS).logits.numpy()
        return made[name]

    return get


def on_meta(model):
    with torch.device("meta"):
        return type(model)(model.config).eval()


def run(model, checkpoint=None, tp=1, **fields):
    """The logits of an engine of the checkpoint, and its notes."""
    if checkpoint is not None:
        fields["checkpoint"] = checkpoint
    tp_fields = {"tp_size": tp, "timeout": 150}
    with dualinfer.init_inference(model, dtype="fp32", tp=tp_fields, **fields) as engine:
        logits = np.asarray(engine(IDS, return_dict=False)[0])
        return logits, engine.report().notes


def source_of(model, checkpoint, **more):
    """The tensors that the model would be filled with."""
    config = model.config.to_dict()
    _, table = describe_model(config, [type(model).__name__])
    return fit(open_weights(checkpoint, **more), wanted_by_table(table, config))


def check_tensors(model, checkpoint, **more):
    """Each tensor is HF's, whole and in part; the source."""
    source = source_of(model, checkpoint, **more)
    state = model.state_dict()
    for name in source.names():
        expected = state[name].numpy()
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
        index = tuple(slice(n // 3, n - n // 4) for n in expected.shape)
        np.testing.assert_array_equal(source.read(name, index), expected[index], err_msg=name)
    missing = state.keys() - set(source.names()) - {"lm_head.weight"}
    assert not missing
    return source


def save_split(model, folder, size):
    """Files with a rank's HF tensors each, as AutoTP splits them, and the dict that names them."""
    names = [f"rank{rank}.bin" for rank in range(size)]
    for rank, name in enumerate(names):
        torch.save(split_state(model, rank, size), folder / name)
    return {"type": "ds_model", "checkpoints": names, "parallelization": "tp", "version": 1.0}


FORMS = {
    "injected": lambda model, folder: save_injected(model, folder, 2),
    "split": lambda model, folder: save_split(model, folder, 2) | {"base_dir": str(folder)},
    "training": lambda model, folder: save_training(folder / "t", [model.state_dict()]),
    "ranks": lambda model, folder: save_training(
        folder / "t", [split_state(model, rank, 2) for rank in range(2)]
    ),
}


@pytest.mark.parametrize("name", [name for name in SIZES if name != "llama-gqa"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_makes_the_whole_tensors(form, name, model_of, tmp_path):
    model, _ = model_of(name)
    check_tensors(model, FORMS[form](model, tmp_path))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_any_number_of_ranks_is_merged(size, model_of, tmp_path):
    model, _ = model_of("bloom")
    check_tensors(model, save_injected(model, tmp_path / "injected", size, partitions=3))
    if size != 1:
        check_tensors(model, save_split(model, tmp_path, size) | {"base_dir": str(tmp_path)})


def test_uneven_shards_of_grouped_heads_are_merged(model_of, tmp_path):
    model, _ = model_of("llama-gqa")
    states = [dict(model.state_dict()) for _ in range(2)]
    for name, tensor in model.state_dict().items():
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if "_proj" in name or "lm_head" in name:
            first = tensor.shape[axis] * 2 // 3 // 16 * 16
            own = tensor.split([first, tensor.shape[axis] - first], axis)
            states[0][name], states[1][name] = own[0].clone(), own[1].clone()
    for rank, state in enumerate(states):
        save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / f"{rank}.safetensors")
    said = {"type": "ds_model", "parallelization": "tp", "version": 1.0, "tp_size": 2}
    said |= {"checkpoints": [f"{rank}.safetensors" for rank in range(2)]}
    check_tensors(model, said, base_dir=str(tmp_path))


def test_matrices_that_autotp_has_turned_are_turned_back(model_of, tmp_path):
    """AutoTP makes linear layers of GPT-2's, so that their matrices are [out, in]."""
    model, _ = model_of("gpt2")
    for rank in range(2):
        state = split_state(model, rank, 2)
        names = [n for n in state if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))]
        state |= {name: state[name].T.contiguous() for name in names}
        torch.save(state, tmp_path / f"rank{rank}.bin")
    said = {"type": "ds_model", "checkpoints": ["rank0.bin", "rank1.bin"], "version": 1.0}
    check_tensors(model, said | {"parallelization": "tp", "base_dir": str(tmp_path)})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bloom", "llama-mha", "gpt2", "opt"])
def test_injected_shards_give_the_logits_of_hf(name, backend, model_of, tmp_path):
    model, expected = model_of(name)
    path = save_injected(model, tmp_path, 2)
    logits, notes = run(on_meta(model), path, backend=backend, kernel_inject=True)
    assert relative_rms(logits, expected) < 1e-5
    assert "the shards of 2 ranks were merged" in notes


@pytest.mark.parametrize("form", FORMS)
def test_a_meta_module_is_filled_in_module_mode(form, model_of, tmp_path):
    model, expected = model_of("opt")
    logits, _ = run(on_meta(model), FORMS[form](model, tmp_path), backend="torch")
    assert relative_rms(logits, expected) < 1e-5


def test_two_devices_of_jax_share_what_two_ranks_wrote(model_of, tmp_path):
    model, expected = model_of("gpt2")
    logits, _ = run(on_meta(model), save_injected(model, tmp_path, 2), tp=2, backend="jax")
    assert relative_rms(logits, expected) < 1e-5


def logits_and_bytes(name, path, fields):
    """Of one rank: its logits, and the bytes that it read while the engine was made."""
    model = make_model(name, **SIZES[name])
    read, original = [], StoredFile._read_bytes

    def counting(self, start, out):
        read.append(len(out))
        original(self, start, out)

    StoredFile._read_bytes = counting
    try:
        return run(on_meta(model), path, tp=2, backend="torch", **fields)[0], sum(read)
    finally:
        StoredFile._read_bytes = original


@pytest.mark.parametrize("fields", [{"kernel_inject": True}, {}], ids=["fused", "module"])
def test_two_ranks_of_torch_load_what_two_ranks_wrote(fields, crew, model_of, tmp_path):
    model, expected = model_of("llama-mha")
    said = save_split(model, tmp_path, 2) | {"base_dir": str(tmp_path)}
    found = crew.run(logits_and_bytes, "llama-mha", said, fields, world=2)
    whole = sum(t.numel() * 4 for t in model.state_dict().values())
    for logits, nbytes in found:
        assert relative_rms(logits, expected) < 1e-5
        if fields:  # the head's half, each layer's half, and what describes the files
            described = 2 * sum(len(name) for name in model.state_dict()) + 2**17
            assert nbytes < 0.6 * whole + described


# --- the JSON ------------------------------------------------------------------------------------


def save_pp(model, folder, suffix=".bin"):
    """Two files with whole tensors each; their names."""
    state = {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    names = [f"part-{i}{suffix}" for i in range(2)]
    for i, name in enumerate(names):
        own = dict(list(state.items())[i::2])
        if suffix == ".safetensors":
            save_file(own, folder / name)
        else:
            torch.save(own, folder / name)
    return names


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".safetensors"])
@pytest.mark.parametrize("kind", ["ds_model", "BLOOM"])
def test_files_of_whole_tensors_are_read(kind, suffix, model_of, tmp_path):
    model, _ = model_of("bloom")
    said = {"type": kind, "checkpoints": save_pp(model, tmp_path, suffix), "version": 1.0}
    path = tmp_path / "ckpt.json"
    path.write_text(json.dumps(said))
    check_tensors(model, path)
    check_tensors(model, said, base_dir=str(tmp_path))
    whole = [str(tmp_path / name) for name in said["checkpoints"]]
    check_tensors(model, said | {"checkpoints": whole})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "gpt"}, "type='gpt'; expected 'ds_model', 'bloom' or 'Megatron'"),
        ({"type": "MEGATRON"}, "type='MEGATRON'"),
        ({"type": None}, "type=None"),
        ({"checkpoints": []}, "no file in checkpoints"),
        ({"checkpoints": "a.bin"}, "checkpoints='a.bin'; expected a list"),
        ({"checkpoints": [5]}, "5 in checkpoints; expected a file's name"),
        ({"checkpoints": {"non_tp": []}}, "no tp; expected lists 'tp' and 'non_tp'"),
        ({"checkpoints": {"tp": [], "x": []}}, "checkpoints with x"),
        ({"checkpoints": ["part-0.bin", "part-0.bin"]}, "part-0.bin twice"),
        ({"checkpoints": ["missing.bin"]}, "missing.bin is named by the checkpoint, but is not"),
        ({"checkpoints": ["ckpt.json"]}, "no file of weights by its name"),
        ({"checkpoints": ["../x.bin"]}, "outside of"),
        ({"checkpoints": ["a/../../x.bin"]}, "outside of"),
        ({"checkpoints": ["/etc/x.bin"]}, "outside of"),
        ({"checkpoints": ["link.bin"]}, "outside of"),
        ({"checkpoints": ["part-0.bin"]}, r"missing \d+"),
        ({"parallelization": "dp"}, "parallelization='dp'"),
        ({"tp_size": 2}, "tp_size=2, and parallelization is 'pp'"),
        ({"tp_size": -1, "parallelization": "tp"}, "tp_size=-1; expected a number"),
        ({"mp_size": 3, "parallelization": "tp"}, "2 files of ranks' shards for 3 ranks"),
        ({"parallelization": "tp"}, "not all ranks hold"),
        ({"dtype": "int8"}, "int8 shards are not read"),
        ({"format": 1}, "has format, which is no key"),
        ({"base_dir": 5}, "base_dir=5"),
    ],
    ids=str,
)
def test_a_wrong_json_is_told(changes, message, model_of, tmp_path):
    model, _ = model_of("bloom")
    folder = tmp_path / "inside"
    folder.mkdir()
    torch.save({"x": torch.ones(1)}, tmp_path / "x.bin")
    (folder / "link.bin").symlink_to(tmp_path / "x.bin")
    said = {"type": "ds_model", "checkpoints": save_pp(model, folder), "version": 1.0}
    (folder / "ckpt.json").write_text(json.dumps(said | changes))
    with pytest.raises(CheckpointError, match=message):
        run(on_meta(model), folder / "ckpt.json", kernel_inject=True)


def test_files_are_found_beside_a_json_that_was_moved(model_of, tmp_path):
    model, _ = model_of("bloom")
    save_injected(model, tmp_path / "old", 2)
    shutil.move(tmp_path / "old", tmp_path / "new")
    source = check_tensors(model, tmp_path / "new" / "ds_inference_config.json")
    assert any("base_dir is not here" in note for note in source.notes)
    check_tensors(model, tmp_path / "new")  # the folder means its JSON
    shutil.move(tmp_path / "new" / "ds_inference_config.json", tmp_path / "ckpt.json")
    check_tensors(model, tmp_path / "ckpt.json", base_dir=str(tmp_path / "new"))
    with pytest.raises(FileNotFoundError, match="no folder here"):
        open_weights(tmp_path / "ckpt.json", str(tmp_path / "none"))


def test_links_of_the_hubs_cache_are_followed(model_of, tmp_path):
    model, _ = model_of("bloom")
    blobs, folder = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    names = save_pp(model, blobs)
    for name in names:
        (folder / name).symlink_to(Path("../../blobs") / name)
    (folder / "ckpt.json").write_text(
        json.dumps({"type": "ds_model", "checkpoints": names, "version": 1.0})
    )
    check_tensors(model, folder / "ckpt.json")


def test_base_dir_without_a_json_is_refused(model_of, tmp_path):
    model, _ = model_of("bloom")
    with pytest.raises(ConfigError, match="base_dir='x': it completes the paths"):
        run(on_meta(model), str(tmp_path), base_dir="x")
    with pytest.raises(ConfigError, match="checkpoint JSON: pass it as the field"):
        dualinfer.init_inference(model, {"type": "ds_model", "checkpoints": [], "version": 1})


def test_shards_that_do_not_fit_are_named(model_of, tmp_path):
    model, _ = model_of("bloom")
    said = save_split(model, tmp_path, 2) | {"base_dir": str(tmp_path)}
    name = "transformer.h.1.mlp.dense_h_to_4h.weight"
    path = tmp_path / "rank1.bin"
    state = torch.load(path)
    torch.save(state | {name: state[name][:-1]}, path)
    with pytest.raises(CheckpointError, match=rf"do not make the model's tensors, 1: {name}"):
        source_of(model, said)
    torch.save(state | {name: state[name].half()}, path)
    with pytest.raises(CheckpointError, match="shards of dtypes float16 and float32"):
        source_of(model, said)
    torch.save(state | {"transformer.ln_f.weight": state["transformer.ln_f.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match="whole in each rank's file, and not the same"):
        source_of(model, said)
    torch.save({n: t for n, t in state.items() if n != name}, path)
    with pytest.raises(CheckpointError, match=rf"not all ranks hold 1: {name} \(only in rank0"):
        source_of(model, said)
    torch.save({n: [t, t] if n == name else t for n, t in state.items()}, path)
    with pytest.raises(CheckpointError, match=rf"pairs of a tensor and its scales, 1: {name}"):
        source_of(model, said)
    torch.save(state, path)
    torch.save({name: torch.zeros(2)}, tmp_path / "more.bin")
    twice = {"tp": said["checkpoints"], "non_tp": ["more.bin"]}
    with pytest.raises(CheckpointError, match=rf"two files 1: {name} \(rank0.bin, more.bin\)"):
        source_of(model, said | {"checkpoints": twice})


def test_joined_projections_of_an_unknown_family_are_not_guessed(tmp_path):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(4, 12), torch.nn.Linear(4, 4)

    module, states = Odd(), [{}, {}]
    for name, tensor in module.state_dict().items():
        for rank, state in enumerate(states):
            state[name] = part(tensor, rank, 2, 0) if "qkv" in name else tensor
    for rank, state in enumerate(states):
        torch.save(state, tmp_path / f"{rank}.pt")
    said = {"type": "ds_model", "checkpoints": ["0.pt", "1.pt"], "parallelization": "tp"}
    with pytest.raises(CheckpointError, match=r"qkv\.weight.*joins several projections"):
        dualinfer.init_inference(module, checkpoint=said, base_dir=str(tmp_path))


# --- folders of a training -----------------------------------------------------------------------


def test_a_folder_of_a_training_is_the_model_where_a_config_lies_in_it(model_of, tmp_path):
    model, expected = model_of("bloom")
    save_training(tmp_path / "run", [model.state_dict()])
    model.config.save_pretrained(tmp_path / "run")
    logits, _ = run(tmp_path / "run", backend="torch")
    assert relative_rms(logits, expected) < 1e-5
    check_tensors(model, tmp_path / "run" / "global_step7")  # one tag


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("", "names ''"),
        ("../other", "expected the name of a folder"),
        ("..", "expected the name"),
        ("a\0b", "expected the name"),
        ("gone", "which is not there"),
        ("link", "a link out of"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=repr,
)
def test_a_latest_that_leads_elsewhere_is_refused(tag, message, model_of, tmp_path):
    model, _ = model_of("bloom")
    save_training(tmp_path / "other", [model.state_dict()])
    folder = save_training(tmp_path / "run", [model.state_dict()])
    (folder / "link").symlink_to(tmp_path / "other" / "global_step7")
    (folder / "latest").write_bytes(tag if isinstance(tag, bytes) else tag.encode())
    with pytest.raises(CheckpointError, match=message):
        open_weights(folder)


def test_parts_of_zero_and_of_pipelines_say_what_to_do(model_of, tmp_path):
    model, _ = model_of("bloom")
    tag = tmp_path / "global_step7"
    tag.mkdir()
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointError, match="holds none of"):
        open_weights(tmp_path)
    for name in ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",):
        torch.save({}, tag / name)
    with pytest.raises(CheckpointError, match=r"ZeRO's parts.*zero_to_fp32\.py .* OUT"):
        open_weights(tmp_path)
    empty = {name: torch.zeros(0) for name in model.state_dict()}
    torch.save(training_file(empty), tag / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"ZeRO's parts.*zero_to_fp32"):
        open_weights(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # what that script writes
    check_tensors(model, tmp_path)
    shutil.rmtree(tag)
    tag.mkdir()
    (tmp_path / "pytorch_model.bin").unlink()
    torch.save({}, tag / "layer_01-model_00-model_states.pt")
    with pytest.raises(CheckpointError, match="pipeline parallelism"):
        open_weights(tmp_path)


def test_ranks_of_a_training_are_all_there(model_of, tmp_path):
    model, _ = model_of("bloom")
    states = [split_state(model, rank, 3) for rank in range(3)]
    folder = save_training(tmp_path / "run", states)
    tag = folder / "global_step7"
    (tag / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="expected the files of ranks 0, 1"):
        open_weights(folder)
    (tag / "mp_rank_02_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="mp_world_size=3, and there are 1"):
        open_weights(folder)
    torch.save(training_file({}) | {"model": {}}, tag / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="module and model, each a dict"):
        open_weights(folder)


# --- Megatron ------------------------------------------------------------------------------------


def save_megatron(model, folder, size, version, padded=0, **more):
    """Files of Megatron's ranks, and the dict that names them."""
    names = [f"v{version}-{rank}.pt" for rank in range(size)]
    for rank, name in enumerate(names):
        state = megatron_state(model, rank, size, version, padded)
        torch.save(training_file(state, size, "model", **more), folder / name)
    return {
        "type": "Megatron",
        "version": version,
        "checkpoints": names,
        "base_dir": str(folder),
    }


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_megatrons_gpt_fills_gpt2(version, size, model_of, tmp_path):
    model, _ = model_of("gpt2")
    source = check_tensors(model, save_megatron(model, tmp_path, size, version, padded=23))
    assert any("23 rows that Megatron adds" in note for note in source.notes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_of_megatron_gives_the_logits_of_hf(backend, model_of, tmp_path):
    model, expected = model_of("gpt2")
    states = [
        {"module." + k: v for k, v in megatron_state(model, r, 2, 2.0).items()} for r in (0, 1)
    ]
    save_training(tmp_path / "run", states, checkpoint_version=2.0)
    logits, _ = run(on_meta(model), tmp_path / "run", backend=backend, kernel_inject=True)
    assert relative_rms(logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("said", "more", "message"),
    [
        ({"version": 3.0}, {}, "version=3.0; expected 0, 1.0 or 2.0"),
        ({"version": "2"}, {}, "version='2'"),
        ({"version": 0}, {"checkpoint_version": 2.0}, "version=0, and its files say"),
        ({"version": None}, {"checkpoint_version": 4}, "checkpoint_version 4; 0, 1.0 and 2.0"),
        ({}, {"mp_world_size": 4}, "mp_world_size=4, and there are 2 files"),
        ({"mp_size": 4}, {}, "2 files for 4 ranks"),
        ({"checkpoints": {"tp": ["v0-0.pt"]}}, {}, "one file for each rank"),
        ({"checkpoints": ["plain.pt"]}, {}, "holds no attention.dense.weight"),
    ],
    ids=str,
)
def test_a_wrong_megatron_checkpoint_is_told(said, more, message, model_of, tmp_path):
    model, _ = model_of("gpt2")
    checkpoint = save_megatron(model, tmp_path, 2, 0, **more)
    torch.save({"module": {"x": torch.ones(2)}}, tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match=message):
        source_of(model, checkpoint | said)


def test_megatron_fills_no_other_family(model_of, tmp_path):
    gpt2, _ = model_of("gpt2")
    said = save_megatron(gpt2, tmp_path, 2, 0)
    with pytest.raises(CheckpointError, match="Set type to 'Megatron'"):
        source_of(gpt2, said | {"type": "ds_model", "parallelization": "tp"})
    bloom, _ = model_of("bloom")
    with pytest.raises(CheckpointError, match=r"fills GPT-2.*the model is 'bloom'"):
        source_of(bloom, save_megatron(gpt2, tmp_path, 2, 0))


# --- Meta ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("version", [2, 3])
def test_metas_files_fill_llama(version, size, model_of, tmp_path):
    model, _ = model_of("llama-gqa")
    check_tensors(model, save_meta(model, tmp_path, size, version))


@pytest.mark.parametrize("backend", BACKENDS)
def test_metas_folder_is_a_model(backend, model_of, tmp_path):
    model, expected = model_of("llama-gqa")
    folder = save_meta(model, tmp_path, 2)
    logits, notes = run(folder, backend=backend)
    assert relative_rms(logits, expected) < 1e-5
    assert "Meta's files of 2 ranks, under HF's names" in notes


def test_metas_params_are_those_of_the_release(model_of, tmp_path):
    model, _ = model_of("llama-mha")
    path = save_meta(model, tmp_path, 1) / "params.json"
    plain = json.loads(path.read_text())

    def config(**changes):
        from dualinfer.checkpoint.described.hf_config import read_config

        path.write_text(json.dumps(plain | changes))
        return read_config(tmp_path)

    found = config()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        assert getattr(found, key) == getattr(model.config, key)
    assert found.max_position_embeddings == (4096 if plain["norm_eps"] >= 1e-5 else 2048)
    assert config(norm_eps=1e-6).max_position_embeddings == 2048
    assert config(rope_theta=500000.0).rope_parameters["rope_theta"] == 500000.0
    scaled = config(use_scaled_rope=True, rope_scaling_factor=32, rope_theta=500000.0)
    expected = hf.LlamaConfig(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    )
    assert scaled.rope_parameters == expected.rope_parameters
    with pytest.raises(UnsupportedError, match="no rope_scaling_factor"):
        config(use_scaled_rope=True)
    with pytest.raises(UnsupportedError, match="has moe"):
        config(moe={"num_experts": 8})
    with pytest.raises(CheckpointError, match="n_heads='x'"):
        config(n_heads="x")
    with pytest.raises(CheckpointError, match="dim=99"):
        config(dim=99)


def test_metas_files_that_do_not_fit_are_told(model_of, tmp_path):
    model, _ = model_of("llama-mha")
    folder = save_meta(model, tmp_path, 2)
    bloom, _ = model_of("bloom")
    with pytest.raises(CheckpointError, match="Meta's Llama, and the model is 'bloom'"):
        source_of(bloom, folder)
    changed = make_model("llama-mha", intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"do not make Llama's tensors: .*w1"):
        source_of(changed, folder)
    (folder / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match="expected the files of ranks 00, 01"):
        open_weights(folder)


# --- prefixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model."]
)
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_prefixes_of_wrappers_are_taken_off(prefix, suffix, model_of, tmp_path):
    model, _ = model_of("opt")
    state = {prefix + n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(state, tmp_path / "x.safetensors")
    torch.save(state, tmp_path / "x.bin")
    source = check_tensors(model, tmp_path / f"x{suffix}")
    assert "were read without" in source.notes[-1]
    assert "".join(source.notes[-1].split("'")[1::2]) == prefix


def test_prefixes_in_the_middle_of_names_are_taken_off(model_of, tmp_path):
    model, _ = model_of("opt")
    state = {
        n.replace("self_attn.", "self_attn._orig_mod."): t for n, t in model.state_dict().items()
    }
    torch.save(state, tmp_path / "x.bin")
    source = check_tensors(model, tmp_path / "x.bin")
    assert "without '_orig_mod.'" in source.notes[-1]


def test_a_module_is_filled_from_names_with_a_prefix(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    expected = module(torch.ones(1, 3)).detach().numpy()
    state = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"module": state}, tmp_path / "x.pt")
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with dualinfer.init_inference(empty, checkpoint=tmp_path / "x.pt", dtype="fp32") as engine:
        assert relative_rms(np.asarray(engine(torch.ones(1, 3)).detach()), expected) < 1e-6
        assert any("without 'module.'" in note for note in engine.report().notes)


def test_names_that_become_one_are_refused(tmp_path):
    module = torch.nn.Linear(3, 4)
    state = dict(module.state_dict())
    torch.save({"module.weight": state["weight"], "module.bias": state["bias"]}, tmp_path / "a.pt")
    wanted = Wanted({"weight": (4, 3), "bias": (4,), "x.weight": (4, 3), "x.bias": (4,)})
    torch.save(
        {"x._orig_mod.weight": state["weight"], "x._orig_mod._orig_mod.weight": state["weight"]},
        tmp_path / "b.pt",
    )
    assert {*fit(open_weights(tmp_path / "a.pt"), wanted).names()} == {"weight", "bias"}
    with pytest.raises(CheckpointError, match=r"two tensors have one name, 1: x\.weight"):
        fit(open_weights(tmp_path / "b.pt"), wanted)


def test_what_save_mp_checkpoint_path_wrote_fills_a_model(model_of, tmp_path):
    model, expected = model_of("gpt2")
    fields = {"kernel_inject": True, "save_mp_checkpoint_path": str(tmp_path / "out")}
    run(model, backend="jax", tp=2, **fields)
    logits, _ = run(on_meta(model), tmp_path / "out", backend="torch", kernel_inject=True)
    assert relative_rms(logits, expected) < 1e-5


COPIED = {
    "injected": ("bloom", lambda model, folder: save_injected(model, folder, 2, partitions=1)),
    "split": ("gpt2", FORMS["split"]),
    "ranks": ("llama-mha", FORMS["ranks"]),
    "megatron": ("gpt2", lambda model, folder: save_megatron(model, folder, 2, 2.0)),
}


@pytest.mark.parametrize("form", COPIED)
def test_a_ranks_file_that_is_a_copy_of_anothers_is_told(form, model_of, tmp_path):
    name, save = COPIED[form]
    model, _ = model_of(name)
    saved = save(model, tmp_path)
    kinds = (".pt", ".bin", ".pth")
    files = sorted(path for path in tmp_path.rglob("*") if path.suffix in kinds)
    ranks = [path for path in files if "non" not in path.name]
    ranks[1].write_bytes(ranks[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"holds the same weights as .*another rank"):
        source_of(model, saved)


# --- hostile files -------------------------------------------------------------------------------


def write_archive(path, pickled, records=()):
    """A file of torch.save's form around a pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, content in records:
            archive.writestr(f"archive/data/{name}", content)
    return path


def test_no_byte_beside_the_records_changes_what_is_read(tmp_path):
    """A bit of each byte of the headers of tensors and of the pickle, and of the archive's end."""
    state = {"a": torch.arange(6.0), "b": -torch.arange(6.0)}
    path = tmp_path / "whole.bin"
    torch.save(state, path)
    raw, expected = path.read_bytes(), {name: t.numpy() for name, t in state.items()}
    with zipfile.ZipFile(path) as archive:
        end, infos = archive.start_dir, archive.infolist()
    places = [*range(end, len(raw))]
    for info in infos:
        if "data" in info.filename:
            places += range(info.header_offset, info.header_offset + 30 + len(info.filename))
    bad, told = tmp_path / "bad.bin", 0
    for at in places:
        bad.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        try:
            file = open_torch_file(bad)
            for name, array in expected.items():
                np.testing.assert_array_equal(file.read(name), array)
        except CheckpointError:
            told += 1
    assert told > len(places) // 3


def test_records_that_lie_over_one_another_are_told(tmp_path):
    """A record with a header of its own within another's bytes, which is whole by itself."""
    state = {"a": torch.zeros(64), "b": torch.ones(4)}
    path = tmp_path / "whole.bin"
    torch.save(state, path)
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        outer, inner = (
            next(i for i in archive.infolist() if f"data/{n}" in i.filename) for n in "01"
        )
    skipped = int.from_bytes(raw[outer.header_offset + 28 : outer.header_offset + 30], "little")
    data = outer.header_offset + 30 + len(outer.filename) + skipped
    header = bytearray(raw[inner.header_offset : inner.header_offset + 30 + len(inner.filename)])
    header[28:30] = bytes(2)  # nothing but the name before its bytes
    raw[data : data + len(header)] = header
    entry = raw.rindex(inner.filename.encode()) - 46
    raw[entry + 42 : entry + 46] = data.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="lie over one another"):
        open_torch_file(path)


def test_an_old_file_that_is_of_another_machine_or_lies_is_told(tmp_path):
    path = tmp_path / "old.bin"
    torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    for old, new, message in [
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "big-endian machine"),
        (raw[-24:-16], struct.pack("<Q", 5), "a storage is of another length than its tensors say"),
    ]:
        assert raw.count(old) == 1
        path.write_bytes(raw.replace(old, new))
        with pytest.raises(CheckpointError, match=message):
            open_torch_file(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")  # zipfile's
def test_a_record_that_is_there_twice_is_told(tmp_path):
    path = tmp_path / "twice.bin"
    torch.save({"a": torch.ones(4)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        name = next(n for n in archive.namelist() if n.endswith("data/0"))
        archive.writestr(name, np.full(4, 7, np.float32).tobytes())
    with pytest.raises(CheckpointError, match="holds data/0 twice"):
        open_torch_file(path)


def text(value):
    """An opcode that pushes a short text."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def call(module, name, *arguments):
    """Opcodes that call something."""
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


HUGE = b"\x8a\x06" + (10**13).to_bytes(6, "little")
LAUGHS = b"}" + b"".join(
    b"q" + bytes([i]) + b"}(" + b"".join(text(f"k{n}") + b"h" + bytes([i]) for n in range(9)) + b"u"
    for i in range(30)
)
HOSTILE = {
    "bytearray of 10 TB": call("builtins", "bytearray", HUGE),
    "storage of 10 TB": call("torch", "FloatStorage", HUGE),
    "text of 2**60": b"\x8d" + struct.pack("<Q", 2**60),
    "bytes of 2**60": b"\x8e" + struct.pack("<Q", 2**60),
    "bytearray8 of 2**60": b"\x96" + struct.pack("<Q", 2**60),
    "memo of 2**32": b"}r\xff\xff\xff\xff",
    "memo that is not there": b"j\xff\xff\xff\xff",
    "deep tuple": b")" + b"\x85" * 20_000,
    "deep tuple as a key": b"})" + b"\x85" * 200_000 + b"Ns",
    "laughs": LAUGHS,
    "itself": b"}q\x00" + text("a") + b"h\x00s",
    "two of a name": b"}(" + text("a") + b"N" + text("a") + b"Nu",
    "no end": b"}" * 10,
    "mark as a value": b"((",
    "empty stack": b"0",
    "extension": b"\x82\x01",
    "buffer": b"\x97",
    "long of many digits": b"L" + b"9" * 100_000 + b"L\n",
    "persistent text": b"Pabc\n",
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "beside weights"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_errors(name, wrapped, tmp_path):
    body = HOSTILE[name]
    if wrapped:
        body = b"}(" + text("module") + body + text("x") + b"Nu"
    start = time.monotonic()
    with pytest.raises(CheckpointError):
        open_weights(write_archive(tmp_path / "x.pt", b"\x80\x02" + body + b"."))
    assert time.monotonic() - start < 10


def test_a_name_that_a_pickle_has_twice_is_told(tmp_path):
    body = b"\x80\x02" + HOSTILE["two of a name"] + b"."
    with pytest.raises(CheckpointError, match="names 'a' twice"):
        open_weights(write_archive(tmp_path / "x.pt", body))


class Bomb:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {os.environ['BOMB']}",)


@pytest.mark.parametrize("place", ["beside", "inside", "alone"])
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_runs(place, legacy, tmp_path, monkeypatch, model_of):
    model, _ = model_of("bloom")
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    state = OrderedDict(model.state_dict())
    content = {
        "beside": {"module": state, "x": Bomb()},
        "inside": {"module": state | {"x": Bomb()}},
        "alone": state | {"x": Bomb()},
    }[place]
    path = tmp_path / "x.pt"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    if place == "alone":
        with pytest.raises(CheckpointError, match="beside tensors"):
            open_weights(path)
    else:
        check_tensors(model, path)
    assert not (tmp_path / "exploded").exists()


def test_objects_of_a_training_are_stand_ins(tmp_path):
    said = training_file({"w": torch.ones(2)})
    torch.save(said, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        found = read_pickle(archive.read("x/data.pkl"))
    assert (
        isinstance(found.value["args"], Inert) and found.value["args"].kind == "argparse.Namespace"
    )
    assert found.value["lr_scheduler"].kind.endswith("deepspeed_files.Scheduler")
    assert found.value["global_steps"] == 7
    source = open_weights(tmp_path / "x.pt")
    np.testing.assert_array_equal(source.read("w"), np.ones(2))
    assert Scheduler().steps and argparse.Namespace()


def stored_tensor(
    count, *, offset=b"K\x00", shape=None, strides=b"K\x01\x85", storage="FloatStorage", part=b""
):
    """Opcodes that push a tensor of storage 0, of which `count` elements are said."""
    shape = shape or b"J" + struct.pack("<i", count) + b"\x85"
    names = text("storage") + b"ctorch\n" + storage.encode() + b"\n" + text("0") + text("cpu")
    kept = b"(" + names + b"J" + struct.pack("<i", count) + part + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + kept + offset + shape + strides
    return tensor + b"\x89" + call("collections", "OrderedDict") + b"tR"


def stored(count, *, more=b"", **fields):
    """A pickle of {"module": {"w": a tensor}, "x": an object}; `more` is in the inner dict, too."""
    module = b"}" + text("w") + stored_tensor(count, **fields) + b"s" + more
    odd = call("argparse", "Namespace")
    return b"\x80\x02}(" + text("module") + module + text("x") + odd + b"u."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 5}, "of 16 bytes, expected 20"),
        ({"count": -1}, "damaged .*: no storage"),
        ({"count": 4, "offset": b"K\x03"}, "it was expanded"),
        ({"count": 4, "shape": b"J\xff\xff\xff\x7f\x85", "strides": b"K\x00\x85"}, "was expanded"),
        ({"count": 4, "strides": b")"}, "strides of another shape"),
        ({"count": 4, "storage": "OddStorage"}, "without a record"),
        ({"count": 4, "part": b"(K\x00K\x02t"}, "damaged .*: no storage, or a part of another one"),
        ({"count": 4, "more": text("v") + stored_tensor(3) + b"s"}, "storage twice, and not alike"),
        (
            {
                "count": 1,
                "shape": b"(" + b"K\x01" * 65 + b"t",
                "strides": b"(" + b"K\x01" * 65 + b"t",
            },
            "damaged .*: a tensor without a shape",
        ),
    ],
    ids=str,
)
def test_tensors_that_the_file_does_not_hold_are_told(fields, message, tmp_path):
    record = [("0", np.arange(4, dtype=np.float32).tobytes())]
    good = write_archive(tmp_path / "good.pt", stored(4), record)
    np.testing.assert_array_equal(open_weights(good).read("w"), np.arange(4))
    twice = stored(4, part=b"N", more=text("v") + stored_tensor(4) + b"s")
    both = open_weights(write_archive(tmp_path / "twice.pt", twice, record))
    np.testing.assert_array_equal(both.read("v"), both.read("w"))
    with pytest.raises(CheckpointError, match=message):
        open_weights(write_archive(tmp_path / "x.pt", stored(**fields), record))


@pytest.mark.parametrize("legacy", [False, True])
def test_files_that_were_cut_are_errors(legacy, model_of, tmp_path):
    model, _ = model_of("bloom")
    buffer = io.BytesIO()
    torch.save(training_file(model.state_dict()), buffer, _use_new_zipfile_serialization=not legacy)
    content = buffer.getvalue()
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "x.pt").write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            open_weights(tmp_path / "x.pt")


def test_dicts_in_one_another_give_no_name_twice(tmp_path):
    w = torch.ones(2)
    torch.save({"model": {"a": {"b": w, "c": {"d": w + 1}}, "n": 5}}, tmp_path / "x.pt")
    source = open_weights(tmp_path / "x.pt")
    assert sorted(source.names()) == ["a.b", "a.c.d"]
    np.testing.assert_array_equal(source.read("a.c.d"), np.full(2, 2))
    torch.save({"model": {"x": {"a.b": w, "a": {"b": w}}}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"names 'x\.a\.b' twice"):
        open_weights(tmp_path / "x.pt")


def test_pickles_of_torch_are_read_as_torch_reads_them():
    for value in ({"a": [1, (2, 3.5, None, True)], "b": b"xy"}, [{"k": {"n": -(2**70)}}], "text"):
        for protocol in range(6):
            found = read_pickle(pickle.dumps(value, protocol))
            if protocol > 2 or not isinstance(value, dict):
                assert found.value == value
            assert found.size == len(pickle.dumps(value, protocol))
