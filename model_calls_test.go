package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// call is an operation of the queue.
type call interface {
	// do makes the call, perhaps in a goroutine of its own.
	do(q *Queue)
	// apply judges what the call returned, and does the same in the model.
	apply(m *model)
}

// single is the action of one call.
func (m *model) single(draw func(*model) call) func(*rapid.T) {
	return func(*rapid.T) { m.run(draw(m)) }
}

// run makes a call while nothing else happens.
func (m *model) run(c call) {
	if w, ok := c.(*claimCall); ok {
		m.runClaim(w)
	} else {
		c.do(m.q)
		synctest.Wait()
		c.apply(m)
	}
	m.settle(true)
}

func (m *model) runClaim(w *claimCall) {
	found := m.anyReady(w.req.Queues) > 0
	expected := ""
	for _, name := range w.req.Queues {
		if m.isLimited(name) || m.opts.groupBytes != 0 { // what is ready may have to wait
			break
		}
		if m.anyReady([]string{name}) > 0 {
			expected = name
			break
		}
	}
	go w.do(m.q)
	synctest.Wait()
	switch {
	case !found && !w.req.NoWait:
		m.arrivals++
		w.arrival, w.waited = m.arrivals, true
		m.waiters = append(m.waiters, w)
	case !w.finished():
		m.t.Fatalf("claim waits for %v, which has ready tasks", w.req.Queues)
	case !found:
		if !errors.Is(w.err, ErrEmpty) {
			m.t.Fatalf("claim without a ready task: %v, %v", w.leases, w.err)
		}
	case w.err != nil || len(w.leases) == 0:
		m.t.Fatalf("claim of ready tasks: %v", w.err)
	default:
		if l := w.leases[0]; expected != "" && l.Queue != expected {
			m.t.Fatalf("claim of %v got a task of %s, expected one of %s", w.req.Queues, l.Queue, expected)
		}
		m.grant(w, true)
	}
}

// drain is the action of claims in a row.
func (m *model) drain(*rapid.T) {
	w := m.drawClaim().(*claimCall)
	for range rapid.IntRange(2, 8).Draw(m.t, "claims") {
		next := *w
		next.done = make(chan struct{})
		m.run(&next)
	}
}

// handBack is the action of a claim that returns some of what it got.
func (m *model) handBack(*rapid.T) {
	w := m.drawClaimBatch().(*claimCall)
	m.run(w)
	for _, l := range w.leases {
		verb := rapid.SampledFrom([]string{"", "give back", "release", "retry"}).Draw(m.t, "verb")
		if verb != "" {
			m.run(&finishCall{verb: verb, receipt: l.Receipt, d: -1})
		}
	}
}

// queueUp is the action of several claims that wait, one behind the other.
func (m *model) queueUp(*rapid.T) {
	for range rapid.IntRange(2, 3).Draw(m.t, "claims") {
		m.run(m.drawClaimWaiting())
	}
}

// together is the action of several calls of which the owner of one shard
// decides those that are for it in one go.
func (m *model) together(*rapid.T) {
	s := m.q.shard(rapid.IntRange(0, m.opts.Shards-1).Draw(m.t, "held shard"))
	draws := []func(*model) call{
		(*model).drawProduce, (*model).drawClaim, (*model).drawClaimWaiting, (*model).drawComplete,
		(*model).drawFinish, (*model).drawExtend,
	}
	m.hurried = true
	defer func() { m.hurried = false }()
	var calls []call
	ready := make(map[call]int) // before the first call
	for range rapid.IntRange(2, 6).Draw(m.t, "calls") {
		c := rapid.SampledFrom(draws).Draw(m.t, "call")(m)
		calls = append(calls, c)
		if w, ok := c.(*claimCall); ok {
			ready[c] = m.anyReady(w.req.Queues)
		}
	}

	held := make(chan struct{})
	go func() { _ = s.probe(func(*shard) error { <-held; return nil }) }()
	synctest.Wait()
	for _, c := range calls {
		go c.do(m.q)
		synctest.Wait()
	}
	close(held)
	synctest.Wait()

	taken := 0
	m.arrivals++
	m.unordered = true
	for _, c := range calls {
		if w, ok := c.(*claimCall); ok {
			w.arrival = m.arrivals
			m.waiters = append(m.waiters, w)
		} else {
			c.apply(m)
		}
	}
	m.unordered = false
	m.giveTurns()
	for _, w := range m.waiters {
		taken += len(w.leases)
	}
	var claims []*claimCall
	for _, w := range m.waiters {
		if !w.finished() || !errors.Is(w.err, ErrEmpty) {
			claims = append(claims, w)
		} else if ready[w] > taken && !slices.ContainsFunc(w.req.Queues, m.isLimited) {
			m.t.Fatalf("claim without a ready task, of which there were %d; %d were taken", ready[w], taken)
		}
	}
	m.waiters = claims
	m.settle(false)
}

