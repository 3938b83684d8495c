"""Selection in numpy: the k entries of largest magnitude, and random positions.

The exact selection of the k largest entries compares all entries with a threshold from a sample, in
one pass over cache-sized chunks, and finds slightly more than k candidates. The exact selection
then selects the k largest entries among the candidates. If fewer than k entries reach the threshold
from a sample, the exact selection compares all entries, so its result does not depend on the
sample. The carried selection uses the magnitude threshold of the previous training step, and so
selects about k entries with less work than the exact selection. The exact and the carried selection
can add an addend (new gradient) to an error-feedback residual in the pass that selects entries.

Source: AdaComp's selection; docs/methods/adacomp.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from thinwire.ops.types import Float32, Int64

#: Arrays with fewer entries than EXACT_BELOW are sorted as a whole, because sampling a threshold
#: costs more time than it saves.
EXACT_BELOW = 4096
#: The carried selection rejects the previous step's threshold if more than TOO_MANY * k or fewer
#: than TOO_FEW * k entries reach the threshold.
TOO_MANY, TOO_FEW = 1.3, 0.8

# number of entries per addition, whose three arrays fit in the second-level cache
_ACCUMULATE_PIECE = 1 << 16
# fraction of selected entries above which bit peeling takes too many rounds
_PEELED_FRACTION = 0.05
# fraction of selected entries above which comparing with a threshold excludes too few entries
_SCANNED_FRACTION = 0.2
# number of selected entries expected in a sample, whose rank is then accurate to 7 %
_SAMPLED_KEPT = 200
# rank of the hint (an expected magnitude) divided by k, so that fewer than k entries seldom reach
# the hint
_HINTED = 1.4
# number of magnitudes from which counting by size replaces partitioning all of them
_COUNTED = 1 << 14
# number of lower bits of a float that counting ignores, so that counted sizes are 1/64 apart
_COUNTED_BITS = 17
# number of entries below which arrays are sorted together, which is cheaper than one call per array
_SMALL = 1024
_TOGETHER = 3  # least number of small arrays to sort together; fewer arrays are faster one by one
_MAGNITUDE = np.int32(0x7FFFFFFF)  # bit mask of a float32's magnitude (all bits except the sign)
_FEW = 32  # number of magnitudes up to which a threshold cannot be extrapolated from them
_SLOPE = 0.3  # assumed slope if it cannot be fitted: magnitudes fall with this power of their rank
_SAFETY = 4.0  # number of standard deviations of the sampled rank by which a threshold is lowered
# number of entries per comparison pass, whose buffers fit in the second-level cache
_PIECE = 1 << 17
# number of entries per gather, a multiple of _PIECE, which fit in the last-level cache
_REGION = 1 << 21
_WORD = 32  # number of bits per word from which the bit peeling takes one bit per round


def accumulate(target: Float32, addend: Float32, factor: float = 1.0, decay: float = 1.0) -> None:
    """Do ``target = decay * target + factor * addend`` in place; each product is rounded.

    Args:
        target: [n] float32 array to which the addend is added in place.
        addend: [n] float32, added to the target array.
        factor: Factor on the addend before the addition; 1 leaves the addend unchanged.
        decay: Factor on the target before the addition; 1 leaves the target unchanged.
    """
    product = np.empty(min(_ACCUMULATE_PIECE, target.size) if factor != 1 else 0, np.float32)
    for start in range(0, target.size, _ACCUMULATE_PIECE):
        part = slice(start, start + _ACCUMULATE_PIECE)
        piece, addition = target[part], addend[part]
        if decay != 1:
            piece *= np.float32(decay)
        if factor != 1:
            addition = np.multiply(addition, np.float32(factor), out=product[: addition.size])
        piece += addition


def random_k(n: int, k: int, rng: np.random.Generator) -> Int64:
    """Return k different positions below n, drawn uniformly at random, ascending, as int64."""
    if k >= n:
        return np.arange(n)
    chosen = rng.choice(n, k, replace=False, shuffle=False)
    chosen.sort()
    return chosen


def top_k(x: Float32, k: int) -> tuple[Int64, Float32]:
    """Return the k entries of largest magnitude of an array.

    Among entries of equal magnitude, `top_k` selects the entries with the lowest indices. `top_k`
    never selects zeros, so it can return fewer than k entries.

    Args:
        x: Array [n] float32 of finite gradient values from which to select entries.
        k: Number of entries to select; n or more selects every non-zero entry.

    Returns:
        Ascending indices [<= k] int64 of the selected entries, and their values [<= k] float32.
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
    """Add an addend to a residual, then remove and return the k largest entries of the sum.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then set to zero where
            selected.
        addend: [n] float32, finite values (a new gradient) to add to the residual.
        k: Number of entries of the sum (residual plus addend) to select, as for `top_k`.
        factor: Factor on the addend before it is added to the residual.
        hint: A magnitude that slightly more than k entries are expected to reach; 0 if unknown. The
            hint changes only the running time, not the result.

    Returns:
        Indices and values of the k largest entries of the sum, as `top_k` returns them, and a hint
        for the next step with this residual, 0 if unknown.
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
            selected = _reaching(magnitudes, lowest, k).nonzero()[0]
            indices, values = _chosen(candidates, values, selected)
            residual[indices] = 0
            return indices, values, hint
    else:
        accumulate(residual, addend, factor)
    # gradients have shrunk since the last step, so fewer than k entries reach the expected
    # magnitude `hint`
    if hint > 0:
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
    """Apply `feedback_top_k` (add a gradient, take the k largest entries) to several residuals.

    The function `feedback_of_each` sorts small residuals together, because one call per small
    residual would cost more time.

    Args:
        residuals: Residuals (values not sent yet), arrays [n] float32 that change in place.
        addends: For each residual, the array (new gradient) to add to the residual.
        counts: For each residual, the number k of entries to select.
        factors: For each residual, the factor on its addend.
        hints: Hint (expected k-th magnitude) of each residual (see `feedback_top_k`); 0 if unknown.
    """
    inputs = list(zip(residuals, addends, counts, factors, hints, strict=True))
    small = [place for place, residual in enumerate(residuals) if 0 < residual.size < _SMALL]
    if len(small) < _TOGETHER:
        return [feedback_top_k(*arguments) for arguments in inputs]
    for place in small:
        accumulate(residuals[place], addends[place], factors[place])
    taken = _take_of_small([residuals[n] for n in small], [counts[n] for n in small])
    results = {place: (*result, 0.0) for place, result in zip(small, taken, strict=True)}
    return [
        results.get(place) or feedback_top_k(*arguments) for place, arguments in enumerate(inputs)
    ]


def _take_of_small(
    residuals: Sequence[Float32], counts: Sequence[int]
) -> Iterator[tuple[Int64, Float32]]:
    """Remove and yield the k largest entries of each residual, sorting all residuals together."""
    sizes = np.array([residual.size for residual in residuals])
    ends = sizes.cumsum()
    starts, num_kept = ends - sizes, np.minimum(counts, sizes)
    joined = np.concatenate(residuals)
    # the bits of floats are integers in the same order as the magnitudes
    bits = joined.view(np.int32) & _MAGNITUDE
    numbers = np.arange(sizes.size).repeat(sizes)
    # sort keys ascend by array, then by falling magnitude
    keys = (numbers << 32) + (_MAGNITUDE - bits)
    limits = np.sort(keys)[np.maximum(starts + num_kept - 1, 0)]
    limits[num_kept == 0] = -1
    is_chosen = keys <= limits[numbers]
    surplus = np.add.reduceat(is_chosen, starts, dtype=np.int64) - num_kept
    # deselect the last of several entries of equal magnitude
    for place in (surplus > 0).nonzero()[0]:
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
    """Return the entries that reach a magnitude threshold, and a threshold for the next step.

    The threshold for the next step is the k-th largest magnitude of the selected entries. If fewer
    than k entries were selected, `carried_top_k` extrapolates the threshold for the next step from
    the selected magnitudes. If more than 1.3 k entries reach the magnitude threshold,
    `carried_top_k` selects the k largest of these entries. If fewer than 0.8 k entries reach the
    magnitude threshold, `carried_top_k` selects the k largest of all entries.

    Args:
        x: Array [n] float32 of finite gradient values from which to select entries.
        k: Number of entries to select approximately, 1 to n; 0 for an empty array.
        threshold: Smallest magnitude of entries to select, as returned in the previous training
            step; 0 if unknown.

    Returns:
        Ascending indices [m] int64 of the selected entries, their nonzero values [m] float32, and
        the next threshold.
    """
    if threshold > 0 and x.size > EXACT_BELOW:
        indices, values = at_least(x, np.float32(threshold), k)
        if indices.size >= TOO_FEW * k:
            following = magnitude_at(np.abs(values), k)
            if indices.size > TOO_MANY * k:
                selected = largest(values, k)
                indices, values = indices.take(selected), values.take(selected)
            return indices, values, following
    indices, values = top_k(x, k)
    return indices, values, lowest_of(values, k)


def feedback_carried(
    residual: Float32, addend: Float32, k: int, factor: float = 1.0, threshold: float = 0.0
) -> tuple[Int64, Float32, float]:
    """Apply `carried_top_k` to a residual plus an addend; set the selected entries to zero.

    Args:
        residual: [n] float32, changed in place: ``+= factor * addend``, then set to zero where
            selected.
        addend: [n] float32, finite values (a new gradient) to add to the residual.
        k: Number of entries to select approximately, 1 to n; 0 for an empty array.
        factor: Factor on the addend before it is added to the residual.
        threshold: Smallest magnitude of entries to select, as returned in the previous training
            step; 0 if unknown.
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
    """Return the ascending positions of the k largest magnitudes; of equal ones, the first."""
    if values.size <= k:
        return np.arange(values.size)
    if k <= 0:
        return np.empty(0, np.int64)
    return _are_largest(np.abs(values), k).nonzero()[0]


