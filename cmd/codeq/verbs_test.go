package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// fillMixed fills a queue with tasks in all states but Leased.
func fillMixed(t *testing.T) func(context.Context, *codeq.Queue) {
	return func(ctx context.Context, q *codeq.Queue) {
		for i := range 3 {
			kill(t, q, mail(i), "no such mailbox 17")
		}
		kill(t, q, codeq.Task{Queue: hostile, Tenant: hostile, Payload: []byte(hostileBytes), Headers: map[string]string{hostile: hostile}}, hostile)
		produce(t, q, codeq.Task{Queue: "done"})
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"done"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, l.Receipt, []byte("result")))
		for i := range 4 {
			produce(t, q, mail(i))
		}
		produce(t, q, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour), Unique: codeq.Unique{Key: "k"}, Priority: 3})
		require.NoError(t, q.Configure(ctx, "mail", func(s *codeq.Settings) { s.Concurrency = 5; s.Retention = time.Hour }))
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "daily", Cron: "@daily", Task: codeq.Task{Queue: "report"}}))
		settle()
	}
}

func counts(t *testing.T, at []string, queue string) codeq.Counts {
	t.Helper()
	r := decoded[infoResult](t, with(at, "info")...)
	for _, q := range r.Queues {
		if q.Queue == queue {
			return q.Counts
		}
	}
	return codeq.Counts{}
}

func TestInfo(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		require.Equal(t, codeq.Counts{Ready: 4, Dead: 3}, counts(t, at, "mail"))
		require.Contains(t, ok(t, with(at, "info")...), "later")
		r := decoded[infoResult](t, with(at, "info", "-storage", "mail")...)
		require.Len(t, r.Queues, 1)
		require.Equal(t, 5, r.Queues[0].Settings.Concurrency)
		require.Len(t, r.Storage.Shards, 2)
		require.NotEmpty(t, r.Days)
		text := ok(t, with(at, "info", "-storage", "mail")...)
		require.Regexp(t, `concurrency +5`, text)
		require.Contains(t, text, "READ AMP")
		require.Positive(t, r.Storage.FreeBytes)
		require.Regexp(t, `NO TASKS BELOW\n *[0-9.]+ .?i?B +(-|[0-9.]+ .?i?B)\n`, text)
		require.Equal(t, exitNotFound, call(t, with(at, "info", "nobody")...).code)
	})
}

func TestList(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		p := decoded[pageResult](t, with(at, "ls", "-state", "dead", "-queue", "mail")...)
		require.Len(t, p.Tasks, 3)
		require.Empty(t, p.Tasks[0].Payload)
		require.Empty(t, p.Next)

		p = decoded[pageResult](t, with(at, "ls", "-limit", "2", "-payload", "-state", "ready")...)
		require.Len(t, p.Tasks, 2)
		rest := decoded[pageResult](t, with(at, "ls", "-limit", "2", "-payload", "-state", "ready", "-cursor", p.Next)...)
		var payloads []string
		for _, task := range append(p.Tasks, rest.Tasks...) {
			payloads = append(payloads, string(task.Payload))
		}
		require.ElementsMatch(t, []string{"to 0", "to 1", "to 2", "to 3"}, payloads)

		out := ok(t, with(at, "-json", "ls", "-limit", "3", "-pages")...)
		n := 0
		for line := range strings.Lines(out) {
			require.NoError(t, json.Unmarshal([]byte(line), &p))
			n += len(p.Tasks)
		}
		require.Equal(t, 10, n, out)
		require.Len(t, decoded[pageResult](t, with(at, "ls", "-error", "no such mailbox #")...).Tasks, 3)
		require.Empty(t, decoded[pageResult](t, with(at, "ls", "-state", "dead", "-to", "1h")...).Tasks)
		require.Len(t, decoded[pageResult](t, with(at, "ls", "-state", "dead", "-from", "1h", "-tenant", "")...).Tasks, 3)

		text := ok(t, with(at, "ls", "-payload")...)
		require.Contains(t, text, `\x1b[2J`)
		require.Contains(t, text, `\u202e`)
		require.Contains(t, call(t, with(at, "ls", "-queue", "nobody")...).err, "No task")
		require.Equal(t, exitUsage, call(t, with(at, "ls", "-cursor", "forged")...).code)
	})
}

