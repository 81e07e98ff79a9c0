package cluster_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

var (
	simSchedules = flag.Int("sim.schedules", 0, "how many schedules TestSimulation runs; 0: 4, 250 with -long")
	simFor       = flag.Duration("sim.for", 0, "for how long TestSimulation begins new schedules, in place of a number of them")
	simSeed      = flag.Uint64("sim.seed", 0, "the seed of the only schedule that TestSimulation runs; 0: random ones")
	simTries     = flag.Int("sim.tries", 1, "how often TestSimulation runs the schedule of -sim.seed; it counts how often that fails")
)

// TestSimulation runs a cluster under faults drawn from a seed, and checks the answers to its
// clients and the stored state at the end.
//
// A seed repeats the actions and their times, to the fake nanosecond. It does not repeat the order
// of goroutines at one moment, nor the random values that they draw: a rare failure may need
// several tries.
func TestSimulation(t *testing.T) {
	t.Parallel()
	var tally simTally
	t.Cleanup(func() { t.Logf("%d schedules: %+v", tally.ran, tally.total) })
	switch {
	case *simSeed != 0:
		t.Run("tries", func(t *testing.T) {
			for i := range *simTries {
				t.Run(fmt.Sprint("try=", i+1), func(t *testing.T) {
					t.Parallel()
					tally.run(t, *simSeed)
				})
			}
		})
		t.Logf("%d of %d tries failed", tally.failed, tally.ran)
	case *simFor != 0:
		end := time.Now().Add(*simFor)
		for i := range runtime.GOMAXPROCS(0) {
			t.Run(fmt.Sprint("worker=", i), func(t *testing.T) {
				t.Parallel()
				for time.Now().Before(end) && !tally.haveFailed() {
					tally.draw(t, false)
				}
			})
		}
	default:
		n := *simSchedules
		if n == 0 {
			n = testkit.Sized(4, 250)
		}
		for range n {
			tally.draw(t, true)
		}
	}
}

// simTally counts the schedules of a test.
type simTally struct {
	mu          sync.Mutex // guards the fields below
	ran, failed int
	total       simCounts
}

// draw runs a schedule with a new seed in its own subtest. A parallel one ends when another has
// failed.
func (r *simTally) draw(t *testing.T, parallel bool) {
	seed := rand.Uint64()>>16 + 1
	t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
		if parallel {
			t.Parallel()
		}
		if r.haveFailed() {
			t.Skip("another one has failed")
		}
		r.run(t, seed)
	})
}

func (r *simTally) haveFailed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed > 0
}

func (r *simTally) run(t *testing.T, seed uint64) {
	var counts simCounts
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.ran++; t.Failed() {
			r.failed++
		}
		r.total.add(counts)
	}()
	counts = runSchedule(t, seed)
}

// simCounts are the counts of a simulation.
type simCounts struct {
	Calls, Unknown, Tasks, Lost, Copies, Uses int
	Faults                                    map[string]int // by kind; all: without repairs
}

func (c *simCounts) add(o simCounts) {
	c.Calls, c.Unknown, c.Tasks, c.Lost, c.Copies, c.Uses = c.Calls+o.Calls, c.Unknown+o.Unknown, c.Tasks+o.Tasks, c.Lost+o.Lost, c.Copies+o.Copies, c.Uses+o.Uses
	if c.Faults == nil {
		c.Faults = make(map[string]int)
	}
	mends := func(kind string) bool {
		return slices.ContainsFunc(simMending, func(f simFault) bool { return f.name == kind })
	}
	for kind, n := range o.Faults {
		c.Faults[kind] += n
		if !mends(kind) {
			c.Faults["all"] += n
		}
	}
}

