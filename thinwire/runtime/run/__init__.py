"""A training run as a whole: its settings, flags as data, directory, locks and signals.

All roles read the same settings (`settings.Run`). `fingerprint` lists the settings that must be
equal on all nodes. The tables of flags consist of `flags.Option`; only `thinwire.flags` uses a flag
library. Import these modules directly: most callers need only one of these small modules.
"""