func TestGet(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		task := decoded[codeq.TaskInfo](t, with(at, "get", "-queue", "later", "-key", "k")...)
		require.Equal(t, codeq.Scheduled, task.State)
		require.Regexp(t, `priority +3`, ok(t, with(at, "get", task.ID.String())...))
		list := decoded[pageResult](t, with(at, "ls", "-state", "dead")...).Tasks
		for _, dead := range list {
			if dead.Queue == "mail" {
				require.Contains(t, ok(t, with(at, "get", "-raw", dead.ID.String())...), "to ")
				continue
			}
			text := ok(t, with(at, "get", dead.ID.String())...)
			require.Contains(t, text, `header \x1b[2J`)
			require.Contains(t, text, `\x07`)
			require.Equal(t, hostileBytes, call(t, with(at, "get", "-raw", dead.ID.String())...).out, "as it is, to a file")
		}
		require.Equal(t, exitNotFound, call(t, with(at, "get", codeq.ID{1}.String())...).code)
		require.Equal(t, exitNotFound, call(t, with(at, "get", "-queue", "later", "-key", "x")...).code)
		require.Equal(t, exitUsage, call(t, with(at, "get", "x")...).code)
		require.Equal(t, exitUsage, call(t, with(at, "get")...).code)
	})
}

func TestProduce(t *testing.T) {
	everywhere(t, nil, func(t *testing.T, at ...string) {
		args := with(at, "produce", "-queue", "mail", "-tenant", "a", "-priority", "7", "-header", "to=ann=x", "-key", "1", "-key-for", "1h",
			"-group", "g", "-limit-key", "l", "-max-attempts", "3", "-run-for", "1m", "-retention", "forever", "-run-at", "1h", "hello")
		require.Equal(t, 1, strings.Count(ok(t, append(args, "-dry-run")...), "\n"))
		require.Zero(t, counts(t, at, "mail"))
		id := strings.TrimSpace(ok(t, args...))
		task := decoded[codeq.TaskInfo](t, with(at, "get", id)...)
		require.WithinDuration(t, time.Now().Add(time.Hour), task.At, time.Minute)
		task.RunAt = time.Time{}
		require.Equal(t, codeq.Task{
			Queue: "mail", Tenant: "a", Priority: 7, Headers: map[string]string{"to": "ann=x"}, Payload: []byte("hello"), Group: "g", LimitKey: "l",
			MaxAttempts: 3, Timeout: time.Minute, Retention: codeq.Forever, Unique: codeq.Unique{Key: "1", For: time.Hour},
		}, task.Task)

		r := call(t, args...)
		require.Equal(t, exitRefused, r.code, r.err)
		require.Contains(t, r.out, id+" has the key already")

		in := []byte("a\nb\r\nc")
		d := run(t.Context(), nil, in, with(at, "-json", "produce", "-queue", "lines", "-file", "-", "-lines")...)
		require.Zero(t, d.code, d.err)
		require.Equal(t, 3, strings.Count(d.out, "\n"))
		p := decoded[pageResult](t, with(at, "ls", "-queue", "lines", "-payload")...)
		require.Equal(t, "b", string(p.Tasks[1].Payload))
		ok(t, with(at, "produce", "-queue", "child", "-after", p.Tasks[0].ID.String(), "x")...)
		require.EqualValues(t, 1, counts(t, at, "child").Blocked)

		file := filepath.Join(t.TempDir(), "payload")
		require.NoError(t, os.WriteFile(file, in, 0o600))
		ok(t, with(at, "produce", "-queue", "file", "-file", file)...)
		require.Equal(t, in, decoded[pageResult](t, with(at, "ls", "-queue", "file", "-payload")...).Tasks[0].Payload)
		for _, wrong := range [][]string{
			{"hello"}, {"-queue", "q", "a", "b"}, {"-queue", "q", "-priority", "10", "x"}, {"-queue", "q", "-header", "x", "y"},
			{"-queue", "q", "-file", file, "x"}, {"-queue", "q", "-lines", "x"}, {"-queue", "q", "-after", "x", "y"}, {"-queue", "q", "-run-at", "soon", "y"},
			{"-queue", "q", "-retention", "long", "y"},
		} {
			require.Equal(t, exitUsage, call(t, with(at, append([]string{"produce"}, wrong...)...)...).code, wrong)
		}
		require.Equal(t, exitOther, call(t, with(at, "produce", "-queue", "q", "-file", file+"x")...).code)
	})
}

