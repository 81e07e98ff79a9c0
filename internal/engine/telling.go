package engine

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// childNotices tells the children of a task that the task has ended. The commit of the end tells
// the first of many children, and later groups tell the others. Until all are told, the range
// Telling has how the task ended, and every operation on the task waits: a dead letter that is
// redriven may end in another way.
type childNotices struct {
	ends  idCache[byte] // by parent, the range (Dead, Done or Canceled) of its end
	count int           // entries in the range, as the group changes it

	parent keys.ID // the last group told some of its children, but not all; zero: none
	from   []byte  // key of its next child
	next   []byte  // the search for the next parent begins here
}

// TellAtOnce is how many children are told in the commit of the end, at most: large ones are left
// to later groups.
const TellAtOnce = 16

// load counts the tasks with children that are not told yet.
func (t *childNotices) load(r pebble.Reader) error {
	t.count = 0
	return store.Scan(r, keys.Telling, func([]byte, []byte) error {
		t.count++
		return nil
	})
}

// isTelling reports whether some children of a task are not told yet that it has ended.
func (ti *ties) isTelling(id keys.ID) bool {
	if ti.notices.count == 0 {
		return false
	}
	_, ok := ti.notices.ends.Get(id)
	return ok
}

func (ti *ties) tellIsDue() bool { return ti.notices.count > 0 }

// nextToTell finds the next parent with children that are not told yet. It returns false if this
// group has added all such parents, and disk does not have them yet. If there are none at all the
// shard fails, because the owner would look for them for ever.
func (ti *ties) nextToTell() bool {
	t := &ti.notices
	lower, upper := keys.Range(keys.Telling)
	starts := [][]byte{t.next, lower}
	if t.next == nil {
		starts = starts[1:]
	}
	for _, from := range starts {
		err := ti.Walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
			parent, _, err := keys.ParseTelling(it.Key(), it.Value())
			if err != nil {
				return false, err
			}
			if _, ok := t.ends.Get(parent); !ok { // this group has told all of its children
				return true, nil
			}
			t.parent, t.from = parent, keys.AppendDependent(nil, parent, keys.ID{})
			return false, nil
		})
		if err != nil {
			ti.Broken = err
		}
		if ti.Broken != nil || t.parent != (keys.ID{}) {
			return ti.Broken == nil
		}
	}
	if !t.ends.HasChanges() {
		ti.Broken = fmt.Errorf("%w: %d ends are to be told to children, and none is stored", base.ErrCorrupt, t.count)
	}
	return false
}
