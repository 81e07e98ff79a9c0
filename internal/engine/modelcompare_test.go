package engine

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// The comparison of the shards with the model.

// settle compares the reports of the shards, counts turns, and checks that no task waits without a
// reason. Not strict: the shards have decided several calls together, in an unknown order.
func (m *model) settle(strict bool) {
	isLimited := func(s record.Settings) bool { return s.ConcurrencyPerKey > 0 }
	if len(m.orphans) > 0 || m.claimed && slices.ContainsFunc(slices.Collect(maps.Values(m.settings)), isLimited) || slices.ContainsFunc(m.live, (*modelTask).isParked) {
		m.adoptParks()
	}
	m.claimed = false
	m.countTurns(strict && !m.isSmall())
	for _, t := range m.live {
		t.late = false
	}
	slices.Sort(m.told)
	slices.Sort(m.expected)
	if !slices.Equal(m.told, m.expected) {
		m.rt.Fatalf("told are\n%s\nexpected\n%s", strings.Join(m.told, "\n"), strings.Join(m.expected, "\n"))
	}
	m.told, m.expected = m.told[:0], m.expected[:0]
}

// compare compares all tasks at each k-th step, and one task at the other steps.
func (m *model) compare(*rapid.T) {
	m.compareOutcome()
	if m.steps++; m.steps%*modelEvery == 0 {
		m.compareAll()
	}
}

func (m *model) compareAll() {
	m.compareTasks()
	m.compareCounts()
	m.compareSettings()
	m.comparePlaces()
	m.compareSchedules()
	m.compareIdle()
	m.compareOrphans()
	for n, s := range m.shards {
		if s.under || !s.isAtRest() {
			m.rt.Fatalf("shard %d is not at rest", n)
		}
		m.noError(m.check(s))
	}
}

// compareOrphans checks that each queue counts the handlers that go on without a lease.
func (m *model) compareOrphans() {
	want, got := make(map[string]int), make(map[string]int)
	for _, o := range m.orphans {
		want[o.queue]++
	}
	for _, s := range m.shards {
		for name, q := range s.Names.Queues {
			if q.Orphans != 0 {
				got[name] += q.Orphans
			}
		}
	}
	if !maps.Equal(want, got) {
		m.rt.Fatalf("orphans by queue are %v, expected %v", got, want)
	}
}

// eachStored visits all tasks of all shards.
func (m *model) eachStored(visit func(*store.Task)) {
	for _, s := range m.shards {
		db := s.Store.DB()
		view := store.NewSnapshot(db)
		for _, prefix := range []byte{keys.Task, keys.Scheduled, keys.Blocked, keys.Dead, keys.Done, keys.Canceled} {
			m.noError(store.Scan(db, prefix, func(key, value []byte) error {
				id, p, err := keys.ParsePlaceKey(key)
				if err != nil {
					return err
				}
				t, err := view.Task(id, p, value)
				if err == nil {
					visit(t)
				}
				return err
			}))
		}
	}
}

func (m *model) compareTasks() {
	found := 0
	m.eachStored(func(got *store.Task) {
		t := m.tasks[got.ID]
		if t == nil {
			m.rt.Fatalf("unexpected task %s, %v: %+v", keys.FormatID(got.ID), StateIn(got.Range), got)
		}
		found++
		m.compareTask(got, t)
	})
	if found == len(m.tasks) {
		return
	}
	m.eachStored(func(got *store.Task) { delete(m.tasks, got.ID) })
	for _, t := range m.tasks {
		m.rt.Fatalf("missing: %+v", t)
	}
}