// inOneGroup is the action of calls that change tasks that wait, each of them perhaps
// several times, and produce tasks whose keys these have: the owner of one shard decides
// those that are for it in one go, and each finds what the ones before it have done.
func (m *model) inOneGroup(*rapid.T) {
	if len(m.waiters) > 0 || m.plain { // claims that wait would be served amid the calls
		m.t.Skip()
	}
	s := m.q.shard(rapid.IntRange(0, m.opts.Shards-1).Draw(m.t, "held shard"))
	var calls []call
	for range rapid.IntRange(2, 8).Draw(m.t, "calls") {
		if rapid.Bool().Draw(m.t, "produce") {
			m.drawn = tiesKeys
			calls = append(calls, &produceCall{shard: m.drawShard(), tasks: m.drawTasks(1)})
			continue
		}
		calls = append(calls, m.drawAlteration(rapid.SampledFrom([]string{"priority", "run at", "redrive"}).Draw(m.t, "verb")))
	}
	if rapid.Bool().Draw(m.t, "release a key") { // last, as it may have to wait for the next group
		c := m.drawReleaseKey().(*releaseKeyCall)
		if p, ok := calls[len(calls)-1].(*produceCall); ok && p.tasks[0].Unique.Key != "" {
			c.task = p.tasks[0]
		}
		calls = append(calls, c)
	}
	held := make(chan struct{})
	go func() { _ = s.probe(func(*shard) error { <-held; return nil }) }()
	synctest.Wait()
	for _, c := range calls {
		go c.do(m.q)
		synctest.Wait()
	}
	close(held)
	synctest.Wait()
	for _, c := range calls {
		c.apply(m)
	}
	m.settle(false)
}

// settle takes in what claims that waited have got, counts turns, and makes
// sure that nobody waits in vain. When several calls ran together, not
// strict, which of them came first is open.
func (m *model) settle(strict bool) {
	strict = strict && m.opts.groupBytes == 0 // else claims are served between the pieces of what is due at once
	synctest.Wait()
	together := func(w *claimCall) bool {
		return slices.ContainsFunc(m.waiters, func(o *claimCall) bool { return o != w && o.arrival == w.arrival })
	}
	var waiting []*claimCall
	for _, w := range m.waiters {
		if !w.finished() {
			waiting = append(waiting, w)
			continue
		}
		m.noError(w.err)
		m.grant(w, strict && !together(w))
		for _, earlier := range waiting {
			if strict && earlier.arrival < w.arrival && slices.Contains(earlier.req.Queues, w.leases[0].Queue) {
				m.t.Fatalf("a claim for %v was served after one that came later", earlier.req.Queues)
			}
		}
	}
	m.waiters = waiting
	m.adoptParks()
	for _, w := range waiting {
		if n := m.anyReady(w.req.Queues); n > 0 {
			m.t.Fatalf("a claim waits for %v, with %d ready tasks", w.req.Queues, n)
		}
		w.waited = true
	}
	m.settleIdlers(strict)
	m.settleAwaits()
	m.countTurns(strict)
	for _, t := range m.tasks {
		t.late = false
	}
	m.reconfigured = ""
}

// settleIdlers makes sure that those wait who should.
func (m *model) settleIdlers(strict bool) {
	m.idlers = slices.DeleteFunc(m.idlers, func(c *idleCall) bool {
		busy := 0
		for _, t := range m.tasks {
			if (t.waiting() || t.want.State == Leased) &&
				(len(c.queues) == 0 || slices.Contains(c.queues, t.want.Queue)) {
				busy++
			}
		}
		select {
		case err := <-c.done:
			m.noError(err)
			if strict && busy > 0 {
				m.t.Fatalf("WaitIdle of %v returned with %d tasks to do", c.queues, busy)
			}
			return true
		default:
			if busy == 0 {
				m.t.Fatalf("WaitIdle of %v waits for nothing", c.queues)
			}
			return false
		}
	})
}

