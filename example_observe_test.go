package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"codeq"
)

// A subscription reports the changes of tasks, here of one queue.
func ExampleQueue_Subscribe() {
	q, done := open()
	defer done()

	sub, err := q.Subscribe(codeq.SubscribeOptions{Queues: []string{"mail"}})
	check(err)
	defer sub.Close()

	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Tenant: "gopher"})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.DeadLetter(ctx, lease.Receipt, errors.New("no such address")))

	for range 3 {
		e, err := sub.Next(ctx)
		check(err)
		fmt.Printf("%s %s, attempt %d %q\n", e.Kind, e.Tenant, e.Attempt, e.LastError)
	}
	// Output:
	// produced gopher, attempt 0 ""
	// claimed gopher, attempt 1 ""
	// dead gopher, attempt 1 "no such address"
}

// A monitor wants only the dead letters, so other changes cost nothing. It ends with its context,
// or with the queue.
func ExampleSubscription_All() {
	q, done := open()
	defer done()

	sub, err := q.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventDeadLettered}})
	check(err)
	defer sub.Close()

	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", MaxAttempts: 1})
	check(err)
	lease, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.Retry(ctx, lease.Receipt, codeq.RetryOptions{Err: errors.New("mailbox full")}))

	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for e, err := range sub.All(short) {
		check(err)
		fmt.Println(e.Queue, e.LastError)
		break
	}
	fmt.Println("lost:", sub.Lost())
	// Output:
	// mail mailbox full
	// lost: 0
}

// A reader waits for the next event until its context ends.
func ExampleSubscription_Next() {
	q, done := open()
	defer done()
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	check(err)
	defer sub.Close()

	go func() {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
		check(err)
	}()
	e, err := sub.Next(ctx)
	check(err)
	fmt.Println(e.Kind, e.Queue)

	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	_, err = sub.Next(short)
	fmt.Println("nothing else:", errors.Is(err, context.DeadlineExceeded))
	// Output:
	// produced mail
	// nothing else: true
}

// A slow reader loses the oldest events, and Lost returns their number.
func ExampleSubscription_Lost() {
	q, done := open()
	defer done()
	sub, err := q.Subscribe(codeq.SubscribeOptions{Buffer: 2})
	check(err)
	defer sub.Close()

	for _, tenant := range []string{"anna", "bert", "cora"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Tenant: tenant})
		check(err)
	}
	fmt.Println("lost:", sub.Lost())
	e, err := sub.Next(ctx)
	check(err)
	fmt.Println("next:", e.Tenant)
	// Output:
	// lost: 1
	// next: bert
}

// A reader that waits for an event gets ErrClosed when the subscription is closed.
func ExampleSubscription_Close() {
	q, done := open()
	defer done()
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	check(err)

	ended := make(chan error)
	go func() {
		_, err := sub.Next(ctx)
		ended <- err
	}()
	sub.Close()
	fmt.Println(errors.Is(<-ended, codeq.ErrClosed))
	// Output: true
}

// Every second, a dashboard asks for the waiting tasks, their age, and the totals.
func ExampleQueue_Info() {
	q, done := open()
	defer done()
	for range 3 {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
		check(err)
	}
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	check(q.Complete(ctx, l.Receipt, nil))

	queues, err := q.Info(ctx)
	check(err)
	for _, i := range queues {
		fmt.Printf("%s: %d ready, the oldest waits: %t\n", i.Queue, i.Counts.Ready, !i.OldestReady.IsZero())
		fmt.Printf("%d produced, %d completed\n", i.Totals.Produced, i.Totals.Completed)
	}
	// Output:
	// mail: 2 ready, the oldest waits: true
	// 3 produced, 1 completed
}

func ExampleQueue_TotalsByDay() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	days, err := q.TotalsByDay(ctx, "mail")
	check(err)
	for _, d := range days {
		fmt.Printf("%d produced on a day that began at %s\n", d.Produced, d.Day.Format("15:04 MST"))
	}
	// Output:
	// 1 produced on a day that began at 00:00 UTC
}

// What fails most, and since when?
func ExampleQueue_DeadKinds() {
	q, done := open()
	defer done()
	for _, cause := range []string{"no user 7", "no user 12", "disk full"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
		check(err)
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
		check(err)
		check(q.DeadLetter(ctx, l.Receipt, errors.New(cause)))
	}

	kinds, err := q.DeadKinds(ctx, "")
	check(err)
	for _, k := range kinds {
		fmt.Printf("%d of %v: %s, today %d\n", k.Count, k.Queues, k.Kind, k.Days[0])
	}
	// Output:
	// 2 of [mail]: no user #, today 2
	// 1 of [mail]: disk full, today 1
}

