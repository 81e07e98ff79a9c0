package codeqsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "modernc.org/sqlite"

	"codeq"
	"codeq/codeqsql"
)

// An order and the task to charge it are written in one transaction. The handler's own writes, and
// their result, are committed once, however often it runs.
func Example() {
	ctx := context.Background()
	app := open()
	defer app.close()
	app.must("CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER, receipt TEXT)")

	relay, err := app.tables.NewRelay(app.db, app.q, nil)
	check(err)
	relaying, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(relaying) }()

	// The application.
	tx, err := app.db.BeginTx(ctx, nil)
	check(err)
	_, err = tx.ExecContext(ctx, "INSERT INTO orders (id, cents) VALUES (7, 100)")
	check(err)
	task, err := codeq.NewTask("charge", 7)
	check(err)
	check(app.tables.Enqueue(ctx, tx, task))
	check(tx.Commit())
	relay.Wake()

	// The worker.
	var mux codeq.Mux
	codeq.Handle(&mux, "charge", func(ctx context.Context, job *codeq.Job[int]) error {
		tx, err := app.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		var done *codeqsql.AlreadyDoneError
		if err := app.tables.Once(ctx, tx, job.Lease); errors.As(err, &done) {
			job.SetResult(done.Result)
			return nil
		} else if err != nil {
			return err
		}
		receipt := fmt.Sprintf("receipt of order %d", job.Args)
		if _, err := tx.ExecContext(ctx, "UPDATE orders SET receipt = ? WHERE id = ?", receipt, job.Args); err != nil {
			return err
		}
		if err := app.tables.SaveResult(ctx, tx, job.Lease, []byte(receipt)); err != nil {
			return err
		}
		job.SetResult([]byte(receipt))
		if err := tx.Commit(); err != nil {
			return err
		}
		if job.Attempt == 1 {
			return errors.New("the first attempt fails after its commit")
		}
		return nil
	})
	working, rest := context.WithCancel(ctx)
	go func() { ended <- app.q.Run(working, &mux, nil) }()

	id := app.produced()
	outcome, err := app.q.Await(ctx, id)
	check(err)
	fmt.Printf("%s after %d attempts\n", outcome.Result, outcome.Attempts)
	stop()
	rest()
	check(errors.Join(<-ended, <-ended))
	// Output: receipt of order 7 after 2 attempts
}

func ExampleNew() {
	tables, err := codeqsql.New(codeqsql.PostgreSQL, &codeqsql.Options{Prefix: "shop_"})
	check(err)
	fmt.Println(tables.Schema()[1])
	_, err = codeqsql.New(codeqsql.PostgreSQL, &codeqsql.Options{Prefix: "shop."})
	fmt.Println(errors.Is(err, codeq.ErrInvalid))
	// Output:
	// CREATE INDEX IF NOT EXISTS shop_outbox_state ON shop_outbox (state, id)
	// true
}

// A tool for migrations gets the statements.
func ExampleTables_Schema() {
	tables, err := codeqsql.New(codeqsql.MySQL, nil)
	check(err)
	fmt.Println(len(tables.Schema()), "statements")
	// Output: 2 statements
}

func ExampleTables_Migrate() {
	db, err := sql.Open("sqlite", ":memory:")
	check(err)
	defer db.Close()
	db.SetMaxOpenConns(1) // each connection has a memory of its own
	tables, err := codeqsql.New(codeqsql.SQLite, nil)
	check(err)
	for range 2 { // at each start of the program
		check(tables.Migrate(context.Background(), db))
	}
	var n int
	check(db.QueryRow("SELECT COUNT(*) FROM codeq_outbox").Scan(&n))
	fmt.Println(n, "rows")
	// Output: 0 rows
}

// A transaction that is rolled back leaves no task.
func ExampleTables_Enqueue() {
	ctx := context.Background()
	app := open()
	defer app.close()
	for _, commit := range []bool{false, true} {
		tx, err := app.db.BeginTx(ctx, nil)
		check(err)
		check(app.tables.Enqueue(ctx, tx, codeq.Task{Queue: "mail", Payload: fmt.Append(nil, commit)}))
		if commit {
			check(tx.Commit())
		} else {
			check(tx.Rollback())
		}
	}
	app.flush()
	lease, err := app.q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	check(err)
	fmt.Printf("%s\n", lease.Payload)
	_, err = app.q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}, NoWait: true})
	fmt.Println(errors.Is(err, codeq.ErrEmpty))
	// Output:
	// true
	// true
}

