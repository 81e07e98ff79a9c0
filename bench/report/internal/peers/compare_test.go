package peers

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/bench/report/internal/benchstat"
	"codeq/bench/report/internal/command"
	"codeq/bench/workload"
)

// measured is a row with a rate, a negative one being an error.
func measured(s subject, rate int64) row {
	res := &result{Result: workload.Result{Created: rate, Completed: rate, Elapsed: time.Second}}
	if rate < 0 {
		res.Err = errors.New("broken")
	}
	return row{s, res}
}

func TestRatio(t *testing.T) {
	peer := measured(subject{Queue: "a", Class: disk, Batch: batchSize}, 10)
	rows := []row{
		measured(subject{Queue: codeqName, Class: disk, Batch: 1}, 50),
		measured(subject{Queue: codeqName, Class: disk, Batch: batchSize}, 70),
		measured(subject{Queue: codeqName, Class: process, Batch: batchSize}, 90),
		peer,
	}
	require.EqualValues(t, 7, ratio(rows, peer))
	peer.Batch = 1
	require.EqualValues(t, 5, ratio(rows, peer))
	peer.Retains = true
	require.True(t, math.IsNaN(ratio(rows, peer)), "codeq was not measured with completed tasks kept")
	rows = append(rows, measured(subject{Queue: codeqName, Class: disk, Batch: 1, Retains: true}, 30))
	require.EqualValues(t, 3, ratio(rows, peer))
	peer.Retains = false
	require.EqualValues(t, 5, ratio(rows, peer))
	peer.Class = none
	require.True(t, math.IsNaN(ratio(rows, peer)), "codeq was not measured at that class")
}

func TestVerdicts(t *testing.T) {
	rows := []row{
		measured(subject{Queue: codeqName, Class: process, Batch: 1}, 700),
		measured(subject{Queue: codeqName, Class: process, Batch: batchSize}, 1500),
		measured(subject{Queue: codeqName, Class: disk, Batch: 1}, 300),
		measured(subject{Queue: codeqName, Class: disk, Batch: 1, Retains: true}, 240),
		measured(subject{Queue: "weaker", Class: none, Batch: 1, Leases: true}, 100),
		measured(subject{Queue: "equal", Class: process, Batch: 1, Leases: true}, 90),
		measured(subject{Queue: "batches", Class: process, Batch: batchSize, Leases: true}, 160),
		measured(subject{Queue: "fsync", Class: disk, Batch: 1, Leases: true}, 20),
		measured(subject{Queue: "fsync batches", Class: disk, Batch: batchSize, Leases: true, Retains: true}, 60),
		measured(subject{Queue: "no leases", Class: disk, Batch: 1}, 1e6),
		measured(subject{Queue: "broken", Class: disk, Batch: 1, Leases: true}, -1),
	}
	type line struct {
		target, peers, fastest string
		ratio                  float64
		outcome                string
	}
	var lines []line
	for _, v := range verdicts(rows) {
		lines = append(lines, line{v.target.String(), v.describe(v.reading), v.peer.Queue, v.ratio(), v.outcome()})
	}
	require.Equal(t, []line{
		{"single calls at process", "equal or weaker durability, single calls", "weaker", 7, "met"},
		{"single calls at process", "equal or weaker durability, driven in its best way", "batches", 700. / 160, "not met: 4.4 of 7 times"},
		{"batches with Run at process", "equal or weaker durability, batches", "batches", 1500. / 160, "not met: 9.4 of 10 times"},
		{"batches with Run at process", "equal or weaker durability, driven in its best way", "batches", 1500. / 160, "not met: 9.4 of 10 times"},
		{"single calls at disk", "equal or weaker durability, single calls", "weaker", 3, "not met: 3.0 of 10 times"},
		{"single calls at disk", "equal or weaker durability, driven in its best way", "batches", 300. / 160, "not met: 1.9 of 10 times"},
		{"single calls at disk", "equal durability, single calls", "fsync", 15, "met"},
		{"single calls at disk", "equal durability, driven in its best way", "fsync batches", 4, "not met: 4.0 of 10 times"},
	}, lines)

	for _, v := range verdicts(rows[:1]) {
		require.Equal(t, "not measured", v.outcome())
	}
}

// The row of a server that is not installed says so, and the others are measured.
func TestMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := program("no-such-server", "/no/such/pattern*")
	require.ErrorIs(t, err, errMissing)
	s := subject{Name: "a", Queue: "a", open: func(context.Context, string, workload.Load) (*peer, error) { return nil, err }}
	b := bench{command.Options{Dir: t.TempDir(), Window: time.Millisecond}}
	res := b.measure(t.Context(), s)
	r := row{s, &res}
	require.Contains(t, cells(nil, r), "missing: no-such-server: not installed")
}

// Names choose rows, so each is there once, and says what class it stands in.
func TestSubjects(t *testing.T) {
	all := subjects()
	names := map[string]bool{}
	for _, s := range all {
		require.False(t, names[s.Name], s.Name)
		names[s.Name] = true
		require.Contains(t, []int{1, batchSize}, s.Batch, s.Name)
	}
	require.Len(t, matching(all, regexp.MustCompile("^codeq/")), 20)
	for _, name := range short {
		require.True(t, names[name], name)
	}
}

// TestRows: the short table, and the file for benchstat.
func TestRows(t *testing.T) {
	rows := []row{
		measured(subject{Name: "codeq/disk/single", Queue: codeqName, Class: disk, Batch: 1}, 50),
		measured(subject{Name: "codeq/none/single", Queue: codeqName, Class: none, Batch: 1}, 90),
		measured(subject{Name: "dque/turbo/single", Queue: "dque", Class: disk, Batch: 1, Driven: "way", Keeps: "what"}, 10),
		{subject: subject{Name: "nats/always/sync", Queue: "NATS"}},
	}
	rows[2].result.Version = "1.2"
	table := inShort(rows)
	require.Len(t, table, 3)
	require.Equal(t, "**codeq**", table[0][0])
	require.Nil(t, table[0][6])
	require.Equal(t, []any{"dque 1.2", "way", "deleted", "what", 10.0}, table[1][:5])
	require.Equal(t, 5.0, table[1][6])
	require.Equal(t, "not run", table[2][4])
	file := filepath.Join(t.TempDir(), "peers.txt")
	require.NoError(t, benchstat.Write(file, lines(rows)))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "BenchmarkPeers/queue=dque/durability=turbo/way=single 10 10 cycles/s 0 cpu-us/cycle\n")
	require.NotContains(t, string(text), "nats")
}

// A driver that needs no server does its cycles, and leaves nothing behind.
func TestMeasure(t *testing.T) {
	for _, s := range matching(subjects(), regexp.MustCompile("^(codeq|nats)/(process|2min)/|^riversqlite/NORMAL|^dque|^pebble")) {
		t.Run(s.Name, func(t *testing.T) {
			dir := t.TempDir()
			b := bench{command.Options{Dir: dir, Warmup: 50 * time.Millisecond, Window: 100 * time.Millisecond}}
			res := b.measure(t.Context(), s)
			require.NoError(t, res.Err)
			require.NotEmpty(t, res.Version)
			entries, err := filepath.Glob(dir + "/*")
			require.NoError(t, err)
			require.Empty(t, entries)
		})
	}
}
