package codeqprom_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqprom"
	"codeq/codeqtest"
	"codeq/internal/inspect"
)

// watched tests a Collector of a queue in a bubble.
func watched(t *testing.T, opts *codeqprom.Options, of codeq.Options, test func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector)) {
	c := codeqprom.New(opts)
	of.Observer = c.Observer(of.Observer)
	codeqtest.Test(t, &of, func(t *testing.T, q *codeqtest.Queue) {
		c.Watch(q.Queue)
		test(t, q, c)
	})
}

// told waits until the Observer has all changes of the bubble.
func told() {
	time.Sleep(time.Second)
	synctest.Wait()
}

// gather returns the families of a Collector by name, and fails if there is an invalid metric.
func gather(t testing.TB, c prometheus.Collector) map[string]*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	require.NoError(t, r.Register(c))
	all, err := r.Gather()
	require.NoError(t, err)
	families := make(map[string]*dto.MetricFamily)
	for _, f := range all {
		families[f.GetName()] = f
	}
	return families
}

// values are the values of a family by their labels, written as in the text format; of a histogram
// its count.
func values(f *dto.MetricFamily) map[string]float64 {
	all := make(map[string]float64)
	for _, m := range f.GetMetric() {
		var labels []string
		for _, l := range m.GetLabel() {
			labels = append(labels, l.GetName()+"="+l.GetValue())
		}
		all[strings.Join(labels, ",")] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return all
}

// nonzero leaves out the zeros.
func nonzero(all map[string]float64) map[string]float64 {
	maps.DeleteFunc(all, func(_ string, v float64) bool { return v == 0 })
	return all
}

func task(queue, payload string) codeq.Task {
	return codeq.Task{Queue: queue, Payload: []byte(payload), Tenant: "tenant-" + payload, Group: "group-" + payload}
}

func produce(t testing.TB, q *codeq.Queue, tasks ...codeq.Task) {
	t.Helper()
	_, err := q.ProduceBatch(t.Context(), tasks)
	require.NoError(t, err)
}

// TestHeld: handlers that go on after the ends of their leases are shown until they return.
func TestHeld(t *testing.T) {
	watched(t, nil, codeq.Options{Shards: 2}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		produce(t, q.Queue, task("mail", "a"), task("mail", "b"), codeq.Task{Queue: "idle"})
		release := make(chan struct{})
		var m codeq.Mux
		codeq.Handle(&m, "mail", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			<-release
			return nil
		})
		running, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- q.Run(running, &m, &codeq.RunOptions{Concurrency: 2}) }()
		told()
		_, err := q.Bulk(t.Context(), codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{Queue: "mail", States: []codeq.State{codeq.Leased}}})
		require.NoError(t, err)
		told()
		require.Equal(t, map[string]float64{"queue=mail": 2, "queue=idle": 0}, values(gather(t, c)["codeq_queue_held"]))
		close(release)
		told()
		require.Empty(t, nonzero(values(gather(t, c)["codeq_queue_held"])))
		stop()
		require.NoError(t, <-done)
	})
}

