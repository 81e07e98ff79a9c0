package codeq_test

import (
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
