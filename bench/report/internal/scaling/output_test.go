package scaling

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/report/internal/command"
	"codeq/bench/report/internal/document"
)

func newMeasurer(t *testing.T, warmup, window time.Duration, runs int) measurer {
	return measurer{
		Options: command.Options{Dir: t.TempDir(), Profiles: t.TempDir(), Warmup: warmup, Window: window},
		runs:    runs, progress: t.Logf,
	}
}

func TestSweepIsMeasuredAndWritten(t *testing.T) {
	m := newMeasurer(t, 20*time.Millisecond, 100*time.Millisecond, 2)
	sw := sweeps(size{ends: true})[3]
	require.Equal(t, "group", sw.name)
	sw.settings = []setting{calls(codeq.DurabilityProcess)}

	out := t.TempDir()
	results := results{machine: document.Machine{}, measurer: m}
	results.add(sw, m.sweep(context.Background(), sw))
	require.NoError(t, results.failed())
	require.NoError(t, results.write(t.Context(), out))
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(out, name))
		require.NoError(t, err)
		return string(b)
	}
	lines := 0
	for _, o := range results.outcomes[0][0] {
		require.Len(t, o.results, 2)
		if o.problem() == "" { // else the machine was busy, and the value is discarded
			lines += 2
		}
	}
	require.Equal(t, lines, strings.Count(read("scaling.txt"), "BenchmarkScaling/sweep=group/setting=single-calls-process/value="), "a line for each run")
	require.Contains(t, read("scaling-group.svg"), "<svg")
	require.Contains(t, read("scaling-contention.md"), "## Operations in a group")
	text := read("scaling.md")
	require.Contains(t, text, "2 times over")
	require.Contains(t, text, "single calls, process; 4096", "its profile")
	for _, o := range results.outcomes[0][0] {
		require.Positive(t, o.results[0].Rate())
		require.NotNil(t, o.profile)
		require.Positive(t, o.profile.result.commits)
	}
	small, large := results.outcomes[0][0][0].results[0], results.outcomes[0][0][1].results[0]
	require.LessOrEqual(t, small.group(), 1.0, "an operation by commit")
	require.Greater(t, large.group(), small.group())
	left, err := os.ReadDir(m.Dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// A sweep that the disk bounds is measured several times, without profiles.
func TestSweepOfCallersHasRanges(t *testing.T) {
	m := newMeasurer(t, 5*time.Millisecond, 30*time.Millisecond, 1)
	all := sweeps(size{})
	sw := all[slices.IndexFunc(all, func(sw *sweep) bool { return sw.name == "callers" })]
	sw.settings, sw.values = sw.settings[4:], sw.values[:1]
	require.Equal(t, 2, sw.settings[0].opts.Shards)
	results := results{measurer: m}
	results.add(sw, m.sweep(t.Context(), sw))
	require.NoError(t, results.failed())
	o := &results.outcomes[0][0][0]
	require.Len(t, o.results, 6)
	require.Nil(t, o.profile)
	out := t.TempDir()
	require.NoError(t, results.write(t.Context(), out))
	b, err := os.ReadFile(filepath.Join(out, "scaling.md"))
	require.NoError(t, err)
	require.Regexp(t, `\| disk, shards: 2; 1 \+ 1 \| [\d,]+ ± \d+%`, string(b))
}

// A sweep of backlogs is measured by tasks; small ones take several rounds.
func TestSweepOfBacklogs(t *testing.T) {
	m := newMeasurer(t, 0, time.Hour, 1)
	sw := backlogSweep(size{ready: 10_000})
	require.Equal(t, []int{0, 100, 1000, 10_000}, sw.values)
	sw.settings = sw.settings[:2]
	results := results{measurer: m}
	results.add(sw, m.sweep(t.Context(), sw))
	require.NoError(t, results.failed())
	for j, tasks := range []int64{1000, 1000, 1000, 10_000} {
		o := results.outcomes[0][1][j].results[0]
		require.Equal(t, tasks, o.Cycles())
		require.Positive(t, o.produced)
		require.Positive(t, o.commits)
	}
	out := t.TempDir()
	require.NoError(t, results.write(t.Context(), out))
	text, err := os.ReadFile(filepath.Join(out, "scaling.md"))
	require.NoError(t, err)
	require.Contains(t, string(text), "| kept; none |")
	for _, chart := range []string{"scaling-backlog.svg", "scaling-backlog-produced.svg"} {
		svg, err := os.ReadFile(filepath.Join(out, chart))
		require.NoError(t, err)
		require.Contains(t, string(svg), ">10,000<")
	}
	left, err := os.ReadDir(m.Dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestInterruptedSweepIsWritten(t *testing.T) {
	m := newMeasurer(t, 0, time.Hour, 1)
	sw := sweeps(size{ends: true})[3]
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	results := results{measurer: m, interrupted: true}
	results.add(sw, m.sweep(ctx, sw))
	require.NoError(t, results.failed())
	out := t.TempDir()
	require.NoError(t, results.write(t.Context(), out))
	b, err := os.ReadFile(filepath.Join(out, "scaling.md"))
	require.NoError(t, err)
	require.Contains(t, string(b), "interrupted")
	require.Contains(t, string(b), "not measured")
	left, err := os.ReadDir(m.Dir)
	require.NoError(t, err)
	require.Empty(t, left)
}
