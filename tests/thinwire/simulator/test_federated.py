"""Simulated federated rounds: a few workers of many, local epochs, uneven parts of the data."""

import numpy as np
import pytest

from tests.thinwire.simulator.toy import simulated_of
from thinwire.data.partition import read_positions, write_positions
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.sync.drawn import parse_draws
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import DataChoice
from thinwire.runtime.run.sync_files import read_draws

WORKERS = 8
FAILURES = "1@0.3-0.9,2@0.5,3@1-1.4,7@1.5-20,5@2.2-2.5"


def federated(folder, sizes, failures="", nb_ps=1, **choices):
    """Play rounds of half of the workers, with one local epoch on this many examples of each."""
    ends = np.cumsum(sizes)
    write_positions(folder / "parts.txt", np.split(np.arange(ends[-1]), ends[:-1]))
    settings = {"fraction": 0.5, "seed": 3, "local_epochs": 1} | choices
    method = compose(
        Choices.of(
            "bsp", len(sizes), overrides={"pacer": "fixed", "weighting": "samples"}, **settings
        )
    )
    data = DataChoice(
        "toy",
        None,
        "unit",
        "positions",
        None,
        partition_file=str(folder / "parts.txt"),
        whole_epochs=True,
    )
    simulation = simulated_of(
        method, "0.1", nb_ps=nb_ps, iter_max=20, failures=failures, run_dir=folder, data=data
    )
    # A run that hangs renews its leases for ever.
    simulation.play(lambda now: None, lambda: simulation.clock.now > 200)
    assert simulation.end == "iter_max"
    assert [shard.core.version for shard in simulation.shards] == [20] * nb_ps
    return simulation


@pytest.mark.parametrize("nb_ps", [1, 2, 3])
def test_rounds_go_on_through_deaths_and_returns_on_every_shard(tmp_path, nb_ps):
    federated(tmp_path, [20] * WORKERS, FAILURES, nb_ps)


def test_a_worker_takes_its_own_examples_once_in_a_round(tmp_path):
    sizes = [3, 8, 9, 20, 40, 8, 1, 17]  # mini-batches of 8
    simulation = federated(tmp_path, sizes)
    counted = simulation.shards[0].core.counters.workers
    drawn = parse_draws((tmp_path / "draws.txt").read_text(), "draws", WORKERS)[:20]
    for worker, size in enumerate(sizes, start=1):
        rounds = sum(worker in each for each in drawn)
        assert counted[worker].pushes == rounds
        assert counted[worker].samples == rounds * size
        assert counted[worker].local_steps == rounds * -(-size // 8)


def test_only_drawn_workers_compute(tmp_path):
    simulation = federated(tmp_path, [16] * WORKERS, fraction=0.25)
    assert sum(worker._steps.num_steps for worker in simulation.workers) <= (20 + 1) * 2 * 2


def test_a_worker_without_examples_neither_counts_nor_hangs_a_round(tmp_path):
    simulation = federated(tmp_path, [16, 0, 16, 16], fraction=1.0, nb_ps=2)
    others = federated(tmp_path, [16, 16, 16], fraction=1.0, nb_ps=2)
    counted = simulation.shards[0].core.counters.workers
    assert 2 not in counted or not counted[2].pushes
    assert counted[1].pushes == counted[3].pushes == 20
    # The examples are equal, but their orders differ: the test checks that the mean is not of four.
    moved = [
        np.linalg.norm(each.shards[0].core.model.theta - each.shards[0].core.model.theta[0])
        for each in (simulation, others)
    ]
    assert moved[0] == pytest.approx(moved[1], rel=0.1)


def test_a_simulation_and_its_file_of_draws_give_the_same_bits(tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    for each in (first, second):
        each.mkdir()
    one = federated(first, [20] * WORKERS, FAILURES, 2)
    draws = read_draws(str(first / "draws.txt"), WORKERS)
    two = federated(second, [20] * WORKERS, FAILURES, 2, draws=draws, seed=99)
    for here, there in zip(one.shards, two.shards, strict=True):
        np.testing.assert_array_equal(here.core.model.theta, there.core.model.theta)


def test_positions_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "parts.txt"
    parts = [np.array([0, 2, 5]), np.array([], np.int64), np.array([1])]
    write_positions(path, parts)
    for one, two in zip(parts, read_positions(path, 3), strict=True):
        np.testing.assert_array_equal(one, two)
    path.write_text("# a comment\n5 0 2\n\n1\n")
    assert [each.tolist() for each in read_positions(path, 3)] == [[0, 2, 5], [], [1]]
    for text, words in (("1 2\n", "1 lines"), ("1\n1\n\n", "twice"), ("a\n\n\n", "cannot be read")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=f"--partition_file=.*{words}"):
            read_positions(path, 3)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_positions(tmp_path / "none", 3)


def test_local_epochs_and_local_steps_exclude_each_other():
    with pytest.raises(ConfigurationError, match="both given.* leave one of the two flags out"):
        compose(Choices.of("bsp", 2, overrides={"pacer": "fixed"}, local_epochs=1, local_steps=2))
    with pytest.raises(ConfigurationError, match="is for --pacer=fixed"):
        compose(Choices.of("bsp", 2, local_epochs=1))
    pacer = compose(Choices.of("bsp", 2, overrides={"pacer": "fixed"}, local_epochs=2)).pacer
    mine = pacer.of_part(17, 8)
    assert [mine.push_now(steps) for steps in (1, 5, 6)] == [False, False, True]
