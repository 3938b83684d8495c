"""The settings, flags, directory, locks and signals of a training run as a whole.

All roles read the same settings (`settings.Run`). The module `fingerprint` lists the settings that
must be equal on all nodes. The tables of command-line flags consist of `flags.Option`, and only
`thinwire.flags` uses a flag library. Import the modules of `run` directly, because most callers
need only one of them.
"""
