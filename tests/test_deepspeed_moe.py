"""Module mode of modules with DeepSpeed's MoE layers: the rules, splits, checkpoints, refusals."""

import copy

import pytest
import torch

import dualinfer
from dualinfer import CheckpointError, ConfigError, ModelError, UnsupportedError
from dualinfer.backends.torch.module.autotp.plan import describe
from dualinfer.backends.torch.module.mixtures import MixtureLayer, Mixtures, route
from dualinfer.config.nested import MoEConfig

from . import deepspeed_files, deepspeed_moe
from .deepspeed_moe import Feed, Mlp, MoE, Odd, make_model
from .models import relative_rms

EXACT = {"use_rts": False, "top2_2nd_expert_sampling": False, "eval_capacity_factor": 0.6}
IDS = torch.randperm(37, generator=torch.Generator().manual_seed(1))[:22].reshape(2, 11)


def _serve(model, **fields):
    return dualinfer.init_inference(model, dtype="fp32", **fields)


def _expected(model, ids=IDS, drops=False):
    """Logits, and each layer's loss and counts, of the stand-in's own arithmetic."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.moe.deepspeed_moe.gate.drop_tokens = drops
    with torch.no_grad():
        return model(ids), [layer.losses[0] for layer in model.layers]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("k", "expert"), [(1, Mlp), (1, Odd), (2, Odd), (2, Mlp), (3, Mlp)])
def test_layers_equal_the_rules(k, expert, residual, drops):
    fields = {"num_experts": 5, "k": k, "use_residual": residual, "expert": expert}
    model = make_model(**fields, **EXACT, min_capacity=2)
    expected, losses = _expected(model, drops=drops)
    with _serve(model, moe={"drop_tokens": drops}) as engine:
        assert relative_rms(engine(IDS), expected) < 1e-5
        for layer, (loss, counts) in zip(model.layers, losses, strict=True):
            own_loss, own_counts = layer.losses[0]
            torch.testing.assert_close(own_loss, loss)
            assert torch.equal(own_counts, counts)
        one = engine(IDS[:1, :1])  # fewer tokens than min_capacity
        assert relative_rms(one, _expected(model, IDS[:1, :1])[0]) < 1e-5
        assert "DeepSpeed's MoE layers: 2 of 5 experts" in "\n".join(engine.report().notes)
    assert type(model.layers[0].moe.deepspeed_moe) is deepspeed_moe.MOELayer  # as it was
    with torch.no_grad():
        assert relative_rms(model(IDS), _expected(model, drops=True)[0]) < 1e-5


def test_drops_are_other_values_than_no_drops():
    model = make_model(num_experts=5, k=2, **EXACT, min_capacity=1)
    whole, dropped = (_expected(model, drops=drops)[0] for drops in (False, True))
    assert relative_rms(whole, dropped) > 1e-2


def test_unused_tokens_go_to_no_expert():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    used = torch.tensor([1, 0, 1, 1, 0, 1])
    routes = route(logits, 1, None, used)
    assert routes.kept.sum(1).tolist() == used.tolist() and int(routes.counts.sum()) == 4
    assert torch.equal(route(logits, 2, None, used).kept, route(logits, 2).kept)


@pytest.mark.parametrize("k", [1, 2])
def test_captured_form_gives_the_same(k):
    model = make_model(num_experts=4, k=k)
    Mixtures(model, MoEConfig()).put()
    layer = model.layers[0].moe.deepspeed_moe
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    routes = route(x @ layer.gate.wg.weight.T, k)
    chosen, all_tokens = torch.zeros(7, 12), torch.zeros(7, 12)
    with torch.no_grad():
        layer._add_chosen(x, routes, chosen)
        layer._add_all(x, routes, all_tokens)
    assert relative_rms(all_tokens, chosen) < 1e-6


def test_two_engines_of_one_module_take_turns():
    model = make_model(num_experts=4, k=2, **EXACT, min_capacity=1)
    whole, dropped = (_expected(model, drops=drops)[0] for drops in (False, True))
    with _serve(model) as one, _serve(model, moe={"drop_tokens": True}) as other:
        for _ in range(2):
            assert relative_rms(one(IDS), whole) < 1e-5
            assert relative_rms(other(IDS), dropped) < 1e-5
        other.close()
        assert relative_rms(one(IDS), whole) < 1e-5
    assert not any(isinstance(part, MixtureLayer) for part in model.modules())


def test_hooks_of_the_layer_still_run():
    model, seen = make_model(num_experts=4), []
    layer = model.layers[1].moe.deepspeed_moe
    layer.register_forward_hook(lambda _, args, output: seen.append(output.shape))
    with _serve(model) as engine:
        engine(IDS)
    assert seen == [(2, 11, 12)]


def test_half_precision_and_quantized_experts():
    model = make_model(num_experts=4, k=2, ffn=32, width=32)
    expected, _ = _expected(model)
    with dualinfer.init_inference(copy.deepcopy(model), dtype="bf16") as engine:
        assert relative_rms(engine(IDS).float(), expected) < 0.1
    with _serve(model, quant="int8") as engine:
        error = relative_rms(engine(IDS), expected)
        assert 1e-5 < error < 0.05
        assert type(model.layers[0].moe.deepspeed_moe.gate.wg) is torch.nn.Linear


def _split(cases, world):
    """Of each case: the error, the share of the experts' bytes here, and the notes."""
    found = []
    for fields, more in cases:
        model = make_model(**fields)
        experts = [p for n, p in model.named_parameters() if "deepspeed_experts" in n]
        whole, expected = sum(p.numel() for p in experts), _expected(model)[0]
        tp = {"tp_size": world, "tp_grain_size": 4}
        with _serve(model, tensor_parallel=tp, **more) as engine:
            errors = [relative_rms(engine(IDS), expected)]
            one = IDS[1:, 4:5]
            errors.append(relative_rms(engine(one), _expected(make_model(**fields), one)[0]))
            named = model.named_parameters()
            here = sum(p.numel() for n, p in named if "deepspeed_experts" in n)
            found.append((max(errors), here / whole, engine.report().notes))
    return found


