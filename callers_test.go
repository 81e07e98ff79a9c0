package codeq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/record"
	"codeq/internal/testkit"
)

// TestCallers makes random calls of a queue, of which some wait, and judges what they return by
// what the disk had before, and has when all is at rest: who gets which task, who waits, and what a
// call changes that is refused. What becomes of tasks, TestModel in internal/engine proves. After
// every step the disk does not contradict itself, nor the memory of any shard.
//
// Time is that of a synctest bubble, and the disk is in memory and crashes. Nothing is left to
// chance but what rapid draws: a seed reproduces a run. -rapid.checks and -rapid.steps make it
// longer.
func TestCallers(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		rapid.SyncTest(t, func(t *rapid.T) {
			m := newCrowd(t)
			defer m.end()
			t.Repeat(map[string]func(*rapid.T){
				"produce":       func(*rapid.T) { m.run(m.drawProduce()) },
				"claim":         func(*rapid.T) { m.run(m.drawClaim(1, true)) },
				"claim of many": func(*rapid.T) { m.run(m.drawClaimOfMany()) },
				"claim batch":   func(*rapid.T) { m.run(m.drawClaim(5, true)) },
				"claim waiting": func(*rapid.T) { m.run(m.drawClaim(3, false)) },
				"claim local":   m.claimLocal,
				"cancel claim":  m.cancelClaim,
				"wait idle":     m.waitIdle,
				"await":         m.await,
				"finish":        func(*rapid.T) { m.run(m.drawFinish()) },
				"control":       func(*rapid.T) { m.run(m.drawControl()) },
				"purge":         func(*rapid.T) { m.run(m.drawPurge()) },
				"configure":     func(*rapid.T) { m.run(m.drawConfigure()) },
				"together":      m.together,
				"sleep":         m.sleep,
				"step wall":     m.stepWall,
				"user code":     m.userCode,
				"low disk":      m.lowDisk,
				"reopen":        func(*rapid.T) { m.reopen(nil) },
				"crash":         m.crash,
				"":              m.check,
			})
		})
	})
}

// crowd is a queue under test, and those that call.
type crowd struct {
	t       *rapid.T
	ctx     context.Context
	disk    *crashfs.Disk
	opts    Options
	q       *Queue
	skew    atomic.Int64 // from the bubble's clock to the wall clock, ns
	stepped bool         // it was changed
	free    atomic.Int64 // bytes on the disk

	seen     map[ID]*TaskInfo // what the disk has, after the last step
	order    []ID             // all tasks that calls have stored
	receipts []Receipt
	settings map[string]Settings
	waiters  []*claimCall // claims that wait, in the order of arrival
	idlers   []*idleCall  // WaitIdle
	awaits   []*awaitCall
	serial   int // of the last payload
	arrivals int // of waiting claims
	steps    int
}

// crowdCall is one call of a queue.
type crowdCall interface {
	do(q *Queue)
	// judge looks at what the call has returned, and at m.seen: before is what there was before.
	// Alone says that nothing else has happened.
	judge(m *crowd, before map[ID]*TaskInfo, alone bool)
}

func newCrowd(t *rapid.T) *crowd {
	m := &crowd{t: t, ctx: context.Background(), disk: crashfs.New(), settings: make(map[string]Settings)}
	m.free.Store(testkit.FreeAt[engine.Roomy])
	m.opts.Shards = rapid.IntRange(1, 3).Draw(t, "shards")
	m.open()
	return m
}

// The bounds of what one call has, and of what a group has, if it has any.
const (
	fewParents  = 60
	smallCommit = 16 << 10
	smallGroup  = 4 << 10
)

func (m *crowd) open() {
	m.opts = *inspect.With(&Options{
		Shards: m.opts.Shards, Durability: DurabilityDisk, LeaseFor: 5 * time.Second,
		MaxAttempts: rapid.IntRange(1, 3).Draw(m.t, "MaxAttempts"),
		Retention:   oneOf(m, "Retention", 0, 4*time.Second),
		Backoff:     Backoff{Base: time.Second, Max: 3 * time.Second, Jitter: -1},
		GroupCap:    oneOf(m, "GroupCap", 0, 1, 2),
		WindowTasks: rapid.IntRange(2, 4).Draw(m.t, "WindowTasks"),
		WindowBytes: oneOf(m, "WindowBytes", 0, 900), MemTableBytes: 256 << 10, MinFreeBytes: testkit.MinFree,
		Limits: Limits{Parents: fewParents, CommitBytes: smallCommit},
	}, inspect.Private{
		IdleLanes: oneOf(m, "idleLanes", 1, engine.IdleLanes), SweepLanes: oneOf(m, "sweepLanes", 1, 8),
		GroupBytes: oneOf(m, "groupBytes", 0, 0, smallGroup), TrimBytes: oneOf(m, "trimBytes", 0, 1),
		TrimLane: oneOf(m, "trimLane", 0, 1), Wall: m.wall, ReclaimFrom: -1,
	})
	inspect.Options(&m.opts).FS = &roomyDisk{m.disk, &m.free}
	var err error
	m.q, err = Open("queues/callers", &m.opts)
	m.noError(err)
	m.settle(true)
}

func (m *crowd) noError(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatalf("unexpected error: %v", err)
	}
}

