package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"codeq"
)

// A task waits for an earlier task, and reads its result.
func ExampleTask_after() {
	q, done := open()
	defer done()

	video, err := q.Produce(ctx, codeq.Task{Queue: "encode", Payload: []byte("cats"), Retention: time.Hour})
	check(err)
	mail, err := q.Produce(ctx, codeq.Task{Queue: "notify", After: []codeq.ID{video}})
	check(err)
	task, err := q.Get(ctx, mail)
	check(err)
	fmt.Println("notify is", task.State)

	run, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "encode", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		job.SetResult(append(job.Payload, ".mp4"...))
		return nil
	})
	codeq.Handle(&mux, "notify", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		parents, err := job.Parents(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("%s is ready\n", parents[0].Result)
		stop()
		return nil
	})
	check(q.Run(run, &mux, nil))
	// Output:
	// notify is blocked
	// cats.mp4 is ready
}

// Workers make the parts of a report at the same time. One commit stores all tasks: the whole flow,
// or nothing.
func ExampleNth() {
	q, done := open()
	defer done()

	ids, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "fetch", Payload: []byte("orders"), Retention: time.Hour},
		{Queue: "count", Payload: []byte("north"), After: []codeq.ID{codeq.Nth(0)}, Retention: time.Hour},
		{Queue: "count", Payload: []byte("south"), After: []codeq.ID{codeq.Nth(0)}, Retention: time.Hour},
		{Queue: "report", After: []codeq.ID{codeq.Nth(1), codeq.Nth(2)}, Retention: time.Hour},
	})
	check(err)

	var mux codeq.Mux
	codeq.Handle(&mux, "fetch", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	codeq.Handle(&mux, "count", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		job.SetResult(fmt.Appendf(nil, "%s: %d letters", job.Payload, len(job.Payload)))
		return nil
	})
	codeq.Handle(&mux, "report", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		var lines []string
		parts, err := job.Parents(ctx)
		if err != nil {
			return err
		}
		for _, part := range parts {
			lines = append(lines, string(part.Result))
		}
		job.SetResult([]byte(strings.Join(lines, "\n")))
		return nil
	})
	run, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(run, &mux, nil) }()

	report, err := q.Await(ctx, ids[3])
	check(err)
	stop()
	check(<-ended)
	fmt.Printf("%s\n", report.Result)
	// Output:
	// north: 5 letters
	// south: 5 letters
}

// The handler of a task gets the results of all of its parents in one call.
func ExampleJob_Parents() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "square", func(ctx context.Context, job *codeq.Job[int]) error {
		return job.SetResultValue(job.Args * job.Args)
	})
	codeq.Handle(&mux, "sum", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		parents, err := job.Parents(ctx)
		if err != nil {
			return err
		}
		sum := 0
		for _, parent := range parents {
			square, err := codeq.ResultAs[int](parent)
			if err != nil {
				return err
			}
			sum += square
		}
		fmt.Println("sum of the squares:", sum)
		return nil
	})
	_, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "square", Payload: []byte("3"), Retention: time.Hour},
		{Queue: "square", Payload: []byte("4"), Retention: time.Hour},
		{Queue: "sum", After: []codeq.ID{codeq.Nth(0), codeq.Nth(1)}},
	})
	check(err)
	check(q.Run(ctx, &mux, nil))
	// Output: sum of the squares: 25
}

// OnDead says whether a task waits, is canceled, or runs when a task before it becomes a dead
// letter.
func ExampleOnDead() {
	q, done := open()
	defer done()

	ids, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "charge"},
		{Queue: "ship", After: []codeq.ID{codeq.Nth(0)}}, // HoldOnDead
		{Queue: "offer", After: []codeq.ID{codeq.Nth(0)}, OnDead: codeq.CancelOnDead, Retention: time.Hour},
		{Queue: "invoice", After: []codeq.ID{codeq.Nth(0)}, OnDead: codeq.RunOnDead},
	})
	check(err)
	claim := func(queue string) *codeq.Lease {
		lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
		check(err)
		return lease
	}
	charge := claim("charge")
	check(q.DeadLetter(ctx, charge.Receipt, errors.New("card expired")))

	ship, err := q.Get(ctx, ids[1])
	check(err)
	fmt.Println("ship is", ship.State)
	offer, err := q.Await(ctx, ids[2])
	check(err)
	fmt.Println("offer is", offer.State)
	invoice := claim("invoice")
	fmt.Println("invoice is claimed, attempt", invoice.Attempt)

	check(q.RedriveDead(ctx, charge.ID))
	check(q.Complete(ctx, claim("charge").Receipt, nil))
	fmt.Println("ship is claimed, attempt", claim("ship").Attempt)
	// Output:
	// ship is blocked
	// offer is canceled
	// invoice is claimed, attempt 1
	// ship is claimed, attempt 1
}

