package cluster_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/guard"
	"codeq/internal/inspect"
	"codeq/internal/repotest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestPanicOfLeader: the owner of a replica panics. The replica steps down, another one leads, and
// callers notice only a pause.
func TestPanicOfLeader(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		ids := queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a"})
		goOn := queuetest.Hold(simQueue(leader), 0)
		produced := make(chan error)
		for _, n := range []*simNode{leader, other} {
			go func() {
				_, err := simQueue(n).Produce(t.Context(), codeq.Task{Queue: "a"})
				produced <- err
			}()
		}
		synctest.Wait()
		go inspect.Of(simQueue(leader)).Owner(0, func(*inspect.Owner) error { panic(testkit.Injected("of the test")) })
		synctest.Wait()
		goOn()
		require.NoError(t, <-produced)
		require.NoError(t, <-produced)
		require.NotNil(t, c.newLeader(leader))
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, simQueue(leader), ids[0]).State)
		require.Equal(t, codeq.Counts{Ready: 3}, queuetest.CountsOf(t, simQueue(leader), "a"))
	})
}

// TestPanicOfStateMachine: a replica fails when its state machine panics. All shards go on, this
// one on the other nodes; the node's other replicas stay. Close returns the panic, and the next
// Open has all tasks.
func TestPanicOfStateMachine(t *testing.T) {
	for _, then := range []string{"", "end of a replica"} {
		t.Run("then "+then, func(t *testing.T) {
			p := &testkit.PanicIn{First: "state machine", Names: []string{then}}
			p.Begin(t)
			synctest.Test(t, func(t *testing.T) { panicOfStateMachine(t, p) })
			require.Equal(t, then == "", len(p.Left()) > 0)
		})
	}
}

func panicOfStateMachine(t *testing.T, p *testkit.PanicIn) {
	c := newSimCluster(t, 1, 3, codeq.Options{Shards: 3})
	c.spread()
	acknowledged := make(map[codeq.ID]bool)
	produceToAll := func() {
		shards := make(map[int]bool)
		for n := 0; len(shards) < c.opts.Shards || n%len(c.nodes) > 0; n++ {
			require.Less(t, n, 1000)
			by := c.nodes[n%len(c.nodes)]
			id, err := simQueue(by).Produce(t.Context(), codeq.Task{Queue: "a"})
			if err != nil {
				require.ErrorIs(t, err, codeq.ErrUncertain) // from the failed leader
				continue
			}
			acknowledged[id] = true
			shards[shardOf(simQueue(by), id)] = true
		}
	}
	p.Armed.Store(true)
	produceToAll()
	synctest.Wait()
	var victim *simNode
	for _, n := range c.nodes {
		for i := range inspect.Of(simQueue(n)).Shards() {
			if err := inspect.Of(simQueue(n)).Group(i).Failure(); err != nil {
				require.Nil(t, victim, "shard %d of %s", i, n.name)
				require.ErrorIs(t, err, codeq.ErrFailed)
				victim = n
			}
		}
	}
	require.NotNil(t, victim)
	produceToAll()
	err := victim.close()
	require.ErrorIs(t, err, codeq.ErrFailed)
	var panicked *codeq.PanicError
	require.ErrorAs(t, err, &panicked)
	require.Equal(t, testkit.Injected("into state machine"), panicked.Value)
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

// elsewhere are the guards that TestPanicOfAnyGoroutine does not test.
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
	// run by chance, or in no story of this test
	"address of this node", "confirmation of a replacement", "ping", "return of a claim", "sync",
	"watch of a handler", // of a handler that ignores its Timeout: TestWatch
	"end of a handler",   // nothing depends on it: a place is free when the lease would have ended
}

// afterAnother are the guards that run only after another goroutine has panicked.
var afterAnother = map[string]string{
	"end of owner": "owner", "end of shard": "owner", "end of operation": "messages",
}

