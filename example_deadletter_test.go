package codeq_test

import (
	"errors"
	"fmt"
	"strings"

	"codeq"
)

// makeDead makes a task for each address a dead letter.
func makeDead(q *codeq.Queue, cause string, addresses ...string) (ids []codeq.ID) {
	for _, to := range addresses {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte(to)})
		check(err)
		lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(err)
		check(q.DeadLetter(ctx, lease.Receipt, errors.New(cause)))
		ids = append(ids, lease.ID)
	}
	return ids
}

// A dead letter whose cause is mended gets all its attempts again.
func ExampleQueue_RedriveDead() {
	q, done := open()
	defer done()
	ids := makeDead(q, "no such mailbox", "anna@example.com")

	check(q.RedriveDead(ctx, ids[0]))

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	fmt.Printf("%s: attempt %d, died of %q\n", lease.Payload, lease.Attempt, lease.LastError)

	err = q.RedriveDead(ctx, ids[0])
	fmt.Println("no dead letter any more:", errors.Is(err, codeq.ErrNotFound))
	// Output:
	// anna@example.com: attempt 1, died of "no such mailbox"
	// no dead letter any more: true
}

// After an outage, what died of it is tried again, at a rate that the server
// can bear. What died of something else stays.
func ExampleQueue_RedriveAllDead() {
	q, done := open()
	defer done()
	makeDead(q, "connection refused", "anna@example.com", "bert@example.com")
	makeDead(q, "no such mailbox", "nobody@example.com")

	n, err := q.RedriveAllDead(ctx, codeq.DeadFilter{
		Queue: "mail",
		Match: func(t *codeq.TaskInfo) bool { return strings.Contains(t.LastError, "refused") },
		Rate:  100, // a second
	})
	check(err)
	fmt.Println("redriven:", n)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println("ready:", counts["mail"].Ready, "dead:", counts["mail"].Dead)
	// Output:
	// redriven: 2
	// ready: 2 dead: 1
}

// Dead letters that nobody is going to look at are forgotten.
func ExampleQueue_PurgeDead() {
	q, done := open()
	defer done()
	makeDead(q, "no such mailbox", "anna@example.com", "bert@example.com")

	n, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "mail"})
	check(err)
	fmt.Println("forgotten:", n)

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println("left:", counts["mail"].Total())
	// Output:
	// forgotten: 2
	// left: 0
}
