package codeq

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
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
				"claim of many": m.single((*model).drawClaimOfMany),
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
				"in one group":  m.inOneGroup,
				"cancel claim":  m.cancelClaim,
				"control":       m.single((*model).drawControl),
				"purge":         m.single((*model).drawPurge),
				"release key":   m.single((*model).drawReleaseKey),
				"configure":     m.single((*model).drawConfigure),
				"await":         m.await,
				"crowd":         m.crowd,
				"alter woken":   m.alterWoken,
				"family":        m.family,
				"sleep":         m.sleep,
				"to next event": m.sleepToNextEvent,
				"step wall":     m.stepWall,
				"user code":     m.userCode,
				"low disk":      m.lowDisk,
				"reopen":        m.reopen,
				"crash":         m.crash,
				"crash amid":    m.crashAmid,
				"flush":         m.flush,
				"forget":        m.forget,
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
	free atomic.Int64 // bytes on the disk

	tasks    map[ID]*modelTask
	gone     []ID           // tasks that are no more
	receipts []Receipt      // all that were given out
	minted   map[int]uint64 // largest since of a new task, by shard
	given    map[int]uint64 // latest time of any since, by shard, ms
	latest   uint64         // that the wall clock has been stepped to, ms
	begun    uint64         // when, by the bubble's clock
	waiters  []*claimCall   // claims that wait, in the order of arrival
	idlers   []*idleCall    // WaitIdle
	awaits   []*awaitCall
	order    []ID // all tasks that ever were
	serial   int  // of the last payload
	arrivals int  // of waiting claims
	steps    int

	settings map[string]Settings
	// reconfigured is a queue whose settings change in this step: until all shards have them, claims go by both.
	reconfigured string
	keys         map[[record.UniqueLen]byte]*modelKey
	turns        map[uint64]ID    // who has the turn of a group, by scope
	contested    map[uint64]bool  // groups of which the turn is open
	woken        []*modelTask     // their parents have ended
	doomed       []*modelTask     // to be canceled, as a parent was
	canceled     map[Receipt]bool // leases that were ended by Cancel since Open
	plain        bool             // no task is bound to others
	reopened     bool             // all turns that are passed on are contested
	hurried      bool             // calls are drawn that come together
	unordered    bool             // their effects are taken in, and which group has which is open
	drawn        int              // the ties that drawTasks draws

	served map[laneID]bool           // in this step
	passed map[laneID]map[laneID]int // by lane with ready tasks: steps that served the other and not it

	weights map[[2]string]int // by queue and tenant, the largest since Open
}

// modelTask is what the model knows of a task.
type modelTask struct {
	want  TaskInfo // what Get returns
	shard int
	since uint64 // Ready, Leased: its place in the lane
	until uint64 // Scheduled, Dead, Done, Canceled: when that ends by the wall clock, ms

	serial int
	on     blockedOn
	waits  map[ID]bool // parents that have not ended, or are dead letters
	parent bool        // others wait for it, or did
	pins   map[ID]bool // Done: children for which it is kept
	kept   uint64      // Done, with pins: its bucket when they have ended
	late   bool        // became ready in a group after the one of the step's operation

	receipt  Receipt // the last that was given out
	deadline uint64  // Leased: by the bubble's clock, ms
	duration uint64  // Leased: ms
	local    bool    // Leased: by this process
	over     bool    // Leased: the lease had ended when the queue was opened
	expired  bool    // a lease has run out otherwise
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
		tasks: make(map[ID]*modelTask), minted: make(map[int]uint64),
		given:  make(map[int]uint64),
		served: make(map[laneID]bool), passed: make(map[laneID]map[laneID]int),
		settings: make(map[string]Settings), keys: make(map[[record.UniqueLen]byte]*modelKey),
		turns: make(map[uint64]ID), contested: make(map[uint64]bool),
	}
	m.free.Store(diskTestLevels[engine.Roomy])
	m.begun = m.now()
	m.latest = m.begun
	m.plain = rapid.IntRange(0, 5).Draw(t, "plain") == 0
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
		MinFreeBytes:  diskTestFree,
		idleLanes:     rapid.SampledFrom([]int{1, 1, 2, 4, engine.IdleLanes}).Draw(m.t, "idleLanes"),
		sweepLanes:    rapid.SampledFrom([]int{1, 1, 2, 8}).Draw(m.t, "sweepLanes"),
		groupBytes:    m.drawGroupBytes(),
		trimBytes:     rapid.SampledFrom([]int{0, 1, 1, 500}).Draw(m.t, "trimBytes"),
		trimLane:      rapid.SampledFrom([]int{0, 1, 1, 100}).Draw(m.t, "trimLane"),
		reclaimFrom:   -1,
		Limits:        Limits{Parents: 300, CommitBytes: smallCommit},
		wall:          func() time.Time { return time.Now().Add(time.Duration(m.skew.Load())) },
	}
	m.openAgain()
	m.sync()
	m.settle(true)
}

