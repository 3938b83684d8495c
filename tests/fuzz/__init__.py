"""Coverage-guided fuzzing of all code that reads bytes from other processes or from files.

``python -m tests.fuzz --list`` names the targets, ``make fuzz SECONDS=60 TARGET=push`` runs one.
Inputs worth keeping are in `corpus`, inputs that once crashed in `crashes`; `test_corpus` replays
both without a fuzzer. `hostile` is the acceptance test: a million messages and a million datagrams
against a real shard that also serves an honest worker.
"""
