package codeq

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"codeq/internal/keys"
)

// TestModel runs random operations on a queue and on a model of it, and
// compares the two after every step: what the calls returned, every task in
// its state, and the counts; and it makes sure that the disk of a shard does
// not contradict itself (view.check) nor the shard's memory (checkMemory).
//
// Time is that of a synctest bubble, the wall clock any step away from it, and
// the disk is in memory and crashes. Nothing is left to chance but what rapid
// draws: a seed reproduces a run. -rapid.checks and -rapid.steps make it longer.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rapid.SyncTest(t, func(t *rapid.T) {
			m := newModel(t)
			defer m.end()
			actions := map[string]func(*rapid.T){
				"produce":       m.single((*model).drawProduce),
				"backlog":       m.single((*model).drawBacklog),
				"claim":         m.single((*model).drawClaim),
				"claim batch":   m.single((*model).drawClaimBatch),
				"claim local":   m.single((*model).drawClaimLocal),
				"claim waiting": m.single((*model).drawClaimWaiting),
				"wait idle":     m.waitIdle,
				"complete":      m.single((*model).drawComplete),
				"finish":        m.single((*model).drawFinish),
				"extend":        m.single((*model).drawExtend),
				"bogus":         m.single((*model).drawBogus),
				"drain":         m.drain,
				"hand back":     m.handBack,
				"queue up":      m.queueUp,
				"together":      m.together,
				"cancel":        m.cancel,
				"sleep":         m.sleep,
				"to next event": m.sleepToNextEvent,
				"step wall":     m.stepWall,
				"reopen":        m.reopen,
				"crash":         m.crash,
				"flush":         m.flush,
				"":              m.compare,
			}
			t.Repeat(actions)
			t.Repeat(actions)
		})
	})
}

// model is a queue under test and what is known of it.
type model struct {
	t    *rapid.T
	ctx  context.Context
	disk *vfs.MemFS
	opts Options
	q    *Queue
	skew atomic.Int64 // from the bubble's clock to the wall clock, ns

	tasks    map[ID]*modelTask
	gone     []ID            // tasks that are no more
	queues   map[string]bool // that ever had a task
	receipts []Receipt       // all that were given out
	minted   map[int]uint64  // largest since of a new task, by shard
	waiters  []*claimCall    // claims that wait, in the order of arrival
	idlers   []*idleCall     // WaitIdle
	serial   int             // of the last payload
	arrivals int             // of waiting claims
	steps    int

	// Turns of lanes. Lanes that evict each other from memory lose turns, and
	// those that wait for their refill may lose one.
	fair   bool
	served map[laneID]bool           // in this step
	passed map[laneID]map[laneID]int // by lane with ready tasks: steps that served the other and not it
}

// modelTask is what the model knows of a task.
type modelTask struct {
	want  TaskInfo // what Get returns
	shard int
	since uint64 // Ready, Leased: its place in the lane
	until uint64 // Scheduled, Done: when that ends by the wall clock, ms

	receipt  Receipt // the last that was given out
	deadline uint64  // Leased: by the bubble's clock, ms
	duration uint64  // Leased: ms
	local    bool    // Leased: by this process
}

func (t *modelTask) compare(o *modelTask) int {
	return cmp.Or(cmp.Compare(t.since, o.since), bytes.Compare(t.want.ID[:], o.want.ID[:]))
}

// laneID is a lane of a shard.
type laneID struct {
	shard    int
	queue    string
	priority int
	tenant   string
}

func (t *modelTask) lane() laneID {
	return laneID{t.shard, t.want.Queue, t.want.Priority, t.want.Tenant}
}

// rivals tells whether two lanes take turns.
func (l laneID) rivals(o laneID) bool {
	return l != o && l.shard == o.shard && l.queue == o.queue && l.priority == o.priority
}

