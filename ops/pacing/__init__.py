"""Pacers decide when a worker pushes: after every mini-batch, after H steps, or by ESync's rule.

A worker calls its pacer after each local step to find out whether the worker must push. A pacer
gets only numbers, so that the worker, the state server, the Simulator (simulation of a run) and the
tests run the same code. Each value of the flag --pacer is a key of `PACERS`.
"""