func runSchedule(t *testing.T, seed uint64) (counts simCounts) {
	var s *schedule
	defer func() { // an error in the bubble ends this goroutine too
		if t.Failed() {
			t.Logf("repeat: go test -run 'TestSimulation$' . -sim.seed=%d -sim.tries=10", seed)
			t.Log(s.story())
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		s = newSchedule(t, seed)
		defer func() {
			if p := recover(); p != nil {
				fmt.Fprintln(os.Stderr, s.tell()) // a test that panics does not print its log
				panic(p)
			}
		}()
		counts = s.run()
	})
	// Outside of the bubble: its clock stands still while histories are checked.
	for _, h := range append(s.past, s.h) {
		for _, problem := range h.Check() {
			t.Error(problem)
		}
	}
	return counts
}

// schedule is one simulation.
type schedule struct {
	*simCluster
	h        *simtest.History[codeq.ID]
	past     []*simtest.History[codeq.ID] // each ended with a loss
	features *simFeatures
	rng      *rand.Rand // of the faults
	seed     uint64
	length   time.Duration
	faults   []simFault
	kill     bool // only processes crash
	large    bool // see drawLoad
	clients  sync.WaitGroup
	load     simLoad
	loads    int       // the number of begun loads
	until    time.Time // the end of the schedule
	over     atomic.Bool
	lost     atomic.Bool // acknowledged changes may be lost, and no client calls

	noting    sync.Mutex // guards events and counts
	events    []string
	counts    map[string]int // faults that have happened, by kind
	done      sync.WaitGroup // faults that end without another fault
	moving    atomic.Bool    // a change of membership runs
	dark      *simNode       // the last node to lose power; only inject uses it
	rushed    atomic.Int64   // all clients of rush so far
	copied    int            // the number of begun copies
	cutting   atomic.Int32   // the number of copies that may stop shards
	blackouts int            // of simBlackout

	backlogged atomic.Int64 // bytes, of backlogs

	copying  sync.Mutex // guards the fields below
	copies   []simCopy
	backlogs map[codeq.ID]bool // tasks of backlogs that are certainly stored
}

// simFault is one kind of fault.
type simFault struct {
	name   string
	weight int
	// inject reports whether the fault has happened. If it happens later, it calls happened then.
	inject func(s *schedule) bool
}

func newSchedule(t *testing.T, seed uint64) *schedule {
	rng := rand.New(rand.NewPCG(seed, 0))
	s := &schedule{h: simtest.NewHistory[codeq.ID](), rng: rng, seed: seed, counts: make(map[string]int)}
	s.features = newSimFeatures(s)
	opts := *inspect.With(&codeq.Options{Shards: 1, Durability: codeq.DurabilityDisk, WindowTasks: 4096}, inspect.Private{MaxAppend: 4})
	nodes := 3
	if rng.IntN(5) == 0 {
		nodes = 5
	}
	if rng.IntN(2) == 0 {
		opts.Shards = 3
	}
	if rng.IntN(4) == 0 {
		opts.Durability, s.kill = codeq.DurabilityProcess, true
	}
	if rng.IntN(3) == 0 {
		opts.WindowTasks = 4
	}
	s.drawLoad(&opts)
	s.length = time.Duration(10+rng.IntN(30)) * time.Second
	s.h.Drifting = rng.IntN(6) == 0
	for _, f := range append(slices.Concat(simFaults, simLinks, simDisks), simOlderCopy) {
		if rng.IntN(2) == 0 {
			s.faults = append(s.faults, f)
		}
	}
	for _, f := range []simFault{simPower, simBlackout} {
		if s.kill && rng.IntN(2) == 0 {
			s.faults = append(s.faults, f)
		}
	}
	if len(s.faults) > 0 {
		s.faults = append(s.faults, simMending...)
	}
	s.note("%d nodes, %d shards, %v, for %v, window %d", nodes, opts.Shards, opts.Durability, s.length, opts.WindowTasks)
	newest := 0
	if rng.IntN(4) == 0 && oldFormat < newFormat {
		newest, s.faults = oldFormat, append(s.faults, simUpgrade)
		s.note("older builds")
	}
	s.simCluster = newSimClusterOf(t, seed, nodes, opts, newest)
	if rng.IntN(2) == 0 {
		s.h.Rates = true
		s.setRates()
		s.note("monotonic clocks run at rates of their own")
	}
	s.tell = func() string { return fmt.Sprintf("seed %d: %s", seed, s.story()) }
	return s
}

