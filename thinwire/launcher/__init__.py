"""The Cluster: every node of a run as a process, on this machine, over ssh, or in Ray's actors.

`role` starts the nodes, restarts workers that die and reaps every process; `local`, `ssh` and `ray`
know where nodes run and how they are reached, and `watchdog` ends a node whose launcher is gone.
`tf_config` reads a node's place from TF_CONFIG, `program` has the command lines of nodes.
`watchdog` and `host_probe` also run as bare files and import the standard library only.
"""
