package dispatch

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// port counts the calls of its methods.
type port struct{ opened, swept int }

func (p *port) Open(string) { p.opened++ }
func (p *port) Sweep()      { p.swept++ }

// newDispatcher returns the Dispatcher of a shard without tasks.
func newDispatcher(t *testing.T) (*Dispatcher, *port) {
	t.Helper()
	shared := store.NewCaches(1<<20, 256<<10, 1)
	st, err := store.Open("store", store.Config{
		FS: crashfs.New(), Log: slog.New(slog.DiscardHandler), MemTableBytes: 256 << 10, ReclaimFrom: -1, Still: true,
	}, shared, true)
	require.NoError(t, err)
	rules := new(engine.State)
	rules.Init(engine.Config{
		Shards: 1, Elapsed: func() time.Duration { return 0 },
		IdleLanes: engine.IdleLanes, GroupBytes: engine.GroupBytes,
		WindowTasks: 64, WindowBytes: 1 << 20,
	}, st)
	t.Cleanup(func() {
		rules.Close()
		require.NoError(t, st.Close())
		shared.Close()
	})
	require.NoError(t, rules.Load(0))
	rules.Begin(engine.Start{})
	p := new(port)
	return New(rules, Config{Shards: 1, Port: p, Gates: NewGates()}), p
}

// forget drops the queues that the Dispatcher no longer needs, as at the end of a group.
func (d *Dispatcher) forget() {
	d.rules.Tidy()
	for _, q := range d.rules.Effects.Forgotten {
		if d.Forget(q) {
			d.rules.Names.Forget(q)
		}
	}
	d.rules.Effects.Forgotten = nil
}

func queueNames(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("queue %d", i))
	}
	return names
}

// caller is a claim of a test.
type caller struct {
	Claim
	err error
}

func (c *caller) Finish(err error) { c.err = err }

func newCaller(queues ...string) *caller {
	c := &caller{Claim: Claim{Queues: queues, Max: 1}}
	c.Caller = c
	return c
}

// TestLargeSetsGoInPieces: the Dispatcher removes a dropped set of very many queues from them
// budget by budget, and in the end completely.
func TestLargeSetsGoInPieces(t *testing.T) {
	d, _ := newDispatcher(t)
	names := queueNames(20 * setStep)
	list := NewList(names, nil)
	for !d.Build(list) {
	}
	d.DropSet(list)
	require.Equal(t, Usage{DroppedSets: 1}, d.Usage())
	d.beginUnit()
	d.dropSetsOn()
	left := d.sets.dropped[0].queues.Len()
	require.Less(t, left, len(names))
	require.GreaterOrEqual(t, left, len(names)-128)
	for d.NextDrop() == 0 {
		d.rules.BeginBudget(engine.UpkeepBudget, time.Hour)
		d.dropSetsOn()
	}
	for len(d.rules.Names.Queues) > 0 {
		before := len(d.rules.Names.Queues)
		d.forget()
		require.Less(t, len(d.rules.Names.Queues), before)
	}
	require.Zero(t, d.Usage())
}

// TestUnfinishedSetsGo: if a claim gives up before its set is complete, the Dispatcher drops this
// set like others.
func TestUnfinishedSetsGo(t *testing.T) {
	d, _ := newDispatcher(t)
	require.False(t, d.Build(NewList(queueNames(setStep+1), nil)), "it is complete")
	d.dropIdleSets(0)
	require.Equal(t, 1, d.Usage().Sets, "its claim may come again")
	for range setGroups {
		d.PublishAll()
	}
	d.dropIdleSets(0)
	require.Zero(t, d.Usage().Sets)
}

// TestIdleSetsMakeRoom: the Dispatcher drops sets without waiting claims when other sets need the
// room.
func TestIdleSetsMakeRoom(t *testing.T) {
	d, _ := newDispatcher(t)
	names := queueNames(setNames/2 + 1)
	first, second := NewList(names, nil), NewList(append([]string{"one more"}, names...), nil)
	waiting := newCaller()
	waiting.List = NewList(queueNames(100), nil)
	d.EndVisit(&waiting.Claim)
	for _, list := range []*List{first, second} {
		for !d.Build(list) {
		}
	}
	require.Nil(t, d.sets.byDigest[first.Digest])
	require.NotNil(t, d.sets.byDigest[second.Digest])
	require.NotNil(t, d.sets.byDigest[waiting.List.Digest], "a claim waits there")
}

