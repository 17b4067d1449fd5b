"""Top-k and top-p as thresholds, found by counting digits: a radix select without a sort.

A token's distance is how far its logit, divided by the temperature, lies below the best one of its
row: a float32 of 0 or more, taken as an integer of three digits (10, 10 and 9 bits). Each launch
counts one digit of the tokens that share the digits found so far, with their probabilities, by
integer atomics, so that the order of the programs does not matter. The last program of a row to
arrive reads the counts and takes the digit. Nothing of this waits for the host.
"""

# Pyright knows device code as Python.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

BINS = tl.constexpr(1024)
COPIES = tl.constexpr(2)  # of each histogram, so that fewer atomics meet at one address
# Distances from 2**-59 (below it: 0, since no logit plus noise can tell) to 32 (beyond: never
# drawn, and less than float32 can add to a sum that holds the best token's 1).
_NEAREST = tl.constexpr((127 - 59) << 23)
_COARSE = tl.constexpr(19)  # bits below the first digit
_FINE = tl.constexpr(9)  # bits below the second one
_NONE = tl.constexpr(0x7FFFFFFF)
_TOGETHER = tl.constexpr(16)
LOWEST = tl.constexpr(-0x80000000)  # below the key of every float

# A histogram's entry: the count from this bit on, below it the sum of weights times 2**24.
_COUNT = tl.constexpr(43)
_ONE = tl.constexpr(1 << 43)
MOST_TOKENS = (1 << 19) - 1

# Columns of a row's integers and of its doubles.
ROW_INTS, ROW_MASSES = tl.constexpr(8), tl.constexpr(2)
_GOAL, _PREFIX, _RANK, _CUT = (tl.constexpr(i) for i in range(4))
WORST = tl.constexpr(4)
_INNER, _LEFT = tl.constexpr(0), tl.constexpr(1)
_TOP_K, _TOP_P = tl.constexpr(1), tl.constexpr(2)  # goals; 0: nothing is left to find


def scales() -> list[float]:
    """What the weights of each first digit are relative to: the probability at its lower edge."""
    import math
    import struct

    edges = (_NEAREST.value + (i << _COARSE.value) for i in range(BINS.value))
    return [math.exp(-struct.unpack("<f", struct.pack("<I", e))[0]) for e in edges]


@triton.jit
def ordered(x):
    """int32 in the order of float32 `x`: zeros are equal, NaN is the greatest."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    return tl.where(x != x, _NONE, tl.where(bits < 0, bits ^ _NONE, bits))


@triton.jit
def unordered(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ _NONE, key).to(tl.float32, bitcast=True)


@triton.jit
def from_best(x, best, temperature):
    """(x - best) / temperature, rounded as the plain sampler rounds it."""
    return tl.div_rn(x - best, temperature)


@triton.jit
def distance(below):
    """The distance of a `from_best` as an integer; NaN has none."""
    bits = below.to(tl.int32, bitcast=True) & _NONE
    bits = tl.where(below != below, 0, bits)
    return tl.maximum(bits, _NEAREST) - _NEAREST


@triton.jit
def scores(
    row, ids, real, logits, seen, eos, EOS_WIDTH: tl.constexpr,
):  # fmt: skip
    """A row's logits of `ids` in float32, penalized and with a held EOS at -inf, if the row asks.

    What it asks is on the device, so that one kernel serves every row.
    """
    logits_ptr, logits_stride = logits
    seen_ptr, seen_stride, penalty_ptr = seen
    eos_ptr, eos_stride, new_ptr, minimum_ptr = eos
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=real, other=float("-inf"))
    x = x.to(tl.float32)
    penalty = tl.load(penalty_ptr + row)
    if penalty != 1:
        was_seen = tl.load(seen_ptr + row * seen_stride + ids, mask=real, other=0) != 0
        x = tl.where(was_seen, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
    if tl.load(new_ptr + row) < tl.load(minimum_ptr + row):
        for i in tl.static_range(EOS_WIDTH):
            x = tl.where(ids == tl.load(eos_ptr + row * eos_stride + i), float("-inf"), x)
    return x


@triton.jit
def is_last(counter_ptr):
    """True in the last program of a row to get here, which sees what the others wrote before.

    It sets the counter back to 0 for the next launch.
    """
    tl.debug_barrier()  # the atomic below releases one thread's writes and those it has waited for
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def start_thresholds(row, bests, ints_ptr, temperature, top_k, top_p, vocab, CHUNKS):
    """By a row's last program: its best logit, what there is to find, and where it can lie."""
    chunk_best_ptr, row_best_ptr = bests
    chunks = tl.arange(0, CHUNKS)
    real = chunks < tl.num_programs(0)
    of_chunk = tl.load(chunk_best_ptr + row * CHUNKS + chunks, mask=real, other=float("-inf"))
    best = unordered(tl.max(tl.where(real, ordered(of_chunk), LOWEST)))
    tl.store(row_best_ptr + row, best)
    ranked = (top_k > 0) & (top_k < vocab)
    # The k-th best token is no worse than the k-th best of the chunks' best ones.
    cut = BINS - 1
    if ranked & (top_k <= tl.num_programs(0)):
        far = distance(from_best(of_chunk, best, temperature))
        rank = tl.zeros((CHUNKS,), tl.int32)
        for start in tl.range(0, CHUNKS, _TOGETHER):  # few at a time: registers are dear
            others = start + tl.arange(0, _TOGETHER)
            there = others < tl.num_programs(0)
            other = tl.load(chunk_best_ptr + row * CHUNKS + others, mask=there, other=0.0)
            its = distance(from_best(other, best, temperature))
            nearer = there[None, :] & (its[None, :] <= far[:, None])
            rank += tl.sum(nearer.to(tl.int32), 1)
        kth = tl.min(tl.where(real & (rank >= top_k), far, _NONE))
        cut = tl.minimum(kth >> _COARSE, BINS - 1)
    ints_ptr += row * ROW_INTS
    tl.store(ints_ptr + _CUT, cut)
    tl.store(ints_ptr + WORST, _NONE)
    tl.store(ints_ptr + _GOAL, (ranked | (top_p < 1)).to(tl.int32))