func (s *schedule) note(format string, args ...any) {
	s.noting.Lock()
	defer s.noting.Unlock()
	s.events = append(s.events, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

// story returns the events so far.
func (s *schedule) story() string {
	s.noting.Lock()
	defer s.noting.Unlock()
	text := "what happened:"
	for _, e := range s.events {
		text += "\n\t" + e
	}
	return text
}

// begin starts the clients.
func (s *schedule) begin() {
	first := s.loads * 10_000 // the first client number
	s.loads++
	client := func(number, home int, use func(c *simClient)) {
		number += first
		rng := rand.New(rand.NewPCG(s.seed, uint64(100+number)))
		s.clients.Go(func() { use(&simClient{schedule: s, number: number, home: home, rng: rng}) })
	}
	const perNode = 2
	for i := range len(s.members()) * perNode {
		client(i, i/perNode, (*simClient).run)
	}
	for i := range 3 {
		client(500+i, i, (*simClient).probe)
	}
	s.load.watch, s.load.watched = s.watchLeases()
	client(600, 0, s.load.watch.abandon)
	client(601, 1, (*simClient).chains)
	s.load.wait, s.load.stop = s.features.begin(first)
}

// ending reports whether the clients must end.
func (s *schedule) ending() bool { return s.over.Load() || s.lost.Load() }

func (s *schedule) run() simCounts {
	s.begin()
	for s.until = time.Now().Add(s.length); time.Now().Before(s.until); {
		time.Sleep(s.upTo(2 * time.Second))
		s.inject()
	}
	s.over.Store(true)
	s.note("mend")
	for _, n := range s.members() {
		release := n.hold()
		n.upgrade()
		release()
	}
	s.mend(true)
	s.clients.Wait()
	s.done.Wait()
	s.load.wait()
	s.mend(true)
	if s.large {
		s.catchUp()
		s.mend(true)
	}
	s.note("drain")
	reclaimed := s.load.watch.reclaim()
	s.drain()
	s.load.stop(true)
	reclaimed()
	s.load.watched()
	s.awaitFormat()
	s.note("rest")
	s.rest()
	if err := s.check(); err != nil {
		s.t.Error(err)
	}
	tasks, err := s.tasks()
	if err != nil {
		s.t.Error(err)
	}
	last := s.h.Begin(simtest.Read, 0, "all")
	s.h.Finish(last, nil, true)
	s.readCopies()
	s.h.Stored(last, shownOf(tasks))
	for id, info := range tasks {
		if info.Queue != "a" {
			continue // a probe's task
		}
		s.t.Errorf("task %s (%s) cannot be claimed: %v", id, info.Payload, info.State)
	}
	s.features.check(tasks)
	s.checkBacklogs(tasks)
	if s.rng.IntN(8) == 0 {
		s.recoverAlone(tasks)
	}
	s.note("close")
	s.close()
	counts := simCounts{Faults: s.counts, Copies: len(s.copies), Uses: s.features.uses}
	for _, h := range append(s.past, s.h) {
		t := h.Totals()
		counts.Calls, counts.Tasks = counts.Calls+t.Calls, counts.Tasks+t.Tasks
		counts.Unknown, counts.Lost = counts.Unknown+t.Unknown, counts.Lost+t.Lost
	}
	return counts
}

// upTo draws a duration of at most d, mostly a short one.
func (s *schedule) upTo(d time.Duration) time.Duration { return drawUpTo(s.rng, d) }

func drawUpTo(rng *rand.Rand, d time.Duration) time.Duration {
	f := rng.Float64()
	return time.Duration(float64(d) * f * f)
}

// inject draws faults until one happens, five at most.
func (s *schedule) inject() {
	total := 0
	for _, f := range s.faults {
		total += f.weight
	}
	for range 5 {
		if total == 0 {
			return
		}
		lot := s.rng.IntN(total)
		at := slices.IndexFunc(s.faults, func(f simFault) bool { lot -= f.weight; return lot < 0 })
		if f := s.faults[at]; f.inject(s) {
			s.happened(f.name)
			return
		}
	}
}

// happened counts a fault.
func (s *schedule) happened(fault string) {
	s.noting.Lock()
	defer s.noting.Unlock()
	s.counts[fault]++
}

func (s *schedule) anyNode() *simNode {
	nodes := s.members()
	return nodes[s.rng.IntN(len(nodes))]
}

// someNode returns a node, mostly a leader.
func (s *schedule) someNode() *simNode {
	if s.rng.IntN(2) == 0 {
		if l := s.leader(s.rng.IntN(s.opts.Shards)); l != nil {
			return l
		}
	}
	return s.anyNode()
}

// someLink returns two nodes.
func (s *schedule) someLink() (from, to string) {
	for from, to = s.someNode().name, s.anyNode().name; from == to; {
		to = s.anyNode().name
	}
	return from, to
}

// simFaults are the faults. A later fault ends one that lasts.
var simFaults = []simFault{
	{"cut", 4, func(s *schedule) bool {
		a, b := s.someLink()
		s.note("cut %s -> %s", a, b)
		there, back := s.net.SetCut(a, b, true), false
		if s.rng.IntN(2) == 0 {
			s.note("cut %s -> %s", b, a)
			back = s.net.SetCut(b, a, true)
		}
		return there || back
	}},
	{"isolate", 4, func(s *schedule) bool {
		n := s.someNode()
		s.note("isolate %s", n.name)
		return s.net.Isolate(n.name, s.names())
	}},
	{"split", 2, func(s *schedule) (changed bool) {
		side := make(map[string]bool)
		for _, n := range s.members() {
			side[n.name] = s.rng.IntN(2) == 0
		}
		s.note("split %v", side)
		for a := range side {
			for b := range side {
				if side[a] != side[b] && s.net.SetCut(a, b, true) {
					changed = true
				}
			}
		}
		return changed
	}},
	{"pause", 3, func(s *schedule) bool {
		n := s.someNode()
		if q, _ := n.queue(); q == nil || !s.net.Pause(n.name, true) {
			return false
		}
		s.note("pause %s", n.name)
		d := s.upTo(15 * time.Second)
		s.done.Go(func() {
			time.Sleep(d)
			s.note("resume %s", n.name)
			s.net.Pause(n.name, false)
		})
		return true
	}},
	{"crash", 5, func(s *schedule) bool {
		n := s.someNode()
		percent := []int{0, 0, 50, 100}[s.rng.IntN(4)]
		if s.kill {
			percent = 100
		}
		if s.rng.IntN(3) == 0 {
			s.note("crash %s, %d%% of what is not synced stays", n.name, percent)
			return n.crash(percent)
		}
		operations := 1 + s.rng.Int64N(30)
		s.note("crash %s %d operations on its disk later, %d%% of what is not synced stays", n.name, operations, percent)
		n.crashAfter(operations, percent, func() { s.happened("crash") })
		return false
	}},
	{"blackout", 1, func(s *schedule) (crashed bool) {
		percent := 0
		if s.kill {
			percent = 100
		}
		s.note("crash all")
		for _, n := range s.members() {
			crashed = n.crash(percent) || crashed
		}
		time.Sleep(s.upTo(2 * time.Second))
		s.raise()
		return crashed
	}},
	{"close", 2, func(s *schedule) bool {
		n := s.someNode()
		if q, _ := n.queue(); q == nil {
			return false
		}
		s.note("close %s", n.name)
		n.stop() // an error if its disk fails
		return true
	}},
	{"clock", 3, func(s *schedule) bool {
		n := s.someNode()
		d := simtest.ClockStep * time.Duration(s.rng.IntN(25)-12)
		s.note("clock of %s is set to %v", n.name, d)
		return n.machine.Wall.Set(d)
	}},
	{"transfer", 4, func(s *schedule) bool {
		by, shard, to := s.anyNode(), s.rng.IntN(s.opts.Shards), s.anyNode()
		if s.leader(shard) != to {
			s.note("%s transfers shard %d to %s", by.name, shard, to.name)
			s.transfer(by, shard, to, func() { s.happened("transfer") })
		}
		return false
	}},
	{"coup", 5, func(s *schedule) bool {
		shard, heir := s.rng.IntN(s.opts.Shards), s.anyNode()
		old := s.leader(shard)
		if q, _ := heir.queue(); q == nil || old == nil || old == heir {
			return false
		}
		before, until := s.upTo(400*time.Millisecond), s.upTo(600*time.Millisecond)
		s.note("%s is not heard by %s, and stands for election of shard %d in %v; %s hears of others %v later", heir.name, old.name, shard, before, old.name, until)
		names := s.names()
		for _, name := range names {
			s.net.SetCut(name, old.name, name != old.name)
		}
		s.done.Go(func() {
			time.Sleep(before)
			heir.stand(shard)
			defer s.compare(heir, old)()
			time.Sleep(until)
			for _, name := range names {
				s.net.SetCut(name, old.name, name == heir.name)
			}
			time.Sleep(until)
			s.net.SetCut(heir.name, old.name, false)
		})
		return true
	}},
	{"late message", 3, func(s *schedule) bool {
		nodes, shard := s.members(), s.rng.IntN(s.opts.Shards)
		old := s.leader(shard)
		nodes = slices.DeleteFunc(nodes, func(n *simNode) bool { return n == old })
		i := s.rng.Perm(len(nodes))
		if old == nil || len(nodes) < 2 || simQueue(nodes[i[0]]) == nil || simQueue(nodes[i[1]]) == nil {
			return false
		}
		s.note("messages of %s to %s, which leads shard %d, are late, until %s has led it", nodes[i[0]].name, old.name, shard, nodes[i[1]].name)
		s.net.SetCut(nodes[i[0]].name, old.name, true)
		s.done.Go(func() { s.lateMessages(nodes[i[0]], old, nodes[i[1]], shard) })
		return false
	}},
	{"replace", 6, func(s *schedule) bool {
		old := s.someNode()
		if !s.moving.CompareAndSwap(false, true) {
			return false
		}
		s.done.Go(func() {
			defer s.moving.Store(false)
			s.replace(old, s.note, func() (end func()) {
				s.h.Leaves(old.name)
				return s.rush(old)
			})
		})
		return true
	}},
	{"lose disk", 2, func(s *schedule) bool {
		old := s.someNode()
		if !s.canLose(old) || !s.moving.CompareAndSwap(false, true) {
			return false
		}
		s.note("%s loses its disk", old.name)
		s.loseDisk(old)
		s.done.Go(func() {
			defer s.moving.Store(false)
			s.replace(old, s.note, nil)
		})
		return true
	}},
	{"stranger", 2, func(s *schedule) bool {
		n := s.someNode()
		d := s.upTo(10 * time.Second)
		n.crash(100)
		if s.net.Listens(n.name) { // it is about to open
			return false
		}
		s.note("another cluster has the address of %s", n.name)
		s.stranger(n.name, d)
		return true
	}},
	{"snapshot", 4, func(s *schedule) bool {
		n, shard, trailing := s.anyNode(), s.rng.IntN(s.opts.Shards), uint64(4*inspect.Options(&s.opts).MaxAppend+s.rng.IntN(16)) // see trailingMessages
		s.note("snapshot of shard %d on %s, %d trailing", shard, n.name, trailing)
		s.snapshot(n, shard, trailing, func() { s.happened("snapshot") })
		return false
	}},
	{"checkpoint", 3, func(s *schedule) bool {
		n := s.anyNode()
		s.note("checkpoint on %s", n.name)
		return s.checkpoint(n)
	}},
}

// simMending is drawn in every schedule.
var simMending = []simFault{
	{"heal", 6, func(s *schedule) bool {
		reset := s.rng.IntN(2) == 0
		s.note("heal, reset %t", reset)
		shaped := s.net.Unshape()
		return s.net.Heal(reset) || shaped
	}},
	{"restart", 8, (*schedule).raise},
}

// canLose reports whether the cluster can lose a node for ever: the others are up, and the cluster
// has begun.
func (s *schedule) canLose(old *simNode) bool {
	for shard := range s.opts.Shards {
		if s.leader(shard) == nil {
			return false
		}
	}
	return !slices.ContainsFunc(s.members(), func(n *simNode) bool { return n != old && simQueue(n) == nil })
}

// loseDisk opens a node with a new disk. The node is refused at once, or when it reaches the
// others.
func (s *schedule) loseDisk(n *simNode) {
	n.crash(0)
	s.keepCopies(n)
	n.machine.Wipe()
	n.mu.Lock()
	n.removed = true
	n.join = n.join || s.rng.IntN(2) == 0
	join := n.join
	n.mu.Unlock()
	switch err := s.open(n); {
	case err == nil && !join:
		_ = n.close() // it may have failed
	case err == nil:
		s.t.Errorf("node %s has joined with a new disk", n.name)
	case errors.Is(err, codeq.ErrNotMember) && !strings.Contains(err.Error(), "ReplaceNode"):
		s.t.Errorf("node %s, which has a new disk, does not say what is to be done: %v", n.name, err)
	}
}

// keepCopies keeps the copies on the disk of a node that is about to get a new disk.
func (s *schedule) keepCopies(n *simNode) {
	s.copying.Lock()
	defer s.copying.Unlock()
	for i := range s.copies {
		if c := &s.copies[i]; c.node == n && c.lost == nil {
			c.lost = n.machine.Disk()
		}
	}
}

// stranger runs another cluster of one node at an address for some time. That cluster keeps its own
// tasks.
func (s *schedule) stranger(address string, length time.Duration) {
	other := &simCluster{t: s.t, net: s.net, rng: s.rng, opts: s.opts, peers: []codeq.Peer{{Node: address, Address: address}}}
	n := newSimNode(other, address, false)
	n.start()
	s.done.Go(func() {
		const tasks = 5
		ctx, cancel := context.WithTimeout(context.Background(), simPatience)
		defer cancel()
		q := simQueue(n)
		for range tasks {
			if _, err := q.Produce(ctx, codeq.Task{Queue: "a"}); err != nil {
				s.t.Errorf("produce of another cluster: %v", err)
			}
		}
		time.Sleep(length)
		if stats, err := q.Stats(ctx); err != nil || stats["a"].Ready != tasks {
			s.t.Errorf("another cluster has %+v, %v", stats, err)
		}
		if err := n.close(); err != nil {
			s.t.Errorf("close of another cluster: %v", err)
		}
	})
}

// rush starts clients of a node. They produce one task after the other, until end is called or each
// has produced some.
func (s *schedule) rush(n *simNode) (end func()) {
	const clients, each = 3, 40
	var over atomic.Bool
	var ended sync.WaitGroup
	for range clients {
		i := s.rushed.Add(1)
		c := &simClient{schedule: s, number: 2000 + int(i), only: n, rng: rand.New(rand.NewPCG(s.seed, 2000+uint64(i)))}
		ended.Go(func() {
			for n := 0; n < each && !over.Load(); n++ {
				c.produce()
				time.Sleep(c.upTo(10 * time.Millisecond))
			}
		})
	}
	return func() {
		over.Store(true)
		ended.Wait()
	}
}

// raise starts the nodes that are down, and reports whether there was one.
func (s *schedule) raise() (raised bool) {
	for _, n := range s.members() {
		if n.raise() {
			raised = true
			s.note("start %s", n.name)
		}
	}
	return raised
}

// simClient produces tasks and works on them, mostly on one node, until the schedule is over.
type simClient struct {
	*schedule
	number int
	home   int
	only   *simNode // nil: it calls any node, mostly its home node
	rng    *rand.Rand
}

func (c *simClient) run() {
	for !c.ending() {
		time.Sleep(c.upTo(time.Second))
		switch c.rng.IntN(7) {
		case 0, 1:
			c.produce()
			continue
		case 2, 3:
			c.read()
			continue
		}
		if l, call := c.claim(); l != nil && c.rng.IntN(4) > 0 {
			c.work(l, call)
		} else if l != nil {
			c.workBatch(l)
		}
	}
}

func (c *simClient) upTo(d time.Duration) time.Duration { return drawUpTo(c.rng, d) }

// call calls a verb on a node that is up, and records it. It returns false if no node is up.
func (c *simClient) call(verb simtest.Verb, do func(ctx context.Context, q *codeq.Queue, call *simtest.Call) error) (*simtest.Call, bool) {
	calls := c.callMany(verb, 1, func(ctx context.Context, q *codeq.Queue, calls []*simtest.Call) []error {
		return []error{do(ctx, q, calls[0])}
	})
	if calls == nil {
		return nil, false
	}
	return calls[0], true
}

// callMany calls a verb for many tasks at once, and records a call for each. do returns an error
// for each. The result is nil if no node is up.
func (c *simClient) callMany(verb simtest.Verb, tasks int, do func(ctx context.Context, q *codeq.Queue, calls []*simtest.Call) []error) []*simtest.Call {
	nodes := c.members()
	n := nodes[c.home%len(nodes)]
	if c.rng.IntN(4) == 0 {
		n = nodes[c.rng.IntN(len(nodes))]
	}
	if c.only != nil {
		n = c.only
	}
	q, life := n.queue()
	if q == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond+c.upTo(6*time.Second))
	defer cancel()
	calls := make([]*simtest.Call, tasks)
	for i := range calls {
		calls[i] = c.h.Begin(verb, c.number, n.name)
	}
	errs := do(ctx, q, calls)
	for i, call := range calls {
		c.h.Finish(call, errs[i], n.alive(life))
	}
	return calls
}

func (c *simClient) produce() {
	count := 1
	if c.rng.IntN(4) == 0 {
		count = 3
	}
	serials, payloads := c.h.Payloads(count)
	var ids []codeq.ID
	call, ok := c.call(simtest.Produce, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
		if count == 1 {
			id, err := q.Produce(ctx, codeq.Task{Queue: "a", Payload: payloads[0]})
			ids = []codeq.ID{id}
			return err
		}
		var tasks []codeq.Task
		for _, p := range payloads {
			tasks = append(tasks, codeq.Task{Queue: "a", Tenant: "x", Payload: p})
		}
		ids, err = q.ProduceBatch(ctx, tasks)
		return err
	})
	if ok {
		c.h.Produced(call, serials, ids)
	}
}

