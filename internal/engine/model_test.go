package engine

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

var (
	modelGroups = flag.Bool("model.groups", false, "TestModel runs with small groups, too, and bounds what each step of upkeep does at once")
	modelEvery  = flag.Int("model.every", 20, "TestModel compares all at each so many steps, and at the end")
)

// TestModel runs random operations on the shards of a queue and on a model of it. It compares the
// answers of the operations and the reports of the shards (events, ends, canceled leases). At each
// k-th step and at the end it compares the state and place of every task, the counts and the
// settings. It checks that the disk of a shard contradicts neither itself (fsck.Check) nor the
// memory of the shard (State.Check).
//
// All chance comes from rapid: a seed reproduces a run. -rapid.checks and -rapid.steps make a run
// longer.
func TestModel(t *testing.T) {
	shared := store.NewCaches(8<<20, 1<<20, 8)
	defer shared.Close()
	defer debug.SetGCPercent(debug.SetGCPercent(800)) // the heap is small, and each run leaves it behind
	ops, began := 0, time.Now()
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t, shared)
		defer m.close()
		actions := m.actions()
		for range 4 {
			t.Repeat(actions)
		}
		m.compareAll()
		ops += m.ops
	})
	t.Logf("%d operations, %.0f in a second", ops, float64(ops)/time.Since(began).Seconds())
}

func (m *model) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"produce":       m.single((*model).drawProduce),
		"backlog":       m.single((*model).drawBacklog),
		"claim":         m.single((*model).drawClaim),
		"claim batch":   m.single((*model).drawClaimBatch),
		"claim rank":    m.single((*model).drawClaimOfRank),
		"complete":      m.single((*model).drawComplete),
		"finish":        m.single((*model).drawFinish),
		"extend":        m.single((*model).drawExtend),
		"step":          m.single((*model).drawStep),
		"signal":        m.single((*model).drawSignal),
		"cursor":        m.single((*model).drawCursor),
		"extend all":    m.extendAll,
		"bogus":         m.single((*model).drawBogus),
		"drain":         m.drain,
		"hand back":     m.handBack,
		"together":      m.together,
		"in one group":  m.inOneGroup,
		"in turn":       m.inTurn,
		"control":       m.single((*model).drawControl),
		"bulk":          m.single((*model).drawBulk),
		"release key":   m.single((*model).drawReleaseKey),
		"configure":     m.single((*model).drawConfigure),
		"schedule":      m.single((*model).drawSchedule),
		"remove node":   m.single((*model).drawRemoval),
		"crowd":         m.crowd,
		"alter woken":   m.alterWoken,
		"family":        m.family,
		"sleep":         m.sleep,
		"to next event": m.sleepToNextEvent,
		"step wall":     m.stepWall,
		"low disk":      m.lowDisk,
		"crash":         m.reboot,
		"kill":          m.kill,
		"start":         m.start,
		"crash amid":    m.crashAmid,
		"flush":         m.flush,
		"forget":        m.forget,
		"":              m.compare,
	}
}

