package codeq_test

import (
	"errors"
	"fmt"

	"codeq"
)

// A service with a quota gets three calls at a time, and a hundred a second. The
// limits are stored with the queue, and may be changed while it runs.
func ExampleQueue_Configure() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "translate", func(s *codeq.Settings) {
		s.Concurrency = 3
		s.Rate, s.Burst = 100, 10
	}))

	for range 20 {
		_, err := q.Produce(ctx, codeq.Task{Queue: "translate"})
		check(err)
	}
	translate := codeq.ClaimRequest{Queues: []string{"translate"}, Max: 20}
	leases, err := q.ClaimBatch(ctx, translate)
	check(err)
	fmt.Println(len(leases), "at a time")

	check(q.Configure(ctx, "translate", func(s *codeq.Settings) { s.Concurrency += 2 }))
	more, err := q.ClaimBatch(ctx, translate)
	check(err)
	fmt.Println(len(more), "more")

	settings, err := q.Settings("translate")
	check(err)
	fmt.Println(settings.Concurrency, settings.Rate)
	// Output:
	// 3 at a time
	// 2 more
	// 5 100
}

// No customer's shop gets more than one request at a time. Its further tasks step
// aside, and those of other customers get past them.
func ExampleSettings_concurrencyPerKey() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "sync", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))

	for _, shop := range []string{"flowers", "flowers", "books"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "sync", LimitKey: shop})
		check(err)
	}
	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"sync"}, Max: 3})
	check(err)
	for _, lease := range leases {
		fmt.Println(lease.LimitKey)
	}

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["sync"].Blocked, "waits")

	check(q.Complete(ctx, leases[0].Receipt, nil))
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"sync"}})
	check(err)
	fmt.Println(lease.LimitKey)
	// Output:
	// flowers
	// books
	// 1 waits
	// flowers
}

// The queue of a customer who has gone is removed, once nobody uses it.
func ExampleQueue_DeleteQueue() {
	q, done := open()
	defer done()

	check(q.Configure(ctx, "acme", func(s *codeq.Settings) { s.Concurrency = 2 }))
	id, err := q.Produce(ctx, codeq.Task{Queue: "acme"})
	check(err)
	var used *codeq.NotEmptyError
	if errors.As(q.DeleteQueue(ctx, "acme"), &used) {
		fmt.Println("tasks that are ready:", used.Counts.Ready)
	}
	check(q.Cancel(ctx, id))
	check(q.DeleteQueue(ctx, "acme"))
	queues, err := q.Info(ctx)
	check(err)
	fmt.Println("queues:", len(queues))
	// Output:
	// tasks that are ready: 1
	// queues: 0
}
