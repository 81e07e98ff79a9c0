package codeq_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"iter"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// testJSON requires that v becomes this JSON and is read back from it. The zero T has no fields.
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

// TestJSONOfTheQueue: the JSON of the queue's results has neither nulls nor zero times.
func TestJSONOfTheQueue(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("p")})[0]
		require.NoError(t, q.SetSchedule(t.Context(), codeq.Schedule{Name: "s", Every: time.Hour, Task: codeq.Task{Queue: "b"}}))

		var infos []any
		look := func() {
			info, err := q.Get(t.Context(), id)
			require.NoError(t, err)
			infos = append(infos, info)
		}
		look()
		l := queuetest.ClaimNow(t, q, "a")
		look()
		queuetest.Complete(t, q, l)
		look()
		outcome, err := q.Await(t.Context(), id)
		require.NoError(t, err)
		schedules, err := q.Schedules(t.Context())
		require.NoError(t, err)
		infos = append(infos, l, outcome, &schedules[0])
		for _, e := range queuetest.Buffered(sub) {
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

// TestTimesAreInUTC: every time that the queue returns is in UTC, for any zone of the machine. JSON
// can write it, up to the last moment of RunAt.
func TestTimesAreInUTC(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
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
			ids := queuetest.Produce(t, q, codeq.Task{Queue: "late", RunAt: at}, codeq.Task{Queue: "waits", Group: "g"}, codeq.Task{Queue: "waits", Group: "g"})
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
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		l := queuetest.ClaimNow(t, q, "a")
		add(l, nil)
		add(q.Get(ctx, l.ID))
		queuetest.Complete(t, q, l)
		l = queuetest.ClaimNow(t, q, "a")
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
		for _, e := range queuetest.Buffered(sub) {
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

const (
	sampleIDText      = "0193b3c0-1234-7abc-8500-0102deadbeef"
	sampleReceiptText = sampleIDText + ".fedcba9876543210"
)

// anyReceipts yields some receipts.
func anyReceipts(t *testing.T) iter.Seq[codeq.Receipt] {
	chance := testkit.Seeded(t)
	return func(yield func(codeq.Receipt) bool) {
		for range 200 {
			r := codeq.Receipt{Token: chance.Uint64() >> chance.IntN(64)}
			for i := range r.ID {
				r.ID[i] = byte(chance.Uint32())
			}
			if !yield(r) {
				return
			}
		}
	}
}

var (
	sampleID      = codeq.ID{0x01, 0x93, 0xb3, 0xc0, 0x12, 0x34, 0x7a, 0xbc, 0x85, 0, 1, 2, 0xde, 0xad, 0xbe, 0xef}
	sampleReceipt = codeq.Receipt{ID: sampleID, Token: 0xfedcba9876543210}
)

func TestIDText(t *testing.T) {
	require.Equal(t, sampleIDText, sampleID.String())
	id, err := codeq.ParseID(sampleIDText)
	require.NoError(t, err)
	require.Equal(t, sampleID, id)
	id, err = codeq.ParseID(strings.ToUpper(sampleIDText))
	require.NoError(t, err, "RFC 9562: either case is read")
	require.Equal(t, sampleID, id)

	for r := range anyReceipts(t) {
		id := r.ID
		got, err := codeq.ParseID(id.String())
		require.NoError(t, err)
		require.Equal(t, id, got)
		b, err := json.Marshal(map[codeq.ID]codeq.ID{id: id})
		require.NoError(t, err)
		var m map[codeq.ID]codeq.ID
		require.NoError(t, json.Unmarshal(b, &m))
		require.Equal(t, map[codeq.ID]codeq.ID{id: id}, m)
	}
}

// withByte returns s with another byte at i.
func withByte(s string, i int, c byte) string { return s[:i] + string(c) + s[i+1:] }

func TestIDTextRefused(t *testing.T) {
	refused := []string{
		"", "-", strings.Repeat("0", 32), strings.Repeat("0", 36), strings.Repeat("-", 36),
		"{" + sampleIDText + "}", "urn:uuid:" + sampleIDText, " " + sampleIDText, sampleIDText + "\n",
	}
	for i := range sampleIDText {
		refused = append(refused, sampleIDText[:i], withByte(sampleIDText, i, 'g'), withByte(sampleIDText, i, ' '))
		if sampleIDText[i] == '-' {
			refused = append(refused, withByte(sampleIDText, i, '0'))
		} else {
			refused = append(refused, withByte(sampleIDText, i, '-'))
		}
	}
	for _, s := range refused {
		id, err := codeq.ParseID(s)
		require.ErrorIs(t, err, codeq.ErrInvalid, "%q", s)
		require.Zero(t, id, "%q", s)
		id = sampleID
		require.Error(t, id.UnmarshalText([]byte(s)))
		require.Equal(t, sampleID, id, "a refused text changes nothing: %q", s)
		var invalid *codeq.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "ID", invalid.Field)
		require.Equal(t, s, invalid.Value)
	}
}

func TestReceiptText(t *testing.T) {
	require.Equal(t, sampleReceiptText, sampleReceipt.String())
	for r := range anyReceipts(t) {
		b, err := r.MarshalText()
		require.NoError(t, err)
		require.Equal(t, r.String(), string(b))
		got := sampleReceipt
		require.NoError(t, got.UnmarshalText(b))
		require.Equal(t, r, got)
		b, err = json.Marshal(r)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, &got))
		require.Equal(t, r, got)
	}
}

