package codeq_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"codeq"
)

// A middleware of produces compresses payloads, and one of the handlers reverts it.
func ExampleProduceMiddleware() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)
	compress := func(next codeq.ProduceFunc) codeq.ProduceFunc {
		return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			for i := range p.Tasks {
				var b bytes.Buffer
				w := gzip.NewWriter(&b)
				if _, err := w.Write(p.Tasks[i].Payload); err != nil {
					return nil, err
				}
				if err := w.Close(); err != nil {
					return nil, err
				}
				p.Tasks[i].Payload = b.Bytes()
			}
			return next(ctx, p)
		}
	}
	q, err := codeq.Open(dir, &codeq.Options{Producing: []codeq.ProduceMiddleware{compress}})
	check(err)
	defer q.Close()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	mux.Use(func(next codeq.Handler) codeq.Handler {
		return func(ctx context.Context, l *codeq.Lease) error {
			r, err := gzip.NewReader(bytes.NewReader(l.Payload))
			if err != nil {
				return codeq.DeadLetter(err)
			}
			if l.Payload, err = io.ReadAll(r); err != nil {
				return codeq.DeadLetter(err)
			}
			return next(ctx, l)
		}
	})
	codeq.Handle(&mux, "mail", func(_ context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		fmt.Printf("%d bytes: %s ...\n", len(job.Args), job.Args[:5])
		return nil
	})

	id, err := q.Produce(ctx, codeq.Task{Queue: "mail", Payload: bytes.Repeat([]byte("hello "), 1000)})
	check(err)
	stored, err := q.Get(ctx, id)
	check(err)
	fmt.Println("stored in less than 100 bytes:", len(stored.Payload) < 100)
	check(q.Run(ctx, &mux, nil))
	// Output:
	// stored in less than 100 bytes: true
	// 6000 bytes: hello ...
}

// The first middleware is the outermost one. The error from next shows the outcome of a task.
func ExampleMux_Use() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	mux.Use(
		func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				err := next(ctx, l)
				var p *codeq.PanicError
				switch {
				case errors.As(err, &p):
					fmt.Printf("%s: panic: %v\n", l.Queue, p.Value)
				case err != nil:
					fmt.Printf("%s: %v\n", l.Queue, err)
				default:
					fmt.Printf("%s: ok\n", l.Queue)
				}
				return err
			}
		},
		func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				if l.Tenant == "" {
					return codeq.DeadLetter(errors.New("no tenant"))
				}
				return next(ctx, l)
			}
		},
	)
	codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	codeq.Handle(&mux, "video", func(context.Context, *codeq.Job[[]byte]) error {
		defer stop()
		panic("no such codec")
	})

	_, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "mail", Tenant: "anna"},
		{Queue: "mail"},
		{Queue: "video", Tenant: "anna"},
	})
	check(err)
	check(q.Run(ctx, &mux, &codeq.RunOptions{
		Concurrency: 1,
		Queues:      []string{"mail", "video"}, // in this order
	}))
	// Output:
	// mail: ok
	// mail: no tenant
	// video: panic: no such codec
}

// A middleware reports failures. A snooze and a retry-after of a handler are not failures.
func ExampleVerdictOf() {
	var mux codeq.Mux
	mux.Use(func(next codeq.Handler) codeq.Handler {
		return func(ctx context.Context, l *codeq.Lease) error {
			err := next(ctx, l)
			switch v := codeq.VerdictOf(err); v {
			case codeq.VerdictRetry, codeq.VerdictDeadLetter:
				fmt.Printf("failed (%v): %v\n", v, err)
			default:
				fmt.Println(v)
			}
			return err
		}
	})
	fmt.Println(codeq.VerdictOf(nil))
	fmt.Println(codeq.VerdictOf(codeq.Snooze(time.Minute)))
	fmt.Println(codeq.VerdictOf(codeq.RetryAfter(time.Minute, errors.New("busy"))))
	fmt.Println(codeq.VerdictOf(fmt.Errorf("mail: %w", errors.New("no route"))))
	// Output:
	// completed
	// released
	// retry-after
	// retry
}

// gobCodec encodes with encoding/gob.
type gobCodec struct{}

func (gobCodec) Marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(v)
	return b.Bytes(), err
}

func (gobCodec) Unmarshal(data []byte, v any) error {
	return gob.NewDecoder(bytes.NewReader(data)).Decode(v)
}

