"""Command-line flags, with one module per subject.

Tables of flags are data (`thinwire.runtime.run.flags`). `registration` registers the tables with
absl, and `run.read_run` builds the `Run` that every role receives from the flags' values. Flags of
a single role are in the role's package, for example `thinwire.ps.flags`. `thinwire.cli.help_text`
lists the flags of all roles.

`run`: the run as a whole; `method`, `dgt`: the training method and its messages; `launch`: the
hosts of nodes; `security`: authentication and encryption; `observability`: logs and metrics. The
package re-exports nothing: its import would load modules that only some commands need.
"""