// claim returns a lease and the call that got it.
func (c *simClient) claim() (l *codeq.Lease, call *simtest.Call) {
	duration := 2*time.Second + c.upTo(4*time.Second).Round(time.Millisecond)
	call, ok := c.call(simtest.Claim, func(ctx context.Context, q *codeq.Queue, call *simtest.Call) (err error) {
		l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: duration, NoWait: c.rng.IntN(4) == 0 || c.ending()})
		return err
	})
	if !ok || l == nil {
		return nil, nil
	}
	// If the node had died when the lease came, no client has seen the lease.
	if call.Outcome != simtest.Done {
		return nil, nil
	}
	c.h.Claimed(call, shownLease(l), duration)
	return l, call
}

// work uses a lease in some way, or leaves it to expire.
func (c *simClient) work(l *codeq.Lease, _ *simtest.Call) {
	for {
		time.Sleep(c.upTo(3 * time.Second))
		verb := simtest.Complete
		var duration time.Duration
		switch c.rng.IntN(10) {
		case 0:
			return
		case 1:
			verb = simtest.Retry
		case 2:
			verb = simtest.Release
		case 3, 4:
			verb = simtest.Extend
			duration = time.Second + c.upTo(6*time.Second).Round(time.Millisecond)
		}
		call, ok := c.call(verb, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
			switch verb {
			case simtest.Retry:
				return q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1})
			case simtest.Release:
				return q.Release(ctx, l.Receipt, 0)
			case simtest.Extend:
				return q.Extend(ctx, l.Receipt, duration)
			}
			return q.Complete(ctx, l.Receipt, nil)
		})
		if !ok {
			continue
		}
		call.Serial, call.Token, call.Attempt, call.Duration = queuetest.SerialOf(l.Payload), l.Receipt.Token, l.Attempt, duration
		if call.Outcome == simtest.Never { // it had no effect, and another try is possible
			continue
		}
		c.h.Add(*call)
		if verb != simtest.Extend || call.Outcome == simtest.Lost {
			return
		}
	}
}

