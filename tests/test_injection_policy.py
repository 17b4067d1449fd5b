"""Injection policies over two processes: the user's own layers, split as the policy says."""

import pytest
import torch
from torch import nn

import dualinfer
from dualinfer.backends.torch.module.autotp.plan import describe, make_plan
from dualinfer.errors import ConfigError

from .models import relative_rms
from .ranks import RankError

pytestmark = pytest.mark.xdist_group("ranks")
_WIDTH, _HEADS, _FFN, _VOCAB = 48, 6, 101, 131


class Attention(nn.Module):
    """Names that say nothing, and KV heads of their own."""

    def __init__(self, kv_heads=_HEADS):
        super().__init__()
        dim = _WIDTH // _HEADS
        self.n_heads, self.dim = _HEADS, dim
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.look = nn.Linear(_WIDTH, kv_heads * dim)
        self.carry = nn.Linear(_WIDTH, kv_heads * dim)
        self.back = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for part in (self.mix, self.look, self.carry)
        )
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.back(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated MLP whose layers are in a list."""

    def __init__(self, between=nn.functional.silu):
        super().__init__()
        self.wide = nn.ModuleList([nn.Linear(_WIDTH, _FFN), nn.Linear(_WIDTH, _FFN)])
        self.narrow = nn.Linear(_FFN, _WIDTH)
        self.between = between

    def forward(self, x):
        return self.narrow(self.between(self.wide[0](x)) * self.wide[1](x))


class Layer(nn.Module):
    def __init__(self, kv_heads=_HEADS, between=nn.functional.silu):
        super().__init__()
        self.attn, self.mlp = Attention(kv_heads), Mlp(between)
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm(x))


class PlainLayer(nn.Module):
    """One whose linear layers are its own children."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(_WIDTH, _FFN), nn.Linear(_FFN, _WIDTH)

    def forward(self, x):
        return x + self.fc2(self.fc1(x).relu())


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embed = nn.Embedding(_VOCAB, _WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(_WIDTH, _VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_net(between=nn.functional.silu):
    torch.manual_seed(0)
    return Net(Layer(), Layer(2, between), PlainLayer()).eval()


POLICIES = {
    "tuple": {Layer: ("attn.back", "mlp.narrow")},
    "list and str": {Layer: ["back", "narrow"], PlainLayer: "fc2"},
    "set": {Layer: {"attn.back", "mlp.narrow"}},
    "direct child with a dot": {PlainLayer: ".fc2"},
    "a class for each": {Attention: ".back", Mlp: "narrow"},
    "none": {},
}


def _apply():
    ids = torch.arange(14).view(2, 7)
    found = {}
    for name, policy in POLICIES.items():
        whole, part = make_net(), make_net()
        tp = {"tp_size": 3}
        with dualinfer.init_inference(
            part, tensor_parallel=tp, dtype="fp32", injection_policy=policy
        ) as engine:
            expected, result = whole(ids).detach(), engine(ids)
            error = relative_rms(result, expected)
            kinds = {path: type(m).__name__ for path, m in part.named_modules()}
            found[name] = error, kinds, part.layers[1].attn.look.weight.shape[0]
    return found


def test_policies_split_custom_layers_exactly(crew):
    for rank, found in enumerate(crew.run(_apply, world=3)):
        assert max(error for error, *_ in found.values()) < 1e-6
        _, kinds, kv_width = found["tuple"]
        assert kinds["layers.1.attn.mix"] == kinds["layers.1.mlp.wide.1"] == "ColumnLinear"
        assert kinds["layers.1.attn.back"] == kinds["layers.1.mlp.narrow"] == "RowLinear"
        assert kinds["layers.2.fc2"] == "RowLinear"  # found without a policy
        assert kv_width == _WIDTH // _HEADS, rank  # one of 2 KV heads, on each of 3 ranks
        assert found["a class for each"][1] == found["set"][1] == kinds
        assert found["direct child with a dot"][1]["layers.0.attn.back"] == "GatheredLinear"
        assert found["none"][1]["layers.1.mlp.wide.1"] == "GatheredLinear"


def _wrong():
    net = make_net(between=lambda x: x.softmax(-1))
    policy = {Layer: ("attn.back", "mlp.narrow")}
    dualinfer.init_inference(
        net, tensor_parallel={"tp_size": 2}, dtype="fp32", injection_policy=policy
    )


def test_policy_that_changes_values_is_refused_in_every_rank(crew):
    with pytest.raises(RankError, match=r"injection_policy: split as.*other values") as e:
        crew.run(_wrong)
    assert e.value.kinds == ["ConfigError", "DistributedError"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({Layer: "norm"}, r"Layer has no linear layer whose name ends with 'norm'"),
        (
            {Layer: "mlp.wide.0"},
            r"layers\.0\.mlp\.wide\.0.*cannot be split: no linear layer before",
        ),
        ({Layer: "absent"}, "no module of the Net has a name that ends with 'absent'"),
        ({nn.Conv1d: "back"}, "has no layer of class Conv1d"),
        ({Layer: type("HFLayerPolicy", (), {})}, "policy classes replace layers by its own"),
        ({Layer: ()}, "expected names of linear layers"),
        ({"Layer": "back"}, "the key 'Layer' is no class"),
    ],
)
def test_policies_that_cannot_be_honoured_are_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        describe(make_net(), 2, policy=policy)


def test_automatic_parsing_does_not_trust_names():
    """A softmax between fc1 and fc2 looks like any MLP, and is not one that can be split."""

    class Trap(PlainLayer):
        def forward(self, x):
            return x + self.fc2(self.fc1(x).softmax(-1))

    plan, notes = make_plan(Net(Trap(), Trap()), 2, 64, {})
    assert {change.becomes for change in plan.changes} == {"vocab", "gathered"}
    assert any("mlp" in note and "gave other values" in note for note in notes)


def test_layers_that_cannot_be_tried_out_are_not_split_as_units():
    class Asking(PlainLayer):
        def forward(self, x, mask):
            return super().forward(x * mask)

    plan, notes = make_plan(Net(Asking(), Asking()), 2, 64, {})
    assert {change.becomes for change in plan.changes} == {"vocab", "gathered"}
    assert "could not be tried out" in notes[0]
    plan, _ = make_plan(Net(Asking(), Asking()), 2, 64, {Asking: "fc2"})
    assert {c.path: c.becomes for c in plan.changes}["layers.1.fc2"] == "row"
