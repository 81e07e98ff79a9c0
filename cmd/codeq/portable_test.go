package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// reshard exports a directory and imports it with another number of shards.
func reshard(t *testing.T, dir string, shards int, flags ...string) (to string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "export")
	ok(t, "-dir", dir, "export", "-file", file)
	to = filepath.Join(t.TempDir(), "new")
	args := append([]string{"-dir", to, "import", "-file", file, "-shards", fmt.Sprint(shards)}, flags...)
	ok(t, args...)
	require.True(t, decoded[verifyResult](t, "-dir", to, "verify").OK)
	return to
}

// contents returns the tasks of a directory by a header that names each, settings and schedules.
func contents(t *testing.T, dir string) (tasks map[string]*codeq.TaskInfo, settings map[string]codeq.Settings, schedules []codeq.Schedule) {
	t.Helper()
	r, err := codeq.OpenReadOnly(dir, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	tasks, settings = make(map[string]*codeq.TaskInfo), make(map[string]codeq.Settings)
	for s := codeq.Ready; s <= codeq.Canceled; s++ {
		for task, err := range r.List(t.Context(), codeq.ListOptions{State: s}) {
			require.NoError(t, err)
			name := task.Headers["name"]
			require.NotContains(t, tasks, name)
			tasks[name] = task
		}
	}
	infos, err := r.Info(t.Context())
	require.NoError(t, err)
	for _, q := range infos {
		settings[q.Queue] = q.Settings
	}
	list, err := r.Schedules(t.Context())
	require.NoError(t, err)
	for _, s := range list {
		schedules = append(schedules, s.Schedule)
	}
	return tasks, settings, schedules
}

func named(name, queue string) codeq.Task {
	return codeq.Task{Queue: queue, Headers: map[string]string{"name": name}, Payload: []byte("payload of " + name)}
}

// attempt claims the next task of a queue, whose name is given, and ends the attempt.
func attempt(t *testing.T, q *codeq.Queue, queue, name string, end func(codeq.Receipt) error) {
	t.Helper()
	l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: time.Hour})
	require.NoError(t, err)
	require.Equal(t, name, l.Headers["name"])
	require.NoError(t, end(l.Receipt))
}