func ExampleReader_Info() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	queues, err := r.Info(context.Background())
	check(err)
	for _, i := range queues {
		fmt.Printf("%s: paused: %t, %d dead of %d\n", i.Queue, i.Settings.Paused, i.Totals.Dead, i.Totals.Produced)
	}
	check(r.Close())
	// Output:
	// mail: paused: true, 1 dead of 3
}

func ExampleReader_TotalsByDay() {
	dir, _, _, end := closedMail()
	defer end()
	r, err := codeq.OpenReadOnly(dir, nil)
	check(err)
	days, err := r.TotalsByDay(context.Background(), "mail")
	check(err)
	dead := 0
	for _, d := range days {
		dead += int(d.Dead)
	}
	fmt.Println(dead, "dead in the last three months")
	check(r.Close())
	// Output:
	// 1 dead in the last three months
}

// A load balancer checks whether this process can take work.
func ExampleQueue_Health() {
	q, done := open()
	defer done()

	switch err := q.Health(ctx); {
	case errors.Is(err, codeq.ErrStalled):
		fmt.Println("the disk does not answer:", err)
	case err != nil:
		fmt.Println("the queue does not work:", err)
	default:
		fmt.Println("ok")
	}
	// Output: ok
}

// The metrics of a process. A node of a cluster shows the shards that it leads.
func ExampleQueue_ProcessInfo() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	info, err := q.ProcessInfo(ctx)
	check(err)
	for i, s := range info.Shards {
		fmt.Printf("shard %d: leads: %t, %d operations wait\n", i, s.Leads, s.Inbox)
		for _, of := range s.Queues {
			fmt.Println(of.Queue, of.Counts.Ready)
		}
	}
	// Output:
	// shard 0: leads: true, 0 operations wait
	// mail 1
}

// metrics is the data of an exporter: counters, and a histogram for each queue.
type metrics struct {
	produced, completed map[string]uint64
	seconds             map[string][]float64
	missed              uint64 // handler calls that are not in seconds
}

// observe runs on one goroutine of the queue. An exporter with concurrent readers needs a lock.
func (m *metrics) observe(o *codeq.Observation) {
	for _, d := range o.Queues {
		m.produced[d.Queue] += d.Produced
		m.completed[d.Queue] += d.Completed
	}
	for _, h := range o.Handlers {
		name := h.Queue + " " + h.Verdict.String()
		m.seconds[name] = append(m.seconds[name], h.Took.Seconds())
	}
	m.missed += o.MissedHandlers
}

// The observations of an Observer become metrics.
func ExampleObservation() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)
	m := &metrics{make(map[string]uint64), make(map[string]uint64), make(map[string][]float64), 0}
	q, err := codeq.Open(dir, &codeq.Options{Observer: m.observe})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error {
		stop()
		return nil
	})
	_, err = q.ProduceBatch(ctx, []codeq.Task{{Queue: "mail"}, {Queue: "video"}, {Queue: "video"}})
	check(err)
	check(q.Run(ctx, &mux, nil))
	check(q.Close()) // by then, the Observer has all observations

	fmt.Println(m.produced["mail"], m.produced["video"], m.completed["mail"])
	fmt.Println(len(m.seconds["mail completed"]), m.missed)
	// Output:
	// 1 2 1
	// 1 0
}

// A dashboard shows the use of the disk.
func ExampleQueue_StorageStats() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: make([]byte, 10_000)})
	check(err)

	stats, err := q.StorageStats()
	check(err)
	for i, s := range stats.Shards {
		fmt.Printf("shard %d: on disk more than 10 kB: %t, of the log in no table yet: %t\n", i, s.DiskBytes > 10_000, s.LogBytes > 10_000)
	}
	fmt.Println("room for more tasks:", stats.FreeBytes > stats.MinFreeBytes)
	// Output:
	// shard 0: on disk more than 10 kB: true, of the log in no table yet: true
	// room for more tasks: true
}

// The statistics show which step of a shard's owner made callers wait.
func ExampleQueue_StorageStats_steps() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	stats, err := q.StorageStats()
	check(err)
	for _, s := range stats.Shards[0].Upkeep {
		if s.Kind == codeq.UpkeepGroup {
			fmt.Println(s.Kind, s.Count > 0, s.Quantile(0.5) <= s.Max)
		}
	}
	// Output: group true true
}

// Of four steps, three took from 1 to 2 us, and one from 8 to 16 us.
func ExampleUpkeepStats_Quantile() {
	s := codeq.UpkeepStats{Count: 4, Max: 11 * time.Microsecond}
	s.Buckets[1], s.Buckets[4] = 3, 1

	fmt.Println("half of them within", s.Quantile(0.5))
	fmt.Println("all of them within", s.Quantile(1))
	// Output:
	// half of them within 2µs
	// all of them within 11µs
}
