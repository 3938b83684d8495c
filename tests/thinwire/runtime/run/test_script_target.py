"""The file that `-m` names is the file that `python -m` runs."""

import pytest

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_target import ScriptTarget


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("alone.py", "whole/__init__.py", "whole/__main__.py", "whole/part.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("alone", "alone.py"),
        ("whole.part", "whole/part.py"),
        ("whole", "whole/__main__.py"),
        ("whole.__main__", "whole/__main__.py"),
    ],
)
def test_a_module_is_the_file_that_python_runs(folder, module, file):
    target = ScriptTarget.of(["-m", module, "--epochs=2"])
    assert (target.path, target.module) == (folder / file, module)
    assert target.arguments == ("--epochs=2",)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-m", "bare"], "package without __main__.py"),
        (["-m", "absent"], "there is no module absent in"),
        (["-m", "whole.absent"], "there is no module whole.absent in"),
        (["-m", "alone.part"], "there is no module alone.part in"),
        (["-m", "sys"], "there is no module sys|without a file"),
        (["-m"], "-m is the last word"),
        (["absent.py"], "absent.py is no file"),
    ],
)
def test_a_target_that_cannot_run_is_refused(folder, words, reason):
    with pytest.raises(ConfigurationError, match=reason):
        ScriptTarget.of(words)
