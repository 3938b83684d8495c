"""Selection in numpy: the k entries of largest magnitude, and positions drawn at random.

Exact top-k: a sampled threshold lets one pass over cache-sized pieces find slightly more than k
candidates; the exact k are then chosen among those. Where the sample misleads, all entries are
looked at, so the result never depends on luck. With a threshold that is carried over from the step
before about k entries are selected, for less work. Either is done in the same pass that adds a step
to an error-feedback residual.

Source: AdaComp's selection; docs/methods/adacomp.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: Of fewer entries all are sorted: sampling costs more than it saves.
EXACT_BELOW = 4096
#: A carried threshold that more or fewer than this times k entries reach is not good enough.
TOO_MANY, TOO_FEW = 1.3, 0.8

_ACCUMULATE_PIECE = 1 << 16  # entries; target, addend and product stay in the second-level cache
_PEELED_FRACTION = 0.05  # of entries kept; above it the bit peeling has too many rounds
_SCANNED_FRACTION = 0.2  # of entries kept; above it a threshold leaves too little out
_SAMPLED_KEPT = 200  # kept entries expected in the sample: its rank is good to 7 %
_HINTED = 1.4  # times k: candidates that a hint aims at; seldom fewer than k then reach it
_COUNTED = 1 << 14  # magnitudes: from here on they are counted by size before any are ordered
_COUNTED_BITS = 17  # of a magnitude's lower bits: those of one count differ by a 64th
_SMALL = 1024  # entries: to sort fewer with others' costs less than a call
_TOGETHER = 3  # small arrays: fewer are faster one by one
_MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of a float32 without its sign
_FEW = 32  # magnitudes are too few to extrapolate from
_SLOPE = 0.3  # with which magnitudes fall where nothing is known: like this power of the rank
_SAFETY = 4.0  # standard deviations by which the threshold is lowered
_PIECE = 1 << 17  # entries per element-wise pass: its buffers stay in the second-level cache
_REGION = 1 << 21  # entries per gather, a multiple of _PIECE: stays in the last-level cache
_WORD = 32  # bits peeled at a time


def accumulate(target: Float32, addend: Float32, factor: float = 1.0, decay: float = 1.0) -> None:
    """Do ``target = decay * target + factor * addend`` in place, each product rounded.

    Args:
        target: [n] float32.
        addend: [n] float32.
        factor: Of the addend.
        decay: Of the target.
    """
    product = np.empty(min(_ACCUMULATE_PIECE, target.size) if factor != 1 else 0, np.float32)
    for start in range(0, target.size, _ACCUMULATE_PIECE):
        part = slice(start, start + _ACCUMULATE_PIECE)
        piece, more = target[part], addend[part]
        if decay != 1:
            piece *= np.float32(decay)
        if factor != 1:
            more = np.multiply(more, np.float32(factor), out=product[: more.size])
        piece += more


def random_k(n: int, k: int, rng: np.random.Generator) -> Int64:
    """Return k different positions below n, uniformly at random, ascending int64."""
    if k >= n:
        return np.arange(n)
    chosen = rng.choice(n, k, replace=False, shuffle=False)
    chosen.sort()
    return chosen


def top_k(x: Float32, k: int) -> tuple[Int64, Float32]:
    """Return the k entries of largest magnitude.

    Ties go to the lowest index. Zeros are never selected, so fewer than k may come back.

    Args:
        x: [n] float32, finite.
        k: How many; n or more returns every non-zero.

    Returns:
        Ascending indices [<= k] int64 and their values [<= k] float32.
    """
    threshold = _sampled_threshold(x, None, k)
    if threshold > 0:
        indices, values = at_least(x, threshold, k)
        if indices.size >= k:
            return _chosen(indices, values, largest(values, k))
    return _exact(x, k)


def feedback_top_k(
    residual: Float32, addend: Float32, k: int, factor: float = 1.0, hint: float = 0.0
) -> tuple[Int64, Float32, float]:
    """Add to a residual, take out its k largest entries, keep the rest: one error-feedback step.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then zero where selected.
        addend: [n] float32, finite.
        k: As for `top_k`.
        factor: Of the addend.
        hint: A magnitude that somewhat more than k entries should reach; the result does not
            depend on it, only the time. 0: none.

    Returns:
        What `top_k` of the sum returns, and a hint for the next step with this residual.
    """
    if np.float32(hint) > 0 and _is_worth_a_scan(residual.size, k):
        threshold = np.float32(hint)
    else:
        threshold = _sampled_threshold(residual, addend, k, factor)
        hint = 0.0
    if threshold > 0:
        candidates, values = add_at_least(residual, addend, threshold, factor, k)
        if candidates.size >= k:
            magnitudes = np.abs(values)
            lowest, hint = _lowest_and_hint(magnitudes, k)
            kept = _reaching(magnitudes, lowest, k).nonzero()[0]
            indices, values = _chosen(candidates, values, kept)
            residual[indices] = 0
            return indices, values, hint
    else:
        accumulate(residual, addend, factor)
    if hint > 0:  # gradients grow and shrink, and take the threshold with them
        indices, values = _once_more(residual, np.abs(values), k)
    else:
        indices, values = _exact(residual, k)
    residual[indices] = 0
    hint = magnitude_at(np.abs(values), _HINTED * k) if indices.size == k > 0 else 0.0
    return indices, values, hint


def feedback_of_each(
    residuals: Sequence[Float32],
    addends: Sequence[Float32],
    counts: Sequence[int],
    factors: Sequence[float],
    hints: Sequence[float],
) -> list[tuple[Int64, Float32, float]]:
    """Do `feedback_top_k` with each residual; small ones together, which otherwise cost calls.

    Args:
        residuals: Of each array [n], changed in place.
        addends: Of each.
        counts: Of each, k.
        factors: Of each addend.
        hints: Of each.
    """
    given = list(zip(residuals, addends, counts, factors, hints, strict=True))
    small = [place for place, residual in enumerate(residuals) if 0 < residual.size < _SMALL]
    if len(small) < _TOGETHER:
        return [feedback_top_k(*each) for each in given]
    for place in small:
        accumulate(residuals[place], addends[place], factors[place])
    taken = _take_of_small([residuals[n] for n in small], [counts[n] for n in small])
    found = {place: (*each, 0.0) for place, each in zip(small, taken, strict=True)}
    return [found.get(place) or feedback_top_k(*each) for place, each in enumerate(given)]


def _take_of_small(
    residuals: Sequence[Float32], counts: Sequence[int]
) -> Iterator[tuple[Int64, Float32]]:
    """Take the k largest entries out of each of some residuals, by one sorting of them all."""
    sizes = np.array([each.size for each in residuals])
    ends = sizes.cumsum()
    starts, kept = ends - sizes, np.minimum(counts, sizes)
    joined = np.concatenate(residuals)
    bits = joined.view(np.int32) & _MAGNITUDE  # ascend with the magnitude
    number = np.arange(sizes.size).repeat(sizes)
    keys = (number << 32) + (_MAGNITUDE - bits)  # by array, the largest magnitude first
    limits = np.sort(keys)[np.maximum(starts + kept - 1, 0)]
    limits[kept == 0] = -1
    is_chosen = keys <= limits[number]
    surplus = np.add.reduceat(is_chosen, starts, dtype=np.int64) - kept
    for place in (surplus > 0).nonzero()[0]:  # ties: the first ones stay
        start, stop = starts[place], ends[place]
        ties = start + (keys[start:stop] == limits[place]).nonzero()[0]
        is_chosen[ties[ties.size - surplus[place] :]] = False
    is_chosen &= bits != 0
    where = is_chosen.nonzero()[0]
    values = joined.take(where)
    lasts = where.searchsorted(ends).tolist()
    firsts = [0, *lasts[:-1]]
    for residual, start, first, last in zip(residuals, starts.tolist(), firsts, lasts, strict=True):
        indices = where[first:last] - start
        residual[indices] = 0
        yield indices, values[first:last]


def carried_top_k(x: Float32, k: int, threshold: float) -> tuple[Int64, Float32, float]:
    """Return the entries that reach a threshold, and the threshold for next time.

    The next one is where k of these entries were above it; if there were fewer, it is lowered along
    the slope of the magnitudes that were found. Where more than 1.3 k reach it the k largest of
    those are taken; where fewer than 0.8 k do, the k largest of all.

    Args:
        x: [n] float32, finite.
        k: How many there should be, 1 to n; 0 of an empty array.
        threshold: Of the time before; 0: not known.

    Returns:
        Ascending indices [m] int64, their values [m] float32, never zeros, and the threshold.
    """
    if threshold > 0 and x.size > EXACT_BELOW:
        indices, values = at_least(x, np.float32(threshold), k)
        if indices.size >= TOO_FEW * k:
            following = magnitude_at(np.abs(values), k)
            if indices.size > TOO_MANY * k:
                kept = largest(values, k)
                indices, values = indices.take(kept), values.take(kept)
            return indices, values, following
    indices, values = top_k(x, k)
    return indices, values, lowest_of(values, k)


def feedback_carried(
    residual: Float32, addend: Float32, k: int, factor: float = 1.0, threshold: float = 0.0
) -> tuple[Int64, Float32, float]:
    """Do `carried_top_k` of a residual plus an addend, and take out what is selected.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then zero where selected.
        addend: [n] float32, finite.
        k: How many there should be, 1 to n; 0 of an empty array.
        factor: Of the addend.
        threshold: Of the step before; 0: not known.
    """
    if threshold > 0 and residual.size > EXACT_BELOW:
        indices, values = add_at_least(residual, addend, np.float32(threshold), factor, k)
        if TOO_FEW * k <= indices.size <= TOO_MANY * k:
            residual[indices] = 0
            return indices, values, magnitude_at(np.abs(values), k)
    else:
        accumulate(residual, addend, factor)
    indices, values, threshold = carried_top_k(residual, k, threshold)
    residual[indices] = 0
    return indices, values, threshold


def largest(values: Float32, k: int) -> Int64:
    """Return ascending positions of the k largest magnitudes, the first ones among equals."""
    if values.size <= k:
        return np.arange(values.size)
    if k <= 0:
        return np.empty(0, np.int64)
    return _are_largest(np.abs(values), k).nonzero()[0]


def lowest_of(values: Float32, k: int) -> float:
    """Return the smallest magnitude of [m] values; 0 where there are not the k > 0 wanted."""
    return float(np.abs(values).min()) if values.size == k > 0 else 0.0


def magnitude_at(magnitudes: Float32, rank: float) -> float:
    """Return the magnitude of this rank, from the largest magnitudes [m], m > 0, of an array.

    Beyond them it is taken to fall on like a power of the rank, as it does from rank m / 2 to m.
    """
    count, wanted = magnitudes.size, math.ceil(rank)
    if wanted <= count:
        return float(np.partition(magnitudes, count - wanted)[count - wanted])
    half = max(1, count // 2)
    ordered = np.partition(magnitudes, count - half)  # two ranks in one call: ten times longer
    lowest, middle = float(ordered[: count - half + 1].min()), float(ordered[count - half])
    power = math.log(middle / lowest) / math.log(count / half) if half < count else _SLOPE
    return float(lowest * (count / wanted) ** power)


def at_least(x: Float32, threshold: np.float32, expected: int) -> tuple[Int64, Float32]:
    """Return the entries of x [n] whose magnitude reaches a threshold > 0: indices, values.

    Args:
        x: [n] float32.
        threshold: Of the magnitude.
        expected: About how many there are; the result does not depend on it, only the time.
    """
    if expected > _PEELED_FRACTION * x.size:
        return _scan_dense(x, threshold)
    return _scan(x, None, threshold)


def add_at_least(
    residual: Float32, addend: Float32, threshold: np.float32, factor: float, expected: int
) -> tuple[Int64, Float32]:
    """Do ``residual += factor * addend`` [n] in place, then `at_least` of it."""
    if expected > _PEELED_FRACTION * residual.size:
        accumulate(residual, addend, factor)
        return _scan_dense(residual, threshold)
    return _scan(residual, addend, threshold, factor)


def _scan_dense(x: Float32, threshold: np.float32) -> tuple[Int64, Float32]:
    """Return the entries of x that reach a threshold, where they are not few."""
    indices = (np.abs(x) >= threshold).nonzero()[0]
    return indices, x.take(indices)


def _sampled_threshold(
    x: Float32, addend: Float32 | None, k: int, factor: float = 1.0
) -> np.float32:
    """Return a magnitude that somewhat more than k entries should reach; 0: look at everything."""
    if not _is_worth_a_scan(x.size, k):
        return np.float32(0)
    stride = max(1, k // _SAMPLED_KEPT) | 1  # odd: does not walk down one column of a matrix
    sample = x[::stride]
    if addend is not None:
        sample = sample + np.float32(factor) * addend[::stride]
    sample = np.abs(sample)
    expected = k * sample.size / x.size
    rank = min(int(expected + _SAFETY * expected**0.5) + 1, sample.size)
    sample.partition(sample.size - rank)
    return np.float32(sample[sample.size - rank])


def _is_worth_a_scan(size: int, k: int) -> bool:
    return size >= EXACT_BELOW and 0 < k <= _SCANNED_FRACTION * size


def _scan(
    x: Float32, addend: Float32 | None, threshold: np.float32, factor: float = 1.0
) -> tuple[Int64, Float32]:
    """Return the entries of x that reach a threshold > 0, where they are few.

    With an addend, x changes in place while in cache: ``+= factor * addend``.
    """
    masks = np.empty((2, min(_PIECE, x.size)), bool)
    packed = np.empty(-(-min(_REGION, x.size) // _WORD), np.uint32)
    octets = packed.view(np.uint8)
    indices, values = [], []
    for start in range(0, x.size, _REGION):
        region = x[start : start + _REGION]
        for first in range(0, region.size, _PIECE):
            piece = region[first : first + _PIECE]
            if addend is not None:
                accumulate(piece, addend[start + first : start + first + _PIECE], factor)
            above, below = masks[:, : piece.size]
            np.greater_equal(piece, threshold, out=above)
            np.less_equal(piece, -threshold, out=below)
            above |= below
            bits = np.packbits(above, bitorder="little")
            octets[first // 8 : first // 8 + bits.size] = bits
        num_words = -(-region.size // _WORD)
        octets[-(-region.size // 8) : packed.itemsize * num_words] = 0
        found = _set_bits(packed[:num_words])
        values.append(region.take(found))
        found += start
        indices.append(found)
    return np.concatenate(indices), np.concatenate(values)


def _set_bits(words: np.ndarray) -> Int64:
    """Return the ascending positions of the bits set in [w] uint32, lowest bit first.

    Peels the lowest bit of every non-zero word, round by round: at 1 % twice as fast as ``nonzero``
    of the boolean mask, whose branches are mispredicted at every hit. A third of the words has
    one; where more than a tenth has, numpy's ``nonzero`` does without branches.
    """
    origins = (words != 0).nonzero()[0]
    words = words.take(origins)
    origins *= _WORD
    rounds = []
    while words.size:
        below = words - np.uint32(1)  # the lowest bit cleared, the zeros below it set
        rounds.append(origins + np.bitwise_count(below & ~words))
        words &= below
        more = (words != 0).nonzero()[0]
        words, origins = words.take(more), origins.take(more)
    if not rounds:
        return np.empty(0, np.int64)
    found = np.concatenate(rounds)
    found.sort(kind="stable")  # few ascending runs: merged, not sorted
    return found


def _exact(x: Float32, k: int) -> tuple[Int64, Float32]:
    """Select among all: numpy finds what is set in a mask in a fifth of the time of non-zeros."""
    if k <= 0:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    indices = (x != 0).nonzero()[0]
    values = x.take(indices)
    if indices.size <= k:
        return indices, values
    # Of the others alone: partitioning many equal zeros takes ten times as long.
    return _chosen(indices, values, _are_largest(np.abs(values), k).nonzero()[0])


def _once_more(x: Float32, magnitudes: Float32, k: int) -> tuple[Int64, Float32]:
    """Do `top_k` of x when the m < k magnitudes above some threshold are known."""
    if magnitudes.size > _FEW:
        threshold = np.float32(magnitude_at(magnitudes, _HINTED * k))
        indices, values = at_least(x, threshold, k)
        if indices.size >= k:
            return _chosen(indices, values, largest(values, k))
    return top_k(x, k)


def _lowest_and_hint(magnitudes: Float32, k: int) -> tuple[np.float32, float]:
    """Return the k-th largest of m >= k magnitudes, and about that of rank `_HINTED` k."""
    wanted = math.ceil(_HINTED * k)
    if magnitudes.size < _COUNTED:
        ordered = np.partition(magnitudes, magnitudes.size - k)
        if magnitudes.size < wanted:
            return ordered[-k], magnitude_at(magnitudes, wanted)
        return ordered[-k], magnitude_at(ordered[:-k], wanted - k)
    # The bits of a float that is not negative ascend with it.
    sizes = magnitudes.view(np.int32) >> _COUNTED_BITS
    smallest = int(sizes.min())
    sizes -= np.int32(smallest)
    counts = np.bincount(sizes)
    reached = counts[::-1].cumsum()  # how many are of the largest size, of the two largest, ...
    place = int(reached.searchsorted(k))
    same = magnitudes[sizes == counts.size - 1 - place]
    rank = int(reached[place]) - k  # among these, from the smallest
    lowest = np.partition(same, rank)[rank]
    if magnitudes.size < wanted:
        return lowest, magnitude_at(magnitudes, wanted)
    size = smallest + counts.size - 1 - int(reached.searchsorted(wanted))
    return lowest, float(np.int32(size << _COUNTED_BITS).view(np.float32))


def _chosen(indices: Int64, values: Float32, kept: Int64) -> tuple[Int64, Float32]:
    return indices.take(kept), values.take(kept)


def _are_largest(magnitudes: Float32, k: int) -> np.ndarray:
    """Return [m] bool: whether each magnitude is of the k largest, 0 < k <= m."""
    return _reaching(magnitudes, np.partition(magnitudes, magnitudes.size - k)[-k], k)


def _reaching(magnitudes: Float32, smallest_kept: np.float32, k: int) -> np.ndarray:
    """Return [m] bool: `_are_largest` when the k-th largest is known."""
    kept = magnitudes >= smallest_kept
    surplus = np.count_nonzero(kept) - k
    if surplus:
        ties = (magnitudes == smallest_kept).nonzero()[0]
        kept[ties[ties.size - surplus :]] = False
    return kept