// The producer, the handler and the reader of a queue use the same codec.
func ExampleWithCodec() {
	q, done := open()
	defer done()

	type Matrix struct{ Rows [][]float64 }
	asGob := codeq.WithCodec(gobCodec{})

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "trace", func(ctx context.Context, job *codeq.Job[Matrix]) error {
		defer stop()
		sum := 0.0
		for i, row := range job.Args.Rows {
			sum += row[i]
		}
		return job.SetResultValue(sum)
	}, asGob)

	task, err := codeq.NewTask("trace", Matrix{[][]float64{{1, 2}, {3, 4}}}, asGob)
	check(err)
	task.Retention = time.Hour
	id, err := q.Produce(ctx, task)
	check(err)
	check(q.Run(ctx, &mux, nil))

	info, err := q.Get(context.Background(), id)
	check(err)
	sum, err := codeq.ResultAs[float64](info, asGob)
	check(err)
	fmt.Println(sum)
	// Output: 5
}

// Run works on each queue with a handler, unless [codeq.RunOptions] name some of them.
func ExampleMux_Queues() {
	var mux codeq.Mux
	for _, queue := range []string{"video", "mail"} {
		codeq.Handle(&mux, queue, func(context.Context, *codeq.Job[[]byte]) error { return nil })
	}
	fmt.Println(mux.Queues())
	// Output: [mail video]
}

// The result of a handler stays with its task for the retention of the task.
func ExampleJob_SetResult() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "shout", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		job.SetResult(bytes.ToUpper(job.Args))
		return nil
	})
	id, err := q.Produce(ctx, codeq.Task{Queue: "shout", Payload: []byte("hello"), Retention: time.Hour})
	check(err)
	check(q.Run(ctx, &mux, nil))

	task, err := q.Get(context.Background(), id)
	check(err)
	fmt.Printf("%s\n", task.Result)
	// Output: HELLO
}

// A result can be any value that the codec of the queue encodes, here as JSON.
func ExampleJob_SetResultValue() {
	q, done := open()
	defer done()

	type Size struct{ Width, Height int }
	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "halve", func(ctx context.Context, job *codeq.Job[Size]) error {
		defer stop()
		return job.SetResultValue(Size{job.Args.Width / 2, job.Args.Height / 2})
	})
	task, err := codeq.NewTask("halve", Size{640, 480})
	check(err)
	task.Retention = time.Hour
	id, err := q.Produce(ctx, task)
	check(err)
	check(q.Run(ctx, &mux, nil))

	info, err := q.Get(context.Background(), id)
	check(err)
	fmt.Printf("%s\n", info.Result)
	// Output: {"Width":320,"Height":240}
}

func ExampleNewTask() {
	type Mail struct{ To, Subject string }

	task, err := codeq.NewTask("mail", Mail{To: "ann@example.org", Subject: "Hi"})
	check(err)
	task.Priority = 9
	fmt.Printf("%s\n", task.Payload)
	// Output: {"To":"ann@example.org","Subject":"Hi"}
}

func ExampleResultAs() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "words", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		count := make(map[string]int)
		for _, word := range bytes.Fields(job.Args) {
			count[string(word)]++
		}
		return job.SetResultValue(count)
	})
	id, err := q.Produce(ctx, codeq.Task{Queue: "words", Payload: []byte("to be or not to be"), Retention: time.Hour})
	check(err)
	check(q.Run(ctx, &mux, nil))

	info, err := q.Get(context.Background(), id)
	check(err)
	count, err := codeq.ResultAs[map[string]int](info)
	check(err)
	fmt.Println(count)
	// Output: map[be:2 not:1 or:1 to:2]
}

// The log records of a handler name its task.
func ExampleLoggerFrom() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)
	withoutTimes := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "task" { // they differ from run to run
			return slog.Attr{}
		}
		return a
	}
	q, err := codeq.Open(dir, &codeq.Options{
		Logger: slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: withoutTimes})),
	})
	check(err)
	defer q.Close()
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Tenant: "anna"})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		return send(ctx, "ann@example.org")
	})
	check(q.Run(ctx, &mux, nil))
	// Output: level=INFO msg=sent queue=mail attempt=1 tenant=anna to=ann@example.org
}

// send gets only the context, like most functions that a handler calls.
func send(ctx context.Context, to string) error {
	codeq.LoggerFrom(ctx).Info("sent", "to", to)
	return nil
}

