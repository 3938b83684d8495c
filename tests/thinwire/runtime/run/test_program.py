"""The comparison of a resumed run's program with the original, and the named difference."""

import pytest

from thinwire.runtime.run.program import (
    Program,
    changed_file,
    digest_of,
    first_change,
    program_rows,
)
from thinwire.runtime.run.resuming import changed_script, first_setting, programs_of, refusal

FILES = {"train.py": "1", "parts/model.py": "2", "module shared": "3"}
COMPILED = {"optimizer": "SGD(learning_rate=0.02)", "loss": "mse"}
BEFORE = Program("train.py", FILES, ("--epochs=2", "a b"), COMPILED)


def changed(**parts):
    return Program(**{**vars(BEFORE), **parts})


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (BEFORE, None),
        (changed(files=FILES | {"train.py": "9"}), "train.py has changed"),
        (changed(files=FILES | {"module shared": "9"}), "module shared has changed"),
        (changed(files=FILES | {"new.py": "9"}), "new.py is new"),
        (changed(files={"train.py": "1"}), "module shared is not there any more"),
        (changed(arguments=()), "the script's arguments were --epochs=2 'a b' and are none"),
        (
            changed(compiled=COMPILED | {"optimizer": "Adam(learning_rate=0.02)"}),
            "the optimizer was SGD(learning_rate=0.02) and is Adam(learning_rate=0.02)",
        ),
        (changed(compiled={"optimizer": COMPILED["optimizer"]}), "the loss was mse and is none"),
    ],
)
def test_the_first_change_is_named(now, words):
    assert first_change(BEFORE.rows(), now.rows()) == words


def test_the_script_comes_first_and_other_rows_are_no_program():
    assert BEFORE.rows()[0] == ("program.file:train.py", "1")
    assert program_rows([("seed", "1"), *BEFORE.rows()]) == BEFORE.rows()


def test_a_program_of_many_files_and_long_arguments_fits_into_a_hello():
    many = {f"m{number:04}.py": "1" for number in range(3000)}
    rows = Program("m0000.py", many, ("x" * 10_000,)).rows()
    assert len(rows) < 600 and max(len(value) for _, value in rows) < 400
    other = Program("m0000.py", many | {"m2999.py": "2"}, ("x" * 10_000,)).rows()
    assert first_change(rows, other) == "other files have changed"
    longer = Program("m0000.py", many, ("x" * 10_001,)).rows()
    assert "arguments" in first_change(rows, longer)


def test_a_launcher_finds_changed_files_from_the_names_alone(tmp_path):
    script, module = tmp_path / "train.py", tmp_path / "parts" / "model.py"
    module.parent.mkdir()
    script.write_text("import parts.model\n")
    module.write_text("SIZE = 1\n")
    files = {"train.py": digest_of(script), "parts/model.py": digest_of(module), "module x": "?"}
    rows = Program("train.py", files, ("--epochs=2",)).rows()
    words = [str(script), "--epochs=2"]
    assert changed_script({1: rows}, words) is None
    assert changed_script({}, words) is None and changed_script({1: rows}, []) is None
    assert "are --epochs=3" in changed_script({1: rows}, [str(script), "--epochs=3"])
    assert changed_file(rows, tmp_path, "other.py") == "the script was train.py and is other.py"
    module.write_text("SIZE = 2\n")
    assert changed_script({2: rows}, words) == "parts/model.py has changed"
    module.unlink()
    assert changed_script({2: rows}, words) == "parts/model.py is not there any more"


def test_programs_come_back_from_a_checkpoint():
    state = {"programs": {"2": [["program.arguments", "--a"]]}}
    assert programs_of(state) == {2: (("program.arguments", "--a"),)}
    assert programs_of({}) == {}


def test_a_setting_that_only_one_version_knows_makes_no_difference():
    assert first_setting({"seed": "1", "old": "1"}, {"seed": "1", "new": "2"}) is None
    assert first_setting({"seed": "1"}, {"seed": "2"}) == "seed was '1' and is now '2'"


def test_a_refusal_is_one_line_that_names_both_remedies():
    text = refusal("--run_dir=runs/x", "train.py has changed", 40)
    assert "\n" not in text and "train.py has changed" in text and "at update 40" in text
    assert "--resume" in text and "--overwrite" in text and "Nothing was deleted" in text
