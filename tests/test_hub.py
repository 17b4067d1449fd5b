"""Models by their names on the hub: what is fetched, from where, what is said where it fails."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from typer.testing import CliRunner

import dualinfer
from dualinfer import CheckpointError, CheckpointNotFoundError, ModelError
from dualinfer.checkpoint.hub import find_checkpoint
from dualinfer.cli import main as cli

from .checkpoints import write_byte_tokenizer, write_llama
from .hub import COMMIT, Hub, use_hub
from .models import BACKENDS

NAME = "owner/tiny"
IDS = np.arange(6)[None] + 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole checkpoint with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    write_llama(path, write_byte_tokenizer(path))
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    return path


@pytest.fixture
def hub(monkeypatch, tmp_path, folder):
    """A hub that knows `folder` as NAME, before an empty cache."""
    server = Hub()
    server.add(NAME, folder)
    use_hub(monkeypatch, server.url, tmp_path / "cache")
    yield server
    server.close()


def go_offline(hub, patch, tmp_path):
    use_hub(patch, hub.url, tmp_path / "cache", offline=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_name_is_the_folder_of_its_files(backend, hub, folder):
    with (
        dualinfer.init_inference(NAME, backend=backend) as engine,
        dualinfer.init_inference(folder, backend=backend) as expected,
    ):
        assert np.array_equal(engine(IDS).logits, expected(IDS).logits)
        assert COMMIT in engine.report().source and "owner--tiny" in engine.report().source


def test_what_is_needed_is_fetched_once(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    weights = hub.models[NAME]["model.safetensors"]
    spare = ("pytorch_model.bin", "consolidated.safetensors", "original/x.pth", "onnx/model.onnx")
    code = ("modeling_tiny.py", "README.md", "model-q4.gguf")
    hub.models[NAME] |= dict.fromkeys((*spare, *code), weights)
    hub.models[NAME]["chat_template.jinja"] = b"{{ messages }}"
    found = find_checkpoint(NAME)
    needed = {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"}
    assert {p.name for p in found.iterdir()} == {*needed, "tokenizer.json", "tokenizer_config.json"}
    assert sorted(hub.fetched()) == sorted(p.name for p in found.iterdir())
    assert "Bearer secret" in hub.tokens
    hub.requests.clear()
    assert find_checkpoint(NAME) == find_checkpoint(NAME, "main") == found
    assert find_checkpoint(NAME, COMMIT) == found and not hub.requests


def test_files_that_an_index_names_are_fetched_and_no_others(hub, folder):
    files = hub.models[NAME]
    weights = files.pop("model.safetensors")
    names = list(load_file(folder / "model.safetensors"))
    index = {"weight_map": dict.fromkeys(names, "model-1-of-1.safetensors")}
    files |= {"model.safetensors.index.json": json.dumps(index).encode()}
    files |= {"model-1-of-1.safetensors": weights, "model-9-of-9.safetensors": weights}
    find_checkpoint(NAME)
    assert "model-1-of-1.safetensors" in hub.fetched()
    assert "model-9-of-9.safetensors" not in hub.fetched()
    assert hub.fetched().count("model.safetensors.index.json") == 1
    hub.requests.clear()
    with dualinfer.init_inference(NAME) as engine:
        assert engine.report().parameters and not hub.requests


def test_other_forms_of_weights_are_fetched_where_they_are_all_there_is(hub, folder, tmp_path):
    del hub.models[NAME]["model.safetensors"]
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "weights")
    hub.models[NAME]["pytorch_model.bin"] = (tmp_path / "weights").read_bytes()
    assert (find_checkpoint(NAME) / "pytorch_model.bin").is_file()
    saved = tmp_path / "saved"
    with dualinfer.init_inference(folder, save_mp_checkpoint_path=saved, dtype="fp32"):
        hub.add("owner/saved", saved)
    with dualinfer.init_inference("owner/saved") as engine:
        assert engine.report().parameters


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_fetched_by_its_name_and_its_model_is_not(hub, folder, tmp_path):
    base = hf.LlamaForCausalLM.from_pretrained(folder, dtype="float32")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    said["base_model_name_or_path"] = NAME
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    hub.add("owner/adapter", tmp_path / "adapter")
    with pytest.raises(CheckpointNotFoundError, match=f"hf download {NAME}"):
        dualinfer.init_inference("owner/adapter")
    assert "model.safetensors" not in hub.fetched()
    with (
        dualinfer.init_inference(folder, adapter=tmp_path / "adapter", dtype="fp32") as expected,
        dualinfer.init_inference(NAME, adapter="owner/adapter", dtype="fp32") as both,
        dualinfer.init_inference("owner/adapter", dtype="fp32") as alone,
        dualinfer.init_inference(folder, dtype="fp32") as plain,
    ):
        logits = expected(IDS).logits
        assert np.array_equal(both(IDS).logits, logits)
        assert np.array_equal(alone(IDS).logits, logits)
        assert not np.array_equal(plain(IDS).logits, logits)


def test_folder_wins_over_a_model_of_the_hub(hub, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / NAME).symlink_to(folder)
    assert find_checkpoint(NAME).samefile(folder) and not hub.requests
    with pytest.raises(CheckpointError, match=r"revision='v1'.*is a folder here.*Leave revision"):
        find_checkpoint(NAME, "v1")


def test_model_without_a_generation_config_is_asked_for_once(hub):
    del hub.models[NAME]["generation_config.json"]
    find_checkpoint(NAME)
    hub.requests.clear()
    find_checkpoint(NAME)
    assert not hub.requests


def write_cache(root, folder, names, absent=()):
    """A cache as huggingface_hub lays it out, with links to blobs."""
    home = root / "models--owner--tiny"
    for part in ("refs", "blobs", f"snapshots/{COMMIT}", f".no_exist/{COMMIT}"):
        (home / part).mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for name in absent:
        (home / f".no_exist/{COMMIT}" / name).touch()
    for i, name in enumerate(names):
        (home / "blobs" / str(i)).write_bytes((folder / name).read_bytes())
        (home / f"snapshots/{COMMIT}" / name).symlink_to(f"../../blobs/{i}")


def test_whole_model_in_the_cache_is_run_without_a_network(hub, folder, tmp_path, monkeypatch):
    write_cache(tmp_path / "cache", folder, os.listdir(folder))
    with dualinfer.init_inference(NAME) as engine:
        assert engine(IDS).logits.shape == (1, 6, 259)
    go_offline(hub, monkeypatch, tmp_path)
    find_checkpoint(NAME)
    assert not hub.requests


def add_modules(files, folder):
    """First tokens, a dense layer stored in the old form, length 1; in folders of odd names."""
    kinds = {"": "Transformer", "pool": "Pooling", "9_Dense": "Dense", "n": "Normalize"}
    types = {path: f"sentence_transformers.models.{kind}" for path, kind in kinds.items()}
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 48))).float()
    torch.save({"linear.weight": weight}, folder / "dense")
    said = {
        "modules.json": [{"path": path, "type": kind} for path, kind in types.items()],
        "pool/config.json": {"pooling_mode_cls_token": True},
        "9_Dense/config.json": {"bias": False},
        "config_sentence_transformers.json": {
            "prompts": {"ask": "?"},
            "default_prompt_name": "ask",
        },
    }
    files |= {name: json.dumps(value).encode() for name, value in said.items()}
    files["9_Dense/pytorch_model.bin"] = (folder / "dense").read_bytes()
    return weight.numpy()


def vectors_by_modules(folder, weight):
    with dualinfer.init_inference(folder, dtype="fp32") as engine:
        x = engine.embed(["?one", "?two"], pooling="cls") @ weight.T
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_how_a_model_embeds_is_fetched_with_it(hub, folder, tmp_path, monkeypatch):
    weight = add_modules(hub.models[NAME], tmp_path)
    find_checkpoint(NAME)
    go_offline(hub, monkeypatch, tmp_path)
    with dualinfer.init_inference(NAME, dtype="fp32") as engine:
        found = engine.embed(["one", "two"])
        assert np.allclose(engine.embed("?one", prompt_name="query"), found[0], atol=1e-6)
    assert np.allclose(found, vectors_by_modules(folder, weight), atol=1e-5)


def test_how_a_model_embeds_is_fetched_where_another_library_left_it(
    hub, folder, tmp_path, monkeypatch
):
    weight = add_modules(hub.models[NAME], tmp_path)
    write_cache(tmp_path / "cache", folder, os.listdir(folder))
    module = hf.AutoModelForCausalLM.from_pretrained(folder)
    module.config._name_or_path = module.name_or_path = module.model.name_or_path = NAME
    match = r"'owner/tiny' is a model of the hub, and .*HF_HUB_OFFLINE=0 hf download.*pass pooling="

    def refuses(of, **more):
        with monkeypatch.context() as patch:
            go_offline(hub, patch, tmp_path)
            with dualinfer.init_inference(of, dtype="fp32", **more) as engine:
                with pytest.raises(CheckpointNotFoundError, match=match):
                    engine.embed([[3, 4]])
                assert engine.embed([[3, 4]], pooling="mean").shape == (1, 48)

    refuses(NAME)
    snapshot = tmp_path / "cache" / "models--owner--tiny" / "snapshots" / COMMIT
    (snapshot / "modules.json").write_bytes(hub.models[NAME]["modules.json"])
    refuses(module, replace_with_kernel_inject=True)
    expected = vectors_by_modules(folder, weight)
    with dualinfer.init_inference(NAME, dtype="fp32") as engine:
        assert not hub.fetched()
        assert np.allclose(engine.embed(["one", "two"]), expected, atol=1e-5)
    hub.requests.clear()
    with dualinfer.init_inference(module, replace_with_kernel_inject=True) as engine:
        assert engine.embed([[64, 112], [65]]).shape == (2, 5) and not hub.requests


def test_a_model_that_says_nothing_of_texts_has_the_mean(hub, folder, tmp_path, monkeypatch):
    find_checkpoint(NAME)
    go_offline(hub, monkeypatch, tmp_path)
    with dualinfer.init_inference(NAME, dtype="fp32") as engine:
        assert np.array_equal(engine.embed("one"), engine.embed("one", pooling="mean"))
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    (part / "1_Pooling").mkdir()
    (part / "1_Pooling" / "config.json").write_text("{}")
    match = r"holds 1_Pooling, but no modules.json"
    with (
        dualinfer.init_inference(part, dtype="fp32") as engine,
        pytest.raises(CheckpointNotFoundError, match=match),
    ):
        engine.embed("one")


def test_a_name_in_other_letters_hints_at_the_one_that_is_there(hub, folder, tmp_path, monkeypatch):
    write_cache(tmp_path / "cache", folder, os.listdir(folder))
    for is_offline in (False, True):
        with monkeypatch.context() as patch:
            if is_offline:
                go_offline(hub, patch, tmp_path)
            with pytest.raises(
                CheckpointNotFoundError, match=r"here \(the local cache holds 'owner/tiny'\), and"
            ):
                find_checkpoint("Owner/Tiny")
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "my" / "models", 40)
    for name, hint in (("./My/models", "does"), ("my/Models", "is"), (Path("MY/MODELS"), "does")):
        with pytest.raises(CheckpointNotFoundError, match=rf" \('my/models' {hint}\)"):
            find_checkpoint(name)
    with pytest.raises(CheckpointNotFoundError, match="'other' does not exist;"):
        find_checkpoint("./other")


def test_part_of_a_model_in_the_cache_is_completed(hub, folder, tmp_path, monkeypatch):
    write_cache(tmp_path / "cache", folder, ["config.json", "tokenizer_config.json"])
    with monkeypatch.context() as patch:
        go_offline(hub, patch, tmp_path)
        with pytest.raises(
            CheckpointNotFoundError, match="HF_HUB_OFFLINE=0 hf download owner/tiny"
        ):
            find_checkpoint(NAME)
    assert (find_checkpoint(NAME) / "model.safetensors").is_file()


def test_weights_in_the_cache_serve_where_the_hub_cannot_be_asked_for_the_rest(
    hub, folder, tmp_path, monkeypatch
):
    names = ["config.json", "model.safetensors", "tokenizer_config.json"]
    write_cache(tmp_path / "cache", folder, names)
    with monkeypatch.context() as patch:
        go_offline(hub, patch, tmp_path)
        assert sorted(os.listdir(find_checkpoint(NAME))) == sorted(names)
    find_checkpoint(NAME)
    assert "generation_config.json" in hub.fetched()


def test_without_a_network_the_command_is_told(tmp_path, monkeypatch):
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    match = r"cannot|failed \(.*\)\. .*`hf download owner/tiny --revision v1`.*--local-dir FOLDER"
    with pytest.raises(CheckpointNotFoundError, match=match):
        dualinfer.init_inference(NAME, revision="v1")


def test_what_the_hub_refuses_is_told_apart(hub, monkeypatch, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"no folder here, and .*no model of that"):
        find_checkpoint("owner/none")
    with pytest.raises(CheckpointNotFoundError, match=r"no revision 'v9'.*/owner/tiny/commits"):
        dualinfer.init_inference(NAME, revision="v9")
    hub.gated.add(NAME)
    with pytest.raises(CheckpointError, match=r"gated.*Ask at .*owner/tiny.*hf auth login"):
        find_checkpoint(NAME)
    hub.models["owner/gguf"] = {"config.json": b"{}", "model-q4.gguf": b""}
    with pytest.raises(CheckpointNotFoundError, match=r"holds config.json, model-q4.gguf, and"):
        find_checkpoint("owner/gguf")
    hub.models["owner/adapter"] = {"adapter_config.json": b'{"peft_type": "LORA"}'}
    with pytest.raises(CheckpointError, match=r"holds no model, but an adapter of peft \(LORA"):
        find_checkpoint("owner/adapter")
    with pytest.raises(CheckpointError, match=r"alone and does not name its model"):
        dualinfer.init_inference("owner/adapter")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="folder 'models' is, without 'none'"):
        find_checkpoint("models/none")


@pytest.mark.parametrize(
    "path",
    ["./tiny", "/tiny", "~/tiny", "a/b/c", "a\\b", "../x", "tiny/", "m.gguf", "x.safetensors"],
)
def test_paths_are_never_asked_for(path, hub, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"does not exist; .*a model of the hub"):
        dualinfer.init_inference(path)
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        dualinfer.init_inference(tmp_path / "owner")
    assert not hub.requests


def test_revision_needs_a_model_of_the_hub(hf_model):
    with pytest.raises(ModelError, match=r"revision='v1'.*LlamaForCausalLM.*Leave revision out"):
        dualinfer.init_inference(hf_model("llama-mqa"), revision="v1")
    with pytest.raises(ModelError, match="revision=5: expected the name"):
        dualinfer.init_inference(NAME, revision=5)


def test_empty_module_is_filled_from_the_hub(hub, folder):
    with torch.device("meta"):
        module = hf.LlamaForCausalLM(hf.LlamaConfig.from_pretrained(folder))
    with dualinfer.init_inference(module, checkpoint=NAME, dtype="fp32") as engine:
        logits = engine(torch.from_numpy(IDS)).logits
    with dualinfer.init_inference(folder) as expected:
        assert torch.allclose(logits, torch.from_numpy(expected(IDS).logits), atol=1e-4)


def test_commands_take_names(hub, folder):
    def run(*arguments):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "LlamaForCausalLM" in run("plan", NAME, "--tp", 1)
    assert hub.fetched() == ["config.json"]
    options = ("hello", "--max-new-tokens", 4, "--backend", "torch")
    assert run("generate", NAME, *options) == run("generate", folder, *options)


def test_plan_of_a_quantized_name_says_how_to_fetch_its_weights(hub):
    config = json.loads(hub.models[NAME]["config.json"])
    config["quantization_config"] = {"quant_method": "fp8"}
    hub.models[NAME]["config.json"] = json.dumps(config).encode()
    result = CliRunner().invoke(cli.app, ["plan", NAME, "--tp", "2", "--revision", "main"])
    assert result.exit_code == 1 and hub.fetched() == ["config.json"]
    command = f"Fetch them with `hf download {NAME} --revision main`, and plan again."
    assert command in " ".join(result.stderr.split())


def find_on_rank(url, cache, name):
    """What a rank finds; its error's text where it fails."""
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, url, cache)
        try:
            with dualinfer.init_inference(name, mp_size=2) as engine:
                return engine.report().parameters
        except dualinfer.DualinferError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.xdist_group("ranks")
@pytest.mark.filterwarnings("ignore:mp_size")
def test_one_of_several_processes_fetches(hub, crew, tmp_path):
    counts = crew.run(find_on_rank, hub.url, tmp_path / "cache", NAME)
    assert len(counts) == 2 and all(isinstance(count, int) for count in counts)
    assert len(hub.fetched()) == len(set(hub.fetched())) == 5
    first, other = crew.run(find_on_rank, hub.url, tmp_path / "cache", "owner/none")
    assert first.startswith("CheckpointNotFoundError: 'owner/none' is no folder here")
    assert re.match(r"DistributedError: Finding the model failed elsewhere. rank 0: .*none", other)
