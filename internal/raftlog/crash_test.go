package raftlog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// onLogs returns a file system that calls before ahead of each creation, write and sync of a log of
// Pebble. An error of before becomes the error of the operation.
func onLogs(base vfs.FS, before func(op string) error) vfs.FS {
	return &testkit.HookFS{FS: base, Before: func(op, name string) error {
		if !strings.HasSuffix(name, ".log") || op == "close" || op == "remove" {
			return nil
		}
		return before(op)
	}}
}

// TestGroupsShareSync: the next sync makes all entries durable that groups store during a sync.
func TestGroupsShareSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const groups = 10
		var syncs atomic.Int64
		gate := make(chan struct{})
		close(gate)
		s := open(t, onLogs(crashfs.New(), func(op string) error {
			if op == "sync" {
				syncs.Add(1)
				<-gate
			}
			return nil
		}), Options{})
		gate = make(chan struct{})
		syncs.Store(0)
		var done atomic.Int64
		for n := range uint32(groups) {
			g := group(t, s, n)
			go func() {
				require.NoError(t, g.StoreLogs(entries(1, 1, 5)))
				done.Add(1)
			}()
			synctest.Wait()
		}
		require.Zero(t, done.Load(), "acknowledged before the sync")
		require.EqualValues(t, 1, syncs.Load())
		close(gate)
		synctest.Wait()
		require.EqualValues(t, groups, done.Load())
		require.EqualValues(t, 2, syncs.Load())
		require.NoError(t, s.Close())
	})
}

// contents returns all groups' logs as indexes and terms, and checks that every entry can be read.
func contents(t *testing.T, s *Store, groups int) string {
	var b strings.Builder
	for n := range uint32(groups) {
		g := group(t, s, n)
		first, last := g.bounds()
		fmt.Fprintf(&b, "group %d from %d:", n, first)
		for i := first; i <= last && first > 0; i++ {
			var l raft.Log
			require.NoError(t, g.GetLog(i, &l), "group %d, index %d", n, i)
			require.Equal(t, *entries(l.Term, i, i)[0], l)
			fmt.Fprintf(&b, " %d", l.Term)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// TestCrash changes the logs of several groups, and takes images of the disk ahead of each write
// and sync of the log, and after each change. An image holds the state after some change: no older
// than the last acknowledged entries if the level survives this kind of crash.
func TestCrash(t *testing.T) {
	const groups = 3
	for _, tc := range []struct {
		name    string
		sync    Sync
		percent []int // of the bytes without a sync that survive, one of these
		keeps   bool  // the acknowledged entries
	}{
		{"disk, power loss", SyncDisk, []int{0, 30, 70, 100}, true},
		{"process, kill", SyncProcess, []int{100}, true},
		{"process, power loss", SyncProcess, []int{0, 30, 70, 100}, false},
		{"none, power loss", SyncNone, []int{0, 30, 70, 100}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, uint64(tc.sync)))
			steps := rand.New(rand.NewPCG(2, 0)) // mu guards the other generator
			disk := crashfs.New()
			states := []string{contents(t, open(t, crashfs.New(), Options{}), groups)}
			acked := 0 // the state of the last acknowledged entries
			type image struct {
				fs          vfs.FS
				acked, last int
			}
			var mu sync.Mutex // Pebble writes its log from another goroutine
			var images []image
			lost := 0
			snap := func(odds, acked, last int) {
				mu.Lock()
				defer mu.Unlock()
				if rng.IntN(odds) > 0 {
					return
				}
				percent := tc.percent[rng.IntN(len(tc.percent))]
				images = append(images, image{
					disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng}), acked, last,
				})
			}
			// the possible states of an image of the hook
			var ackedNow, lastNow atomic.Int64
			s := open(t, onLogs(disk, func(string) error {
				snap(4, int(ackedNow.Load()), int(lastNow.Load()))
				return nil
			}), Options{Sync: tc.sync, CacheBytes: 1000})
			var logs [groups]*Group
			for n := range logs {
				logs[n] = group(t, s, uint32(n))
			}
			model := make([][2]uint64, groups) // first and last
			terms := make([][]uint64, groups)
			for term := uint64(1); term <= 400; term++ {
				n := steps.IntN(groups)
				first, last := model[n][0], model[n][1]
				var change func() error
				switch op := steps.IntN(10); {
				case op == 0 && first > 0: // prefix
					through := first + steps.Uint64N(last-first+1)
					change = func() error { return logs[n].DeleteRange(first, through) }
					terms[n] = terms[n][through-first+1:]
					model[n][0] = through + 1
				case op == 1 && first > 0: // suffix
					from := first + steps.Uint64N(last-first+1)
					change = func() error { return logs[n].DeleteRange(from, last) }
					terms[n] = terms[n][:from-first]
					model[n][1] = from - 1
				default:
					from := last + 1
					if op == 2 { // after a snapshot
						from += 3
						terms[n], first = nil, 0
					}
					through := from + steps.Uint64N(5)
					change = func() error { return logs[n].StoreLogs(entries(term, from, through)) }
					for range through - from + 1 {
						terms[n] = append(terms[n][:len(terms[n]):len(terms[n])], term)
					}
					if first == 0 {
						model[n][0] = from
					}
					model[n][1] = through
				}
				stores := len(terms[n]) > 0 && terms[n][len(terms[n])-1] == term
				if len(terms[n]) == 0 {
					model[n] = [2]uint64{}
				}
				var b strings.Builder
				for n := range groups {
					fmt.Fprintf(&b, "group %d from %d:", n, model[n][0])
					for _, term := range terms[n] {
						fmt.Fprintf(&b, " %d", term)
					}
					b.WriteString("\n")
				}
				states = append(states, b.String())
				lastNow.Store(int64(len(states) - 1))
				require.NoError(t, change())
				if stores {
					acked = len(states) - 1
					ackedNow.Store(int64(acked))
				}
				snap(4, acked, len(states)-1)
			}
			require.NoError(t, s.Close())

			require.Greater(t, len(images), 50)
			for i, img := range images {
				s := open(t, img.fs, Options{Sync: tc.sync})
				got := contents(t, s, groups)
				found := -1
				for k := img.last; k >= 0; k-- {
					if states[k] == got {
						found = k
						break
					}
				}
				require.GreaterOrEqual(t, found, 0, "image %d, %d to %d: no prefix:\n%s", i, img.acked, img.last, got)
				if found < img.acked {
					lost++
				}
				require.NoError(t, s.Close())
			}
			if tc.keeps {
				require.Zero(t, lost, "images that have lost what was acknowledged")
			} else {
				require.NotZero(t, lost, "the images show nothing")
			}
			// The closed store has everything, at each level.
			s = open(t, disk.CrashClone(vfs.CrashCloneCfg{}), Options{})
			require.Equal(t, states[len(states)-1], contents(t, s, groups))
			require.NoError(t, s.Close())
		})
	}
}

