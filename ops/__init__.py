"""Policies of training over thin links, and the data types that all roles share.

Modules of this package compute on arrays and plain data. The modules use no sockets, threads,
clocks or flags, so the roles, the Simulator and the tests run the same code. Each policy package
defines its interface in `base.py` and lists its policies in `registry.py`. The package `methods`
combines the policies.
"""
