package codeq

import (
	"bytes"
	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/schema"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"
	"unicode/utf8"
)

// configured is what a queue has been set to. The first shard decides in which
// order its versions follow each other; every shard keeps, and goes by, the
// newest that it has heard of.
type configured struct {
	settings *XSettings
	version  uint64 // 0: nobody has configured the queue
	value    []byte // both, as they are stored; nil: there are none
}

var unconfigured = configured{settings: new(XSettings)}

func settingsKey(queue string) []byte { return append([]byte{keys.Settings}, queue...) }

// loadSettings reads what the shard went by before the queue was closed.
// REQUIRES: the counts are loaded.
func (s *state) loadSettings() error {
	return schema.Scan(s.store.DB(), keys.Settings, func(key, value []byte) error {
		c, err := parseSettings(bytes.Clone(value))
		if err != nil {
			return fmt.Errorf("%w: settings of queue %q: %w", base.ErrCorrupt, key[1:], err)
		}
		s.goBy(s.queue(string(key[1:])), c, false)
		return nil
	})
}

// parseSettings reads settings as they are stored, or sent. It keeps b.
func parseSettings(b []byte) (configured, error) {
	v, err := keys.ParseSettings(b)
	if err != nil {
		return configured{}, err
	}
	set := new(XSettings)
	if err := json.Unmarshal(v.JSON, set); err != nil {
		return configured{}, err
	}
	if err := set.Check(); err != nil {
		return configured{}, err
	}
	return configured{settings: set, version: v.Version, value: b}, nil
}

func (s *state) adoptValue(queue string, value []byte) error {
	c, err := parseSettings(value)
	if err != nil {
		return fmt.Errorf("settings of queue %q: %w", queue, err)
	}
	s.adopt(queue, c, true)
	return nil
}

// adopt has the shard go by settings of a queue, and keep them, unless it has
// newer ones. Fresh is as for gate.set.
func (s *state) adopt(queue string, c configured, fresh bool) {
	q := s.queue(queue)
	if c.version <= q.version {
		return
	}
	s.group.set(settingsKey(queue), c.value)
	s.goBy(q, c, fresh)
}

// goBy puts settings of a queue into force.
func (s *state) goBy(q *queueState, c configured, fresh bool) {
	before := q.settings
	if q.version == 0 {
		s.settled.Append(q)
	}
	q.configured = c
	if before.ConcurrencyPerKey != c.settings.ConcurrencyPerKey {
		s.recheck(q)
	}
	s.effects.configured = append(s.effects.configured, reconfigured{q, before, fresh})
}

// XSettings are those of a queue, as it is set to work.
type XSettings struct {
	Paused            bool           `json:",omitzero"`
	Concurrency       int            `json:",omitzero"`
	ConcurrencyPerKey int            `json:",omitzero"`
	Rate              float64        `json:",omitzero"`
	Burst             int            `json:",omitzero"`
	TenantWeights     map[string]int `json:",omitempty"`
	Retention         time.Duration  `json:",omitzero"`
	DeadRetention     time.Duration  `json:",omitzero"`
	HoldGroups        bool           `json:",omitzero"`
}

// XInvalid says which setting cannot be.
type XInvalid struct {
	Field string
	Value any
	Limit string // what is allowed
}

func (e *XInvalid) Error() string {
	return fmt.Sprintf("invalid %s: %v (allowed: %s)", e.Field, e.Value, e.Limit)
}

// XMaxWeight keeps the sum of the weights of any list of queues in an int.
const XMaxWeight = 1 << 16

// Check refuses settings that cannot be, by an *XInvalid.
func (s *XSettings) Check() error {
	for _, f := range []struct {
		field string
		value int
	}{
		{"Settings.Concurrency", s.Concurrency},
		{"Settings.ConcurrencyPerKey", s.ConcurrencyPerKey},
		{"Settings.Burst", s.Burst},
	} {
		if f.value < 0 || f.value > math.MaxInt32 {
			return &XInvalid{f.field, f.value, "0 to 2^31-1"}
		}
	}
	if !(s.Rate >= 0 && s.Rate <= 1e9) {
		return &XInvalid{"Settings.Rate", s.Rate, "0 to 1e9"}
	}
	for tenant, w := range s.TenantWeights {
		if !utf8.ValidString(tenant) { // they are stored as JSON
			return &XInvalid{"Settings.TenantWeights", strconv.Quote(tenant), "names in UTF-8"}
		}
		if w < 1 || w > XMaxWeight {
			return &XInvalid{"Settings.TenantWeights of " + tenant, w, fmt.Sprint("1 to ", XMaxWeight)}
		}
	}
	for _, f := range []struct {
		field string
		value time.Duration
	}{{"Settings.Retention", s.Retention}, {"Settings.DeadRetention", s.DeadRetention}} {
		if f.value < 0 && f.value != forever {
			return &XInvalid{f.field, f.value, "0 or more, or Forever"}
		}
	}
	return nil
}

// forever is a retention without end.
const forever time.Duration = -1

// weight is how many claims in a row a tenant gets.
func (s *XSettings) weight(tenant string) int {
	if s.TenantWeights == nil {
		return 1
	}
	return max(1, s.TenantWeights[tenant])
}
