package listing

import (
	"cmp"
	"strings"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Key has the parts of a task's position in the order besides its time.
type Key struct {
	Queue, Tenant string
	Priority      int
	ID            keys.ID
}

// compare compares two positions in the order of the query: the order in which shards store the
// tasks of its state.
func (q *Query) compare(a, b *Position) int {
	group := 0
	switch q.State {
	case engine.Scheduled:
	case engine.Ready, engine.Leased:
		group = cmp.Or(strings.Compare(a.Queue, b.Queue), -cmp.Compare(a.Priority, b.Priority), strings.Compare(a.Tenant, b.Tenant))
	default:
		group = strings.Compare(a.Queue, b.Queue)
	}
	switch {
	case group != 0:
		return group
	case a.End && b.End:
		return 0
	case a.End:
		return 1
	case b.End:
		return -1
	}
	return q.byTime(a.At, b.At, &a.ID, &b.ID)
}

// Merge yields the tasks of all shards in one order, each read by a Reader, until yield returns
// false. fetch reads the next page of a shard; its error ends the tasks.
func Merge[T any](heads []*Reader[T], key func(*T) Key, fetch func(shard int, l *Reader[T]) error, yield func(*T) bool) error {
	never := func() bool { return false }
	_, err := merge(heads, key, fetch, never, func(i Item[T]) bool { return yield(i.Task) })
	return err
}

// merge yields the tasks of all shards in one order until yield returns false, or until spent
// returns true before a necessary read. end is then the position of the last task yielded or
// skipped: all tasks up to it are done, and none after it. nil: there are no more.
func merge[T any](
	heads []*Reader[T], key func(*T) Key, fetch func(shard int, l *Reader[T]) error, spent func() bool, yield func(Item[T]) bool,
) (end *Position, err error) {
	for {
		if err := fill(heads, fetch, spent); err != nil {
			return nil, err
		}
		var first *Reader[T]
		var least Position
		var barrier *Position // position of the first shard that is not read further
		for _, l := range heads {
			if len(l.Page) == 0 {
				if l.More() && (barrier == nil || l.compare(l.Reached, barrier) < 0) {
					barrier = l.Reached
				}
				continue
			}
			p := Position{Key: key(l.Page[0].Task), At: l.Page[0].At}
			if first == nil || l.compare(&p, &least) < 0 {
				first, least = l, p
			}
		}
		if first == nil || barrier != nil && first.compare(&least, barrier) > 0 {
			return barrier, nil
		}
		item := first.Page[0]
		first.Page = first.Page[1:]
		if !yield(item) {
			return &least, nil
		}
	}
}

// fill reads on in all shards with an unknown next task, in turns, so that they are about equally
// far when spent returns true. Each reads at least once.
func fill[T any](heads []*Reader[T], fetch func(shard int, l *Reader[T]) error, spent func() bool) error {
	for unknown := true; unknown; {
		unknown = false
		for shard, l := range heads {
			if len(l.Page) > 0 || !l.More() || l.Reached != nil && spent() {
				continue
			}
			l.prepare()
			if err := fetch(shard, l); err != nil {
				return err
			}
			unknown = unknown || len(l.Page) == 0
		}
	}
	return nil
}
