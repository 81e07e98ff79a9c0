package bench

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// BenchmarkOrder takes a backlog of random priorities out of a queue of several shards. It reports
// the share of claims that passed over a task of a higher priority (urgent-passed-%), or an older
// task of the same priority (older-passed-%), and the number of such tasks for each claim on
// average.
func BenchmarkOrder(b *testing.B) {
	const tasks = 20_000
	for _, shards := range []int{1, 2, 4} {
		for _, load := range []struct {
			name          string
			callers, size int
		}{{"single", 1, 1}, {"single", 64, 1}, {"batch", 4, 64}} {
			b.Run(fmt.Sprintf("shards=%d/%s/callers=%d", shards, load.name, load.callers), func(b *testing.B) {
				measureOrder(b, tasks, shards, load.callers, load.size)
			})
		}
	}
}

func measureOrder(b *testing.B, tasks, shards, callers, size int) {
	ctx := context.Background()
	q := newQueue(b, process(shards))
	priority := func(i int) int { return i * 7 % 10 }
	fill(b, q, 1, tasks, 1, func(i int) codeq.Task {
		return codeq.Task{Queue: queueName, Priority: priority(i), Payload: binary.BigEndian.AppendUint32(nil, uint32(i))}
	})
	var (
		mu    sync.Mutex
		order []int // of the tasks that claims returned
		wg    sync.WaitGroup
	)
	for range callers {
		wg.Go(func() {
			for {
				leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{queueName}, Max: size, NoWait: true})
				if err != nil {
					return
				}
				mu.Lock()
				for _, l := range leases {
					order = append(order, int(binary.BigEndian.Uint32(l.Payload)))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	require.Len(b, order, tasks)
	// For each task, count the later tasks that should have come before it. Begin at the end.
	urgent, older, passed := 0, 0, 0
	var later [10][]int // by priority, the tasks that come later, sorted
	for _, n := range slices.Backward(order) {
		p := priority(n)
		more := 0
		for _, l := range later[p+1:] {
			more += len(l)
		}
		at, _ := slices.BinarySearchFunc(later[p], n, cmp.Compare)
		later[p] = slices.Insert(later[p], at, n)
		if more > 0 {
			urgent++
		}
		if at > 0 {
			older++
		}
		passed += more + at
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(100*float64(urgent)/float64(tasks), "urgent-passed-%")
	b.ReportMetric(100*float64(older)/float64(tasks), "older-passed-%")
	b.ReportMetric(float64(passed)/float64(tasks), "passed/claim")
}