// compareTask compares a task with the same task in the model.
func (m *model) compareTask(got *store.Task, t *modelTask) {
	state, at, place := StateIn(got.Range), got.Ended.At, got.At
	want := t.until
	switch {
	case state == Ready:
		want = t.since
		if got.Lease != nil {
			state, at, got.Record.Attempts = Leased, got.Lease.Deadline, got.Lease.Attempts
		}
	case state == Blocked:
		want = [...]uint64{onParents: 0, onGroup: t.rec.Group, onLimit: t.rec.Limit, onOrphan: t.rec.Group, onSuspicion: keys.SuspectScope(t.Queue, keys.SuspectPartOf(t.id, got.Record.Leases))}[t.on]
	}
	key := LaneKey{got.Lane.Queue, got.Lane.Tenant, got.Lane.Priority}
	ended := state == Leased || state == Dead || state == Done || state == Canceled
	if state != t.state || place != want || ended && at != t.at || key != t.LaneKey || state == Done && string(got.Ended.Result) != t.result {
		for _, o := range m.live {
			if o != t && o.rec.Group == t.rec.Group && o.rec.Group != 0 {
				m.rt.Logf("of the same group, whose turn is %s: %v", keys.FormatID(m.turns[o.rec.Group]), o)
			}
		}
		m.rt.Fatalf("found %s: %v at %d (%x) of %+v with %q, expected %+v (%x)",
			keys.FormatID(got.ID), state, at, place, key, got.Ended.Result, t, want)
	}
	m.compareRecord(t, &got.Record)
	m.compareKind(got)
	m.compareSteps(got, t)
}

// compareRecord compares a record, except the shard's own fields in it.
func (m *model) compareRecord(t *modelTask, got *record.Record) {
	m.compareHistory(t, got)
	plain := func(r record.Record) []byte {
		r.History, r.Notes, r.Steps, r.Kept, r.Cursors, r.Beside = nil, nil, 0, nil, nil, 0
		r.DeadKind = 0
		r.Leases, r.Rewritten, r.Expired, r.HoldsTurn, r.Parent, r.Child = 0, false, false, false, false, false
		r.Flags &^= record.HoldsKey
		return r.Encode()
	}
	if !bytes.Equal(plain(*got), plain(t.rec)) {
		m.rt.Fatalf("record of %s is\n%+v, expected\n%+v", keys.FormatID(t.id), got, t.rec)
	}
}

// compareKind: a dead letter is counted under the kind of its error. That counts and records agree,
// fsck.Check says.
func (m *model) compareKind(got *store.Task) {
	n := got.Record.DeadKind
	if n == 0 { // not yet
		return
	}
	text, err := store.Lookup(m.shards[keys.ShardOf(got.ID, len(m.shards))].Store.DB(), keys.AppendDeadKind(nil, got.Group, n-1))
	m.noError(err)
	if want := record.ErrorKind(got.Record.Error); string(text) != want || text == nil || got.Range != keys.Dead {
		m.rt.Fatalf("dead letter %s is counted as %q, its error is %q", keys.FormatID(got.ID), text, want)
	}
}

// compareHistory compares the history of a task: it has or counts each lease that has ended.
func (m *model) compareHistory(t *modelTask, got *record.Record) {
	h := got.History
	if h == nil {
		h = new(record.History)
	}
	ended := len(h.Attempts) + int(h.Dropped)
	sound, last := int(got.Leases) == ended || t.folded && int(got.Leases) > ended, h.FirstReady
	for i := range h.Attempts {
		a := &h.Attempts[i]
		sound = sound && last <= a.Start && a.Start <= a.End && a.Number > 0
		last = a.Start // the end is by the wall clock: a step may have set it back
	}
	if n := len(h.Attempts); n > 0 && sound {
		how := EventKind(h.Attempts[n-1].How)
		switch t.state {
		case Done:
			sound = how == EventCompleted
		case Dead:
			sound = how == EventDeadLettered || how == EventExpired
		}
	}
	if !sound {
		m.rt.Fatalf("history of %s with %d leases is %+v", keys.FormatID(t.id), got.Leases, h)
	}
}