// beginUnit begins a budget for one unit of work.
func (d *Dispatcher) beginUnit() {
	size := engine.CallerBudget
	size.Records, size.Time = 0, 0
	d.rules.BeginBudget(size, 0)
}

// TestUnusedSetsGo: the Dispatcher drops a set that no claim has used for a minute. It keeps a set
// with a waiting claim, and checks a used set again later.
func TestUnusedSetsGo(t *testing.T) {
	d, _ := newDispatcher(t)
	require.Equal(t, uint64(engine.Never), d.NextDrop())
	unused, used := NewList(queueNames(100), nil), NewList(queueNames(101), nil)
	waiting := newCaller()
	waiting.List = NewList(queueNames(102), nil)
	d.EndVisit(&waiting.Claim)
	for _, list := range []*List{unused, used} {
		require.True(t, d.Build(list))
	}
	upkeep := func(uptime uint64) {
		d.rules.Update(engine.Start{Instant: engine.Instant{Uptime: uptime}})
		require.LessOrEqual(t, d.NextDrop(), uptime)
		for d.NextDrop() <= uptime {
			d.rules.BeginBudget(engine.UpkeepBudget, time.Hour)
			d.dropSetsOn()
		}
	}
	d.rules.Update(engine.Start{Instant: engine.Instant{Uptime: setIdle / 2}})
	require.True(t, d.Build(used))
	upkeep(setIdle)
	require.Nil(t, d.sets.byDigest[unused.Digest])
	require.NotNil(t, d.sets.byDigest[used.Digest])
	require.Equal(t, uint64(setIdle/2+setIdle), d.NextDrop())
	upkeep(setIdle/2 + setIdle)
	require.Nil(t, d.sets.byDigest[used.Digest])
	require.NotNil(t, d.sets.byDigest[waiting.List.Digest])
	require.Equal(t, uint64(setIdle+setLookAll), d.NextDrop(), "the owner sleeps")

	require.True(t, waiting.Take())
	d.Leave(waiting.Departure())
	upkeep(setIdle + setLookAll)
	require.Zero(t, d.Usage().Sets)
	require.Equal(t, uint64(engine.Never), d.NextDrop())
}

// TestWaitBesideDroppedSets: a waiting claim gets the set of its list even if the Dispatcher builds
// no other set because too many dropped sets are left.
func TestWaitBesideDroppedSets(t *testing.T) {
	d, _ := newDispatcher(t)
	for i := range 2 {
		list := NewList(append([]string{fmt.Sprint("other ", i)}, queueNames(setNames/2)...), nil)
		for !d.Build(list) {
		}
		d.DropSet(list)
	}
	c := newCaller()
	c.List = NewList(queueNames(ShortList+1), nil)
	require.False(t, d.Build(c.List))
	d.EndVisit(&c.Claim)
	require.Equal(t, 1, d.Usage().Tickets)
}

// TestDrawEndsWithVisit: the queue drawn from a list for a claim has no effect in the next shard:
// there, the first queue of a strict order goes first.
func TestDrawEndsWithVisit(t *testing.T) {
	names := queueNames(ShortList + 1)
	here, _ := newDispatcher(t)
	there, _ := newDispatcher(t)
	for _, name := range names[:2] {
		there.produceOne(t, name)
	}
	c := newCaller()
	c.List, c.NoWait = NewList(names, nil), true
	c.drawn = 2 // its refill was due here when the disk became full
	here.EndVisit(&c.Claim)
	require.Equal(t, Done, there.Try(&c.Claim))
	require.Equal(t, names[0], c.Grants[0].Queue)
}

