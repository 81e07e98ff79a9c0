package testkit

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Leaks finds goroutines and files that were not there when a test began.
type Leaks struct{ goroutines, files map[string]string }

// WatchLeaks begins to watch. REQUIRES: no other test runs at the same time.
func WatchLeaks() *Leaks { return &Leaks{goroutines(), descriptors()} }

// Require fails if there is something that was not there at the beginning.
func (l *Leaks) Require(t testing.TB, when string, args ...any) {
	t.Helper()
	var left []string
	for range 1000 { // a goroutine that has said its last word may not be gone yet
		left = left[:0]
		for _, had := range []struct{ before, now map[string]string }{
			{l.goroutines, goroutines()}, {l.files, descriptors()},
		} {
			for id, what := range had.now {
				if had.before[id] == "" {
					left = append(left, what)
				}
			}
		}
		if len(left) == 0 {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	t.Fatalf("%s: %d goroutines and files left:\n%s", fmt.Sprintf(when, args...), len(left), strings.Join(left, "\n\n"))
}

// goroutines returns the stacks of the goroutines that run code of this module
// or of what it is built on, by their names, without that of the caller.
func goroutines() map[string]string {
	buf := make([]byte, 1<<22)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	found := make(map[string]string)
	for _, stack := range all[1:] {
		for _, ours := range []string{"codeq.", "codeq/", "cockroachdb/", "hashicorp/raft", "bbolt"} {
			if strings.Contains(stack, ours) {
				name, _, _ := strings.Cut(stack, " [")
				found[name] = stack
			}
		}
	}
	return found
}

// descriptors returns what the open file descriptors of the process are, sockets
// too; nothing where the system does not tell.
func descriptors() map[string]string {
	const dir = "/proc/self/fd"
	found := make(map[string]string)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return found
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err == nil && !strings.HasSuffix(target, "/fd") && !strings.HasPrefix(target, "anon_inode:") {
			found[e.Name()+" "+target] = "file " + target
		}
	}
	return found
}

// AbandonsStores is for tests in which stores of Pebble cannot be closed. The log writer of such a
// store points to the last batch that it has synced; if another store gets this batch from Pebble's
// pool, it is kept as well, with its log writer, and so each store of the tests that follow. So no
// other test runs beside this one, and the pool is empty after it.
func AbandonsStores(t testing.TB) {
	t.Cleanup(func() {
		runtime.GC() // keeps what is in pools once
		runtime.GC()
	})
}