// TestFilters: each flag selects the same tasks for a list, a count and a change, wherever they
// are; nothing else is changed.
func TestFilters(t *testing.T) {
	var between time.Time
	fill := func(_ context.Context, q *codeq.Queue) {
		kill(t, q, codeq.Task{
			Queue: "a", Kind: "k", Tenant: "t", Group: "g", Unique: codeq.Unique{Key: "u"}, Payload: []byte("for Ada"),
		}, "disk is full")
		settle()
		between = time.Now()
		settle()
		kill(t, q, codeq.Task{Queue: "b", Payload: []byte("for Bob")}, "timeout")
		produce(t, q, codeq.Task{Queue: "b"})
		settle()
	}
	everywhere(t, fill, func(t *testing.T, at ...string) {
		first := between.Format(time.RFC3339Nano)
		selects := map[string]struct {
			flags []string
			n     int
		}{
			"States": {nil, 2}, "Queue": {[]string{"-queue", "a"}, 1}, "Tenants": {[]string{"-tenant", "t"}, 1},
			"Group": {[]string{"-group", "g"}, 1}, "Key": {[]string{"-key", "u"}, 1}, "ErrorKind": {[]string{"-error", "disk is full"}, 1},
			"Kind": {[]string{"-kind", "k"}, 1}, "From": {[]string{"-from", first}, 1}, "To": {[]string{"-to", first}, 1},
			"Text": {[]string{"-text", "DISK"}, 1}, "Contents": {[]string{"-text", "FOR ada", "-contents"}, 1},
		}
		for _, field := range reflect.VisibleFields(reflect.TypeFor[codeq.TaskFilter]()) {
			c, known := selects[field.Name]
			require.True(t, known, "no flag for %s is tested", field.Name)
			require.Len(t, decoded[pageResult](t, with(at, append([]string{"ls", "-state", "dead"}, c.flags...)...)...).Tasks, c.n, field.Name)
			require.Equal(t, c.n, decoded[bulkResult](t, with(at, append([]string{"cancel", "-dry-run", "-all", "-state", "dead"}, c.flags...)...)...).Matched, field.Name)
		}
		require.Equal(t, 1, decoded[bulkResult](t, with(at, "cancel", "-state", "dead", "-text", "FOR ada", "-contents")...).Changed)
		require.EqualValues(t, 1, counts(t, at, "b").Dead)
	})
}

func TestChanges(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		dry := decoded[bulkResult](t, with(at, "redrive", "-queue", "mail", "-dry-run")...)
		require.Equal(t, bulkResult{"redrive", true, codeq.BulkResult{Matched: 3}}, dry)
		require.EqualValues(t, 3, counts(t, at, "mail").Dead)
		require.Equal(t, "3 tasks would be redriven.\n", ok(t, with(at, "redrive", "-queue", "mail", "-dry-run")...))

		list := decoded[pageResult](t, with(at, "ls", "-state", "dead", "-queue", "mail")...).Tasks
		one := list[0].ID.String()
		require.Equal(t, one+" would be redriven\n", ok(t, with(at, "redrive", "-dry-run", one)...))
		require.Contains(t, call(t, with(at, "redrive", "-from-step", "charge", one)...).err, "a step of the task")
		require.Equal(t, taskResult{ID: list[0].ID, Done: true}, decoded[taskResult](t, with(at, "redrive", one)...))
		require.Equal(t, exitNotFound, call(t, with(at, "redrive", one)...).code, "it is no dead letter any more")
		require.Equal(t, exitRefused, call(t, with(at, "redrive", "-dry-run", one)...).code)
		require.Equal(t, "2 tasks of 2 redriven; 0 had changed meanwhile, 0 were refused.\n", ok(t, with(at, "redrive", "-error", "no such mailbox #")...))
		require.Equal(t, codeq.Counts{Ready: 7}, counts(t, at, "mail"))

		require.Equal(t, 8, decoded[bulkResult](t, with(at, "cancel", "-all", "-dry-run")...).Matched)
		require.Equal(t, one+" canceled\n", ok(t, with(at, "cancel", one)...))
		require.Equal(t, exitRefused, call(t, with(at, "cancel", one)...).code)
		require.Equal(t, 6, decoded[bulkResult](t, with(at, "cancel", "-queue", "mail", "-state", "ready", "-rate", "100000")...).Changed)
		require.Equal(t, codeq.Counts{Canceled: 7}, counts(t, at, "mail"))

		require.Equal(t, 7, decoded[bulkResult](t, with(at, "purge", "-queue", "mail", "-state", "canceled")...).Changed)
		require.Equal(t, 1, decoded[bulkResult](t, with(at, "purge", "-all")...).Changed, "the hostile one")
		gone := call(t, with(at, "purge", one, list[1].ID.String())...)
		require.Equal(t, exitNotFound, gone.code)
		require.Equal(t, 2, strings.Count(gone.err, "task 01"), gone.err)
		for _, wrong := range [][]string{
			{"redrive"}, {"redrive", "x"}, {"redrive", "-state", "ready", "-all"}, {"purge", "-state", "dead"}, {"cancel", one, "-queue", "mail"},
			{"redrive", "-state", "frob"}, {"redrive", "-all", "-rate", "-1"}, {"redrive", "-from", "x"}, {"redrive", "-all", "-from-step", "x"},
		} {
			require.Equal(t, exitUsage, call(t, with(at, wrong...)...).code, wrong)
		}
	})
}

