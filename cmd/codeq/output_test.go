package main

import (
	"bytes"
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mattn/go-runewidth"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/offline"
)

var update = flag.Bool("update", false, "write the golden files")

// golden compares text with a file in testdata.
func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), text)
}

var noon = time.Date(2026, 5, 6, 12, 0, 0, 0, time.UTC)

func atNoon(out *bytes.Buffer) *app {
	return &app{out: out, err: out, now: func() time.Time { return noon }, loc: time.UTC}
}

func someQueues() []codeq.QueueInfo {
	return []codeq.QueueInfo{
		{
			Queue: "mail", Counts: codeq.Counts{Ready: 12345, Leased: 3, Dead: 1}, OldestReady: noon.Add(-3*time.Minute - 12*time.Second),
			Totals: codeq.Totals{Produced: 20_000, Completed: 7651, Retried: 4, Dead: 1}, Settings: codeq.Settings{Paused: true, Concurrency: 5},
		},
		{Queue: "日本語", Counts: codeq.Counts{Scheduled: 1, Blocked: 2, Done: 3, Canceled: 4}, Held: 2},
		{Queue: hostileBytes, Counts: codeq.Counts{Ready: 1}, OldestReady: noon.Add(-49 * time.Hour), Totals: codeq.Totals{Produced: 1}},
	}
}

func someWorkers() []codeq.WorkerInfo {
	return []codeq.WorkerInfo{
		{Name: "web-1:4711", Queues: []string{"mail", "日本語"}, Concurrency: 8, Busy: 3, Since: noon.Add(-time.Hour), Hung: []codeq.HungHandler{
			{ID: codeq.ID{1, 6: 0x70}, Queue: "mail", Attempt: 1, Since: noon.Add(-time.Minute)},
			{ID: codeq.ID{2, 6: 0x70}, Queue: "mail", Attempt: 2, Since: noon.Add(-time.Hour)},
		}},
		{Name: "web-2:4711" + hostile, Node: "n2", Quiet: true, Concurrency: 8, Since: noon.Add(-time.Second)},
		{Node: "n3", LastError: "no answer\x1b[2J"},
	}
}

// TestGolden: the tables for people.
func TestGolden(t *testing.T) {
	var out bytes.Buffer
	a := atNoon(&out)
	require.NoError(t, a.showInfo(&infoResult{At: where{Kind: whereClosed}, Queues: someQueues(), Workers: someWorkers(), Storage: &codeq.StorageStats{
		Shards: []codeq.ShardStorage{{DiskBytes: 5 << 30, Tables: 7, TableBytes: 1234567, DeadBytes: 12, MemTableBytes: 16 << 20, LogBytes: 1, ReadAmp: 4}},
	}}, ""))
	require.NoError(t, a.gap("One queue"))
	require.NoError(t, a.showInfo(&infoResult{Queues: someQueues()[:1], Days: []codeq.DayTotals{{Day: noon.Truncate(24 * time.Hour), Totals: codeq.Totals{Produced: 20_000, Canceled: 3}}}}, "mail"))
	golden(t, "info.txt", out.String())

	out.Reset()
	id := codeq.ID{1, 2, 3, 4, 5, 6, 0x70}
	tasks := []*codeq.TaskInfo{
		{ID: id, Task: codeq.Task{Queue: "mail", Payload: []byte(`{"to":"ann"}`), MaxAttempts: 25}, State: codeq.Dead, Attempts: 25, LastError: strings.Repeat("no such mailbox ", 9), At: noon},
		{ID: id, Task: codeq.Task{Queue: hostileBytes, Tenant: hostileBytes, Priority: 9, Payload: []byte(hostileBytes)}, State: codeq.Ready, LastError: hostileBytes, At: noon},
	}
	require.NoError(t, a.showPage(pageResult{Tasks: tasks}, true, true))
	golden(t, "ls.txt", out.String())

	out.Reset()
	tasks[0].Headers = map[string]string{"traceparent": "00-1", hostile: hostileBytes}
	tasks[0].After, tasks[0].OnDead, tasks[0].Result = []codeq.ID{{9}}, codeq.RunOnDead, []byte("42")
	tasks[0].Unique, tasks[0].Group, tasks[0].LimitKey = codeq.Unique{Key: "k", For: time.Hour}, "g", "l"
	tasks[0].Timeout, tasks[0].Retention, tasks[0].FirstReady = time.Minute, codeq.Forever, noon
	tasks[0].History = []codeq.Attempt{
		{Number: 1, Start: noon, End: noon.Add(time.Second), Outcome: codeq.EventRetried, Worker: "web-1", Error: hostile},
		{Number: 2, Start: noon, End: noon.Add(20 * time.Millisecond), Outcome: codeq.EventExpired},
		{Number: 25, Start: noon, Worker: hostile},
	}
	tasks[0].HistoryDropped, tasks[0].Progress = 22, codeq.Progress{Done: 1, Total: 3, Note: hostile, At: noon}
	tasks[0].Metadata = map[string]string{"page": "7"}
	tasks[0].Kind = hostile
	tasks[0].Logs = []codeq.LogLine{{At: noon, Level: slog.LevelWarn, Attempt: 25, Text: hostile}}
	tasks[0].Steps = []codeq.StepInfo{{Name: "charge", Kind: codeq.StepResult, At: noon, Result: []byte(hostile)}, {Name: "pause", Kind: codeq.StepSleep, At: noon}}
	list, fields := tasks[0], a.root()
	require.NoError(t, a.showTask(fields, list, false))
	golden(t, "get.txt", out.String())

	out.Reset()
	require.NoError(t, a.showReport(&codeq.VerifyReport{
		Shards:   []codeq.ShardReport{{Sealed: true, Files: 3, Bytes: 4096, Tasks: codeq.Counts{Ready: 5, Dead: 1}}, {Kept: "shard-001.damaged-1", MayRepeat: 3}},
		Problems: []codeq.Problem{{Shard: -1, Text: "a"}, {Shard: 1, File: "shard-001/1.sst", Text: "checksum " + hostile, Repairable: true}, {Shard: 1, Repaired: true, Text: "c"}},
	}))
	golden(t, "verify.txt", out.String())

	out.Reset()
	require.NoError(t, a.table(clusterTable(&codeq.ClusterStatus{Shards: []codeq.ShardStatus{{
		Shard: 1, Leader: "n1", Placed: "n1", Replicas: []codeq.ReplicaStatus{
			{Node: "n1", Address: "10.0.0.1:7400", Voter: true, Term: 3, Applied: 99},
			{Node: "n2", Address: "10.0.0.2:7400", Voter: true, Suspect: true, Lag: 5, LastContact: 20 * time.Millisecond, ClockAhead: -3 * time.Millisecond},
			{Node: "n3", LastError: "no answer"},
		},
	}}})))
	golden(t, "cluster.txt", out.String())

	out.Reset()
	for _, e := range []codeq.Event{
		{Kind: codeq.EventRetried, ID: id, Queue: "mail", Tenant: "a", Attempt: 2, Time: noon, LastError: hostile},
		{Kind: codeq.EventProgress, ID: id, Queue: hostile, Time: noon, Progress: codeq.Progress{Done: 1, Total: 2, Note: "half"}},
	} {
		require.NoError(t, a.line("%s", a.eventLine(&e)))
	}
	golden(t, "tail.txt", out.String())

	out.Reset()
	s := &screen{app: a, now: sample{Time: noon, At: where{Kind: whereServed, Dir: "/var/q\x1b"}, Queues: someQueues(), Workers: someWorkers()}}
	out.WriteString(strings.Join(s.lines(), "\n") + "\n\n")
	s.before = sample{Time: noon.Add(-2 * time.Second), Queues: []codeq.QueueInfo{{Queue: "mail", Totals: codeq.Totals{Produced: 19_000, Completed: 7650}}}}
	s.now.Error, s.sort = "it has ended", 4
	out.WriteString(strings.Join(s.lines(), "\n") + "\n")
	golden(t, "top.txt", out.String())
	require.True(t, isSafe(strings.ReplaceAll(out.String(), "\n", "")))
}

