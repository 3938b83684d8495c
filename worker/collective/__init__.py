"""Training in which workers sum gradients among themselves and a PS coordinates (--collective).

If the links between workers are faster than the links to the PS, workers can exchange gradients
directly. Shard 0 then manages membership, the barrier and evaluation, and receives weights only at
intervals. `CollectiveExchange` (exchange) carries out a worker's rounds. `Aggregator` (all_reduce)
sums gradients. `Peers` (peers) is the sending end and `PeerServer` (service) the receiving end of
the streams between workers. `Mailbox` (mailbox) stores parts of sums that arrive early. `Replica`
and `Neighbours` (replica) keep the workers' copies of the model equal. The package re-exports no
names, because its modules import numpy and gRPC.
"""
