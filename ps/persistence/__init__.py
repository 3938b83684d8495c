"""A PS shard's files on disk: snapshots, a write-ahead journal of events, a high-water mark.

A snapshot alone would lose the acknowledged updates since the snapshot was written. With the
journal, a restarted PS restores the state in which it was killed, bit for bit. Without a journal,
the high-water mark (newest version reached) shows how many updates are lost. `SavedShard`
(shard_store) reads and writes the files, `Journal` and `JournaledCore` (journal) write events
before the core handles them, `replay` restores the state, and `JournalPolicy` (policy) decides by
``--journal`` whether to write a journal. The package `ps.persistence` imports none of its modules,
because they need numpy.
"""