// fillAll fills a queue with a task for each thing that a task may have.
func fillAll(t *testing.T) func(context.Context, *codeq.Queue) {
	return func(ctx context.Context, q *codeq.Queue) {
		add := func(task codeq.Task) codeq.ID { return produce(t, q, task) }
		dead := func(task codeq.Task) codeq.ID {
			id := add(task)
			attempt(t, q, task.Queue, task.Headers["name"], func(r codeq.Receipt) error { return q.DeadLetter(ctx, r, errors.New("died "+task.Headers["name"])) })
			return id
		}
		retry := func(r codeq.Receipt) error {
			return q.Retry(ctx, r, codeq.RetryOptions{Err: errors.New("failed"), After: -1})
		}
		later := func(r codeq.Receipt) error {
			return q.Retry(ctx, r, codeq.RetryOptions{Err: errors.New("failed late"), After: time.Hour})
		}

		// Ended, with and without a retention of their own.
		done := named("done", "a")
		done.Retention = 2 * time.Hour
		doneID := add(done)
		attempt(t, q, "a", "done", retry)
		attempt(t, q, "a", "done", func(r codeq.Receipt) error { return q.Complete(ctx, r, []byte("result")) })
		add(named("done by default", "a"))
		attempt(t, q, "a", "done by default", func(r codeq.Receipt) error { return q.Complete(ctx, r, nil) })
		require.NoError(t, q.Cancel(ctx, add(named("canceled", "a"))))

		// Dead letters.
		deadID := dead(named("dead", "b"))
		full := named("dead with all", "b")
		full.Priority, full.Tenant, full.MaxAttempts, full.LimitKey = 7, "tenant", 3, "limit"
		full.LeaseFor, full.Timeout, full.Retention = time.Minute, time.Second, codeq.Forever
		full.Headers[hostileBytes], full.Payload = hostileBytes, []byte(hostileBytes)
		dead(full)
		worn := named("worn out", "b")
		worn.MaxAttempts = 3
		add(worn)
		for range 3 {
			attempt(t, q, "b", "worn out", retry)
		}
		child := named("dead child of done", "b")
		child.After = []codeq.ID{doneID}
		dead(child)
		run := named("dead child of dead", "b")
		run.After, run.OnDead = []codeq.ID{deadID}, codeq.RunOnDead
		dead(run)

		// Idempotency keys: held by a waiting task, by a dead letter for a time, by nobody.
		key := named("key", "keys")
		key.Unique = codeq.Unique{Key: "1", For: time.Hour}
		key.RunAt = time.Now().Add(time.Hour)
		add(key)
		for _, name := range []string{"dead key", "dead key again"} {
			key := named(name, "keys")
			key.Unique.Key = "2"
			dead(key)
		}
		held := named("held by a dead letter", "keys")
		held.Unique = codeq.Unique{Key: "3", For: time.Hour}
		dead(held)
		released := named("released", "keys")
		released.Unique, released.RunAt = codeq.Unique{Key: "4"}, key.RunAt
		add(released)
		require.NoError(t, q.ReleaseKey(ctx, codeq.UniqueKey{Queue: "keys", Key: "4"}))
		released.Headers = map[string]string{"name": "took it"}
		add(released)
		for _, key := range []codeq.UniqueKey{{Key: "5"}, {Key: "6"}, {Key: "7"}, {Key: "8", Group: "g", Tenant: "t"}} { // whose tasks are gone
			gone := named("gone", "keys")
			gone.Group, gone.Tenant, gone.Unique = key.Group, key.Tenant, codeq.Unique{Key: key.Key, For: time.Hour}
			if key.Key == "6" {
				gone.Unique.For = time.Millisecond
			}
			id := add(gone)
			require.NoError(t, q.Cancel(ctx, id))
			require.NoError(t, q.Forget(ctx, id))
		}

		// Worked on before, and waiting.
		add(named("retried", "c"))
		attempt(t, q, "c", "retried", retry)
		attempt(t, q, "c", "retried", later)
		add(named("tried", "c"))
		attempt(t, q, "c", "tried", retry)
		redriven := dead(named("redriven", "d"))
		require.NoError(t, q.RedriveDead(ctx, redriven))
		again := dead(named("redriven for later", "d2"))
		require.NoError(t, q.RedriveDead(ctx, again))
		require.NoError(t, q.SetRunAt(ctx, again, key.RunAt))
		add(named("leased", "e"))
		attempt(t, q, "e", "leased", func(codeq.Receipt) error { return nil })
		add(named("leased again", "e2"))
		attempt(t, q, "e2", "leased again", retry)
		attempt(t, q, "e2", "leased again", func(codeq.Receipt) error { return nil })

		// A group whose first task is between two attempts; one that a dead letter holds.
		for _, name := range []string{"g1", "g2", "g3"} {
			task := named(name, "groups")
			task.Group = "g"
			add(task)
		}
		attempt(t, q, "groups", "g1", later)
		require.NoError(t, q.Configure(ctx, "holding", func(s *codeq.Settings) { s.HoldGroups = true }))
		for _, name := range []string{"h1", "h2"} {
			task := named(name, "holding")
			task.Group = "h"
			add(task)
		}
		attempt(t, q, "holding", "h1", func(r codeq.Receipt) error { return q.DeadLetter(ctx, r, errors.New("held")) })

		// A chain, of which the parents are in another order than their children.
		root := named("root", "flow")
		root.RunAt = key.RunAt
		rootID := add(root)
		for i, parent := 0, rootID; i < 5; i++ {
			task := named(fmt.Sprint("link ", i), "flow")
			task.After, task.OnDead = []codeq.ID{parent, doneID}, codeq.CancelOnDead
			parent = add(task)
		}
		waits := named("waits for dead", "flow")
		waits.After = []codeq.ID{deadID}
		add(waits)

		// Order, names that are no UTF-8, settings, schedules.
		for i := range 300 {
			task := named(fmt.Sprintf("ready %03d", i), "order")
			task.Priority, task.Tenant = i%3, fmt.Sprint("tenant ", i%2)
			add(task)
		}
		add(named("hostile \xfe", hostileBytes))
		require.NoError(t, q.Configure(ctx, "order", func(s *codeq.Settings) {
			*s = codeq.Settings{
				Paused: true, Concurrency: 3, Rate: 2.5, Burst: 7, TenantWeights: map[string]int{"tenant 1": 2, "é": 3},
				Retention: codeq.Forever, DeadRetention: 48 * time.Hour,
			}
		}))
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Cron: "0 3 * * *", TimeZone: "UTC", Missed: codeq.MissedAll, Task: codeq.Task{Queue: "r", Payload: []byte("p")}}))
	}
}

