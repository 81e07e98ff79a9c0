package codeq

import (
	"errors"
	"fmt"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/wire"
)

// Errors on which callers branch with errors.Is. A returned error wraps one of them.
var (
	ErrEmpty = base.ErrEmpty // a [Queue.Claim] that does not wait found no ready task
	// ErrLeaseLost: the lease has expired or ended; another worker may have done its work since.
	ErrLeaseLost  = base.ErrLeaseLost
	ErrNotFound   = base.ErrNotFound                    // no task has this ID, or it is no longer kept; or no schedule has this name
	ErrDuplicate  = errors.New("codeq: duplicate task") // the idempotency key of a task is taken: the error is, or has, a [*DuplicateError]
	ErrNotWaiting = base.ErrNotWaiting                  // the task is leased, or has ended
	// ErrCanceled: the task was canceled while it was leased. It is the cause of the end of a
	// handler's context, and comes with ErrLeaseLost from the verbs that take a receipt.
	ErrCanceled = base.ErrCanceled
	ErrInvalid  = base.ErrInvalid // an argument was refused before anything was written: an [*InvalidError]
	ErrClosed   = base.ErrClosed  // the queue is closed or closing, or was never opened; nothing was applied
	ErrFailed   = base.ErrFailed  // the shard stopped as its storage failed, until the queue is reopened; nothing was applied
	// ErrDiskFull: less is free on the disk than the operation needs ([Options.MinFreeBytes]). It
	// was not applied, and works once there is room.
	ErrDiskFull  = base.ErrDiskFull
	ErrStalled   = base.ErrStalled   // an operation on files took longer than [Options.StallAfter], as on a disk that hangs
	ErrUncertain = base.ErrUncertain // storage failed, ctx ended or a leader was lost in the commit: applied or not

	ErrNotServed = base.ErrNotServed // no process serves the queue to this program ([OpenLocal]); nothing was applied

	ErrNotLeader = base.ErrNotLeader // the shard has no leader in reach, or the node was removed; certainly not applied
	// ErrDiverged: this node's replica of a shard contradicts its cluster, as after a power loss
	// below [DurabilityDisk]. It comes with ErrFailed; see [Queue.ReplaceNode].
	ErrDiverged = base.ErrDiverged
	// ErrOldCopy: the node's directory is an older copy, or a copy of one in use; the error says
	// where. It comes with ErrFailed. Opened again, alone, the node comes back.
	ErrOldCopy = base.ErrOldCopy
	// ErrPowerLost: the shard has no leader: after losses of power below [DurabilityDisk], or with
	// older copies, no majority is left. It comes with ErrNotLeader; see [RecoverCluster].
	ErrPowerLost  = base.ErrPowerLost
	ErrNoCluster  = base.ErrNoCluster  // the queue was opened without [Options.Cluster]
	ErrNoMajority = base.ErrNoMajority // the node cannot be removed now: most of the others do not answer; nothing changed
	ErrCannotLead = base.ErrCannotLead // a node cannot be reached, does not vote, lags or is drained; or no other can lead
	// ErrNotMember: the directory is another node's; or the cluster knows the node with another
	// directory, or not at all; or the node is of another cluster, was removed, or was opened by
	// another process since. Nothing was applied.
	ErrNotMember = base.ErrNotMember

	ErrNotQueue = base.ErrNotQueue // the directory is something other than a queue, or empty (see [Options.MustExist])
	// ErrFormat: the format is of another version, or the other nodes have risen to a newer one.
	ErrFormat     = base.ErrFormat
	ErrShardCount = base.ErrShardCount // [Options.Shards] differs from the count fixed at creation
	// ErrLocked: another process, or another [Queue] of this one, has the directory open; the text
	// says which, as far as it is known. A file system that cannot lock is another error.
	ErrLocked = base.ErrLocked
	// ErrCopied: the files are a copy that was made while the queue was open, or after its process
	// had died: see [Options.AcceptCopy]. Use [Queue.Checkpoint] to copy an open queue.
	ErrCopied  = base.ErrCopied
	ErrCorrupt = base.ErrCorrupt // stored data is damaged, or contradicts itself; see [Verify]

	// ErrNoHandler: the [Mux] given to [Queue.Run] has no handlers, or none for one of the queues.
	// Its text is in the error of a task that died without one ([RunOptions].UnhandledFor).
	ErrNoHandler       = errors.New("codeq: no handler")
	ErrNotEmpty        = errors.New("codeq: queue is not empty")     // the queue is in use: a [NotEmptyError]
	ErrHandlersRunning = errors.New("codeq: handlers still running") // [Queue.Run] gave up handlers that ignored the end of their context; leases are released
)

// NotEmptyError says what [Queue.DeleteQueue] has found in a queue. It matches [ErrNotEmpty].
type NotEmptyError struct {
	Queue     string
	Counts    Counts // of its tasks
	Keys      int    // idempotency keys that are taken for the time of [Unique].For
	Schedules int    // that produce tasks for it
	Claims    int    // that wait for its tasks; of another node, some count as one, and 20 s longer
}

func (e *NotEmptyError) Error() string {
	return fmt.Sprintf("%v: queue %q: %d tasks, %d idempotency keys, %d schedules, %d waiting claims",
		ErrNotEmpty, e.Queue, e.Counts.Total(), e.Keys, e.Schedules, e.Claims)
}

// Is reports that every [NotEmptyError] is an [ErrNotEmpty].
func (e *NotEmptyError) Is(target error) bool { return target == ErrNotEmpty }

// InvalidError says which argument was refused and why. It matches [ErrInvalid].
type InvalidError struct {
	Field string // such as "Task.Priority"
	Value any    // the refused value; for a long one its length
	Limit string // the allowed values, such as "0 to 9"
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("codeq: invalid %s: %v (allowed: %s)", e.Field, e.Value, e.Limit)
}

// Is reports that every [InvalidError] is an [ErrInvalid].
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// public is deferred by exported functions: errors begin with the name of the package, once.
func public(err *error) {
	if *err != nil {
		*err = base.Prefixed(*err)
	}
}

// encodeError returns the code and text (call.EncodeError) of an error that goes to another node.
func encodeError(err error) (code byte, text string) {
	var duplicate *DuplicateError
	var invalid *InvalidError
	switch {
	case errors.As(err, &duplicate):
		return call.CodeDuplicate, string(wire.AppendJSON(nil, duplicate))
	case errors.As(err, &invalid):
		return call.CodeInvalid, string(wire.AppendJSON(nil, &InvalidError{invalid.Field, fmt.Sprint(invalid.Value), invalid.Limit}))
	}
	return call.EncodeError(err)
}

// encodeOwnError is encodeError for a program that calls this process and no other.
func encodeOwnError(err error) (code byte, text string) {
	if !errors.Is(err, ErrInvalid) {
		if code, text = call.EncodeOwnError(err); code != 0 {
			return code, text
		}
	}
	return encodeError(err)
}

func decodeError(code byte, text string) error {
	switch code {
	case call.CodeDuplicate:
		return call.DecodeDetails(text, new(DuplicateError))
	case call.CodeInvalid:
		return call.DecodeDetails(text, new(InvalidError))
	}
	return call.DecodeError(code, text)
}
