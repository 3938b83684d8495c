"""Workers that sum and step among themselves, with the PS as coordinator (--collective).

Where the links between workers are faster than those to the PS, the traffic of synchronous rounds
can bypass it: shard 0 keeps membership, barrier and evaluation, and receives weights only now and
then. In the order of use: `CollectiveExchange` (exchange) does a worker's rounds, `Aggregator`
(all_reduce) sums them, `Peers` and `PeerServer` (peers, service) are both ends of the streams,
`Mailbox` (mailbox) holds parts that arrived early, `Replica` and `Neighbours` (replica) keep the
copies of the model equal. Nothing is re-exported: it needs numpy and gRPC.
"""
