package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/inspect"
	"codeq/internal/repotest"
	"codeq/internal/testkit"
)

// TestPanicOfOwner: the owner of a shard panics amid a group. Whoever waits for the shard gets an
// answer, the other shards go on, Close returns, and the next Open finds all that was acknowledged.
func TestPanicOfOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := testkit.NewUserHandler(func(string) {})
		fs := crashfs.New()
		q, err := Open("q", inspect.With(&Options{Shards: 2, Logger: slog.New(h)}, inspect.Private{FS: fs}))
		require.NoError(t, err)
		one := q.startingAt(1)
		kept := produce(t, one, Task{Queue: "kept", RunAt: time.Now().Add(time.Hour)})[0]
		s := q.led()[1]
		ctx := context.Background()
		verbs := map[string]func() error{
			"Await":    func() error { _, err := q.Await(ctx, kept); return err },
			"WaitIdle": func() error { return q.WaitIdle(ctx) },
			"Claim":    func() error { _, err := one.Claim(ctx, ClaimRequest{Queues: []string{"none"}}); return err },
		}
		var outcomes sync.Map
		var calls sync.WaitGroup
		start := func(verbs map[string]func() error) {
			for name, verb := range verbs {
				calls.Go(func() { outcomes.Store(name, verb()) })
			}
			synctest.Wait()
		}
		start(verbs)
		goOn := standStill(s)
		start(map[string]func() error{
			"Produce": func() error { _, err := one.Produce(ctx, Task{Queue: "a"}); return err },
			"Get":     func() error { _, err := q.Get(ctx, kept); return err },
		})
		calls.Go(func() { outcomes.Store("probe", s.probe(func(*shard) error { panic(injected("of the test")) })) })
		synctest.Wait()
		start(map[string]func() error{"later": func() error { _, err := one.Produce(ctx, Task{Queue: "a"}); return err }})
		goOn()
		calls.Wait()
		n := 0
		outcomes.Range(func(name, outcome any) bool {
			n++
			err, _ := outcome.(error)
			require.Error(t, err, name)
			require.True(t, errors.Is(err, ErrFailed) || errors.Is(err, ErrUncertain), "%s: %v", name, err)
			var p *PanicError
			require.ErrorAs(t, err, &p, name)
			require.Equal(t, injected("of the test"), p.Value)
			return true
		})
		require.Equal(t, 7, n)
		synctest.Wait()
		require.Contains(t, strings.Join(*h.Seen, "\n"), "TestPanicOfOwner", "the stack")
		_, err = one.Produce(ctx, Task{Queue: "a"})
		require.ErrorIs(t, err, ErrFailed)
		produce(t, q.startingAt(0), Task{Queue: "a"})
		require.ErrorIs(t, q.Close(), ErrFailed)
		q, err = Open("q", inspect.With(&Options{}, inspect.Private{FS: fs}))
		require.NoError(t, err)
		require.Equal(t, Scheduled, infoOf(t, q, kept).State)
		require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "a"))
		require.NoError(t, q.checkAll())
		require.NoError(t, q.Close())
	})
}

// panickyGate panics when somebody who has passed it looks whether he may again.
type panickyGate struct{ passed bool }

func (g *panickyGate) Look(*dispatch.Dispatcher, time.Time) (bool, time.Duration) {
	if g.passed {
		panic(injected("look"))
	}
	return true, 0
}

func (g *panickyGate) Enter(*dispatch.Dispatcher, time.Time) (bool, time.Duration) {
	g.passed = true
	return true, 0
}
func (g *panickyGate) Leave(int) []*dispatch.Dispatcher { return nil }
func (g *panickyGate) MayAsk() bool                     { return false }
func (g *panickyGate) Ask(*dispatch.Claim) bool         { return false }

// TestPanicOfOwnerAmidClaim: the owner panics while it serves a claim that it has taken, one that
// waits or that has just come, for one queue or for a list of them. The claim gets an answer.
func TestPanicOfOwnerAmidClaim(t *testing.T) {
	for _, queues := range [...]int{1, dispatch.ShortList + 1} {
		for _, waits := range [...]bool{false, true} {
			t.Run(fmt.Sprintf("queues=%d/waits=%t", queues, waits), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
					require.NoError(t, err)
					req := ClaimRequest{Max: 2}
					for i := range queues {
						req.Queues = append(req.Queues, fmt.Sprint(i))
					}
					require.NoError(t, q.led()[0].probe(func(s *shard) error { s.setGate("0", new(panickyGate)); return nil }))
					if !waits {
						produce(t, q, Task{Queue: "0"})
					}
					claimed := make(chan error, 1)
					go func() {
						_, err := q.ClaimBatch(t.Context(), req)
						claimed <- err
					}()
					if waits {
						synctest.Wait()
						_, err := q.Produce(t.Context(), Task{Queue: "0"})
						require.ErrorIs(t, err, ErrUncertain)
					}
					require.ErrorIs(t, <-claimed, ErrUncertain)
					require.ErrorIs(t, q.Close(), ErrFailed)
				})
			})
		}
	}
}

