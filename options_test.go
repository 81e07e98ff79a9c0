package codeq_test

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/record"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// testLimits are small, so that tests reach them.
var testLimits = codeq.Limits{Payload: 100, Headers: 20, Name: 10, Batch: 4, BatchBytes: 250}

// limited is a queue with testLimits.
type limited struct {
	*codeq.Queue
	t *testing.T
}

func openLimited(t *testing.T) *limited {
	q, err := codeq.Open("q", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2, Limits: testLimits, Retention: time.Hour}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, q.Close()) })
	return &limited{q, t}
}

func (q *limited) stats() map[string]codeq.Counts {
	q.t.Helper()
	counts, err := q.Stats(context.Background())
	require.NoError(q.t, err)
	return counts
}

// refused requires that a verb returns an InvalidError and stores nothing.
func (q *limited) refused(field string, value any, limit string, verb func() error) {
	q.t.Helper()
	before := q.stats()
	err := verb()
	require.ErrorIs(q.t, err, codeq.ErrInvalid, "%s: %v", field, value)
	var invalid *codeq.InvalidError
	require.ErrorAs(q.t, err, &invalid)
	require.Equal(q.t, codeq.InvalidError{field, value, limit}, *invalid)
	for _, part := range []string{field, fmt.Sprint(value), limit} {
		require.ErrorContains(q.t, err, part)
	}
	require.Equal(q.t, before, q.stats(), "%s: %v", field, value)
}

// lease produces a task and claims it.
func (q *limited) lease() *codeq.Lease {
	q.t.Helper()
	id, err := q.Produce(context.Background(), codeq.Task{Queue: "leases"})
	require.NoError(q.t, err)
	l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"leases"}})
	require.NoError(q.t, err)
	require.Equal(q.t, id, l.ID)
	return l
}

func text(n int) string { return strings.Repeat("x", n) }

