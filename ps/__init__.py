"""The parameter server: the PS role, one process for each shard of the model.

``core`` implements a shard as a sans-IO state machine. ``service`` serves the shard over the
network, ``persistence`` saves its state on disk, ``datagrams`` receives DGT's unreliable blocks,
``wire`` codes messages, and ``telemetry`` reports figures. ``role`` builds all these parts;
``flags`` reads the options.
"""