// countTurns makes sure that tenants take turns.
func (m *model) countTurns(strict bool) {
	ready := make(map[laneID]bool)
	for _, t := range m.tasks {
		if t.want.State == Ready {
			ready[t.lane()] = true
		}
	}
	maps.DeleteFunc(m.passed, func(l laneID, _ map[laneID]int) bool { return !strict || !ready[l] || m.served[l] })
	for l := range ready {
		if m.passed[l] == nil { // ready since this step, or served in it
			m.passed[l] = make(map[laneID]int)
			continue
		}
		if m.settings[l.queue].ConcurrencyPerKey > 0 { // what is ready may have to wait
			continue
		}
		for other := range m.served {
			if !l.rivals(other) {
				continue
			}
			most := 2 * max(1, m.weights[[2]string{other.queue, other.tenant}])
			if m.passed[l][other]++; m.passed[l][other] > most {
				m.t.Fatalf("%+v had %d turns in a row before %+v", other, m.passed[l][other], l)
			}
		}
	}
	clear(m.served)
}

// grant judges what a claim has got.
func (m *model) grant(w *claimCall, strict bool) {
	if n := len(w.leases); n == 0 || n > max(w.req.Max, 1) {
		m.t.Fatalf("claim of at most %d returned %d leases", w.req.Max, n)
	}
	for _, l := range w.leases {
		first := w.leases[0]
		if l.ID.shard(m.opts.Shards) != first.ID.shard(m.opts.Shards) || !slices.Contains(w.req.Queues, l.Queue) {
			m.t.Fatalf("claim of %v returned tasks of %s, and of two shards", w.req.Queues, l.Queue)
		}
		m.grantOne(w, l, strict)
	}
}

// comesBefore reports whether one of two ready tasks of a lane is to be claimed before the other. While
// a parent's end is told in pieces, a new child waits for it, and comes behind those of its millisecond.
func (m *model) comesBefore(a, b *modelTask) bool {
	if *modelGroups && keys.SinceMillis(a.since) == keys.SinceMillis(b.since) {
		return false
	}
	return a.compare(b) < 0
}

func (m *model) grantOne(w *claimCall, l *Lease, strict bool) {
	t := m.tasks[l.ID]
	if t != nil && t.want.State == Blocked && t.on == onLimit { // there was room again
		t.late = true
		m.toReady(t, keys.SinceOf(keys.ID(l.ID)))
	}
	if t == nil || t.want.State != Ready || m.keyFull(t) || !m.isOpen(l.Queue) && l.Queue != m.reconfigured {
		m.t.Fatalf("claim returned %s, which is %+v; settings: %+v", l.ID, t, m.settings[l.Queue])
	}
	for _, o := range m.tasks {
		if !strict || o.want.State != Ready || o.want.Queue != t.want.Queue {
			continue
		}
		if o.late || m.parks(o) { // was not ready yet, or is to be parked
			continue
		}
		settled := !w.waited && l.Queue != m.reconfigured // all shards serve the queue
		if o.want.Priority > t.want.Priority && (settled || o.shard == t.shard) {
			m.t.Fatalf("claim returned %s of priority %d before %s of priority %d", l.ID, t.want.Priority, o.want.ID, o.want.Priority)
		}
		if o.lane() == t.lane() && m.comesBefore(o, t) {
			m.t.Fatalf("claim returned %s (%x) before %s (%x) of the same lane", l.ID, t.since, o.want.ID, o.since)
		}
	}
	m.served[t.lane()] = true

	duration := cmp.Or(w.req.LeaseFor, m.opts.LeaseFor)
	if !w.local {
		duration = cmp.Or(t.want.LeaseFor, duration)
	}
	if l.Receipt.Token <= t.receipt.Token {
		m.t.Fatalf("token %x of %s is not larger than the last, %x", l.Receipt.Token, l.ID, t.receipt.Token)
	}
	t.receipt = Receipt{l.ID, l.Receipt.Token}
	m.receipts = append(m.receipts, t.receipt)
	t.over, t.local, t.duration = false, w.local, uint64(duration.Milliseconds())
	t.deadline = m.now() + t.duration
	t.want.State, t.want.At = Leased, wallTime(m.wall()+t.duration)
	t.want.Attempts++
	want := Lease{
		ID: t.receipt.ID, Receipt: t.receipt, Task: t.want.Task, Attempt: t.want.Attempts,
		Deadline: t.want.At, LastError: t.want.LastError,
	}
	if !reflect.DeepEqual(*l, want) {
		m.t.Fatalf("claim returned\n%+v, expected\n%+v", *l, want)
	}
}

// produceCall is Produce or ProduceBatch.
type produceCall struct {
	shard int
	tasks []Task
	ids   []ID
	err   error
}

