package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/internal/offline"
)

// reshard exports a directory, imports it with another number of shards, and requires the same
// content.
func reshard(t *testing.T, dir string, shards int) (to string) {
	t.Helper()
	file, ids := filepath.Join(t.TempDir(), "export"), filepath.Join(t.TempDir(), "ids")
	ok(t, "-dir", dir, "export", "-file", file)
	to = filepath.Join(t.TempDir(), "new")
	ok(t, "-dir", to, "import", "-file", file, "-shards", fmt.Sprint(shards), "-dry-run")
	ok(t, "-dir", to, "import", "-file", file, "-shards", fmt.Sprint(shards), "-ids", ids)
	require.True(t, decoded[verifyResult](t, "-dir", to, "verify").OK)
	requireSame(t, dir, to, ids)
	return to
}

func named(name, queue string) codeq.Task {
	return codeq.Task{Queue: queue, Headers: map[string]string{"name": name}, Payload: []byte("payload of " + name)}
}

// attempt claims the next task of a queue, requires its name, and ends the attempt.
func attempt(t *testing.T, q *codeq.Queue, queue, name string, end func(codeq.Receipt) error) {
	t.Helper()
	l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: time.Hour})
	require.NoError(t, err)
	require.Equal(t, name, l.Headers["name"])
	require.NoError(t, end(l.Receipt))
}

// fillAll fills a queue with a task for each property that a task may have.
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
		full.Headers[hostile], full.Payload = hostile, []byte(hostileBytes)
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

		// Idempotency keys: held by a waiting task, by a dead letter for a time, by no task.
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
		// The tasks of these keys are gone.
		for _, key := range []codeq.UniqueKey{{Key: "5"}, {Key: "6"}, {Key: "7"}, {Key: "8", Group: "g", Tenant: "t"}} {
			gone := named("gone", "keys")
			gone.Group, gone.Tenant, gone.Unique = key.Group, key.Tenant, codeq.Unique{Key: key.Key, For: time.Hour}
			if key.Key == "6" {
				gone.Unique.For = time.Millisecond
			}
			id := add(gone)
			require.NoError(t, q.Cancel(ctx, id))
			require.NoError(t, q.Forget(ctx, id))
		}

		// Tasks that wait after an attempt.
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

		// A group with its first task between two attempts, and a group that a dead letter holds.
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

		// A chain. Its parents are in another order than their children.
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

		// The latest possible times, and a removed queue.
		far := named("far", "far")
		far.RunAt = time.Date(9999, time.December, 31, 23, 59, 59, 999e6, time.UTC)
		far.Unique, far.Retention, far.Timeout = codeq.Unique{Key: "far", For: math.MaxInt64}, math.MaxInt64, math.MaxInt64
		add(far)
		require.NoError(t, q.Configure(ctx, "removed", func(s *codeq.Settings) { s.Concurrency = 3 }))
		require.NoError(t, q.DeleteQueue(ctx, "removed"))

		// Order, names with control characters, settings, schedules.
		for i := range 300 {
			task := named(fmt.Sprintf("ready %03d", i), "order")
			task.Priority, task.Tenant = i%3, fmt.Sprint("tenant ", i%2)
			add(task)
		}
		add(named("hostile", hostile))
		require.NoError(t, q.Configure(ctx, "order", func(s *codeq.Settings) {
			*s = codeq.Settings{
				Paused: true, Concurrency: 3, Rate: 2.5, Burst: 7, TenantWeights: map[string]int{"tenant 1": 2, "é": 3},
				Policy: codeq.Policy{Retention: codeq.Forever}, DeadRetention: 48 * time.Hour,
			}
		}))
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Cron: "0 3 * * *", TimeZone: "UTC", Missed: codeq.MissedAll, Task: codeq.Task{Queue: "r", Payload: []byte("p")}}))
	}
}

