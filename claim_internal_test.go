package codeq

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/permits"
	"codeq/internal/record"
)

// ownCluster runs a test on one node that leads two shards.
func ownCluster(t *testing.T, story func(t *testing.T, q *Queue)) {
	synctest.Test(t, func(t *testing.T) { story(t, loneNode(t, 2)) })
}

// closedGate blocks all claims.
type closedGate struct{}

func (closedGate) Look(*dispatch.Dispatcher, time.Time) (bool, time.Duration)  { return false, 0 }
func (closedGate) Enter(*dispatch.Dispatcher, time.Time) (bool, time.Duration) { return false, 0 }
func (closedGate) Leave(int) []*dispatch.Dispatcher                            { return nil }
func (closedGate) MayAsk() bool                                                { return false }
func (closedGate) Ask(*dispatch.Claim) bool                                    { return false }

// TestClaimOutlivesTheShardItBeginsAt: a claim is in the inbox of a shard when the shard's leader
// stops. The claim then waits in all other shards that this node leads, and in all shards that this
// node leads later.
func TestClaimOutlivesTheShardItBeginsAt(t *testing.T) {
	ownCluster(t, func(t *testing.T, q *Queue) {
		const claims = 10
		s := q.shard(0)
		goOn := standStill(s)
		require.NoError(t, s.inbox.Pass(crashNotice()))
		served := make(chan error, claims)
		for range claims { // some begin at this shard
			go func() {
				_, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
				served <- err
			}()
		}
		synctest.Wait()
		goOn()
		for q.shard(0) == nil || q.shard(0) == s {
			time.Sleep(10 * time.Millisecond)
		}
		for range claims {
			_, err := q.node.do(t.Context(), 1, &produceOp{completion: newCompletion(callProduce), Produce: call.Produce{Tasks: []engine.NewTask{prepare(&Task{Queue: "a"}, nil)}}})
			require.NoError(t, err)
		}
		time.Sleep(time.Minute)
		require.Len(t, served, claims, "claims that wait, though there are tasks")
	})
}

// TestClaimThatIsSentOnIsGivenUp: a caller can give up a claim at any moment after a shard has
// passed it on.
func TestClaimThatIsSentOnIsGivenUp(t *testing.T) {
	ownCluster(t, func(t *testing.T, q *Queue) {
		other := q.shard(1)
		liar := dispatch.New(&other.rules, dispatch.Config{Index: 1, Shards: 2})
		require.NoError(t, other.probe(func(*shard) error {
			liar.Join(q.heads, new(dispatch.SlowStart), time.Minute)
			return nil
		}))
		_, err := q.node.do(t.Context(), 1, &produceOp{completion: newCompletion(callProduce), Produce: call.Produce{Tasks: []engine.NewTask{prepare(&Task{Queue: "a"}, nil)}}})
		require.NoError(t, err)
		for range 20 { // some begin at the other shard
			require.NoError(t, other.probe(func(s *shard) error {
				s.claims.SetGateway(s.claims.Of(s.rules.Names.QueueNamed("a")), closedGate{})
				// It announces a task that the shard does not grant.
				liar.Publish(s.rules.Names.Queues["a"])
				return nil
			}))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			cancel()
		}
		synctest.Wait()
		require.NoError(t, other.probe(func(s *shard) error { require.Zero(t, s.claims.Usage().Tickets); return nil }))
	})
}

// TestLeaderLoadedInVain: a shard that was loaded but never served leaves nothing in memory.
func TestLeaderLoadedInVain(t *testing.T) {
	ownCluster(t, func(t *testing.T, q *Queue) {
		_, err := q.ProduceBatch(t.Context(), []Task{{Queue: "a"}, {Queue: "a"}})
		require.NoError(t, err)
		loaded := func() weak.Pointer[shard] {
			s, err := q.replicas[0].load(2)
			require.NoError(t, err)
			return weak.Make(s)
		}()
		runtime.GC()
		runtime.GC()
		require.Nil(t, loaded.Value())
	})
}

// TestHeadsOfWhatCannotBeClaimed: a queue that is paused or at its limit attracts no claims and
// ends no batches. Claims find the queue again when it has room.
func TestHeadsOfWhatCannotBeClaimed(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		words := func(queue string) (heads []bool) {
			synctest.Wait()
			for shard := range 2 {
				heads = append(heads, q.heads.Has(queue, shard))
			}
			return heads
		}
		produce(t, q.startingAt(0), Task{Queue: "a"})
		produce(t, q.startingAt(1), Task{Queue: "a"}, Task{Queue: "a"})
		require.Equal(t, []bool{true, true}, words("a"))
		require.NoError(t, q.Pause(t.Context(), "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		require.NoError(t, q.Resume(t.Context(), "a"))
		require.Equal(t, []bool{true, true}, words("a"))
		require.NoError(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Concurrency = 1 }))
		l := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
		require.Contains(t, words("a"), true)
		requireNextAny(t, q, "a", 2)
		require.Equal(t, []bool{false, false}, words("a"))
		require.NoError(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Concurrency, s.Rate, s.Burst = 0, 1, 1 }))
		produce(t, q, Task{Queue: "a"}, Task{Queue: "a"}, Task{Queue: "a"})
		claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		for range 2 {
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
		}
	})
}

