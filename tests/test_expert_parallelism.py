"""Experts that several devices share out, whole or cut by width as well, on both backends."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dualinfer import ConfigError, init_inference
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.config import MoEConfig
from dualinfer.model.families import describe_model
from dualinfer.model.load_plan import TableSource, make_load_plan
from dualinfer.parallel.experts import describe_experts, most_chosen, parts_of_experts
from dualinfer.parallel.sharding import make_places, make_plan

from .cases import make_model
from .cases.mixtures import VOCAB, chosen_by
from .models import random_ids, relative_rms
from .ranks import RankError
from .test_mixtures import remember_routes

pytestmark = [
    pytest.mark.xdist_group("ranks"),  # whose processes live through a run
    pytest.mark.usefixtures("greedy"),
]
FUSED = {"dtype": "fp32", "replace_with_kernel_inject": True}
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
EVEN = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
EVEN |= {"num_key_value_heads": 2, "moe_intermediate_size": 64}
EVEN |= {"shared_expert_intermediate_size": 64}


def made(case):
    if case in ("axk1", "deepseek_v2, experts", "glm4_moe_lite"):
        return make_model(case)
    return make_model(case.removesuffix(", even"), **(EVEN if case.endswith(", even") else {}))


def batch(vocab=VOCAB):
    """Two sequences, one of them padded on the left."""
    ids, mask = random_ids(2, 11, vocab=vocab), np.ones((2, 11), np.int64)
    mask[1, :4], ids[1, :4] = 0, 0
    return ids, mask


def shared(case, backend, devices, parts, quant=None):
    """Logits of real tokens, and text, of a model whose experts so many devices have in parts."""
    model, (ids, mask) = made(case), batch(99)
    how = {"backend": backend, "tensor_parallel": {"tp_size": devices}, "quant": quant}
    with init_inference(model, moe={"ep_size": parts}, **how, **FUSED) as engine:
        logits, text = np.asarray(engine(ids, attention_mask=mask).logits), None
        if backend == "torch":  # on JAX it takes seconds to compile
            text = np.asarray(engine.generate(ids, attention_mask=mask, **GREEDY))
        notes = " ".join(engine.report().notes)
        assert ("ep_size" in notes) == (devices > 1)
        return logits[mask > 0], text


CASES_OF_PLAIN = [
    ("qwen2_moe", "torch", 3, 3, None, True),
    ("qwen2_moe", "jax", 4, 2, None, True),
    ("qwen2_moe", "torch", 2, 2, None, False),
    ("qwen2_moe", "torch", 4, 2, None, False),
    ("qwen2_moe", "torch", 4, 4, None, False),
    ("qwen2_moe", "jax", 3, 3, None, False),
    ("qwen2_moe, one layer dense", "jax", 4, 4, None, False),
    ("gpt_oss", "torch", 3, 3, None, False),
    ("gpt_oss", "torch", 4, 2, None, False),
    ("gpt_oss", "jax", 4, 2, None, False),
    ("glm4_moe", "torch", 4, 2, None, False),
    ("granitemoe", "torch", 2, 2, None, False),
    ("afmoe", "torch", 4, 2, None, False),
    ("cohere2_moe", "jax", 2, 2, None, False),
    ("dbrx", "jax", 4, 2, None, False),
    ("mixtral", "jax", 2, 2, None, False),
    ("hunyuan_v1_moe", "torch", 4, 2, None, False),
    ("llama4", "torch", 4, 2, None, False),
    ("llama4, one expert", "jax", 3, 3, None, False),
    ("deepseek_v2, experts", "torch", 4, 2, None, False),
    ("glm4_moe_lite", "jax", 3, 3, None, False),
    ("qwen2_moe, even", "torch", 4, 2, "int4", False),
    ("qwen2_moe, even", "jax", 4, 2, "int4", False),
    ("qwen2_moe, even", "torch", 2, 2, "fp8", False),
    ("gpt_oss", "torch", 4, 2, "int8", False),
    ("qwen2_moe, even", "torch", 4, 2, "int8_w8a8", False),
    ("qwen2_moe, even", "jax", 4, 2, "int8_w8a8", False),
]
SHARED = [
    pytest.param(*case, marks=[] if quick else [pytest.mark.slow])
    for *case, quick in CASES_OF_PLAIN
]


@pytest.mark.parametrize(("case", "backend", "devices", "parts", "quant"), SHARED)
def test_experts_in_parts_give_what_one_device_gives(case, backend, devices, parts, quant, crew):
    """Five or six experts in two, three and four parts, whole or cut by their width."""
    if backend == "torch":
        found = crew.run(shared, case, backend, devices, parts, quant, world=devices)
    else:
        found = [shared(case, backend, devices, parts, quant)]
    # One device gives the same on both backends, and on torch nothing is compiled.
    logits, text = shared(case, "torch" if quant is None else backend, 1, 1, quant)
    for ours, own in found:
        # Codes of inputs lie between two where sums differ by their roundings.
        assert relative_rms(ours, logits) < (1e-5 if quant != "int8_w8a8" else 2e-3)
        if backend == "torch" and quant != "int8_w8a8":
            np.testing.assert_array_equal(own, text)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_experts_that_no_token_chose_change_no_bit(backend, monkeypatch, crew):
    if backend == "torch":
        _, chosen = chosen_by(one_of_many(), random_ids(1, 8, vocab=9))
        assert all(crew.run(unread_experts_change_nothing, "torch", chosen))
        return
    routes = remember_routes("jax", monkeypatch)
    with init_inference(one_of_many(), backend="jax", **FUSED) as engine:
        engine(random_ids(1, 8, vocab=9))
    monkeypatch.undo()
    assert unread_experts_change_nothing("jax", routes)  # padding chooses, too


def one_of_many():
    return make_model("qwen2_moe", num_experts=24, num_experts_per_tok=1)


def unread_experts_change_nothing(backend, chosen):
    """Whether logits over two devices stay as they are with NaN in every expert never chosen."""
    model, ids = one_of_many(), random_ids(1, 8, vocab=9)
    how = {"backend": backend, "moe": {"ep_size": 2}, **FUSED}
    with init_inference(model, **how) as engine:
        before = np.asarray(engine(ids).logits)
    with torch.no_grad():
        for layer, own in zip(model.model.layers, chosen, strict=True):
            unread = np.setdiff1d(np.arange(24), own)
            assert len(unread) >= 7
            for part in ("gate_up_proj", "down_proj"):
                getattr(layer.mlp.experts, part)[unread] = math.nan
    with init_inference(model, **how) as engine:
        after = np.asarray(engine(ids).logits)
    return bool((before == after).all() and np.isfinite(after).all())


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("devices", "parts"), [(2, 2), (3, 3), (4, 2), (6, 3), (5, 5)])
def test_each_element_of_every_expert_is_held_once(devices, parts, equal):
    """And read once from a file."""
    _, table = describe_model(make_model("qwen2_moe").config.to_dict())
    plan = make_plan(table, devices, 1, equal, parts)
    loads = make_load_plan(table, TableSource(table, "float32", "a test"))
    rows = [row for row, _ in loads.rows if row.local_name.startswith("experts.")]
    assert len(rows) == 4
    for row in rows:
        read = {source.name: np.zeros(table.shape(row, source.axes)) for source in row.sources}
        for shard in plan.shards:
            for source in row.sources:
                for own in shard.reads(row, source):
                    read[source.name][own.index] += 1
        assert len(read) == 5 * (1 + row.local_name.startswith("experts.up"))
        assert all((times == 1).all() for times in read.values())
        extents = [shard.share("experts", row.layer) for shard in plan.shards]
        assert max(own.real for own in extents) - min(own.real for own in extents) <= 1


def test_a_device_opens_no_tensor_of_anothers_experts(tmp_path, crew):
    """Of a checkpoint with a tensor for each expert, by what is read."""
    make_model("qwen2_moe").save_pretrained(tmp_path)
    found = crew.run(tensors_read, str(tmp_path), 2, world=2)
    experts = [{name for name in names if ".experts." in name} for names in found]
    numbers = [{int(n.split(".experts.")[1].split(".")[0]) for n in own} for own in experts]
    assert numbers == [{0, 1, 2}, {3, 4}]
    assert not experts[0] & experts[1]
    assert all("model.layers.0.mlp.gate.weight" in names for names in found)


def tensors_read(folder, parts):
    """The names of the tensors of which this rank reads anything."""
    source = type(open_checkpoint(Path(folder)))
    names, read = set(), source.read

    def remember(self, name, index=None):
        found = read(self, name, index)
        if found.size > 60:  # a few values are compared with other processes'
            names.add(name)
        return found

    source.read = remember
    try:
        with init_inference(folder, backend="torch", moe={"ep_size": parts}, **FUSED):
            return sorted(names)
    finally:
        source.read = read


def in_groups(by):
    """Which experts ranks have by groups of their own, and what they compute, or the error."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def own(groups):
        made = [dist.new_group(ranks) for ranks in groups]
        return next(g for g, ranks in zip(made, groups, strict=True) if rank in ranks)

    fields = {name: own(groups) for name, groups in by.items()}
    parallel = {"tp_size": dist.get_world_size()}
    ids = random_ids(2, 11, vocab=VOCAB)
    with init_inference(
        make_model("qwen2_moe"), backend="torch", tensor_parallel=parallel, moe=fields, **FUSED
    ) as engine:
        shard = engine._runner._shard
        share = shard.share("experts", 0)
        width = shard.share("ffn", 0)
        return (share.start, share.stop), (width.start, width.stop), np.asarray(engine(ids).logits)