MLP = {"num_experts": 5, "k": 2, "use_residual": True}
ODD = {"num_experts": 5, "k": 3, "expert": Odd}
SPLITS = {
    2: [
        (MLP, {}),
        (MLP, {"moe": {"ep_size": 2, "moe_experts": 5, "type": "residual"}}),
        (ODD, {}),
        (MLP | {"layers": 1, "k": 1}, {"moe": {"moe_experts": [5]}}),
    ],
    3: [(MLP, {}), (ODD, {"moe": {"ep_size": 3}}), (ODD | {"num_experts": 3, "k": 1}, {})],
    4: [(MLP, {"moe": {"ep_size": 2}}), (ODD | {"num_experts": 3, "k": 1}, {})],
}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_split_modules_equal_whole_ones(crew, world):
    cases = SPLITS[world]
    for rank, found in enumerate(crew.run(_split, cases, world, world=world)):
        for (fields, more), (error, share, notes) in zip(cases, found, strict=True):
            print(f"{rank}/{world} {fields} {more}: {error:.1e}, {share:.2f} of the bytes")
            assert error < 1e-5, (fields, more, notes)
            assert share <= 1 / world + 0.2, (fields, more, notes)
            is_cut = "fc2 (partial)" in "\n".join(notes)
            expert = fields.get("expert", Mlp)
            parts = more.get("moe", {}).get("ep_size", 1)
            assert is_cut == (expert is Mlp and parts < world), notes


def _quantized():
    """Errors of quantized experts that are shared out, against those of one process."""
    fields = {"num_experts": 3, "k": 2, "ffn": 32, "width": 32}
    with _serve(make_model(**fields), quant="int8") as engine:
        expected = engine(IDS)
    model = make_model(**fields)
    with _serve(model, quant="int8", tensor_parallel={"tp_size": 2}) as engine:
        own = model.layers[0].moe.deepspeed_moe.experts.deepspeed_experts
        return relative_rms(engine(IDS), expected), sorted(own._modules)


@pytest.mark.xdist_group("ranks")
def test_quantized_experts_are_shared_out(crew):
    found = crew.run(_quantized)
    assert max(error for error, _ in found) < 1e-5
    assert [names for _, names in found] == [["0", "1"], ["2"]]


