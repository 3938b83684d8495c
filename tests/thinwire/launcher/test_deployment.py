"""The code that a launcher sends to hosts is whole; two of its files run there by themselves."""

import ast
import io
import pathlib
import subprocess
import sys
import tarfile

import pytest

from thinwire.launcher import program, ssh
from thinwire.launcher.program import PACKAGE
from thinwire.launcher.role import Node
from thinwire.runtime.run.script_settings import IN_SCRIPT_FOLDER

PACKAGES = ("data", "ops", "proto", "ps", "supervisor", "worker")


class Flags(dict):
    """Flags of a Cluster that copies its code."""

    hosts_file, sync_dst_dir = "hosts", "~/there/"

    def __init__(self, **values):
        super().__init__({name: Flag(value) for name, value in values.items()})


class Flag:
    """A flag that was given."""

    present = True

    def __init__(self, value):
        self.value = value


def open_archive(data):
    return tarfile.open(fileobj=io.BytesIO(data))


def test_the_sent_code_is_whole_and_the_users_files_go_with_it(tmp_path, monkeypatch):
    own = tmp_path / ".my model.py"
    own.write_text("")
    monkeypatch.setattr(ssh, "FLAGS", Flags(model=str(own), hosts_file="hosts"))
    deployment = ssh.code_deployment()
    assert deployment.folder == "there"
    assert deployment.flags == ("--model=sent/model/.my model.py",)
    with open_archive(deployment.archive) as archive:
        names = archive.getnames()
        assert {member.uname for member in archive} == {""}
    launched = {"thinwire/__main__.py", deployment.watchdog[-1]}
    assert launched | {"sent/model/.my model.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "thinwire", "sent"}


def test_a_script_s_folder_goes_with_the_code(tmp_path, monkeypatch):
    folder = tmp_path / ".hidden"
    for name in ("train.py", "helper.py", ".git/config", "runs/train/launch.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    monkeypatch.setattr(ssh, "FLAGS", Flags())
    deployment = ssh.code_deployment(folder)
    with open_archive(deployment.archive) as archive:
        sent = {name for name in archive.getnames() if name.startswith("sent")}
    assert sent == {"sent/script", "sent/script/train.py", "sent/script/helper.py"}
    node = Node("worker-1", "Worker", 1, ("--seed=1",), script=(str(folder / "train.py"), "x"))
    words = deployment.words(node, ["--worker_threads=1"])
    assert words[words.index("--") :] == ["--", "sent/script/train.py", "x"]
    assert IN_SCRIPT_FOLDER in words and "--seed=1" in words


def test_unpacked_code_runs_and_its_links_are_links(tmp_path):
    with open_archive(ssh.pack({})) as archive:
        archive.extractall(tmp_path, filter="data")
    for name in PACKAGES:
        link = tmp_path / "thinwire" / name
        assert link.is_symlink() and link.resolve() == tmp_path / name
    assert "Thinwire" in run_in(tmp_path, *program.COPIED_NODE, "--help")
    imports = "import thinwire.ops.sync.rule; print(thinwire.ops.sync.rule.__file__)"
    found = pathlib.Path(run_in(tmp_path, "-c", imports).strip())
    assert found.resolve() == tmp_path / "ops" / "sync" / "rule.py"


def run_in(folder, *arguments):
    """Return the output of a fresh Python in a folder."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["watchdog.py", "host_probe.py"])
def test_a_file_that_runs_by_itself_imports_the_standard_library_only(name):
    imported = set()
    for node in ast.walk(ast.parse((PACKAGE / "launcher" / name).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(node.module)
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