// model is the shards under test, with the expectations about them.
type model struct {
	driver
	rt  *rapid.T
	rng *rand.Rand // for the choices outside the order of rapid: losses, sweeps

	tasks    map[keys.ID]*modelTask
	totals   map[shardQueue]keys.Totals
	live     []*modelTask   // the values of tasks, in the order of their admission
	gone     []keys.ID      // tasks that no longer exist
	receipts []Receipt      // all receipts so far
	minted   map[int]uint64 // largest since of a new task, by shard
	given    map[int]uint64 // latest time of any since, by shard, ms
	clocks   []modelClock   // of leases, by shard
	latest   uint64         // largest time of the wall clock after a step, ms
	decades  bool           // the wall clock has been stepped by years: totals of days have gone
	order    []keys.ID      // all tasks that ever were
	serial   int            // of the last payload
	jitter   uint64         // largest delay of the clocks of periods by steps of the wall clock, ms
	age      uint64         // of the model, by a monotonic clock that no crash sets back, ms
	steps    int
	ops      int
	commits  int                // until the power fails; 0: no power failure
	adopted  map[string]keys.ID // by payload: tasks stored since the call with the power failure

	settings  map[string]record.Settings
	versions  map[string]uint64 // of settings; 0: there are none
	removed   uint64            // the largest version of settings that were removed
	schedules map[string]*modelSchedule
	byKey     map[[keys.UniqueLen]byte]*modelKey
	turns     map[uint64]keys.ID // the task with the turn of a group, by scope
	contested map[uint64]bool    // groups with several possible holders of the turn
	delayed   map[uint64]bool    // groups that go on now, as their orphans ended with the process
	completed keys.ID            // the model takes in the follow-ups of this task
	woken     []*modelTask       // their parents have ended
	doomed    []*modelTask       // the cancellation of a parent cancels them
	canceled  map[Receipt]bool   // leases that Cancel has ended since the last load
	orphans   map[Receipt]modelOrphan
	endings   map[keys.ID]modelEnding
	plain     bool           // no task is bound to others
	reopened  bool           // all turns that pass to another task are contested
	unpinned  []*modelTask   // parents that were released while there was no room
	hurried   bool           // the drawn calls come together
	unordered bool           // the model takes in their effects: the group of each one is unknown
	drawn     int            // the ties that drawTasks draws
	claimed   bool           // in this step: claims may have parked tasks
	calls     uint64         // produces with a number
	life      uint64         // of the node that numbers them
	numbered  []*produceCall // the decided ones
	sessions  map[int]modelSession
	dead      *crash         // of the process before
	places    map[int]int    // of suspects, by shard
	beside    map[int]int    // tasks that suspects come after, likewise
	until     map[int]uint64 // of the last crash, as known to a shard of a cluster

	served  map[laneID]bool           // in this step
	passes  map[laneID]map[laneID]int // by ready lane: steps that served only the other lane
	weights map[[2]string]int         // by queue and tenant, the largest since the last load

	told, expected []string // events, ends and canceled leases of this step
}

// modelTask is a task in the model.
type modelTask struct {
	id keys.ID
	LaneKey
	rec    record.Record // the fields from its producer, the attempts, and the last error
	state  TaskState
	at     uint64 // wall clock, ms: the end of an ended task, the deadline of a leased one
	result string
	shard  int
	since  uint64 // Ready, Leased: its place in the lane
	until  uint64 // Scheduled, Dead, Done, Canceled: the end of this state by clockOf, ms

	on    blockedOn
	waits map[keys.ID]bool // parents that have not ended, or that are dead letters
	// children are the OnDead of tasks that wait for the task, or did so before they were canceled.
	children map[keys.ID]uint8
	parent   bool             // other tasks wait for it, or have waited
	pins     map[keys.ID]bool // Done: it is kept for these children
	kept     uint64           // Done, with pins: its bucket after the end of the children
	late     bool             // became ready in a group after the group of the step's operation

	receipt  Receipt // the latest one
	deadline uint64  // Leased: by the monotonic clock, ms
	ends     uint64  // Leased: by the shard's clock of leases, ms
	promised uint64  // Leased: earliest end of the lease, by age, ms; else: for isOver
	duration uint64  // Leased: of the lease; else: of the state that ends at until, ms
	local    bool    // Leased: by this process
	started  bool    // as a suspect, since the process began
	handled  bool    // Leased: by Run
	overdue  bool    // Leased: the attempt counts already
	over     bool    // Leased: the lease had ended when the shard was loaded
	expired  bool    // a lease has run out in another way

	steps   []string // texts
	signals []record.Signal
	cursor  string
	awaits  Receipt // of the lease that ended with the wait for a signal
	folded  bool    // its history may have folded some attempts
}

func (t *modelTask) compare(o *modelTask) int {
	return cmp.Or(cmp.Compare(t.since, o.since), bytes.Compare(t.id[:], o.id[:]))
}

// modelClock is a shard's clock of leases in the model.
type modelClock struct {
	ahead  uint64 // of the monotonic clock, ms; it may wrap around
	stored uint64 // the value on disk
	age    uint64 // of the model when the shard stored that value, ms
}

// shardQueue is a queue in a shard.
type shardQueue struct {
	shard int
	queue string
}

// laneID is a lane of a shard.
type laneID struct {
	shard int
	LaneKey
}

func (t *modelTask) lane() laneID { return laneID{t.shard, t.LaneKey} }

// rivals tells whether two lanes take turns.
func (l laneID) rivals(o laneID) bool {
	return l != o && l.shard == o.shard && l.Queue == o.Queue && l.Priority == o.Priority
}

