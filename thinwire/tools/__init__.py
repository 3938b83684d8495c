"""Commands that inspect runs and machines without taking part in a run.

The commands `status` and `stop` inspect and end a run: the module `recorded` reads the run
directory, and `observer` contacts PS shard 0. The command `doctor` checks the machine, `health`
checks one process, and `versions` lists installed versions. The command `manifests` writes
Kubernetes objects for a run. The package `esync` converts records of runs to and from log files of
ESync (a synchronization method), and draws the figures of ESync's paper. No command of
`thinwire.tools` imports TensorFlow. Slow modules are imported after the command line is parsed, so
``--help`` is fast.
"""
