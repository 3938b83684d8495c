"""AdaComp's layout of 1,200 files: file kinds, owners of files, and the tool."""

from pathlib import Path

import numpy as np
import pytest

from thinwire.data import write_adacomp
from thinwire.data.partition import equal_range
from thinwire.data.readers import adacomp
from thinwire.data.registry import DatasetRequest, load_raw
from thinwire.ops.types import ConfigurationError

SIZE = 3


def make_part(count: int, depth: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    images = rng.integers(256, size=(count, SIZE, SIZE, depth), dtype=np.uint8)
    return images, rng.integers(10, size=count, dtype=np.uint8)


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_round_trip_with_remainder(tmp_path: Path, headers: bool, depth: int) -> None:
    images, labels = make_part(450, depth)
    adacomp.write(tmp_path, "test", images, labels, headers)
    read_images, read_labels, offsets = adacomp.read(tmp_path, "test", SIZE, depth)
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)
    assert np.diff(offsets).tolist() == [3] * 50 + [2] * 150


def test_names_and_headerless_sizes_are_the_originals(tmp_path: Path) -> None:
    images, labels = make_part(2400)
    adacomp.write(tmp_path, "train", images, labels)
    last = tmp_path / "training_set_images" / "train-images-01199.idx3-ubyte"
    assert last.read_bytes() == images[2398:].tobytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"training_set_images", "training_set_labels"}


@pytest.mark.parametrize("nb_workers", [1, 7, 100, 1200])
def test_every_file_has_one_owner(nb_workers: int) -> None:
    owned = [
        equal_range(1200, nb_workers, number + 1, "training files") for number in range(nb_workers)
    ]
    assert [file for files in owned for file in files] == list(range(1200))
    extra, share = 1200 % nb_workers, 1200 // nb_workers
    assert [len(files) for files in owned] == [share + (w < extra) for w in range(nb_workers)]


@pytest.mark.parametrize(("id_worker", "nb_workers"), [(0, 4), (5, 4), (1, 1201)])
def test_impossible_owners_are_refused(id_worker: int, nb_workers: int) -> None:
    with pytest.raises(ConfigurationError):
        equal_range(1200, nb_workers, id_worker, "training files")


def test_damage_is_named(tmp_path: Path) -> None:
    images, labels = make_part(200)
    adacomp.write(tmp_path, "test", images, labels)
    damaged = adacomp.path_of(tmp_path, "test", "images", 7)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match="00007.*8 bytes; expected records of 9"):
        adacomp.read(tmp_path, "test", SIZE, 1)
    damaged.write_bytes(bytes(18))
    with pytest.raises(ConfigurationError, match="2 images but .*00007.*1 labels"):
        adacomp.read(tmp_path, "test", SIZE, 1)
    damaged.unlink()
    with pytest.raises(ConfigurationError, match="00007"):
        adacomp.read(tmp_path, "test", SIZE, 1)


def test_tool_writes_what_load_reads(tmp_path: Path) -> None:
    assert write_adacomp.main(["fashion_mnist_sample", str(tmp_path)]) == 0
    written = load_raw(DatasetRequest("fashion_mnist_sample", str(tmp_path)), "train")
    shipped = load_raw(DatasetRequest("fashion_mnist_sample", None), "train")
    np.testing.assert_array_equal(written.images, shipped.images)
    np.testing.assert_array_equal(written.labels, shipped.labels)
    assert written.file_offsets is not None and len(written.file_offsets) == 1201


def test_tool_reports_a_bad_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_adacomp.main(["no_such_set", str(tmp_path)]) == 2
    assert "no_such_set" in capsys.readouterr().err
