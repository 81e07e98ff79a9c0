package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"codeq"
)

var ctx = context.Background()

// open opens a queue in a directory of its own. With one shard, all tasks of a queue have one
// order.
func open() (q *codeq.Queue, done func()) {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	q, err = codeq.Open(dir, &codeq.Options{Shards: 1})
	check(err)
	return q, func() {
		check(q.Close())
		check(os.RemoveAll(dir))
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleOpen() {
	temp, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(temp)
	dir := filepath.Join(temp, "queue")

	q, err := codeq.Open(dir, &codeq.Options{
		Durability: codeq.DurabilityDisk,
		Retention:  24 * time.Hour,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer q.Close()

	_, err = codeq.Open(dir, nil)
	fmt.Println(errors.Is(err, codeq.ErrLocked))
	// Output: true
}

func ExampleQueue_Produce() {
	q, done := open()
	defer done()

	id, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("to: gopher")})
	check(err)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Printf("%s %s: %s\n", task.State, task.Queue, task.Payload)
	// Output: ready mail: to: gopher
}

// A claim takes the task of the highest priority.
func ExampleQueue_Produce_priority() {
	q, done := open()
	defer done()

	for _, t := range []codeq.Task{
		{Queue: "mail", Payload: []byte("newsletter")},
		{Queue: "mail", Payload: []byte("password reset"), Priority: 9},
	} {
		_, err := q.Produce(ctx, t)
		check(err)
	}

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	fmt.Printf("%s\n", lease.Payload)
	// Output: password reset
}

// A task with RunAt cannot be claimed before that time.
func ExampleQueue_Produce_later() {
	q, done := open()
	defer done()

	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", RunAt: time.Now().Add(time.Hour)})
	check(err)

	_, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}, NoWait: true})
	fmt.Println(errors.Is(err, codeq.ErrEmpty))
	// Output: true
}

// Claims take turns over the tenants, however many tasks each tenant has.
func ExampleQueue_Produce_tenants() {
	q, done := open()
	defer done()

	for _, tenant := range []string{"large", "large", "large", "small"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "report", Tenant: tenant})
		check(err)
	}

	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"report"}, Max: 4})
	check(err)
	for _, lease := range leases {
		fmt.Println(lease.Tenant)
	}
	// Output:
	// large
	// small
	// large
	// large
}

// A batch stores either all of its tasks or none.
func ExampleQueue_ProduceBatch() {
	q, done := open()
	defer done()

	ids, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "pack", Payload: []byte("order 17")},
		{Queue: "mail", Payload: []byte("order 17")},
	})
	check(err)
	fmt.Println(len(ids), "tasks")

	_, err = q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "pack"},
		{Queue: "mail", Priority: 10},
	})
	fmt.Println(err)
	// Output:
	// 2 tasks
	// codeq: ProduceBatch: task 1: invalid Task.Priority: 10 (allowed: 0 to 9)
}

// An error says which tasks of a batch are not stored, and why.
func ExampleQueue_ProduceBatch_duplicates() {
	q, done := open()
	defer done()

	_, err := q.Produce(ctx, codeq.Task{Queue: "pay", Unique: codeq.Unique{Key: "order 17"}})
	check(err)

	_, err = q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "pay", Unique: codeq.Unique{Key: "order 16"}},
		{Queue: "pay", Unique: codeq.Unique{Key: "order 17"}},
	})
	var batch *codeq.BatchError
	if errors.As(err, &batch) {
		for i, err := range batch.Errors {
			fmt.Println(i, "stored:", err == nil, "duplicate:", errors.Is(err, codeq.ErrDuplicate))
		}
	}
	// Output:
	// 0 stored: true duplicate: false
	// 1 stored: false duplicate: true
}

// Claim waits until there is a task.
func ExampleQueue_Claim() {
	q, done := open()
	defer done()

	go func() {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("hello")})
		check(err)
	}()

	lease, err := q.Claim(ctx, codeq.ClaimRequest{
		Queues:   []string{"urgent", "mail"}, // urgent first
		LeaseFor: time.Minute,
	})
	check(err)
	fmt.Printf("attempt %d of %s: %s\n", lease.Attempt, lease.Queue, lease.Payload)
	// Output: attempt 1 of mail: hello
}