// produceOne adds a task to a queue.
func (d *Dispatcher) produceOne(t *testing.T, queue string) {
	d.rules.BeginBudget(engine.CallerBudget, 0)
	task := engine.NewTask{Key: engine.LaneKey{Queue: queue}}
	task.Encode(&record.Record{}, nil)
	_, err := d.rules.Produce([]engine.NewTask{task}, new(keys.CallNumber), new(engine.Produced))
	require.NoError(t, err)
}

// serveOne serves one waiting claim.
func (d *Dispatcher) serveOne(t *testing.T) {
	d.FeedAll()
	d.Serve()
	require.Len(t, d.Served, 1)
	d.Served = nil
}

// listed is a claim of one task with a long list of queues. All lists begin with the same queues.
func listed(i int) *caller {
	c := newCaller()
	c.List, c.Max = NewList(append(queueNames(ShortList+1), fmt.Sprint("other ", i)), nil), 1
	return c
}

// TestSetsTakeTurns: claims with different lists that wait for one queue all get tasks of it, even
// if each claim has a successor that waits before the next task comes.
func TestSetsTakeTurns(t *testing.T) {
	const lists, tasks = 3, 12
	d, _ := newDispatcher(t)
	var waiting [lists]*caller
	for i := range waiting {
		waiting[i] = listed(i)
		d.EndVisit(&waiting[i].Claim)
	}
	var got [lists]int
	for range tasks {
		d.produceOne(t, queueNames(1)[0])
		d.serveOne(t)
		for i, c := range waiting {
			if c.IsTaken() {
				got[i]++
				waiting[i] = listed(i)
				d.EndVisit(&waiting[i].Claim)
			}
		}
	}
	require.Equal(t, [lists]int{tasks / lists, tasks / lists, tasks / lists}, got)
}

// TestNewSetsDoNotComeFirst: a claim gets a task even if a claim with a new list also waits each
// time a task comes.
func TestNewSetsDoNotComeFirst(t *testing.T) {
	d, _ := newDispatcher(t)
	for n := range 10 { // their sets have served claims
		c := listed(-1 - n)
		d.EndVisit(&c.Claim)
		d.produceOne(t, queueNames(1)[0])
		d.serveOne(t)
	}
	patient := listed(-1)
	d.EndVisit(&patient.Claim)
	for i := 0; !patient.IsTaken(); i++ {
		require.Less(t, i, 10)
		c := listed(i)
		d.EndVisit(&c.Claim)
		d.produceOne(t, queueNames(1)[0])
		d.serveOne(t)
	}
}

// TestSetsDoNotPassEachOther: a new claim with a list does not get a task while a claim with
// another list waits for it.
func TestSetsDoNotPassEachOther(t *testing.T) {
	d, _ := newDispatcher(t)
	first, second := listed(1), listed(2)
	for _, c := range []*caller{first, second} {
		for !d.Build(c.List) {
		}
	}
	d.EndVisit(&first.Claim)
	d.produceOne(t, queueNames(1)[0])
	require.Equal(t, Nothing, d.Try(&second.Claim))
	d.EndVisit(&second.Claim)
	d.serveOne(t)
	require.True(t, first.IsTaken())
	require.False(t, second.IsTaken())
}

// TestStaleTicketsAreSwept: when the shard counts many stale tickets, it asks for one sweep. The
// sweep drops them and keeps the others.
func TestStaleTicketsAreSwept(t *testing.T) {
	d, port := newDispatcher(t)
	patient := newCaller("a", "b")
	d.EndVisit(&patient.Claim)
	for i := range maxStale + 10 {
		gone := newCaller(fmt.Sprint("q", i))
		d.EndVisit(&gone.Claim)
		require.True(t, gone.Take())
		d.CountStale(gone.Tickets())
	}
	require.Equal(t, 1, port.swept)
	d.Sweep()
	for d.sweep.on {
		d.beginUnit()
		d.sweepOn()
	}
	require.Equal(t, Usage{Tickets: 2, Queues: 2}, d.Usage())
	d.forget()
	require.Len(t, d.rules.Names.Queues, 2)
	require.True(t, patient.Take())
	d.Leave(patient.Departure())
	require.Zero(t, d.Usage().Queues)
}

