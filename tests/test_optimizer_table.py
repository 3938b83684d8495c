"""The tables of docs/reference/optimizers.md match the treatment of each optimizer and method.

A failure prints the expected text of the page.
"""

import functools

import keras
import pytest

from tests import documents
from tests.command_line import run_of
from thinwire.ops.methods.builder import adopt
from thinwire.ops.methods.method import METHODS
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.described import describe
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

PAGE = documents.ROOT / "docs" / "reference/optimizers.md"
o = keras.optimizers


class Mine(o.SGD):
    """An optimizer of a script's own."""


class MySchedule(o.schedules.LearningRateSchedule):
    """A schedule of a script's own."""


#: Name of a compiled setting -> the optimizer.
COMPILED = {
    "`SGD`": o.SGD,
    "`SGD(momentum=0.9)`": lambda: o.SGD(momentum=0.9),
    "`SGD(momentum=0.9, nesterov=True)`": lambda: o.SGD(momentum=0.9, nesterov=True),
    **{f"`{name}`": getattr(o, name) for name in allow_list.OPTIMIZERS if name != "SGD"},
    "`Adam(clipnorm=1.0)`": lambda: o.Adam(clipnorm=1.0),
    "`Adam(global_clipnorm=1.0)`": lambda: o.Adam(global_clipnorm=1.0),
    "`Adam(CosineDecay(...))`": lambda: o.Adam(o.schedules.CosineDecay(0.1, 10)),
    "`LossScaleOptimizer(Adam())`": lambda: o.LossScaleOptimizer(o.Adam()),
    "`MultiOptimizer`": lambda: o.MultiOptimizer(o.OptimizerMap(o.SGD())),
    "a learning rate that is a function": lambda: o.SGD(lambda: 0.1),
    "a schedule of your own": lambda: o.SGD(MySchedule()),
    "an optimizer of your own": Mine,
}


@functools.cache
def method_of(name):
    return run_of("--model_from=worker", f"--method={name}", "--nb_workers=2").method


def adopted(name, make):
    """Return a method with a script's optimizer on the PS."""
    variable = keras.Variable([[0.5]])
    spec = ModelSpec((TensorSpec("w", (1, 1)), TensorSpec("v", (1, 1))))
    found = describe(make(), [variable, keras.Variable([[0.5]])], paths=["w", "v"])
    return adopt(method_of(name), Offer(spec, optimizers=(found.offer,))), spec


def where(name, make):
    try:
        if not method_of(name).awaits_offer:
            return "workers"
        adopted(name, make)
    except ConfigurationError:
        return "refused"
    return "PS"


def shards(make):
    try:
        method, spec = adopted("bsp", make)
    except ConfigurationError:
        return "", ""
    server = method.server
    try:
        method.place(spec, 2)
    except ConfigurationError:
        return "Keras", "one shard"
    steps = "Thinwire's own, without TensorFlow" if server._is_flat else "Keras"
    return steps, "whole" if server.traits.whole_variables else "any part"


def tables():
    """Return the two tables as lines."""
    columns = {}
    for name in METHODS:
        cells = tuple(where(name, make) for make in COMPILED.values())
        columns.setdefault(cells, []).append(name)
    heads = [", ".join(f"`{name}`" for name in names) for names in columns.values()]
    lines = [f"| compiled | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    places = zip(*columns, strict=True)
    lines += grouped(dict(zip(COMPILED, places, strict=True)))
    lines += ["", "| on the PS | its step | of a variable, a shard may hold |", "|---|---|---|"]
    steps = {compiled: shards(make) for compiled, make in COMPILED.items()}
    return lines + grouped({compiled: cells for compiled, cells in steps.items() if cells[0]})


def grouped(cells):
    """Return the rows of a table, with one row for all optimizers that have equal cells."""
    rows = {}
    for compiled, row in cells.items():
        rows.setdefault(row, []).append(compiled)
    return [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]


def test_the_tables_are_what_the_code_does():
    text = PAGE.read_text()
    for table in "\n".join(tables()).split("\n\n"):
        assert table in text, f"docs/reference/optimizers.md should have\n{table}"


def test_a_refusal_names_methods_that_take_the_optimizer():
    for make in (Mine, lambda: o.SGD(lambda: 0.1), COMPILED["`MultiOptimizer`"]):
        with pytest.raises(ConfigurationError) as refused:
            adopted("asgd", make)
        words = str(refused.value).replace(",", " ").replace(".", " ").split()
        named = [word.removeprefix("--method=") for word in words if word.startswith("--method=")]
        assert named and {where(name, make) for name in named} == {"workers"}
