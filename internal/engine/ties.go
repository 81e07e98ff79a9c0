package engine

import "codeq/internal/keys"

// ties holds what ties tasks to each other: idempotency keys, the turns of groups, parents and
// children, the pins of results, the limits of keys, and the wakeups of the tasks that wait for any
// of these.
type ties struct {
	*round
	names  *names
	mail   *mail
	leases *leases

	uniques   uniqueCache
	nextFreed dueCursor // the first idempotency key to become free
	turns     turnCache
	limits    limitTable
	pending   pendingCache // numbers of parents
	notices   childNotices
	pins      pins

	wakeups  wakeupList // of blocked tasks that may go on
	cursors  scanCursors
	blocked  rangeReader
	children rangeReader // tasks that wait for parents
}

func newTies(r *round, ns *names, ml *mail, le *leases) ties {
	return ties{
		round: r, names: ns, mail: ml, leases: le,
		uniques: newUniqueCache(), nextFreed: nothingDue, turns: newTurnCache(), limits: make(limitTable),
		pending: newPendingCache(), notices: newChildNotices(), pins: newPins(),
		cursors: scanCursors{group: 1}, blocked: rangeReader{prefix: keys.Blocked}, children: rangeReader{prefix: keys.Dependent},
	}
}
