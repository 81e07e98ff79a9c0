package listing

import (
	"bytes"
	"cmp"
	"strings"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Key is what the order of tasks depends on, besides their time.
type Key struct {
	Queue, Tenant string
	Priority      int
	ID            keys.ID
}

// compare compares two tasks in the order in which the shards keep those of a state.
func compare(state engine.TaskState, a, b *Key, since, other uint64) int {
	byTime := cmp.Or(cmp.Compare(since, other), bytes.Compare(a.ID[:], b.ID[:]))
	switch state {
	case engine.Scheduled:
		return byTime
	case engine.Ready, engine.Leased:
		return cmp.Or(strings.Compare(a.Queue, b.Queue), -cmp.Compare(a.Priority, b.Priority),
			strings.Compare(a.Tenant, b.Tenant), byTime)
	}
	return cmp.Or(strings.Compare(a.Queue, b.Queue), byTime)
}

// Merge yields the tasks of all shards in one order, each read by a Reader, until yield returns
// false. fetch lets a shard read the next page; an error of it ends the tasks.
func Merge[T any](heads []*Reader[T], key func(*T) Key, fetch func(shard int, l *Reader[T]) error, yield func(*T) bool) error {
	for {
		var first *Reader[T]
		var least Key
		for shard, l := range heads {
			for len(l.Page) == 0 && l.More() {
				l.Prepare()
				if err := fetch(shard, l); err != nil {
					return err
				}
			}
			if len(l.Page) == 0 {
				continue
			}
			k := key(l.Page[0].Task)
			if first == nil || compare(l.State, &k, &least, l.Page[0].At, first.Page[0].At) < 0 {
				first, least = l, k
			}
		}
		if first == nil {
			return nil
		}
		t := first.Page[0].Task
		first.Page = first.Page[1:]
		if !yield(t) {
			return nil
		}
	}
}
