package codeq_test

import (
	"errors"
	"fmt"
	"time"

	"codeq"
)

// A payment service may call its webhook twice for one payment. The second
// call finds the task of the first, for a day, even if it is completed by then.
func ExampleQueue_Produce_unique() {
	q, done := open()
	defer done()

	webhook := func() (codeq.ID, error) {
		return q.Produce(ctx, codeq.Task{
			Queue:   "payments",
			Payload: []byte(`{"order": 17}`),
			Unique:  codeq.Unique{Key: "payment 4711", For: 24 * time.Hour},
		})
	}

	first, err := webhook()
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"payments"}})
	check(err)
	check(q.Complete(ctx, lease.Receipt, nil))

	second, err := webhook()
	var duplicate *codeq.DuplicateError
	if errors.As(err, &duplicate) {
		fmt.Printf("%q is taken\n", duplicate.Key)
	}
	fmt.Println("by the first task:", second == first)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println("tasks:", counts["payments"].Total())
	// Output:
	// "payment 4711" is taken
	// by the first task: true
	// tasks: 0
}

// A document is indexed when it has not changed for a while, however often it
// changed before: each change replaces the task of the one before it.
func ExampleUnique_debounce() {
	q, done := open()
	defer done()

	changed := func(document, text string) {
		_, err := q.Produce(ctx, codeq.Task{
			Queue:   "index",
			Payload: []byte(text),
			RunAt:   time.Now().Add(20 * time.Millisecond),
			Unique:  codeq.Unique{Key: document, Replace: true},
		})
		// Should a worker have the last change already, this one must not get
		// lost: ErrDuplicate is to be met by trying again.
		check(err)
	}
	changed("readme", "codeq is a")
	changed("readme", "codeq is a queue")
	changed("readme", "codeq is a task queue")

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"index"}})
	check(err)
	fmt.Printf("index: %s\n", lease.Payload)
	check(q.Complete(ctx, lease.Receipt, nil))

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println("left:", counts["index"].Total())
	// Output:
	// index: codeq is a task queue
	// left: 0
}

// An invoice is sent once a month. An operator who has corrected it frees the
// key, so that it can be sent again.
func ExampleQueue_ReleaseKey() {
	q, done := open()
	defer done()

	invoice := codeq.Task{
		Queue:  "invoice",
		Tenant: "gopher",
		Unique: codeq.Unique{Key: "2024-10", For: 31 * 24 * time.Hour},
	}
	_, err := q.Produce(ctx, invoice)
	check(err)
	_, err = q.Produce(ctx, invoice)
	fmt.Println("again:", errors.Is(err, codeq.ErrDuplicate))

	check(q.ReleaseKey(ctx, codeq.UniqueKey{Queue: "invoice", Tenant: "gopher", Key: "2024-10"}))
	_, err = q.Produce(ctx, invoice)
	fmt.Println("after the release:", err)
	// Output:
	// again: true
	// after the release: <nil>
}
