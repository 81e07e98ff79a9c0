package dbtest

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqsql"
	"codeq/codeqtest"
)

func TestMain(m *testing.M) {
	if kind := os.Getenv(childEnv); kind != "" {
		runChild(kind)
		return
	}
	code := m.Run()
	stopServers()
	os.Exit(code)
}

// database is a database with the tables of one test.
type database struct {
	*codeqsql.Tables
	*sql.DB
	place
	server *server // nil: SQLite
}

// place says where the tables are, also to another process.
type place struct {
	Dialect     codeqsql.Dialect
	Driver, DSN string
	Prefix      string
}

func (p *place) open() (*codeqsql.Tables, *sql.DB, error) {
	tables, err := codeqsql.New(p.Dialect, &codeqsql.Options{Prefix: p.Prefix})
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open(p.Driver, p.DSN)
	return tables, db, err
}

// options are those of package codeqsql for SQLite.
const options = "?_txlock=immediate&_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)"

// onSQLite opens a database for a test.
func onSQLite(t *testing.T) *database {
	return at(t, nil, place{codeqsql.SQLite, "sqlite", "file:" + filepath.Join(t.TempDir(), "app.db") + options, ""})
}

func onPostgres(t *testing.T) *database {
	s, err := postgres()
	return on(t, need(t, s, err), codeqsql.PostgreSQL)
}

func onMariaDB(t *testing.T) *database {
	s, err := mariaDB()
	return on(t, need(t, s, err), codeqsql.MySQL)
}

func on(t *testing.T, s *server, d codeqsql.Dialect) *database {
	return at(t, s, place{d, s.driver, s.dsn, ""})
}

var tests atomic.Int64

func at(t *testing.T, s *server, p place) *database {
	t.Helper()
	p.Prefix = fmt.Sprintf("t%d_", tests.Add(1))
	tables, db, err := p.open()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, tables.Migrate(t.Context(), db))
	return &database{tables, db, p, s}
}

// onAll calls a test with each database.
func onAll(t *testing.T, test func(t *testing.T, d *database)) {
	t.Parallel()
	onServers(t, test)
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, onSQLite(t))
	})
}

// onServers calls a test with each database that has several writers at a time.
func onServers(t *testing.T, test func(t *testing.T, d *database)) {
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		test(t, onPostgres(t))
	})
	t.Run("MariaDB", func(t *testing.T) {
		t.Parallel()
		test(t, onMariaDB(t))
	})
}

// outbox is the name of the table.
func (d *database) outbox() string { return d.Prefix + "outbox" }

// sql puts the placeholders of the dialect into a statement.
func (p *place) sql(statement string) string {
	for n := 1; p.Dialect == codeqsql.PostgreSQL && strings.Contains(statement, "?"); n++ {
		statement = strings.Replace(statement, "?", fmt.Sprintf("$%d", n), 1)
	}
	return statement
}

// do executes a statement.
func (d *database) do(t *testing.T, statement string, args ...any) {
	t.Helper()
	_, err := d.ExecContext(t.Context(), d.sql(statement), args...)
	require.NoError(t, err)
}

// number is the result of a query.
func (d *database) number(t *testing.T, query string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, d.QueryRowContext(t.Context(), d.sql(query), args...).Scan(&n))
	return n
}

func (d *database) rows(t *testing.T) int { return d.number(t, "SELECT COUNT(*) FROM "+d.outbox()) }

// enqueue commits a row for each task, in a transaction each.
func (d *database) enqueue(t *testing.T, tasks ...codeq.Task) {
	t.Helper()
	for _, task := range tasks {
		tx := d.begin(t)
		require.NoError(t, d.Enqueue(t.Context(), tx, task))
		require.NoError(t, tx.Commit())
	}
}

// begin begins a transaction that the end of the test rolls back.
func (d *database) begin(t *testing.T) *sql.Tx {
	t.Helper()
	tx, err := d.BeginTx(context.Background(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() }) // of a failed test
	return tx
}

