"""Starts and supervises the processes of a run: on this machine, over ssh, on Ray or on Slurm.

`role` starts the nodes, restarts PS and workers that die, and reaps every process. `local`, `ssh`,
`ray` and `slurm` start a node on its host and send it signals. `watchdog` ends a node when the
launcher has died. `tf_config` reads a node's role and addresses from TF_CONFIG; `program` has the
command lines of nodes. `watchdog` and `host_probe` also run as bare files and import the standard
library only.
"""
