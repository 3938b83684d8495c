"""Text files give the same sequences on every worker, and test text is never trained on."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest

from thinwire.data import registry
from thinwire.data.choices import CONTEXT
from thinwire.data.readers import source_text
from thinwire.models.tasks import TASKS
from thinwire.ops.types import ConfigurationError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files of different bytes, one of them in a folder, and a file that is not text."""
    for number in range(19):
        (tmp_path / f"text{number:02}.py").write_bytes(bytes([number]) * (3 * CONTEXT + 5))
    (tmp_path / "zz").mkdir()
    (tmp_path / "zz" / "last.md").write_bytes(bytes([19]) * (3 * CONTEXT + 5))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "text.py").write_bytes(bytes([99]) * 500)
    (tmp_path / "picture.png").write_bytes(bytes([98]) * 500)
    return tmp_path


def test_parts_are_of_different_files_and_complete(folder: Path) -> None:
    found = {part: source_text.read(part, str(folder)) for part in ("train", "test")}
    for tokens, following in found.values():
        assert tokens.shape == following.shape == (len(tokens), CONTEXT)
        assert tokens.dtype == following.dtype == np.int32
        np.testing.assert_array_equal(tokens[:, 1:], following[:, :-1])
    assert set(np.unique(found["test"][0])) == {9, 19}
    assert set(np.unique(found["train"][0])) == {*range(20)} - {9, 19}
    text = b"".join(bytes([n]) * (3 * CONTEXT + 5) for n in range(19) if n != 9)
    whole = np.frombuffer(text, np.uint8)
    tokens, following = found["train"]
    np.testing.assert_array_equal(tokens.ravel(), whole[: tokens.size])
    np.testing.assert_array_equal(following.ravel(), whole[1 : tokens.size + 1])


def test_the_log_names_a_digest_of_what_was_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def digest() -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            source_text.read("train", str(folder))
        return caplog.messages[-1].split()[-1]

    first = digest()
    assert len(first) == 12 and digest() == first
    (folder / "text00.py").write_bytes(b"other" * 40)
    assert digest() != first


def test_the_standard_library_is_there() -> None:
    wanted = registry.DatasetRequest("stdlib", None, nb_classes=256, task=TASKS["tokens"])
    load = lambda: registry.load_raw(wanted, "test")  # noqa: E731
    one, other = load(), load()
    assert one.images.shape == one.labels.shape == (source_text.NUM_TEST, CONTEXT)
    np.testing.assert_array_equal(one.images, other.images)
    assert one.images.min() >= 0 and one.images.max() < 256
    with pytest.raises(ConfigurationError, match=r"--nb_classes 1\d\d or more|--nb_classes 2"):
        registry.load_raw(dataclasses.replace(wanted, nb_classes=64), "test")


@pytest.mark.parametrize("content", [b"", b"short"])
def test_too_little_text_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"contains 0 files.*--data_dir"):
        source_text.read("train", str(tmp_path))
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"bytes of text for the train part.*--data_dir"):
        source_text.read("train", str(tmp_path))