// TestCrashOnFullDisk: a shard on which nothing is written for want of room ends as well when what
// it relies on has panicked.
func TestCrashOnFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		s := q.led()[0]
		require.NoError(t, s.probe(func(s *shard) error { s.Room = engine.RoomEmpty; return nil }))
		require.NoError(t, s.inbox.Pass(&crashOp{injected("of the test")}))
		synctest.Wait()
		_, err = q.Produce(t.Context(), Task{Queue: "a"})
		require.ErrorIs(t, err, ErrFailed)
		require.ErrorIs(t, q.Close(), ErrFailed)
	})
}

// panickyCommitter panics, as Pebble does with its locks locked.
type panickyCommitter struct{ committer }

func (panickyCommitter) Commit(*pebble.Batch) error { panic(injected("commit")) }

// TestPanicOfCommit: the callers of the group do not know whether it is stored.
func TestPanicOfCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		s := q.led()[0]
		require.NoError(t, s.probe(func(s *shard) error { s.commit = panickyCommitter{s.commit}; return nil }))
		_, err = q.Produce(t.Context(), Task{Queue: "a"})
		require.ErrorIs(t, err, ErrUncertain)
		_, err = q.Produce(t.Context(), Task{Queue: "a"})
		require.ErrorIs(t, err, ErrFailed)
		require.ErrorIs(t, q.Close(), ErrFailed)
	})
}

// TestPanicOfLeader: a replica whose owner has panicked steps down, another one leads, and no
// caller notices more than a pause.
func TestPanicOfLeader(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		ids := produce(t, simQueue(other), Task{Queue: "a"})
		s := simQueue(leader).shard(0)
		goOn := standStill(s)
		produced := make(chan error)
		for _, n := range []*simNode{leader, other} {
			go func() {
				_, err := simQueue(n).Produce(t.Context(), Task{Queue: "a"})
				produced <- err
			}()
		}
		synctest.Wait()
		require.NoError(t, s.inbox.Pass(&crashOp{injected("of the test")}))
		goOn()
		require.NoError(t, <-produced)
		require.NoError(t, <-produced)
		require.NotNil(t, c.newLeader(leader))
		require.Equal(t, Ready, infoOf(t, simQueue(leader), ids[0]).State)
		require.Equal(t, Counts{Ready: 3}, countsOf(t, simQueue(leader), "a"))
	})
}

// panicIn makes the guarded functions of each name panic once, when it is armed. Another name, if
// one is given, panics once as well.
type panicIn struct {
	names        []string
	first        string
	armed, begun atomic.Bool

	mu  sync.Mutex // guards hit
	hit []string
}

func (p *panicIn) hits(what string) bool {
	if what == p.first && p.begun.CompareAndSwap(false, true) {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.names, what) || slices.Contains(p.hit, what) {
		return false
	}
	p.hit = append(p.hit, what)
	return true
}

// left is the names that have not panicked.
func (p *panicIn) left() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.names), func(name string) bool { return slices.Contains(p.hit, name) })
}

func (p *panicIn) begin(t *testing.T) {
	guard.SetHook(func(what string) {
		if p.armed.Load() && p.hits(what) {
			panic(injected("into " + what))
		}
	})
	t.Cleanup(func() { guard.SetHook(nil) })
}

// TestPanicOfStateMachine: a replica whose state machine panics is one that has failed. All shards
// go on, that one on the other nodes; the node's other replicas stay; Close returns and tells of
// it, and the next Open has everything.
func TestPanicOfStateMachine(t *testing.T) {
	for _, then := range []string{"", "end of a replica"} {
		t.Run("then "+then, func(t *testing.T) {
			p := &panicIn{first: "state machine", names: []string{then}}
			p.begin(t)
			synctest.Test(t, func(t *testing.T) { panicOfStateMachine(t, p) })
			require.Equal(t, then == "", len(p.left()) > 0)
		})
	}
}