// Upper limits in the model for a group and a large record; for a group only with -model.groups.
const (
	smallGroup  = 4 << 10
	largeRecord = 3 << 10
)

func newModel(t *rapid.T, shared *store.Caches) *model {
	m := &model{
		rt: t, rng: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 0)),
		tasks: make(map[keys.ID]*modelTask), totals: make(map[shardQueue]keys.Totals), minted: make(map[int]uint64), given: make(map[int]uint64),
		served: make(map[laneID]bool), passes: make(map[laneID]map[laneID]int),
		settings: make(map[string]record.Settings), versions: make(map[string]uint64), schedules: make(map[string]*modelSchedule),
		byKey:   make(map[[keys.UniqueLen]byte]*modelKey),
		orphans: make(map[Receipt]modelOrphan), turns: make(map[uint64]keys.ID), contested: make(map[uint64]bool), delayed: make(map[uint64]bool), life: 2, sessions: make(map[int]modelSession),
		places: make(map[int]int), beside: make(map[int]int), until: make(map[int]uint64),
	}
	m.driver = driver{
		t: t, shared: shared, seed: 1, Instant: Instant{Wall: storyStart - 20_000}, // soon a day begins
		tenants: make(countedTenants), sealing: func(*drivenShard) {}, sealed: m.hearClock, persisted: m.hear, kept: m.checkSteps, forgotten: func(*Queue) {},
		clockAge: m.continueClock, forGood: func() bool { return m.rng.IntN(2) == 0 },
	}
	m.latest = m.Wall
	m.plain = rapid.IntRange(0, 5).Draw(t, "plain") == 0
	m.config.Shards = rapid.IntRange(1, 3).Draw(t, "shards")
	m.config.Replicated = m.oneIn(3, "replicated")
	m.clocks = make([]modelClock, m.config.Shards)
	m.drawConfig()
	m.driver.open()
	m.begun()
	return m
}

func oneOf[T any](m *model, what string, of ...T) T { return rapid.SampledFrom(of).Draw(m.rt, what) }

// oneIn is true once in about n times.
func (m *model) oneIn(n int, what string) bool { return rapid.IntRange(0, n-1).Draw(m.rt, what) == 0 }

// drawConfig draws the configuration of a process.
func (m *model) drawConfig() {
	m.config = Config{
		Shards: m.config.Shards, Replicated: m.config.Replicated, Seed: m.config.Seed, Elapsed: m.config.Elapsed,
		MaxAttempts: rapid.IntRange(1, 3).Draw(m.rt, "MaxAttempts"),
		SuspectFor:  oneOf[uint64](m, "SuspectFor", 60_000, 1000),
		Retention:   oneOf(m, "Retention", 0, 4*time.Second),
		Backoff:     func(attempt int, _ float64) time.Duration { return min(time.Second<<(attempt-1), 3*time.Second) },
		WindowTasks: rapid.IntRange(2, 4).Draw(m.rt, "WindowTasks"),
		WindowBytes: oneOf(m, "WindowBytes", 16<<20, 16<<20, 1, 900, 3000),
		IdleLanes:   oneOf(m, "IdleLanes", 1, 1, 2, 4, IdleLanes),
		SweepLanes:  oneOf(m, "SweepLanes", 1, 1, 2, 8),
		GroupBytes:  GroupBytes,
		TrimBytes:   oneOf(m, "TrimBytes", TrimBytes, 1, 1, 500),
		TrimLane:    oneOf(m, "TrimLane", TrimLane, 1, 1, 100),
	}
	if *modelGroups {
		m.config.GroupBytes = oneOf(m, "GroupBytes", GroupBytes, GroupBytes, smallGroup)
	}
	m.slow = oneOf(m, "slow", 0, 0, 0, time.Millisecond)
	m.wanted = oneOf[KindSet](m, "wanted", 0, 1<<endOfEvents-2|1<<eventUnhandled|WantOutcomes|WantCancels|WantCounts)
}

// isSmall reports whether groups may end before all due work is done.
func (m *model) isSmall() bool { return m.config.GroupBytes == smallGroup || m.slow > 0 }

// begun prepares the model after a load of the shards.
func (m *model) begun() {
	clear(m.passes)
	m.canceled, m.weights = make(map[Receipt]bool), make(map[[2]string]int)
	m.endings = make(map[keys.ID]modelEnding)
	m.dropOrphans()
	m.weigh()
	m.deliver()
}

