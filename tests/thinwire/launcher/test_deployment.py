"""The code that a launcher sends to hosts is complete; two of its files run there alone."""

import ast
import io
import pathlib
import random
import subprocess
import sys
import tarfile

import pytest

from tests.own_policies import loaded
from thinwire.launcher import deployment, program
from thinwire.launcher.program import PACKAGE
from thinwire.launcher.role import Node
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import IN_SCRIPT_FOLDER

#: Folders of the checkout that its package links to.
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


def names_in(data):
    with open_archive(data) as archive:
        return archive.getnames()


def test_the_sent_code_is_whole_and_the_users_files_go_with_it(tmp_path, monkeypatch):
    own = tmp_path / ".my model.py"
    own.write_text("")
    monkeypatch.setattr(deployment, "FLAGS", Flags(model=str(own), hosts_file="hosts"))
    made = deployment.code_deployment()
    assert made.folder == "there"
    assert made.flags == ("--model=sent/model/.my model.py",)
    with open_archive(made.archive) as archive:
        names = archive.getnames()
        assert {member.uname for member in archive} == {""}
    launched = {"thinwire/__main__.py", made.programs.watchdog[-1]}
    assert launched | {"sent/model/.my model.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {"thinwire", "sent"}


def test_modules_beside_a_file_of_policies_go_with_it(tmp_path, monkeypatch):
    (tmp_path / "helper_of_policies.py").write_text("X = 1")
    (tmp_path / "unused.py").write_text("")
    mine = tmp_path / "mine.py"
    row = 'METHODS = {"mine": BUILT_IN["asgd"]}'
    mine.write_text(
        "import helper_of_policies\n"
        "from thinwire.ops.methods.method import METHODS as BUILT_IN\n" + row
    )
    monkeypatch.setattr(deployment, "FLAGS", Flags(policy=str(mine)))
    with loaded(mine):
        made = deployment.code_deployment()
    assert made.flags == ("--policy=sent/policy/mine.py",)
    sent = {name for name in names_in(made.archive) if name.startswith("sent")}
    assert sent == {"sent/policy/mine.py", "sent/policy/helper_of_policies.py"}


def test_a_script_s_folder_goes_with_the_code(tmp_path, monkeypatch):
    folder = tmp_path / ".hidden"
    for name in ("train.py", "helper.py", ".git/config", "runs/train/launch.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    monkeypatch.setattr(deployment, "FLAGS", Flags())
    made = deployment.code_deployment(folder)
    sent = {name for name in names_in(made.archive) if name.startswith("sent")}
    assert sent == {"sent/script", "sent/script/train.py", "sent/script/helper.py"}
    node = Node("worker-1", "Worker", 1, ("--seed=1",), script=(str(folder / "train.py"), "x"))
    words = made.words(node, ["--worker_threads=1"])
    assert words[words.index("--") :] == ["--", "sent/script/train.py", "x"]
    assert IN_SCRIPT_FOLDER in words and "--seed=1" in words


def test_only_the_folder_runs_of_earlier_runs_is_left_out(tmp_path, monkeypatch):
    for name in ("runs/launch.json", "runs.py", "running/a.py", "package/runs/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(deployment, "FLAGS", Flags())
    sent = {name for name in names_in(deployment.pack({}, tmp_path)) if name.endswith(".py")}
    assert {name.removeprefix("sent/script/") for name in sent if name.startswith("sent")} == {
        *("runs.py", "running/a.py", "package/runs/b.py"),
    }


def test_secrets_beside_a_script_are_not_sent(tmp_path, monkeypatch):
    for name in ("token", "certs [1]/ps-0.key", "certs [1]/ps-0.crt", "certs [1]/worker-1.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    given = Flags(token_file="token", tls_key=f"{tmp_path}/certs [1]/{{node}}.key")
    monkeypatch.setattr(deployment, "FLAGS", given)
    sent = [name for name in names_in(deployment.pack({}, tmp_path)) if name.startswith("sent")]
    assert sent == [
        *("sent/script", "sent/script/certs [1]", "sent/script/certs [1]/ps-0.crt"),
        "sent/script/loop",
    ]


def test_a_link_that_a_flag_names_is_sent_as_its_file(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text("text")
    (tmp_path / "link.py").symlink_to(tmp_path / "model.py")
    monkeypatch.setattr(deployment, "FLAGS", Flags(model=str(tmp_path / "link.py")))
    made = deployment.code_deployment()
    assert made.flags == ("--model=sent/model/link.py",)
    with open_archive(made.archive) as archive:
        assert archive.extractfile("sent/model/link.py").read() == b"text"


def test_links_stay_links_and_none_leads_ray_out_of_the_folder(tmp_path, monkeypatch, caplog):
    script, there = tmp_path / "script", tmp_path / "there"
    (script / "own").mkdir(parents=True)
    (script / "inside").symlink_to("own")
    (script / "outside").symlink_to("../../../private")
    (script / "absolute").symlink_to(tmp_path)
    monkeypatch.setattr(deployment, "FLAGS", Flags())
    packed = deployment.pack({}, script)
    with open_archive(packed) as archive:
        links = {member.name: member.linkname for member in archive if member.issym()}
    assert links == {
        "sent/script/inside": "own",
        "sent/script/outside": "../../../private",
        "sent/script/absolute": str(tmp_path),
    }
    deployment.unpack(packed, there)
    assert {path.name for path in (there / "sent" / "script").iterdir()} == {"own", "inside"}
    assert "sent/script/outside " in caplog.text
    assert "sent/script/absolute is not unpacked" in caplog.text


def test_what_is_too_large_is_named(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(b"x")
    monkeypatch.setattr(deployment, "FLAGS", Flags())
    monkeypatch.setattr(deployment, "_LARGEST_ARCHIVE_BYTES", len(deployment.pack({})))
    deployment.pack({})
    (tmp_path / "data").write_bytes(random.Random(0).randbytes(1 << 16))
    with pytest.raises(ConfigurationError, match=f"{tmp_path} is too large .*--sync_dst_dir"):
        deployment.pack({}, tmp_path)


def test_unpacked_code_runs_also_over_an_earlier_copy_with_links(tmp_path):
    (tmp_path / "thinwire").mkdir()
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / "thinwire" / name).symlink_to(f"../{name}")
    unpack = ["tar", "-x", "-z", "-o", "-f", "-", "-C", str(tmp_path)]  # as `Ssh.unpack` does
    for _ in range(2):
        subprocess.run(unpack, input=deployment.pack({}), check=True)
    assert not [path for path in (tmp_path / "thinwire").iterdir() if path.is_symlink()]
    assert "Thinwire" in run_in(tmp_path, *program.COPIED.node, "--help")
    imports = "import thinwire.ops.sync.rule; print(thinwire.ops.sync.rule.__file__)"
    found = pathlib.Path(run_in(tmp_path, "-c", imports).strip())
    assert found == tmp_path / "thinwire" / "ops" / "sync" / "rule.py"


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
