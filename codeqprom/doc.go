// Package codeqprom exports metrics of a queue to Prometheus.
//
// Make the [Collector] first: the open queue reports to its Observer.
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
//	codeq_queue_oldest_ready_seconds{queue}  gauge      age of the oldest ready task
//	codeq_queue_held{queue}                  gauge      handlers that hold places after the ends of their leases
//	codeq_task_events_total{queue,event}     counter    changes of tasks, by codeq.EventKind
//	codeq_task_wait_seconds{queue}           histogram  from ready to claimed, of tasks run here
//	codeq_handler_seconds{queue}             histogram  of handlers of Run here
//	codeq_handlers_total{queue,verdict}      counter    of handlers of Run here, by codeq.Verdict
//	codeq_batch_tasks{queue}                 histogram  of tasks in the calls of batch handlers of Run here
//	codeq_workers{state}                     gauge      handlers that Run may run here: busy, idle, quiet
//	codeq_commit_seconds{shard}              histogram  of commits
//	codeq_owner_upkeep_seconds{kind}         histogram  of the upkeep of shards' owners (codeq.UpkeepKind)
//	codeq_inbox_operations{shard}            gauge      operations that wait for the owner
//	codeq_shard_up{shard}                    gauge      1 if this process leads the shard and it answers
//	codeq_disk_free_bytes                    gauge      free on the disk of the directory
//	codeq_disk_min_free_bytes                gauge      codeq.Options.MinFreeBytes in force
//	codeq_disk_stalled_seconds{store}        gauge      for how long a store's disk is stalled; 0: it is not
//	codeq_storage_bytes{shard}               gauge      size of the shard's store here
//	codeq_storage_dead_bytes{shard}          gauge      the part of deleted records
//	codeq_schedule_late_seconds{shard}       gauge      delay of the latest tick of a schedule
//	codeq_events_lost_total                  counter    by the subscriptions of this process
//	codeq_tasks_crashed_total                counter    tasks that came back since their process had died
//	codeq_handlers_stuck_total               counter    handlers that went on after their Timeout
//	codeq_suspects                           gauge      tasks at work that may have ended a process
//	codeq_raft_lag_entries{shard,node}       gauge      entries that a follower has yet to apply
//	codeq_raft_follower_up{shard,node}       gauge      1 if a follower answers and counts
//	codeq_samples_missed_total{kind}         counter    handlers and commits left out of the histograms
//	codeq_scrape_errors_total{part}          counter    scrapes that lack a part of the gauges
//
// # Nodes
//
// In a cluster each process exports its own metrics. Gauges of tasks and schedules, the inbox and
// the lag cover the shards that it leads; counters and histograms count its work since its start;
// storage and disk cover its directory. So sums and rates over all processes stay right when the
// leader of a shard changes: write
//
//	sum by (queue, state) (codeq_tasks)
//	sum by (queue, event) (rate(codeq_task_events_total[5m]))
//	max by (queue) (codeq_queue_oldest_ready_seconds)
//	max by (shard) (codeq_shard_up)
//
// Nodes are not scraped at the same time: a shard that moves meanwhile may be counted by both nodes
// or by none.
//
// # Labels
//
// No label is a tenant, key, group or ID. The first 200 queues of a process have their own labels
// ([Options.MaxQueues]). All others share the label "(other)"; its oldest task is the oldest of
// them. The order is that of the queues' first changes and, at the first scrape, of their names;
// list important queues in [Options.Queues], on all nodes the same. If all labels are in use, the
// label of a queue without tasks and settings is freed after an hour and a quarter; if the queue
// comes back, its counters begin at 0. Bytes of a name that are not UTF-8 become U+FFFD; queues
// with equal labels share one.
//
// # A program beside the process
//
// The queue of [Collector.Watch] may come from codeq.OpenLocal. Without an Observer, the Collector
// has the gauges, and the counters that the other process keeps itself.
package codeqprom
