"""TensorFlow's gfile, h5py, NumPy and Keras leave the chief's files unchanged, too."""

import pytest

from tests.worker.test_held_files import Folder

#: Each overwrites or deletes "out/log.csv" or "out/deep/1.h5".
TOPS = {
    "gfile.remove": "tf.io.gfile.remove('out/log.csv')",
    "gfile.rmtree": "tf.io.gfile.rmtree('out')",
    "GFile w": "with tf.io.gfile.GFile('out/log.csv', 'w') as f: f.write('new')",
    "GFile wb": "with tf.io.gfile.GFile('out/log.csv', 'wb') as f: f.write(b'new')",
    "gfile.rename": "open('t', 'w').close(); tf.io.gfile.rename('t', 'out/log.csv', True)",
    "gfile.copy": "open('t', 'w').close(); tf.io.gfile.copy('t', 'out/log.csv', True)",
    "GFile of a Path": "tf.io.gfile.GFile(pathlib.Path('out/log.csv'), 'w').write('new')",
    "h5py": "h5py.File('out/deep/1.h5', 'w').close()",
    "h5py by name": "h5py.File(name='out/log.csv', mode='w').close()",
    "np.savez": "np.savez(open('out/log.csv', 'wb'), np.ones(3))",
    "np.savetxt": "np.savetxt('out/log.csv', np.ones(3))",
    "tofile": "np.ones(3).tofile('out/log.csv')",
    "memmap": "np.memmap('out/log.csv', mode='w+', shape=3)[:] = 1",
}


@pytest.mark.timeout(300)
def test_what_the_chief_has_written_stays(tmp_path):
    """One process for all cases, as TensorFlow's import is slow; file names identify the cases."""
    folder = Folder(tmp_path)
    (tmp_path / "theirs").mkdir()  # as another worker writes it
    program = [
        "from thinwire.worker.held_libraries import hold_h5py, hold_tensorflow",
        "import h5py, numpy as np",
        "hold_h5py(h5py)",
        "import tensorflow as tf, keras",
        "hold_tensorflow()",
        "report_held()",
        *(
            f"print({name!r}, file=sys.stderr, flush=True)\ntry:\n    {top}\n"
            f"except PermissionError as error: print('refused', error, file=sys.stderr)\n"
            "assert open('out/log.csv').read() == open('out/deep/1.h5').read() == 'chief', "
            f"{name!r}"
            for name, top in TOPS.items()
        ),
        "own = h5py.File('own.h5', 'w'); own.close(); h5py.File('own.h5', 'w').close()",
        "with tf.io.gfile.GFile('own.txt', 'w') as f: f.write('own')",
        "tf.io.gfile.remove('own.txt')",
        "tf.io.gfile.mkdir('theirs')",
        "print('end', os.path.exists('own.txt'))",
    ]
    ended = folder.run("\n".join(program))
    assert ended.stdout == "end False\n", ended.stderr[-3000:]
    folder.check_kept(ended)
    shown = f"\n{ended.stderr}"  # the first name may be the first line
    for name, following in zip(TOPS, [*list(TOPS)[1:], None], strict=True):
        own = shown.partition(f"\n{name}\n")[2].partition(f"\n{following}\n")[0]
        assert "held back" in own or "refused" in own, (name, own)
    assert "own." not in shown.replace("its own", "")