func (m *model) drawProduce() call {
	c := &produceCall{shard: m.drawShard()}
	n := rapid.IntRange(1, 3).Draw(m.t, "tasks")
	m.drawn = tiesAll
	if m.hurried {
		// What is asked by messages, or has to look at the disk, may be decided
		// after calls that come later; so may what is for several shards.
		if m.drawn = tiesLocal; n > 1 && m.opts.Shards > 1 {
			m.drawn = tiesNone
		}
	}
	c.tasks = m.drawTasks(n)
	return c
}

// drawBacklog is for many tasks of one lane, or for one of each of many.
func (m *model) drawBacklog() call {
	m.drawn = tiesAll
	c := &produceCall{shard: m.drawShard(), tasks: m.drawTasks(rapid.IntRange(3, 10).Draw(m.t, "tasks"))}
	for i := range c.tasks {
		t := &c.tasks[i]
		t.Queue, t.Tenant, t.Priority, t.RunAt = c.tasks[0].Queue, c.tasks[0].Tenant, c.tasks[0].Priority, time.Time{}
	}
	if rapid.Bool().Draw(m.t, "of many tenants") {
		for i := range c.tasks {
			c.tasks[i].Tenant = fmt.Sprint("tenant ", i)
		}
	}
	if rapid.Bool().Draw(m.t, "all alike") {
		for i := range c.tasks {
			t := &c.tasks[i]
			t.Group, t.LimitKey, t.Unique, t.After = c.tasks[0].Group, c.tasks[0].LimitKey, Unique{}, nil
		}
	}
	if !m.plain && len(m.order) > 0 && rapid.IntRange(0, 3).Draw(m.t, "children") == 0 {
		parents := append(m.strangers(rapid.SampledFrom([]int{0, 0, 20, 60}).Draw(m.t, "strangers")), m.drawID())
		for i := range c.tasks {
			c.tasks[i].After = parents
		}
	}
	if rapid.IntRange(0, 4).Draw(m.t, "large") == 0 {
		for i := range c.tasks {
			m.enlarge(&c.tasks[i])
		}
	}
	return c
}

// enlarge gives a task a large payload.
func (m *model) enlarge(t *Task) { t.Payload = fmt.Appendf(t.Payload, "%*s", largeRecord-600, "") }

// strangers is IDs of tasks that never were.
func (m *model) strangers(n int) (ids []ID) {
	for i := range n {
		id := m.order[0]
		id[4], id[5] = id[4]-1, byte(i) // of other milliseconds
		ids = append(ids, id)
	}
	return ids
}

func (m *model) drawShard() int { return rapid.IntRange(0, m.opts.Shards-1).Draw(m.t, "shard") }

// genTask generates a task without a payload, with RunAt counted from 1970.
var genTask = rapid.Custom(func(t *rapid.T) Task {
	task := Task{
		Queue:       rapid.SampledFrom([]string{"a", "a", "b", "b", "c", "d", "e"}).Draw(t, "Queue"),
		Tenant:      rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "Tenant"),
		Priority:    rapid.SampledFrom([]int{0, 0, 5}).Draw(t, "Priority"),
		MaxAttempts: rapid.SampledFrom([]int{0, 0, 1, 2, 3}).Draw(t, "MaxAttempts"),
		LeaseFor:    rapid.SampledFrom([]time.Duration{0, 0, 2 * time.Second}).Draw(t, "LeaseFor"),
		Retention:   rapid.SampledFrom([]time.Duration{0, 0, 3 * time.Second, Forever}).Draw(t, "Retention"),
	}
	if wait := rapid.SampledFrom([]int64{0, 0, 0, -1, 1, 1000, 8000, 1_800_000}).Draw(t, "RunAt"); wait != 0 {
		task.RunAt = time.UnixMilli(wait)
	}
	if rapid.IntRange(0, 3).Draw(t, "Headers") == 3 {
		task.Headers, task.Timeout = map[string]string{"a": "1", "": "2"}, time.Minute
	}
	return task
})

// Which ties drawTasks draws.
const (
	tiesNone  = iota
	tiesLocal // decided at once: no parents, and no Replace
	tiesKeys  // decided at once: no parents
	tiesNext  // parents do not have the task canceled at once
	tiesAll
)

func (m *model) drawTasks(n int) []Task {
	tasks := make([]Task, n)
	for i := range tasks {
		tasks[i] = genTask.Draw(m.t, "task")
		m.serial++
		tasks[i].Payload = fmt.Appendf(nil, "%d%*s", m.serial, rapid.IntRange(0, 300).Draw(m.t, "more bytes"), "")
		if t := tasks[i].RunAt; !t.IsZero() {
			tasks[i].RunAt = m.opts.wall().Add(time.Duration(t.UnixMilli()) * time.Millisecond)
		}
		if !m.plain && m.drawn != tiesNone {
			m.drawTies(&tasks[i], i)
		}
		if rapid.IntRange(0, 15).Draw(m.t, "large") == 0 {
			m.enlarge(&tasks[i])
		}
	}
	return tasks
}