def lowest_of(values: Float32, k: int) -> float:
    """Return the smallest magnitude of k > 0 values; 0 if there are more or fewer than k values."""
    return float(np.abs(values).min()) if values.size == k > 0 else 0.0


def magnitude_at(magnitudes: Float32, rank: float) -> float:
    """Return the magnitude at a rank (1: the largest) of an array, given its m largest magnitudes.

    For a rank above the number m of known magnitudes, the magnitude is extrapolated as a power of
    the rank, fitted between the ranks m / 2 and m.
    """
    count, whole_rank = magnitudes.size, math.ceil(rank)
    if whole_rank <= count:
        return float(np.partition(magnitudes, count - whole_rank)[count - whole_rank])
    half = max(1, count // 2)
    # Partition at one rank, because a call of np.partition with two ranks takes ten times as long.
    ordered = np.partition(magnitudes, count - half)
    lowest, middle = float(ordered[: count - half + 1].min()), float(ordered[count - half])
    power = math.log(middle / lowest) / math.log(count / half) if half < count else _SLOPE
    return float(lowest * (count / whole_rank) ** power)


def at_least(x: Float32, threshold: np.float32, expected: int) -> tuple[Int64, Float32]:
    """Return the (indices, values) of entries with a magnitude of at least a threshold > 0.

    Args:
        x: Array [n] float32 of gradient values from which to select entries.
        threshold: Smallest magnitude of an entry to select.
        expected: Expected number of selected entries, which affects only the running time.
    """
    if expected > _PEELED_FRACTION * x.size:
        return _scan_dense(x, threshold)
    return _scan(x, None, threshold)


def add_at_least(
    residual: Float32, addend: Float32, threshold: np.float32, factor: float, expected: int
) -> tuple[Int64, Float32]:
    """Do ``residual += factor * addend``; return entries of at least a magnitude `threshold`."""
    if expected > _PEELED_FRACTION * residual.size:
        accumulate(residual, addend, factor)
        return _scan_dense(residual, threshold)
    return _scan(residual, addend, threshold, factor)


def _scan_dense(x: Float32, threshold: np.float32) -> tuple[Int64, Float32]:
    """Return (indices, values) of entries that reach a threshold; fast for many such entries."""
    indices = (np.abs(x) >= threshold).nonzero()[0]
    return indices, x.take(indices)


def _sampled_threshold(
    x: Float32, addend: Float32 | None, k: int, factor: float = 1.0
) -> np.float32:
    """Estimate a magnitude that slightly more than k entries reach; 0 if that saves no time."""
    if not _is_worth_a_scan(x.size, k):
        return np.float32(0)
    # the stride is odd, because an even stride can hit one column of a matrix
    stride = max(1, k // _SAMPLED_KEPT) | 1
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
    """Return (indices, values) of entries that reach a threshold > 0; fast for few such entries.

    With an addend, the scan first changes the array x in place: ``x += factor * addend``.
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
        # The last word can still have bits of the previous region, so these bits are cleared.
        octets[-(-region.size // 8) : packed.itemsize * num_words] = 0
        positions = _set_bits(packed[:num_words])
        values.append(region.take(positions))
        positions += start
        indices.append(positions)
    return np.concatenate(indices), np.concatenate(values)


def _set_bits(words: np.ndarray) -> Int64:
    """Return the ascending positions of the set bits in words [w] uint32, lowest bit first.

    The function `_set_bits` works by bit peeling: each pass clears the lowest set bit of every
    non-zero word. With 1 % of the bits set, bit peeling is twice as fast as ``nonzero`` of the
    boolean mask, which mispredicts a branch at every set bit. If 1 % of the bits are set, about a
    third of the 32-bit words have a set bit. If more than a tenth of the 32-bit words have a set
    bit, numpy's ``nonzero`` of the words runs without branches.
    """
    origins = (words != 0).nonzero()[0]
    words = words.take(origins)
    origins *= _WORD
    rounds = []
    while words.size:
        # in `words - 1` the lowest set bit becomes 0 and the zeros below it become 1
        below = words - np.uint32(1)
        rounds.append(origins + np.bitwise_count(below & ~words))
        words &= below
        remaining = (words != 0).nonzero()[0]
        words, origins = words.take(remaining), origins.take(remaining)
    if not rounds:
        return np.empty(0, np.int64)
    positions = np.concatenate(rounds)
    positions.sort(kind="stable")  # a stable sort merges the few ascending runs, which is fast
    return positions


def _exact(x: Float32, k: int) -> tuple[Int64, Float32]:
    """Return the k largest entries of x by comparing all entries, without a threshold.

    The function `_exact` searches for positions in a boolean mask, because numpy's search is five
    times faster in a mask than in an array of floats.
    """
    if k <= 0:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    indices = (x != 0).nonzero()[0]
    values = x.take(indices)
    if indices.size <= k:
        return indices, values
    # Only non-zero values are partitioned, because many equal zeros would take ten times as long.
    return _chosen(indices, values, _are_largest(np.abs(values), k).nonzero()[0])


def _once_more(x: Float32, magnitudes: Float32, k: int) -> tuple[Int64, Float32]:
    """Return the k largest entries of x after only m < k of them reached a threshold."""
    if magnitudes.size > _FEW:
        threshold = np.float32(magnitude_at(magnitudes, _HINTED * k))
        indices, values = at_least(x, threshold, k)
        if indices.size >= k:
            return _chosen(indices, values, largest(values, k))
    return top_k(x, k)


def _lowest_and_hint(magnitudes: Float32, k: int) -> tuple[np.float32, float]:
    """Return the k-th largest of m >= k magnitudes, and an estimate for the rank `_HINTED` * k."""
    hint_rank = math.ceil(_HINTED * k)
    if magnitudes.size < _COUNTED:
        ordered = np.partition(magnitudes, magnitudes.size - k)
        if magnitudes.size < hint_rank:
            return ordered[-k], magnitude_at(magnitudes, hint_rank)
        return ordered[-k], magnitude_at(ordered[:-k], hint_rank - k)
    # For floats that are not negative, the order of their bits as integers is the order of their
    # values.
    sizes = magnitudes.view(np.int32) >> _COUNTED_BITS
    smallest = int(sizes.min())
    sizes -= np.int32(smallest)
    counts = np.bincount(sizes)
    # element i of `reached` is the number of magnitudes with the i + 1 largest sizes
    reached = counts[::-1].cumsum()
    place = int(reached.searchsorted(k))
    same_size = magnitudes[sizes == counts.size - 1 - place]
    # index of the k-th largest magnitude in `same_size`, in ascending order
    rank = int(reached[place]) - k
    lowest = np.partition(same_size, rank)[rank]
    if magnitudes.size < hint_rank:
        return lowest, magnitude_at(magnitudes, hint_rank)
    size = smallest + counts.size - 1 - int(reached.searchsorted(hint_rank))
    return lowest, float(np.int32(size << _COUNTED_BITS).view(np.float32))


def _chosen(indices: Int64, values: Float32, kept: Int64) -> tuple[Int64, Float32]:
    return indices.take(kept), values.take(kept)


def _are_largest(magnitudes: Float32, k: int) -> np.ndarray:
    """Return [m] bool: True for the k largest of m magnitudes, 0 < k <= m."""
    return _reaching(magnitudes, np.partition(magnitudes, magnitudes.size - k)[-k], k)


def _reaching(magnitudes: Float32, smallest_kept: np.float32, k: int) -> np.ndarray:
    """Return [m] bool: True for the k largest of m magnitudes, given the k-th largest magnitude."""
    is_kept = magnitudes >= smallest_kept
    surplus = np.count_nonzero(is_kept) - k
    if surplus:
        ties = (magnitudes == smallest_kept).nonzero()[0]
        is_kept[ties[ties.size - surplus :]] = False
    return is_kept
