// Package dispatch gives the ready tasks of a shard to the claims that wait for them: in the order in
// which the claims came, as far as the limits of queues let them, and with an eye on what other shards
// of the process have that is more urgent.
//
// The rules (internal/engine) say which task of a queue is next, and record the lease. A [Dispatcher]
// says who gets it. One goroutine, the owner of the shard, uses a Dispatcher; what others may call is
// said where it is. No method waits: what concerns other shards goes to them through a [Port], and the
// claims that are served are collected in Served.
package dispatch