// TestClose: Close settles the waiting claims, or only removes those of this process.
func TestClose(t *testing.T) {
	over := errors.New("over")
	for _, local := range []error{nil, over} {
		d, _ := newDispatcher(t)
		here, there, many := newCaller("a"), newCaller("a"), newCaller()
		there.Remote = true
		many.List = NewList(queueNames(ShortList+1), nil)
		for _, c := range []*caller{here, there, many} {
			d.EndVisit(&c.Claim)
		}
		d.Close(local, over)
		require.Equal(t, local, here.err)
		require.Equal(t, local, many.err)
		require.Equal(t, local == nil, here.Ticket().Good())
		require.Equal(t, over, there.err)
		require.Zero(t, d.Usage().Tickets)
	}
}

// TestCloseLeavesNothing: a shard that closes withdraws its heads, and passes on the places that
// are kept for it.
func TestCloseLeavesNothing(t *testing.T) {
	board, slow, gates := new(Board), new(SlowStart), NewGates()
	var shards [2]*Dispatcher
	var ports [2]*port
	var queues [2]*Queue
	for i := range shards {
		d, p := newDispatcher(t)
		d.index, d.shards, d.gates = i, len(shards), gates
		d.Join(board, slow, time.Minute)
		d.produceOne(t, "a")
		q := d.Of(d.rules.Names.QueueNamed("a"))
		q.Configured = engine.Configured{Version: 1, Settings: &record.Settings{Concurrency: 1}}
		d.limit(q, true)
		d.Publish(q.Queue)
		shards[i], ports[i], queues[i] = d, p, q
	}
	closing, stays, q := shards[0], shards[1], queues[1]
	require.True(t, stays.passGate(q))
	closing.isServing, stays.isServing = true, true // waiting claims
	require.False(t, closing.mayPass(queues[0]))
	stays.leaveGate(q)
	require.Equal(t, 1, ports[0].opened)
	require.False(t, stays.mayPass(q), "the place is kept for the other shard")
	require.Equal(t, engine.Rank(0), stays.highestElsewhere(q))
	opened := ports[1].opened
	closing.Close(nil, nil)
	require.Equal(t, opened+1, ports[1].opened)
	require.True(t, stays.mayPass(q))
	require.Zero(t, stays.highestElsewhere(q))
	stays.Close(nil, nil)
	requireEmptyBoard(t, board)
}

// TestWaitList: for all sequences of pushes, pops and given-up claims, the list pops the good
// tickets in order. Its length is at most twice their number plus a constant.
func TestWaitList(t *testing.T) {
	r := testkit.Seeded(t)
	var w waitList
	var model []*caller // wait, in order
	for range 50_000 {
		switch n := r.IntN(10); {
		case n < 5:
			c := newCaller("a")
			c.Max = 1 + r.IntN(3)
			w.Push(c.Ticket())
			model = append(model, c)
		case n < 8 && len(model) > 0:
			at := r.IntN(len(model))
			require.True(t, model[at].Take())
			if r.IntN(2) == 0 {
				w.noteStale()
			}
			model = slices.Delete(model, at, at+1)
		case w.AnyGood():
			ticket := w.Pop()
			require.Same(t, &model[0].Claim, ticket.Claim())
			require.True(t, ticket.Take())
			require.False(t, ticket.Take())
			model = model[1:]
		}
		require.Equal(t, len(model) > 0, w.AnyGood())
		require.GreaterOrEqual(t, w.Len(), len(model))
		if r.IntN(100) == 0 {
			wants := 0
			for _, c := range model {
				wants += c.Max
			}
			require.Equal(t, wants, w.Wants(1<<30))
			require.GreaterOrEqual(t, w.Wants(5), min(5, wants))
			w.Sweep()
			require.Equal(t, len(model), w.Len())
		}
	}
}

