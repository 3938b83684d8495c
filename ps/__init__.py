"""The parameter server: the PS role, one process for each shard of the model.

``core`` is a shard as a sans-IO state machine, ``service`` puts it on the network, ``persistence``
keeps its state on disk, ``datagrams`` receives DGT's unreliable blocks, ``wire`` holds the coding
of messages, ``telemetry`` what is reported. ``role`` builds all of it; ``flags`` reads the options.
"""
