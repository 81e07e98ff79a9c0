package codeq

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/schema"
)

// What binds tasks to each other, in the model: idempotency keys, groups,
// parents, and the limits of keys.
//
// The model knows what follows from what, and when several tasks were let go by
// messages between shards, not which of them came first: then, and when a claim
// parks tasks whose limit is full, it looks at where the disk has them, and
// makes sure that it may be so.

// modelKey is who has an idempotency key.
type modelKey struct {
	id    ID
	until uint64 // wall clock, ms; 0: until the task has ended
	ended bool   // the task has, and the key is taken until then
}

// blockedOn is what a blocked task waits for.
type blockedOn int

const (
	onParents blockedOn = iota + 1
	onGroup
	onLimit
)

// inOrder is the tasks in the order in which they were admitted.
func (m *model) inOrder() []*modelTask {
	return slices.SortedFunc(maps.Values(m.tasks), func(a, b *modelTask) int { return cmp.Compare(a.serial, b.serial) })
}

func (m *model) toBlocked(t *modelTask, on blockedOn) {
	t.on = on
	t.want.State, t.want.At = Blocked, t.want.ID.Time()
}

// waiting is as in located.
func (t *modelTask) waiting() bool {
	return t.want.State == Ready || t.want.State == Scheduled || t.want.State == Blocked
}

// Keys.

func (m *model) keyOf(t *Task) (hash [record.UniqueLen]byte, has bool) {
	return t.uniqueHash(), t.Unique.Key != ""
}

// holder is who has the key of a task.
func (m *model) holder(t *Task) (ID, bool) {
	hash, has := m.keyOf(t)
	k := m.keys[hash]
	if !has || k == nil || k.ended && k.until <= m.wall() {
		return ID{}, false
	}
	return k.id, true
}

// takeKey gives a key to a task, for some time from a moment on.
func (m *model) takeKey(id ID, t *Task, from uint64) {
	hash, has := m.keyOf(t)
	if !has {
		return
	}
	k := &modelKey{id: id}
	if t.Unique.For != 0 {
		k.until = from + millis(t.Unique.For)
	}
	m.keys[hash] = k
}

// passKeys is what the wall clock does to keys: once it has shown the end of
// their time, they are free with the end of their tasks, wherever it goes then.
func (m *model) passKeys(wall uint64) {
	maps.DeleteFunc(m.keys, func(_ [record.UniqueLen]byte, k *modelKey) bool {
		if k.until > wall {
			return false
		}
		k.until = 0
		return k.ended
	})
}

func (m *model) endKey(t *modelTask, state State, wall uint64) {
	hash, has := m.keyOf(&t.want.Task)
	k := m.keys[hash]
	if !has || k == nil || k.id != t.want.ID {
		return
	}
	u := t.want.Unique
	if k.until <= wall || state == Done && u.ReleaseOnComplete || state == Dead && u.ReleaseOnDead {
		delete(m.keys, hash)
		return
	}
	k.ended = true
}

// Groups.

// enter makes a task ready if it has the turn of its group, or gets it.
func (m *model) enter(t *modelTask, since uint64) {
	if scope := t.want.groupScope(); scope != 0 {
		holder, held := m.turns[scope]
		switch {
		case !held && m.unordered: // a task that is woken may come before, or after
			m.toBlocked(t, onGroup)
			m.contested[scope] = true
			return
		case !held && !m.anyWaits(scope):
			m.turns[scope] = t.want.ID
		case holder != t.want.ID || !held:
			m.toBlocked(t, onGroup)
			return
		}
	}
	m.toReady(t, since)
}

func (m *model) waitsInGroup(t *modelTask, scope uint64) bool {
	return t.want.State == Blocked && t.on == onGroup && t.want.groupScope() == scope
}

func (m *model) anyWaits(scope uint64) bool {
	for _, t := range m.tasks {
		if m.waitsInGroup(t, scope) {
			return true
		}
	}
	return false
}

// proceed lets a task go on that was held back by what happens in other shards
// or later groups.
func (m *model) proceed(t *modelTask) {
	if due := runAtMillis(t.want.RunAt); due > m.wall() {
		m.toScheduled(t, due)
		return
	}
	t.late = true
	if scope := t.want.groupScope(); scope != 0 {
		if _, held := m.turns[scope]; !held {
			m.toBlocked(t, onGroup)
			m.contested[scope] = true
			return
		}
	}
	m.enter(t, keys.SinceOf(keys.ID(t.want.ID)))
}