func ExampleQueue_ClaimBatch() {
	q, done := open()
	defer done()
	for n := range 5 {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: fmt.Append(nil, n)})
		check(err)
	}

	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"mail"}, Max: 3})
	check(err)
	for _, lease := range leases {
		fmt.Printf("%s\n", lease.Payload)
	}
	// Output:
	// 0
	// 1
	// 2
}

func ExampleQueue_Complete() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "sum", Payload: []byte("2+3"), Retention: time.Hour})
	check(err)

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"sum"}})
	check(err)
	err = q.Complete(ctx, lease.Receipt, []byte("5"))
	check(err)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Printf("%s: %s = %s\n", task.State, task.Payload, task.Result)

	err = q.Complete(ctx, lease.Receipt, []byte("6"))
	fmt.Println(errors.Is(err, codeq.ErrLeaseLost))
	// Output:
	// done: 2+3 = 5
	// true
}

// The follow-ups are stored if and only if the task is completed.
func ExampleQueue_Complete_followUps() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "order", Payload: []byte("17")})
	check(err)

	order, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"order"}})
	check(err)
	err = q.Complete(ctx, order.Receipt, nil,
		codeq.Task{Queue: "pack", Payload: order.Payload},
		codeq.Task{Queue: "mail", Payload: order.Payload},
	)
	check(err)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["order"].Total(), counts["pack"].Ready, counts["mail"].Ready)
	// Output: 0 1 1
}

// A failed attempt counts, and the next attempt sees its error.
func ExampleQueue_Retry() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", MaxAttempts: 2})
	check(err)

	mail := codeq.ClaimRequest{Queues: []string{"mail"}}
	lease, err := q.Claim(ctx, mail)
	check(err)
	err = q.Retry(ctx, lease.Receipt, codeq.RetryOptions{
		Err:   errors.New("connection refused"),
		After: -1, // at once; 0 waits by Options.Backoff
	})
	check(err)

	lease, err = q.Claim(ctx, mail)
	check(err)
	fmt.Printf("attempt %d, after: %s\n", lease.Attempt, lease.LastError)
	err = q.Retry(ctx, lease.Receipt, codeq.RetryOptions{})
	check(err)

	task, err := q.Get(ctx, lease.ID)
	check(err)
	fmt.Println(task.State)
	// Output:
	// attempt 2, after: connection refused
	// dead
}

// A worker that cannot work on a task now gives it back; the attempt does not count.
func ExampleQueue_Release() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	err = q.Release(ctx, lease.Receipt, time.Hour)
	check(err)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Println(task.State, task.Attempts)
	// Output: scheduled 0
}

func ExampleQueue_DeadLetter() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	err = q.DeadLetter(ctx, lease.Receipt, errors.New("no such mailbox"))
	check(err)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Printf("%s: %s\n", task.State, task.LastError)
	// Output: dead: no such mailbox
}

// A worker that claims many tasks ends them in one call, at the price of one commit a shard. Each
// has an outcome of its own.
func ExampleQueue_CompleteBatch() {
	q, done := open()
	defer done()
	leases := claimMails(q, 3)
	err := q.Cancel(ctx, leases[1].ID)
	check(err)

	completions := make([]codeq.Completion, len(leases))
	for i, lease := range leases {
		completions[i].Receipt = lease.Receipt
	}
	err = q.CompleteBatch(ctx, completions)
	var batch *codeq.BatchError
	if errors.As(err, &batch) {
		for i, err := range batch.Errors {
			fmt.Println(i, err == nil, errors.Is(err, codeq.ErrCanceled))
		}
	}
	// Output:
	// 0 true false
	// 1 false true
	// 2 true false
}

// claimMails produces n tasks, and claims them.
func claimMails(q *codeq.Queue, n int) []*codeq.Lease {
	tasks := make([]codeq.Task, n)
	for i := range tasks {
		tasks[i] = codeq.Task{Queue: "mail", Payload: fmt.Append(nil, i)}
	}
	_, err := q.ProduceBatch(ctx, tasks)
	check(err)
	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"mail"}, Max: n})
	check(err)
	return leases
}