// TestGoldenJSON: the documents for programs stay as they are.
func TestGoldenJSON(t *testing.T) {
	var out bytes.Buffer
	a := atNoon(&out)
	for _, v := range []any{
		infoResult{At: where{Kind: whereClosed, Dir: "q", Killed: true}, Queues: someQueues()},
		pageResult{Tasks: []*codeq.TaskInfo{{ID: codeq.ID{1}, Task: codeq.Task{Queue: hostileBytes, Payload: []byte(hostileBytes)}, State: codeq.Dead}}, Next: "x"},
		bulkResult{"redrive", true, codeq.BulkResult{Matched: 3, Next: "x"}},
		taskResult{ID: codeq.ID{1}, Error: "x"},
		produced{ID: codeq.ID{1}, Duplicate: true},
		queueSettings{Queue: "q", Settings: codeq.Settings{Rate: 2.5}, DryRun: true},
		workersResult{Workers: someWorkers()},
		scheduleResult{Name: "s", ID: codeq.ID{1}},
		verifyResult{true, &codeq.VerifyReport{}},
		importResult{Dir: "q", Shards: 3, Counts: offline.Counts{Settings: 1, Schedules: 2, Totals: 3, Keys: 4, Tasks: 5, Ties: 6}},
		benchResult{"produce", 1, 2, 3},
		clusterResult{Done: "added", Node: "n"},
		sample{Time: noon, At: where{Kind: whereServed}, Queues: []codeq.QueueInfo{}},
	} {
		require.NoError(t, a.json(v))
	}
	golden(t, "json.txt", out.String())
	require.True(t, isSafe(strings.ReplaceAll(out.String(), "\n", "")))
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0ms", 999 * time.Millisecond: "999ms", time.Second: "1s", 61 * time.Second: "1m1s", time.Hour: "1h", 25*time.Hour + time.Minute: "1d1h",
		-90 * time.Second: "-1m30s", 400 * 24 * time.Hour: "400d",
	} {
		require.Equal(t, want, short(d))
	}
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 30: "3.0 GiB", 1 << 60: "1024.0 PiB"} {
		require.Equal(t, want, sizeText(n))
	}
	require.Equal(t, 10, runewidth.StringWidth(clip("日本語日本語日本語", 10))+1, "a wide character is not cut in two")
}
