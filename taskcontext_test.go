package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestTraceOfFollowUps: a follow-up without a trace context of its own carries
// that of its task, and none of the other headers.
func TestTraceOfFollowUps(t *testing.T) {
	parent := map[string]string{"traceparent": "p", "tracestate": "s", "other": "o"}
	for name, tc := range map[string]struct{ task, followUp, want map[string]string }{
		"both":             {parent, nil, map[string]string{"traceparent": "p", "tracestate": "s"}},
		"beside its own":   {parent, map[string]string{"x": "y"}, map[string]string{"x": "y", "traceparent": "p", "tracestate": "s"}},
		"no state":         {map[string]string{"traceparent": "p"}, nil, map[string]string{"traceparent": "p"}},
		"state alone":      {map[string]string{"tracestate": "s"}, nil, nil},
		"none":             {map[string]string{"other": "o"}, map[string]string{"x": "y"}, map[string]string{"x": "y"}},
		"its own parent":   {parent, map[string]string{"traceparent": "q"}, map[string]string{"traceparent": "q"}},
		"its own, empty":   {parent, map[string]string{"traceparent": ""}, map[string]string{"traceparent": ""}},
		"its own state":    {parent, map[string]string{"tracestate": "q"}, map[string]string{"tracestate": "q"}},
		"no room for it":   {parent, map[string]string{"x": string(make([]byte, 40-23))}, map[string]string{"x": string(make([]byte, 40-23))}},
		"just room for it": {parent, map[string]string{"x": string(make([]byte, 40-24))}, map[string]string{"x": string(make([]byte, 40-24)), "traceparent": "p", "tracestate": "s"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Limits: codeq.Limits{Headers: 40}})
				given := maps.Clone(tc.followUp)
				tasks := []codeq.Task{{Queue: "b", Headers: given}, {Queue: "b", Headers: given}}
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					j.FollowUp(tasks[0])
					j.FollowUp(tasks[1:]...)
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{})
				queuetest.Produce(t, q, codeq.Task{Queue: "a", Headers: tc.task})
				synctest.Wait()
				require.Empty(t, run.Reported())
				leases, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"b"}, Max: 3, NoWait: true})
				require.NoError(t, err)
				require.Len(t, leases, 2)
				for _, l := range leases {
					require.Equal(t, tc.want, l.Headers)
				}
				require.Equal(t, tc.followUp, given, "the handler's map is its own")
				require.Equal(t, codeq.Task{Queue: "b", Headers: given}, tasks[1])
			})
		})
	}
}

// TestLogsOfTask: what the handlers of a task have logged is kept with it, bounded, over its
// attempts, with its progress and metadata, and shown at once by Get. Nothing is kept by default.
func TestLogsOfTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := newRecorder()
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Retention: time.Hour, Logger: slog.New(rec)})
		more := make(chan int)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			log := codeq.LoggerFrom(ctx).With("x", 1)
			for n := range more {
				switch n {
				case 0:
					return codeq.RetryAfter(0, errors.New("boom"))
				case 1:
					return nil
				case 2:
					require.NoError(t, codeq.ReportProgress(ctx, 1, 2, "half"))
					require.NoError(t, codeq.SetMetadata(ctx, "k", "v"))
				case 3:
					log.Debug("too low")
				default:
					log.Info("line", "n", n)
				}
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{KeepLogs: slog.LevelInfo, Concurrency: 1})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		logs := func() (texts []string) {
			for _, l := range queuetest.InfoOf(t, q, id).Logs {
				require.Equal(t, slog.LevelInfo, l.Level)
				require.WithinDuration(t, time.Now(), l.At, time.Hour)
				texts = append(texts, fmt.Sprint(l.Attempt, " ", l.Text))
			}
			return texts
		}
		say := func(all ...int) {
			for _, n := range all {
				more <- n
			}
			synctest.Wait()
		}
		say(10)
		require.Equal(t, []string{"1 line x=1 n=10"}, logs(), "at once")
		say(3, 11)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, logs(), 2)
		page, err := q.ListPage(t.Context(), codeq.PageOptions{})
		require.NoError(t, err)
		require.Nil(t, page.Tasks[0].Logs, "in lists")
		say(2, 0, 12)
		require.Equal(t, []string{"1 line x=1 n=10", "1 line x=1 n=11", "2 line x=1 n=12"}, logs())
		for n := range 100 {
			more <- 100 + n
		}
		say(1)
		require.NoError(t, run.End(nil))
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State)
		require.Len(t, got.Logs, 64)
		require.Equal(t, "2 line x=1 n=136", logs()[0])
		require.Equal(t, "2 line x=1 n=199", logs()[63])
		require.Equal(t, "half", got.Progress.Note)
		require.Equal(t, map[string]string{"k": "v"}, got.Metadata)
		require.Equal(t, 103, strings.Count(rec.text.String(), "msg=line"), "they go to the logger as well")

		run = startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		id = queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		say(10, 1)
		require.NoError(t, run.End(nil))
		require.Empty(t, logs())
	})
}
