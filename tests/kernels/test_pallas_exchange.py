"""Exchanges between GPUs: the protocol's PTX run by a small simulator, and that the kernels lower.

The simulator lets threads of several ranks take turns at random before each access to memory.
GPUs themselves: tests/test_multi_gpu_jax.py.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from dualinfer.kernels.pallas.exchange import (  # noqa: E402
    BLOCK,
    Mailboxes,
    gather_ranks,
    given_up,
    protocol,
    sum_ranks,
)

from .arrays import check_lowers, struct  # noqa: E402

Memory = dict[int, int]  # uint32 by address
LOW = 0xFFFFFFFF


def bits(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def number(pattern: int) -> np.float32:
    return np.uint32(pattern).view(np.float32)


def thread(text: str, operands: list[int], memory: Memory, out: list[int]) -> Iterator[None]:
    """One thread of `text`: stops before each access to memory, appends $0 at last."""
    lines = [line.rstrip(";") for line in text.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    registers: dict[str, int] = {f"${i}": x for i, x in enumerate(operands, 1)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def pair(name: str) -> list[str]:
        return name.strip("{}").split(", ")

    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line in "{}" or line.startswith(".reg") or line.endswith(":"):
            continue
        if guard := re.fullmatch(r"@(!?)(\w+) (.*)", line):
            if bool(registers[guard[2]]) == bool(guard[1]):
                continue
            line = guard[3]
        what, rest = line.split(" ", 1)
        to, *given = re.findall(r"\{.*?\}|\[.*?\]|[^, ]+", rest)
        if what == "bra":
            at = labels[to]
        elif what.startswith(("ld.", "st.")):
            yield
            place = sum(map(value, (to if what[0] == "s" else given[0])[1:-1].split(" + ")))
            wide = what.endswith("64")
            assert place % (8 if wide else 4) == 0 and place in memory
            if what[0] == "l":
                registers[to] = memory[place] | (memory[place + 4] << 32 if wide else 0)
            else:
                memory[place] = value(given[0]) & LOW
                if wide:
                    memory[place + 4] = value(given[0]) >> 32
        elif what == "mov.b64" and to[0] == "{":
            low, high = pair(to)
            registers[low], registers[high] = value(given[0]) & LOW, value(given[0]) >> 32
        elif what == "mov.b64":
            low, high = pair(given[0])
            registers[to] = value(low) | value(high) << 32
        else:
            registers[to] = _OPERATIONS[what](*map(value, given))
    out.append(registers["$0"])


_OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "add.u32": lambda a, b: (a + b) & LOW,
    "sub.u32": lambda a, b: (a - b) & LOW,
    "and.b32": lambda a, b: a & b,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & LOW,
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.ne.or.u32": lambda a, b, p: a != b or p,
    "add.rn.f32": lambda a, b: bits(number(a) + number(b)),
}


def mailboxes(size: int, done: int = 0, patience: int = 10**5) -> Any:
    """Mailboxes of four elements, the ranks' rows, and their memory after `done` exchanges."""
    boxes = Mailboxes(size, 4, patience)
    addresses = [(7 << 40) + (rank << 33) + 256 * rank for rank in range(size)]
    memory = {a + at: 0 for a in addresses for at in range(0, boxes.bytes, 4)}
    memory |= {a + 4 * element: done for a in addresses for element in range(4)}
    return boxes, boxes.table(addresses).view(np.uint32).tolist(), memory


