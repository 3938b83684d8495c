"""Services that every process of a run uses and that need files, threads or signals.

`run` holds the settings and the directory of a run, `persistence` checkpoints and documents, and
`telemetry` what a process reports about itself.
"""
