// Package base has the errors that inner packages return and users branch on. Package codeq
// publishes them, and documents what they mean.
package base

import "errors"

// Of stored data.
var ErrCorrupt = errors.New("codeq: stored data is corrupt")

// Of a queue's directory.
var (
	ErrNotMember  = errors.New("codeq: directory is not that of the node")
	ErrNotQueue   = errors.New("codeq: directory is not a queue")
	ErrFormat     = errors.New("codeq: unknown storage format")
	ErrShardCount = errors.New("codeq: shard count differs")
	ErrLocked     = errors.New("codeq: directory is locked")
	ErrCopied     = errors.New("codeq: directory is a copy of a queue that was not closed")
)

// Of shards.
var (
	ErrClosed    = errors.New("codeq: queue is closed")
	ErrFailed    = errors.New("codeq: shard failed")
	ErrDiskFull  = errors.New("codeq: disk is full")
	ErrNotLeader = errors.New("codeq: shard has no leader")
)

// Of tasks and leases.
var (
	ErrNotFound   = errors.New("codeq: not found")
	ErrNotWaiting = errors.New("codeq: task does not wait")
	ErrLeaseLost  = errors.New("codeq: lease lost")
	ErrCanceled   = errors.New("codeq: task canceled")
	ErrUncertain  = errors.New("codeq: outcome unknown")
)
