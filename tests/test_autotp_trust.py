"""What a split of a caller's module must not trust: each of these gave other values once."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from dualinfer.backends.torch.module.autotp import rehearsal
from dualinfer.backends.torch.module.autotp.layers import RanksSeam, Shards
from dualinfer.backends.torch.module.autotp.layouts import Run
from dualinfer.backends.torch.module.autotp.plan import describe, make_plan
from dualinfer.backends.torch.module.autotp.surgery import _own_config, split_module
from dualinfer.backends.torch.parallel import one
from dualinfer.errors import ConfigError, UnsupportedError

from .split_models import VOCAB, make_model

_WIDTH, _FFN, _TOKENS = 16, 40, 128


class Mlp(nn.Module):
    def __init__(self, gain=1.0, act=functional.gelu):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(_WIDTH, _FFN), nn.Linear(_FFN, _WIDTH)
        self.act: Any = nn.GELU()
        self.function = act
        self.is_normalized: Any = False
        self.gain: Any
        self.register_buffer("gain", torch.tensor([gain]))

    def forward(self, x):
        x = self.function(self.act(self.fc1(x)))
        if self.is_normalized or self.gain < 1:
            x = x.softmax(-1)
        return self.fc2(x)


class Block(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        self.mlp = Mlp(**fields)

    def forward(self, x):
        return x + self.mlp(x)


class Asked(Block):
    """Its model may ask for another branch than a rehearsal takes."""

    def forward(self, x, scale=False):
        if not scale:
            return super().forward(x)
        return x + self.mlp.fc2(self.mlp.fc1(x).softmax(-1))


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.wte = nn.Embedding(_TOKENS, _WIDTH)
        self.tables: Any = nn.ModuleList([nn.Embedding(_TOKENS, _WIDTH)])
        self.layers: Any = nn.ModuleList(layers or [Block(), Block()])
        self.head = nn.Linear(_WIDTH, _TOKENS)

    def forward(self, ids):
        x = self.wte(ids) + self.tables[0](ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _becomes(module, policy=None):
    """What each layer becomes over 2 ranks, by path, and the notes."""
    plan, notes = make_plan(module.eval(), 2, 8, policy or {})
    return {c.path: c.becomes for c in plan.changes}, "\n".join(notes)


def _flag(net):
    net.layers[1].mlp.is_normalized = True


def _tuple_of_flags(net):
    for layer, flags in zip(net.layers, ((0, 1), (1, 1)), strict=True):
        layer.mlp.is_normalized = flags
    net.layers[0].mlp.is_normalized = ()


def _buffer(net):
    net.layers[1] = Block(gain=0.5)


def _function(net):
    net.layers[1] = Block(act=lambda x: x.softmax(-1))


def _default(net):
    for i in range(2):
        net.layers[i] = Block(act=lambda x, soft=bool(i): x.softmax(-1) if soft else x.relu())


class Softmax:
    """An object whose method is an activation."""

    def __init__(self, soft):
        self.soft = soft

    def __call__(self, x):
        return x.softmax(-1) if self.soft else x.relu()

    def act(self, x):
        return self(x)


def _owner_of_a_method(net):
    for i in range(2):
        net.layers[i] = Block(act=Softmax(bool(i)).act)


@pytest.mark.parametrize(
    "change", [_flag, _tuple_of_flags, _buffer, _function, _default, _owner_of_a_method]
)
def test_layers_that_differ_in_what_their_forward_reads_are_each_tried_out(change):
    net = Net()
    assert _becomes(net)[0]["layers.1.mlp.fc2"] == "row"
    change(net)
    found, notes = _becomes(net)
    assert found["layers.1.mlp.fc2"] == "gathered" and "layers.1: rank" in notes


def test_layers_with_arrays_of_numpy_are_alike_where_these_are():
    net = Net()
    for layer in net.layers:
        layer.mlp.table = np.arange(4)
    assert _becomes(net)[0]["layers.1.mlp.fc2"] == "row"


def test_lists_of_a_hf_config_are_seen_layer_by_layer():
    import transformers

    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        hidden_size=48,
        intermediate_size=101,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.9],
        layer_types=["full_attention"] * 2,
    )
    found, _ = _becomes(transformers.Gemma3nForCausalLM(config))
    assert found["model.layers.1.mlp.down_proj"] == "gathered"
    assert found["model.layers.1.self_attn.o_proj"] == "row"


@pytest.mark.parametrize("way", ["hook", "pre-hook", "forward"])
def test_a_unit_with_hooks_inside_is_not_split(way):
    net = Net()
    act = net.layers[0].mlp.act
    if way == "hook":
        act.register_forward_hook(lambda module, args, out: out * (torch.arange(len(out[0])) > 3))
    elif way == "pre-hook":
        act.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    else:
        act.forward = lambda x: x.softmax(-1)
    found, notes = _becomes(net)
    assert found["layers.0.mlp.fc2"] == "gathered" and found["layers.1.mlp.fc2"] == "row"
    assert "layers.*.mlp.act inside it has hooks or a forward of its own" in notes
    with pytest.raises(ConfigError, match="act inside it has hooks"):
        describe(net, 2, policy={Block: "fc2"})


def test_hooks_on_a_whole_block_leave_it_split():
    net = Net()
    net.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert _becomes(net)[0]["layers.0.mlp.fc2"] == "row"


class _Alias(Net):
    def forward(self, ids):
        table = self.wte
        return functional.linear(table(ids), table.weight)


class _Indexed(Net):
    def forward(self, ids):
        return functional.linear(self.tables[0](ids), self.tables[0].weight)


class _Dict(Net):
    def forward(self, ids):
        return functional.embedding(ids, dict(self.wte.named_parameters())["weight"])


class _Given(Net):
    def forward(self, ids):
        return _project(self.wte(ids), self.wte)


def _project(x, table):
    return functional.linear(x, table.weight)


class _Property(Net):
    @property
    def table(self):
        return self.wte.weight

    def forward(self, ids):
        return functional.linear(self.wte(ids), self.table)


class _Tied(Net):
    def tied_head(self, x):
        return functional.linear(x, self.wte.weight)

    def forward(self, ids):
        return self.tied_head(self.wte(ids))


class _Shared(Net):
    def __init__(self):
        super().__init__()
        self.again = nn.ModuleDict({"inner": nn.Module()})
        self.again["inner"].twin = self.wte

    def forward(self, ids):
        return functional.linear(self.wte(ids), self.again["inner"].twin.weight)


@pytest.mark.parametrize("kind", [_Alias, _Indexed, _Dict, _Given, _Property, _Tied, _Shared])
def test_an_embedding_that_is_read_under_another_name_stays_whole(kind):
    path = "tables.0" if kind is _Indexed else "wte"
    assert _becomes(Net())[0][path] == "vocab"
    found, notes = _becomes(kind())
    assert path not in found and "its weight is read elsewhere" in notes
    assert found["layers.0.mlp.fc2"] == "row"


def test_a_split_table_says_how_many_rows_the_whole_has():
    table = nn.Embedding(_TOKENS, _WIDTH)
    by_rank = ((Run(0, 64),), (Run(64, 64),))
    for rank in range(2):
        made = Shards(nn.Sequential(table), rank, RanksSeam(one(torch.device("cpu")))).embedding(
            table, by_rank
        )
        assert made.num_embeddings == _TOKENS and made.weight.shape == (64, _WIDTH)
        ids = torch.arange(_TOKENS)
        expected = table(ids).where((ids // 64 == rank)[:, None], 0.0)
        torch.testing.assert_close(made(ids), expected)


def test_a_config_with_numbers_of_its_own_follows_the_models():
    config = hf.GPT2Config(n_head=12)
    own = _own_config(config, {"num_attention_heads": 6, "hidden_size": 384})
    assert isinstance(own, hf.GPT2Config) and own.n_head == own.num_attention_heads == 6
    assert own.n_embd == 384 and (config.n_head, config.n_embd) == (12, 768)
    config._attn_implementation = "eager"
    config.layer_norm_epsilon = 0.5
    assert own._attn_implementation == "eager" and own.layer_norm_epsilon == 0.5


def test_layers_that_take_more_are_split_as_units_only_if_a_policy_says_so():
    net = Net(Block(), Asked())
    found, notes = _becomes(net)
    assert found["layers.1.mlp.fc2"] == "gathered" and "Asked takes scale, too" in notes
    assert _becomes(net, {Asked: "fc2"})[0]["layers.1.mlp.fc2"] == "row"


class _Sized(Block):
    """Normalizes what no rank has the whole of, for inputs [B, T, E] of some sizes."""

    def __init__(self, when=lambda rows, tokens: False):
        super().__init__()
        self.when = when

    def forward(self, x):
        h = self.mlp.fc1(x)
        return x + self.mlp.fc2(h.softmax(-1) if self.when(*x.shape[:2]) else h)


SIZES = {
    "one token": lambda rows, tokens: tokens == 1,
    "many tokens": lambda rows, tokens: tokens > 32,
    "many rows": lambda rows, tokens: rows > 4,
}


@pytest.mark.parametrize("when", SIZES.values(), ids=SIZES)
def test_layers_that_go_another_way_at_other_sizes_are_seen(when):
    assert _becomes(Net(_Sized()))[0]["layers.0.mlp.fc2"] == "row"
    found, notes = _becomes(Net(_Sized(when)))
    assert found["layers.0.mlp.fc2"] == "gathered" and "gave other values" in notes


class _CallsInside(Net):
    """Its own forward calls a part of a block."""

    def forward(self, ids):
        aside = self.layers[0].mlp.fc1(self.wte(ids)).mean(-1, keepdim=True)
        return super().forward(ids) + aside


class _ReadsInside(Net):
    """Its own forward uses what a block has left behind."""

    def forward(self, ids):
        kept = []
        hook = self.layers[0].mlp.fc1.register_forward_hook(lambda *a: kept.append(a[-1]))
        x = super().forward(ids)
        hook.remove()
        return torch.cat((x, kept[0]), -1)


class _Noisy(Net):
    """It never gives the same twice, so that the whole of it shows nothing."""

    def forward(self, ids):
        return super().forward(ids) + torch.rand(())


@pytest.mark.parametrize("kind", [_CallsInside, _ReadsInside])
def test_code_outside_of_a_block_that_uses_its_inside_is_seen(kind):
    found, notes = _becomes(kind())
    assert found["layers.0.mlp.fc2"] == "gathered" and "gave other values" in notes
    with pytest.raises(ConfigError, match="other values"):
        _becomes(kind(), {Block: "fc2"})
    for plain in (Net(), _Noisy()):
        assert _becomes(plain)[0]["layers.0.mlp.fc2"] == "row"


def _split_in_place(model):
    plan, _ = make_plan(model, 2, 64, {})
    split_module(model, plan.changes, 0, RanksSeam(one(torch.device("cpu"))))
    return model


def test_attention_weights_of_a_split_model_are_refused():
    model = _split_in_place(make_model("llama"))
    ids = torch.arange(3, 8)[None]
    model(ids, output_attentions=False)
    for part in (model, model.model):
        with pytest.raises(UnsupportedError, match="attention weights would be those of one"):
            part(ids, output_attentions=True)
    with pytest.raises(UnsupportedError):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(UnsupportedError):
        model(ids)


def test_saving_and_resizing_a_split_model_are_refused(tmp_path):
    model = _split_in_place(make_model("llama"))
    with pytest.raises(UnsupportedError, match=r"Save the model before.*save_mp_checkpoint_path"):
        model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="Resize the whole model"):
        model.resize_token_embeddings(140)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_of_torch_that_fuse_their_parts_stay_whole(kind):
    layers = [kind(_WIDTH, 4, _FFN, batch_first=True) for _ in range(2)]
    found, notes = _becomes(nn.ModuleList(layers))
    assert not found and f"{kind.__name__} reads its weight in fused operations" in notes


def test_a_rank_that_does_not_come_is_a_problem(monkeypatch):
    monkeypatch.setattr(rehearsal, "_PATIENCE", 0.3)

    class Waiting(nn.Linear):
        seam: Any

        def forward(self, input):
            return self.seam.sum(super().forward(input))

    def split(copy, rank, seam):
        if rank == 1:
            copy.layers[0].mlp.fc2 = Waiting(_FFN, _WIDTH)
            copy.layers[0].mlp.fc2.seam = seam

    assert "a rank did not come" in rehearsal.Rehearsal(Net().eval()).check(2, split)


def test_a_plan_for_layers_that_the_copy_lacks_is_a_problem():
    def split(copy, rank, seam):
        raise ValueError("the copy has no fc3")

    assert "no fc3" in rehearsal.Rehearsal(Net().eval()).check(2, split)


class _FusedAttention(nn.Module):
    """q, k and v in blocks, which the name does not tell: nanoGPT's."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = 4, _WIDTH
        self.c_attn, self.c_proj = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x):
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class _FusedBlock(Block):
    def __init__(self):
        super().__init__()
        self.attn = _FusedAttention()

    def forward(self, x):
        return super().forward(x + self.attn(x))


def test_both_layouts_of_fused_attention_are_tried():
    found, notes = _becomes(Net(_FusedBlock(), _FusedBlock()))
    assert found["layers.1.attn.c_attn"] == "column" and found["layers.1.mlp.fc2"] == "row"
    assert "by themselves" not in notes


def test_notes_tell_each_reason_and_each_pattern_once():
    net = Net(*[Block() for _ in range(3)])
    for layer, width in zip(net.layers, (_FFN, 48, 56), strict=True):
        layer.mlp.fc1, layer.mlp.fc2 = nn.Linear(_WIDTH, width), nn.Linear(width, _WIDTH)
        layer.mlp.is_normalized = True
    _, notes = _becomes(net)
    assert notes.count("other values") == 1
    assert notes.count("layers.*.mlp.fc1") == 2  # what is split, and why by itself
