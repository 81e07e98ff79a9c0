package dbtest

import (
	"bytes"
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqsql"
	"codeq/codeqtest"
)

// TestEnqueue: a task exists if its transaction was committed, with all of its fields.
func TestEnqueue(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		parent, err := q.Produce(t.Context(), text("parents", ""))
		require.NoError(t, err)
		full := codeq.Task{
			Queue: "mail", Payload: []byte("a\x00\xff'\"\\"), Headers: map[string]string{"trace": "né'"}, Priority: 7,
			Tenant: "ten'ant", MaxAttempts: 3, RunAt: time.Date(2031, 2, 3, 4, 5, 6, 7e6, time.UTC), LeaseFor: time.Minute,
			Timeout: time.Hour, Retention: codeq.Forever, Group: "g", LimitKey: "l",
			Unique: codeq.Unique{Key: "own", For: 48 * time.Hour},
			After:  []codeq.ID{parent}, OnDead: codeq.CancelOnDead, OnMissing: codeq.RefuseOnMissing,
		}
		d.enqueue(t, full)
		rolledBack := d.begin(t)
		require.NoError(t, d.Enqueue(t.Context(), rolledBack, text("mail", "rolled back")))
		require.NoError(t, rolledBack.Rollback())
		require.NoError(t, d.Enqueue(t.Context(), d.DB, text("log", "at once")))
		conn, err := d.Conn(t.Context())
		require.NoError(t, err)
		require.NoError(t, d.Enqueue(t.Context(), conn, text("log", "on a connection")))
		require.NoError(t, conn.Close())

		r := d.relay(t, q)
		require.NoError(t, r.Flush(t.Context()))
		require.Zero(t, d.rows(t))
		require.Equal(t, codeqsql.RelayStats{Produced: 3}, r.Stats())
		var got []codeq.Task
		for _, info := range produced(t, q.Queue, "mail") {
			got = append(got, info.Task)
		}
		require.Equal(t, []codeq.Task{full}, got)
		require.Equal(t, []string{"at once", "on a connection"}, payloads(t, q, "log"))
	})
}

// TestKeyOfOutbox: a task without a key gets one for seven days. The same numbers of rows again, as
// in a database that was restored, are other tasks.
func TestKeyOfOutbox(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		r := d.relay(t, q)
		for _, payload := range []string{"first", "second"} {
			switch d.Dialect {
			case codeqsql.SQLite:
				d.do(t, "DELETE FROM sqlite_sequence")
			case codeqsql.PostgreSQL:
				d.do(t, "TRUNCATE "+d.outbox()+" RESTART IDENTITY")
			case codeqsql.MySQL:
				d.do(t, "TRUNCATE "+d.outbox())
			}
			d.enqueue(t, text("mail", payload))
			require.Equal(t, 1, d.number(t, "SELECT MAX(id) FROM "+d.outbox()))
			require.NoError(t, r.Flush(t.Context()))
		}
		require.Equal(t, []string{"first", "second"}, payloads(t, q, "mail"))
		for _, info := range produced(t, q.Queue, "mail") {
			require.Equal(t, codeqsql.KeyFor, info.Unique.For)
			require.NotEmpty(t, info.Unique.Key)
		}
	})
}

// TestOwnKey: a task with a key that another task has ends without a task.
func TestOwnKey(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	q := codeqtest.Open(t, nil)
	r := d.relay(t, q)
	one, two := text("mail", "one"), text("mail", "two")
	one.Unique = codeq.Unique{Key: "order 7", For: codeqsql.MinKeyFor}
	two.Unique = one.Unique
	d.enqueue(t, one, two)
	require.NoError(t, r.Flush(t.Context()))
	d.enqueue(t, two)
	require.NoError(t, r.Flush(t.Context()))
	require.Equal(t, []string{"one"}, payloads(t, q, "mail"))
	require.Equal(t, codeqsql.RelayStats{Produced: 1, Duplicates: 2}, r.Stats())
	require.Zero(t, d.rows(t))
}

