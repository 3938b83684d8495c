"""Commands that inspect runs and machines without taking part in a run.

`status` and `stop` inspect and end one run: `recorded` reads the run directory, and `observer`
contacts shard 0. `doctor` checks the machine, `health` one process, and `versions` lists installed
versions. `manifests` writes Kubernetes objects. `esync` converts records of runs to and from
ESync's log files and draws its figures. No command imports TensorFlow. Slow modules are imported
after the command line is parsed, so ``--help`` is fast.
"""