// openAgain opens the queue with the options that it had.
func (m *model) openAgain() {
	m.opts.fs = &roomyDisk{m.disk, &m.free}
	var err error
	m.q, err = Open("queues/model", &m.opts)
	m.noError(err)
	clear(m.passed)
	m.canceled, m.weights = make(map[Receipt]bool), make(map[[2]string]int)
	m.weigh()
	synctest.Wait()
}

func (m *model) end() {
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

func (m *model) noError(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatalf("unexpected error: %v", err)
	}
}

// now is the bubble's clock, and wall the wall clock, in milliseconds.
func (m *model) now() uint64  { return uint64(time.Now().UnixMilli()) }
func (m *model) wall() uint64 { return uint64(m.opts.wall().UnixMilli()) }

// since is the place of a task that becomes ready again now: behind every place
// that its shard has given in another millisecond, whatever the clocks showed.
func (m *model) since(shard int) uint64 {
	ms := m.orderTime(shard)
	if ms < m.given[shard] {
		m.t.Fatalf("shard %d goes by %d, and has gone by %d", shard, ms, m.given[shard])
	}
	m.given[shard] = ms
	return keys.MovedSince(ms)
}

// orderTime is the time by which a shard orders what becomes ready, ms: the wall
// clock's unless that was ahead. The shard's owner sleeps, and is not woken.
func (m *model) orderTime(shard int) uint64 {
	synctest.Wait()
	s := m.q.shard(shard)
	s.inbox.mu.Lock() // which the owner locks before it sleeps, and when it wakes up
	ms := s.Probe().OrderTime(m.wall(), uint64(time.Since(s.origin)/time.Millisecond))
	s.inbox.mu.Unlock()
	if ms != m.wall() && (ms < m.wall() || ms > m.latest+m.now()-m.begun) {
		m.t.Fatalf("shard %d goes by %d, the wall clock by %d, and by %d at most", shard, ms, m.wall(), m.latest)
	}
	return ms
}

// isAhead reports whether a shard orders tasks by a later time than that of the wall clock.
func (m *model) isAhead() bool {
	for shard := range m.opts.Shards {
		if m.orderTime(shard) > m.wall() {
			return true
		}
	}
	return false
}

func wallTime(ms uint64) time.Time { return time.UnixMilli(int64(ms)) }

