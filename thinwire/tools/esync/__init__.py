"""Log files and figures in the format of ESync (a synchronization method), from measured runs.

The module `format` reads and writes ESync's log files. The module `runs` loads a measured run from
ESync's log files or from a run directory. The module `convert` converts between ESync's log files
and run directories. The module `figures` draws the five figures of ESync's paper. The modules
`convert` and `figures` can be run as programs. No module of the package `esync` needs TensorFlow.
"""
