"""A shard without model takes that of the first worker, and refuses what is no good."""

import concurrent.futures

import numpy as np

from tests.ps.offered import offered_run, weights_of


def begin(*workers):
    """Return the weights that all begin with; a run starts when all have joined."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return [weights.copy() for weights in threads.map(lambda each: each.begin(), workers)]


def join_all(*workers):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda each: each.join(), workers))


def test_the_first_worker_s_weights_are_everybody_s(tmp_path):
    with offered_run(tmp_path) as run:
        run.listen()
        workers = [run.worker(1), run.worker(2)]
        for worker in workers:
            worker.join()
        for weights in begin(*workers):
            np.testing.assert_array_equal(weights, weights_of(1))
        for worker in workers:
            worker.leave("done")


def test_workers_that_come_together_get_the_same_weights(tmp_path):
    with offered_run(tmp_path) as run:
        run.listen()
        workers = [run.worker(1), run.worker(2)]
        join_all(*workers)
        one, two = begin(*workers)
        np.testing.assert_array_equal(one, two)
        assert any(np.array_equal(one, weights_of(number)) for number in (1, 2))
        for worker in workers:
            worker.leave("done")