// The mail server has refused some mails for now.
func ExampleQueue_RetryBatch() {
	q, done := open()
	defer done()
	leases := claimMails(q, 2)

	err := q.RetryBatch(ctx, []codeq.Failure{
		{Receipt: leases[0].Receipt, Err: errors.New("mailbox full"), After: time.Hour},
		{Receipt: leases[1].Receipt, Err: errors.New("server busy")}, // by Options.Backoff
	})
	check(err)
	for _, lease := range leases {
		task, err := q.Get(ctx, lease.ID)
		check(err)
		fmt.Printf("%s: %s\n", task.State, task.LastError)
	}
	// Output:
	// scheduled: mailbox full
	// scheduled: server busy
}

func ExampleQueue_DeadLetterBatch() {
	q, done := open()
	defer done()
	leases := claimMails(q, 2)

	err := q.DeadLetterBatch(ctx, []codeq.Failure{
		{Receipt: leases[0].Receipt, Err: errors.New("no such mailbox")},
		{Receipt: leases[1].Receipt},
	})
	check(err)
	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["mail"].Dead)
	// Output: 2
}

// A worker that claims many tasks keeps them while it works, and gives back those that it cannot
// work on.
func ExampleQueue_ExtendBatch() {
	q, done := open()
	defer done()
	leases := claimMails(q, 3)
	receipts := make([]codeq.Receipt, len(leases))
	for i, lease := range leases {
		receipts[i] = lease.Receipt
	}

	err := q.ExtendBatch(ctx, receipts, time.Hour)
	check(err)
	err = q.ReleaseBatch(ctx, receipts[1:], 0)
	check(err)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["mail"].Leased, counts["mail"].Ready)
	// Output: 1 2
}

func ExampleQueue_ReleaseBatch() {
	q, done := open()
	defer done()
	leases := claimMails(q, 2)

	err := q.ReleaseBatch(ctx, []codeq.Receipt{leases[0].Receipt, leases[1].Receipt}, time.Hour)
	check(err)
	task, err := q.Get(ctx, leases[1].ID)
	check(err)
	fmt.Println(task.State, task.Attempts)
	// Output: scheduled 0
}

// A worker that needs more time extends its lease.
func ExampleQueue_Extend() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "video"})
	check(err)

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"video"}, LeaseFor: time.Minute})
	check(err)
	err = q.Extend(ctx, lease.Receipt, time.Hour)
	check(err)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Println(task.State, task.At.After(lease.Deadline))
	// Output: leased true
}

// Run ends with its context. Here the last handler ends it.
func ExampleQueue_Run() {
	q, done := open()
	defer done()
	_, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "mail", Payload: []byte("first")},
		{Queue: "mail", Payload: []byte("second")},
	})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		fmt.Printf("send %s\n", job.Args)
		if string(job.Args) == "second" {
			stop()
		}
		return nil
	})
	err = q.Run(ctx, &mux, &codeq.RunOptions{Concurrency: 1})
	check(err)
	fmt.Println("all handlers have ended")
	// Output:
	// send first
	// send second
	// all handlers have ended
}

// A handler gets the decoded JSON of the payload. The completion stores its result and its
// follow-ups.
func ExampleHandle() {
	q, done := open()
	defer done()

	type Order struct {
		Number int
		Item   string
	}
	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "order", func(ctx context.Context, job *codeq.Job[Order]) error {
		job.SetResult([]byte("charged"))
		job.FollowUp(codeq.Task{Queue: "pack", Payload: []byte(job.Args.Item)})
		return nil
	})
	codeq.Handle(&mux, "pack", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		fmt.Printf("pack a %s\n", job.Args)
		stop()
		return nil
	})

	id, err := q.Produce(ctx, codeq.Task{
		Queue:     "order",
		Payload:   []byte(`{"Number": 17, "Item": "teapot"}`),
		Retention: time.Hour,
	})
	check(err)
	check(q.Run(ctx, &mux, nil))

	order, err := q.Get(context.Background(), id)
	check(err)
	fmt.Printf("order %s: %s\n", order.State, order.Result)
	// Output:
	// pack a teapot
	// order done: charged
}