func oneOf[T any](m *crowd, what string, of ...T) T { return rapid.SampledFrom(of).Draw(m.t, what) }

func (m *crowd) drawShard() int { return rapid.IntRange(0, m.opts.Shards-1).Draw(m.t, "shard") }

func (m *crowd) wall() time.Time { return time.Now().Add(time.Duration(m.skew.Load())) }

// run makes a call while nothing else happens but claims that wait.
func (m *crowd) run(c crowdCall) {
	go c.do(m.q)
	synctest.Wait()
	m.judge(true, c)
}

// judge judges calls that have been made together, or one.
func (m *crowd) judge(strict bool, calls ...crowdCall) {
	before := m.seen
	m.look()
	alone := len(calls) == 1 && len(m.waiters) == 0 && inspect.Options(&m.opts).GroupBytes == 0 // else a call may find what is amid more groups
	m.arrivals++
	for _, c := range calls {
		if w, ok := c.(*claimCall); ok {
			w.arrival = m.arrivals
			if !w.finished() {
				m.waiters = append(m.waiters, w)
				continue
			}
		}
		c.judge(m, before, alone)
	}
	m.settle(strict)
}

// look reads what the disk has.
func (m *crowd) look() {
	synctest.Wait()
	var err error
	m.seen, err = m.q.list()
	m.noError(err)
}

// settle judges claims that have waited, and makes sure that nobody waits in vain. When several
// calls ran together, not strict, which of them came first is open.
func (m *crowd) settle(strict bool) {
	ordered := strict && inspect.Options(&m.opts).GroupBytes == 0 // else claims are served between the pieces of what is due at once
	before := m.seen
	m.look()
	var waiting []*claimCall
	for _, w := range m.waiters {
		if !w.finished() {
			waiting = append(waiting, w)
			continue
		}
		w.judge(m, before, false)
		for _, earlier := range waiting {
			if ordered && earlier.line() == w.line() && earlier.arrival < w.arrival && slices.Contains(earlier.req.Queues, w.leases[0].Queue) {
				m.t.Fatalf("a claim for %v was served after one that came later", earlier.req.Queues)
			}
		}
	}
	m.waiters = waiting
	for _, w := range waiting {
		if n := m.claimable(m.seen, w.req.Queues...); n > 0 {
			m.t.Fatalf("a claim waits for %v, with %d ready tasks", w.req.Queues, n)
		}
	}
	m.settleIdlers(ordered)
	m.settleAwaits(strict)
}

// Which tasks claims may get.

// leased counts the leases of a queue and, unless it is "", of a limit's key.
func leased(tasks map[ID]*TaskInfo, queue, key string) (n int) {
	for _, t := range tasks {
		if t.State == Leased && t.Queue == queue && (key == "" || t.LimitKey == key) {
			n++
		}
	}
	return n
}

// mayBeClaimed reports whether a task is ready and no setting keeps it from claims.
func (m *crowd) mayBeClaimed(tasks map[ID]*TaskInfo, t *TaskInfo) bool {
	set := m.settings[t.Queue]
	return t.State == Ready && !set.Paused &&
		(set.Concurrency == 0 || leased(tasks, t.Queue, "") < set.Concurrency) &&
		(set.ConcurrencyPerKey == 0 || t.LimitKey == "" || leased(tasks, t.Queue, t.LimitKey) < set.ConcurrencyPerKey)
}

// sameTime leaves the times of a task and of its attempts out where they may differ from the stamps
// that the disk has: once the wall clock was set, and for a lease by the rounding of two clocks.
func (m *crowd) sameTime(want, got *TaskInfo) {
	if m.stepped && len(want.History) == len(got.History) {
		got.FirstReady = want.FirstReady
		for i := range got.History {
			got.History[i].Start, got.History[i].End = want.History[i].Start, want.History[i].End
		}
	}
	if m.stepped || want.State == Leased && want.At.Sub(got.At).Abs() < 100*time.Millisecond {
		got.At = want.At
	}
}

// mayStart reports whether a task may be a suspect that waits for its start, which a claim brings.
func mayStart(t *TaskInfo) bool { return t != nil && t.Suspect && t.State == Blocked }

func (m *crowd) claimable(tasks map[ID]*TaskInfo, queues ...string) (n int) {
	for _, t := range tasks {
		if slices.Contains(queues, t.Queue) && m.mayBeClaimed(tasks, t) {
			n++
		}
	}
	return n
}

// isLimited reports whether settings may keep tasks of a queue from claims.
func (m *crowd) isLimited(queue string) bool {
	set := m.settings[queue]
	return set.Paused || set.Concurrency > 0 || set.ConcurrencyPerKey > 0
}

// claimCall is Claim or ClaimBatch, or the claim of a Run.
type claimCall struct {
	shard  int // that is asked first
	req    ClaimRequest
	local  bool
	cancel context.CancelFunc

	arrival int // grows; equal for claims that were made together
	ctx     context.Context
	done    chan struct{} // closed when the call has returned
	leases  []*Lease
	err     error
}

