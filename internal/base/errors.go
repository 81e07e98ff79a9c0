// Package base has the errors that inner packages return and users test for. Package codeq
// publishes and documents them.
package base

import (
	"errors"
	"strings"
)

// Errors of stored data.
var ErrCorrupt = errors.New("codeq: stored data is corrupt")

// Corrupt makes an error that reports damage match ErrCorrupt, and name the next step.
func Corrupt(err error) error { return &corruptError{err} }

type corruptError struct{ damage error }

func (e *corruptError) Error() string {
	return ErrCorrupt.Error() + ": " + strings.TrimPrefix(e.damage.Error(), "damaged: ") +
		": Verify says what else is, and what can be repaired"
}

func (e *corruptError) Unwrap() []error { return []error{ErrCorrupt, e.damage} }

// ErrInvalid: an argument was refused before anything was written.
var ErrInvalid = errors.New("codeq: invalid argument")

// Errors of a queue's directory.
var (
	ErrNotMember  = errors.New("codeq: not a member of the cluster")
	ErrNotQueue   = errors.New("codeq: directory is not a queue")
	ErrFormat     = errors.New("codeq: unknown storage format")
	ErrShardCount = errors.New("codeq: shard count differs")
	ErrLocked     = errors.New("codeq: directory is locked")
	ErrCopied     = errors.New("codeq: directory is a copy of a queue that was not closed")
)

// Errors of shards.
var (
	ErrClosed    = errors.New("codeq: queue is closed")
	ErrFailed    = errors.New("codeq: shard failed")
	ErrDiskFull  = errors.New("codeq: disk is full")
	ErrStalled   = errors.New("codeq: disk does not answer")
	ErrNotServed = errors.New("codeq: queue is not served by a local socket")
	ErrNotLeader = errors.New("codeq: shard has no leader")
	ErrDiverged  = errors.New("codeq: node has diverged from its cluster")
	ErrOldCopy   = errors.New("codeq: node's directory is an older copy")
	ErrPowerLost = errors.New("codeq: a majority may have lost what was acknowledged")

	ErrNoCluster  = errors.New("codeq: queue is not part of a cluster")
	ErrNoMajority = errors.New("codeq: the other nodes have no majority")
	ErrCannotLead = errors.New("codeq: another node cannot lead now")
)

// Errors of tasks and leases.
var (
	ErrNotFound   = errors.New("codeq: not found")
	ErrNotWaiting = errors.New("codeq: task does not wait")
	ErrLeaseLost  = errors.New("codeq: lease lost")
	ErrEmpty      = errors.New("codeq: no task is ready")
	ErrCanceled   = errors.New("codeq: task canceled")
	ErrUncertain  = errors.New("codeq: outcome unknown")

	ErrSuspended    = errors.New("codeq: the task is suspended")
	ErrStepsChanged = errors.New("codeq: the steps of the task have changed")
)

// CauseOf returns err as the cause of another error, after something was stored: it does not match
// the errors that say that nothing was.
func CauseOf(err error) error {
	if errors.Is(err, ErrDiskFull) || errors.Is(err, ErrNotLeader) {
		return errors.New(err.Error())
	}
	return err
}