func (m *model) noError(err error) {
	if err != nil {
		m.rt.Fatalf("unexpected error: %v", err)
	}
}

// since is the place of a task that becomes ready again now: behind every place from another
// millisecond in its shard, for all values of the clocks.
func (m *model) since(shard int) uint64 {
	ms := m.orderTime(shard)
	if ms < m.given[shard] {
		m.rt.Fatalf("shard %d goes by %d, and has gone by %d", shard, ms, m.given[shard])
	}
	m.given[shard] = ms
	return keys.MovedSince(ms)
}

// orderTime is a shard's time for the order of tasks that become ready, ms: the time of the wall
// clock unless the wall clock was ahead.
func (m *model) orderTime(shard int) uint64 {
	mint := m.shards[shard].mint
	mint.Tick(m.Wall, m.Uptime)
	ms := mint.Now()
	if ms != m.Wall && (ms < m.Wall || ms > m.latest+m.age) {
		m.rt.Fatalf("shard %d goes by %d, the wall clock by %d, and by %d at most", shard, ms, m.Wall, m.latest)
	}
	return ms
}

// period is a shard's clock of periods. It shows the time of the wall clock unless the wall clock
// was ahead.
func (m *model) period(shard int) uint64 {
	c := m.shards[shard].periods
	c.Tick(m.Wall, m.Uptime)
	if c.Now < m.Wall || c.Now > m.latest+m.age {
		m.rt.Fatalf("periods of shard %d go by %d, the wall clock by %d, and by %d at most", shard, c.Now, m.Wall, m.latest)
	}
	return c.Now
}

// isWait reports whether a scheduled task waits between attempts.
func (t *modelTask) isWait() bool { return t.state == Scheduled && t.until != t.rec.RunAt }

// clockOf is the clock for the end of a task's state.
func (m *model) clockOf(t *modelTask) uint64 {
	if t.state == Scheduled && !t.isWait() {
		return m.Wall
	}
	return m.period(t.shard)
}

// lasts sets the end of a task's state that has a length.
func (m *model) lasts(t *modelTask, until uint64) {
	t.until, t.duration = until, until-m.period(t.shard)
	t.promised = m.promise(t.duration)
}

// promise is the end of a period of some ms that begins now, for isOver: clocks of periods follow a
// wall clock that is a little behind.
func (m *model) promise(ms uint64) uint64 {
	return m.age + ms + ms>>store.ClockDrift + store.ClockJitter - m.jitter
}

// isOver reports whether a promised period is over.
func (m *model) isOver(promised uint64) bool { return promised+m.jitter < m.age }

// retained is the end of the retention of a task of a shard.
func (m *model) retained(t *modelTask, ms int64) { m.lasts(t, keys.BucketOf(m.period(t.shard), ms)) }

// Groups.

// group begins a group of a shard with the due work. If a group is already under way, the next
// operation gets its own budget.
func (m *model) group(shard int) *drivenShard {
	s := m.shards[shard]
	if !s.under {
		m.begin(s)
		if s.isDueAt(m.Instant) {
			steps := s.KeepUp(m.passed, 0)
			m.checkSteps(s, steps)
		}
	}
	m.begin(s)
	return s
}

// decide makes a shard decide an operation, in as many groups as necessary.
func (m *model) decide(shard int, verb func(*drivenShard) (Verdict, error)) (Verdict, error) {
	m.ops++
	for n := 0; ; n++ {
		s := m.group(shard)
		v, err := verb(s)
		m.noError(s.Broken)
		if v != Again {
			return v, err
		}
		if n > 1000 {
			m.rt.Fatalf("an operation is decided again and again")
		}
		m.persist(s)
	}
}

// powerFails is the panic of a commit: the power fails after it.
type powerFails struct{}

func (m *model) persist(s *drivenShard) {
	written := !s.Group.Batch.Empty() || s.Group.tasks.Len()+len(s.Group.finished)+len(s.Group.granted) > 0
	m.commit(s)
	if m.commits > 0 && written {
		if m.commits--; m.commits == 0 {
			panic(powerFails{})
		}
	}
}