// TestReshard: what is exported from two shards and imported into five is the same, but for what
// README.md says.
func TestReshard(t *testing.T) {
	dir := newQueue(t, fillAll(t))
	to := reshard(t, dir, 5)
	requireSame(t, dir, to)
	back := reshard(t, to, 1)
	requireSame(t, to, back)

	// What holds tasks back still does, and what is held goes on in its order.
	q, err := codeq.Open(to, &codeq.Options{MustExist: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	tasks, _, _ := contentsOf(t, q)
	ctx := t.Context()
	require.Equal(t, codeq.Blocked, tasks["g2"].State)
	require.NoError(t, q.SetRunAt(ctx, tasks["g1"].ID, time.Time{}))
	finish := func(r codeq.Receipt) error { return q.Complete(ctx, r, nil) }
	for _, name := range []string{"g1", "g2", "g3"} {
		claimNamed(t, q, "groups", name, finish)
	}
	require.Equal(t, codeq.Blocked, tasks["h2"].State, "the dead letter holds the turn")
	require.NoError(t, q.RedriveDead(ctx, tasks["h1"].ID))
	for _, name := range []string{"h1", "h2"} {
		claimNamed(t, q, "holding", name, finish)
	}
	require.NoError(t, q.SetRunAt(ctx, tasks["root"].ID, time.Time{}))
	for _, name := range []string{"root", "link 0", "link 1", "link 2", "link 3", "link 4"} {
		claimNamed(t, q, "flow", name, finish)
	}
	require.NoError(t, q.RedriveDead(ctx, tasks["dead"].ID))
	claimNamed(t, q, "b", "dead", finish)
	claimNamed(t, q, "flow", "waits for dead", finish)

	requireTaken(t, q, map[string]bool{"1": true, "2": false, "3": true, "4": true, "5": true, "6": false, "7": true, "8": true})
}

// requireTaken produces tasks with keys, and makes sure which of them are taken.
func requireTaken(t *testing.T, q *codeq.Queue, keys map[string]bool) {
	t.Helper()
	for key, taken := range keys {
		task := codeq.Task{Queue: "keys", Unique: codeq.Unique{Key: key}}
		if key == "8" {
			task.Group, task.Tenant = "g", "t"
		}
		_, err := q.Produce(t.Context(), task)
		require.Equal(t, taken, errors.Is(err, codeq.ErrDuplicate), "key %s: %v", key, err)
	}
}

// TestReshardFreedKeys: a key that outlived its task, came by an import and was freed or taken
// since is so after the next import, too.
func TestReshardFreedKeys(t *testing.T) {
	first := reshard(t, newQueue(t, fillAll(t)), 5)
	q, err := codeq.Open(first, nil)
	require.NoError(t, err)
	require.NoError(t, q.ReleaseKey(t.Context(), codeq.UniqueKey{Queue: "keys", Key: "5"}))
	require.NoError(t, q.ReleaseKey(t.Context(), codeq.UniqueKey{Queue: "keys", Tenant: "t", Group: "g", Key: "8"}))
	again := named("took 8", "keys")
	again.Group, again.Tenant, again.Unique = "g", "t", codeq.Unique{Key: "8", For: time.Minute}
	require.NoError(t, q.Cancel(t.Context(), produce(t, q, again))) // canceled tasks are not kept
	require.NoError(t, q.Close())

	q, err = codeq.Open(reshard(t, first, 3), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	_, err = q.FindByKey(t.Context(), codeq.UniqueKey{Queue: "keys", Key: "7"})
	require.ErrorIs(t, err, codeq.ErrNotFound)
	var taken *codeq.DuplicateError
	_, err = q.Produce(t.Context(), codeq.Task{Queue: "keys", Unique: codeq.Unique{Key: "7", Replace: true}})
	require.ErrorAs(t, err, &taken)
	require.Equal(t, 1970, taken.ID.Time().Year(), "nobody knows which task it was")
	requireTaken(t, q, map[string]bool{"5": false, "7": true, "8": true})
}

func contentsOf(t *testing.T, q *codeq.Queue) (tasks map[string]*codeq.TaskInfo, _, _ any) {
	tasks = make(map[string]*codeq.TaskInfo)
	for s := codeq.Ready; s <= codeq.Canceled; s++ {
		for task, err := range q.List(t.Context(), codeq.ListOptions{State: s}) {
			require.NoError(t, err)
			tasks[task.Headers["name"]] = task
		}
	}
	return tasks, nil, nil
}

// claimNamed waits for a task of a queue, which is the next one, and ends it.
func claimNamed(t *testing.T, q *codeq.Queue, queue, name string, end func(codeq.Receipt) error) {
	t.Helper()
	l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{queue}})
	require.NoError(t, err)
	require.Equal(t, name, l.Headers["name"])
	require.NoError(t, end(l.Receipt))
}

// requireSame compares the contents of two directories, of which the second was imported.
func requireSame(t *testing.T, from, to string) {
	t.Helper()
	want, wantSettings, wantSchedules := contents(t, from)
	got, gotSettings, gotSchedules := contents(t, to)
	require.Equal(t, wantSettings, gotSettings)
	require.Equal(t, wantSchedules, gotSchedules)
	require.ElementsMatch(t, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(got)))
	names := func(tasks map[string]*codeq.TaskInfo) map[codeq.ID]string {
		m := make(map[codeq.ID]string)
		for name, task := range tasks {
			m[task.ID] = name
		}
		return m
	}
	olds, news := names(want), names(got)
	for name, w := range want {
		g := got[name]
		ended := w.State == codeq.Done || w.State == codeq.Canceled
		attempts := w.Attempts
		state := w.State
		if state == codeq.Leased {
			attempts, state = attempts-1, codeq.Ready
		}
		require.Equal(t, state, g.State, name)
		require.Equal(t, attempts, g.Attempts, name)
		require.Equal(t, w.LastError, g.LastError, name)
		require.Equal(t, w.Result, g.Result, name)
		if state == codeq.Scheduled {
			require.WithinDuration(t, w.At, g.At, time.Millisecond, name)
		}
		if !ended {
			parents := func(ids []codeq.ID, names map[codeq.ID]string) (list []string) {
				for _, id := range ids {
					list = append(list, names[id])
				}
				return list
			}
			require.Equal(t, parents(w.After, olds), parents(g.After, news), name)
		}
		wt, gt := w.Task, g.Task
		wt.After, gt.After, wt.RunAt, gt.RunAt = nil, nil, time.Time{}, time.Time{}
		if name == "released" {
			require.Equal(t, codeq.Unique{}, gt.Unique, "others have the key")
			wt.Unique = codeq.Unique{}
		}
		if wt.Unique.For != 0 {
			require.InDelta(t, wt.Unique.For, gt.Unique.For, float64(time.Minute), name)
			wt.Unique.For = gt.Unique.For
		}
		require.Equal(t, wt, gt, name)
	}
	var order [2][]string
	for i, tasks := range []map[string]*codeq.TaskInfo{want, got} {
		for name := range tasks {
			if strings.HasPrefix(name, "ready") {
				order[i] = append(order[i], name)
			}
		}
		slices.SortFunc(order[i], func(a, b string) int {
			return cmpTimes(tasks[a].At, tasks[b].At, a, b)
		})
	}
	require.Len(t, order[0], 300)
}

