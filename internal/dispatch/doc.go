// Package dispatch gives the ready tasks of a shard to the claims that wait for them: in the order
// in which the claims came, within the limits of the queues, and unless other shards of the process
// have more urgent tasks.
//
// The rules (internal/engine) decide which task of a queue is next, and record the lease. A
// [Dispatcher] decides which claim gets it. One goroutine, the owner of the shard, uses a
// Dispatcher; methods that others may call say so. No method waits: messages to other shards go
// through a [Port], and the claims that are served are collected in Served.
//
// In a cluster, [ClaimLines] holds the claims that wait at other nodes, and [Permits] the limits of
// queues over all nodes.
package dispatch
