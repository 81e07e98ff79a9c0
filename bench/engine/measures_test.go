package main

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

const printed = `goos: linux
pkg: codeq/bench
BenchmarkFullCycle/durability=disk/shards=1-2   1   2.000 allocs/cycle   30000 cycles/s   1500 p50-us
BenchmarkFullCycle/durability=disk/shards=1-2   1   2.000 allocs/cycle   10000 cycles/s   1500 p50-us
BenchmarkFullCycle/durability=disk/shards=1-2   1   2.000 allocs/cycle   20000 cycles/s   1500 p50-us
BenchmarkIdle                                   1   0.006 %core
BenchmarkIdle                                   1   0.008 %core
PASS
=== RUN   TestClusterKill
=== RUN   TestClusterKill/disk
    cluster_test.go:436: kill 1: node 2, shards led again after [1s], served after [1.1s]
    cluster_test.go:457: 14 kills, 30 elections, 9000 tasks acknowledged, 9000 completed, failovers of 28: min 900ms, median 1.15s, 90% 2s, max 2.09s
=== RUN   TestClusterKill/process
    cluster_test.go:457: 12 kills, 26 elections, 8000 tasks acknowledged, 8000 completed, failovers of 24: min 900ms, median 1.39s, 90% 2s, max 2.89s
--- PASS: TestClusterKill (130.01s)
`

func TestParse(t *testing.T) {
	m := make(measures)
	require.NoError(t, m.parse("", printed))
	cycle := "FullCycle/durability=disk/shards=1"
	require.Equal(t, 20000.0, m.median(cycle, "cycles/s"))
	require.Equal(t, 1500.0, m.median(cycle, "p50-us"))
	require.InDelta(t, 0.007, m.median("Idle", "%core"), 1e-9)
	require.True(t, math.IsNaN(m.median("Idle", "cycles/s")))
	require.Equal(t, 10000.0, m.least(cycle, "cycles/s"))
	require.Equal(t, 30000.0, m.most(cycle, "cycles/s"))
	require.True(t, math.IsNaN(m.least("Idle", "cycles/s")))
	require.True(t, math.IsNaN(m.most("Idle", "cycles/s")))
	require.Equal(t, 28.0, m.median("ClusterKill/disk", "failovers"))
	require.Equal(t, 1150.0, m.median("ClusterKill/disk", "median-ms"))
	require.Equal(t, 2890.0, m.median("ClusterKill/process", "max-ms"))
	require.Equal(t, 8000.0, m.median("ClusterKill/process", "acknowledged"))
}

func TestParseAddsRunsByPrefix(t *testing.T) {
	m := make(measures)
	for i, rate := range []string{"10", "30", "20"} {
		require.NoError(t, m.parse("", "BenchmarkRun-2 1 "+rate+" cycles/s\n"))
		if i > 0 {
			require.NoError(t, m.parse("GOGC=400/", "BenchmarkRun-2 1 "+rate+"0 cycles/s\n"))
		}
	}
	require.Equal(t, measures{"Run": {"cycles/s": {10, 30, 20}}, "GOGC=400/Run": {"cycles/s": {300, 200}}}, m)
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
	require.Equal(t, []string{
		every,
		"^BenchmarkCluster/nodes=3/durability=disk|^BenchmarkFullCycle/durability=disk|^BenchmarkRun$/durability=disk",
		every,
		"GOGC=100", run, "GOGC=400", run, "GOGC=100", run, "GOGC=400", run,
	}, all)
	require.Len(t, c.plan(chosen("Features")), 2, "no round at disk")
	require.Len(t, c.plan(chosen("Failover")), 1)
}