func (m *crowd) drawClaim(most int, noWait bool) *claimCall {
	c := &claimCall{shard: m.drawShard(), done: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(m.ctx)
	c.req = ClaimRequest{
		Queues: oneOf(m, "Queues", []string{"a"}, []string{"b"}, []string{"a", "b"}, []string{"b", "a"}, []string{"c", "d", "e"}, []string{"e", "a"}),
		Max:    rapid.IntRange(min(most-1, 1), most).Draw(m.t, "Max"), NoWait: noWait,
		LeaseFor: oneOf(m, "LeaseFor", 0, time.Second, 10*time.Second),
	}
	return c
}

// drawClaimOfMany is a claim that names many queues, most of which nobody else knows.
func (m *crowd) drawClaimOfMany() crowdCall {
	c := m.drawClaim(3, oneOf(m, "NoWait", true, false))
	c.req.Queues = slices.Clone(c.req.Queues)
	for i := range dispatch.ShortList {
		c.req.Queues = append(c.req.Queues, fmt.Sprint("nobody's ", i))
	}
	return c
}

func (m *crowd) claimLocal(*rapid.T) {
	c := m.drawClaim(5, true)
	c.local = true
	m.run(c)
}

// line identifies the line in which the claim waits: "" for all that name few queues, else the
// list. Within a line, claims are served first come, first served; lines take turns.
func (c *claimCall) line() string {
	if len(c.req.Queues) <= dispatch.ShortList {
		return ""
	}
	return fmt.Sprint(c.req.Queues)
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

func (c *claimCall) judge(m *crowd, before map[ID]*TaskInfo, alone bool) {
	ready := m.claimable(before, c.req.Queues...)
	switch {
	case errors.Is(c.err, ErrEmpty) && c.req.NoWait:
		if alone && ready > 0 {
			m.t.Fatalf("claim of %v is told that it is empty, with %d ready tasks", c.req.Queues, ready)
		}
		return
	case c.err != nil || len(c.leases) == 0 || len(c.leases) > max(c.req.Max, 1):
		m.t.Fatalf("claim of at most %d got %d leases: %v", c.req.Max, len(c.leases), c.err)
	}
	first := c.leases[0]
	for _, name := range c.req.Queues {
		if m.isLimited(name) || !alone || mayStart(before[first.ID]) { // what is ready may have to wait
			break
		}
		if m.claimable(before, name) > 0 {
			require.Equal(m.t, name, first.Queue, "the first of %v that has tasks", c.req.Queues)
			break
		}
	}
	for _, l := range c.leases {
		if l.ID.shard(m.opts.Shards) != first.ID.shard(m.opts.Shards) || !slices.Contains(c.req.Queues, l.Queue) {
			m.t.Fatalf("claim of %v got tasks of %s, and of two shards", c.req.Queues, l.Queue)
		}
		m.receipts = append(m.receipts, l.Receipt)
		switch now := m.seen[l.ID]; {
		case now == nil || now.State != Leased:
			if alone {
				m.t.Fatalf("claim got %s, which is %+v", l.ID, now)
			}
		case now.Attempts == l.Attempt && (!reflect.DeepEqual(now.Task, l.Task) || alone && !now.At.Equal(l.Deadline) || now.LastError != l.LastError):
			m.t.Fatalf("claim got\n%+v, the disk has\n%+v", l, now)
		}
		if alone {
			m.judgeOrder(l, before)
		}
		if was := before[l.ID]; was != nil {
			was.State = Leased // for the next of a batch
		}
	}
	for name, set := range m.settings {
		if n := leased(m.seen, name, ""); alone && set.Concurrency > 0 && n > max(set.Concurrency, leased(before, name, "")) {
			m.t.Fatalf("%d tasks of queue %s are leased, at most %d allowed", n, name, set.Concurrency)
		}
	}
}

// judgeOrder makes sure that a claim got a task that comes before all others: of all shards the
// highest priority, and of its lane the one that has been ready for longest.
func (m *crowd) judgeOrder(l *Lease, before map[ID]*TaskInfo) {
	was := before[l.ID]
	if mayStart(was) { // a suspect has its own order
		ready := *was
		ready.State = Ready
		if !m.mayBeClaimed(before, &ready) || l.Attempt != was.Attempts+1 {
			m.t.Fatalf("claim started attempt %d of %s, which was %+v", l.Attempt, l.ID, was)
		}
		return
	}
	if was == nil || !m.mayBeClaimed(before, was) || l.Attempt != was.Attempts+1 {
		m.t.Fatalf("claim got attempt %d of %s, which was %+v", l.Attempt, l.ID, was)
	}
	for id, o := range before {
		if o.Queue != was.Queue || !m.mayBeClaimed(before, o) || o.LimitKey != "" && m.settings[o.Queue].ConcurrencyPerKey > 0 {
			continue
		}
		if o.Priority > was.Priority {
			m.t.Fatalf("claim got %s of priority %d before %s of priority %d", l.ID, was.Priority, id, o.Priority)
		}
		if o.Priority == was.Priority && o.Tenant == was.Tenant && o.At.Before(was.At) && id.shard(m.opts.Shards) == l.ID.shard(m.opts.Shards) {
			m.t.Fatalf("claim got %s, ready since %v, before %s of the same lane, ready since %v", l.ID, was.At, id, o.At)
		}
	}
}

// cancelClaim is the action of a claim that gives up.
func (m *crowd) cancelClaim(t *rapid.T) {
	if len(m.waiters) == 0 {
		t.Skip()
	}
	i := rapid.IntRange(0, len(m.waiters)-1).Draw(t, "waiter")
	w := m.waiters[i]
	m.waiters = slices.Delete(m.waiters, i, i+1)
	w.cancel()
	synctest.Wait()
	if !w.finished() || !errors.Is(w.err, context.Canceled) {
		t.Fatalf("canceled claim: finished %t, %v", w.finished(), w.err)
	}
}

// produceCall is Produce or ProduceBatch.
type produceCall struct {
	shard int
	tasks []Task
	ids   []ID
	err   error
}

func (m *crowd) drawProduce() crowdCall {
	c := &produceCall{shard: m.drawShard(), tasks: make([]Task, rapid.IntRange(1, 5).Draw(m.t, "tasks"))}
	for i := range c.tasks {
		c.tasks[i] = m.drawTask(i)
	}
	return c
}

// drawTask draws the i-th task of a batch.
func (m *crowd) drawTask(i int) Task {
	m.serial++
	t := Task{
		Queue: oneOf(m, "Queue", "a", "a", "b", "b", "c", "d", "e"), Tenant: oneOf(m, "Tenant", "", "x", "y"),
		Priority: oneOf(m, "Priority", 0, 0, 5), Retention: oneOf(m, "Retention", 0, 0, 3*time.Second),
		Group: oneOf(m, "Group", "", "", "", "g"), LimitKey: oneOf(m, "LimitKey", "", "", "", "k"),
		Payload: fmt.Appendf(nil, "%d%*s", m.serial, oneOf(m, "more bytes", 0, 10, 300, 300, 8000), ""),
	}
	if wait := oneOf(m, "RunAt", 0, 0, 0, time.Millisecond, 8*time.Second); wait != 0 {
		t.RunAt = m.wall().Add(wait)
	}
	if key := oneOf(m, "Unique.Key", "", "", "", "u", "v"); key != "" {
		t.Unique = Unique{Key: key, Replace: rapid.Bool().Draw(m.t, "Replace"), For: oneOf(m, "For", 0, 3*time.Second)}
	}
	for range oneOf(m, "After", 0, 0, 0, 1, 2, fewParents) {
		if i > 0 && rapid.Bool().Draw(m.t, "Nth") {
			t.After = append(t.After, Nth(rapid.IntRange(0, i-1).Draw(m.t, "sibling")))
		} else if len(m.order) > 0 {
			t.After = append(t.After, rapid.SampledFrom(m.order).Draw(m.t, "parent"))
		}
	}
	return t
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

func (c *produceCall) judge(m *crowd, before map[ID]*TaskInfo, alone bool) {
	if refused := m.refuses(c.tasks); refused != errors.Is(c.err, ErrInvalid) {
		m.t.Fatalf("produce of %+v: %v, expected to be refused: %t", c.tasks, c.err, refused)
	} else if refused {
		m.unchanged(before, alone)
		return
	}
	duplicates := make(map[int]ID)
	for _, d := range duplicatesOf(c.err) {
		duplicates[d.Index] = d.ID
	}
	if c.err != nil && len(duplicates) == 0 {
		m.t.Fatalf("produce of %+v: %v", c.tasks, c.err)
	}
	for i, id := range c.ids {
		task, now := c.tasks[i], m.seen[id]
		home, bound := m.home(&task)
		switch holder, duplicate := duplicates[i]; {
		case bound && id.shard(m.opts.Shards) != home:
			m.t.Fatalf("task %+v is in the shard of %s, expected %d", task, id, home)
		case duplicate && (holder != id || task.Unique.Key == ""):
			m.t.Fatalf("task %+v is a duplicate of %s, by its error of %s", task, id, holder)
		case duplicate, task.Unique.Replace, isReplaced(c.tasks, i), !alone:
		case now == nil && len(task.After) > 0: // canceled at once, perhaps
		case now == nil || !bytes.Equal(now.Payload, task.Payload) || before[id] != nil:
			m.t.Fatalf("produce of %+v stored %s: %+v", task, id, now)
		}
		m.order = append(m.order, id)
	}
}

// isReplaced reports whether a later task of a batch replaces one.
func isReplaced(tasks []Task, i int) bool {
	return slices.ContainsFunc(tasks[i+1:], func(t Task) bool {
		return t.Unique.Replace && t.Queue == tasks[i].Queue && t.Unique.Key == tasks[i].Unique.Key
	})
}

// home is the shard to which a task belongs.
func (m *crowd) home(t *Task) (shard int, bound bool) {
	rec := t.record()
	return rec.Ties.Home(m.opts.Shards)
}

// refuses reports whether a batch is not to be accepted, as it is too large for one commit.
func (m *crowd) refuses(tasks []Task) bool {
	parents, bytes := 0, 0
	for i := range tasks {
		t := &tasks[i]
		rec := t.record()
		parents += len(t.After)
		bytes += len(rec.Encode()) + len(t.Queue) + len(t.Tenant)
		bytes += 300 + 64*len(t.After) // as Limits.CommitBytes says
	}
	return parents > m.opts.Limits.Parents || bytes > m.opts.Limits.CommitBytes
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

// unchanged makes sure that a call that was refused has changed nothing.
func (m *crowd) unchanged(before map[ID]*TaskInfo, alone bool) {
	if alone && !reflect.DeepEqual(before, m.seen) {
		m.t.Fatalf("a call that was refused has changed tasks: %+v, before %+v", m.seen, before)
	}
}

// finishCall is a call of a verb with a receipt.
type finishCall struct {
	verb    string
	receipt Receipt
	cause   error
	next    []Task
	err     error
}

func (m *crowd) drawFinish() crowdCall {
	if len(m.receipts) == 0 {
		m.t.Skip()
	}
	c := &finishCall{
		verb:    oneOf(m, "verb", "complete", "complete", "retry", "release", "dead letter", "extend"),
		receipt: m.receipts[max(0, len(m.receipts)-1-rapid.IntRange(0, 8).Draw(m.t, "receipt"))],
		cause:   oneOf[error](m, "cause", nil, errors.New("cause"), (*testkit.MyErr)(nil), testkit.HostileErr{}),
	}
	if c.verb == "complete" && rapid.IntRange(0, 2).Draw(m.t, "next") == 0 {
		c.next = []Task{m.drawTask(0)}
		c.next[0].Unique, c.next[0].After = Unique{}, nil
	}
	return c
}

func (c *finishCall) do(q *Queue) {
	ctx := context.Background()
	switch c.verb {
	case "complete":
		c.err = q.Complete(ctx, c.receipt, []byte("result"), c.next...)
	case "retry":
		c.err = q.Retry(ctx, c.receipt, RetryOptions{Err: c.cause, After: -1})
	case "release":
		c.err = q.Release(ctx, c.receipt, 0)
	case "dead letter":
		c.err = q.DeadLetter(ctx, c.receipt, c.cause)
	case "extend":
		c.err = q.Extend(ctx, c.receipt, 20*time.Second)
	}
}

func (c *finishCall) judge(m *crowd, before map[ID]*TaskInfo, alone bool) {
	was, now := before[c.receipt.ID], m.seen[c.receipt.ID]
	last := func(r Receipt) bool { return r.ID == c.receipt.ID && r.Token > c.receipt.Token }
	held := was != nil && was.State == Leased && !slices.ContainsFunc(m.receipts, last)
	switch {
	case c.verb == "complete" && m.refuses(c.next):
		require.ErrorIs(m.t, c.err, ErrInvalid)
		m.unchanged(before, alone)
		return
	case !held && alone:
		require.ErrorIs(m.t, c.err, ErrLeaseLost)
		m.unchanged(before, alone)
		return
	case c.err != nil && !alone && errors.Is(c.err, ErrLeaseLost): // another call has ended it
		return
	}
	m.noError(c.err)
	if !alone {
		return
	}
	state := State(0)
	if now != nil {
		state = now.State
	}
	want := map[string][]State{
		"complete": {0, Done}, "retry": {Ready, Dead}, "release": {Ready}, "dead letter": {Dead}, "extend": {Leased},
	}
	if !slices.Contains(want[c.verb], state) {
		m.t.Fatalf("after %s of %s it is %+v", c.verb, c.receipt, now)
	}
	if c.cause != nil && (c.verb == "retry" || c.verb == "dead letter") {
		require.Equal(m.t, storedText(c.cause), now.LastError)
	}
	for _, task := range c.next {
		if !slices.ContainsFunc(slices.Collect(maps.Values(m.seen)), func(t *TaskInfo) bool { return bytes.Equal(t.Payload, task.Payload) }) {
			m.t.Fatalf("follow-up %q was not produced", task.Payload)
		}
	}
}

// storedText is what is stored of an error that a user hands in, whose method Error may panic.
func storedText(err error) string {
	switch err := err.(type) {
	case *testkit.MyErr:
		if err == nil {
			return "error of type *testkit.MyErr, whose method Error panics: runtime error: invalid memory address or nil pointer dereference"
		}
	case testkit.HostileErr:
		return "error of type testkit.HostileErr, whose method Error panics: Error"
	}
	return err.Error()
}

// controlCall is a verb that names a task by its ID.
type controlCall struct {
	verb string
	id   ID
	err  error
}

func (m *crowd) drawControl() crowdCall {
	if len(m.order) == 0 {
		m.t.Skip()
	}
	return &controlCall{verb: oneOf(m, "verb", "cancel", "cancel", "priority", "run at", "redrive"), id: rapid.SampledFrom(m.order).Draw(m.t, "task")}
}

func (c *controlCall) do(q *Queue) {
	ctx := context.Background()
	switch c.verb {
	case "cancel":
		c.err = q.Cancel(ctx, c.id)
	case "priority":
		c.err = q.SetPriority(ctx, c.id, 9)
	case "run at":
		c.err = q.SetRunAt(ctx, c.id, time.Time{})
	case "redrive":
		c.err = q.RedriveDead(ctx, c.id)
	}
}

func (c *controlCall) judge(m *crowd, before map[ID]*TaskInfo, alone bool) {
	was, now := before[c.id], m.seen[c.id]
	var want error
	switch {
	case !alone:
		return
	case was == nil, c.verb == "redrive" && was.State != Dead:
		want = ErrNotFound
	case c.verb == "cancel" && (was.State == Done || was.State == Canceled),
		(c.verb == "priority" || c.verb == "run at") && was.State >= Leased:
		want = ErrNotWaiting
	case c.verb == "redrive" && was.Unique.Key != "" && errors.Is(c.err, ErrDuplicate):
		want = ErrDuplicate
	}
	if want != nil {
		require.ErrorIs(m.t, c.err, want)
		m.unchanged(before, alone)
		return
	}
	m.noError(c.err)
	good := map[string]bool{
		"cancel": now == nil || now.State == Canceled, "priority": now != nil && now.Priority == 9,
		"run at": now != nil && now.RunAt.IsZero(), "redrive": now != nil && now.State < Leased && now.Attempts == 0,
	}
	if !good[c.verb] {
		m.t.Fatalf("after %s of %+v it is %+v", c.verb, was, now)
	}
}

// purgeCall is PurgeDead.
type purgeCall struct {
	queue string
	n     int
	err   error
}

func (m *crowd) drawPurge() crowdCall { return &purgeCall{queue: oneOf(m, "queue", "", "a", "b")} }

func (c *purgeCall) do(q *Queue) {
	c.n, c.err = q.PurgeDead(context.Background(), DeadFilter{Queue: c.queue})
}

func (c *purgeCall) judge(m *crowd, before map[ID]*TaskInfo, alone bool) {
	m.noError(c.err)
	n := 0
	for id, t := range before {
		if t.State != Dead || c.queue != "" && t.Queue != c.queue {
			continue
		}
		n++
		if m.seen[id] != nil {
			m.t.Fatalf("purged task is %+v", m.seen[id])
		}
	}
	if alone && c.n != n {
		m.t.Fatalf("purged %d, expected %d", c.n, n)
	}
}

// configureCall is Configure, Pause or Resume.
type configureCall struct {
	queue, verb string
	to          Settings
	err         error
}

func (m *crowd) drawConfigure() crowdCall {
	c := &configureCall{queue: oneOf(m, "queue", "a", "b"), verb: oneOf(m, "verb", "", "", "pause", "resume")}
	c.to = Settings{
		Concurrency:       oneOf(m, "Concurrency", 0, 0, 1, 3),
		ConcurrencyPerKey: oneOf(m, "ConcurrencyPerKey", 0, 1, 2),
		TenantWeights:     oneOf(m, "TenantWeights", nil, map[string]int{"x": 3}),
		HoldGroups:        rapid.Bool().Draw(m.t, "HoldGroups"),
	}
	return c
}

func (c *configureCall) do(q *Queue) {
	ctx := context.Background()
	switch c.verb {
	case "pause":
		c.err = q.Pause(ctx, c.queue)
	case "resume":
		c.err = q.Resume(ctx, c.queue)
	default:
		c.err = q.Configure(ctx, c.queue, func(s *Settings) { *s = c.to })
	}
}

func (c *configureCall) judge(m *crowd, _ map[ID]*TaskInfo, _ bool) {
	m.noError(c.err)
	set := m.settings[c.queue]
	if c.verb == "" {
		set = c.to
		set.TenantWeights = maps.Clone(c.to.TenantWeights)
	}
	set.Paused = c.verb == "pause"
	if m.settings[c.queue] = set; reflect.DeepEqual(set, Settings{}) {
		delete(m.settings, c.queue) // they are not kept
	}
}

// together is the action of several calls of which the owner of one shard
// decides those that are for it in one go.
func (m *crowd) together(*rapid.T) {
	s := m.q.shard(m.drawShard())
	calls := make([]crowdCall, rapid.IntRange(2, 6).Draw(m.t, "calls"))
	for i := range calls {
		switch n := rapid.IntRange(0, 5).Draw(m.t, "call"); {
		case n == 0 && len(m.receipts) > 0:
			calls[i] = m.drawFinish()
		case n == 1 && len(m.order) > 0:
			calls[i] = m.drawControl()
		case n <= 3:
			calls[i] = m.drawClaim(3, oneOf(m, "NoWait", true, false))
		default:
			calls[i] = m.drawProduce()
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
	m.judge(false, calls...)
}

// sleep lets time pass, and looks before a lease can end that somebody has got meanwhile.
func (m *crowd) sleep(*rapid.T) {
	for d := oneOf(m, "sleep", time.Millisecond, time.Second, 5*time.Second, 20*time.Second); d > 0; d -= time.Second / 2 {
		time.Sleep(min(d, time.Second/2))
		m.settle(false)
	}
}

// stepWall steps the wall clock. A shard sees that when the next operation comes, or a minute
// later.
func (m *crowd) stepWall(t *rapid.T) {
	m.stepped = true
	m.skew.Add(int64(oneOf(m, "step", 1, -1, 4000, -4000, 3600_000, -3600_000)) * int64(time.Millisecond))
	if rapid.Bool().Draw(t, "quiet") {
		time.Sleep(record.Duration(wallCheck))
	} else {
		for _, s := range m.q.led() {
			m.noError(s.probe(func(*shard) error { return nil }))
		}
	}
	m.settle(false)
}

// idleCall is WaitIdle.
type idleCall struct {
	queues []string
	cancel context.CancelFunc
	done   chan error // capacity 1
}

// waitIdle is the action of WaitIdle, or of one that gives up.
func (m *crowd) waitIdle(t *rapid.T) {
	if len(m.idlers) == 2 {
		c := m.idlers[0]
		m.idlers = m.idlers[1:]
		c.cancel()
		require.ErrorIs(t, <-c.done, context.Canceled)
		return
	}
	c := &idleCall{done: make(chan error, 1)}
	c.queues = oneOf(m, "queues", nil, []string{"a"}, []string{"b"}, []string{"b", "a"}, []string{"none"})
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(m.ctx)
	q := m.q
	go func() { c.done <- q.WaitIdle(ctx, c.queues...) }()
	m.idlers = append(m.idlers, c)
	m.settle(true)
}

// settleIdlers makes sure that those wait who should.
func (m *crowd) settleIdlers(strict bool) {
	m.idlers = slices.DeleteFunc(m.idlers, func(c *idleCall) bool {
		busy := 0
		for _, t := range m.seen {
			if t.State < Dead && (len(c.queues) == 0 || slices.Contains(c.queues, t.Queue)) {
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

// awaitCall is Await.
type awaitCall struct {
	id     ID
	cancel context.CancelFunc
	done   chan error // capacity 1
	got    *Outcome
}

// await is the action of an Await, or of one that gives up.
func (m *crowd) await(t *rapid.T) {
	if len(m.awaits) == 3 || len(m.order) == 0 {
		if len(m.awaits) == 0 {
			t.Skip()
		}
		c := m.awaits[0]
		m.awaits = m.awaits[1:]
		c.cancel()
		require.ErrorIs(t, <-c.done, context.Canceled)
		return
	}
	c := &awaitCall{id: rapid.SampledFrom(m.order).Draw(t, "task"), done: make(chan error, 1)}
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(m.ctx)
	q := m.q
	go func() {
		var err error
		c.got, err = q.Await(ctx, c.id)
		c.done <- err
	}()
	synctest.Wait()
	if m.seen[c.id] == nil {
		c.cancel()
		if err := <-c.done; err != nil { // or its end is remembered
			require.ErrorIs(t, err, ErrNotFound)
		}
		return
	}
	m.awaits = append(m.awaits, c)
	m.settle(true)
}

// settleAwaits makes sure that those are told whose task has ended. Unless strict, it may have been
// canceled or redriven after they were told of its death.
func (m *crowd) settleAwaits(strict bool) {
	m.awaits = slices.DeleteFunc(m.awaits, func(c *awaitCall) bool {
		t := m.seen[c.id]
		select {
		case err := <-c.done:
			m.noError(err)
			if t != nil && t.State >= Dead && (strict || c.got.State != Dead || t.State == Dead) {
				want := Outcome{State: t.State, Result: t.Result, LastError: t.LastError, Attempts: t.Attempts}
				if t.State == Done {
					want.LastError = ""
				}
				if len(c.got.Result) == 0 {
					c.got.Result = want.Result
				}
				require.Equal(m.t, want, *c.got)
			}
			c.cancel()
			return true
		default:
			if t == nil || t.State >= Dead {
				m.t.Fatalf("Await of %s still waits, and it is %+v", c.id, t)
			}
			return false
		}
	})
}

// userCode is the action of functions of a user that fail within a call: the panic is the caller's,
// and nothing else changes.
func (m *crowd) userCode(*rapid.T) {
	ctx, failure := context.Background(), errors.New("of the user")
	queue := oneOf(m, "queue", "a", "b")
	fail := oneOf(m, "user code",
		func() {
			_ = m.q.Configure(ctx, queue, func(s *Settings) {
				require.Equal(m.t, m.settings[queue], *s)
				require.ErrorIs(m.t, m.q.Pause(ctx, queue), ErrInvalid) // within another call
				s.Paused, s.Concurrency = true, 1
				panic(failure)
			})
		},
		func() {
			for range m.q.List(ctx, ListOptions{State: Ready, Queue: queue}) {
				panic(failure)
			}
			panic(failure)
		},
		func() {
			ctx, cancel := context.WithCancelCause(ctx)
			cancel(failure)
			_, err := m.q.Claim(ctx, ClaimRequest{Queues: []string{"no tasks"}})
			panic(err)
		},
	)
	func() {
		defer func() {
			v := recover()
			err, ok := v.(error)
			if !ok {
				panic(v) // a check of the test's
			}
			require.ErrorIs(m.t, err, failure)
		}()
		fail()
	}()
	before := m.seen
	m.settle(true)
	m.unchanged(before, len(m.waiters) == 0)
}

// lowDisk is the action of calls while there is less room on the disk: what adds tasks is refused,
// and below that what leases them, and both go on when there is room.
func (m *crowd) lowDisk(*rapid.T) {
	level := engine.Room(rapid.IntRange(int(engine.RoomLow), int(engine.RoomEmpty)).Draw(m.t, "level"))
	m.setRoom(level)
	before := m.seen
	produce, claim := m.drawProduce().(*produceCall), m.drawClaim(3, true)
	produce.do(m.q)
	if !m.refuses(produce.tasks) {
		require.ErrorIs(m.t, produce.err, ErrDiskFull)
	}
	if level > engine.RoomLow {
		claim.do(m.q)
		require.ErrorIs(m.t, claim.err, ErrDiskFull)
		m.look()
		m.unchanged(before, true)
	} else {
		m.run(claim)
	}
	m.setRoom(engine.Roomy)
	m.settle(false)
}

// setRoom sets the level of room, and lets all shards find it.
func (m *crowd) setRoom(level engine.Room) {
	m.free.Store(testkit.FreeAt[level])
	for _, s := range m.q.led() {
		m.noError(s.probe(func(s *shard) error {
			s.space.Written = math.MaxInt
			return nil
		}))
		m.noError(s.probe(func(*shard) error { return nil }))
	}
}

// roomyDisk is a file system with as much room as somebody says.
type roomyDisk struct {
	vfs.FS
	free *atomic.Int64 // bytes
}

func (d *roomyDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: uint64(d.free.Load()), TotalBytes: 1 << 40}, nil
}

// crash opens the queue from what a power loss has left.
func (m *crowd) crash(t *rapid.T) {
	m.reopen(m.disk.CrashClone(vfs.CrashCloneCfg{
		UnsyncedDataPercent: oneOf(m, "unsynced data that is left, %", 0, 100),
	}))
}

// reopen closes the queue, and opens it again, from another disk if there is one: what was stored
// is there, but that leases may have ended.
func (m *crowd) reopen(disk *crashfs.Disk) {
	m.look()
	before := m.seen
	m.close()
	if disk != nil {
		m.disk = disk
	}
	m.open()
	for id, t := range before {
		now := m.seen[id]
		switch {
		case now == nil, t.State != Leased && t.State != Blocked && (now.State != t.State || now.Attempts != t.Attempts), !bytes.Equal(now.Payload, t.Payload):
			m.t.Fatalf("task %+v is %+v when the queue is opened again", t, now)
		}
	}
	require.Len(m.t, m.seen, len(before))
}

func (m *crowd) close() {
	q := m.q
	m.q = nil
	m.noError(q.Close())
	synctest.Wait()
	for _, w := range m.waiters {
		if !w.finished() || !errors.Is(w.err, ErrClosed) {
			m.t.Fatalf("claim in a closed queue: finished %t, %v", w.finished(), w.err)
		}
	}
	for _, c := range m.idlers {
		require.ErrorIs(m.t, <-c.done, ErrClosed)
	}
	for _, c := range m.awaits {
		require.ErrorIs(m.t, <-c.done, ErrClosed)
	}
	m.waiters, m.idlers, m.awaits = nil, nil, nil
}

func (m *crowd) end() {
	for _, w := range m.waiters {
		w.cancel()
	}
	for _, c := range m.idlers {
		c.cancel()
	}
	for _, c := range m.awaits {
		c.cancel()
	}
	if m.q != nil {
		m.noError(m.q.Close())
	}
}

// check compares all that can be seen of the queue with what its disk has, and makes sure that this
// does not contradict itself.
func (m *crowd) check(*rapid.T) {
	m.steps++
	m.checkStats()
	m.checkList()
	for id, want := range m.seen {
		got, err := m.q.Get(m.ctx, id)
		m.noError(err)
		m.sameTime(want, got)
		require.Equal(m.t, want, got)
		break
	}
	for name, want := range m.settings {
		got, err := m.q.Settings(name)
		m.noError(err)
		require.Equal(m.t, want, got)
	}
	m.noError(m.q.checkAll())
	m.noError(m.q.checkMemory())
	for _, s := range m.q.led() {
		for _, st := range upkeepStats(s.upkeep.UpkeepTable) { // operations go by their budget, and one batch
			if st.Kind == UpkeepOperations && inspect.Options(&m.opts).GroupBytes != 0 && st.MaxBytes > smallGroup+2*smallCommit {
				m.t.Fatalf("owners had %d bytes of operations at once", st.MaxBytes)
			}
		}
	}
}

func (m *crowd) checkStats() {
	want := make(map[string]Counts)
	for name := range m.settings {
		want[name] = Counts{}
	}
	for _, t := range m.seen {
		c := want[t.Queue]
		*[...]*uint64{Ready: &c.Ready, Scheduled: &c.Scheduled, Blocked: &c.Blocked, Leased: &c.Leased, Dead: &c.Dead, Done: &c.Done, Canceled: &c.Canceled}[t.State]++
		want[t.Queue] = c
	}
	got, err := m.q.Stats(m.ctx)
	m.noError(err)
	require.Equal(m.t, want, got)
	infos, err := m.q.Info(m.ctx)
	m.noError(err)
	for _, i := range infos {
		require.Equal(m.t, want[i.Queue], i.Counts, i.Queue)
		require.Equal(m.t, i.Counts.Ready > 0, !i.OldestReady.IsZero(), i.Queue)
		delete(want, i.Queue)
	}
	require.Empty(m.t, want)
}

// checkList compares the tasks of one state, of another one after each step.
func (m *crowd) checkList() {
	opts := ListOptions{State: Ready + State(m.steps)%Canceled, Queue: []string{"", "a", "b", "c"}[m.steps/int(Canceled)%4]}
	listed := make(map[ID]*TaskInfo)
	for got, err := range m.q.List(m.ctx, opts) {
		m.noError(err)
		listed[got.ID] = got
	}
	want := maps.Clone(m.seen)
	maps.DeleteFunc(want, func(_ ID, t *TaskInfo) bool {
		return t.State != opts.State || opts.Queue != "" && t.Queue != opts.Queue
	})
	for id, got := range listed {
		if want := want[id]; want != nil {
			m.sameTime(want, got)
		}
	}
	require.Equal(m.t, want, listed)
}