func newModel(t *rapid.T) *model {
	m := &model{
		t: t, ctx: context.Background(), disk: vfs.NewCrashableMem(),
		tasks: make(map[ID]*modelTask), queues: make(map[string]bool), minted: make(map[int]uint64),
		served: make(map[laneID]bool), passed: make(map[laneID]map[laneID]int),
	}
	m.opts.Shards = rapid.IntRange(1, 3).Draw(t, "shards")
	m.open()
	return m
}

// open opens the queue with new options.
func (m *model) open() {
	m.opts = Options{
		Shards:        m.opts.Shards,
		Durability:    DurabilityDisk,
		LeaseFor:      5 * time.Second,
		MaxAttempts:   rapid.IntRange(1, 3).Draw(m.t, "MaxAttempts"),
		Retention:     rapid.SampledFrom([]time.Duration{0, 4 * time.Second}).Draw(m.t, "Retention"),
		Backoff:       Backoff{Base: time.Second, Max: 3 * time.Second, Jitter: -1},
		GroupCap:      rapid.SampledFrom([]int{0, 1, 2}).Draw(m.t, "GroupCap"),
		WindowTasks:   rapid.IntRange(2, 4).Draw(m.t, "WindowTasks"),
		WindowBytes:   rapid.SampledFrom([]int{0, 0, 1, 900, 3000}).Draw(m.t, "WindowBytes"),
		MemTableBytes: 256 << 10,
		fs:            m.disk,
		wall:          func() time.Time { return time.Now().Add(time.Duration(m.skew.Load())) },
	}
	var err error
	m.q, err = Open("queues/model", &m.opts)
	m.noError(err)
	m.fair = m.opts.WindowBytes == 0
	clear(m.passed)
	m.sync()
	m.settle(true)
}

func (m *model) end() {
	for _, w := range m.waiters {
		w.cancel()
	}
	for _, c := range m.idlers {
		c.cancel()
	}
	if m.q != nil {
		m.noError(m.q.Close())
	}
}

func (m *model) noError(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatalf("unexpected error: %v", err)
	}
}

// now is the bubble's clock, and wall the wall clock, in milliseconds.
func (m *model) now() uint64  { return uint64(time.Now().UnixMilli()) }
func (m *model) wall() uint64 { return uint64(m.opts.wall().UnixMilli()) }

func wallTime(ms uint64) time.Time { return time.UnixMilli(int64(ms)) }

// ready is the number of ready tasks of a queue in a shard.
func (m *model) ready(shard int, queue string) (n int) {
	for _, t := range m.tasks {
		if t.want.State == Ready && t.shard == shard && t.want.Queue == queue {
			n++
		}
	}
	return n
}

func (m *model) anyReady(queues []string) (n int) {
	for shard := range m.opts.Shards {
		for _, name := range queues {
			n += m.ready(shard, name)
		}
	}
	return n
}

// What becomes of tasks.

func (m *model) toReady(t *modelTask, since uint64) {
	t.since = since
	t.want.State, t.want.At = Ready, wallTime(keys.SinceMillis(since))
}

func (m *model) toScheduled(t *modelTask, due uint64) {
	t.until = due
	t.want.State, t.want.At = Scheduled, wallTime(due)
}

func (m *model) toDead(t *modelTask, at uint64) {
	t.want.State, t.want.At = Dead, wallTime(at)
}

func (m *model) toDone(t *modelTask, result []byte) {
	retention := cmp.Or(t.want.Retention, m.opts.Retention)
	if retention == 0 {
		m.toGone(t)
		return
	}
	t.until = bucketOf(m.wall(), retentionMillis(retention))
	t.want.State, t.want.At, t.want.Result = Done, wallTime(m.wall()), result
}

func (m *model) toGone(t *modelTask) {
	delete(m.tasks, t.want.ID)
	m.gone = append(m.gone, t.want.ID)
}