func TestReceiptTextRefused(t *testing.T) {
	refused := []string{"", ".", sampleIDText, sampleIDText + ".1", sampleReceiptText + "0", strings.Repeat("0", len(sampleReceiptText))}
	for i := range sampleReceiptText {
		refused = append(refused, sampleReceiptText[:i], withByte(sampleReceiptText, i, 'x'))
	}
	for _, s := range refused {
		for _, before := range []codeq.Receipt{{}, {ID: codeq.ID{1}, Token: 1}} {
			r := before
			require.ErrorIs(t, r.UnmarshalText([]byte(s)), codeq.ErrInvalid, "%q", s)
			require.Equal(t, before, r, "a refused text changes nothing: %q", s)
		}
	}
}

func TestIDTime(t *testing.T) {
	require.Equal(t, time.UnixMilli(0x0193b3c01234).UTC(), sampleID.Time())
}

// FuzzText: the text form of an ID and of a Receipt is either refused or unique, except for the
// case of its digits.
func FuzzText(f *testing.F) {
	f.Add(codeq.Receipt{ID: sampleID, Token: 1<<63 + 5}.String())
	f.Add(sampleID.String())
	f.Add(codeq.ID{}.String())
	f.Fuzz(func(t *testing.T, text string) {
		var invalid *codeq.InvalidError
		if id, err := codeq.ParseID(text); err == nil {
			require.Equal(t, string(bytes.ToLower([]byte(text))), id.String())
		} else {
			require.ErrorAs(t, err, &invalid)
			require.Zero(t, id)
		}
		var r codeq.Receipt
		if err := r.UnmarshalText([]byte(text)); err == nil {
			require.Equal(t, string(bytes.ToLower([]byte(text))), r.String())
		} else {
			require.ErrorAs(t, err, &invalid)
			require.Zero(t, r)
		}
	})
}

