package codeq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"strconv"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// Settings of a queue are stored with it, and may change while it runs. The
// zero Settings are those of a queue that nobody has configured.
type Settings struct {
	// Paused: nothing is claimed from the queue. Tasks in workers' hands, and
	// produces, go on.
	Paused bool `json:",omitzero"`
	// Concurrency is how many tasks of the queue may be leased at the same
	// time. 0: no limit. Lowering it takes no lease away.
	Concurrency int `json:",omitzero"`
	// ConcurrencyPerKey is the same for the tasks of each Task.LimitKey.
	ConcurrencyPerKey int `json:",omitzero"`
	// Rate is how many tasks a second may be claimed from the queue, on
	// average; 0: any number. It is the rate of a token bucket
	// (golang.org/x/time/rate) that is empty after Open.
	Rate float64 `json:",omitzero"`
	// Burst is how many tasks may be claimed at once after a lull, while Rate
	// is set. 0: Rate, rounded up. The queue looks at the clock once a millisecond,
	// so that a Burst below Rate/1000 lowers the rate.
	Burst int `json:",omitzero"`
	// TenantWeights are how many claims in a row the tenants get when it is
	// their turn. Those that are not named have weight 1.
	TenantWeights map[string]int `json:",omitempty"`
	// Retention is how long completed and canceled tasks are kept that do not
	// say. 0: Options.Retention; Forever: without end.
	Retention time.Duration `json:",omitzero"`
	// DeadRetention is how long dead letters are kept. 0 or Forever: until they
	// are redriven, purged or canceled. Dead letters that other tasks wait for
	// are kept in any case.
	DeadRetention time.Duration `json:",omitzero"`
}

func (s *Settings) check() error {
	for _, f := range []struct {
		field string
		value int
	}{
		{"Settings.Concurrency", s.Concurrency},
		{"Settings.ConcurrencyPerKey", s.ConcurrencyPerKey},
		{"Settings.Burst", s.Burst},
	} {
		if f.value < 0 || f.value > math.MaxInt32 {
			return &InvalidError{f.field, f.value, "0 to 2^31-1"}
		}
	}
	if !(s.Rate >= 0 && s.Rate <= 1e9) {
		return &InvalidError{"Settings.Rate", s.Rate, "0 to 1e9"}
	}
	for tenant, w := range s.TenantWeights {
		if !utf8.ValidString(tenant) { // they are stored as JSON
			return &InvalidError{"Settings.TenantWeights", strconv.Quote(tenant), "names in UTF-8"}
		}
		if w < 1 || w > maxWeight {
			return &InvalidError{"Settings.TenantWeights of " + tenant, w, fmt.Sprint("1 to ", maxWeight)}
		}
	}
	for _, f := range []struct {
		field string
		value time.Duration
	}{{"Settings.Retention", s.Retention}, {"Settings.DeadRetention", s.DeadRetention}} {
		if f.value < 0 && f.value != Forever {
			return &InvalidError{f.field, f.value, "0 or more, or Forever"}
		}
	}
	return nil
}

func (s *Settings) burst() int {
	if s.Burst > 0 {
		return s.Burst
	}
	return max(1, int(math.Ceil(s.Rate)))
}

// weight is how many claims in a row a tenant gets.
func (s *Settings) weight(tenant string) int {
	if s.TenantWeights == nil {
		return 1
	}
	return max(1, s.TenantWeights[tenant])
}

// clone returns Settings that share nothing with s.
func (s *Settings) clone() *Settings {
	c := *s
	c.TenantWeights = maps.Clone(s.TenantWeights)
	return &c
}

// Settings returns those of a queue.
func (q *Queue) Settings(queue string) (Settings, error) {
	if err := q.checkQueue(queue); err != nil {
		return Settings{}, err
	}
	return *q.settings.of(queue).clone(), nil
}

func (q *Queue) checkQueue(name string) error {
	if name == "" {
		return &InvalidError{"queue", `""`, "a name"}
	}
	return checkName("queue", name, q.opts.Limits.Name)
}

