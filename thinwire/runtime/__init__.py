"""Services for all processes of a training run that need files, threads or signals.

The package `run` has the settings, flags, directory and locks of a training run. The package
`persistence` reads and writes checkpoints and JSON documents. The package `telemetry` has the
reports of a process about its own work.
"""
