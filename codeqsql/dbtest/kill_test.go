package dbtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqsql"
)

// The tests run this test binary again as children. The environment has the kind of a child, and
// its configuration in JSON.
const (
	childEnv  = "CODEQSQL_CHILD"
	configEnv = "CODEQSQL_CHILD_CONFIG"
)

// config is that of a child.
type config struct {
	Place  place
	Dir    string // of the queue
	Insert string // into the table of the application
	KillAt string // the point at which the child kills itself; "": it ends when all is done
}

func runChild(kind string) {
	var c config
	err := json.Unmarshal([]byte(os.Getenv(configEnv)), &c)
	if err == nil {
		err = map[string]func(*config) error{"relay": relayChild, "worker": workerChild}[kind](&c)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", kind, err)
		os.Exit(1)
	}
}

// child runs a child until it ends: by itself, or by a kill if it has a point for that.
func child(t *testing.T, kind string, c config) {
	t.Helper()
	encoded, err := json.Marshal(&c)
	require.NoError(t, err)
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+kind, configEnv+"="+string(encoded))
	out, err := cmd.CombinedOutput()
	if c.KillAt == "" {
		require.NoError(t, err, "%s", out)
		return
	}
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, "%s: not killed", c.KillAt)
	require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), "%s: %s", c.KillAt, out)
}

// kill is a hook that kills this process at the point. "during X" is while X goes on.
func (c *config) kill(at string) error {
	what, during := strings.CutPrefix(c.KillAt, "during ")
	switch {
	case at == c.KillAt:
		killSelf()
	case during && at == "before "+what:
		go killSelf()
	case during && at == "after "+what: // it was too fast
		killSelf()
	}
	return nil
}

func killSelf() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) }

func (c *config) openQueue() (*codeq.Queue, error) {
	return codeq.Open(c.Dir, &codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess})
}

// relayChild moves all rows.
func relayChild(c *config) error {
	tables, db, err := c.Place.open()
	if err != nil {
		return err
	}
	q, err := c.openQueue()
	if err != nil {
		return err
	}
	f := &faulty{DB: db, Producer: q, at: c.kill}
	r, err := tables.NewRelay(f, f, nil)
	if err != nil {
		return err
	}
	return errors.Join(r.Flush(context.Background()), q.Close())
}

// TestKilledRelay: a relay that is killed before, during and after each step of a pass loses no row
// and produces none twice; the order of groups holds.
func TestKilledRelay(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		c := config{Place: d.place, Dir: filepath.Join(t.TempDir(), "queue")}
		var want []string
		for _, point := range append([]string{"during mark", "during produce", "during delete"}, points...) {
			for n := range 3 {
				want = append(want, fmt.Sprint(point, " ", n))
				d.enqueue(t, inGroup("g", want[len(want)-1]), text("other", want[len(want)-1]))
			}
			rolledBack := d.begin(t)
			require.NoError(t, d.Enqueue(t.Context(), rolledBack, text("other", "rolled back")))
			require.NoError(t, rolledBack.Rollback())
			c.KillAt = point
			child(t, "relay", c)
		}
		c.KillAt = ""
		child(t, "relay", c)
		require.Zero(t, d.rows(t))
		q, err := c.openQueue()
		require.NoError(t, err)
		defer q.Close()
		inGroups, others := payloadsOf(t, q, "mail"), payloadsOf(t, q, "other")
		require.Equal(t, want, inGroups)
		require.ElementsMatch(t, want, others)
	})
}

// TestKilledDatabase: a server that is killed before, during and after each step of a pass, and
// during the commits of an application, loses no committed row, and none is produced twice.
func TestKilledDatabase(t *testing.T) {
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		s, err := newPostgres()
		testKilledDatabase(t, on(t, owned(t, s, err), codeqsql.PostgreSQL))
	})
	t.Run("MariaDB", func(t *testing.T) {
		t.Parallel()
		s, err := newMariaDB()
		testKilledDatabase(t, on(t, owned(t, s, err), codeqsql.MySQL))
	})
}

