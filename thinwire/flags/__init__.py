"""Command-line flags of Thinwire, with one module per subject.

The modules define flags in tables (`thinwire.runtime.run.flags`). `registration` registers these
tables with absl, and `run.read_run` builds the `Run` that every role receives from the flags'
values. Flags that only one role reads are in the role's package, for example `thinwire.ps.flags`.
`thinwire.cli.help_text` lists the flags of all roles.

`run` has flags of the run as a whole; `method` and `dgt` of the training method and its messages;
`launch` of the hosts of nodes; `security` of authentication and encryption; `observability` of logs
and metrics. The package re-exports nothing: importing it would load modules that only some commands
need.
"""