// retry is for an attempt that counts. A task with attempts left goes on.
func (m *model) retry(t *modelTask, cause string, at uint64, goesOn func()) {
	t.want.LastError = cmp.Or(cause, t.want.LastError)
	if t.want.Attempts >= cmp.Or(t.want.MaxAttempts, m.opts.MaxAttempts) {
		m.toDead(t, at)
		return
	}
	goesOn()
}

func (m *model) wait(t *modelTask, d time.Duration) {
	if d == 0 {
		m.toReady(t, keys.MovedSince(m.wall()))
	} else {
		m.toScheduled(t, m.wall()+uint64(d.Milliseconds()))
	}
}

func (m *model) backoff(attempt int) time.Duration {
	d := m.opts.Backoff.Base
	for range attempt - 1 {
		d *= 2
	}
	return min(d, m.opts.Backoff.Max)
}

// sync does what time has brought.
func (m *model) sync() {
	now, wall := m.now(), m.wall()
	for _, t := range m.tasks {
		switch {
		case t.want.State == Scheduled && t.until <= wall:
			m.toReady(t, keys.MovedSince(t.until))
		case t.want.State == Done && t.until <= wall:
			m.toGone(t)
		case t.want.State == Leased && t.deadline <= now:
			m.retry(t, "lease expired", wall-(now-t.deadline), func() { m.toReady(t, t.since) })
		}
	}
}

// nextEvent is when time brings something, by the bubble's clock.
func (m *model) nextEvent() uint64 {
	next := uint64(never)
	now, wall := m.now(), m.wall()
	for _, t := range m.tasks {
		switch t.want.State {
		case Leased:
			next = min(next, t.deadline)
		case Scheduled, Done:
			if t.until != neverExpires {
				next = min(next, now+t.until-wall)
			}
		}
	}
	return next
}

// held is the task of which a receipt names a lease in force, or nil.
func (m *model) held(r Receipt) *modelTask {
	if t := m.tasks[r.ID]; t != nil && t.want.State == Leased && t.receipt == r {
		return t
	}
	return nil
}

// admit takes in a new task.
func (m *model) admit(shard int, task Task, id ID) {
	since := keys.SinceOf(id)
	switch {
	case id.shard(m.opts.Shards) != shard:
		m.t.Fatalf("new task %s routes to shard %d, not %d", id, id.shard(m.opts.Shards), shard)
	case since <= m.minted[shard]:
		m.t.Fatalf("new task %s in shard %d does not come after %x", id, shard, m.minted[shard])
	case keys.SinceMillis(since) < m.wall():
		m.t.Fatalf("new task %s is of %v, now is %v", id, id.Time(), m.opts.wall())
	}
	m.minted[shard] = since
	m.queues[task.Queue] = true
	t := &modelTask{want: TaskInfo{ID: id, Task: task}, shard: shard}
	m.tasks[id] = t
	if !task.RunAt.IsZero() {
		t.want.RunAt = wallTime(uint64(task.RunAt.UnixMilli())) // in the local time zone
	}
	if due := uint64(task.RunAt.UnixMilli()); !task.RunAt.IsZero() && due > m.wall() {
		m.toScheduled(t, due)
	} else {
		m.toReady(t, since)
	}
}

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
		c.apply(m)
	}
	m.settle(true)
}