// TestCollector: what tasks, handlers and workers do is exported, each with its labels.
func TestCollector(t *testing.T) {
	watched(t, nil, codeq.Options{Shards: 2}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		ctx := t.Context()
		produce(t, q.Queue, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})
		produce(t, q.Queue, task("mail", "good"), task("mail", "bad"), task("mail", "stuck"))
		time.Sleep(30 * time.Second)
		var m codeq.Mux
		codeq.Handle(&m, "mail", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			switch string(j.Args) {
			case "bad":
				return codeq.DeadLetter(errors.New("no such mailbox"))
			case "stuck":
				<-ctx.Done()
				return ctx.Err()
			}
			time.Sleep(20 * time.Millisecond)
			return nil
		})
		running, stop := context.WithCancel(ctx)
		done := make(chan error)
		go func() { done <- q.Run(running, &m, &codeq.RunOptions{Concurrency: 5, Name: "w", Grace: -1}) }()
		told()
		produce(t, q.Queue, codeq.Task{Queue: "idle"})
		told()

		f := gather(t, c)
		require.Equal(t, map[string]float64{
			"queue=later,state=scheduled": 1, "queue=idle,state=ready": 1,
			"queue=mail,state=leased": 1, "queue=mail,state=dead": 1, "queue=mail,state=done": 1,
		}, nonzero(values(f["codeq_tasks"])))
		require.Len(t, f["codeq_tasks"].Metric, 3*7, "all states of all queues")
		require.Equal(t, map[string]float64{"queue=later": 0, "queue=idle": 1, "queue=mail": 0}, values(f["codeq_queue_oldest_ready_seconds"]))
		require.Equal(t, map[string]float64{
			"event=produced,queue=later": 1, "event=produced,queue=idle": 1, "event=produced,queue=mail": 3,
			"event=claimed,queue=mail": 3, "event=completed,queue=mail": 1, "event=dead,queue=mail": 1,
		}, nonzero(values(f["codeq_task_events_total"])))
		require.Len(t, f["codeq_task_events_total"].Metric, 3*9, "all events of all queues")
		require.Equal(t, map[string]float64{"queue=mail": 2}, values(f["codeq_task_wait_seconds"]), "that have returned")
		wait := f["codeq_task_wait_seconds"].Metric[0].Histogram
		require.InDelta(t, 60, wait.GetSampleSum(), 0.1)
		for _, b := range wait.Bucket {
			require.Equal(t, b.GetUpperBound() >= 30, b.GetCumulativeCount() == 2, b)
		}
		took := f["codeq_handler_seconds"].Metric[0].Histogram
		require.InDelta(t, 0.02, took.GetSampleSum(), 1e-6)
		for _, b := range took.Bucket {
			require.EqualValues(t, map[bool]int{false: 1, true: 2}[b.GetUpperBound() >= 0.02], b.GetCumulativeCount(), b)
		}
		require.Equal(t, map[string]float64{"queue=mail,verdict=completed": 1, "queue=mail,verdict=dead-letter": 1}, nonzero(values(f["codeq_handlers_total"])))
		require.Equal(t, map[string]float64{"state=busy": 1, "state=idle": 4, "state=quiet": 0}, values(f["codeq_workers"]))
		require.Equal(t, map[string]float64{"shard=0": 1, "shard=1": 1}, values(f["codeq_shard_up"]))
		require.Equal(t, map[string]float64{"shard=0": 0, "shard=1": 0}, values(f["codeq_inbox_operations"]))
		require.Len(t, values(f["codeq_commit_seconds"]), 2)
		steps := values(f["codeq_owner_upkeep_seconds"])
		require.Contains(t, nonzero(steps), "kind=commit")
		require.Contains(t, steps, "kind=group")
		require.Positive(t, values(f["codeq_storage_bytes"])["shard=1"])
		require.Contains(t, values(f["codeq_storage_dead_bytes"]), "shard=0")
		require.Positive(t, values(f["codeq_disk_min_free_bytes"])[""])
		require.Equal(t, map[string]float64{"": 0}, values(f["codeq_events_lost_total"]))
		require.Equal(t, map[string]float64{"kind=commit": 0, "kind=handler": 0}, values(f["codeq_samples_missed_total"]))
		require.Equal(t, map[string]float64{"part=process": 0, "part=storage": 0, "part=cluster": 0}, values(f["codeq_scrape_errors_total"]))
		require.NotContains(t, f, "codeq_raft_lag_entries")

		require.NoError(t, q.QuietWorkers(ctx, "w"))
		require.Equal(t, map[string]float64{"state=busy": 1, "state=idle": 0, "state=quiet": 4}, values(gather(t, c)["codeq_workers"]))
		stop()
		require.NoError(t, <-done)
	})
}

