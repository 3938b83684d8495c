"""What Thinwire costs: ratios to what the machine can do, and to other systems.

``python -m bench`` runs the parts, one module for each; a part yields rows of work against a limit
(`bench.table`), which are written to bench/results as a dated page. `bench.peers` trains the same
model by other systems on the same links. Nothing that ships imports this package.
"""