@triton.jit
def no_thresholds(row, ints_ptr):
    """Mark a row as one without filters."""
    tl.store(ints_ptr + row * ROW_INTS + _GOAL, 0)
    tl.store(ints_ptr + row * ROW_INTS + WORST, _NONE)


@triton.jit
def _take(histogram_ptr, row, CLEAR: tl.constexpr):
    """A row's counts int32 and masses float64 [BINS], and the histogram cleared."""
    copies, bins = tl.arange(0, COPIES), tl.arange(0, BINS)
    entries = histogram_ptr + row * (COPIES * BINS) + copies[:, None] * BINS + bins[None, :]
    both = tl.load(entries)
    if CLEAR:
        tl.store(entries, tl.zeros_like(both))
    both = tl.sum(both, 0)
    return (both >> _COUNT).to(tl.int32), (both & (_ONE - 1)).to(tl.float64)


@triton.jit
def _ranked(counts, rank):
    """The first bin up to which `rank` tokens lie, and how many lie before it."""
    bins = tl.arange(0, BINS)
    found = tl.sum((tl.cumsum(counts, 0) < rank).to(tl.int32))
    return found, tl.sum(tl.where(bins < found, counts, 0))


@triton.jit
def _reached(masses, goal):
    """The last bin with tokens before which less than `goal` lies, and what lies before it."""
    bins = tl.arange(0, BINS)
    before = tl.cumsum(masses, 0) - masses
    stays = (masses > 0) & ((before < goal) | (before <= 0))  # the best one stays whatever `goal`
    found = tl.max(tl.where(stays, bins, 0))
    return found, tl.sum(tl.where(bins == found, before, 0.0))


@triton.jit
def _start_top_p(row, coarse_ptr, scales_ptr, ints_ptr, masses_ptr, top_p, worst, inner):
    """The first digit of top-p's threshold among what top-k has left over.

    `worst` is the first digit of top-k's threshold, `inner` the mass that stays of that digit.
    """
    bins = tl.arange(0, BINS)
    _, masses = _take(coarse_ptr, row, True)
    masses = tl.where(bins < worst, masses, tl.where(bins == worst, inner, 0.0))
    scale = tl.load(scales_ptr + bins)
    goal = top_p.to(tl.float64) * tl.sum(masses * scale)
    found, before = _reached(masses * scale, goal)
    left = (goal - before) / tl.load(scales_ptr + found)
    tl.store(masses_ptr + _LEFT, left)
    tl.store(ints_ptr + _PREFIX, found)
    tl.store(ints_ptr + _GOAL, tl.where(top_p < 1, _TOP_P, 0))