// atOpen are the guards of the steps of Open.
var atOpen = []string{"opening of a shard", "reconciliation of shards", "loading of a shard"}

// TestPanicOfAnyGoroutine: after a panic in any goroutine of codeq, the process goes on, all calls
// return, and Close returns too. In a cluster, several goroutines panic in one story; with -long
// each panics in its own story.
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
			p := &testkit.PanicIn{Names: []string{name}, First: afterAnother[name]}
			p.Begin(t)
			synctest.Test(t, func(t *testing.T) { panicAlone(t, p) })
			inCluster = append(inCluster, p.Left()...)
		})
	}
	var alone []string
	for names := range slices.Chunk(inCluster, testkit.Sized(15, 1)) {
		t.Run("cluster/"+strings.Join(names, ", "), func(t *testing.T) {
			p := &testkit.PanicIn{Names: names}
			p.Begin(t)
			synctest.Test(t, func(t *testing.T) { panicInCluster(t, p, 1) })
			alone = append(alone, p.Left()...)
		})
	}
	for _, name := range alone {
		t.Run("cluster/"+name, func(t *testing.T) {
			p := &testkit.PanicIn{Names: []string{name}, First: afterAnother[name]}
			p.Begin(t)
			for seed := uint64(1); len(p.Left()) > 0 && seed <= 5; seed++ { // some need chance
				p.Reset()
				synctest.Test(t, func(t *testing.T) { panicInCluster(t, p, seed) })
			}
			require.Empty(t, p.Left(), "the story does not come to a goroutine of this name")
		})
	}
}

// TestPanicAtTheBeginning: a node panics while it founds a cluster. It can be closed, and founds
// the cluster when it is opened again.
func TestPanicAtTheBeginning(t *testing.T) {
	p := &testkit.PanicIn{Names: []string{"beginning of a cluster", "first election"}}
	p.Begin(t)
	p.Armed.Store(true)
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 3, codeq.Options{Shards: 1})
		time.Sleep(10 * time.Second)
		require.Empty(t, p.Left())
		require.ErrorIs(t, c.members()[0].close(), codeq.ErrFailed)
		c.members()[0].start()
		c.awaitLeaders()
		c.close()
	})
}

// TestPanicAfterCrash: the tasks of a dead node go on, although the leaders panic while they count
// its suspects together.
func TestPanicAfterCrash(t *testing.T) {
	for _, name := range []string{"question for all nodes", "answers of all nodes"} {
		t.Run(name, func(t *testing.T) {
			p := &testkit.PanicIn{Names: []string{name}}
			p.Begin(t)
			synctest.Test(t, func(t *testing.T) {
				c := newSimCluster(t, 1, 3, codeq.Options{Shards: 3})
				c.spread()
				leader, worker := c.lead()
				leader.produce(t, 24)
				begun := make(chan struct{}, 24)
				var stuck, m codeq.Mux
				codeq.Handle(&stuck, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
					begun <- struct{}{}
					<-ctx.Done()
					return ctx.Err()
				})
				run := codeq.RunOptions{LeaseFor: 2 * time.Second, Concurrency: 24}
				queuetest.Run(simQueue(worker), &stuck, run)
				for range cap(begun) {
					<-begun
				}
				p.Armed.Store(true)
				worker.crash(0)
				codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error { return nil })
				stop := queuetest.Run(simQueue(leader), &m, run)
				require.NoError(t, simQueue(leader).WaitIdle(t.Context(), "a"))
				require.Empty(t, p.Left())
				require.NoError(t, stop())
				worker.start()
				c.close()
			})
		})
	}
}

// TestPanicInAnyStepOfCloseOfANode is TestPanicInAnyStepOfClose for a node.
func TestPanicInAnyStepOfCloseOfANode(t *testing.T) {
	eachStepOfClose(t, 8, func(t *testing.T, close func(func() error)) {
		c := newSimCluster(t, 1, 1, codeq.Options{Shards: 2})
		c.awaitLeaders()
		n := c.members()[0]
		id := queuetest.Produce(t, simQueue(n), codeq.Task{Queue: "a"})[0]
		close(n.close)
		n.start()
		c.awaitLeaders()
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, simQueue(n), id).State)
		c.close()
	})
}

