package ready

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Ask makes the next refill find the first ready task of a lane: First is exact then.
func (t *Tasks) Ask(l *Lane) { t.refiller.heads = append(t.refiller.heads, l) }

// findHeads finds the first ready tasks of lanes that a call has asked for, as far as the time of a
// refill goes. REQUIRES: the group is empty, so that disk has every task.
func (t *Tasks) findHeads() error {
	f := &t.refiller
	asked := f.heads
	slices.SortFunc(asked, func(a, b *Lane) int { return cmp.Compare(a.Number, b.Number) })
	lower, upper := keys.Range(keys.Task)
	it, err := t.store.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	begin := t.config.Elapsed()
	n := 0
	for ; n < len(asked) && (n == 0 || t.config.Elapsed()-begin < refillTime); n++ {
		if l := asked[n]; l.Queue != nil && !l.drained() && l.window.Len() == 0 && !l.exact {
			if err := t.findHead(it, l); err != nil {
				return err
			}
			f.done.Shown = append(f.done.Shown, l.Queue)
		}
	}
	f.heads = append(asked[:0], asked[n:]...)
	clear(asked[len(f.heads):])
	return nil
}

// findHead moves the position at which a lane goes on to its first ready task.
func (t *Tasks) findHead(it *pebble.Iterator, l *Lane) error {
	f := &t.refiller
	f.key = keys.AppendFrom(f.key[:0], l.Number, l.next.Since, l.next.ID)
	f.end = keys.AppendLane(f.end[:0], l.Number+1)
	at := it.SeekGEWithLimit(f.key, f.end)
	for looks := refillLooks; at == pebble.IterValid && looks > 0; at = it.NextWithLimit(f.end) {
		_, since, id, err := keys.ParseTask(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		f.done.Entries++
		if l.next = (Pos{Since: since, ID: id}); !t.config.Leased(id) {
			l.exact = true
			return nil
		}
		l.next = l.next.next()
		looks--
	}
	if err := it.Error(); err != nil {
		return store.Error(err)
	}
	if at != pebble.IterValid {
		t.completed(l)
	}
	return nil
}