// TestLottery: draws are the same as those of a linear search over the members.
func TestLottery(t *testing.T) {
	r := testkit.Seeded(t)
	for range 200 {
		n := 1 + r.IntN(200)
		var weights []int
		if r.IntN(3) > 0 {
			for i := range n {
				weights = append(weights, 1+i%7)
			}
		}
		l := newLottery(&List{names: queueNames(n), weights: weights})
		in := make([]bool, n)
		for range 3 * n {
			at := r.IntN(n)
			if in[at] = r.IntN(2) == 0; in[at] {
				l.add(at)
			} else {
				l.remove(at)
			}
		}
		lot := uint64(0)
		members := 0
		for at := range n {
			require.Equal(t, in[at], l.has(at))
			if in[at] {
				members++
				require.Equal(t, at, l.find(lot))
				lot += l.weight(at)
				require.Equal(t, at, l.find(lot-1))
			}
		}
		require.Equal(t, members, l.len())
		require.Equal(t, lot, l.total)
		if members > 0 {
			require.True(t, in[l.draw()])
		}
	}
}

// TestHeadOrder: heads compare by priority, then by age.
func TestHeadOrder(t *testing.T) {
	const most = 9
	older, newer := uint64(1000)<<16, uint64(1001)<<16
	one := func(priority uint8, since uint64) head {
		return makeHead(engine.FirstTask{Priority: priority, Since: since, Tenant: "x", Alone: true})
	}
	order := []head{0, one(0, newer), one(0, older), one(1, newer), one(1, older), one(most, older), one(most, 0)}
	require.True(t, slices.IsSorted(order), strings.Trim(fmt.Sprintf("%x", order), "[]"))
	other := makeHead(engine.FirstTask{Priority: 1, Since: older, Tenant: "y", Alone: true})
	require.NotEqual(t, one(1, older).tenant(), other.tenant())
	none := makeHead(engine.FirstTask{Priority: 1, Since: older, Alone: true})
	require.NotEqual(t, uint64(manyTenants), none.tenant())
	require.EqualValues(t, manyTenants, makeHead(engine.FirstTask{Priority: 1, Since: older, Tenant: "x"}).tenant())
	require.EqualValues(t, most+1, one(most, older).rank())
}

// TestOldSettingsOfGates: a gate does not go back to settings that a later version has replaced. It
// also counts the leases that are older than the gate.
func TestOldSettingsOfGates(t *testing.T) {
	d, _ := newDispatcher(t)
	q := d.Of(d.rules.Names.QueueNamed("a"))
	q.Counts.Leased = 3
	limit := func(version uint64, concurrency int) {
		q.Configured = engine.Configured{Version: version, Settings: &record.Settings{Concurrency: concurrency}}
		d.limit(q, true)
	}
	limit(1, 4)
	limit(2, 5)
	settings := map[string]engine.Configured{"a": q.Configured}
	limit(1, 4)
	require.NoError(t, d.CheckLimits(map[string]int{"a": 3}, settings))
	for range 2 {
		require.True(t, d.passGate(q))
	}
	require.False(t, d.passGate(q))
	require.True(t, q.sharedGate().isClosed())
	d.isServing = true // waiting claims
	require.False(t, d.mayPass(q))
	d.leaveGate(q)
	require.False(t, q.sharedGate().isClosed())
	require.Same(t, q, d.opening())
	require.True(t, d.mayPass(q))
	require.Nil(t, d.opening())
}

// TestGateGoes: after the removal of a queue's settings, the queue has no gate once all shards have
// left it, and the Dispatcher no longer needs the queue.
func TestGateGoes(t *testing.T) {
	d, _ := newDispatcher(t)
	other, _ := newDispatcher(t)
	other.gates = d.gates
	limit := func(d *Dispatcher, version uint64, concurrency int) *Queue {
		q := d.Of(d.rules.Names.QueueNamed("a"))
		q.Configured = engine.Configured{Version: version, Settings: &record.Settings{Concurrency: concurrency}}
		if concurrency == 0 {
			q.Removed, q.Version = version, 0
		}
		d.limit(q, true)
		return q
	}
	q := limit(d, 1, 1)
	q.Counts.Leased = 1
	require.True(t, d.passGate(q))
	limit(other, 1, 1)
	limit(d, 2, 0)
	require.False(t, q.Gated)
	require.False(t, q.isNeeded())
	require.Len(t, d.gates.byQueue, 1, "the other shard does not know it yet")
	limit(d, 3, 2)
	limit(d, 4, 0)
	rest := limit(other, 4, 0)
	require.Empty(t, d.gates.byQueue)
	require.False(t, rest.isNeeded())
	require.NoError(t, d.CheckLimits(nil, nil))
}

