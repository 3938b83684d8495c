"""Services for all processes of a training run that need files, threads or signals.

`run` holds the settings and the directory of a run. `persistence` holds checkpoints and JSON
documents. `telemetry` holds the reports that a process makes about its own work.
"""