// giveTurns gives the turns that nobody has: to the first that waits or, if
// tasks came to wait by ways of which the order is open, to the one of those
// that wait that has it on disk.
func (m *model) giveTurns() {
	if m.unordered {
		return
	}
	next := make(map[uint64]*modelTask)
	var places map[ID]keys.Place
	for _, t := range m.tasks {
		scope := t.want.groupScope()
		if _, held := m.turns[scope]; held || scope == 0 || !m.waitsInGroup(t, scope) {
			continue
		}
		first := next[scope]
		better := first == nil || bytes.Compare(t.want.ID[:], first.want.ID[:]) < 0
		if m.contested[scope] || m.reopened {
			if places == nil {
				places = m.places()
			}
			has := func(t *modelTask) bool {
				return places[t.want.ID].Range != keys.Blocked || places[t.want.ID].At != scope
			}
			if first != nil && has(t) != has(first) {
				better = has(t)
			}
		}
		if better {
			next[scope] = t
		}
	}
	for scope, t := range next {
		m.turns[scope] = t.want.ID
		t.late = true
		m.toReady(t, keys.SinceOf(keys.ID(t.want.ID)))
	}
	clear(m.contested)
}

// Parents.

// alterWoken is the action of a call that alters a task in the group in which the last of
// its parents ends: as long as it waits, if that group lets it go on no more, or when it has gone on.
func (m *model) alterWoken(t *rapid.T) {
	leased := slices.DeleteFunc(m.inOrder(), func(t *modelTask) bool { return m.held(t.receipt) != t })
	if m.plain || m.opts.GroupCap == 1 || len(leased) == 0 {
		t.Skip()
	}
	parent := rapid.SampledFrom(leased).Draw(t, "parent")
	m.drawn = tiesNone
	c := &produceCall{shard: parent.shard, tasks: m.drawTasks(1)}
	c.tasks[0].After = []ID{parent.want.ID}
	m.run(c)

	complete := &finishCall{verb: "complete", receipt: parent.receipt}
	alter := &controlCall{verb: rapid.SampledFrom([]string{"priority", "run at"}).Draw(t, "verb"), id: c.ids[0], priority: 5}
	if rapid.Bool().Draw(t, "later") {
		alter.runAt = m.opts.wall().Add(time.Second)
	}
	held := make(chan struct{})
	go func() { _ = m.q.shard(parent.shard).probe(func(*shard) error { <-held; return nil }) }()
	synctest.Wait()
	for _, c := range []call{complete, alter} {
		go c.do(m.q)
		synctest.Wait()
	}
	close(held)
	synctest.Wait()
	if p := m.places()[alter.id]; p.Range == keys.Task && keys.Fresh(p.At) {
		alter.apply(m)
		complete.apply(m)
	} else {
		complete.apply(m)
		alter.apply(m)
	}
	m.settle(false)
}

// family is the action of a task that ends while many wait for it, of whom the first know by
// the commit of its end.
func (m *model) family(t *rapid.T) {
	leased := slices.DeleteFunc(m.inOrder(), func(t *modelTask) bool { return m.held(t.receipt) != t })
	if m.plain || len(leased) == 0 {
		t.Skip()
	}
	parent := rapid.SampledFrom(leased).Draw(t, "parent")
	m.drawn = tiesNone
	child := m.drawTasks(1)[0]
	child.After = []ID{parent.want.ID}
	produce := &produceCall{shard: parent.shard, tasks: make([]Task, rapid.IntRange(engine.TellAtOnce, 2*engine.TellAtOnce).Draw(t, "children"))}
	for i := range produce.tasks {
		m.serial++
		child.Payload, child.OnDead = fmt.Append(nil, m.serial), OnDead(i%3)
		produce.tasks[i] = child
	}
	m.run(produce)

	var end call = &controlCall{verb: "cancel", id: parent.want.ID}
	if verb := rapid.SampledFrom([]string{"complete", "dead letter", ""}).Draw(t, "verb"); verb != "" {
		end = &finishCall{verb: verb, receipt: parent.receipt}
	}
	if rapid.Bool().Draw(t, "crash") {
		m.crashAfter(t, end)
	} else {
		m.run(end)
	}
}