// TestChangeEnds: an interrupted change writes the cursor for the next call.
func TestChangeEnds(t *testing.T) {
	const n = 2000
	fill := func(ctx context.Context, q *codeq.Queue) {
		tasks := make([]codeq.Task, n)
		for i := range tasks {
			tasks[i] = mail(i)
		}
		_, err := q.ProduceBatch(ctx, tasks)
		require.NoError(t, err)
		require.NoError(t, q.Configure(ctx, "mail", func(s *codeq.Settings) { s.Retention = time.Hour }))
		settle()
	}
	everywhere(t, fill, func(t *testing.T, at ...string) {
		r := call(t, with(at, "-json", "-timeout", "2s", "cancel", "-queue", "mail", "-rate", "500")...)
		require.Equal(t, exitEnded, r.code, r.err)
		_, cursor, found := strings.Cut(r.err, "-cursor ")
		require.True(t, found, r.err)
		cursor, _, _ = strings.Cut(cursor, "\n")
		var part bulkResult
		require.NoError(t, json.Unmarshal([]byte(r.out), &part))
		require.Less(t, part.Changed, n)
		rest := decoded[bulkResult](t, with(at, "cancel", "-queue", "mail", "-cursor", cursor)...)
		require.EqualValues(t, n, counts(t, at, "mail").Canceled)
		require.LessOrEqual(t, part.Changed+rest.Changed, n)
	})
}

// endingOutput ends a command with its first output.
type endingOutput struct {
	io.Writer
	end context.CancelFunc
}

func (e endingOutput) Write(b []byte) (int, error) {
	e.end()
	return e.Writer.Write(b)
}

// TestChangeOfIDsEnds: a change of several IDs or queues that ends early names the rest, and has
// the exit code of an ended command.
func TestChangeOfIDsEnds(t *testing.T) {
	var ids []string
	fill := func(_ context.Context, q *codeq.Queue) {
		ids = nil
		for i := range 3 {
			ids = append(ids, produce(t, q, mail(i)).String())
		}
	}
	everywhere(t, fill, func(t *testing.T, at ...string) {
		ending := func(args ...string) done {
			ctx, end := context.WithCancel(t.Context())
			var out, errs locked
			a := &app{out: endingOutput{&out, end}, err: &errs, env: func(string) string { return "" }, now: time.Now, loc: time.UTC}
			code := a.run(ctx, append([]string{"codeq"}, with(at, args...)...))
			return done{code, out.String(), errs.String()}
		}
		gone := codeq.ID{1}.String()
		r := ending(append([]string{"cancel", "-dry-run"}, ids...)...)
		require.Equal(t, exitEnded, r.code, r.err)
		r = ending("cancel", gone, ids[0], ids[1], ids[2])
		require.Equal(t, exitEnded, r.code, r.err)
		require.Equal(t, ids[0]+" canceled\n", r.out)
		require.Contains(t, r.err, "task "+gone+": not found")
		for _, left := range ids[1:] {
			require.Contains(t, r.err, "task "+left+": not reached: context canceled")
		}
		require.EqualValues(t, 2, counts(t, at, "mail").Ready)

		r = ending("-json", "cancel", ids[1], ids[2])
		require.Equal(t, exitEnded, r.code, r.err)
		var last taskResult
		require.NoError(t, json.Unmarshal([]byte(r.out[strings.Index(r.out, "\n"):]), &last))
		require.Equal(t, ids[2], last.ID.String())
		require.False(t, last.Done)
		require.Contains(t, last.Error, "not reached")

		require.Equal(t, exitEnded, ending("pause", "mail", "other").code, "nothing of the other one was sent")
	})
}

func TestSettings(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		require.Contains(t, ok(t, with(at, "pause", "mail", "-dry-run")...), "as they would be")
		require.False(t, decoded[queueSettings](t, with(at, "resume", "-dry-run", "mail")...).Settings.Paused)
		require.True(t, decoded[queueSettings](t, with(at, "pause", "mail")...).Settings.Paused)
		require.Contains(t, ok(t, with(at, "info")...), "paused")
		set := decoded[queueSettings](t, with(at, "set", "queue", "-rate", "2.5", "-burst", "4", "-concurrency-per-key", "1", "-tenant-weight", "a=3",
			"-tenant-weight", "b=c=2", "-retention", "2h", "-dead-retention", "forever", "-hold-groups", "-max-attempts", "3", "-timeout", "1m",
			"-backoff-base", "2s", "-backoff-step", "1s", "-retry-first", "-dead-letter-queue", "failed", "mail")...)
		want := codeq.Settings{
			Paused: true, Concurrency: 5, ConcurrencyPerKey: 1, Rate: 2.5, Burst: 4, TenantWeights: map[string]int{"a": 3, "b=c": 2},
			Policy: codeq.Policy{
				MaxAttempts: 3, Backoff: codeq.Backoff{Base: 2 * time.Second, Step: time.Second}, Timeout: time.Minute,
				Retention: 2 * time.Hour, RetryFirst: true,
			},
			DeadRetention: codeq.Forever, HoldGroups: true, DeadLetterQueue: "failed",
		}
		require.Equal(t, want, set.Settings)
		require.False(t, decoded[queueSettings](t, with(at, "resume", "mail")...).Settings.Paused)
		set = decoded[queueSettings](t, with(at, "set", "queue", "-concurrency", "0", "-tenant-weight", "a=0", "-hold-groups=false", "-retention", "0",
			"-backoff-step", "0", "-backoff-factor", "1", "-retry-first=false", "mail")...)
		want.Paused, want.Concurrency, want.HoldGroups, want.Retention = false, 0, false, 0
		want.Backoff.Step, want.Backoff.Factor, want.RetryFirst = 0, 1, false
		delete(want.TenantWeights, "a")
		require.Equal(t, want, set.Settings)
		for _, wrong := range [][]string{
			{"pause"}, {"set"}, {"set", "queue", "mail"}, {"set", "queue", "-rate", "1"}, {"set", "queue", "-rate", "-1", "mail"},
			{"set", "queue", "-tenant-weight", "a", "mail"}, {"set", "frob"},
		} {
			require.Equal(t, exitUsage, call(t, with(at, wrong...)...).code, wrong)
		}
	})
}