func panicAlone(t *testing.T, p *testkit.PanicIn) {
	fs := crashfs.New()
	open := func() (*codeq.Queue, error) {
		return codeq.Open("q", inspect.With(&codeq.Options{
			Shards: 3, Logger: slog.New(testkit.NewUserHandler(func(string) {})), Observer: func(*codeq.Observation) {},
		}, inspect.Private{FS: fs, IdleLanes: 1, SweepLanes: 1}))
	}
	p.Armed.Store(slices.Contains(atOpen, p.Names[0]))
	q, err := open()
	if err != nil { // the node was opening
		q, err = open()
		require.NoError(t, err)
	}
	p.Armed.Store(true)
	bounded(t, "a call", func() { useVerbs(t, q, "copy") })
	bounded(t, "Close", func() { _ = q.Close() })
	p.Armed.Store(false)
	q, err = open()
	require.NoError(t, err)
	require.NoError(t, queuetest.CheckAll(q))
	require.NoError(t, q.Close())
}

func panicInCluster(t *testing.T, p *testkit.PanicIn, seed uint64) {
	c := newSimCluster(t, seed, 3, codeq.Options{Shards: 3, Durability: codeq.DurabilityProcess})
	c.awaitLeaders()
	p.Armed.Store(true)
	queues := make([]*codeq.Queue, 0, 3)
	for _, n := range c.members() {
		queues = append(queues, simQueue(n))
	}
	bounded(t, "a call", func() {
		var users sync.WaitGroup
		for i, q := range queues[:2] {
			users.Go(func() { useVerbs(t, q, fmt.Sprint("copy", i)) })
		}
		users.Wait()
	})
	bounded(t, "a pause of a node", func() { pauseOne(c, queues[0], c.members()[2]) })
	for _, n := range c.members() { // a joining node then gets one from any leader
		for i := range c.opts.Shards {
			c.snapshot(n, i, 1)
		}
	}
	bounded(t, "a change of leaders", func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_, _ = queues[0].ClusterStatus(ctx)
		_ = queues[0].TransferLeadership(ctx, 0, c.members()[1].name)
		time.Sleep(30 * time.Second) // until the leaders are balanced
	})
	bounded(t, "a replacement", func() {
		n := c.node(true)
		n.leaves = true
		if c.open(n) == nil {
			_ = n.close()
		}
	})
	bounded(t, "a drain", func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if n := c.leader(0); n != nil {
			_ = simQueue(n).Drain(ctx)
			_ = simQueue(n).Undrain(ctx)
		}
	})
	bounded(t, "a power loss", func() {
		n := c.members()[2]
		n.crash(0)
		n.raise()
		time.Sleep(30 * time.Second) // until it is readmitted
	})
	added := c.node(false)
	bounded(t, "an addition", func() {
		if c.open(added) == nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			time.Sleep(5 * time.Second) // until it waits to be added
			_ = queues[0].AddNode(ctx, codeq.Peer{Node: added.name, Address: added.name})
			_ = queues[0].RemoveNode(ctx, added.name)
		}
	})
	for _, n := range append(c.members(), added) {
		var p *codeq.PanicError
		bounded(t, "Close", func() {
			if err := n.close(); err != nil {
				require.ErrorAs(t, err, &p)
			}
		})
	}
	bounded(t, "Close", c.close)
}

// pauseOne makes calls on a node while another node does not answer; some of them give up.
func pauseOne(c *simCluster, q *codeq.Queue, paused *simNode) {
	c.net.Pause(paused.name, true)
	defer c.net.Pause(paused.name, false)
	end := time.Now().Add(time.Minute)
	for i := 0; time.Now().Before(end); i++ {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		_, _ = q.Produce(ctx, codeq.Task{Queue: "c", Payload: make([]byte, 64<<10)})
		if i%8 == 0 {
			_ = q.Checkpoint(ctx, fmt.Sprint("copy of ", i))
		}
		cancel()
		time.Sleep(200 * time.Millisecond)
	}
}

