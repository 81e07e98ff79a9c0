package dbtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqsql"
	"codeq/codeqtest"
)

// TestOrder: rows are produced in their order, over batches of many rows and of large ones.
func TestOrder(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		var want []string
		tx := d.begin(t)
		large := strings.Repeat("x", 700<<10)
		for n := range 600 {
			payload := fmt.Sprint(n)
			if n > 300 && n < 310 {
				payload += large
			}
			want = append(want, payload)
			require.NoError(t, d.Enqueue(t.Context(), tx, inGroup("g", payload)))
		}
		require.NoError(t, tx.Commit())
		r := d.relay(t, q)
		require.NoError(t, r.Flush(t.Context()))
		require.Equal(t, want, payloads(t, q, "mail"))
		require.Zero(t, d.rows(t))
		require.Equal(t, codeqsql.RelayStats{Produced: 600}, r.Stats())
	})
}

// TestLargeRows: a relay asks for few rows while they are large: drivers read all of a result.
func TestLargeRows(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	q := codeqtest.Open(t, nil)
	for range 12 {
		d.enqueue(t, text("mail", strings.Repeat("x", 1<<20)))
	}
	f := &faulty{DB: d.DB, Producer: q, at: failing("")}
	require.NoError(t, d.relayOf(t, f).Flush(t.Context()))
	require.Equal(t, []any{256, 3, 3, 3, 3}, f.limits) // of 1.4 MB each, in base64
	require.Len(t, payloads(t, q, "mail"), 12)
}

// TestLateCommit: a row with a lower number that is committed after the relay has passed it is
// produced all the same.
func TestLateCommit(t *testing.T) {
	t.Parallel()
	onServers(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		r := d.relay(t, q)
		early, late := d.begin(t), d.begin(t)
		require.NoError(t, d.Enqueue(t.Context(), early, text("mail", "began first")))
		require.NoError(t, d.Enqueue(t.Context(), late, text("mail", "committed first")))
		require.NoError(t, late.Commit())
		require.NoError(t, r.Flush(t.Context()))
		require.Equal(t, []string{"committed first"}, payloads(t, q, "mail"))
		require.NoError(t, early.Commit())
		require.NoError(t, r.Flush(t.Context()))
		require.Equal(t, []string{"committed first", "began first"}, payloads(t, q, "mail"))

		early = d.begin(t)
		require.NoError(t, d.Enqueue(t.Context(), early, text("mail", "committed during a pass")))
		d.enqueue(t, text("mail", "of the pass"))
		f := &faulty{DB: d.DB, Producer: q, at: func(at string) error {
			if at == afterDelete && early != nil {
				tx := early
				early = nil
				return tx.Commit()
			}
			return nil
		}}
		require.NoError(t, d.relayOf(t, f).Flush(t.Context()))
		require.Equal(t, []string{"of the pass", "committed during a pass"}, payloads(t, q, "mail")[2:])
		require.Zero(t, d.rows(t))
	})
}

