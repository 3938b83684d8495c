"""A PS shard's files: snapshots, a write-ahead journal of events, and the newest version reached.

With snapshots alone, a restart would lose the acknowledged updates since the newest snapshot. With
its journal of events, a restarted PS restores its state at the time when it was killed, bit for
bit. Without a journal, the high-water mark (newest version reached) shows how many updates a
restarted PS has lost. `SavedShard` (shard_store) reads and writes the shard's files, `Journal` and
`JournaledCore` (journal) write the shard's events, `replay` restores the shard's state, and
`JournalPolicy` (policy) decides by ``--journal`` whether to write a journal. The package
`ps.persistence` imports none of its modules, because they need numpy.
"""
