"""Starts and supervises the processes of a run: on this machine, over ssh, on Ray or on Slurm.

The module `role` starts the nodes, restarts PS and workers that die, and reaps every process. The
modules `local`, `ssh`, `ray` and `slurm` start a node on its host and send signals to the node. The
module `watchdog` ends a node after the death of the launcher. The module `tf_config` reads a node's
role and addresses from TF_CONFIG. The module `gpus` deals the GPUs of a machine to its workers. The
module `program` defines the command lines that start nodes.
The modules `watchdog` and `host_probe` also run as bare files and import the standard library only.
"""
