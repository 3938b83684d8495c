"""The policies of training over thin links, and the plain parts that all roles share.

Everything here is arithmetic on arrays and plain data: no sockets, threads, clocks or flags, so
that the roles, the Simulator and the tests run the same code. Each policy package holds its
interface in `base.py` and its values in `registry.py`; `methods` composes them.
"""