// drawsOf draws from the queues of a list with heads, and returns the number of draws of each
// queue; by "" the number of draws without a queue.
func drawsOf(l *listHeads, draws int) map[string]int {
	drawn := make(map[string]int)
	for range draws {
		if at, h := l.draw(); h == nil {
			drawn[""]++
		} else {
			drawn[l.list.names[at]]++
		}
	}
	return drawn
}

// TestHeadsOfLists: draws from a long list give the queues with heads in some shard, by their
// weights. The heads may come before the list or after it.
func TestHeadsOfLists(t *testing.T) {
	names := queueNames(1000)
	weights := slices.Repeat([]int{1}, len(names))
	weights[7] = 9
	board, list := new(Board), NewList(names, weights)
	old := board.hold(names[7], 2)
	old.setHead(1, 5)
	l := board.holdList(list)
	require.Same(t, l, board.holdList(NewList(names, weights)))
	l.join(500, 2)
	require.Equal(t, map[string]int{"": 10}, drawsOf(l, 10), "not complete")
	l.join(1000, 2)
	require.Equal(t, map[string]int{names[7]: 10}, drawsOf(l, 10))
	later := board.hold(names[900], 2)
	later.setHead(0, 3)
	drawn := drawsOf(l, 2000)
	require.InDelta(t, 1800, drawn[names[7]], 6*14)
	require.Equal(t, 2000, drawn[names[7]]+drawn[names[900]])
	later.setHead(1, 3)
	later.setHead(0, 0)
	require.NotZero(t, drawsOf(l, 500)[names[900]], "another shard has one")
	closed := new(gate)
	closed.closed.Store(forever)
	old.gate.Store(closed)
	require.Equal(t, map[string]int{names[900]: 100}, drawsOf(l, 100), "the gate of the other one is closed")
	old.gate.Store(nil)
	require.NotZero(t, drawsOf(l, 100)[names[7]])
	later.setHead(1, 0)
	require.Equal(t, map[string]int{names[7]: 100}, drawsOf(l, 100))
	old.setHead(1, 0)
	require.Equal(t, map[string]int{"": 10}, drawsOf(l, 10))
	board.drop(names[900], later)
	board.drop(names[7], old)
	require.False(t, l.quit())
	require.True(t, l.quit())
	for l.leaveOne() {
	}
	requireEmptyBoard(t, board)
}

func requireEmptyBoard(t *testing.T, b *Board) {
	t.Helper()
	for _, m := range []*sync.Map{&b.queues, &b.lists} {
		m.Range(func(key, _ any) bool {
			require.Fail(t, "not empty", "%v", key)
			return false
		})
	}
}

// TestHeadsOfListsGo: the heads go with the last set of the list, also if this set is not complete,
// and with the shard.
func TestHeadsOfListsGo(t *testing.T) {
	const longs = 3 * setStep
	list := NewList(queueNames(longs), slices.Repeat([]int{2}, longs))
	for name, steps := range map[string][2]int{"complete": {3, 3}, "one is not": {3, 1}, "none is": {1, 2}} {
		for _, closes := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " ", closes), func(t *testing.T) {
				board, slow := new(Board), new(SlowStart)
				for shard, n := range steps {
					d, _ := newDispatcher(t)
					d.index, d.shards = shard, 2
					d.Join(board, slow, time.Minute)
					for range n {
						d.Build(list)
					}
					v, _ := board.lists.Load(list.Digest)
					require.Len(t, v.(*listHeads).heads, max(steps[0], n*shard)*setStep)
					defer func() {
						if closes {
							d.Close(nil, nil)
							return
						}
						d.DropSet(list)
						for d.NextDrop() == 0 {
							d.beginUnit()
							d.dropSetsOn()
						}
						if shard == 0 { // the last one
							requireEmptyBoard(t, board)
						}
					}()
				}
				if closes {
					t.Cleanup(func() { requireEmptyBoard(t, board) })
				}
			})
		}
	}
}
