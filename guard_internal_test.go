package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

// TestPanicOfOwner: the owner of a shard panics in a group. All calls that wait for the shard
// return, the other shards continue, Close returns, and the next Open finds all acknowledged
// changes.
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
		calls.Go(func() {
			outcomes.Store("probe", s.probe(func(*shard) error { panic(testkit.Injected("of the test")) }))
		})
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
			require.Equal(t, testkit.Injected("of the test"), p.Value)
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

// panickyGate panics at the first look after a claim has entered.
type panickyGate struct{ passed bool }

func (g *panickyGate) Look(*dispatch.Dispatcher, time.Time) (bool, time.Duration) {
	if g.passed {
		panic(testkit.Injected("look"))
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

// TestPanicOfOwnerAmidClaim: the owner panics while it serves a claim that has taken a task. The
// claim is new or has waited, for one queue or for a list of queues. It returns an error.
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
					require.NoError(t, q.led()[0].probe(func(s *shard) error {
						s.claims.SetGateway(s.claims.Of(s.rules.Names.QueueNamed("0")), new(panickyGate))
						return nil
					}))
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

// TestCrashOnFullDisk: a shard without disk space writes nothing. It still fails when a component
// that it needs has panicked.
func TestCrashOnFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		s := q.led()[0]
		require.NoError(t, s.probe(func(s *shard) error { s.start.Room = engine.RoomEmpty; return nil }))
		require.NoError(t, s.inbox.Pass(crashNotice()))
		synctest.Wait()
		_, err = q.Produce(t.Context(), Task{Queue: "a"})
		require.ErrorIs(t, err, ErrFailed)
		require.ErrorIs(t, q.Close(), ErrFailed)
	})
}

// panickyCommitter panics in Commit. Pebble can panic there, too, and keeps its locks locked.
type panickyCommitter struct{ committer }

func (panickyCommitter) Commit(*pebble.Batch) error { panic(testkit.Injected("commit")) }

// TestPanicOfCommit: the callers of the group get ErrUncertain, since the group may be stored.
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

// TestPanicInClose: Close abandons a store that it cannot close, and the next Open can open the
// store.
func TestPanicInClose(t *testing.T) {
	testkit.AbandonsStores(t)
	p := &testkit.PanicIn{Names: []string{"close of a store"}}
	p.Begin(t)
	fs := crashfs.New()
	q, err := Open("q", inspect.With(&Options{Shards: 1}, inspect.Private{FS: fs}))
	require.NoError(t, err)
	id := produce(t, q, Task{Queue: "a"})[0]
	p.Armed.Store(true)
	require.ErrorIs(t, q.Close(), ErrFailed)
	require.Empty(t, p.Left())
	q, err = Open("q", inspect.With(&Options{}, inspect.Private{FS: fs}))
	require.NoError(t, err)
	require.Equal(t, Ready, infoOf(t, q, id).State)
	require.NoError(t, q.Close())
}

// TestAbandonedEnds: if the outcome of a call that ends a lease for Run is unknown, OnError reports
// it once.
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
			abandon(op, testkit.ErrBroken)
			r.pool.Outcomes.Wait()
			require.ErrorIs(t, <-told, testkit.ErrBroken)
		}
		require.Empty(t, told)
	})
}
