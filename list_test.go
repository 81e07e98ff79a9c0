package codeq

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/listing"
)

// collect returns what List yields, by payload.
func collect(t *testing.T, list iter.Seq2[*TaskInfo, error]) (payloads []string) {
	t.Helper()
	for info, err := range list {
		require.NoError(t, err)
		payloads = append(payloads, string(info.Payload))
	}
	return payloads
}

// Listed returns the payloads of the tasks that List yields.
func (f *FlowTest) Listed(o ListOptions) []string {
	f.Helper()
	synctest.Wait()
	return collect(f.T, f.Q.List(context.Background(), o))
}

// Spread produces tasks, with their names as payloads, in one shard after the
// other, a millisecond apart.
func (f *FlowTest) Spread(tasks ...Task) (ids []ID) {
	f.Helper()
	for i, task := range tasks {
		ids = append(ids, f.ProduceAt(i%f.Opts.Shards, task))
		time.Sleep(time.Millisecond)
	}
	return ids
}

var allStates = []State{Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled}

// TestListPages: lists that are longer than a page, in every shard, are whole
// and in order, whatever part of them a filter leaves.
func TestListPages(t *testing.T) {
	const n = 2*listing.PageTasks + 50 // in each shard
	for _, shards := range []int{1, 3} {
		for _, state := range allStates {
			t.Run(fmt.Sprint(state, " ", shards, " shards"), func(t *testing.T) {
				inFlow(t, Options{Shards: shards, Retention: Forever, LeaseFor: time.Hour}, func(f *FlowTest) {
					ctx := context.Background()
					var parent []ID
					if state == Blocked {
						parent = f.Spread(Task{Queue: "parent"})
					}
					var want, wantX []string
					for i := 0; i < n; i++ {
						for s := range shards {
							task := Task{Queue: "a", Payload: fmt.Appendf(nil, "%d.%d", i, s), After: parent}
							if i%100 == 99 {
								task.Tenant = "x"
								wantX = append(wantX, string(task.Payload))
							}
							if state == Scheduled {
								task.RunAt = time.Now().Add(time.Hour)
							}
							want = append(want, string(task.Payload))
							f.ProduceAt(s, task)
						}
					}
					synctest.Wait()
					if state != Ready && state != Scheduled && state != Blocked {
						for range want {
							l := claimNow(f.T, f.Q, "a")
							switch state {
							case Dead:
								require.NoError(f, f.Q.DeadLetter(ctx, l.Receipt, nil))
							case Done:
								require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil))
							case Canceled:
								require.NoError(f, f.Q.Cancel(ctx, l.ID))
							}
						}
					}
					got := f.Listed(ListOptions{State: state})
					require.ElementsMatch(f, want, got)
					require.ElementsMatch(f, wantX, f.Listed(ListOptions{State: state, Tenants: []string{"x"}}))
					last := make(map[string]int) // by tenant and shard
					for _, name := range got {
						var i, s int
						_, err := fmt.Sscanf(name, "%d.%d", &i, &s)
						require.NoError(f, err)
						key := fmt.Sprint(i%100 == 99, s)
						require.GreaterOrEqual(f, i, last[key], "%s", name)
						last[key] = i
					}
				})
			})
		}
	}
}

// TestListWhileTasksChange: a list that is read while tasks come and go yields
// no task twice, all that stay, and none that is no longer in the state when its
// page is read.
func TestListWhileTasksChange(t *testing.T) {
	const n = 3 * listing.PageTasks // in each shard
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, Options{Shards: shards}, func(f *FlowTest) {
				var ids []ID
				for s := range shards {
					tasks := make([]Task, n)
					for i := range tasks {
						tasks[i].Queue = "a"
					}
					more, err := f.Q.startingAt(s).ProduceBatch(ctx, tasks)
					require.NoError(f, err)
					ids = append(ids, more...)
				}
				slices.SortFunc(ids, func(a, b ID) int { return strings.Compare(string(a[:]), string(b[:])) })
				stay, leave := ids[:len(ids)-10], ids[len(ids)-10:]
				seen := make(map[ID]bool)
				first := true
				for info, err := range f.Q.List(ctx, ListOptions{State: Ready}) {
					require.NoError(f, err)
					require.False(f, seen[info.ID], "listed twice")
					seen[info.ID] = true
					if !first {
						continue
					}
					first = false
					for _, id := range leave { // of pages that have not been read
						require.NoError(f, f.Q.Cancel(ctx, id))
					}
					require.NoError(f, f.Q.SetRunAt(ctx, info.ID, time.Now().Add(time.Hour)))
					ids = append(ids, produce(f.T, f.Q, Task{Queue: "a"})...)
				}
				for _, id := range stay {
					require.True(f, seen[id])
				}
				for _, id := range leave {
					require.False(f, seen[id])
				}
				require.True(f, seen[ids[len(ids)-1]], "what comes behind the pages read is listed too")
			})
		})
	}
}

// TestListEnds: a list may be left, its context may end, and the queue may be
// closed while it is read.
func TestListEnds(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *FlowTest) {
		tasks := make([]Task, 2*listing.PageTasks)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		f.Batch(tasks...)
		n := 0
		for _, err := range f.Q.List(context.Background(), ListOptions{State: Ready}) {
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
		for info, err := range f.Q.List(ctx, ListOptions{State: Ready}) {
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
		for _, err := range f.Q.List(context.Background(), ListOptions{State: Ready}) {
			if err != nil {
				errs = append(errs, err)
			} else if !closed {
				closed = true
				require.NoError(f, f.Q.Close())
			}
		}
		require.Len(f, errs, 1)
		require.ErrorIs(f, errs[0], ErrClosed)
		f.Open()
	})
}

// TestPageIsReadAgain: a page that is read again, as the shard's leader has changed meanwhile, is read
// from where it begins.
func TestPageIsReadAgain(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		for range listing.PageTasks + 1 {
			produce(t, q, Task{Queue: "a"})
		}
		s := q.led()[0]
		op := &readOp{completion: newCompletion(), list: newLister(ListOptions{State: Ready})}
		visit := func() (again bool) { // what the owner does, and then who reads
			require.NoError(t, s.probe(func(s *shard) (err error) {
				v := viewOf(s)
				defer v.close()
				op.list.Visit(&s.State, v.Snapshot)
				again, err = op.read(v)
				return err
			}))
			return again
		}
		require.False(t, visit(), "what there is to read")
		require.True(t, visit(), "the tasks of a page")
		op.again()
		for range listing.PageTasks {
			require.NoError(t, q.Complete(t.Context(), claimNow(t, q, "a").Receipt, nil))
		}
		require.True(t, visit())
		require.False(t, visit())
		require.Len(t, op.list.Page, 1)
		require.False(t, op.list.More())
	})
}