def _partial(folder):
    """A model whose layers were made with ep_size=2: live, and filled from a folder."""
    import os

    rank = int(os.environ["RANK"])
    whole = make_model(num_experts=4, k=2)
    part = make_model(seed=1, num_experts=4, k=2, ep_size=2)
    state = {}
    for name in part.state_dict():
        head, found, rest = name.partition(".deepspeed_experts.")
        own = f"{head}{found}{int(rest[0]) + 2 * rank}{rest[1:]}" if found else name
        state[name] = whole.state_dict()[own]
    empty = copy.deepcopy(part)
    part.load_state_dict(state)
    expected = _expected(whole)[0]
    ways = {"moe": {"ep_size": 2}}
    with _serve(part, **ways) as engine:
        errors = [relative_rms(engine(IDS), expected)]
    with _serve(empty, checkpoint=folder, **ways) as engine:
        errors.append(relative_rms(engine(IDS), expected))
    with torch.device("meta"):
        meta = make_model(num_experts=4, k=2, ep_size=2)
    with _serve(meta, checkpoint=folder, tensor_parallel={"tp_size": 2}) as engine:
        errors.append(relative_rms(engine(IDS), expected))
    return errors


@pytest.mark.xdist_group("ranks")
def test_layers_that_have_a_part_of_their_experts(crew, tmp_path):
    model = make_model(num_experts=4, k=2)
    folder = deepspeed_files.save_moe_training(tmp_path / "run", model)
    for errors in crew.run(_partial, str(folder)):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize(("old", "size"), [(False, 1), (True, 1), (False, 2)])
