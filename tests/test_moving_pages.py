"""Pages for those who come from elsewhere: the Thinwire side of each diff is a script that runs."""

import ast
import os
import re
import subprocess

import numpy as np
import pytest

from tests import documents
from tests.documents import ROOT
from tests.forked import forker

PAGES = {
    "TO_A_CLUSTER": ROOT / "docs" / "TO_A_CLUSTER.md",
    **{path.stem: path for path in sorted((ROOT / "docs" / "moving").glob("*.md"))},
}
#: What each page's other side imports.
FROM = {
    "TO_A_CLUSTER": "keras",
    "HOROVOD": "horovod.tensorflow.keras",
    "TF_DISTRIBUTE": "tensorflow",
    "FLOWER": "flwr",
    "TORCH_DDP": "torch.nn.parallel",
}
GOOD_ENOUGH = 0.9  # the rows are easy


def sides(page):
    """Return both scripts of a page's diff: before and after."""
    (diff,) = re.findall(r"(?ms)^```diff\n(.*?)^```$", page.read_text())
    lines = diff.splitlines()
    before = [line[1:] for line in lines if line[:1] != "+"]
    after = [line[1:] for line in lines if line[:1] != "-"]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


def first_run(page):
    """Return the words of a page's first `thinwire run`, without the script."""
    return next(
        command.words[:-1]
        for command in documents.commands()
        if command.block.page == page
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


def test_every_page_has_a_side_to_come_from():
    assert set(PAGES) == set(FROM)


@pytest.mark.parametrize("name", PAGES)
def test_both_sides_of_the_diff_are_scripts(name):
    before, after = sides(PAGES[name])
    assert FROM[name] in imported(before)
    assert "thinwire" not in imported(before)
    assert "thinwire" in imported(after)
    assert imported(after) <= {"keras", "numpy", "tensorflow", "thinwire"}
    assert "thinwire.distribute(" in after


@pytest.mark.product
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PAGES)
def test_the_side_of_thinwire_runs(name, tmp_path):
    _, after = sides(PAGES[name])
    (tmp_path / "train.py").write_text(after)
    rng = np.random.default_rng(1)
    templates = rng.normal(size=(4, 20))
    y = rng.integers(4, size=5000)
    x = (templates[y] + rng.normal(size=(5000, 20))).astype("float32")
    np.savez(tmp_path / "train.npz", x=x[:4000], y=y[:4000], x_test=x[4000:], y_test=y[4000:])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    for words in (("train.py",), ("-m", "thinwire", *first_run(PAGES[name]), "train.py")):
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
