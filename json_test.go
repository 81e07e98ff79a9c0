package codeq_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// testJSON: v becomes the JSON and is read back. The zero T has no fields.
func testJSON[T any](t *testing.T, v T, want string) {
	t.Helper()
	var compact bytes.Buffer
	require.NoError(t, json.Compact(&compact, []byte(want)))
	b, err := json.Marshal(v)
	require.NoError(t, err)
	require.Equal(t, compact.String(), string(b))
	var back T
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, v, back)

	var zero T
	b, err = json.Marshal(zero)
	require.NoError(t, err)
	require.Equal(t, "{}", string(b))
}

func TestJSON(t *testing.T) {
	at := time.Date(2030, 1, 2, 3, 4, 5, 6_000_000, time.UTC)
	id, err := codeq.ParseID("0193b3c0-0000-7000-8000-000000000001")
	require.NoError(t, err)
	task := codeq.Task{
		Queue: "mail", Payload: []byte(`{"to":"ann"}`), Headers: map[string]string{"trace": "1"},
		Priority: 5, Tenant: "t", MaxAttempts: 3, RunAt: at, LeaseFor: time.Minute, Timeout: time.Second,
		Retention: codeq.Forever, Unique: codeq.Unique{Key: "k", For: time.Hour, Replace: true, ReleaseOnDead: true},
		Group: "g", LimitKey: "l", After: []codeq.ID{codeq.Nth(0)}, OnDead: codeq.RunOnDead, OnMissing: codeq.RefuseOnMissing,
	}
	const taskText = `"Queue": "mail", "Payload": "eyJ0byI6ImFubiJ9", "Headers": {"trace": "1"},
		"Priority": 5, "Tenant": "t", "MaxAttempts": 3, "RunAt": "2030-01-02T03:04:05.006Z",
		"LeaseFor": 60000000000, "Timeout": 1000000000, "Retention": -1,
		"Unique": {"Key": "k", "For": 3600000000000, "Replace": true, "ReleaseOnDead": true},
		"Group": "g", "LimitKey": "l", "After": ["00000000-0000-0000-0000-000000000001"], "OnDead": "run", "OnMissing": "refuse"`
	const idText = `"ID": "0193b3c0-0000-7000-8000-000000000001"`

	testJSON(t, task, `{`+taskText+`}`)
	testJSON(t, codeq.Task{Queue: "mail"}, `{"Queue": "mail"}`)

	testJSON(t, codeq.Lease{
		ID: id, Receipt: codeq.Receipt{id, 17}, Task: task, Attempt: 2, Deadline: at, LastError: "no route",
	}, `{`+idText+`, "Receipt": "0193b3c0-0000-7000-8000-000000000001.0000000000000011", `+taskText+`,
		"Attempt": 2, "Deadline": "2030-01-02T03:04:05.006Z", "LastError": "no route"}`)

	testJSON(t, codeq.TaskInfo{
		ID: id, Task: task, State: codeq.Done, Attempts: 2, LastError: "no route", At: at, Result: []byte("sent"),
	}, `{`+idText+`, `+taskText+`, "State": "done", "Attempts": 2, "LastError": "no route",
		"At": "2030-01-02T03:04:05.006Z", "Result": "c2VudA=="}`)
	testJSON(t, codeq.TaskInfo{ID: id, Task: codeq.Task{Queue: "mail"}, State: codeq.Ready, At: at},
		`{`+idText+`, "Queue": "mail", "State": "ready", "At": "2030-01-02T03:04:05.006Z"}`)

	testJSON(t, codeq.Outcome{State: codeq.Dead, LastError: "no route", Attempts: 25},
		`{"State": "dead", "LastError": "no route", "Attempts": 25}`)
	testJSON(t, codeq.Outcome{State: codeq.Done, Result: []byte("sent"), Attempts: 1},
		`{"State": "done", "Result": "c2VudA==", "Attempts": 1}`)

	testJSON(t, codeq.Event{Kind: codeq.EventRetried, ID: id, Queue: "mail", Tenant: "t", Attempt: 1, Time: at, LastError: "no route"},
		`{"Kind": "retried", `+idText+`, "Queue": "mail", "Tenant": "t", "Attempt": 1,
		"Time": "2030-01-02T03:04:05.006Z", "LastError": "no route"}`)
	testJSON(t, codeq.Event{Kind: codeq.EventProduced, ID: id, Queue: "mail", Time: at},
		`{"Kind": "produced", `+idText+`, "Queue": "mail", "Time": "2030-01-02T03:04:05.006Z"}`)

	cron := codeq.Schedule{
		Name: "report", Cron: "30 6 * * *", TimeZone: "Asia/Kolkata", Task: codeq.Task{Queue: "mail"}, Missed: codeq.MissedAll,
	}
	const cronText = `"Name": "report", "Cron": "30 6 * * *", "TimeZone": "Asia/Kolkata",
		"Task": {"Queue": "mail"}, "Missed": "all"`
	testJSON(t, cron, `{`+cronText+`}`)
	testJSON(t, codeq.ScheduleInfo{Schedule: cron, Next: at, Last: at.Add(-24 * time.Hour)},
		`{`+cronText+`, "Next": "2030-01-02T03:04:05.006Z", "Last": "2030-01-01T03:04:05.006Z"}`)
	testJSON(t, codeq.ScheduleInfo{Schedule: codeq.Schedule{Name: "odd", Every: time.Second}, LastError: "unknown time zone"},
		`{"Name": "odd", "Every": 1000000000, "LastError": "unknown time zone"}`)
}

