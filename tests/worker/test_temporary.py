"""Temporary files of a script are removed, but not the files that they only link to."""

import os

import pytest

from thinwire.worker import temporary


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(temporary, "_MADE", {})
    return temporary._MADE


def test_files_folders_and_links_are_removed_and_a_link_s_folder_stays(tmp_path, made):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "weights").touch()
    file, folder, link, gone = (tmp_path / name for name in ("file", "folder", "link", "gone"))
    file.touch()
    (folder / "deep").mkdir(parents=True)
    link.symlink_to(kept)
    made.update(dict.fromkeys(map(str, (file, folder, link, gone))))
    temporary.remove_temporary()
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    assert os.listdir(kept) == ["weights"]


def test_what_lies_in_a_temporary_folder_is_temporary(tmp_path, made):
    made[str(tmp_path / "folder")] = None
    assert temporary.is_temporary(str(tmp_path / "folder"))
    assert temporary.is_temporary(str(tmp_path / "folder" / "deep" / "file"))
    assert not temporary.is_temporary(str(tmp_path))
    assert not temporary.is_temporary(str(tmp_path / "folder2"))