// ready is the number of ready tasks of a queue in a shard that may be claimed.
func (m *model) ready(shard int, queue string) (n int) {
	if !m.isOpen(queue) {
		return 0
	}
	for _, t := range m.tasks {
		if t.want.State == Ready && t.shard == shard && t.want.Queue == queue && !m.keyFull(t) {
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
	t.until = keys.Forever
	set := m.settings[t.want.Queue]
	holds := set.HoldGroups && t.want.Group != ""
	if retention := set.DeadRetention; retention != 0 && !t.parent && !holds {
		t.until = engine.BucketOf(at, retentionMillis(retention))
	}
	if t.until != keys.Forever {
		m.unpin(t, t.until)
	}
	m.endKey(t, Dead, at)
	t.want.State, t.want.At = Dead, wallTime(at)
	m.ended(t, Outcome{State: Dead, LastError: t.want.LastError, Attempts: t.want.Attempts}, !holds)
}

func (m *model) toDone(t *modelTask, result []byte) {
	m.unpin(t, 0)
	m.endKey(t, Done, m.wall())
	if retention := m.retention(t); retention == 0 {
		m.toGone(t)
	} else {
		t.until = engine.BucketOf(m.wall(), retention)
		t.want.State, t.want.At, t.want.Result = Done, wallTime(m.wall()), result
	}
	m.ended(t, Outcome{State: Done, Result: result, Attempts: t.want.Attempts}, true)
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
		m.toReady(t, m.since(t.shard))
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

// sync does what time has brought, in the order of the shard's upkeep.
func (m *model) sync() {
	now, wall := m.now(), m.wall()
	tasks := m.inOrder()
	slices.SortStableFunc(tasks, func(a, b *modelTask) int {
		if a.want.State != Scheduled || b.want.State != Scheduled {
			return cmp.Compare(a.want.State, b.want.State)
		}
		return cmp.Or(cmp.Compare(a.until, b.until), bytes.Compare(a.want.ID[:], b.want.ID[:]))
	})
	for _, t := range tasks {
		switch t.want.State {
		case Scheduled:
			if t.until <= wall {
				m.enter(t, keys.MovedSince(m.orderTime(t.shard)-(wall-t.until)))
			}
		case Dead, Done, Canceled:
			if t.until <= wall {
				m.toGone(t)
			}
		}
	}
	m.passKeys(wall)
	for _, t := range tasks {
		if t.want.State == Leased && t.deadline <= now {
			m.retry(t, "lease expired", wall-(now-t.deadline), func() { m.toExpired(t, now-t.deadline) })
		}
	}
	m.react()
}

// toExpired is for a lease that has run out so many ms ago: the second time the task goes
// behind those that were ready then.
func (m *model) toExpired(t *modelTask, ago uint64) {
	since := t.since
	if !t.over {
		if t.expired {
			since = keys.MovedSince(m.orderTime(t.shard) - ago)
		}
		t.expired = true
	}
	m.toReady(t, since)
}

// nextEvent is when time brings something, by the bubble's clock.
func (m *model) nextEvent() uint64 {
	next := uint64(engine.Never)
	now, wall := m.now(), m.wall()
	for _, t := range m.tasks {
		switch t.want.State {
		case Leased:
			next = min(next, t.deadline)
		case Scheduled, Dead, Done, Canceled:
			if t.until != keys.Forever {
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

// admit takes in a new task of a batch, of which the first tasks have the IDs
// given. A remote one has come to its shard by a message.
func (m *model) admit(shard int, task Task, id ID, batch []ID, remote bool) {
	since := keys.SinceOf(keys.ID(id))
	switch {
	case id.shard(m.opts.Shards) != shard:
		m.t.Fatalf("new task %s routes to shard %d, not %d", id, id.shard(m.opts.Shards), shard)
	case since <= m.minted[shard]:
		m.t.Fatalf("new task %s in shard %d does not come after %x", id, shard, m.minted[shard])
	case keys.SinceMillis(since) < m.wall():
		m.t.Fatalf("new task %s is of %v, now is %v", id, id.Time(), m.opts.wall())
	}
	m.minted[shard] = since
	m.given[shard] = max(m.given[shard], keys.SinceMillis(since))
	m.order = append(m.order, id)
	t := &modelTask{want: TaskInfo{ID: id, Task: storedTask(task)}, shard: shard, serial: len(m.order)}
	t.want.After = slices.Clone(task.After)
	for i, p := range t.want.After {
		if n, ok := keys.NthOf(p); ok {
			t.want.After[i] = batch[n]
		}
	}
	m.tasks[id] = t
	m.takeKey(id, &task, keys.SinceMillis(keys.SinceOf(id)))
	due := runAtMillis(task.RunAt)
	switch {
	case len(task.After) > 0:
		m.toBlocked(t, onParents)
		t.waits = make(map[ID]bool)
		doomed := false
		for _, p := range t.want.After {
			doomed = m.depend(t, p) || doomed
		}
		if doomed {
			m.doomed = append(m.doomed, t)
		} else if len(t.waits) == 0 {
			m.woken = append(m.woken, t)
		}
	case remote:
		m.proceed(t)
	case due > m.wall():
		m.toScheduled(t, due)
	default:
		m.enter(t, since)
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
	if next == engine.Never {
		t.Skip()
	}
	m.pass(time.Duration(next-m.now())*time.Millisecond - time.Millisecond)
	m.compare(t)
	m.pass(time.Millisecond)
}

// stepWall steps the wall clock. A shard sees that when the next operation
// comes, or a minute later. With tasks that are bound to others, what happens
// within that minute depends on what else wakes the shard; so do the places of
// what becomes due while the shard's own clock is ahead.
func (m *model) stepWall(t *rapid.T) {
	step := time.Duration(rapid.SampledFrom([]int{1, 1000, 4000, 60_000, 3600_000}).Draw(t, "step")) * time.Millisecond
	if rapid.Bool().Draw(t, "backwards") {
		step = -step
	}
	m.skew.Add(int64(step))
	m.latest = max(m.latest, m.wall())
	tied := slices.ContainsFunc(m.inOrder(), func(t *modelTask) bool { return t.want.tied() })
	if len(m.waiters) == 0 && !tied && !m.isAhead() && rapid.IntRange(0, 3).Draw(t, "quiet") == 0 {
		time.Sleep(duration(wallCheck))
	} else {
		for _, s := range m.q.led() {
			m.noError(s.probe(func(*shard) error { return nil }))
		}
	}
	synctest.Wait()
	m.sync()
	m.sync() // dead letters of that minute may not have been kept for all of it
	m.settle(true)
}

// The end of a process.

// reopen closes the queue and opens it again.
func (m *model) reopen(*rapid.T) {
	m.close()
	m.restart()
}

// forget has memory hold nothing of keys, groups and parents, as when there are too many.
func (m *model) forget(t *rapid.T) {
	for _, s := range m.q.led() {
		if err := s.probe(forgetMirrors); err != nil && !errors.Is(err, errBusy) {
			t.Fatal(err)
		}
	}
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

// crashAmid is the action of a call after whose first commits the power fails:
// with the first one, all that follows from it is certain, by what is stored.
func (m *model) crashAmid(t *rapid.T) {
	m.drawn = tiesAll
	draws := []func(*model) call{
		(*model).drawComplete, (*model).drawFinish, (*model).drawControl, (*model).drawReleaseKey,
		func(m *model) call { return &produceCall{shard: m.drawShard(), tasks: m.drawTasks(1)} },
	}
	c := rapid.SampledFrom(draws).Draw(t, "call")(m)
	m.crashAfter(t, c)
}

// crashAfter makes a call after whose first commits the power fails.
func (m *model) crashAfter(t *rapid.T, c call) {
	camera := &camera{disk: m.disk, commits: rapid.IntRange(1, 4).Draw(t, "commits")}
	camera.config = vfs.CrashCloneCfg{
		UnsyncedDataPercent: rapid.SampledFrom([]int{0, 100}).Draw(t, "unsynced data that is left, %"),
		RNG:                 rand.New(rand.NewPCG(0, 0)), // decides nothing
	}
	m.sendAway()
	for _, s := range m.q.led() {
		m.noError(s.probe(func(s *shard) error { s.commit = &cameraCommitter{s.commit, camera}; return nil }))
	}
	c.do(m.q)
	synctest.Wait()
	left := camera.stop()
	if left == nil {
		c.apply(m)
		m.settle(true)
		return
	}
	m.close()
	m.disk = left
	m.openAgain()
	m.reopened = true // what is let go on now may come in another order
	c.apply(m)
	clear(m.canceled)
	m.resumeLeases()
	m.sync()
	m.reopened = false
	m.settle(true)
}

// camera takes an image of a disk after a number of commits.
type camera struct {
	disk   *vfs.MemFS
	config vfs.CrashCloneCfg

	mu      sync.Mutex
	commits int
	left    *vfs.MemFS
}

func (c *camera) stop() *vfs.MemFS {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.commits = 0
	return c.left
}

// cameraCommitter is that of one shard.
type cameraCommitter struct {
	committer
	*camera
}

func (c *cameraCommitter) Commit(b *pebble.Batch) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.committer.Commit(b)
	if c.commits--; c.commits == 0 {
		c.left = c.disk.CrashClone(c.config)
	}
	return err
}

// sendAway has all callers that wait give up.
func (m *model) sendAway() {
	for _, w := range m.waiters {
		w.cancel()
	}
	for _, c := range m.idlers {
		c.cancel()
	}
	for _, c := range m.awaits {
		c.cancel()
	}
	synctest.Wait()
	m.waiters, m.idlers, m.awaits = nil, nil, nil
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
	for _, c := range m.awaits {
		if err := <-c.done; !errors.Is(err, ErrClosed) {
			m.t.Fatalf("Await in a closed queue: %v", err)
		}
	}
	m.waiters, m.idlers, m.awaits = nil, nil, nil
}

func (m *model) restart() {
	m.resumeLeases()
	m.open()
}

// resumeLeases sets the deadlines of leases that the queue has found when it
// was opened.
func (m *model) resumeLeases() {
	for _, t := range m.tasks {
		if t.want.State != Leased {
			continue
		}
		t.deadline, t.over = m.now(), true
		if end := uint64(t.want.At.UnixMilli()); !t.local && end > m.wall() {
			t.deadline, t.over = t.deadline+min(end-m.wall(), t.duration), false
		}
	}
}

// flush moves what a shard has in memory into a table, and perhaps all tables
// into one.
func (m *model) flush(t *rapid.T) {
	db := m.q.shard(m.drawShard()).Store.DB()
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
	m.compareSettings()
	m.checkSteps()
	m.noError(m.q.checkAll())
	m.noError(m.q.checkMemory())
}

// What a group, one commit of a batch, and a large record have at the most in the model; a
// group only with -model.groups.
const (
	smallGroup  = 4 << 10
	smallCommit = 16 << 10
	largeRecord = 3 << 10
)

var modelGroups = flag.Bool("model.groups", false, "TestModel runs with small groups, too, and bounds what owners do at once")

func (m *model) drawGroupBytes() int {
	if !*modelGroups {
		return 0
	}
	return rapid.SampledFrom([]int{0, 0, smallGroup}).Draw(m.t, "groupBytes")
}

// checkSteps: however much is due or asked for, what owners do at once is bounded: upkeep by
// its budget and one unit of work, operations by theirs and one batch.
func (m *model) checkSteps() {
	if m.opts.groupBytes != smallGroup {
		return
	}
	for _, s := range m.q.led() {
		for _, st := range s.steps.table.stats() {
			most := int64(0)
			switch {
			case st.Kind >= StepTrim && st.Kind <= StepTidy:
				most = smallGroup/2 + 4*(largeRecord+512) // read, written and told of, before the next one is read
			case st.Kind == StepOperations:
				most = smallGroup + 2*smallCommit
			default:
				continue
			}
			if st.MaxBytes > most {
				m.t.Fatalf("step %v had %d bytes, expected %d at the most", st.Kind, st.MaxBytes, most)
			}
		}
	}
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
	for name := range m.settings {
		want[name] = Counts{}
	}
	for _, t := range m.tasks {
		c := want[t.want.Queue]
		switch t.want.State {
		case Ready:
			c.Ready++
		case Scheduled:
			c.Scheduled++
		case Blocked:
			c.Blocked++
		case Canceled:
			c.Canceled++
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
	opts := ListOptions{State: Ready + State(m.steps)%Canceled, Queue: []string{"", "a", "b", "c"}[m.steps/int(Canceled)%4]}
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