// depend has a task wait for a parent. It says whether the task is to be
// canceled instead.
func (m *model) depend(t *modelTask, parent ID) (doomed bool) {
	p := m.tasks[parent]
	if p == nil {
		return false
	}
	switch p.want.State {
	case Done, Canceled, Dead:
		if cancels, held := endMeans(p.want.State, t.want.OnDead); !held {
			m.pin(p, t)
			return cancels
		}
		p.until = keys.Forever
	}
	p.parent = true
	t.waits[parent] = true
	return false
}

// ended is the end of a task: who is bound to it goes on with the next react. passes: it
// gives up the turn of its group if it has it.
func (m *model) ended(t *modelTask, o Outcome, passes bool) {
	if scope := t.want.groupScope(); passes && scope != 0 && m.turns[scope] == t.want.ID {
		delete(m.turns, scope)
	}
	for _, child := range m.inOrder() {
		if !child.waits[t.want.ID] {
			continue
		}
		cancels, held := endMeans(o.State, child.want.OnDead)
		if held {
			continue
		}
		delete(child.waits, t.want.ID)
		m.pin(t, child)
		if cancels {
			m.doomed = append(m.doomed, child)
		} else if len(child.waits) == 0 {
			m.woken = append(m.woken, child)
		}
	}
	for _, a := range m.awaits {
		if a.id == t.want.ID && a.want == nil {
			a.want = &o
		}
	}
}

// pin keeps the result of a parent that is done, for some time, until a child has ended that is
// told of it.
func (m *model) pin(parent, child *modelTask) {
	if parent.want.State != Done || m.tasks[parent.want.ID] != parent || parent.until == keys.Forever && parent.kept == 0 {
		return
	}
	if parent.kept == 0 {
		parent.kept, parent.until, parent.pins = parent.until, keys.Forever, make(map[ID]bool)
	}
	parent.pins[child.want.ID] = true
}

// unpin has a task let go of its parents, which are kept until a time at least.
func (m *model) unpin(child *modelTask, until uint64) {
	for _, p := range m.tasks {
		if !p.pins[child.want.ID] {
			continue
		}
		p.kept = max(p.kept, until)
		if delete(p.pins, child.want.ID); len(p.pins) == 0 {
			p.until, p.kept = max(p.kept, engine.BucketOf(m.wall(), 1)), 0
		}
	}
}

// react does what ends of tasks mean to others.
func (m *model) react() {
	blocked := func(t *modelTask) bool {
		return m.tasks[t.want.ID] == t && t.want.State == Blocked && t.on == onParents
	}
	for len(m.doomed)+len(m.woken) > 0 {
		doomed, woken := m.doomed, m.woken
		m.doomed, m.woken = nil, nil
		for _, t := range doomed {
			if blocked(t) {
				m.toCanceled(t)
			}
		}
		for _, t := range woken {
			if blocked(t) {
				m.proceed(t)
			}
		}
	}
	m.giveTurns()
}

func (m *model) toCanceled(t *modelTask) {
	if t.want.State == Leased {
		m.canceled[t.receipt] = true
	}
	t.waits = nil
	m.unpin(t, 0)
	m.endKey(t, Canceled, m.wall())
	o := Outcome{State: Canceled, LastError: t.want.LastError, Attempts: t.want.Attempts}
	if retention := m.retention(t); retention == 0 {
		m.toGone(t)
	} else {
		t.until = engine.BucketOf(m.wall(), retention)
		t.want.State, t.want.At = Canceled, wallTime(m.wall())
	}
	m.ended(t, o, true)
}

// retention is how long a task is kept that is completed or canceled, ms.
func (m *model) retention(t *modelTask) int64 {
	return retentionMillis(cmp.Or(t.want.Retention, m.settings[t.want.Queue].Retention, m.opts.Retention))
}

// replace gives a task that waits the form of a new one.
func (m *model) replace(t *modelTask, by Task) {
	by = storedTask(by)
	by.After, by.OnDead = t.want.After, t.want.OnDead
	t.want = TaskInfo{ID: t.want.ID, Task: by, State: t.want.State, At: t.want.At}
	t.expired = false
	m.takeKey(t.want.ID, &by, max(m.wall(), keys.SinceMillis(keys.SinceOf(t.want.ID))))
	switch due := runAtMillis(by.RunAt); {
	case t.want.State == Blocked && t.on == onParents:
	case due > m.wall():
		m.toScheduled(t, due)
	default:
		m.enter(t, m.since(t.shard))
	}
}