func panicOfStateMachine(t *testing.T, p *panicIn) {
	c := newSimCluster(t, 1, 3, Options{Shards: 3})
	c.spread()
	acknowledged := make(map[ID]bool)
	produceToAll := func() {
		shards := make(map[int]bool)
		for n := 0; len(shards) < c.opts.Shards || n%len(c.nodes) > 0; n++ {
			require.Less(t, n, 1000)
			by := c.nodes[n%len(c.nodes)]
			id, err := simQueue(by).Produce(t.Context(), Task{Queue: "a"})
			if err != nil {
				require.ErrorIs(t, err, ErrUncertain) // of the leader that has failed
				continue
			}
			acknowledged[id] = true
			shards[simQueue(by).shardOf(id)] = true
		}
	}
	p.armed.Store(true)
	produceToAll()
	synctest.Wait()
	var victim *simNode
	for _, n := range c.nodes {
		for i, r := range simQueue(n).replicas {
			if err := r.group.Failure(); err != nil {
				require.Nil(t, victim, "shard %d of %s", i, n.name)
				require.ErrorIs(t, err, ErrFailed)
				victim = n
			}
		}
	}
	require.NotNil(t, victim)
	produceToAll()
	err := victim.close()
	require.ErrorIs(t, err, ErrFailed)
	var panicked *PanicError
	require.ErrorAs(t, err, &panicked)
	require.Equal(t, injected("into state machine"), panicked.Value)
	victim.start()
	c.rest()
	require.NoError(t, c.check())
	tasks, err := c.tasks()
	require.NoError(t, err)
	for id := range acknowledged {
		require.Contains(t, tasks, id)
	}
	c.close()
}

// elsewhere are the guards that TestPanicOfAnyGoroutine leaves out.
var elsewhere = []string{
	"OnError", "slog.Handler", "Observer", // of functions of users: TestOnErrorEnds, TestLoggerEnds, TestObserverThatEnds
	"question for a certificate",                     // of functions of users: TestOwnCertificate
	"close of a store",                               // leaves goroutines of Pebble behind: TestPanicInClose
	"end of a replica",                               // leaves those of Raft behind: TestPanicOfStateMachine
	"late snapshot",                                  // comes by chance: TestLateSnapshot
	"question for all nodes", "answers of all nodes", // begin with a crash of a node: TestPanicAfterCrash
	"end of a handshake",                       // comes by chance: TestHandshakeHangs
	"candidacy for others",                     // comes by chance: TestStandIn
	"beginning of a cluster", "first election", // TestPanicAtTheBeginning
	"watch of a transfer", "answer of a receiver", "end of a transfer", // TestPanicsOfATransfer
	"call of a local client", "end of a local subscription", // of sockets, which are in no bubble: TestLocalPanics
	"events of another process", "end of events of another process", // likewise
	// come by chance, or in no story of this test
	"address of this node", "confirmation of a replacement", "ping", "return of a claim", "sync",
	"watch of a handler", // of a handler that ignores its Timeout: TestWatch
	"end of a handler",   // nothing depends on it: a place is free when the lease would have ended
}

// afterAnother are the guards of what is done only when another goroutine has panicked.
var afterAnother = map[string]string{
	"end of owner": "owner", "end of shard": "owner", "end of operation": "messages",
}

// atOpen are the guards of what Open does.
var atOpen = []string{"opening of a shard", "reconciliation of shards", "loading of a shard"}

// TestPanicOfAnyGoroutine: whichever goroutine of codeq panics, the process goes on, all calls
// return, and so does Close. In a cluster some panic in one story, and with -long each in a story
// of its own.
func TestPanicOfAnyGoroutine(t *testing.T) {
	if testing.Short() {
		t.Skip("some ten seconds")
	}
	var inCluster []string
	for _, name := range repotest.GuardNames(t) {
		if slices.Contains(elsewhere, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			p := &panicIn{names: []string{name}, first: afterAnother[name]}
			p.begin(t)
			synctest.Test(t, func(t *testing.T) { panicAlone(t, p) })
			inCluster = append(inCluster, p.left()...)
		})
	}
	var alone []string
	for names := range slices.Chunk(inCluster, testkit.Sized(1, 15, 1)) {
		t.Run("cluster/"+strings.Join(names, ", "), func(t *testing.T) {
			p := &panicIn{names: names}
			p.begin(t)
			synctest.Test(t, func(t *testing.T) { panicInCluster(t, p, 1) })
			alone = append(alone, p.left()...)
		})
	}
	for _, name := range alone {
		t.Run("cluster/"+name, func(t *testing.T) {
			p := &panicIn{names: []string{name}, first: afterAnother[name]}
			p.begin(t)
			for seed := uint64(1); len(p.left()) > 0 && seed <= 5; seed++ { // a few are reached by chance
				p.armed.Store(false)
				p.begun.Store(false)
				synctest.Test(t, func(t *testing.T) { panicInCluster(t, p, seed) })
			}
			require.Empty(t, p.left(), "the story does not come to a goroutine of this name")
		})
	}
}

