// Package engine is the rules of one shard: what each operation does to tasks, lanes, leases,
// groups, limits, flows, schedules and retention. It has no goroutine, channel, lock, clock, file
// or socket: time and a seed are given, and disk is read as it is between two groups. The rules
// collect writes in a group, and notifications in Effects; the owner carries both out.
//
// The owner goes through a group in this order:
//
//	Begin        with the instant, the Room and the kinds Wanted; then Refill
//	KeepUp       work that is due without a request
//	verbs        each has a Verdict: Produce, Next and Grant, Complete, Fail, Alter ...
//	Seal         Group.Batch is complete; the owner commits it
//	Clear        of Group and Effects, once it has persisted
//	Tidy         then; the owner may forget each queue of Effects.Forgotten
//
// and reads the Effects as their comments say. After an error (in Broken), do not use the State.
package engine
