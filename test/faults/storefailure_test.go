package faults_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestStoreFailureInBackground: while no table can be written, logs keep the acknowledged changes.
func TestStoreFailureInBackground(t *testing.T) {
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, "begin", ".sst", queuetest.ErrBroken)
			f := queuetest.NewFailingQueue(t, level, fs)
			broken.Store(true)
			flushed, err := queuetest.StoreOf(f.Queue, 0).DB().AsyncFlush()
			require.NoError(t, err)
			for range 10 {
				require.NoError(t, f.Store(10))
			}
			select {
			case <-flushed:
				require.Fail(t, "the flush has succeeded")
			default:
			}
			broken.Store(false)
			require.NoError(t, testkit.InTime(t, "flush", func() error { <-flushed; return nil }))
			require.NoError(t, testkit.InTime(t, "Close", f.Close))
			f.RequireStored(disk, true)
		})
	}
}
