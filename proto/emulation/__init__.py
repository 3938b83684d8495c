"""Emulated links, so that thin and lossy networks can be tried on one machine.

`link` models rate, delay and loss of one direction for real streams and for the Simulator alike;
`priority_link` adds classes of service and background traffic, as DGT's datagrams need; `uplink`
runs that model on the real clock for a worker's streams and datagrams. All draws are seeded.
"""