// taskLimits are the limits of every field of a task.
var taskLimits = []struct {
	field    string
	accepted []codeq.Task
	refused  []codeq.Task
	values   []any // of the InvalidErrors
	limit    string
}{
	{
		"Task.Queue", []codeq.Task{{Queue: text(1)}, {Queue: text(10)}},
		[]codeq.Task{{Queue: text(11)}}, []any{"11 bytes"}, "at most 10 bytes",
	},
	{"Task.Queue", nil, []codeq.Task{{}}, []any{`""`}, "a name"},
	{
		"Task.Tenant", []codeq.Task{{Queue: "a", Tenant: ""}, {Queue: "a", Tenant: text(10)}},
		[]codeq.Task{{Queue: "a", Tenant: text(11)}}, []any{"11 bytes"}, "at most 10 bytes",
	},
	{
		"Task.Payload", []codeq.Task{{Queue: "a", Payload: []byte{}}, {Queue: "a", Payload: make([]byte, 100)}},
		[]codeq.Task{{Queue: "a", Payload: make([]byte, 101)}}, []any{"101 bytes"}, "at most 100 bytes",
	},
	{
		"Task.Headers",
		[]codeq.Task{
			{Queue: "a", Headers: map[string]string{}},
			{Queue: "a", Headers: map[string]string{"": ""}},
			{Queue: "a", Headers: map[string]string{"1234": "567890", "12345": "67890"}},
			{Queue: "a", Headers: map[string]string{text(20): ""}},
			{Queue: "a", Headers: map[string]string{"": text(20)}},
		},
		[]codeq.Task{
			{Queue: "a", Headers: map[string]string{"1234": "567890", "12345": "678901"}},
			{Queue: "a", Headers: map[string]string{text(21): ""}},
			{Queue: "a", Headers: map[string]string{"": text(22)}},
		},
		[]any{"21 bytes", "21 bytes", "22 bytes"}, "at most 20 bytes",
	},
	{
		"Task.Priority", []codeq.Task{{Queue: "a", Priority: 0}, {Queue: "a", Priority: 9}},
		[]codeq.Task{{Queue: "a", Priority: -1}, {Queue: "a", Priority: 10}, {Queue: "a", Priority: 256}, {Queue: "a", Priority: math.MinInt}},
		[]any{-1, 10, 256, math.MinInt}, "0 to 9",
	},
	{
		"Task.MaxAttempts", []codeq.Task{{Queue: "a", MaxAttempts: 1}, {Queue: "a", MaxAttempts: math.MaxInt32}},
		[]codeq.Task{{Queue: "a", MaxAttempts: -1}, {Queue: "a", MaxAttempts: testkit.Beyond31Bits}},
		[]any{-1, testkit.Beyond31Bits}, "0 to 2^31-1",
	},
	{
		"Task.RunAt",
		[]codeq.Task{
			{Queue: "a", RunAt: time.Unix(0, 0)}, {Queue: "a", RunAt: time.Unix(-1, 0)},
			{Queue: "a", RunAt: firstMoment}, {Queue: "a", RunAt: lastMoment},
		},
		[]codeq.Task{{Queue: "a", RunAt: firstMoment.Add(-1)}, {Queue: "a", RunAt: lastMoment.Add(1)}, {Queue: "a", RunAt: lastWest.Add(1)}},
		[]any{firstMoment.Add(-1), lastMoment.Add(1), lastWest.Add(1)}, "the years 0 to 9999 in UTC",
	},
	{
		"Task.LeaseFor", []codeq.Task{{Queue: "a", LeaseFor: shortestLease}, {Queue: "a", LeaseFor: longestLease}},
		[]codeq.Task{{Queue: "a", LeaseFor: -1}, {Queue: "a", LeaseFor: shortestLease - 1}, {Queue: "a", LeaseFor: longestLease + 1}},
		[]any{time.Duration(-1), shortestLease - 1, longestLease + 1}, "0, or 10ms to 8760h0m0s",
	},
	{
		"Task.Timeout", []codeq.Task{{Queue: "a", Timeout: 1}, {Queue: "a", Timeout: math.MaxInt64}},
		[]codeq.Task{{Queue: "a", Timeout: -1}}, []any{time.Duration(-1)}, "0 or more",
	},
	{
		"Task.Retention", []codeq.Task{{Queue: "a", Retention: 1}, {Queue: "a", Retention: codeq.Forever}, {Queue: "a", Retention: math.MaxInt64}},
		[]codeq.Task{{Queue: "a", Retention: codeq.Forever - 1}, {Queue: "a", Retention: math.MinInt64}},
		[]any{codeq.Forever - 1, time.Duration(math.MinInt64)}, "0 or more, or Forever",
	},
}

// The bounds of a lease.
const (
	shortestLease = 10 * time.Millisecond
	longestLease  = 365 * 24 * time.Hour
)

var (
	firstMoment = time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC)
	lastMoment  = time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC)
	lastWest    = lastMoment.In(time.FixedZone("west", -12*3600))
)

