"""The scripts on the pages about torch run alone and with `thinwire run`."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.documents import ROOT
from tests.waiting import patience

GOOD_ENOUGH = 0.85  # the rows are easy


def script_of(page):
    """Return the script after the change, from a page's diff."""
    text = (ROOT / "docs" / "guide" / f"{page}.md").read_text()
    (diff,) = re.findall(r"(?ms)^```diff\n(.*?)^```$", text)
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-") + "\n"


@pytest.mark.processes
@pytest.mark.parametrize("page", ["torch", "ddp"])
def test_the_script_of_a_page_runs(page, tmp_path):
    (tmp_path / "train.py").write_text(script_of(page))
    rng = np.random.default_rng(1)
    templates = rng.normal(size=(4, 20))
    y = rng.integers(4, size=2000)
    x = (templates[y] + rng.normal(size=(2000, 20))).astype("float32")
    np.savez(tmp_path / "train.npz", x=x[:1500], y=y[:1500], x_test=x[1500:], y_test=y[1500:])
    run = ("-m", "thinwire", "run", "--nb_workers=2", "--method=bsp", "train.py")
    for words in (("train.py",), run):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=patience(200),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        values = [float(each) for each in re.findall(r"accuracy ([\d.]+)$", done.stdout, re.M)]
        assert len(values) == (1 if words[0] == "train.py" else 2), done.stdout
        assert min(values) >= GOOD_ENOUGH
