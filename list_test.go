package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/listing"
	"codeq/test/queuetest"
)

var allStates = []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased, codeq.Dead, codeq.Done, codeq.Canceled}

func labelled(name string, task codeq.Task) codeq.Task {
	task.Payload = []byte(name)
	return task
}

// TestListOrder: List yields the tasks of each state in the documented order, whatever their
// shards.
func TestListOrder(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	inLane := []codeq.Task{
		labelled("b", codeq.Task{Queue: "b", Priority: 9}),
		labelled("a low 1", codeq.Task{Queue: "a"}),
		labelled("a high y", codeq.Task{Queue: "a", Priority: 9, Tenant: "y"}),
		labelled("a low 2", codeq.Task{Queue: "a"}),
		labelled("a high x 1", codeq.Task{Queue: "a", Priority: 9, Tenant: "x"}),
		labelled("a middle", codeq.Task{Queue: "a", Priority: 5, Tenant: "z"}),
		labelled("a high x 2", codeq.Task{Queue: "a", Priority: 9, Tenant: "x"}),
	}
	byLane := []string{"a high x 1", "a high x 2", "a high y", "a middle", "a low 1", "a low 2", "b"}
	claimAll := func(f *queuetest.FlowTest, end func(*codeq.Lease) error) {
		f.Helper()
		for l := queuetest.ClaimNow(f.T, f.Q, "a", "b"); l != nil; l = queuetest.ClaimNow(f.T, f.Q, "a", "b") {
			if end != nil {
				require.NoError(f, end(l))
			}
		}
	}
	ended := func(f *queuetest.FlowTest, end func(*codeq.Lease) error) {
		f.Spread( // the longest retention comes last
			labelled("b", codeq.Task{Queue: "b", Retention: time.Hour}),
			labelled("a 1", codeq.Task{Queue: "a", Retention: time.Hour}),
			labelled("a long", codeq.Task{Queue: "a", Retention: 9 * time.Hour}),
			labelled("a 2", codeq.Task{Queue: "a", Retention: time.Hour}),
			labelled("a for ever", codeq.Task{Queue: "a", Retention: codeq.Forever}),
			labelled("a 3", codeq.Task{Queue: "a", Retention: time.Hour}),
		)
		claimAll(f, end)
	}
	kept := []string{"a 1", "a 2", "a 3", "a long", "a for ever", "b"}
	for _, shards := range []int{1, 3} {
		for _, c := range []struct {
			state codeq.State
			make  func(f *queuetest.FlowTest)
			want  []string
		}{
			{codeq.Ready, func(f *queuetest.FlowTest) { f.Spread(inLane...) }, byLane},
			{codeq.Ready, func(f *queuetest.FlowTest) { // one task became ready later
				ids := f.Spread(inLane...)
				require.NoError(f, f.Q.SetRunAt(ctx, ids[1], time.Time{}))
			}, []string{"a high x 1", "a high x 2", "a high y", "a middle", "a low 2", "a low 1", "b"}},
			{codeq.Leased, func(f *queuetest.FlowTest) {
				f.Spread(inLane...)
				claimAll(f, nil)
			}, byLane},
			{codeq.Scheduled, func(f *queuetest.FlowTest) {
				now := time.Now()
				f.Spread(
					labelled("third", codeq.Task{Queue: "a", RunAt: now.Add(3 * time.Hour)}),
					labelled("first", codeq.Task{Queue: "b", RunAt: now.Add(time.Hour)}),
					labelled("fourth", codeq.Task{Queue: "a", RunAt: now.Add(3 * time.Hour)}),
					labelled("second", codeq.Task{Queue: "c", RunAt: now.Add(2 * time.Hour), Priority: 9}),
				)
			}, []string{"first", "second", "third", "fourth"}},
			{codeq.Blocked, func(f *queuetest.FlowTest) {
				parent := f.Spread(codeq.Task{Queue: "parent"})
				group := codeq.Task{Queue: "a", Group: "g"}
				queuetest.Produce(f.T, f.Q, group)
				f.Spread(
					labelled("b", codeq.Task{Queue: "b", After: parent}),
					labelled("a parent 1", codeq.Task{Queue: "a", After: parent}),
				)
				queuetest.Produce(f.T, f.Q, labelled("a group 1", group))
				time.Sleep(time.Millisecond)
				f.Spread(labelled("a parent 2", codeq.Task{Queue: "a", After: parent}))
				queuetest.Produce(f.T, f.Q, labelled("a group 2", group))
			}, []string{"a parent 1", "a parent 2", "a group 1", "a group 2", "b"}},
			{codeq.Done, func(f *queuetest.FlowTest) {
				ended(f, func(l *codeq.Lease) error { return f.Q.Complete(ctx, l.Receipt, nil) })
			}, kept},
			{codeq.Canceled, func(f *queuetest.FlowTest) {
				ended(f, func(l *codeq.Lease) error { return f.Q.Cancel(ctx, l.ID) })
			}, kept},
			{codeq.Dead, func(f *queuetest.FlowTest) { // all dead letters are kept for ever
				ended(f, func(l *codeq.Lease) error { return f.Q.DeadLetter(ctx, l.Receipt, nil) })
			}, []string{"a 1", "a long", "a 2", "a for ever", "a 3", "b"}},
		} {
			t.Run(fmt.Sprint(c.state, " ", shards, " shards"), func(t *testing.T) {
				queuetest.InFlow(t, codeq.Options{Shards: shards, LeaseFor: time.Hour}, func(f *queuetest.FlowTest) {
					c.make(f)
					f.Check()
					require.Equal(f, c.want, f.Listed(codeq.ListOptions{State: c.state}))
					var onlyA []string
					for _, name := range c.want {
						if strings.HasPrefix(name, "a") {
							onlyA = append(onlyA, name)
						}
					}
					if c.state != codeq.Scheduled {
						require.Equal(f, onlyA, f.Listed(codeq.ListOptions{State: c.state, Queue: "a"}))
					}
					require.Empty(f, f.Listed(codeq.ListOptions{State: c.state, Queue: "unknown"}))
					f.Reopen()
					require.Equal(f, c.want, f.Listed(codeq.ListOptions{State: c.state}))
				})
			})
		}
	}
}

// TestListEnds: during a list, the caller may leave the list, the context of the list may end, and
// the queue may be closed.
func TestListEnds(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		tasks := make([]codeq.Task, 2*listing.PageTasks)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		f.Batch(tasks...)
		n := 0
		for _, err := range f.Q.List(context.Background(), codeq.ListOptions{State: codeq.Ready}) {
			require.NoError(f, err)
			if n++; n == 3 {
				break
			}
		}
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		n = 0
		var errs []error
		for info, err := range f.Q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
			if err != nil {
				require.Nil(f, info)
				errs = append(errs, err)
				continue
			}
			n++
			cancel(cause)
		}
		require.Len(f, errs, 1, "the sequence ends after the first error")
		require.ErrorIs(f, errs[0], cause)
		require.Equal(f, listing.PageTasks, n, "what has been read is yielded")

		errs = nil
		closed := false
		for _, err := range f.Q.List(context.Background(), codeq.ListOptions{State: codeq.Ready}) {
			if err != nil {
				errs = append(errs, err)
			} else if !closed {
				closed = true
				require.NoError(f, f.Q.Close())
			}
		}
		require.Len(f, errs, 1)
		require.ErrorIs(f, errs[0], codeq.ErrClosed)
		f.Open()
	})
}