// TestTaskLimits: a task at its limits is stored without a change. Every verb that takes tasks
// refuses one above its limits, and the others of the same batch.
func TestTaskLimits(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	parent := q.lease()
	for _, l := range taskLimits {
		for _, task := range l.accepted {
			id, err := q.Produce(ctx, task)
			require.NoError(t, err, l.field)
			info, err := q.Get(ctx, id)
			require.NoError(t, err)
			require.Equal(t, task.Queue, info.Queue)
			require.Equal(t, task.Tenant, info.Tenant)
			require.Equal(t, string(task.Payload), string(info.Payload))
			require.True(t, maps.Equal(task.Headers, info.Headers))
			require.Equal(t, task.Priority, info.Priority)
			require.Equal(t, task.MaxAttempts, info.MaxAttempts)
			for _, d := range [][2]time.Duration{
				{task.LeaseFor, info.LeaseFor}, {task.Timeout, info.Timeout}, {task.Retention, info.Retention},
			} {
				require.Equal(t, record.Millis(d[0]), record.Millis(d[1]), l.field)
			}
			if task.RunAt.After(time.Now()) {
				require.Equal(t, task.RunAt.UnixMilli(), info.RunAt.UnixMilli())
				require.Equal(t, codeq.Scheduled, info.State)
			} else {
				require.Equal(t, codeq.Ready, info.State)
			}
			ids, err := q.ProduceBatch(ctx, []codeq.Task{task, task})
			require.NoError(t, err, l.field)
			require.Len(t, ids, 2)
			require.NoError(t, q.Complete(ctx, q.lease().Receipt, nil, task), l.field)
		}
		for i, task := range l.refused {
			q.refused(l.field, l.values[i], l.limit, func() error {
				_, err := q.Produce(ctx, task)
				return err
			})
			q.refused(l.field, l.values[i], l.limit, func() error {
				_, err := q.ProduceBatch(ctx, []codeq.Task{{Queue: "fine"}, {Queue: "fine"}, task})
				require.ErrorContains(t, err, "task 2")
				return err
			})
			q.refused(l.field, l.values[i], l.limit, func() error {
				err := q.Complete(ctx, parent.Receipt, nil, codeq.Task{Queue: "fine"}, task)
				require.ErrorContains(t, err, "task 1")
				return err
			})
		}
	}
	require.NotContains(t, q.stats(), "fine")
	require.NoError(t, q.Complete(ctx, parent.Receipt, nil), "the lease outlives refusals")
	require.NoError(t, queuetest.CheckAll(q.Queue))
}

// TestDefaultLimits: the limits that hold without Options, each once.
func TestDefaultLimits(t *testing.T) {
	q, err := codeq.Open("q", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 1}))
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	ctx := context.Background()
	_, err = q.Produce(ctx, codeq.Task{
		Queue: text(255), Tenant: text(255), Payload: make([]byte, 1<<20), Headers: map[string]string{"k": text(16<<10 - 1)},
	})
	require.NoError(t, err)
	for field, task := range map[string]codeq.Task{
		"Task.Queue":   {Queue: text(256)},
		"Task.Tenant":  {Queue: "a", Tenant: text(256)},
		"Task.Payload": {Queue: "a", Payload: make([]byte, 1<<20+1)},
		"Task.Headers": {Queue: "a", Headers: map[string]string{"k": text(16 << 10)}},
	} {
		_, err := q.Produce(ctx, task)
		var invalid *codeq.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, field, invalid.Field)
	}
	batch := make([]codeq.Task, 10_000)
	for i := range batch {
		batch[i].Queue = "batch"
	}
	_, err = q.ProduceBatch(ctx, batch)
	require.NoError(t, err)
	_, err = q.ProduceBatch(ctx, append(batch, batch[0]))
	require.ErrorIs(t, err, codeq.ErrInvalid)
	counts, err := q.Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, map[string]codeq.Counts{text(255): {Ready: 1}, "batch": {Ready: 10_000}}, counts)
}

// TestBatchLimits: the limits of ProduceBatch and of the follow-ups of Complete.
func TestBatchLimits(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	for _, v := range []struct {
		verb, queue string
		call        func(tasks []codeq.Task) error
	}{
		{"ProduceBatch", "produced", func(tasks []codeq.Task) error {
			_, err := q.ProduceBatch(ctx, tasks)
			return err
		}},
		{"Complete", "next", func(tasks []codeq.Task) error { return q.Complete(ctx, q.lease().Receipt, nil, tasks...) }},
	} {
		refusedCall := func(tasks []codeq.Task) func() error {
			if v.verb == "ProduceBatch" {
				return func() error { return v.call(tasks) }
			}
			receipt := q.lease().Receipt
			return func() error { return q.Complete(ctx, receipt, nil, tasks...) }
		}
		payload := func(n int) codeq.Task { return codeq.Task{Queue: v.queue, Payload: make([]byte, n)} }
		stored := uint64(0)
		accepted := func(tasks ...codeq.Task) {
			t.Helper()
			require.NoError(t, v.call(tasks))
			stored += uint64(len(tasks))
			require.Equal(t, stored, q.stats()[v.queue].Ready)
		}
		accepted()
		accepted(payload(0), payload(0), payload(0), payload(0))
		accepted(payload(100), payload(100), payload(50))
		accepted(payload(100), payload(0), payload(100), payload(50))
		q.refused(v.verb+" tasks", 5, "at most 4", refusedCall(make([]codeq.Task, 5)))
		q.refused(v.verb+" payloads", "251 bytes and more", "at most 250 bytes",
			refusedCall([]codeq.Task{payload(100), payload(100), payload(51)}))
		q.refused(v.verb+" payloads", "300 bytes and more", "at most 250 bytes",
			refusedCall([]codeq.Task{payload(100), payload(100), payload(100), payload(100)}))
	}
}

