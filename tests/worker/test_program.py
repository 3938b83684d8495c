"""The files of this process that belong to the script, and the compared arguments."""

import subprocess
import sys
import textwrap
import types

import pytest

from thinwire.runtime.run.program import digest_of
from thinwire.runtime.run.script_settings import SETTINGS_VARIABLE, write_settings
from thinwire.worker import program


@pytest.fixture
def folder(tmp_path):
    for name in ("train.py", "parts/model.py", "shared/common.py", "env/site-packages/lib.py"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return tmp_path / "project"


def modules_of(**files):
    return {
        name.replace("__", "."): types.SimpleNamespace(__file__=str(path))
        for name, path in files.items()
    }


def test_modules_of_python_of_packages_and_of_thinwire_are_not_local(folder):
    modules = {
        **modules_of(
            parts__model=folder / "parts" / "model.py",
            lib=folder / "env" / "site-packages" / "lib.py",
            gone=folder / "gone.py",
            train=folder / "train.py",
        ),
        **{name: sys.modules[name] for name in ("subprocess", "pytest", "thinwire.ops.types")},
        "built_in": types.SimpleNamespace(),
        "namespace": types.SimpleNamespace(__file__=None),
    }
    found = dict(program._local_files(folder, modules, folder / "train.py"))
    assert found == {"parts/model.py": digest_of(folder / "parts" / "model.py")}


def test_names_are_the_same_in_another_folder_and_on_another_host(folder):
    modules = modules_of(shared__common=folder / "shared" / "common.py")
    below = dict(program._local_files(folder, modules, None))
    outside = dict(program._local_files(folder / "parts", modules, None))
    assert (list(below), list(outside)) == (["shared/common.py"], ["module shared.common"])


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--epochs=3", "--ps_hosts=a:1,b:2", "data"], ["--epochs=3", "data"]),
        (["--id_worker", "2", "--rate", "0.1"], ["--rate", "0.1"]),
        (["--port=1", "--nb_workers=4", "--insecure", "data"], ["data"]),
        (["-v", "port"], ["-v", "port"]),
    ],
)
def test_a_place_is_no_argument(words, kept):
    assert [*program._without_places(words)] == kept


def test_arguments_under_a_launcher_are_those_that_it_gave(tmp_path, monkeypatch):
    path = write_settings(tmp_path, "worker-1", [], ["train.py", "--port=5"])
    monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert program.program_here({}).arguments == ("--port=5",)


def test_a_script_that_runs_by_itself_names_its_files(folder):
    (folder / "train.py").write_text(
        textwrap.dedent(
            """
            import parts.model
            from thinwire.worker.program import program_here
            for row in program_here({"loss": "mse"}).rows():
                print(*row)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "train.py", "--epochs=3"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"program.file:train.py {digest_of(folder / 'train.py')}",
        f"program.file:parts/model.py {digest_of(folder / 'parts' / 'model.py')}",
        "program.arguments --epochs=3",
        "program.loss mse",
    ]
