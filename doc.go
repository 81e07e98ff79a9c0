// Package codeq is a durable task queue inside the process that uses it. It needs no broker and no
// database server, and listens on the network only with [Options.Cluster].
//
// [Open] a directory, [Queue.Produce] tasks, and either [Queue.Claim] and [Queue.Complete] them one
// by one or let [Queue.Run] drive a pool of workers.
//
// # Guarantees
//
// A call that returns without an error has persisted at the [Durability] of the queue. Tasks are
// delivered at least once: when a lease expires, the attempt counts and the task is delivered
// again, until it is out of attempts and becomes a dead letter. The verbs that take the [Receipt]
// of a lease that has expired or ended return [ErrLeaseLost]. Follow-up tasks of Complete exist
// exactly if the task is done.
//
// # Order
//
// A claim takes the highest priority first, tenants in turn, and for each tenant the task that has
// been ready for longest; [Queue.Claim] tells how that holds with several shards.
//
// # Time
//
// Leases run by the monotonic clock while the queue is open, and by the wall clock over a restart,
// which never makes them longer. Tasks produced for a time become ready when the wall clock shows
// it; if the clock is set, this is noticed within a minute. A period (retry waits, retention, For
// of an idempotency key) ends earlier if the clock is set forward, but never later: at the latest
// when its length has passed since [Open], or since the shard has its leader, by the monotonic
// clock. All times have the resolution of a millisecond.
//
// # More than one task
//
// [Task.Unique] gives a task an idempotency key, [Task.Group] makes tasks follow each other,
// [Task.LimitKey] bounds how many are worked on at a time, and [Task.After] makes a task wait for
// others. [Queue.Configure] pauses a queue, limits its concurrency and rate, gives weights to its
// tenants and sets how long ended tasks are kept. [Queue.SetSchedule] produces tasks by a cron
// expression, [Queue.Await] waits for the end of a task, and [Queue.Subscribe] reports all changes.
// With several shards, tasks that are bound to each other lie in one shard, and messages between
// shards are applied exactly once.
//
// # JSON
//
// [Task], [Lease], [TaskInfo], [Outcome], [Event], [Schedule] and [ScheduleInfo] are encoded as
// JSON that decodes to the same values, if their texts are UTF-8. The names are those of the
// fields, and zero fields are omitted. States and other kinds, IDs and receipts are strings. A
// payload or a result is in base64, as encoding/json writes bytes; a duration is a number of
// nanoseconds, and [Forever] is -1. A time is as in RFC 3339, in its own zone. All times that the
// library returns are in UTC, and none is later than the year 9999, which JSON could not write.
//
// # Several nodes
//
// With [Options.Cluster], three or five processes hold the same tasks, and every call may be made
// on each of them; see [Cluster]. [ErrNotLeader] says that the call was certainly not applied,
// [ErrUncertain] that it may have been; the library retries a produce in either case, and never
// stores it twice.
//
// [OpenReadOnly] shows the content of a closed queue's directory; [Verify] checks it, and repairs
// it.
//
// # Errors
//
// Branch with errors.Is on the errors that each verb lists: a returned error wraps one of them,
// adds what failed and the value that was refused, and its text begins with "codeq: ". After
// [ErrInvalid], [ErrClosed], ErrFailed, ErrNotLeader and ErrDiskFull nothing was applied;
// [ErrUncertain] leaves that open. If the ctx of a call has ended, the error matches
// context.Canceled or context.DeadlineExceeded, and the cause of ctx if it has one; if the
// operation was under way, it matches ErrUncertain as well. A field named LastError is the text of
// an error.
//
// # Concurrency
//
// All methods of [Queue] are safe for concurrent use. The library logs only to [Options.Logger].
// [Queue.Close] ends every goroutine that it has started. When storage fails, the library never
// exits or panics the process: the shard concerned returns [ErrUncertain] for the operations under
// way and [ErrFailed] for all later ones, until the queue is closed and opened again. While the
// disk is nearly full, calls return [ErrDiskFull]; see [Options.MinFreeBytes]. Package codeqtest
// helps to test programs that use codeq.
package codeq