// An import reports its progress, and continues where the previous attempt has stopped.
func ExampleReportProgress() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "import", Retention: time.Hour})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "import", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		const rows = 4
		first, _ := strconv.Atoi(job.Metadata["imported"])
		for row := first; row < rows; row++ {
			if row == 2 && job.Attempt == 1 {
				return codeq.RetryAfter(0, errors.New("connection lost"))
			}
			fmt.Println("attempt", job.Attempt, "imports row", row)
			check(codeq.SetMetadata(ctx, "imported", fmt.Sprint(row+1)))
			check(codeq.ReportProgress(ctx, int64(row+1), rows, "rows"))
		}
		stop()
		return nil
	})
	check(q.Run(ctx, &mux, nil))
	info, err := q.Get(context.Background(), id)
	check(err)
	fmt.Println(info.Progress.Done, "of", info.Progress.Total, info.Progress.Note)
	// Output:
	// attempt 1 imports row 0
	// attempt 1 imports row 1
	// attempt 2 imports row 2
	// attempt 2 imports row 3
	// 4 of 4 rows
}

func ExampleSetMetadata() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "charge", Retention: time.Hour})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "charge", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		return codeq.SetMetadata(ctx, "receipt", "4711") // from the called service
	})
	check(q.Run(ctx, &mux, nil))
	info, err := q.Get(context.Background(), id)
	check(err)
	fmt.Println(info.State, info.Metadata)
	// Output: done map[receipt:4711]
}

func ExampleLeaseFrom() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Headers: map[string]string{"locale": "de"}})
	check(err)

	greet := func(ctx context.Context) string {
		l, ok := codeq.LeaseFrom(ctx)
		if ok && l.Headers["locale"] == "de" {
			return "Guten Tag"
		}
		return "Good day"
	}

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		fmt.Println(greet(ctx))
		return nil
	})
	check(q.Run(ctx, &mux, nil))
	fmt.Println(greet(ctx))
	// Output:
	// Guten Tag
	// Good day
}

