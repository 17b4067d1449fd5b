"""The plan of tensor parallelism: what each device holds, and that together it is everything."""

import re

import numpy as np
import pytest

import dualinfer
from dualinfer.model.families import describe_model
from dualinfer.model.weights import Row, WeightTable, row
from dualinfer.parallel.sharding import Share, make_plan, whole

from .models import ALL, CASES


def described(name, **changes):
    case = CASES[name]
    return describe_model(case.make_config(**changes).to_dict(), [case.model.__name__])


def widths(plan, axis):
    return [shard.shares[axis].real for shard in plan.shards]


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
    spec, table = described("llama-gqa", num_key_value_heads=kv_heads)
    for equal in (False, True):
        plan = make_plan(spec, table, size, equal=equal)
        if not equal or size > kv_heads:
            dim = spec.layers[0].attention.head_dim
            count = [n // dim for n in widths(plan, "q")]
            shared = [n // dim for n in widths(plan, "k")]
            assert (count, shared) == (query, key)
        for shard in plan.shards:
            a, shares = shard.spec.layers[0].attention, shard.shares
            assert a.heads * a.head_dim == shares["q"].extent and a.heads % a.kv_heads == 0
            first = shares["q"].start // a.head_dim // (6 // kv_heads)
            assert not shares["q"].real or first == shares["k"].start // a.head_dim


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
    spec, table = described("llama-gqa", vocab_size=size, intermediate_size=size)
    plan = make_plan(spec, table, devices)
    assert widths(plan, "vocab") == widths(plan, "up") == widths(plan, "gate") == expected
    equal = make_plan(spec, table, devices, equal=True)
    assert sum(widths(equal, "vocab")) == size
    (extent,) = {shard.shares["vocab"].extent for shard in equal.shards}
    assert extent % 64 == 0 or size < 64 * devices
    fine = make_plan(spec, table, devices, grain=1, equal=True)
    assert fine.shards[0].shares["vocab"].extent == -(-size // devices)
    shares = [shard.shares["vocab"] for shard in equal.shards]
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]


def test_more_devices_than_the_mlp_is_wide_are_refused():
    spec, table = described("llama-gqa", intermediate_size=3)
    with pytest.raises(dualinfer.ConfigError, match=r"tp_size=4: Llama.* has gate of 3"):
        make_plan(spec, table, 4)
    assert widths(make_plan(spec, table, 4, equal=True), "up") == [1, 1, 1, 0]


def pieces(name, devices, equal):
    """How often each element of each stored tensor is read, and the joined shapes."""
    spec, table = described(name)
    plan = make_plan(spec, table, devices, equal=equal)
    for r in table.rows:
        shapes = []
        counts = {p.name: np.zeros([table.size(a) for a in p.axes], int) for p in r.sources}
        for shard in plan.shards:
            joined = 0
            for part in r.sources:
                for read in shard.reads(r, part, table):
                    counts[part.name][read.index] += 1
                    stored = np.zeros([table.size(a) for a in part.axes])[read.index]
                    blocks = shard.blocks(read, stored.transpose(read.order), table)
                    padded = shard.block_shapes(read, table)
                    assert len(blocks) == len(padded)
                    assert all(b.shape <= p for b, p in zip(blocks, padded, strict=True))
                    joined += sum(shape[r.join_axis] for shape in padded)
            shape = shard.shape(r.axes, table)
            assert not r.sources or shape[r.join_axis] == joined
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
    spec, table = described("gpt2")
    shard = whole(spec)
    for r in table.rows:
        assert shard.split_axis(r) is None
        for part in r.sources:
            (read,) = shard.reads(r, part, table)
            assert read.index == tuple(slice(0, table.size(axis)) for axis in part.axes)


def test_blocks_that_are_interleaved_by_head_come_apart():
    """Heads of (2 of q, 1 of k) each, along the second axis as stored."""
    table = WeightTable(
        rows=(row("w", "q+k in", ("x", "in q+k/heads")), row("b", "q+k", ("y", "q+k"))),
        sizes={"in": 5, "q": 6, "k": 3, "heads": 3},
    )
    spec, _ = described("bloom")
    shard = whole(spec)
    heads = np.array(["q00", "q01", "k00", "q10", "q11", "k10", "q20", "q21", "k20"])
    stored = np.repeat(heads[None], 5, axis=0)
    (part,) = table.rows[0].sources
    (read,) = shard.reads(table.rows[0], part, table)
    blocks = shard.blocks(read, stored[read.index].transpose(read.order), table)
    assert [block.shape for block in blocks] == shard.block_shapes(read, table) == [(6, 5), (3, 5)]
    assert blocks[0][:, 4].tolist() == ["q00", "q01", "q10", "q11", "q20", "q21"]
    assert blocks[1][:, 0].tolist() == ["k00", "k10", "k20"]
    (whole_read,) = shard.reads(table.rows[1], table.rows[1].sources[0], table)
    array = np.zeros(9)
    assert shard.blocks(whole_read, array, table)[0] is array


def test_constant_rows_have_the_shape_of_the_share():
    constant = Row("c", ("in", "q+k"), (), constant=1.0)
    table = WeightTable(rows=(constant,), sizes={"in": 2, "q": 4, "k": 5})
    spec, _ = described("gpt2")
    assert whole(spec).shape(constant.axes, table) == (2, 9)


def test_slopes_go_with_their_heads():
    spec, table = described("bloom")
    slopes = spec.layers[0].attention.alibi
    plan = make_plan(spec, table, 4)
    assert sum((s.spec.layers[0].attention.alibi for s in plan.shards), ()) == slopes
    padded = make_plan(spec, table, 4, equal=True).shards[-1]
    assert padded.shares["heads"] == Share(5, 5, 2)
    assert padded.spec.layers[0].attention.alibi == (0.0, 0.0)


@pytest.mark.parametrize("name", [n for n in ALL if CASES[n].config.base_model_tp_plan])
def test_the_plan_agrees_with_hfs_own(name):
    """colwise splits what a layer gives, rowwise what it takes."""
    theirs = CASES[name].config.base_model_tp_plan
    _, table = described(name)
    shard = make_plan(*described(name), 2).shards[0]
    checked = 0
    for r in table.rows:
        for part in r.sources:
            for pattern, kind in theirs.items():
                inner = part.name.removeprefix(table.base)
                regex = pattern.replace(".", r"\.").replace("*", r"\d+") + r"\.weight"
                if not re.fullmatch(regex, inner):
                    continue
                names = [a.partition("/")[0].split("+") for a in part.axes]
                split = [bool(shard.shares.keys() & set(joined)) for joined in names]
                if kind in ("colwise", "colwise_rep", "colwise_gather_output"):
                    assert split == [True, False], inner
                elif kind == "rowwise":
                    assert split == [False, True], inner
                elif kind in ("replicated", "replicated_with_grad_allreduce"):
                    assert not any(split), inner
                else:
                    pytest.fail(f"{pattern}: an unknown style {kind}")
                checked += 1
    assert checked >= 7


def test_a_share_is_described_for_people():
    shard = make_plan(*described("llama-gqa"), 2).shards[1]
    assert shard.describe(described("llama-gqa")[1]) == (
        "query heads 2 of 6, KV heads 1 of 3, MLP width 50 of 100, vocabulary 489 of 1001"
    )