// TestSetAside: a task that the queue refuses, and one of another version, are kept aside and
// reported, once; those beside them go. They may be sent again, or discarded.
func TestSetAside(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		opts := &codeq.Options{Limits: codeq.Limits{Payload: 10}}
		q := codeqtest.Open(t, opts)
		refuses := codeq.Task{Queue: "mail", Payload: []byte("orphan"), After: []codeq.ID{{1}}, OnMissing: codeq.RefuseOnMissing}
		d.enqueue(t, inGroup("g", "a"), inGroup("g", "b, too large"), inGroup("g", "c"), refuses, text("mail", "d"),
			text("mail", "later"), text("mail", "unknown"))
		last := d.number(t, "SELECT MAX(id) FROM "+d.outbox())
		d.do(t, "UPDATE "+d.outbox()+" SET format = 2 WHERE id = ?", last-1)
		d.do(t, "UPDATE "+d.outbox()+" SET task = ? WHERE id = ?", []byte(`{"Queue":"mail","Colour":"red"}`), last)

		var reported []*codeqsql.RowError
		r, err := d.NewRelay(d.DB, q, &codeqsql.RelayOptions{OnError: func(err error) {
			var row *codeqsql.RowError
			if !errors.As(err, &row) {
				t.Errorf("reported: %v", err)
			}
			reported = append(reported, row)
		}})
		require.NoError(t, err)
		for range 2 {
			require.NoError(t, r.Flush(t.Context()))
		}
		require.Equal(t, []string{"a", "c", "d"}, payloads(t, q, "mail"))
		require.Len(t, reported, 4)
		require.Equal(t, codeqsql.RelayStats{Produced: 3, SetAside: 4}, r.Stats())
		byPayload := make(map[string]*codeqsql.RowError)
		for _, row := range reported {
			byPayload[string(row.Task.Payload)] = row
		}
		require.ErrorIs(t, byPayload["b, too large"], codeq.ErrInvalid)
		require.ErrorContains(t, byPayload["b, too large"], `queue "mail" is set aside`)
		require.ErrorIs(t, byPayload["orphan"], codeq.ErrNotFound)
		require.ErrorContains(t, byPayload[""], "another version")

		rows, err := d.List(t.Context(), d.DB, codeqsql.Refused, 0, 1000)
		require.NoError(t, err)
		require.Len(t, rows, 4)
		require.Equal(t, "b, too large", string(rows[0].Task.Payload))
		require.Contains(t, rows[0].Cause, "Task.Payload")
		require.False(t, rows[0].Sent.IsZero())
		require.WithinDuration(t, time.Now(), rows[0].Created, time.Minute)
		next, err := d.List(t.Context(), d.DB, codeqsql.Refused, rows[0].ID, 1)
		require.NoError(t, err)
		require.Equal(t, rows[1:2], next)
		stats, err := d.Tables.Stats(t.Context(), d.DB)
		require.NoError(t, err)
		require.Equal(t, codeqsql.OutboxStats{Refused: 4}, stats)

		require.NoError(t, d.Discard(t.Context(), d.DB, rows[1].ID))
		require.ErrorIs(t, d.Discard(t.Context(), d.DB, rows[1].ID), codeq.ErrNotFound)
		require.NoError(t, d.Resend(t.Context(), d.DB, rows[0].ID))
		require.ErrorIs(t, d.Resend(t.Context(), d.DB, rows[0].ID), codeq.ErrNotFound)
		stats, err = d.Tables.Stats(t.Context(), d.DB)
		require.NoError(t, err)
		require.Equal(t, codeqsql.OutboxStats{Waiting: 1, Refused: 2, Oldest: rows[0].Created}, stats)
		generous := codeqtest.Open(t, nil)
		require.NoError(t, d.relay(t, generous).Flush(t.Context()))
		require.Equal(t, []string{"b, too large"}, payloads(t, generous, "mail"))
	})
}

// TestRefusedLists: List refuses bad arguments.
func TestRefusedLists(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	for _, limit := range []int{0, 1001} {
		_, err := d.List(t.Context(), d.DB, codeqsql.Waiting, 0, limit)
		require.ErrorIs(t, err, codeq.ErrInvalid)
	}
	_, err := d.List(t.Context(), d.DB, 3, 0, 1)
	require.ErrorIs(t, err, codeq.ErrInvalid)
}

// TestStuck: a row that was first sent so long ago that its key may have ended is not sent, but
// reported and kept; one that was never sent is, however old it is.
func TestStuck(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		own := text("mail", "own key")
		own.Unique = codeq.Unique{Key: "own", For: codeqsql.MinKeyFor}
		d.enqueue(t, text("mail", "stuck"), text("mail", "in time"), text("mail", "never sent"), own)
		first := d.number(t, "SELECT MIN(id) FROM "+d.outbox())
		ago := func(d time.Duration) int64 { return time.Now().Add(-d).UnixMilli() }
		d.do(t, "UPDATE "+d.outbox()+" SET created_at = ?", ago(30*24*time.Hour))
		for n, age := range []time.Duration{codeqsql.KeyFor - 20*time.Hour, codeqsql.KeyFor - 22*time.Hour, 0, 22 * time.Hour} {
			if age > 0 {
				d.do(t, "UPDATE "+d.outbox()+" SET sent_at = ? WHERE id = ?", ago(age), first+n)
			}
		}
		var reported []error
		r, err := d.NewRelay(d.DB, q, &codeqsql.RelayOptions{OnError: func(err error) { reported = append(reported, err) }})
		require.NoError(t, err)
		for range 2 {
			require.NoError(t, r.Flush(t.Context()))
		}
		require.Equal(t, []string{"in time", "never sent"}, payloads(t, q, "mail"))
		require.Len(t, reported, 2)
		for _, err := range reported {
			require.ErrorIs(t, err, codeqsql.ErrStuck)
		}
		rows, err := d.List(t.Context(), d.DB, codeqsql.Stuck, 0, 10)
		require.NoError(t, err)
		require.Len(t, rows, 2)
		require.Contains(t, rows[0].Cause, "began")
		require.NoError(t, d.Resend(t.Context(), d.DB, rows[0].ID))
		require.NoError(t, r.Flush(t.Context()))
		require.Equal(t, []string{"in time", "never sent", "stuck"}, payloads(t, q, "mail"))
	})
}

