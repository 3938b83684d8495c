"""Services that every process of a run uses and that need files, threads or signals.

`run` holds the settings and the directory of a run. `persistence` holds checkpoints and documents.
`telemetry` holds the reports that a process makes about itself.
"""
