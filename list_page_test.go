package codeq_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/listing"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// pager is the list method of a Queue and of a Reader.
type pager interface {
	ListPage(context.Context, codeq.PageOptions) (*codeq.Page, error)
}

// paged reads a list page by page.
func paged(t *testing.T, q pager, o codeq.PageOptions) (tasks []*codeq.TaskInfo) {
	t.Helper()
	for n := 0; ; n++ {
		p, err := q.ListPage(context.Background(), o)
		require.NoError(t, err)
		if o.Limit > 0 {
			require.LessOrEqual(t, len(p.Tasks), o.Limit)
		}
		tasks = append(tasks, p.Tasks...)
		if o.Cursor = p.Next; p.Next == "" {
			return tasks
		}
		require.Less(t, n, 10_000)
	}
}

// groupOf returns the part of a state's order that comes before the time.
func groupOf(i *codeq.TaskInfo) string {
	switch i.State {
	case codeq.Scheduled:
		return ""
	case codeq.Ready, codeq.Leased:
		return fmt.Sprint(i.Queue, "/", i.Priority, "/", i.Tenant)
	}
	return i.Queue
}

// newestFirst reverses each group of a list.
func newestFirst(tasks []*codeq.TaskInfo) []*codeq.TaskInfo {
	tasks = slices.Clone(tasks)
	for begin := 0; begin < len(tasks); {
		end := begin
		for end < len(tasks) && groupOf(tasks[end]) == groupOf(tasks[begin]) && tasks[end].State == tasks[begin].State {
			end++
		}
		slices.Reverse(tasks[begin:end])
		begin = end
	}
	return tasks
}

// manyTasks fills a queue with tasks in all states, of several queues, tenants, priorities and
// groups. It returns them by state, in the order of List.
func manyTasks(f *queuetest.FlowTest, seed uint64) map[codeq.State][]*codeq.TaskInfo {
	ctx := context.Background()
	rng := rand.New(rand.NewPCG(seed, 1))
	var parents []codeq.ID
	for s := range f.Opts.Shards {
		parents = append(parents, f.ProduceAt(s, codeq.Task{Queue: "parents", RunAt: time.Now().Add(1000 * time.Hour)}))
	}
	for i := range 240 {
		task := codeq.Task{
			Queue: []string{"a", "b", "c"}[rng.IntN(3)], Tenant: []string{"", "x", "y"}[rng.IntN(3)], Priority: rng.IntN(2) * 5,
			Payload: fmt.Append(nil, i), Retention: []time.Duration{time.Hour, 9 * time.Hour, codeq.Forever}[rng.IntN(3)],
		}
		switch rng.IntN(8) {
		case 0:
			task.RunAt = time.Now().Add(time.Duration(rng.IntN(100)) * time.Hour)
		case 1:
			task.After = parents[:1+rng.IntN(len(parents))]
		case 2:
			task.Group = fmt.Sprint("g", rng.IntN(2))
		case 3:
			task.Unique.Key = fmt.Sprint("k", i)
		}
		_, err := f.Q.Produce(ctx, task)
		require.NoError(f, err)
		time.Sleep(time.Duration(rng.IntN(3)) * time.Minute)
		if rng.IntN(2) > 0 {
			continue
		}
		l := queuetest.ClaimNow(f.T, f.Q, "a", "b", "c")
		if l == nil {
			continue
		}
		switch rng.IntN(4) {
		case 0:
			require.NoError(f, f.Q.DeadLetter(ctx, l.Receipt, fmt.Errorf("%s %d: no answer", []string{"dial", "read"}[rng.IntN(2)], i)))
		case 1:
			require.NoError(f, f.Q.Complete(ctx, l.Receipt, []byte("result")))
		case 2:
			require.NoError(f, f.Q.Cancel(ctx, l.ID))
		}
	}
	f.Check()
	all := make(map[codeq.State][]*codeq.TaskInfo)
	for _, state := range allStates {
		for info, err := range f.Q.List(ctx, codeq.ListOptions{State: state}) {
			require.NoError(f, err)
			all[state] = append(all[state], info)
		}
		require.NotEmpty(f, all[state], "seed %d: no task is %v", seed, state)
	}
	return all
}