// compareOutcome compares the end of a task, and checks that a shard does not find a task that no
// longer exists: different tasks after each step.
func (m *model) compareOutcome() {
	ask := func(id keys.ID) (*Outcome, error) {
		o, v, err := m.group(keys.ShardOf(id, m.config.Shards)).Outcome(id, true)
		m.deliver() // it may have found a lane that had left memory
		if v != Decided {
			m.rt.Fatalf("outcome of a task at rest: verdict %d", v)
		}
		return o, err
	}
	if len(m.live) > 0 {
		t := m.live[m.steps%len(m.live)]
		got, err := ask(t.id)
		m.noError(err)
		want := Outcome{State: t.state, Result: []byte(t.result), LastError: t.rec.Error, Attempts: int(t.rec.Attempts)}
		if t.state == Done {
			want.LastError = ""
		}
		if t.state < Dead {
			if got != nil {
				m.rt.Fatalf("%+v has ended: %+v", t, got)
			}
		} else if got == nil || textOf(t.id, got) != textOf(t.id, &want) {
			m.rt.Fatalf("outcome of %+v is %+v", t, got)
		}
	}
	if len(m.gone) > 0 {
		id := m.gone[m.steps%len(m.gone)]
		want, remembered := m.endings[id]
		remembered = remembered && m.Uptime <= want.until
		switch got, err := ask(id); {
		case (!remembered || want.perhaps) && errors.Is(err, base.ErrNotFound):
		case remembered && err == nil && textOf(id, got) == want.text:
		default:
			m.rt.Fatalf("task that is no more: %+v, %v, expected %+v at %d", got, err, want, m.Uptime)
		}
	}
}

func (m *model) compareCounts() {
	for shard, s := range m.shards {
		want := make(map[string]keys.Counts)
		for name := range m.settings {
			want[name] = keys.Counts{}
		}
		for _, t := range m.live {
			if t.shard != shard {
				continue
			}
			c := want[t.Queue]
			switch t.state {
			case Ready:
				c.Ready++
			case Scheduled:
				c.Scheduled++
			case Blocked:
				c.Blocked++
			case Leased:
				c.Leased++
			case Dead:
				c.Dead++
			case Done:
				c.Done++
			case Canceled:
				c.Canceled++
			}
			want[t.Queue] = c
		}
		got := make(map[string]keys.Counts)
		var p CountsCursor
		for more := true; more; {
			var some []QueueCounts
			some, more = s.Names.Counts(&p, 2, nil)
			for _, c := range some {
				if _, twice := got[c.Queue]; twice {
					m.rt.Fatalf("queue %s is counted twice", c.Queue)
				}
				got[c.Queue] = c.Counts
			}
		}
		if !maps.Equal(got, want) {
			m.rt.Fatalf("counts of shard %d are %+v, expected %+v", shard, got, want)
		}
		m.compareInfo(shard, want)
	}
}

// compareInfo compares a shard's report on its queues with the counts of their tasks: all totals,
// and since when the oldest ready task waits.
func (m *model) compareInfo(shard int, counts map[string]keys.Counts) {
	s := m.shards[shard]
	first := make(map[LaneKey]uint64)
	for _, t := range m.live {
		if at := keys.SinceMillis(t.since); t.shard == shard && t.state == Ready && (first[t.LaneKey] == 0 || at < first[t.LaneKey]) {
			first[t.LaneKey] = at
		}
	}
	oldest, clock := make(map[string]uint64), s.Clock()
	for lane, at := range first {
		if at, _ := clock.ByWall(at); oldest[lane.Queue] == 0 || at < oldest[lane.Queue] {
			oldest[lane.Queue] = at
		}
	}
	want, got := make(map[string]QueueInfo), make(map[string]QueueInfo)
	total := func(queue string) keys.Totals {
		if m.decades { // the shard may have forgotten them
			return keys.Totals{}
		}
		return m.totals[shardQueue{shard, queue}]
	}
	held := make(map[string]uint64)
	for r, o := range m.orphans {
		if keys.ShardOf(r.ID, m.config.Shards) == shard {
			held[o.queue]++
		}
	}
	for name, c := range counts {
		want[name] = QueueInfo{Queue: name, Counts: c, Oldest: oldest[name], Held: held[name], Totals: total(name)}
	}
	var p InfoCursor
	var some []QueueInfo
	var v Verdict
	for more := true; more; {
		if some, more, v = s.Names.Info(&p, m.rng.IntN(5), some); v == Again {
			m.begin(s)
			m.deliver() // it may have found that a lane is empty
		}
		m.noError(s.Broken)
	}
	for _, i := range some {
		if _, twice := got[i.Queue]; twice {
			m.rt.Fatalf("queue %s is shown twice", i.Queue)
		}
		if m.decades {
			i.Totals = keys.Totals{}
		}
		if i.Settings = nil; i.Counts != (keys.Counts{}) || counts[i.Queue] == i.Counts && m.versions[i.Queue] > 0 {
			got[i.Queue] = i
		} else if i.Totals != total(i.Queue) || i.Oldest != 0 || i.Held != held[i.Queue] {
			m.rt.Fatalf("shard %d shows an empty queue %+v", shard, i)
		}
	}
	if !maps.EqualFunc(got, want, func(a, b QueueInfo) bool { return reflect.DeepEqual(a, b) }) {
		m.rt.Fatalf("shard %d shows %+v, expected %+v", shard, got, want)
	}
	for of, total := range m.totals {
		if of.shard != shard || m.decades {
			continue
		}
		var sum keys.Totals
		days, v := s.Names.DaysOf(of.queue, nil)
		m.noError(s.Broken)
		for i := range days {
			sum.Add(&days[i].OfDay)
		}
		if known := s.Names.TotalsOf([]string{of.queue}, nil); len(known) != 1 || known[0].Totals != total {
			m.rt.Fatalf("totals of queue %s of shard %d are %+v, expected %v", of.queue, shard, known, total)
		}
		if v != Decided || sum != total {
			m.rt.Fatalf("queue %s of shard %d has days %+v, expected %v in all", of.queue, shard, days, total)
		}
	}
}