// TestPanicAtTheBeginning: a node that panics while it founds a cluster can be closed, and founds
// it when it is opened again.
func TestPanicAtTheBeginning(t *testing.T) {
	p := &panicIn{names: []string{"beginning of a cluster", "first election"}}
	p.begin(t)
	p.armed.Store(true)
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 3, Options{Shards: 1})
		time.Sleep(10 * time.Second)
		require.Empty(t, p.left())
		require.ErrorIs(t, c.members()[0].close(), ErrFailed)
		c.members()[0].start()
		c.awaitLeaders()
		c.close()
	})
}

// TestPanicAfterCrash: the tasks of a node that has died go on, though the leaders panic while they
// count its suspects together.
func TestPanicAfterCrash(t *testing.T) {
	for _, name := range []string{"question for all nodes", "answers of all nodes"} {
		t.Run(name, func(t *testing.T) {
			p := &panicIn{names: []string{name}}
			p.begin(t)
			synctest.Test(t, func(t *testing.T) {
				c := newSimCluster(t, 1, 3, Options{Shards: 3})
				c.spread()
				leader, worker := c.lead()
				for range 24 {
					produce(t, simQueue(leader), Task{Queue: "a"})
				}
				begun := make(chan struct{}, 24)
				var stuck, m Mux
				Handle(&stuck, "a", func(ctx context.Context, _ *Job[[]byte]) error {
					begun <- struct{}{}
					<-ctx.Done()
					return ctx.Err()
				})
				run := &RunOptions{LeaseFor: 2 * time.Second, Concurrency: 24}
				go func() { _ = simQueue(worker).Run(t.Context(), &stuck, run) }()
				for range cap(begun) {
					<-begun
				}
				p.armed.Store(true)
				worker.crash(0)
				Handle(&m, "a", func(context.Context, *Job[[]byte]) error { return nil })
				ctx, end := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- simQueue(leader).Run(ctx, &m, run) }()
				require.NoError(t, simQueue(leader).WaitIdle(t.Context(), "a"))
				require.Empty(t, p.left())
				end()
				require.NoError(t, <-ended)
				worker.start()
				c.close()
			})
		})
	}
}

// TestPanicInClose: a store that cannot be closed is left, and can be opened again.
func TestPanicInClose(t *testing.T) {
	testkit.AbandonsStores(t)
	p := &panicIn{names: []string{"close of a store"}}
	p.begin(t)
	fs := crashfs.New()
	q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: fs}))
	require.NoError(t, err)
	id := produce(t, q, Task{Queue: "a"})[0]
	p.armed.Store(true)
	require.ErrorIs(t, q.Close(), ErrFailed)
	require.Empty(t, p.left())
	q, err = Open("q", inspect.With(&Options{}, inspect.Private{FS: fs}))
	require.NoError(t, err)
	require.Equal(t, Ready, infoOf(t, q, id).State)
	require.NoError(t, q.Close())
}

// eachStepOfClose lets each step of a Close panic, in a bubble of its own. story calls close once,
// with what closes a queue, and then goes on without panics.
func eachStepOfClose(t *testing.T, least int, story func(t *testing.T, close func(func() error))) {
	t.Cleanup(func() { guard.SetHook(nil) })
	for step, reached := 0, true; reached; step++ {
		seen := 0
		guard.SetHook(func(what string) {
			if what == "Close" {
				if seen++; seen == step+1 {
					panic(injected("into a step"))
				}
			}
		})
		synctest.Test(t, func(t *testing.T) {
			story(t, func(end func() error) {
				err := end()
				guard.SetHook(nil)
				if reached = seen > step; !reached {
					require.NoError(t, err)
					require.GreaterOrEqual(t, step, least)
					return
				}
				require.ErrorIs(t, err, ErrFailed)
				var p *PanicError
				require.ErrorAs(t, err, &p)
				require.Equal(t, injected("into a step"), p.Value)
			})
		})
	}
}