@pytest.mark.parametrize("done", [0, LOW - 3], ids=["fresh", "about to wrap"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_whatever_the_order(size, done):
    """Sums and gathers by turns, while ranks run ahead and fall behind."""
    rounds = 6
    for seed in range(12):
        chance = random.Random(seed)
        boxes, rows, memory = mailboxes(size, done)
        owners = [*range(size), *[0] * (4 - size)]
        x = np.random.default_rng(seed).standard_normal((rounds, size, 4)).astype(np.float32)
        expected = x[:, 0].copy()
        for rank in range(1, size):
            expected += x[:, rank]
        expected[1::2] = x[1::2, owners, range(4)]
        texts = protocol(boxes), protocol(boxes, gathers=True)
        found = np.zeros((rounds, size, 4), np.float32)

        def device(
            rank: int,
            values: Any = x,
            where: Any = (rows, memory, owners, texts),
            into: Any = found,
            chance: random.Random = chance,
        ) -> Iterator[None]:
            rows, memory, owners, texts = where
            for step in range(rounds):
                outs: list[list[int]] = [[] for _ in range(4)]
                running = [
                    thread(
                        texts[step % 2],
                        [bits(values[step, rank, e]), e, *rows[rank], owners[e]],
                        memory,
                        outs[e],
                    )
                    for e in range(4)
                ]
                while running:
                    one = chance.choice(running)
                    if next(one, running) is running:
                        running.remove(one)
                    yield
                into[step, rank] = [number(out[0]) for out in outs]

        devices = [device(rank) for rank in range(size)]
        speeds = {id(d): chance.random() ** 3 + 0.01 for d in devices}
        while devices:
            one = chance.choices(devices, [speeds[id(d)] for d in devices])[0]
            for _ in range(chance.choice((1, 1, 5, 60))):
                if next(one, devices) is devices:
                    devices.remove(one)
                    break
        np.testing.assert_array_equal(found, np.broadcast_to(expected[:, None], found.shape))
        assert not any(memory[7 * 2**40 + (r << 33) + 256 * r + boxes.flag] for r in range(size))


@pytest.mark.parametrize("gathers", [False, True])
def test_a_rank_that_waits_too_long_gives_up_and_never_waits_again(gathers):
    boxes, rows, memory = mailboxes(3)
    flag = (rows[0][1] | rows[0][2] << 32) + boxes.flag
    for patience, most in ((5, 60), (10**5, 10)):
        out: list[int] = []
        text = protocol(boxes._replace(patience=patience), gathers)
        accesses = sum(1 for _ in thread(text, [bits(1), 0, *rows[0], 1], memory, out))
        assert accesses < most and np.isnan(number(out[0])) and memory[flag] == 1
    # The words are there by now, but what the others sent belongs to a sum that failed.
    for rank in (1, 2):
        for _ in range(2):
            text = protocol(boxes._replace(patience=0), gathers)
            list(thread(text, [bits(1), 0, *rows[rank], 1], memory, []))
    list(thread(protocol(boxes, gathers), [bits(1), 0, *rows[0], 1], memory, out))
    assert np.isnan(number(out[-1]))


def test_a_table_has_a_row_for_each_rank():
    boxes = Mailboxes(2, BLOCK, 7)
    table = boxes.table([0x7F00_1234_5600, 0x7EFF_FFFF_FF00])
    assert table.dtype == np.int32 and table.shape == (2, 7)
    expected = [0x1234_5600, 0x7F00, 0xFFFF_FF00, 0x7EFF]
    assert table.view(np.uint32)[0].tolist() == [0, *expected[:2], *expected]
    assert table.view(np.uint32)[1].tolist() == [1, *expected[2:], *expected]
    assert boxes.words % 8 == 0 and boxes.bytes == 4 * BLOCK + 256 + 8 * 2 * 2 * BLOCK


def arguments(size: int, capacity: int = 8 * BLOCK) -> tuple[Any, Mailboxes, Any]:
    boxes = Mailboxes(size, capacity, 9)
    return struct(3 + 2 * size, dtype="int32"), boxes, struct(5, dtype="int32")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_lower_with_one_thread_an_element(dtype, size):
    row, boxes, counters = arguments(size)
    x, bias = struct(2, 1, 63, dtype="float32"), struct(63, dtype=dtype)

    def chain(x: Any, row: Any, counters: Any, bias: Any, residual: Any) -> Any:
        y, counters = sum_ranks(x, row, boxes, counters, bias, residual, residual.dtype)
        z, counters = sum_ranks(y, row, boxes, counters)
        logits, counters = gather_ranks(z, row, boxes, counters, size * 63 - 5)
        return y, logits, given_up(row, boxes, counters)

    residual = struct(2, 1, 63, dtype=dtype)
    y, logits, flag = jax.eval_shape(chain, x, row, counters, bias, residual)
    assert (y.shape, y.dtype) == (x.shape, dtype) and (flag.shape, flag.dtype) == ((1,), "int32")
    assert (logits.shape, logits.dtype) == ((2, 1, size * 63 - 5), dtype)
    text = check_lowers(chain, x, row, counters, bias, residual)
    calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line]
    assert len(calls) == 4
    for line in calls[:3]:
        (warps,) = re.findall(r"num_warps = (\d+)", line)
        assert 32 * int(warps) == BLOCK
        assert line.count("output_operand_alias<") == 1  # the counters, which order exchanges


def test_what_does_not_fit_is_refused():
    row, boxes, counters = arguments(3, BLOCK)
    x = struct(2, 60, dtype="float32")

    def sums(x: Any, row: Any, *added: Any) -> Any:
        return sum_ranks(x, row, boxes, jax.numpy.zeros(1, "int32"), *added)

    for given, message in [
        ((struct(2, 65, dtype="float32"), row), "130 values"),
        ((x, struct(7, dtype="int32")), r"int32 \(9,\) is expected"),
        ((x, row, struct(2, dtype="float32")), "bias is"),
        ((x, row, None, struct(60, dtype="float32")), "residual is"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(sums, *given)
    for columns in (120, 181):  # none of the last rank's; more than there are
        with pytest.raises(ValueError, match="not some of each of 3 ranks"):
            jax.eval_shape(
                lambda *a, n=columns: gather_ranks(a[0], a[1], boxes, a[2], n), x, row, counters
            )
