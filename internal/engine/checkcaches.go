package engine

import (
	"errors"

	"codeq/internal/store"
)

// caches: what they hold of keys, groups and parents is as on disk, and nothing is missing that
// they should hold.
func (c *checker) caches() error {
	s := c.state
	return errors.Join(
		checkCache(c, "idempotency key", &s.Ties.uniques),
		checkCache(c, "group", &s.Ties.turns),
		checkCache(c, "number of parents", &s.Ties.pending),
		checkCache(c, "end being told", &s.Ties.notices.ends),
		checkCache(c, "number of pins", &s.Ties.pins.counts),
	)
}

func checkCache[K, V comparable](c *checker, what string, m *writeBackCache[K, V]) error {
	onDisk := make(map[K]V)
	err := store.Scan(c.disk, m.prefix, func(key, value []byte) error {
		k, v, err := m.parse(key, value)
		onDisk[k] = v
		return err
	})
	if len(m.changed) > 0 {
		c.report("%d changes of %s are not stored", len(m.changed), what)
	}
	listed := 0
	for k := range onDisk {
		if !m.isListed(k) {
			continue
		}
		if listed++; !m.prints.Has(m.print(k)) {
			c.report("%s %v is on disk, and its fingerprint is missing", what, k)
		}
	}
	if n := m.prints.Len(); n != listed {
		c.report("%s: %d fingerprints of %d entries", what, n, listed)
	}
	for k, e := range m.held {
		v, ok := onDisk[k]
		if e.present != ok || (e.stored > 0) != ok || ok && e.value != v || e.changed {
			c.report("%s %v is held as %+v, on disk: %t, %+v", what, k, e, ok, v)
		}
		delete(onDisk, k)
	}
	if len(m.held) > m.most() {
		c.report("%d entries of %s are held", len(m.held), what)
	}
	if m.whole && len(onDisk) > 0 {
		c.report("%s is not held: %+v", what, onDisk)
	}
	return err
}
