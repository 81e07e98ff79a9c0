package faults_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestCallers makes random calls of a queue; some of them wait. It checks their results against the
// contents of the disk before the call and at rest after it: which claim gets which task, which
// calls wait, and that a refused call changes nothing. TestModel in internal/engine proves the
// effect of calls on tasks. After every step, the disk contradicts neither itself nor the memory of
// any shard.
//
// Time is that of a synctest bubble; the disk is in memory and can crash. rapid draws all random
// values, so a seed reproduces a run. -rapid.checks and -rapid.steps make the test longer.
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
				"configure":     func(*rapid.T) { m.run(m.drawConfigure()) },
				"together":      m.together,
				"sleep":         m.sleep,
				"step wall":     m.stepWall,
				"low disk":      m.lowDisk,
				"reopen":        func(*rapid.T) { m.reopen(nil) },
				"crash":         m.crash,
				"":              m.check,
			})
		})
	})
}

// crowd is a queue under test, and its callers.
type crowd struct {
	t       *rapid.T
	ctx     context.Context
	disk    *crashfs.Disk
	opts    codeq.Options
	q       *codeq.Queue
	skew    atomic.Int64 // from the bubble's clock to the wall clock, ns
	stepped bool         // skew was changed
	free    atomic.Int64 // bytes on the disk

	seen     map[codeq.ID]*codeq.TaskInfo // the contents of the disk after the last step
	order    []codeq.ID                   // all tasks that calls have stored
	receipts []codeq.Receipt
	settings map[string]codeq.Settings
	waiters  []*claimCall // claims that wait, in the order of arrival
	idlers   []*idleCall  // WaitIdle
	awaits   []*awaitCall
	serial   int // of the last payload
	arrivals int // of waiting claims
	steps    int
}

// crowdCall is one call of a queue.
type crowdCall interface {
	do(q *codeq.Queue)
	// judge checks the result of the call and m.seen; before is m.seen before the call. With alone,
	// nothing else has happened.
	judge(m *crowd, before map[codeq.ID]*codeq.TaskInfo, alone bool)
}

func newCrowd(t *rapid.T) *crowd {
	m := &crowd{t: t, ctx: context.Background(), disk: crashfs.New(), settings: make(map[string]codeq.Settings)}
	m.free.Store(testkit.FreeAt[engine.Roomy])
	m.opts.Shards = rapid.IntRange(1, 3).Draw(t, "shards")
	m.open()
	return m
}

// The limits of one call, and of a group, if it has any.
const (
	fewParents  = 60
	smallCommit = 16 << 10
	smallGroup  = 4 << 10
)