// What cannot be produced is reported.
func ExampleTables_NewRelay() {
	app := open()
	defer app.close()
	_, err := app.tables.NewRelay(app.db, app.q, &codeqsql.RelayOptions{
		Poll: time.Second, // a longer delay without Wake
		OnError: func(err error) {
			if row := new(codeqsql.RowError); errors.As(err, &row) {
				fmt.Println("alert:", row)
			}
		},
	})
	fmt.Println(err)
	// Output: <nil>
}

func ExampleRelay_Run() {
	app := open()
	defer app.close()
	relay, err := app.tables.NewRelay(app.db, app.q, nil)
	check(err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- relay.Run(ctx) }()
	check(app.tables.Enqueue(ctx, app.db, codeq.Task{Queue: "mail"}))
	app.produced() // 50 ms later at the most
	stop()
	fmt.Println(<-ended)
	// Output: <nil>
}

func ExampleRelay_Wake() {
	app := open()
	defer app.close()
	relay, err := app.tables.NewRelay(app.db, app.q, &codeqsql.RelayOptions{Poll: time.Hour})
	check(err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- relay.Run(ctx) }()
	check(app.tables.Enqueue(ctx, app.db, codeq.Task{Queue: "mail"})) // committed
	relay.Wake()
	app.produced()
	stop()
	fmt.Println(<-ended)
	// Output: <nil>
}

// A program that ends at once has no relay that runs.
func ExampleRelay_Flush() {
	ctx := context.Background()
	app := open()
	defer app.close()
	check(app.tables.Enqueue(ctx, app.db, codeq.Task{Queue: "mail"}))
	relay, err := app.tables.NewRelay(app.db, app.q, nil)
	check(err)
	check(relay.Flush(ctx))
	stats, err := app.q.Stats(ctx)
	check(err)
	fmt.Println(stats["mail"].Ready)
	// Output: 1
}

func ExampleRelay_Stats() {
	ctx := context.Background()
	app := open()
	defer app.close()
	relay, err := app.tables.NewRelay(app.db, app.q, nil)
	check(err)
	check(app.tables.Enqueue(ctx, app.db, codeq.Task{Queue: "mail"}))
	check(relay.Flush(ctx))
	fmt.Printf("%+v\n", relay.Stats())
	// Output: {Produced:1 Duplicates:0 SetAside:0 Failed:0}
}

// An alert looks at the rows that wait, and at those that were set aside.
func ExampleTables_Stats() {
	ctx := context.Background()
	app := open()
	defer app.close()
	check(app.tables.Enqueue(ctx, app.db, codeq.Task{Queue: "mail"}))
	stats, err := app.tables.Stats(ctx, app.db)
	check(err)
	fmt.Println(stats.Waiting, stats.Refused, stats.Stuck, time.Since(stats.Oldest) < time.Minute)
	// Output: 1 0 0 true
}

// setAside is an application with a row that its queue has refused.
func setAside(ctx context.Context) *application {
	app := open()
	gone := codeq.ID{1}
	check(app.tables.Enqueue(ctx, app.db, codeq.Task{Queue: "mail", After: []codeq.ID{gone}, OnMissing: codeq.RefuseOnMissing}))
	app.flush()
	return app
}

func ExampleTables_List() {
	ctx := context.Background()
	app := setAside(ctx)
	defer app.close()
	for _, state := range []codeqsql.RowState{codeqsql.Waiting, codeqsql.Refused, codeqsql.Stuck} {
		rows, err := app.tables.List(ctx, app.db, state, 0, 100)
		check(err)
		for _, row := range rows {
			fmt.Println(row.ID, row.State, row.Task.Queue, strings.Contains(row.Cause, "not found: parent"))
		}
	}
	// Output: 1 refused mail true
}

