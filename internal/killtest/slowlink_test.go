package killtest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"codeq"
	"codeq/internal/testkit"
)

// The slow link test runs three nodes as processes. One node starts when the others have gigabytes
// of tasks. Its links have a limited rate, and the others go on producing.

const (
	slowMemory  = 300_000_000 // of a process
	slowBehind  = 2_000_000_000
	slowLoad    = 12 << 20 // bytes per second, at most
	slowPayload = 64 << 10
)

// slowConfig is the configuration of a node for its start.
type slowConfig struct {
	Dir    string
	Self   int
	Peers  []codeq.Peer
	Shards int // 0: the default
	Rate   int // incoming bytes per second; 0: no limit
	Fill   int // bytes to produce at once
	Load   int // bytes per second to produce after that
}

// slowReport is the report of a node, ten times a second.
type slowReport struct {
	Node   int
	Filled bool
	Memory int64            // resident bytes
	Heap   int64            // bytes of Go's heap
	Lacks  map[string]int64 // entries of all shards, by node that answers
}

// slowListener limits the rate of all connections together.
type slowListener struct {
	net.Listener
	limit *rate.Limiter
}

const slowRead = 1 << 20

func (l slowListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return slowConn{c, l.limit}, nil
}

type slowConn struct {
	net.Conn
	limit *rate.Limiter
}

func (c slowConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p[:min(len(p), slowRead)])
	if n > 0 {
		_ = c.limit.WaitN(context.Background(), n) // n is at most the burst
	}
	return n, err
}

// slowChild is a node. It ends with its standard input.
func slowChild(c slowConfig) error {
	l, err := net.Listen("tcp", c.Peers[c.Self].Address)
	if err != nil {
		return err
	}
	if c.Rate > 0 {
		l = slowListener{l, rate.NewLimiter(rate.Limit(c.Rate), slowRead)}
	}
	q, err := codeq.Open(c.Dir, &codeq.Options{
		Shards: c.Shards, Durability: codeq.DurabilityProcess, Logger: childLogger(),
		Cluster: &codeq.Cluster{Node: c.Peers[c.Self].Node, Listener: l, Peers: c.Peers},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var filled atomic.Bool
	errs := make(chan error, 1)
	if c.Fill > 0 {
		go func() { errs <- slowProduce(ctx, q, c, &filled) }()
	}
	go slowReports(ctx, q, c.Self, &filled)
	ended := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, os.Stdin); ended <- err }()
	select {
	case err = <-errs:
	case err = <-ended:
	}
	cancel()
	return err
}

// slowProduce first produces the tasks that the new node lacks, and then produces at a rate.
func slowProduce(ctx context.Context, q *codeq.Queue, c slowConfig, filled *atomic.Bool) error {
	limit := rate.NewLimiter(rate.Limit(c.Load), 1<<20)
	batch := make([]codeq.Task, 1<<20/slowPayload)
	for i := range batch {
		batch[i] = codeq.Task{Queue: clusterQueue, Payload: make([]byte, slowPayload)}
	}
	for done := 0; ctx.Err() == nil; {
		for i := range batch {
			_, _ = rand.Read(batch[i].Payload) // never fails
		}
		if done >= c.Fill {
			filled.Store(true)
			if err := limit.WaitN(ctx, 1<<20); err != nil {
				return nil
			}
		}
		if _, err := q.ProduceBatch(ctx, batch); err != nil && ctx.Err() == nil {
			return fmt.Errorf("produce: %w", err)
		}
		done += 1 << 20
	}
	return nil
}

// slowReports writes the reports of the node until its end.
func slowReports(ctx context.Context, q *codeq.Queue, self int, filled *atomic.Bool) {
	for ; ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		r := slowReport{Node: self, Filled: filled.Load(), Memory: residentBytes(), Heap: heapBytes(), Lacks: map[string]int64{}}
		shards, err := statusOf(q)
		if err != nil {
			return // the queue has closed
		}
		known := map[string]int{}
		for _, shard := range shards {
			leader := replicaOf(shard, shard.Leader)
			for _, p := range shard.Replicas {
				if leader != nil && p.LastError == "" {
					r.Lacks[p.Node] += int64(leader.Applied) - int64(p.Applied)
					known[p.Node]++
				}
			}
		}
		maps.DeleteFunc(r.Lacks, func(node string, _ int64) bool { return known[node] < len(shards) })
		b, err := json.Marshal(r)
		if err == nil {
			_, err = os.Stdout.Write(append(b, '\n'))
		}
		if err != nil {
			os.Exit(1) // the parent has ended
		}
	}
}

