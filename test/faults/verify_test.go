package faults_test

import (
	"fmt"
	"path"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestRepairOfFiles flips bits in the files of a queue and repairs it: the queue then has its
// earlier contents.
func TestRepairOfFiles(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk, tasks := queuetest.VariedDisk(t)
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
			r := queuetest.VerifyImage(t, disk, false)
			if r.OK() { // the bit is in a table outside of the store, or in padding
				continue
			}
			for _, p := range r.Problems {
				require.True(t, strings.HasPrefix(name, path.Join("queue", p.File)), "%s: %v", what, p)
				require.True(t, p.Repairable, "%s: %v", what, p)
			}
			dir := path.Dir(name)
			mayLose := make(map[keys.ID]bool)
			if path.Ext(name) == ".sst" {
				mayLose = simtest.UnreadableRecords(t, disk, dir, simtest.StoreRecords(t, c.Disk, dir))
			}
			r = queuetest.VerifyImage(t, disk, true)
			if !r.OK() { // a lane has lost its name: its tasks get one that is not in their scopes
				require.Contains(t, fmt.Sprint(r.Problems), "has scope", what)
				continue
			}
			repaired++
			got := queuetest.TasksOf(t, disk)
			if path.Ext(name) != ".sst" {
				require.Equal(t, tasks, got, what)
			} else {
				for id, info := range got {
					require.Contains(t, tasks, id)
					if strings.HasPrefix(info.Tenant, "recovered-") || strings.HasPrefix(info.Queue, "recovered-") {
						continue
					}
					if was := tasks[id].State; info.State == codeq.Ready && (was == codeq.Leased || was == codeq.Blocked) {
						continue // the lease is lost, or the task that it waited for
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
	})
}