// A handler postpones its task; the attempt does not count.
func ExampleSnooze() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "bake"})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	warm := false
	var mux codeq.Mux
	codeq.Handle(&mux, "bake", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		if !warm {
			warm = true
			fmt.Println("the oven is cold")
			return codeq.Snooze(time.Millisecond)
		}
		fmt.Println("attempt", job.Attempt)
		stop()
		return nil
	})
	check(q.Run(ctx, &mux, &codeq.RunOptions{Concurrency: 1}))
	// Output:
	// the oven is cold
	// attempt 1
}

// A handler chooses when its failed task is tried again.
func ExampleRetryAfter() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "fetch"})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "fetch", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		if job.Attempt == 1 {
			return codeq.RetryAfter(time.Millisecond, errors.New("too many requests"))
		}
		fmt.Printf("attempt %d, after: %s\n", job.Attempt, job.LastError)
		stop()
		return nil
	})
	check(q.Run(ctx, &mux, nil))
	// Output: attempt 2, after: too many requests
}

// A handler gives up its task, even if attempts are left.
func ExampleDeadLetter() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		stop()
		return codeq.DeadLetter(errors.New("no such mailbox"))
	})
	check(q.Run(ctx, &mux, nil))

	task, err := q.Get(context.Background(), id)
	check(err)
	fmt.Printf("%s after attempt %d: %s\n", task.State, task.Attempts, task.LastError)
	// Output: dead after attempt 1: no such mailbox
}

func ExampleQueue_Stats() {
	q, done := open()
	defer done()
	_, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "mail"},
		{Queue: "mail"},
		{Queue: "mail", RunAt: time.Now().Add(time.Hour)},
		{Queue: "video"},
	})
	check(err)
	_, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Printf("mail: %+v\n", counts["mail"])
	fmt.Println("video:", counts["video"].Total())
	// Output:
	// mail: {Ready:1 Scheduled:1 Blocked:0 Leased:1 Dead:0 Done:0 Canceled:0}
	// video: 1
}

// The number of tasks of a queue, in all states.
func ExampleCounts_Total() {
	q, done := open()
	defer done()
	_, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "mail"},
		{Queue: "mail", RunAt: time.Now().Add(time.Hour)},
	})
	check(err)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["mail"].Ready, "of", counts["mail"].Total())
	// Output: 1 of 2
}

// A user of a web page enters the ID of a task.
func ExampleParseID() {
	id, err := codeq.ParseID("0193b3c0-7a1e-7b2c-9d3e-4f5061728394")
	check(err)
	fmt.Println(id)

	_, err = codeq.ParseID("42")
	fmt.Println(errors.Is(err, codeq.ErrInvalid))
	// Output:
	// 0193b3c0-7a1e-7b2c-9d3e-4f5061728394
	// true
}

// An ID contains the time when its task was produced.
func ExampleID_Time() {
	id, err := codeq.ParseID("0193b3c0-7a1e-7b2c-9d3e-4f5061728394")
	check(err)
	fmt.Println(id.Time().UTC())
	// Output: 2024-12-11 03:25:56.126 +0000 UTC
}

// The waits after the failed attempts of a task, without their random part.
func ExampleBackoff_Delay() {
	b := codeq.Backoff{Base: time.Second, Max: time.Minute, Factor: 4, Jitter: -1}
	for attempt := 1; attempt <= 4; attempt++ {
		fmt.Println(b.Delay(attempt, 0))
	}
	// Output:
	// 1s
	// 4s
	// 16s
	// 1m0s
}

// Linear and fixed waits.
func ExampleBackoff() {
	linear := codeq.Backoff{Base: time.Second, Step: time.Minute, Max: time.Hour, Factor: 1, Jitter: -1}
	fixed := codeq.Backoff{Base: time.Second, Max: time.Hour, Factor: 1, Jitter: -1}
	for attempt := 1; attempt <= 3; attempt++ {
		fmt.Println(linear.Delay(attempt, 0), fixed.Delay(attempt, 0))
	}
	// Output:
	// 1s 1s
	// 1m1s 1s
	// 2m1s 1s
}

func ExampleQueue_Get() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "mail", Headers: map[string]string{"trace": "4bf92f"}})
	check(err)

	task, err := q.Get(ctx, id)
	check(err)
	fmt.Println(task.State, task.Attempts, task.Headers["trace"])

	_, err = q.Get(ctx, codeq.ID{})
	fmt.Println(errors.Is(err, codeq.ErrNotFound))
	// Output:
	// ready 0 4bf92f
	// true
}

