package dbtest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqsql"
	"codeq/codeqtest"
)

// charge is a handler with writes that happen once; after is called after the commit.
func charge(tables *codeqsql.Tables, db *sql.DB, insert string, at func(point string) error) func(context.Context, *codeq.Job[[]byte]) error {
	return func(ctx context.Context, job *codeq.Job[[]byte]) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // after Commit it does nothing
		var done *codeqsql.AlreadyDoneError
		if err := tables.Once(ctx, tx, job.Lease); errors.As(err, &done) {
			job.SetResult(done.Result)
			return nil
		} else if err != nil {
			return err
		}
		result := fmt.Appendf(nil, "receipt of attempt %d", job.Attempt)
		if err := at("after once"); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, insert, string(job.Args)); err != nil {
			return err
		}
		if err := tables.SaveResult(ctx, tx, job.Lease, result); err != nil {
			return err
		}
		if err := at("before commit"); err != nil {
			return err
		}
		if err := tx.Commit(); err != nil {
			return err
		}
		job.SetResult(result)
		return at("after commit")
	}
}

// charges makes the table of the application, and returns the statement that writes into it.
func (d *database) charges(t *testing.T) (insert string) {
	d.do(t, "CREATE TABLE "+d.Prefix+"charges (id VARCHAR(20))")
	return d.sql("INSERT INTO " + d.Prefix + "charges (id) VALUES (?)")
}

func (d *database) charged(t *testing.T) int {
	return d.number(t, "SELECT COUNT(*) FROM "+d.Prefix+"charges")
}

// TestOnce: the writes of a handler that fails before or after its commit, and runs again, happen
// once, and the task is completed with the result of the attempt that has committed, though it was
// a dead letter meanwhile.
func TestOnce(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		insert := d.charges(t)
		for n, points := range [][]string{{}, {"after once"}, {"before commit"}, {"after commit"}, {"before commit", "after commit", "after commit"}} {
			q := codeqtest.Open(t, &codeq.Options{MaxAttempts: max(1, len(points))})
			var mux codeq.Mux
			left := points
			codeq.Handle(&mux, "charge", charge(d.Tables, d.DB, insert, func(at string) error {
				if len(left) > 0 && left[0] == at {
					left = left[1:]
					return errors.New(at)
				}
				return nil
			}))
			id, err := q.Produce(t.Context(), text("charge", fmt.Sprint(n)))
			require.NoError(t, err)
			for len(left) > 0 {
				before := len(left)
				q.Work(&mux)
				if len(left) == before { // the writes were committed
					break
				}
				if info, err := q.Get(t.Context(), id); err == nil && info.State == codeq.Scheduled {
					require.NoError(t, q.SetRunAt(t.Context(), id, time.Time{}))
				}
			}
			if info, err := q.Get(t.Context(), id); err == nil && info.State == codeq.Dead {
				require.NoError(t, q.RedriveDead(t.Context(), id))
			}
			q.Work(&mux)
			info, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, codeq.Done, info.State)
			require.Contains(t, string(info.Result), "receipt of attempt", points)
			require.Equal(t, n+1, d.charged(t), points)
		}
	})
}

// lease is that of a task that was claimed.
func lease(t *testing.T, q *codeqtest.Queue) *codeq.Lease {
	t.Helper()
	_, err := q.Produce(t.Context(), codeq.Task{Queue: "charge"})
	require.NoError(t, err)
	l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"charge"}, NoWait: true})
	require.NoError(t, err)
	return l
}

// TestOnceBesideAnother: while an attempt is in its transaction, another one waits; it works if the
// first is rolled back, and gets its result if it is committed.
func TestOnceBesideAnother(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		for _, commit := range []bool{false, true} {
			job := lease(t, q)
			first := d.begin(t)
			require.NoError(t, d.Once(t.Context(), first, job))
			second := make(chan error)
			go func() {
				tx, err := d.BeginTx(context.Background(), nil) // on SQLite it waits here
				if err == nil {
					if d.Dialect == codeqsql.MySQL { // its snapshot is of before the commit
						_, err = tx.Exec("SELECT COUNT(*) FROM " + d.outbox())
					}
					err = errors.Join(err, d.Once(context.Background(), tx, job), tx.Rollback())
				}
				second <- err
			}()
			if d.Dialect != codeqsql.SQLite {
				d.awaitWaiting(t)
			}
			select {
			case err := <-second:
				require.Fail(t, "it did not wait", "%v", err)
			default:
			}
			if !commit {
				require.NoError(t, first.Rollback())
				require.NoError(t, <-second)
				continue
			}
			require.NoError(t, d.SaveResult(t.Context(), first, job, []byte("receipt")))
			require.NoError(t, first.Commit())
			err := <-second
			require.ErrorIs(t, err, codeqsql.ErrAlreadyDone)
			var done *codeqsql.AlreadyDoneError
			require.ErrorAs(t, err, &done)
			require.Equal(t, "receipt", string(done.Result))
			require.Equal(t, job.ID, done.ID)
			require.WithinDuration(t, time.Now(), done.At, time.Minute)
		}
	})
}

// awaitWaiting waits until a transaction waits for another one's row of Once.
func (d *database) awaitWaiting(t *testing.T) {
	query, like := "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE ?", "%"+d.Prefix+"once%"
	if d.Dialect == codeqsql.MySQL { // it runs at least
		query, like = "SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE ?", "INSERT IGNORE INTO "+d.Prefix+"once%"
	}
	for d.number(t, query, like) == 0 {
		require.NoError(t, t.Context().Err())
	}
}

