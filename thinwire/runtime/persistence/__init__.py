"""State on disk: checkpoints that are whole or absent, and JSON documents with checked fields.

Every role saves plain data (nested dicts of arrays and numbers) with the same `Checkpoints`, so
that a process killed at any moment can resume. `documents` writes dataclasses as JSON and checks
every field when it reads them. Import these modules directly, because `checkpoint` needs numpy.
"""
