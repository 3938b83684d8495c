"""Training in which workers sum gradients among themselves and a PS coordinates (--collective).

If the links between workers are faster than the links to the PS, workers can exchange gradients
directly. With --collective, shard 0 manages the workers' membership, the barrier and evaluation,
and receives weights only at intervals. The class `CollectiveExchange` (module exchange) carries out
a worker's rounds. The class `Aggregator` (module all_reduce) sums gradients over workers. The class
`Peers` (module peers) is the sending end and `PeerServer` (module service) the receiving end of the
streams between workers. The class `Mailbox` (module mailbox) stores parts of sums that arrive
early. The classes `Replica` and `Neighbours` (module replica) keep the workers' copies of the model
equal. The package `worker.collective` re-exports no names, so that importing it does not import
numpy and gRPC.
"""