// TestDelete: an unused queue is removed, any other is refused.
func TestDelete(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		r := call(t, with(at, "delete", "mail")...)
		require.Equal(t, exitRefused, r.code)
		require.Contains(t, r.err, "7 tasks")
		require.Equal(t, exitRefused, call(t, with(at, "delete", "report")...).code, "a schedule uses it")
		ok(t, with(at, "pause", "unused")...)
		require.Contains(t, ok(t, with(at, "info")...), "unused")
		require.Equal(t, "queue unused deleted\n", ok(t, with(at, "delete", "unused")...))
		require.NotContains(t, ok(t, with(at, "info")...), "unused")
		require.Equal(t, exitUsage, call(t, with(at, "delete")...).code)
	})
}

func TestSetTask(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		list := decoded[pageResult](t, with(at, "ls", "-state", "ready", "-queue", "mail")...).Tasks
		one := list[3].ID.String()
		ok(t, with(at, "set", "task", "-priority", "9", one)...)
		require.Equal(t, one, decoded[pageResult](t, with(at, "ls", "-state", "ready", "-limit", "1")...).Tasks[0].ID.String())
		ok(t, with(at, "set", "task", "-run-at", "1h", one)...)
		require.Equal(t, codeq.Scheduled, decoded[codeq.TaskInfo](t, with(at, "get", one)...).State)
		ok(t, with(at, "set", "task", "-run-at", "now", one)...)
		ok(t, with(at, "set", "task", "-run-at", "", one)...)
		require.Equal(t, codeq.Ready, decoded[codeq.TaskInfo](t, with(at, "get", one)...).State)
		require.Equal(t, 3, decoded[bulkResult](t, with(at, "set", "task", "-queue", "mail", "-priority", "9", "-dry-run")...).Matched)
		require.Equal(t, 3, decoded[bulkResult](t, with(at, "set", "task", "-queue", "mail", "-priority", "9")...).Changed)
		require.Equal(t, 7, decoded[bulkResult](t, with(at, "set", "task", "-queue", "mail", "-state", "ready", "-state", "dead", "-to-queue", "post")...).Changed)
		require.Equal(t, codeq.Counts{Ready: 7}, counts(t, at, "post"))
		for _, wrong := range [][]string{{one}, {"-priority", "3"}, {"-priority", "11", one}, {"-to-queue", "x", one}, {"-run-at", "1h", "-queue", "post"}, {"-priority", "1", "-run-at", "1h", one}} {
			require.Equal(t, exitUsage, call(t, with(at, append([]string{"set", "task"}, wrong...)...)...).code, wrong)
		}
	})
}

