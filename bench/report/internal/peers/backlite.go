package peers

import (
	"context"
	"database/sql"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/mattn/go-sqlite3"
	"github.com/mikestefanello/backlite"

	"codeq/bench/workload"
)

// sqliteLevels lists the values of synchronous that differ with a WAL.
var sqliteLevels = []struct {
	name, keeps string
	class       class
}{
	{"FULL", "nothing", disk},
	{"NORMAL", "crash: nothing; power: what is in the WAL, up to 1,000 pages", process},
}

// sqliteSource returns the name of a database of go-sqlite3 below dir.
func sqliteSource(dir, synchronous string) string {
	return filepath.Join(dir, "queue.db") + "?_journal=WAL&_timeout=5000&_synchronous=" + synchronous
}

// backliteSubjects is backlite on SQLite by go-sqlite3, with the journal and the timeout of its
// README, one connection (SQLite has one writer, and the pool of database/sql waits in better order
// than SQLite's timeout), and eight times the workers, since its dispatcher sleeps for 100 ms when
// all are busy. By its defaults it deletes completed tasks.
func backliteSubjects() []subject {
	var all []subject
	for _, s := range sqliteLevels {
		for _, batch := range []int{1, batchSize} {
			way, driven := "single", "Add of a task; 1,024 workers"
			if batch > 1 {
				way, driven = "batch", "Add of 64; 1,024 workers"
			}
			all = append(all, subject{
				Name: "backlite/" + s.name + "/" + way, Queue: "backlite", Driven: driven + ", synchronous=" + s.name,
				Keeps: s.keeps, Class: s.class, Batch: batch, Leases: true, AtHandler: true, Load: workload.Load{Workers: 1024},
				open: func(_ context.Context, dir string, l workload.Load) (*peer, error) {
					return openBacklite(dir, l, s.name)
				},
			})
		}
	}
	return all
}

func openBacklite(dir string, l workload.Load, synchronous string) (_ *peer, err error) {
	p := &peer{}
	defer closeUnless(&err, p)
	db, err := sql.Open("sqlite3", sqliteSource(dir, synchronous))
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	p.onClose(db.Close)
	d := &backliteDriver{db: db}
	d.client, err = backlite.NewClient(backlite.ClientConfig{DB: db, NumWorkers: l.Workers, ReleaseAfter: 10 * time.Minute})
	if err != nil {
		return nil, err
	}
	if err := d.client.Install(); err != nil {
		return nil, err
	}
	d.client.Register(backlite.NewQueue(func(_ context.Context, t backliteTask) error {
		(*d.done.Load())(t.Payload)
		return nil
	}))
	lib, _, _ := sqlite3.Version()
	p.version = moduleVersion("github.com/mikestefanello/backlite") + ", SQLite " + lib
	p.driver = d
	return p, nil
}

type backliteTask struct{ Payload []byte }

func (backliteTask) Config() backlite.QueueConfig {
	return backlite.QueueConfig{Name: "bench", MaxAttempts: 25, Timeout: time.Minute}
}

type backliteDriver struct {
	db     *sql.DB
	client *backlite.Client
	done   atomic.Pointer[func(payload []byte)]
}

func (d *backliteDriver) Produce(ctx context.Context, _, _ int, payloads [][]byte) error {
	tasks := make([]backlite.Task, len(payloads))
	for i, p := range payloads {
		tasks[i] = backliteTask{p}
	}
	_, err := d.client.Add(tasks...).Ctx(ctx).Save()
	return err
}

func (d *backliteDriver) Work(ctx context.Context, _ int, done func(payload []byte)) error {
	d.done.Store(&done)
	d.client.Start(ctx)
	<-ctx.Done()
	return nil
}

// Pending counts, since a processor does not learn when its completion is stored.
func (d *backliteDriver) Pending(ctx context.Context) (n int64, err error) {
	err = d.db.QueryRowContext(ctx, "SELECT count(*) FROM backlite_tasks").Scan(&n)
	return n, err
}
