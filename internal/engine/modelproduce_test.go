package engine

import (
	"errors"
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// spec is a task as its producer describes it.
type spec struct {
	LaneKey
	rec record.Record
}

// Which ties drawTasks draws.
const (
	tiesNone  = iota
	tiesLocal // decided at once: no parents, and no replacement
	tiesKeys  // decided at once: no parents
	tiesNext  // no parent cancels the task at once
	tiesAll
)

func (m *model) drawTasks(n int) []spec {
	tasks := make([]spec, n)
	for i := range tasks {
		t := &tasks[i]
		m.serial++
		*t = spec{
			LaneKey{
				oneOf(m, "Queue", "a", "a", "b", "b", "c", "d", "e"), oneOf(m, "Tenant", "", "x", "y"), oneOf[uint8](m, "Priority", 0, 0, 5),
			},
			record.Record{
				Head: record.Head{
					MaxAttempts: oneOf[uint32](m, "MaxAttempts", 0, 0, 1, 2, 3), Lease: oneOf[uint64](m, "Lease", 0, 0, 2000),
					Retention: oneOf[int64](m, "Retention", 0, 0, 3000, -1),
				},
				Payload: fmt.Appendf(nil, "%d%*s", m.serial, oneOf(m, "more bytes", 0, 10, 100, 300), ""),
			},
		}
		if wait := oneOf[int64](m, "RunAt", 0, 0, 0, -1, 1, 1000, 8000, 1_800_000); wait != 0 {
			t.rec.RunAt = m.Wall + uint64(wait)
		}
		if m.oneIn(4, "headers") {
			t.rec.Headers, t.rec.Timeout = map[string]string{"a": "1", "": "2"}, 60_000
		}
		if !m.plain && m.drawn != tiesNone {
			m.drawTies(t, i)
		}
		tie(&t.LaneKey, &t.rec)
		if m.oneIn(16, "large") {
			m.enlarge(t)
		}
	}
	return tasks
}

// drawTies binds the i-th task of a batch to other tasks.
func (m *model) drawTies(t *spec, i int) {
	r := &t.rec
	r.GroupKey = oneOf(m, "group", "", "", "g")
	r.LimitKey = oneOf(m, "limit key", "", "", "k")
	if r.UniqueKey = oneOf(m, "unique", "", "", "u", "v"); r.UniqueKey != "" {
		r.UniqueFor = oneOf[uint64](m, "unique for", 0, 0, 3000, 3600_000)
		for _, flag := range []uint8{record.ReplaceWaiting, record.ReleaseOnComplete, record.ReleaseOnDead} {
			if rapid.Bool().Draw(m.rt, "flag") && (flag != record.ReplaceWaiting || m.drawn != tiesLocal) {
				r.Flags |= flag
			}
		}
		if r.MaxWait = oneOf[uint64](m, "max wait", 0, 2000); r.Flags&record.ReplaceWaiting == 0 {
			r.MaxWait = 0
		}
		if r.UniqueFor == 0 && m.drawn != tiesLocal && rapid.Bool().Draw(m.rt, "release on claim") {
			r.Flags |= record.ReleaseOnClaim
		}
	}
	if m.drawn == tiesLocal || m.drawn == tiesKeys {
		return
	}
	for range oneOf(m, "parents", 0, 0, 0, 1, 1, 2) {
		if i > 0 && rapid.Bool().Draw(m.rt, "sibling") {
			r.Parents = append(r.Parents, keys.Nth(rapid.IntRange(0, i-1).Draw(m.rt, "n")))
			continue
		}
		if len(m.order) == 0 {
			continue
		}
		id := m.drawID()
		if p := m.tasks[id]; m.drawn == tiesNext && p != nil && (p.state == Canceled || p.state == Dead || p.state == Leased) {
			continue // a lease may end with a crash, and the task be dead
		}
		r.Parents = append(r.Parents, id)
	}
	if onDead := oneOf[uint8](m, "on dead", 0, 1, 2); len(r.Parents) > 0 {
		r.OnDead = onDead
	}
	if onMissing := oneOf[uint8](m, "on missing", 0, 0, 1, 2); len(r.Parents) > 0 && (m.drawn != tiesNext || !slices.ContainsFunc(r.Parents, m.isMissing)) {
		r.OnMissing = onMissing
	}
}

// isMissing reports whether a parent is gone.
func (m *model) isMissing(parent [record.IDLen]byte) bool {
	return !isNth(parent) && m.tasks[parent] == nil
}

// enlarge gives a task a large payload.
func (m *model) enlarge(t *spec) {
	t.rec.Payload = fmt.Appendf(t.rec.Payload, "%*s", largeRecord-600, "")
}

// strangers are IDs of tasks that never existed.
func (m *model) strangers(n int) (ids [][record.IDLen]byte) {
	for i := range n {
		id := m.order[0]
		id[4], id[5] = id[4]-1, byte(i) // of other milliseconds
		ids = append(ids, id)
	}
	return ids
}

func (m *model) drawShard() int { return rapid.IntRange(0, m.config.Shards-1).Draw(m.rt, "shard") }

// home is the home shard of a task; -1: any shard.
func (m *model) home(rec *record.Record) int {
	if home, bound := rec.Ties.Home(m.config.Shards); bound {
		return home
	}
	return -1
}

// singleOut changes a batch into one that callers may send: no task replaces another one of the
// batch, and the first one with a key decides whether the key is taken over.
func (m *model) singleOut(tasks []spec) {
	known := make(map[[keys.UniqueLen]byte]bool)
	for i := range tasks {
		r := &tasks[i].rec
		if r.UniqueKey != "" && known[r.Unique] {
			r.Flags &^= record.ReplaceWaiting | record.ReleaseOnClaim
		}
		known[r.Unique] = true
	}
}

// scatter is singleOut, and no task waits for a sibling in another shard.
func (m *model) scatter(shard int, tasks []spec) {
	m.singleOut(tasks)
	scattered := slices.ContainsFunc(tasks, func(t spec) bool { h := m.home(&t.rec); return h >= 0 && h != shard })
	for i := range tasks {
		r := &tasks[i].rec
		if scattered {
			r.Parents = slices.DeleteFunc(r.Parents, isNth)
			if len(r.Parents) == 0 {
				r.Parents, r.OnDead, r.OnMissing = nil, 0, 0
			}
		}
	}
}

// prepare makes the shards' form of new tasks. A sibling that a task names is its parent; if an
// earlier task of the batch has the key of the sibling, that task is the parent.
func prepare(tasks []spec) []NewTask {
	parents := make(map[int]bool)
	for _, t := range tasks {
		for _, p := range t.rec.Parents {
			if n, ok := keys.NthOf(p); ok {
				if key := tasks[n].rec.Unique; tasks[n].rec.UniqueKey != "" {
					n = slices.IndexFunc(tasks, func(t spec) bool { return t.rec.Unique == key })
				}
				parents[n] = true
			}
		}
	}
	made := make([]NewTask, len(tasks))
	for i, t := range tasks {
		rec := t.rec
		rec.Parents = slices.Clone(rec.Parents)
		rec.Parent = parents[i]
		made[i].Key = t.LaneKey
		made[i].Encode(&rec, nil)
	}
	markTwins(made)
	return made
}

// produceCall is a produce of tasks of one shard.
type produceCall struct {
	shard int
	tasks []spec
	call  keys.CallNumber
	again bool // the shard has decided it before
	first Produced
	out   Produced
	err   error
}

// produceOf leaves out the tasks that belong to another shard than the first.
func (m *model) produceOf(tasks []spec) *produceCall {
	c := &produceCall{shard: m.home(&tasks[0].rec)}
	if c.shard < 0 {
		c.shard = m.drawShard()
	}
	for _, t := range tasks {
		if h := m.home(&t.rec); h < 0 || h == c.shard {
			t.rec.Parents = slices.DeleteFunc(t.rec.Parents, func(p [record.IDLen]byte) bool {
				n, nth := keys.NthOf(p)
				return nth && n >= len(c.tasks)
			})
			if len(t.rec.Parents) == 0 {
				t.rec.Parents, t.rec.OnDead, t.rec.OnMissing = nil, 0, 0
			}
			c.tasks = append(c.tasks, t)
		}
	}
	m.scatter(c.shard, c.tasks)
	return c
}

func (m *model) drawProduce() call {
	if len(m.numbered) > 0 && m.oneIn(20, "again") {
		c := *oneOf(m, "call", m.numbered[max(0, len(m.numbered)-4):]...)
		c.again, c.first, c.out = true, c.out, Produced{}
		return &c
	}
	n := rapid.IntRange(1, 3).Draw(m.rt, "tasks")
	m.drawn = tiesAll
	if m.hurried { // a shard may decide later if it asks by messages, or reads the disk
		m.drawn = tiesLocal
	}
	c := m.produceOf(m.drawTasks(n))
	if m.oneIn(8, "numbered") {
		m.calls++
		c.call = keys.CallNumber{Node: "n", Incarnation: m.life, Seq: m.calls, Low: max(m.calls, 8) - 7}
		switch {
		case m.oneIn(6, "late"):
			c.call.Incarnation--
		case m.oneIn(6, "life"):
			m.life++
		}
	}
	return c
}

// modelSession is a shard's session of the producing node.
type modelSession struct {
	life, low uint64
	gone      bool // the node was removed
}

// isKnown reports whether the shard answers a numbered call from the session of the node: as a call
// of a life that is over, or with the earlier answer. Else the call begins the session, or adds to
// it.
func (m *model) isKnown(c *produceCall) bool {
	s := m.sessions[c.shard]
	switch {
	case c.call.Incarnation < s.life, c.call.Incarnation == s.life && s.gone:
		var over *keys.IncarnationOverError
		if !errors.As(c.err, &over) || over.Latest != s.life || len(c.out.IDs) > 0 {
			m.rt.Fatalf("a produce of life %d: %v, expected that life %d is known", c.call.Incarnation, c.err, s.life)
		}
		return true
	case c.again && c.call.Seq < s.low:
		if !errors.Is(c.err, base.ErrUncertain) || len(c.out.IDs) > 0 {
			m.rt.Fatalf("produce %d that is tried again: %v, and those below %d are not known any more", c.call.Seq, c.err, s.low)
		}
		return true
	case c.again:
		m.noError(c.err)
		if !slices.Equal(c.out.IDs, c.first.IDs) || !slices.Equal(c.out.Duplicates, c.first.Duplicates) {
			m.rt.Fatalf("a produce that is tried again: %+v, expected %+v", c.out, c.first)
		}
		return true
	}
	if c.call.Incarnation > s.life {
		s = modelSession{life: c.call.Incarnation}
	}
	s.low = max(s.low, c.call.Low)
	m.sessions[c.shard] = s
	m.numbered = append(m.numbered, c)
	return false
}

// removal removes the node with numbered produces, in one shard.
type removal struct{ shard int }

func (m *model) drawRemoval() call { return &removal{m.drawShard()} }

func (c *removal) do(m *model) {
	_, _ = m.decide(c.shard, func(s *drivenShard) (Verdict, error) {
		s.Mail.SetInterest("n", keys.InterestValue{}, true)
		return Decided, nil
	})
}

func (c *removal) apply(m *model) {
	s := m.sessions[c.shard]
	s.gone = true
	m.sessions[c.shard] = s
}

// drawBacklogTasks draws many tasks of one lane, or one task of each of many lanes.
func (m *model) drawBacklogTasks() []spec {
	tasks := m.drawTasks(rapid.IntRange(3, 10).Draw(m.rt, "tasks"))
	for i := range tasks {
		t := &tasks[i]
		t.LaneKey, t.rec.RunAt = tasks[0].LaneKey, 0
	}
	if rapid.Bool().Draw(m.rt, "of many tenants") {
		for i := range tasks {
			tasks[i].Tenant = fmt.Sprint("tenant ", i)
		}
	}
	return tasks
}

func (m *model) drawBacklog() call {
	m.drawn = tiesAll
	tasks := m.drawBacklogTasks()
	if rapid.Bool().Draw(m.rt, "all alike") {
		for i := range tasks {
			r := &tasks[i].rec
			r.GroupKey, r.LimitKey, r.UniqueKey, r.Parents = tasks[0].rec.GroupKey, tasks[0].rec.LimitKey, "", nil
			r.Ties, r.OnDead, r.OnMissing = record.Ties{}, 0, 0
		}
	}
	if !m.plain && len(m.order) > 0 && m.oneIn(4, "children") {
		parents := append(m.strangers(oneOf(m, "strangers", 0, 0, 20, 60)), m.drawID())
		for i := range tasks {
			tasks[i].rec.Parents = parents
		}
	}
	for i := range tasks {
		tie(&tasks[i].LaneKey, &tasks[i].rec)
	}
	if m.oneIn(5, "all large") {
		for i := range tasks {
			m.enlarge(&tasks[i])
		}
	}
	return m.produceOf(tasks)
}

func (c *produceCall) do(m *model) {
	_, c.err = m.decide(c.shard, func(s *drivenShard) (Verdict, error) {
		return s.Produce(prepare(c.tasks), &c.call, &c.out)
	})
}

func (c *produceCall) apply(m *model) {
	if c.call.Seq != 0 && m.isKnown(c) {
		return
	}
	m.noError(c.err)
	if len(c.out.IDs) != len(c.tasks) {
		m.rt.Fatalf("produce of %d tasks: %d IDs", len(c.tasks), len(c.out.IDs))
	}
	var duplicates []int
	stored := make(map[keys.ID]bool)
	for i, id := range c.out.IDs {
		task := c.tasks[i]
		if holder, taken := m.holderOf(&task.rec, id); taken && !m.takeOver(&task.rec) {
			if id != holder {
				m.rt.Fatalf("produce of key %q: %s, expected the holder %s", task.rec.UniqueKey, keys.FormatID(id), keys.FormatID(holder))
			}
			if t := m.tasks[holder]; task.rec.Flags&record.ReplaceWaiting != 0 && t != nil && t.waiting() && len(t.steps) == 0 {
				m.replace(t, task)
				stored[id] = true
			} else {
				duplicates = append(duplicates, i)
			}
			continue
		}
		m.admit(c.shard, task, id, c.out.IDs, false)
		stored[id] = true
	}
	m.markParents(c.tasks, c.out.IDs, stored)
	if !slices.Equal(c.out.Duplicates, duplicates) {
		m.rt.Fatalf("produce with duplicates %v, expected %v", c.out.Duplicates, duplicates)
	}
	m.react()
}

// markParents marks tasks that a sibling of their batch names. Such a task counts as a parent even
// if the shard has not stored the sibling because another task has its key.
func (m *model) markParents(tasks []spec, ids []keys.ID, stored map[keys.ID]bool) {
	for _, task := range tasks {
		for _, p := range task.rec.Parents {
			if n, ok := keys.NthOf(p); ok && stored[ids[n]] {
				m.tasks[ids[n]].parent = true
			}
		}
	}
}
