package killtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/platform"
	"codeq/internal/testkit"
)

// The hung disk test runs three nodes as processes; they produce all the time. The disk of one node
// stops answering: its file system blocks, or the kernel freezes it. The other nodes lead its
// shards, and no call takes longer than CallTimeout.

const (
	hungShards = 3
	hungQueue  = "hung"
	hungCall   = 10 * time.Second // Cluster.CallTimeout
	hungStall  = 5 * time.Second  // Options.StallAfter
)

// hungConfig is the configuration of a node for its start.
type hungConfig struct {
	Dir   string
	Self  int
	Peers []codeq.Peer
}

// hungReport is the report of a node, twenty times a second.
type hungReport struct {
	Node      int
	Leads     []int         // shards
	Stalled   bool          // by Health
	Status    time.Duration // duration of Health and ClusterStatus
	Longest   time.Duration // the longest duration of a produce
	Acked     int
	Uncertain int
	Refused   int    // certainly not stored
	Error     string // any other
	Stored    uint64 // at the last request for it
	Counts    int    // the number of these requests
}

// hungFS is the file system of a node. Writes and syncs block while blocked is locked.
type hungFS struct {
	blocked sync.RWMutex
}

func (h *hungFS) fs() vfs.FS {
	return &testkit.HookFS{FS: platform.FS, Before: func(string, string) error {
		h.blocked.RLock()
		defer h.blocked.RUnlock()
		return nil
	}}
}

// hungChild is a node. It obeys the lines of its standard input, and ends with it.
func hungChild(c hungConfig) error {
	var disk hungFS
	o := &codeq.Options{
		Shards: hungShards, Logger: childLogger(),
		Cluster: &codeq.Cluster{
			Node: c.Peers[c.Self].Node, Listen: c.Peers[c.Self].Address, Peers: c.Peers, CallTimeout: hungCall,
		},
	}
	inspect.Options(o).FS = disk.fs()
	q, err := codeq.Open(c.Dir, o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var mu sync.Mutex // guards sum
	sum := hungReport{Node: c.Self}
	var stop atomic.Bool
	var produces sync.WaitGroup
	for range 4 {
		produces.Go(func() {
			for !stop.Load() {
				began := time.Now()
				_, err := q.Produce(context.Background(), codeq.Task{Queue: hungQueue})
				mu.Lock()
				sum.Longest = max(sum.Longest, time.Since(began))
				switch {
				case err == nil:
					sum.Acked++
				case errors.Is(err, codeq.ErrUncertain):
					sum.Uncertain++
				case errors.Is(err, codeq.ErrNotLeader):
					sum.Refused++
				default:
					sum.Error = err.Error()
				}
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	go func() {
		for out := json.NewEncoder(os.Stdout); ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
			began := time.Now()
			stalled := errors.Is(q.Health(ctx), codeq.ErrStalled)
			st, err := q.ClusterStatus(ctx)
			if err != nil {
				continue
			}
			var leads []int
			for i, sh := range st.Shards {
				if r := replicaOf(sh, o.Cluster.Node); r != nil && r.Serves {
					leads = append(leads, i)
				}
			}
			mu.Lock()
			sum.Leads, sum.Stalled, sum.Status = leads, stalled, time.Since(began)
			report := sum
			mu.Unlock()
			if out.Encode(report) != nil {
				os.Exit(1) // the parent has ended
			}
		}
	}()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "hang":
			disk.blocked.Lock()
		case "answer":
			disk.blocked.Unlock()
		case "count":
			stop.Store(true)
			produces.Wait()
			stats, err := q.Stats(ctx)
			if err != nil {
				return err
			}
			mu.Lock()
			sum.Stored, sum.Counts = stats[hungQueue].Total(), sum.Counts+1
			mu.Unlock()
		}
	}
	cancel()
	return q.Close()
}

// hungNodes are the processes.
type hungNodes struct {
	mu      sync.Mutex // guards the fields below
	last    [3]hungReport
	changed chan struct{} // closed and replaced by each report
	nodes   [3]*child
}

func (h *hungNodes) start(t *testing.T, c hungConfig) {
	node := start(t, command(t, thisBuild(t), "hung", c), reports(func(r hungReport) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.last[r.Node] = r
		close(h.changed)
		h.changed = make(chan struct{})
	}))
	h.nodes[c.Self] = node
	t.Cleanup(func() {
		_ = node.stdin.Close()
		_ = node.wait()
	})
}

// await waits until the last reports are as wanted, and returns them.
func (h *hungNodes) await(t *testing.T, what string, wanted func(*[3]hungReport) bool) [3]hungReport {
	t.Helper()
	for end := time.After(90 * time.Second); ; {
		h.mu.Lock()
		last, changed := h.last, h.changed
		h.mu.Unlock()
		for _, r := range last {
			require.Empty(t, r.Error)
		}
		if wanted(&last) {
			return last
		}
		select {
		case <-changed:
		case <-end:
			t.Fatalf("%s: %+v", what, last)
		}
	}
}

func (h *hungNodes) say(t *testing.T, node int, word string) {
	_, err := fmt.Fprintln(h.nodes[node].stdin, word)
	require.NoError(t, err)
}

func TestHungDisk(t *testing.T) {
	t.Parallel()
	t.Run("blocks", func(t *testing.T) {
		t.Parallel()
		var h hungNodes
		testHungDisk(t, &h, t.TempDir(), func() { h.say(t, 0, "hang") }, func() { h.say(t, 0, "answer") })
	})
	// The kernel freezes the file system of one node: also bbolt, with the votes, hangs.
	t.Run("frozen", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		image, at := filepath.Join(dir, "image"), filepath.Join(dir, "disk")
		require.NoError(t, os.WriteFile(image, nil, 0o600))
		require.NoError(t, os.Truncate(image, 1<<30))
		require.NoError(t, os.Mkdir(at, 0o700))
		run := func(name string, args ...string) error {
			out, err := exec.Command(name, args...).CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%s %v: %w: %s", name, args, err, out)
			}
			return err
		}
		for _, cmd := range [][]string{{"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, at}} {
			if err := run(cmd[0], cmd[1:]...); err != nil {
				t.Skip("it takes root and a loop device: ", err)
			}
		}
		t.Cleanup(func() { require.NoError(t, run("umount", at)) }) // after the processes
		if err := run("fsfreeze", "-f", at); err != nil {
			t.Skip("no fsfreeze: ", err)
		}
		require.NoError(t, run("fsfreeze", "-u", at))
		var frozen atomic.Bool
		thaw := func() {
			if frozen.Swap(false) {
				require.NoError(t, run("fsfreeze", "-u", at))
			}
		}
		var h hungNodes
		testHungDisk(t, &h, filepath.Join(at, "queue"), func() {
			frozen.Store(true)
			t.Cleanup(thaw) // before the wait for the processes
			require.NoError(t, run("fsfreeze", "-f", at))
		}, thaw)
	})
}