// TestPanicInAnyStepOfClose: whichever step of Close panics, nothing of the queue is left, its
// directory is unlocked, and the error says that it was a panic.
func TestPanicInAnyStepOfClose(t *testing.T) {
	eachStepOfClose(t, 6, func(t *testing.T, close func(func() error)) {
		opts := inspect.With(&Options{Shards: 2}, inspect.Private{FS: crashfs.New()})
		q, err := Open("q", opts)
		require.NoError(t, err)
		id := produce(t, q, Task{Queue: "a"})[0]
		close(q.Close)
		q, err = Open("q", opts)
		require.NoError(t, err)
		require.Equal(t, Ready, infoOf(t, q, id).State)
		require.NoError(t, q.Close())
	})
}

// TestPanicInAnyStepOfCloseOfANode: the same of a node.
func TestPanicInAnyStepOfCloseOfANode(t *testing.T) {
	eachStepOfClose(t, 8, func(t *testing.T, close func(func() error)) {
		c := newSimCluster(t, 1, 1, Options{Shards: 2})
		c.awaitLeaders()
		n := c.members()[0]
		id := produce(t, simQueue(n), Task{Queue: "a"})[0]
		close(n.close)
		n.start()
		c.awaitLeaders()
		require.Equal(t, Ready, infoOf(t, simQueue(n), id).State)
		c.close()
	})
}

// bounded calls everything that f calls, which has to return.
func bounded(what string, f func()) {
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Minute):
		panic(what + " does not return") // the bubble would not end
	}
}

// useVerbs calls all verbs, whatever they return, by callers who wait as long as it takes.
func useVerbs(q *Queue, copyTo string) {
	ctx := context.Background()
	var m Mux
	Handle(&m, "a", func(ctx context.Context, j *Job[[]byte]) error {
		j.FollowUp(Task{Queue: "b", Unique: Unique{Key: j.ID.String()}}) // perhaps of another shard
		return nil
	})
	Handle(&m, "slow", func(ctx context.Context, j *Job[[]byte]) error {
		_ = ReportProgress(ctx, 1, 2, "")
		<-ctx.Done()
		return nil
	})
	Handle(&m, "lost", func(ctx context.Context, j *Job[[]byte]) error { _ = q.DeadLetter(ctx, j.Receipt, nil); return nil })
	run, stop := context.WithCancel(ctx)
	var calls sync.WaitGroup
	calls.Go(func() { _ = q.Run(run, &m, &RunOptions{Concurrency: 8, LeaseFor: time.Second}) })
	sub, err := q.Subscribe(SubscribeOptions{})
	if err == nil {
		calls.Go(func() {
			for range sub.All(ctx) {
			}
		})
	}
	_ = q.Configure(ctx, "a", func(s *Settings) { s.Concurrency = 5 })
	for i := range 9 {
		_, _ = q.Produce(ctx, Task{Queue: "a", Unique: Unique{Key: fmt.Sprint(i)}})
		_, _ = q.Produce(ctx, Task{Queue: "lost"})
		_, _ = q.Produce(ctx, Task{Queue: "a", Tenant: fmt.Sprint(i)}) // whose lane comes and goes
		calls.Go(func() {
			wait, cancel := context.WithTimeout(ctx, 3*time.Second)
			defer cancel()
			_, _ = q.Claim(wait, ClaimRequest{Queues: []string{"b"}})
		})
	}
	slow, _ := q.Produce(ctx, Task{Queue: "slow"})
	_ = q.SetSchedule(ctx, Schedule{Name: "s", Every: time.Second, Task: Task{Queue: "s"}})
	time.Sleep(2 * time.Second)
	_ = q.Cancel(ctx, slow)
	_, _ = q.Get(ctx, slow)
	for range q.List(ctx, ListOptions{State: Ready}) {
	}
	_, _ = q.Stats(ctx)
	_, _ = q.ProcessInfo(ctx)
	_, _ = q.Workers(ctx)
	_ = q.QuietWorkers(ctx, "nobody")
	_ = q.ResumeWorkers(ctx, "")
	_ = q.Checkpoint(ctx, copyTo)
	if err == nil {
		sub.Close()
	}
	stop()
	calls.Wait()
}