func TestSchedules(t *testing.T) {
	everywhere(t, fillMixed(t), func(t *testing.T, at ...string) {
		require.Contains(t, ok(t, with(at, "schedules")...), "@daily")
		ok(t, with(at, "schedules", "set", "often", "-every", "5m", "-queue", "mail", "-missed", "skip", "-dry-run", "hello")...)
		ok(t, with(at, "schedules", "set", "often", "-every", "5m", "-queue", "mail", "-missed", "skip", "hello")...)
		list := decoded[struct{ Schedules []codeq.ScheduleInfo }](t, with(at, "schedules")...).Schedules
		require.Len(t, list, 2)
		require.Equal(t, codeq.Schedule{
			Name: "often", Every: 5 * time.Minute, Missed: codeq.MissedSkip, Task: codeq.Task{Queue: "mail", Payload: []byte("hello")},
		}, list[1].Schedule)
		ok(t, with(at, "schedules", "run", "daily", "-dry-run")...)
		id := strings.TrimSpace(ok(t, with(at, "schedules", "run", "daily")...))
		require.Equal(t, "report", decoded[codeq.TaskInfo](t, with(at, "get", id)...).Queue)
		ok(t, with(at, "schedules", "rm", "-dry-run", "often")...)
		ok(t, with(at, "schedules", "rm", "often")...)
		require.Equal(t, exitNotFound, call(t, with(at, "schedules", "rm", "often")...).code)
		require.Equal(t, exitNotFound, call(t, with(at, "schedules", "run", "often")...).code)
		for _, wrong := range [][]string{{"frob"}, {"set"}, {"set", "x"}, {"set", "x", "-queue", "q"}, {"set", "x", "-queue", "q", "-cron", "frob"}, {"set", "x", "-queue", "q", "-every", "1h", "-missed", "x"}, {"rm"}} {
			require.Equal(t, exitUsage, call(t, with(at, append([]string{"schedules"}, wrong...)...)...).code, wrong)
		}
	})
}

func TestQuiet(t *testing.T) {
	dir := newQueue(t, nil)
	require.Equal(t, exitNotNow, call(t, "-dir", dir, "quiet").code, "nobody works")
	q, stop := serve(t, dir)
	mux := new(codeq.Mux)
	began := make(chan struct{}, 9)
	codeq.Handle(mux, "mail", func(context.Context, *codeq.Job[[]byte]) error {
		began <- struct{}{}
		return nil
	})
	ended := make(chan error)
	go func() { ended <- q.Run(context.Background(), mux, &codeq.RunOptions{Name: "w\x1b1", Concurrency: 2}) }()
	produce(t, q, mail(0))
	<-began
	for _, at := range [][]string{{"-dir", dir}, {"-url", newDashboard(t, q).URL + "/admin/"}} {
		require.Contains(t, ok(t, with(at, "quiet")...), "works")
		require.False(t, decoded[workersResult](t, with(at, "quiet", "-dry-run", "w\x1b1")...).Workers[0].Quiet)
		require.True(t, decoded[workersResult](t, with(at, "quiet", "w\x1b1")...).Workers[0].Quiet)
		require.Contains(t, ok(t, with(at, "info")...), "quiet")
		require.False(t, decoded[workersResult](t, with(at, "quiet", "-undo", "-all")...).Workers[0].Quiet)
		require.Equal(t, exitNotFound, call(t, with(at, "quiet", "nobody")...).code)
		require.Equal(t, exitUsage, call(t, with(at, "quiet", "-undo")...).code)
	}
	stop()
	require.ErrorIs(t, <-ended, codeq.ErrClosed)
}

func TestVerify(t *testing.T) {
	dir := newQueue(t, fillMixed(t))
	require.Contains(t, ok(t, "-dir", dir, "verify"), "No problem")
	require.True(t, decoded[verifyResult](t, "-dir", dir, "verify").OK)
	require.Equal(t, exitUsage, call(t, "-dir", dir, "verify", "x").code)

	tables, err := filepath.Glob(filepath.Join(dir, "shard-*", "*.log"))
	require.NoError(t, err)
	require.NotEmpty(t, tables)
	for _, name := range tables {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		for i := 20; i < len(b); i += 97 {
			b[i] ^= 0x55
		}
		require.NoError(t, os.WriteFile(name, b, 0o600))
	}
	r := call(t, "-dir", dir, "verify")
	require.Equal(t, exitDamaged, r.code, r.out)
	requireHarmless(t, r)
	require.Equal(t, exitDamaged, call(t, "-dir", dir, "info").code)
	require.Equal(t, exitDamaged, call(t, "-dir", dir, "pause", "mail").code)
	before := r.out
	require.Equal(t, before, call(t, "-dir", dir, "repair", "-dry-run").out)
	require.Contains(t, ok(t, "-dir", dir, "repair"), "repaired")
	require.True(t, decoded[verifyResult](t, "-dir", dir, "verify").OK)
	ok(t, "-dir", dir, "info")

	served := newQueue(t, nil)
	serve(t, served)
	// The process serves, but these verbs need a closed directory.
	for _, args := range [][]string{{"verify"}, {"export"}, {"repair"}} {
		r := call(t, with([]string{"-dir", served}, args...)...)
		require.Equal(t, exitInUse, r.code)
		require.Contains(t, r.err, "this needs a closed directory: end that process first")
		require.NotContains(t, r.err, "ServeLocal")
		require.Equal(t, args[0] != "repair", strings.Contains(r.err, "codeq checkpoint"), r.err)
	}
}