func TestResultLimit(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	l := q.lease()
	q.refused("Complete result", "101 bytes", "at most 100 bytes", func() error {
		return q.Complete(ctx, l.Receipt, make([]byte, 101), codeq.Task{Queue: "next"})
	})
	result := []byte(text(100))
	require.NoError(t, q.Complete(ctx, l.Receipt, result))
	info, err := q.Get(ctx, l.ID)
	require.NoError(t, err)
	require.Equal(t, result, info.Result)
}

// TestClaimLimits: a request that is accepted finds no task here.
func TestClaimLimits(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	one, two := []string{"a"}, []string{"a", "b"}
	many := slices.Repeat(two, dispatch.ShortList)
	for _, req := range []codeq.ClaimRequest{
		{Queues: one},
		{Queues: []string{text(10), text(10)}},
		{Queues: two, Weights: map[string]int{}},
		{Queues: two, Weights: map[string]int{"b": record.MaxWeight}},
		{Queues: []string{"a", "a"}, Weights: map[string]int{"a": 2}},
		{Queues: one, LeaseFor: shortestLease},
		{Queues: one, LeaseFor: longestLease},
		{Queues: one, Max: 4},
	} {
		req.NoWait = true
		_, err := q.Claim(ctx, req)
		require.ErrorIs(t, err, codeq.ErrEmpty)
		_, err = q.ClaimBatch(ctx, req)
		require.ErrorIs(t, err, codeq.ErrEmpty)
	}
	_, err := q.Produce(ctx, codeq.Task{Queue: "a"}) // a request that is refused does not take it
	require.NoError(t, err)
	for _, c := range []struct {
		req   codeq.ClaimRequest
		field string
		value any
		limit string
	}{
		{codeq.ClaimRequest{}, "Queues", "none", "at least one"},
		{codeq.ClaimRequest{Queues: []string{}}, "Queues", "none", "at least one"},
		{codeq.ClaimRequest{Queues: []string{"a", text(11)}}, "Queues", "11 bytes", "at most 10 bytes"},
		{codeq.ClaimRequest{Queues: two, Weights: map[string]int{"c": 1}}, "Weights", `"c"`, "one of Queues"},
		{codeq.ClaimRequest{Queues: many, Weights: map[string]int{"a": 1, "c": 1}}, "Weights", `"c"`, "one of Queues"},
		{codeq.ClaimRequest{Queues: two, Weights: map[string]int{"b": 0}}, "Weights of b", 0, "1 to 65536"},
		{codeq.ClaimRequest{Queues: two, Weights: map[string]int{"b": math.MaxInt}}, "Weights of b", math.MaxInt, "1 to 65536"},
		{codeq.ClaimRequest{Queues: []string{"a", ""}}, "Queues", `""`, "names"},
		{codeq.ClaimRequest{Queues: two, Weights: map[string]int{"a": -1, "b": 1}}, "Weights of a", -1, "1 to 65536"},
		{codeq.ClaimRequest{Queues: one, LeaseFor: shortestLease - 1}, "LeaseFor", shortestLease - 1, "10ms to 8760h0m0s"},
		{codeq.ClaimRequest{Queues: one, LeaseFor: longestLease + 1}, "LeaseFor", longestLease + 1, "10ms to 8760h0m0s"},
		{codeq.ClaimRequest{Queues: one, LeaseFor: -1}, "LeaseFor", time.Duration(-1), "10ms to 8760h0m0s"},
		{codeq.ClaimRequest{Queues: one, Max: 5}, "Max", 5, "at most 4"},
		{codeq.ClaimRequest{Queues: one, Max: -1}, "Max", -1, "at most 4"},
	} {
		q.refused("ClaimRequest."+c.field, c.value, c.limit, func() error {
			_, err := q.ClaimBatch(ctx, c.req)
			return err
		})
		if c.field != "Max" { // which Claim ignores
			q.refused("ClaimRequest."+c.field, c.value, c.limit, func() error {
				_, err := q.Claim(ctx, c.req)
				return err
			})
		}
	}
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: one, Max: -1})
	require.NoError(t, err)
	require.NoError(t, q.Complete(ctx, l.Receipt, nil))
}