func cmpTimes(a, b time.Time, nameA, nameB string) int {
	if c := a.Compare(b); c != 0 {
		return c
	}
	return strings.Compare(nameA, nameB)
}

// TestImportOrder: the tasks of a lane are claimed in the order in which they were ready.
func TestImportOrder(t *testing.T) {
	dir := newQueue(t, func(_ context.Context, q *codeq.Queue) {
		for i := range 1000 {
			produce(t, q, mail(i))
		}
	})
	to := reshard(t, dir, 1)
	p := decoded[pageResult](t, "-dir", dir, "ls", "-payload", "-limit", "1000")
	at := make(map[string]time.Time) // those of one millisecond in several shards have no order
	for _, task := range p.Tasks {
		at[string(task.Payload)] = task.At
	}
	last := time.Time{}
	for _, task := range decoded[pageResult](t, "-dir", to, "ls", "-payload", "-limit", "1000").Tasks {
		now := at[string(task.Payload)]
		require.False(t, now.Before(last), string(task.Payload))
		last = now
	}
}

// TestImportRandom reshards queues of random tasks, and works on all that can be worked on: as many
// tasks end as there were.
func TestImportRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	dir := newQueue(t, func(ctx context.Context, q *codeq.Queue) {
		var made []codeq.ID
		for i := range 600 {
			task := named(fmt.Sprint(i), fmt.Sprint("q", rnd.IntN(3)))
			task.Priority, task.MaxAttempts = rnd.IntN(10), 1+rnd.IntN(4)
			if rnd.IntN(3) == 0 {
				task.Tenant = fmt.Sprint(rnd.IntN(3))
			}
			if rnd.IntN(4) == 0 {
				task.Group = fmt.Sprint(rnd.IntN(5))
			}
			if rnd.IntN(4) == 0 {
				task.LimitKey = fmt.Sprint(rnd.IntN(5))
			}
			if rnd.IntN(4) == 0 {
				task.Unique = codeq.Unique{Key: fmt.Sprint(i), For: time.Duration(rnd.IntN(2)) * time.Hour}
			}
			if len(made) > 0 && rnd.IntN(3) == 0 {
				task.After, task.OnDead = []codeq.ID{made[rnd.IntN(len(made))]}, codeq.OnDead(rnd.IntN(3))
			}
			if rnd.IntN(5) == 0 {
				task.RunAt = time.Now().Add(time.Hour)
			}
			made = append(made, produce(t, q, task))
			if rnd.IntN(2) == 0 {
				continue
			}
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"q0", "q1", "q2"}, NoWait: true, LeaseFor: time.Hour})
			if errors.Is(err, codeq.ErrEmpty) {
				continue
			}
			require.NoError(t, err)
			switch rnd.IntN(5) {
			case 0:
				require.NoError(t, q.Complete(ctx, l.Receipt, []byte("r")))
			case 1:
				require.NoError(t, q.DeadLetter(ctx, l.Receipt, errors.New("dead")))
			case 2:
				require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("again"), After: -1}))
			case 3:
				require.NoError(t, q.Release(ctx, l.Receipt, time.Hour))
			}
		}
	})
	to := reshard(t, dir, 3)
	want, _, _ := contents(t, dir)
	got, _, _ := contents(t, to)
	require.Len(t, got, len(want))
	for name, w := range want {
		g := got[name]
		require.NotNil(t, g, name)
		switch w.State {
		case codeq.Leased:
			w.Attempts--
		case codeq.Dead, codeq.Done, codeq.Canceled:
			require.Equal(t, w.State, g.State, name)
		default:
			if g.State == codeq.Canceled && w.State == codeq.Blocked && len(w.After) > 0 {
				continue // the end of a parent was on its way to it when the queue was closed
			}
			require.NotContains(t, []codeq.State{codeq.Dead, codeq.Done, codeq.Canceled, codeq.Leased}, g.State, name)
		}
		require.Equal(t, w.Attempts, g.Attempts, name)
		require.Equal(t, w.LastError, g.LastError, name)
		require.Equal(t, w.Priority, g.Priority, name)
	}
	q, err := codeq.Open(to, &codeq.Options{Retention: time.Hour})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	_, err = q.RedriveAllDead(t.Context(), codeq.DeadFilter{})
	require.NoError(t, err)
	for {
		_, err := q.Bulk(t.Context(), codeq.BulkOptions{Action: codeq.BulkSetPriority})
		require.NoError(t, err)
		for task, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Scheduled}) {
			require.NoError(t, err)
			require.NoError(t, q.SetRunAt(t.Context(), task.ID, time.Time{}))
		}
		ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"q0", "q1", "q2"}})
		stop()
		if errors.Is(err, context.DeadlineExceeded) {
			waits := func(c codeq.Counts) bool { return c.Ready+c.Scheduled+c.Blocked > 0 }
			counts, err := q.Stats(t.Context())
			require.NoError(t, err)
			if slices.ContainsFunc(slices.Collect(maps.Values(counts)), waits) {
				continue // the machine is slow
			}
			break
		}
		require.NoError(t, err)
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
	}
	require.NoError(t, q.WaitIdle(t.Context()), "nothing waits for ever")
}