// TestFaults: an error at each point of a pass ends it; the next one loses nothing and repeats
// nothing.
func TestFaults(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		var want []string
		for _, point := range points {
			want = append(want, point+" 1", point+" 2")
			d.enqueue(t, inGroup("g", point+" 1"), text("mail", point+" 2"))
			f := &faulty{DB: d.DB, Producer: q, at: failing(point)}
			r, err := d.NewRelay(f, f, nil)
			require.NoError(t, err)
			err = r.Flush(t.Context())
			require.ErrorIs(t, err, io.ErrUnexpectedEOF, point)
			require.ErrorContains(t, err, "codeqsql: relay "+d.outbox())
			require.Equal(t, uint64(1), r.Stats().Failed)
			require.NoError(t, d.relay(t, q).Flush(t.Context()), point)
		}
		require.Equal(t, want, payloads(t, q, "mail"))
		require.Zero(t, d.rows(t))
	})
}

// TestHeldGroup: a task that cannot be produced now holds up its group, and nothing else, however
// many there are of it; the order stays.
func TestHeldGroup(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	q := codeqtest.Open(t, nil)
	tx := d.begin(t)
	var held []string
	for n := range 600 {
		held = append(held, fmt.Sprint("held ", n))
		require.NoError(t, d.Enqueue(t.Context(), tx, inGroup("down", held[n])))
	}
	require.NoError(t, d.Enqueue(t.Context(), tx, text("mail", "no group")))
	require.NoError(t, d.Enqueue(t.Context(), tx, inGroup("up", "other group")))
	require.NoError(t, tx.Commit())
	calls := 0
	down := producer(func(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error) {
		calls++
		for _, task := range tasks {
			if task.Group == "down" {
				return nil, fmt.Errorf("%w: no leader", codeq.ErrNotLeader)
			}
		}
		return q.ProduceBatch(ctx, tasks)
	})
	r, err := d.NewRelay(d.DB, down, nil)
	require.NoError(t, err)
	require.ErrorIs(t, r.Flush(t.Context()), codeq.ErrNotLeader)
	require.Equal(t, []string{"no group", "other group"}, payloads(t, q, "mail"))
	require.LessOrEqual(t, calls, 10) // the group is not tried 600 times
	require.Equal(t, 600, d.rows(t))
	require.NoError(t, d.relay(t, q).Flush(t.Context()))
	require.Equal(t, append([]string{"no group", "other group"}, held...), payloads(t, q, "mail"))
}

// producer is a queue.
type producer func(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error)

func (p producer) ProduceBatch(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error) {
	return p(ctx, tasks)
}

// TestUncertain: a row is produced again after an uncertain produce, and not twice. A duplicate
// beside another error does not end a row.
func TestUncertain(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	q := codeqtest.Open(t, nil)
	d.enqueue(t, text("mail", "a"), text("mail", "b"))
	uncertain := producer(func(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error) {
		ids, err := q.ProduceBatch(ctx, tasks)
		return ids, errors.Join(err, codeq.ErrUncertain)
	})
	r, err := d.NewRelay(d.DB, uncertain, nil)
	require.NoError(t, err)
	for range 2 {
		require.ErrorIs(t, r.Flush(t.Context()), codeq.ErrUncertain)
		require.Equal(t, 2, d.rows(t))
	}
	r = d.relay(t, q)
	require.NoError(t, r.Flush(t.Context()))
	require.Equal(t, []string{"a", "b"}, payloads(t, q, "mail"))
	require.Equal(t, codeqsql.RelayStats{Duplicates: 2}, r.Stats())
}

