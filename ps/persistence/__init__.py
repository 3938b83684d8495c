"""What a shard keeps on disk: snapshots, a write-ahead journal of events, a high-water mark.

A snapshot alone would lose the updates since it was written, and their workers believe they were
acknowledged. With the journal a killed PS returns to the state it died in, bit for bit; the mark
counts what is lost without one. `SavedShard` (shard_store) reads and writes the files, `Journal`
and `JournaledCore` (journal) write events before the core handles them, `replay` restores,
`JournalPolicy` (policy) decides by ``--journal`` whether a journal is kept.
Names are imported from the modules: they need numpy.
"""