// TestReshard: an export from two shards has the same content after imports into five, into one,
// and into seven.
func TestReshard(t *testing.T) {
	t.Parallel()
	dir := newQueue(t, fillAll(t))
	to := reshard(t, reshard(t, reshard(t, dir, 5), 1), 7)

	// Tasks are still held back for the same reasons, and go on in their order.
	q, err := codeq.Open(to, &codeq.Options{MustExist: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	tasks := contentsOf(t, q)
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
	infos, err := q.Info(ctx)
	require.NoError(t, err)
	require.False(t, slices.ContainsFunc(infos, func(i codeq.QueueInfo) bool { return i.Queue == "removed" }))
	s, err := q.Settings("removed")
	require.NoError(t, err)
	require.Zero(t, s)
}

// requireTaken produces tasks with keys, and checks for each key whether it is taken.
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

// TestReshardFreedKeys: a key outlives its task and is imported. If it is then freed or taken
// again, it is so after the next import, too.
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

// TestImportIntoDirectory: an import fills an existing empty directory, also through a link. The
// directory keeps its owner and mode, and may be the root of a volume.
func TestImportIntoDirectory(t *testing.T) {
	t.Parallel()
	export := []byte(call(t, "-dir", newQueue(t, fillAll(t)), "export").out)
	into := func(dir string, flags ...string) done {
		return run(t.Context(), nil, export, append([]string{"-dir", dir, "import", "-shards", "3"}, flags...)...)
	}
	whole := func(dir string) {
		t.Helper()
		r := into(dir, "-dry-run")
		require.Zero(t, r.code, r.err)
		r = into(dir)
		require.Zero(t, r.code, r.err)
		require.True(t, decoded[verifyResult](t, "-dir", dir, "verify").OK)
		require.NoDirExists(t, filepath.Join(dir, workSuffix))
		require.Equal(t, exitRefused, into(dir).code, "it is not empty any more")
	}
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	require.NoError(t, os.Mkdir(at("empty"), 0o750))
	before, err := os.Stat(at("empty"))
	require.NoError(t, err)
	require.NoError(t, os.Symlink(at("empty"), at("link")))
	whole(at("link"))
	after, err := os.Stat(at("empty"))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after))
	require.Equal(t, before.Mode(), after.Mode())

	require.NoError(t, os.Symlink(at("nowhere"), at("dangling")))
	for _, flags := range [][]string{{"-dry-run"}, nil} {
		r := into(at("dangling"), flags...)
		require.Equal(t, exitRefused, r.code)
		require.Contains(t, r.err, "which does not exist")
	}

	// An import was killed while it moved its stores there. It runs again, and keeps the files of
	// others.
	require.NoError(t, os.MkdirAll(filepath.Join(at("killed"), "shard-001"), 0o700))
	require.Equal(t, exitRefused, into(at("killed")).code)
	require.NoError(t, os.MkdirAll(filepath.Join(at("killed"), workSuffix, "queue"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(at("killed"), workSuffix, importMark), nil, 0o600))
	_, err = codeq.Open(at("killed"), nil)
	require.ErrorIs(t, err, codeq.ErrNotQueue)
	require.NoError(t, os.WriteFile(filepath.Join(at("killed"), "a"), nil, 0o600))
	require.Equal(t, exitRefused, into(at("killed")).code)
	require.NoError(t, os.Remove(filepath.Join(at("killed"), "a")))
	whole(at("killed"))

	// A failed import leaves the directory empty.
	require.NoError(t, os.Mkdir(at("fails"), 0o700))
	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.Equal(t, exitEnded, run(ctx, nil, export, "-dir", at("fails"), "import").code)
	names, err := os.ReadDir(at("fails"))
	require.NoError(t, err)
	require.Empty(t, names)

	if os.Geteuid() == 0 && runtime.GOOS == "linux" {
		const somebody = "65534"
		require.NoError(t, os.Mkdir(at("service"), 0o700))
		require.NoError(t, exec.Command("chown", somebody, at("service")).Run())
		whole(at("service"))
		out, err := exec.Command("find", at("service"), "!", "-uid", somebody).CombinedOutput()
		require.NoError(t, err)
		require.Empty(t, string(out), "root has made what the service cannot read")

		require.NoError(t, os.Mkdir(at("volume"), 0o700))
		if exec.Command("mount", "-t", "tmpfs", "none", at("volume")).Run() == nil {
			defer func() { require.NoError(t, exec.Command("umount", at("volume")).Run()) }()
			require.NoError(t, os.Mkdir(filepath.Join(at("volume"), "lost+found"), 0o700))
			whole(at("volume"))
		}
	}
}

// contentsOf returns the tasks of a queue by their header "name".
func contentsOf(t *testing.T, q *codeq.Queue) map[string]*codeq.TaskInfo {
	tasks := make(map[string]*codeq.TaskInfo)
	for s := codeq.Ready; s <= codeq.Canceled; s++ {
		for task, err := range q.List(t.Context(), codeq.ListOptions{State: s}) {
			require.NoError(t, err)
			tasks[task.Headers["name"]] = task
		}
	}
	return tasks
}

// claimNamed waits for the next task of a queue, requires its name, and ends it.
func claimNamed(t *testing.T, q *codeq.Queue, queue, name string, end func(codeq.Receipt) error) {
	t.Helper()
	l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{queue}})
	require.NoError(t, err)
	require.Equal(t, name, l.Headers["name"])
	require.NoError(t, end(l.Receipt))
}

