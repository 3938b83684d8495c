"""A storage address is checked at the start; the error is one line without secrets."""

import dataclasses
import os
import sys
import time

import pytest

from tests.command_line import given
from tests.object_storage import BUCKET, SECRET, environment_of, s3_server
from thinwire.cli.node import _refuse_places
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.fsspec_objects import FsspecObjects, open_objects, without_secrets
from thinwire.runtime.persistence.object_store import LocalObjects, StorageError
from thinwire.runtime.persistence.places import CHECKPOINTS, check_place


@pytest.fixture(scope="module")
def s3():
    with s3_server() as environment:
        yield environment


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere://bucket/run", "protocol nowhere is unknown"),
        ("memory://bucket/run", "protocol memory is unknown"),
        ("http://host/run", "expected a folder, or s3://"),
        ("s3://bucket", "expected a bucket and a folder"),
        ("s3:///run", "expected a bucket"),
        ("gs://bucket/run", "pip install fsspec gcsfs"),
        ("s3://me:hunter2secret@bucket/run", "user name, password"),
        ("s3://bucket/run?key=hunter2secret", "password, query"),
    ],
)
def test_an_address_of_no_use_is_refused(address, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_place(address, CHECKPOINTS)
    assert "--checkpoint_dir=" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match=r"pip install thinwire\[s3\]"):
        check_place("s3://bucket/run", CHECKPOINTS)


@pytest.mark.parametrize(
    ("change", "address", "message"),
    [
        ({}, f"s3://{BUCKET}/run", None),
        ({}, "s3://missing/run", "bucket does not exist"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, f"s3://{BUCKET}/run", "Could not connect"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "s3://bucket/run", "credent"),
    ],
)
def test_a_storage_is_tried_out(s3, tmp_path, change, address, message):
    began = time.monotonic()
    with environment_of(s3 | {"HOME": str(tmp_path)}):
        for name, value in change.items():
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})
        if message is None:
            check_place(address, CHECKPOINTS)
            assert open_objects(address, CHECKPOINTS).names() == []
            return
        with pytest.raises(ConfigurationError, match=message) as caught:
            check_place(address, CHECKPOINTS)
    text = str(caught.value)
    assert f"--checkpoint_dir={address}" in text and "\n" not in text and SECRET not in text
    assert time.monotonic() - began < 30


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Expected an existing bucket or folder"):
        check_place(f"file://{tmp_path}/file", CHECKPOINTS)


def test_a_storage_that_writes_over_what_is_there_is_refused(tmp_path):
    class Overwrites(LocalObjects):
        create = LocalObjects.put

    with pytest.raises(StorageError, match="If-None-Match"):
        Overwrites(tmp_path).check()


def test_secrets_stay_out_of_messages(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    error = OSError(f"GET https://u:pw@h/b?X-Amz-Signature=abc failed\n with {SECRET}")
    assert without_secrets(error) == "GET https://h/b failed with ***"

    class Broken:
        def _strip_protocol(self, address):
            return "b"

        def cat_file(self, path):
            raise ValueError(f"bad {SECRET}")

    with pytest.raises(StorageError, match=r"cannot read s3://b/a: bad \*\*\*"):
        FsspecObjects(Broken(), "s3://b").get("a")


@pytest.mark.parametrize("flag", ["checkpoint_dir", "report_dir"])
@pytest.mark.parametrize("role", ["Standalone", "Simulator"])
def test_roles_that_keep_nothing_elsewhere_refuse_the_flags(role, flag):
    with given(f"--type_node={role}", f"--{flag}=/tmp/elsewhere"):
        run = read_run()
    with pytest.raises(
        ConfigurationError, match=f"{role} --{flag}=/tmp/elsewhere: .*Leave --{flag} out"
    ):
        _refuse_places(dataclasses.replace(run, type_node=role))