func ExampleQueue_List() {
	q, done := open()
	defer done()
	for _, name := range []string{"anna", "bert"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte(name)})
		check(err)
		lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(err)
		check(q.DeadLetter(ctx, lease.Receipt, errors.New("no such mailbox")))
	}

	for task, err := range q.List(ctx, codeq.ListOptions{Queue: "mail", State: codeq.Dead}) {
		check(err)
		fmt.Printf("%s: %s\n", task.Payload, task.LastError)
	}
	// Output:
	// anna: no such mailbox
	// bert: no such mailbox
}

// A claim that waits ends when the queue is closed.
func ExampleQueue_Close() {
	q, done := open()
	defer done()

	ended := make(chan error)
	go func() {
		_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		ended <- err
	}()
	err := q.Close()
	check(err)
	fmt.Println(errors.Is(<-ended, codeq.ErrClosed))
	// Output: true
}

// A receipt goes to a worker on another machine as text. It comes back when the worker is done.
func ExampleReceipt() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "video"})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"video"}})
	check(err)

	text := lease.Receipt.String()

	var receipt codeq.Receipt
	err = receipt.UnmarshalText([]byte(text))
	check(err)
	err = q.Complete(ctx, receipt, nil)
	check(err)
	fmt.Println(receipt == lease.Receipt)
	// Output: true
}

func ExampleQueue_WaitIdle() {
	q, done := open()
	defer done()
	for _, name := range []string{"a", "b", "c"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "files", Payload: []byte(name)})
		check(err)
	}
	var mux codeq.Mux
	var worked atomic.Int64
	codeq.Handle(&mux, "files", func(context.Context, *codeq.Job[[]byte]) error {
		worked.Add(1)
		return nil
	})
	run, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(run, &mux, nil) }()

	check(q.WaitIdle(ctx, "files"))
	stop()
	check(<-ended)
	fmt.Println(worked.Load(), "files")
	// Output: 3 files
}

// With Await, a task works like a function call: Await returns the result or the error of the
// handler.
func ExampleQueue_Await() {
	q, done := open()
	defer done()
	var mux codeq.Mux
	codeq.Handle(&mux, "square", func(ctx context.Context, job *codeq.Job[int]) error {
		if job.Args > 100 {
			return codeq.DeadLetter(errors.New("too large"))
		}
		return job.SetResultValue(job.Args * job.Args)
	})
	run, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(run, &mux, nil) }()

	for _, n := range []string{"12", "1000"} {
		id, err := q.Produce(ctx, codeq.Task{Queue: "square", Payload: []byte(n), Retention: time.Minute})
		check(err)
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		outcome, err := q.Await(call, id)
		cancel()
		check(err)
		if outcome.State == codeq.Done {
			fmt.Printf("%s squared is %s\n", n, outcome.Result)
		} else {
			fmt.Printf("%s is %s: %s\n", n, outcome.State, outcome.LastError)
		}
	}
	stop()
	check(<-ended)
	// Output:
	// 12 squared is 144
	// 1000 is dead: too large
}

// Call produces a task, and returns the result of its handler.
func ExampleCall() {
	q, done := open()
	defer done()
	var mux codeq.Mux
	codeq.Handle(&mux, "square", func(ctx context.Context, job *codeq.Job[int]) error {
		if job.Args > 100 {
			return codeq.DeadLetter(errors.New("too large"))
		}
		return job.SetResultValue(job.Args * job.Args)
	})
	run, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(run, &mux, nil) }()

	for _, n := range []int{12, 1000} {
		task, err := codeq.NewTask("square", n)
		check(err)
		square, err := codeq.Call[int](ctx, q, task)
		var failed *codeq.CallError
		if errors.As(err, &failed) {
			fmt.Println(n, "is", failed.Outcome.State, "since it is", failed.Outcome.LastError)
			continue
		}
		check(err)
		fmt.Println(n, "squared is", square)
	}
	stop()
	check(<-ended)
	// Output:
	// 12 squared is 144
	// 1000 is dead since it is too large
}