// TestSlowRelay: a relay that stops between any two steps, while another one produces and deletes
// all rows, and more come, repeats nothing and changes no order.
func TestSlowRelay(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		fast := d.relay(t, q)
		var want []string
		for _, point := range points {
			want = append(want, point+" 1", point+" 2", point+" 3")
			d.enqueue(t, inGroup("g", point+" 1"), inGroup("g", point+" 2"))
			stopped := false
			f := &faulty{DB: d.DB, Producer: q, at: func(at string) error {
				if at != point || stopped {
					return nil
				}
				stopped = true
				if point == afterRead { // the result is open yet
					return nil
				}
				if err := fast.Flush(t.Context()); err != nil {
					return err
				}
				d.enqueue(t, inGroup("g", point+" 3"))
				return nil
			}}
			slow, err := d.NewRelay(f, f, nil)
			require.NoError(t, err)
			require.NoError(t, slow.Flush(t.Context()), point)
			if point == afterRead {
				d.enqueue(t, inGroup("g", point+" 3"))
			}
			require.NoError(t, fast.Flush(t.Context()))
		}
		require.Equal(t, want, payloads(t, q, "mail"))
		require.Zero(t, d.rows(t))
	})
}

// TestPoll: Run sees a row within 50 ms without Wake, at once with it, and asks the database
// nothing else while it is idle.
func TestPoll(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		d := onSQLite(t)
		var statements atomic.Int64
		f := &faulty{DB: d.DB, Producer: q, at: func(at string) error {
			if strings.HasPrefix(at, "before") {
				statements.Add(1)
			}
			return nil
		}}
		r, err := d.NewRelay(f, f, nil)
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		time.Sleep(30*time.Millisecond + time.Microsecond)
		d.enqueue(t, text("mail", "polled"))
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, []string{"polled"}, payloads(t, q, "mail"))
		d.enqueue(t, text("mail", "woken"))
		r.Wake()
		synctest.Wait()
		require.Equal(t, []string{"polled", "woken"}, payloads(t, q, "mail"))
		statements.Store(0)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, int64(20), statements.Load())
		stop()
		require.NoError(t, <-ended)
	})
}

// TestRunGoesOn: Run reports the errors of the database, at first after 50 ms, then each second,
// however often it is woken, and goes on; it ends when the queue is closed.
func TestRunGoesOn(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		d := onSQLite(t)
		var up atomic.Bool
		f := &faulty{DB: d.DB, Producer: q, at: func(string) error {
			if up.Load() {
				return nil
			}
			return io.ErrUnexpectedEOF
		}}
		var reported []time.Duration
		began := time.Now()
		var r *codeqsql.Relay
		r, err := d.NewRelay(f, f, &codeqsql.RelayOptions{OnError: func(error) {
			reported = append(reported, time.Since(began))
			r.Wake()
		}})
		require.NoError(t, err)
		ended := make(chan error, 1)
		go func() { ended <- r.Run(t.Context()) }()
		d.enqueue(t, text("mail", "a"))
		time.Sleep(3*time.Second - time.Millisecond)
		synctest.Wait()
		require.Equal(t, []time.Duration{0, 50e6, 150e6, 350e6, 750e6, 1550e6, 2550e6}, reported)
		up.Store(true)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a"}, payloads(t, q, "mail"))
		require.NoError(t, q.Queue.Close())
		d.enqueue(t, text("mail", "b"))
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
		q.Reopen()
	})
}

// TestOneConnection: a relay needs one connection at a time.
func TestOneConnection(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, &codeq.Options{Limits: codeq.Limits{Payload: 3}})
		d.SetMaxOpenConns(1)
		d.enqueue(t, text("mail", "a"), text("mail", "large"), text("mail", "b"))
		for range 2 {
			stats, err := d.Tables.Stats(t.Context(), d.DB)
			require.NoError(t, err)
			require.Equal(t, 3, stats.Waiting)
		}
		r, err := d.NewRelay(d.DB, q, nil)
		require.NoError(t, err)
		require.NoError(t, r.Flush(t.Context()))
		require.Equal(t, []string{"a", "b"}, payloads(t, q, "mail"))
	})
}