// A W3C trace context goes from the producer through the handler to its follow-ups. In a program, a
// tracing library replaces traceKey. A middleware that begins a span replaces the header by the
// header of the span.
func ExampleJob_FollowUp_traceContext() {
	q, done := open()
	defer done()

	type traceKey struct{}
	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	mux.Use(func(next codeq.Handler) codeq.Handler {
		return func(ctx context.Context, l *codeq.Lease) error {
			return next(context.WithValue(ctx, traceKey{}, l.Headers["traceparent"]), l)
		}
	})
	codeq.Handle(&mux, "order", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		fmt.Println("order:", ctx.Value(traceKey{}))
		job.FollowUp(codeq.Task{Queue: "mail"})
		return nil
	})
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		fmt.Println("mail: ", ctx.Value(traceKey{}))
		return nil
	})

	_, err := q.Produce(ctx, codeq.Task{Queue: "order", Headers: map[string]string{
		"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	}})
	check(err)
	check(q.Run(ctx, &mux, nil))
	// Output:
	// order: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
	// mail:  00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
}

// startWorker starts a worker with a name, and returns when it takes tasks.
func startWorker(q *codeq.Queue, name string) (stop func()) {
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(_ context.Context, job *codeq.Job[string]) error {
		fmt.Println(name, "sends", job.Args)
		return nil
	})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- q.Run(ctx, &mux, &codeq.RunOptions{Name: name, Concurrency: 1}) }()
	for {
		workers, err := q.Workers(ctx)
		check(err)
		for _, w := range workers {
			if w.Name == name {
				return func() {
					cancel()
					check(<-ended)
				}
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// A page that lists the workers.
func ExampleQueue_Workers() {
	q, done := open()
	defer done()
	defer startWorker(q, "anna")()

	workers, err := q.Workers(ctx)
	check(err)
	for _, w := range workers {
		fmt.Println(w.Name, w.Queues, w.Busy, "of", w.Concurrency, w.Quiet)
	}
	// Output: anna [mail] 0 of 1 false
}

// Before a deployment, or when it does harm, a worker takes no more tasks. Another worker takes
// them.
func ExampleQueue_QuietWorkers() {
	q, done := open()
	defer done()
	defer startWorker(q, "anna")()
	check(q.QuietWorkers(ctx, "anna"))
	defer startWorker(q, "ben")()

	task, err := codeq.NewTask("mail", "a letter")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	check(q.WaitIdle(ctx, "mail"))
	// Output: ben sends a letter
}

// All quiet workers continue.
func ExampleQueue_ResumeWorkers() {
	q, done := open()
	defer done()
	defer startWorker(q, "anna")()
	check(q.QuietWorkers(ctx, ""))

	task, err := codeq.NewTask("mail", "a letter")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	counts, err := q.Stats(ctx)
	check(err)
	fmt.Println(counts["mail"].Ready, "waits")

	check(q.ResumeWorkers(ctx, ""))
	check(q.WaitIdle(ctx, "mail"))
	// Output:
	// 1 waits
	// anna sends a letter
}

// A local lease ends with the process. After a crash, the task is ready as soon as the queue is
// open again, and not when the lease expires.
func ExampleClaimRequest_local() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "codeq")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "queue")
	q, err := codeq.Open(path, nil)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := q.Produce(ctx, codeq.Task{Queue: "films", Payload: []byte("Alien")}); err != nil {
		log.Fatal(err)
	}
	req := codeq.ClaimRequest{Queues: []string{"films"}, LeaseFor: time.Hour, Local: true}
	if _, err := q.Claim(ctx, req); err != nil {
		log.Fatal(err)
	}
	if err := q.Close(); err != nil { // before the task is completed
		log.Fatal(err)
	}

	if q, err = codeq.Open(path, nil); err != nil {
		log.Fatal(err)
	}
	defer q.Close()
	l, err := q.Claim(ctx, req)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, attempt %d\n", l.Payload, l.Attempt)
	// Output: Alien, attempt 1
}

// The handler runs again after an error, or a crash, and its finished steps return their stored
// results: the card is charged once.
func ExampleStep() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "orders", func(ctx context.Context, j *codeq.Job[string]) error {
		receipt, err := codeq.Step(ctx, "charge", func(context.Context) (string, error) {
			fmt.Println("charging for", j.Args)
			return "receipt 17", nil
		})
		if err != nil {
			return err
		}
		if j.Attempt == 1 {
			return codeq.RetryAfter(0, errors.New("the post office is closed"))
		}
		fmt.Println("shipping", j.Args, "with", receipt)
		stop()
		return nil
	})

	task, err := codeq.NewTask("orders", "a lamp")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	check(q.Run(ctx, &mux, nil))
	// Output:
	// charging for a lamp
	// shipping a lamp with receipt 17
}

// A sleeping task uses no worker, and its run counts as no attempt.
func ExampleSleep() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "reminders", func(ctx context.Context, j *codeq.Job[string]) error {
		if _, err := codeq.Step(ctx, "first mail", func(context.Context) (int, error) {
			fmt.Println("a mail to", j.Args)
			return 0, nil
		}); err != nil {
			return err
		}
		if err := codeq.Sleep(ctx, "a while", 10*time.Millisecond); err != nil {
			return err
		}
		fmt.Println("a reminder to", j.Args, "in attempt", j.Attempt)
		stop()
		return nil
	})

	task, err := codeq.NewTask("reminders", "anna")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	check(q.Run(ctx, &mux, nil))
	// Output:
	// a mail to anna
	// a reminder to anna in attempt 1
}

// An order waits for its approval, for a day at most, without a worker.
func ExampleWaitSignal() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "orders", func(ctx context.Context, j *codeq.Job[string]) error {
		by, err := codeq.WaitSignal[string](ctx, "approval", 24*time.Hour)
		if errors.Is(err, codeq.ErrNoSignal) {
			return codeq.DeadLetter(errors.New("nobody has approved it"))
		} else if err != nil {
			return err
		}
		fmt.Println(j.Args, "approved by", by)
		stop()
		return nil
	})

	task, err := codeq.NewTask("orders", "a lamp")
	check(err)
	id, err := q.Produce(ctx, task)
	check(err)
	check(q.Signal(ctx, id, "approval", "anna"))
	check(q.Run(ctx, &mux, nil))
	// Output: a lamp approved by anna
}

