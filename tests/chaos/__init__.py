"""Chaos tests: random faults on nodes of a run, and checks of what must hold afterwards."""
