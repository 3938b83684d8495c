"""The DGT bench: its runs are runs of main.py, and its table says what they came to."""

import json
import math
import sys
import types

import pytest

from bench import dgt, dgt_real, dgt_table
from bench.dgt_arms import ARMS, LINKS, MODELS, Case, case
from tests.command_line import given
from thinwire.flags.run import read_run


def entry(one, seconds, accuracies=(), final=None):
    """A run of as many updates as the model's, with a constant step."""
    model = MODELS[one.model]
    versions = range(model.evaluate_every, model.updates + 1, model.evaluate_every)
    return {
        "times": [seconds * version for version in range(1, model.updates + 1)],
        "evaluations": [list(pair) for pair in zip(versions, accuracies, strict=False)],
        "final": final and [final, 0.5],
        "fresh": 0.5,
        "fill": 0.75,
        "push_bytes": 2e6,
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("link", LINKS)
def test_every_case_is_a_run_of_main(model, link, tmp_path):
    for name, arm in ARMS.items():
        for k in arm.ks:
            with given(*case(model, link, name, k).flags(), f"--run_dir={tmp_path}"):
                run = read_run()
                run.method.check()
                assert run.nb_workers == 2 and run.iter_max == MODELS[model].updates
                if k == "adaptive":
                    assert run.method.router.dgt_adaptive_k
                elif k:
                    assert run.method.router.dgt_k == float(k)


def test_what_learns_alike_learns_once():
    assert case("mnist_cnn", "free", "reliable", "").learns
    assert not case("mnist_cnn", "congested", "reliable", "").learns
    assert not case("mnist_cnn", "free", "marked", "1").learns
    assert case("mnist_cnn", "congested", "diff", "0.5").learns
    assert case("mnist_cnn", "congested", "sender drop", "adaptive").learns


def test_a_grid_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    played = []

    class Quick:
        def __init__(self, threads):
            pass

        def play(self, one):
            played.append(one)
            return entry(one, 1.0, (0.9,) * 12, 0.9)

    # In its place: the module imports TensorFlow.
    monkeypatch.setitem(sys.modules, "bench.dgt_play", types.SimpleNamespace(Player=Quick))
    results = tmp_path / "runs" / "dgt.jsonl"
    command = ["--results", str(results), "--links", "free", "--arms", "reliable", "marked", "diff"]
    assert dgt.main([*command, "--arms", "reliable"]) == 0
    with results.open("a") as file:
        file.write('{"case": {"model": "mnist_c')  # killed while it wrote
        file.write("\n")
    assert dgt.main(command) == 0
    assert [(one.arm, one.k) for one in played] == [
        ("reliable", ""),
        ("marked", "1"),
        *(("diff", k) for k in ARMS["diff"].ks),
    ]
    assert set(dgt.read(results)) == set(played)


def test_commands_are_printed(capsys):
    assert dgt.main(["--commands", "--links", "congested", "--arms", "diff", "--ks", "0.2"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("python main.py --type_node=Simulator")
    assert "--dgt_k=0.2" in line and "--link_background_mbps=90" in line


def test_the_table_sets_arms_beside_the_reliable_one():
    reliable, marked = (
        case("mnist_cnn", "free", *arm) for arm in (("reliable", ""), ("marked", "1"))
    )
    crowded = case("mnist_cnn", "congested", "reliable", "")
    diff = case("mnist_cnn", "congested", "diff", "0.5")
    rising = [0.1 * number for number in range(12)]
    found = {
        reliable: entry(reliable, 1.0, rising, 0.8),
        marked: entry(marked, 0.5),
        crowded: entry(crowded, 4.0),
        diff: entry(diff, 0.5, rising, 0.79),
    }
    assert dgt_table.to_target(found, marked) == dgt_table.to_target(found, reliable) / 2
    lines = [line.split(" | ") for line in dgt_table.tables(found).splitlines() if " | " in line]
    ratios = {cells[0].strip("| "): cells[3] for cells in lines}
    assert ratios["diff"] == "8.00" and ratios["marked"] == "2.00"
    unknown = Case("mnist_cnn", "free", "diff", "0.5", 2)
    assert dgt_table.to_target(found, unknown) is None


def test_a_target_that_is_never_reached():
    assert dgt_table.crossing([(10, 0.2), (20, 0.3), (30, 0.3)], 0.5) is None
    assert dgt_table.crossing([(10, 0.2), (20, 0.9)], 0.5) is None  # too few for a mean
    assert math.isclose(dgt_table.crossing([(10, 0.6), (20, 0.6), (30, 0.6)], 0.5), 30.0)


def test_steps_of_real_rounds():
    rounds = "\n".join(json.dumps({"total_time": at}) for at in (5, 6, 7, 8, 10, 12.5))
    assert dgt_real.median_step(rounds) == 2.25
    with pytest.raises(RuntimeError, match="only 1 steps"):
        dgt_real.median_step("\n".join(rounds.splitlines()[:4]))
