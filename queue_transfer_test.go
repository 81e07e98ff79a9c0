package codeq_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/offline"
	"codeq/internal/record"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// transferred exports the queue "q" of a disk and imports it as "new" with that number of shards.
func transferred(t *testing.T, disk *crashfs.Disk, shards int) (export string) {
	t.Helper()
	var lines bytes.Buffer
	_, err := offline.Export(t.Context(), disk, "q", true, &lines, nil)
	require.NoError(t, err)
	export = lines.String()
	_, err = offline.Import(t.Context(), disk, "new", &lines, offline.ImportConfig{Shards: shards})
	require.NoError(t, err)
	return export
}

// TestTransferUnderWay exports a queue of four shards as it is after a crash, with tasks that wait
// for each other: with messages between shards that are not taken, leases in force, children that
// are being told, and results that are kept. With another number of shards its tasks end as those
// of the queue itself do.
func TestTransferUnderWay(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rng := testkit.Seeded(t)
		disk := crashfs.New()
		opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: 4, Durability: codeq.DurabilityDisk, Retention: codeq.Forever})
		q, err := codeq.Open("q", &opts)
		require.NoError(t, err)
		im := queuetest.KeepImages(t, q, disk)
		work(t, q, rng)
		require.NoError(t, q.Close())

		// At least 24 images, and more until each part of an export was in one of them.
		unseen := []string{`{"Header":`, `{"Settings":`, `{"Schedule":`, `{"Totals":`, `{"Task":`, `{"Dependent":`, `{"Pin":`, `{"Message":`, `"Lease":`, `"Siblings":`}
		for n, i := range rng.Perm(len(im.Images)) {
			if n >= 24 && len(unseen) == 0 {
				break
			}
			image := im.Images[i]
			want := image.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100})
			shards := []int{1, 3, 7}[n%3]
			export := transferred(t, image, shards)
			unseen = slices.DeleteFunc(unseen, func(part string) bool { return strings.Contains(export, part) })
			require.Equal(t, endsOf(t, want, "q", 4), endsOf(t, image, "new", shards), "image %d", i)
		}
		require.Empty(t, unseen)
	})
}

// TestTransferInterrupted: a process dies in an import, as soon as there is a queue. The export
// lacks that a parent knows its child. Open derives it.
func TestTransferInterrupted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk, ctx := crashfs.New(), t.Context()
		q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: 1}))
		require.NoError(t, err)
		parent, err := q.Produce(ctx, codeq.Task{Queue: "parents"})
		require.NoError(t, err)
		_, err = q.Produce(ctx, codeq.Task{Queue: "children", After: []codeq.ID{parent}})
		require.NoError(t, errors.Join(err, q.Close()))
		simtest.AlterStore(t, disk, func(db *pebble.DB) {
			key, _ := queuetest.First(t, db, keys.Dependent, nil)
			require.NoError(t, db.Delete(key, nil))
		})
		var lines bytes.Buffer
		_, err = offline.Export(ctx, disk, "queue", true, &lines, nil)
		require.NoError(t, err)
		var mu sync.Mutex // guards the variables below
		var image *crashfs.Disk
		written := false
		_, err = offline.Import(ctx, &testkit.HookFS{FS: disk, Before: func(op, name string) error {
			mu.Lock()
			defer mu.Unlock()
			if written && image == nil {
				image = disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100})
			}
			written = written || op == "rename" && disk.PathBase(name) == offline.ManifestName
			return nil
		}}, "new", &lines, offline.ImportConfig{})
		require.NoError(t, err)

		q, err = codeq.Open("new", queuetest.OnDisk(image, &codeq.Options{}))
		require.NoError(t, err)
		queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "parents"))
		ctx, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"children"}})
		require.NoError(t, err)
		queuetest.Complete(t, q, l)
		require.NoError(t, q.Close())
	})
}