// An order is shipped by a task of another queue, which has attempts and limits of its own.
func ExampleChild() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "parcels", func(_ context.Context, j *codeq.Job[string]) error {
		fmt.Println("shipping", j.Args)
		return j.SetResultValue("parcel 5")
	})
	codeq.Handle(&mux, "orders", func(ctx context.Context, j *codeq.Job[string]) error {
		parcel, err := codeq.NewTask("parcels", j.Args)
		if err != nil {
			return err
		}
		number, err := codeq.Child[string](ctx, "ship", parcel)
		var failed *codeq.CallError
		if errors.As(err, &failed) {
			return codeq.DeadLetter(failed)
		} else if err != nil {
			return err
		}
		fmt.Println(j.Args, "is", number)
		stop()
		return nil
	})

	task, err := codeq.NewTask("orders", "a lamp")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	check(q.Run(ctx, &mux, nil))
	// Output:
	// shipping a lamp
	// a lamp is parcel 5
}

// A signal may come before the task waits for it; the second one of a name is refused.
func ExampleQueue_Signal() {
	q, done := open()
	defer done()

	id, err := q.Produce(ctx, codeq.Task{Queue: "orders"})
	check(err)
	check(q.Signal(ctx, id, "approval", "anna"))
	err = q.Signal(ctx, id, "approval", "bob")
	fmt.Println("again:", errors.Is(err, codeq.ErrDuplicate))
	err = q.Signal(ctx, codeq.ID{1}, "approval", "anna")
	fmt.Println("to nobody:", errors.Is(err, codeq.ErrNotFound))
	// Output:
	// again: true
	// to nobody: true
}

// Another program sees how far a handler has come.
func ExampleSetCursor() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "imports", func(ctx context.Context, j *codeq.Job[int]) error {
		defer stop()
		if err := codeq.SetCursor(ctx, "row", 4); err != nil {
			return err
		}
		return codeq.RetryAfter(time.Hour, errors.New("the database is away"))
	})

	id, err := q.Produce(ctx, codeq.Task{Queue: "imports"})
	check(err)
	check(q.Run(ctx, &mux, nil))
	info, err := q.Get(context.Background(), id)
	check(err)
	fmt.Printf("%s\n", info.Cursors["row"])
	// Output: 4
}

// A long loop keeps how far it has come. Here its second run goes on after the fourth row.
func ExampleCursor() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "imports", func(ctx context.Context, j *codeq.Job[int]) error {
		last, err := codeq.Cursor[int](ctx, "row")
		if err != nil {
			return err
		}
		fmt.Println("begins after row", last)
		for row := last + 1; row <= j.Args; row++ {
			if row == 5 && j.Attempt == 1 {
				return codeq.RetryAfter(0, errors.New("the database is away"))
			}
			if err := codeq.SetCursor(ctx, "row", row); err != nil {
				return err
			}
		}
		stop()
		return nil
	})

	task, err := codeq.NewTask("imports", 7)
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)
	check(q.Run(ctx, &mux, nil))
	// Output:
	// begins after row 0
	// begins after row 4
}

// Mails go out in one request for each batch. The tasks of a batch are of one tenant, as
// BatchOptions.By says, and each has its own verdict: the second one is tried again later.
func ExampleHandleBatch() {
	q, done := open()
	defer done()
	for _, to := range []string{"ann", "bob", "carol"} {
		task, err := codeq.NewTask("mail", to)
		check(err)
		task.Tenant = "shop"
		_, err = q.Produce(ctx, task)
		check(err)
	}

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	options := codeq.BatchOptions{Max: 3, Linger: time.Second, By: codeq.ByTenant}
	codeq.HandleBatch(&mux, "mail", options, func(_ context.Context, jobs []*codeq.Job[string]) []error {
		defer stop()
		errs := make([]error, len(jobs))
		for i, job := range jobs {
			fmt.Println(job.Tenant, job.Args)
			if job.Args == "bob" {
				errs[i] = codeq.RetryAfter(time.Hour, errors.New("mailbox full"))
			}
		}
		return errs // nil: all are completed
	})
	err := q.Run(ctx, &mux, nil)
	check(err)
	counts, err := q.Stats(context.Background())
	check(err)
	fmt.Println(counts["mail"].Scheduled)
	// Unordered output:
	// shop ann
	// shop bob
	// shop carol
	// 1
}

// Each customer's events are written by one statement.
func ExampleByLimitKey() {
	l := &codeq.Lease{Task: codeq.Task{Queue: "event", Tenant: "shop", LimitKey: "customer 7"}}
	fmt.Println(codeq.ByLimitKey(l))
	// Output: customer 7
}

func ExampleByTenant() {
	l := &codeq.Lease{Task: codeq.Task{Queue: "event", Tenant: "shop", LimitKey: "customer 7"}}
	fmt.Println(codeq.ByTenant(l))
	// Output: shop
}