// deliver commits the groups under way and does the due work, until nothing is left. Meanwhile it
// loses some messages, or their confirmations.
func (m *model) deliver() {
	for rounds, busy := 0, true; busy; rounds++ {
		if rounds > 1000 {
			m.rt.Fatalf("the shards do not come to rest")
		}
		busy = false
		for _, n := range m.rng.Perm(len(m.shards)) {
			s := m.shards[n]
			if s.isDueAt(m.Instant) || s.Names.ready.WantsRefill() || !s.Group.Batch.Empty() { // with mail from load
				m.group(n)
			}
			if sw := s.Effects.Sweep; sw != nil && m.rng.IntN(2) == 0 {
				s.Effects.Sweep = nil
				s.Names.Swept(sw, sw.Names.Read(s.Store.DB(), func() bool { return false }))
				busy = true
			}
			m.take(s, func(int, *delivery, int) {})
			m.confirm(s)
			if len(s.mail) > 0 && m.rng.IntN(20) == 0 {
				m.lose(s)
			}
			m.noError(s.Broken)
			busy = busy || s.under || len(s.mail) > 0 || !s.isAtRest()
			if s.under {
				m.persist(s)
			}
		}
	}
}

// Time.

// advance moves the clocks.
func (m *model) advance(ms uint64) {
	m.Wall, m.Now, m.Uptime, m.age = m.Wall+ms, m.Now+ms, m.Uptime+ms, m.age+ms
}

// pass advances the time, and stops at each event that the time brings.
func (m *model) pass(ms uint64) {
	for end := m.Uptime + ms; m.Uptime < end; {
		m.advance(min(end-m.Uptime, m.nextEvent()))
		m.deliver()
		m.sync()
		m.settle(true)
	}
}

func (m *model) sleep(*rapid.T) { m.pass(oneOf[uint64](m, "sleep", 1, 500, 1000, 5000, 60_000)) }

func (m *model) sleepToNextEvent(t *rapid.T) {
	next := m.nextEvent()
	if next == Never {
		t.Skip()
	}
	m.pass(next - 1)
	m.pass(1)
}

// nextEvent is the time until the next event that time alone brings, ms.
func (m *model) nextEvent() uint64 {
	next := uint64(Never)
	for _, t := range m.live {
		switch t.state {
		case Leased:
			next = min(next, t.deadline-m.Now)
		case Scheduled, Dead, Done, Canceled:
			if t.until != keys.Forever {
				next = min(next, t.until-m.clockOf(t))
			}
		}
	}
	for _, o := range m.orphans {
		next = min(next, o.deadline-m.Now)
	}
	for _, s := range m.schedules {
		next = min(next, s.next-m.Wall)
	}
	return next
}

// sync does the work that has become due, in the order of the shard's upkeep.
func (m *model) sync() {
	tasks := slices.Clone(m.live)
	slices.SortStableFunc(tasks, func(a, b *modelTask) int {
		if a.state != Scheduled || b.state != Scheduled {
			return cmp.Compare(a.state, b.state)
		}
		return cmp.Or(cmp.Compare(a.until, b.until), bytes.Compare(a.id[:], b.id[:]))
	})
	for _, t := range tasks {
		switch t.state {
		case Scheduled:
			if clock := m.clockOf(t); t.until <= clock {
				since := keys.MovedSince(m.orderTime(t.shard) - (clock - t.until))
				if t.rec.RetryFirst && t.isWait() {
					since = keys.FrontSince(t.id)
				}
				m.enter(t, since)
			} else if t.isWait() && m.isOver(t.promised) {
				m.rt.Fatalf("%+v waits longer than it was told to", t)
			}
		case Dead, Done, Canceled:
			if t.until <= m.clockOf(t) {
				m.toGone(t)
			} else if t.until != keys.Forever && m.isOver(t.promised) {
				m.rt.Fatalf("%+v is kept longer than it was to be", t)
			}
		}
	}
	m.passKeys()
	expired := slices.DeleteFunc(slices.Clone(tasks), func(t *modelTask) bool { return t.state != Leased || t.deadline > m.Now })
	crashes := m.crashes(expired)
	for _, t := range expired {
		if t.state == Leased {
			if m.config.Replicated && m.age < t.promised {
				m.rt.Fatalf("lease of %s runs out %d ms too early", keys.FormatID(t.id), t.promised-m.age)
			}
			if c := crashes[t.shard]; c != nil && t.local && (t.over || m.config.Replicated && t.handled) {
				m.crashed(t, c)
				continue
			}
			if t.local && t.over && !t.overdue { // nothing has died
				t.rec.Attempts--
				t.rec.RetryFirst = false
				m.expect(EventReleased, t, "")
				m.toReadyOrHeld(t, t.since)
				continue
			}
			ago := m.Now - t.deadline
			m.expect(EventExpired, t, "")
			m.retry(t, 0, "lease expired", func() { m.toExpired(t, ago) })
		}
	}
	maps.DeleteFunc(m.orphans, func(_ Receipt, o modelOrphan) bool { return o.deadline <= m.Now })
	m.adoptCleared(expired, crashes)
	m.tick()
	m.react()
}

