package codeq_test

import (
	"errors"
	"fmt"
	"net/url"
	"time"

	"codeq"
)

// The scheduled tasks of a tenant for the next hours, in the order of their times.
func ExampleQueue_List_filter() {
	q, done := open()
	defer done()
	now := time.Now()
	for _, t := range []codeq.Task{
		{Queue: "mail", Tenant: "acme", RunAt: now.Add(2 * time.Hour), Payload: []byte("reminder")},
		{Queue: "mail", Tenant: "acme", RunAt: now.Add(1 * time.Hour), Payload: []byte("welcome")},
		{Queue: "mail", Tenant: "acme", RunAt: now.Add(48 * time.Hour), Payload: []byte("survey")},
		{Queue: "mail", Tenant: "zeta", RunAt: now.Add(1 * time.Hour), Payload: []byte("invoice")},
	} {
		_, err := q.Produce(ctx, t)
		check(err)
	}

	for task, err := range q.List(ctx, codeq.ListOptions{
		State: codeq.Scheduled, Queue: "mail", Tenants: []string{"acme"}, To: now.Add(24 * time.Hour),
	}) {
		check(err)
		fmt.Printf("%s in %v\n", task.Payload, task.At.Sub(now).Round(time.Hour))
	}
	// Output:
	// welcome in 1h0m0s
	// reminder in 2h0m0s
}

// The history of a dead letter: each attempt, with its error and its worker.
func ExampleAttempt() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", MaxAttempts: 2})
	check(err)
	for _, cause := range []string{"connection refused", "mailbox full"} {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}, Worker: "mailer-1"})
		check(err)
		check(q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New(cause), After: -1}))
	}
	for task, err := range q.List(ctx, codeq.ListOptions{State: codeq.Dead}) {
		check(err)
		for _, a := range task.History {
			fmt.Println(a.Number, a.Outcome, "by", a.Worker+":", a.Error)
		}
	}
	// Output:
	// 1 retried by mailer-1: connection refused
	// 2 dead by mailer-1: mailbox full
}

// A web page shows the latest dead letters, a few at a time. Its link to the next page contains the
// cursor. It leaves out the payloads, since they may be large.
// A search for the tasks of a customer.
func ExamplePageOptions_search() {
	q, done := open()
	defer done()
	for _, customer := range []string{"Ada", "Eve"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "orders", Payload: []byte(`{"customer":"` + customer + `"}`)})
		check(err)
	}
	page, err := q.ListPage(ctx, codeq.PageOptions{TaskFilter: codeq.TaskFilter{Text: "customer\":\"ada", Contents: true}})
	check(err)
	for _, task := range page.Tasks {
		fmt.Println(string(task.Payload))
	}
	fmt.Println(page.Scanned, "looked at, last page:", page.Next == "")
	// Output:
	// {"customer":"Ada"}
	// 2 looked at, last page: true
}

func ExampleQueue_ListPage() {
	q, done := open()
	defer done()
	for i := range 5 {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Headers: map[string]string{"to": fmt.Sprint("user ", i)}})
		check(err)
		lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(err)
		check(q.DeadLetter(ctx, lease.Receipt, errors.New("mailbox full")))
	}

	show := func(link string) (next string) {
		page, err := q.ListPage(ctx, codeq.PageOptions{
			TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, Queue: "mail"},
			Newest:     true, NoPayload: true, Limit: 3, Cursor: link,
		})
		check(err)
		for _, task := range page.Tasks {
			fmt.Println(task.Headers["to"])
		}
		return page.Next
	}
	next := show("")
	fmt.Println("a part of a URL:", next == url.QueryEscape(next))
	fmt.Println("is there more?", show(next) != "")
	// Output:
	// user 4
	// user 3
	// user 2
	// a part of a URL: true
	// user 1
	// user 0
	// is there more? false
}

// Dead letters are grouped by the kind of their errors, and one group is redriven.
func ExampleErrorKind() {
	q, done := open()
	defer done()
	for _, err := range []string{"dial 10.0.0.7: refused", "user 17 has no address", "dial 10.0.0.8: refused"} {
		_, produceErr := q.Produce(ctx, codeq.Task{Queue: "mail"})
		check(produceErr)
		lease, claimErr := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(claimErr)
		check(q.DeadLetter(ctx, lease.Receipt, errors.New(err)))
	}

	kinds := make(map[string]int)
	for task, err := range q.List(ctx, codeq.ListOptions{State: codeq.Dead}) {
		check(err)
		kinds[codeq.ErrorKind(task.LastError)]++
	}
	fmt.Println(kinds)

	time.Sleep(2 * time.Millisecond) // Bulk skips tasks that die while it runs
	result, err := q.Bulk(ctx, codeq.BulkOptions{
		Action: codeq.BulkRedrive, TaskFilter: codeq.TaskFilter{ErrorKind: "dial #.#.#.#: refused"},
	})
	check(err)
	fmt.Println("redriven:", result.Changed)
	// Output:
	// map[dial #.#.#.#: refused:2 user # has no address:1]
	// redriven: 2
}

// Two thousand tasks are in the wrong queue. A dry run counts them. Then they move, at a limited
// rate. After an interruption, the move continues from the same place.
func ExampleQueue_Bulk() {
	q, done := open()
	defer done()
	tasks := make([]codeq.Task, 2000)
	for i := range tasks {
		tasks[i] = codeq.Task{Queue: "mial", Payload: []byte("hello")}
	}
	_, err := q.ProduceBatch(ctx, tasks)
	check(err)
	time.Sleep(2 * time.Millisecond) // Bulk skips tasks that are produced while it runs

	move := codeq.BulkOptions{
		Action: codeq.BulkMove, ToQueue: "mail",
		TaskFilter: codeq.TaskFilter{Queue: "mial", States: []codeq.State{codeq.Ready, codeq.Scheduled}},
	}
	move.DryRun = true
	result, err := q.Bulk(ctx, move)
	check(err)
	fmt.Println("would move:", result.Matched)

	move.DryRun, move.Rate = false, 100_000
	moved := 0
	for {
		result, err = q.Bulk(ctx, move)
		moved += result.Changed
		if err == nil {
			break
		}
		move.Cursor = result.Next // perhaps tomorrow
	}
	fmt.Println("moved:", moved)
	// Output:
	// would move: 2000
	// moved: 2000
}

// The outcome of an order's payment, found by its key.
func ExampleQueue_FindByKey() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "payments", Unique: codeq.Unique{Key: "order 17", For: 24 * time.Hour}, Retention: time.Hour})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"payments"}})
	check(err)
	check(q.Complete(ctx, lease.Receipt, []byte("paid")))

	task, err := q.FindByKey(ctx, codeq.UniqueKey{Queue: "payments", Key: "order 17"})
	check(err)
	fmt.Printf("%v: %s\n", task.State, task.Result)
	_, err = q.FindByKey(ctx, codeq.UniqueKey{Queue: "payments", Key: "order 18"})
	fmt.Println(errors.Is(err, codeq.ErrNotFound))
	// Output:
	// done: paid
	// true
}

// A user's data is deleted, also the data of a completed task.
func ExampleQueue_Forget() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "exports", Payload: []byte("personal data"), Retention: codeq.Forever})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"exports"}})
	check(err)
	check(q.Complete(ctx, lease.Receipt, nil))

	check(q.Forget(ctx, id))
	_, err = q.Get(ctx, id)
	fmt.Println(errors.Is(err, codeq.ErrNotFound))
	// Output: true
}
