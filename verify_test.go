package codeq

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// contents is all files below a directory, but for locks.
func contents(t *testing.T, disk *vfs.MemFS, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for name, b := range testkit.ImageOf(t, disk, dir).Content {
		if path.Base(name) != manifest.LockName {
			all[name] = string(b)
		}
	}
	return all
}

func verifyImage(t *testing.T, disk vfs.FS, repair bool) *VerifyReport {
	t.Helper()
	r, err := Verify("queue", &VerifyOptions{Repair: repair, fs: disk})
	require.NoError(t, err)
	return r
}

// tasksOf opens an image, checks it, and returns its tasks.
func tasksOf(t *testing.T, disk *vfs.MemFS) map[ID]*TaskInfo {
	t.Helper()
	q, err := Open("queue", variedOptions(disk))
	require.NoError(t, err)
	tasks, err := q.list()
	require.NoError(t, errors.Join(err, q.checkAll(), q.checkMemory(), q.Close()))
	return tasks
}

// variedDisk is a disk with a queue that was closed in order, and its tasks.
func variedDisk(t *testing.T) (disk *vfs.MemFS, tasks map[ID]*TaskInfo) {
	t.Helper()
	disk = vfs.NewCrashableMem()
	q := variedQueue(t, disk)
	tasks, err := q.list()
	require.NoError(t, errors.Join(err, q.Close()))
	return disk, tasks
}

// alter changes the store of shard 0 behind its back.
func alter(t *testing.T, disk *vfs.MemFS, change func(db *pebble.DB) (alsoGone map[ID]bool)) (gone map[ID]bool) {
	t.Helper()
	const dir = "queue/shard-000"
	db, err := pebble.Open(dir, &pebble.Options{FS: disk, FormatMajorVersion: store.Format, Logger: failstop.New(slog.New(slog.DiscardHandler), "store")})
	require.NoError(t, err)
	gone = change(db)
	require.NoError(t, db.Close())
	require.NoError(t, integrity.Seal(disk, dir))
	return gone
}

// TestRepairOfFiles flips bits in the files of a queue and repairs it: then all is as it
// was.
func TestRepairOfFiles(t *testing.T) {
	t.Parallel()
	disk, tasks := variedDisk(t)
	c := newCorruptible(t, disk)
	rng := testkit.Seeded(t)
	lost, repaired := 0, 0
	for begun := time.Now(); repaired < 8 || time.Since(begun) < *corruptFor; {
		name := c.Files[rng.IntN(len(c.Files))]
		if path.Base(name) == manifest.Name {
			continue
		}
		bit := rng.IntN(8 * len(c.Content[name]))
		what := fmt.Sprintf("%s, bit %d", name, bit)
		disk := c.Flip(t, name, bit)
		r := verifyImage(t, disk, false)
		if r.OK() { // in a table that is no part of the store, or in padding
			continue
		}
		for _, p := range r.Problems {
			require.True(t, strings.HasPrefix(name, path.Join("queue", p.File)), "%s: %v", what, p)
			require.True(t, p.Repairable, "%s: %v", what, p)
		}
		dir := path.Dir(name)
		mayLose := make(map[ID]bool)
		if path.Ext(name) == ".sst" {
			mayLose = unreadable(t, disk, dir, recordsIn(t, c.Disk, dir))
		}
		r = verifyImage(t, disk, true)
		if !r.OK() { // the name of a lane is lost: its tasks have another one, of which their scopes do not tell
			require.Contains(t, fmt.Sprint(r.Problems), "has scope", what)
			continue
		}
		repaired++
		got := tasksOf(t, disk)
		if path.Ext(name) != ".sst" {
			require.Equal(t, tasks, got, what)
		} else {
			for id, info := range got {
				require.Contains(t, tasks, id)
				if strings.HasPrefix(info.Tenant, "recovered-") || strings.HasPrefix(info.Queue, "recovered-") {
					continue
				}
				if was := tasks[id].State; info.State == Ready && (was == Leased || was == Blocked) {
					continue // the lease is lost, or the task for which it waited
				}
				require.Equal(t, tasks[id], info, what)
			}
		}
		for id := range tasks {
			require.True(t, got[id] != nil || mayLose[id], "%s: %s is lost", what, id)
		}
		lost += len(tasks) - len(got)
	}
	t.Logf("%d repaired, which lost %d tasks", repaired, lost)
}

// recordsIn is the keys of the tasks that the store of a shard has.
func recordsIn(t *testing.T, disk vfs.FS, dir string) map[ID][]byte {
	t.Helper()
	db, err := store.OpenForReading(disk, dir)
	require.NoError(t, err)
	found := make(map[ID][]byte)
	for _, prefix := range recordRanges {
		require.NoError(t, schema.Scan(db, prefix, func(key, _ []byte) error {
			id, _, err := keys.ParsePlaceKey(key)
			found[id] = bytes.Clone(key)
			return err
		}))
	}
	require.NoError(t, db.Close())
	return found
}

// unreadable is those of the tasks of a shard of which its store, which is damaged, does not give
// the record.
func unreadable(t *testing.T, disk vfs.FS, dir string, records map[ID][]byte) map[ID]bool {
	t.Helper()
	db, err := store.OpenForReading(disk, dir)
	require.NoError(t, err)
	lost := make(map[ID]bool)
	for id, key := range records {
		it, err := db.NewIter(&pebble.IterOptions{LowerBound: key, UpperBound: append(bytes.Clone(key), 0)})
		require.NoError(t, err)
		found := it.First()
		if err := it.Close(); err != nil {
			lost[id] = true
		} else {
			require.True(t, found)
		}
	}
	require.NoError(t, db.Close())
	return lost
}