// eachStepOfClose makes each step of a Close panic, each in its own bubble. story calls close once,
// with the function that closes a queue, and then goes on without panics.
func eachStepOfClose(t *testing.T, least int, story func(t *testing.T, close func(func() error))) {
	t.Cleanup(func() { guard.SetHook(nil) })
	for step, reached := 0, true; reached; step++ {
		seen := 0
		guard.SetHook(func(what string) {
			if what == "Close" {
				if seen++; seen == step+1 {
					panic(testkit.Injected("into a step"))
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
				require.ErrorIs(t, err, codeq.ErrFailed)
				var p *codeq.PanicError
				require.ErrorAs(t, err, &p)
				require.Equal(t, testkit.Injected("into a step"), p.Value)
			})
		})
	}
}

// TestPanicInAnyStepOfClose: after a panic in any step of Close, nothing of the queue is left, its
// directory is unlocked, and the error reports the panic.
func TestPanicInAnyStepOfClose(t *testing.T) {
	eachStepOfClose(t, 6, func(t *testing.T, close func(func() error)) {
		opts := inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: crashfs.New()})
		q, err := codeq.Open("q", opts)
		require.NoError(t, err)
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		close(q.Close)
		q, err = codeq.Open("q", opts)
		require.NoError(t, err)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, id).State)
		require.NoError(t, q.Close())
	})
}

// bounded calls f, and panics if f does not return within 10 minutes.
func bounded(t *testing.T, what string, f func()) {
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Minute):
		panic(what + " does not return") // the bubble would not end
	}
}

// useVerbs calls all verbs without a time limit, and ignores their results.
func useVerbs(t *testing.T, q *codeq.Queue, copyTo string) {
	ctx := context.Background()
	var m codeq.Mux
	codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		j.FollowUp(codeq.Task{Queue: "b", Unique: codeq.Unique{Key: j.ID.String()}}) // perhaps of another shard
		_, _ = j.Parents(ctx)
		return nil
	})
	codeq.Handle(&m, "slow", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		_ = codeq.ReportProgress(ctx, 1, 2, "")
		<-ctx.Done()
		return nil
	})
	codeq.Handle(&m, "lost", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		_ = q.DeadLetter(ctx, j.Receipt, nil)
		return nil
	})
	run, stop := context.WithCancel(ctx)
	var calls sync.WaitGroup
	calls.Go(func() { _ = q.Run(run, &m, &codeq.RunOptions{Concurrency: 8, LeaseFor: time.Second}) })
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	if err == nil {
		calls.Go(func() {
			for range sub.All(ctx) {
			}
		})
	}
	_ = q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 5 })
	for i := range 9 {
		_, _ = q.Produce(ctx, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: fmt.Sprint(i)}})
		_, _ = q.Produce(ctx, codeq.Task{Queue: "lost"})
		_, _ = q.Produce(ctx, codeq.Task{Queue: "a", Tenant: fmt.Sprint(i)}) // its lane comes and goes
		calls.Go(func() {
			wait, cancel := context.WithTimeout(ctx, 3*time.Second)
			defer cancel()
			_, _ = q.Claim(wait, codeq.ClaimRequest{Queues: []string{"b"}})
		})
	}
	slow, _ := q.Produce(ctx, codeq.Task{Queue: "slow"})
	_ = q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Second, Task: codeq.Task{Queue: "s"}})
	time.Sleep(2 * time.Second)
	_ = q.Cancel(ctx, slow)
	_, _ = q.Get(ctx, slow)
	for range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
	}
	_, _ = q.Stats(ctx)
	_, _ = q.DeadKinds(ctx, "lost")
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
