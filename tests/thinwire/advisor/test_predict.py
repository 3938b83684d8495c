"""The Advisor without processes: measured links, candidates, predictions, the proposal."""

import pathlib

import pytest
from absl import flags

from tests.command_line import given
from tests.thinwire.simulator.toy import BATCH, ToyTrainer, dataset, run_of
from tests.virtual.toy import KERNELS, method
from thinwire.advisor import flags as advisor_flags
from thinwire.advisor import measure, predict
from thinwire.advisor.predict import CANDIDATES, Candidate
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.telemetry.predictions import (
    Excluded,
    Predicted,
    Prediction,
    PredictionSetting,
    Recommendation,
    WorkerLink,
    digest_of,
)
from thinwire.runtime.telemetry.round_trace import (
    ENCODE,
    FORWARD_AND_BACKWARD,
    GET_BATCH,
    GLOBAL_AGGREGATE,
    Round,
)

STEP, CODING = 0.1, (0.004, 0.01)  # the times of a dense and of a sparse update
MODEL, SMALL = 1_600_000, 20_000


def a_round(number, up, down, coding, rates=(2.5e6, 5e6), round_trip=0.03, held=0.0):
    """A round on a link of 20 Mbit/s up and 40 down."""
    exchange = up / rates[0] + down / rates[1] + round_trip + held
    time = {
        GET_BATCH: 0.01,
        FORWARD_AND_BACKWARD: STEP - 0.01,
        ENCODE: coding,
        GLOBAL_AGGREGATE: exchange,
    }
    return Round(
        num_iters=number,
        num_samples=10,
        total_time=1.0,
        n_local=1,
        epoch=0,
        version=number,
        staleness=0,
        loss=None,
        bytes_sent=up,
        bytes_received=down,
        barrier_wait=held,
        transfer=exchange - held,
        time=time,
    )


def dense_rounds(**link):
    return [a_round(n, MODEL, MODEL, CODING[0], **link) for n in range(1, 5)]


def sparse_rounds(**link):
    sizes = [MODEL if n % 4 == 0 else SMALL for n in range(1, 10)]
    return [a_round(n, SMALL, size, CODING[1], **link) for n, size in enumerate(sizes, 1)]


def test_three_kinds_of_rounds_tell_both_rates_and_the_round_trip():
    found = measure.worker_link(3, dense_rounds(), sparse_rounds(), *CODING)
    assert (found.worker, found.rounds) == (3, 11)
    assert found.step_seconds == pytest.approx(STEP)
    assert (found.up_mbps, found.down_mbps) == (pytest.approx(20), pytest.approx(40))
    assert found.round_trip_seconds == pytest.approx(0.03)


def test_what_others_made_a_worker_wait_is_not_its_link():
    held = measure.worker_link(1, dense_rounds(held=5.0), sparse_rounds(held=1.0), *CODING)
    free = measure.worker_link(1, dense_rounds(), sparse_rounds(), *CODING)
    assert held.to_dict() == pytest.approx(free.to_dict())


def test_one_late_round_changes_nothing():
    late = a_round(7, MODEL, MODEL, CODING[0], round_trip=30.0)
    found = measure.worker_link(1, [*dense_rounds(), late], sparse_rounds(), *CODING)
    assert found.up_mbps == pytest.approx(20)


def test_bytes_that_take_no_time_have_no_limit():
    free = {"rates": (float("inf"), float("inf")), "round_trip": 0.001}
    found = measure.worker_link(1, dense_rounds(**free), sparse_rounds(**free), *CODING)
    assert (found.up_mbps, found.down_mbps) == (0.0, 0.0)
    assert found.round_trip_seconds == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("dense", "sparse", "what"),
    [
        ([], sparse_rounds(), "both ways"),
        (dense_rounds()[:1], sparse_rounds(), "both ways"),  # the first round shows little
        (dense_rounds(), [], "model down"),
        (dense_rounds(), sparse_rounds()[:3], "model down"),
    ],
)
def test_too_few_rounds_are_said_so(dense, sparse, what):
    with pytest.raises(ConfigurationError, match=rf"worker 2 .*{what}.*--probe_seconds"):
        measure.worker_link(2, dense, sparse, *CODING)