// linkedTables returns the bytes of a closed queue's tables in files with other links.
func linkedTables(t *testing.T, dir string) (bytes int64) {
	t.Helper()
	r, err := codeq.OpenReadOnly(dir, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	s, err := r.StorageStats()
	require.NoError(t, err)
	for _, shard := range s.Shards {
		bytes += shard.LinkedBytes
	}
	return bytes
}

func TestCheckpoint(t *testing.T) {
	dir := newQueue(t, fillMixed(t))
	to := filepath.Join(filepath.Dir(dir), "copy")
	ok(t, "-dir", dir, "checkpoint", to)
	require.Equal(t, counts(t, []string{"-dir", dir}, "mail"), counts(t, []string{"-dir", to}, "mail"))
	require.Equal(t, exitRefused, call(t, "-dir", dir, "checkpoint", to).code, "it exists")
	require.Equal(t, exitUsage, call(t, "-dir", dir, "checkpoint").code)
	serve(t, dir)
	require.Equal(t, to+"2", decoded[struct{ Dir string }](t, "-dir", dir, "checkpoint", to+"2").Dir)
	ok(t, "-dir", to+"2", "info")
	require.Positive(t, linkedTables(t, to+"2"))
	ok(t, "-dir", dir, "checkpoint", "-copy", to+"3")
	require.Zero(t, linkedTables(t, to+"3"))
	require.Equal(t, counts(t, []string{"-dir", dir}, "mail"), counts(t, []string{"-dir", to + "3"}, "mail"))
}

func TestBench(t *testing.T) {
	in := t.TempDir()
	require.Contains(t, ok(t, "bench", "-in", in, "-tasks", "200", "-workers", "4"), "PER SECOND")
	require.Contains(t, ok(t, "-json", "bench", "-in", in, "-tasks", "20", "-durability", "none"), `"Part":"work"`)
	left, err := os.ReadDir(in)
	require.NoError(t, err)
	require.Empty(t, left)
	for _, wrong := range [][]string{{"-dir", in, "bench"}, {"bench", "-tasks", "0"}, {"bench", "-durability", "x"}} {
		require.Equal(t, exitUsage, call(t, wrong...).code)
	}
}

// TestMisuse: errors of use have clear texts and exit codes.
func TestMisuse(t *testing.T) {
	dir := newQueue(t, nil)
	for _, c := range []struct {
		code int
		args []string
	}{
		{exitUsage, []string{"frob"}},
		{exitUsage, []string{"info", "-frob"}},
		{exitUsage, []string{"info"}},
		{exitUsage, []string{"-dir", dir, "-url", "http://x/", "info"}},
		{exitUsage, []string{"-dir", dir, "info", "a", "b"}},
		{exitUsage, []string{"-dir", dir, "-timeout", "-1s", "info"}},
		{exitUsage, []string{"-dir", dir, "-timeout", "soon", "info"}},
		{exitUsage, []string{"-dir"}},
		{exitNoQueue, []string{"-dir", dir + "x", "info"}},
		{exitNoQueue, []string{"-dir", dir + "x", "pause", "mail"}},
		{exitNoQueue, []string{"-dir", t.TempDir(), "pause", "mail"}},
		{exitNoQueue, []string{"-dir", dir + "x", "verify"}},
		{exitNoQueue, []string{"-dir", dir + "x", "export"}},
		{exitNotNow, []string{"-dir", dir, "cluster", "status"}},
		{exitNotNow, []string{"-dir", dir, "cluster", "drain"}},
		{exitNotNow, []string{"-dir", dir, "cluster", "remove", "n1"}},
		{exitNoQueue, []string{"-dir", dir + "x", "cluster", "status"}},
		{exitNoQueue, []string{"-dir", t.TempDir(), "quiet"}},
		{exitUsage, []string{"-dir", dir, "cluster"}},
		{exitUsage, []string{"-dir", dir, "list", "-from", "9999-12-31T23:59:59-12:00"}},
		{exitUsage, []string{"-dir", dir, "produce", "-run-at", "0000-01-01T00:00:00+12:00", "a", "p"}},
		{exitUsage, []string{"-dir", dir, "cluster", "transfer", "x", "n"}},
	} {
		r := call(t, c.args...)
		require.Equal(t, c.code, r.code, "%v: %s", c.args, r.err)
		require.NotEmpty(t, r.err)
		require.Empty(t, r.out)
		requireHarmless(t, r)
	}
	_, err := os.Stat(dir + "x")
	require.ErrorIs(t, err, os.ErrNotExist, "a wrong path makes no queue")
	both := map[string]string{"CODEQ_DIR": dir, "CODEQ_URL": "http://x/"}
	require.Equal(t, exitUsage, run(t.Context(), both, nil, "info").code)
	delete(both, "CODEQ_URL")
	require.Zero(t, run(t.Context(), both, nil, "info").code)

	// A process has the queue open, and does not serve it.
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	for _, args := range [][]string{{"info"}, {"pause", "mail"}, {"export"}, {"verify"}, {"quiet"}, {"cluster", "status"}, {"cluster", "remove", "n"}} {
		r := call(t, with([]string{"-dir", dir}, args...)...)
		require.Equal(t, exitInUse, r.code, r.err)
		if args[0] == "export" || args[0] == "verify" {
			require.Contains(t, r.err, "this needs a closed directory")
		} else {
			require.Contains(t, r.err, "ServeLocal")
		}
	}
	require.NoError(t, q.Close())
	if os.Getuid() == 0 {
		return // root may read everything
	}
	require.NoError(t, os.Chmod(dir, 0))
	defer func() { require.NoError(t, os.Chmod(dir, 0o700)) }()
	require.Equal(t, exitDenied, call(t, "-dir", dir, "info").code)
	require.Equal(t, exitDenied, call(t, "-dir", dir, "pause", "mail").code)
}

// TestApplicationDecides: a verb on a closed directory makes only its own change, with the options
// of the application. The tasks of a killed process stay as they are.
func TestApplicationDecides(t *testing.T) {
	for _, verb := range [][]string{
		{"pause", "other"}, {"resume", "other"}, {"set", "queue", "other", "-concurrency", "3"}, {"set", "task", "-queue", "later", "-priority", "5"},
		{"produce", "-queue", "other", "x"}, {"redrive", "-all"}, {"purge", "-queue", "dead", "-all"}, {"cancel", "-queue", "waits"},
		{"schedules", "set", "-name", "s", "-cron", "@daily", "-queue", "other"}, {"checkpoint", "new"}, {"cluster", "status"},
	} {
		t.Run(verb[0]+" "+verb[1], func(t *testing.T) {
			dir, ctx := filepath.Join(t.TempDir(), "q"), t.Context()
			q, err := codeq.Open(dir, &codeq.Options{MaxAttempts: 100, Retention: time.Hour, Backoff: codeq.Backoff{Base: 1, Max: 1}})
			require.NoError(t, err)
			leased := produce(t, q, codeq.Task{Queue: "often"})
			claim := codeq.ClaimRequest{Queues: []string{"often"}, Local: true}
			for range 30 {
				l, err := q.Claim(ctx, claim)
				require.NoError(t, err)
				require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: 1}))
			}
			_, err = q.Claim(ctx, claim)
			require.NoError(t, err)
			waits := produce(t, q, codeq.Task{Queue: "waits"})
			produce(t, q, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})
			kill(t, q, codeq.Task{Queue: "dead"}, "bad")
			require.NoError(t, q.Close())
			settle()
			if verb[0] == "checkpoint" {
				verb[1] = filepath.Join(filepath.Dir(dir), verb[1])
			}
			call(t, append([]string{"-dir", dir}, verb...)...)
			r, err := codeq.OpenReadOnly(dir, nil)
			require.NoError(t, err)
			defer func() { require.NoError(t, r.Close()) }()
			info, err := r.Get(ctx, leased)
			require.NoError(t, err)
			require.Equal(t, codeq.Leased, info.State, "its attempts are not used up, nor is the lease over")
			require.Equal(t, 31, info.Attempts)
			if verb[0] == "cancel" {
				info, err = r.Get(ctx, waits)
				require.NoError(t, err, "it is kept, as the application has said")
				require.Equal(t, codeq.Canceled, info.State)
			}
		})
	}
}

