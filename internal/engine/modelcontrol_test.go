package engine

import (
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
)

// alterCall is Alter.
type alterCall struct {
	how Alteration
	id  keys.ID
	to  AlterTo
	err error
}

func (m *model) drawControl() call {
	return m.drawAlteration(oneOf(m, "how", AlterCancel, AlterPriority, AlterRunAt, AlterRedrive, AlterForget))
}

func (m *model) drawAlteration(how Alteration) call {
	c := &alterCall{how: how}
	switch how {
	case AlterCancel:
		states := [][]TaskState{{Ready}, {Scheduled}, {Blocked}, {Leased}, {Dead}, {Done, Canceled}}
		c.id = m.drawIDIn(oneOf(m, "state", states...)...)
	case AlterPriority:
		c.id, c.to.Arg = m.drawIDIn(Ready, Scheduled, Blocked), oneOf[uint64](m, "priority", 0, 5, 9)
	case AlterRunAt:
		c.id = m.drawIDIn(Ready, Scheduled, Blocked)
		if wait := oneOf[int64](m, "run at", 0, -1, 1, 1000, 8000); wait != 0 {
			c.to.Arg = m.Wall + uint64(wait)
		}
	case AlterForget:
		c.id = m.drawIDIn(oneOf(m, "state", []TaskState{Dead}, []TaskState{Done, Canceled})...)
	default:
		c.id = m.drawIDIn(Dead)
		if t := m.tasks[c.id]; t != nil && m.oneIn(2, "from a step") {
			c.to.Step = "none of its steps"
			if n := len(t.steps); n > 0 && !m.oneIn(4, "unknown") {
				c.to.Step = nameOfStep(t.steps[rapid.IntRange(0, n-1).Draw(m.rt, "step")])
			}
		}
	}
	return c
}

func (c *alterCall) do(m *model) {
	_, c.err = m.decide(keys.ShardOf(c.id, m.config.Shards), func(s *drivenShard) (Verdict, error) { return s.Alter(c.id, c.how, c.to) })
}

// refusal is the error that the call should return.
func (c *alterCall) refusal(m *model, t *modelTask) error {
	switch {
	case t == nil, c.how == AlterRedrive && t.state != Dead, c.how == AlterForget && !record.SetOf(Dead, Done, Canceled).Has(t.state):
		return base.ErrNotFound
	case c.how == AlterCancel && (t.state == Done || t.state == Canceled):
		return base.ErrNotWaiting
	case c.how == AlterCancel && m.shards[t.shard].Room > RoomScarce && m.retention(t) != 0:
		return ErrNoRoom
	case (c.how == AlterPriority || c.how == AlterRunAt) && !t.waiting():
		return base.ErrNotWaiting
	}
	return nil
}

func (c *alterCall) apply(m *model) {
	t := m.tasks[c.id]
	if t != nil && t.state == Dead && c.how == AlterRedrive && c.to.Step != "" && t.step(c.to.Step) < 0 {
		if !errors.As(c.err, new(*base.Invalid)) {
			m.rt.Fatalf("redrive of %s from %s: %v", keys.FormatID(c.id), c.to.Step, c.err)
		}
		return
	}
	if t != nil && t.state == Dead && c.how == AlterRedrive {
		if id, taken := m.holder(&t.rec); taken && id != t.id {
			if d := new(Duplicate); !errors.As(c.err, &d) || d.ID != id || d.Key != t.rec.UniqueKey {
				m.rt.Fatalf("redrive of %s, whose key %s has: %v", keys.FormatID(c.id), keys.FormatID(id), c.err)
			}
			return
		}
	}
	want := c.refusal(m, t)
	if !errors.Is(c.err, want) || want == nil && c.err != nil {
		m.rt.Fatalf("%+v of %+v: %v, expected %v", c, t, c.err, want)
	}
	if c.err == nil {
		m.alter(t, c.how, &c.to)
		m.react()
	}
}

func (m *model) alter(t *modelTask, how Alteration, to *AlterTo) {
	switch how {
	case AlterCancel:
		m.toCanceled(t)
	case AlterForget:
		switch {
		case t.state == Dead:
			m.unpin(t, 0)
			m.toGone(t)
			m.ended(t, Outcome{State: Canceled}, true)
		case t.kept != 0: // it goes with the last of its children
			t.kept = min(t.kept, m.period(t.shard))
		default:
			m.toGone(t)
		}
	case AlterPriority:
		t.Priority = uint8(to.Arg)
		if t.state == Ready {
			m.toReady(t, keys.MovedSince(keys.SinceMillis(t.since)))
		}
	case AlterRunAt:
		t.rec.RunAt = to.Arg
		switch {
		case t.state == Blocked && (t.on == onParents || to.Arg <= m.Wall):
		case to.Arg > m.Wall:
			m.toScheduled(t, to.Arg)
		default:
			m.enter(t, m.since(t.shard))
		}
	case AlterRedrive:
		if t.rec.UniqueKey != "" {
			if _, taken := m.holder(&t.rec); taken {
				m.byKey[t.rec.Unique].ended = false
			} else {
				m.takeKeyFrom(t.id, &t.rec, keys.SinceMillis(keys.SinceOf(t.id)))
			}
		}
		t.rec.Attempts, t.rec.RunAt, t.rec.Crashes, t.expired = 0, 0, 0, false
		if to.Step != "" {
			t.steps = t.steps[:t.step(to.Step)]
		}
		t.signals = slices.DeleteFunc(t.signals, func(s record.Signal) bool { return !s.Taken || !t.got(s.Name) })
		m.enter(t, m.since(t.shard))
	}
}