// stepWall steps the wall clock.
func (m *model) stepWall(t *rapid.T) {
	step := oneOf[uint64](m, "step", 1, 1000, 4000, 60_000, 3600_000)
	if rapid.Bool().Draw(t, "backwards") {
		step = -step
	}
	m.setWall(m.Wall + step)
	m.deliver()
	m.sync()
	m.sync() // dead letters of that hour may have been kept for less than the hour
	m.settle(true)
}

func (m *model) setWall(to uint64) {
	m.Wall, m.latest = to, max(m.latest, to)
	m.jitter += store.ClockJitter
}

// The end of a process.

// reboot ends a process between two calls; the wall clock of the next process may differ.
func (m *model) reboot(*rapid.T) {
	if m.oneIn(3, "wrong clock") { // the clock of the process before, or of this one
		step := oneOf[uint64](m, "by", 5000, 24*3600_000, years)
		if step == years && m.hasAllTicks() { // they would be produced
			step = 5000
		}
		m.decades = m.decades || step == years
		if m.Wall > storyStart+step/2 || m.oneIn(4, "behind") {
			step = -step
		}
		m.setWall(m.Wall + step)
	}
	m.reopen()
}

// reopen ends a process; the next process loads the committed state.
func (m *model) reopen() {
	m.drawConfig()
	m.countDead()
	if m.rng.IntN(4) == 0 {
		for _, s := range m.shards {
			m.noError(forgetKinds(s.Store))
		}
	}
	m.crash()
	clear(m.endings)
	m.resume()
	m.begun()
	m.sync()
	m.settle(true)
}

// years is the largest error of a wrong clock that is ahead, ms.
const years = 13 * 365 * 24 * 3600_000

func (m *model) hasAllTicks() bool {
	for _, s := range m.schedules {
		if s.missed == recurrence.MissedAll {
			return true
		}
	}
	return false
}

// resume sets the deadlines of leases that a process has found. A state with a length ends after
// this length at the latest.
func (m *model) resume() {
	m.dropOrphans()
	for _, k := range m.byKey {
		k.promised = m.promise(k.length + 2*store.UsualLead) // the clock that numbers tasks is ahead
	}
	for _, t := range m.live {
		if t.state != Leased {
			t.promised = m.promise(t.duration)
			continue
		}
		if m.config.Replicated {
			c := m.clocks[t.shard].ahead + m.Now
			t.deadline, t.handled = m.Now+min(max(t.ends, c+store.LeaseGrace)-c, t.duration), t.local
			continue
		}
		t.deadline, t.over = m.Now, true
		if !t.local && t.at > m.Wall {
			t.deadline, t.over = t.deadline+min(t.at-m.Wall, t.duration), false
		}
	}
}

// lease sets the deadline of a granted or extended lease; the shard stores it.
func (m *model) lease(t *modelTask, ms uint64) {
	t.duration, t.at = ms, m.Wall+ms
	t.ends, t.promised = m.Now+m.clocks[t.shard].ahead+ms, m.age+ms
}

// continueClock continues a shard's clock of leases in another process. It returns for how long the
// new process has known the clock: not longer than the clock has been stored.
func (m *model) continueClock(shard int) (known uint64) {
	c := &m.clocks[shard]
	since := m.age - c.age
	known = oneOf(m, "clock known for", since, since, since/2, 0)
	c.ahead = c.stored + min(known, store.LeaseClockEvery) - m.Now
	return known
}

// hearClock checks the clock of leases that a group has stored.
func (m *model) hearClock(s *drivenShard) {
	for r := s.Group.Batch.Reader(); ; {
		_, key, value, ok, err := r.Next()
		m.noError(err)
		if !ok {
			return
		}
		if key[0] != keys.LeaseTime {
			continue
		}
		c := &m.clocks[s.config.Shard]
		c.age = m.age
		v, err := keys.ParseLeaseTime(value)
		m.noError(err)
		c.stored = v.Clock
		if now := m.Now + c.ahead; c.stored != now {
			m.rt.Fatalf("shard %d stores %d as its clock of leases, which is at %d", s.config.Shard, c.stored, now)
		}
	}
}