// drawTies binds the i-th task of a batch to others.
func (m *model) drawTies(t *Task, i int) {
	t.Group = rapid.SampledFrom([]string{"", "", "g"}).Draw(m.t, "Group")
	t.LimitKey = rapid.SampledFrom([]string{"", "", "k"}).Draw(m.t, "LimitKey")
	if key := rapid.SampledFrom([]string{"", "", "u", "v"}).Draw(m.t, "Unique.Key"); key != "" {
		t.Unique = Unique{
			Key:               key,
			For:               rapid.SampledFrom([]time.Duration{0, 0, 3 * time.Second, time.Hour}).Draw(m.t, "Unique.For"),
			Replace:           m.drawn != tiesLocal && rapid.Bool().Draw(m.t, "Unique.Replace"),
			ReleaseOnComplete: rapid.Bool().Draw(m.t, "Unique.ReleaseOnComplete"),
			ReleaseOnDead:     rapid.Bool().Draw(m.t, "Unique.ReleaseOnDead"),
		}
	}
	if m.drawn == tiesLocal || m.drawn == tiesKeys {
		return
	}
	for range rapid.SampledFrom([]int{0, 0, 0, 1, 1, 2}).Draw(m.t, "After") {
		if i > 0 && rapid.Bool().Draw(m.t, "Nth") {
			t.After = append(t.After, Nth(rapid.IntRange(0, i-1).Draw(m.t, "sibling")))
			continue
		}
		if len(m.order) == 0 {
			continue
		}
		id := m.drawID()
		if p := m.tasks[id]; m.drawn == tiesNext && p != nil && (p.want.State == Canceled || p.want.State == Dead || p.want.State == Leased) {
			continue // a lease may end with a crash, and the task be dead
		}
		t.After = append(t.After, id)
	}
	t.OnDead = rapid.SampledFrom([]OnDead{HoldOnDead, CancelOnDead, RunOnDead}).Draw(m.t, "OnDead")
}

func (c *produceCall) do(q *Queue) {
	if !slices.ContainsFunc(c.tasks, func(t Task) bool { return t.LimitKey+t.Group+t.Unique.Key != "" }) {
		q = q.startingAt(c.shard) // else these tasks decide
	}
	if len(c.tasks) > 1 {
		c.ids, c.err = q.ProduceBatch(context.Background(), c.tasks)
		return
	}
	id, err := q.Produce(context.Background(), c.tasks[0])
	c.ids, c.err = []ID{id}, err
}

func (c *produceCall) apply(m *model) {
	if m.refuses(c.tasks, -1) {
		if !errors.Is(c.err, ErrInvalid) {
			m.t.Fatalf("produce of %+v: %v", c.tasks, c.err)
		}
		return
	}
	var duplicates []DuplicateError
	stored := make(map[ID]bool)
	for i, id := range c.ids {
		task := c.tasks[i]
		if holder, taken := m.holder(&task); taken {
			if id != holder {
				m.t.Fatalf("produce of key %+v: %s, expected the holder %s", task.Unique, id, holder)
			}
			if t := m.tasks[holder]; task.Unique.Replace && t != nil && t.waiting() {
				m.replace(t, task)
				stored[id] = true
			} else {
				duplicates = append(duplicates, DuplicateError{Key: task.Unique.Key, ID: id, Index: i})
			}
			continue
		}
		shard := m.home(&task)
		switch first := slices.IndexFunc(c.tasks, func(t Task) bool { return m.home(&t) >= 0 }); {
		case shard >= 0:
		case first >= 0: // with one of those that belong somewhere
			shard = id.shard(m.opts.Shards)
			if !slices.ContainsFunc(c.tasks, func(t Task) bool { return m.home(&t) == shard }) {
				m.t.Fatalf("task %s lies in shard %d, where no other of its batch is", id, shard)
			}
		default:
			shard = c.shard
		}
		m.admit(shard, task, id, c.ids, false)
		stored[id] = true
	}
	m.markParents(c.tasks, c.ids, stored)
	got := duplicatesOf(c.err)
	slices.SortFunc(got, func(a, b DuplicateError) int { return a.Index - b.Index })
	if !slices.Equal(got, duplicates) || c.err != nil && len(got) == 0 {
		m.t.Fatalf("produce of %+v: %v, expected %+v", c.tasks, c.err, duplicates)
	}
	m.react()
}

