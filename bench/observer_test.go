package bench

import (
	"fmt"
	"testing"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkObserver is BenchmarkFullCycle and BenchmarkRun without an Observer, and with one that
// adds up its counters.
func BenchmarkObserver(b *testing.B) {
	for _, observed := range []bool{false, true} {
		open := func(b *testing.B) *codeq.Queue {
			opts := codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess}
			var completed, handled, missed, calls uint64
			if observed {
				opts.Observer = func(o *codeq.Observation) {
					calls++
					for i := range o.Queues {
						completed += o.Queues[i].Completed
					}
					handled += uint64(len(o.Handlers))
					missed += o.MissedHandlers
				}
			}
			q, err := codeq.Open(b.TempDir(), &opts)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
				if observed {
					b.Logf("%d completed, %d handlers, %d missed, in %d calls", completed, handled, missed, calls)
				}
			})
			return q
		}
		b.Run(fmt.Sprintf("cycle/observed=%t", observed), func(b *testing.B) { fullCycle(b, open(b)) })
		b.Run(fmt.Sprintf("run/observed=%t", observed), func(b *testing.B) {
			measure(b, workload.Load{Batch: batch, Backlog: 2 * producers * batch}, workload.Runner{Queues: []*codeq.Queue{open(b)}})
		})
	}
}
