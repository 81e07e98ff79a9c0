package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// Configured is the settings of a queue. The first shard decides the order of their versions; every
// shard keeps and applies the newest version that it has received.
//
// Settings without a value are those of a queue that was never configured, and are not kept: when
// the first shard decides on them, it removes its entry, and so does every other shard when it has
// the message. A late call of Adopt must not bring older settings back then. So a shard remembers
// the largest version that it has removed, State.Given, and settings of a queue without an entry
// have to exceed that. Messages come in the order of the first shard's decisions, and that shard's
// versions begin after its own Given: so newer settings are never refused. Calls of Adopt come in
// any order: by them, settings without a value are kept, but not shown, until the message comes.
type Configured struct {
	Settings *record.Settings
	Version  uint64 // 0: there are none
	Value    []byte // both, as stored; nil: there are none
}

var unconfigured = Configured{Settings: new(record.Settings)}

// hasSettings reports whether the queue has settings other than the default.
func (c *Configured) hasSettings() bool { return c.Version > 0 && !c.Settings.IsZero() }

// loadSettings reads the settings that the shard has stored.
// REQUIRES: the counts are loaded.
func (ns *names) loadSettings() error {
	return store.Scan(ns.Store.DB(), keys.Settings, func(key, value []byte) error {
		c, err := ParseSettings(bytes.Clone(value))
		if err != nil {
			return fmt.Errorf("%w: settings of queue %q: %w", base.ErrCorrupt, key[1:], err)
		}
		if len(key) == 1 {
			ns.Given = c.Version
			return nil
		}
		ns.applySettings(ns.QueueNamed(string(key[1:])), c, false)
		return nil
	})
}

// ParseSettings reads settings as they are stored, or sent. It keeps b.
func ParseSettings(b []byte) (Configured, error) {
	v, err := keys.ParseSettings(b)
	if err != nil {
		return Configured{}, err
	}
	set := new(record.Settings)
	if err := json.Unmarshal(v.JSON, set); err != nil {
		return Configured{}, err
	}
	if err := set.Check(); err != nil {
		return Configured{}, err
	}
	return Configured{Settings: set, Version: v.Version, Value: b}, nil
}

// Adopt stores and applies settings of a queue that the first shard has sent, unless the shard has
// newer ones.
func (ns *names) Adopt(queue string, value []byte) error {
	c, err := ParseSettings(value)
	if err != nil {
		return fmt.Errorf("settings of queue %q: %w", queue, err)
	}
	ns.adopt(queue, c)
	return nil
}

// adopt stores and applies settings of a queue, unless the shard has newer ones.
func (ns *names) adopt(queue string, c Configured) {
	if c.Version <= ns.versionOf(queue) {
		return
	}
	ns.Group.Set(keys.AppendNamed(nil, keys.Settings, queue), c.Value)
	q := ns.QueueNamed(queue)
	if ns.applySettings(q, c, true); bytes.HasSuffix(c.Value, keys.DeleteQueue) {
		q.changed = 0 // Info does not show it any more
	}
}

// versionOf returns the version that new settings of a queue have to exceed.
func (ns *names) versionOf(queue string) uint64 {
	if q := ns.Queues[queue]; q != nil && q.Version > 0 {
		return q.Version
	}
	return ns.Given
}

// adoptSent is Adopt for a message of the first shard.
func (ns *names) adoptSent(queue string, value []byte) error {
	if v, err := keys.ParseSettings(value); err == nil && v.IsNone() {
		ns.removeSettings(queue, v)
		return nil
	}
	return ns.Adopt(queue, value)
}

// removeSettings removes the settings of a queue, unless they are newer than a version.
func (ns *names) removeSettings(queue string, none keys.SettingsValue) {
	if q := ns.Queues[queue]; q != nil {
		if q.Version > 0 && q.Version <= none.Version {
			ns.Group.Delete(keys.AppendNamed(nil, keys.Settings, queue))
			q.Removed = none.Version
			ns.applySettings(q, unconfigured, true)
		}
		if bytes.Equal(none.JSON, keys.QueueIsGone) {
			q.changed = 0
		}
		ns.Rest(q)
	}
	if none.Version > ns.Given {
		ns.Given = none.Version
		ns.Group.Set(keys.GivenKey(), keys.SettingsValue{Version: ns.Given, JSON: keys.GivenSettings}.Append(nil))
	}
}