// TestRefusedTasks: a task that no queue takes, or with a key that may end too early, is refused
// before its row is written, and names the field.
func TestRefusedTasks(t *testing.T) {
	t.Parallel()
	d := onSQLite(t)
	long := strings.Repeat("x", 256)
	for field, change := range map[string]func(*codeq.Task){
		"Task.Queue":           func(task *codeq.Task) { task.Queue = "" },
		"Task.Tenant":          func(task *codeq.Task) { task.Tenant = "\xff" },
		"Task.Group":           func(task *codeq.Task) { task.Group = long },
		"Task.LimitKey":        func(task *codeq.Task) { task.LimitKey = "\xff" },
		"Task.Headers":         func(task *codeq.Task) { task.Headers = map[string]string{"a": "\xff"} },
		"Task.Headers of é":    func(task *codeq.Task) { task.Headers = map[string]string{"k\xc3": "\xa9v"} }, // half in each
		"Task.Payload":         func(task *codeq.Task) { task.Payload = make([]byte, 1<<20+1) },
		"Task.Priority":        func(task *codeq.Task) { task.Priority = 10 },
		"Task.MaxAttempts":     func(task *codeq.Task) { task.MaxAttempts = -1 },
		"Task.RunAt":           func(task *codeq.Task) { task.RunAt = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
		"Task.LeaseFor":        func(task *codeq.Task) { task.LeaseFor = -1 },
		"Task.Timeout":         func(task *codeq.Task) { task.Timeout = -1 },
		"Task.Retention":       func(task *codeq.Task) { task.Retention = -2 },
		"Task.After":           func(task *codeq.Task) { task.After = make([]codeq.ID, codeq.MaxParents+1) },
		"Task.After of Nth":    func(task *codeq.Task) { task.After = []codeq.ID{codeq.Nth(0)} },
		"OnDead":               func(task *codeq.Task) { task.OnDead = 9 },
		"OnMissing":            func(task *codeq.Task) { task.OnMissing = 9 },
		"Task.Unique.Key":      func(task *codeq.Task) { task.Unique.For = time.Hour },
		"Task.Unique.For":      func(task *codeq.Task) { task.Unique = codeq.Unique{Key: "k", For: codeqsql.MinKeyFor - 1} },
		"Task.Unique":          func(task *codeq.Task) { task.Unique = codeq.Unique{Key: "k", For: codeqsql.KeyFor, Replace: true} },
		"Task.Headers of 16 K": func(task *codeq.Task) { task.Headers = map[string]string{"a": strings.Repeat("x", 16<<10)} },
	} {
		task := text("mail", "")
		change(&task)
		var invalid *codeq.InvalidError
		require.ErrorAs(t, d.Enqueue(t.Context(), d.DB, task), &invalid, field)
		name, _, _ := strings.Cut(field, " of ")
		require.Equal(t, name, invalid.Field)
	}
	for _, unique := range []codeq.Unique{
		{Key: "k", For: codeqsql.KeyFor, ReleaseOnComplete: true}, {Key: "k", For: codeqsql.KeyFor, ReleaseOnDead: true},
		{Key: "k", For: codeqsql.KeyFor, ReleaseOnClaim: true}, {Key: "k", For: codeqsql.KeyFor, MaxWait: 1},
	} {
		require.ErrorIs(t, d.Enqueue(t.Context(), d.DB, codeq.Task{Queue: "mail", Unique: unique}), codeq.ErrInvalid)
	}
	require.Zero(t, d.rows(t))
}

// TestLimitsOfEnqueue: the default limits are those of a queue; others are options of both.
func TestLimitsOfEnqueue(t *testing.T) {
	t.Parallel()
	for _, limits := range []codeq.Limits{{}, {Payload: 100, Headers: 20, Name: 8}} {
		d := onSQLite(t)
		tables, err := codeqsql.New(codeqsql.SQLite, &codeqsql.Options{Prefix: d.Prefix, Limits: limits})
		require.NoError(t, err)
		q := codeqtest.Open(t, &codeq.Options{Limits: limits})
		atLimit := map[string]int{"payload": 1 << 20, "headers": 16 << 10, "name": 255}
		if limits != (codeq.Limits{}) {
			atLimit = map[string]int{"payload": limits.Payload, "headers": limits.Headers, "name": limits.Name}
		}
		for what, limit := range atLimit {
			for beyond := range 2 {
				task := codeq.Task{Queue: "q"}
				switch what {
				case "payload":
					task.Payload = make([]byte, limit+beyond)
				case "headers":
					task.Headers = map[string]string{"k": strings.Repeat("x", limit+beyond-1)}
				case "name":
					task.Queue = strings.Repeat("x", limit+beyond)
				}
				_, err := q.Produce(t.Context(), task)
				require.Equal(t, beyond == 1, err != nil, "%s: %v", what, err)
				err = tables.Enqueue(t.Context(), d.DB, task)
				require.Equal(t, beyond == 1, err != nil, "%s: %v", what, err)
			}
		}
	}
}

// TestOptions: bad options are refused, and a prefix begins all names.
func TestOptions(t *testing.T) {
	t.Parallel()
	for _, d := range []codeqsql.Dialect{0, 4} {
		_, err := codeqsql.New(d, nil)
		require.ErrorIs(t, err, codeq.ErrInvalid)
	}
	for _, o := range []codeqsql.Options{
		{Prefix: "a.b"}, {Prefix: "1"}, {Prefix: "a b"}, {Prefix: strings.Repeat("a", 31)}, {Limits: codeq.Limits{Payload: -1}},
	} {
		_, err := codeqsql.New(codeqsql.SQLite, &o)
		require.ErrorIs(t, err, codeq.ErrInvalid, o)
	}
	tables, err := codeqsql.New(codeqsql.MySQL, &codeqsql.Options{Prefix: "app_"})
	require.NoError(t, err)
	for _, statement := range tables.Schema() {
		require.Contains(t, statement, "app_")
		require.NotContains(t, statement, "{")
	}
	d := onSQLite(t)
	q := codeqtest.Open(t, nil)
	_, err = d.NewRelay(nil, q, nil)
	require.ErrorIs(t, err, codeq.ErrInvalid)
	_, err = d.NewRelay(d.DB, nil, nil)
	require.ErrorIs(t, err, codeq.ErrInvalid)
	_, err = d.NewRelay(d.DB, q, &codeqsql.RelayOptions{Poll: time.Microsecond})
	require.ErrorIs(t, err, codeq.ErrInvalid)
}

// TestMigrate: several programs make the same tables at a time, and again.
func TestMigrate(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		p := d.place
		p.Prefix += "again_"
		var programs sync.WaitGroup
		for range 4 {
			programs.Go(func() {
				tables, db, err := p.open()
				if err == nil {
					err = tables.Migrate(t.Context(), db)
				}
				if err != nil {
					t.Errorf("migrate: %v", err)
				}
				_ = db.Close()
			})
		}
		programs.Wait()
		require.Zero(t, d.number(t, "SELECT COUNT(*) FROM "+p.Prefix+"outbox"))
		require.Zero(t, d.number(t, "SELECT COUNT(*) FROM "+p.Prefix+"once"))
	})
}

