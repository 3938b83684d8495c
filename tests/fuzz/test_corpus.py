"""Replay of the fuzzing corpus and of all inputs that once crashed."""

import tracemalloc

import pytest
from absl import logging

from tests.fuzz import __main__ as command_line
from tests.fuzz import guided, registry
from tests.fuzz.target import CORPUS, CRASHES, watched

#: Memory that one input may use in addition to the memory before it, in bytes.
MOST_BYTES = 96 << 20


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)


def inputs(name):
    """Return {name: input} of all stored inputs of a target."""
    found = {f"seed {number}": data for number, data in enumerate(registry.load(name).seeds())}
    for folder in (CORPUS / name, CRASHES / name):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            found[f"{folder.parent.name}/{name}/{path.name}"] = path.read_bytes()
    return found


@pytest.mark.parametrize("name", registry.names())
def test_everything_that_was_found_runs(name):
    target = registry.load(name)
    for what, data in inputs(name).items():
        try:
            with watched():
                target.one(data)
        except Exception as error:
            raise AssertionError(f"{what} crashes the target {name}") from error


@pytest.mark.parametrize("name", ["block", "checkpoint", "framing", "idx", "push"])
def test_no_input_takes_much_memory(name):
    target = registry.load(name)
    known = inputs(name)
    target.one(next(iter(known.values())))  # the inputs are not charged for first allocations
    tracemalloc.start()
    try:
        for what, data in known.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            target.one(data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MOST_BYTES, what
    finally:
        tracemalloc.stop()


def test_corpus_and_crashes_are_of_targets():
    for folder in (CORPUS, CRASHES):
        if folder.is_dir():
            assert {path.name for path in folder.iterdir() if path.is_dir()} <= {*registry.names()}
    size = sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file())
    assert size < 400 << 10


def test_targets_are_listed_with_what_they_are(capsys):
    assert command_line.main(["--list", "--target=push", "--target=idx"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["push", "idx"]
    assert "IDX files" in listed[1]


def test_a_missing_fuzzer_is_said_to_be_missing(monkeypatch, capsys):
    monkeypatch.setattr(guided.importlib.util, "find_spec", lambda name: None)
    assert command_line.main(["--target=push", "--seconds=1"]) == 2
    assert "CPython 3.11 to 3.13 on Linux" in capsys.readouterr().err