// crashAmid is the action of a call with a power failure after its first commits. After the first
// commit, all its consequences are certain: the stored state implies them.
func (m *model) crashAmid(t *rapid.T) {
	m.drawn = tiesAll
	m.crashAfter(oneOf(m, "call", (*model).drawComplete, (*model).drawFinish, (*model).drawControl,
		(*model).drawReleaseKey, (*model).drawProduce)(m))
}

// crashAfter makes a call; the power fails after its first commits.
func (m *model) crashAfter(c call) {
	m.commits = rapid.IntRange(1, 4).Draw(m.rt, "commits")
	m.adopted = make(map[string]keys.ID)
	if m.failed(func() {
		c.do(m)
		m.deliver()
	}) {
		m.countDead()
		m.driver.crash()
		m.reopened = true // tasks that go on now may do so in another order
		canceled := m.canceled
		m.begun()
		m.canceled = canceled // the call has found them
	}
	c.apply(m)
	m.adopted = nil
	if m.reopened {
		clear(m.canceled)
		for id, e := range m.endings {
			m.endings[id] = modelEnding{e.text, e.until, true}
		}
		m.resume()
		m.sync()
	}
	reopened := m.reopened
	m.reopened = false
	m.settle(!reopened)
}

// failed reports whether the power has failed during do.
func (m *model) failed(do func()) (failed bool) {
	defer func() {
		m.commits = 0
		if v := recover(); v == (powerFails{}) {
			failed = true
		} else if v != nil {
			panic(v)
		}
	}()
	do()
	return false
}

// forget clears the memory of keys, groups and parents, as when there are too many.
func (m *model) forget(*rapid.T) {
	for _, s := range m.shards {
		s.Probe().ForgetCaches()
	}
	m.deliver() // keys are listed again
}

// flush writes a shard's memory into a table, and perhaps merges all tables into one.
func (m *model) flush(t *rapid.T) {
	db := m.shards[m.drawShard()].Store.DB()
	m.noError(db.Flush())
	if rapid.Bool().Draw(t, "compact") {
		m.noError(db.Compact(context.Background(), []byte{0}, []byte{0xff}, false))
	}
}

// lowDisk is the action of calls while the disk has less room; time may pass meanwhile. The level
// of room refuses a call, which then changes nothing, or the call does its usual work. Tasks that
// the call releases go on when there is room.
func (m *model) lowDisk(*rapid.T) {
	level := RoomLow
	if m.plain { // tasks with ties to other tasks may go on later in another order
		level = Room(rapid.IntRange(int(RoomLow), int(RoomEmpty)).Draw(m.rt, "level"))
	}
	m.setRoom(level)
	m.reopened = level > RoomLow
	for range rapid.IntRange(1, 4).Draw(m.rt, "calls") {
		c := m.drawInRoom(level)
		switch {
		case c == nil:
		case level == RoomLow:
			m.run(c)
		default:
			c.do(m)
			m.deliver()
			c.apply(m)
		}
	}
	if level > RoomScarce {
		now := m.Now
		m.advance(oneOf[uint64](m, "time without room", 0, 1000, 10_000))
		m.Now = now // leases do not run out while they cannot be renewed
		m.deliver()
	}
	m.setRoom(Roomy)
	m.deliver()
	m.adoptUnpinned()
	m.sync()
	m.reopened = false
	m.settle(level == RoomLow)
}

func (m *model) setRoom(level Room) {
	for _, s := range m.shards {
		s.Room = level
	}
}

// drawInRoom draws a call that an owner asks for at a level of room; nil: no such call exists.
func (m *model) drawInRoom(level Room) (c call) {
	var draws []func(*model) call
	if level <= RoomNone && len(m.order) > 0 {
		draws = append(draws, (*model).drawReleaseKey, (*model).drawBulk,
			func(m *model) call { return m.drawAlteration(AlterCancel) })
	}
	if level <= RoomNone && len(m.receipts) > 0 {
		draws = append(draws, (*model).drawCompleteAlone)
	}
	if level <= RoomScarce && len(m.receipts) > 0 {
		draws = append(draws, (*model).drawFinish, (*model).drawExtend)
	}
	if level <= RoomLow {
		draws = append(draws, (*model).drawClaim)
		if len(m.order) > 0 {
			draws = append(draws, (*model).drawControl)
		}
	}
	if len(draws) > 0 {
		m.hurriedly(func() { c = oneOf(m, "call", draws...)(m) })
	}
	return c
}