// TestVerdicts: all verdicts of handlers are counted, those of steps and batches too.
func TestVerdicts(t *testing.T) {
	watched(t, nil, codeq.Options{}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		var m codeq.Mux
		codeq.Handle(&m, "steps", func(ctx context.Context, _ *codeq.Job[[]byte]) error { return codeq.Sleep(ctx, "night", time.Minute) })
		codeq.HandleBatch(&m, "batch", codeq.BatchOptions{}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			errs := make([]error, len(jobs))
			errs[0] = codeq.Snooze(time.Hour)
			return errs
		})
		produce(t, q.Queue, codeq.Task{Queue: "steps"}, codeq.Task{Queue: "batch"}, codeq.Task{Queue: "batch"})
		running, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- q.Run(running, &m, nil) }()
		told()
		all := values(gather(t, c)["codeq_handlers_total"])
		require.Len(t, all, 2*8, "all verdicts of both queues")
		require.Equal(t, map[string]float64{
			"queue=steps,verdict=suspended": 1, "queue=batch,verdict=released": 1, "queue=batch,verdict=completed": 1,
		}, nonzero(all))
		batches := gather(t, c)["codeq_batch_tasks"].Metric
		require.Len(t, batches, 1)
		require.EqualValues(t, 1, batches[0].Histogram.GetSampleCount(), "of two tasks")
		require.EqualValues(t, 2, batches[0].Histogram.GetSampleSum())
		stop()
		require.NoError(t, <-done)
	})
}

// TestSteps: the histogram of upkeep has the count and the time of the steps of all shards.
func TestSteps(t *testing.T) {
	q := codeqtest.Open(t, &codeq.Options{Shards: 2}) // not in a bubble: there upkeep takes no time
	c := codeqprom.New(nil)
	c.Watch(q.Queue)
	for range 20 {
		produce(t, q.Queue, codeq.Task{Queue: "a"})
	}
	type sum struct {
		count uint64
		total time.Duration
	}
	sums := func() map[string]sum {
		st, err := q.StorageStats()
		require.NoError(t, err)
		all := make(map[string]sum)
		for _, shard := range st.Shards {
			for _, s := range shard.Upkeep {
				of := all[s.Kind.String()]
				all[s.Kind.String()] = sum{of.count + uint64(s.Count), of.total + s.Total}
			}
		}
		return all
	}
	before := sums()
	metrics := gather(t, c)["codeq_owner_upkeep_seconds"].Metric
	after := sums()
	require.Len(t, metrics, len(after))
	require.Positive(t, before["group"].total)
	for _, m := range metrics {
		name, h := m.Label[0].GetValue(), m.Histogram
		require.GreaterOrEqual(t, h.GetSampleCount(), before[name].count, name)
		require.LessOrEqual(t, h.GetSampleCount(), after[name].count, name)
		require.GreaterOrEqual(t, h.GetSampleSum(), before[name].total.Seconds(), name)
		require.LessOrEqual(t, h.GetSampleSum(), after[name].total.Seconds(), name)
		require.Len(t, h.Bucket, 12)
		require.InDelta(t, 4e-6, h.Bucket[0].GetUpperBound(), 1e-12)
		require.InDelta(t, 16e-6, h.Bucket[1].GetUpperBound(), 1e-12)
	}
}

// TestLate: a tick that waits for room on the disk is late; a subscription without a reader loses
// events.
func TestLate(t *testing.T) {
	c := codeqprom.New(nil)
	synctest.Test(t, func(t *testing.T) {
		disk := newDisk()
		opts := &codeq.Options{Shards: 1, Observer: c.Observer(nil)}
		inspect.Options(opts).FS = disk
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		c.Watch(q)
		sub, err := q.Subscribe(codeq.SubscribeOptions{Buffer: 3})
		require.NoError(t, err)
		defer sub.Close()
		require.NoError(t, q.SetSchedule(t.Context(), codeq.Schedule{Name: "s", Every: time.Minute, Task: codeq.Task{Queue: "a"}}))
		f := gather(t, c)
		require.Equal(t, map[string]float64{"shard=0": 0}, values(f["codeq_schedule_late_seconds"]))
		require.Equal(t, map[string]float64{"": 1 << 40}, values(f["codeq_disk_free_bytes"]))
		disk.free.Store(1 << 20)
		time.Sleep(5 * time.Minute)
		f = gather(t, c)
		require.Equal(t, map[string]float64{"shard=0": 240}, values(f["codeq_schedule_late_seconds"]))
		require.Equal(t, map[string]float64{"": 1 << 20}, values(f["codeq_disk_free_bytes"]))
		disk.free.Store(1 << 40)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Equal(t, map[string]float64{"shard=0": 0}, values(gather(t, c)["codeq_schedule_late_seconds"]))
		for range 10 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		require.GreaterOrEqual(t, values(gather(t, c)["codeq_events_lost_total"])[""], 7.)
	})
}