// storedTask is a task as it is read again.
func storedTask(t Task) Task {
	if !t.RunAt.IsZero() {
		t.RunAt = wallTime(runAtMillis(t.RunAt)) // in the local time zone
	}
	if len(t.After) == 0 {
		t.OnDead = HoldOnDead
	}
	return t
}

// home is the shard to which a task belongs, or -1.
func (m *model) home(t *Task) int {
	rec := t.record()
	if home, bound := rec.Ties.Home(m.opts.Shards); bound {
		return home
	}
	return -1
}

// Limits.

// leased counts leases of a queue and, unless it is 0, of a limit's scope.
func (m *model) leased(queue string, scope uint64) (n int) {
	for _, t := range m.tasks {
		if t.want.State == Leased && t.want.Queue == queue && (scope == 0 || t.want.limitScope() == scope) {
			n++
		}
	}
	return n
}

// keyFull reports whether the limit of the task's key leaves no room.
func (m *model) keyFull(t *modelTask) bool {
	limit, scope := m.settings[t.want.Queue].ConcurrencyPerKey, t.want.limitScope()
	return limit > 0 && scope != 0 && m.leased(t.want.Queue, scope) >= limit
}

// isOpen reports whether tasks may be claimed from a queue.
func (m *model) isOpen(queue string) bool {
	set := m.settings[queue]
	return !set.Paused && (set.Concurrency == 0 || m.leased(queue, 0) < set.Concurrency)
}

// parks reports whether claims may park tasks of a queue.
func (m *model) parks(t *modelTask) bool {
	return t.want.LimitKey != "" && m.settings[t.want.Queue].ConcurrencyPerKey > 0
}

// places is where the disk has the tasks.
func (m *model) places() map[ID]keys.Place {
	found := make(map[ID]keys.Place)
	for _, s := range m.q.led() {
		v := m.q.peek(s)
		for _, prefix := range []byte{keys.Task, keys.Scheduled, keys.Blocked, keys.Dead, keys.Done, keys.Canceled} {
			m.noError(schema.Scan(v.snap, prefix, func(key, _ []byte) error {
				id, p, err := keys.ParsePlaceKey(key)
				found[id] = p
				return err
			}))
		}
		v.close()
	}
	return found
}

// adoptParks takes in which tasks claims have parked, and which have room again:
// that depends on the lanes at which the claims have looked, which the
// model does not follow. It makes sure that none waits in vain.
func (m *model) adoptParks() {
	if !slices.ContainsFunc(m.inOrder(), func(t *modelTask) bool { return t.want.LimitKey != "" }) {
		return
	}
	places := m.places()
	type use struct {
		queue          string
		parked, active int
	}
	uses := make(map[uint64]*use)
	for _, t := range m.inOrder() {
		scope := t.want.limitScope()
		if scope == 0 {
			continue
		}
		p, first := places[t.want.ID], keys.SinceOf(keys.ID(t.want.ID))
		parked := p.Range == keys.Blocked && p.At == scope
		switch {
		case t.want.State == Ready && parked:
			m.toBlocked(t, onLimit)
		case t.want.State == Blocked && t.on == onLimit && !parked && p.Range == keys.Task:
			m.toReady(t, p.At) // first, unless a call has moved it since
		case t.want.State == Blocked && t.on == onLimit && !parked:
			m.toReady(t, first)
		case t.want.State == Ready && p.Range == keys.Task && p.At == first: // parked, and back again
			m.toReady(t, first)
		case t.want.State == Leased && p.Range == keys.Task && p.At == first:
			t.since = first
		}
		u := uses[scope]
		if u == nil {
			u = &use{queue: t.want.Queue}
			uses[scope] = u
		}
		switch t.want.State {
		case Ready, Leased:
			u.active++
		case Blocked:
			if t.on == onLimit {
				u.parked++
			}
		}
	}
	for scope, u := range uses {
		limit := m.settings[u.queue].ConcurrencyPerKey
		if u.parked > 0 && (limit == 0 || u.active < limit) {
			m.t.Fatalf("%d tasks of queue %s wait for limit %x of %d, with %d leased or ready", u.parked, u.queue, scope, limit, u.active)
		}
	}
}

// endMeans is what the end of a parent means to a child; held: not yet anything.
func endMeans(state State, onDead OnDead) (cancels, held bool) {
	switch {
	case state == Done, state == Dead && onDead == RunOnDead:
		return false, false
	case state == Dead && onDead == HoldOnDead:
		return false, true
	}
	return true, false
}
