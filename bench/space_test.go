package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

var (
	spaceBytes   = flag.Int64("space.bytes", 1<<30, "bytes of payload that BenchmarkSpace produces in each row")
	spacePayload = flag.Int("space.payload", 64<<10, "bytes of a payload of BenchmarkSpace")
	spaceRest    = flag.Duration("space.rest", 30*time.Second, "how long BenchmarkSpace lets a drained queue rest")
	spaceTrace   = flag.Bool("space.trace", false, "log what BenchmarkSpace sees while it drains")
)

// spaceRow is one way to make stored data obsolete.
type spaceRow struct {
	name  string
	task  func(n int) codeq.Task
	opts  codeq.Options
	fails error                                     // of each task
	end   func(context.Context, *codeq.Queue) error // after the drain; nil: nothing
	live  int64                                     // bytes left after the drain, of 1,000 produced
}

// BenchmarkSpace fills a queue and drains it, and measures the disk space of its tables: the most
// beyond the live data during the drain, after a rest, and after another Open and a rest. It uses
// default options, and payloads that cannot be compressed.
func BenchmarkSpace(b *testing.B) {
	plain := func(int) codeq.Task { return codeq.Task{Queue: queueName} }
	for _, row := range []spaceRow{
		{name: "plain", task: plain},
		{name: "shards=4", task: plain, opts: codeq.Options{Shards: 4}},
		{name: "tenants=100", task: func(n int) codeq.Task { return codeq.Task{Queue: queueName, Tenant: fmt.Sprint(n % 100)} }},
		{name: "kept", task: plain, opts: codeq.Options{Retention: time.Hour}, live: 1000},
		{name: "kept=2s", task: plain, opts: codeq.Options{Retention: 2 * time.Second}, live: 1000},
		{name: "kept-one-in-ten", live: 100, task: func(n int) codeq.Task {
			t := codeq.Task{Queue: queueName}
			if n%10 == 0 {
				t.Retention = time.Hour
			}
			return t
		}},
		{name: "dead-purged", task: func(int) codeq.Task { return codeq.Task{Queue: queueName, MaxAttempts: 1} },
			fails: errors.New("it is to die"), live: 1000,
			end: func(ctx context.Context, q *codeq.Queue) error {
				_, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: queueName})
				return err
			}},
	} {
		b.Run(row.name, func(b *testing.B) { row.run(b) })
	}
}

func (row *spaceRow) run(b *testing.B) {
	ctx := context.Background()
	dir := b.TempDir()
	opts := row.opts
	opts.Durability = codeq.DurabilityProcess
	q := open(b, dir, opts)
	tasks := int(*spaceBytes) / *spacePayload
	began := time.Now()
	fill(b, q, 1, tasks, max(1, (1<<20) / *spacePayload), func(i int) codeq.Task {
		t := row.task(i)
		t.Payload = make([]byte, *spacePayload)
		_, _ = rand.Read(t.Payload)
		return t
	})
	produced := storageOf(b, q)
	filled := time.Since(began)

	var done atomic.Int64
	mux := new(codeq.Mux)
	codeq.Handle(mux, queueName, func(_ context.Context, job *codeq.Job[[]byte]) error {
		done.Add(1)
		return row.fails
	})
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	began = time.Now()
	go func() { ended <- q.Run(running, mux, &codeq.RunOptions{Concurrency: 128}) }()
	var most int64 // of the tables beyond 1.3 times the live data
	last, moved := int64(0), began
	for tick := 0; done.Load() < int64(tasks); tick++ {
		select {
		case err := <-ended:
			b.Fatalf("Run has ended with %d of %d tasks: %v", done.Load(), tasks, err)
		case <-time.After(50 * time.Millisecond):
		}
		if n := done.Load(); n > last {
			last, moved = n, time.Now()
		} else if time.Since(moved) > time.Minute {
			stop()
			b.Fatalf("%d of %d tasks, and none for a minute: %v", n, tasks, storageOf(b, q))
		}
		st := storageOf(b, q)
		left := int64(tasks) - done.Load()
		live := (left + done.Load()*row.live/1000) * int64(*spacePayload)
		most = max(most, st.disk-live*13/10)
		if *spaceTrace && tick%20 == 0 {
			b.Logf("%.1fs left %d MB, %v", time.Since(began).Seconds(), left*int64(*spacePayload)>>20, st)
		}
	}
	drained := time.Since(began)
	stop()
	if err := <-ended; err != nil && running.Err() == nil {
		b.Fatal(err)
	}
	if row.end != nil {
		require.NoError(b, row.end(ctx, q))
	}
	atEnd := storageOf(b, q)
	rest := func() space {
		last := storageOf(b, q)
		for end := time.Now().Add(*spaceRest); time.Now().Before(end); {
			time.Sleep(500 * time.Millisecond)
			if st := storageOf(b, q); *spaceTrace && st.tables != last.tables {
				b.Logf("resting: %v", st)
				last = st
			}
		}
		return storageOf(b, q)
	}
	rested := rest()
	require.NoError(b, q.Close())
	q = open(b, dir, opts)
	opened := storageOf(b, q)
	again := rest()
	mb := func(n int64) float64 { return float64(n) / (1 << 20) }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(mb(*spaceBytes)/filled.Seconds(), "fill-MB/s")
	b.ReportMetric(mb(*spaceBytes)/drained.Seconds(), "drain-MB/s")
	b.ReportMetric(mb(produced.tables), "filled-MB")
	b.ReportMetric(mb(most), "beyond-MB")
	b.ReportMetric(mb(atEnd.tables), "drained-MB")
	b.ReportMetric(mb(rested.tables), "rested-MB")
	b.ReportMetric(mb(opened.tables), "opened-MB")
	b.ReportMetric(mb(again.tables), "again-MB")
	b.ReportMetric(mb(rested.compacted-produced.compacted), "compacted-MB")
	b.ReportMetric(mb(sizesOf(dir, func(string) string { return "" })[""]), "files-MB")
}

// space has the sizes of a queue's stores, in bytes.
type space struct{ disk, tables, dead, log, flushes, compacted, l0 int64 }

func (s space) String() string {
	return fmt.Sprintf("disk %d MB, tables %d MB, dead %d MB, L0 %d tables, log %d MB, %d flushes, compacted %d MB",
		s.disk>>20, s.tables>>20, s.dead>>20, s.l0, s.log>>20, s.flushes, s.compacted>>20)
}

func storageOf(b *testing.B, q *codeq.Queue) (s space) {
	st, err := q.StorageStats()
	require.NoError(b, err)
	for i := range st.Shards {
		s.disk += st.Shards[i].DiskBytes
		s.tables += st.Shards[i].TableBytes
		s.dead += st.Shards[i].DeadBytes
		s.log += st.Shards[i].LogBytes
		s.flushes += st.Shards[i].Flushes
		s.compacted += st.Shards[i].CompactedBytes
		s.l0 += int64(st.Shards[i].L0Tables)
	}
	return s
}
