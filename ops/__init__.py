"""Policies of training over thin links, and data types that workers and parameter servers share.

The modules of the package `thinwire.ops` compute on arrays and plain data. The modules of
`thinwire.ops` use no sockets, threads, clocks or flags, so the workers, the servers, the Simulator
(simulation of a run) and the tests run the same code. Each policy package of `thinwire.ops` defines
its interface in `base.py` and lists its policies in `registry.py`. The package
`thinwire.ops.methods` combines policies (codecs, optimizers and others) to training methods.
"""
