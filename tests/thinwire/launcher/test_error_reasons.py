"""An error's reason is one line, for all wrappers that Keras and TensorFlow add."""

import pathlib
import subprocess

import keras
import pytest
import tensorflow as tf

from tests.forked import MAIN, forker
from thinwire.launcher.error_reasons import exit_code_of, original_of, place_of, reason_of
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import Diverged
from thinwire.worker.client.control import RunHalted
from thinwire.worker.script import RECORD

ONES = tf.ones([2, 3])


class Refusing(keras.layers.Layer):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def call(self, x):
        raise self.error


def in_a_layer(error):
    Refusing(error)(ONES)


def in_layers_of_a_model(error):
    keras.Sequential([keras.Sequential([Refusing(error)])])(ONES)


def in_a_graph(error):
    @tf.function
    def step(x):
        if tf.reduce_sum(x) > 0:
            raise error
        return x

    step(ONES)


def in_a_layer_in_a_graph(error):
    tf.function(lambda x: Refusing(error)(x))(ONES)


def in_the_step_of_a_graph(error):
    """As an exchange fails within a step: TensorFlow shows another error."""

    def exchange(x):
        RECORD.failure = error
        raise error

    tf.function(lambda x: tf.numpy_function(exchange, [x], tf.float32))(ONES)


WAYS = [in_a_layer, in_layers_of_a_model, in_a_graph, in_a_layer_in_a_graph]


def raised_by(way, error):
    with pytest.raises(Exception) as raised:
        way(error)
    return raised.value


@pytest.fixture(autouse=True)
def _nothing_recorded(monkeypatch):
    monkeypatch.setattr(RECORD, "failure", None)


@pytest.mark.parametrize("way", [*WAYS, in_the_step_of_a_graph], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("--nb_workers=0: expected\n  at least 1. Give more."), 2),
        (Diverged("the loss is nan"), 5),
        (RunHalted("diverged", "lower the rate"), 5),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_of_thinwire_is_its_own_text(way, error, code):
    shown = raised_by(way, error)
    assert original_of(shown) is error
    assert exit_code_of(original_of(shown)) == code
    assert reason_of(shown) == " ".join(str(error).split())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_error_of_the_script_has_its_type_and_its_first_line(way):
    shown = raised_by(way, ValueError("no such column\nsee the header"))
    assert reason_of(shown) == "ValueError: no such column"
    assert exit_code_of(original_of(shown)) is None


def test_the_error_of_an_operation_is_not_the_page_of_its_graph():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    # The labels have no gradient, so that one operation fails: TensorFlow reports either of two.
    model.compile("sgd", lambda y, predicted: tf.reduce_sum(predicted) + tf.reshape(y, [3, 5]))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(tf.ones([8, 4]), tf.ones([8, 1]), verbose=0)
    raised.value.add_note("Thinwire: a batch is a part here.")
    assert reason_of(raised.value) == (
        "InvalidArgumentError: Input to reshape is a tensor with 8 values, but the requested shape "
        "has 15. Thinwire: a batch is a part here."
    )


def test_an_error_that_quotes_another_one_by_itself_stays():
    inner = ConfigurationError("no token")
    try:
        try:
            raise inner
        except ConfigurationError as error:
            raise ConfigurationError(f"--token_file=x: {error}") from error
    except ConfigurationError as outer:
        assert original_of(outer) is outer and reason_of(outer) == "--token_file=x: no token"


def test_without_a_message_the_type_is_the_reason():
    assert reason_of(ValueError()) == "ValueError"


def test_the_place_is_the_innermost_line_of_the_script():
    shown = raised_by(in_layers_of_a_model, ValueError("no"))
    file, _, line = place_of(shown).rpartition(":")
    assert file == __file__
    text = pathlib.Path(__file__).read_text().splitlines()[int(line) - 1]
    assert "raise self.error" in text


SCRIPT = """
import sys, threading
import keras, tensorflow as tf
import thinwire
from thinwire.launcher.error_reasons import exit_with_reason

class Refusing(keras.layers.Layer):
    def call(self, x):
        raise {error}

exit_with_reason()
tf.function(lambda x: Refusing()(x))(tf.ones([2, 3]))
"""


@pytest.mark.parametrize(
    ("error", "code", "num_lines", "last"),
    [
        ("thinwire.ConfigurationError('bad. Do this.')", 2, 1, "mine.py:9: bad. Do this."),
        ("ValueError('oh no')", 1, None, "ValueError: oh no"),
    ],
)
def test_a_script_of_no_launcher_ends_with_the_reason(tmp_path, error, code, num_lines, last):
    (tmp_path / "mine.py").write_text(SCRIPT.format(error=error))
    done = subprocess.run(
        [forker().python, "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(MAIN.parent), "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": ""},
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[-1].endswith(last)) == (code, True), done.stderr
    assert num_lines is None or "Traceback" not in done.stderr