// bulkCall is AlterMany, of one shard.
type bulkCall struct {
	shard  int
	how    Alteration
	states record.StateSet
	ids    []keys.ID
	n      int
	failed int
	err    error
}

func (m *model) drawBulk() call {
	c := &bulkCall{shard: m.drawShard(), how: oneOf(m, "how", AlterForget, AlterRedrive, AlterPriority), states: record.SetOf(Dead)}
	queue := oneOf(m, "queue", "", "a", "b")
	switch {
	case c.how == AlterPriority && m.plain: // otherwise tasks that wait for room wake
		c.states = oneOf(m, "states", record.SetOf(Ready), record.SetOf(Ready, Scheduled, Leased))
	case c.how == AlterPriority:
		c.how, c.states = AlterForget, record.SetOf(Done, Canceled)
	}
	for _, t := range m.live {
		if t.shard == c.shard && (c.states.Has(t.state) && (queue == "" || t.Queue == queue) || m.oneIn(30, "other")) {
			c.ids = append(c.ids, t.id)
		}
	}
	if m.shards[c.shard].Room > Roomy {
		c.how, c.states = AlterForget, record.SetOf(Dead)
	}
	return c
}

func (c *bulkCall) do(m *model) {
	b := BulkAlteration{IDs: c.ids, How: c.how, States: c.states, AlterTo: AlterTo{Arg: 5}}
	_, c.err = m.decide(c.shard, func(s *drivenShard) (Verdict, error) { return s.AlterMany(&b) })
	c.n, c.failed = b.N, b.Failed
}

func (c *bulkCall) apply(m *model) {
	m.noError(c.err)
	n, failed := 0, 0
	for _, id := range c.ids {
		t := m.tasks[id]
		if t == nil || !c.states.Has(t.state) || c.how == AlterPriority && !t.waiting() {
			continue
		}
		if holder, taken := m.holder(&t.rec); c.how == AlterRedrive && taken && holder != id {
			failed++
			continue
		}
		m.alter(t, c.how, &AlterTo{Arg: 5})
		n++
	}
	if c.n != n || c.failed != failed {
		m.rt.Fatalf("altered %d tasks, refused %d, expected %d and %d", c.n, c.failed, n, failed)
	}
	m.react()
}

// releaseKeyCall is ReleaseKey.
type releaseKeyCall struct {
	of  spec
	err error
}

func (m *model) drawReleaseKey() call {
	c := &releaseKeyCall{spec{LaneKey{Queue: "a"}, record.Record{UniqueKey: "u"}}, nil}
	keyed := slices.DeleteFunc(slices.Clone(m.live), func(t *modelTask) bool { return t.rec.UniqueKey == "" })
	if len(keyed) > 0 {
		t := oneOf(m, "task", keyed...)
		c.of = spec{t.LaneKey, t.rec}
	}
	tie(&c.of.LaneKey, &c.of.rec)
	return c
}

func (c *releaseKeyCall) do(m *model) {
	_, c.err = m.decide(m.home(&c.of.rec), func(s *drivenShard) (Verdict, error) {
		return s.ReleaseKey(c.of.rec.Unique, c.of.rec.UniqueKey)
	})
}

func (c *releaseKeyCall) apply(m *model) {
	id, taken := m.holder(&c.of.rec)
	var want error
	if t := m.tasks[id]; !taken {
		want = base.ErrNotFound
	} else if t != nil && t.state < Dead && m.shards[t.shard].Room > RoomScarce {
		want = ErrNoRoom
	}
	if !errors.Is(c.err, want) || want == nil && c.err != nil {
		m.rt.Fatalf("release of key %q: %v, expected %v", c.of.rec.UniqueKey, c.err, want)
	}
	if want == nil {
		delete(m.byKey, c.of.rec.Unique)
	}
}

// configureCall sets a queue: the first shard decides, the others learn it by messages.
type configureCall struct {
	queue string
	to    record.Settings
	stale bool // of an older version
	late  bool
	err   error
}