func (m *model) runClaim(w *claimCall) {
	shard, queue, found := m.foresee(w)
	go w.do(m.q)
	synctest.Wait()
	switch {
	case !found && !w.req.NoWait:
		m.arrivals++
		w.arrival = m.arrivals
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
		if l := w.leases[0]; l.ID.shard(m.opts.Shards) != shard || l.Queue != queue {
			m.t.Fatalf("claim of %s in shard %d, expected queue %s of shard %d",
				l.Queue, l.ID.shard(m.opts.Shards), queue, shard)
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

// foresee tells where a claim finds a task.
func (m *model) foresee(w *claimCall) (shard int, queue string, found bool) {
	for i := range m.opts.Shards {
		shard := (w.shard + i) % m.opts.Shards
		for _, name := range w.req.Queues {
			if m.ready(shard, name) > 0 {
				return shard, name, true
			}
		}
	}
	return 0, "", false
}

// together is the action of several calls of which the owner of one shard
// decides those that are for it in one go.
func (m *model) together(*rapid.T) {
	s := m.q.shards[rapid.IntRange(0, m.opts.Shards-1).Draw(m.t, "held shard")]
	draws := []func(*model) call{
		(*model).drawProduce, (*model).drawClaim, (*model).drawClaimWaiting, (*model).drawComplete,
		(*model).drawFinish, (*model).drawExtend,
	}
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
	for _, c := range calls {
		if w, ok := c.(*claimCall); ok {
			w.arrival = m.arrivals
			m.waiters = append(m.waiters, w)
		} else {
			c.apply(m)
		}
	}
	for _, w := range m.waiters {
		taken += len(w.leases)
	}
	var claims []*claimCall
	for _, w := range m.waiters {
		if !w.finished() || !errors.Is(w.err, ErrEmpty) {
			claims = append(claims, w)
		} else if ready[w] > taken {
			m.t.Fatalf("claim without a ready task, of which there were %d; %d were taken", ready[w], taken)
		}
	}
	m.waiters = claims
	m.settle(false)
}

// settle takes in what claims that waited have got, counts turns, and makes
// sure that nobody waits in vain. When several calls ran together, not
// strict, which of them came first is open.
func (m *model) settle(strict bool) {
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
	for _, w := range waiting {
		if n := m.anyReady(w.req.Queues); n > 0 {
			m.t.Fatalf("a claim waits for %v, with %d ready tasks", w.req.Queues, n)
		}
	}
	m.settleIdlers(strict)
	m.countTurns(strict)
}

// settleIdlers makes sure that those wait who should.
func (m *model) settleIdlers(strict bool) {
	m.idlers = slices.DeleteFunc(m.idlers, func(c *idleCall) bool {
		busy := 0
		for _, t := range m.tasks {
			if (t.want.State == Ready || t.want.State == Scheduled || t.want.State == Leased) &&
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
		for other := range m.served {
			if !l.rivals(other) {
				continue
			}
			if m.passed[l][other]++; m.fair && m.passed[l][other] > 2 {
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
		if l.Queue != first.Queue || l.ID.shard(m.opts.Shards) != first.ID.shard(m.opts.Shards) || !slices.Contains(w.req.Queues, l.Queue) {
			m.t.Fatalf("claim of %v returned tasks of %s and %s", w.req.Queues, first.Queue, l.Queue)
		}
		m.grantOne(w, l, strict)
	}
}

func (m *model) grantOne(w *claimCall, l *Lease, strict bool) {
	t := m.tasks[l.ID]
	if t == nil || t.want.State != Ready {
		m.t.Fatalf("claim returned %s, which is %+v", l.ID, t)
	}
	for _, o := range m.tasks {
		if !strict || o.want.State != Ready || o.shard != t.shard || o.want.Queue != t.want.Queue {
			continue
		}
		if o.want.Priority > t.want.Priority {
			m.t.Fatalf("claim returned %s of priority %d before %s of priority %d", l.ID, t.want.Priority, o.want.ID, o.want.Priority)
		}
		if o.lane() == t.lane() && o.compare(t) < 0 {
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
	t.local, t.duration = w.local, uint64(duration.Milliseconds())
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
	return &produceCall{shard: m.drawShard(), tasks: m.drawTasks(rapid.IntRange(1, 3).Draw(m.t, "tasks"))}
}

// drawBacklog is for many tasks of one lane.
func (m *model) drawBacklog() call {
	c := &produceCall{shard: m.drawShard(), tasks: m.drawTasks(rapid.IntRange(3, 10).Draw(m.t, "tasks"))}
	for i := range c.tasks {
		t := &c.tasks[i]
		t.Queue, t.Tenant, t.Priority, t.RunAt = c.tasks[0].Queue, c.tasks[0].Tenant, c.tasks[0].Priority, time.Time{}
	}
	return c
}

func (m *model) drawShard() int { return rapid.IntRange(0, m.opts.Shards-1).Draw(m.t, "shard") }

// genTask generates a task without a payload, with RunAt counted from 1970.
var genTask = rapid.Custom(func(t *rapid.T) Task {
	task := Task{
		Queue:       rapid.SampledFrom([]string{"a", "b"}).Draw(t, "Queue"),
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

func (m *model) drawTasks(n int) []Task {
	tasks := make([]Task, n)
	for i := range tasks {
		tasks[i] = genTask.Draw(m.t, "task")
		m.serial++
		tasks[i].Payload = fmt.Appendf(nil, "%d%*s", m.serial, rapid.IntRange(0, 300).Draw(m.t, "more bytes"), "")
		if t := tasks[i].RunAt; !t.IsZero() {
			tasks[i].RunAt = m.opts.wall().Add(time.Duration(t.UnixMilli()) * time.Millisecond)
		}
	}
	return tasks
}

func (c *produceCall) do(q *Queue) {
	q = q.startingAt(c.shard)
	if len(c.tasks) > 1 {
		c.ids, c.err = q.ProduceBatch(context.Background(), c.tasks)
		return
	}
	id, err := q.Produce(context.Background(), c.tasks[0])
	c.ids, c.err = []ID{id}, err
}

func (c *produceCall) apply(m *model) {
	m.noError(c.err)
	for i, id := range c.ids {
		m.admit(c.shard, c.tasks[i], id)
	}
}

// claimCall is Claim or ClaimBatch, or the claim of a Run.
type claimCall struct {
	shard  int // that is asked first
	req    ClaimRequest
	local  bool
	cancel context.CancelFunc

	arrival int // grows; equal for claims that were made together

	ctx    context.Context
	done   chan struct{} // closed when the call has returned
	leases []*Lease
	err    error
}

func (m *model) drawClaim() call {
	c := &claimCall{shard: m.drawShard(), done: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(m.ctx)
	c.req = ClaimRequest{
		Queues:   rapid.SampledFrom([][]string{{"a"}, {"b"}, {"a", "b"}, {"b", "a"}}).Draw(m.t, "Queues"),
		LeaseFor: rapid.SampledFrom([]time.Duration{0, time.Second, 10 * time.Second}).Draw(m.t, "LeaseFor"),
		NoWait:   true,
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
		if op, c.err = q.claim(c.ctx, &c.req, new(runner)); c.err != nil {
			return
		}
		defer op.unref()
		for i := range op.grants {
			l, err := op.grants[i].lease()
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

// cancel is the action of a claim that gives up.
func (m *model) cancel(t *rapid.T) {
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
	c.next = m.drawTasks(rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(m.t, "next"))
	return c
}

func (m *model) drawFinish() call {
	return &finishCall{
		verb:    rapid.SampledFrom([]string{"retry", "retry", "release", "give back", "dead letter"}).Draw(m.t, "verb"),
		receipt: m.drawReceipt(),
		d:       rapid.SampledFrom([]time.Duration{0, 0, -1, time.Millisecond, 2 * time.Second}).Draw(m.t, "after"),
		cause:   rapid.SampledFrom([]error{nil, errors.New("first"), errors.New("second")}).Draw(m.t, "cause"),
	}
}

func (m *model) drawExtend() call {
	d := rapid.SampledFrom([]time.Duration{minLease, time.Second, 20 * time.Second}).Draw(m.t, "extension")
	return &finishCall{verb: "extend", receipt: m.drawReceipt(), d: d}
}

// drawBogus is for receipts that never were.
func (m *model) drawBogus() call {
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
		c.err = q.failed(ctx, c.receipt, failOp{how: failReturn}, nil)
	case "dead letter":
		c.err = q.DeadLetter(ctx, c.receipt, c.cause)
	case "extend":
		c.err = q.Extend(ctx, c.receipt, c.d)
	}
}

func (c *finishCall) apply(m *model) {
	t := m.held(c.receipt)
	if t == nil {
		if !errors.Is(c.err, ErrLeaseLost) {
			m.t.Fatalf("%s of %s, not in force: %v", c.verb, c.receipt, c.err)
		}
		return
	}
	if c.err != nil {
		m.t.Fatalf("%s of %s: %v", c.verb, c.receipt, c.err)
	}
	cause := ""
	if c.cause != nil {
		cause = c.cause.Error()
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
	for _, task := range next {
		id, ok := byPayload[string(task.Payload)]
		if !ok {
			m.t.Fatalf("follow-up %q was not produced", task.Payload)
		}
		m.admit(shard, task, id)
	}
}

// Time.

// pass lets time pass, and stops wherever it brings something.
func (m *model) pass(d time.Duration) {
	for end := m.now() + uint64(d.Milliseconds()); m.now() < end; {
		next := min(end, m.nextEvent())
		time.Sleep(time.Duration(next-m.now()) * time.Millisecond)
		synctest.Wait()
		m.sync()
		m.settle(true)
		m.compareTasks()
	}
}

func (m *model) sleep(t *rapid.T) {
	m.pass(rapid.SampledFrom([]time.Duration{
		time.Millisecond, 500 * time.Millisecond, time.Second, 5 * time.Second, time.Minute,
	}).Draw(t, "sleep"))
}

func (m *model) sleepToNextEvent(t *rapid.T) {
	next := m.nextEvent()
	if next == never {
		t.Skip()
	}
	m.pass(time.Duration(next-m.now())*time.Millisecond - time.Millisecond)
	m.compare(t)
	m.pass(time.Millisecond)
}

// stepWall steps the wall clock. A shard sees that when the next operation
// comes, or a minute later.
func (m *model) stepWall(t *rapid.T) {
	step := time.Duration(rapid.SampledFrom([]int{1, 1000, 4000, 60_000, 3600_000}).Draw(t, "step")) * time.Millisecond
	if rapid.Bool().Draw(t, "backwards") {
		step = -step
	}
	m.skew.Add(int64(step))
	if len(m.waiters) == 0 && rapid.IntRange(0, 3).Draw(t, "quiet") == 0 {
		time.Sleep(duration(wallCheck))
	} else {
		for _, s := range m.q.shards {
			m.noError(s.probe(func(*shard) error { return nil }))
		}
	}
	synctest.Wait()
	m.sync()
	m.settle(true)
}

// The end of a process.

// reopen closes the queue and opens it again.
func (m *model) reopen(*rapid.T) {
	m.close()
	m.restart()
}

// crash opens the queue from what a power loss has left.
func (m *model) crash(t *rapid.T) {
	left := m.disk.CrashClone(vfs.CrashCloneCfg{
		UnsyncedDataPercent: rapid.SampledFrom([]int{0, 100}).Draw(t, "unsynced data that is left, %"),
		RNG:                 rand.New(rand.NewPCG(0, 0)), // decides nothing
	})
	m.close()
	m.disk = left
	m.restart()
}

func (m *model) close() {
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
		if err := <-c.done; !errors.Is(err, ErrClosed) {
			m.t.Fatalf("WaitIdle of a closed queue: %v", err)
		}
	}
	m.waiters, m.idlers = nil, nil
}

func (m *model) restart() {
	for _, t := range m.tasks {
		if t.want.State != Leased {
			continue
		}
		t.deadline = m.now()
		if end := uint64(t.want.At.UnixMilli()); !t.local && end > m.wall() {
			t.deadline += min(end-m.wall(), t.duration)
		}
	}
	m.open()
}

// flush moves what a shard has in memory into a table, and perhaps all tables
// into one.
func (m *model) flush(t *rapid.T) {
	db := m.q.shards[m.drawShard()].store.db
	m.noError(db.Flush())
	if rapid.Bool().Draw(t, "compact") {
		m.noError(db.Compact(m.ctx, []byte{0}, []byte{0xff}, false))
	}
}

// compare compares all that can be seen of the queue with the model.
func (m *model) compare(*rapid.T) {
	m.compareTasks() // first, as it does not wake the owners
	m.compareStats()
	m.compareGet()
	m.compareList()
	m.noError(m.q.checkAll())
	m.noError(m.q.checkMemory())
}

func (m *model) compareTasks() {
	found, err := m.q.list()
	m.noError(err)
	for id, info := range found {
		if m.tasks[id] == nil {
			m.t.Fatalf("unexpected task: %s", show(*info))
		}
	}
	for id, t := range m.tasks {
		m.compareTask(found[id], t)
	}
}

// show is a task for a message.
func show(t TaskInfo) string {
	t.Payload = t.Payload[:min(len(t.Payload), 4)]
	return fmt.Sprintf("%+v", t)
}

func (m *model) compareTask(got *TaskInfo, t *modelTask) {
	if got == nil {
		m.t.Fatalf("missing: %s", show(t.want))
	}
	if len(got.Result) == 0 {
		got.Result = nil
	}
	if !reflect.DeepEqual(*got, t.want) {
		m.t.Fatalf("found\n%s, expected\n%s", show(*got), show(t.want))
	}
}

func (m *model) compareStats() {
	want := make(map[string]Counts)
	for name := range m.queues {
		want[name] = Counts{}
	}
	for _, t := range m.tasks {
		c := want[t.want.Queue]
		switch t.want.State {
		case Ready:
			c.Ready++
		case Scheduled:
			c.Scheduled++
		case Leased:
			c.Leased++
		case Dead:
			c.Dead++
		case Done:
			c.Done++
		}
		want[t.want.Queue] = c
	}
	got, err := m.q.Stats(m.ctx)
	m.noError(err)
	if !maps.Equal(got, want) {
		m.t.Fatalf("stats are %+v, expected %+v", got, want)
	}
}

// compareGet compares one task and one that is no more, others after each step.
func (m *model) compareGet() {
	m.steps++
	ids := slices.SortedFunc(maps.Keys(m.tasks), func(a, b ID) int { return bytes.Compare(a[:], b[:]) })
	if len(ids) > 0 {
		id := ids[m.steps%len(ids)]
		got, err := m.q.Get(m.ctx, id)
		m.noError(err)
		m.compareTask(got, m.tasks[id])
	}
	if len(m.gone) > 0 {
		if got, err := m.q.Get(m.ctx, m.gone[m.steps%len(m.gone)]); !errors.Is(err, ErrNotFound) {
			m.t.Fatalf("task that is no more: %+v, %v", got, err)
		}
	}
}

// compareList compares the tasks of one state, of another one after each step.
func (m *model) compareList() {
	opts := ListOptions{State: Ready + State(m.steps)%Done, Queue: []string{"", "a", "b"}[m.steps/int(Done)%3]}
	n := 0
	for _, t := range m.tasks {
		if t.want.State == opts.State && (opts.Queue == "" || t.want.Queue == opts.Queue) {
			n++
		}
	}
	listed := make(map[ID]bool)
	for got, err := range m.q.List(m.ctx, opts) {
		m.noError(err)
		t := m.tasks[got.ID]
		if t == nil || t.want.State != opts.State || opts.Queue != "" && t.want.Queue != opts.Queue {
			m.t.Fatalf("list of %+v yields %s", opts, show(*got))
		}
		m.compareTask(got, t)
		listed[got.ID] = true
	}
	if len(listed) != n {
		m.t.Fatalf("list of %+v yields %d tasks, expected %d", opts, len(listed), n)
	}
}
