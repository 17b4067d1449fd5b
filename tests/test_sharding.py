"""The plan of tensor parallelism: what each device holds, and that together it is everything."""

import re
from dataclasses import replace

import numpy as np
import pytest

import dualinfer
from dualinfer.config.nested import TensorParallelConfig
from dualinfer.model.families import describe_model
from dualinfer.model.weights import Row, WeightTable, join_axis, row
from dualinfer.parallel.shard import Share, whole
from dualinfer.parallel.sharding import make_plan

from .cases.decoders import ALL, CASES


def described(name, **changes):
    case = CASES[name]
    return describe_model(case.make_config(**changes).to_dict(), [case.model.__name__])[1]


def widths(plan, axis):
    return [shard.share(axis, 0).real for shard in plan.shards]


@pytest.mark.parametrize(
    ("kv_heads", "size", "query", "key"),
    [
        (3, 2, [4, 2], [2, 1]),
        (3, 3, [2, 2, 2], [1, 1, 1]),
        (3, 4, [1, 1, 2, 2], [1, 1, 1, 1]),  # two devices hold the first KV head
        (1, 4, [2, 2, 1, 1], [1, 1, 1, 1]),
        (6, 4, [2, 2, 1, 1], [2, 2, 1, 1]),
        (6, 8, [1, 0, 1, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1, 1, 1]),  # two have none
        (2, 5, [1, 1, 1, 2, 1], [1, 1, 1, 1, 1]),
    ],
)
def test_heads_stay_whole_and_follow_their_kv_head(kv_heads, size, query, key):
    table = described("llama-gqa", num_key_value_heads=kv_heads)
    for equal in (False, True):
        plan = make_plan(table, size, equal=equal)
        if not equal or size > kv_heads:
            dim = table.spec.layers[0].attention.head_dim
            count = [n // dim for n in widths(plan, "q")]
            shared = [n // dim for n in widths(plan, "k")]
            assert (count, shared) == (query, key)
        for shard in plan.shards:
            a, q, k = shard.spec.layers[0].attention, shard.share("q", 0), shard.share("k", 0)
            assert a.heads * a.head_dim == q.extent and a.heads % a.kv_heads == 0
            first = q.start // a.head_dim // (6 // kv_heads)
            assert not q.real or first == k.start // a.head_dim


# contract 5.3: size, devices, grain; the degenerate ones leave nobody without a share here
GRAINS = [
    (11008, 3, [3712, 3648, 3648]),
    (32000, 3, [10688, 10688, 10624]),
    (50257, 2, [25152, 25105]),
    (50257, 8, [6336, *[6272] * 6, 6289]),
    (151936, 8, [*[19008] * 6, 18944, 18944]),
    (100, 3, [34, 33, 33]),
    (256, 8, [32] * 8),
    (30, 4, [8, 8, 7, 7]),
]


@pytest.mark.parametrize(("size", "devices", "expected"), GRAINS)
def test_widths_are_spread_by_the_grain(size, devices, expected):
    table = described("llama-gqa", vocab_size=size, intermediate_size=size)
    plan = make_plan(table, devices)
    assert widths(plan, "vocab") == widths(plan, "up") == widths(plan, "gate") == expected
    equal = make_plan(table, devices, equal=True)
    assert sum(widths(equal, "vocab")) == size
    (extent,) = {shard.share("vocab").extent for shard in equal.shards}
    assert extent % 64 == 0 or size < 64 * devices
    fine = make_plan(table, devices, grain=1, equal=True)
    assert fine.shards[0].share("vocab").extent == -(-size // devices)
    shares = [shard.share("vocab") for shard in equal.shards]
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]


def test_more_devices_than_the_mlp_is_wide_are_refused():
    table = described("llama-gqa", intermediate_size=3)
    with pytest.raises(dualinfer.ConfigError, match=r"tp_size=4: Llama.* has gate of 3"):
        make_plan(table, 4)
    with pytest.raises(dualinfer.ConfigError, match=r"moe\.ep_size=4: Llama.* has gate of 3"):
        make_plan(table, 4, asked_by=TensorParallelConfig().by_experts(4).asked_by)
    assert widths(make_plan(table, 4, equal=True), "up") == [1, 1, 1, 0]


def pieces(name, devices, equal):
    """How often each element of each stored tensor is read, and the joined shapes."""
    table = described(name)
    plan = make_plan(table, devices, equal=equal)
    for r in table.rows:
        shapes = []
        counts = {p.name: np.zeros(table.shape(r, p.axes), int) for p in r.sources}
        for shard in plan.shards:
            joined = 0
            for part in r.sources:
                for read in shard.reads(r, part):
                    counts[part.name][read.index] += 1
                    stored = np.zeros(table.shape(r, part.axes))[read.index]
                    blocks = shard.blocks(r, read, stored.transpose(read.order))
                    padded = shard.block_shapes(r, read)
                    assert len(blocks) == len(padded)
                    assert all(b.shape <= p for b, p in zip(blocks, padded, strict=True))
                    joined += sum(shape[join_axis(r.axes)] for shape in padded)
            shape = shard.shape(r)
            assert not r.sources or shape[join_axis(r.axes)] == joined
            shapes.append(shape)
        yield r, plan, counts, shapes


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", ALL)
def test_every_element_is_read_by_one_device_or_by_all_that_share_it(name, devices, equal):
    for r, plan, counts, shapes in pieces(name, devices, equal):
        split = plan.shards[0].split_axis(r) is not None
        for read in counts.values():
            assert read.min() >= 1, r.name
            if not split:
                assert (read == devices).all(), r.name
            elif not {"k", "v"} & set("+".join(r.axes).split("+")):
                assert (read == 1).all(), r.name
        assert not equal or len(set(shapes)) == 1, r.name


def test_one_device_reads_each_tensor_whole():
    table = described("gpt2")
    shard = whole(table)
    for r in table.rows:
        assert shard.split_axis(r) is None
        for part in r.sources:
            (read,) = shard.reads(r, part)
            assert read.index == tuple(slice(0, n) for n in table.shape(r, part.axes))


def test_blocks_that_are_interleaved_by_head_come_apart():
    """Three heads of (2 of q, 1 of k) each, along the second axis as stored."""
    bloom = described("bloom").spec
    attention = replace(bloom.layers[0].attention, heads=3, kv_heads=3, head_dim=2, alibi=None)
    spec = replace(bloom, layers=(replace(bloom.layers[0], attention=attention),), embed=5)
    rows = row("w", "q+k embed", ("x", "embed q+k/heads")), row("b", "q+k", ("y", "q+k"))
    table = WeightTable(spec, (), (rows,))
    shard = whole(table)
    heads = np.array([f"{p}{i}{j}" for i in range(3) for p in "qk" for j in range(2)])
    stored = np.repeat(heads[None], 5, axis=0)
    first, second = table.rows
    (read,) = shard.reads(first, first.sources[0])
    blocks = shard.blocks(first, read, stored[read.index].transpose(read.order))
    shapes = [block.shape for block in blocks]
    assert shapes == shard.block_shapes(first, read) == [(6, 5), (6, 5)]
    assert blocks[0][:, 4].tolist() == ["q00", "q01", "q10", "q11", "q20", "q21"]
    assert blocks[1][:, 0].tolist() == ["k00", "k01", "k10", "k11", "k20", "k21"]
    (whole_read,) = shard.reads(second, second.sources[0])
    array = np.zeros(12)
    assert shard.blocks(second, whole_read, array)[0] is array


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", ["kv_heads", "2"])
def test_groups_give_each_device_its_parts(groups, devices):
    """Two KV heads, each with three query heads, as Falcon stores them and in CodeGen's order."""
    bloom = described("bloom").spec
    attention = replace(bloom.layers[0].attention, heads=6, kv_heads=2, head_dim=2, alibi=None)
    spec = replace(bloom, layers=(replace(bloom.layers[0], attention=attention),))
    axis = f"q+k+v/{groups}" if groups == "kv_heads" else f"q+v+k/{groups}"
    table = WeightTable(spec, (), ((row("b", "q+k+v", ("x", axis)),),))
    parts = {"q": np.arange(12), "k": 100 + np.arange(4), "v": 200 + np.arange(4)}
    by_group = [parts[name].reshape(2, -1) for name in axis.partition("/")[0].split("+")]
    stored = np.concatenate(by_group, axis=1).reshape(-1)
    (own,) = table.rows
    for shard in make_plan(table, devices).shards:
        (read,) = shard.reads(own, own.sources[0])
        blocks = shard.blocks(own, read, stored[read.index])
        assert [block.shape for block in blocks] <= shard.block_shapes(own, read)
        for name, block in zip("qkv", blocks, strict=True):
            share = shard.share(name, 0)
            np.testing.assert_array_equal(block, parts[name][share.start : share.stop])


def test_constant_rows_have_the_shape_of_the_share():
    spec = described("gpt2").spec
    constant = Row("c", ("embed", "q+k"), (), constant=1.0)
    table = WeightTable(spec, (), ((constant,),) * 2)
    for devices, columns in ((1, 120), (5, 24)):
        shard = make_plan(table, devices).shards[0]
        assert shard.shape(table.rows[1]) == (60, columns)


def test_layers_that_differ_are_split_each_for_itself():
    """One layer has 16 heads over 2 KV heads, the other 6 over 3, and a narrower MLP."""
    spec = described("llama-mha").spec
    wide, narrow = spec.layers
    wide = replace(wide, attention=replace(wide.attention, heads=16, kv_heads=2))
    narrow = replace(narrow, mlp=replace(narrow.mlp, ffn=30))
    narrow = replace(narrow, attention=replace(narrow.attention, heads=6, kv_heads=3))
    rows = row("qkv.weight", "q+k+v embed"), row("down.weight", "embed up")
    table = WeightTable(replace(spec, layers=(wide, narrow)), (), (rows, rows))
    plan = make_plan(table, 2)
    dim = wide.attention.head_dim
    heads = [
        [(a.heads, a.kv_heads) for a in (x.attention for x in s.spec.layers)] for s in plan.shards
    ]
    assert heads == [[(8, 1), (4, 2)], [(8, 1), (2, 1)]]
    shapes = [[shard.shape(r) for r in table.rows] for shard in plan.shards]
    assert shapes[0] == [(10 * dim, 84), (84, 50), (8 * dim, 84), (84, 15)]
    assert shapes[1] == [(10 * dim, 84), (84, 50), (4 * dim, 84), (84, 15)]
    assert "; " in plan.shards[0].describe()


def test_slopes_go_with_their_heads():
    table = described("bloom")
    slopes = table.spec.layers[0].attention.alibi
    plan = make_plan(table, 4)
    assert sum((s.spec.layers[0].attention.alibi for s in plan.shards), ()) == slopes
    padded = make_plan(table, 4, equal=True).shards[-1]
    assert padded.share("heads", 0) == Share(5, 5, 2)
    assert padded.spec.layers[0].attention.alibi == (0.0, 0.0)


@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].config.base_model_tp_plan])
def test_the_plan_agrees_with_hfs_own(name):
    """colwise splits what a layer gives, rowwise what it takes."""
    theirs = CASES[name].config.base_model_tp_plan
    table = described(name)
    shard = make_plan(table, 2).shards[0]
    checked = 0
    for r in table.rows:
        for part in r.sources:
            for pattern, kind in theirs.items():
                inner = part.name.removeprefix(table.base)
                regex = pattern.replace(".", r"\.").replace("*", r"\d+") + r"\.weight"
                if not re.fullmatch(regex, inner):
                    continue
                axes = tuple(axis.removesuffix("/heads") for axis in part.axes)
                part = replace(part, axes=axes)
                split = shard.split_axis(replace(r, axes=axes, sources=(part,)))
                if kind in ("colwise", "colwise_rep", "colwise_gather_output"):
                    assert split == 0, inner
                elif kind == "rowwise":
                    assert split == 1, inner
                elif kind in ("replicated", "replicated_with_grad_allreduce"):
                    assert split is None, inner
                else:
                    pytest.fail(f"{pattern}: an unknown style {kind}")
                checked += 1
    assert checked >= 7


def test_a_share_is_described_for_people():
    shard = make_plan(described("llama-gqa"), 2).shards[1]
    assert shard.describe() == (
        "query heads 2 of 6, KV heads 1 of 3, MLP width 50 of 100, vocabulary 489 of 1001"
    )
