"""Keys, tables and candidates of the Triton kernels' configurations."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from dualinfer.kernels.triton import attention_choice, decode_attention, linear, routing, tuning
from dualinfer.kernels.triton.decode_attention import DecodeConfig
from dualinfer.kernels.triton.experts import tuning_key
from dualinfer.kernels.triton.linear import MOST_VECTORS, TileConfig, VectorConfig
from dualinfer.kernels.triton.mixture import Mixture
from dualinfer.kernels.triton.tuning import Configurations, Measured

SMS = 132
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
KEYS = [
    *(
        linear.tuning_key(rows, features, width, itemsize, gated)
        for rows in ROWS
        for features, width in ((4096, 4096), (1001, 63), (256000, 2304), (11008, 4096), (1, 11008))
        for itemsize in (2, 4)
        for gated in (False, True)
    ),
    *(
        decode_attention.tuning_key(pairs, reach, group, dim, itemsize)
        for pairs in (1, 8, 32, 1024)
        for reach in (64, 1000, 8192)
        for group, dim in ((1, 64), (4, 128), (8, 256), (71, 80))
        for itemsize in (2, 4)
    ),
    *(
        attention_choice.tuning_key(itemsize, dim, tokens, 32, True)
        for itemsize in (2, 4)
        for dim in (64, 80, 96, 128, 256)
        for tokens in (1, 63, 1000, 8192)
    ),
    *(
        ("experts", tokens, *shape, itemsize, bits, columns or shape[-1], True)
        for tokens in (1, 8, 64, 2048)
        for shape in ((8, 128, 768, 2048), (2, 8, 14336, 4096), (4, 32, 2880, 2880), (2, 5, 48, 64))
        for itemsize, bits, columns in ((2, 16, 0), (4, 32, 0), (2, 4, 32), (2, 8, 0))
    ),
    *(
        routing.tuning_key(rows, total, width, itemsize)
        for rows in ROWS
        for total, width in ((8, 4096), (128, 2048), (512, 7168))
        for itemsize in (2, 4)
    ),
]
SHAPE = (4096, 11008, 2, False)
TUNED = {("linear", 1, *SHAPE): Measured(VectorConfig(2, 16), 31.25)}
SHIPPED = {
    ("linear", 1, *SHAPE): Measured(VectorConfig(1, 8), 32.0),
    ("linear", 8, *SHAPE): Measured(TileConfig(16, 32, 128, 4, 4, 2), 33.0),
}


def test_every_key_has_about_a_dozen_candidates_that_a_table_can_hold():
    for key in KEYS:
        found = tuning.candidates(key, SMS)
        uneven = key[:2] == ("linear", 1) and key[3].bit_count() > 1  # its columns are tried, too
        assert 1 <= len(found) <= (32 if uneven else 14) and len(set(found)) == len(found), key
        for config in found:
            table = {key: Measured(config, 1.0)}
            assert tuning.to_table(json.loads(json.dumps(tuning.to_entries(table)))) == table
    assert all(len(tuning.candidates(("linear", n, *SHAPE), SMS)) >= 8 for n in ROWS)
    assert len(tuning.candidates(decode_attention.tuning_key(32, 2048, 1, 128, 2), SMS)) >= 8


def test_candidates_hold_what_measured_best_by_hand():
    best = {
        (1, 11008, 4096, True): [VectorConfig(1, 8), VectorConfig(1, 4)],
        (1, 4096, 11008, False): [VectorConfig(2, 16), VectorConfig(1, 8)],
        (1, 12288, 4096, False): [VectorConfig(1, 4), VectorConfig(4, 8, 2)],
        (1, 4096, 4096, False): [VectorConfig(4, 8), VectorConfig(8, 16), VectorConfig(4, 8, 2)],
        (1, 2048, 8192, False): [VectorConfig(2, 8, 2)],
        (1, 3072, 2048, False): [VectorConfig(2, 4)],
        (16, 11008, 4096, True): [TileConfig(16, 32, 256, 4, 2)],
        # What a search of these is to try beside columns, by hand as well.
        (1, 10576, 2560, False): [
            *(VectorConfig(2, 4, n) for n in (0, 4, 6)),
            *(VectorConfig(4, 8, n) for n in (0, 4, 6)),
            VectorConfig(4, 16, 4),
            *(VectorConfig(1, 2, n, 512) for n in (0, 4, 8)),
            *(VectorConfig(2, 4, n, 2048) for n in (0, 4)),
        ],
        (1, 2560, 5120, False): [
            *(VectorConfig(1, warps, n) for warps in (4, 8) for n in (4, 5)),
            VectorConfig(2, 8, 2),
            VectorConfig(2, 8, 5),
            *(VectorConfig(1, 4, n, 1024) for n in (0, 4, 5)),
            *(VectorConfig(1, 4, n, 4096) for n in (0, 4)),
        ],
    }
    for (rows, features, width, gated), configs in best.items():
        key = linear.tuning_key(rows, features, width, 2, gated)
        assert set(configs) <= set(tuning.candidates(key, SMS))


def test_counts_share_a_key_up_to_the_next_power_of_two():
    assert linear.tuning_key(3, 10, 20, 2, True) == linear.tuning_key(4, 10, 20, 2, True)
    assert linear.tuning_key(3, 10, 20, 2, True) != linear.tuning_key(2, 10, 20, 2, True)
    assert decode_attention.tuning_key(33, 1000, 4, 80, 2) == (
        "decode_attention",
        64,
        1024,
        4,
        80,
        2,
    )
    assert attention_choice.tuning_key(2, 80, 100, 40, True) == ("attention", 2, 80, 128, 64, True)


def test_a_share_of_a_mixture_has_the_key_of_a_smaller_one_but_for_few_tokens():
    """Whoever has a quarter of 60 experts has a quarter of the pairs of a token and an expert."""

    def mixture(total, **how):
        up, down = (SimpleNamespace(shape=(total, *rest)) for rest in ((80, 96), (96, 40)))
        return Mixture(up, down, **how)

    share, smaller = mixture(15, own=object(), among=60), mixture(15)
    for tokens in (8, 2048):
        assert tuning_key(tokens, 6, share, 2) == tuning_key(tokens, 2, smaller, 2)
    assert tuning_key(1, 6, share, 2) == tuning_key(1, 6, smaller, 2)
    assert tuning_key(8, 6, mixture(60), 2)[2:4] == (6, 60)


def test_tables_are_asked_in_their_order_and_then_the_kernels_default():
    known = Configurations([("tuned on this machine", TUNED), ("shipped for H100", SHIPPED)])
    assert str(known).endswith("2 shipped for H100, defaults; in use: none yet")
    for _ in range(2):
        assert known.find(linear.tuning_key(1, *SHAPE)) == VectorConfig(2, 16)
        assert known.find(linear.tuning_key(5, *SHAPE)) == SHIPPED["linear", 8, *SHAPE].config
        assert known.find(linear.tuning_key(9, *SHAPE)) is None
        assert known.find(decode_attention.tuning_key(8, 256, 4, 128, 2)) is None
    used = "in use: 1 tuned on this machine, 1 shipped for H100, 2 defaults"
    assert str(known) == f"1 tuned on this machine, 2 shipped for H100, defaults; {used}"
    assert str(Configurations()) == "defaults; in use: none yet"


def test_a_later_search_goes_before_all_others():
    known = Configurations([("shipped for H100", SHIPPED)]).having("tuned on this machine", TUNED)
    assert known.find(linear.tuning_key(1, *SHAPE)) == VectorConfig(2, 16)
    more = {("linear", 2, *SHAPE): Measured(VectorConfig(1, 4), 32.0)}
    assert (
        known.having("tuned on this machine", more).table("tuned on this machine") == TUNED | more
    )


GOOD = tuning.to_entries({("linear", 8, *SHAPE): Measured(TileConfig(16, 32, 128, 4, 4), 3.0)})[0]
VECTOR = {"kind": "vector", "rows": 2, "warps": 4, "per_sm": 0}


def changed(**fields):
    return [{**GOOD, **fields}]


def tile(**fields):
    return changed(config={**GOOD["config"], **fields})


@pytest.mark.parametrize(
    "entries",
    [
        *(None, {}, "text", [1], [[]], [{}]),
        *(changed(op="matmul"), changed(op=None), changed(op=["linear"]), changed(extra=1)),
        *(changed(rows=0), changed(rows=True), changed(rows="8"), changed(features=2**40)),
        *(changed(gated=1), changed(us=float("nan")), changed(us=-1.0), changed(us="fast")),
        *(changed(config=None), changed(config=[]), tile(kind="decode"), tile(kind=["tile"])),
        *(tile(m=8), tile(m=48), tile(m=16.0), tile(m=True), tile(m=1 << 40), tile(splits=0)),
        *(tile(splits=1000), tile(stages=0), tile(warps=3), tile(more=1)),
        tile(n=256, k=512, stages=8),  # more shared memory than there is
        changed(config=VECTOR),  # more rows than that kernel takes
        changed(rows=1),  # a norm may be fused into one row: not in the kernel for tiles
        changed(rows=1, config={**VECTOR, "rows": 32, "warps": 1}),  # more than registers hold
        changed(rows=1, config={**VECTOR, "columns": 512}),  # far too many parts
        changed(rows=1, config={**VECTOR, "columns": 3000}),
        changed(rows=2, config={**VECTOR, "columns": 8192}),  # more than a single row
        changed(config={name: n for name, n in GOOD["config"].items() if name != "m"}),
    ],
    ids=str,
)
def test_what_no_search_has_written_is_refused(entries):
    with pytest.raises(ValueError):  # noqa: PT011
        tuning.to_table(entries)
    assert tuning.to_table([GOOD])


def test_an_entry_without_a_field_that_has_a_default_keeps_it():
    config = {name: value for name, value in GOOD["config"].items() if name != "splits"}
    assert tuning.to_table(changed(config=config)) == tuning.to_table([GOOD])


def test_shipped_tables_are_sound():
    for kind in ("H100", "H200", "A100"):
        for found, table in tuning.shipped([kind]):
            assert found == kind
            for key, (config, us) in table.items():
                assert us > 0
                assert key[1] <= MOST_VECTORS or not isinstance(config, VectorConfig)
    assert tuning.shipped(["Z80"]) == tuning.shipped([]) == []


def test_another_kind_of_device_lends_all_but_what_memory_bounds():
    (own, table), (other, lent) = tuning.shipped(["H200", "H100"])
    assert (own, other) == ("H200", "H100")
    assert any(isinstance(config, VectorConfig) for config, _ in table.values())
    bound = VectorConfig, DecodeConfig
    assert not any(isinstance(config, bound) for config, _ in lent.values())
    whole = dict(tuning.shipped(["H100"]))["H100"]
    assert lent.items() <= whole.items()
    assert 0 < len(lent) < len(whole)


def test_file_of_tables_has_an_entry_a_line():
    entries = tuning.to_entries(SHIPPED)
    text = tuning.to_json({"H100": {"device": "x", "entries": entries}, "B": {"entries": []}})
    assert json.loads(text) == {"H100": {"device": "x", "entries": entries}, "B": {"entries": []}}
    assert len(text.splitlines()) >= 2 + len(entries)


@pytest.mark.parametrize(
    ("name", "capability", "sms", "kinds"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, ("H100", "H200")),
        ("NVIDIA H200", (9, 0), 132, ("H200", "H100")),
        ("NVIDIA GH200 480GB", (9, 0), 132, ("H200", "H100")),
        ("NVIDIA H20", (9, 0), 78, ()),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, ()),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, ("A100",)),
        ("NVIDIA A30", (8, 0), 56, ()),
        ("NVIDIA L4", (8, 9), 58, ()),
        ("NVIDIA B200", (10, 0), 148, ()),
    ],
)
def test_kind_of_device(name, capability, sms, kinds):
    assert tuning.device_kinds(name, capability, sms) == kinds


def test_decode_entries_round_trip():
    table = {decode_attention.tuning_key(32, 256, 1, 128, 2): Measured(DecodeConfig(32, 4, 8), 5.5)}
    assert tuning.to_table(tuning.to_entries(table)) == table
