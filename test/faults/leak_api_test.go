package faults_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestNothingLeft: nothing runs and nothing is open when Close has returned, whatever
// was in use; that Close returns no error says so of the iterators and snapshots of Pebble. In
// the bubbles of other tests a goroutine left behind is a failure by itself.
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