// requireSame: the exports of a directory and of its import have the same lines, except for the
// lines about the directory. The file ids maps the old IDs to the new ones.
func requireSame(t *testing.T, from, to, ids string) {
	t.Helper()
	news := make(map[string]string)
	b, err := os.ReadFile(ids)
	require.NoError(t, err)
	for line := range bytes.Lines(b) {
		var p struct{ Old, New string }
		require.NoError(t, json.Unmarshal(line, &p))
		require.Empty(t, news[p.Old])
		news[p.Old] = p.New
	}
	require.Equal(t, linesOf(t, from, func(id string) string { return cmp.Or(news[id], id) }), linesOf(t, to, nil))
}

var idText = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// linesOf exports a directory and returns the lines in an order that does not depend on IDs. named,
// if any, replaces each ID.
func linesOf(t *testing.T, dir string, named func(string) string) []string {
	t.Helper()
	lines := strings.SplitAfter(call(t, "-dir", dir, "export").out, "\n")
	lines = lines[1 : len(lines)-2] // without the header and the end
	for i := range lines {
		if named != nil {
			lines[i] = idText.ReplaceAllStringFunc(lines[i], named)
		}
	}
	slices.Sort(lines)
	return lines
}

// TestReshardWaiting: a paused schedule keeps its position and the parents of its task. A task with
// a time and a parent waits for both. Joins wait for 10,000 tasks each.
func TestReshardWaiting(t *testing.T) {
	t.Parallel()
	at := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
	dir := newQueue(t, func(ctx context.Context, q *codeq.Queue) {
		parent := produce(t, q, named("parent", "parents"))
		gone := produce(t, q, named("gone", "parents"))
		require.NoError(t, q.Cancel(ctx, gone))
		require.NoError(t, q.Forget(ctx, gone))
		timed := named("timed", "children")
		timed.After, timed.RunAt = []codeq.ID{parent}, at
		produce(t, q, timed)
		for _, s := range []codeq.Schedule{
			{Name: "paused", Every: time.Hour, Task: codeq.Task{Queue: "ticks", After: []codeq.ID{parent}}},
			{Name: "missing", Every: 2 * time.Hour, Missed: codeq.MissedAll, Task: codeq.Task{Queue: "ticks", After: []codeq.ID{gone, parent}}},
			{Name: "refuses", Every: 2 * time.Hour, Task: codeq.Task{Queue: "ticks", After: []codeq.ID{gone}, OnMissing: codeq.CancelOnMissing}},
		} {
			require.NoError(t, q.SetSchedule(ctx, s))
		}
		require.NoError(t, q.PauseSchedule(ctx, "paused"))
		require.NoError(t, q.Configure(ctx, "dead", func(s *codeq.Settings) { s.DeadRetention = time.Millisecond }))
		dead := named("dead", "dead")
		dead.Retention = codeq.Forever
		produce(t, q, dead)
		attempt(t, q, "dead", "dead", func(r codeq.Receipt) error { return q.DeadLetter(ctx, r, errors.New("dead")) })

		var parts []codeq.ID
		for range 11 {
			batch := make([]codeq.Task, 1000)
			for i := range batch {
				batch[i] = codeq.Task{Queue: "parts", Headers: map[string]string{"name": fmt.Sprint(len(parts), " ", i)}}
			}
			ids, err := q.ProduceBatch(ctx, batch)
			require.NoError(t, err)
			parts = append(parts, ids...)
		}
		for i := range 11 {
			join := named(fmt.Sprint("join ", i), "joins")
			join.After = parts[i : i+10_000]
			produce(t, q, join)
		}
	})
	r, err := codeq.OpenReadOnly(dir, nil)
	require.NoError(t, err)
	before, err := r.Schedules(t.Context())
	require.NoError(t, err)
	require.NoError(t, r.Close())
	file, ids, to := filepath.Join(t.TempDir(), "export"), filepath.Join(t.TempDir(), "ids"), filepath.Join(t.TempDir(), "new")
	ok(t, "-dir", dir, "export", "-file", file)
	ok(t, "-dir", to, "import", "-file", file, "-shards", "3", "-ids", ids)
	again := reshard(t, to, 7)

	q, err := codeq.Open(again, &codeq.Options{MustExist: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	ctx := t.Context()
	tasks := contentsOf(t, q)
	require.Equal(t, codeq.Blocked, tasks["timed"].State)
	require.Equal(t, at, tasks["timed"].RunAt.UTC())
	after, err := q.Schedules(ctx)
	require.NoError(t, err)
	require.Len(t, after, len(before))
	for i, s := range after {
		was := before[i]
		require.Equal(t, []any{was.Name, was.Paused, was.Next, was.Last}, []any{s.Name, s.Paused, s.Next, s.Last})
		switch s.Name {
		case "paused", "missing": // the other parent is gone
			require.Equal(t, []codeq.ID{tasks["parent"].ID}, s.Task.After)
		case "refuses":
			require.Equal(t, was.Task.After, s.Task.After, "it says what to do without the parent")
		}
	}
	finish := func(r codeq.Receipt) error { return q.Complete(ctx, r, nil) }
	claimNamed(t, q, "parents", "parent", finish)
	for done := 0; done < 11_000; {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"parts"}, Max: 1000})
		require.NoError(t, err)
		g, _ := errgroup.WithContext(ctx)
		for _, l := range leases {
			g.Go(func() error { return finish(l.Receipt) })
		}
		require.NoError(t, g.Wait())
		done += len(leases)
	}
	for range 11 {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"joins"}})
		require.NoError(t, err)
		require.NoError(t, finish(l.Receipt))
	}
	require.Eventually(t, func() bool { // the message of its parent arrives, and its time has not come
		timed, err := q.Get(ctx, tasks["timed"].ID)
		return err == nil && timed.State == codeq.Scheduled
	}, time.Minute, time.Millisecond)
}