// work produces tasks that wait for each other, and works on some of them.
func work(t *testing.T, q *codeq.Queue, rng *rand.Rand) {
	ctx := t.Context()
	var made []codeq.ID
	task := func(name string) codeq.Task {
		task := codeq.Task{Queue: "a", Payload: []byte(name)}
		if rng.IntN(3) == 0 {
			task.Group = fmt.Sprint("g", rng.IntN(6))
		}
		if rng.IntN(4) == 0 {
			task.Unique = codeq.Unique{Key: name, For: time.Hour}
		}
		if rng.IntN(3) == 0 {
			task.Retention = time.Hour // parents are pinned
		}
		for range rng.IntN(4) {
			if len(made) > 0 {
				task.After = append(task.After, made[max(0, len(made)-1-rng.IntN(40))])
			}
		}
		task.OnDead = codeq.OnDead(1 + rng.IntN(2))
		return task
	}
	require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: 1000 * time.Hour, Task: codeq.Task{Queue: "a"}}))
	require.NoError(t, q.PauseSchedule(ctx, "s"))
	for i := range 150 {
		id, err := q.Produce(ctx, task(fmt.Sprint(i)))
		require.NoError(t, err)
		made = append(made, id)
		if i%40 == 0 {
			require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 50 + i }))
		}
		l := queuetest.ClaimNow(t, q, "a")
		switch {
		case l == nil:
		case i%10 == 9:
			require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
		case i%10 == 8:
			require.NoError(t, q.Cancel(ctx, l.ID))
		case i%10 < 6:
			next := task(fmt.Sprint("next of ", i))
			next.After = append(next.After, l.ID)
			second := codeq.Task{Queue: "a", Payload: fmt.Append(nil, "second of ", i), Group: fmt.Sprint("h", i%5), After: []codeq.ID{codeq.Nth(0)}, OnDead: codeq.RunOnDead}
			third := codeq.Task{Queue: "a", Payload: fmt.Append(nil, "third of ", i), Unique: codeq.Unique{Key: fmt.Sprint(i)}, After: []codeq.ID{codeq.Nth(0), codeq.Nth(1)}, OnDead: codeq.CancelOnDead}
			require.NoError(t, q.Complete(ctx, l.Receipt, []byte("r"), next, second, third))
		}
	}
}

// endsOf runs a queue until everything has ended, and returns the outcome of each task.
func endsOf(t *testing.T, disk *crashfs.Disk, dir string, shards int) (ended []string) {
	report, err := codeq.Verify(dir, queuetest.OnDisk(disk, &codeq.VerifyOptions{AcceptCopy: true}))
	require.NoError(t, err)
	require.True(t, report.OK(), "%s: %v", dir, report.Problems)
	q, err := codeq.Open(dir, queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Retention: codeq.Forever, AcceptCopy: true}))
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	var m codeq.Mux
	codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	go func() { ran <- q.Run(ctx, &m, nil) }()
	require.NoError(t, q.WaitIdle(ctx))
	stop()
	require.NoError(t, <-ran)
	for _, s := range []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased, codeq.Dead, codeq.Done, codeq.Canceled} {
		for task, err := range q.List(t.Context(), codeq.ListOptions{State: s}) {
			require.NoError(t, err)
			ended = append(ended, fmt.Sprintf("%s is %v after %d attempts", task.Payload, s, task.Attempts))
		}
	}
	slices.Sort(ended)
	return ended
}

// TestTransferKeys: idempotency keys that outlive their tasks stay taken after an import, in any
// shard. The tasks that held them are no longer known.
func TestTransferKeys(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	disk := crashfs.New()
	keyed := func(key, group string, d time.Duration) codeq.Task {
		return codeq.Task{Queue: "a", Group: group, Unique: codeq.Unique{Key: key, For: d}}
	}
	q, err := codeq.Open("q", queuetest.OnDisk(disk, &codeq.Options{Shards: 3}))
	require.NoError(t, err)
	for _, task := range []codeq.Task{keyed("1", "", time.Hour), keyed("2", "g", time.Hour), keyed("no time", "", 0)} {
		id, err := q.Produce(ctx, task)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(ctx, id))
	}
	ready, err := q.Produce(ctx, keyed("ready", "", time.Hour))
	require.NoError(t, err)
	require.NoError(t, q.Close())
	export := transferred(t, disk, 5)
	require.Equal(t, 2, strings.Count(export, "\n{\"Key\":"), export)
	require.Equal(t, 1, strings.Count(export, `"HasKey":true`))

	q, err = codeq.Open("new", queuetest.OnDisk(disk, &codeq.Options{Shards: 5}))
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	var taken *codeq.DuplicateError
	for _, task := range []codeq.Task{keyed("1", "", 0), keyed("2", "g", 0), keyed("ready", "", 0)} {
		_, err := q.Produce(ctx, task)
		require.ErrorAs(t, err, &taken, task.Unique.Key)
		require.Equal(t, task.Unique.Key != "ready", taken.ID == codeq.ID(keys.Gone))
	}
	require.Equal(t, ready.Time(), taken.ID.Time())
	_, err = q.Produce(ctx, keyed("no time", "", 0))
	require.NoError(t, err)
}