// In a batch each job has a context of its own, which ends when its task is canceled.
func ExampleJob_Context() {
	q, done := open()
	defer done()
	task, err := codeq.NewTask("mail", "ann")
	check(err)
	_, err = q.Produce(ctx, task)
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.HandleBatch(&mux, "mail", codeq.BatchOptions{}, func(_ context.Context, jobs []*codeq.Job[string]) []error {
		defer stop()
		for _, job := range jobs {
			err := codeq.ReportProgress(job.Context(), 1, 2, "rendered")
			check(err)
			lease, _ := codeq.LeaseFrom(job.Context())
			fmt.Println(lease.Queue, job.Context().Err() == nil)
		}
		return nil
	})
	err = q.Run(ctx, &mux, nil)
	check(err)
	// Output: mail true
}

// The tasks of an order follow each other, though they have handlers of their own.
func ExampleHandleKind() {
	q, done := open()
	defer done()
	for _, kind := range []string{"charge", "ship"} {
		task, err := codeq.NewTask("orders", "order 7")
		check(err)
		task.Kind, task.Group = kind, "7"
		_, err = q.Produce(ctx, task)
		check(err)
	}

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.HandleKind(&mux, "orders", "charge", func(_ context.Context, job *codeq.Job[string]) error {
		if job.Attempt == 1 {
			return codeq.RetryAfter(0, errors.New("the bank does not answer"))
		}
		fmt.Println("charged", job.Args)
		return nil
	})
	codeq.HandleKind(&mux, "orders", "ship", func(_ context.Context, job *codeq.Job[string]) error {
		fmt.Println("shipped", job.Args)
		stop()
		return nil
	})
	check(q.Run(ctx, &mux, nil))
	// Output:
	// charged order 7
	// shipped order 7
}

// Why has the task died? The log of its handlers is with it.
func ExampleRunOptions_keepLogs() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "mail", MaxAttempts: 2})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		codeq.LoggerFrom(ctx).Info("connected", "server", "mx.example.org")
		if job.Attempt == 2 {
			stop()
		}
		return codeq.RetryAfter(0, errors.New("no answer"))
	})
	check(q.Run(ctx, &mux, &codeq.RunOptions{KeepLogs: slog.LevelInfo}))
	info, err := q.Get(context.Background(), id)
	check(err)
	fmt.Println(info.State)
	for _, line := range info.Logs {
		fmt.Println(line.Attempt, line.Level, line.Text)
	}
	// Output:
	// dead
	// 1 INFO connected server=mx.example.org
	// 2 INFO connected server=mx.example.org
}

// The handler gives up after two attempts, one right after the other, before the tasks that wait.
func ExamplePolicy_handler() {
	q, done := open()
	defer done()
	id, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(_ context.Context, j *codeq.Job[[]byte]) error {
		if fmt.Println("attempt", j.Attempt); j.Attempt == 2 {
			stop()
		}
		return errors.New("no connection")
	}, codeq.Policy{MaxAttempts: 2, Backoff: codeq.Backoff{Base: time.Millisecond, Factor: 1}, RetryFirst: true})
	check(q.Run(ctx, &mux, nil))

	task, err := q.Get(context.Background(), id)
	check(err)
	fmt.Println(task.State)
	// Output:
	// attempt 1
	// attempt 2
	// dead
}

// A handler that ignores its context does not stop the others: another one gets its place.
func ExampleRunOptions_replaceStuck() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "video", func(s *codeq.Settings) { s.Timeout = 10 * time.Millisecond }))
	for _, queue := range []string{"video", "mail"} {
		_, err := q.Produce(ctx, codeq.Task{Queue: queue})
		check(err)
	}

	ctx, stop := context.WithCancel(ctx)
	sent := make(chan struct{})
	var mux codeq.Mux
	codeq.Handle(&mux, "video", func(context.Context, *codeq.Job[[]byte]) error {
		<-sent
		fmt.Println("the video is late")
		stop()
		return nil
	})
	codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error {
		fmt.Println("the mail is sent")
		close(sent)
		return nil
	})
	check(q.Run(ctx, &mux, &codeq.RunOptions{Queues: []string{"video", "mail"}, Concurrency: 1, ReplaceStuck: 1}))
	// Output:
	// the mail is sent
	// the video is late
}
