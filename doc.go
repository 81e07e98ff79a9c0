// Package codeq is a durable task queue inside the process that uses it: no broker, no database
// server, and no network listener unless [Options.Cluster] asks for other nodes.
//
// [Open] a directory, [Queue.Produce] tasks, and either [Queue.Claim] and [Queue.Complete] them one
// by one or let [Queue.Run] drive a pool of workers:
//
//	q, err := codeq.Open("queue", nil)
//	...
//	id, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: body})
//	...
//	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
//	...
//	err = q.Complete(ctx, lease.Receipt, nil)
//
// # Guarantees
//
// A call that returns without an error has persisted at the Durability of the queue. Tasks are
// delivered at least once: a claimed task whose lease expires is delivered again, with the attempt
// counted, until it is out of attempts and becomes a dead letter. A lease that has expired or ended
// cannot finish its task: the verbs that take its [Receipt] return [ErrLeaseLost]. Follow-up tasks
// of Complete exist exactly if the task is done.
//
// # Order
//
// A claim takes the highest priority first, tenants in turn, and for each tenant the task that has
// been ready for longest. With several shards, claims go to the one with the highest priority, and
// of a queue with one tenant to the one with the oldest task; see [Queue.Claim].
//
// # Time
//
// Leases run by the monotonic clock while the queue is open, and by the wall clock over a restart,
// when they never become longer than they were granted. Tasks produced for a time become ready when
// the wall clock shows it; a clock that is set is noticed within a minute. All times have the
// resolution of a millisecond.
//
// # More than one task
//
// [Task.Unique] gives a task an idempotency key, [Task.Group] has tasks follow each other,
// [Task.LimitKey] bounds how many are worked on at a time, and [Task.After] has a task wait for
// others. [Queue.Configure] pauses a queue, limits its concurrency and rate, weighs its tenants and
// says how long what has ended is kept. [Queue.SetSchedule] produces tasks by a cron expression,
// [Queue.Await] waits for the end of one, and [Queue.Subscribe] tells of all changes. With several
// shards, tasks that are bound to each other lie in one, and what concerns another shard reaches it
// exactly once.
//
// # JSON
//
// Task, Lease, TaskInfo, Outcome, Event, Schedule and ScheduleInfo become JSON that is read back as
// they were. The names are those of the fields, and zero fields are left out. States and other
// kinds, IDs and receipts are texts. A payload or a result is in base64, as encoding/json writes
// bytes; a time is as in RFC 3339, in the zone that it has; a duration is a number of nanoseconds,
// and Forever is -1.
//
// # Several nodes
//
// With [Options.Cluster], three or five processes hold the same tasks, and every call may be made
// on each of them: what is acknowledged is in the logs of a majority. A call waits while its shard
// is between two leaders, for [Cluster.CallTimeout] at the most. [ErrNotLeader] says that it was
// certainly not applied, [ErrUncertain] that it may have been; a produce is tried again by the
// library in either case, and never stored twice.
//
// [Verify] reads through the directory of a closed queue, and repairs it if it can.
//
// # Errors
//
// Branch on errors with errors.Is: what is returned wraps one of the errors of this package with
// what failed and the value that was refused, and its text begins with "codeq: ". Each verb names
// those that it may return. After ErrInvalid, ErrClosed, ErrFailed, ErrNotLeader and ErrDiskFull
// nothing was applied; [ErrUncertain] leaves that open. The error of a call whose ctx has ended
// matches context.Canceled or context.DeadlineExceeded, and the cause of ctx if it has one; if the
// operation was under way, ErrUncertain as well. A field that is called LastError is the text of an
// error.
//
// Package codeqtest is for the tests of programs that use codeq.
//
// # Concurrency
//
// All methods of Queue are safe for concurrent use. The library logs to [Options.Logger] only,
// starts no goroutine that Close does not end, but for a compaction of Pebble's that cannot read
// its tables, which is held for ever, and never exits or panics the process when storage fails: the
// shard concerned then returns [ErrUncertain] for what was under way and [ErrFailed] for all that
// follows, until the queue is closed and opened again. While the disk is nearly full, calls return
// [ErrDiskFull]; see [Options.MinFreeBytes].
package codeq