// residentBytes is the memory in use by the process: the heap of Go, and of C.
func residentBytes() int64 {
	var pages, resident int64
	b, err := os.ReadFile("/proc/self/statm")
	if err == nil {
		_, _ = fmt.Sscan(string(b), &pages, &resident) // 0 elsewhere
	}
	return resident * int64(os.Getpagesize())
}

// heapBytes is the heap of Go within residentBytes, with the free part of the heap.
func heapBytes() int64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapSys - m.HeapReleased)
}

// TestSlowLink: a node that lacks gigabytes catches up over links of a limited rate, while the
// others go on producing. No node takes much memory for it.
func TestSlowLink(t *testing.T) {
	testkit.OnlyLong(t, "gigabytes over slow links")
	if runtime.GOOS != "linux" {
		t.Skip("memory is known on Linux")
	}
	for _, mb := range []int{110, 40, 10} {
		t.Run(fmt.Sprint(mb, " MB per second"), func(t *testing.T) { slowLink(t, mb*1e6, 0) })
		t.Run(fmt.Sprint(mb, " MB per second, one shard"), func(t *testing.T) { slowLink(t, mb*1e6, 1) })
	}
}

func slowLink(t *testing.T, limit, shards int) {
	dir := t.TempDir()
	c := slowConfig{Load: min(slowLoad, limit*3/10), Shards: shards}
	c.Peers = threePeers(t, testkit.Seeded(t).IntN)
	seen, over := make(chan slowReport), make(chan struct{})
	run := func(node int, c slowConfig) (end func()) {
		c.Self, c.Dir = node, filepath.Join(dir, c.Peers[node].Node)
		ending := make(chan struct{}) // its reports may have no reader any more
		p := start(t, command(t, thisBuild(t), "slow", c), reports(func(r slowReport) {
			select {
			case seen <- r:
			case <-ending:
			case <-over:
			}
		}))
		end = sync.OnceFunc(func() { close(ending); p.kill() })
		t.Cleanup(end)
		return end
	}
	defer close(over) // before the processes end
	// await returns when a report of the first node meets a condition.
	await := func(what string, limit time.Duration, holds func(r slowReport) bool) {
		t.Helper()
		for begun, last := time.Now(), (slowReport{}); ; {
			select {
			case r := <-seen:
				if r.Node == 0 {
					last = r
				}
				if holds(r) {
					return
				}
			case <-time.After(time.Minute):
			}
			require.Less(t, time.Since(begun), limit, "%s: %+v", what, last)
		}
	}

	first := c
	first.Fill = slowBehind
	run(0, first)
	run(1, c)
	away := run(2, c) // a cluster begins with all of its nodes
	await("the cluster begins", time.Minute, func(r slowReport) bool { return r.Node == 0 && len(r.Lacks) == 3 })
	away()
	var before [3]int64
	await("the tasks are there", 10*time.Minute, func(r slowReport) bool {
		before[r.Node] = max(before[r.Node], r.Memory)
		return r.Filled
	})
	begun := time.Now()
	slow := c
	slow.Rate = limit
	run(2, slow)
	var most, heap [3]int64
	behind := int64(0)
	await("the node catches up", 20*time.Minute, func(r slowReport) bool {
		most[r.Node], heap[r.Node] = max(most[r.Node], r.Memory), max(heap[r.Node], r.Heap)
		lacks, known := r.Lacks[c.Peers[2].Node]
		if r.Node == 0 && known {
			behind = max(behind, lacks)
		}
		return r.Node == 0 && known && behind > 1000 && lacks < 32
	})
	t.Logf("%d entries behind, caught up within %v; most memory of the nodes: %d, %d, %d MB, and in Go's heap %d, %d, %d; without the third %d, %d",
		behind, time.Since(begun).Round(time.Second), most[0]/1e6, most[1]/1e6, most[2]/1e6, heap[0]/1e6, heap[1]/1e6, heap[2]/1e6, before[0]/1e6, before[1]/1e6)
	for node, bytes := range most {
		require.Less(t, bytes, int64(slowMemory), "node %d", node)
	}
}
