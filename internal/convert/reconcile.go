package convert

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Reconcile makes the stores of all shards of a queue agree with each other: when a standalone
// queue is opened, and before a cluster begins from them.
//
// A receiver may have taken more messages than their sender has stored. The sender continues after
// their numbers, or else the receiver would drop the next ones as taken. Each queue gets its latest
// settings in all shards: the first shard accepts only such as follow its own, and the others only
// later ones than theirs.
//
// A power loss, or a lost majority, may have taken different last groups from the stores, and a
// rebuilt store lacks what could not be read. If so (differ), the entries about tasks that wait for
// each other are derived from the records: see Crosscheck. This reads all tasks that wait. The log
// gets the losses that cannot be derived, and the number of corrections.
//
// REQUIRES: the stores are not in use. Reconcile can be repeated. Its changes are durable when it
// returns.
func Reconcile(stores []*store.Store, differ bool, log *slog.Logger) error {
	readers := make([]pebble.Reader, len(stores))
	for i, st := range stores {
		readers[i] = st.DB()
	}
	c := newCrosscheck(readers)
	for _, st := range stores {
		f := &fix{st: st, b: st.DB().NewBatch()}
		defer func() { _ = f.b.Close() }() // it does no more than to recycle memory
		c.fixes = append(c.fixes, f)
	}
	err := readAll(stores, func() error { return errors.Join(c.run(differ), c.settings()) })
	for i, f := range c.fixes {
		if err == nil {
			if err = f.end(); err != nil {
				err = fmt.Errorf("shard %d: %w", i, err)
			}
		}
	}
	for _, m := range c.found {
		log.Warn("a shard lacks what others have sent to it", "shard", m.Shard, "what", m.Text)
	}
	if c.corrected > 0 {
		log.Warn("shards did not agree; entries about tasks that wait for each other were corrected", "entries", c.corrected)
	}
	return err
}

// readAll calls a function that reads stores which are not known to be sound.
func readAll(stores []*store.Store, do func() error) error {
	if len(stores) == 0 {
		return do()
	}
	return stores[0].Read(func() error { return readAll(stores[1:], do) })
}

// fix collects changes of a store.
type fix struct {
	st      *store.Store
	b       *pebble.Batch
	changed bool
}

// fixBytes is how much is written in one batch: changes that belong together are in one.
const fixBytes = 1 << 20

// fix changes the store of a shard; Crosscheck changes nothing.
func (c *crosscheck) fix(shard int, change func(f *fix)) error {
	if c.fixes == nil {
		return nil
	}
	f := c.fixes[shard]
	change(f)
	f.changed = true
	if f.b.Len() < fixBytes {
		return nil
	}
	return f.commit()
}

func (f *fix) set(key, value []byte) { _ = f.b.Set(key, value, nil) } // fails for indexed batches only
func (f *fix) delete(key []byte)     { _ = f.b.Delete(key, nil) }

// number stores the number of the last message to, or from, a shard.
func (f *fix) number(kind byte, shard int, last uint64) {
	f.set(keys.AppendNumbered(nil, kind, uint32(shard)), keys.AppendNumber(nil, last))
}

func (f *fix) commit() error {
	err := f.st.Commit(f.b)
	f.b.Reset()
	return err
}

// end makes the changes durable, at every level of durability.
func (f *fix) end() error {
	if !f.changed {
		return nil
	}
	if err := f.commit(); err != nil {
		return err
	}
	return f.st.Flush(context.Background())
}

// stored is the settings of a queue.
type stored struct {
	version uint64
	value   []byte
}

// settings gives all shards the latest settings of each queue.
func (c *crosscheck) settings() error {
	versions, latest := make([]map[string]uint64, len(c.shards)), make(map[string]stored)
	for i, r := range c.shards {
		var err error
		if versions[i], err = settingsOf(r, latest); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	for i := range c.shards {
		for queue, v := range latest {
			if removed(versions, queue, v.version) {
				if versions[i][queue] > 0 {
					if err := c.fix(i, func(f *fix) { f.delete(append([]byte{keys.Settings}, queue...)) }); err != nil {
						return err
					}
				}
				continue
			}
			if v.version > versions[i][queue] {
				if err := c.fix(i, func(f *fix) { f.set(append([]byte{keys.Settings}, queue...), v.value) }); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// removed reports whether a shard has removed the latest settings of a queue that another shard
// still has: it has none, and has removed settings of that version or a later one. versions has the
// versions of each shard; the last removed one has the name "".
func removed(versions []map[string]uint64, queue string, latest uint64) bool {
	return queue != "" && slices.ContainsFunc(versions, func(of map[string]uint64) bool {
		return of[queue] == 0 && of[""] >= latest
	})
}

// settingsOf reads the versions of the settings of all queues, and adds those that are later to the
// latest.
func settingsOf(r pebble.Reader, latest map[string]stored) (map[string]uint64, error) {
	versions := make(map[string]uint64)
	return versions, store.Scan(r, keys.Settings, func(key, value []byte) error {
		v, err := keys.ParseSettings(value)
		if err != nil {
			return fmt.Errorf("%w: settings of queue %q: %w", base.ErrCorrupt, key[1:], err)
		}
		queue := string(key[1:])
		versions[queue] = v.Version
		if v.Version > latest[queue].version {
			latest[queue] = stored{v.Version, bytes.Clone(value)}
		}
		return nil
	})
}