// TestKilled: the state left by a killed process is shown and marked.
func TestKilled(t *testing.T) {
	dir := killedQueue(t)
	r := call(t, "-dir", dir, "info")
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.err, "killed")
	require.True(t, decoded[infoResult](t, "-dir", dir, "info").At.Killed)
}

// TestExitCodes: the help and README.md say the same.
func TestExitCodes(t *testing.T) {
	help := ok(t, "help")
	doc, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for _, m := range exitMeanings {
		require.Contains(t, help, m.text)
		require.Contains(t, string(doc), m.text)
	}
	require.Equal(t, exitUncertain, exitCode(errors.Join(codeq.ErrUncertain, context.Canceled)))
	require.Equal(t, exitOther, exitCode(errors.New("x")))
}

// TestHelp: every verb and flag is explained, and README.md names each verb.
func TestHelp(t *testing.T) {
	doc, err := os.ReadFile("README.md")
	require.NoError(t, err)
	a := &app{env: func(string) string { return "" }}
	for _, c := range a.root().Commands {
		require.NotEmpty(t, c.Usage, c.Name)
		require.Contains(t, string(doc), "codeq "+c.Name)
		text := ok(t, c.Name, "-help")
		for _, f := range c.Flags {
			require.Contains(t, text, "-"+f.Names()[0]+" ")
		}
		for _, sub := range c.Commands {
			require.NotEmpty(t, sub.Usage)
			ok(t, c.Name, sub.Name, "-help")
		}
	}
}