// weigh notes how many claims in a row a tenant may get: its largest weight since the load, because
// a change of the weight does not change a turn that has begun.
func (m *model) weigh() {
	for name, set := range m.settings {
		for tenant, w := range set.TenantWeights {
			k := [2]string{name, tenant}
			m.weights[k] = max(m.weights[k], w)
		}
	}
}

// Turns of tenants.

// countTurns checks that tenants take turns.
func (m *model) countTurns(strict bool) {
	ready := make(map[laneID]bool)
	for _, t := range m.live {
		if t.state == Ready {
			ready[t.lane()] = true
		}
	}
	maps.DeleteFunc(m.passes, func(l laneID, _ map[laneID]int) bool { return !strict || !ready[l] || m.served[l] })
	for l := range ready {
		if m.passes[l] == nil { // ready since this step, or served in it
			m.passes[l] = make(map[laneID]int)
			continue
		}
		if m.settings[l.Queue].ConcurrencyPerKey > 0 { // ready tasks may have to wait
			continue
		}
		for other := range m.served {
			if !l.rivals(other) {
				continue
			}
			most := 2 * max(1, m.weights[[2]string{other.Queue, other.Tenant}]) * m.config.Shards
			if m.passes[l][other]++; m.passes[l][other] > most {
				m.rt.Fatalf("%+v had %d turns in a row before %+v", other, m.passes[l][other], l)
			}
		}
	}
	clear(m.served)
}

// expect notes that the shard must count and report an event of a task.
func (m *model) expect(kind EventKind, t *modelTask, cause string) {
	of := shardQueue{t.shard, t.Queue}
	n := m.totals[of]
	n[indexOf(kind)]++
	m.totals[of] = n
	if m.wanted>>kind&1 != 0 {
		m.expected = append(m.expected, fmt.Sprintf("%s %s %d %q", eventNames[kind], keys.FormatID(t.id), t.rec.Attempts, cause))
	}
}

// indexOf returns the index of a kind in totals.
func indexOf(kind EventKind) int {
	if kind == eventUnhandled {
		return keys.Unhandled
	}
	return int(kind) - 1
}

// hear notes the reports of a group.
func (m *model) hear(s *drivenShard) {
	if m.adopted != nil { // the work after the next start of the shards may end the task
		m.eachStored(func(t *store.Task) { m.adopted[string(t.Record.Payload)] = t.ID })
	}
	m.hearPlaces(s)
	counted := make(map[string]keys.Totals)
	for _, c := range s.Effects.Counted {
		if _, twice := counted[c.Queue.Name]; twice {
			m.rt.Fatalf("queue %s was counted twice", c.Queue.Name)
		}
		if n := c.Events(); n != (keys.Totals{}) {
			counted[c.Queue.Name] = n
		}
	}
	events := make(map[string]keys.Totals)
	for _, e := range s.Effects.Events {
		of := events[e.Queue]
		of[indexOf(e.Kind)]++
		events[e.Queue] = of
		m.told = append(m.told, fmt.Sprintf("%s %s %d %q", eventNames[e.Kind], keys.FormatID(e.ID), e.Attempt, e.LastError))
	}
	if m.wanted&WantCounts != 0 && !maps.Equal(events, counted) {
		m.rt.Fatalf("events %v were counted as %+v", events, s.Effects.Counted)
	}
	for _, e := range s.Effects.Endings {
		m.told = append(m.told, textOf(e.ID, &e.Outcome))
	}
	for _, r := range s.Effects.Canceled {
		m.told = append(m.told, "canceled "+r.String())
	}
}

// modelEnding is a shard's memory of a task that is not kept, until an uptime. perhaps: a crash may
// have removed this memory.
type modelEnding struct {
	text    string
	until   uint64
	perhaps bool
}

func textOf(id keys.ID, o *Outcome) string {
	return fmt.Sprintf("ended %s %v %q %q %d", keys.FormatID(id), o.State, o.Result, o.LastError, o.Attempts)
}
