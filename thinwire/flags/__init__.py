"""Command-line flags, by what they set.

Tables of flags are data (`thinwire.runtime.run.flags`); `registration` hands them to absl, and
`run.read_run` makes of their values the `Run` that every role receives. Flags of a single role are
in its own package: `thinwire.ps.flags`, `thinwire.worker.flags` ...; `thinwire.cli.help_text` has
all.

`run`: the run as a whole; `method`, `dgt`: what travels, and when; `launch`: where nodes run;
`security`: who may connect; `observability`: logs and metrics. Nothing is re-exported: importing
the package would then import what only some commands need.
"""
