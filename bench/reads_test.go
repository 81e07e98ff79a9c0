package bench

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"codeq"
)

// BenchmarkReads makes calls that write nothing on the node that leads the only shard of three. A
// leader checks that it still leads before it answers.
func BenchmarkReads(b *testing.B) {
	ctx := context.Background()
	c := newNodes(b, codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess})
	q := c.queues[0]
	if _, err := q.Stats(ctx); err != nil {
		b.Fatal(err)
	}
	status, err := q.ClusterStatus(ctx)
	if err != nil {
		b.Fatal(err)
	}
	for i, p := range c.peers {
		if p.Node == status.Shards[0].Leader {
			q = c.queues[i]
		}
	}
	for _, call := range []struct {
		name string
		do   func() error
	}{
		{"Stats", func() error {
			_, err := q.Stats(ctx)
			return err
		}},
		{"ClaimEmpty", func() error {
			_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
			if errors.Is(err, codeq.ErrEmpty) {
				return nil
			}
			return fmt.Errorf("claim of an empty queue: %w", err)
		}},
	} {
		for _, callers := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/callers=%d", call.name, callers), func(b *testing.B) {
				b.SetParallelism(callers)
				if callers == 1 {
					for b.Loop() {
						if err := call.do(); err != nil {
							b.Fatal(err)
						}
					}
				} else {
					b.RunParallel(func(pb *testing.PB) {
						for pb.Next() {
							if err := call.do(); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
			})
		}
	}
}
