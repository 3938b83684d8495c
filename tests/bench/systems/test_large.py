"""The bench of large models reads memory and progress of a run from outside its processes."""

import pytest

from bench.systems import large


def test_steps_are_the_times_between_exchanges(tmp_path):
    run = large.ObservedRun(tmp_path, [])
    run.exchanged_at = [1.0, 2.0, 2.5, 4.0, 9.0]
    assert run.step_seconds(0.0, 5.0) == (1.0, 1.5)
    assert run.step_seconds(3.0, 10.0) == (5.0, 5.0)


def test_a_node_that_ends_is_an_error(tmp_path):
    run = large.ObservedRun(tmp_path, ["--batch_size=0"])
    run.start("PS", "--type_node=PS")
    with pytest.raises(RuntimeError, match="PS ended with 1.*batch_size"):
        run.until(lambda: False)


@pytest.mark.processes
@pytest.mark.product
@pytest.mark.parametrize("method", large.METHODS)
def test_every_line_of_the_table_is_found(method):
    rows = {row.what: row.value for row in large.measure(large.MODELS["decoder-tiny"], method, 4.0)}
    assert {"PS killed: until an exchange is done", "worker: most memory"} <= set(rows)
    assert not any("nan" in value for value in rows.values())
    if method == "dgs":  # dgs keeps a journal
        assert rows["PS killed: acknowledged updates lost"] == "0"


@pytest.mark.processes
@pytest.mark.product
def test_models_of_many_variables_train():
    found = list(large.measure_variables(20))
    assert [(number, method) for number, method, _, _ in found] == [
        ("20", m) for m in large.METHODS
    ]
