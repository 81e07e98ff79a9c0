package codeq_test

import (
	"context"
	"maps"
	"testing"
	"testing/synctest"

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
