"""State on disk: checkpoints that are whole or absent, and documents with checked fields.

Every role saves plain data (nested dicts of arrays and numbers) by the same `Checkpoints`, so that
a process killed at any moment can resume. `documents` reads and writes the JSON of other programs'
hands without trusting it. Both import numpy or nothing; none is imported here.
"""