// TestTransferClocks: a shard worked while the wall clock was years ahead. In the new directory it
// ends no periods of other shards, and its own periods keep their length.
func TestTransferClocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := crashfs.New()
		keyed := func(name string) codeq.Task {
			return codeq.Task{Queue: "a", Unique: codeq.Unique{Key: name, For: time.Hour}}
		}
		use := func(dir string, shards int, ahead time.Duration, f func(q *codeq.Queue)) {
			opts := queuetest.OnDisk(disk, &codeq.Options{Shards: shards})
			inspect.Options(opts).Wall = func() time.Time { return time.Now().Add(ahead) }
			q, err := codeq.Open(dir, opts)
			require.NoError(t, err)
			f(q)
			require.NoError(t, q.Close())
		}
		names := make(map[string]bool)
		put := func(q *codeq.Queue, shard int) {
			for i := 0; ; i++ {
				name := fmt.Sprint(shard, " ", i)
				hash := keys.UniqueHash("a", "", "", "", name)
				ties := record.Ties{Unique: hash}
				if home, _ := ties.Home(2); home != shard {
					continue
				}
				id, err := q.Produce(ctx, keyed(name))
				require.NoError(t, err)
				require.NoError(t, q.Cancel(ctx, id))
				names[name] = true
				return
			}
		}
		use("q", 2, 13*365*24*time.Hour, func(q *codeq.Queue) { put(q, 1) })
		use("q", 2, 0, func(q *codeq.Queue) { put(q, 0) })
		time.Sleep(time.Minute)
		transferred(t, disk, 3)
		use("new", 3, 0, func(q *codeq.Queue) {
			for name := range names {
				_, err := q.Produce(ctx, keyed(name))
				require.ErrorIs(t, err, codeq.ErrDuplicate, name)
			}
			time.Sleep(time.Hour + time.Minute)
			for name := range names {
				_, err := q.Produce(ctx, keyed(name))
				require.NoError(t, err, name)
			}
		})
	})
}

// TestTransferRate: after an import a rate goes on from its last task, and a queue that has used
// its rate never gets its burst, in any shard. A clock that was ahead delays nothing longer than
// the rate does.
func TestTransferRate(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{0, 13 * 365 * 24 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			ctx, disk, wrong := t.Context(), crashfs.New(), ahead
			open := func(dir string, shards int) *codeq.Queue {
				opts := queuetest.OnDisk(disk, &codeq.Options{Shards: shards})
				inspect.Options(opts).Wall = func() time.Time { return time.Now().Add(wrong) }
				q, err := codeq.Open(dir, opts)
				require.NoError(t, err)
				return q
			}
			q := open("q", 2)
			for _, queue := range []string{"used", "unused"} {
				require.NoError(t, q.Configure(ctx, queue, func(s *codeq.Settings) { s.Rate, s.Burst = 1.0/3600, 1 }))
				for range 20 {
					queuetest.Produce(t, q, codeq.Task{Queue: queue})
				}
			}
			time.Sleep(time.Minute)
			require.NotNil(t, queuetest.ClaimNow(t, q, "used"))
			used := time.Now()
			for life := range 4 {
				require.NoError(t, q.Close())
				wrong = 0
				from, to := []string{"q", "new"}[life%2], []string{"new", "q"}[life%2]
				var lines bytes.Buffer
				_, err := offline.Export(ctx, disk, from, false, &lines, nil)
				require.NoError(t, err)
				require.NoError(t, disk.RemoveAll(to))
				shards := 3 + life
				_, err = offline.Import(ctx, disk, to, &lines, offline.ImportConfig{Shards: shards})
				require.NoError(t, err)
				q = open(to, shards)
				if life == 0 {
					require.NotNil(t, queuetest.ClaimNow(t, q, "unused"))
				}
				require.Nil(t, queuetest.ClaimNow(t, q, "unused"))
				time.Sleep(10 * time.Minute)
				require.Nil(t, queuetest.ClaimNow(t, q, "used"))
			}
			require.Nil(t, queuetest.ClaimNow(t, q, "used"))
			if ahead == 0 {
				time.Sleep(time.Hour - time.Since(used) + 2*time.Second)
			} else {
				time.Sleep(time.Hour + 2*time.Second) // at the latest from Open on
			}
			require.NotNil(t, queuetest.ClaimNow(t, q, "used"))
			require.Nil(t, queuetest.ClaimNow(t, q, "used"))
			require.NoError(t, q.Close())
		})
	}
}
