"""Coverage-guided fuzzing of everything that reads bytes from elsewhere.

``python -m tests.fuzz --list`` names the targets, ``make fuzz SECONDS=60 TARGET=push`` runs one.
What was found worth keeping is in `corpus`, what once crashed in `crashes`; `test_corpus` replays
both, without a fuzzer. `hostile` is the acceptance: a million messages and a million datagrams
against a real shard with an honest worker beside them.
"""
