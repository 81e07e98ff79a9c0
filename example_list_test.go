package codeq_test

import (
	"errors"
	"fmt"
	"time"

	"codeq"
)

// What a tenant has planned for the next hours, in the order in which it comes.
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

// What has happened to a dead letter: each attempt, with the error and the worker.
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