// filtered returns the tasks of a list that a filter selects.
func filtered(tasks []*codeq.TaskInfo, o *codeq.TaskFilter) (found []*codeq.TaskInfo) {
	for _, i := range tasks {
		if (o.Queue == "" || i.Queue == o.Queue) && (len(o.Tenants) == 0 || slices.Contains(o.Tenants, i.Tenant)) &&
			(o.Group == "" || i.Group == o.Group) && (o.Key == "" || i.Unique.Key == o.Key) &&
			(o.ErrorKind == "" || codeq.ErrorKind(i.LastError) == o.ErrorKind) &&
			(o.From.IsZero() || !i.At.Before(o.From)) && (o.To.IsZero() || i.At.Before(o.To)) && hasText(i, o) {
			found = append(found, i)
		}
	}
	return found
}

// hasText reports whether a task has the text of a filter.
func hasText(i *codeq.TaskInfo, o *codeq.TaskFilter) bool {
	in := []string{i.ID.String(), i.Kind, i.Tenant, i.Group, i.LimitKey, i.Unique.Key, i.LastError}
	if o.Contents {
		in = append(in, string(i.Payload), string(i.Result))
		for name, value := range i.Headers {
			in = append(in, name, value)
		}
	}
	return slices.ContainsFunc(in, func(s string) bool { return strings.Contains(strings.ToLower(s), strings.ToLower(o.Text)) })
}

// TestListPageText: a page has the tasks with a text in their names and errors, and on request in
// their contents; it says how many of these were not searched.
func TestListPageText(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		of := map[string]codeq.ID{} // a text with a v is in no ID
		for name, task := range map[string]codeq.Task{
			"payload": {Payload: []byte(`{"customer":"Ava Löwe"}`)}, "header": {Headers: map[string]string{"for": "AVA"}},
			"tenant": {Tenant: "avalbert"}, "key": {Unique: codeq.Unique{Key: "order-ava"}}, "group": {Group: "Ava"},
			"limit key": {LimitKey: "x-ava-x"}, "kind": {Kind: "ava"}, "encoded": {Payload: []byte("ava\xff")}, "none": {Payload: []byte("av a")},
		} {
			task.Queue = "a"
			of[name] = queuetest.Produce(t, q, task)[0]
		}
		find := func(text string, contents bool) (names []string, encoded int) {
			t.Helper()
			p, err := q.ListPage(t.Context(), codeq.PageOptions{TaskFilter: codeq.TaskFilter{Text: text, Contents: contents}, NoPayload: true})
			require.NoError(t, err)
			require.Equal(t, len(of), p.Scanned)
			for _, i := range p.Tasks {
				for name, id := range of {
					if id == i.ID {
						names = append(names, name)
					}
				}
			}
			return names, p.Encoded
		}
		names, encoded := find("aVa", false)
		require.ElementsMatch(t, []string{"tenant", "key", "group", "limit key", "kind"}, names)
		require.Zero(t, encoded)
		names, encoded = find("aVa", true)
		require.ElementsMatch(t, []string{"tenant", "key", "group", "limit key", "kind", "payload", "header"}, names)
		require.Equal(t, 1, encoded)
		names, _ = find("a löwE", true)
		require.Equal(t, []string{"payload"}, names)
		names, _ = find(of["none"].String(), false)
		require.Equal(t, []string{"none"}, names)
		for _, f := range []codeq.TaskFilter{{Contents: true}, {Text: strings.Repeat("x", 257)}} {
			_, err := q.ListPage(t.Context(), codeq.PageOptions{TaskFilter: f})
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
	})
}

