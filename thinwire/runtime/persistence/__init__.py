"""State on disk: checkpoints that are whole or absent, and JSON documents with checked fields.

Every role saves its state as plain data (nested dicts of arrays and numbers) with the class
`Checkpoints`, so that a process killed at any moment can resume. The module `documents` writes
dataclasses as JSON and checks every field when it reads them. Import the modules of `persistence`
directly, because `checkpoint` needs numpy.
"""
