package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/report"
)

func TestSweepIsMeasuredAndWritten(t *testing.T) {
	m := measurer{
		dir: t.TempDir(), profiles: t.TempDir(), warmup: 20 * time.Millisecond, window: 100 * time.Millisecond, runs: 2,
		progress: t.Logf,
	}
	sw := sweeps(size{ends: true})[3]
	require.Equal(t, "group", sw.name)
	sw.settings = []setting{calls(codeq.DurabilityProcess)}

	out := t.TempDir()
	results := results{machine: report.Machine{}, measurer: m}
	results.add(sw, m.sweep(context.Background(), sw))
	require.NoError(t, results.failed())
	require.NoError(t, results.write(out))
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		return string(b)
	}
	require.Equal(t, 1+2*2, strings.Count(read("scaling.csv"), "\n"), "a header, and a line for each run")
	require.Contains(t, read("scaling-group.svg"), "<svg")
	require.Contains(t, read("scaling-contention.md"), "## Operations in a group")
	text := read("scaling.md")
	require.Contains(t, text, "2 times over")
	require.Contains(t, text, "single calls, process; 4096", "its profile")
	for _, o := range results.outcomes[0][0] {
		require.Positive(t, o.median().Rate())
		require.NotNil(t, o.profile)
		require.Positive(t, o.profile.result.commits)
	}
	small, large := results.outcomes[0][0][0].median(), results.outcomes[0][0][1].median()
	require.LessOrEqual(t, small.group(), 1.0, "an operation by commit")
	require.Greater(t, large.group(), small.group())
	left, err := os.ReadDir(m.dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// A sweep of what the disk bounds is measured several times, without profiles.
func TestSweepOfCallersHasRanges(t *testing.T) {
	m := measurer{dir: t.TempDir(), profiles: t.TempDir(), warmup: 5 * time.Millisecond, window: 30 * time.Millisecond, runs: 1, progress: t.Logf}
	chosen, err := chosen(sweeps(size{}), "callers")
	require.NoError(t, err)
	sw := chosen[0]
	sw.settings, sw.values = sw.settings[4:], sw.values[:1]
	require.Equal(t, 2, sw.settings[0].opts.Shards)
	results := results{measurer: m}
	results.add(sw, m.sweep(t.Context(), sw))
	require.NoError(t, results.failed())
	o := &results.outcomes[0][0][0]
	require.Len(t, o.results, 3)
	require.Nil(t, o.profile)
	out := t.TempDir()
	require.NoError(t, results.write(out))
	b, err := os.ReadFile(filepath.Join(out, "scaling.md"))
	require.NoError(t, err)
	require.Contains(t, string(b), "| group | least | most |")
	require.Contains(t, string(b), "| disk, shards: 2 | 1 + 1 |")
}

// A sweep of backlogs is measured by tasks; small ones take several rounds.
func TestSweepOfBacklogs(t *testing.T) {
	m := measurer{dir: t.TempDir(), profiles: t.TempDir(), window: time.Hour, runs: 1, progress: t.Logf}
	sw := backlogSweep(size{ready: 10_000})
	require.Equal(t, []int{0, 100, 1000, 10_000}, sw.values)
	sw.settings = sw.settings[:2]
	results := results{measurer: m}
	results.add(sw, m.sweep(t.Context(), sw))
	require.NoError(t, results.failed())
	for j, tasks := range []int64{1000, 1000, 1000, 10_000} {
		o := results.outcomes[0][1][j].median()
		require.Equal(t, tasks, o.Cycles())
		require.Positive(t, o.produced)
		require.Positive(t, o.commits)
	}
	out := t.TempDir()
	require.NoError(t, results.write(out))
	text, err := os.ReadFile(filepath.Join(out, "scaling.md"))
	require.NoError(t, err)
	require.Contains(t, string(text), "| kept | none |")
	for _, chart := range []string{"scaling-backlog.svg", "scaling-backlog-produced.svg"} {
		svg, err := os.ReadFile(filepath.Join(out, chart))
		require.NoError(t, err)
		require.Contains(t, string(svg), ">10,000<")
	}
	left, err := os.ReadDir(m.dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestInterruptedSweepIsWritten(t *testing.T) {
	m := measurer{dir: t.TempDir(), profiles: t.TempDir(), window: time.Hour, runs: 1, progress: t.Logf}
	sw := sweeps(size{ends: true})[3]
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	results := results{measurer: m, interrupted: true}
	results.add(sw, m.sweep(ctx, sw))
	require.NoError(t, results.failed())
	out := t.TempDir()
	require.NoError(t, results.write(out))
	b, err := os.ReadFile(filepath.Join(out, "scaling.md"))
	require.NoError(t, err)
	require.Contains(t, string(b), "interrupted")
	require.Contains(t, string(b), "not measured")
	left, err := os.ReadDir(m.dir)
	require.NoError(t, err)
	require.Empty(t, left)
}
