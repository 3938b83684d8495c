"""Pages about moving from other frameworks: the Thinwire side of each diff is a working script."""

import ast
import os
import re
import subprocess

import numpy as np
import pytest

from tests import documents
from tests.documents import ROOT
from tests.forked import forker

CLUSTER = ROOT / "docs" / "guide/cluster.md"
MOVING = ROOT / "docs" / "guide/moving.md"
#: Heading of the section with a diff -> imports of the script before the change.
FROM = {
    "From your script to a cluster": "keras",
    "From Horovod": "horovod.tensorflow.keras",
    "From tf.distribute": "tensorflow",
    "From Flower": "flwr",
}
GOOD_ENOUGH = 0.9  # the rows are easy


def section(name):
    """Return the page of a section, the number of its first line, and its lines."""
    page = CLUSTER if name == "From your script to a cluster" else MOVING
    lines = page.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if re.fullmatch(f"##? {name}", line))
    ends = (n for n in range(start + 1, len(lines)) if lines[n].startswith("## From "))
    return page, start + 1, lines[start : next(ends, len(lines))]


def sides(name):
    """Return both scripts of a section's diff: before and after."""
    (diff,) = re.findall(r"(?ms)^```diff\n(.*?)^```$", "\n".join(section(name)[2]) + "\n")
    lines = diff.splitlines()
    before = [line[1:] for line in lines if line[:1] != "+"]
    after = [line[1:] for line in lines if line[:1] != "-"]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


def first_run(name):
    """Return the arguments of a section's first `thinwire run`, without the script."""
    page, start, lines = section(name)
    return next(
        command.words[:-1]
        for command in documents.commands()
        if command.block.page == page
        and start <= command.block.line < start + len(lines)
        and command.words[:1] == ("run",)
        and "--dry_run" not in command.words
    )


def imported(text):
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def test_every_section_of_the_page_is_known():
    headings = re.findall(r"^## (.+)$", MOVING.read_text(), re.M)
    assert headings == list(FROM)[1:]


@pytest.mark.parametrize("name", FROM)
def test_both_sides_of_the_diff_are_scripts(name):
    before, after = sides(name)
    assert FROM[name] in imported(before)
    assert "thinwire" not in imported(before)
    assert "thinwire" in imported(after)
    assert imported(after) <= {"keras", "numpy", "tensorflow", "thinwire"}
    assert "thinwire.distribute(" in after


@pytest.mark.product
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FROM)
def test_the_side_of_thinwire_runs(name, tmp_path):
    _, after = sides(name)
    (tmp_path / "train.py").write_text(after)
    rng = np.random.default_rng(1)
    templates = rng.normal(size=(4, 20))
    y = rng.integers(4, size=5000)
    x = (templates[y] + rng.normal(size=(5000, 20))).astype("float32")
    np.savez(tmp_path / "train.npz", x=x[:4000], y=y[:4000], x_test=x[4000:], y_test=y[4000:])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    for words in (("train.py",), ("-m", "thinwire", *first_run(name), "train.py")):
        done = subprocess.run(
            [forker().python, *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        values = [float(each) for each in re.findall(r"accuracy ([\d.]+)$", done.stdout, re.M)]
        assert len(values) == (1 if words[0] == "train.py" else 2), done.stdout[-3000:]
        assert min(values) >= GOOD_ENOUGH
