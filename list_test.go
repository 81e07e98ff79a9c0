package codeq

import (
	"codeq/internal/listing"
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

// listed returns the payloads of the tasks that List yields.
func (f *flowTest) listed(o ListOptions) []string {
	f.Helper()
	synctest.Wait()
	return collect(f.T, f.q.List(context.Background(), o))
}

// spread produces tasks, with their names as payloads, in one shard after the
// other, a millisecond apart.
func (f *flowTest) spread(tasks ...Task) (ids []ID) {
	f.Helper()
	for i, task := range tasks {
		ids = append(ids, f.produceAt(i%f.opts.Shards, task))
		time.Sleep(time.Millisecond)
	}
	return ids
}

func labelled(name string, task Task) Task {
	task.Payload = []byte(name)
	return task
}

// TestListOrder: List yields the tasks of each state in the order that it
// documents, over whatever shards they lie in.
func TestListOrder(t *testing.T) {
	ctx := context.Background()
	inLane := []Task{
		labelled("b", Task{Queue: "b", Priority: 9}),
		labelled("a low 1", Task{Queue: "a"}),
		labelled("a high y", Task{Queue: "a", Priority: 9, Tenant: "y"}),
		labelled("a low 2", Task{Queue: "a"}),
		labelled("a high x 1", Task{Queue: "a", Priority: 9, Tenant: "x"}),
		labelled("a middle", Task{Queue: "a", Priority: 5, Tenant: "z"}),
		labelled("a high x 2", Task{Queue: "a", Priority: 9, Tenant: "x"}),
	}
	byLane := []string{"a high x 1", "a high x 2", "a high y", "a middle", "a low 1", "a low 2", "b"}
	claimAll := func(f *flowTest, end func(*Lease) error) {
		f.Helper()
		for l := claimNow(f.T, f.q, "a", "b"); l != nil; l = claimNow(f.T, f.q, "a", "b") {
			if end != nil {
				require.NoError(f, end(l))
			}
		}
	}
	ended := func(f *flowTest, end func(*Lease) error) {
		f.spread( // the longest kept are last
			labelled("b", Task{Queue: "b", Retention: time.Hour}),
			labelled("a 1", Task{Queue: "a", Retention: time.Hour}),
			labelled("a long", Task{Queue: "a", Retention: 9 * time.Hour}),
			labelled("a 2", Task{Queue: "a", Retention: time.Hour}),
			labelled("a for ever", Task{Queue: "a", Retention: Forever}),
			labelled("a 3", Task{Queue: "a", Retention: time.Hour}),
		)
		claimAll(f, end)
	}
	kept := []string{"a 1", "a 2", "a 3", "a long", "a for ever", "b"}
	for _, shards := range []int{1, 3} {
		for _, c := range []struct {
			state State
			make  func(f *flowTest)
			want  []string
		}{
			{Ready, func(f *flowTest) { f.spread(inLane...) }, byLane},
			{Ready, func(f *flowTest) { // one that became ready later
				ids := f.spread(inLane...)
				require.NoError(f, f.q.SetRunAt(ctx, ids[1], time.Time{}))
			}, []string{"a high x 1", "a high x 2", "a high y", "a middle", "a low 2", "a low 1", "b"}},
			{Leased, func(f *flowTest) {
				f.spread(inLane...)
				claimAll(f, nil)
			}, byLane},
			{Scheduled, func(f *flowTest) {
				now := time.Now()
				f.spread(
					labelled("third", Task{Queue: "a", RunAt: now.Add(3 * time.Hour)}),
					labelled("first", Task{Queue: "b", RunAt: now.Add(time.Hour)}),
					labelled("fourth", Task{Queue: "a", RunAt: now.Add(3 * time.Hour)}),
					labelled("second", Task{Queue: "c", RunAt: now.Add(2 * time.Hour), Priority: 9}),
				)
			}, []string{"first", "second", "third", "fourth"}},
			{Blocked, func(f *flowTest) {
				parent := f.spread(Task{Queue: "parent"})
				group := Task{Queue: "a", Group: "g"}
				produce(f.T, f.q, group)
				f.spread(
					labelled("b", Task{Queue: "b", After: parent}),
					labelled("a parent 1", Task{Queue: "a", After: parent}),
				)
				produce(f.T, f.q, labelled("a group 1", group))
				time.Sleep(time.Millisecond)
				f.spread(labelled("a parent 2", Task{Queue: "a", After: parent}))
				produce(f.T, f.q, labelled("a group 2", group))
			}, []string{"a parent 1", "a parent 2", "a group 1", "a group 2", "b"}},
			{Done, func(f *flowTest) {
				ended(f, func(l *Lease) error { return f.q.Complete(ctx, l.Receipt, nil) })
			}, kept},
			{Canceled, func(f *flowTest) {
				ended(f, func(l *Lease) error { return f.q.Cancel(ctx, l.ID) })
			}, kept},
			{Dead, func(f *flowTest) { // kept for ever, all of them
				ended(f, func(l *Lease) error { return f.q.DeadLetter(ctx, l.Receipt, nil) })
			}, []string{"a 1", "a long", "a 2", "a for ever", "a 3", "b"}},
		} {
			t.Run(fmt.Sprint(c.state, " ", shards, " shards"), func(t *testing.T) {
				inFlow(t, Options{Shards: shards, LeaseFor: time.Hour}, func(f *flowTest) {
					c.make(f)
					f.check()
					require.Equal(f, c.want, f.listed(ListOptions{State: c.state}))
					var onlyA []string
					for _, name := range c.want {
						if strings.HasPrefix(name, "a") {
							onlyA = append(onlyA, name)
						}
					}
					if c.state != Scheduled {
						require.Equal(f, onlyA, f.listed(ListOptions{State: c.state, Queue: "a"}))
					}
					require.Empty(f, f.listed(ListOptions{State: c.state, Queue: "unknown"}))
					f.reopen()
					require.Equal(f, c.want, f.listed(ListOptions{State: c.state}))
				})
			})
		}
	}
}

// listState brings tasks of queues a and b, and of tenants "", x and y, into a
// state, at times ten minutes apart; it returns their names and times.
func listState(f *flowTest, state State) (names []string, at []time.Time) {
	ctx := context.Background()
	var parent []ID
	if state == Blocked {
		parent = f.spread(Task{Queue: "parent"})
	}
	for i := range 12 {
		task := Task{
			Queue: []string{"a", "b"}[i%2], Tenant: []string{"", "x", "y"}[i%3], Payload: fmt.Append(nil, i),
			After: parent, Retention: Forever,
		}
		moment := time.Now()
		switch state {
		case Scheduled:
			task.RunAt = moment.Add(100 * time.Hour)
			moment = task.RunAt
		case Leased:
			task.LeaseFor = 100 * time.Hour
			moment = moment.Add(task.LeaseFor)
		}
		id := f.produceAt(i%f.opts.Shards, task)
		if state == Leased || state == Dead || state == Done || state == Canceled {
			l := f.claim(task.Queue)
			switch state {
			case Dead:
				require.NoError(f, f.q.DeadLetter(ctx, l.Receipt, errors.New("broken")))
			case Done:
				require.NoError(f, f.q.Complete(ctx, l.Receipt, []byte("result")))
			case Canceled:
				require.NoError(f, f.q.Cancel(ctx, id))
			}
		}
		names, at = append(names, fmt.Sprint(i)), append(at, moment)
		time.Sleep(10 * time.Minute)
	}
	f.check()
	return names, at
}

var allStates = []State{Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled}

// TestListFilters: queue, tenants and times choose the same tasks in every
// state, alone and together.
func TestListFilters(t *testing.T) {
	for _, shards := range []int{1, 3} {
		for _, state := range allStates {
			t.Run(fmt.Sprint(state, " ", shards, " shards"), func(t *testing.T) {
				inFlow(t, Options{Shards: shards}, func(f *flowTest) {
					names, at := listState(f, state)
					for _, queue := range []string{"", "a", "b"} {
						for _, tenants := range [][]string{nil, {""}, {"x"}, {"x", "y"}, {"unknown"}} {
							for _, bounds := range [][2]time.Time{
								{}, {at[3]}, {{}, at[9]}, {at[3], at[9]}, {at[3].Add(time.Millisecond), at[9].Add(time.Millisecond)},
								{at[11].Add(time.Hour)}, {{}, at[0]}, {at[5], at[5]},
							} {
								var want []string
								for i, name := range names {
									if (queue == "" || queue == []string{"a", "b"}[i%2]) &&
										(tenants == nil || slices.Contains(tenants, []string{"", "x", "y"}[i%3])) &&
										(bounds[0].IsZero() || !at[i].Before(bounds[0])) &&
										(bounds[1].IsZero() || at[i].Before(bounds[1])) {
										want = append(want, name)
									}
								}
								got := f.listed(ListOptions{State: state, Queue: queue, Tenants: tenants, From: bounds[0], To: bounds[1]})
								require.ElementsMatch(f, want, got, "queue %q, tenants %q, from %v to %v", queue, tenants, bounds[0], bounds[1])
							}
						}
					}
				})
			})
		}
	}
}

// TestGetInEveryState: Get shows a task as List does, with the time that belongs
// to its state.
func TestGetInEveryState(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		for _, state := range allStates {
			inFlow(t, Options{Shards: shards}, func(f *flowTest) {
				_, at := listState(f, state)
				n := 0
				for listed, err := range f.q.List(ctx, ListOptions{State: state}) {
					require.NoError(f, err)
					if listed.Queue == "parent" { // of blocked tasks
						continue
					}
					n++
					got, err := f.q.Get(ctx, listed.ID)
					require.NoError(f, err)
					require.Equal(f, listed, got)
					require.Equal(f, state, got.State)
					i := serialOf(got.Payload)
					require.WithinDuration(f, at[i], got.At, 0, "%v %d", state, i)
					var result, lastError string
					attempts := 0
					switch state {
					case Leased, Canceled:
						attempts = 1
					case Done:
						attempts, result = 1, "result"
					case Dead:
						attempts, lastError = 1, "broken"
					}
					require.Equal(f, attempts, got.Attempts)
					require.Equal(f, result, string(got.Result))
					require.Equal(f, lastError, got.LastError)
				}
				require.Equal(f, len(at), n)
			})
		}
	}
}

