package bench

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// pauses is a logger's handler that records the pauses of shards.
type pauses struct {
	slog.Handler // for WithGroup, which is not called
	mu           sync.Mutex
	took         []time.Duration
}

func (p *pauses) Enabled(context.Context, slog.Level) bool { return true }
func (p *pauses) WithAttrs([]slog.Attr) slog.Handler       { return p }
func (p *pauses) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "for" {
			p.mu.Lock()
			p.took = append(p.took, a.Value.Duration())
			p.mu.Unlock()
		}
		return true
	})
	return nil
}

// BenchmarkCheckpoint measures the pause of the shards during a Checkpoint, and the time of the
// call, while 10 producers and Run work, with no backlog and with a million ready tasks.
func BenchmarkCheckpoint(b *testing.B) {
	for _, backlog := range []int{0, 1_000_000} {
		for _, shards := range []int{1, 2} {
			for _, d := range durabilities {
				b.Run(fmt.Sprintf("backlog=%d/shards=%d/durability=%v", backlog, shards, d), func(b *testing.B) {
					benchmarkCheckpoint(b, backlog, codeq.Options{Shards: shards, Durability: d})
				})
			}
		}
	}
}

func benchmarkCheckpoint(b *testing.B, backlog int, opts codeq.Options) {
	var p pauses
	opts.Logger = slog.New(&p)
	root := b.TempDir()
	q := open(b, filepath.Join(root, "queue"), opts)
	stock(b, q, "behind", backlog)
	ctx, stop := context.WithCancel(context.Background())
	var load sync.WaitGroup
	for range 10 {
		load.Go(func() {
			for ctx.Err() == nil {
				if _, err := q.Produce(context.Background(), codeq.Task{Queue: queueName, Payload: payload}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	var mux codeq.Mux
	codeq.Handle(&mux, queueName, func(context.Context, *codeq.Job[[]byte]) error { return nil })
	load.Go(func() {
		if err := q.Run(ctx, &mux, nil); err != nil {
			b.Error(err)
		}
	})
	time.Sleep(*warmup)
	var calls []time.Duration
	for end := time.Now().Add(*window); len(calls) < 3 || time.Now().Before(end); {
		dir, start := filepath.Join(root, "copy"), time.Now()
		require.NoError(b, q.Checkpoint(context.Background(), dir))
		calls = append(calls, time.Since(start))
		require.NoError(b, os.RemoveAll(dir))
		time.Sleep(*window / 20)
	}
	stop()
	load.Wait()
	require.NoError(b, q.Close()) // so that no other pause comes
	slices.Sort(p.took)
	slices.Sort(calls)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(p.took[len(p.took)/2]), "pause-p50-ms")
	b.ReportMetric(ms(p.took[len(p.took)-1]), "pause-max-ms")
	b.ReportMetric(ms(calls[len(calls)/2]), "call-p50-ms")
	b.ReportMetric(float64(len(calls)), "checkpoints")
}
