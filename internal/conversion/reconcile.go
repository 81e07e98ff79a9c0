package conversion

import (
	"bytes"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/schema"
	"codeq/internal/store"
)

// Reconcile makes the stores of all shards of a queue agree with each other: when a queue by itself
// is opened, and before a cluster begins from them. They may be of different moments: each lacks
// what a power loss, or a lost majority, has taken from it.
//
// A shard may have taken more messages of another one than that one knows to have sent. The sender
// goes on behind their numbers, or else the receiver would drop the next ones as those that it has
// taken. Each queue gets its latest settings in all shards: the first shard accepts only such as
// follow its own, and the others only later ones than theirs.
//
// Nobody may use the stores meanwhile. Reconcile can be repeated. What it changes is durable when
// it returns.
func Reconcile(stores []*store.Store) error {
	sent, taken := make([]map[int]uint64, len(stores)), make([]map[int]uint64, len(stores))
	versions, latest := make([]map[string]uint64, len(stores)), make(map[string]stored) // of settings
	for i, st := range stores {
		if err := st.Read(func() (err error) {
			if sent[i], err = numbersOf(st, keys.Sent, len(stores)); err != nil {
				return err
			}
			if taken[i], err = numbersOf(st, keys.Inbound, len(stores)); err != nil {
				return err
			}
			versions[i], err = settingsOf(st, latest)
			return err
		}); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	for i, st := range stores {
		var behind []entry
		for to := range stores {
			if last := taken[to][i]; last > sent[i][to] {
				behind = append(behind, entry{keys.AppendNumbered(nil, keys.Sent, uint32(to)), keys.AppendNumber(nil, last)})
			}
		}
		for queue, v := range latest {
			if v.version > versions[i][queue] {
				behind = append(behind, entry{append([]byte{keys.Settings}, queue...), v.value})
			}
		}
		if len(behind) == 0 {
			continue
		}
		if err := convert(st, func(b *pebble.Batch) error {
			for _, e := range behind {
				_ = b.Set(e.key, e.value, nil) // fails for indexed batches only
			}
			return nil
		}); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	return nil
}

type entry struct{ key, value []byte }

// stored is the settings of a queue.
type stored struct {
	version uint64
	value   []byte
}

// numbersOf reads the numbers of the last messages to, or from, each of some shards.
func numbersOf(st *store.Store, kind byte, shards int) (map[int]uint64, error) {
	numbers := make(map[int]uint64)
	return numbers, schema.Scan(st.DB(), kind, func(key, value []byte) error {
		shard, err := keys.ParseNumbered(key)
		last, bad := keys.ParseNumber(value)
		if err != nil || bad != nil || int(shard) >= shards {
			return fmt.Errorf("%w: last message number %x has value %x", base.ErrCorrupt, key, value)
		}
		numbers[int(shard)] = last
		return nil
	})
}

// settingsOf reads the versions of the settings of all queues, and adds those that are later to the
// latest.
func settingsOf(st *store.Store, latest map[string]stored) (map[string]uint64, error) {
	versions := make(map[string]uint64)
	return versions, schema.Scan(st.DB(), keys.Settings, func(key, value []byte) error {
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