// TestNotUTF8: names, keys and headers that are not UTF-8 are refused, and nothing is stored. Verbs
// that read or end tasks accept any names. The text of an error gets U+FFFD.
func TestNotUTF8(t *testing.T) {
	t.Parallel()
	q := queuetest.OpenForRun(t, codeq.Options{})
	ctx := t.Context()
	const odd = "a\xff"
	for field, task := range map[string]codeq.Task{
		"Task.Queue":      {Queue: odd},
		"Task.Kind":       {Queue: "a", Kind: odd},
		"Task.Tenant":     {Queue: "a", Tenant: odd},
		"Task.Group":      {Queue: "a", Group: odd},
		"Task.LimitKey":   {Queue: "a", LimitKey: odd},
		"Task.Unique.Key": {Queue: "a", Unique: codeq.Unique{Key: odd}},
		"Task.Headers":    {Queue: "a", Headers: map[string]string{"k": odd}},
	} {
		_, err := q.Produce(ctx, task)
		require.ErrorContains(t, err, field)
		require.ErrorContains(t, err, "UTF-8")
		require.ErrorIs(t, err, codeq.ErrInvalid)
		require.ErrorIs(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Hour, Task: task}), codeq.ErrInvalid)
	}
	_, err := q.Produce(ctx, codeq.Task{Queue: "a", Headers: map[string]string{odd: "v"}})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	require.ErrorIs(t, q.SetSchedule(ctx, codeq.Schedule{Name: odd, Every: time.Hour, Task: codeq.Task{Queue: "a"}}), codeq.ErrInvalid)
	require.ErrorIs(t, q.Configure(ctx, odd, func(*codeq.Settings) {}), codeq.ErrInvalid)
	require.ErrorIs(t, q.Pause(ctx, odd), codeq.ErrInvalid)
	require.ErrorIs(t, q.Run(ctx, new(codeq.Mux), &codeq.RunOptions{Name: odd}), codeq.ErrInvalid)
	_, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Worker: odd, NoWait: true})
	require.ErrorIs(t, err, codeq.ErrInvalid)

	_, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{odd}, NoWait: true})
	require.ErrorIs(t, err, codeq.ErrEmpty)
	_, err = q.FindByKey(ctx, codeq.UniqueKey{Queue: odd, Key: odd})
	require.ErrorIs(t, err, codeq.ErrNotFound)
	_, err = q.ListPage(ctx, codeq.PageOptions{TaskFilter: codeq.TaskFilter{Queue: odd}})
	require.NoError(t, err)
	require.NoError(t, q.DeleteQueue(ctx, odd))

	id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
	require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, errors.New(odd)))
	require.Equal(t, "a\ufffd", queuetest.InfoOf(t, q, id).LastError)
}

// TestEachFieldIsStored: each field of a task is stored, also without the other fields.
func TestEachFieldIsStored(t *testing.T) {
	t.Parallel()
	q := queuetest.OpenForRun(t, codeq.Options{})
	parent := queuetest.Produce(t, q, codeq.Task{Queue: "parent"})[0]
	values := codeq.Task{
		Queue: "a", Kind: "k", Payload: []byte("p"), Headers: map[string]string{"k": "v"}, Priority: 3, Tenant: "t", MaxAttempts: 2,
		RunAt: time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond), LeaseFor: time.Minute, Timeout: time.Second,
		Retention: time.Hour, Unique: codeq.Unique{Key: "k", For: time.Hour}, Group: "g", LimitKey: "l",
		After: []codeq.ID{parent}, OnDead: codeq.RunOnDead, OnMissing: codeq.CancelOnMissing,
	}
	for i := range reflect.TypeFor[codeq.Task]().NumField() {
		field := reflect.TypeFor[codeq.Task]().Field(i).Name
		want := reflect.ValueOf(values).Field(i)
		require.False(t, want.IsZero(), "%s has no value here", field)
		task := codeq.Task{Queue: "a"}
		if field == "OnDead" || field == "OnMissing" { // have no meaning without a parent
			task.After = values.After
		}
		reflect.ValueOf(&task).Elem().Field(i).Set(want)
		got := queuetest.InfoOf(t, q, queuetest.Produce(t, q, task)[0]).Task
		require.Equal(t, want.Interface(), reflect.ValueOf(got).Field(i).Interface(), field)
	}
}

// TestVerifyNamesNotUTF8: Verify names tasks with headers that are not UTF-8. Such headers are no
// damage.
func TestVerifyNamesNotUTF8(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: 1}))
	require.NoError(t, err)
	id := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})[0]
	require.NoError(t, q.Close())
	simtest.AlterStore(t, disk, func(db *pebble.DB) {
		key, value := queuetest.First(t, db, keys.Task, nil)
		rec, err := record.Decode(value)
		require.NoError(t, err)
		rec.Headers = map[string]string{"k": "\xff"}
		require.NoError(t, db.Set(key, rec.Encode(), nil))
	})
	r := queuetest.VerifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)
	require.Equal(t, []codeq.ID{id}, r.Shards[0].NotUTF8)
}

// TestDelayHasDefaults: the fields that are zero have their defaults.
func TestDelayHasDefaults(t *testing.T) {
	require.Equal(t, 4*time.Second, codeq.Backoff{}.Delay(3, 0.5))
	require.Equal(t, 30*time.Millisecond, codeq.Backoff{Base: 10 * time.Millisecond, Step: 10 * time.Millisecond}.Delay(3, 0.5))
	require.Equal(t, time.Hour, codeq.Backoff{}.Delay(1000, 0.5))
	require.Equal(t, 800*time.Millisecond, codeq.Backoff{}.Delay(1, 0))
}
