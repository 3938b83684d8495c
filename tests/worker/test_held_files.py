"""A process that starts during a run does not delete the chief's files, and names each one.

Each case runs in a separate process, because the functions are replaced for a whole process; it is
a fork of one that has replaced nothing.
"""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.worker.forks import Forks

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROLOGUE = """
import glob, io, os, pathlib, shutil, sys
from os import remove as remove_by_name
from thinwire.worker.held_files import lift_hold, report_held, was_kept
from thinwire.worker.held_python import hold_back
from thinwire.worker.temporary import record_temporary
run_dir, began, worker, is_first = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
record_temporary()
node = f"worker-{worker}" if worker else "evaluator"
hold_back(pathlib.Path(run_dir), node, began, lambda: worker == 1, is_first == "first")
"""
#: Actions of a script at its top. "log.csv" is the chief's, "deep/1.h5" too.
TOPS = {
    "rmtree": "shutil.rmtree('out')",
    "rmtree that ignores errors": "shutil.rmtree('out', ignore_errors=True)",
    "rmtree from a folder": "shutil.rmtree('out', dir_fd=os.open('.', os.O_RDONLY))",
    "os.remove": "for f in glob.glob('out/**/*.*', recursive=True): os.remove(f)",
    "remove by name": "remove_by_name('out/log.csv')",
    "os.unlink": "os.unlink(b'out/log.csv')",
    "in a folder": "os.unlink('log.csv', dir_fd=os.open('out', os.O_RDONLY))",
    "Path.unlink": "for f in pathlib.Path('out').rglob('*.*'): f.unlink()",
    "Path.write_text": "pathlib.Path('out/log.csv').write_text('new')",
    "open w": "with open('out/log.csv', 'w') as f: f.write('new')",
    "open wb": "open(file='out/log.csv', mode='wb').close()",
    "open w+": "f = open(pathlib.Path('out/log.csv'), 'w+'); f.write('a'); f.seek(0); f.read()",
    "io.open": "io.open('out/log.csv', 'wt').close()",
    "os.open": "os.close(os.open('out/log.csv', os.O_WRONLY | os.O_TRUNC))",
    "os.truncate": "os.truncate('out/log.csv', 0)",
    "rename over": "open('out/t', 'w').write('new'); os.rename('out/t', 'out/log.csv')",
    "replace over": "open('t', 'w').write('new'); os.replace('t', 'out/log.csv')",
    "Path.replace": "pathlib.Path('t').write_text('new'); pathlib.Path('t').replace('out/log.csv')",
    "move over": "open('t', 'w').write('new'); shutil.move('t', 'out/log.csv')",
    "copy over": "open('t', 'w').write('new'); shutil.copy('t', 'out/log.csv')",
    "move away": "shutil.move('out', 'out.bak'); open('out.bak/log.csv').read()",
    "move one away": "os.rename('out/log.csv', 'kept.csv'); open('kept.csv').read()",
    "clear and make": "shutil.rmtree('out'); os.mkdir('out'); open('out/mine.txt', 'w').write('')",
    "clear and makedirs": "shutil.rmtree('out'); os.makedirs('out/deep')",
    "walk": """
        for top, folders, names in os.walk('out', topdown=False):
            for name in names: os.remove(os.path.join(top, name))
            for name in folders: os.rmdir(os.path.join(top, name))
        os.rmdir('out')
        os.mkdir('out')
        with open('out/log.csv', 'x') as f: f.write('new')
        """,
}
#: Actions that bypass the functions, and are rejected.
AROUND = {
    "FileIO": "io.FileIO('out/log.csv', 'w')",
    "posix": "import posix; posix.remove('out/log.csv')",
    "posix.rename": "import posix; open('t', 'w').close(); posix.rename('t', 'out/log.csv')",
}
STARTS = {
    "a restarted worker": (2, "again"),
    "a restarted chief": (1, "again"),
    "a late joiner": (2, "first"),
    "a late chief": (1, "first"),
    "a restarted evaluator": (0, "first"),
}


class Folder:
    """A folder with a file that is older than the run, and files that the chief has written."""

    def __init__(self, path, forks=None):
        self.path, self.run_dir, self._forks = path, path / "run", forks
        (self.run_dir / "settings").mkdir(parents=True)
        (path / "out" / "deep").mkdir(parents=True)
        old = path / "out" / "old.txt"
        old.write_text("old")
        while True:  # until the clock of the files has advanced
            for name in ("log.csv", "deep/1.h5"):
                (path / "out" / name).write_text("chief")
            self.began = (path / "out" / "log.csv").stat().st_ctime
            if self.began > old.stat().st_ctime:
                break
        (self.run_dir / "settings" / "training").touch()

    def run(self, top, start=(2, "again")):
        """Run the top of a script; return the process."""
        program, place = PROLOGUE + textwrap.dedent(top), (self.run_dir, repr(self.began))
        words = [*map(str, (*place, *start))]
        if self._forks is not None:
            return self._forks.run(program, words, self.path, {"TMPDIR": str(self.path)})
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def check_kept(self, ended):
        assert (self.path / "out" / "log.csv").read_text() == "chief", ended.stderr
        assert (self.path / "out" / "deep" / "1.h5").read_text() == "chief", ended.stderr
        assert not list(self.path.glob("thinwire-held-*"))

    def names(self):
        return sorted(each.name for each in (self.path / "out").iterdir())


