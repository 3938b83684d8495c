"""A run as a whole: its settings, flags as data, its directory, its locks and its signals.

All roles read the same `settings.Run`, and what must be equal on all nodes is its `fingerprint`.
The tables of flags are made of `flags.Option`; a flag library is known only in `thinwire.flags`.
Import the modules themselves: each is small, and few need more than one.
"""
