"""ESync's own log files and figures, from runs measured with --measure.

`format` reads and writes the files, `runs` loads a measured run from them or from a run directory,
`convert` exports and imports between the two, and `figures` draws the five figures of ESync's
paper. Each has a command line of its own; none needs TensorFlow.
"""