// TestManyWriters: transactions beside each other and beside two relays do not fail, as by a
// deadlock or a busy database, and each task is produced once.
func TestManyWriters(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		q := codeqtest.Open(t, nil)
		stop := make(chan struct{})
		var relays, writers sync.WaitGroup
		for range 2 {
			// Two relays that change the same rows may get a deadlock: one goes on later.
			r, err := d.NewRelay(d.DB, q, nil)
			require.NoError(t, err)
			relays.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						_ = r.Flush(t.Context())
					}
				}
			})
		}
		const each = 25
		for w := range 4 {
			writers.Go(func() {
				for n := range each {
					if err := write(t, d, inGroup(string(rune('a'+w)), string(rune('a'+w))+string(rune('A'+n)))); err != nil {
						t.Errorf("writer: %v", err)
					}
				}
			})
		}
		writers.Wait()
		close(stop)
		relays.Wait()
		require.NoError(t, d.relay(t, q).Flush(t.Context()))
		require.Zero(t, d.rows(t))
		inOrder := make(map[byte][]byte)
		for _, p := range payloads(t, q, "mail") {
			inOrder[p[0]] = append(inOrder[p[0]], p[1])
		}
		for w := range 4 {
			of := inOrder[byte('a'+w)]
			require.Len(t, of, each)
			require.True(t, bytes.Equal(of, []byte("ABCDEFGHIJKLMNOPQRSTUVWXY")), "%s", of)
		}
	})
}

// write commits a row, in a transaction that reads before it writes.
func write(t *testing.T, d *database, task codeq.Task) error {
	tx, err := d.BeginTx(t.Context(), nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	var n sql.NullInt64
	if err := tx.QueryRowContext(t.Context(), "SELECT MAX(id) FROM "+d.outbox()).Scan(&n); err != nil {
		return err
	}
	if err := d.Enqueue(t.Context(), tx, task); err != nil {
		return err
	}
	return tx.Commit()
}