// fullDisk is a file system that reports a given free size.
type fullDisk struct {
	vfs.FS
	free atomic.Uint64
	wait atomic.Pointer[chan struct{}] // nil: it answers at once

	waited atomic.Int64 // calls that had to wait
}

func (d *fullDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	if wait := d.wait.Load(); wait != nil {
		d.waited.Add(1)
		<-*wait
	}
	return vfs.DiskUsage{AvailBytes: d.free.Load()}, nil
}

func newDisk() *fullDisk {
	d := &fullDisk{FS: vfs.NewMem()}
	d.free.Store(1 << 40)
	return d
}

// TestNames: the first queues, and those of Options.Queues, have their own labels; all others share
// one.
func TestNames(t *testing.T) {
	watched(t, nil, codeq.Options{}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		var batch []codeq.Task
		for i := range 250 {
			batch = append(batch, codeq.Task{Queue: fmt.Sprintf("q%03d", i)}, codeq.Task{Queue: fmt.Sprintf("q%03d", i)})
		}
		produce(t, q.Queue, batch...)
		told()
		f := gather(t, c)
		ready, produced := 0., 0.
		for labels, n := range values(f["codeq_tasks"]) {
			if strings.HasSuffix(labels, "state=ready") && labels != "queue=(other),state=ready" {
				require.EqualValues(t, 2, n, labels)
				ready++
			}
		}
		for labels, n := range values(f["codeq_task_events_total"]) {
			if strings.HasPrefix(labels, "event=produced") && labels != "event=produced,queue=(other)" {
				require.EqualValues(t, 2, n, labels)
				produced++
			}
		}
		require.EqualValues(t, 200, ready)
		require.EqualValues(t, 200, produced)
		require.EqualValues(t, 100, values(f["codeq_tasks"])["queue=(other),state=ready"])
		require.EqualValues(t, 100, values(f["codeq_task_events_total"])["event=produced,queue=(other)"])
		require.EqualValues(t, 1, values(f["codeq_queue_oldest_ready_seconds"])["queue=(other)"])
	})
	watched(t, &codeqprom.Options{Queues: []string{"z", "\uFFFD"}, MaxQueues: 3}, codeq.Options{}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		for _, name := range []string{"b", "a", "z", "\uFFFD", "other", "(other)"} {
			produce(t, q.Queue, codeq.Task{Queue: name})
			told()
		}
		f := gather(t, c)
		require.Equal(t, map[string]float64{
			"queue=b,state=ready": 1, "queue=z,state=ready": 1, "queue=\uFFFD,state=ready": 1, "queue=(other),state=ready": 3,
		}, nonzero(values(f["codeq_tasks"])))
		require.Equal(t, map[string]float64{"queue=b": 6, "queue=z": 4, "queue=\uFFFD": 3, "queue=(other)": 5}, values(f["codeq_queue_oldest_ready_seconds"]))
		require.Equal(t, map[string]float64{
			"event=produced,queue=b": 1, "event=produced,queue=z": 1, "event=produced,queue=\uFFFD": 1, "event=produced,queue=(other)": 3,
		}, nonzero(values(f["codeq_task_events_total"])))
	})
}

