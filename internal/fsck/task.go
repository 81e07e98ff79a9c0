package fsck

import "codeq/internal/keys"

// taskID is the ID of a task, printed as users see it.
type taskID keys.ID

func (id taskID) String() string { return keys.FormatID(keys.ID(id)) }

func (id taskID) shard(shards int) int { return keys.ShardOf(keys.ID(id), shards) }

// count adds the task to the counts of its queue. It reports whether it is in a bucket.
func (st *checkedTask) count(n *keys.Counts) (ended bool) {
	switch st.Range {
	case keys.Task:
		if st.leased {
			n.Leased++
		} else {
			n.Ready++
		}
	case keys.Scheduled:
		n.Scheduled++
	case keys.Blocked:
		n.Blocked++
	default:
		*n.Ended(st.Range)++
	}
	return st.ended()
}
