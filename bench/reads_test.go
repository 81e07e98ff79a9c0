package bench

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// BenchmarkReads makes calls that write nothing on the node that leads the only shard of three. A
// leader checks that it still leads before it answers.
func BenchmarkReads(b *testing.B) {
	ctx := context.Background()
	q := openCluster(b, b.TempDir(), process(1))[0]
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
						require.NoError(b, call.do())
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