// relay returns a relay that fails the test by an error that it reports.
func (d *database) relay(t *testing.T, q codeqsql.Producer) *codeqsql.Relay {
	t.Helper()
	return d.relayOf(t, &faulty{DB: d.DB, Producer: q, at: failing("")})
}

func (d *database) relayOf(t *testing.T, f *faulty) *codeqsql.Relay {
	t.Helper()
	r, err := d.NewRelay(f, f, &codeqsql.RelayOptions{OnError: func(err error) { t.Errorf("the relay reports: %v", err) }})
	require.NoError(t, err)
	return r
}

// text is a task with a payload.
func text(queue, payload string) codeq.Task {
	return codeq.Task{Queue: queue, Payload: []byte(payload)}
}

// inGroup is a task of a group.
func inGroup(group, payload string) codeq.Task {
	return codeq.Task{Queue: "mail", Payload: []byte(payload), Group: group}
}

// produced returns the waiting tasks of a queue, in the order of their produces.
func produced(t *testing.T, q *codeq.Queue, queue string) (all []*codeq.TaskInfo) {
	t.Helper()
	for _, state := range []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked} {
		for info, err := range q.List(t.Context(), codeq.ListOptions{Queue: queue, State: state}) {
			require.NoError(t, err)
			all = append(all, info)
		}
	}
	slices.SortFunc(all, func(a, b *codeq.TaskInfo) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	return all
}

// payloads returns those of produced.
func payloads(t *testing.T, q *codeqtest.Queue, queue string) []string {
	t.Helper()
	return payloadsOf(t, q.Queue, queue)
}

func payloadsOf(t *testing.T, q *codeq.Queue, queue string) (all []string) {
	t.Helper()
	for _, info := range produced(t, q, queue) {
		all = append(all, string(info.Payload))
	}
	return all
}

// hook is called by a faulty at a point, which is one of points; an error is that of the call.
type hook func(point string) error

// The points of a pass.
const (
	beforeRead, afterRead       = "before read", "after read"
	beforeMark, afterMark       = "before mark", "after mark"
	beforeProduce, afterProduce = "before produce", "after produce"
	beforeDelete, afterDelete   = "before delete", "after delete"
)

var points = []string{
	beforeRead, afterRead, beforeMark, afterMark, beforeProduce, afterProduce, beforeDelete, afterDelete,
}

// faulty is the database, and the queue, of a relay, with a hook.
type faulty struct {
	codeqsql.DB
	codeqsql.Producer
	at     hook
	limits []any // of its queries for rows
}

func (f *faulty) around(what string, call func() error) error {
	if err := f.at("before " + what); err != nil {
		return err
	}
	err := call()
	if faultErr := f.at("after " + what); faultErr != nil {
		return faultErr
	}
	return err
}

func (f *faulty) ExecContext(ctx context.Context, query string, args ...any) (r sql.Result, err error) {
	what := "mark"
	if strings.HasPrefix(query, "DELETE") {
		what = "delete"
	}
	return r, f.around(what, func() (err error) { r, err = f.DB.ExecContext(ctx, query, args...); return err })
}

func (f *faulty) QueryContext(ctx context.Context, query string, args ...any) (r *sql.Rows, err error) {
	f.limits = append(f.limits, args[len(args)-1])
	err = f.around("read", func() (err error) { r, err = f.DB.QueryContext(ctx, query, args...); return err })
	if err != nil && r != nil {
		_ = r.Close()
	}
	return r, err
}

func (f *faulty) ProduceBatch(ctx context.Context, tasks []codeq.Task) (ids []codeq.ID, err error) {
	return ids, f.around("produce", func() (err error) { ids, err = f.Producer.ProduceBatch(ctx, tasks); return err })
}

// failing is a hook that returns io.ErrUnexpectedEOF at a point.
func failing(point string) hook {
	return func(at string) error {
		if at == point {
			return fmt.Errorf("at %s: %w", at, io.ErrUnexpectedEOF)
		}
		return nil
	}
}
