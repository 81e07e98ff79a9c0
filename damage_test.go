package codeq

import (
	"runtime"
	"testing"
)

// abandonsStores is for tests in which stores of Pebble cannot be closed. The log writer of such a
// store points to the last batch that it has synced; if another store gets this batch from Pebble's
// pool, it is kept as well, with its log writer, and so each store of the tests that follow. So no
// other test runs beside this one, and the pool is empty after it.
func abandonsStores(t *testing.T) {
	t.Cleanup(func() {
		runtime.GC() // keeps what is in pools once
		runtime.GC()
	})
}
