"""Command-line flags of Thinwire, with one module per subject.

The modules of `flags` define Thinwire's flags in tables (`thinwire.ops.options`). The module
`registration` registers the tables of flags with absl, and `run.read_run` builds the `Run` that
every role receives from the values of the flags. Flags that only one role reads are in the role's
package, for example `thinwire.ps.flags`. `thinwire.cli.help_text` lists the flags of all roles.

The module `run` defines flags of the run as a whole, `method` and `dgt` define flags of the
training method and its messages, `launch` flags of the hosts of nodes, `security` flags of
authentication and encryption, and `observability` flags of logs and metrics. The package `flags`
re-exports no names, because importing it would load modules that only some commands need.
"""