// TestSaveResult: a result needs the row of Once, and may be the one that is there.
func TestSaveResult(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		job := &codeq.Lease{Receipt: codeq.Receipt{ID: codeq.ID{1}}}
		require.ErrorIs(t, d.SaveResult(t.Context(), d.DB, job, []byte("x")), codeq.ErrNotFound)
		require.NoError(t, d.Once(t.Context(), d.DB, job))
		for _, result := range []string{"", "x", "x", ""} {
			require.NoError(t, d.SaveResult(t.Context(), d.DB, job, []byte(result)))
		}
	})
}

// TestOnceInTransaction: after ErrAlreadyDone the transaction can go on.
func TestOnceInTransaction(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		insert := d.charges(t)
		q := codeqtest.Open(t, nil)
		job := lease(t, q)
		tx := d.begin(t)
		require.NoError(t, d.Once(t.Context(), tx, job))
		require.NoError(t, tx.Commit())
		tx = d.begin(t)
		err := d.Once(t.Context(), tx, job)
		require.ErrorIs(t, err, codeqsql.ErrAlreadyDone)
		require.ErrorContains(t, err, "already done: task "+job.ID.String())
		var done *codeqsql.AlreadyDoneError
		require.ErrorAs(t, err, &done)
		require.Empty(t, done.Result)
		_, err = tx.ExecContext(t.Context(), insert, "after")
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		require.Equal(t, 1, d.charged(t))

		job.Unique = codeq.Unique{Key: "k", Replace: true}
		require.ErrorIs(t, d.Once(t.Context(), d.begin(t), job), codeq.ErrInvalid)
	})
}

// TestSweep: the rows of Once go when they are old enough and their tasks have ended: not that of a
// dead letter, of a task that waits, or of one that cannot be asked for.
func TestSweep(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		jobs := make(map[string]*codeq.Lease)
		for _, name := range []string{"young", "done", "gone", "canceled", "dead", "waiting", "unknown"} {
			jobs[name] = lease(t, q)
			tx := d.begin(t)
			require.NoError(t, d.Once(t.Context(), tx, jobs[name]))
			require.NoError(t, tx.Commit())
			if name != "young" {
				d.do(t, "UPDATE "+d.Prefix+"once SET created_at = created_at - 3600000 WHERE task_id = ?", jobs[name].ID[:])
			}
		}
		for _, name := range []string{"young", "done", "gone"} {
			require.NoError(t, q.Complete(t.Context(), jobs[name].Receipt, nil))
		}
		require.NoError(t, q.Forget(t.Context(), jobs["gone"].ID))
		require.NoError(t, q.Cancel(t.Context(), jobs["canceled"].ID))
		require.NoError(t, q.DeadLetter(t.Context(), jobs["dead"].Receipt, errors.New("no")))
		require.NoError(t, q.Release(t.Context(), jobs["waiting"].Receipt, 0))
		asked := getter(func(ctx context.Context, id codeq.ID) (*codeq.TaskInfo, error) {
			if id == jobs["unknown"].ID {
				return nil, codeq.ErrNotLeader
			}
			return q.Get(ctx, id)
		})
		n, err := d.Sweep(t.Context(), d.DB, asked, time.Minute)
		require.NoError(t, err)
		require.Equal(t, 3, n)
		for name, kept := range map[string]int{"young": 1, "done": 0, "gone": 0, "canceled": 0, "dead": 1, "waiting": 1, "unknown": 1} {
			require.Equal(t, kept, d.number(t, "SELECT COUNT(*) FROM "+d.Prefix+"once WHERE task_id = ?", jobs[name].ID[:]), name)
		}
		n, err = d.Sweep(t.Context(), d.DB, q, 0)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		_, err = d.Sweep(t.Context(), d.DB, q, -1)
		require.ErrorIs(t, err, codeq.ErrInvalid)
		closed := getter(func(context.Context, codeq.ID) (*codeq.TaskInfo, error) { return nil, codeq.ErrClosed })
		_, err = d.Sweep(t.Context(), d.DB, closed, 0)
		require.ErrorIs(t, err, codeq.ErrClosed)
	})
}

// TestSweepPages: a sweep goes through more rows than one query returns.
func TestSweepPages(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	tx := d.begin(t)
	for n := range 1100 {
		require.NoError(t, d.Once(t.Context(), tx, &codeq.Lease{ID: codeq.ID{byte(n >> 8), byte(n)}}))
	}
	require.NoError(t, tx.Commit())
	odd := getter(func(_ context.Context, id codeq.ID) (*codeq.TaskInfo, error) {
		if id[1]%2 == 1 {
			return &codeq.TaskInfo{State: codeq.Dead}, nil
		}
		return nil, codeq.ErrNotFound
	})
	n, err := d.Sweep(t.Context(), d.DB, odd, 0)
	require.NoError(t, err)
	require.Equal(t, 550, n)
}

// getter is a queue.
type getter func(ctx context.Context, id codeq.ID) (*codeq.TaskInfo, error)

func (g getter) Get(ctx context.Context, id codeq.ID) (*codeq.TaskInfo, error) { return g(ctx, id) }