// TestImportRefuses: what is not a whole export makes no directory, and nothing is overwritten.
func TestImportRefuses(t *testing.T) {
	dir := newQueue(t, fillMixed(t))
	whole := call(t, "-dir", dir, "export").out
	to := filepath.Join(t.TempDir(), "new")
	lines := strings.SplitAfter(whole, "\n")
	withKey := func(keys ...string) string {
		more := slices.Clone(lines[:1])
		for _, key := range keys {
			more = append(more, `{"Key":`+key+"}\n")
		}
		counted := strings.Replace(strings.Join(lines[1:], ""), `"Keys":0`, fmt.Sprintf(`"Keys":%d`, len(keys)), 1)
		return strings.Join(more, "") + counted
	}
	swapped := slices.Clone(lines)
	slices.Reverse(swapped[1 : len(swapped)-2])
	for what, in := range map[string]string{
		"nothing": "", "text": "hello\n", "cut short": whole[:len(whole)/2], "no end": strings.Join(lines[:len(lines)-2], ""),
		"a line is missing": strings.Join(append(slices.Clone(lines[:3]), lines[4:]...), ""), "more": whole + "{}\n",
		"other version": strings.Replace(whole, `"Version":2`, `"Version":3`, 1), "unknown field": strings.Replace(whole, `"Priority":3`, `"Frob":3`, 1),
		"order": strings.Join(swapped, ""), "short hash": withKey(`{"Hash":"AAAA","Until":"2040-01-01T00:00:00Z"}`),
		"no hash": withKey(`{"Until":"2040-01-01T00:00:00Z"}`), "no time": withKey(`{"Hash":"AAAAAAAAAAAAAAAAAAAAAA=="}`),
		"before all time": withKey(`{"Hash":"AAAAAAAAAAAAAAAAAAAAAA==","Until":"1969-12-31T23:59:59Z"}`),
	} {
		for _, flags := range [][]string{nil, {"-dry-run"}} {
			r := run(t.Context(), nil, []byte(in), append([]string{"-dir", to, "import"}, flags...)...)
			require.Equal(t, exitDamaged, r.code, "%s: %s", what, r.err)
		}
		_, err := os.Stat(to)
		require.ErrorIs(t, err, os.ErrNotExist, what)
	}
	require.Equal(t, exitDamaged, run(t.Context(), nil, []byte(whole[:99]), "-dir", to, "import").code)
	require.Zero(t, run(t.Context(), nil, []byte(whole), "-dir", to, "import", "-dry-run").code)
	require.NoDirExists(t, to)

	// Of a key that is given twice, the later time counts.
	twice := filepath.Join(t.TempDir(), "twice")
	const once = `{"Hash":"AAAAAAAAAAAAAAAAAAAAAA==","Until":"20%d-01-01T00:00:00Z"}`
	in := withKey(fmt.Sprintf(once, 20), fmt.Sprintf(once, 40), fmt.Sprintf(once, 30))
	require.Zero(t, run(t.Context(), nil, []byte(in), "-dir", twice, "import").code)
	require.True(t, decoded[verifyResult](t, "-dir", twice, "verify").OK)
	require.Contains(t, call(t, "-dir", twice, "export").out, fmt.Sprintf(once, 40))

	// An import that was interrupted is run again.
	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.Equal(t, exitEnded, run(ctx, nil, []byte(whole), "-dir", to, "import").code)
	require.NoDirExists(t, to)
	require.DirExists(t, to+".importing")
	require.NoError(t, os.Mkdir(to, 0o700), "an empty directory may be there")
	ids := filepath.Join(t.TempDir(), "ids")
	r := run(t.Context(), nil, []byte(whole), "-dir", to, "import", "-ids", ids)
	require.Zero(t, r.code, r.err)
	require.NoDirExists(t, to+".importing")
	b, err := os.ReadFile(ids)
	require.NoError(t, err)
	for line := range bytes.Lines(b) {
		var p struct{ Old, New codeq.ID }
		require.NoError(t, json.Unmarshal(line, &p))
		old := decoded[codeq.TaskInfo](t, "-dir", dir, "get", p.Old.String())
		now := decoded[codeq.TaskInfo](t, "-dir", to, "get", p.New.String())
		require.Equal(t, old.Payload, now.Payload)
	}
	require.Equal(t, 10, bytes.Count(b, []byte("\n")))

	require.Equal(t, exitRefused, run(t.Context(), nil, []byte(whole), "-dir", to, "import").code, "it is not empty")
	require.NoError(t, os.Mkdir(to+"2.importing", 0o700))
	require.Equal(t, exitRefused, run(t.Context(), nil, []byte(whole), "-dir", to+"2", "import").code, "it belongs to somebody else")

	serve(t, dir)
	require.Equal(t, exitInUse, call(t, "-dir", dir, "export").code, "a copy is exported")
}