func ExampleTables_Resend() {
	ctx := context.Background()
	app := setAside(ctx)
	defer app.close()
	check(app.tables.Resend(ctx, app.db, 1)) // after the cause has gone
	rows, err := app.tables.List(ctx, app.db, codeqsql.Waiting, 0, 100)
	check(err)
	fmt.Println(len(rows))
	// Output: 1
}

func ExampleTables_Discard() {
	ctx := context.Background()
	app := setAside(ctx)
	defer app.close()
	check(app.tables.Discard(ctx, app.db, 1))
	fmt.Println(errors.Is(app.tables.Discard(ctx, app.db, 1), codeq.ErrNotFound))
	// Output: true
}

// begun returns a claimed task, and a transaction with its row.
func begun(ctx context.Context, app *application) (*codeq.Lease, *sql.Tx) {
	_, err := app.q.Produce(ctx, codeq.Task{Queue: "charge"})
	check(err)
	lease, err := app.q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"charge"}})
	check(err)
	tx, err := app.db.BeginTx(ctx, nil)
	check(err)
	check(app.tables.Once(ctx, tx, lease))
	return lease, tx
}

// A second attempt learns that the first has committed.
func ExampleTables_Once() {
	ctx := context.Background()
	app := open()
	defer app.close()
	lease, tx := begun(ctx, app)
	check(tx.Commit())

	tx, err := app.db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	err = app.tables.Once(ctx, tx, lease)
	fmt.Println(errors.Is(err, codeqsql.ErrAlreadyDone))
	// Output: true
}

func ExampleTables_SaveResult() {
	ctx := context.Background()
	app := open()
	defer app.close()
	lease, tx := begun(ctx, app)
	check(app.tables.SaveResult(ctx, tx, lease, []byte("receipt 5")))
	check(tx.Commit())

	tx, err := app.db.BeginTx(ctx, nil)
	check(err)
	defer tx.Rollback()
	var done *codeqsql.AlreadyDoneError
	if errors.As(app.tables.Once(ctx, tx, lease), &done) {
		fmt.Printf("%s\n", done.Result)
	}
	// Output: receipt 5
}

func ExampleTables_Sweep() {
	ctx := context.Background()
	app := open()
	defer app.close()
	lease, tx := begun(ctx, app)
	check(tx.Commit())
	const age = 0 // a program gives the age of the oldest copy that it may restore
	n, err := app.tables.Sweep(ctx, app.db, app.q, age)
	check(err)
	fmt.Println(n)
	check(app.q.Complete(ctx, lease.Receipt, nil))
	n, err = app.tables.Sweep(ctx, app.db, app.q, age)
	check(err)
	fmt.Println(n)
	// Output:
	// 0
	// 1
}

// application has a database and a queue.
type application struct {
	dir    string
	db     *sql.DB
	tables *codeqsql.Tables
	q      *codeq.Queue
	events *codeq.Subscription
}

func open() *application {
	dir, err := os.MkdirTemp("", "codeqsql-example-")
	check(err)
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+
		"?_txlock=immediate&_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)")
	check(err)
	tables, err := codeqsql.New(codeqsql.SQLite, nil)
	check(err)
	check(tables.Migrate(context.Background(), db))
	q, err := codeq.Open(filepath.Join(dir, "queue"), &codeq.Options{Backoff: codeq.Backoff{Base: time.Millisecond}})
	check(err)
	events, err := q.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProduced}})
	check(err)
	return &application{dir, db, tables, q, events}
}

func (a *application) close() { check(errors.Join(a.q.Close(), a.db.Close(), os.RemoveAll(a.dir))) }

func (a *application) must(statement string) {
	_, err := a.db.Exec(statement)
	check(err)
}

// flush relays all rows.
func (a *application) flush() {
	relay, err := a.tables.NewRelay(a.db, a.q, nil)
	check(err)
	check(relay.Flush(context.Background()))
}

// produced waits for the next task that is produced, and returns its ID.
func (a *application) produced() codeq.ID {
	event, err := a.events.Next(context.Background())
	check(err)
	return event.ID
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