// TestImportOrder: the tasks of a lane are claimed in the order of the times when they became
// ready.
func TestImportOrder(t *testing.T) {
	dir := newQueue(t, func(_ context.Context, q *codeq.Queue) {
		for i := range 1000 {
			produce(t, q, mail(i))
		}
	})
	to := reshard(t, dir, 1)
	p := decoded[pageResult](t, "-dir", dir, "ls", "-payload", "-limit", "1000")
	at := make(map[string]time.Time) // tasks of one millisecond in several shards have no order
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

// TestImportRandom reshards queues of random tasks, and works on all of them: no task waits for
// ever.
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
			case 4:
				require.NoError(t, q.Extend(ctx, l.Receipt, 10*time.Millisecond))
			}
		}
	})
	to := reshard(t, dir, 3)
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

// summed returns an export of the given lines, with an end that fits them.
func summed(lines ...string) string {
	text, counts := strings.Join(lines, ""), offline.Counts{}
	for _, l := range lines[1:] {
		switch {
		case strings.HasPrefix(l, `{"Settings`):
			counts.Settings++
		case strings.HasPrefix(l, `{"Schedule`):
			counts.Schedules++
		case strings.HasPrefix(l, `{"Totals`):
			counts.Totals++
		case strings.HasPrefix(l, `{"Key`):
			counts.Keys++
		case strings.HasPrefix(l, `{"Task`):
			counts.Tasks++
		case !strings.HasPrefix(l, `{"Options`):
			counts.Ties++
		}
	}
	b, err := json.Marshal(offline.Line{End: &offline.End{Counts: counts, SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(text)))}})
	if err != nil {
		panic(err)
	}
	return text + string(b) + "\n"
}