// TestPagesAreTheList: the pages of a list together are the list. This holds for any page size,
// direction, filter and set of states, even if the queue is opened again between two pages. Get
// shows each task as the list does.
func TestPagesAreTheList(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: shards, LeaseFor: 1000 * time.Hour}, func(f *queuetest.FlowTest) {
				seed := rand.Uint64()
				all := manyTasks(f, seed)
				rng := rand.New(rand.NewPCG(seed, 2))
				compare := func(o codeq.PageOptions, want []*codeq.TaskInfo) {
					f.Helper()
					if o.Newest {
						want = newestFirst(want)
					}
					if o.NoPayload {
						for i := range want {
							bare := *want[i]
							bare.Payload, bare.Result = nil, nil
							want[i] = &bare
						}
					}
					got := paged(f.T, f.Q, o)
					require.Equal(f, len(want), len(got), "seed %d, %+v", seed, o)
					for i := range want {
						require.Equal(f, want[i], got[i], "seed %d, task %d of %+v", seed, i, o)
					}
				}
				for _, state := range allStates {
					for _, limit := range []int{1, 7, 1000} {
						for _, newest := range []bool{false, true} {
							compare(codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{state}}, Limit: limit, Newest: newest}, all[state])
						}
					}
				}
				for range 120 {
					states := slices.Clone(allStates)
					rng.Shuffle(len(states), func(i, j int) { states[i], states[j] = states[j], states[i] })
					states = states[:1+rng.IntN(len(states))]
					o := codeq.PageOptions{Limit: 1 + rng.IntN(40), Newest: rng.IntN(2) > 0, NoPayload: rng.IntN(2) > 0}
					some := all[states[0]]
					like := some[rng.IntN(len(some))]
					pick := func(of func()) {
						if rng.IntN(3) == 0 {
							of()
						}
					}
					pick(func() { o.Queue = like.Queue })
					pick(func() { o.Tenants = []string{like.Tenant, "unknown"} })
					pick(func() { o.Group = like.Group })
					pick(func() { o.Key = like.Unique.Key })
					pick(func() { o.ErrorKind = codeq.ErrorKind(like.LastError) })
					pick(func() {
						o.Text = []string{"X", "dial", "1", "k", like.ID.String()[9:]}[rng.IntN(5)]
						o.Contents = rng.IntN(2) > 0
					})
					pick(func() { o.From = like.At })
					pick(func() { o.To = like.At.Add(time.Duration(rng.IntN(3)-1) * time.Millisecond) })
					var want []*codeq.TaskInfo
					for _, s := range states {
						want = append(want, filtered(all[s], &o.TaskFilter)...)
					}
					o.States = states
					compare(o, want)

					o.Group, o.Key, o.ErrorKind, o.Text = "", "", "", "" // List has none of them
					want = filtered(some, &o.TaskFilter)
					for i, err := range f.Q.List(context.Background(), codeq.ListOptions{
						State: states[0], Queue: o.Queue, Tenants: o.Tenants, From: o.From, To: o.To,
					}) {
						require.NoError(f, err)
						require.NotEmpty(f, want, "seed %d, %+v", seed, o)
						require.Equal(f, want[0], i, "seed %d, %+v", seed, o)
						want = want[1:]
					}
					require.Empty(f, want, "seed %d, %+v", seed, o)
				}
				var every []*codeq.TaskInfo
				for _, s := range allStates {
					every = append(every, all[s]...)
				}
				first, err := f.Q.ListPage(context.Background(), codeq.PageOptions{Limit: 99})
				require.NoError(f, err)
				f.Reopen()
				rest := paged(f.T, f.Q, codeq.PageOptions{Limit: 77, Cursor: first.Next})
				require.Equal(f, every, append(first.Tasks, rest...), "all states, and a new process after the first page")
				for _, want := range every {
					got, err := f.Q.Get(context.Background(), want.ID)
					require.NoError(f, err)
					require.Equal(f, want, got)
				}
			})
		})
	}
}