func panicAlone(t *testing.T, p *panicIn) {
	fs := crashfs.New()
	open := func() (*Queue, error) {
		return Open("q", inspect.With(&Options{
			Shards: 3, Logger: slog.New(testkit.NewUserHandler(func(string) {})), Observer: func(*Observation) {},
		}, inspect.Private{FS: fs, IdleLanes: 1, SweepLanes: 1}))
	}
	p.armed.Store(slices.Contains(atOpen, p.names[0]))
	q, err := open()
	if err != nil { // it was an opening
		q, err = open()
		require.NoError(t, err)
	}
	p.armed.Store(true)
	q.opts.log.Info("a record")
	bounded("a call", func() { useVerbs(q, "copy") })
	bounded("Close", func() { _ = q.Close() })
	p.armed.Store(false)
	q, err = open()
	require.NoError(t, err)
	require.NoError(t, q.checkAll())
	require.NoError(t, q.Close())
}

func panicInCluster(t *testing.T, p *panicIn, seed uint64) {
	c := newSimCluster(t, seed, 3, Options{Shards: 3, Durability: DurabilityProcess})
	c.awaitLeaders()
	p.armed.Store(true)
	queues := make([]*Queue, 0, 3)
	for _, n := range c.members() {
		queues = append(queues, simQueue(n))
	}
	bounded("a call", func() {
		var users sync.WaitGroup
		for i, q := range queues[:2] {
			users.Go(func() { useVerbs(q, fmt.Sprint("copy", i)) })
		}
		users.Wait()
	})
	bounded("a pause of a node", func() { pauseOne(c, queues[0], c.members()[2]) })
	for _, n := range c.members() { // whichever leads then, a node that joins is sent one
		for i := range c.opts.Shards {
			c.snapshot(n, i, 1)
		}
	}
	bounded("a change of leaders", func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, _ = queues[0].ClusterStatus(ctx)
		_ = queues[0].TransferLeadership(ctx, 0, c.members()[1].name)
		time.Sleep(30 * time.Second) // they are balanced
	})
	bounded("a replacement", func() {
		n := c.node(true)
		n.leaves = true
		if c.open(n) == nil {
			_ = n.close()
		}
	})
	bounded("a drain", func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if n := c.leader(0); n != nil {
			_ = simQueue(n).Drain(ctx)
			_ = simQueue(n).Undrain(ctx)
		}
	})
	bounded("a power loss", func() {
		n := c.members()[2]
		n.crash(0)
		n.raise()
		time.Sleep(30 * time.Second) // it is taken back
	})
	added := c.node(false)
	bounded("an addition", func() {
		if c.open(added) == nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			time.Sleep(5 * time.Second) // it waits to be added
			_ = queues[0].AddNode(ctx, Peer{added.name, added.name})
			_ = queues[0].RemoveNode(ctx, added.name)
		}
	})
	for _, n := range append(c.members(), added) {
		var p *PanicError
		bounded("Close", func() {
			if err := n.close(); err != nil {
				require.ErrorAs(t, err, &p)
			}
		})
	}
	bounded("Close", c.close)
}

// pauseOne does on a node what gives up, in part, while another one does not answer.
func pauseOne(c *simCluster, q *Queue, paused *simNode) {
	c.net.Pause(paused.name, true)
	defer c.net.Pause(paused.name, false)
	end := time.Now().Add(time.Minute)
	for i := 0; time.Now().Before(end); i++ {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		_, _ = q.Produce(ctx, Task{Queue: "c", Payload: make([]byte, 64<<10)})
		if i%8 == 0 {
			_ = q.Checkpoint(ctx, fmt.Sprint("copy of ", i))
		}
		cancel()
		time.Sleep(200 * time.Millisecond)
	}
}

// TestAbandonedEnds: whoever ends a lease for Run, and whose outcome is not known any more, hears
// of it once.
func TestAbandonedEnds(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		told := make(chan error, 3)
		var m Mux
		Handle(&m, "a", func(ctx context.Context, _ *Job[[]byte]) error { <-ctx.Done(); return ctx.Err() })
		r, err := q.newRun(t.Context(), &m, &RunOptions{OnError: func(_ *Lease, err error) { told <- err }})
		require.NoError(t, err)
		for _, op := range []leaseEnd{&completeOp{completion: newCompletion(callComplete)}, &failOp{completion: newCompletion(callFail)}} {
			r.pool.Outcomes.Add(1)
			*op.of() = ofRunner{r, new(Lease)}
			abandon(op, errBroken)
			r.pool.Outcomes.Wait()
			require.ErrorIs(t, <-told, errBroken)
		}
		require.Empty(t, told)
	})
}
