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

// Leaks finds goroutines and files left by a test.
type Leaks struct{ goroutines, files map[string]string }

// WatchLeaks begins to watch. REQUIRES: no other test runs at the same time.
func WatchLeaks() *Leaks { return &Leaks{goroutines(), descriptors()} }

// Require fails if there are new goroutines or files since WatchLeaks.
func (l *Leaks) Require(t testing.TB, when string, args ...any) {
	t.Helper()
	var left []string
	for range 1000 { // a goroutine may need a moment to end
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

// goroutines returns the stacks of the goroutines that run code of this module or its dependencies,
// by their names, without the caller's.
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

// descriptors returns the open file descriptors of the process, sockets included; none without
// /proc.
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

// AbandonsStores is for tests with Pebble stores that cannot be closed. The log writer of such a
// store points to its last synced batch; if another store got this batch from Pebble's pool, it
// would stay in memory as well, and so would each store of later tests. So no other test may run
// beside this one, and the pool is emptied after it.
func AbandonsStores(t testing.TB) {
	t.Cleanup(func() {
		runtime.GC() // pools survive one collection
		runtime.GC()
	})
}