func (m *crowd) open() {
	m.opts = *inspect.With(&codeq.Options{
		Shards: m.opts.Shards, Durability: codeq.DurabilityDisk, LeaseFor: 5 * time.Second,
		MaxAttempts: rapid.IntRange(1, 3).Draw(m.t, "MaxAttempts"),
		Retention:   oneOf(m, "Retention", 0, 4*time.Second),
		Backoff:     codeq.Backoff{Base: time.Second, Max: 3 * time.Second, Jitter: -1},
		GroupCap:    oneOf(m, "GroupCap", 0, 1, 2),
		WindowTasks: rapid.IntRange(2, 4).Draw(m.t, "WindowTasks"),
		WindowBytes: oneOf(m, "WindowBytes", 0, 900), MemTableBytes: 256 << 10, MinFreeBytes: testkit.MinFree,
		Limits: codeq.Limits{Parents: fewParents, CommitBytes: smallCommit},
	}, inspect.Private{
		IdleLanes: oneOf(m, "idleLanes", 1, engine.IdleLanes), SweepLanes: oneOf(m, "sweepLanes", 1, 8),
		GroupBytes: oneOf(m, "groupBytes", 0, 0, smallGroup), TrimBytes: oneOf(m, "trimBytes", 0, 1),
		TrimLane: oneOf(m, "trimLane", 0, 1), Wall: m.wall, ReclaimFrom: -1,
	})
	inspect.Options(&m.opts).FS = &roomyDisk{m.disk, &m.free}
	var err error
	m.q, err = codeq.Open("queues/callers", &m.opts)
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

// run makes a call while nothing else runs except waiting claims.
func (m *crowd) run(c crowdCall) {
	go c.do(m.q)
	synctest.Wait()
	m.judge(true, c)
}

// judge checks one call, or several made at the same time.
func (m *crowd) judge(strict bool, calls ...crowdCall) {
	before := m.seen
	m.look()
	alone := len(calls) == 1 && len(m.waiters) == 0 && inspect.Options(&m.opts).GroupBytes == 0 // else a call may be between groups
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

// look reads the contents of the disk.
func (m *crowd) look() {
	synctest.Wait()
	var err error
	m.seen, err = queuetest.List(m.q)
	m.noError(err)
}

// settle checks claims that have waited, and that no claim waits for a task that it could get.
// Without strict, several calls ran at the same time, in an unknown order.
func (m *crowd) settle(strict bool) {
	ordered := strict && inspect.Options(&m.opts).GroupBytes == 0 // else claims are served between parts of due tasks
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

// The functions below tell which tasks claims may get.

// leased counts the leases of a queue and, unless it is "", of a limit's key.
func leased(tasks map[codeq.ID]*codeq.TaskInfo, queue, key string) (n int) {
	for _, t := range tasks {
		if t.State == codeq.Leased && t.Queue == queue && (key == "" || t.LimitKey == key) {
			n++
		}
	}
	return n
}

// mayBeClaimed reports whether a task is ready and no setting blocks its claim.
func (m *crowd) mayBeClaimed(tasks map[codeq.ID]*codeq.TaskInfo, t *codeq.TaskInfo) bool {
	set := m.settings[t.Queue]
	return t.State == codeq.Ready && !set.Paused &&
		(set.Concurrency == 0 || leased(tasks, t.Queue, "") < set.Concurrency) &&
		(set.ConcurrencyPerKey == 0 || t.LimitKey == "" || leased(tasks, t.Queue, t.LimitKey) < set.ConcurrencyPerKey)
}

// sameTime ignores times of a task and of its attempts that may differ from the stamps on the disk:
// all of them after a change of the wall clock, and the ends of a lease and of a retention because
// of the rounding of two clocks.
func (m *crowd) sameTime(want, got *codeq.TaskInfo) {
	if m.stepped && len(want.History) == len(got.History) {
		got.FirstReady = want.FirstReady
		for i := range got.History {
			got.History[i].Start, got.History[i].End = want.History[i].Start, want.History[i].End
		}
	}
	if m.stepped || want.Until.Sub(got.Until).Abs() < 100*time.Millisecond {
		got.Until = want.Until
	}
	// The disk does not have the renewals of local leases.
	if m.stepped || want.State == codeq.Leased && want.At.Sub(got.At) < 100*time.Millisecond {
		got.At = want.At
	}
}

// mayStart reports whether a task may be a suspect that waits for a claim to start it.
func mayStart(t *codeq.TaskInfo) bool { return t != nil && t.Suspect && t.State == codeq.Blocked }

func (m *crowd) claimable(tasks map[codeq.ID]*codeq.TaskInfo, queues ...string) (n int) {
	for _, t := range tasks {
		if slices.Contains(queues, t.Queue) && m.mayBeClaimed(tasks, t) {
			n++
		}
	}
	return n
}

// isLimited reports whether settings may block claims of tasks of a queue.
func (m *crowd) isLimited(queue string) bool {
	set := m.settings[queue]
	return set.Paused || set.Concurrency > 0 || set.ConcurrencyPerKey > 0
}

// together is the action of several calls at once: the owner of one shard decides all of its calls
// in one turn.
func (m *crowd) together(*rapid.T) {
	shard := m.drawShard()
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
	go func() { _ = inspect.Of(m.q).Owner(shard, func(*inspect.Owner) error { <-held; return nil }) }()
	synctest.Wait()
	for _, c := range calls {
		go c.do(m.q)
		synctest.Wait()
	}
	close(held)
	synctest.Wait()
	m.judge(false, calls...)
}

// sleep advances the time. It looks at the disk before a lease that a claim got in the meantime can
// end.
func (m *crowd) sleep(*rapid.T) {
	for d := oneOf(m, "sleep", time.Millisecond, time.Second, 5*time.Second, 20*time.Second); d > 0; d -= time.Second / 2 {
		time.Sleep(min(d, time.Second/2))
		m.settle(false)
	}
}

// stepWall steps the wall clock. A shard sees the step at its next operation, or a minute later.
func (m *crowd) stepWall(t *rapid.T) {
	m.stepped = true
	m.skew.Add(int64(oneOf(m, "step", 1, -1, 4000, -4000, 3600_000, -3600_000)) * int64(time.Millisecond))
	if rapid.Bool().Draw(t, "quiet") {
		time.Sleep(time.Minute)
	} else {
		for shard := range queuetest.Led(m.q) {
			m.noError(inspect.Of(m.q).Owner(shard, func(*inspect.Owner) error { return nil }))
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

// waitIdle is the action of a WaitIdle, or of the cancellation of one.
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

// settleIdlers checks that exactly the right calls of WaitIdle wait.
func (m *crowd) settleIdlers(strict bool) {
	m.idlers = slices.DeleteFunc(m.idlers, func(c *idleCall) bool {
		busy := 0
		for _, t := range m.seen {
			if t.State < codeq.Dead && (len(c.queues) == 0 || slices.Contains(c.queues, t.Queue)) {
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
	id     codeq.ID
	cancel context.CancelFunc
	done   chan error // capacity 1
	got    *codeq.Outcome
}

// await is the action of an Await, or of the cancellation of one.
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
		if err := <-c.done; err != nil { // no error: the queue remembers its end
			require.ErrorIs(t, err, codeq.ErrNotFound)
		}
		return
	}
	m.awaits = append(m.awaits, c)
	m.settle(true)
}

// settleAwaits checks that each Await returns after the end of its task. Without strict, the task
// may have been canceled or redriven after Await returned its death.
func (m *crowd) settleAwaits(strict bool) {
	m.awaits = slices.DeleteFunc(m.awaits, func(c *awaitCall) bool {
		t := m.seen[c.id]
		select {
		case err := <-c.done:
			m.noError(err)
			if t != nil && t.State >= codeq.Dead && (strict || c.got.State != codeq.Dead || t.State == codeq.Dead) {
				want := codeq.Outcome{State: t.State, Result: t.Result, LastError: t.LastError, Attempts: t.Attempts}
				if t.State == codeq.Done {
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
			if t == nil || t.State >= codeq.Dead {
				m.t.Fatalf("Await of %s still waits, and it is %+v", c.id, t)
			}
			return false
		}
	})
}

// lowDisk is the action of calls with less room on the disk: produces are refused, and with still
// less room claims too. Both go on when there is room.
func (m *crowd) lowDisk(*rapid.T) {
	level := engine.Room(rapid.IntRange(int(engine.RoomLow), int(engine.RoomEmpty)).Draw(m.t, "level"))
	m.setRoom(level)
	before := m.seen
	produce, claim := m.drawProduce().(*produceCall), m.drawClaim(3, true)
	produce.do(m.q)
	if !m.refuses(produce.tasks) {
		require.ErrorIs(m.t, produce.err, codeq.ErrDiskFull)
	}
	if level > engine.RoomLow {
		claim.do(m.q)
		require.ErrorIs(m.t, claim.err, codeq.ErrDiskFull)
		m.look()
		m.unchanged(before, true)
	} else {
		m.run(claim)
	}
	m.setRoom(engine.Roomy)
	m.settle(false)
}

// setRoom sets the level of room, and waits until all shards see it.
func (m *crowd) setRoom(level engine.Room) {
	m.free.Store(testkit.FreeAt[level])
	for shard := range queuetest.Led(m.q) {
		m.noError(inspect.Of(m.q).Owner(shard, func(s *inspect.Owner) error {
			s.Measure()
			return nil
		}))
		m.noError(inspect.Of(m.q).Owner(shard, func(*inspect.Owner) error { return nil }))
	}
}

// roomyDisk is a file system with settable free space.
type roomyDisk struct {
	vfs.FS
	free *atomic.Int64 // bytes
}

func (d *roomyDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: uint64(d.free.Load()), TotalBytes: 1 << 40}, nil
}

// crash opens the queue from the disk after a power loss.
func (m *crowd) crash(t *rapid.T) {
	m.reopen(m.disk.CrashClone(vfs.CrashCloneCfg{
		UnsyncedDataPercent: oneOf(m, "unsynced data that is left, %", 0, 100),
	}))
}

// reopen closes the queue and opens it again, from another disk if there is one. All stored state
// is there, but leases may have ended.
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
		case now == nil, t.State != codeq.Leased && t.State != codeq.Blocked && (now.State != t.State || now.Attempts != t.Attempts), !bytes.Equal(now.Payload, t.Payload):
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
		if !w.finished() || !errors.Is(w.err, codeq.ErrClosed) {
			m.t.Fatalf("claim in a closed queue: finished %t, %v", w.finished(), w.err)
		}
	}
	for _, c := range m.idlers {
		require.ErrorIs(m.t, <-c.done, codeq.ErrClosed)
	}
	for _, c := range m.awaits {
		require.ErrorIs(m.t, <-c.done, codeq.ErrClosed)
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

// check compares all answers of the queue with the contents of its disk, and checks that the disk
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
	m.noError(queuetest.CheckAll(m.q))
	m.noError(queuetest.CheckMemory(m.q))
	stats, err := m.q.StorageStats()
	m.noError(err)
	for shard := range stats.Shards {
		for _, st := range stats.Shards[shard].Upkeep { // the budget and one batch are the limit
			if st.Kind == codeq.UpkeepOperations && inspect.Options(&m.opts).GroupBytes != 0 && st.MaxBytes > smallGroup+2*smallCommit {
				m.t.Fatalf("owners had %d bytes of operations at once", st.MaxBytes)
			}
		}
	}
}

func (m *crowd) checkStats() {
	want := make(map[string]codeq.Counts)
	for name := range m.settings {
		want[name] = codeq.Counts{}
	}
	for _, t := range m.seen {
		c := want[t.Queue]
		*[...]*uint64{codeq.Ready: &c.Ready, codeq.Scheduled: &c.Scheduled, codeq.Blocked: &c.Blocked, codeq.Leased: &c.Leased, codeq.Dead: &c.Dead, codeq.Done: &c.Done, codeq.Canceled: &c.Canceled}[t.State]++
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

// checkList compares the tasks of one state; each step takes the next state.
func (m *crowd) checkList() {
	opts := codeq.ListOptions{State: codeq.Ready + codeq.State(m.steps)%codeq.Canceled, Queue: []string{"", "a", "b", "c"}[m.steps/int(codeq.Canceled)%4]}
	listed := make(map[codeq.ID]*codeq.TaskInfo)
	for got, err := range m.q.List(m.ctx, opts) {
		m.noError(err)
		listed[got.ID] = got
	}
	want := maps.Clone(m.seen)
	maps.DeleteFunc(want, func(_ codeq.ID, t *codeq.TaskInfo) bool {
		return t.State != opts.State || opts.Queue != "" && t.Queue != opts.Queue
	})
	for id, got := range listed {
		if want := want[id]; want != nil {
			m.sameTime(want, got)
		}
	}
	require.Equal(m.t, want, listed)
}
