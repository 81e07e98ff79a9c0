package engine

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/bench/report/internal/command"
	"codeq/bench/report/internal/document"
)

func TestKills(t *testing.T) {
	require.Equal(t, `BenchmarkClusterKill/durability=disk 1 28 failovers 1150 median-ms 2090 max-ms 9000 acknowledged
BenchmarkClusterKill/durability=process 1 24 failovers 1390 median-ms 2890 max-ms 8000 acknowledged
`, kills(`=== RUN   TestClusterKill
=== RUN   TestClusterKill/disk
    cluster_test.go:436: kill 1: node 2, shards led again after [1s], served after [1.1s]
    cluster_test.go:457: 14 kills, 30 elections, 9000 tasks acknowledged, 9000 completed, failovers of 28: min 900ms, median 1.15s, 90% 2s, max 2.09s
=== RUN   TestClusterKill/process
    cluster_test.go:457: 12 kills, 26 elections, 8000 tasks acknowledged, 8000 completed, failovers of 24: min 900ms, median 1.39s, 90% 2s, max 2.89s
--- PASS: TestClusterKill (130.01s)
`))
}

func TestPlan(t *testing.T) {
	c := config{count: 2}
	var all []string
	chosen := func(titles ...string) []section {
		return slices.DeleteFunc(c.sections(), func(s section) bool { return !slices.Contains(titles, s.title) })
	}
	for _, cmd := range c.plan(chosen("Cycles", "Nodes", "GOGC")) {
		all = append(all, slices.Concat(cmd.env, []string{cmd.args[slices.Index(cmd.args, "-bench")+1]})...)
	}
	every, run := "^BenchmarkCluster|^BenchmarkFullCycle|^BenchmarkRawPebble|^BenchmarkRun$", "^BenchmarkRun$/durability=process/shards=1"
	require.Equal(t, []string{every, every, "GOGC=100", run, "GOGC=400", run, "GOGC=100", run, "GOGC=400", run}, all)
	require.Len(t, c.plan(chosen("Failover")), 1)
}

// TestResults: each section has its tables, by the results that are there.
func TestResults(t *testing.T) {
	c := config{Options: command.Options{Out: t.TempDir()}}
	failed := map[string]error{c.sections()[7].once[0].String(): errors.New("broken")}
	d := document.New("The engine", document.Machine{})
	require.NoError(t, c.write(t.Context(), d, c.sections(), failed, "../../../results/engine.txt"))
	file := filepath.Join(c.Out, "engine.md")
	require.NoError(t, d.Write(file))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, line := range []string{
		"|  |  | none | process | disk |",
		"| single calls, 1 shard | cycles/s | 163,000 |",
		"| raw Pebble, four key writes a cycle, 2 stores | 788,000 |",
		"| an idempotency key for an hour | 26,500 |",
		"| GOGC=400 | 316,000 |",
	} {
		require.Contains(t, string(text), line)
	}
	sections := strings.Split(string(text), "\n## ")
	require.Len(t, sections, 9)
	for _, section := range sections[1:8] {
		require.Contains(t, section, "| --- |", "a table")
	}
	require.Contains(t, sections[8], "It failed: broken.")
}