// TestJSONOfTheQueue: the JSON of what the queue returns has neither nulls nor zero times.
func TestJSONOfTheQueue(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		id := produce(t, q, codeq.Task{Queue: "a", Payload: []byte("p")})[0]
		require.NoError(t, q.SetSchedule(t.Context(), codeq.Schedule{Name: "s", Every: time.Hour, Task: codeq.Task{Queue: "b"}}))

		var infos []any
		look := func() {
			info, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			infos = append(infos, info)
		}
		look()
		l := claimNow(t, q, "a")
		look()
		complete(t, q, l)
		look()
		outcome, err := q.Await(t.Context(), id)
		require.NoError(t, err)
		schedules, err := q.Schedules(t.Context())
		require.NoError(t, err)
		infos = append(infos, l, outcome, &schedules[0])
		for _, e := range buffered(sub) {
			infos = append(infos, &e)
		}
		require.Len(t, infos, 9)
		for _, v := range infos {
			b, err := json.Marshal(v)
			require.NoError(t, err)
			require.NotContains(t, string(b), "null")
			require.NotContains(t, string(b), "0001-01-01")
		}
	})
}

// timesOf visits the times within v that are set.
func timesOf(v reflect.Value, visit func(time.Time)) {
	if at, ok := reflect.TypeAssert[time.Time](v); ok {
		if !at.IsZero() {
			visit(at)
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			timesOf(v.Elem(), visit)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				timesOf(v.Field(i), visit)
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			timesOf(v.Index(i), visit)
		}
	}
}

// TestTimesAreInUTC: every time that the queue returns is in UTC, and JSON can write it, up to the
// last moment that RunAt may be; whatever the zone of the machine is.
func TestTimesAreInUTC(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		var got []any
		add := func(v any, err error) {
			require.NoError(t, err)
			got = append(got, v)
		}
		for _, at := range []time.Time{lastMoment, lastMoment.In(time.FixedZone("east", 14*3600))} {
			ids := produce(t, q, codeq.Task{Queue: "late", RunAt: at}, codeq.Task{Queue: "waits", Group: "g"}, codeq.Task{Queue: "waits", Group: "g"})
			for _, id := range ids {
				add(q.Get(ctx, id))
				add(id.Time(), nil)
			}
		}
		for _, s := range []codeq.Schedule{{Name: "cron", Cron: "@yearly", TimeZone: "Pacific/Kiritimati"}, {Name: "every", Every: 290 * 365 * 24 * time.Hour}} {
			s.Task.Queue = "ticks"
			require.NoError(t, q.SetSchedule(ctx, s))
		}
		schedules, err := q.Schedules(ctx)
		add(schedules, err)
		for i := range schedules {
			add(schedules[i].Upcoming(9000), nil)
		}
		produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		l := claimNow(t, q, "a")
		add(l, nil)
		add(q.Get(ctx, l.ID))
		complete(t, q, l)
		l = claimNow(t, q, "a")
		require.NoError(t, q.DeadLetter(ctx, l.Receipt, errors.New("no")))
		add(q.Get(ctx, l.ID))
		for state := codeq.Ready; state <= codeq.Canceled; state++ {
			for info, err := range q.List(ctx, codeq.ListOptions{State: state}) {
				add(info, err)
			}
		}
		for cursor, pages := "", 0; pages == 0 || cursor != ""; pages++ {
			p, err := q.ListPage(ctx, codeq.PageOptions{TaskFilter: codeq.TaskFilter{From: firstMoment, To: lastWest}, Cursor: cursor, Limit: 1})
			add(p, err)
			cursor = p.Next
		}
		add(q.Info(ctx))
		add(q.TotalsByDay(ctx, "a"))
		add(q.ProcessInfo(ctx))
		for _, e := range buffered(sub) {
			add(e, nil)
		}
		last := 0
		for _, v := range got {
			_, err := json.Marshal(v)
			require.NoError(t, err, "%+v", v)
			timesOf(reflect.ValueOf(v), func(at time.Time) {
				require.Equal(t, time.UTC, at.Location(), "%+v", v)
				if at.UnixMilli() == lastMoment.UnixMilli() {
					last++
				}
			})
		}
		require.GreaterOrEqual(t, last, 3*2*2, "by Get, List and ListPage: At and RunAt")
	})
}