// applySettings makes the shard use settings of a queue. afterOpen is Reconfigured.AfterOpen.
func (ns *names) applySettings(q *Queue, c Configured, afterOpen bool) {
	before := q.Settings
	switch {
	case q.Version == 0:
		q.settledAt = ns.settled.Put(q)
	case c.Version == 0:
		ns.settled.Empty(q.settledAt)
	}
	q.Configured, q.timeout = c, record.Millis(c.Settings.Timeout)
	if afterOpen {
		ns.followRate(q, before)
	}
	ns.renewWeights(q, before.TenantWeights)
	if before.ConcurrencyPerKey != c.Settings.ConcurrencyPerKey {
		ns.recheck(q)
	}
	ns.Effects.Configured = append(ns.Effects.Configured, Reconfigured{q, afterOpen})
}

// A queue that has a rate remembers when its last task was leased, by the clock of periods, so that
// the rate goes on after a restart or with another leader. It is stored with the lease, at most
// once in grantEvery. Queues without a rate have no such entry.

const (
	// grantEvery is how long after a stored grant others are not stored, ms.
	grantEvery = 1000
	// noGrant is stored when a queue gets a rate: no task was leased since.
	noGrant = 0
)

// noteGrant is called for a lease of a queue that has a rate.
func (ns *names) noteGrant(q *Queue) {
	if now := ns.periods.Now; q.granted == noGrant || now-q.granted >= grantEvery {
		ns.storeGrant(q, now)
	}
}

func (ns *names) storeGrant(q *Queue, at uint64) {
	ns.periods.Made = true
	q.granted = at
	ns.Group.Set(keys.AppendNamed(nil, keys.Granted, q.Name), keys.AppendNumber(ns.value[:0], at))
}

// SinceGrant returns how long ago the last lease of a queue was that is stored, ms; Never: there
// was none since it has its rate.
func (ns *names) SinceGrant(q *Queue) uint64 {
	if q.granted == noGrant {
		return Never
	}
	return ns.periods.Now - min(q.granted, ns.periods.Now)
}

// followRate is called when the settings of a queue have changed.
func (ns *names) followRate(q *Queue, before *record.Settings) {
	switch has := q.Settings.Rate > 0; {
	case has == (before.Rate > 0):
	case has:
		ns.storeGrant(q, noGrant)
	default:
		q.granted = noGrant
		ns.Group.Delete(keys.AppendNamed(nil, keys.Granted, q.Name))
	}
}

// loadGrants reads the last grants. A queue that has a rate and no entry may have had one right
// now.
// REQUIRES: the settings are loaded, and the clock of periods is set.
func (ns *names) loadGrants() error {
	for _, q := range ns.settled.All() {
		if q != nil && q.Settings.Rate > 0 {
			q.granted = ns.periods.Now
		}
	}
	return store.Scan(ns.Store.DB(), keys.Granted, func(key, value []byte) error {
		at, err := keys.ParseNumber(bytes.Clone(value))
		if err != nil {
			return fmt.Errorf("%w: last grant of queue %q: %w", base.ErrCorrupt, key[1:], err)
		}
		if q := ns.Queues[string(key[1:])]; q != nil && q.Settings.Rate > 0 {
			q.granted = min(at, ns.periods.Now)
		}
		return nil
	})
}

// tenantTable counts in how many shards of a process tenants have turns. It is for concurrent use.
type tenantTable interface {
	// Hold returns the count of a queue, tenant and priority: one for all shards, until Drop.
	Hold(q *Queue, tenant string, priority uint8) *atomic.Int32
	Drop(q *Queue, tenant string, priority uint8)
}

// renewWeights is called when the weights of a queue's tenants have changed.
func (ns *names) renewWeights(q *Queue, before map[string]int) {
	if q.lanes.Len() == 0 || maps.Equal(before, q.Settings.TenantWeights) {
		return
	}
	for _, weights := range []map[string]int{before, q.Settings.TenantWeights} {
		for tenant := range weights {
			for p := range uint8(maxPriority + 1) {
				if l := q.lane(tenant, p); l != nil {
					ns.ready.Weigh(&l.tasks, q.Settings.Weight(tenant))
				}
			}
		}
	}
}
