package codeqprom

import (
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"codeq"
)

// all has the descriptions of all metrics.
var all []*prometheus.Desc

func desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc("codeq_"+name, help, labels, nil)
	all = append(all, d)
	return d
}

var (
	tasks         = desc("tasks", "Tasks of a queue in a state, in the shards that this process leads.", "queue", "state")
	oldestReady   = desc("queue_oldest_ready_seconds", "How long the oldest ready task has waited, in the shards that this process leads; 0: none is ready.", "queue")
	held          = desc("queue_held", "Handlers that go on after the ends of their leases, and hold places of limits and turns of groups, in the shards that this process leads.", "queue")
	events        = desc("task_events_total", "Changes of tasks, by kind, in the shards that this process has led.", "queue", "event")
	taskWait      = desc("task_wait_seconds", "How long tasks that this process has worked on had been ready when they were claimed.", "queue")
	handlerTook   = desc("handler_seconds", "How long the handlers of this process have taken.", "queue")
	verdicts      = desc("handlers_total", "Handlers of this process that have returned, by verdict.", "queue", "verdict")
	batchTasks    = desc("batch_tasks", "How many tasks the calls of the batch handlers of this process had.", "queue")
	workers       = desc("workers", "Handlers that this process may run at a time: busy ones, idle ones, and idle ones that are to take no tasks (quiet).", "state")
	commitTook    = desc("commit_seconds", "How long commits of a shard have taken, in a cluster to a majority, while this process led it.", "shard")
	upkeepTook    = desc("owner_upkeep_seconds", "How long the upkeep of shards' owners has taken, by kind.", "kind")
	inbox         = desc("inbox_operations", "Operations that wait for the owner of a shard that this process leads.", "shard")
	shardUp       = desc("shard_up", "Whether this process leads the shard, and the shard answers.", "shard")
	diskFree      = desc("disk_free_bytes", "Free space on the disk of the queue's directory.")
	diskStalled   = desc("disk_stalled_seconds", "For how long an operation on a store of this process has not returned (log: on what lies beside the shards' stores), if that is longer than StallAfter; else 0.", "store")
	diskMinFree   = desc("disk_min_free_bytes", "Free space below which no tasks are added; 0: there is no limit.")
	storage       = desc("storage_bytes", "Size of the files of a shard's store in this process.", "shard")
	storageDead   = desc("storage_dead_bytes", "Estimate of the bytes in a shard's tables that belong to deleted records.", "shard")
	scheduleLate  = desc("schedule_late_seconds", "How late the latest tick of a schedule is that has not produced its task yet, in a shard that this process leads.", "shard")
	eventsLost    = desc("events_lost_total", "Events that subscriptions of this process have lost.")
	crashed       = desc("tasks_crashed_total", "Tasks that have come back to this process since theirs had died with them at work.")
	stuck         = desc("handlers_stuck_total", "Handlers of this process that have gone on after the timeout of their task.")
	suspects      = desc("suspects", "Tasks at work that may have ended a process, and hold up further ones.")
	raftLag       = desc("raft_lag_entries", "Entries that the leader of a shard, this process, has applied and another node has not.", "shard", "node")
	raftFollower  = desc("raft_follower_up", "Whether another node answers and counts in majorities of a shard that this process leads.", "shard", "node")
	samplesMissed = desc("samples_missed_total", "Commits and handlers that are in none of the histograms, since too many came at a time.", "kind")
	scrapeErrors  = desc("scrape_errors_total", "Scrapes that lack a part of the gauges.", "part")
)

// export has the metrics of one scrape.
type export struct {
	metrics []prometheus.Metric
	now     time.Time
}

func (e *export) add(m prometheus.Metric) { e.metrics = append(e.metrics, m) }

func (e *export) gauge(d *prometheus.Desc, v float64, labels ...string) {
	e.add(prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...))
}

func (e *export) counter(d *prometheus.Desc, v uint64, labels ...string) {
	e.add(prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...))
}

func (e *export) histogram(d *prometheus.Desc, h *histogram, labels ...string) {
	within, count := h.cumulative()
	e.add(prometheus.MustNewConstHistogram(d, count, h.sum, within, labels...))
}

// since returns the seconds since t; 0 if t is zero or in the future.
func (e *export) since(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return max(e.now.Sub(t).Seconds(), 0)
}

func (e *export) queue(t *queueGauges) {
	for _, of := range [...]struct {
		state codeq.State
		n     uint64
	}{
		{codeq.Ready, t.counts.Ready},
		{codeq.Scheduled, t.counts.Scheduled},
		{codeq.Blocked, t.counts.Blocked},
		{codeq.Leased, t.counts.Leased},
		{codeq.Dead, t.counts.Dead},
		{codeq.Done, t.counts.Done},
		{codeq.Canceled, t.counts.Canceled},
	} {
		e.gauge(tasks, float64(of.n), t.label, of.state.String())
	}
	e.gauge(oldestReady, e.since(t.oldest), t.label)
	e.gauge(held, float64(t.held), t.label)
}

