"""The uneven bench starts its runs in the planned order and draws the picture at the end."""

import types

from bench.studies import uneven
from tests.command_line import given
from tests.supervisor.measured_samples import write_measured
from thinwire.flags.run import read_run


def test_it_runs_every_method_with_both_splits_and_draws(tmp_path, monkeypatch, capsys):
    started = []

    def run(command, check):
        flags = dict(word.removeprefix("--").split("=") for word in command[2:] if "=" in word)
        started.append((flags["method"], flags["partition"]))
        write_measured(
            tmp_path / f"{flags['method']}-{flags['partition']}",
            flags["method"],
            partition=flags["partition"],
        )
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(uneven.subprocess, "run", run)
    assert uneven.main(["--runs", str(tmp_path)]) == 0
    assert started == [(m, p) for p in ("iid", "class") for m in uneven.METHODS]
    assert len(list((tmp_path / "figures").glob("*.png"))) == 5
    assert "esync-class | ESync | non-IID" in capsys.readouterr().out


def test_a_run_that_fails_ends_it(tmp_path, monkeypatch, capsys):
    failed = types.SimpleNamespace(returncode=3)
    monkeypatch.setattr(uneven.subprocess, "run", lambda command, check: failed)
    assert uneven.main(["--runs", str(tmp_path)]) == 3
    assert "ended with 3" in capsys.readouterr().err


def test_its_flags_are_those_of_main(tmp_path, monkeypatch):
    seen = []
    done = types.SimpleNamespace(returncode=1)
    monkeypatch.setattr(
        uneven.subprocess, "run", lambda command, check: seen.append(command) or done
    )
    uneven.main(["--runs", str(tmp_path), "--methods", "esync"])
    with given(*seen[0][2:]):
        run = read_run()
    assert (run.nb_workers, run.model.network, run.method.name) == (3, "lenet", "esync")
