package codeq

import (
	"errors"
	"fmt"

	"codeq/internal/base"
)

// Errors on which callers branch with errors.Is. A returned error wraps one of them, and adds what
// failed and the value that was refused.
var (
	// ErrEmpty: a [Queue.Claim] that does not wait found no ready task.
	ErrEmpty = base.ErrEmpty
	// ErrLeaseLost: the lease of the receipt is not in force. It has expired, or the task has been
	// finished; another worker may have repeated the work of this one since then.
	ErrLeaseLost = base.ErrLeaseLost
	// ErrNotFound: no task has this ID, or it has ended and is no longer kept; or no schedule has
	// this name.
	ErrNotFound = base.ErrNotFound
	// ErrDuplicate: the idempotency key of a task is taken. The error is, or joins, a
	// [*DuplicateError].
	ErrDuplicate = errors.New("codeq: duplicate task")
	// ErrNotWaiting: the task is leased, or has ended.
	ErrNotWaiting = base.ErrNotWaiting
	// ErrCanceled: the task was canceled while it was leased. It is the cause of the end of a
	// handler's context, and comes with ErrLeaseLost from the verbs that take a receipt.
	ErrCanceled = base.ErrCanceled
	// ErrInvalid: an argument was refused before anything was written. The error is an
	// [*InvalidError] that names the field, the value and the limit.
	ErrInvalid = base.ErrInvalid
	// ErrClosed: the queue is closed or closing, or was never opened. The operation was not
	// applied.
	ErrClosed = base.ErrClosed
	// ErrFailed: the shard stopped because its storage failed, and refuses operations until the
	// queue is closed and opened again. The operation was not applied.
	ErrFailed = base.ErrFailed
	// ErrDiskFull: there is less room on the disk than the operation needs, see
	// [Options.MinFreeBytes]. It was not applied. The same call works once there is room, and a
	// lease does not expire as long as it can be neither ended nor extended.
	ErrDiskFull = base.ErrDiskFull
	// ErrStalled: an operation on the files of the queue has taken longer than
	// [Options.StallAfter], as on a disk that hangs. It is a cause, or a finding of [Queue.Health].
	ErrStalled = base.ErrStalled
	// ErrUncertain: it is not known whether the operation was applied, because storage failed, ctx
	// ended or a leader was lost while it was being committed.
	ErrUncertain = base.ErrUncertain

	// ErrNotServed: no process serves the queue to this program ([OpenLocal]), since none has it
	// open, or it does not call [Queue.ServeLocal]. The operation was not applied.
	ErrNotServed = base.ErrNotServed

	// ErrNotLeader: the shard has no leader that could be reached, or the node was removed from its
	// cluster. The operation was certainly not applied.
	ErrNotLeader = base.ErrNotLeader
	// ErrDiverged: this node's replica of a shard contradicts those of its cluster, as after a
	// power loss below [DurabilityDisk]. It comes with ErrFailed: the shard goes on without this
	// node. See [Queue.ReplaceNode] and [RecoverCluster].
	ErrDiverged = base.ErrDiverged
	// ErrOldCopy: the directory of this node is an older copy, which lacks later changes that the
	// node acknowledged, or a copy of one that another process has open; the error says where. It
	// comes with ErrFailed. Opened again, when no other is, the node comes back by itself.
	ErrOldCopy = base.ErrOldCopy
	// ErrPowerLost: the shard has no leader, since so many nodes have lost power below
	// [DurabilityDisk], or are older copies, that the others are no majority. It comes with
	// ErrNotLeader. See [RecoverCluster].
	ErrPowerLost = base.ErrPowerLost
	// ErrNoCluster: the queue was opened without [Options.Cluster].
	ErrNoCluster = base.ErrNoCluster
	// ErrNoMajority: the node cannot be removed now: a majority of the remaining nodes does not
	// answer. Nothing has changed.
	ErrNoMajority = base.ErrNoMajority
	// ErrCannotLead: a node cannot lead a shard now, as when it cannot be reached, does not vote,
	// lags behind or is drained; or no other node can.
	ErrCannotLead = base.ErrCannotLead
	// ErrNotMember: the directory does not belong to the node that opens it; or the cluster knows
	// the name of the node with another directory, or the node is of another cluster; or no member
	// has the name of the node to remove; or the calling node was removed from the cluster, or
	// another process has opened it since. The operation was not applied.
	ErrNotMember = base.ErrNotMember

	// ErrNotQueue: the directory given to [Open] holds something other than a queue, or no queue
	// although one must exist (see [Options.MustExist]).
	ErrNotQueue = base.ErrNotQueue
	// ErrFormat: the queue was written by a version of codeq with another format; or a node of a
	// cluster runs an older version than the others, which have raised the cluster's format.
	ErrFormat = base.ErrFormat
	// ErrShardCount: [Options.Shards] differs from the count fixed at creation.
	ErrShardCount = base.ErrShardCount
	// ErrLocked: another process, or another [Queue] of this one, has the directory open; the text
	// says which, as far as it is known. A file system that cannot lock is another error.
	ErrLocked = base.ErrLocked
	// ErrCopied: the files are a copy that was made while the queue was open, or after its process
	// had died: see [Options.AcceptCopy]. Use [Queue.Checkpoint] to copy an open queue.
	ErrCopied = base.ErrCopied
	// ErrCorrupt: stored data is damaged, or contradicts itself; see [Verify].
	ErrCorrupt = base.ErrCorrupt

	// ErrNoHandler: the [Mux] given to [Queue.Run] has no handlers, or none for one of the queues.
	ErrNoHandler = errors.New("codeq: no handler")
	// ErrNotEmpty: the queue is in use. An error that matches it is a [NotEmptyError].
	ErrNotEmpty = errors.New("codeq: queue is not empty")
	// ErrHandlersRunning: [Queue.Run] gave up waiting for handlers that ignored the end of their
	// context. Their leases have been released.
	ErrHandlersRunning = errors.New("codeq: handlers still running")
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

// public is deferred by exported functions. It makes the text of an error begin with the name of
// the package, once, whatever errors are wrapped in it.
func public(err *error) {
	if *err != nil {
		*err = base.Prefixed(*err)
	}
}
