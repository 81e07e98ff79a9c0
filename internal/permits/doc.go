// Package permits enforces the limits of a queue, Concurrency and Rate, across shards that are led
// by several nodes: a shard leases a task of a limited queue only with a permit. An Allocator, one
// for each limited queue, grants permits to the shards; a Holder keeps those of one shard. With
// Concurrency, a permit is in use until the lease ends, and may then be used for the next one; with
// Rate, it is used once.
//
// The package is only the protocol: it has no goroutine, channel, lock, clock, file or socket.
// Times are arguments, and the callers of Holders and Allocators send the messages between them.
//
// A shard reports the number of its permits to the allocator, not a change of this number, so that
// the next report corrects the effect of a lost or repeated one.
//
// Invariant: the allocator never believes that a shard has fewer permits than it has. For that
//   - permits are given back, and the ends of leases reported, only after the ends of the leases
//     have persisted: otherwise a next leader of the shard would find the leases in force;
//   - among the reports of a shard the latest counts, by epoch and number;
//   - a shard accepts permits only in the answer to its last report. Each report makes the answers
//     to earlier ones invalid;
//   - the leader of a shard, and the node with the allocator, answer only after a majority has
//     confirmed that they still lead. So a new allocator that has asked a shard knows all grants of
//     earlier allocators there: after its answer, the shard accepts no grants of theirs, and
//     earlier leaders of the shard no longer lead.
//
// A new leader of a shard has as many permits as there are leases in its store; the allocator gets
// the other permits of its predecessor back with its first report. A new allocator asks all shards
// for their permits; before all have answered, it grants nothing, and its token bucket does not
// fill, since shards may still use tokens of the previous allocator.
package permits