// compareSettings: all shards have the last settings.
func (m *model) compareSettings() {
	for name := range m.versions {
		want := m.settings[name]
		for n, s := range m.shards {
			q := s.Names.Queues[name]
			if q == nil && m.versions[name] == 0 {
				continue
			}
			if q == nil || s.Names.Given != m.removed || q.Version != m.versions[name] || !reflect.DeepEqual(*q.Settings, want) {
				m.rt.Fatalf("settings of queue %s in shard %d are not %+v", name, n, want)
			}
		}
	}
}

func (m *model) compareSchedules() {
	n := 0
	for _, s := range m.shards {
		s.Times.Schedules("", func(i *recurrence.Schedule) bool {
			n++
			if want := m.schedules[i.Name]; want == nil || i.Next != want.next || i.Value.Last != want.last || i.Value.After != want.after || i.Err != nil {
				m.rt.Fatalf("schedule %+v, expected %+v", i, want)
			}
			return true
		})
	}
	if n != len(m.schedules) {
		m.rt.Fatalf("%d schedules, expected %d", n, len(m.schedules))
	}
}

// compareIdle: queues are idle if all their tasks have ended.
func (m *model) compareIdle() {
	for shard, s := range m.shards {
		for _, queues := range [][]string{nil, {"a"}, {"b", "c"}, {"none"}} {
			busy := slices.ContainsFunc(m.live, func(t *modelTask) bool {
				return t.shard == shard && t.state < Dead && (queues == nil || slices.Contains(queues, t.Queue))
			})
			if s.Idle(&Idleness{Queues: queues}) == busy {
				m.rt.Fatalf("queues %v of shard %d are idle: %t", queues, shard, !busy)
			}
		}
	}
}

// checkSteps: for any amount of due work, the work of one step is at most its budget and one unit
// of work.
func (m *model) checkSteps(s *drivenShard, steps []upkeepDone) {
	m.noError(s.Broken)
	if m.config.GroupBytes != smallGroup {
		return
	}
	for i := 1; i < len(steps); i++ {
		step, unit := steps[i].UpkeepKind, 4*(largeRecord+512) // read, written and reported before the next read
		if step == UpkeepWake {
			unit += store.WaitersAhead * (largeRecord + 512) // read ahead
		}
		if n := steps[i].Bytes - steps[i-1].Bytes; n > smallGroup/2+unit {
			m.rt.Fatalf("step %s had %d bytes, expected %d at the most", stepNames[step], n, smallGroup/2+unit)
		}
	}
}

func (m *model) parseTick(text string) uint64 {
	at, err := time.Parse(recurrence.Format, text)
	m.noError(err)
	return uint64(at.UnixMilli())
}

func (t *modelTask) String() string {
	return fmt.Sprintf("%s, %v at %d, since %x, until %d, in shard %d, %+v, rec %+v, on %d, waits %d, late %t, local %t, over %t, expired %t, parent %t",
		keys.FormatID(t.id), t.state, t.at, t.since, t.until, t.shard, t.LaneKey, t.rec.Head, t.on, len(t.waits), t.late, t.local, t.over, t.expired, t.parent)
}