def made(rate, name="x"):
    prediction = Prediction(rate / 10, rate, 1e5, 2e6)
    return Predicted([f"--method={name}"], "digest", prediction, 0.01)


@pytest.mark.parametrize(
    ("rates", "share", "expected"),
    [
        ([95, 100, 99], 0.9, (0, True)),  # the truest that is fast enough, not the fastest
        ([20, 89, 91, 99], 0.9, (2, True)),
        ([20, 50, 40], 0.9, (1, False)),
        ([20, 46, 50, 50], 0.9, (1, False)),  # next to as fast as the fastest
        ([20, 50, 99], 0.5, (1, True)),
        ([7], 1.0, (0, False)),
    ],
)
def test_the_truest_composition_that_is_fast_enough(rates, share, expected):
    assert predict.propose([made(rate) for rate in rates], 100.0, share) == expected


def test_advice_is_told_with_a_command_line_to_copy():
    link = [WorkerLink(1, 0.1, 20.0, 0.0, 0.03, 12)]
    setting = PredictionSetting("cnn", "mnist", 10, 1, 1)
    advice = Recommendation(
        setting,
        ["--link_mbps=20"],
        link,
        100.0,
        0.9,
        [made(20, "bsp"), made(95, "dgs")],
        [Excluded(["--method=gsp"], "one worker")],
        1,
        True,
    )
    text = predict.describe(advice, pathlib.Path("run/advice.json"))
    assert "20.0     no limit" in text and "not predicted: --method=gsp: one worker" in text
    chosen = next(line for line in text.splitlines() if line.startswith("*"))
    assert chosen.endswith("--method=dgs")
    assert text.splitlines()[-1] == (
        "thinwire cluster --link_mbps=20 --method=dgs --advice=run/advice.json"
    )
    advice = Recommendation(setting, [], link, 100.0, 0.9, [made(20, "bsp")], [], 0, False)
    assert "none reaches 90%" in predict.describe(advice, pathlib.Path("a"))


def trials_of(*arguments, chosen=CANDIDATES):
    with given("--type_node=Advisor", "--nb_workers=4", *arguments) as values:
        return predict.trials(pathlib.Path("x"), chosen, values)


def test_every_candidate_can_be_run():
    kept, left_out = trials_of()
    assert left_out == [] and len(kept) == len(CANDIDATES)
    digests = [digest_of(trial.run.method) for trial in kept]
    assert len(set(digests)) == len(digests)


def test_what_was_given_stays():
    kept, left_out = trials_of("--method=dgs", "--value_dtype=bfloat16")
    assert {trial.run.method.name for trial in kept} == {"dgs"}
    assert all("--value_dtype=bfloat16" in trial.candidate.flags for trial in kept)
    assert "--method=dgs was given" in {out.why for out in left_out}
    assert len(kept) + len(left_out) == len(CANDIDATES)


