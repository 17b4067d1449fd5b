"""The weight table: names, axes, and that every tensor of every model is accounted for."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dualinfer import CheckpointError
from dualinfer.checkpoint.views.quantized import open_quantized
from dualinfer.model.families import describe_model
from dualinfer.model.load_plan import make_load_plan, marks_of
from dualinfer.model.weights import WeightTable, join_axis, row
from dualinfer.parallel.shard import Found, Shard, Share
from dualinfer.parallel.sharding import make_plan
from dualinfer.quantization import BlockScheme
from dualinfer.quantization.formats import Opener

from .cases import make_model
from .cases.decoders import ALL, CASES
from .models import BACKENDS


class Tensors:
    """A source of NumPy arrays."""

    notes = ()

    description = "here"

    def __init__(self, **tensors):
        self.tensors = tensors

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return str(self.tensors[name].dtype)

    def read(self, name, index=None):
        return self.tensors[name][... if index is None else index]


def zeros(*shape):
    return np.zeros(shape, np.float32)


class Sizes:
    """A spec of a few axes."""

    layers = ()

    def extent(self, axis, layer=None):
        sizes = {"in": 2, "out": 3, "q": 4, "k": 5}
        return sum(sizes[part] for part in axis.split("+"))


TABLE = WeightTable(
    Sizes(),
    outer=(
        row("a", "out in", ("base.a", "in out")),
        row("b", "q+k", ("base.q", "q"), ("base.k", "k")),
    ),
    layers=(),
    base="base.",
    renames=((".q", ".old_q"),),
    unused=(r"^junk",),
)


def test_permutation_follows_the_axes_names():
    assert TABLE.rows[0].permutation(TABLE.rows[0].sources[0]) == (1, 0)
    joined = row("w", "q+k+v embed", ("x", "embed q+k+v"), ("y", "k embed"))
    assert joined.permutation(joined.sources[0]) == (1, 0)
    assert joined.permutation(joined.sources[1]) == (0, 1)
    assert join_axis(joined.axes) == 0
    assert join_axis(("embed", "gate+up")) == 1


def test_extents_are_of_each_layer_and_of_a_joined_axis_the_sum():
    spec, table = describe_model(CASES["llama-gqa"].make_config().to_dict())
    wide = replace(spec.layers[1], mlp=replace(spec.layers[1].mlp, ffn=7))
    spec = replace(spec, layers=(spec.layers[0], wide, spec.layers[2]))
    assert (spec.extent("q", 0), spec.extent("q+k+v", 0)) == (480, 960)
    assert [spec.extent("gate+up", i) for i in range(3)] == [200, 14, 200]
    assert (spec.extent("vocab"), spec.extent("embed")) == (1001, 96)
    assert table.shape(table.rows[-1]) == (96, 100)


def test_a_layers_rows_are_its_template_with_its_number():
    layer = (row("up.weight", "ffn embed", ("h.{i}.fc.weight", "embed ffn")),)
    spec = describe_model(CASES["gpt2"].make_config().to_dict())[0]
    table = WeightTable(spec, (row("embed", "vocab embed", ("wte", "vocab embed")),), (layer,) * 2)
    found = [(r.name, r.local_name, r.layer, r.sources[0].name) for r in table.rows]
    assert found == [
        ("embed", "embed", None, "wte"),
        ("layers.0.up.weight", "up.weight", 0, "h.0.fc.weight"),
        ("layers.1.up.weight", "up.weight", 1, "h.1.fc.weight"),
    ]


@pytest.mark.parametrize(
    "names",
    [("base.a", "base.q", "base.k"), ("a", "q", "k"), ("base.a", "base.old_q", "base.k")],
)
def test_plan_finds_each_name_that_a_file_may_use(names):
    shapes = ((2, 3), (4,), (5,))
    source = Tensors(**{n: zeros(*s) for n, s in zip(names, shapes, strict=True)})
    plan = make_load_plan(TABLE, source)
    assert [found for _, found in plan.rows] == [names[:1], names[1:]]
    assert plan.unused == ()


def test_plan_lists_what_is_unused_and_refuses_what_is_left_over():
    tensors = {"base.a": zeros(2, 3), "base.q": zeros(4), "base.k": zeros(5)}
    assert make_load_plan(TABLE, Tensors(**tensors, junk1=zeros(1))).unused == ("junk1",)
    with pytest.raises(CheckpointError, match=r"left over 1: base\.z"):
        make_load_plan(TABLE, Tensors(**tensors, **{"base.z": zeros(1)}))


def test_same_tensor_under_two_of_its_names_is_refused():
    tensors = {"base.a": zeros(2, 3), "a": zeros(2, 3), "base.q": zeros(4), "base.k": zeros(5)}
    with pytest.raises(CheckpointError, match="left over 1: a"):
        make_load_plan(TABLE, Tensors(**tensors))


def test_marks_tell_models_apart_that_differ_in_one_row():
    """The first or the last: embeddings of two tokenizers may differ there alone."""
    tensors = {"base.a": zeros(2, 3), "base.q": zeros(4), "base.k": zeros(5)}
    source = Tensors(**tensors)
    plan = make_load_plan(TABLE, source)
    for place in ((0, 0), (1, 2)):
        other = zeros(2, 3)
        other[place] = 1
        marks = marks_of(Tensors(**{**tensors, "base.a": other}), plan)
        pairs = zip(marks, marks_of(source, plan), strict=True)
        assert not all(np.array_equal(a, b) for a, b in pairs)


def test_a_tied_head_of_other_rows_is_no_twin():
    """One with the first rows of the embedding: HF would not tie it, and neither fits."""
    head = row("head", "out in", ("head", "out in"))
    rows = (row("embed", "out in", ("embed", "out in")),)
    table = WeightTable(Sizes(), rows, (), tied=((head, "embed"),))
    whole = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert len(make_load_plan(table, Tensors(embed=whole, head=whole)).rows) == 1
    with pytest.raises(CheckpointError, match=r"head is \(2, 2\), expected \(3, 2\)"):
        make_load_plan(table, Tensors(embed=whole, head=whole[:2]))


def test_an_optional_part_is_there_as_a_whole_or_not_at_all():
    rows = (row("a", "out", ("a", "out")), *(row(f"top.{n}", "q", (n, "q")) for n in "xy"))
    table = WeightTable(Sizes(), rows, (), optional="top.")
    for names, loaded in (("xy", 3), ("", 1)):
        plan = make_load_plan(table, Tensors(a=zeros(3), **{n: zeros(4) for n in names}))
        assert len(plan.rows) == loaded
    with pytest.raises(CheckpointError, match="missing 1: y"):
        make_load_plan(table, Tensors(a=zeros(3), x=zeros(4)))


@pytest.mark.parametrize("name", ALL)
def test_table_accounts_for_every_tensor_once(name, hf_model):
    case = CASES[name]
    spec, table = describe_model(hf_model(name).config.to_dict(), [case.model.__name__])
    sources = [s.name for r in table.rows for s in r.sources]
    assert len(sources) == len(set(sources))
    own = {n for n, _ in hf_model(name).named_parameters(remove_duplicate=True)}
    if name == "bert-masked-untied":
        own.remove("cls.predictions.bias")  # HF makes it, and reads decoder.bias
    found = {next(c for c in table.candidates(s) if c in own) for s in sources}
    assert found == own
    assert len({r.name for r in table.rows}) == len(table.rows)
    assert spec.vocab == 1001 and len(spec.layers) == case.make_config().num_hidden_layers
    assert (spec.head is not None, spec.can_generate) == (case.has_head, case.generates)


OLDER = {
    "opt": {"model.decoder.version": (1,)},
    "gptj": {"transformer.h.0.attn.bias": (1, 1, 9, 9), "transformer.h.0.attn.masked_bias": ()},
    "gpt-neo": {
        "transformer.h.1.attn.attention.bias": (1, 1, 9, 9),
        "transformer.h.1.attn.attention.masked_bias": (),
    },
    "neox": {
        "gpt_neox.layers.0.attention.bias": (1, 1, 9, 9),
        "gpt_neox.layers.0.attention.masked_bias": (),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (2,),
    },
    "gemma2": {"model.layers.0.self_attn.rotary_emb.inv_freq": (11,)},
    "biogpt": {},
    "codegen": {"transformer.h.0.attn.causal_mask": (1, 1, 9, 9)},
    "falcon": {"transformer.h.0.self_attention.rotary_emb.inv_freq": (7,)},
    "gpt_bigcode": {"transformer.bias": (9, 9)},
    "openai-gpt": {"transformer.h.0.attn.bias": (1, 1, 9, 9)},
    "xglm": {"model.embed_positions.weights": (130, 84)},
}
HEADS = ("lm_head", "embed_out", "output_projection")


@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize("name", [*OLDER, "bloom"])
def test_names_and_buffers_of_older_checkpoints_are_known(name, base, hf_model):
    """Buffers that HF once stored, NeoX's old name of its head, and a file without HF's prefix."""
    model = hf_model(name) if name in CASES else make_model(name)
    _, table = describe_model(model.config.to_dict(), [type(model).__name__])
    tensors = {n: p.detach().numpy() for n, p in model.named_parameters()}
    tensors |= {n: zeros(*shape) for n, shape in OLDER.get(name, {}).items()}
    if name == "neox":
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    if not base:
        tensors = {n.removeprefix(table.base): x for n, x in tensors.items()}
    plan = make_load_plan(table, Tensors(**tensors))
    assert len(plan.unused) == len(OLDER.get(name, {}))
    assert all(found or not own.sources for own, found in plan.rows)
    headless = re.sub("(ForCausalLM|LMHeadModel)$", "Model", type(model).__name__)
    _, table = describe_model(model.config.to_dict(), [headless])
    unused = make_load_plan(table, Tensors(**tensors)).unused
    assert {n for n in unused if n.startswith(HEADS)} == {n for n in tensors if n.startswith(HEADS)}


class Experts(Sizes):
    """A spec of three experts, and no layers of its own."""

    layers = all_layers = ()

    def extent(self, axis, layer=None):
        sizes = {"experts": 3, "gate": 4, "up": 4, "in": 2, "in=1": 1}
        return sum(sizes[part] for part in axis.split("+"))


STACKED = row("up.weight", "experts gate+up in", ("{x}.gate", "gate in"), ("{x}.up", "in up"))


def experts(stacked=STACKED, **fields):
    """A table of one row of stacked experts, and its tensors."""
    table = WeightTable(Experts(), (stacked,), (), **fields)
    random = np.random.default_rng(0)
    parts = [part for own in table.rows for part in own.sources]
    tensors = {p.name: random.normal(size=table.shape(table.rows[0], p.axes)) for p in parts}
    source = Tensors(**{name: array.astype(np.float32) for name, array in tensors.items()})
    return table, source


def gathered(shard, source, part="data"):
    """What a shard holds of its table's only row, by NumPy."""
    ((own, names),) = make_load_plan(shard.table, source).rows
    found = [
        Found(read, source.read(name, read.index))
        for origin, name in zip(own.sources, names, strict=True)
        for read in shard.reads(own, origin)
        if origin.part == part
    ]

    def pad(block, shape):
        return np.pad(block, [(0, n - m) for n, m in zip(shape, block.shape, strict=True)])

    return shard.assemble(own, found, np.transpose, pad, np.concatenate)