func (e *export) process(got *scrape) {
	p := got.process
	if p == nil {
		return
	}
	busy, idle, quiet := 0, 0, 0
	for i := range p.Workers {
		w := &p.Workers[i]
		busy += w.Busy
		if free := max(w.Concurrency-w.Busy, 0); w.Quiet {
			quiet += free
		} else {
			idle += free
		}
	}
	e.gauge(workers, float64(busy), "busy")
	e.gauge(workers, float64(idle), "idle")
	e.gauge(workers, float64(quiet), "quiet")
	e.counter(eventsLost, p.EventsLost)
	e.counter(crashed, p.Crashed)
	e.counter(stuck, p.Stuck)
	e.gauge(suspects, float64(p.Suspects))
	e.gauge(diskStalled, p.Stalled.Seconds(), "log")
	for i := range p.Shards {
		s, shard := &p.Shards[i], strconv.Itoa(i)
		e.gauge(diskStalled, s.Stalled.Seconds(), "shard "+shard)
		if !s.Leads {
			e.gauge(shardUp, 0, shard)
			continue
		}
		e.gauge(shardUp, 1, shard)
		e.gauge(inbox, float64(s.Inbox), shard)
		e.gauge(scheduleLate, e.since(s.NextTick), shard)
	}
}

func (e *export) storage(st *codeq.StorageStats) {
	if st == nil {
		return
	}
	if st.FreeBytes >= 0 {
		e.gauge(diskFree, float64(st.FreeBytes))
	}
	e.gauge(diskMinFree, float64(st.MinFreeBytes))
	var sum []codeq.UpkeepStats
	for i := range st.Shards {
		s, shard := &st.Shards[i], strconv.Itoa(i)
		if s.LastError != "" {
			continue
		}
		e.gauge(storage, float64(s.DiskBytes), shard)
		e.gauge(storageDead, float64(s.DeadBytes), shard)
		sum = addUpkeep(sum, s.Upkeep)
	}
	for i := range sum {
		e.upkeep(&sum[i])
	}
}

// addUpkeep adds the upkeep of another shard.
func addUpkeep(sum, more []codeq.UpkeepStats) []codeq.UpkeepStats {
	if sum == nil {
		return append(sum, more...)
	}
	for i := range more {
		sum[i].Count += more[i].Count
		sum[i].Total += more[i].Total
		for k, n := range more[i].Buckets {
			sum[i].Buckets[k] += n
		}
	}
	return sum
}

// The exported buckets of upkeep have bounds from 4 us to 67 s, each four times the previous one.
// codeq has twice as many.
const (
	firstUpkeepBucket = 2
	nextUpkeepBucket  = 2
)

func (e *export) upkeep(s *codeq.UpkeepStats) {
	within, sum := make(map[float64]uint64), uint64(0)
	for i, n := range s.Buckets {
		sum += uint64(n)
		if i >= firstUpkeepBucket && (i-firstUpkeepBucket)%nextUpkeepBucket == 0 && i < len(s.Buckets)-1 {
			within[(time.Microsecond << i).Seconds()] = sum
		}
	}
	e.add(prometheus.MustNewConstHistogram(upkeepTook, sum, s.Total.Seconds(), within, s.Kind.String()))
}

func (e *export) raft(st *codeq.ClusterStatus) {
	if st == nil {
		return
	}
	for i := range st.Shards {
		s, shard := &st.Shards[i], strconv.Itoa(i)
		if s.Leader != st.Node {
			continue
		}
		for k := range s.Replicas {
			r := &s.Replicas[k]
			if r.Node == st.Node {
				continue
			}
			node := strings.ToValidUTF8(r.Node, "\uFFFD")
			if r.LastError != "" {
				e.gauge(raftFollower, 0, shard, node)
				continue
			}
			up := 1.
			if r.Suspect {
				up = 0
			}
			e.gauge(raftFollower, up, shard, node)
			e.gauge(raftLag, float64(r.Lag), shard, node)
		}
	}
}

// exportCounters exports the sums of observations, and the Collector's own counters.
func (c *Collector) exportCounters(e *export) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for part, n := range c.failed {
		e.counter(scrapeErrors, n, partNames[part])
	}
	if !c.observed {
		return
	}
	for label, q := range c.told.queues {
		t := &q.events
		for _, of := range [...]struct {
			kind codeq.EventKind
			n    uint64
		}{
			{codeq.EventProduced, t.Produced},
			{codeq.EventClaimed, t.Claimed},
			{codeq.EventCompleted, t.Completed},
			{codeq.EventRetried, t.Retried},
			{codeq.EventReleased, t.Released},
			{codeq.EventUnhandled, t.Unhandled},
			{codeq.EventDeadLettered, t.Dead},
			{codeq.EventCanceled, t.Canceled},
			{codeq.EventExpired, t.Expired},
		} {
			e.counter(events, of.n, label, of.kind.String())
		}
		if q.batches != nil {
			e.histogram(batchTasks, q.batches, label)
		}
		if q.waits != nil {
			e.histogram(taskWait, q.waits, label)
			e.histogram(handlerTook, q.worked, label)
			for i, n := range q.verdicts {
				e.counter(verdicts, n, label, (codeq.VerdictCompleted + codeq.Verdict(i)).String())
			}
		}
	}
	for shard, h := range c.told.commits {
		e.histogram(commitTook, h, strconv.Itoa(shard))
	}
	e.counter(samplesMissed, c.told.missed.commits, "commit")
	e.counter(samplesMissed, c.told.missed.handlers, "handler")
}
