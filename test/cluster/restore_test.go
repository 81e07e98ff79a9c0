package cluster_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// behindCase runs a story with a node that lacks log entries that its leader has dropped. The node
// gets no snapshot, because its disk is full.
func behindCase(t *testing.T, story func(t *testing.T, c *simCluster, leader, behind *simNode, ended codeq.ID)) {
	simCase(t, codeq.Options{MinFreeBytes: testkit.MinFree}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // until the leader is the home node
		leader, behind := c.lead()
		q := simQueue(leader)
		ended := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		_, err := simQueue(behind).Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		time.Sleep(time.Second)
		behind.fill(testkit.MinFree/4 - 1)
		time.Sleep(store.LookEvery * time.Millisecond)
		require.NoError(t, q.Complete(t.Context(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "b"})
		}
		c.snapshot(leader, 0, 5)
		time.Sleep(time.Second)
		story(t, c, leader, behind, ended)
	})
}

// TestAwaitOfBehindNode: an Await of an ended task waits on a node that has not applied the end
// yet. It returns when the node has received the leader's state, or is closed.
func TestAwaitOfBehindNode(t *testing.T) {
	t.Parallel()
	for _, closes := range []bool{false, true} {
		t.Run(fmt.Sprint("closes ", closes), func(t *testing.T) {
			behindCase(t, func(t *testing.T, c *simCluster, leader, behind *simNode, ended codeq.ID) {
				time.Sleep(11 * time.Minute) // until the leader no longer remembers the end
				told := make(chan error, 1)
				go func() {
					_, err := simQueue(behind).Await(t.Context(), ended)
					told <- err
				}()
				time.Sleep(10 * time.Second)
				require.Empty(t, told)
				if closes {
					require.NoError(t, behind.close())
				} else {
					behind.fill(simtest.DiskSize)
					time.Sleep(12 * time.Second) // Raft tries a snapshot again after this time
					require.Equal(t, inspect.Of(simQueue(leader)).Group(0).Applied(), inspect.Of(simQueue(behind)).Group(0).Applied())
				}
				synctest.Wait()
				require.Len(t, told, 1)
				require.ErrorIs(t, <-told, codeq.ErrNotFound)
			})
		})
	}
}

// TestCloseAmidRestore: Close also closes a store that a snapshot opens during Close. On a full
// disk, Close does not wait.
func TestCloseAmidRestore(t *testing.T) {
	t.Parallel()
	for _, full := range []bool{false, true} {
		t.Run(fmt.Sprint("full ", full), func(t *testing.T) {
			behindCase(t, func(t *testing.T, c *simCluster, _, behind *simNode, _ codeq.ID) {
				dir := manifest.ShardDir(behind.machine.Disk(), "queue", 0)
				var opens atomic.Bool
				answer := behind.hang(func(op, name string) bool {
					hangs := op == "create" && strings.HasPrefix(name, dir+"/MANIFEST-")
					opens.Store(opens.Load() || hangs)
					return hangs
				})
				behind.fill(simtest.DiskSize)
				for !opens.Load() {
					time.Sleep(100 * time.Millisecond)
				}
				closed := make(chan error, 1)
				go func() { closed <- behind.close() }()
				time.Sleep(time.Second)
				if full {
					behind.life.Limit(1<<20, false)
				}
				answer()
				select {
				case err := <-closed:
					require.NoError(t, err)
				case <-time.After(time.Minute):
					t.Fatal("Close waits")
				}
			})
		})
	}
}

// TestFailedRestore: a replica fails if its store cannot be replaced, and is closed once.
func TestFailedRestore(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"rename", "open"} {
		t.Run(where, func(t *testing.T) {
			behindCase(t, func(t *testing.T, c *simCluster, _, behind *simNode, _ codeq.ID) {
				dir := manifest.ShardDir(behind.machine.Disk(), "queue", 0)
				behind.breakDisk(func(op, name string) bool {
					if where == "rename" {
						return op == "rename" && name == dir
					}
					return op == "create" && strings.HasPrefix(name, dir+"/MANIFEST-")
				})
				g := inspect.Of(simQueue(behind)).Group(0)
				behind.fill(simtest.DiskSize)
				time.Sleep(12 * time.Second)
				require.ErrorIs(t, g.Failure(), queuetest.ErrBroken)
				err := behind.close()
				require.ErrorIs(t, err, codeq.ErrFailed)
				require.NotContains(t, err.Error(), "panic")
			})
		})
	}
}
