// Package engine is the rules of one shard: what each operation does to tasks, lanes, leases,
// groups, limits, flows, schedules and retention. It has no goroutine, channel, lock, clock, file
// or socket: time and a seed are given, disk is read as it is between two groups, and what is to be
// written is collected. What others are to learn is collected as well; the owner carries it out.
//
// The owner goes through a group in this order:
//
//	Begin        with the instant, the Room and what is Wanted; then Refill
//	KeepUp       what is due without being asked for
//	verbs        each has a Verdict: Produce, Next and Grant, Complete, Fail, Alter ...
//	Seal         Group.Batch is what is to be written; the owner commits it
//	Tidy         once it has persisted; then Clear both, and Forget each of Effects.Forgotten
//
// and reads the Effects where they say. After an error, which is in Broken, the State is of no use.
package engine
