"""The order in which xdist's workers take the tests: waiting and computing tests are mixed.

A test that starts nodes mostly waits, and a test in one process computes. In sequence they leave
cores idle. So every test of a ``*_processes.py`` file is a separate work item, and these items
are spread over the first part of the queue. Any other file is one item, because
its fixtures are made once. Long items come first, so that all workers end at about the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadFileScheduling

#: How much longer than elsewhere a test of a folder takes, about.
_WEIGHTS = {
    "tests/thinwire/script/keras/": 20,
    "tests/thinwire/script/data/": 5,
    "tests/chaos/test_script_kills.py": 100,
}
#: The part of the queue over which tests that start nodes are spread.
_SPREAD = 0.75


class Interleaved(LoadFileScheduling):
    """Gives a worker that has ended its piece of work the next one, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if _starts_nodes(nodeid) else super()._split_scope(nodeid)


def interleave(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return all tests in the order in which the workers should take them."""
    nodes, files = [], []
    for path, group in itertools.groupby(items, lambda item: item.nodeid.partition("::")[0]):
        tests = list(group)
        if _starts_nodes(path):
            nodes += [[test] for test in tests]
        else:
            weight = next((_WEIGHTS[top] for top in _WEIGHTS if path.startswith(top)), 1)
            files.append((weight * len(tests), tests))
    files.sort(key=lambda file: -file[0])
    work = sum(size for size, _ in files) * _SPREAD
    places, done = [], 0
    for size, tests in files:
        places.append((done, tests))
        done += size
    places += [(work * at / len(nodes), tests) for at, tests in enumerate(nodes)]
    places.sort(key=lambda place: place[0])
    return [test for _, tests in places for test in tests]


def _starts_nodes(nodeid: str) -> bool:
    return nodeid.partition("::")[0].endswith("_processes.py")