// TestLabelsComeBack: after a queue is gone, another one gets its label. Queues of Options.Queues,
// and queues with tasks, keep their labels. A queue with the name of the label for all others is
// not one of the others.
func TestLabelsComeBack(t *testing.T) {
	watched(t, &codeqprom.Options{Queues: []string{"z"}, MaxQueues: 3}, codeq.Options{Retention: time.Minute}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		labels := func() (all []string) {
			for label := range values(gather(t, c)["codeq_task_events_total"]) {
				if queue, of := strings.CutPrefix(label, "event=produced,queue="); of {
					all = append(all, queue)
				}
			}
			slices.Sort(all)
			return all
		}
		produce(t, q.Queue, codeq.Task{Queue: "stays"})
		for n := range 5 {
			gone := fmt.Sprint("gone", n)
			produce(t, q.Queue, codeq.Task{Queue: gone})
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{gone}})
			require.NoError(t, err)
			require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
			told()
			require.Equal(t, []string{gone, "stays"}, labels())
			time.Sleep(2 * time.Hour)
			require.Equal(t, []string{"stays"}, labels())
		}
		produce(t, q.Queue, codeq.Task{Queue: "z"}, codeq.Task{Queue: "(other)"}, codeq.Task{Queue: "a"})
		told()
		require.Equal(t, []string{"(other)", "stays", "z", "\uFFFDother)"}, labels())
	})
}

// TestCountersBeginAtZero: the counters of a queue are there before the first change in it, so that
// rates include this change. Without an Observer there are no counters.
func TestCountersBeginAtZero(t *testing.T) {
	watched(t, nil, codeq.Options{}, func(t *testing.T, q *codeqtest.Queue, _ *codeqprom.Collector) {
		produce(t, q.Queue, codeq.Task{Queue: "a"})
		c := codeqprom.New(nil)
		c.Watch(q.Queue)
		require.NotContains(t, gather(t, c), "codeq_task_events_total")
		c.Observer(nil)
		events := values(gather(t, c)["codeq_task_events_total"])
		require.Len(t, events, 9)
		require.Empty(t, nonzero(events))
	})
}

// TestOtherOfObserver: queues that the Observer counts together get the label of all others.
func TestOtherOfObserver(t *testing.T) {
	c := codeqprom.New(nil)
	tell := c.Observer(nil)
	tell(&codeq.Observation{Queues: []codeq.QueueDelta{{Totals: codeq.Totals{Expired: 7}}}, MissedCommits: 2, MissedHandlers: 3})
	tell(&codeq.Observation{MissedCommits: 2})
	f := gather(t, c)
	require.Equal(t, map[string]float64{"event=expired,queue=(other)": 7}, nonzero(values(f["codeq_task_events_total"])))
	require.Equal(t, map[string]float64{"kind=commit": 4, "kind=handler": 3}, values(f["codeq_samples_missed_total"]))
}

// TestChain: the application's own Observer gets the same observations, and does no harm.
func TestChain(t *testing.T) {
	calls := 0
	c := codeqprom.New(nil)
	tell := c.Observer(func(o *codeq.Observation) {
		calls += len(o.Queues)
		panic("own")
	})
	require.PanicsWithValue(t, "own", func() {
		tell(&codeq.Observation{Queues: []codeq.QueueDelta{{Queue: "a", Totals: codeq.Totals{Produced: 1}}}})
	})
	require.Equal(t, 1, calls)
	require.EqualValues(t, 1, values(gather(t, c)["codeq_task_events_total"])["event=produced,queue=a"])
}

// TestNothingPrivate: no label is a tenant, key, group, ID, worker, error or payload.
func TestNothingPrivate(t *testing.T) {
	watched(t, nil, codeq.Options{}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		private := codeq.Task{
			Queue: "q", Tenant: "SECRET", Unique: codeq.Unique{Key: "SECRET"}, Group: "SECRET", Payload: []byte("SECRET"), Headers: map[string]string{"SECRET": "SECRET"},
		}
		id, err := q.Produce(t.Context(), private)
		require.NoError(t, err)
		var m codeq.Mux
		codeq.Handle(&m, "q", func(context.Context, *codeq.Job[[]byte]) error { return codeq.DeadLetter(errors.New("SECRET")) })
		running, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- q.Run(running, &m, &codeq.RunOptions{Name: "SECRET"}) }()
		told()
		families := gather(t, c)
		require.NotEmpty(t, values(families["codeq_handler_seconds"]))
		for _, f := range families {
			require.NotContains(t, f.String(), "SECRET")
			require.NotContains(t, f.String(), id.String())
		}
		stop()
		require.NoError(t, <-done)
	})
}