// TestListPages: lists that are longer than a page, in every shard, are whole
// and in order, whatever part of them a filter leaves.
func TestListPages(t *testing.T) {
	const n = 2*listing.PageTasks + 50 // in each shard
	for _, shards := range []int{1, 3} {
		for _, state := range allStates {
			t.Run(fmt.Sprint(state, " ", shards, " shards"), func(t *testing.T) {
				inFlow(t, Options{Shards: shards, Retention: Forever, LeaseFor: time.Hour}, func(f *flowTest) {
					ctx := context.Background()
					var parent []ID
					if state == Blocked {
						parent = f.spread(Task{Queue: "parent"})
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
							f.produceAt(s, task)
						}
					}
					synctest.Wait()
					if state != Ready && state != Scheduled && state != Blocked {
						for range want {
							l := claimNow(f.T, f.q, "a")
							switch state {
							case Dead:
								require.NoError(f, f.q.DeadLetter(ctx, l.Receipt, nil))
							case Done:
								require.NoError(f, f.q.Complete(ctx, l.Receipt, nil))
							case Canceled:
								require.NoError(f, f.q.Cancel(ctx, l.ID))
							}
						}
					}
					got := f.listed(ListOptions{State: state})
					require.ElementsMatch(f, want, got)
					require.ElementsMatch(f, wantX, f.listed(ListOptions{State: state, Tenants: []string{"x"}}))
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
			inFlow(t, Options{Shards: shards}, func(f *flowTest) {
				var ids []ID
				for s := range shards {
					tasks := make([]Task, n)
					for i := range tasks {
						tasks[i].Queue = "a"
					}
					more, err := f.q.startingAt(s).ProduceBatch(ctx, tasks)
					require.NoError(f, err)
					ids = append(ids, more...)
				}
				slices.SortFunc(ids, func(a, b ID) int { return strings.Compare(string(a[:]), string(b[:])) })
				stay, leave := ids[:len(ids)-10], ids[len(ids)-10:]
				seen := make(map[ID]bool)
				first := true
				for info, err := range f.q.List(ctx, ListOptions{State: Ready}) {
					require.NoError(f, err)
					require.False(f, seen[info.ID], "listed twice")
					seen[info.ID] = true
					if !first {
						continue
					}
					first = false
					for _, id := range leave { // of pages that have not been read
						require.NoError(f, f.q.Cancel(ctx, id))
					}
					require.NoError(f, f.q.SetRunAt(ctx, info.ID, time.Now().Add(time.Hour)))
					ids = append(ids, produce(f.T, f.q, Task{Queue: "a"})...)
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
	inFlow(t, Options{Shards: 3}, func(f *flowTest) {
		tasks := make([]Task, 2*listing.PageTasks)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		f.batch(tasks...)
		n := 0
		for _, err := range f.q.List(context.Background(), ListOptions{State: Ready}) {
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
		for info, err := range f.q.List(ctx, ListOptions{State: Ready}) {
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
		for _, err := range f.q.List(context.Background(), ListOptions{State: Ready}) {
			if err != nil {
				errs = append(errs, err)
			} else if !closed {
				closed = true
				require.NoError(f, f.q.Close())
			}
		}
		require.Len(f, errs, 1)
		require.ErrorIs(f, errs[0], ErrClosed)
		f.open()
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