// testHungDisk makes the disk of the first node hang, with the given directory, and then answer
// again.
func testHungDisk(t *testing.T, h *hungNodes, dir string, hang, answer func()) {
	dirs := []string{dir, t.TempDir(), t.TempDir()}
	h.changed = make(chan struct{})
	peers := threePeers(t, testkit.Seeded(t).IntN)
	for i := range dirs {
		h.start(t, hungConfig{dirs[i], i, peers})
	}
	all := func(last *[3]hungReport, but int) bool {
		led := make(map[int]bool)
		for i, r := range last {
			for _, shard := range r.Leads {
				led[shard] = led[shard] || i != but
			}
		}
		for shard := range hungShards {
			if !led[shard] {
				return false
			}
		}
		return true
	}
	before := h.await(t, "all shards are led, one by the first node", func(last *[3]hungReport) bool {
		return all(last, -1) && len(last[0].Leads) > 0 && slices.ContainsFunc(last[1:], func(r hungReport) bool { return r.Acked > 100 })
	})

	began := time.Now()
	hang()
	after := h.await(t, "others lead all shards", func(last *[3]hungReport) bool { return all(last, 0) && len(last[0].Leads) == 0 && last[0].Stalled })
	took := time.Since(began)
	t.Logf("after %v the others lead shards %v", took.Round(10*time.Millisecond), before[0].Leads)
	require.Less(t, took, hungStall+5*time.Second)
	h.await(t, "calls on all nodes work", func(last *[3]hungReport) bool {
		for i, r := range last {
			if r.Acked < after[i].Acked+100 || r.Status > 3*time.Second {
				return false
			}
		}
		return last[0].Stalled
	})
	answer()
	h.await(t, "the disk answers", func(last *[3]hungReport) bool { return !last[0].Stalled })
	h.await(t, "the node leads its share again", func(last *[3]hungReport) bool { return len(last[0].Leads) > 0 })

	var sum hungReport
	for i := range dirs {
		h.say(t, i, "count")
	}
	counted := func(times int) func(*[3]hungReport) bool {
		return func(last *[3]hungReport) bool {
			return !slices.ContainsFunc(last[:], func(r hungReport) bool { return r.Counts < times })
		}
	}
	h.await(t, "nobody produces any more", counted(1))
	for i := range dirs {
		h.say(t, i, "count")
	}
	last := h.await(t, "all have counted", counted(2))
	for _, r := range last {
		sum.Acked, sum.Uncertain, sum.Refused = sum.Acked+r.Acked, sum.Uncertain+r.Uncertain, sum.Refused+r.Refused
		sum.Longest = max(sum.Longest, r.Longest)
	}
	t.Logf("acknowledged %d, uncertain %d, refused %d, the longest call took %v", sum.Acked, sum.Uncertain, sum.Refused, sum.Longest.Round(10*time.Millisecond))
	require.GreaterOrEqual(t, last[0].Stored, uint64(sum.Acked))
	require.LessOrEqual(t, last[0].Stored, uint64(sum.Acked+sum.Uncertain))
	require.Less(t, sum.Longest, hungCall+2*time.Second)
}