// TestPagesWhileTasksChange: whatever changes between two pages, an unchanged task is shown exactly
// once, in both directions.
func TestPagesWhileTasksChange(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		for _, newest := range []bool{false, true} {
			t.Run(fmt.Sprint(shards, " shards, newest ", newest), func(t *testing.T) {
				queuetest.InFlow(t, codeq.Options{Shards: shards, LeaseFor: 1000 * time.Hour}, func(f *queuetest.FlowTest) {
					seed := rand.Uint64()
					all := manyTasks(f, seed)
					rng := rand.New(rand.NewPCG(seed, 3))
					for _, state := range allStates {
						stay, shown := make(map[codeq.ID]bool), make(map[codeq.ID]int)
						for _, i := range all[state] {
							stay[i.ID] = true
						}
						o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{state}}, Newest: newest, Limit: 5}
						for {
							p, err := f.Q.ListPage(ctx, o)
							require.NoError(f, err)
							for _, i := range p.Tasks {
								require.Equal(f, state, i.State)
								shown[i.ID]++
							}
							if o.Cursor = p.Next; p.Next == "" {
								break
							}
							ids := slices.SortedFunc(maps.Keys(stay), func(a, b codeq.ID) int { return bytes.Compare(a[:], b[:]) })
							for range min(2, len(ids)) { // change or remove two tasks
								id := ids[rng.IntN(len(ids))]
								delete(stay, id)
								var err error
								switch state {
								case codeq.Ready, codeq.Scheduled, codeq.Blocked:
									err = f.Q.SetPriority(ctx, id, 9)
								case codeq.Leased:
									err = f.Q.Cancel(ctx, id)
								default:
									err = f.Q.Forget(ctx, id)
								}
								if !errors.Is(err, codeq.ErrNotFound) && !errors.Is(err, codeq.ErrNotWaiting) {
									require.NoError(f, err)
								}
							}
							f.ProduceAt(rng.IntN(shards), codeq.Task{Queue: "a", Priority: 5})
							f.ProduceAt(rng.IntN(shards), codeq.Task{Queue: "0 new", RunAt: time.Now().Add(time.Hour)})
							if rng.IntN(3) == 0 {
								require.NoError(f, f.Q.Cancel(ctx, f.ProduceAt(rng.IntN(shards), codeq.Task{Queue: "b", Retention: time.Hour})))
							}
							if rng.IntN(8) == 0 {
								f.Reopen()
							}
						}
						for id := range stay {
							if i, err := f.Q.Get(ctx, id); err == nil && i.State == state && shown[id] != 1 {
								require.Equal(f, 1, shown[id], "seed %d: %v task %s", seed, state, id)
							}
						}
					}
				})
			})
		}
	}
}

// TestPageCost: a page reads little more than its own tasks, from either end, however many tasks
// are stored before it and beside it.
func TestPageCost(t *testing.T) {
	testbase.SkipUnderRace(t)
	const backlog, limit = 20_000, 50
	ctx := context.Background()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2, Durability: codeq.DurabilityNone})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	fillQueue(t, q, "ready", backlog, 0)
	fillQueue(t, q, "leased", backlog/10, backlog/10)
	scheduled := slices.Repeat([]codeq.Task{{Queue: "scheduled", RunAt: time.Now().Add(time.Hour)}}, 1000)
	for range backlog / len(scheduled) {
		_, err := q.ProduceBatch(ctx, scheduled)
		require.NoError(t, err)
	}
	rare := make(map[codeq.ID]bool)
	fillQueue(t, q, "dead", backlog/2, 0)
	for n := 0; n < backlog/2; {
		got, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"dead"}, Max: 1000})
		require.NoError(t, err)
		for i, l := range got {
			var cause error
			if (n+i)%997 == 0 {
				cause = errors.New("rare")
				rare[l.ID] = true
			}
			require.NoError(t, q.DeadLetter(ctx, l.Receipt, cause))
		}
		n += len(got)
	}
	for _, c := range []struct {
		queue string
		state codeq.State
	}{{"ready", codeq.Ready}, {"", codeq.Ready}, {"leased", codeq.Leased}, {"", codeq.Scheduled}, {"dead", codeq.Dead}, {"", codeq.Dead}} {
		for _, newest := range []bool{false, true} {
			t.Run(fmt.Sprintf("%q %v newest %v", c.queue, c.state, newest), func(t *testing.T) {
				o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{Queue: c.queue, States: []codeq.State{c.state}}, Newest: newest, Limit: limit}
				for range 4 {
					var p *codeq.Page
					bytes := allocated(func() {
						p, err = q.ListPage(ctx, o)
						require.NoError(t, err)
					})
					require.Len(t, p.Tasks, limit)
					require.LessOrEqual(t, p.Scanned, 3*limit)
					require.Less(t, bytes, uint64(2<<20))
					require.NotEmpty(t, p.Next)
					o.Cursor = p.Next
				}
			})
		}
	}
	t.Run("a filter without an index", func(t *testing.T) {
		o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}, Group: "none"}}
		scanned, pages := 0, 0
		for ; pages == 0 || o.Cursor != ""; pages++ {
			p, err := q.ListPage(ctx, o)
			require.NoError(t, err)
			require.Empty(t, p.Tasks)
			require.LessOrEqual(t, p.Scanned, 4096+8)
			scanned += p.Scanned
			o.Cursor = p.Next
		}
		require.GreaterOrEqual(t, scanned, backlog)
		require.LessOrEqual(t, scanned, 2*backlog, "how many are read twice depends on the shards of the batches")
		require.LessOrEqual(t, pages, 2*backlog/4096)
	})
	for _, newest := range []bool{false, true} {
		t.Run(fmt.Sprint("few of many, newest ", newest), func(t *testing.T) {
			shown := make(map[codeq.ID]bool)
			o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, ErrorKind: "rare"}, Newest: newest}
			for _, i := range paged(t, q, o) {
				require.False(t, shown[i.ID], "shown twice")
				shown[i.ID] = true
			}
			require.Equal(t, rare, shown)
		})
	}
}

