package codeq_test

import (
	"bytes"
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/hook"
)

// TestClockJumpsUnderRun: a clock that is set by an hour, either way, neither takes a
// task from a handler nor gives it to another one, does not change the rate of claims, makes
// nothing spin, and the IDs go on in their order; also over a restart.
func TestClockJumpsUnderRun(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1, LeaseFor: time.Minute}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "rated", func(s *codeq.Settings) { s.Rate, s.Burst = 1, 1 }))
		last := p.Store(codeq.Task{Queue: "rated"})
		for _, jump := range []time.Duration{time.Hour, -time.Hour, -time.Hour, time.Hour} {
			calls, finish := 0, make(chan struct{})
			var m codeq.Mux
			codeq.Handle(&m, "held", func(context.Context, *codeq.Job[[]byte]) error {
				calls++
				<-finish
				return nil
			})
			runCtx, stop := context.WithCancel(ctx)
			run := make(chan error, 1)
			go func() { run <- p.Run(runCtx, &m, nil) }()
			held := p.Store(codeq.Task{Queue: "held"})
			synctest.Wait()

			commits := hook.Commits(p.Queue)
			p.SetClock(jump)
			p.Pass(10 * time.Minute) // ten leases
			require.Less(t, hook.Commits(p.Queue)-commits, uint64(100), "nothing spins after a jump of %v", jump)
			require.Equal(t, 1, calls, "after a jump of %v", jump)
			require.Equal(t, codeq.Leased, p.StateOf(held))

			var tasks []codeq.Task
			for range 5 {
				tasks = append(tasks, codeq.Task{Queue: "rated"})
			}
			ids, err := p.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
			for _, id := range ids {
				require.Positive(t, bytes.Compare(id[:], last[:]), "after a jump of %v", jump)
				last = id
			}
			require.NotNil(t, claimNow(t, p.Queue, "rated"))
			require.Nil(t, claimNow(t, p.Queue, "rated"), "the burst is one")
			start := time.Now()
			for range 3 {
				l, err := p.Claim(ctx, codeq.ClaimRequest{Queues: []string{"rated"}})
				require.NoError(t, err)
				require.NoError(t, p.Complete(ctx, l.Receipt, nil))
			}
			require.InDelta(t, 3, time.Since(start).Seconds(), 0.1, "after a jump of %v", jump)

			close(finish)
			stop()
			require.NoError(t, <-run)
			require.Zero(t, p.StateOf(held), "it has been completed")
			p.Step()
		}
	})
}