def test_a_candidate_that_cannot_be_run_says_why():
    kept, left_out = trials_of("--momentum=0.9", chosen=CANDIDATES[:12])
    assert "bsp" in {trial.run.method.name for trial in kept}
    assert any("momentum" in out.why for out in left_out if "--method=dgs" in out.flags)
    with pytest.raises(ConfigurationError, match=r"no composition .*--method=bsp"):
        trials_of("--method=asgd", chosen=(Candidate(("--method=bsp",)),))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--link_mbps=1,2,3"], "link_mbps"),
        (["--slowdown=0"], "slowdown"),
        (["--launcher=ssh"], "hosts_file"),
        (["--method=bsp", "--collective=ring"], "collective=ring"),
        (["--advice=runs/mine/advice.json"], "--advice=runs/mine/advice.json"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(arguments, text):
    with (
        given("--type_node=Advisor", "--nb_workers=4", *arguments),
        pytest.raises(ConfigurationError, match=text),
    ):
        advisor_flags.check(read_run())


@pytest.mark.parametrize(
    "flag",
    ["advise_rate=0", "advise_rate=1.1", "advise_rate=nan", "probe_seconds=0", "advise_pushes=1"],
)
def test_nonsense_is_refused_at_start(flag):
    with pytest.raises(flags.Error, match=flag.partition("=")[0]), given(f"--{flag}"):
        pass


def test_probes_keep_the_cluster_and_choose_their_own_method():
    asked = (
        "--type_node=Advisor",
        "--nb_workers=3",
        "--method=dgs",
        "--dgs_momentum=0.5",
        "--link_mbps=5",
        "--batch_size=32",
        "--iter_max=9",
        "--advise_rate=0.5",
    )
    commands = []
    with given(*asked):
        run = read_run()
        for each in (measure.DENSE, measure.SPARSE):
            command = measure.command(run, each, 12.5, pathlib.Path("probe"))
            assert set(each.flags) <= set(command)
            kept = {"--batch_size=32", "--link_mbps=5", "--nb_workers=3"}
            own = {"--type_node=Cluster", "--port=0", "--max_seconds=12.5", "--run_dir=probe"}
            assert kept | own <= set(command)
            text = " ".join(command)
            assert "dgs" not in text and "advise" not in text
            assert f"--iter_max={3 * each.rounds}" in command
            commands.append(command)
        assert measure.composition(measure.SPARSE, pathlib.Path("x")).method.name == "gd"
    for command in commands:
        with given(*command[2:]):
            assert read_run().nb_workers == 3  # and no flag of it is refused
    with given("--type_node=Advisor", "--port=4000"):
        command = measure.command(read_run(), measure.DENSE, 1, pathlib.Path("probe"))
        assert "--port=4000" in command and "--port=0" not in command
    with given("--type_node=Advisor", "--hosts_file=hosts", "--ssh_options=-i key"):
        command = measure.command(read_run(), measure.DENSE, 1, pathlib.Path("probe"))
        assert {"--hosts_file=hosts", "--ssh_options=-i key"} <= set(command)
        assert "--port=0" not in command


@pytest.fixture
def predictor():
    return predict.Predictor(
        predict.GradientPool.of_first_steps(run_of(method("asgd"), 2), ToyTrainer(), dataset()),
        dataset(),
        KERNELS,
        24,
    )


def rates(predictor, name, links_, coding=0.0, nb_ps=1, **choices):
    run = run_of(method(name, len(links_), **choices), len(links_), nb_ps=nb_ps)
    return predictor.predict(run, links_, coding)


def test_without_a_network_workers_step_all_the_time(predictor):
    found = rates(predictor, "asgd", [WorkerLink(n, 0.1 * n, 0, 0, 0, 1) for n in (1, 2)])
    assert found.updates_per_second == pytest.approx(15.0, rel=0.05)
    assert found.samples_per_second == pytest.approx(15.0 * BATCH, rel=0.05)


def test_a_round_is_step_coding_bytes_and_round_trip(predictor):
    links_ = [WorkerLink(n, 0.1, 0.02, 0.01, 0.06, 1) for n in (1, 2)]
    found = rates(predictor, "bsp", links_, coding=0.04)
    up, down = found.bytes_up_per_push, found.bytes_down_per_pull
    seconds = 0.1 + 0.04 + 0.06 + 8e-6 * up / 0.02 + 8e-6 * down / 0.01
    assert 1 / found.updates_per_second == pytest.approx(seconds, rel=0.01)
    assert found.samples_per_second == pytest.approx(2 * BATCH * found.updates_per_second)
    shards = rates(predictor, "bsp", links_, coding=0.04, nb_ps=2)
    assert shards.updates_per_second == pytest.approx(found.updates_per_second, rel=0.3)


def test_the_slowest_worker_holds_back_who_must_wait(predictor):
    links_ = [WorkerLink(1, 0.1, 0, 0, 0, 1), WorkerLink(2, 0.5, 0, 0, 0, 1)]
    free, bound, lockstep = (rates(predictor, name, links_) for name in ("asgd", "ssp", "bsp"))
    assert free.samples_per_second == pytest.approx(12 * BATCH, rel=0.1)
    assert bound.samples_per_second == pytest.approx(4 * BATCH, rel=0.3)
    assert lockstep.samples_per_second == pytest.approx(4 * BATCH, rel=0.02)


def test_coding_takes_time(predictor):
    assert 0 < predictor.coding_seconds(run_of(method("adacomp"), 2)) < 1