// requireNextAny claims and completes n tasks one by one, in any order.
func requireNextAny(t *testing.T, q *Queue, queue string, n int) {
	t.Helper()
	for range n {
		require.NoError(t, q.Complete(t.Context(), claimNow(t, q, queue).Receipt, nil))
	}
}

// boundTo returns a task of queue "a" that belongs to the given shard, out of three.
func boundTo(shard int) Task {
	for i := 0; ; i++ {
		t := Task{Queue: "a", LimitKey: fmt.Sprint(i)}
		ties := record.Ties{Limit: keys.LimitScope(t.Queue, t.LimitKey)}
		if home, _ := ties.Home(3); home == shard {
			return t
		}
	}
}

// gateIn returns the permit gate of queue "a" in a shard.
func gateIn(s *shard) *dispatch.PermitGate {
	return s.claims.Of(s.rules.Names.Queues["a"]).Gateway().(*dispatch.PermitGate)
}

// TestPermitsLateReport: a late report of a shard has no effect after a newer report of this shard
// or of its next leader.
func TestPermitsLateReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := loneNode(t, 3)
		require.NoError(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Concurrency = 2 }))
		produce(t, q, boundTo(1), boundTo(1), boundTo(1))
		held := []*Lease{claimNow(t, q, "a"), claimNow(t, q, "a")}
		produce(t, q, boundTo(0))
		s := q.shard(1)
		for _, late := range []permits.Report{
			{Epoch: s.epoch - 1, Seq: 1000},
			{Epoch: s.epoch, Seq: 0, Try: 7},
		} {
			op := &permitsOp{completion: newCompletion(callPermits), PermitRequest: dispatch.PermitRequest{Queue: "a", Shard: 1}}
			op.Report = late
			_, err := q.shard(0).do(t.Context(), op, op.base(), nil)
			require.ErrorIs(t, err, ErrNotLeader)
			require.Nil(t, claimNow(t, q, "a"))
		}
		require.NoError(t, q.Complete(t.Context(), held[0].Receipt, nil))
		synctest.Wait() // the permit may be on its way to the other shard
		require.NotNil(t, claimNow(t, q, "a"))
	})
}

// TestPermitsAnswerAfterAsk: after a shard has reported its permits to a new permit allocator, it
// takes no more permits from the old one.
func TestPermitsAnswerAfterAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := loneNode(t, 3)
		require.NoError(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Concurrency = 1 }))
		produce(t, q, boundTo(1))
		goOn := standStill(q.shard(0)) // the allocator
		ctx, stop := context.WithCancel(t.Context())
		claimed := make(chan error, 1)
		go func() {
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
			claimed <- err
		}()
		time.Sleep(10 * time.Millisecond)
		s := q.shard(1)
		var late func(s *shard)
		var value []byte
		require.NoError(t, s.probe(func(s *shard) error {
			p := gateIn(s)
			require.True(t, p.IsBusy())
			op := new(permitsOp)
			op.Granted = 1
			op.Request = permits.Request{Report: permits.Report{Epoch: s.epoch, Seq: s.permits.Reports()}, Want: 1}
			late = func(*shard) { p.Answered(&op.Request, op.Answer, nil) }
			value = s.rules.Names.Queues["a"].Value
			return nil
		}))
		ask := &askPermitsOp{completion: newCompletion(callAskPermits), Question: permits.Question{Queue: "a", Settings: value}}
		_, err := s.do(t.Context(), ask, ask.base(), nil)
		require.NoError(t, err)
		require.Zero(t, ask.Held)
		taken := 0
		require.NoError(t, s.probe(func(s *shard) error {
			late(s)
			taken = gateIn(s).Unused()
			return nil
		}))
		require.Zero(t, taken)
		goOn()
		stop()
		<-claimed
	})
}

// TestClaimAsksNoFormerLeaders: a claim does not ask the shards that this node led when the claim
// began.
func TestClaimAsksNoFormerLeaders(t *testing.T) {
	ownCluster(t, func(t *testing.T, q *Queue) {
		_, err := q.node.claims.askAll(t.Context(), &ClaimRequest{Queues: []string{"a"}}, nil, nil, nil)
		require.ErrorIs(t, err, ErrNotLeader, "the shards were led elsewhere when the claim began, and were not asked")
	})
}
