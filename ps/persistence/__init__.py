"""A PS shard's files on disk: snapshots, a write-ahead journal of events, a high-water mark.

With snapshots alone, a restart would lose the acknowledged updates since the newest snapshot. With
its journal of events, a restarted PS restores its state at the time when it was killed, bit for
bit. Without a journal, the high-water mark (newest version reached) shows how many updates a
restarted PS has lost. `SavedShard` (shard_store) reads and writes the files, `Journal` and
`JournaledCore` (journal) write events before the core handles them, `replay` restores the state,
and `JournalPolicy` (policy) decides by ``--journal`` whether to write a journal. The package
`ps.persistence` imports none of its modules, because they need numpy.
"""
