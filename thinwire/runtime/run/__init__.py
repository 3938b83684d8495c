"""A run as a whole: its settings, flags as data, its directory, its locks and its signals.

All roles read the same `settings.Run`. The settings that must be equal on all nodes are its
`fingerprint`. The tables of flags consist of `flags.Option`; only `thinwire.flags` uses a flag
library. Import the modules directly: most users need only one of the small modules.
"""
