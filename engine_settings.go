package codeq

import (
	"bytes"
	"codeq/internal/keys"
	"codeq/internal/schema"
	"encoding/json"
	"fmt"
)

// configured is what a queue has been set to. The first shard decides in which
// order its versions follow each other; every shard keeps, and goes by, the
// newest that it has heard of.
type configured struct {
	settings *Settings
	version  uint64 // 0: nobody has configured the queue
	value    []byte // both, as they are stored; nil: there are none
}

var unconfigured = configured{settings: new(Settings)}

func settingsKey(queue string) []byte { return append([]byte{keys.Settings}, queue...) }

// loadSettings reads what the shard went by before the queue was closed.
// REQUIRES: the counts are loaded.
func (s *state) loadSettings() error {
	return schema.Scan(s.store.DB(), keys.Settings, func(key, value []byte) error {
		c, err := parseSettings(bytes.Clone(value))
		if err != nil {
			return fmt.Errorf("%w: settings of queue %q: %w", ErrCorrupt, key[1:], err)
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
	set := new(Settings)
	if err := json.Unmarshal(v.JSON, set); err != nil {
		return configured{}, err
	}
	if err := set.check(); err != nil {
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
