"""Benchmarks of Thinwire: its costs as ratios to the machine's limits and to other systems.

``python -m bench`` runs the parts. One module measures each part and returns rows that compare work
with a limit (`bench.table`); the rows are written to bench/results as a dated page. `bench.peers`
trains the same model with other systems on the same links. The shipped packages do not import this
package.
"""
