package fsck

import "codeq/internal/keys"

// taskID is the ID of a task, printed as users see it.
type taskID keys.ID

func (id taskID) String() string { return keys.FormatID(keys.ID(id)) }

func (id taskID) shard(shards int) int { return keys.ShardOf(keys.ID(id), shards) }

// state of a task.
type state uint8

const (
	ready state = iota
	leased
	scheduled
	blocked
	dead
	done
	canceled
)

func (s state) String() string {
	return [...]string{"ready", "leased", "scheduled", "blocked", "dead", "done", "canceled"}[s]
}

// stateIn returns the state of a task by its range. A leased task counts as ready.
func stateIn(prefix byte) state {
	switch prefix {
	case keys.Scheduled:
		return scheduled
	case keys.Blocked:
		return blocked
	case keys.Dead:
		return dead
	case keys.Done:
		return done
	case keys.Canceled:
		return canceled
	default:
		return ready
	}
}

// count adds the task to the counts of its queue. It reports whether it is in a bucket.
func (st *checkedTask) count(n *keys.Counts) (ended bool) {
	switch st.state {
	case ready:
		n.Ready++
	case leased:
		n.Leased++
	case scheduled:
		n.Scheduled++
	case blocked:
		n.Blocked++
	default:
		*n.Ended(st.Range)++
	}
	return st.ended()
}