@pytest.fixture(scope="module")
def forks():
    started = Forks()
    yield started
    started.close()


@pytest.fixture
def folder(tmp_path, forks):
    return Folder(tmp_path, forks)


@pytest.mark.parametrize("top", TOPS.values(), ids=TOPS)
def test_what_the_chief_has_written_stays_and_is_named_in_one_line(folder, top):
    ended = folder.run(top)
    assert ended.returncode == 0, ended.stderr
    folder.check_kept(ended)
    assert ended.stderr.count("held back") == 1 and "log.csv" in ended.stderr, ended.stderr


@pytest.mark.parametrize("top", AROUND.values(), ids=AROUND)
def test_what_goes_around_python_s_functions_is_refused(folder, top):
    ended = folder.run(top)
    folder.check_kept(ended)
    assert "PermissionError" in ended.stderr and "thinwire.is_chief()" in ended.stderr


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("name", ["rmtree", "open w", "os.remove", "Path.unlink"])
def test_every_process_that_starts_later_keeps_them(folder, start, name):
    ended = folder.run(TOPS[name], start)
    assert ended.returncode == 0, ended.stderr
    folder.check_kept(ended)
    assert ended.stderr.count("held back") == 1


def test_the_first_chief_clears_its_folder_as_alone(folder):
    (folder.run_dir / "settings" / "training").unlink()
    ended = folder.run(TOPS["rmtree"], (1, "first"))
    assert not (folder.path / "out").exists() and not ended.stderr


def test_at_the_start_of_a_run_it_is_no_news_that_others_write_the_same(folder):
    (folder.run_dir / "settings" / "training").unlink()
    ended = folder.run(TOPS["open w"], (2, "first"))
    folder.check_kept(ended)
    assert ended.stderr == ""


def test_what_is_older_than_the_run_is_deleted_as_alone(folder):
    ended = folder.run("shutil.rmtree('out')")
    assert folder.names() == ["deep", "log.csv"]
    assert "old.txt" not in ended.stderr
    assert folder.run("open('out/older', 'w').close(); os.remove('out/older')").stderr == ""


def test_an_old_folder_is_deleted_whole_and_errors_are_as_alone(folder):
    (folder.run_dir / "settings" / "training").unlink()
    folder.began = 1e12  # everything is older
    missing = folder.run("shutil.rmtree('nowhere')")
    assert "FileNotFoundError" in missing.stderr
    assert folder.run("shutil.rmtree('out')").stderr == ""
    assert not (folder.path / "out").exists()


def test_a_worker_rewrites_its_own_files_after_a_restart_but_not_the_chief_s(folder):
    rewrite = """
        for name in ('out/worker2.txt', 'out/log.csv', 'out/config.json'):
            with open(name, 'w') as f: f.write('two')
    """
    assert "log.csv" in folder.run(rewrite, (2, "first")).stderr
    chief = "open('out/config.json', 'w').write('chief')"
    (folder.run_dir / "settings" / "training").unlink()
    assert folder.run(chief, (1, "first")).stderr == ""
    (folder.run_dir / "settings" / "training").touch()
    (folder.path / "out" / "worker2.txt").write_text("before")
    again = folder.run(rewrite, (2, "again"))
    assert (folder.path / "out" / "worker2.txt").read_text() == "two"
    assert (folder.path / "out" / "config.json").read_text() == "chief"
    assert "worker2.txt" not in again.stderr and "config.json" in again.stderr
    folder.check_kept(again)
    deleted = folder.run("shutil.rmtree('out')", (2, "again"))
    assert folder.names() == ["config.json", "deep", "log.csv"], deleted.stderr


def test_a_run_forgets_what_an_earlier_one_has_noted(folder):
    folder.run("open('out/mine.txt', 'w').close()", (2, "first"))
    (folder.path / "out" / "mine.txt").write_text("of another")
    folder.run("", (2, "first"))
    ended = folder.run("os.remove('out/mine.txt')", (2, "again"))
    assert "mine.txt" in ended.stderr and (folder.path / "out" / "mine.txt").exists()