// TestSyncToDisk: while it is on, stored entries survive a power loss, with all entries before
// them, at any level.
func TestSyncToDisk(t *testing.T) {
	for _, sync := range []Sync{SyncDisk, SyncProcess, SyncNone} {
		disk := crashfs.New()
		s := open(t, disk, Options{Sync: sync})
		last := func() uint64 {
			after := open(t, disk.CrashClone(vfs.CrashCloneCfg{}), Options{Sync: sync})
			last, err := group(t, after, 1).LastIndex()
			require.NoError(t, errors.Join(err, after.Close()))
			return last
		}
		g := group(t, s, 1)
		for i, step := range []struct {
			on   bool
			want uint64
		}{{false, 0}, {true, 2}, {true, 3}, {false, 3}} {
			s.SyncToDisk(step.on)
			index := uint64(i) + 1
			require.NoError(t, g.StoreLogs(entries(1, index, index)))
			if sync == SyncDisk {
				step.want = index
			}
			require.Equal(t, step.want, last(), "level %d, entry %d", sync, index)
		}
		require.NoError(t, s.Close())
	}
}

// TestFailedWrite: after a failed write of the log, concurrent calls of all groups fail, and none
// hangs. No failed entry counts as stored.
func TestFailedWrite(t *testing.T) {
	for _, sync := range []Sync{SyncDisk, SyncProcess, SyncNone} {
		for _, op := range []string{"write", "sync", "create"} {
			if op == "sync" && sync != SyncDisk {
				continue
			}
			t.Run(fmt.Sprintf("sync=%d/%s", sync, op), func(t *testing.T) {
				const groups = 8
				mem := crashfs.New()
				var broken atomic.Bool
				s := open(t, onLogs(mem, func(o string) error {
					if o == op && broken.Load() {
						return testkit.ErrBroken
					}
					return nil
				}), Options{Sync: sync, CacheBytes: 1})
				var acked [groups]uint64
				type result struct {
					n   int
					err error
				}
				results := make(chan result)
				var logs [groups]*Group
				var written atomic.Int64
				for n := range logs {
					logs[n] = group(t, s, uint32(n))
					require.NoError(t, logs[n].StoreLogs(entries(1, 1, 1)))
					acked[n] = 1
				}
				for n := range logs {
					go func() {
						for i := uint64(2); ; i++ {
							if err := logs[n].StoreLogs(entries(1, i, i)); err != nil {
								results <- result{n, err}
								return
							}
							acked[n] = i
							if written.Add(1) == 500 {
								broken.Store(true)
							}
							if i%10 == 0 {
								if err := logs[n].DeleteRange(1, i-5); err != nil {
									results <- result{n, err}
									return
								}
							}
						}
					}()
				}
				for range logs {
					select {
					case r := <-results:
						require.ErrorIs(t, r.err, ErrFailed)
						require.ErrorContains(t, r.err, testkit.ErrBroken.Error())
					case <-time.After(20 * time.Second):
						require.FailNow(t, "hangs")
					}
				}
				for n, g := range logs {
					last, err := g.LastIndex()
					require.NoError(t, err)
					require.Equal(t, acked[n], last)
					require.ErrorIs(t, g.StoreLogs(entries(1, last+1, last+1)), ErrFailed)
					require.ErrorIs(t, g.DeleteRange(last, last), ErrFailed)
				}
				closed := make(chan error)
				go func() { closed <- s.Close() }()
				select {
				case err := <-closed:
					require.ErrorIs(t, err, ErrFailed)
				case <-time.After(20 * time.Second):
					require.FailNow(t, "Close hangs")
				}

				percent := map[Sync]int{SyncDisk: 0, SyncProcess: 100, SyncNone: 100}[sync]
				if op == "create" {
					_, err := Open("raft", Options{FS: onLogs(mem, func(string) error { return testkit.ErrBroken })})
					require.ErrorIs(t, err, testkit.ErrBroken)
				}
				s = open(t, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(1, 2))}), Options{})
				for n := range uint32(groups) {
					last, err := group(t, s, n).LastIndex()
					require.NoError(t, err)
					if sync != SyncNone {
						require.GreaterOrEqual(t, last, acked[n])
					}
				}
				require.NoError(t, s.Close())
			})
		}
	}
}
