// Package codeqprom exports what a queue does as metrics of Prometheus.
//
// A [Collector] is made first, since the queue tells it what happens while it is open:
//
//	metrics := codeqprom.New(nil)
//	q, err := codeq.Open(dir, &codeq.Options{Observer: metrics.Observer(nil)})
//	...
//	metrics.Watch(q)
//	prometheus.MustRegister(metrics)
//	http.Handle("/metrics", promhttp.Handler())
//
// These are the metrics:
//
//	codeq_tasks{queue,state}                 gauge      tasks in a state
//	codeq_queue_oldest_ready_seconds{queue}  gauge      how long the oldest ready task has waited
//	codeq_queue_held{queue}                  gauge      handlers that hold places after the ends of their leases
//	codeq_task_events_total{queue,event}     counter    changes of tasks, by codeq.EventKind
//	codeq_task_wait_seconds{queue}           histogram  from ready to claimed, of tasks run here
//	codeq_handler_seconds{queue}             histogram  of handlers of Run here
//	codeq_workers{state}                     gauge      handlers that Run may run here: busy, idle, quiet
//	codeq_commit_seconds{shard}              histogram  of commits
//	codeq_owner_upkeep_seconds{kind}         histogram  of the upkeep of shards' owners (codeq.UpkeepKind)
//	codeq_inbox_operations{shard}            gauge      operations that wait for the owner
//	codeq_shard_up{shard}                    gauge      1 if this process leads the shard and it answers
//	codeq_disk_free_bytes                    gauge      free on the disk of the directory
//	codeq_disk_min_free_bytes                gauge      codeq.Options.MinFreeBytes in force
//	codeq_disk_stalled_seconds{store}        gauge      for how long a store's disk is stalled; 0: it is not
//	codeq_storage_bytes{shard}               gauge      size of the shard's store here
//	codeq_storage_dead_bytes{shard}          gauge      of which belong to deleted records
//	codeq_schedule_late_seconds{shard}       gauge      how late the latest tick of a schedule is
//	codeq_events_lost_total                  counter    by the subscriptions of this process
//	codeq_tasks_crashed_total                counter    tasks that came back since their process had died
//	codeq_suspects                           gauge      tasks at work that may have ended a process
//	codeq_raft_lag_entries{shard,node}       gauge      entries that a follower has yet to apply
//	codeq_raft_follower_up{shard,node}       gauge      1 if a follower answers and counts
//	codeq_samples_missed_total{kind}         counter    handlers and commits left out of the histograms
//	codeq_scrape_errors_total{part}          counter    scrapes that lack a part of the gauges
//
// # Nodes
//
// In a cluster each process exports what is its own. Gauges of tasks and schedules, the inbox and
// the lag are of the shards that it leads; counters and histograms count what it has done since it
// began; storage and disk are of its directory. So sums over all processes are right, whichever
// node leads a shard, and rates stay right when another one does: write
//
//	sum by (queue, state) (codeq_tasks)
//	sum by (queue, event) (rate(codeq_task_events_total[5m]))
//	max by (queue) (codeq_queue_oldest_ready_seconds)
//	max by (shard) (codeq_shard_up)
//
// A scrape is not of one moment: between the scrapes of two nodes, a shard that moves from one to
// the other may be counted by both or by none.
//
// # Labels
//
// No label is a tenant, key, group or ID. The first 200 queues that a process sees keep their names
// ([Options.MaxQueues]), all others are the queue "(other)" together, whose oldest task is the
// oldest of all. They are seen in the order of their first changes, and, at the first scrape, of
// their names; list those that matter in [Options.Queues], on all nodes the same. If all places are
// taken, a queue without tasks and settings gives its own up after an hour and a quarter; if it
// comes back, its counters begin at 0. Bytes of a name that are no UTF-8 become U+FFFD, and queues
// whose names are equal then are one.
//
// # A program beside the process
//
// The queue of [Collector.Watch] may be one of codeq.OpenLocal. There is no Observer then: the
// Collector has the gauges, and the counters that the process counts itself.
package codeqprom
