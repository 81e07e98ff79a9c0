package codeq

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// InOneGroup has a shard decide calls in one group, in their order, and returns how
// many commits they take until nothing is under way.
func (f *FlowTest) InOneGroup(index int, calls ...func()) (commits uint64) {
	f.Helper()
	s := f.Q.shard(index)
	held := make(chan struct{})
	go func() { _ = s.probe(func(*shard) error { <-held; return nil }) }()
	synctest.Wait()
	before := s.commits.Load()
	var done sync.WaitGroup
	for _, call := range calls {
		done.Go(call)
		synctest.Wait()
	}
	close(held)
	done.Wait()
	synctest.Wait()
	return s.commits.Load() - before
}

// TestChildrenShareCommits: many children of a task that exists already do not take a
// commit each, be the parent ready, leased, scheduled, blocked or dead.
func TestChildrenShareCommits(t *testing.T) {
	t.Parallel()
	const children = 400
	ctx := context.Background()
	for name, prepare := range map[string]func(f *FlowTest) ID{
		"ready":     func(f *FlowTest) ID { return produce(f.T, f.Q, Task{Queue: "p"})[0] },
		"scheduled": func(f *FlowTest) ID { return produce(f.T, f.Q, Task{Queue: "p", RunAt: time.Now().Add(time.Hour)})[0] },
		"blocked": func(f *FlowTest) ID {
			first := produce(f.T, f.Q, Task{Queue: "first"})[0]
			return produce(f.T, f.Q, Task{Queue: "p", After: []ID{first}})[0]
		},
		"leased": func(f *FlowTest) ID {
			produce(f.T, f.Q, Task{Queue: "p"})
			return claimNow(f.T, f.Q, "p").ID
		},
		"dead": func(f *FlowTest) ID {
			produce(f.T, f.Q, Task{Queue: "p"})
			l := claimNow(f.T, f.Q, "p")
			require.NoError(f, f.Q.DeadLetter(ctx, l.Receipt, nil))
			return l.ID
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFlow(t, Options{Shards: 1}, func(f *FlowTest) {
				parent := prepare(f)
				synctest.Wait()
				tasks := make([]Task, children)
				for i := range tasks {
					tasks[i] = Task{Queue: "c", After: []ID{parent}, OnDead: HoldOnDead}
				}
				s := f.Q.shard(0)
				before := s.commits.Load()
				_, err := f.Q.ProduceBatch(ctx, tasks)
				require.NoError(f, err)
				f.Check()
				require.LessOrEqual(f, s.commits.Load()-before, uint64(children/10), "commits for children")
				require.NoError(f, f.Q.Cancel(ctx, parent)) // which cancels them
				f.Check()
				require.Equal(f, uint64(0), f.Stats()["c"].Blocked)
			})
		})
	}
}

func (f *FlowTest) Stats() map[string]Counts {
	f.Helper()
	stats, err := f.Q.Stats(context.Background())
	require.NoError(f, err)
	return stats
}

// TestDebounceSharesCommits: many produces that replace each other share a commit, and
// the last one stands.
func TestDebounceSharesCommits(t *testing.T) {
	const calls = 200
	for name, task := range map[string]Task{
		"ready":      {Queue: "q"},
		"scheduled":  {Queue: "q", RunAt: time.UnixMilli(1 << 42)},
		"in a group": {Queue: "q", Group: "g"},
	} {
		t.Run(name, func(t *testing.T) {
			inFlow(t, Options{Shards: 1}, func(f *FlowTest) {
				if task.Group != "" {
					produce(f.T, f.Q, task)
				}
				ids := make([]ID, calls)
				var each []func()
				for i := range calls {
					each = append(each, func() {
						next := task
						next.Payload = fmt.Append(nil, i)
						next.Priority = i % 3
						next.Unique = Unique{Key: "k", Replace: true, For: time.Duration(i%2) * time.Hour}
						var err error
						ids[i], err = f.Q.Produce(context.Background(), next)
						require.NoError(f, err)
					})
				}
				require.LessOrEqual(f, f.InOneGroup(0, each...), uint64(3), "commits")
				for _, id := range ids {
					require.Equal(f, ids[0], id)
				}
				info, err := f.Q.Get(context.Background(), ids[0])
				require.NoError(f, err)
				require.Equal(f, fmt.Append(nil, calls-1), info.Payload)
				f.Check()
				f.Reopen()
			})
		})
	}
}

// TestVerbsOfOneGroup: verbs that follow each other on one task in one group each find
// what the one before has made of it.
func TestVerbsOfOneGroup(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 1, Retention: time.Hour}, func(f *FlowTest) {
		id := produce(f.T, f.Q, Task{Queue: "q"})[0]
		other := produce(f.T, f.Q, Task{Queue: "q"})[0]
		must := func(call func() error) func() { return func() { require.NoError(f, call()) } }
		commits := f.InOneGroup(0,
			must(func() error { return f.Q.SetPriority(ctx, id, 5) }),
			must(func() error { return f.Q.SetRunAt(ctx, id, time.Now().Add(time.Hour)) }),
			must(func() error { return f.Q.SetPriority(ctx, id, 7) }),
			must(func() error { return f.Q.SetRunAt(ctx, id, time.Time{}) }),
			must(func() error { return f.Q.SetPriority(ctx, other, 3) }),
			must(func() error { return f.Q.Cancel(ctx, other) }),
			func() { require.ErrorIs(f, f.Q.SetPriority(ctx, other, 4), ErrNotWaiting) },
		)
		require.LessOrEqual(f, commits, uint64(2))
		f.Check()
		info, err := f.Q.Get(ctx, id)
		require.NoError(f, err)
		require.Equal(f, Ready, info.State)
		require.Equal(f, 7, info.Priority)
		info, err = f.Q.Get(ctx, other)
		require.NoError(f, err)
		require.Equal(f, Canceled, info.State)
		require.Equal(f, 3, info.Priority)
		f.Reopen()
		require.Equal(f, id, claimNow(f.T, f.Q, "q").ID)
	})
}