// refuses reports whether a batch is not to be accepted: it is too large for one commit, tasks
// that refer to each other do not belong to the same shard, or one would replace another.
// Must is the shard in which follow-ups begin, or -1.
func (m *model) refuses(tasks []Task, must int) bool {
	keys := make(map[[record.UniqueLen]byte]bool)
	homes := make(map[int]bool)
	if must >= 0 {
		homes[must] = true
	}
	parents, bytes := 0, 0
	for i := range tasks {
		t := &tasks[i]
		rec := t.record()
		parents += len(t.After)
		bytes += len(rec.Encode()) + len(t.Queue) + len(t.Tenant) + taskCost + len(t.After)*parentCost
		if parents > m.opts.Limits.Parents || bytes > m.opts.Limits.CommitBytes {
			return true
		}
	}
	for i := range tasks {
		hash, has := m.keyOf(&tasks[i])
		if has && keys[hash] && tasks[i].Unique.Replace {
			return true
		}
		keys[hash] = has
		if home := m.home(&tasks[i]); home >= 0 {
			homes[home] = true
		}
	}
	return len(homes) > 1 && slices.ContainsFunc(tasks, func(t Task) bool {
		return slices.ContainsFunc(t.After, isNth)
	})
}

// duplicatesOf takes an error apart.
func duplicatesOf(err error) (all []DuplicateError) {
	switch e := err.(type) {
	case *DuplicateError:
		return []DuplicateError{*e}
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			all = append(all, duplicatesOf(err)...)
		}
	}
	return all
}

// claimCall is Claim or ClaimBatch, or the claim of a Run.
type claimCall struct {
	shard  int // that is asked first
	req    ClaimRequest
	local  bool
	cancel context.CancelFunc

	arrival int  // grows; equal for claims that were made together
	waited  bool // for the first shard that has a task

	ctx    context.Context
	done   chan struct{} // closed when the call has returned
	leases []*Lease
	err    error
}

func (m *model) drawClaim() call {
	c := &claimCall{shard: m.drawShard(), done: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(m.ctx)
	c.req = ClaimRequest{
		Queues:   rapid.SampledFrom([][]string{{"a"}, {"b"}, {"a", "b"}, {"b", "a"}, {"c", "d", "e"}, {"e", "a"}}).Draw(m.t, "Queues"),
		LeaseFor: rapid.SampledFrom([]time.Duration{0, time.Second, 10 * time.Second}).Draw(m.t, "LeaseFor"),
		NoWait:   true,
	}
	return c
}

// drawClaimOfMany is a claim that names many queues, most of which nobody else knows.
func (m *model) drawClaimOfMany() call {
	c := m.drawClaim().(*claimCall)
	c.req.Queues = slices.Clone(c.req.Queues)
	for i := range dispatch.ShortList {
		c.req.Queues = append(c.req.Queues, fmt.Sprint("nobody's ", i))
	}
	return c
}

func (m *model) drawClaimBatch() call {
	c := m.drawClaim().(*claimCall)
	c.req.Max = rapid.IntRange(1, 5).Draw(m.t, "Max")
	return c
}

func (m *model) drawClaimWaiting() call {
	c := m.drawClaim().(*claimCall)
	c.req.NoWait = false
	c.req.Max = rapid.IntRange(0, 3).Draw(m.t, "Max")
	return c
}

func (m *model) drawClaimLocal() call {
	c := m.drawClaimBatch().(*claimCall)
	c.local = true
	return c
}

func (c *claimCall) finished() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *claimCall) do(q *Queue) {
	defer close(c.done)
	q = q.startingAt(c.shard)
	switch {
	case c.local:
		var op *claimOp
		if op, c.err = q.claim(c.ctx, &c.req, &runner{queue: q}); c.err != nil {
			return
		}
		defer op.unref()
		for i := range op.Grants {
			l, err := leaseOf(&op.Grants[i])
			c.leases, c.err = append(c.leases, l), errors.Join(c.err, err)
		}
	case c.req.Max == 0:
		var l *Lease
		if l, c.err = q.Claim(c.ctx, c.req); c.err == nil {
			c.leases = []*Lease{l}
		}
	default:
		c.leases, c.err = q.ClaimBatch(c.ctx, c.req)
	}
}

// apply is for settle.
func (c *claimCall) apply(*model) { panic("claims are settled") }

// idleCall is WaitIdle.
type idleCall struct {
	queues []string
	cancel context.CancelFunc
	done   chan error // capacity 1
}