def test_checkpoint_of_a_training_fills_a_module(old, size, tmp_path):
    model = make_model(num_experts=3, use_residual=True)
    folder = deepspeed_files.save_moe_training(tmp_path / "run", model, old=old, size=size)
    expected = _expected(model)[0]
    for path in (folder, folder / "global_step7"):
        with torch.device("meta"):
            empty = make_model(num_experts=3, use_residual=True)
        with _serve(empty, checkpoint=str(path)) as engine:
            assert relative_rms(engine(IDS), expected) < 1e-5
    part = make_model(seed=2, num_experts=3, ep_size=3, use_residual=True)
    with _serve(part, checkpoint=str(folder)) as engine:
        assert relative_rms(engine(IDS), expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: (f / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink(), "expert 1 of"),
        (lambda f: (f / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink(), "has 3 experts"),
        (lambda f: [p.unlink() for p in f.glob("layer_0_*")], "lacks files of experts, layer 0"),
        (lambda f: [p.unlink() for p in f.glob("layer_*")], "does not hold all experts"),
        (
            lambda f: (f / "layer_0_expert_01_mp_rank_00_model_states.pt").write_bytes(
                (f / "layer_0_expert_1_mp_rank_00_model_states.pt").read_bytes()
            ),
            "holds experts twice",
        ),
        (
            lambda f: (f / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(
                (f / "layer_0_expert_1_mp_rank_00_model_states.pt").read_bytes()
            ),
            "tensors held by two files",
        ),
        (
            lambda f: (f / "layer_0_expert_0_mp_rank_01_model_states.pt").write_bytes(
                (f / "layer_0_expert_0_mp_rank_00_model_states.pt").read_bytes()
            ),
            "mp_rank_01 of the rest",
        ),
    ],
)
def test_missing_or_doubled_experts_are_named(change, text, tmp_path):
    model = make_model(num_experts=3)
    folder = deepspeed_files.save_moe_training(tmp_path / "run", model)
    change(folder / "global_step7")
    before = {name: id(part) for name, part in model.named_modules()}
    with pytest.raises(CheckpointError, match=text):
        _serve(model, checkpoint=str(folder))
    assert {name: id(part) for name, part in model.named_modules()} == before


def test_experts_by_harmful_pickles_do_not_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return open, (str(tmp_path / "harm"), "w")

    model = make_model(num_experts=3)
    folder = deepspeed_files.save_moe_training(tmp_path / "run", model)
    torch.save({"x": Harm()}, folder / "global_step7/layer_0_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError):
        _serve(model, checkpoint=str(folder))
    assert not (tmp_path / "harm").exists()


NOISY = {"num_experts": 4, "k": 1}


@pytest.mark.parametrize(
    ("fields", "moe", "text"),
    [
        (NOISY, {"drop_tokens": True}, "use_rts=True drops tokens at random"),
        (NOISY | {"k": 2}, {"drop_tokens": True}, "top2_2nd_expert_sampling=True draws"),
        (NOISY, {"moe_experts": 8}, "Model has 4 experts in each of 2 layers. Use 4"),
        (NOISY, {"type": "residual"}, "of the 2 MoE layers of the Model 0 are residual"),
        (NOISY | {"use_residual": True}, {"type": "standard"}, "2 are residual.*Use 'residual'"),
        (NOISY, {"ep_group": object()}, "moe.ep_group"),
    ],
)
def test_what_the_layers_do_not_allow_is_refused(fields, moe, text):
    model = make_model(**fields)
    with pytest.raises(ConfigError, match=text):
        _serve(model, moe=moe)
    assert not any(isinstance(part, MixtureLayer) for part in model.modules())


def test_modules_without_such_layers_refuse_what_asks_for_them():
    for moe in ({"drop_tokens": True}, {"type": "residual"}, {"moe_experts": 4}):
        with pytest.raises(ConfigError, match=r"moe\."):
            _serve(Mlp(8, 8), moe=moe)


def test_odd_layers_are_refused():
    with pytest.raises(ModelError, match="ep_size=2 and holds 2 of its 4 experts"):
        _serve(make_model(num_experts=4, ep_size=2))
    model = make_model(num_experts=4)
    del model.layers[0].moe.deepspeed_moe.experts.deepspeed_experts[3]
    with pytest.raises(ModelError, match="a gate for 4 experts and holds 3"):
        _serve(model)
    model = make_model(num_experts=4)
    model.layers[0].moe.deepspeed_moe.gate.register_forward_hook(print)
    with pytest.raises(UnsupportedError, match="gate has hooks"):
        _serve(model)


def test_layers_of_another_kind_run_as_they_are():
    class Gate(deepspeed_moe.TopKGate):
        def forward(self, x):
            return super().forward(-x)

    model = make_model(num_experts=4)
    for layer in model.layers:
        layer.moe.deepspeed_moe.gate.__class__ = Gate
    with torch.no_grad():
        expected = model(IDS)
    with _serve(model) as engine:
        assert relative_rms(engine(IDS), expected) < 1e-6
        assert type(model.layers[0].moe.deepspeed_moe) is deepspeed_moe.MOELayer


def test_table_says_what_experts_become():
    model = make_model(**ODD)
    Mixtures(model, MoEConfig()).put()
    lines = {line.path: line for line in describe(model, 2).lines}
    line = lines["layers.*.moe.deepspeed_moe.experts.deepspeed_experts"]
    assert (line.kind, line.becomes, line.shapes) == ("Odd", "mixture", ((3,), (2,)))
    assert lines["layers.*.moe.deepspeed_moe.gate.wg"].becomes == "replicated"


def _hf(seed=0):
    import transformers as hf

    torch.manual_seed(seed)
    sizes = dict(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=3)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    block = model.transformer.h[1]
    block.mlp = Feed(MoE(24, block.mlp, num_experts=3, k=2, use_residual=True, drop_tokens=False))
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "wg" in name else 0.2)
    return model


def _hf_text(model, generate):
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        return generate(IDS, **options).tolist()


def test_hf_model_with_such_layers_generates(tmp_path):
    model = _hf()
    with torch.no_grad():
        expected, text = model(IDS).logits, _hf_text(model, model.generate)
    folder = deepspeed_files.save_moe_training(tmp_path / "run", model)
    for given, more in ((model, {}), (_hf(seed=1), {"checkpoint": str(folder)})):
        with _serve(given, **more) as engine:
            assert relative_rms(engine(IDS).logits, expected) < 1e-5
            assert _hf_text(given, engine.generate) == text


def _split_hf():
    expected = _hf()
    text = _hf_text(expected, expected.generate)
    model = _hf()
    with _serve(model, tensor_parallel={"tp_size": 2}) as engine, torch.no_grad():
        error = relative_rms(engine(IDS).logits, expected(IDS).logits)
        return error, _hf_text(model, engine.generate) == text, engine.report().notes


@pytest.mark.xdist_group("ranks")
def test_split_hf_model_with_such_layers(crew):
    for error, same, notes in crew.run(_split_hf):
        assert error < 1e-5 and same, notes
        assert "deepspeed_experts.*.c_proj (partial)" in "\n".join(notes)