func (m *model) drawConfigure() call {
	c := &configureCall{queue: oneOf(m, "queue", "a", "b"), stale: m.oneIn(8, "stale")}
	c.stale = c.stale && m.versionOf(c.queue) > 0
	c.to = record.Settings{
		Paused:            !m.settings[c.queue].Paused && m.oneIn(6, "paused"),
		Concurrency:       oneOf(m, "Concurrency", 0, 3), // for owners only
		ConcurrencyPerKey: oneOf(m, "ConcurrencyPerKey", 0, 1, 1, 2),
		TenantWeights:     oneOf(m, "TenantWeights", nil, map[string]int{"x": 3}, map[string]int{"": 2, "y": 4}),
		Policy: record.Policy{
			MaxAttempts: oneOf(m, "MaxAttempts", 0, 0, 1, 2, 4),
			Backoff:     oneOf(m, "Backoff", base.Backoff{}, base.Backoff{Base: time.Second, Step: 2 * time.Second, Jitter: -1}, base.Backoff{Factor: 1, Jitter: -1}),
			Retention:   oneOf(m, "Retention", 0, 0, 2*time.Second, -1),
			RetryFirst:  rapid.Bool().Draw(m.rt, "RetryFirst"),
			Timeout:     oneOf(m, "Timeout", 0, 0, time.Minute),
		},
		DeadRetention: oneOf(m, "DeadRetention", 0, 3*time.Second, time.Minute, -1),
		HoldGroups:    rapid.Bool().Draw(m.rt, "HoldGroups"),
	}
	if !m.plain { // else the model takes in deaths before they are stored
		c.to.DeadLetterQueue = oneOf(m, "DeadLetterQueue", "", "", "a", "d")
	}
	if m.oneIn(3, "none") {
		c.to = record.Settings{}
	}
	return c
}

// versionOf is the version that new settings of a queue follow.
func (m *model) versionOf(queue string) uint64 { return cmp.Or(m.versions[queue], m.removed) }

func (c *configureCall) do(m *model) {
	text, err := json.Marshal(c.to)
	m.noError(err)
	value := keys.SettingsValue{Version: m.versionOf(c.queue) + 1, JSON: text}
	if c.stale {
		value.Version--
	}
	_, c.err = m.decide(0, func(s *drivenShard) (_ Verdict, err error) {
		c.late, err = s.Configure(c.queue, value.Append(nil))
		return Decided, err
	})
}

func (c *configureCall) apply(m *model) {
	m.noError(c.err)
	if c.late != c.stale {
		m.rt.Fatalf("settings are late: %t, expected %t", c.late, c.stale)
	}
	if c.stale {
		return
	}
	c.to.TenantWeights = maps.Clone(c.to.TenantWeights)
	m.settings[c.queue] = c.to
	if m.versions[c.queue] = m.versionOf(c.queue) + 1; c.to.IsZero() {
		m.removed, m.versions[c.queue] = max(m.removed, m.versions[c.queue]), 0
		delete(m.settings, c.queue)
	}
	m.weigh()
	clear(m.passes)
}

// scheduleCall sets a schedule, or deletes it.
type scheduleCall struct {
	modelSchedule
	remove bool
	err    error
}

func (m *model) drawSchedule() call {
	c := &scheduleCall{remove: m.oneIn(2, "delete")}
	c.name = oneOf(m, "name", "s", "t")
	c.queue, c.payload = oneOf(m, "queue", "a", "c"), "tick of "+c.name
	c.every, c.missed = oneOf[uint64](m, "every", 60_000, 400_000), oneOf(m, "missed", recurrence.MissedOnce, recurrence.MissedSkip, recurrence.MissedAll)
	return c
}

func (c *scheduleCall) do(m *model) {
	_, c.err = m.decide(keys.ShardOfSchedule(c.name, m.config.Shards), func(s *drivenShard) (Verdict, error) {
		if c.remove {
			return Decided, s.Times.DeleteSchedule(c.name)
		}
		v := keys.ScheduleValue{
			Queue: c.queue, Every: c.every, Missed: c.missed, Record: (&record.Record{Payload: []byte(c.payload)}).Encode(),
		}
		times, err := recurrence.Of(&v)
		m.noError(err)
		return Decided, s.Times.SetSchedule(c.name, v, times)
	})
}

func (c *scheduleCall) apply(m *model) {
	old := m.schedules[c.name]
	if c.remove && old == nil {
		if !errors.Is(c.err, base.ErrNotFound) {
			m.rt.Fatalf("removal of schedule %q, which is not there: %v", c.name, c.err)
		}
		return
	}
	m.noError(c.err)
	if c.remove {
		delete(m.schedules, c.name)
		return
	}
	s := c.modelSchedule
	if old != nil && old.every == s.every && (old.next < m.Wall || old.next-m.Wall <= dayMillis+old.every) {
		s.start, s.after, s.last = old.start, old.after, old.last
	} else {
		s.start, s.after = m.Wall, m.Wall
	}
	s.pass(s.after)
	m.schedules[s.name] = &s
}
