"""Log files and figures in ESync's format, from runs measured with --measure.

`format` reads and writes ESync's log files. `runs` loads a measured run from ESync's log files or
from a run directory. `convert` converts between log files and run directories. `figures` draws the
five figures of ESync's paper. `convert` and `figures` are command lines. No module
needs TensorFlow.
"""