// OnMissing says whether a task is refused, is canceled, or runs if a task before it does not
// exist. The outcome of a task that is no longer kept is unknown.
func ExampleOnMissing() {
	q, done := open()
	defer done()

	order, err := q.Produce(ctx, codeq.Task{Queue: "order"})
	check(err)
	check(q.Cancel(ctx, order))

	_, err = q.Produce(ctx, codeq.Task{Queue: "pack", After: []codeq.ID{order}, OnMissing: codeq.RefuseOnMissing})
	fmt.Println("pack is stored:", !errors.Is(err, codeq.ErrNotFound))
	ship, err := q.Produce(ctx, codeq.Task{
		Queue: "ship", After: []codeq.ID{order}, OnMissing: codeq.CancelOnMissing, Retention: time.Hour,
	})
	check(err)
	end, err := q.Await(ctx, ship)
	check(err)
	fmt.Println("ship is", end.State)
	tidy, err := q.Produce(ctx, codeq.Task{Queue: "tidy", After: []codeq.ID{order}}) // RunOnMissing
	check(err)
	task, err := q.Get(ctx, tidy)
	check(err)
	fmt.Println("tidy is", task.State)
	// Output:
	// pack is stored: false
	// ship is canceled
	// tidy is ready
}

// The changes of one account are made one after the other, in their order, even if one of them is
// tried again. The changes of other accounts continue meanwhile.
func ExampleTask_group() {
	q, done := open()
	defer done()
	for _, change := range []struct{ account, what string }{
		{"anna", "deposit 10"}, {"anna", "withdraw 5"}, {"bert", "deposit 7"},
	} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "ledger", Group: change.account, Payload: []byte(change.what)})
		check(err)
	}
	ledger := codeq.ClaimRequest{Queues: []string{"ledger"}, NoWait: true}

	deposit, err := q.Claim(ctx, ledger)
	check(err)
	fmt.Printf("%s: %s\n", deposit.Group, deposit.Payload)
	other, err := q.Claim(ctx, ledger)
	check(err)
	fmt.Printf("%s: %s\n", other.Group, other.Payload)

	_, err = q.Claim(ctx, ledger)
	fmt.Println("anna has to wait:", errors.Is(err, codeq.ErrEmpty))

	check(q.Complete(ctx, deposit.Receipt, nil))
	withdrawal, err := q.Claim(ctx, ledger)
	check(err)
	fmt.Printf("%s: %s\n", withdrawal.Group, withdrawal.Payload)
	// Output:
	// anna: deposit 10
	// bert: deposit 7
	// anna has to wait: true
	// anna: withdraw 5
}

// A transfer that fails for good stops its account until an operator has checked it, since the
// later transfers depend on it.
func ExampleSettings_holdGroups() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "ledger", func(s *codeq.Settings) { s.HoldGroups = true }))
	for _, what := range []string{"deposit 10", "withdraw 5"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "ledger", Group: "anna", Payload: []byte(what)})
		check(err)
	}
	ledger := codeq.ClaimRequest{Queues: []string{"ledger"}, NoWait: true}

	deposit, err := q.Claim(ctx, ledger)
	check(err)
	check(q.DeadLetter(ctx, deposit.Receipt, errors.New("no such account")))
	_, err = q.Claim(ctx, ledger)
	fmt.Println("anna has to wait:", errors.Is(err, codeq.ErrEmpty))

	check(q.RedriveDead(ctx, deposit.ID))
	for range 2 {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"ledger"}})
		check(err)
		fmt.Printf("%s\n", l.Payload)
		check(q.Complete(ctx, l.Receipt, nil))
	}
	// Output:
	// anna has to wait: true
	// deposit 10
	// withdraw 5
}

// A payment service may call its webhook twice for one payment. For a day, the second call finds
// the task of the first call, even if that task is completed.
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