// TestPageBytes: large tasks make a page short, unless it leaves out their payloads.
func TestPageBytes(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards, Durability: codeq.DurabilityNone}, func(t *testing.T, q *codeq.Queue) {
			ctx := context.Background()
			for i := range 24 {
				size := []int{1 << 20, 100 << 10}[i%2]
				_, err := q.Produce(ctx, codeq.Task{Queue: "a", Payload: bytes.Repeat([]byte("x"), size)})
				require.NoError(t, err)
			}
			o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}}}
			n := 0
			for n == 0 || o.Cursor != "" {
				p, err := q.ListPage(ctx, o)
				require.NoError(t, err)
				size := 0
				for _, i := range p.Tasks {
					n++
					size += len(i.Payload)
				}
				require.True(t, len(p.Tasks) > 0 || p.Next == "")
				require.Less(t, size, 2<<20+100<<10)
				o.Cursor = p.Next
			}
			require.Equal(t, 24, n)
			o.NoPayload, o.Cursor = true, ""
			p, err := q.ListPage(ctx, o)
			require.NoError(t, err)
			require.Len(t, p.Tasks, 24)
			require.Nil(t, p.Tasks[0].Payload)
		})
	}
}

// TestPageRefused: ListPage refuses a damaged cursor, a cursor of another list, and options that
// are out of bounds.
func TestPageRefused(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		for range 3 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		of := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready, codeq.Dead}, Queue: "a"}, Limit: 1}
		p, err := q.ListPage(ctx, of)
		require.NoError(t, err)
		require.NotEmpty(t, p.Next)
		refused := func(field string, change func(o *codeq.PageOptions)) {
			t.Helper()
			o := of
			o.Cursor = p.Next
			change(&o)
			got, err := q.ListPage(ctx, o)
			require.Nil(t, got)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid, "%+v", o)
			require.Equal(t, "PageOptions."+field, invalid.Field)
		}
		for i := range len(p.Next) {
			refused("Cursor", func(o *codeq.PageOptions) { o.Cursor = o.Cursor[:i] + string(o.Cursor[i]^1) + o.Cursor[i+1:] })
			if i > 0 {
				refused("Cursor", func(o *codeq.PageOptions) { o.Cursor = o.Cursor[:i] })
			}
		}
		for _, text := range []string{"x", "*", " ", p.Next + "A", p.Next + "=", p.Next + "\n", base64.RawURLEncoding.EncodeToString(make([]byte, 40))} {
			refused("Cursor", func(o *codeq.PageOptions) { o.Cursor = text })
		}
		refused("Cursor", func(o *codeq.PageOptions) { o.Queue = "b" })
		refused("Cursor", func(o *codeq.PageOptions) { o.Newest = true })
		refused("Cursor", func(o *codeq.PageOptions) { o.States = o.States[:1] })
		refused("Cursor", func(o *codeq.PageOptions) { o.States = []codeq.State{codeq.Dead, codeq.Ready} })
		refused("Cursor", func(o *codeq.PageOptions) { o.Group = "g" })
		refused("Cursor", func(o *codeq.PageOptions) { o.To = time.Now() })
		refused("Limit", func(o *codeq.PageOptions) { o.Limit = -1 })
		refused("Limit", func(o *codeq.PageOptions) { o.Limit = codeq.MaxPage + 1 })
		refused("States", func(o *codeq.PageOptions) { o.States = []codeq.State{codeq.Ready, codeq.Ready} })
		refused("States", func(o *codeq.PageOptions) { o.States = []codeq.State{0} })
		refused("States", func(o *codeq.PageOptions) { o.States = []codeq.State{8} })
		of.Cursor, of.NoPayload, of.Limit = p.Next, true, 7 // these options may change between pages
		p, err = q.ListPage(ctx, of)
		require.NoError(t, err)
		require.Len(t, p.Tasks, 2)
	})
}