func testKilledDatabase(t *testing.T, d *database) {
	insert := d.charges(t)
	q, err := codeq.Open(filepath.Join(t.TempDir(), "queue"), &codeq.Options{Durability: codeq.DurabilityProcess})
	require.NoError(t, err)
	defer q.Close()
	maybe := make(map[string]bool)
	var want []string
	restart := func() {
		require.NoError(t, d.server.restart())
		for d.PingContext(t.Context()) != nil { // connections to the old server
			require.NoError(t, t.Context().Err())
		}
	}
	for _, point := range append([]string{"during mark", "during delete"}, points...) {
		want = append(want, point+" 1", point+" 2")
		d.enqueue(t, inGroup("g", point+" 1"), inGroup("g", point+" 2"))

		tx := d.begin(t) // of an application, killed during its commit
		maybe[point] = true
		require.NoError(t, d.Enqueue(t.Context(), tx, text("maybe", point)))
		_, err = tx.ExecContext(t.Context(), insert, point)
		require.NoError(t, err)
		committed := make(chan struct{})
		go func() {
			_ = tx.Commit() // perhaps
			close(committed)
		}()
		restart()
		<-committed

		what, during := strings.CutPrefix(point, "during ")
		killed := make(chan struct{})
		f := &faulty{DB: d.DB, Producer: q, at: func(at string) error {
			switch {
			case at == point:
				d.server.kill()
				close(killed)
			case during && at == "before "+what:
				go func() {
					d.server.kill()
					close(killed)
				}()
			}
			return nil
		}}
		r, err := d.NewRelay(f, f, nil)
		require.NoError(t, err)
		_ = r.Flush(t.Context()) // it succeeds if the kill comes after the last step
		<-killed
		restart()
	}
	require.NoError(t, d.relay(t, q).Flush(t.Context()))
	require.Zero(t, d.rows(t))
	require.Equal(t, want, payloadsOf(t, q, "mail"))
	produced := payloadsOf(t, q, "maybe")
	require.Len(t, produced, d.charged(t))
	for _, payload := range produced {
		require.True(t, maybe[payload], payload)
		delete(maybe, payload)
		require.Equal(t, 1, d.number(t, "SELECT COUNT(*) FROM "+d.Prefix+"charges WHERE id = ?", payload))
	}
}

// workerChild works on all tasks.
func workerChild(c *config) error {
	tables, db, err := c.Place.open()
	if err != nil {
		return err
	}
	q, err := c.openQueue()
	if err != nil {
		return err
	}
	var mux codeq.Mux
	codeq.Handle(&mux, "charge", charge(tables, db, c.Insert, c.kill))
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- q.Run(ctx, &mux, &codeq.RunOptions{Concurrency: 2}) }()
	err = q.WaitIdle(ctx)
	stop()
	return errors.Join(err, <-ended, q.Close())
}

// TestKilledHandler: the writes of handlers in a process killed before, during and after their
// commits happen once.
func TestKilledHandler(t *testing.T) {
	onAll(t, func(t *testing.T, d *database) {
		c := config{Place: d.place, Dir: filepath.Join(t.TempDir(), "queue"), Insert: d.charges(t)}
		produce := func(n int) {
			q, err := c.openQueue()
			require.NoError(t, err)
			for i := range 4 {
				_, err := q.Produce(t.Context(), text("charge", fmt.Sprint(n, " ", i)))
				require.NoError(t, err)
			}
			require.NoError(t, q.Close())
		}
		kills := []string{"after once", "before commit", "during commit", "after commit"}
		for n, point := range kills {
			produce(n)
			c.KillAt = point
			child(t, "worker", c)
		}
		c.KillAt = ""
		child(t, "worker", c)
		require.Equal(t, 4*len(kills), d.charged(t))
		require.Equal(t, 4*len(kills), d.number(t, "SELECT COUNT(DISTINCT id) FROM "+d.Prefix+"charges"))
		q, err := c.openQueue()
		require.NoError(t, err)
		defer q.Close()
		n, err := d.Sweep(t.Context(), d.DB, q, 0)
		require.NoError(t, err)
		require.Equal(t, 4*len(kills), n)
	})
}
