"""Operations on sets of ascending positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.kernels.numpy_ops import union

SETS = st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=5)


@given(SETS)
def test_all_positions_once_and_ascending(sets):
    arrays = [np.array(sorted(each), np.int64) for each in sets]
    assert union(arrays).tolist() == sorted(set().union(*sets))
    assert union(arrays).dtype == np.int64
