package faults_test

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/test/queuetest"
)

// TestCrashLastsUntilStored: a crash is over when a process has stored all tasks that it took back,
// and has closed the queue. If a shard has failed, the crash is not over.
func TestCrashLastsUntilStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := queuetest.OpenForRun(t, *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: disk}))
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Local: true})
		require.NoError(t, err)
		for _, fails := range []bool{true, false} {
			disk := disk.Clone()
			q := queuetest.OpenForRun(t, *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: disk}))
			synctest.Wait()
			if fails {
				queuetest.FailShard(t, q, 0)
				require.ErrorIs(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.Paused = true }), codeq.ErrUncertain)
			}
			require.Equal(t, fails, q.Close() != nil)
			m, err := manifest.Read(disk, "q")
			require.NoError(t, err)
			require.Equal(t, fails, m.Crashed)
		}
	})
}
