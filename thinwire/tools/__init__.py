"""Commands that look at runs and machines, and take part in none.

`status` and `stop` are about one run (`recorded` reads its directory, `observer` contacts its shard
0), `doctor` is about the machine, `health` about one process and `versions` about what is
installed. `esync` converts records of runs to and from ESync's own log files and draws its figures.
None of them imports TensorFlow; what is slow is imported after ``--help``.
"""
