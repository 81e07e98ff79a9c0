package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// The service is stopped in the midst of its work, again and again. In the bubble of synctest, its
// minutes take almost no real time.
func TestNothingIsLostOverRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		var logged bytes.Buffer
		log := slog.New(slog.NewTextHandler(&logged, nil))
		run := func(d time.Duration, every time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			require.NoError(t, serve(ctx, config{dir: dir, every: every, workers: 4, stats: time.Second}, log))
		}
		withQueue := func(f func(q *codeq.Queue)) {
			q, err := codeq.Open(dir, nil)
			require.NoError(t, err)
			f(q)
			require.NoError(t, q.Close())
		}

		taken := make(map[codeq.ID]order)
		withQueue(func(q *codeq.Queue) {
			for n := range 300 {
				o := order{Number: n, Arrives: time.Now().Add(time.Minute)}
				task, err := newOrder(o)
				require.NoError(t, err)
				id, err := q.Produce(t.Context(), task)
				require.NoError(t, err)
				taken[id] = o
			}
		})
		for range 5 {
			run(333*time.Millisecond, 30*time.Millisecond)
		}
		withQueue(func(q *codeq.Queue) {
			stats, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.Greater(t, stats[orderQueue].Ready, uint64(50), "the service was stopped with work left")
			require.Greater(t, stats[orderQueue].Done, uint64(50), "the service has worked")
			require.EqualValues(t, 300+5*11, stats[orderQueue].Total(), "its own orders are there too")
		})
		run(5*time.Minute, 0)

		withQueue(func(q *codeq.Queue) {
			for id, o := range taken {
				info, err := q.Get(t.Context(), id)
				require.NoError(t, err)
				switch o.Number % 10 {
				case 5:
					require.Equal(t, codeq.Dead, info.State)
					require.Equal(t, "card refused", info.LastError)
					continue
				case 7:
					require.Equal(t, 2, info.Attempts)
				default:
					require.Equal(t, 1, info.Attempts, "neither a snooze nor a shutdown is an attempt")
				}
				require.Equal(t, codeq.Done, info.State)
				require.Equal(t, "charged", string(info.Result))
			}
			stats, err := q.Stats(t.Context())
			require.NoError(t, err)
			orders, mails := stats[orderQueue], stats[mailQueue]
			require.Equal(t, orders.Total(), orders.Done+orders.Dead)
			require.Equal(t, codeq.Counts{Done: orders.Done}, mails, "one mail for each order")
		})
		for _, text := range []string{
			"card refused", "the bank does not answer", "mail server is busy", "msg=tasks queue=order",
		} {
			require.Contains(t, logged.String(), text)
		}
	})
}

// The service shows its dashboard, and serves programs beside it, until it is stopped.
func TestDashboard(t *testing.T) {
	dir := t.TempDir()
	addr := fmt.Sprint("127.0.0.1:", testkit.FreePorts(t, rand.IntN, 1))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	log := slog.New(slog.DiscardHandler)
	go func() { ended <- serve(ctx, config{dir: dir, every: time.Millisecond, workers: 4, http: addr}, log) }()
	var live *http.Response
	require.Eventually(t, func() bool {
		var err error
		live, err = http.Get("http://" + addr + "/live?page=overview") //nolint:bodyclose // a stream, which the test reads
		if err != nil {
			return false
		}
		if live.StatusCode != http.StatusOK {
			_ = live.Body.Close()
			return false
		}
		return true
	}, 20*time.Second, 10*time.Millisecond)
	defer live.Body.Close()
	require.Eventually(t, func() bool {
		beside, err := codeq.OpenLocal(ctx, dir)
		if err != nil {
			return false
		}
		defer beside.Close()
		_, err = beside.Stats(ctx)
		return err == nil
	}, 20*time.Second, 10*time.Millisecond)
	cancel()
	require.NoError(t, <-ended, "a viewer does not delay it")
	_, err := io.Copy(io.Discard, live.Body)
	require.NoError(t, err)
}