// TestClosed: a closed queue has no gauges and no errors; the counters go on with the next queue.
func TestClosed(t *testing.T) {
	watched(t, &codeqprom.Options{ReportErrors: true}, codeq.Options{}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		produce(t, q.Queue, codeq.Task{Queue: "a"})
		require.NoError(t, q.Close())
		f := gather(t, c)
		require.Empty(t, slices.DeleteFunc(slices.Sorted(maps.Keys(f)), func(name string) bool {
			return slices.Contains([]string{"codeq_task_events_total", "codeq_commit_seconds", "codeq_samples_missed_total", "codeq_scrape_errors_total"}, name)
		}))
		require.Zero(t, values(f["codeq_scrape_errors_total"])["part=process"])
		q.Reopen()
		c.Watch(q.Queue)
		produce(t, q.Queue, codeq.Task{Queue: "a"})
		told()
		f = gather(t, c)
		require.EqualValues(t, 2, values(f["codeq_tasks"])["queue=a,state=ready"])
		require.EqualValues(t, 2, values(f["codeq_task_events_total"])["event=produced,queue=a"])
		c.Watch(nil)
		require.NotContains(t, gather(t, c), "codeq_tasks")
	})
}

// TestUnanswered: a scrape waits at most for its Timeout; a part without an answer is missing,
// counted, and reported if ReportErrors is set; any number of scrapes together makes one call.
func TestUnanswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := newDisk()
		opts := &codeq.Options{Shards: 1, MinFreeBytes: -1} // the queue itself does not ask
		inspect.Options(opts).FS = disk
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		const timeout = 400 * time.Millisecond // StorageStats waits for a second
		c := codeqprom.New(&codeqprom.Options{Timeout: timeout})
		c.Watch(q)
		wait := make(chan struct{})
		disk.wait.Store(&wait)
		began := time.Now()
		for i := range 2 {
			f := gather(t, c)
			require.Equal(t, time.Duration(i+1)*timeout, time.Since(began))
			require.NotContains(t, f, "codeq_storage_bytes")
			require.Contains(t, f, "codeq_shard_up")
			require.Equal(t, map[string]float64{"part=storage": float64(i + 1), "part=process": 0, "part=cluster": 0}, values(f["codeq_scrape_errors_total"]))
		}
		another := codeqtest.Open(t, nil)
		c.Watch(another.Queue)
		require.Contains(t, gather(t, c), "codeq_storage_bytes", "another queue is asked at once")
		c.Watch(q)
		time.Sleep(time.Second)
		require.Contains(t, gather(t, c), "codeq_storage_bytes", "the file system has not answered, but the stores have")
		require.EqualValues(t, 1, disk.waited.Load(), "it is asked once")
		close(wait)
		synctest.Wait()
		next := make(chan struct{})
		disk.wait.Store(&next)
		strict := codeqprom.New(&codeqprom.Options{Timeout: timeout, ReportErrors: true})
		strict.Watch(q)
		r := prometheus.NewRegistry()
		r.MustRegister(strict)
		all, err := r.Gather()
		require.ErrorContains(t, err, "codeqprom: storage: context deadline exceeded")
		require.NotEmpty(t, all, "the rest is there")
		close(next)
		synctest.Wait()
		require.Contains(t, gather(t, c), "codeq_storage_bytes")
	})
}

// TestScrapesTogether: any number of scrapes at a time, while tasks change and another queue is
// watched.
func TestScrapesTogether(t *testing.T) {
	watched(t, nil, codeq.Options{Shards: 2}, func(t *testing.T, q *codeqtest.Queue, c *codeqprom.Collector) {
		for range 4 {
			go func() {
				for range 20 {
					testutil.CollectAndCount(c)
				}
			}()
			go func() {
				for range 20 {
					_, _ = q.Queue.Produce(t.Context(), codeq.Task{Queue: "a"})
					c.Watch(q.Queue)
				}
			}()
		}
		told()
		f := gather(t, c)
		require.EqualValues(t, 80, values(f["codeq_tasks"])["queue=a,state=ready"])
		require.EqualValues(t, 80, values(f["codeq_task_events_total"])["event=produced,queue=a"])
	})
}