// TestClaimBatchTakesAtMostMax: ClaimBatch returns at most Max tasks, and one for 0.
func TestClaimBatchTakesAtMostMax(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	for range 2 {
		_, err := queuetest.StartingAt(q.Queue, 0).ProduceBatch(ctx, []codeq.Task{{Queue: "a"}, {Queue: "a"}, {Queue: "a"}, {Queue: "a"}})
		require.NoError(t, err)
	}
	for given, want := range map[int]int{0: 1, 2: 2, 4: 4} {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: given})
		require.NoError(t, err)
		require.Len(t, leases, want)
	}
}

func TestExtendLimits(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	l := q.lease()
	for _, d := range []time.Duration{math.MinInt64, -1, 0, shortestLease - 1, longestLease + 1, math.MaxInt64} {
		q.refused("Extend duration", d, "10ms to 8760h0m0s", func() error { return q.Extend(ctx, l.Receipt, d) })
	}
	before := time.Now()
	require.NoError(t, q.Extend(ctx, l.Receipt, longestLease))
	info, err := q.Get(ctx, l.ID)
	require.NoError(t, err)
	require.WithinRange(t, info.At, before.Add(longestLease-time.Second), time.Now().Add(longestLease+time.Second))
	require.NoError(t, q.Extend(ctx, l.Receipt, shortestLease)) // after it the lease is soon over
}

func TestReleaseAndRetryLimits(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	l := q.lease()
	q.refused("Release after", time.Duration(-1), "0 or more", func() error { return q.Release(ctx, l.Receipt, -1) })
	require.NoError(t, q.Release(ctx, l.Receipt, math.MaxInt64))
	info, err := q.Get(ctx, l.ID)
	require.NoError(t, err)
	require.Equal(t, codeq.Scheduled, info.State)
	require.Greater(t, info.At.Year(), 2300)

	l = q.lease()
	require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: math.MaxInt64}))
	info, err = q.Get(ctx, l.ID)
	require.NoError(t, err)
	require.Equal(t, codeq.Scheduled, info.State)
	require.Greater(t, info.At.Year(), 2300)

	l = q.lease()
	require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: math.MinInt64}))
	info, err = q.Get(ctx, l.ID)
	require.NoError(t, err)
	require.Equal(t, codeq.Ready, info.State)
}

func TestListLimits(t *testing.T) {
	q := openLimited(t)
	for _, state := range []codeq.State{0, codeq.Canceled + 1, 255} {
		q.refused("ListOptions.State", state, "Ready, Scheduled, Blocked, Leased, Dead, Done or Canceled", func() error {
			for info, err := range q.List(context.Background(), codeq.ListOptions{State: state}) {
				require.Nil(t, info)
				return err
			}
			return nil
		})
	}
}