// Configure changes the settings of a queue, which need not exist yet. change
// gets the present ones and alters what it likes; calls of Configure take turns.
// When Configure returns, the settings are stored and in force in all shards.
// ctx is heeded until the first commit.
func (q *Queue) Configure(ctx context.Context, queue string, change func(*Settings)) error {
	if err := q.checkQueue(queue); err != nil {
		return err
	}
	select {
	case q.configuring <- struct{}{}:
		defer func() { <-q.configuring }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	next := q.settings.of(queue).clone()
	change(next)
	next = next.clone() // change may have kept what it got
	if err := next.check(); err != nil {
		return err
	}
	value, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	ctx = context.WithoutCancel(ctx)
	store := &storeOp{completion: newCompletion(), key: settingsKey(queue), value: value}
	if _, err := q.shard(0).do(ctx, store, &store.completion); err != nil {
		return err
	}
	c := q.settings.publish(queue, next)
	if c.gate != nil {
		c.gate.set(next, true, time.Now())
	}
	var errs []error
	for i := range q.replicas {
		op := &configureOp{completion: newCompletion(), queue: queue, to: c}
		_, err := q.shard(i).do(ctx, op, &op.completion)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Pause has no task of the queue claimed until Resume.
func (q *Queue) Pause(ctx context.Context, queue string) error {
	return q.Configure(ctx, queue, func(s *Settings) { s.Paused = true })
}

// Resume ends a Pause.
func (q *Queue) Resume(ctx context.Context, queue string) error {
	return q.Configure(ctx, queue, func(s *Settings) { s.Paused = false })
}

// settingsTable is the settings of all queues that have been configured. The
// first shard stores them; every shard reads the same table.
//
// Invariant: a map that is published does not change; who holds
// Queue.configuring publishes the next one.
type settingsTable struct {
	byQueue atomic.Pointer[map[string]*configured]
}

// configured is what a queue has been set to.
type configured struct {
	settings *Settings
	gate     *gate // nil: never needed
}

var unconfigured Settings

func newSettingsTable() *settingsTable {
	t := new(settingsTable)
	t.byQueue.Store(&map[string]*configured{})
	return t
}

func (t *settingsTable) of(queue string) *Settings {
	if c := (*t.byQueue.Load())[queue]; c != nil {
		return c.settings
	}
	return &unconfigured
}

// publish enters the settings of a queue. Its gate stays the same.
func (t *settingsTable) publish(queue string, set *Settings) *configured {
	next := maps.Clone(*t.byQueue.Load())
	c := &configured{settings: set}
	if old := next[queue]; old != nil {
		c.gate = old.gate
	}
	if c.gate == nil && (set.Concurrency > 0 || set.Rate > 0) {
		c.gate = new(gate)
	}
	next[queue] = c
	t.byQueue.Store(&next)
	return c
}

func settingsKey(queue string) []byte { return append([]byte{keys.Settings}, queue...) }

// load reads the settings from the first shard, before any shard runs.
func (t *settingsTable) load(r pebble.Reader) error {
	now := time.Now()
	return scan(r, keys.Settings, func(key, value []byte) error {
		set := new(Settings)
		err := json.Unmarshal(value, set)
		if err == nil {
			err = set.check()
		}
		if err != nil {
			return fmt.Errorf("%w: settings of queue %q: %w", ErrCorrupt, key[1:], err)
		}
		if c := t.publish(string(key[1:]), set); c.gate != nil {
			c.gate.set(set, false, now)
		}
		return nil
	})
}

// storeOp stores a value whose key nothing else in the shard depends on.
type storeOp struct {
	completion
	key, value []byte
}

func (op *storeOp) resolve(s *shard) {
	s.settle(op)
	s.group.set(op.key, op.value)
}

// configureOp has a shard go by new settings of a queue.
type configureOp struct {
	completion
	queue string
	to    *configured
}

func (op *configureOp) resolve(s *shard) {
	s.settle(op)
	s.configure(s.queue(op.queue), op.to)
}

// configure has the shard go by new settings of a queue.
func (s *shard) configure(q *queueState, to *configured) {
	before := q.settings
	q.settings = to.settings
	if q.gate == nil && to.gate != nil {
		q.gate = to.gate
		q.gate.leave(-int(q.counts.Leased))
	}
	if before.ConcurrencyPerKey != to.settings.ConcurrencyPerKey {
		s.recheck(q)
	}
	s.feed(q)
}
