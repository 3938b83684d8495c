"""A simulated run's rate is measured between two statuses in which all workers train."""

import json

import pytest

from bench.studies.simulator import steady


def line(seconds, version, pushes, stop_reason=None):
    workers = [{"pushes": count} for count in pushes]
    return json.dumps(
        {
            "kind": "status",
            "seconds": seconds,
            "version": version,
            "nb_workers": 2,
            "workers": workers,
            "bytes_up": 100 * version,
            "bytes_down": 7 * version,
            "stop_reason": stop_reason,
        }
    )


def test_start_and_end_are_left_out():
    lines = [
        line(0.0, 0, []),
        json.dumps({"kind": "eval", "version": 3}),
        line(5.0, 4, [4, 0]),
        line(10.0, 20, [10, 10]),
        line(15.0, 50, [25, 25]),
        line(20.0, 80, [40, 40]),
        line(21.0, 999, [500, 499], "max_seconds"),
    ]
    assert steady("\n".join(lines)) == {"updates": 6.0, "bytes_up": 600.0, "bytes_down": 42.0}


def test_a_run_that_was_too_short_is_said_so():
    with pytest.raises(RuntimeError, match="only 1 of 2 status lines"):
        steady("\n".join([line(0.0, 0, []), line(5.0, 9, [4, 5])]))
