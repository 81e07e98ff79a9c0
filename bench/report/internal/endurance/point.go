package endurance

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime/debug"
	"time"

	"github.com/jszwec/csvutil"

	"codeq"
	"codeq/bench/report/internal/document"
	"codeq/bench/workload"
)

// point is one run of the cycle.
type point struct {
	producers int
	workers   int
	payload   int // bytes
}

func (p point) String() string { return fmt.Sprintf("%d producers, %s", p.producers, size(p.payload)) }

// file returns the point as a part of a file name.
func (p point) file() string { return fmt.Sprintf("%dp-%dB", p.producers, p.payload) }

func size(bytes int) string {
	if bytes >= 1024 && bytes%1024 == 0 {
		return fmt.Sprintf("%d KiB", bytes/1024)
	}
	return fmt.Sprintf("%d B", bytes)
}

// sampleEvery gives some hundred latencies a second at all points.
const sampleEvery = 8

// reopening has the durations of closing the queue and of opening it again with its tasks.
type reopening struct{ close, open time.Duration }

// running is the state of a point during its run.
type running struct {
	config *config
	point
	dir       string
	samples   *csv.Writer
	encoder   *csvutil.Encoder // writes to samples
	worked    time.Duration    // in earlier lives
	created   int64            // likewise
	completed int64
	open      time.Duration // duration of the last Open
}

// run measures a point and writes its samples. When ctx ends, it returns the error of ctx after it
// has written all samples so far.
func (p point) run(ctx context.Context, c *config, w io.Writer) (re reopening, err error) {
	dir, err := os.MkdirTemp(c.Dir, "codeq-endurance-")
	if err != nil {
		return re, err
	}
	defer func() {
		err = errors.Join(err, os.RemoveAll(dir))
		debug.FreeOSMemory() // so that all points begin alike
	}()
	samples := csv.NewWriter(w)
	r := &running{config: c, point: p, dir: dir, samples: samples, encoder: newEncoder(samples)}
	if re.close, err = r.live(ctx, 1); err != nil {
		return re, err
	}
	select {
	case <-time.After(c.cooldown):
	case <-ctx.Done():
		return re, ctx.Err()
	}
	_, err = r.live(ctx, 2)
	re.open = r.open
	return re, err
}

// live is half of a point, from opening the queue to closing it.
func (r *running) live(ctx context.Context, life int) (closed time.Duration, err error) {
	begin := time.Now()
	q, err := codeq.Open(r.dir, &codeq.Options{Durability: r.config.durability, Shards: r.config.shards})
	if err != nil {
		return 0, err
	}
	r.open = time.Since(begin)
	err = r.work(ctx, q, life)
	begin = time.Now()
	err = errors.Join(err, q.Close())
	return time.Since(begin), err
}

// work runs the load for half of the time.
func (r *running) work(ctx context.Context, q *codeq.Queue, life int) error {
	run := workload.Start(context.Background(), workload.Load{
		Producers: r.producers, Workers: r.workers, Payload: r.payload, Backlog: r.config.backlog, SampleEvery: sampleEvery,
	}, workload.Calls{Queues: []*codeq.Queue{q}})
	before, err := readGauge(run)
	start := before.at
	end := start.Add(r.config.time / 2)
	for n := 1; err == nil && before.at.Before(end); n++ {
		next := start.Add(time.Duration(n) * time.Second)
		if next.After(end) {
			next = end
		}
		select {
		case <-time.After(time.Until(next)):
			before, err = r.sample(run, q, life, start, before)
		case <-run.Ended():
			return run.Stop()
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err := errors.Join(err, run.Stop()); err != nil {
		return err
	}
	r.worked += before.at.Sub(start)
	return r.count(run, q, life)
}

// sample writes the changes since a gauge as a row, and returns the next gauge.
func (r *running) sample(run *workload.Run, q *codeq.Queue, life int, start time.Time, before gauge) (gauge, error) {
	after, err := readGauge(run)
	if err != nil {
		return after, err
	}
	s := sample{Life: float64(life), Seconds: (r.worked + after.at.Sub(start)).Seconds()}
	s.used(before, after)
	if s.Rate > 0 {
		s.MiB80 = 80 << 20 / float64(r.payload) / s.Rate
	}
	l := run.Latencies()
	microseconds := func(p float64) float64 { return float64(l.Quantile(p)) / float64(time.Microsecond) }
	s.P50, s.P90, s.P99, s.Max = microseconds(0.5), microseconds(0.9), microseconds(0.99), microseconds(1)
	if s.Disk, err = allocated(r.dir); err != nil {
		return after, err
	}
	stores, err := q.StorageStats()
	if err != nil {
		return after, err
	}
	s.stores(stores)
	if math.Mod(math.Round(s.Seconds), 10) == 0 {
		r.config.progress("%v: %.0f s, %s cycles/s, p99 %s, memory %s, disk %s", r.point, s.Seconds, document.Number(s.Rate),
			document.Duration(time.Duration(s.P99*1e3)), document.Bytes(int64(s.Resident)), document.Bytes(int64(s.Disk)))
	}
	err = r.encoder.Encode(s)
	r.samples.Flush()
	return after, errors.Join(err, r.samples.Error())
}

// count compares the tasks of the queue with the acknowledged ones. A call canceled at the end of
// the load may have had its effect.
func (r *running) count(run *workload.Run, q *codeq.Queue, life int) error {
	created, completed, err := run.Counts()
	if err != nil {
		return err
	}
	r.created, r.completed = r.created+created, r.completed+completed
	stats, err := q.Stats(context.Background())
	if err != nil {
		return err
	}
	has, expected := int64(stats[workload.QueueName].Total()), r.created-r.completed
	if has < expected-int64(life*r.workers) || has > expected+int64(life*r.producers) {
		return fmt.Errorf("%v: the queue has %d tasks, but %d were created and %d completed, with %d producers and %d workers cut off %d times",
			r.point, has, r.created, r.completed, r.producers, r.workers, life)
	}
	return nil
}