// workBatch claims some more tasks, and uses all leases in one call, once.
func (c *simClient) workBatch(first *codeq.Lease) {
	leases := []*codeq.Lease{first}
	for range 1 + c.rng.IntN(3) {
		if l, _ := c.claim(); l != nil {
			leases = append(leases, l)
		}
	}
	time.Sleep(c.upTo(time.Second))
	verbs := []simtest.Verb{simtest.Complete, simtest.Complete, simtest.Retry, simtest.Release, simtest.Extend}
	verb := verbs[c.rng.IntN(len(verbs))]
	duration := time.Second + c.upTo(6*time.Second).Round(time.Millisecond)
	calls := c.callMany(verb, len(leases), func(ctx context.Context, q *codeq.Queue, _ []*simtest.Call) []error {
		var completions []codeq.Completion
		var failures []codeq.Failure
		var receipts []codeq.Receipt
		for _, l := range leases {
			completions = append(completions, codeq.Completion{Receipt: l.Receipt})
			failures = append(failures, codeq.Failure{Receipt: l.Receipt, After: -1})
			receipts = append(receipts, l.Receipt)
		}
		switch verb {
		case simtest.Complete:
			return simErrors(q.CompleteBatch(ctx, completions), len(leases))
		case simtest.Retry:
			return simErrors(q.RetryBatch(ctx, failures), len(leases))
		case simtest.Release:
			return simErrors(q.ReleaseBatch(ctx, receipts, 0), len(leases))
		}
		return simErrors(q.ExtendBatch(ctx, receipts, duration), len(leases))
	})
	for i, call := range calls {
		l := leases[i]
		call.Serial, call.Token, call.Attempt = queuetest.SerialOf(l.Payload), l.Receipt.Token, l.Attempt
		if verb == simtest.Extend {
			call.Duration = duration
		}
		if call.Outcome != simtest.Never {
			c.h.Add(*call)
		}
	}
}

