//go:build unix

package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
)

// childEnv makes the test binary the service itself: its value is address and directory.
const childEnv = "ORDERS_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	err := run(context.Background(), os.Args[1], os.Args[2])
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// service is the service in another process, which is killed and started again.
type service struct {
	*testing.T
	addr, dir string
	cmd       *exec.Cmd
}

func (s *service) start() {
	s.cmd = exec.Command(os.Args[0], s.addr, s.dir)
	s.cmd.Env = append(os.Environ(), childEnv+"=1")
	require.NoError(s, s.cmd.Start())
}

func (s *service) kill() {
	require.NoError(s, s.cmd.Process.Kill())
	require.Error(s, s.cmd.Wait())
	require.Equal(s, "signal: killed", s.cmd.ProcessState.String(), "it has ended before")
}

// post posts until the service takes it.
func (s *service) post(path string) {
	for s.Context().Err() == nil {
		resp, err := http.Post("http://"+s.addr+path, "", http.NoBody)
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// count returns the result of a query of one number.
func (s *service) count(db *sql.DB, query string) (n int) {
	require.NoError(s, db.QueryRow(query).Scan(&n))
	return n
}

// missing logs the orders that are not in table, with their tasks. The service has ended.
func (s *service) missing(db *sql.DB, table string) {
	rows, err := db.Query("SELECT id, task FROM orders WHERE id NOT IN (SELECT id FROM " + table + ") LIMIT 10")
	require.NoError(s, err)
	defer rows.Close()
	q, err := codeq.Open(filepath.Join(s.dir, "queue"), nil)
	require.NoError(s, err)
	defer q.Close()
	for rows.Next() {
		var order, task string
		require.NoError(s, rows.Scan(&order, &task))
		id, err := codeq.ParseID(task)
		if err != nil {
			s.Logf("order %s has no task: %v", order, err)
			continue
		}
		info, err := q.Get(s.Context(), id)
		s.Logf("order %s: %+v, %v", order, info, err)
	}
	require.NoError(s, rows.Err())
}

// TestKill9EachSecond: while the service is killed each second, all orders that it has taken are
// charged, shipped and mailed once.
func TestKill9EachSecond(t *testing.T) {
	kills := 60
	if testing.Short() {
		kills = 5
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, free.Close())
	s := &service{T: t, addr: free.Addr().String(), dir: t.TempDir()}
	s.start()
	defer func() { _ = s.cmd.Process.Kill() }()

	shopping, stop := context.WithCancel(t.Context()) // a begun order is posted until it is taken
	taken := make(chan int, 1<<20)                    // orders to be packed
	ended := make(chan struct{}, 2)
	go func() { // the customers
		defer close(taken)
		for id := 1; shopping.Err() == nil; id++ {
			s.post(fmt.Sprint("/orders/", id))
			taken <- id
		}
		ended <- struct{}{}
	}()
	go func() { // the warehouse
		for id := range taken {
			s.post(fmt.Sprint("/orders/", id, "/packed"))
		}
		ended <- struct{}{}
	}()
	for range kills {
		time.Sleep(time.Second)
		s.kill()
		s.start()
	}
	stop()
	<-ended
	<-ended

	db, err := sql.Open("sqlite", "file:"+filepath.Join(s.dir, "orders.db")+"?_pragma=busy_timeout(10000)")
	require.NoError(t, err)
	defer db.Close()
	orders := s.count(db, "SELECT COUNT(*) FROM orders")
	t.Logf("%d orders, %d kills", orders, kills)
	require.Greater(t, orders, kills)
	for _, table := range []string{"charges", "shipments", "mails"} {
		if !assert.Eventually(t, func() bool {
			return s.count(db, "SELECT COUNT(DISTINCT id) FROM "+table) == orders
		}, 5*time.Minute, 10*time.Millisecond, table) {
			s.kill()
			s.missing(db, table)
			t.FailNow()
		}
		require.Equal(t, orders, s.count(db, "SELECT COUNT(*) FROM "+table), "%s happened twice", table)
	}
}