// A document is indexed when it has not changed for a while, however often it changed before. Each
// change replaces the task of the previous change.
func ExampleUnique_debounce() {
	q, done := open()
	defer done()

	changed := func(document, text string) {
		_, err := q.Produce(ctx, codeq.Task{
			Queue:   "index",
			Payload: []byte(text),
			RunAt:   time.Now().Add(20 * time.Millisecond),
			Unique: codeq.Unique{
				Key: document, Replace: true,
				MaxWait:        time.Second, // after the first change, however many follow
				ReleaseOnClaim: true,        // a change during the indexing makes a new task
			},
		})
		check(err)
	}
	changed("readme", "codeq is a")
	changed("readme", "codeq is a queue")
	changed("readme", "codeq is a task queue")

	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"index"}})
	check(err)
	fmt.Printf("index: %s\n", lease.Payload)
	changed("readme", "codeq is a durable task queue")
	check(q.Complete(ctx, lease.Receipt, nil))

	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println("left:", counts["index"].Total())
	// Output:
	// index: codeq is a task queue
	// left: 1
}

// An invoice is sent once a month. After a correction, an operator releases the key, so that the
// invoice can be sent again.
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

// makeDead produces a task for each address and makes it a dead letter.
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

// After the repair of its cause, a dead letter gets all its attempts again.
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

// A step had returned a wrong price. Once that is mended, the handler runs it, and all after it,
// again; the steps before it are not repeated.
func ExampleQueue_RedriveDeadFrom() {
	q, done := open()
	defer done()
	var mux codeq.Mux
	price := -1
	codeq.Handle(&mux, "orders", func(ctx context.Context, _ *codeq.Job[string]) error {
		step := func(name string, result int) int {
			n, err := codeq.Step(ctx, name, func(context.Context) (int, error) {
				fmt.Println("running", name)
				return result, nil
			})
			check(err)
			return n
		}
		step("reserve", 1)
		if n := step("price", price); n < 0 {
			return codeq.DeadLetter(fmt.Errorf("price %d", n))
		}
		return nil
	})
	task, err := codeq.NewTask("orders", "order 7")
	check(err)
	id, err := q.Produce(ctx, task)
	check(err)
	run := func() {
		ctx, stop := context.WithCancel(ctx)
		go func() {
			check(q.WaitIdle(ctx))
			stop()
		}()
		check(q.Run(ctx, &mux, nil))
	}
	run()

	price = 5
	check(q.RedriveDeadFrom(ctx, id, "price"))
	run()
	// Output:
	// running reserve
	// running price
	// running price
}

// After an outage, its dead letters are tried again, at a rate that the server can bear. Dead
// letters with another cause stay.
func ExampleQueue_RedriveAllDead() {
	q, done := open()
	defer done()
	makeDead(q, "connection refused", "anna@example.com", "bert@example.com")
	makeDead(q, "no such mailbox", "nobody@example.com")

	n, err := q.RedriveAllDead(ctx, codeq.DeadFilter{
		Queue: "mail",
		Match: func(t *codeq.TaskInfo) bool { return strings.Contains(t.LastError, "refused") },
		Rate:  100, // per second
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

// Dead letters without further use are forgotten.
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

// The tasks of a queue are tried three times, with a linear backoff, and each run of a handler has
// a minute. A task may have a policy of its own.
func ExamplePolicy() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "mail", func(s *codeq.Settings) {
		s.MaxAttempts, s.Timeout = 3, time.Minute
		s.Backoff = codeq.Backoff{Base: time.Second, Step: 2 * time.Second, Jitter: -1}
	}))
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Timeout: time.Hour})
	check(err)
	for range 2 {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(err)
		fmt.Println(l.Timeout)
	}
	// Output:
	// 1m0s
	// 1h0m0s
}

// What happens at a death is the handler of another queue: the task there tells which one has died,
// and why.
func ExampleDeathOf() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "mail", func(s *codeq.Settings) { s.DeadLetterQueue = "mail-failed" }))
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("to anna")})
	check(err)
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.DeadLetter(ctx, l.Receipt, errors.New("no such address")))

	failed, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail-failed"}})
	check(err)
	d, _ := codeq.DeathOf(failed.Headers)
	fmt.Printf("%s of %s: %s; %t\n", failed.Payload, d.Queue, d.Reason, d.ID == l.ID)
	// Output: to anna of mail: no such address; true
}
