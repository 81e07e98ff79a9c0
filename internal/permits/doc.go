// Package permits keeps the limits of a queue, Concurrency and Rate, over shards that are led by
// several nodes: a shard leases a task of a limited queue only with a permit. An Allocator, one for
// each limited queue, grants permits to the shards; a Holder is what one shard has of them. With
// Concurrency, a permit is taken up until the lease ends, and may then serve for the next one; with
// Rate, it serves once.
//
// The package is the protocol alone: it has no goroutine, channel, lock, clock, file or socket.
// Times are given, and whoever has a Holder or an Allocator carries messages between them.
//
// What a shard tells the allocator is not a change but how many permits it has, so that what is
// lost, or comes twice, is put right by what comes next.
//
// Invariant: the allocator never believes that a shard has fewer permits than it has.
// For that
//   - permits are given back, and the ends of leases told, only after what ended the leases has
//     persisted: a next leader of the shard would find them in force;
//   - of what a shard has told, the latest counts, by epoch and number;
//   - a shard takes what the allocator grants only in answer to the last that it has told.
//     Whatever it tells makes answers to what it has told before void;
//   - the leader of a shard, and the node with the allocator, answer only after a majority has
//     confirmed that they still lead. So a new allocator that has asked a shard knows of all that
//     any allocator before it has granted there: after its answer, the shard takes it no more, and
//     leaders of the shard before that one are over.
//
// A new leader of a shard has as many permits as there are leases in its store; what its
// predecessor had more comes back to the allocator when it tells that. A new allocator asks all
// shards what they have; before all have answered, it grants nothing, and its token bucket does not
// fill, since shards may still use the tokens of the one before.
package permits
