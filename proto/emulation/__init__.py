"""Emulated network links, which reproduce slow and lossy networks on one machine.

The module `link` models rate, delay and loss of one direction of a network link, for real gRPC
streams and for the simulator. The module `priority_link` adds classes of service and background
traffic to the link model, for DGT's datagrams. The module `uplink` runs the emulated link on the
real clock for a worker's streams and datagrams. All random draws of emulated links are seeded.
"""