// TestLimitsOfCommit: lists, headers, names and keys count, and not only payloads. Every verb that
// takes a batch refuses one that is within all other limits but too large for one commit, and
// stores nothing of it.
func TestLimitsOfCommit(t *testing.T) {
	t.Parallel()
	parents := make([]codeq.ID, codeq.MaxParents)
	for i := range parents {
		parents[i] = codeq.ID{1, byte(i >> 8), byte(i)}
	}
	wide := make([]codeq.Task, 10_000) // of default size, 10 GiB of lists
	for i := range wide {
		wide[i] = codeq.Task{Queue: "a", After: parents}
	}
	headed := make([]codeq.Task, 3000)
	for i := range headed {
		headed[i] = codeq.Task{Queue: "a", Headers: map[string]string{"h": text(16<<10 - 1)}}
	}
	for _, shards := range []int{1, 3} {
		for name, c := range map[string]struct {
			limits codeq.Limits
			tasks  []codeq.Task
			limit  string
		}{
			"parents of each other": {codeq.Limits{}, wide, "at most 100000"},
			"bytes of parents":      {codeq.Limits{Parents: 1 << 20}, wide, "at most 33554432 bytes"},
			"headers":               {codeq.Limits{}, headed, "at most 33554432 bytes"},
			"one task":              {codeq.Limits{CommitBytes: 1000}, []codeq.Task{{Queue: "a", Payload: make([]byte, 800)}}, "at most 1000 bytes"},
			"one task's parents":    {codeq.Limits{Parents: 9999}, wide[:1], "at most 9999"},
		} {
			t.Run(fmt.Sprint(name, " ", shards), func(t *testing.T) {
				ctx := context.Background()
				q, err := codeq.Open("q", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: shards, Limits: c.limits}))
				require.NoError(t, err)
				defer func() { require.NoError(t, q.Close()) }()
				l := (&limited{q, t}).lease()
				before := (&limited{q, t}).stats()
				verbs := map[string]func() error{
					"ProduceBatch": func() error { _, err := q.ProduceBatch(ctx, c.tasks); return err },
					"Complete":     func() error { return q.Complete(ctx, l.Receipt, nil, c.tasks...) },
				}
				if len(c.tasks) == 1 {
					verbs["Produce"] = func() error { _, err := q.Produce(ctx, c.tasks[0]); return err }
				}
				for verb, call := range verbs {
					err := call()
					require.ErrorIs(t, err, codeq.ErrInvalid, verb)
					require.ErrorContains(t, err, c.limit, verb)
					require.Equal(t, before, (&limited{q, t}).stats(), verb)
				}
				require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			})
		}
	}
}

// TestClaimBatchBytes: a claim gets at least one task, and not more bytes than a batch may have,
// from one queue, several in order, drawn ones, and a long list. A task beyond these bytes gives
// its place in a limit back.
func TestClaimBatchBytes(t *testing.T) {
	long := []string{"a", "b"}
	for i := range 30 {
		long = append(long, fmt.Sprint("queue ", i))
	}
	for name, req := range map[string]codeq.ClaimRequest{
		"one":     {Queues: []string{"a"}},
		"strict":  {Queues: []string{"a", "b"}},
		"weights": {Queues: []string{"a", "b"}, Weights: map[string]int{"b": 2}},
		"long":    {Queues: long},
	} {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 1, Limits: codeq.Limits{Payload: 150, BatchBytes: 100}}, func(t *testing.T, q *codeq.Queue) {
				ctx := context.Background()
				queues := req.Queues[:min(2, len(req.Queues))]
				for _, queue := range queues {
					require.NoError(t, q.Configure(ctx, queue, func(s *codeq.Settings) { s.Concurrency = 12 / len(queues) }))
				}
				for range 12 / len(queues) {
					for _, queue := range queues {
						queuetest.Produce(t, q, codeq.Task{Queue: queue, Payload: make([]byte, 25)})
					}
				}
				req.Max, req.NoWait = 1000, true
				var held []*codeq.Lease
				for range 3 {
					leases, err := q.ClaimBatch(ctx, req)
					require.NoError(t, err)
					require.Len(t, leases, 4)
					held = append(held, leases...)
				}
				_, err := q.ClaimBatch(ctx, req)
				require.ErrorIs(t, err, codeq.ErrEmpty)
				for _, l := range held {
					require.NoError(t, q.Complete(ctx, l.Receipt, nil))
				}
				for range 3 {
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: make([]byte, 150)})
				}
				for range 3 {
					leases, err := q.ClaimBatch(ctx, req)
					require.NoError(t, err)
					require.Len(t, leases, 1)
				}
			})
		})
	}
}