// simErrors returns the error of each task of a batch.
func simErrors(err error, tasks int) []error {
	if batch, ok := errors.AsType[*codeq.BatchError](err); ok {
		return batch.Errors
	}
	errs := make([]error, tasks)
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// drain completes the remaining tasks. REQUIRES: all nodes are up and connected.
func (s *schedule) drain() {
	for shard := range s.opts.Shards {
		if n := s.leader(shard); n == nil {
			s.awaitLeaders()
		}
	}
	c := &simClient{schedule: s, number: 1000, rng: rand.New(rand.NewPCG(s.seed, 99))}
	for end := time.Now().Add(simPatience); time.Now().Before(end); {
		l, _ := c.claim()
		if l == nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			q, _ := s.members()[0].queue()
			stats, err := q.Stats(ctx)
			cancel()
			if err == nil && stats["a"] == (codeq.Counts{}) {
				return
			}
			time.Sleep(500 * time.Millisecond)
			continue
		}
		for done := false; !done; {
			call, ok := c.call(simtest.Complete, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
				return q.Complete(ctx, l.Receipt, nil)
			})
			if !ok {
				continue
			}
			call.Serial, call.Token, call.Attempt = queuetest.SerialOf(l.Payload), l.Receipt.Token, l.Attempt
			if done = call.Outcome != simtest.Never; done {
				s.h.Add(*call)
			}
		}
	}
}
