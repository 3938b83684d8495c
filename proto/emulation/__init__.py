"""Emulated links, which reproduce thin and lossy networks on one machine.

`link` models rate, delay and loss of one direction, for real streams and for the Simulator.
`priority_link` adds classes of service and background traffic, which DGT's datagrams need. `uplink`
runs the priority link on the real clock for a worker's streams and datagrams. All random draws are
seeded.
"""
