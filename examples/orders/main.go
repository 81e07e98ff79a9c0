// Command orders is a shop in one process: an HTTP service with its orders in SQLite, and codeq for
// all that follows an order. It is charged, waits until the warehouse has packed it, is shipped,
// and its customer gets a mail: each once, though the process is killed at any moment.
//
//	orders [-addr ADDR] [-dir DIR]
//
//	curl -X POST localhost:8080/orders/7         # takes order 7
//	curl -X POST localhost:8080/orders/7/packed  # the warehouse has packed it
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	_ "modernc.org/sqlite"

	"codeq"
	"codeq/codeqsql"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:8080", "serve HTTP at `ADDR`")
	dir := flag.String("dir", filepath.Join(os.TempDir(), "codeq-orders"), "keep database and queue in `DIR`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *addr, *dir); err != nil {
		slog.Error("orders failed", "err", err)
		os.Exit(1)
	}
}

// run serves until ctx ends.
func run(ctx context.Context, addr, dir string) (err error) {
	s := new(shop)
	if s.queue, err = codeq.Open(filepath.Join(dir, "queue"), &codeq.Options{Logger: slog.Default()}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.queue.Close()) }()
	if err := s.openDatabase(ctx, filepath.Join(dir, "orders.db")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.db.Close()) }()
	relay, err := s.outbox.NewRelay(s.db, s.queue, nil)
	if err != nil {
		return err
	}
	server := &http.Server{Addr: addr, Handler: s.routes(), ReadHeaderTimeout: 10 * time.Second}
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return relay.Run(ctx) })
	work.Go(func() error { return s.queue.Run(ctx, s.handlers(), nil) })
	work.Go(server.ListenAndServe)
	<-ctx.Done()
	err = server.Shutdown(context.WithoutCancel(ctx))
	if failed := work.Wait(); !errors.Is(failed, http.ErrServerClosed) {
		return failed
	}
	return err
}

// shop is the database and the queue of the service.
type shop struct {
	db     *sql.DB
	outbox *codeqsql.Tables
	queue  *codeq.Queue
}

// Tables stand for bank, carrier and mail server. Each remembers its idempotency keys.
const schema = `
	CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, task TEXT NOT NULL DEFAULT '');
	CREATE TABLE IF NOT EXISTS charges (key TEXT PRIMARY KEY, id TEXT);
	CREATE TABLE IF NOT EXISTS shipments (key TEXT PRIMARY KEY, id TEXT);
	CREATE TABLE IF NOT EXISTS mails (key TEXT PRIMARY KEY, id TEXT)`

func (s *shop) openDatabase(ctx context.Context, path string) (err error) {
	if s.outbox, err = codeqsql.New(codeqsql.SQLite, nil); err != nil {
		return err
	}
	s.db, err = sql.Open("sqlite", "file:"+path+
		"?_txlock=immediate&_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)")
	if err == nil {
		err = s.outbox.Migrate(ctx, s.db)
	}
	if err == nil {
		_, err = s.db.ExecContext(ctx, schema)
	}
	return err
}

func (s *shop) routes() http.Handler {
	mux := http.NewServeMux()
	for path, do := range map[string]func(ctx context.Context, id string) error{
		"POST /orders/{id}": s.take, "POST /orders/{id}/packed": s.packed,
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if err := do(r.Context(), r.PathValue("id")); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
			}
		})
	}
	return mux
}

// take takes an order: its row and its task are committed together.
func (s *shop) take(ctx context.Context, id string) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // unless it is committed
	made, err := tx.ExecContext(ctx, "INSERT INTO orders (id) VALUES (?) ON CONFLICT DO NOTHING", id)
	if err != nil {
		return err
	}
	if n, err := made.RowsAffected(); err != nil || n == 0 {
		return err // it was taken before
	}
	task, err := codeq.NewTask("order", id)
	if err == nil {
		err = s.outbox.Enqueue(ctx, tx, task)
	}
	if err == nil {
		err = tx.Commit()
	}
	return err
}

// packed tells the task of an order that the goods are packed.
func (s *shop) packed(ctx context.Context, id string) error {
	var task string
	if err := s.db.QueryRowContext(ctx, "SELECT task FROM orders WHERE id = ? AND task <> ''", id).Scan(&task); err != nil {
		return err
	}
	taskID, err := codeq.ParseID(task)
	if err != nil {
		return err
	}
	err = s.queue.Signal(ctx, taskID, "packed", nil)
	if errors.Is(err, codeq.ErrDuplicate) || errors.Is(err, codeq.ErrNotFound) {
		return nil // the warehouse has called before; the task may have ended since
	}
	return err
}

func (s *shop) handlers() *codeq.Mux {
	mux := new(codeq.Mux)
	codeq.Handle(mux, "order", s.fulfil)
	codeq.HandleBatch(mux, "mail", codeq.BatchOptions{Linger: 20 * time.Millisecond}, s.mail)
	return mux
}

// fulfil runs again after each wait, error or crash: finished steps return their results. A step
// that a crash interrupts runs again, too, so that the other side gets a key.
func (s *shop) fulfil(ctx context.Context, job *codeq.Job[string]) error {
	do := func(name, statement string) error {
		_, err := codeq.Step(ctx, name, func(ctx context.Context) (sql.Result, error) {
			_, err := s.db.ExecContext(ctx, statement, job.ID.String(), job.Args)
			return nil, err
		})
		return err
	}
	if err := do("name", "UPDATE orders SET task = ? WHERE id = ?"); err != nil { // for packed
		return err
	}
	if err := codeq.Sleep(ctx, "may be canceled", 100*time.Millisecond); err != nil {
		return err
	}
	if err := do("charge", "INSERT INTO charges (key, id) VALUES (?, ?) ON CONFLICT DO NOTHING"); err != nil {
		return err
	}
	if _, err := codeq.WaitSignal[any](ctx, "packed", 24*time.Hour); err != nil {
		return err
	}
	if err := do("ship", "INSERT INTO shipments (key, id) VALUES (?, ?) ON CONFLICT DO NOTHING"); err != nil {
		return err
	}
	mail, err := codeq.NewTask("mail", job.Args)
	job.FollowUp(mail) // in the commit that completes this task
	return err
}

// mail sends the mails of many orders.
func (s *shop) mail(_ context.Context, jobs []*codeq.Job[string]) []error {
	errs := make([]error, len(jobs))
	for i, job := range jobs {
		_, errs[i] = s.db.ExecContext(job.Context(), "INSERT INTO mails (key, id) VALUES (?, ?) ON CONFLICT DO NOTHING", job.ID.String(), job.Args)
	}
	return errs
}