// waitIdle is the action of WaitIdle, or of one that gives up.
func (m *model) waitIdle(t *rapid.T) {
	if len(m.idlers) == 2 {
		c := m.idlers[0]
		m.idlers = m.idlers[1:]
		c.cancel()
		if err := <-c.done; !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled WaitIdle: %v", err)
		}
		return
	}
	c := &idleCall{done: make(chan error, 1)}
	c.queues = rapid.SampledFrom([][]string{nil, {"a"}, {"b"}, {"b", "a"}, {"none"}}).Draw(t, "queues")
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(m.ctx)
	q := m.q
	go func() { c.done <- q.WaitIdle(ctx, c.queues...) }()
	m.idlers = append(m.idlers, c)
	m.settle(true)
}

// cancelClaim is the action of a claim that gives up.
func (m *model) cancelClaim(t *rapid.T) {
	if len(m.waiters) == 0 {
		t.Skip()
	}
	i := rapid.IntRange(0, len(m.waiters)-1).Draw(t, "waiter")
	w := m.waiters[i]
	m.waiters = slices.Delete(m.waiters, i, i+1)
	w.cancel()
	synctest.Wait()
	if !w.finished() || !errors.Is(w.err, context.Canceled) {
		t.Fatalf("cancelled claim: finished %t, %v", w.finished(), w.err)
	}
}

// finishCall is a call of a verb with a receipt.
type finishCall struct {
	verb    string
	receipt Receipt
	d       time.Duration // to wait, or to extend
	cause   error
	result  []byte
	next    []Task
	err     error
}

// drawReceipt is of a lease in force rather than of one that is over.
func (m *model) drawReceipt() Receipt {
	if len(m.receipts) == 0 {
		m.t.Skip()
	}
	var live []Receipt
	for _, r := range m.receipts {
		if m.held(r) != nil {
			live = append(live, r)
		}
	}
	if len(live) > 0 && rapid.IntRange(0, 4).Draw(m.t, "stale receipt") > 0 {
		return rapid.SampledFrom(live).Draw(m.t, "receipt")
	}
	return rapid.SampledFrom(m.receipts).Draw(m.t, "receipt")
}

func (m *model) drawComplete() call {
	c := &finishCall{verb: "complete", receipt: m.drawReceipt()}
	if rapid.Bool().Draw(m.t, "result") {
		c.result = fmt.Append(nil, "result of ", c.receipt)
	}
	if m.drawn = tiesNext; m.hurried {
		m.drawn = tiesNone
	}
	c.next = m.drawTasks(rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(m.t, "next"))
	if t := m.tasks[c.receipt.ID]; t != nil && len(c.next) > 0 && !m.hurried && rapid.Bool().Draw(m.t, "again") {
		n, by := &c.next[0], t.want.Task
		n.Queue, n.Tenant, n.Group, n.LimitKey, n.Unique.Key = by.Queue, by.Tenant, by.Group, by.LimitKey, by.Unique.Key
		if by.Unique.Key == "" {
			n.Unique = Unique{}
		}
	}
	return c
}

func (m *model) drawFinish() call {
	return &finishCall{
		verb:    rapid.SampledFrom([]string{"retry", "retry", "release", "give back", "dead letter"}).Draw(m.t, "verb"),
		receipt: m.drawReceipt(),
		d:       rapid.SampledFrom([]time.Duration{0, 0, -1, time.Millisecond, 2 * time.Second}).Draw(m.t, "after"),
		cause:   rapid.SampledFrom([]error{nil, errors.New("first"), errors.New("second"), (*myErr)(nil), hostileErr{}}).Draw(m.t, "cause"),
	}
}

func (m *model) drawExtend() call {
	d := rapid.SampledFrom([]time.Duration{minLease, time.Second, 20 * time.Second}).Draw(m.t, "extension")
	return &finishCall{verb: "extend", receipt: m.drawReceipt(), d: d}
}

// drawBogus is for receipts that never were.
func (m *model) drawBogus() call {
	m.drawn = tiesNone
	c := &finishCall{
		verb:    rapid.SampledFrom([]string{"complete", "retry", "release", "give back", "dead letter", "extend"}).Draw(m.t, "verb"),
		receipt: m.drawReceipt(),
		d:       minLease,
		next:    m.drawTasks(rapid.IntRange(0, 1).Draw(m.t, "next")),
	}
	switch rapid.IntRange(0, 3).Draw(m.t, "change") {
	case 0:
		c.receipt.Token++
	case 1:
		c.receipt.Token--
	case 2:
		c.receipt.Token = 0
	case 3:
		c.receipt.ID[14]++
	}
	return c
}

