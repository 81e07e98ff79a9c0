// Package queuetest has what tests of codeq from outside share: queues in fake time, verbs that
// have to succeed, faults of a shard's owner and its commits, and looks into memory and disk by
// package inspect. It is for the tests of this repository alone, and changes as they do.
package queuetest