def test_a_process_that_trains_with_the_others_holds_nothing_back(folder):
    top = "lift_hold(); print(was_kept('out/log.csv')); os.remove('out/log.csv')"
    ended = folder.run(top, (2, "again"))
    assert not ended.stderr and ended.stdout == "True\n"
    assert not (folder.path / "out" / "log.csv").exists()
    shown = folder.run("lift_hold(); open('out/new', 'w').close(); print(was_kept('out/new'))")
    assert shown.stdout == "False\n", "this worker has written it"


def test_later_ones_are_named_each_time_once_the_script_has_come_to_distribute(folder):
    top = (
        "os.remove('out/log.csv'); report_held(); os.remove('out/deep/1.h5'); shutil.rmtree('out')"
    )
    ended = folder.run(top)
    assert ended.stderr.count("held back") == 3
    folder.check_kept(ended)


def test_many_are_counted(folder):
    for number in range(10):
        (folder.path / "out" / f"{number}.txt").write_text("chief")
    ended = folder.run("shutil.rmtree('out')")
    assert "and 9 more" in ended.stderr and ended.stderr.count("\n") == 1


def test_what_it_may_do_as_alone(folder):
    ended = folder.run(
        """
        import tempfile, multiprocessing
        with open('out/log.csv', 'a') as f: f.write('!')
        with open('out/log.csv', 'r+') as f: assert f.read() == 'chief!'
        os.truncate('out/old.txt', 1)
        with tempfile.TemporaryDirectory(dir='out') as made:
            pathlib.Path(made, 'a').write_text('a')
            os.replace(os.path.join(made, 'a'), 'out/own.txt')
        os.remove('out/own.txt')
        os.close(os.open('lock', os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        open(os.devnull, 'w').close()
        class Reader: opens = open
        Reader().opens('out/old.txt').close()
        open(os.dup(1), 'w').close()
        assert multiprocessing.get_context('fork').Process(target=print).run() is None
        """
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    assert (folder.path / "out" / "log.csv").read_text() == "chief!"


def test_an_empty_lock_of_several_processes_stays_the_same_file(folder):
    lock = folder.path / "lock"
    lock.touch()
    before = lock.stat().st_ino
    ended = folder.run("fd = os.open('lock', os.O_RDWR | os.O_TRUNC); print(os.fstat(fd).st_ino)")
    assert ended.stdout == f"{before}\n" and not ended.stderr


#: Each makes "theirs", which another worker has made a moment before.
MAKING = {
    "os.mkdir": "os.mkdir('theirs')",
    "os.makedirs": "os.makedirs('theirs')",
    "below it": "os.makedirs('theirs/deep')",
    "Path.mkdir": "pathlib.Path('theirs').mkdir()",
    "in a folder": "os.mkdir('theirs', dir_fd=os.open('.', os.O_RDONLY))",
    "by a link": "os.symlink('.', 'here'); os.mkdir('here/theirs')",
    "in training": "lift_hold(); os.mkdir('theirs')",
    "deleted and made": "os.mkdir('theirs'); os.rmdir('theirs'); os.mkdir('theirs')",
    "copytree": "shutil.copytree('empty', 'theirs')",
}


@pytest.mark.parametrize("start", [*STARTS.values(), "the first chief"], ids=[*STARTS, "chief"])
def test_a_folder_that_another_worker_has_just_made_counts_as_made(folder, start):
    if start == "the first chief":
        (folder.run_dir / "settings" / "training").unlink()
        start = (1, "first")
    # Each way to make a folder is tried in one start, and each start has three of the ways.
    ways = MAKING if start == (2, "first") else ("os.makedirs", "in training", "deleted and made")
    for name in ways:
        for made in ("theirs", "theirs/deep", "empty"):
            (folder.path / made).mkdir(exist_ok=True)
        if name == "below it":
            (folder.path / "theirs" / "deep").rmdir()
        if name == "deleted and made":
            (folder.path / "theirs" / "deep").rmdir()
        ended = folder.run(MAKING[name], start)
        assert ended.returncode == 0, (name, ended.stderr)
        assert not ended.stderr and (folder.path / "theirs").is_dir(), (name, ended.stderr)
        if (folder.path / "here").is_symlink():
            (folder.path / "here").unlink()


@pytest.mark.parametrize(
    "top",
    [
        "os.mkdir('theirs'); os.mkdir('theirs')",
        "os.mkdir('mine'); os.mkdir('mine')",
        "os.mkdir('mine'); os.rmdir('mine'); os.mkdir('mine'); pathlib.Path('mine').mkdir()",
        "os.mkdir('out/log.csv')",
        "import tempfile; os.mkdir(tempfile.mkdtemp())",
    ],
)
def test_other_folders_are_there_already_as_alone(folder, top):
    (folder.path / "theirs").mkdir()
    assert "FileExistsError" in folder.run(top).stderr


def test_a_folder_that_is_older_than_the_run_is_there_already(folder):
    (folder.path / "theirs").mkdir()
    folder.began = 1e12
    assert "FileExistsError" in folder.run("os.mkdir('theirs')").stderr