GROUPS = {
    "rows": {"ep_group": [[0, 1], [2, 3]]},
    "columns": {"ep_group": [[0, 2], [1, 3]], "ep_mp_group": [[0, 1], [2, 3]]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_the_caller_say_who_has_which_experts(name, crew):
    found = crew.run(in_groups, GROUPS[name], world=4)
    wide, narrow = (0, 3), (3, 5)
    experts = {"rows": [wide, narrow] * 2, "columns": [wide] * 2 + [narrow] * 2}[name]
    widths = {"rows": [0, 0, 1, 1], "columns": [0, 1, 0, 1]}[name]
    assert [own[0] for own in found] == experts
    assert [own[1] for own in found] == [((0, 10), (10, 19))[i] for i in widths]
    with init_inference(make_model("qwen2_moe"), backend="torch", **FUSED) as engine:
        logits = np.asarray(engine(random_ids(2, 11, vocab=VOCAB)).logits)
    assert all(relative_rms(own[2], logits) < 1e-5 for own in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "message"),
    [
        ({"ep_group": [[0, 1], [2, 3]], "ep_mp_group": [[0, 1], [2, 3]]}, "share one of each"),
        ({"ep_group": [[0, 1], [2, 3]], "ep_size": 4}, "ep_group has 2 processes"),
        ({"ep_mp_group": [[0, 1], [2, 3]]}, "are expected"),
    ],
)
def test_groups_that_do_not_fit_are_refused_in_every_process(by, message, crew):
    with pytest.raises(RankError, match=message) as error:
        crew.run(in_groups_of, by, world=4)
    assert set(error.value.kinds) == {"ConfigError"}


def in_groups_of(by):
    sizes = {n: v for n, v in by.items() if isinstance(v, int)}
    if not sizes:
        return in_groups(by)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    groups = [dist.new_group(ranks) for ranks in by["ep_group"]]
    moe = {"ep_group": groups[dist.get_rank() // 2], **sizes}
    return init_inference(make_model("qwen2_moe"), backend="torch", moe=moe, **FUSED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe": {"ep_size": 2}, "tp": {"tp_size": 3}}, "ep_size=2, and 3 devices share"),
        ({"moe": {"ep_size": 4}}, "has 3 experts in each of 2 layers.*at most 3"),
        ({"moe": {"moe_experts": [8]}}, r"moe_experts=\[8\]: .* has 5 experts .* Use 5"),
        ({"moe": {"num_experts": [5, 5, 5]}}, "has 5 experts"),
        ({"moe": {"ep_size": 2, "ep_group": object()}}, "processes in groups are torch's"),
        ({"moe": {"ep_size": 2}, "tp": {"enabled": False}}, "and one device has the model"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_with_its_own_numbers(fields, message):
    model = make_model("qwen2_moe", **({"num_experts": 3} if "3 experts" in message else {}))
    with pytest.raises(ConfigError, match=message):
        init_inference(model, backend="jax", **fields, **FUSED)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_model_without_experts_has_none_to_share_out(backend, crew):
    if backend == "torch":
        with pytest.raises(RankError, match="has no experts to share out"):
            crew.run(without_experts, backend, world=2)
    else:
        with pytest.raises(ConfigError, match=r"no experts to share out.*tp_size=2"):
            without_experts(backend)
    with pytest.raises(ConfigError, match=r"moe_experts=\[8\]: .* has no experts"):
        init_inference(make_model("gpt2"), backend=backend, moe={"moe_experts": 8}, **FUSED)


def without_experts(backend):
    init_inference(make_model("gpt2"), backend=backend, moe={"ep_size": 2}, **FUSED)


@pytest.mark.parametrize("moe", [{"ep_size": 2}, {"moe_experts": 5}, {"ep_group": object()}])
def test_module_mode_shares_no_experts_out(moe):
    reason = r"in module mode that is for DeepSpeed's.*replace_with_kernel_inject=True|no size\(\)"
    with pytest.raises(ConfigError, match=reason):
        init_inference(make_model("qwen2_moe"), backend="torch", moe=moe, tp={"enabled": False})


def test_what_asks_for_nothing_and_the_models_own_numbers_are_taken():
    for moe in ({"num_experts": 5}, {"moe_experts": [5, 5]}, {"enabled": False, "ep_size": 7}):
        with init_inference(make_model("qwen2_moe"), backend="torch", moe=moe, **FUSED) as engine:
            assert engine.report() is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ep_size.*")
def test_the_old_name_shares_the_model_by_as_many_devices():
    ids, mask = batch()
    with init_inference(make_model("mixtral"), backend="jax", ep_size=3, **FUSED) as engine:
        config = engine.inference_config
        assert (config.moe.ep_size, config.tensor_parallel.tp_size) == (3, 3)
        found = np.asarray(engine(ids, attention_mask=mask).logits)
        assert "experts 2 of 5" in " ".join(engine.report().notes)
        again = np.asarray(engine.apply(engine.params, ids, attention_mask=mask)[0])
        np.testing.assert_allclose(again[mask > 0], found[mask > 0], rtol=1e-5, atol=1e-5)
    with init_inference(make_model("mixtral"), backend="jax", **FUSED) as engine:
        wanted = np.asarray(engine(ids, attention_mask=mask).logits)
    assert relative_rms(found[mask > 0], wanted[mask > 0]) < 1e-5


def test_the_most_that_one_part_has_is_the_mean_over_all_choices():
    for shares, chosen in [((3, 2), 3), ((2, 2, 1), 3), ((2, 1, 1, 1), 2), ((3, 3), 6)]:
        owners = [part for part, own in enumerate(shares) for _ in range(own)]
        most = [
            max(np.bincount([owners[i] for i in own]))
            for own in itertools.combinations(range(len(owners)), chosen)
        ]
        assert most_chosen(shares, chosen) == pytest.approx(np.mean(most))
    gains = [8 / most_chosen([128 // n] * n, 8) for n in (2, 4)]
    assert gains == pytest.approx([1.57, 2.26], abs=0.05)  # of ones drawn by lot


def test_a_plan_says_how_experts_are_shared():
    spec, table = describe_model(make_model("qwen2_moe").config.to_dict())
    assert parts_of_experts(MoEConfig(ep_size=2), spec, 4) == 2
    (cut,) = describe_experts(make_plan(table, 4))
    assert "ep_size 1" in cut and "evenly" in cut
    (parts,) = describe_experts(make_plan(table, 4, expert_parts=2))
    assert "5 in 2 parts (1 of 3, 1 of 2), the width of each cut for 2 devices" in parts
    assert describe_experts(make_plan(table, 1)) == []
    assert [tuple(place) for place in make_places(4, 2)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_plan_shows_the_experts_of_each_device(tmp_path):
    testing = pytest.importorskip("typer.testing")
    from dualinfer.cli.main import app

    make_model("glm4_moe").config.save_pretrained(tmp_path)  # whose first layer is dense
    run = testing.CliRunner(env={"COLUMNS": "200"}).invoke
    result = run(app, ["plan", str(tmp_path), "--tp", "4", "--ep", "4"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "layers.1.experts.up.weight [6, 38, 60] [2 | 2 | 1 | 1, 38, 60] experts " in text
    assert "(ep_size 4): 6 in 4 parts (2 of 2, 2 of 1)" in text
    assert "experts vocabulary" in text
    refused = run(app, ["plan", str(tmp_path), "--tp", "4", "--ep", "3"])
    assert refused.exit_code == 1 and "must divide" in " ".join(refused.output.split())


@pytest.mark.slow
def test_bench_measures_experts_in_parts(tmp_path, monkeypatch):
    testing = pytest.importorskip("typer.testing")
    import json

    from dualinfer.cli.main import app

    make_model("qwen2_moe").save_pretrained(tmp_path / "model")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    command = ["bench", "decode", str(tmp_path / "model"), "--tp", "2", "--ep", "2"]
    command += ["--backend", "jax", "--prompt", "5", "--new-tokens", "16", "--repeats", "2"]
    command += ["--dtype", "fp32", "--json", str(tmp_path / "rows.json")]
    result = testing.CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "on 2, ep 2" in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    found = sorted((row["system"], row["tp"], row["ep"]) for row in rows)
    assert found == [("jax", 2, 2)]  # of torch, test_bench runs two processes
    assert all(row["tokens_per_s"] > 0 for row in rows)


def saved_and_refreshed(folder, case="qwen2_moe"):
    """Logits of two ranks, of what they saved, and after weights changed and were read again."""
    model, ids = make_model(case), random_ids(2, 11, vocab=VOCAB)
    how = {"backend": "torch", "moe": {"ep_size": 2}, **FUSED}
    with init_inference(model, save_mp_checkpoint_path=folder, **how) as engine:
        first = np.asarray(engine(ids).logits)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.experts.down_proj.mul_(1.5)
        engine.refresh()
        changed = np.asarray(engine(ids).logits)
        wanted = model(torch.tensor(ids)).logits.detach().numpy()
    with init_inference(folder, **how) as engine:
        return first, np.asarray(engine(ids).logits), changed, wanted


@pytest.mark.slow
def test_what_ranks_save_and_read_again_is_the_model(tmp_path, crew):
    for first, again, changed, wanted in crew.run(saved_and_refreshed, str(tmp_path / "x")):
        assert relative_rms(again, first) < 1e-6
        assert relative_rms(changed, wanted) < 1e-5 < relative_rms(first, wanted)