// TestErrorKind: ErrorKind replaces the variable parts of an error's text.
func TestErrorKind(t *testing.T) {
	for text, want := range map[string]string{
		"":        "",
		"timeout": "timeout",
		"dial tcp 10.0.0.3:5432: connection refused": "dial tcp #.#.#.#:#: connection refused",
		"order 17 of 0193b3c0-aaaa-7bbb is gone":     "order # of #-aaaa-# is gone",
		"open \"/tmp/a\": no such file\n\tin  call":  `open "?": no such file in call`,
		"unclosed \" quote `x` y":                    "unclosed \" quote `?` y",
		"ключ 5 не найден":                           "ключ # не найден",
		strings.Repeat("é", 200):                     strings.Repeat("é", 128),
		strings.Repeat("word ", 100):                 strings.TrimRight(strings.Repeat("word ", 100)[:256], " "),
	} {
		require.Equal(t, want, codeq.ErrorKind(text))
	}
}

// FuzzErrorKind: the kind of a kind is the kind itself.
func FuzzErrorKind(f *testing.F) {
	for _, text := range []string{"a 1 \"b\" c", "\xff `", "x\"`\"`", strings.Repeat("é\"", 200)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		kind := codeq.ErrorKind(text)
		require.LessOrEqual(t, len(kind), 256)
		require.Equal(t, kind, codeq.ErrorKind(kind))
	})
}

// TestPagesOfManyGroups: a page covers some hundred lanes, queues and leases at most. The next page
// continues behind them, even if they show no tasks.
func TestPagesOfManyGroups(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	const n = 2*listing.PageTasks + 50
	made := map[codeq.State]int{codeq.Ready: n, codeq.Leased: n - n/300, codeq.Dead: n, codeq.Done: n / 300}
	for _, shards := range []int{1, 2} {
		queuetest.InFlow(t, codeq.Options{Shards: shards, LeaseFor: time.Hour, Retention: codeq.Forever, Durability: codeq.DurabilityNone}, func(f *queuetest.FlowTest) {
			ctx := context.Background()
			for _, state := range []codeq.State{codeq.Leased, codeq.Dead, codeq.Ready} {
				for i := range n {
					f.ProduceAt(i%shards, codeq.Task{Queue: fmt.Sprintf("%03d", i%300), Tenant: fmt.Sprint(i % 2), Group: map[bool]string{true: "last"}[i%300 == 299]})
					if state == codeq.Ready {
						continue
					}
					l := f.Claim(fmt.Sprintf("%03d", i%300))
					if state == codeq.Dead {
						require.NoError(f, f.Q.DeadLetter(ctx, l.Receipt, nil))
					} else if i%300 == 299 {
						require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil))
					}
				}
			}
			for _, state := range []codeq.State{codeq.Ready, codeq.Leased, codeq.Dead, codeq.Done} {
				for _, newest := range []bool{false, true} {
					for _, filter := range []codeq.TaskFilter{{}, {Tenants: []string{"1"}}, {Group: "last"}} {
						var want []*codeq.TaskInfo
						for i, err := range f.Q.List(ctx, codeq.ListOptions{State: state}) {
							require.NoError(f, err)
							want = append(want, i)
						}
						require.Len(f, want, made[state])
						want = filtered(want, &filter)
						if newest {
							want = newestFirst(want)
						}
						filter.States = []codeq.State{state}
						for _, limit := range []int{100, 1000} {
							got := paged(f.T, f.Q, codeq.PageOptions{TaskFilter: filter, Newest: newest, Limit: limit})
							require.Equal(f, len(want), len(got), "%v newest %v, %+v", state, newest, filter)
							require.Equal(f, want, got)
						}
					}
				}
			}
		})
	}
}