// TestParentsFirst: parents come before their children, however they are listed.
func TestParentsFirst(t *testing.T) {
	id := func(i int) codeq.ID { return codeq.ID{byte(i >> 8), byte(i)} }
	const n = 2000
	for range 20 {
		links := make([]link, n)
		for i, at := range rand.Perm(n) {
			links[i].id = id(at)
			for range rand.IntN(4) {
				if at > 0 {
					links[i].after = append(links[i].after, id(rand.IntN(at)))
				}
			}
			links[i].after = append(links[i].after, id(n+1)) // one that is not among them
		}
		seen := make(map[codeq.ID]bool)
		for _, l := range parentsFirst(links) {
			for _, parent := range l.after {
				require.True(t, seen[parent] || parent == id(n+1))
			}
			require.False(t, seen[l.id])
			seen[l.id] = true
		}
		require.Len(t, seen, n)
	}
	chain := make([]link, 100_000) // deeper than a stack of calls should be
	for i := range chain {
		chain[i] = link{codeq.ID{byte(i >> 16), byte(i >> 8), byte(i)}, nil}
		if i+1 < len(chain) {
			j := i + 1
			chain[i].after = []codeq.ID{{byte(j >> 16), byte(j >> 8), byte(j)}}
		}
	}
	require.Len(t, parentsFirst(chain), len(chain))
}
