package faults_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestNothingLeft: after Close, no goroutine runs and no file is open, whatever was in use. For the
// iterators and snapshots of Pebble, the proof is that Close returns no error. In other tests, the
// bubble itself reports a leaked goroutine.
func TestNothingLeft(t *testing.T) {
	before := testkit.WatchLeaks()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2, Durability: level, MemTableBytes: 256 << 10})
		require.NoError(t, err)
		wait := queuetest.UseEverything(t, q)
		require.NoError(t, q.Close())
		wait()
		before.Require(t, "at durability %s", level)
	}
}