func (c *finishCall) do(q *Queue) {
	ctx := context.Background()
	switch c.verb {
	case "complete":
		c.err = q.Complete(ctx, c.receipt, c.result, c.next...)
	case "retry":
		c.err = q.Retry(ctx, c.receipt, RetryOptions{Err: c.cause, After: c.d})
	case "release":
		c.err = q.Release(ctx, c.receipt, max(c.d, 0))
	case "give back":
		c.err = q.failed(ctx, c.receipt, failOp{how: engine.FailReturn}, nil)
	case "dead letter":
		c.err = q.DeadLetter(ctx, c.receipt, c.cause)
	case "extend":
		c.err = q.Extend(ctx, c.receipt, c.d)
	}
}

func (c *finishCall) apply(m *model) {
	if c.verb == "complete" && m.refuses(c.next, c.receipt.ID.shard(m.opts.Shards)) {
		if !errors.Is(c.err, ErrInvalid) {
			m.t.Fatalf("complete with %+v: %v", c.next, c.err)
		}
		return
	}
	t := m.held(c.receipt)
	if t == nil {
		if !errors.Is(c.err, ErrLeaseLost) || errors.Is(c.err, ErrCanceled) != m.canceled[c.receipt] {
			m.t.Fatalf("%s of %s, not in force: %v", c.verb, c.receipt, c.err)
		}
		return
	}
	if c.err != nil {
		m.t.Fatalf("%s of %s: %v", c.verb, c.receipt, c.err)
	}
	cause := ""
	if c.cause != nil {
		cause = modelText(c.cause)
	}
	switch c.verb {
	case "complete":
		m.toDone(t, c.result)
		m.adopt(t.shard, c.next)
	case "retry":
		m.retry(t, cause, m.wall(), func() {
			switch {
			case c.d == 0:
				m.wait(t, m.backoff(t.want.Attempts))
			default:
				m.wait(t, max(c.d, 0))
			}
		})
	case "release":
		t.want.Attempts--
		m.wait(t, max(c.d, 0))
	case "give back":
		t.want.Attempts--
		m.toReady(t, t.since)
	case "dead letter":
		t.want.LastError = cmp.Or(cause, t.want.LastError)
		m.toDead(t, m.wall())
	case "extend":
		d := uint64(c.d.Milliseconds())
		t.deadline = m.now() + d
		if !t.local { // the deadline of a local lease is in memory
			t.duration, t.want.At = d, wallTime(m.wall()+d)
		}
	}
	m.react()
}

// adopt finds the follow-ups that a Complete has produced: it does not say
// their IDs.
func (m *model) adopt(shard int, next []Task) {
	if len(next) == 0 {
		return
	}
	found, err := m.q.list()
	m.noError(err)
	byPayload := make(map[string]ID)
	for id, info := range found {
		byPayload[string(info.Payload)] = id
	}
	ids, stored := make([]ID, len(next)), make(map[ID]bool)
	for i, task := range next {
		id, ok := byPayload[string(task.Payload)]
		if holder, taken := m.holder(&task); taken {
			ids[i] = holder
			if t := m.tasks[holder]; task.Unique.Replace && t != nil && t.waiting() {
				m.replace(t, task)
				stored[holder] = true
			} else if ok {
				m.t.Fatalf("follow-up %q has the key of task %s", task.Payload, holder)
			}
			continue
		}
		if !ok {
			m.t.Fatalf("follow-up %q was not produced", task.Payload)
		}
		ids[i] = id
		home := m.home(&task)
		remote := home >= 0 && home != shard
		if home < 0 {
			home = shard
		}
		m.admit(home, task, id, ids, remote)
		stored[id] = true
	}
	m.markParents(next, ids, stored)
}

// markParents notes who was named by a sibling of its batch: it counts as a
// parent even if the sibling was not stored, as its key is taken.
func (m *model) markParents(tasks []Task, ids []ID, stored map[ID]bool) {
	for _, task := range tasks {
		for _, p := range task.After {
			if n, ok := keys.NthOf(p); ok && stored[ids[n]] {
				m.tasks[ids[n]].parent = true
			}
		}
	}
}

// isLimited reports whether settings may keep tasks of a queue from claims.
func (m *model) isLimited(queue string) bool {
	set := m.settings[queue]
	return set.Paused || set.Concurrency > 0 || set.ConcurrencyPerKey > 0
}

func isNth(id ID) bool {
	_, nth := keys.NthOf(id)
	return nth
}
