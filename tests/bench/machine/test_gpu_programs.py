"""Every op's XLA program can be lowered and declares its input and output shapes."""

import json

import numpy as np
import pytest

from bench.machine import gpu, gpu_programs

SIZE = 6_000
pytestmark = pytest.mark.product  # lowering all ops takes many seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("programs") / "here"
    gpu_programs.write(made, SIZE)
    return made


def test_every_op_is_written_with_inputs_and_answers(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    listed = {each["name"]: each for each in manifest["programs"]}
    ops = {op.name: op for op in gpu.ops(SIZE)}
    assert listed.keys() == ops.keys() and manifest["size"] == SIZE
    for name, op in ops.items():
        arrays = np.load(folder / f"{name}.npz")
        assert set(arrays) == {
            *(f"in{place}" for place in range(listed[name]["inputs"])),
            *(f"out{place}" for place in range(len(op.expected))),
        }
        for place, wanted in enumerate(op.expected):
            np.testing.assert_array_equal(arrays[f"out{place}"], wanted)
        assert (folder / f"{name}.stablehlo").stat().st_size > 100


def test_numbers_that_shapes_follow_from_are_part_of_the_program(folder):
    assert set(np.load(folder / "top_k.npz")) == {"in0", "out0", "out1", "out2"}


def test_a_folder_is_not_written_over(folder):
    with pytest.raises(FileExistsError):
        gpu_programs.write(folder, SIZE)


def test_they_run_without_tensorflow(folder, tmp_path, monkeypatch, capsys):
    """Where jax is installed; it is not among the pinned packages."""
    pytest.importorskip("jax")
    from bench.machine import run_programs

    monkeypatch.setattr("sys.argv", ["run_programs", str(folder), "--out", str(tmp_path)])
    assert run_programs.main() == 0, capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == len(list(gpu.ops(SIZE))) and not any(row["error"] for row in rows)