def expected_experts(source):
    tensors = source.tensors
    return np.stack(
        [np.concatenate([tensors[f"{x}.gate"], tensors[f"{x}.up"].T]) for x in range(3)]
    )


def test_stored_tensors_are_stacked_along_a_new_first_axis():
    table, source = experts()
    names = [part.name for part in table.rows[0].sources]
    assert names == ["0.gate", "0.up", "1.gate", "1.up", "2.gate", "2.up"]
    whole = gathered(Shard(0, 1, table.spec, table, {}), source)
    np.testing.assert_array_equal(whole, expected_experts(source))
    one = row("up.weight", "experts gate+up in", ("all", "experts gate+up in"))
    table, _ = experts(one)
    whole = gathered(Shard(0, 1, table.spec, table, {}), Tensors(all=whole))
    np.testing.assert_array_equal(whole, expected_experts(source))


def test_a_share_of_stacked_tensors_is_of_the_stack_or_of_each():
    """Other devices' experts are not read; what is padded are experts of zeros."""
    table, source = experts()
    whole = expected_experts(source)
    last = Shard(1, 2, table.spec, table, {"experts": Share(2, 3, 2)})
    assert {
        r.source.index for p in table.rows[0].sources for r in last.reads(table.rows[0], p)
    } == {2}
    assert last.split_axis(table.rows[0]) == 0
    np.testing.assert_array_equal(gathered(last, source), np.stack([whole[2], zeros(8, 2)]))
    wide = {name: Share(1, 4, 4) for name in ("gate", "up")}
    part = Shard(0, 2, table.spec, table, wide)
    assert part.split_axis(table.rows[0]) == 1
    padded = zeros(3, 8, 2)
    padded[:, :3], padded[:, 4:7] = whole[:, 1:4], whole[:, 5:8]
    np.testing.assert_array_equal(gathered(part, source), padded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stacked_tensors_with_scales_load_as_one_weight(backend):
    """Each part is stacked by itself, and cut where it has the axis."""
    table, stored = experts()
    random = np.random.default_rng(1)
    codes = {n: random.integers(-99, 99, (4, 2), np.int8) for n in stored.names()}
    scales = {f"{n}.s": random.random((len(a), 1), np.float32) for n, a in codes.items()}

    class Matrix:
        scheme = BlockScheme("int8")

        def __init__(self, name):
            self.name, self.stored, self.shape = name, (name, f"{name}.s"), codes[name].shape

        def codes(self, rows, columns):
            return codes[self.name][rows, columns]

        def scale(self):
            return scales[f"{self.name}.s"]

        def zero(self):
            return None

        group = outer = input_scale = zero

    source, table = open_quantized(Tensors(**codes, **scales), table, Opener(Matrix))
    plan = make_load_plan(table, source)
    if backend == "torch":
        import torch

        from dualinfer.backends.torch.params import load_params

        shard = Shard(0, 1, table.spec, table, {})
        given = shard, plan, source, torch.bfloat16, torch.device("cpu")
        leaf = load_params(*given).outer["up.weight"]
    else:
        import jax

        from dualinfer.backends.jax.mesh import OneDevice
        from dualinfer.backends.jax.params import load_params

        place, tp_plan = OneDevice(jax.devices("cpu")[0]), make_plan(table, 1)
        params, model, _ = load_params(place, tp_plan, plan, source, jax.numpy.dtype("bfloat16"))
        leaf = params.outer["up.weight"]
        assert model.up.weight_scale.shape == (3, 8, 1)
    assert str(leaf.dtype).endswith("bfloat16") and leaf.axes == ("experts", "gate+up", "in")
    for array, held, end in ((leaf.data, codes, ""), (leaf.beside["scale"], scales, ".s")):
        each = [[held[f"{x}.{n}{end}"] for n in ("gate", "up")] for x in range(3)]
        whole = np.stack([np.concatenate(pair) for pair in each])
        np.testing.assert_array_equal(np.asarray(array), whole)