@triton.jit
def count_digit(
    row, x, real, best, temperature, prefix, worst, histogram_ptr, ids,
    DIGIT: tl.constexpr,
):  # fmt: skip
    """Add the tokens of this program to the histogram of the digit that is looked for."""
    far = distance(from_best(x, best, temperature))
    if DIGIT == 0:
        digit = far >> _COARSE
        counted = real & (digit <= prefix)
    elif DIGIT == 1:
        digit = (far >> _FINE) & (BINS - 1)
        counted = real & ((far >> _COARSE) == prefix)
    else:
        digit = far & (BINS // 2 - 1)
        counted = real & ((far >> _FINE) == prefix)
    counted &= far <= worst
    # Relative to the probability at the edge of the first digit it lies between 1/e and 1.
    far = tl.where(counted, far, 0)
    edge = (((far >> _COARSE) << _COARSE) + _NEAREST).to(tl.float32, bitcast=True)
    weight = tl.exp(edge - (far + _NEAREST).to(tl.float32, bitcast=True))
    weight = tl.where(counted, weight * 16777216.0 + 0.5, 0.0).to(tl.int64)
    entry = tl.where(counted, weight + _ONE, 0)
    histogram_ptr += row * (COPIES * BINS)
    first = tl.min(tl.where(counted, digit, BINS))
    last = tl.max(tl.where(counted, digit, -1))
    if first == last:  # one address: one atomic
        tl.atomic_add(histogram_ptr + first, tl.sum(entry), sem="relaxed")
    elif first < last:
        at = histogram_ptr + (ids % COPIES) * BINS + digit
        tl.atomic_add(at, entry, mask=counted, sem="relaxed")


@triton.jit
def may_count(of_chunk, best, temperature, prefix, DIGIT: tl.constexpr):
    """False if not even the best token of a chunk is near enough to be counted."""
    far = distance(from_best(of_chunk, best, temperature))
    if DIGIT == 2:
        return (far >> _FINE) <= prefix
    return (far >> _COARSE) <= prefix


@triton.jit
def load_goal(row, ints_ptr, DIGIT: tl.constexpr):
    """What a row looks for, the digits found so far (the greatest first digit), the threshold."""
    ints_ptr += row * ROW_INTS
    prefix = tl.load(ints_ptr + (_CUT if DIGIT == 0 else _PREFIX))
    return tl.load(ints_ptr + _GOAL), prefix, tl.load(ints_ptr + WORST)


@triton.jit
def take_digit(row, goal, prefix, tables, want, DIGIT: tl.constexpr):
    """By a row's last program: the digit that the histogram tells, and what is next."""
    coarse_ptr, fine_ptr, scales_ptr, ints_ptr, masses_ptr = tables
    top_k, top_p, vocab = want
    bins = tl.arange(0, BINS)
    ints_ptr += row * ROW_INTS
    masses_ptr += row * ROW_MASSES
    if DIGIT == 0:
        counts, _ = _take(coarse_ptr, row, False)
        found, before = _ranked(counts, top_k)
        # Where fewer tokens were counted, the k-th is too far away to matter.
        if (top_k > 0) & (top_k < vocab) & (found < BINS):
            tl.store(ints_ptr + _PREFIX, found)
            tl.store(ints_ptr + _RANK, top_k - before)
            tl.store(ints_ptr + _GOAL, _TOP_K)
            tl.store(masses_ptr + _INNER, 0.0)
        else:
            _start_top_p(row, coarse_ptr, scales_ptr, ints_ptr, masses_ptr, top_p, BINS, 0.0)
    else:
        counts, masses = _take(fine_ptr, row, True)
        if goal == _TOP_K:
            rank = tl.load(ints_ptr + _RANK)
            found, before = _ranked(counts, rank)
            inner = tl.load(masses_ptr + _INNER)
            inner += tl.sum(tl.where(bins < found + (DIGIT - 1), masses, 0.0))
            if DIGIT == 1:
                tl.store(ints_ptr + _PREFIX, (prefix << (_COARSE - _FINE)) | found)
                tl.store(ints_ptr + _RANK, rank - before)
                tl.store(masses_ptr + _INNER, inner)
            else:
                worst = (prefix << _FINE) | found
                tl.store(ints_ptr + WORST, worst)
                worst >>= _COARSE
                _start_top_p(row, coarse_ptr, scales_ptr, ints_ptr, masses_ptr, top_p, worst, inner)
        else:
            left = tl.load(masses_ptr + _LEFT)
            found, passed = _reached(masses, left)
            if DIGIT == 1:
                tl.store(ints_ptr + _PREFIX, (prefix << (_COARSE - _FINE)) | found)
                tl.store(masses_ptr + _LEFT, left - passed)
            else:
                tl.store(ints_ptr + WORST, (prefix << _FINE) | found)
                tl.store(ints_ptr + _GOAL, 0)