// TestImportRefuses: an input that is not a complete export makes no directory, and nothing is
// overwritten.
func TestImportRefuses(t *testing.T) {
	t.Parallel()
	dir := newQueue(t, fillMixed(t))
	whole := call(t, "-dir", dir, "export").out
	to := filepath.Join(t.TempDir(), "new")
	lines := strings.SplitAfter(whole, "\n")
	lines = lines[:len(lines)-1]
	own := lines[:len(lines)-1] // without the end
	require.Equal(t, whole, summed(own...))
	const hash = "AAAAAAAAAAAAAAAAAAAAAQ=="
	plus := func(more ...string) string { return summed(append(slices.Clone(own), more...)...) }
	first := func(prefix string) int {
		return slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, prefix) })
	}
	replaced := func(at int, by string) string {
		changed := slices.Clone(own)
		changed[at] = by
		return summed(changed...)
	}
	copied := slices.Clone(lines)
	copied[first(`{"Task`)+1] = copied[first(`{"Task`)]
	swapped := slices.Clone(own)
	slices.Reverse(swapped[1:])
	ready := slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, `"State":"ready"`) })
	changed := func(old, now string) string {
		require.Contains(t, lines[ready], old)
		return replaced(ready, strings.Replace(lines[ready], old, now, 1))
	}
	const nobody = "01a218ef-5015-7000-9a00-0000c974879c"
	for what, in := range map[string]string{
		"nothing": "", "text": "hello\n", "cut short": whole[:len(whole)/2], "no end": strings.Join(own, ""),
		"a line is missing":           strings.Join(append(slices.Clone(lines[:3]), lines[4:]...), ""),
		"a line is its neighbour":     strings.Join(copied, ""),
		"twice":                       plus(lines[first(`{"Task`)]),
		"a letter is another":         strings.Replace(whole, `"Cron":"@daily"`, `"Cron":"@dally"`, 1),
		"more":                        whole + "{}\n",
		"older version":               strings.Replace(whole, `"Version":3`, `"Version":2`, 1),
		"newer version":               strings.Replace(whole, `"Version":3`, `"Version":4`, 1),
		"unknown field":               changed(`"State"`, `"Frob":3,"State"`),
		"unknown state":               changed(`"State":"ready"`, `"State":"steady"`),
		"no ID":                       changed(`"ID":"0`, `"ID":"x`),
		"no queue":                    changed(`"Queue":"mail"`, `"Queue":""`),
		"priority":                    changed(`"State"`, `"Priority":10,"State"`),
		"attempts":                    changed(`"State"`, `"Attempts":2,"Leases":1,"State"`),
		"what another state has":      changed(`"State"`, `"Due":5,"State"`),
		"a turn of no group":          changed(`"State"`, `"HasTurn":true,"State"`),
		"a key that it does not have": changed(`"State"`, `"HasKey":true,"State"`),
		"a step of no kind":           changed(`"State"`, `"Steps":[{"Name":"x"}],"State"`),
		"a step without a name":       changed(`"State"`, `"Steps":[{"Kind":1}],"State"`),
		"a lease of before":           changed(`"State"`, `"Lease":{"Token":1,"Deadline":1,"Duration":1,"Leases":4,"Attempts":1},"State"`),
		"two objects":                 replaced(ready, strings.TrimSpace(lines[ready])+lines[ready]),
		"two kinds":                   replaced(ready, `{"Key":{"Hash":"`+hash+`","Until":1},`+lines[ready][1:]),
		"no kind":                     plus("{}\n"),
		"order":                       summed(swapped...),
		"options":                     replaced(first(`{"Options`), `{"Options":{"maxAttempts":-1}}`+"\n"),
		"settings":                    replaced(first(`{"Settings`), `{"Settings":{"Queue":"q","Version":1,"Value":{"Concurrency":-1}}}`+"\n"),
		"cron":                        replaced(first(`{"Schedule`), strings.Replace(lines[first(`{"Schedule`)], "@daily", "@dally", 1)),
		"short hash":                  plus(`{"Key":{"Hash":"AAAA","Until":3000000000000}}` + "\n"),
		"no time":                     plus(`{"Key":{"Hash":"` + hash + `"}}` + "\n"),
		"a key twice":                 plus(`{"Key":{"Hash":"`+hash+`","Until":5}}`+"\n", `{"Key":{"Hash":"`+hash+`","Until":6}}`+"\n"),
		"telling":                     plus(`{"Telling":{"ID":"` + nobody + `","End":"ready"}}` + "\n"),
		"message":                     plus(`{"Message":{"Kind":99}}` + "\n"),
		"no task":                     plus(`{"Message":{"Kind":1}}` + "\n"),
	} {
		flags := [][]string{{"-dry-run"}, nil}
		if !slices.Contains([]string{"cut short", "a line is its neighbour", "settings"}, what) {
			flags = flags[:1] // the lines are read by the same code
		}
		for _, flags := range flags {
			r := run(t.Context(), nil, []byte(in), append([]string{"-dir", to, "import"}, flags...)...)
			require.Equal(t, exitDamaged, r.code, "%s: %s", what, r.err)
			require.Contains(t, r.err, "line", what)
		}
		require.NoFileExists(t, to, what)
		require.NoDirExists(t, to+".importing", what)
	}
	r := run(t.Context(), nil, []byte(strings.Replace(whole, `"Version":3`, `"Version":2`, 1)), "-dir", to, "import")
	require.Contains(t, r.err, "it is of version 2")

	// Only the whole input shows this fault: the import puts nothing in place.
	r = run(t.Context(), nil, []byte(plus(`{"Wake":{"Queue":"mail","ID":"`+nobody+`"}}`+"\n", `{"Pin":{"Child":"`+nobody+`","Parent":"`+nobody+`"}}`+"\n")), "-dir", to, "import")
	require.Contains(t, []int{exitOK, exitDamaged}, r.code, r.err)
	require.NoError(t, os.RemoveAll(to))

	// Checks that depend on the machine come first, also in a dry run.
	mars := replaced(first(`{"Schedule`), strings.Replace(lines[first(`{"Schedule`)], `"Cron"`, `"TimeZone":"Mars/Olympus","Cron"`, 1))
	require.NoError(t, os.WriteFile(to, nil, 0o600))
	for _, flags := range [][]string{nil, {"-dry-run"}} {
		imports := func(to, in string) done {
			return run(t.Context(), nil, []byte(in), append([]string{"-dir", to, "import"}, flags...)...)
		}
		require.Equal(t, exitNotNow, imports(to+"2", mars).code)
		for _, ids := range []string{filepath.Join(to+"2", "ids"), dir} {
			r := run(t.Context(), nil, []byte(whole), append([]string{"-dir", to + "2", "import", "-ids", ids}, flags...)...)
			require.Equal(t, exitOther, r.code, "there can be no such file")
			require.NoDirExists(t, to+"2")
		}
		require.Equal(t, exitRefused, imports(to, whole).code, "it is a file")
		require.Equal(t, exitRefused, imports(dir, whole).code, "it is not empty")
		require.Equal(t, exitUsage, run(t.Context(), nil, []byte(whole), append([]string{"-dir", to + "2", "import", "-shards", "257"}, flags...)...).code)
	}
	require.NoError(t, os.Remove(to))

	// A canceled import leaves nothing. An import removes the remains of a killed one.
	ctx, stop := context.WithCancel(t.Context())
	stop()
	ids := filepath.Join(t.TempDir(), "ids")
	require.Equal(t, exitEnded, run(ctx, nil, []byte(whole), "-dir", to, "import", "-ids", ids).code)
	require.NoDirExists(t, to)
	require.NoDirExists(t, to+".importing")
	require.NoFileExists(t, ids)
	require.NoError(t, os.MkdirAll(filepath.Join(to+".importing", "queue", "shard-000"), 0o700))
	require.Equal(t, exitRefused, run(t.Context(), nil, []byte(whole), "-dir", to, "import").code, "it belongs to somebody else")
	require.NoError(t, os.WriteFile(filepath.Join(to+".importing", importMark), nil, 0o600))
	require.Zero(t, run(t.Context(), nil, []byte(whole), "-dir", to, "import", "-dry-run").code)
	r = run(t.Context(), nil, []byte(whole), "-dir", to, "import", "-ids", ids)
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
		require.Equal(t, old.At, now.At)
	}
	require.Equal(t, 10, bytes.Count(b, []byte("\n")))
	require.Equal(t, exitRefused, run(t.Context(), nil, []byte(whole), "-dir", to, "import").code, "it is not empty")

	file := filepath.Join(t.TempDir(), "export")
	serve(t, dir)
	require.Equal(t, exitInUse, call(t, "-dir", dir, "export", "-file", file).code, "a copy is exported")
	require.NoFileExists(t, file)
}
