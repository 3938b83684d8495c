"""--overwrite removes a node's own files and nothing else."""

import pytest

from thinwire.runtime.run import directory as run_directory

NODES = ("ps-0", "worker-1", "worker-12")
RECORDS = (
    "metrics.jsonl",
    "summary.json",
    "best.keras",
    "report/index.html",
    "measure/worker-1.jsonl",
)


@pytest.fixture
def used(tmp_path):
    for node in NODES:
        for folder in (run_directory.checkpoints_of, run_directory.scalars_of):
            folder(tmp_path, node).mkdir(parents=True)
            (folder(tmp_path, node) / "file").write_text(node)
    (tmp_path / "report").mkdir()
    (tmp_path / "measure").mkdir()
    (tmp_path / "logs").mkdir()
    for name in (*RECORDS, "logs/worker-1.log", "mine.txt"):
        (tmp_path / name).write_text("")
    return tmp_path


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_node_clears_its_own(used):
    before = files(used)
    run_directory.clear_node(used, "worker-1")
    assert before - files(used) == {"checkpoints/worker-1/file", "tb/worker-1/file"}


def test_the_supervisor_clears_its_records(used):
    before = files(used)
    run_directory.clear_records(used)
    assert before - files(used) == set(RECORDS)


def test_a_cluster_clears_everything_but_logs_and_strangers(used):
    run_directory.clear(used)
    run_directory.clear(used)
    assert files(used) == {"logs/worker-1.log", "mine.txt"}
