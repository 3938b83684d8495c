"""Mutants: small mistakes planted in a copy of the tree, to see which test fails on each."""
