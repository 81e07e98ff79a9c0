package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"codeq/bench/workload"
)

// riverSubjects returns River on PostgreSQL over TCP: one client with the shortest cooldown between
// fetches (it bounds the throughput), a pool of 40 connections, and single inserts, or
// InsertManyFast (COPY) of 64. PostgreSQL has its defaults except for 512 MiB of shared buffers,
// and no checkpoint during a run. A completion counts when River publishes its event, after the
// commit. River keeps completed jobs for 24 h, by its defaults.
func riverSubjects() []subject {
	var all []subject
	for _, s := range []struct {
		name, keeps string
		class       class
		commit      string
	}{
		{"fsync", "nothing", disk, "on"},
		{"async", "crash of PostgreSQL, power: the last 0.6 s", process, "off"},
	} {
		for _, w := range []struct {
			name, driven   string
			batch, workers int
		}{
			{"single", "Insert; 128 workers", 1, 0},
			{"batch", "InsertManyFast of 64; 128 workers", batchSize, 0},
			{"batch-workers", "InsertManyFast of 64; 2,000 workers", batchSize, 2000},
		} {
			all = append(all, subject{
				Name: "river/" + s.name + "/" + w.name, Queue: "River", Driven: w.driven + ", synchronous_commit=" + s.commit,
				Keeps: s.keeps, Class: s.class, Batch: w.batch, Leases: true, Retains: true, Load: workload.Load{Workers: w.workers},
				open: func(ctx context.Context, dir string, _ workload.Load) (*peer, error) {
					return openRiver(ctx, dir, s.commit)
				},
			})
		}
	}
	return all
}

func openRiver(ctx context.Context, dir, synchronousCommit string) (_ *peer, err error) {
	p := &peer{}
	defer closeUnless(&err, p)
	port, err := startPostgres(ctx, dir, p, synchronousCommit)
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable&pool_max_conns=40", port))
	if err != nil {
		return nil, err
	}
	p.onClose(func() error { pool.Close(); return nil })
	var version string
	if err := pool.QueryRow(ctx, "SHOW server_version").Scan(&version); err != nil {
		return nil, err
	}
	number, _, _ := strings.Cut(version, " ")
	p.version = moduleVersion("github.com/riverqueue/river") + ", PostgreSQL " + number
	p.driver, err = newRiverDriver(ctx, riverpgxv5.New(pool))
	return p, err
}

// startPostgres creates a database below dir and serves it. PostgreSQL refuses to run as root: then
// it runs as the user postgres of the package.
func startPostgres(ctx context.Context, dir string, p *peer, synchronousCommit string) (port int, err error) {
	const pattern = "/usr/lib/postgresql/*/bin/"
	initdb, err := program("initdb", pattern+"initdb")
	if err != nil {
		return 0, err
	}
	postgres := filepath.Join(filepath.Dir(initdb), "postgres")
	data := filepath.Join(dir, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return 0, err
	}
	var as *syscall.Credential
	if os.Geteuid() == 0 {
		u, err := user.Lookup("postgres")
		if err != nil {
			return 0, err
		}
		uid, _ := strconv.Atoi(u.Uid) // numbers, on Unix
		gid, _ := strconv.Atoi(u.Gid)
		as = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		if err := os.Chown(data, uid, gid); err != nil {
			return 0, err
		}
	}
	init := exec.CommandContext(ctx, initdb, "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	init.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	init.Dir = data
	if out, err := init.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("initdb: %w: %s", err, lastLine(out))
	}
	if port, err = freePort(); err != nil {
		return 0, err
	}
	// SIGQUIT ends PostgreSQL at once, as a crash would.
	return port, p.serve(startServer(ctx, dir, as, syscall.SIGQUIT, func(ctx context.Context) error {
		c, err := pgx.Connect(ctx, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port))
		if err != nil {
			return err
		}
		return c.Close(ctx)
	}, postgres, "-D", data, "-p", fmt.Sprint(port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
		"-c", "shared_buffers=512MB", "-c", "max_wal_size=8GB", "-c", "checkpoint_timeout=30min",
		"-c", "synchronous_commit="+synchronousCommit))
}

type riverTask struct {
	Payload []byte `json:"p"`
}

func (riverTask) Kind() string { return "bench" }

type riverWorker struct {
	river.WorkerDefaults[riverTask]
}

func (riverWorker) Work(context.Context, *river.Job[riverTask]) error { return nil }

// riverDriver is River on a database with transactions of type TTx.
type riverDriver[TTx any] struct {
	db       riverdriver.Driver[TTx]
	inserter *river.Client[TTx]
}

// newRiverDriver creates River's tables in an empty database.
func newRiverDriver[TTx any](ctx context.Context, db riverdriver.Driver[TTx]) (workload.Driver, error) {
	migrator, err := rivermigrate.New(db, &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, err
	}
	inserter, err := river.NewClient(db, &river.Config{Logger: slog.New(slog.DiscardHandler)})
	return &riverDriver[TTx]{db, inserter}, err
}

func (d *riverDriver[TTx]) Produce(ctx context.Context, _, _ int, payloads [][]byte) error {
	if len(payloads) == 1 {
		_, err := d.inserter.Insert(ctx, riverTask{payloads[0]}, nil)
		return err
	}
	params := make([]river.InsertManyParams, len(payloads))
	for i, p := range payloads {
		params[i].Args = riverTask{p}
	}
	_, err := d.inserter.InsertManyFast(ctx, params)
	return err
}

func (d *riverDriver[TTx]) Work(ctx context.Context, workers int, done func(payload []byte)) (err error) {
	all := river.NewWorkers()
	river.AddWorker(all, riverWorker{})
	client, err := river.NewClient(d.db, &river.Config{
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}},
		Workers:           all,
		FetchCooldown:     river.FetchCooldownMin,
		FetchPollInterval: 50 * time.Millisecond,
		Logger:            slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	// A full channel drops events; this one has room for all events that the backlog allows.
	events, cancel := client.SubscribeConfig(&river.SubscribeConfig{ChanSize: 2 * backlog, Kinds: []river.EventKind{river.EventKindJobCompleted}})
	defer cancel()
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err = errors.Join(err, client.StopAndCancel(stop))
	}()
	for {
		select {
		case e := <-events:
			var t riverTask
			if err := json.Unmarshal(e.Job.EncodedArgs, &t); err != nil {
				return err
			}
			done(t.Payload)
		case <-ctx.Done():
			return nil
		}
	}
}
